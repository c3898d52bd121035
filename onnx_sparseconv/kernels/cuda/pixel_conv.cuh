// Sparse 1x1 convolution of one image whose map is a pixel, on unified CSR: gates (squeeze and excitation),
// classifiers.
//
// A single position leaves nothing that entries could be shared for. So a warp computes a row: its lanes have
// neighbouring entries, and what they sum is added up in the end. All entries that a lane begins with are on their way
// before the launch in front of this one is complete.
//
// Launch: blockDim.x is a multiple of 32; x = blocks of rows, a warp each; it may be smaller.
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

// What no entry asks for is not read, though it would be multiplied by zero: it might be infinite.
template <class T>
__device__ __forceinline__ float SumOf(const PixelEntries& entries, const T* x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPixelEntries; ++i) {
    if (entries.columns[i] != kNoPixelColumn) sum += entries.values[i] * LoadElement(x + entries.columns[i]);
  }
  return sum;
}

template <class T>
__device__ __forceinline__ void ConvolvePixel(const CsrParams& p) {
  LetNextLaunchBegin();
  const int warps = static_cast<int>(blockDim.x / 32), step = static_cast<int>(gridDim.x) * warps;
  const T* x = static_cast<const T*>(p.x);
  bool has_waited = false;
  for (int row = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x / 32); row < p.out_channels;
       row += step) {
    unsigned begin = p.row_begin[row];
    const unsigned end = p.row_begin[row + 1];
    const PixelEntries head = LoadPixelEntries(p, begin, end);
    if (!has_waited) WaitForLaunchBefore();
    has_waited = true;
    float sum = SumOf(head, x);
    while ((begin += 32 * kPixelEntries) < end) sum += SumOf(LoadPixelEntries(p, begin, end), x);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      sum += BitsToFloat(__shfl_xor_sync(0xFFFFFFFFu, FloatToBits(sum), lanes));
    }
    if (threadIdx.x % 32 == 0) StoreOutput<T>(p.epilogue, p.y, row, row, sum);
  }
}

}  // namespace sparseconv::cuda
