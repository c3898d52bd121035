// Computes outputs of a float convolution once more, as the CSR kernel does, where halves could not hold what they
// read.
#pragma once

#include "csr_conv.cuh"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "params.h"
#include "sources.cuh"

namespace sparseconv::cuda {

// The same outputs where X has sources, of a pointwise convolution with neither strides nor padding: an output a
// thread, from memory. Slow, and short.
__device__ __noinline__ void RecomputeFromSources(const RecomputeParams& p, const OutputBox& box) {
  const CsrParams& csr = p.csr;
  const long long plane = static_cast<long long>(csr.out_dims[0]) * csr.out_dims[1] * csr.out_dims[2];
  const long long first_plane = box.first / plane;
  const int image = static_cast<int>(first_plane / csr.out_channels);
  const int first_row = static_cast<int>(first_plane - static_cast<long long>(image) * csr.out_channels);
  for (int place = static_cast<int>(threadIdx.x); place < box.rows * box.columns;
       place += static_cast<int>(blockDim.x)) {
    const int y = place / box.columns;
    const long long position =
        box.first - first_plane * plane + static_cast<long long>(y) * csr.out_dims[2] + (place - y * box.columns);
    for (int row = first_row + box.share; row < first_row + box.channels; row += box.shares) {
      float sum = 0.0f;
      for (unsigned entry = csr.row_begin[row]; entry < csr.row_begin[row + 1]; ++entry) {
        const auto channel = static_cast<int>(csr.columns[entry]);
        const int source = FindSourceNumber(p.sources, channel);
        const int begin = p.sources.begins[source], channels = p.sources.begins[source + 1] - begin;
        const long long from = static_cast<long long>(image) * channels + channel - begin;
        sum +=
            csr.values[entry] * LoadElement(static_cast<const float*>(p.sources.x[source]) + from * plane + position);
      }
      StoreOutput<float>(csr.epilogue, csr.y,
                         (static_cast<long long>(image) * csr.out_channels + row) * plane + position, row, sum);
    }
  }
}

// To be called by all threads of a block, at its end, once for each box of its outputs: all it did is complete, and its
// shared memory, kRecomputeBytes at least, has served. A function that is called, since no call should come to it.
__device__ __noinline__ void Recompute(const RecomputeParams& p, OutputBox box, void* shared) {
  WaitForLaunchBefore();
  if (threadIdx.x == 0) *p.happened = 1;
  if (p.sources.count > 0) return RecomputeFromSources(p, box);
  auto* entries = static_cast<CsrEntry*>(shared);
  CsrConv<float, 1>(p.csr, entries, reinterpret_cast<unsigned*>(entries + kCsrPiece)).RunBox(box);
}
static_assert(kCsrPiece * (sizeof(CsrEntry) + sizeof(unsigned)) <= kRecomputeBytes);

// What the blocks of launches before saw of X, each of the threads that call this a part of it: `index` of `count`.
__device__ __forceinline__ unsigned SeenBefore(const RecomputeParams& p, int index, int count) {
  unsigned seen = 0;
#pragma unroll 8
  for (; index < p.num_seen; index += count) seen |= LoadWritten(p.seen + index);
  return seen;
}

}  // namespace sparseconv::cuda
