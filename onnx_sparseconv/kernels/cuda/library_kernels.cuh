// The kernels that the library carries for every GPU and every model. Compiled for compute capability 9.0 and later,
// they may be launched to begin early (see WaitForLaunchBefore).
#pragma once

#include "concatenate.cuh"
#include "csr_conv.cuh"
#include "depthwise_conv.cuh"
#include "params.h"
#include "pixel_conv.cuh"
#include "pool.cuh"
#include "reduce.cuh"
#include "scale_channels.cuh"

using sparseconv::cuda::ConcatenateParams;
using sparseconv::cuda::CsrParams;
using sparseconv::cuda::DepthwiseParams;
using sparseconv::cuda::Half;
using sparseconv::cuda::PoolParams;
using sparseconv::cuda::ReduceParams;
using sparseconv::cuda::ScaleParams;

// Registers for loads that are on their way are worth more than further warps.
#define SPARSECONV_CSR_KERNEL(name, type, sub_batch)                                \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxCsrThreads, 4) \
      sparseconv_csr_##name##_b##sub_batch(const CsrParams params) {                \
    __shared__ sparseconv::cuda::CsrEntry entries[sparseconv::cuda::kCsrPiece];     \
    __shared__ unsigned taps[sparseconv::cuda::kCsrPiece];                          \
    sparseconv::cuda::CsrConv<type, sub_batch>(params, entries, taps).Run();        \
  }

SPARSECONV_CSR_KERNEL(f32, float, 1)
SPARSECONV_CSR_KERNEL(f32, float, 2)
SPARSECONV_CSR_KERNEL(f32, float, 4)
SPARSECONV_CSR_KERNEL(f32, float, 8)
SPARSECONV_CSR_KERNEL(f16, Half, 1)
SPARSECONV_CSR_KERNEL(f16, Half, 2)
SPARSECONV_CSR_KERNEL(f16, Half, 4)
SPARSECONV_CSR_KERNEL(f16, Half, 8)

extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxPixelThreads)
    sparseconv_pixel_f32(const CsrParams params) {
  sparseconv::cuda::ConvolvePixel<float>(params);
}

extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxPixelThreads)
    sparseconv_pixel_f16(const CsrParams params) {
  sparseconv::cuda::ConvolvePixel<Half>(params);
}

extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxReduceThreads)
    sparseconv_reduce_f32(const ReduceParams params) {
  sparseconv::cuda::Reduce<float>(params);
}

extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxReduceThreads)
    sparseconv_reduce_f16(const ReduceParams params) {
  sparseconv::cuda::Reduce<Half>(params);
}

#define SPARSECONV_DEPTHWISE_KERNEL(window, name, type, size, stride)                               \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxDepthwiseThreads,              \
                                               sparseconv::cuda::kDepthwiseBlocks<size, stride>)    \
      sparseconv_depthwise_##window##_##name(const DepthwiseParams params) {                        \
    sparseconv::cuda::DepthwiseConv<type, size, stride>(params, sparseconv_depthwise_shared).Run(); \
  }
#define SPARSECONV_DEPTHWISE_KERNELS(name, type)       \
  SPARSECONV_DEPTHWISE_KERNEL(3x3, name, type, 3, 1)   \
  SPARSECONV_DEPTHWISE_KERNEL(5x5, name, type, 5, 1)   \
  SPARSECONV_DEPTHWISE_KERNEL(7x7, name, type, 7, 1)   \
  SPARSECONV_DEPTHWISE_KERNEL(3x3s2, name, type, 3, 2) \
  SPARSECONV_DEPTHWISE_KERNEL(5x5s2, name, type, 5, 2) \
  SPARSECONV_DEPTHWISE_KERNEL(any, name, type, 0, 1)

extern __shared__ uint4 sparseconv_depthwise_shared[];

SPARSECONV_DEPTHWISE_KERNELS(f32, float)
SPARSECONV_DEPTHWISE_KERNELS(f16, Half)

#define SPARSECONV_SCALE_KERNEL(name, type)                                                                            \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxDepthwiseThreads, sparseconv::cuda::kScaleBlocks) \
      sparseconv_depthwise_1x1_##name(const ScaleParams params) {                                                      \
    sparseconv::cuda::ScaleChannels<type>(params).Run();                                                               \
  }

SPARSECONV_SCALE_KERNEL(f32, float)
SPARSECONV_SCALE_KERNEL(f16, Half)

#define SPARSECONV_CONCATENATE_KERNEL(bytes, type)                                       \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxConcatenateThreads) \
      sparseconv_concatenate_v##bytes(const ConcatenateParams params) {                  \
    sparseconv::cuda::Concatenate<type>(params);                                         \
  }

SPARSECONV_CONCATENATE_KERNEL(16, uint4)
SPARSECONV_CONCATENATE_KERNEL(4, unsigned)
SPARSECONV_CONCATENATE_KERNEL(2, Half)

#define SPARSECONV_POOL_KERNEL(name, type)                                        \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxPoolThreads) \
      sparseconv_max_pool_##name(const PoolParams params) {                       \
    sparseconv::cuda::MaxPool<type>(params);                                      \
  }

#define SPARSECONV_POOL_VECTORS_KERNEL(name, type, bytes, size)                          \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxPoolThreads)        \
      sparseconv_max_pool_##size##x##size##_##name##_v##bytes(const PoolParams params) { \
    sparseconv::cuda::MaxPoolVectors<type, bytes, size>(params);                         \
  }

#define SPARSECONV_POOL_ROWS_KERNEL(name, type, size)                             \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kMaxPoolThreads) \
      sparseconv_max_pool_##size##x##size##_##name(const PoolParams params) {     \
    sparseconv::cuda::MaxPoolRows<type, size>(params);                            \
  }

SPARSECONV_POOL_KERNEL(f32, float)
SPARSECONV_POOL_KERNEL(f16, Half)
SPARSECONV_POOL_ROWS_KERNEL(f32, float, 2)
SPARSECONV_POOL_ROWS_KERNEL(f32, float, 3)
SPARSECONV_POOL_ROWS_KERNEL(f16, Half, 2)
SPARSECONV_POOL_ROWS_KERNEL(f16, Half, 3)
SPARSECONV_POOL_VECTORS_KERNEL(f32, float, 8, 2)
SPARSECONV_POOL_VECTORS_KERNEL(f32, float, 16, 2)
SPARSECONV_POOL_VECTORS_KERNEL(f32, float, 8, 3)
SPARSECONV_POOL_VECTORS_KERNEL(f32, float, 16, 3)
SPARSECONV_POOL_VECTORS_KERNEL(f16, Half, 4, 2)
SPARSECONV_POOL_VECTORS_KERNEL(f16, Half, 8, 2)
SPARSECONV_POOL_VECTORS_KERNEL(f16, Half, 16, 2)
SPARSECONV_POOL_VECTORS_KERNEL(f16, Half, 4, 3)
SPARSECONV_POOL_VECTORS_KERNEL(f16, Half, 8, 3)
SPARSECONV_POOL_VECTORS_KERNEL(f16, Half, 16, 3)
