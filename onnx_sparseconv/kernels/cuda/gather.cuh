// Copies planes to where each begins at a multiple of 16 bytes, as halves, as the pointwise kernel reads them (see
// GatherParams).
#pragma once

#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "params.h"
#include "sources.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// Neighbours in memory, by words, wherever they begin. Reads less than a word before them, and less than two behind.
__device__ __forceinline__ uint4 LoadNeighbours(const Half* from, Magnitude&) {
  const bool is_odd = reinterpret_cast<unsigned long long>(from) % sizeof(Half2) != 0;
  const auto* words = reinterpret_cast<const Half2*>(is_odd ? from - 1 : from);
  const unsigned selector = is_odd ? 0x5432 : 0x3210;
  Half2 found[kSegmentPositions / 2 + 1];
#pragma unroll
  for (int i = 0; i <= kSegmentPositions / 2; ++i) found[i] = LoadOnce(words + i);
  return {SelectBytes(found[0], found[1], selector), SelectBytes(found[1], found[2], selector),
          SelectBytes(found[2], found[3], selector), SelectBytes(found[3], found[4], selector)};
}

// The same, by vectors where they begin at multiples of 16 bytes.
__device__ __forceinline__ uint4 LoadNeighbours(const float* from, Magnitude& magnitude) {
  float values[kSegmentPositions];
  if (reinterpret_cast<unsigned long long>(from) % sizeof(uint4) == 0) {
#pragma unroll
    for (int i = 0; i < kSegmentPositions; i += 4) {
      const uint4 four = LoadOnce(reinterpret_cast<const uint4*>(from + i));
      values[i] = BitsToFloat(four.x), values[i + 1] = BitsToFloat(four.y);
      values[i + 2] = BitsToFloat(four.z), values[i + 3] = BitsToFloat(four.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSegmentPositions; ++i) values[i] = LoadOnce(from + i);
  }
  return RoundedEight(values, magnitude);
}

// Those of a plane from position `first` on.
template <class T>
__device__ __forceinline__ uint4 LoadPositions(const GatherParams& p, const T* plane, int first, Magnitude& magnitude) {
  const int positions = p.out_h * p.out_w;
  int row = first / p.out_w, column = first - row * p.out_w;
  T values[kSegmentPositions];
#pragma unroll
  for (int i = 0; i < kSegmentPositions; ++i) {
    const int y = row * p.strides[0] - p.pads_begin[0], x = column * p.strides[1] - p.pads_begin[1];
    const bool is_inside = first + i < positions && y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
    values[i] = is_inside ? LoadOnce(plane + (y * p.in_w + x)) : T{0};
    if (++column == p.out_w) column = 0, ++row;
  }
  return RoundedEight(values, magnitude);
}

// The same of every second column: so many of them a load, with what lies between.
template <int kColumns>
__device__ __forceinline__ uint4 LoadEverySecond(const GatherParams& p, const Half* plane, int first) {
  const int positions = p.out_h * p.out_w;
  int row = first / p.out_w, column = first - row * p.out_w;
  Half2 words[kSegmentPositions];
#pragma unroll
  for (int i = 0; i < kSegmentPositions; i += kColumns) {
    Columns<kColumns * sizeof(Half2)> columns;
    if (first + i < positions) columns.Load(plane + (row * p.strides[0] * p.in_w + 2 * column));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) words[i + j] = columns.words[j];
    column += kColumns;
    if (column == p.out_w) column = 0, ++row;
  }
  return {SelectBytes(words[0], words[1], kLowerHalves), SelectBytes(words[2], words[3], kLowerHalves),
          SelectBytes(words[4], words[5], kLowerHalves), SelectBytes(words[6], words[7], kLowerHalves)};
}

__device__ __forceinline__ uint4 LoadGathered(const GatherParams& p, const Half* plane, int first,
                                              Magnitude& magnitude) {
  if (p.columns == 4) return LoadEverySecond<4>(p, plane, first);
  if (p.columns == 2) return LoadEverySecond<2>(p, plane, first);
  if (p.columns == 1) return LoadEverySecond<1>(p, plane, first);
  return LoadPositions(p, plane, first, magnitude);
}
__device__ __forceinline__ uint4 LoadGathered(const GatherParams& p, const float* plane, int first,
                                              Magnitude& magnitude) {
  return LoadPositions(p, plane, first, magnitude);
}

// A plane of X, or of the source that has it, and how many elements of that tensor lie before it, and in all.
template <class T>
struct GatheredPlane {
  const T* first;
  long long begin, end;
};

template <class T>
__device__ __forceinline__ GatheredPlane<T> PlaneAt(const GatherParams& p, int plane, long long plane_size) {
  const int planes = p.num_segments / p.plane_segments;
  if (p.sources.count == 0) {
    const long long begin = plane * plane_size;
    return {static_cast<const T*>(p.x) + begin, begin, planes * plane_size};
  }
  const int image = plane / p.channels;
  const Source source = FindSource(p.sources, plane - image * p.channels);
  const long long channel = plane - image * p.channels - source.begin;
  const long long begin = (static_cast<long long>(image) * source.channels + channel) * plane_size;
  const long long end = static_cast<long long>(planes / p.channels) * source.channels * plane_size;
  return {static_cast<const T*>(source.x) + begin, begin, end};
}

// T is the type of X, Half or float. Neighbours in memory that lie behind a plane's end are of the next plane, so what
// is seen of them is of X as well.
template <class T>
__device__ __forceinline__ void Gather(const GatherParams& p) {
  LetNextLaunchBegin();
  WaitForLaunchBefore();
  Magnitude magnitude;
  const auto threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const auto plane_size = static_cast<long long>(p.in_h) * p.in_w;
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < p.num_segments; i += threads) {
    const int index = static_cast<int>(i), plane = index / p.plane_segments;
    const int first = (index - plane * p.plane_segments) * kSegmentPositions;
    const GatheredPlane<T> from = PlaneAt<T>(p, plane, plane_size);
    const bool has_neighbours =
        p.is_whole != 0 && from.begin + first > 0 && from.begin + first <= from.end - kSegmentPositions - 2;
    static_cast<uint4*>(p.out)[index] =
        has_neighbours ? LoadNeighbours(from.first + first, magnitude) : LoadGathered(p, from.first, first, magnitude);
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    const unsigned seen = SeenByBlock(magnitude.Seen());
    if (threadIdx.x == 0) p.seen[blockIdx.x] = seen;
  }
}

}  // namespace sparseconv::cuda
