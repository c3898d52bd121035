// A weight in the form that the flat kernels read (kernels/cuda/flat_conv.cuh): all rows of a group have one order of
// its input channels, in which few of them have more than two non-zeros in four neighbours, for any tap. Where there is
// no such order, channels keep theirs, and the form is dense.
//
// 64 output channels of a group, a row tile, are a sequence of chunks of 32 places, or dense, of 16. Where the
// convolution has strides, taps that read other rows or columns between two that are one stride apart are in other
// chunks. A chunk is
//
//   header   [header_bytes]           32-bit words: the number of steps, and of pairs (from bit 16 on); then the tap of
//                                     each step; then of each pair, the first octet of the chunk (bits 0 to 7), a tap
//                                     (8 to 15), the second octet (16 to 23) and a tap
//   values   [steps + pairs][2048]    as wgmma_operand.h has them
//   places   [steps][256]             not where it is dense
//
// Of each tap there is a step with the first two entries of all neighbours; dense, one with all. Where a row has more
// entries, these are strays: few of the octets have any for a tap. A pair multiplies two octets, each by a tap, by the
// strays of all rows, as a dense step does; what it reads for the second octet is behind what it does for the first.
// Steps, pairs and chunks without entries are left out. Where a chunk has many steps, they are shared out among several
// of the same places.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../../../kernels/cuda/flat_params.h"
#include "../attributes.h"

namespace sparseconv::cuda {

struct FlatForm {
  FlatProducts products = FlatProducts::kSparse;
  int row_tiles = 0;  // of all groups
  int row_tiles_per_group = 0;
  int num_octets = 0;  // of flat X, of all groups
  int num_places = 0;  // between strides, each of which has so many octets
  int header_bytes = 0;
  int max_chunk_bytes = 0;
  int64_t num_chunks = 0, num_steps = 0, num_pairs = 0;  // of all row tiles
};

struct FlatWeight {
  FlatForm form;
  std::vector<uint8_t> chunks;
  std::vector<uint32_t> chunk_begins;  // [chunks + 1], in units of 16 bytes
  std::vector<uint32_t> tile_begins;   // [row_tiles + 1], first chunks
  std::vector<int32_t> octets;         // [chunks], the first of each; those of a place follow those of the one before
  std::vector<int32_t> channels;       // [octets][8], of X; -1 at a place without one
  std::vector<int32_t> places;         // [num_places], the row and column between strides: row << 16 | column
};

// Whether the kernel may run the node: windows of many channels. The weight must have the form of the other kernels of
// warpgroups, too (HasWgmmaForm).
bool HasFlatForm(const ConvGeometry& geometry);

// Nothing where all orders leave many strays, with too few zeros, and with its zeros it is too large.
std::optional<FlatWeight> PackFlatWeight(const SparseWeight& weight, const ConvGeometry& geometry);

}  // namespace sparseconv::cuda
