// The kernels that the library carries, as a cubin, for float on GPUs of compute capability 9.0.
// kernels/library_code.py makes it.
#include "cluster_conv.cuh"
#include "flat_conv.cuh"
#include "flatten.cuh"
#include "gather.cuh"
#include "interleave.cuh"
#include "octet_conv.cuh"
#include "params.h"
#include "pointwise_conv.cuh"
#include "product_kernel.cuh"
#include "reduce_rounded.cuh"
#include "space_to_depth.cuh"
#include "wgmma_conv.cuh"

using sparseconv::cuda::ClusterConv;
using sparseconv::cuda::ClusterParams;
using sparseconv::cuda::FlatConv;
using sparseconv::cuda::FlatParams;
using sparseconv::cuda::FlatProducts;
using sparseconv::cuda::Flatten;
using sparseconv::cuda::FlattenParams;
using sparseconv::cuda::FlattenRows;
using sparseconv::cuda::Interleave;
using sparseconv::cuda::InterleaveParams;
using sparseconv::cuda::kClusterThreads;
using sparseconv::cuda::kFlattenRowsThreads;
using sparseconv::cuda::kFlatThreads;
using sparseconv::cuda::kMaxReduceThreads;
using sparseconv::cuda::kOctetThreads;
using sparseconv::cuda::kRecomputeBytes;
using sparseconv::cuda::kWgmmaThreads;
using sparseconv::cuda::OctetConv;
using sparseconv::cuda::OctetForm;
using sparseconv::cuda::OctetParams;
using sparseconv::cuda::PointwiseConv;
using sparseconv::cuda::PointwiseParams;
using sparseconv::cuda::ReduceRounded;
using sparseconv::cuda::ReduceRoundedParams;
using sparseconv::cuda::SpaceToDepth;
using sparseconv::cuda::SpaceToDepthParams;
using sparseconv::cuda::WgmmaConv;
using sparseconv::cuda::WgmmaParams;

SPARSECONV_ROUNDING_KERNEL(wgmma_f32_p16, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 16>)
SPARSECONV_ROUNDING_KERNEL(wgmma_f32_p24, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 24>)
SPARSECONV_ROUNDING_KERNEL(wgmma_f32_p28, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 28>)
SPARSECONV_ROUNDING_KERNEL(wgmma_f32_p30, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 30>)
SPARSECONV_ROUNDING_KERNEL(wgmma_f32_p32, WgmmaParams, kWgmmaThreads, WgmmaConv<float, 32>)
SPARSECONV_ROUNDING_KERNEL(octets_f32_n8, OctetParams, kOctetThreads<8>, OctetConv<float, 8>)
SPARSECONV_ROUNDING_KERNEL(octets_f32_n15, OctetParams, kOctetThreads<15>, OctetConv<float, 15>)
SPARSECONV_ROUNDING_KERNEL(octets_f32_n28, OctetParams, kOctetThreads<28>, OctetConv<float, 28>)
SPARSECONV_ROUNDING_KERNEL(octets_f32_n29, OctetParams, kOctetThreads<29>, OctetConv<float, 29>)
SPARSECONV_ROUNDING_KERNEL(strided_f32_n8, OctetParams, kOctetThreads<8>, OctetConv<float, 8, OctetForm::kStrides>)
SPARSECONV_ROUNDING_KERNEL(strided_f32_n15, OctetParams, kOctetThreads<15>, OctetConv<float, 15, OctetForm::kStrides>)
SPARSECONV_ROUNDING_KERNEL(words_f32_n8, OctetParams, kOctetThreads<8>, OctetConv<float, 8, OctetForm::kWords>)
SPARSECONV_ROUNDING_KERNEL(words_f32_n15, OctetParams, kOctetThreads<15>, OctetConv<float, 15, OctetForm::kWords>)
SPARSECONV_ROUNDING_KERNEL(flat_f32_n16, FlatParams, kFlatThreads, FlatConv<float, 16>)
SPARSECONV_ROUNDING_KERNEL(flat_f32_n24, FlatParams, kFlatThreads, FlatConv<float, 24>)
SPARSECONV_ROUNDING_KERNEL(flat_f32_n28, FlatParams, kFlatThreads, FlatConv<float, 28>)
SPARSECONV_ROUNDING_KERNEL(flat_f32_n30, FlatParams, kFlatThreads, FlatConv<float, 30>)
SPARSECONV_ROUNDING_KERNEL(flat_f32_n32, FlatParams, kFlatThreads, FlatConv<float, 32>)
SPARSECONV_ROUNDING_KERNEL(flat_dense_f32_n16, FlatParams, kFlatThreads, FlatConv<float, 16, FlatProducts::kDense>)
SPARSECONV_ROUNDING_KERNEL(flat_dense_f32_n24, FlatParams, kFlatThreads, FlatConv<float, 24, FlatProducts::kDense>)
SPARSECONV_ROUNDING_KERNEL(flat_dense_f32_n28, FlatParams, kFlatThreads, FlatConv<float, 28, FlatProducts::kDense>)
SPARSECONV_ROUNDING_KERNEL(flat_dense_f32_n30, FlatParams, kFlatThreads, FlatConv<float, 30, FlatProducts::kDense>)
SPARSECONV_ROUNDING_KERNEL(flat_dense_f32_n32, FlatParams, kFlatThreads, FlatConv<float, 32, FlatProducts::kDense>)
SPARSECONV_ROUNDING_KERNEL(cluster_f32_n8, ClusterParams, kClusterThreads, ClusterConv<float, 8>)
SPARSECONV_ROUNDING_KERNEL(cluster_f32_n15, ClusterParams, kClusterThreads, ClusterConv<float, 15>)
SPARSECONV_ROUNDING_KERNEL(cluster_f32_n19, ClusterParams, kClusterThreads, ClusterConv<float, 19>)
SPARSECONV_ROUNDING_KERNEL(cluster_f32_n29, ClusterParams, kClusterThreads, ClusterConv<float, 29>)
SPARSECONV_ROUNDING_KERNEL(pointwise_f32_s16, PointwiseParams, kWgmmaThreads, PointwiseConv<float, 16>)
SPARSECONV_ROUNDING_KERNEL(pointwise_f32_s24, PointwiseParams, kWgmmaThreads, PointwiseConv<float, 24>)
SPARSECONV_ROUNDING_KERNEL(pointwise_f32_s32, PointwiseParams, kWgmmaThreads, PointwiseConv<float, 32>)

extern "C" __global__ void sparseconv_interleave_f32(const InterleaveParams params) { Interleave<float>(params); }

extern "C" __global__ void sparseconv_flatten_f32(const FlattenParams params) { Flatten<float>(params); }

extern "C" __global__ void __launch_bounds__(kFlattenRowsThreads)
    sparseconv_flatten_rows_f32(const FlattenParams params) {
  FlattenRows<float>(params, product_stages);
}

SPARSECONV_GATHER_KERNELS(_f32, float)

extern "C" __global__ void sparseconv_space_to_depth_f32(const SpaceToDepthParams params) {
  SpaceToDepth<float>(params);
}

extern "C" __global__ void __launch_bounds__(kMaxReduceThreads)
    sparseconv_reduce_rounded(const __grid_constant__ ReduceRoundedParams params) {
  __shared__ uint4 shared[kRecomputeBytes / sizeof(uint4)];
  ReduceRounded(params, shared);
}
