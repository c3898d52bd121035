// The kernels that the library carries, as a cubin, for 1x1 as matrix products, in float, on GPUs of compute capability
// 9.0. kernels/library_code.py makes it.
#include "gemm_conv.cuh"
#include "pack.cuh"
#include "product_kernel.cuh"

using sparseconv::cuda::GemmConv;
using sparseconv::cuda::GemmParams;
using sparseconv::cuda::kGemmThreads;

#define SPARSECONV_BOXES_KERNEL(segments) \
  SPARSECONV_ROUNDING_KERNEL(gemm_boxes_f32_s##segments, GemmParams, kGemmThreads, GemmConv<float, segments, true>)
#define SPARSECONV_PLANES_KERNEL(segments) \
  SPARSECONV_ROUNDING_KERNEL(gemm_planes_f32_s##segments, GemmParams, kGemmThreads, GemmConv<float, segments, false>)

SPARSECONV_BOXES_KERNEL(8)
SPARSECONV_BOXES_KERNEL(13)
SPARSECONV_BOXES_KERNEL(14)
SPARSECONV_PLANES_KERNEL(8)
SPARSECONV_PLANES_KERNEL(13)
SPARSECONV_PLANES_KERNEL(14)
SPARSECONV_ROUNDING_KERNEL(gemm_ready_boxes_f32_s13, GemmParams, kGemmThreads, GemmConv<float, 13, true, true>)
SPARSECONV_ROUNDING_KERNEL(gemm_ready_boxes_f32_s14, GemmParams, kGemmThreads, GemmConv<float, 14, true, true>)
SPARSECONV_ROUNDING_KERNEL(gemm_ready_planes_f32_s14, GemmParams, kGemmThreads, GemmConv<float, 14, false, true>)

SPARSECONV_PACK_KERNEL(_f32, float)
