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

// T is how accurate the result has to be. As float, it has an error of a few units in the last place down to the least
// normal one. For halves, five instructions do, and for floats whose inputs tensor cores have rounded: the error of
// small results grows to 4e-6 of them.
template <class T>
__device__ __forceinline__ float Sigmoid(float x) {
  constexpr float kLog2OfE = 1.44269504f;
  return Reciprocal(1.0f + (sizeof(T) == sizeof(float) ? expf(-x) : Exp2(-kLog2OfE * x)));
}

// kCode is an ActivationCode.
template <int kCode, class T>
__device__ __forceinline__ float Activate(float x, float alpha, float beta) {
  if constexpr (kCode == kRelu) return AtLeast(0.0f, x);
  if constexpr (kCode == kClip) return AtMost(beta, AtLeast(alpha, x));
  if constexpr (kCode == kLeakyRelu) return x < 0.0f ? alpha * x : x;
  if constexpr (kCode == kHardSwish) return x * Saturated(x * (1.0f / 6.0f) + 0.5f);  // NaN by x
  if constexpr (kCode == kHardSigmoid) return AtLeast(0.0f, AtMost(1.0f, alpha * x + beta));
  if constexpr (kCode == kSigmoid) return Sigmoid<T>(x);
  if constexpr (kCode == kSilu) return x * Sigmoid<T>(x);
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

// An activation of a generated kernel's sums, which leaves them alone where they are not final. A `Word` is a float or
// two halves.
template <int kCode>
class FinalActivation {
 public:
  __device__ __forceinline__ FinalActivation(bool is_final, float alpha, float beta)
      : is_final_(is_final), alpha_(alpha), beta_(beta) {
    if (kCode == kClip && !is_final) alpha_ = -Infinity(), beta_ = Infinity();
    if (kCode == kLeakyRelu && !is_final) alpha_ = 1.0f;
    lows_ = ToHalves(alpha_, alpha_);
    highs_ = ToHalves(beta_, beta_);
  }

  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kCode == kNoActivation) return x;
    if constexpr (kCode == kRelu) return AtLeast(is_final_ ? 0.0f : -Infinity(), x);
    if constexpr (kCode == kClip || kCode == kLeakyRelu) return Activate<kCode, float>(x, alpha_, beta_);
    return is_final_ ? Activate<kCode, float>(x, alpha_, beta_) : x;
  }

  __device__ __forceinline__ Half2 operator()(Half2 pair) const {
    if constexpr (kCode == kNoActivation) return pair;
    if constexpr (kCode == kRelu) return is_final_ ? AtLeastZero(pair) : pair;
#if __CUDA_ARCH__ >= 800
    if constexpr (kCode == kClip) return AtMost(highs_, AtLeast(lows_, pair));
#endif
    const float lower = ToFloat(Lower(pair)), upper = ToFloat(Upper(pair));
    const Half2 result =
        ToHalves(Activate<kCode, Half>(lower, alpha_, beta_), Activate<kCode, Half>(upper, alpha_, beta_));
    return is_final_ ? result : pair;
  }

 private:
  static __device__ __forceinline__ float Infinity() { return BitsToFloat(0x7F800000u); }

  const bool is_final_;
  float alpha_, beta_;
  Half2 lows_, highs_;  // the same, twice, in halves
};

// The same where the code is only known at run time, with little code: the kernel has many copies of it. All threads of
// a launch take the same way.
template <class T>
__device__ __forceinline__ float Activate(int code, float x, float alpha, float beta) {
  if (code == kNoActivation) return x;
  if (code == kLeakyRelu) return Activate<kLeakyRelu, T>(x, alpha, beta);
  if (code == kRelu) return Activate<kRelu, T>(x, alpha, beta);
  if (code == kClip) return Activate<kClip, T>(x, alpha, beta);
  const float gate = code == kSigmoid || code == kSilu ? Sigmoid<T>(x)
                     : code == kHardSwish              ? Activate<kHardSigmoid, T>(x, 1.0f / 6.0f, 0.5f)
                                                       : Activate<kHardSigmoid, T>(x, alpha, beta);
  return code == kSilu || code == kHardSwish ? x * gate : gate;
}

// The same of several values, in a function that is called: for kernels that would have hundreds of copies of it. The
// code is asked for once: few warps run beside each other, and each branch would have all values wait. Those that most
// networks have are asked for first.
template <int kCount>
struct Floats {
  float at[kCount];
};

template <int kCode, class T, int kCount>
__device__ __forceinline__ Floats<kCount> ActivateAll(Floats<kCount> x, float alpha, float beta) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x.at[i] = Activate<kCode, T>(x.at[i], alpha, beta);
  return x;
}

template <class T, int kCount>
__device__ __noinline__ Floats<kCount> ActivateElsewhere(int code, Floats<kCount> x, float alpha, float beta) {
  if (code == kSilu) return ActivateAll<kSilu, T>(x, alpha, beta);
  if (code == kHardSwish) return ActivateAll<kHardSwish, T>(x, alpha, beta);
  if (code == kSigmoid) return ActivateAll<kSigmoid, T>(x, alpha, beta);
  if (code == kLeakyRelu) return ActivateAll<kLeakyRelu, T>(x, alpha, beta);
  if (code == kHardSigmoid) return ActivateAll<kHardSigmoid, T>(x, alpha, beta);
  if (code == kRelu) return ActivateAll<kRelu, T>(x, alpha, beta);
  if (code == kClip) return ActivateAll<kClip, T>(x, alpha, beta);
  return x;
}

// The same, with what most layers have in place of the call.
template <class T, int kCount>
__device__ __forceinline__ Floats<kCount> ActivateSums(const Epilogue& e, const Floats<kCount>& sums) {
  if (e.activation == kNoActivation) return sums;
  if (e.activation == kRelu) return ActivateAll<kRelu, T>(sums, e.alpha, e.beta);
  if (e.activation == kClip) return ActivateAll<kClip, T>(sums, e.alpha, e.beta);
  return ActivateElsewhere<T>(e.activation, sums, e.alpha, e.beta);
}

// Stores output `index` of y, which belongs to output channel k. T is float or Half.
template <class T>
__device__ __forceinline__ void StoreOutput(const Epilogue& epilogue, void* y, long long index, int k, float sum) {
  if (epilogue.bias != nullptr) sum += LoadElement(static_cast<const T*>(epilogue.bias) + k);
  if (epilogue.residual != nullptr) sum += LoadElement(static_cast<const T*>(epilogue.residual) + index);
  StoreRounded(static_cast<T*>(y) + index, Activate<T>(epilogue.activation, sum, epilogue.alpha, epilogue.beta));
}

}  // namespace sparseconv::cuda
