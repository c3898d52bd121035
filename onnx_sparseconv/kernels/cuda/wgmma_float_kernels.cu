// The kernels that the library carries, as PTX, for float on GPUs of compute capability 9.0. kernels/library_ptx.py
// makes the PTX.
#include "cluster_conv.cuh"
#include "gather.cuh"
#include "interleave.cuh"
#include "octet_conv.cuh"
#include "params.h"
#include "pointwise_conv.cuh"
#include "recompute.cuh"
#include "warpgroup_kernel.cuh"
#include "wgmma_conv.cuh"

using sparseconv::cuda::ClusterConv;
using sparseconv::cuda::ClusterParams;
using sparseconv::cuda::CsrEntry;
using sparseconv::cuda::Gather;
using sparseconv::cuda::GatherParams;
using sparseconv::cuda::Interleave;
using sparseconv::cuda::InterleaveParams;
using sparseconv::cuda::kClusterThreads;
using sparseconv::cuda::kCsrPiece;
using sparseconv::cuda::kMaxCsrThreads;
using sparseconv::cuda::kOctetThreads;
using sparseconv::cuda::kWgmmaThreads;
using sparseconv::cuda::OctetConv;
using sparseconv::cuda::OctetParams;
using sparseconv::cuda::PointwiseConv;
using sparseconv::cuda::PointwiseParams;
using sparseconv::cuda::Recompute;
using sparseconv::cuda::RecomputeParams;
using sparseconv::cuda::WgmmaConv;
using sparseconv::cuda::WgmmaParams;

SPARSECONV_WARPGROUP_KERNEL(wgmma_f32_p24, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 24>)
SPARSECONV_WARPGROUP_KERNEL(wgmma_f32_p28, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 28>)
SPARSECONV_WARPGROUP_KERNEL(wgmma_f32_p30, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 30>)
SPARSECONV_WARPGROUP_KERNEL(wgmma_f32_p32, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 32>)
SPARSECONV_WARPGROUP_KERNEL(octets_f32_n8, OctetParams, kOctetThreads, OctetConv<float, 8>)
SPARSECONV_WARPGROUP_KERNEL(octets_f32_n15, OctetParams, kOctetThreads, OctetConv<float, 15>)
SPARSECONV_WARPGROUP_KERNEL(octets_f32_n28, OctetParams, kOctetThreads, OctetConv<float, 28>)
SPARSECONV_WARPGROUP_KERNEL(octets_f32_n29, OctetParams, kOctetThreads, OctetConv<float, 29>)
SPARSECONV_WARPGROUP_KERNEL(words_f32_n8, OctetParams, kOctetThreads, OctetConv<float, 8, true>)
SPARSECONV_WARPGROUP_KERNEL(words_f32_n15, OctetParams, kOctetThreads, OctetConv<float, 15, true>)
SPARSECONV_WARPGROUP_KERNEL(cluster_f32_n8, ClusterParams, kClusterThreads, ClusterConv<float, 8>)
SPARSECONV_WARPGROUP_KERNEL(cluster_f32_n15, ClusterParams, kClusterThreads, ClusterConv<float, 15>)
SPARSECONV_WARPGROUP_KERNEL(cluster_f32_n19, ClusterParams, kClusterThreads, ClusterConv<float, 19>)
SPARSECONV_WARPGROUP_KERNEL(cluster_f32_n29, ClusterParams, kClusterThreads, ClusterConv<float, 29>)
SPARSECONV_WARPGROUP_KERNEL(pointwise_f32_s24, PointwiseParams, kWgmmaThreads, PointwiseConv<float, 24>)
SPARSECONV_WARPGROUP_KERNEL(pointwise_f32_s32, PointwiseParams, kWgmmaThreads, PointwiseConv<float, 32>)

extern "C" __global__ void sparseconv_interleave_f32(const InterleaveParams params) { Interleave<float>(params); }

extern "C" __global__ void sparseconv_gather_f32(const GatherParams params) { Gather<float>(params); }

extern "C" __global__ void __launch_bounds__(kMaxCsrThreads, 4) sparseconv_recompute(const RecomputeParams params) {
  __shared__ CsrEntry entries[kCsrPiece];
  __shared__ unsigned taps[kCsrPiece];
  Recompute(params, entries, taps);
}
