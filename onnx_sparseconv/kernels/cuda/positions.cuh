// How positions of X are read that lie anywhere, or are every second of a row, by vectors of 16 bytes.
#pragma once

#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "params.h"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// A slab is a run of X in shared memory, as halves that lie as they do in memory, from a multiple of 16 bytes on.
//
// Stores a vector of it, which is at `from` in X; those of its elements from `begin` up to `end` are X.
__device__ __forceinline__ void StoreVector(Shared slab, int vector, const Half* from, int begin, int end, Magnitude&) {
  Columns<16> eight;
  if (begin <= 0 && end >= kSegmentPositions) {
    eight.Load(from);
  } else {
    for (int i = 0; i < kSegmentPositions; i += 2) {
      const auto value = [&](int at) { return at >= begin && at < end ? LoadOnce(from + at) : Half{0}; };
      eight.words[i / 2] = Joined(value(i), value(i + 1));
    }
  }
  StoreSharedVectorIf(1, slab + static_cast<unsigned>(16 * vector), eight.words);
}
__device__ __forceinline__ void StoreVector(Shared slab, int vector, const float* from, int begin, int end,
                                            Magnitude& magnitude) {
  Columns<16> four;
  if (begin <= 0 && end >= 4) {
    four.Load(from);
  } else {
    for (int i = begin; i < min(end, 4); ++i) four.words[i] = FloatToBits(LoadOnce(from + i));
  }
  const auto value = [&](int i) { return BitsToFloat(four.words[i]); };
  StoreSharedPair(slab + static_cast<unsigned>(8 * vector), magnitude.Rounded(value(0), value(1)),
                  magnitude.Rounded(value(2), value(3)));
}

// Eight neighbours of a slab, wherever they begin. A word more is read.
__device__ __forceinline__ uint4 LoadFromSlab(Shared slab, unsigned first) {
  const Shared word = slab + first / 2 * 4;
  const unsigned selector = first % 2 != 0 ? 0x5432 : 0x3210;
  unsigned words[kSegmentPositions / 2 + 1];
#pragma unroll
  for (unsigned i = 0; i <= kSegmentPositions / 2; ++i) words[i] = LoadShared(word + 4 * i);
  return {SelectBytes(words[0], words[1], selector), SelectBytes(words[1], words[2], selector),
          SelectBytes(words[2], words[3], selector), SelectBytes(words[3], words[4], selector)};
}

// Of columns, every second one.
template <class T, int kBytes>
__device__ __forceinline__ T EverySecond(const Columns<kBytes>& columns, int index) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return BitsToFloat(columns.words[2 * index]);
  } else {
    return Lower(columns.words[index]);
  }
}

}  // namespace sparseconv::cuda
