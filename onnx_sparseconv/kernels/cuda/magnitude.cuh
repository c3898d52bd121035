// Floats that are rounded to halves, as the tensor cores multiply them, and whether halves can hold them.
//
// A half has as many bits of a number as TF32, to which ONNX Runtime's own Conv rounds floats, but fewer exponents. So
// the kernels that round X note what they saw of it, and a block whose X halves could not hold computes its outputs
// once more (recompute.cuh).
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

// What was seen of X: bits, to be joined by "or".
constexpr unsigned kSawSome = 1;    // a value that is not zero
constexpr unsigned kSawEnough = 2;  // one of 2^-10 or more, 16 times the least half that has all its bits
constexpr unsigned kSawBeyond = 4;  // one beyond the largest half, or that is no number
constexpr unsigned kEnoughHalf = 0x1400, kInfiniteHalf = 0x7C00;

// Whether halves held X well enough: nothing overflowed, and what became zero, or lost bits, is little beside the rest.
__device__ __forceinline__ bool DidHalvesHold(unsigned seen) {
  return (seen & kSawBeyond) == 0 && ((seen & kSawEnough) != 0 || seen == 0);
}

// Joins what the threads of a block saw. To be called by all of them.
__device__ __forceinline__ unsigned SeenByBlock(unsigned seen) {
  unsigned all = 0;
#pragma unroll
  for (unsigned bit = kSawSome; bit <= kSawBeyond; bit *= 2) {
    if (IsAnyInBlock(seen & bit)) all |= bit;
  }
  return all;
}

// What a thread sees of the floats that it rounds.
class Magnitude {
 public:
  __device__ __forceinline__ Half2 Rounded(float lower, float upper) {
    const Half2 pair = ToHalves(lower, upper);
    largest_ = LargerMagnitudes(largest_, pair);
    bits_ |= FloatToBits(lower) | FloatToBits(upper);
    return pair;
  }

  __device__ __forceinline__ unsigned Seen() const {
    // Magnitudes of halves, as bits, are ordered as the numbers are, infinity and NaN behind all.
    const unsigned largest = max(static_cast<unsigned>(Lower(largest_)), static_cast<unsigned>(Upper(largest_)));
    return ((bits_ & 0x7FFFFFFFu) != 0 ? kSawSome : 0u) | (largest >= kEnoughHalf ? kSawEnough : 0u) |
           (largest >= kInfiniteHalf ? kSawBeyond : 0u);
  }

 private:
  Half2 largest_ = 0;
  unsigned bits_ = 0;  // of all floats
};

// Notes what each block of a grid of so many axes saw of X, where that is floats. To be called by all of its threads.
template <class T, int kAxes>
__device__ __forceinline__ void NoteSeen(unsigned* of_blocks, const Magnitude& magnitude) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const unsigned seen = SeenByBlock(magnitude.Seen());
    if (threadIdx.x != 0) return;
    const unsigned row = kAxes > 2 ? blockIdx.z * gridDim.y + blockIdx.y : blockIdx.y;
    of_blocks[kAxes > 1 ? row * gridDim.x + blockIdx.x : blockIdx.x] = seen;
  }
}

// Values as halves. What are halves already needs no watching.
__device__ __forceinline__ Half2 RoundedPair(Half lower, Half upper, Magnitude&) { return Joined(lower, upper); }
__device__ __forceinline__ Half2 RoundedPair(float lower, float upper, Magnitude& magnitude) {
  return magnitude.Rounded(lower, upper);
}

// Eight values, 16 bytes of halves.
template <class T>
__device__ __forceinline__ uint4 RoundedEight(const T (&values)[8], Magnitude& magnitude) {
  return {RoundedPair(values[0], values[1], magnitude), RoundedPair(values[2], values[3], magnitude),
          RoundedPair(values[4], values[5], magnitude), RoundedPair(values[6], values[7], magnitude)};
}

}  // namespace sparseconv::cuda
