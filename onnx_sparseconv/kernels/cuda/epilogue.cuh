// What is done to a finished sum: y = activation(sum + bias + residual), in float, rounded once where it is stored.
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

__device__ __forceinline__ float LoadElement(const float* address) { return LoadWritten(address); }
__device__ __forceinline__ float LoadElement(const Half* address) { return ToFloat(LoadWritten(address)); }
// What is read once, in float.
template <class T>
__device__ __forceinline__ float LoadElementOnce(const T* address) {
  return ToFloat(LoadOnce(address));
}
__device__ __forceinline__ void StoreRounded(float* address, float value) { *address = value; }
__device__ __forceinline__ void StoreRounded(Half* address, float value) { *address = ToHalf(value); }

// NaN stays NaN in all of these, which fmaxf and fminf would not let it.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ float AtLeast(float low, float x) { return Larger(low, x); }
__device__ __forceinline__ float AtMost(float high, float x) { return Smaller(high, x); }
#else
__device__ __forceinline__ float AtLeast(float low, float x) { return x < low ? low : x; }
__device__ __forceinline__ float AtMost(float high, float x) { return x > high ? high : x; }
#endif

// exp of what is not positive does not overflow, so that small results keep their relative accuracy. Where the divisor
// is 1 to 2, the fast division is as good as any.
__device__ __forceinline__ float Sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return __fdividef(x < 0.0f ? e : 1.0f, 1.0f + e);
}

// kCode is an ActivationCode.
template <int kCode>
__device__ __forceinline__ float Activate(float x, float alpha, float beta) {
  if constexpr (kCode == kRelu) return AtLeast(0.0f, x);
  if constexpr (kCode == kClip) return AtMost(beta, AtLeast(alpha, x));
  if constexpr (kCode == kLeakyRelu) return x < 0.0f ? alpha * x : x;
  if constexpr (kCode == kHardSwish) return x * Activate<kHardSigmoid>(x, 1.0f / 6.0f, 0.5f);
  if constexpr (kCode == kHardSigmoid) return AtLeast(0.0f, AtMost(1.0f, alpha * x + beta));
  if constexpr (kCode == kSigmoid) return Sigmoid(x);
  if constexpr (kCode == kSilu) return x * Sigmoid(x);
  return x;
}

#if __CUDA_ARCH__ >= 800
// Whether `Bounded` is all that an activation takes.
__device__ __forceinline__ bool IsBound(int code) { return code <= kClip; }

// Two halves, or a float, within bounds. As integers, floats that nothing is done to would have the compiler let each
// product wait for the one before: here, something is done to them always.
template <class T>
__device__ __forceinline__ unsigned Bounded(const Bounds& bounds, const float* sums) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return FloatToBits(Smaller(BitsToFloat(bounds.high), Larger(BitsToFloat(bounds.low), sums[0])));
  } else {
    return AtMost(bounds.high, AtLeast(bounds.low, ToHalves(sums[0], sums[1])));
  }
}
#endif

// Activations that `Limited` applies, none among them.
__device__ constexpr bool IsLimit(int code) {
  return code == kNoActivation || code == kRelu || code == kClip || code == kLeakyRelu;
}

// Parameters of `Limited`, such that it changes nothing where a sum is not final.
struct Limits {
  float low, high, slope;
  Half2 lows, highs;  // both, twice, in halves

  template <int kCode>
  static __device__ __forceinline__ Limits Of(bool is_final, float alpha, float beta) {
    const float infinity = BitsToFloat(0x7F800000u);
    Limits limits{-infinity, infinity, 1.0f, 0, 0};
    if (is_final) {
      if constexpr (kCode == kRelu) limits.low = 0.0f;
      if constexpr (kCode == kClip) limits.low = alpha, limits.high = beta;
      if constexpr (kCode == kLeakyRelu) limits.slope = alpha;
    }
    limits.lows = ToHalves(limits.low, limits.low);
    limits.highs = ToHalves(limits.high, limits.high);
    return limits;
  }
};

