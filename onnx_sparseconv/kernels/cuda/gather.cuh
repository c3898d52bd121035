// Copies planes to where each begins at a multiple of 16 bytes, as halves, as the pointwise kernel reads them (see
// GatherParams). What waits for memory here waits for all of it, so lanes load neighbours: whole planes come by way of
// shared memory, since they begin anywhere, and every second column comes with what lies between.
#pragma once

#include "divide.cuh"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "params.h"
#include "positions.cuh"
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

// Any positions, segment by segment; of whole planes, also of several sources. T is the type of X, Half or float.
// Neighbours in memory that lie behind a plane's end are of the next plane, so what is seen of them is of X as well.
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
        has_neighbours ? LoadNeighbours(from.first + first, magnitude) : LoadPositions(p, from.first, first, magnitude);
  }
  NoteSeen<T, 1>(p.seen, magnitude);
}

// Whole planes of one X, by blocks of kGatherThreads, of whose segments each thread has one. `slab`: kGatherSlabBytes
// of shared memory, where a run of X lies as it does in memory.
template <class T>
__device__ __forceinline__ void GatherWhole(const GatherParams& p, Shared slab) {
  constexpr int kVector = 16 / sizeof(T);
  LetNextLaunchBegin();
  WaitForLaunchBefore();
  Magnitude magnitude;
  const auto* const x = static_cast<const T*>(p.x);
  const long long end = static_cast<long long>(p.num_segments / p.plane_segments) * p.in_w;
  // Elements before X, from the multiple of 16 bytes on.
  const auto before = static_cast<int>(reinterpret_cast<unsigned long long>(x) % 16 / sizeof(T));
  const auto element = [&](int segment) {
    const int plane = Divide(segment, p.plane_divisor);
    return static_cast<long long>(plane) * p.in_w + (segment - plane * p.plane_segments) * kSegmentPositions;
  };
  const auto thread = static_cast<int>(threadIdx.x);
  const auto step = static_cast<long long>(gridDim.x) * kGatherThreads;
  for (long long i = static_cast<long long>(blockIdx.x) * kGatherThreads; i < p.num_segments; i += step) {
    const auto begin = static_cast<int>(i), count = min(p.num_segments - begin, kGatherThreads);
    const long long from = (element(begin) + before) / kVector * kVector - before;
    // A word more is read of the last segment.
    const auto length = static_cast<int>(element(begin + count - 1) - from) + kSegmentPositions + 2;
    for (int vector = thread; vector * kVector < length; vector += kGatherThreads) {
      const long long at = from + vector * kVector;
      StoreVector(slab, vector, x + at, at < 0 ? static_cast<int>(-at) : 0,
                  static_cast<int>(max(min(end - at, static_cast<long long>(kVector)), 0ll)), magnitude);
    }
    __syncthreads();
    if (thread < count) {
      const auto first = static_cast<unsigned>(element(begin + thread) - from);
      static_cast<uint4*>(p.out)[begin + thread] = LoadFromSlab(slab, first);
    }
    __syncthreads();
  }
  NoteSeen<T, 1>(p.seen, magnitude);
}

// Every second element of what was loaded, as halves, to where they belong.
template <class T, int kBytes>
__device__ __forceinline__ void StoreEverySecond(const Columns<kBytes>& columns, Half* to, Magnitude& magnitude) {
  constexpr int kOutputs = kBytes / static_cast<int>(2 * sizeof(T));
  T values[kOutputs];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) values[i] = EverySecond<T>(columns, i);
  if constexpr (kOutputs == 1) {
    *to = Lower(RoundedPair(values[0], T{0}, magnitude));
  } else if constexpr (kOutputs == 2) {
    *reinterpret_cast<Half2*>(to) = RoundedPair(values[0], values[1], magnitude);
  } else {
    *reinterpret_cast<uint2*>(to) = {RoundedPair(values[0], values[1], magnitude),
                                     RoundedPair(values[2], values[3], magnitude)};
  }
}

// Every second column of rows, all rows or some, by loads of `kBytes`: so many outputs and what lies behind each.
// Several loads of a thread are on their way.
template <class T, int kBytes>
__device__ __forceinline__ void GatherEverySecond(const GatherParams& p) {
  constexpr int kOutputs = kBytes / static_cast<int>(2 * sizeof(T)), kLoads = 4;
  Magnitude magnitude;
  const auto plane_size = static_cast<long long>(p.in_h) * p.in_w;
  const int row_loads = p.out_w / kOutputs, all = p.num_lines * row_loads;
  const auto step = static_cast<long long>(gridDim.x) * kGatherThreads * kLoads;
  for (long long begin = static_cast<long long>(blockIdx.x) * kGatherThreads * kLoads + threadIdx.x; begin < all;
       begin += step) {
    Columns<kBytes> columns[kLoads];
    Half* to[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      to[i] = nullptr;
      if (begin + i * kGatherThreads >= all) continue;
      const int index = static_cast<int>(begin) + i * kGatherThreads, line = Divide(index, p.row_divisor);
      const int plane = Divide(line, p.plane_divisor), row = line - plane * p.out_h;
      const int column = (index - line * row_loads) * kOutputs;
      columns[i].Load(PlaneAt<T>(p, plane, plane_size).first + (row * p.strides[0] * p.in_w + 2 * column));
      to[i] = static_cast<Half*>(p.out) + static_cast<long long>(plane) * p.plane_segments * kSegmentPositions +
              row * p.out_w + column;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (to[i] != nullptr) StoreEverySecond<T>(columns[i], to[i], magnitude);
    }
  }
  NoteSeen<T, 1>(p.seen, magnitude);
}

// By the widest loads that all rows allow.
template <class T>
__device__ __forceinline__ void GatherColumns(const GatherParams& p) {
  LetNextLaunchBegin();
  WaitForLaunchBefore();
  if (p.load_bytes == 16) return GatherEverySecond<T, 16>(p);
  if (p.load_bytes == 8) return GatherEverySecond<T, 8>(p);
  if constexpr (sizeof(T) == sizeof(Half)) GatherEverySecond<T, 4>(p);
}

}  // namespace sparseconv::cuda

// The kernels for a type of X, with a suffix of their names.
#define SPARSECONV_GATHER_KERNELS(suffix, T)                                           \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kGatherThreads)       \
      sparseconv_gather##suffix(const sparseconv::cuda::GatherParams params) {         \
    sparseconv::cuda::Gather<T>(params);                                               \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kGatherThreads)       \
      sparseconv_gather_whole##suffix(const sparseconv::cuda::GatherParams params) {   \
    __shared__ uint4 slab[sparseconv::cuda::kGatherSlabBytes / sizeof(uint4)];         \
    sparseconv::cuda::GatherWhole<T>(params, sparseconv::cuda::SharedAddress(slab));   \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kGatherThreads)       \
      sparseconv_gather_columns##suffix(const sparseconv::cuda::GatherParams params) { \
    sparseconv::cuda::GatherColumns<T>(params);                                        \
  }
