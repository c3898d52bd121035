// Adds up parts of sums whose X was rounded to halves.
#pragma once

#include "recompute.cuh"
#include "reduce.cuh"

namespace sparseconv::cuda {

// Adds up sums of what was rounded; or, where halves did not hold that, computes all outputs once more, each block some
// of the channels. `shared`: kRecomputeBytes. Launch: as ReduceVectors.
__device__ __forceinline__ void ReduceRounded(const ReduceRoundedParams& p, void* shared) {
  const auto did_halves_hold = [&] {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    if (DidHalvesHold(SeenByBlock(SeenBefore(p.recompute, thread, threads)))) return true;
    const ReduceParams& reduce = p.reduce;
    OutputBox box = {
        0, reduce.out_channels, 1, reduce.plane, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    const long long image = static_cast<long long>(reduce.out_channels) * reduce.plane;
    for (; box.first < reduce.num_values; box.first += image) Recompute(p.recompute, box, shared);
    return false;
  };
  ReduceVectors<float>(p.reduce, did_halves_hold);
}

}  // namespace sparseconv::cuda
