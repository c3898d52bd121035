// The kernels that the library carries, as a cubin, for float16 on GPUs of compute capability 9.0.
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
#include "reduce.cuh"
#include "ring_conv.cuh"
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
using sparseconv::cuda::Half;
using sparseconv::cuda::Interleave;
using sparseconv::cuda::InterleaveParams;
using sparseconv::cuda::kClusterThreads;
using sparseconv::cuda::kFlattenRowsThreads;
using sparseconv::cuda::kFlatThreads;
using sparseconv::cuda::kOctetThreads;
using sparseconv::cuda::kRingThreads;
using sparseconv::cuda::kWgmmaThreads;
using sparseconv::cuda::OctetConv;
using sparseconv::cuda::OctetForm;
using sparseconv::cuda::OctetParams;
using sparseconv::cuda::PointwiseConv;
using sparseconv::cuda::PointwiseParams;
using sparseconv::cuda::ReduceParams;
using sparseconv::cuda::RingConv;
using sparseconv::cuda::RingParams;
using sparseconv::cuda::SpaceToDepth;
using sparseconv::cuda::SpaceToDepthParams;
using sparseconv::cuda::WgmmaConv;
using sparseconv::cuda::WgmmaParams;

SPARSECONV_PRODUCT_KERNEL(wgmma_p16, WgmmaParams, kWgmmaThreads, WgmmaConv<Half, 16>)
SPARSECONV_PRODUCT_KERNEL(wgmma_p24, WgmmaParams, kWgmmaThreads, WgmmaConv<Half, 24>)
SPARSECONV_PRODUCT_KERNEL(wgmma_p28, WgmmaParams, kWgmmaThreads, WgmmaConv<Half, 28>)
SPARSECONV_PRODUCT_KERNEL(wgmma_p30, WgmmaParams, kWgmmaThreads, WgmmaConv<Half, 30>)
SPARSECONV_PRODUCT_KERNEL(wgmma_p32, WgmmaParams, kWgmmaThreads, WgmmaConv<Half, 32>)
SPARSECONV_PRODUCT_KERNEL(octets_n8, OctetParams, kOctetThreads<8>, OctetConv<Half, 8>)
SPARSECONV_PRODUCT_KERNEL(octets_n15, OctetParams, kOctetThreads<15>, OctetConv<Half, 15>)
SPARSECONV_PRODUCT_KERNEL(octets_n28, OctetParams, kOctetThreads<28>, OctetConv<Half, 28>)
SPARSECONV_PRODUCT_KERNEL(octets_n29, OctetParams, kOctetThreads<29>, OctetConv<Half, 29>)
SPARSECONV_PRODUCT_KERNEL(strided_n8, OctetParams, kOctetThreads<8>, OctetConv<Half, 8, OctetForm::kStrides>)
SPARSECONV_PRODUCT_KERNEL(strided_n15, OctetParams, kOctetThreads<15>, OctetConv<Half, 15, OctetForm::kStrides>)
SPARSECONV_PRODUCT_KERNEL(words_n8, OctetParams, kOctetThreads<8>, OctetConv<Half, 8, OctetForm::kWords>)
SPARSECONV_PRODUCT_KERNEL(words_n15, OctetParams, kOctetThreads<15>, OctetConv<Half, 15, OctetForm::kWords>)
SPARSECONV_PRODUCT_KERNEL(ring_p8, RingParams, kRingThreads, RingConv<8>)
SPARSECONV_PRODUCT_KERNEL(ring_p16, RingParams, kRingThreads, RingConv<16>)
SPARSECONV_PRODUCT_KERNEL(ring_p32, RingParams, kRingThreads, RingConv<32>)
SPARSECONV_PRODUCT_KERNEL(flat_n16, FlatParams, kFlatThreads, FlatConv<Half, 16>)
SPARSECONV_PRODUCT_KERNEL(flat_n24, FlatParams, kFlatThreads, FlatConv<Half, 24>)
SPARSECONV_PRODUCT_KERNEL(flat_n28, FlatParams, kFlatThreads, FlatConv<Half, 28>)
SPARSECONV_PRODUCT_KERNEL(flat_n30, FlatParams, kFlatThreads, FlatConv<Half, 30>)
SPARSECONV_PRODUCT_KERNEL(flat_n32, FlatParams, kFlatThreads, FlatConv<Half, 32>)
SPARSECONV_PRODUCT_KERNEL(flat_dense_n16, FlatParams, kFlatThreads, FlatConv<Half, 16, FlatProducts::kDense>)
SPARSECONV_PRODUCT_KERNEL(flat_dense_n24, FlatParams, kFlatThreads, FlatConv<Half, 24, FlatProducts::kDense>)
SPARSECONV_PRODUCT_KERNEL(flat_dense_n28, FlatParams, kFlatThreads, FlatConv<Half, 28, FlatProducts::kDense>)
SPARSECONV_PRODUCT_KERNEL(flat_dense_n30, FlatParams, kFlatThreads, FlatConv<Half, 30, FlatProducts::kDense>)
SPARSECONV_PRODUCT_KERNEL(flat_dense_n32, FlatParams, kFlatThreads, FlatConv<Half, 32, FlatProducts::kDense>)
SPARSECONV_PRODUCT_KERNEL(cluster_n8, ClusterParams, kClusterThreads, ClusterConv<Half, 8>)
SPARSECONV_PRODUCT_KERNEL(cluster_n15, ClusterParams, kClusterThreads, ClusterConv<Half, 15>)
SPARSECONV_PRODUCT_KERNEL(cluster_n19, ClusterParams, kClusterThreads, ClusterConv<Half, 19>)
SPARSECONV_PRODUCT_KERNEL(cluster_n29, ClusterParams, kClusterThreads, ClusterConv<Half, 29>)
SPARSECONV_PRODUCT_KERNEL(pointwise_s16, PointwiseParams, kWgmmaThreads, PointwiseConv<Half, 16>)
SPARSECONV_PRODUCT_KERNEL(pointwise_s24, PointwiseParams, kWgmmaThreads, PointwiseConv<Half, 24>)
SPARSECONV_PRODUCT_KERNEL(pointwise_s32, PointwiseParams, kWgmmaThreads, PointwiseConv<Half, 32>)

extern "C" __global__ void sparseconv_interleave(const InterleaveParams params) { Interleave<Half>(params); }

extern "C" __global__ void sparseconv_flatten(const FlattenParams params) { Flatten<Half>(params); }

extern "C" __global__ void __launch_bounds__(kFlattenRowsThreads) sparseconv_flatten_rows(const FlattenParams params) {
  FlattenRows<Half>(params, product_stages);
}

SPARSECONV_GATHER_KERNELS(, Half)

extern "C" __global__ void sparseconv_space_to_depth(const SpaceToDepthParams params) { SpaceToDepth<Half>(params); }

extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxReduceThreads)
    sparseconv_reduce_vectors(const ReduceParams params) {
  sparseconv::cuda::ReduceVectors<Half>(params, [] { return true; });
}
