// The kernels that the library carries, as PTX, for GPUs with sparse tensor cores. kernels/library_code.py makes the
// PTX.
#include "params.h"
#include "product_kernel.cuh"
#include "reduce.cuh"
#include "tensor_conv.cuh"

using sparseconv::cuda::Half;
using sparseconv::cuda::kMaxReduceThreads;
using sparseconv::cuda::kMaxTensorThreads;
using sparseconv::cuda::ReduceParams;
using sparseconv::cuda::ReduceVectors;
using sparseconv::cuda::TensorConv;
using sparseconv::cuda::TensorParams;

SPARSECONV_PRODUCT_KERNEL(tensor_r4_p7, TensorParams, kMaxTensorThreads, TensorConv<Half, 4, 7>)
SPARSECONV_PRODUCT_KERNEL(tensor_r4_p8, TensorParams, kMaxTensorThreads, TensorConv<Half, 4, 8>)
SPARSECONV_PRODUCT_KERNEL(tensor_r2_p14, TensorParams, kMaxTensorThreads, TensorConv<Half, 2, 14>)
SPARSECONV_PRODUCT_KERNEL(tensor_r2_p16, TensorParams, kMaxTensorThreads, TensorConv<Half, 2, 16>)

extern "C" __global__ void __launch_bounds__(kMaxReduceThreads) sparseconv_reduce_vectors(const ReduceParams params) {
  ReduceVectors<Half>(params, [] { return true; });
}
