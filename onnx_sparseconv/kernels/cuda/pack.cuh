// Brings X into the form in which the gemm kernels multiply it (see PackParams): of neighbouring positions of a channel
// eight become 16 bytes, as halves, those of 64 channels next to each other.
#pragma once

#include "divide.cuh"
#include "gemm_params.h"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "positions.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// A block has a line of some channels of a chunk. `T` is the type of X, Half or float.
template <class T>
class Packing {
 public:
  // `slab`: kPackSlabBytes of shared memory.
  __device__ __forceinline__ Packing(const PackParams& params, Shared slab)
      : p_(params),
        slab_(slab),
        line_(static_cast<int>(blockIdx.x)),
        first_(static_cast<int>(blockIdx.y) * params.block_channels),
        image_(line_ / params.image_lines),
        begin_((line_ - image_ * params.image_lines) * params.line_positions),
        channels_(max(min(params.block_channels, params.in_channels - first_), 0)),
        x_(static_cast<const T*>(params.x) +
           (static_cast<long long>(image_) * params.in_channels + first_) * PlaneSize()) {}

  __device__ __forceinline__ void Run() {
    LetNextLaunchBegin();
    WaitForLaunchBefore();
    if (p_.load_bytes == kPackAny) {
      ForPieces([&](int channel, int position) { return AnyPositions(channel, position); });
    } else if (sizeof(T) == sizeof(Half) && p_.load_bytes == kPackWhole) {
      FillWithPlanes();
      __syncthreads();
      ForPieces([&](int channel, int position) {
        return LoadFromSlab(slab_, static_cast<unsigned>(Before() + channel * p_.plane + position));
      });
    } else {
      if (p_.load_bytes == 16) {
        FillWithColumns<16>();
      } else if (p_.load_bytes == 8) {
        FillWithColumns<8>();
      } else if constexpr (sizeof(T) == sizeof(Half)) {
        FillWithColumns<4>();
      }
      __syncthreads();
      ForPieces([&](int channel, int position) {
        return LoadSharedVector(slab_ + static_cast<unsigned>(channel * SlabPitch() + 2 * (position - begin_)));
      });
    }
    NoteSeen<T, 2>(p_.seen, magnitude_);
  }

 private:
  __device__ __forceinline__ long long PlaneSize() const { return static_cast<long long>(p_.in_h) * p_.in_w; }

