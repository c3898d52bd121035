// Floats that are rounded to halves, as the tensor cores multiply them, and whether halves can hold them.
//
// A half has as many bits of a number as TF32, to which ONNX Runtime's own Conv rounds floats, but fewer exponents. So
// the kernels that round X note how large its values are, and `sparseconv_recompute` (recompute.cuh) looks.
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

// The largest magnitude among what a thread saw, as the bits of a float: these are ordered as the numbers are, with
// infinity and NaN behind all.
class Magnitude {
 public:
  __device__ __forceinline__ void Add(float value) {
    const unsigned bits = FloatToBits(value) & 0x7FFFFFFFu;
    largest_ = largest_ < bits ? bits : largest_;
  }
  // Halves need no watching.
  __device__ __forceinline__ void Add(Half) {}

  // Stores the largest of the block. To be called by all threads of it, of whole warps.
  __device__ __forceinline__ void Store(unsigned* to) {
    __shared__ unsigned of_warps[32];
    OfWarp();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest_;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) largest_ = max(largest_, of_warps[warp]);
    *to = largest_;
  }

  // The same of the warp, to be called by all threads of that.
  __device__ __forceinline__ void StoreOfWarp(unsigned* to) {
    OfWarp();
    if (threadIdx.x % 32 == 0) *to = largest_;
  }

 private:
  __device__ __forceinline__ void OfWarp() {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest_ = max(largest_, __shfl_xor_sync(0xFFFFFFFFu, largest_, lanes));
  }

  unsigned largest_ = 0;
};

// Values as halves, in whichever type they are.
__device__ __forceinline__ Half2 RoundedPair(Half lower, Half upper) { return Joined(lower, upper); }
__device__ __forceinline__ Half2 RoundedPair(float lower, float upper) { return ToHalves(lower, upper); }

// Eight values, 16 bytes of halves.
template <class T>
__device__ __forceinline__ uint4 RoundedEight(const T (&values)[8], Magnitude& magnitude) {
#pragma unroll
  for (int i = 0; i < 8; ++i) magnitude.Add(values[i]);
  return {RoundedPair(values[0], values[1]), RoundedPair(values[2], values[3]), RoundedPair(values[4], values[5]),
          RoundedPair(values[6], values[7])};
}

}  // namespace sparseconv::cuda
