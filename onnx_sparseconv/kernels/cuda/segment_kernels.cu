// The kernels for 1x1 that the library carries, as PTX, for GPUs with sparse tensor cores. kernels/library_code.py
// makes the PTX.
#include "product_kernel.cuh"
#include "segment_conv.cuh"
#include "segment_params.h"

using sparseconv::cuda::Half;
using sparseconv::cuda::kMaxSegmentThreads;
using sparseconv::cuda::kSegmentBlocks;
using sparseconv::cuda::SegmentConv;
using sparseconv::cuda::SegmentParams;

SPARSECONV_RESIDENT_PRODUCT_KERNEL(segments_r4, SegmentParams, kMaxSegmentThreads, kSegmentBlocks,
                                   SegmentConv<Half, 4, 4>)
SPARSECONV_RESIDENT_PRODUCT_KERNEL(segments_r2, SegmentParams, kMaxSegmentThreads, kSegmentBlocks,
                                   SegmentConv<Half, 2, 8>)
