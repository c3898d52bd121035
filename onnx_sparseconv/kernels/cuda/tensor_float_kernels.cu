// The same for float. kernels/library_code.py makes the PTX.
#include "params.h"
#include "product_kernel.cuh"
#include "reduce_rounded.cuh"
#include "tensor_conv.cuh"

using sparseconv::cuda::kMaxReduceThreads;
using sparseconv::cuda::kMaxTensorThreads;
using sparseconv::cuda::kRecomputeBytes;
using sparseconv::cuda::ReduceRounded;
using sparseconv::cuda::ReduceRoundedParams;
using sparseconv::cuda::TensorConv;
using sparseconv::cuda::TensorParams;

SPARSECONV_ROUNDING_KERNEL(tensor_f32_r4_p7, TensorParams, kMaxTensorThreads, TensorConv<float, 4, 7>)
SPARSECONV_ROUNDING_KERNEL(tensor_f32_r4_p8, TensorParams, kMaxTensorThreads, TensorConv<float, 4, 8>)
SPARSECONV_ROUNDING_KERNEL(tensor_f32_r2_p14, TensorParams, kMaxTensorThreads, TensorConv<float, 2, 14>)
SPARSECONV_ROUNDING_KERNEL(tensor_f32_r2_p16, TensorParams, kMaxTensorThreads, TensorConv<float, 2, 16>)

extern "C" __global__ void __launch_bounds__(kMaxReduceThreads)
    sparseconv_reduce_rounded(const __grid_constant__ ReduceRoundedParams params) {
  __shared__ uint4 shared[kRecomputeBytes / sizeof(uint4)];
  ReduceRounded(params, shared);
}
