// Sparse 1x1 convolution of maps of one pixel, on unified CSR: what gates (squeeze and excitation) and classifiers do.
//
// With a single position there is nothing that entries could be shared for, but images. So a warp computes a row for
// kImages of them: its lanes have neighbouring entries, and what they sum is added up in the end. All entries that a
// lane begins with are on their way before the launch in front of this one is complete.
//
// Launch: blockDim.x is a multiple of 32; x = blocks of rows, a warp each, y = blocks of kImages images, both may be
// smaller.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

constexpr int kMaxPixelThreads = 128;
constexpr int kPixelEntries = 4;  // of a lane, on their way together
constexpr unsigned kNoPixelColumn = 0xFFFFFFFFu;

struct PixelEntries {
  float values[kPixelEntries];
  unsigned columns[kPixelEntries];
};

// The lane's of a row's from `begin` on; of those behind its end there is no column.
__device__ __forceinline__ PixelEntries LoadPixelEntries(const CsrParams& p, unsigned begin, unsigned end) {
  PixelEntries entries;
#pragma unroll
  for (unsigned i = 0; i < kPixelEntries; ++i) {
    const unsigned at = begin + 32 * i + threadIdx.x % 32;
    const bool exists = at < end;
    entries.values[i] = exists ? p.values[at] : 0.0f;
    entries.columns[i] = exists ? p.columns[at] : kNoPixelColumn;
  }
  return entries;
}

template <class T, int kImages>
__device__ __forceinline__ void ConvolvePixels(const CsrParams& p) {
  LetNextLaunchBegin();
  const int warps = static_cast<int>(blockDim.x / 32), step = static_cast<int>(gridDim.x) * warps;
  bool has_waited = false;
  for (int row = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x / 32); row < p.out_channels;
       row += step) {
    const unsigned first = p.row_begin[row], end = p.row_begin[row + 1];
    const PixelEntries head = LoadPixelEntries(p, first, end);
    if (!has_waited) WaitForLaunchBefore();
    has_waited = true;
    for (long long image = static_cast<long long>(blockIdx.y) * kImages; image < p.batch;
         image += static_cast<long long>(gridDim.y) * kImages) {
      const T* x = static_cast<const T*>(p.x) + image * p.in_channels;
      const int images = p.batch - image < kImages ? static_cast<int>(p.batch - image) : kImages;
      float sums[kImages] = {};
      const auto add = [&](const PixelEntries& entries) {
#pragma unroll
        for (int i = 0; i < kPixelEntries; ++i) {
          // What no entry asks for is not read, though it would be multiplied by zero: it might be infinite.
          const bool exists = entries.columns[i] != kNoPixelColumn;
#pragma unroll
          for (int n = 0; n < kImages; ++n) {
            const bool is_read = exists && n < images;
            const float value =
                is_read ? LoadElement(x + static_cast<long long>(n) * p.in_channels + entries.columns[i]) : 0.0f;
            sums[n] += entries.values[i] * value;
          }
        }
      };
      add(head);
      for (unsigned begin = first + 32 * kPixelEntries; begin < end; begin += 32 * kPixelEntries) {
        add(LoadPixelEntries(p, begin, end));
      }
#pragma unroll
      for (int n = 0; n < kImages; ++n) {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          sums[n] += BitsToFloat(__shfl_xor_sync(0xFFFFFFFFu, FloatToBits(sums[n]), lanes));
        }
        if (n < images && static_cast<int>(threadIdx.x % 32) == n) {
          StoreOutput<T>(p.epilogue, p.y, (image + n) * p.out_channels + row, row, sums[n]);
        }
      }
    }
  }
}

}  // namespace sparseconv::cuda
