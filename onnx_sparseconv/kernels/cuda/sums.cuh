// The sums of one thread of a generated kernel: `kChannels` outputs of each of its slot's columns.
#pragma once

#include "intrinsics.cuh"

namespace sparseconv::cuda {

// Values that a thread brings to shared memory at a time, to be finished in a loop: unrolled for all channels, that
// code would take a good part of the instruction cache.
constexpr int kBatch = 8;

template <int kChannels>
struct FloatSums {
  using Element = float;
  static constexpr int kColumns = 1;
  float sum[kChannels];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) sum[k] = 0.0f;
  }
  __device__ __forceinline__ float Get(int value) const { return sum[value]; }
};

// Halves add up to `part`, which the generated code adds to the float sums and restarts every few terms: a long sum in
// half would lose too many bits.
template <int kChannels>
struct HalfSums {
  using Element = Half;
  static constexpr int kColumns = 2;
  Half2 part[kChannels];
  float left[kChannels];
  float right[kChannels];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      part[k] = 0u;
      left[k] = right[k] = 0.0f;
    }
  }
  __device__ __forceinline__ float Get(int value) const {
    const int k = value / 2;
    return value % 2 == 0 ? left[k] + ToFloat(Lower(part[k])) : right[k] + ToFloat(Upper(part[k]));
  }
};

// The same with the second level in half too, for short sums: fewer registers, so more channels in a tile.
template <int kChannels>
struct ShortHalfSums {
  using Element = Half;
  static constexpr int kColumns = 2;
  Half2 part[kChannels];
  Half2 whole[kChannels];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) part[k] = whole[k] = 0u;
  }
  __device__ __forceinline__ float Get(int value) const {
    const int k = value / 2;
    return value % 2 == 0 ? ToFloat(Lower(whole[k])) + ToFloat(Lower(part[k]))
                          : ToFloat(Upper(whole[k])) + ToFloat(Upper(part[k]));
  }
};

// Stores values kBatch * batch .. + kBatch - 1 of a thread at `to`, `pitch` bytes from one to the next. Value
// k * kColumns + c is output channel k of the tile, column c of the slot.
template <class Sums, int kValues, int kIndex = 0>
__device__ __forceinline__ void StoreBatch(const Sums& sums, int batch, Shared to, int pitch) {
  if constexpr (kIndex < kValues) {
    if (batch == kIndex / kBatch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (kIndex + i < kValues) StoreShared(to + static_cast<Shared>(i * pitch), FloatBits(sums.Get(kIndex + i)));
      }
    } else {
      StoreBatch<Sums, kValues, kIndex + kBatch>(sums, batch, to, pitch);
    }
  }
}

}  // namespace sparseconv::cuda
