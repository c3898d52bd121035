// Depthwise convolution: each channel of X by a window of its own. Such layers have hardly a zero among their weights,
// and what bounds them is memory; but amid sparse ones, this does bias and activation in passing.
//
// In memory, the planes of X (a channel of an image each) lie one behind the other, and so do those of Y. So whatever
// their sizes, what a block reads is one run of elements, which it copies to shared memory by vectors: some planes, or
// a band of rows of a plane. Likewise, its outputs are one run. A thread computes kColumns columns of kRows outputs:
// what it loads of X serves several of them.
//
// Where a window leaves the map, a row of zeros is read instead of one that there is not, and what was loaded of a
// column that there is not becomes zero. No branch: so all loads are on their way together.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"
#include "shared_elements.cuh"

namespace sparseconv::cuda {

// A run of elements between global and shared memory, where both lie alike within 16 bytes. By all threads of the
// block.
template <class T>
class ElementRun {
 public:
  __device__ __forceinline__ ElementRun(const void* tensor, long long first, Shared shared)
      : global_(reinterpret_cast<unsigned long long>(static_cast<const T*>(tensor) + first)),
        shared_(shared + static_cast<unsigned>(global_ % kVectorBytes)) {}

  // Of the run's first element.
  __device__ __forceinline__ Shared shared() const { return shared_; }

  __device__ __forceinline__ void Load(int count) const {
    const int vectors = VectorsOf(count);
    ForEnds(count, vectors, [&](int i) {
      const T element = LoadOnce(Global() + i);
      StoreSharedAs(Address(i), element);
    });
    for (int first = static_cast<int>(threadIdx.x); first < vectors; first += kAtOnce * static_cast<int>(blockDim.x)) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int vector = first + i * static_cast<int>(blockDim.x);
        if (vector < vectors) words[i] = LoadOnce(reinterpret_cast<const uint4*>(Global() + At(vector)));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int vector = first + i * static_cast<int>(blockDim.x);
        const unsigned four[] = {words[i].x, words[i].y, words[i].z, words[i].w};
        StoreSharedVectorIf(vector < vectors, Address(At(vector)), four);
      }
    }
  }

  __device__ __forceinline__ void Store(int count) const {
    const int vectors = VectorsOf(count);
    ForEnds(count, vectors, [&](int i) { StoreOnce(Global() + i, LoadSharedAs<T>(Address(i))); });
    for (int vector = static_cast<int>(threadIdx.x); vector < vectors; vector += static_cast<int>(blockDim.x)) {
      StoreOnce(reinterpret_cast<uint4*>(Global() + At(vector)), LoadSharedVector(Address(At(vector))));
    }
  }

 private:
  static constexpr unsigned kVectorBytes = 16;
  static constexpr int kElements = kVectorBytes / sizeof(T), kAtOnce = 4;

  __device__ __forceinline__ T* Global() const { return reinterpret_cast<T*>(global_); }
  __device__ __forceinline__ Shared Address(int element) const {
    return shared_ + static_cast<unsigned>(element * static_cast<int>(sizeof(T)));
  }
  // Elements in front of the first vector.
  __device__ __forceinline__ int Head() const { return static_cast<int>((0 - global_) % kVectorBytes / sizeof(T)); }
  __device__ __forceinline__ int VectorsOf(int count) const { return max(count - Head(), 0) / kElements; }
  __device__ __forceinline__ int At(int vector) const { return Head() + vector * kElements; }

  // Calls function(element) for those that no vector has.
  template <class Function>
  __device__ __forceinline__ void ForEnds(int count, int vectors, const Function& function) const {
    const int head = min(Head(), count), thread = static_cast<int>(threadIdx.x);
    const int tail = vectors * kElements + head;
    for (int i = thread; i < head; i += static_cast<int>(blockDim.x)) function(i);
    for (int i = tail + thread; i < count; i += static_cast<int>(blockDim.x)) function(i);
  }

  const unsigned long long global_;  // address of the first element
  const Shared shared_;
};

// Of a multiprocessor: what a thread holds of weights and of X leaves registers for so many.
template <int kSize, int kStride>
constexpr int kDepthwiseBlocks = kSize < 5 && kStride == 1 ? 5
                                 : kSize < 7               ? 4
                                                           : 3;

