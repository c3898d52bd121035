// Adds up sums of the same outputs that several blocks computed, always in the same order, and finishes them.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

constexpr int kMaxReduceThreads = 256;

// An output's place: its channel, and where in the plane it lies.
struct OutputPlace {
  int channel, position;
};

// Of output `index` of [N, K, plane]. 64-bit divisions are slow, and seldom needed.
__device__ __forceinline__ OutputPlace PlaceOf(const ReduceParams& p, long long index) {
  if (p.num_values <= 0xFFFFFFFFll) {
    const unsigned at = static_cast<unsigned>(index), plane = static_cast<unsigned>(p.plane), map = at / plane;
    return {static_cast<int>(map % static_cast<unsigned>(p.out_channels)), static_cast<int>(at - map * plane)};
  }
  const long long map = index / p.plane;
  return {static_cast<int>(map % p.out_channels), static_cast<int>(index - map * p.plane)};
}

// Launch: any blockDim.x up to kMaxReduceThreads; a grid smaller than the work is fine.
template <class T>
__device__ __forceinline__ void Reduce(const ReduceParams& p) {
  LetNextLaunchBegin();
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  WaitForLaunchBefore();
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_values; i += step) {
    float sum = 0.0f;
#pragma unroll 4
    for (int split = 0; split < p.num_splits; ++split) {
      sum += LoadElement(static_cast<const T*>(p.partial) + split * p.part_values + i);
    }
    StoreOutput<T>(p.epilogue, p.y, i, PlaceOf(p, i).channel, sum);
  }
}

#if __CUDA_ARCH__ >= 900
// Biases of neighbouring outputs.
__device__ __forceinline__ void AddBiases(const ReduceParams& p, long long first, Floats<kReduceVector>& sums) {
  const auto* biases = static_cast<const Half*>(p.epilogue.bias);
  OutputPlace place = PlaceOf(p, first);
  float bias = ToFloat(LoadOnce(biases + place.channel));
#pragma unroll
  for (int i = 0; i < kReduceVector; ++i, ++place.position) {
    if (place.position == p.plane) {
      place = {place.channel + 1 == p.out_channels ? 0 : place.channel + 1, 0};
      bias = ToFloat(LoadOnce(biases + place.channel));
    }
    sums.at[i] += bias;
  }
}

// Calls function(i, half) for the halves of a vector.
template <class Function>
__device__ __forceinline__ void ForHalves(const uint4& vector, const Function& function) {
  const Half2 pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < kReduceVector; ++i) function(i, i % 2 == 0 ? Lower(pairs[i / 2]) : Upper(pairs[i / 2]));
}

// Launch: any blockDim.x up to kMaxReduceThreads; a grid smaller than the work is fine.
__device__ __forceinline__ void ReduceVectors(const ReduceParams& p) {
  LetNextLaunchBegin();
  const auto* residual = static_cast<const Half*>(p.epilogue.residual);
  auto* y = static_cast<Half*>(p.y);
  const auto addresses = reinterpret_cast<unsigned long long>(y) | reinterpret_cast<unsigned long long>(residual);
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x * kReduceVector;
  WaitForLaunchBefore();
  for (long long first = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * kReduceVector;
       first < p.num_values; first += step) {
    const bool is_full = first + kReduceVector <= p.num_values, is_whole = is_full && addresses % sizeof(uint4) == 0;
    const Half* partial = static_cast<const Half*>(p.partial) + first;
    Floats<kReduceVector> sums = {};
    if (is_full) {
#pragma unroll 8
      for (int split = 0; split < p.num_splits; ++split) {
        ForHalves(LoadOnce(reinterpret_cast<const uint4*>(partial + split * p.part_values)),
                  [&](int i, Half half) { sums.at[i] += ToFloat(half); });
      }
    } else {
      // What lies behind the last sums was never written.
      for (int split = 0; split < p.num_splits; ++split) {
#pragma unroll
        for (int i = 0; i < kReduceVector; ++i) {
          if (first + i < p.num_values) sums.at[i] += ToFloat(LoadOnce(partial + split * p.part_values + i));
        }
      }
    }
    if (p.epilogue.bias != nullptr) AddBiases(p, first, sums);
    if (residual != nullptr && is_whole) {
      ForHalves(LoadOnce(reinterpret_cast<const uint4*>(residual + first)),
                [&](int i, Half half) { sums.at[i] += ToFloat(half); });
    } else if (residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kReduceVector; ++i) {
        if (first + i < p.num_values) sums.at[i] += ToFloat(LoadOnce(residual + first + i));
      }
    }
    sums = ActivateElsewhere(p.epilogue.activation, sums, p.epilogue.alpha, p.epilogue.beta);
    if (is_whole) {
      StoreOnce(reinterpret_cast<uint4*>(y + first),
                {ToHalves(sums.at[0], sums.at[1]), ToHalves(sums.at[2], sums.at[3]), ToHalves(sums.at[4], sums.at[5]),
                 ToHalves(sums.at[6], sums.at[7])});
    } else {
#pragma unroll
      for (int i = 0; i < kReduceVector; ++i) {
        if (first + i < p.num_values) StoreOnce(y + first + i, ToHalf(sums.at[i]));
      }
    }
  }
}
#endif

}  // namespace sparseconv::cuda
