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

// Neighbouring outputs, of which the parts of a sum, and a residual, are vectors of 16 bytes.
template <class T>
class ReducedVector {
 public:
  static constexpr int kCount = kReduceBytes / sizeof(T);

  // `first`: the index of its first output, a multiple of kCount; there may be none.
  __device__ __forceinline__ ReducedVector(const ReduceParams& p, long long first)
      : p_(p), first_(first), is_full_(first + kCount <= p.num_values), place_(PlaceOf(p, first)) {}

  __device__ __forceinline__ void SumParts() {
    LoadBiases();
    const T* partial = static_cast<const T*>(p_.partial) + first_;
    if (is_full_) {
#pragma unroll 8
      for (int split = 0; split < p_.num_splits; ++split) Add(LoadVector(partial + split * p_.part_values));
    } else {
      // What lies behind the last sums was never written.
      for (int split = 0; split < p_.num_splits; ++split) AddSome(partial + split * p_.part_values);
    }
  }

  __device__ __forceinline__ void Finish() {
    const auto* residual = static_cast<const T*>(p_.epilogue.residual);
    T* y = static_cast<T*>(p_.y);
    const auto addresses = reinterpret_cast<unsigned long long>(y) | reinterpret_cast<unsigned long long>(residual);
    const bool is_whole = is_full_ && addresses % kReduceBytes == 0;
    if (p_.epilogue.bias != nullptr) AddBiases();
    if (residual != nullptr && is_whole) {
      Add(LoadVector(residual + first_));
    } else if (residual != nullptr) {
      AddSome(residual + first_);
    }
    sums_ = ActivateElsewhere<T>(p_.epilogue.activation, sums_, p_.epilogue.alpha, p_.epilogue.beta);
    if (is_whole) return StoreOnce(reinterpret_cast<uint4*>(y + first_), Rounded());
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first_ + i < p_.num_values) StoreRounded(y + first_ + i, sums_.at[i]);
    }
  }

 private:
  static __device__ __forceinline__ uint4 LoadVector(const T* from) {
    return LoadOnce(reinterpret_cast<const uint4*>(from));
  }

  __device__ __forceinline__ void Add(const uint4& vector) {
    const unsigned words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == sizeof(float)) {
        sums_.at[i] += BitsToFloat(words[i]);
      } else {
        sums_.at[i] += ToFloat(i % 2 == 0 ? Lower(words[i / 2]) : Upper(words[i / 2]));
      }
    }
  }

  // Those that are, one by one.
  __device__ __forceinline__ void AddSome(const T* from) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first_ + i < p_.num_values) sums_.at[i] += LoadElementOnce(from + i);
    }
  }

  // That of the first output's channel and of the next one: on their way before the sums are added up.
  __device__ __forceinline__ void LoadBiases() {
    if (p_.epilogue.bias == nullptr) return;
    bias_ = BiasOf(place_.channel);
    next_bias_ = BiasOf(NextChannel(place_.channel));
  }

  __device__ __forceinline__ void AddBiases() {
    OutputPlace place = place_;
#pragma unroll
    for (int i = 0; i < kCount; ++i, ++place.position) {
      if (place.position == p_.plane) {
        place = {NextChannel(place.channel), 0};
        bias_ = next_bias_;
        // Of the smallest planes, a vector has more than two.
        if (p_.plane < kCount) next_bias_ = BiasOf(NextChannel(place.channel));
      }
      sums_.at[i] += bias_;
    }
  }

  __device__ __forceinline__ int NextChannel(int channel) const {
    return channel + 1 == p_.out_channels ? 0 : channel + 1;
  }
  __device__ __forceinline__ float BiasOf(int channel) const {
    return LoadElementOnce(static_cast<const T*>(p_.epilogue.bias) + channel);
  }

  __device__ __forceinline__ uint4 Rounded() const {
    if constexpr (sizeof(T) == sizeof(float)) {
      return {FloatToBits(sums_.at[0]), FloatToBits(sums_.at[1]), FloatToBits(sums_.at[2]), FloatToBits(sums_.at[3])};
    } else {
      return {ToHalves(sums_.at[0], sums_.at[1]), ToHalves(sums_.at[2], sums_.at[3]),
              ToHalves(sums_.at[4], sums_.at[5]), ToHalves(sums_.at[6], sums_.at[7])};
    }
  }

  const ReduceParams& p_;
  const long long first_;
  const bool is_full_;
  const OutputPlace place_;  // of the first
  float bias_ = 0.0f, next_bias_ = 0.0f;
  Floats<kCount> sums_ = {};
};

// Launch: any blockDim.x up to kMaxReduceThreads; a grid smaller than the work is fine. `may_store` is called once by
// all threads of a block, while the first parts are on their way: whether any output is to be stored.
template <class T, class Function>
__device__ __forceinline__ void ReduceVectors(const ReduceParams& p, const Function& may_store) {
  constexpr int kCount = ReducedVector<T>::kCount;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x * kCount;
  long long first = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount;
  LetNextLaunchBegin();
  ReducedVector<T> vector(p, first);
  WaitForLaunchBefore();
  if (first < p.num_values) vector.SumParts();
  if (!may_store() || first >= p.num_values) return;
  vector.Finish();
  for (first += step; first < p.num_values; first += step) {
    ReducedVector<T> next(p, first);
    next.SumParts();
    next.Finish();
  }
}

}  // namespace sparseconv::cuda