// kSize: of a square window without dilation, of which at most half lies beyond the map on either side; 0: any window.
template <class T, int kSize, int kStride>
class DepthwiseConv {
 public:
  __device__ __forceinline__ DepthwiseConv(const DepthwiseParams& params, const void* shared)
      : p_(params),
        first_plane_(static_cast<int>(blockIdx.x) * params.block_planes),
        planes_(min(params.block_planes, params.num_planes - first_plane_)),
        first_out_row_(static_cast<int>(blockIdx.y) * params.band_rows),
        out_rows_(min(params.band_rows, params.out_h - first_out_row_)),
        first_row_(max(first_out_row_ * params.stride_h - params.pad_top, 0)),
        rows_(RowsOf(params)),
        zeros_(SharedAddress(shared)),
        in_(params.x, (static_cast<long long>(first_plane_) * params.in_h + first_row_) * params.in_w,
            zeros_ + static_cast<unsigned>(params.in_offset)),
        out_(params.y, (static_cast<long long>(first_plane_) * params.out_h + first_out_row_) * params.out_w,
             zeros_ + static_cast<unsigned>(params.out_offset)) {}

  __device__ __forceinline__ void Run() const {
    LetNextLaunchBegin();
    if constexpr (kSize != 0) StoreZeros();
    WaitForLaunchBefore();
    in_.Load(planes_ * rows_ * p_.in_w);
    __syncthreads();
    const int items = planes_ * p_.strips * p_.strip_items;
    for (int item = static_cast<int>(threadIdx.x); item < items; item += static_cast<int>(blockDim.x)) Compute(item);
    __syncthreads();
    out_.Store(planes_ * out_rows_ * p_.out_w);
  }

 private:
  static constexpr int kRows = kSize == 0 ? 1 : kDepthwiseRows,
                       kColumns = kDepthwiseColumns<sizeof(T) == sizeof(Half), kSize, kStride>;
  static constexpr int kElementBytes = static_cast<int>(sizeof(T));

  // That the block reads of a plane: all of them where there are several, which lie one behind the other.
  __device__ __forceinline__ int RowsOf(const DepthwiseParams& p) const {
    if (p.block_planes > 1) return p.in_h;
    const int last = (first_out_row_ + out_rows_ - 1) * p.stride_h - p.pad_top + (p.kernel_h - 1) * p.dilation_h;
    return max(min(last + 1, p.in_h) - first_row_, 0);
  }

  // A row of them, and what is read on either side of one.
  __device__ __forceinline__ void StoreZeros() const {
    const unsigned none[4] = {};
    for (int at = 16 * static_cast<int>(threadIdx.x); at < p_.in_offset; at += 16 * static_cast<int>(blockDim.x)) {
      StoreSharedVectorIf(1, zeros_ + static_cast<unsigned>(at), none);
    }
  }

  // Of the first output of a thread: `row` counts from the block's first.
  struct Place {
    int plane, row, column;
  };

  __device__ __forceinline__ void Compute(int item) const {
    Place place;
    const int strip = Divide(item, p_.by_strip_items);
    place.column = (item - strip * p_.strip_items) * kColumns;
    place.plane = Divide(strip, p_.by_strips);
    place.row = (strip - place.plane * p_.strips) * kRows;
    const int plane = first_plane_ + place.plane;
    const int channel = plane - Divide(plane, p_.by_channels) * p_.channels;
    const float* weight = p_.weight + channel * (p_.kernel_h * p_.kernel_w);
    Sums sums = {};
    if constexpr (kSize == 0) {
      sums.at[0] = SumAny(place, weight);
    } else {
      Sum(place, weight, sums);
    }
    Finish(place, plane, channel, sums);
  }

  // Rows, one after the other.
  using Sums = Floats<kRows * kColumns>;

