// Direct sparse convolution on unified CSR: the kernel for every convolution that no generated one fits.
//
// After Escoin (Chen, 2018) and Pietron & Zurek: nothing is lowered to a matrix. Each thread of a block computes one
// output position of kSubBatch images, so that an entry which was read once serves all of them, in one output channel
// or, where rows are short, in several, one after the other. Entries are staged in shared memory in pieces, and there
// columns are stretched to offsets in the input.
//
// Launch: blockDim.x is a multiple of 32, at most kMaxCsrThreads but for RunBox. Grids smaller than the work are fine
// in y and z. Limit: an image has fewer than 2^32 elements, a kernel at most 2^29 taps. The batch may have any number
// of elements.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

constexpr int kMaxCsrThreads = 256;
constexpr int kCsrPiece = 256;  // entries that are staged at a time

// Quotient and remainder by a number that many divisions share: a few instructions instead of some twenty.
struct Divider {
  unsigned divisor;
  unsigned reciprocal;

  explicit __device__ __forceinline__ Divider(int by)
      : divisor(static_cast<unsigned>(by)), reciprocal(0xFFFFFFFFu / static_cast<unsigned>(by)) {}

  // The estimate is right or one too small, for every dividend.
  __device__ __forceinline__ unsigned Divide(unsigned dividend, unsigned& remainder) const {
    unsigned quotient = static_cast<unsigned>(static_cast<unsigned long long>(dividend) * reciprocal >> 32);
    remainder = dividend - quotient * divisor;
    if (remainder >= divisor) {
      ++quotient;
      remainder -= divisor;
    }
    return quotient;
  }
};

// One staged entry. Offsets and positions are counted modulo 2^32: their sum is right wherever it is inside the image.
struct alignas(8) CsrEntry {
  float value;
  unsigned offset;  // of the tap from the first tap of the group's first channel, in elements
};

// How a position finds out which taps fall outside of the input.
enum class Border {
  kInside,       // all of them are inside
  kBits,         // a bit for every coordinate on every axis: tap (1, 0, 2) of a 3x3x3 kernel is bits 1, 3 + 0, 6 + 2
  kCoordinates,  // kernels whose axes have more than 32 coordinates together: three numbers packed in one word
};

// Bits that numbers below `count` need.
__device__ __forceinline__ int BitsFor(int count) {
  int bits = 0;
  while (bits < 31 && (1 << bits) < count) ++bits;
  return bits;
}

// Where a thread's position begins to read: the input coordinates of tap (0, 0, 0), negative in the padding.
struct CsrPosition {
  int first[3];
  unsigned offset;   // the same as an offset in the image, modulo 2^32
  unsigned outside;  // Border::kBits: coordinates whose taps fall outside
};

template <class T, int kSubBatch>
class CsrConv {
 public:
  explicit __device__ __forceinline__ CsrConv(const CsrParams& params, CsrEntry* entries, unsigned* taps)
      : p_(params),
        entries_(entries),
        taps_(taps),
        bits_{BitsFor(params.kernel_shape[1]), BitsFor(params.kernel_shape[2])} {
    plane_ = Product(p_.in_dims);
    image_ = static_cast<long long>(p_.in_channels) * plane_;
    out_plane_ = Product(p_.out_dims);
    has_bits_ = p_.kernel_shape[0] <= 32 && p_.kernel_shape[1] <= 32 && p_.kernel_shape[2] <= 32 &&
                p_.kernel_shape[0] + p_.kernel_shape[1] + p_.kernel_shape[2] <= 32;
  }

  __device__ __forceinline__ void Run() const {
    LetNextLaunchBegin();
    bool has_waited = false;
    RunPositions(blockIdx.x, has_waited);
  }

