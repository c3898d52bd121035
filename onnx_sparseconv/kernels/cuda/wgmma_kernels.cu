// The kernels that the library carries, as PTX, for GPUs of compute capability 9.0. kernels/library_ptx.py makes the
// PTX.
#include "gather.cuh"
#include "interleave.cuh"
#include "octet_conv.cuh"
#include "params.h"
#include "pointwise_conv.cuh"
#include "reduce.cuh"
#include "ring_conv.cuh"
#include "wgmma_conv.cuh"

using sparseconv::cuda::Gather;
using sparseconv::cuda::GatherParams;
using sparseconv::cuda::Interleave;
using sparseconv::cuda::InterleaveParams;
using sparseconv::cuda::kOctetThreads;
using sparseconv::cuda::kRingThreads;
using sparseconv::cuda::kWgmmaThreads;
using sparseconv::cuda::OctetConv;
using sparseconv::cuda::OctetParams;
using sparseconv::cuda::PointwiseConv;
using sparseconv::cuda::PointwiseParams;
using sparseconv::cuda::ReduceParams;
using sparseconv::cuda::RingConv;
using sparseconv::cuda::RingParams;
using sparseconv::cuda::WgmmaConv;
using sparseconv::cuda::WgmmaParams;

#define SPARSECONV_WARPGROUP_KERNEL(name, Convolution, Params, threads)                                               \
  extern "C" __global__ void __launch_bounds__(threads, 1) sparseconv_##name(const __grid_constant__ Params params) { \
    extern __shared__ uint4 wgmma_stages[];                                                                           \
    Convolution(params, wgmma_stages).Run();                                                                          \
  }

SPARSECONV_WARPGROUP_KERNEL(wgmma_p24, WgmmaConv<24>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(wgmma_p28, WgmmaConv<28>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(wgmma_p30, WgmmaConv<30>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(wgmma_p32, WgmmaConv<32>, WgmmaParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(octets_n8, OctetConv<8>, OctetParams, kOctetThreads)
SPARSECONV_WARPGROUP_KERNEL(octets_n15, OctetConv<15>, OctetParams, kOctetThreads)
SPARSECONV_WARPGROUP_KERNEL(octets_n28, OctetConv<28>, OctetParams, kOctetThreads)
SPARSECONV_WARPGROUP_KERNEL(octets_n29, OctetConv<29>, OctetParams, kOctetThreads)
SPARSECONV_WARPGROUP_KERNEL(ring_p8, RingConv<8>, RingParams, kRingThreads)
SPARSECONV_WARPGROUP_KERNEL(ring_p16, RingConv<16>, RingParams, kRingThreads)
SPARSECONV_WARPGROUP_KERNEL(ring_p32, RingConv<32>, RingParams, kRingThreads)
SPARSECONV_WARPGROUP_KERNEL(pointwise_s24, PointwiseConv<24>, PointwiseParams, kWgmmaThreads)
SPARSECONV_WARPGROUP_KERNEL(pointwise_s32, PointwiseConv<32>, PointwiseParams, kWgmmaThreads)

extern "C" __global__ void sparseconv_interleave(const InterleaveParams params) { Interleave(params); }

extern "C" __global__ void sparseconv_gather(const GatherParams params) { Gather(params); }

extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxReduceThreads)
    sparseconv_reduce_vectors(const ReduceParams params) {
  sparseconv::cuda::ReduceVectors(params);
}