  __device__ __forceinline__ void Sum(const Place& place, const float* weight, Sums& sums) const {
    constexpr int kInRows = (kRows - 1) * kStride + kSize, kInColumns = (kColumns - 1) * kStride + kSize;
    float weights[kSize * kSize];
#pragma unroll
    for (int i = 0; i < kSize * kSize; ++i) weights[i] = LoadWritten(weight + i);
    const int first_row = (first_out_row_ + place.row) * kStride - p_.pad_top - first_row_;
    const int first_column = place.column * kStride - p_.pad_left;
    const auto columns = static_cast<unsigned>(first_column * kElementBytes);
    const Shared zeros = zeros_ + kDepthwiseSlackBytes + columns;
    const Shared plane = in_.shared() + static_cast<unsigned>(place.plane * rows_ * p_.in_w * kElementBytes) + columns;
#pragma unroll
    for (int i = 0; i < kInRows; ++i) {
      const int row = first_row + i;
      const Shared from = IsIn(row, rows_) ? plane + static_cast<unsigned>(row * p_.in_w * kElementBytes) : zeros;
      float values[kInColumns];
#pragma unroll
      for (int j = 0; j < kInColumns; ++j) {
        T value = LoadSharedAs<T>(from + static_cast<unsigned>(j * kElementBytes));
        // Others are always there, for an output that is.
        if (j < kSize / 2 && first_column + j < 0) value = 0;
        if (j > (kSize - 1) / 2 && first_column + j >= p_.in_w) value = 0;
        values[j] = ToFloat(value);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int tap_row = i - r * kStride;
        if (tap_row < 0 || tap_row >= kSize) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            sums.at[r * kColumns + c] += weights[tap_row * kSize + j] * values[c * kStride + j];
          }
        }
      }
    }
  }

  static __device__ __forceinline__ bool IsIn(int place, int size) {
    return static_cast<unsigned>(place) < static_cast<unsigned>(size);
  }

  __device__ __forceinline__ float SumAny(const Place& place, const float* weight) const {
    const int first_row = (first_out_row_ + place.row) * p_.stride_h - p_.pad_top - first_row_;
    const int first_column = place.column * p_.stride_w - p_.pad_left;
    const Shared plane = in_.shared() + static_cast<unsigned>(place.plane * rows_ * p_.in_w * kElementBytes);
    float sum = 0;
    for (int i = 0; i < p_.kernel_h; ++i) {
      const int row = first_row + i * p_.dilation_h;
      if (!IsIn(row, rows_)) continue;
      for (int j = 0; j < p_.kernel_w; ++j) {
        const int column = first_column + j * p_.dilation_w;
        if (!IsIn(column, p_.in_w)) continue;
        const Shared at = plane + static_cast<unsigned>((row * p_.in_w + column) * kElementBytes);
        sum += LoadWritten(weight + i * p_.kernel_w + j) * ToFloat(LoadSharedAs<T>(at));
      }
    }
    return sum;
  }

  // Calls function(index of a sum, row, column) for those of a thread's outputs that there are; the latter from its
  // first.
  template <class Function>
  __device__ __forceinline__ void ForOutputs(const Place& place, const Function& function) const {
    const int rows = min(out_rows_ - place.row, kRows), columns = p_.out_w - place.column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (r < rows && (c == 0 || c < columns)) function(r * kColumns + c, r, c);
      }
    }
  }

  __device__ __forceinline__ void Finish(const Place& place, int plane, int channel, Sums& sums) const {
    const Epilogue& e = p_.epilogue;
    const float bias = e.bias != nullptr ? LoadElement(static_cast<const T*>(e.bias) + channel) : 0.0f;
#pragma unroll
    for (float& sum : sums.at) sum += bias;
    if (e.residual != nullptr) {
      const long long row = static_cast<long long>(plane) * p_.out_h + first_out_row_ + place.row;
      const T* residual = static_cast<const T*>(e.residual) + row * p_.out_w + place.column;
      ForOutputs(place, [&](int i, int r, int c) { sums.at[i] += LoadElementOnce(residual + r * p_.out_w + c); });
    }
    sums = ActivateSums<T>(e, sums);
    const int first = (place.plane * out_rows_ + place.row) * p_.out_w + place.column;
    const Shared to = out_.shared() + static_cast<unsigned>(first * kElementBytes);
    ForOutputs(place, [&](int i, int r, int c) {
      const Shared at = to + static_cast<unsigned>((r * p_.out_w + c) * kElementBytes);
      if constexpr (sizeof(T) == sizeof(float)) {
        StoreSharedAs(at, sums.at[i]);
      } else {
        StoreSharedAs(at, ToHalf(sums.at[i]));
      }
    });
  }

  const DepthwiseParams& p_;
  const int first_plane_, planes_;      // of N * C
  const int first_out_row_, out_rows_;  // of each of them
  const int first_row_, rows_;          // likewise, of X
  const Shared zeros_;
  const ElementRun<T> in_, out_;
};

}  // namespace sparseconv::cuda
