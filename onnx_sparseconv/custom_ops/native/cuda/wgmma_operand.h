// The weight of one step as wgmma.mma_async.sp.m64nNk32 reads it: 64 rows of 32 columns, two of four of them; or as
// wgmma.mma_async.m64nNk16 does: all of 16 columns, without places.
//
//   values   [2048]  halves: operand A, as [8 rows of matrices][2 columns of them][8][8]
//   places   [256]   32-bit words: its metadata, two words for rows r and r + 8 of each 16 rows
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sparse_pair.h"

namespace sparseconv::cuda {

constexpr int kWgmmaTileRows = 64;
constexpr size_t kWgmmaValueBytes = 2048, kWgmmaPlaceBytes = 256;
constexpr int kWgmmaValueColumns = 16;  // that are stored
// A weight with its zeros may take so many bytes beside its other forms; larger ones are left to kernels that read
// these.
constexpr int64_t kMaxDenseWeightBytes = int64_t{64} << 20;

// Of a stored value, in the values.
inline size_t WgmmaValueAt(int row, int column) {
  constexpr int kMatrixRows = 8;
  constexpr size_t kMatrixBytes = 128;
  const auto matrix = static_cast<size_t>(row / kMatrixRows * 2 + column / 8);
  return matrix * kMatrixBytes + static_cast<size_t>(row % kMatrixRows * 8 + column % 8) * 2;
}

// `pair_of(row, quad)` is the SparsePair of four neighbouring columns of a row.
template <class PairOf>
void WriteWgmmaOperand(const PairOf& pair_of, uint8_t* values, uint8_t* places) {
  constexpr int kQuads = 8;
  uint32_t words[kWgmmaPlaceBytes / sizeof(uint32_t)] = {};
  for (int row = 0; row < kWgmmaTileRows; ++row) {
    for (int quad = 0; quad < kQuads; ++quad) {
      const SparsePair pair = pair_of(row, quad);
      std::memcpy(values + WgmmaValueAt(row, 2 * quad), pair.values, sizeof(pair.values));
      const auto word = static_cast<size_t>(row / 16 * 16 + row % 8 * 2 + quad / 4);
      words[word] |= pair.places << (row % 16 / 8 * 16 + quad % 4 * 4);
    }
  }
  std::memcpy(places, words, sizeof(words));
}

// The same of 32 places, of the entries that are the first two of their four neighbours (level 0), or of the others
// (level 1). `channels` are the channel of each place, or -1; `has_entry(channel, row)` and `value(channel, row)` are
// of the weight. Returns whether there are any.
template <class HasEntry, class Value>
bool WriteWgmmaLevel(const int* channels, int level, const HasEntry& has_entry, const Value& value, uint8_t* values,
                     uint8_t* places) {
  bool is_empty = true;
  WriteWgmmaOperand(
      [&](int row, int quad) {
        const int* const of = channels + quad * kQuadColumns;
        bool has[kQuadColumns] = {};
        int found = 0;
        for (int i = 0; i < kQuadColumns; ++i) {
          if (of[i] >= 0 && has_entry(of[i], row)) has[i] = found++ / 2 == level;
          is_empty = is_empty && !has[i];
        }
        return MakeSparsePair([&](int i) { return has[i]; }, [&](int i) { return value(of[i], row); });
      },
      values, places);
  return !is_empty;
}

// The same of all entries of 16 places, without metadata.
template <class HasEntry, class Value>
bool WriteDenseWgmma(const int* channels, const HasEntry& has_entry, const Value& value, uint8_t* values) {
  bool is_empty = true;
  std::memset(values, 0, kWgmmaValueBytes);
  for (int column = 0; column < kWgmmaValueColumns; ++column) {
    const int channel = channels[column];
    for (int row = 0; channel >= 0 && row < kWgmmaTileRows; ++row) {
      if (!has_entry(channel, row)) continue;
      const uint16_t half = value(channel, row);
      std::memcpy(values + WgmmaValueAt(row, column), &half, sizeof(half));
      is_empty = false;
    }
  }
  return !is_empty;
}

}  // namespace sparseconv::cuda
