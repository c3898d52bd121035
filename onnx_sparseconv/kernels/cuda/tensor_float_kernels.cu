// The same for float. kernels/library_ptx.py makes the PTX.
#include "params.h"
#include "product_kernel.cuh"
#include "tensor_conv.cuh"

using sparseconv::cuda::kMaxTensorThreads;
using sparseconv::cuda::TensorConv;
using sparseconv::cuda::TensorParams;

SPARSECONV_ROUNDING_KERNEL(tensor_f32_r4_p7, TensorParams, kMaxTensorThreads, TensorConv<float, 4, 7>)
SPARSECONV_ROUNDING_KERNEL(tensor_f32_r4_p8, TensorParams, kMaxTensorThreads, TensorConv<float, 4, 8>)
SPARSECONV_ROUNDING_KERNEL(tensor_f32_r2_p14, TensorParams, kMaxTensorThreads, TensorConv<float, 2, 14>)
SPARSECONV_ROUNDING_KERNEL(tensor_f32_r2_p16, TensorParams, kMaxTensorThreads, TensorConv<float, 2, 16>)
