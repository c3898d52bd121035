// How the kernels on tensor cores are declared.
#pragma once

#include "intrinsics.cuh"

extern __shared__ uint4 product_stages[];

// What comes last is the type of what runs: of a Params and the block's shared memory. A multiprocessor is to have
// registers for so many `blocks` of so many `threads`.
#define SPARSECONV_RESIDENT_PRODUCT_KERNEL(name, Params, threads, blocks, ...) \
  extern "C" __global__ void __launch_bounds__(threads, blocks)                \
      sparseconv_##name(const __grid_constant__ Params params) {               \
    __VA_ARGS__(params, product_stages).Run();                                 \
  }
#define SPARSECONV_PRODUCT_KERNEL(name, Params, threads, ...) \
  SPARSECONV_RESIDENT_PRODUCT_KERNEL(name, Params, threads, 1, __VA_ARGS__)

// The same of what rounds floats to halves. Where these did not hold X, another function computes the block's tiles
// once more, by the same type, made anew: nothing that it needs is kept in registers while no one knows yet.
#define SPARSECONV_RESIDENT_ROUNDING_KERNEL(name, Params, threads, blocks, ...) \
  extern "C" __global__ void __launch_bounds__(threads, blocks)                 \
      sparseconv_##name(const __grid_constant__ Params params) {                \
    if (__VA_ARGS__(params, product_stages).Run()) return;                      \
    const Params* again;                                                        \
    SPARSECONV_FIND_PARAMETER(again, sparseconv_##name, params)                 \
    RecomputeTiles<__VA_ARGS__>(*again);                                        \
  }
#define SPARSECONV_ROUNDING_KERNEL(name, Params, threads, ...) \
  SPARSECONV_RESIDENT_ROUNDING_KERNEL(name, Params, threads, 1, __VA_ARGS__)

template <class Conv, class Params>
__device__ __noinline__ void RecomputeTiles(const Params& params) {
  Conv(params, product_stages).RecomputeTiles();
}
