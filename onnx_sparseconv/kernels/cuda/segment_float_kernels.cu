// The same for float. kernels/library_code.py makes the PTX.
#include "product_kernel.cuh"
#include "segment_conv.cuh"
#include "segment_params.h"

using sparseconv::cuda::kMaxSegmentThreads;
using sparseconv::cuda::kSegmentBlocks;
using sparseconv::cuda::SegmentConv;
using sparseconv::cuda::SegmentParams;

SPARSECONV_RESIDENT_ROUNDING_KERNEL(segments_f32_r4, SegmentParams, kMaxSegmentThreads, kSegmentBlocks,
                                    SegmentConv<float, 4, 4>)
SPARSECONV_RESIDENT_ROUNDING_KERNEL(segments_f32_r2, SegmentParams, kMaxSegmentThreads, kSegmentBlocks,
                                    SegmentConv<float, 2, 8>)
