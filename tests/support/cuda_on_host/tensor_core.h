// What the tensor core makes of the registers of a warp's 32 lanes, written down by the tables of the PTX manual.
#pragma once

#include <cstdint>

#include "half.h"

namespace cuda_on_host {

struct SparseOperands {
  uint32_t a[4], b[4], metadata;
  float sums[4];
};

// Where a row's stored columns 2 * quad and 2 * quad + 1 stand in the quad: two bits each, the first one lower.
inline unsigned PlacesOf(uint32_t metadata, unsigned nibble) { return metadata >> (4 * nibble) & 0xFu; }

// mma.sp.m16n8k32 of halves: results [16][8] = sums + a [16][32, two of four stored] * b [32][8], summed in float.
inline void MultiplySparse(const SparseOperands* lanes, unsigned selector, float (*results)[8]) {
  using Row = float __attribute__((vector_size(32)));
  const auto half = [](uint32_t pair, unsigned i) {
    return sparseconv::HalfToFloat(static_cast<uint16_t>(pair >> (16 * i)));
  };
  Row b[32];
  for (unsigned k = 0; k < 32; ++k) {
    for (unsigned n = 0; n < 8; ++n) b[k][n] = half(lanes[4 * n + k % 8 / 2].b[k / 8], k % 2);
  }
  for (unsigned row = 0; row < 16; ++row) {
    const SparseOperands* four = lanes + row % 8 * 4;  // the lanes that hold this row
    const unsigned lower = row / 8;
    Row sums;
    for (unsigned n = 0; n < 8; ++n) sums[n] = four[n / 2].sums[2 * lower + n % 2];
    for (unsigned quad = 0; quad < 8; ++quad) {
      const uint32_t pair = four[quad % 4].a[lower + 2 * (quad / 4)];
      const unsigned places = PlacesOf(four[2 * selector + quad / 4].metadata, 4 * lower + quad % 4);
      sums += half(pair, 0) * b[4 * quad + (places & 3u)];
      sums += half(pair, 1) * b[4 * quad + (places >> 2)];
    }
    for (unsigned n = 0; n < 8; ++n) results[row][n] = sums[n];
  }
}

}  // namespace cuda_on_host