  // Stores load(channel, position) for all segments of the line. Of a warp, eight lanes have neighbouring channels, the
  // others the segments behind: both what is read and what is written lies together.
  template <class Load>
  __device__ __forceinline__ void ForPieces(const Load& load) {
    const int tile = line_ / p_.tile_lines;
    unsigned char* const to = static_cast<unsigned char*>(p_.out) +
                              (static_cast<size_t>(tile) * p_.num_chunks + first_ / kGemmChannels) * p_.stage_bytes +
                              static_cast<size_t>(line_ - tile * p_.tile_lines) * p_.line_segments * kGemmPackedPitch +
                              16 * (first_ % kGemmChannels);
    const int pieces = p_.block_channels * p_.line_segments;
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kPackThreads) {
      const int rows = i / 8, eight = Divide(rows, p_.by_line_segments), segment = rows - eight * p_.line_segments;
      const int channel = 8 * eight + i % 8, position = begin_ + segment * kSegmentPositions;
      *reinterpret_cast<uint4*>(to + segment * kGemmPackedPitch + 16 * channel) =
          channel < channels_ ? load(channel, position) : uint4{};
    }
  }

  // The planes of the channels, which follow each other in X, lie in shared memory as they do there.
  __device__ __forceinline__ int Before() const {
    return static_cast<int>(reinterpret_cast<unsigned long long>(x_) % 16 / sizeof(T));
  }
  __device__ __forceinline__ void FillWithPlanes() {
    constexpr int kVector = 16 / sizeof(T);
    const int end = channels_ * p_.plane;
    for (int vector = static_cast<int>(threadIdx.x); vector * kVector < end + Before() + kSegmentPositions + 2;
         vector += kPackThreads) {
      const int at = vector * kVector - Before();
      StoreVector(slab_, vector, x_ + at, max(-at, 0), max(min(end - at, kVector), 0), magnitude_);
    }
  }

  // Or what of the line's rows is read, channel by channel; bytes from one to the next. Of eight channels, what is read
  // together lies in different banks.
  __device__ __forceinline__ int SlabPitch() const { return 16 * (p_.line_segments | 1); }
  template <int kBytes>
  __device__ __forceinline__ void FillWithColumns() {
    constexpr int kOutputs = kBytes / static_cast<int>(2 * sizeof(T)), kLoads = 4;
    const int positions = min(p_.line_segments * kSegmentPositions, p_.plane - begin_);
    const int line_loads = (positions + kOutputs - 1) / kOutputs, loads = channels_ * line_loads;
    for (int first = static_cast<int>(threadIdx.x); first < loads; first += kLoads * kPackThreads) {
      Columns<kBytes> columns[kLoads];
      Shared to[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int load = first + i * kPackThreads;
        if (load >= loads) continue;
        const int channel = load / line_loads, position = (load - channel * line_loads) * kOutputs;
        const int row = (begin_ + position) / p_.out_w, column = begin_ + position - row * p_.out_w;
        columns[i].Load(x_ + (channel * PlaneSize() + row * p_.strides[0] * p_.in_w + 2 * column));
        to[i] = slab_ + static_cast<unsigned>(channel * SlabPitch() + 2 * position);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i * kPackThreads < loads) StoreSeconds<kBytes>(columns[i], to[i]);
      }
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void StoreSeconds(const Columns<kBytes>& columns, Shared to) {
    constexpr int kOutputs = kBytes / static_cast<int>(2 * sizeof(T));
    if constexpr (kOutputs == 1) {
      StoreSharedHalf(to, Lower(RoundedPair(EverySecond<T>(columns, 0), T{0}, magnitude_)));
    } else {
#pragma unroll
      for (int i = 0; i < kOutputs; i += 2) {
        StoreShared(to + static_cast<unsigned>(2 * i),
                    RoundedPair(EverySecond<T>(columns, i), EverySecond<T>(columns, i + 1), magnitude_));
      }
    }
  }

  __device__ __forceinline__ uint4 AnyPositions(int channel, int position) {
    const T* const plane = x_ + channel * PlaneSize();
    int row = position / p_.out_w, column = position - row * p_.out_w;
    T values[kSegmentPositions];
#pragma unroll
    for (int i = 0; i < kSegmentPositions; ++i) {
      const bool exists = position + i < p_.plane;
      values[i] = exists ? LoadOnce(plane + (row * p_.strides[0] * p_.in_w + column * p_.strides[1])) : T{0};
      if (++column == p_.out_w) column = 0, ++row;
    }
    return RoundedEight(values, magnitude_);
  }

  const PackParams& p_;
  const Shared slab_;
  const int line_, first_, image_;  // the first channel
  const int begin_;                 // the line's first position
  const int channels_;              // that there are
  const T* const x_;                // of the image's first channel of these
  Magnitude magnitude_;
};

}  // namespace sparseconv::cuda

// The kernel for a type of X, with a suffix of its name.
#define SPARSECONV_PACK_KERNEL(suffix, T)                                                    \
  extern "C" __global__ void __launch_bounds__(sparseconv::cuda::kPackThreads)               \
      sparseconv_pack##suffix(const __grid_constant__ sparseconv::cuda::PackParams params) { \
    __shared__ uint4 slab[sparseconv::cuda::kPackSlabBytes / sizeof(uint4)];                 \
    sparseconv::cuda::Packing<T>(params, sparseconv::cuda::SharedAddress(slab)).Run();       \
  }
