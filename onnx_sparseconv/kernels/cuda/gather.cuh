// Copies planes to where each begins at a multiple of 16 bytes, as the pointwise kernel reads them (see GatherParams).
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

__device__ __forceinline__ void Gather(const GatherParams& p) {
  const auto threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const int positions = p.out_h * p.out_w;
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < p.num_segments; i += threads) {
    const int index = static_cast<int>(i), plane = index / p.plane_segments;
    const int first = (index - plane * p.plane_segments) * kSegmentPositions;
    const Half* from = static_cast<const Half*>(p.x) + static_cast<long long>(plane) * p.in_h * p.in_w;
    int row = first / p.out_w, column = first - row * p.out_w;
    Half halves[kSegmentPositions];
#pragma unroll
    for (int j = 0; j < kSegmentPositions; ++j) {
      const int y = row * p.strides[0] - p.pads_begin[0], x = column * p.strides[1] - p.pads_begin[1];
      const bool is_inside = first + j < positions && y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
      halves[j] = is_inside ? LoadReadOnly(from + (y * p.in_w + x)) : Half{0};
      if (++column == p.out_w) column = 0, ++row;
    }
    static_cast<uint4*>(p.out)[index] = {Joined(halves[0], halves[1]), Joined(halves[2], halves[3]),
                                         Joined(halves[4], halves[5]), Joined(halves[6], halves[7])};
  }
}

}  // namespace sparseconv::cuda