  // The outputs of a box, by a block that has waited for the launch in front; row by row, `block_rows` being 1.
  __device__ __forceinline__ void RunBox(const OutputBox& box) const {
    static_assert(kSubBatch == 1);
    bool has_waited = true;
    const long long first_plane = box.first / out_plane_;
    const auto first_position = static_cast<unsigned>(box.first - first_plane * out_plane_);
    const auto image = static_cast<int>(first_plane / p_.out_channels);
    const auto first_row = static_cast<int>(first_plane - static_cast<long long>(image) * p_.out_channels);
    for (int place = 0; place < box.rows * box.columns; place += static_cast<int>(blockDim.x)) {
      const int mine = place + static_cast<int>(threadIdx.x);
      const bool is_active = mine < box.rows * box.columns;
      // Spare threads, as below.
      const int y = is_active ? mine / box.columns : 0, x = is_active ? mine - y * box.columns : 0;
      const unsigned position = first_position + static_cast<unsigned>(y * p_.out_dims[2] + x);
      const CsrPosition start = Locate(position);
      const Border border = BorderOf(start);
      for (int row = box.share; row < box.channels; row += box.shares) {
        SumRows(first_row + row, image, start, border, has_waited, [&](int k, const float (&sums)[kSubBatch]) {
          if (is_active) Store(k, image, position, sums);
        });
      }
    }
  }

 private:
  // Those of the block with this index along x.
  __device__ __forceinline__ void RunPositions(long long block, bool& has_waited) const {
    const long long begin = block * blockDim.x + threadIdx.x;
    const bool is_active = begin < out_plane_;
    // Spare threads compute the last position once more and do not store it: they are needed at the barriers.
    const unsigned position = static_cast<unsigned>(is_active ? begin : out_plane_ - 1);
    const int num_sub_batches = (p_.batch + kSubBatch - 1) / kSubBatch;
    const CsrPosition start = Locate(position);
    const Border border = BorderOf(start);
    const int step = static_cast<int>(gridDim.y) * p_.block_rows;
    for (int row = static_cast<int>(blockIdx.y) * p_.block_rows; row < p_.out_channels; row += step) {
      for (int i = static_cast<int>(blockIdx.z); i < num_sub_batches; i += static_cast<int>(gridDim.z)) {
        SumRows(row, i * kSubBatch, start, border, has_waited, [&](int k, const float (&sums)[kSubBatch]) {
          if (is_active) Store(k, i * kSubBatch, position, sums);
        });
      }
    }
  }

  // Entries at a time: some 8 loads should be under way in each thread.
  static constexpr int kUnroll = 8 / kSubBatch;

  static __device__ __forceinline__ long long Product(const int (&dims)[3]) {
    return static_cast<long long>(dims[0]) * dims[1] * dims[2];
  }

