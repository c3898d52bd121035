// Computes a float convolution once more, as the CSR kernel does, where halves could not hold its input.
#pragma once

#include "csr_conv.cuh"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "params.h"

namespace sparseconv::cuda {

// Whether halves held all of X well enough, by the largest magnitudes that blocks saw: nothing overflowed, and what
// became zero, or lost bits, is little beside the rest. To be called by all threads of the block.
__device__ __forceinline__ bool DidHalvesHold(const RecomputeParams& p) {
  constexpr unsigned kInfinity = 0x7C00u;
  constexpr unsigned kEnough = 0x2000u;  // 2^-7, 2^7 times the least half that has all its bits
  __shared__ unsigned largest;
  Magnitude magnitude;
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(p.num_magnitudes); i += blockDim.x) {
    magnitude.Add(LoadWritten(p.magnitudes + i));
  }
  magnitude.Store(&largest);
  __syncthreads();
  return largest == 0 || (largest >= kEnough && largest < kInfinity);
}

// Launch: as of the CSR kernel, but a grid of any size in x, y and z.
__device__ __forceinline__ void Recompute(const RecomputeParams& p, CsrEntry* entries, unsigned* taps) {
  LetNextLaunchBegin();
  WaitForLaunchBefore();
  if (DidHalvesHold(p)) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.happened = 1;
  CsrConv<float, 1>(p.csr, entries, taps).RunAll();
}

}  // namespace sparseconv::cuda
