// Floats that are rounded to halves, as the tensor cores multiply them, and whether halves can hold them.
//
// A half has as many bits of a number as TF32, to which ONNX Runtime's own Conv rounds floats, but fewer exponents. So
// the kernels that round X note how large its values are, and `sparseconv_recompute` (recompute.cuh) looks.
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

// The largest magnitude among the halves that a thread rounds floats to: infinity where one is beyond them, NaN where
// one is none, the least half where all become zero and one is not. It is stored as the bits of a half: these are
// ordered as the numbers are, infinity and NaN behind all.
class Magnitude {
 public:
  __device__ __forceinline__ Half2 Rounded(float lower, float upper) {
    const Half2 pair = ToHalves(lower, upper);
    largest_ = LargerMagnitudes(largest_, pair);
    bits_ |= FloatToBits(lower) | FloatToBits(upper);
    return pair;
  }
  // As it was stored.
  __device__ __forceinline__ void Add(unsigned stored) { largest_ = LargerMagnitudes(largest_, stored); }

  // Stores the largest of the block. To be called by all threads of it, of whole warps.
  __device__ __forceinline__ void Store(unsigned* to) const {
    __shared__ unsigned of_warps[32];
    unsigned largest = OfWarp();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) largest = max(largest, of_warps[warp]);
    *to = largest;
  }

  // The same of the warp, to be called by all threads of that.
  __device__ __forceinline__ void StoreOfWarp(unsigned* to) const {
    const unsigned largest = OfWarp();
    if (threadIdx.x % 32 == 0) *to = largest;
  }

 private:
  __device__ __forceinline__ unsigned OfWarp() const {
    unsigned largest = max(static_cast<unsigned>(Lower(largest_)), static_cast<unsigned>(Upper(largest_)));
    largest = max(largest, (bits_ & 0x7FFFFFFFu) != 0 ? 1u : 0u);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
    return largest;
  }

  Half2 largest_ = 0;
  unsigned bits_ = 0;  // of all floats
};

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
