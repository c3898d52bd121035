// Copies the inputs of a Concat to where they are one tensor, for kernels that know of one X. All that bounds it is
// memory.
#pragma once

#include "intrinsics.cuh"
#include "params.h"
#include "sources.cuh"

namespace sparseconv::cuda {

constexpr int kMaxConcatenateThreads = 256;

template <class Unit>
__device__ __forceinline__ void Concatenate(const ConcatenateParams& p) {
  LetNextLaunchBegin();
  WaitForLaunchBefore();
  const auto units = static_cast<unsigned>(p.units);
  for (unsigned unit = blockIdx.x * blockDim.x + threadIdx.x; unit < units; unit += gridDim.x * blockDim.x) {
    const Source source = FindSource(p.sources, static_cast<int>(unit));
    const Unit* from = static_cast<const Unit*>(source.x) + (static_cast<int>(unit) - source.begin);
    Unit* to = static_cast<Unit*>(p.out) + unit;
#pragma unroll 4
    for (long long image = blockIdx.y; image < p.batch; image += gridDim.y) {
      to[image * units] = LoadWritten(from + image * source.channels);
    }
  }
}

}  // namespace sparseconv::cuda
