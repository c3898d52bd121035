// The kernels that the library carries, as PTX, for GPUs of compute capability 9.0. kernels/library_ptx.py makes the
// PTX.
#include "gather.cuh"
#include "interleave.cuh"
#include "params.h"
#include "pointwise_conv.cuh"
#include "reduce.cuh"
#include "ring_conv.cuh"
#include "segment_conv.cuh"
#include "wgmma_conv.cuh"

using sparseconv::cuda::Gather;
using sparseconv::cuda::GatherParams;
using sparseconv::cuda::Interleave;
using sparseconv::cuda::InterleaveParams;
using sparseconv::cuda::kRingThreads;
using sparseconv::cuda::kSegmentThreads;
using sparseconv::cuda::kWgmmaThreads;
using sparseconv::cuda::PointwiseConv;
using sparseconv::cuda::PointwiseParams;
using sparseconv::cuda::ReduceParams;
using sparseconv::cuda::RingConv;
using sparseconv::cuda::RingParams;
using sparseconv::cuda::SegmentConv;
using sparseconv::cuda::SegmentParams;
using sparseconv::cuda::WgmmaConv;
using sparseconv::cuda::WgmmaParams;

#define SPARSECONV_WARPGROUP_KERNEL(name, Convolution, Params, threads)                             \
  extern "C" __global__ void __launch_bounds__(threads, 1) sparseconv_##name(const Params params) { \
    extern __shared__ uint4 wgmma_stages[];                                                         \
    Convolution(params, wgmma_stages).Run();                                                        \
  }

#define SPARSECONV_SEGMENTS(rows, segments) SegmentConv<rows, segments>

SPARSECONV_WARPGROUP_KERNEL(wgmma_p24, WgmmaConv<24>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(wgmma_p28, WgmmaConv<28>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(wgmma_p30, WgmmaConv<30>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(wgmma_p32, WgmmaConv<32>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(ring_p8, RingConv<8>, RingParams, kRingThreads)
SPARSECONV_WARPGROUP_KERNEL(ring_p16, RingConv<16>, RingParams, kRingThreads)
SPARSECONV_WARPGROUP_KERNEL(ring_p32, RingConv<32>, RingParams, kRingThreads)
SPARSECONV_WARPGROUP_KERNEL(segments_1x8, SPARSECONV_SEGMENTS(1, 8), SegmentParams, kSegmentThreads)
SPARSECONV_WARPGROUP_KERNEL(segments_1x14, SPARSECONV_SEGMENTS(1, 14), SegmentParams, kSegmentThreads)
SPARSECONV_WARPGROUP_KERNEL(segments_1x15, SPARSECONV_SEGMENTS(1, 15), SegmentParams, kSegmentThreads)
SPARSECONV_WARPGROUP_KERNEL(segments_2x7, SPARSECONV_SEGMENTS(2, 7), SegmentParams, kSegmentThreads)
SPARSECONV_WARPGROUP_KERNEL(segments_3x4, SPARSECONV_SEGMENTS(3, 4), SegmentParams, kSegmentThreads)
SPARSECONV_WARPGROUP_KERNEL(pointwise_s24, PointwiseConv<24>, PointwiseParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(pointwise_s32, PointwiseConv<32>, PointwiseParams, kWgmmaThreads)

extern "C" __global__ void sparseconv_interleave(const InterleaveParams params) { Interleave(params); }

extern "C" __global__ void sparseconv_gather(const GatherParams params) { Gather(params); }

extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxReduceThreads)
    sparseconv_reduce_vectors(const ReduceParams params) {
  sparseconv::cuda::ReduceVectors(params);
}
