// Copies planes to where each begins at a multiple of 16 bytes, as the pointwise kernel reads them (see GatherParams).
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

// Neighbours in memory, by words, wherever they begin. Reads less than a word before them, and less than two behind.
__device__ __forceinline__ uint4 LoadNeighbours(const Half* from) {
  const bool is_odd = reinterpret_cast<unsigned long long>(from) % sizeof(Half2) != 0;
  const auto* words = reinterpret_cast<const Half2*>(is_odd ? from - 1 : from);
  const unsigned selector = is_odd ? 0x5432 : 0x3210;
  Half2 found[kSegmentPositions / 2 + 1];
#pragma unroll
  for (int i = 0; i <= kSegmentPositions / 2; ++i) found[i] = LoadOnce(words + i);
  return {SelectBytes(found[0], found[1], selector), SelectBytes(found[1], found[2], selector),
          SelectBytes(found[2], found[3], selector), SelectBytes(found[3], found[4], selector)};
}

// Those of a plane from position `first` on.
__device__ __forceinline__ uint4 LoadPositions(const GatherParams& p, const Half* plane, int first) {
  const int positions = p.out_h * p.out_w;
  int row = first / p.out_w, column = first - row * p.out_w;
  Half halves[kSegmentPositions];
#pragma unroll
  for (int i = 0; i < kSegmentPositions; ++i) {
    const int y = row * p.strides[0] - p.pads_begin[0], x = column * p.strides[1] - p.pads_begin[1];
    const bool is_inside = first + i < positions && y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
    halves[i] = is_inside ? LoadOnce(plane + (y * p.in_w + x)) : Half{0};
    if (++column == p.out_w) column = 0, ++row;
  }
  return {Joined(halves[0], halves[1]), Joined(halves[2], halves[3]), Joined(halves[4], halves[5]),
          Joined(halves[6], halves[7])};
}

__device__ __forceinline__ void Gather(const GatherParams& p) {
  LetNextLaunchBegin();
  WaitForLaunchBefore();
  const auto threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const auto plane_size = static_cast<long long>(p.in_h) * p.in_w;
  const long long end = p.num_segments / p.plane_segments * plane_size - kSegmentPositions - 2;
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < p.num_segments; i += threads) {
    const int index = static_cast<int>(i), plane = index / p.plane_segments;
    const int first = (index - plane * p.plane_segments) * kSegmentPositions;
    const long long begin = plane * plane_size;
    const Half* from = static_cast<const Half*>(p.x) + begin;
    const bool has_neighbours = p.is_whole != 0 && begin + first > 0 && begin + first <= end;
    static_cast<uint4*>(p.out)[index] = has_neighbours ? LoadNeighbours(from + first) : LoadPositions(p, from, first);
  }
}

}  // namespace sparseconv::cuda
