// The kernels that the library carries, as PTX, for GPUs with sparse tensor cores. kernels/library_ptx.py makes the
// PTX.
#include "params.h"
#include "tensor_conv.cuh"

using sparseconv::cuda::kMaxTensorThreads;
using sparseconv::cuda::TensorConv;
using sparseconv::cuda::TensorParams;

#define SPARSECONV_TENSOR_KERNEL(subtiles, positions)                           \
  extern "C" __global__ void __launch_bounds__(kMaxTensorThreads, 1)            \
      sparseconv_tensor_r##subtiles##_p##positions(const TensorParams params) { \
    extern __shared__ uint4 tensor_stages[];                                    \
    TensorConv<subtiles, positions>(params, tensor_stages).Run();               \
  }

SPARSECONV_TENSOR_KERNEL(4, 7)
SPARSECONV_TENSOR_KERNEL(4, 8)
SPARSECONV_TENSOR_KERNEL(2, 14)
SPARSECONV_TENSOR_KERNEL(2, 16)
