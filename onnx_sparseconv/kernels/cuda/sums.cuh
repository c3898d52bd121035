// The sums of one thread of a generated kernel: `kChannels` outputs of each of its slot's columns. A `Word` holds the
// values of all columns of a slot for one channel.
#pragma once

#include "intrinsics.cuh"

namespace sparseconv::cuda {

template <int kChannels>
struct FloatSums {
  using Element = float;
  using Word = float;
  static constexpr int kColumns = 1;
  float sum[kChannels];

  __device__ __forceinline__ void Start(int k, float value) { sum[k] = value; }
  // To a sum that is complete.
  __device__ __forceinline__ void Add(int k, float value) { sum[k] += value; }
  __device__ __forceinline__ float Finished(int k) const { return sum[k]; }
};

// Halves add up to `part`, which the generated code adds to `whole` and restarts every few terms: each level is short
// enough not to lose many bits.
template <int kChannels>
struct HalfSums {
  using Element = Half;
  using Word = Half2;
  static constexpr int kColumns = 2;
  Half2 part[kChannels];
  Half2 whole[kChannels];

  __device__ __forceinline__ void Start(int k, Half2 values) {
    part[k] = 0u;
    whole[k] = values;
  }
  __device__ __forceinline__ void Add(int k, Half2 values) {
    whole[k] = AddHalves(Finished(k), values);
    part[k] = 0u;
  }
  __device__ __forceinline__ Half2 Finished(int k) const { return AddHalves(whole[k], part[k]); }
};

}  // namespace sparseconv::cuda
