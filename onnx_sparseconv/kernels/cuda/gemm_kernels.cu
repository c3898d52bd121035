// The kernels that the library carries, as a cubin, for 1x1 as matrix products, in float16, on GPUs of compute
// capability 9.0. kernels/library_code.py makes it.
#include "gemm_conv.cuh"
#include "pack.cuh"
#include "product_kernel.cuh"

using sparseconv::cuda::GemmConv;
using sparseconv::cuda::GemmParams;
using sparseconv::cuda::Half;
using sparseconv::cuda::kGemmThreads;

#define SPARSECONV_BOXES_KERNEL(segments) \
  SPARSECONV_PRODUCT_KERNEL(gemm_boxes_s##segments, GemmParams, kGemmThreads, GemmConv<Half, segments, true>)
#define SPARSECONV_PLANES_KERNEL(segments) \
  SPARSECONV_PRODUCT_KERNEL(gemm_planes_s##segments, GemmParams, kGemmThreads, GemmConv<Half, segments, false>)
#define SPARSECONV_READY_KERNEL(segments)                                            \
  SPARSECONV_PRODUCT_KERNEL(gemm_ready_planes_s##segments, GemmParams, kGemmThreads, \
                            GemmConv<Half, segments, false, true>)

SPARSECONV_BOXES_KERNEL(16)
SPARSECONV_BOXES_KERNEL(32)
SPARSECONV_PLANES_KERNEL(16)
SPARSECONV_PLANES_KERNEL(25)
SPARSECONV_PLANES_KERNEL(32)
SPARSECONV_READY_KERNEL(16)
SPARSECONV_READY_KERNEL(25)
SPARSECONV_READY_KERNEL(32)

SPARSECONV_PACK_KERNEL(, Half)