template <int kCode>
__device__ __forceinline__ float Limited(float x, const Limits& limits) {
  if constexpr (kCode == kRelu) return Larger(limits.low, x);
  if constexpr (kCode == kClip) return AtMost(limits.high, AtLeast(limits.low, x));
  if constexpr (kCode == kLeakyRelu) return x < 0.0f ? limits.slope * x : x;
  return x;
}

template <int kCode>
__device__ __forceinline__ Half2 Limited(Half2 pair, const Limits& limits) {
  if constexpr (kCode == kNoActivation || !IsLimit(kCode)) return pair;
  if constexpr (kCode == kRelu) return limits.low == 0.0f ? AtLeastZero(pair) : pair;
#if __CUDA_ARCH__ >= 800
  if constexpr (kCode == kClip) return AtMost(limits.highs, AtLeast(limits.lows, pair));
#endif
  return ToHalves(Limited<kCode>(ToFloat(Lower(pair)), limits), Limited<kCode>(ToFloat(Upper(pair)), limits));
}

// The same where the code is only known at run time, with little code: the kernel has many copies of it. All threads of
// a launch take the same way.
__device__ __forceinline__ float Activate(int code, float x, float alpha, float beta) {
  if (code == kNoActivation) return x;
  if (code == kLeakyRelu) return Activate<kLeakyRelu>(x, alpha, beta);
  if (code == kRelu) return Activate<kRelu>(x, alpha, beta);
  if (code == kClip) return Activate<kClip>(x, alpha, beta);
  const float gate = code == kSigmoid || code == kSilu ? Sigmoid(x)
                     : code == kHardSwish              ? Activate<kHardSigmoid>(x, 1.0f / 6.0f, 0.5f)
                                                       : Activate<kHardSigmoid>(x, alpha, beta);
  return code == kSilu || code == kHardSwish ? x * gate : gate;
}

// The same of several values, in a function that is called: for kernels that would have hundreds of copies of it. The
// code is asked for once: few warps run beside each other, and each branch would have all values wait.
template <int kCount>
struct Floats {
  float at[kCount];
};

template <int kCode, int kCount>
__device__ __forceinline__ Floats<kCount> ActivateAll(Floats<kCount> x, float alpha, float beta) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x.at[i] = Activate<kCode>(x.at[i], alpha, beta);
  return x;
}

template <int kCount>
__device__ __noinline__ Floats<kCount> ActivateElsewhere(int code, Floats<kCount> x, float alpha, float beta) {
  if (code == kRelu) return ActivateAll<kRelu>(x, alpha, beta);
  if (code == kClip) return ActivateAll<kClip>(x, alpha, beta);
  if (code == kLeakyRelu) return ActivateAll<kLeakyRelu>(x, alpha, beta);
  if (code == kHardSwish) return ActivateAll<kHardSwish>(x, alpha, beta);
  if (code == kHardSigmoid) return ActivateAll<kHardSigmoid>(x, alpha, beta);
  if (code == kSigmoid) return ActivateAll<kSigmoid>(x, alpha, beta);
  if (code == kSilu) return ActivateAll<kSilu>(x, alpha, beta);
  return x;
}

// Stores output `index` of y, which belongs to output channel k. T is float or Half.
template <class T>
__device__ __forceinline__ void StoreOutput(const Epilogue& epilogue, void* y, long long index, int k, float sum) {
  if (epilogue.bias != nullptr) sum += LoadElement(static_cast<const T*>(epilogue.bias) + k);
  if (epilogue.residual != nullptr) sum += LoadElement(static_cast<const T*>(epilogue.residual) + index);
  StoreRounded(static_cast<T*>(y) + index, Activate(epilogue.activation, sum, epilogue.alpha, epilogue.beta));
}

}  // namespace sparseconv::cuda