  __device__ __forceinline__ CsrPosition Locate(unsigned position) const {
    const unsigned width = static_cast<unsigned>(p_.out_dims[2]), height = static_cast<unsigned>(p_.out_dims[1]);
    const unsigned row = position / width;
    const int out[3] = {static_cast<int>(row / height), static_cast<int>(row % height),
                        static_cast<int>(position % width)};
    CsrPosition start;
    start.offset = 0;
    start.outside = 0;
    int bit = 0;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      start.first[axis] = out[axis] * p_.strides[axis] - p_.pads_begin[axis];
      start.offset = start.offset * static_cast<unsigned>(p_.in_dims[axis]) + static_cast<unsigned>(start.first[axis]);
      if (has_bits_) {
        for (int tap = 0; tap < p_.kernel_shape[axis]; ++tap, ++bit) {
          if (!IsInside(start, axis, tap)) start.outside |= 1u << bit;
        }
      }
    }
    return start;
  }

  // From the first channel of X to the first one that output channel k reads.
  __device__ __forceinline__ unsigned GroupOffset(int k) const {
    if (p_.group_out_channels == p_.out_channels) return 0;
    return static_cast<unsigned>(k / p_.group_out_channels * p_.group_in_channels * plane_);
  }

  __device__ __forceinline__ bool IsInside(const CsrPosition& start, int axis, int tap) const {
    const int coordinate = start.first[axis] + tap * p_.dilations[axis];
    return static_cast<unsigned>(coordinate) < static_cast<unsigned>(p_.in_dims[axis]);
  }

  // All threads of a warp take the same way through the entries.
  __device__ __forceinline__ Border BorderOf(const CsrPosition& start) const {
    bool is_inside = true;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      is_inside = is_inside && IsInside(start, axis, 0) && IsInside(start, axis, p_.kernel_shape[axis] - 1);
    }
    if (__all_sync(0xFFFFFFFFu, is_inside)) return Border::kInside;
    return has_bits_ ? Border::kBits : Border::kCoordinates;
  }

  // Stages up to kCsrPiece entries from `begin` on.
  __device__ __forceinline__ void Stage(unsigned begin, int count) const {
    const Divider by_taps(p_.kernel_shape[0] * p_.kernel_shape[1] * p_.kernel_shape[2]);
    const Divider by_width(p_.kernel_shape[2]), by_height(p_.kernel_shape[1]);
    const unsigned height = static_cast<unsigned>(p_.in_dims[1]), width = static_cast<unsigned>(p_.in_dims[2]);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      unsigned tap, row, h, w;
      const unsigned channel = by_taps.Divide(p_.columns[begin + i], tap);
      row = by_width.Divide(tap, w);
      const unsigned d = by_height.Divide(row, h);
      const unsigned offset =
          (d * static_cast<unsigned>(p_.dilations[0]) * height + h * static_cast<unsigned>(p_.dilations[1])) * width +
          w * static_cast<unsigned>(p_.dilations[2]);
      entries_[i] = {p_.values[begin + i], channel * static_cast<unsigned>(plane_) + offset};
      taps_[i] = has_bits_
                     ? 1u << d | 1u << (p_.kernel_shape[0] + h) | 1u << (p_.kernel_shape[0] + p_.kernel_shape[1] + w)
                     : ((d << bits_[0] | h) << bits_[1] | w);
    }
  }

  // Calls finish(k, sums) for the block's rows from `row` on. The first time, only the weight is read before the launch
  // in front of this one has been waited for.
  template <class Function>
  __device__ __forceinline__ void SumRows(int row, int first_image, const CsrPosition& start, Border border,
                                          bool& has_waited, const Function& finish) const {
    const T* images[kSubBatch];
    float sums[kSubBatch] = {};
#pragma unroll
    for (int b = 0; b < kSubBatch; ++b) {
      // Images that the batch does not have are the last one once more.
      const int image = first_image + b < p_.batch ? first_image + b : p_.batch - 1;
      images[b] = static_cast<const T*>(p_.x) + image * image_;
    }
    const int end_row = p_.out_channels - row < p_.block_rows ? p_.out_channels : row + p_.block_rows;
    const unsigned end = p_.row_begin[end_row];
    unsigned row_end = p_.row_begin[row + 1];
    for (unsigned begin = p_.row_begin[row]; row < end_row; begin += kCsrPiece) {
      const unsigned piece_end = end - begin < kCsrPiece ? end : begin + kCsrPiece;
      Stage(begin, static_cast<int>(piece_end - begin));
      if (!has_waited) WaitForLaunchBefore();
      has_waited = true;
      __syncthreads();
      unsigned next = begin;
      while (true) {
        const unsigned until = row_end < piece_end ? row_end : piece_end;
        const unsigned next_end = row + 1 < end_row ? p_.row_begin[row + 2] : 0;
        Accumulate(border, static_cast<int>(next - begin), static_cast<int>(until - begin), start,
                   start.offset + GroupOffset(row), images, sums);
        if (row_end > piece_end) break;  // the rest of the row is in the next piece
        finish(row, sums);
#pragma unroll
        for (int b = 0; b < kSubBatch; ++b) sums[b] = 0.0f;
        next = row_end;
        row_end = next_end;
        if (++row == end_row) break;
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void Accumulate(Border border, int begin, int end, const CsrPosition& start,
                                             unsigned first_offset, const T* const (&images)[kSubBatch],
                                             float (&sums)[kSubBatch]) const {
    switch (border) {
      case Border::kInside:
        return Accumulate<Border::kInside>(begin, end, start, first_offset, images, sums);
      case Border::kBits:
        return Accumulate<Border::kBits>(begin, end, start, first_offset, images, sums);
      case Border::kCoordinates:
        return Accumulate<Border::kCoordinates>(begin, end, start, first_offset, images, sums);
    }
  }

  template <Border kBorder>
  __device__ __forceinline__ void Accumulate(int begin, int end, const CsrPosition& start, unsigned first_offset,
                                             const T* const (&images)[kSubBatch], float (&sums)[kSubBatch]) const {
    constexpr int kCount = kBorder == Border::kCoordinates ? 1 : kUnroll;
    constexpr int kRest = kCount > 1 ? kCount / 2 : 1;
#pragma unroll 1
    for (; begin + kCount <= end; begin += kCount) {
      AccumulateBatch<kBorder, kCount>(begin, kCount, start, first_offset, images, sums);
    }
#pragma unroll 1
    for (; begin < end; begin += kRest) {
      AccumulateBatch<kBorder, kRest>(begin, end - begin, start, first_offset, images, sums);
    }
  }

  // The hot loop's body, of kCount entries or the `count` that there are: all loads, then all products. A tap outside
  // of the input reads a zero, which is multiplied like any other value.
  template <Border kBorder, int kCount>
  __device__ __forceinline__ void AccumulateBatch(int begin, int count, const CsrPosition& start, unsigned first_offset,
                                                  const T* const (&images)[kSubBatch], float (&sums)[kSubBatch]) const {
    float values[kCount], x[kCount][kSubBatch];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool exists = i < count;
      const CsrEntry entry = exists ? entries_[begin + i] : CsrEntry{0.0f, 0};
      const bool is_inside = exists && (kBorder == Border::kInside || IsTapInside<kBorder>(start, taps_[begin + i]));
      values[i] = entry.value;
#pragma unroll
      for (int b = 0; b < kSubBatch; ++b) {
        x[i][b] = is_inside ? LoadElement(images[b] + (first_offset + entry.offset)) : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int b = 0; b < kSubBatch; ++b) sums[b] += values[i] * x[i][b];
    }
  }

  template <Border kBorder>
  __device__ __forceinline__ bool IsTapInside(const CsrPosition& start, unsigned tap) const {
    if constexpr (kBorder == Border::kBits) return (start.outside & tap) == 0;
    const unsigned w = tap & ((1u << bits_[1]) - 1u), row = tap >> bits_[1];
    const unsigned h = row & ((1u << bits_[0]) - 1u), d = row >> bits_[0];
    return IsInside(start, 0, static_cast<int>(d)) && IsInside(start, 1, static_cast<int>(h)) &&
           IsInside(start, 2, static_cast<int>(w));
  }

  __device__ __forceinline__ void Store(int k, int first_image, unsigned position,
                                        const float (&sums)[kSubBatch]) const {
#pragma unroll
    for (int b = 0; b < kSubBatch; ++b) {
      if (first_image + b >= p_.batch) continue;
      const long long plane = static_cast<long long>(first_image + b) * p_.out_channels + k;
      StoreOutput<T>(p_.epilogue, p_.y, plane * out_plane_ + position, k, sums[b]);
    }
  }

  const CsrParams& p_;
  CsrEntry* const entries_;  // [kCsrPiece], shared
  unsigned* const taps_;     // [kCsrPiece], shared
  const int bits_[2];
  long long plane_;      // elements of one channel of one image
  long long image_;      // elements of one image
  long long out_plane_;  // outputs of one channel of one image
  bool has_bits_;
};

}  // namespace sparseconv::cuda
