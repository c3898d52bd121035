// Adds up sums of the same outputs that several blocks computed, always in the same order, and finishes them.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

constexpr int kMaxReduceThreads = 256;

// Output channel of output `index` of [N, K, plane]. 64-bit divisions are slow, and seldom needed.
__device__ __forceinline__ int ChannelOf(const ReduceParams& p, long long index) {
  if (p.num_values <= 0xFFFFFFFFll) {
    return static_cast<int>(static_cast<unsigned>(index) / static_cast<unsigned>(p.plane) %
                            static_cast<unsigned>(p.out_channels));
  }
  return static_cast<int>(index / p.plane % p.out_channels);
}

// Launch: any blockDim.x up to kMaxReduceThreads; a grid smaller than the work is fine.
template <class T>
__device__ __forceinline__ void Reduce(const ReduceParams& p) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_values; i += step) {
    float sum = 0.0f;
#pragma unroll 4
    for (int split = 0; split < p.num_splits; ++split) {
      sum += LoadElement(static_cast<const T*>(p.partial) + split * p.num_values + i);
    }
    StoreOutput<T>(p.epilogue, p.y, i, ChannelOf(p, i), sum);
  }
}

}  // namespace sparseconv::cuda
