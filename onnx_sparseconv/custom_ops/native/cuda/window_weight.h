// A weight in the form that the kernels for windows of few channels read (octet_conv.cuh and ring_conv.cuh in
// kernels/cuda): for each row tile, 64 output channels, an order of all input channels in which few of its rows have
// more than two non-zeros in four neighbours, for any tap.
//
// A row tile is a sequence of steps. A sparse one multiplies one tap of 32 places by two of four columns of its rows, a
// dense one a tap of 16 places by all of them, in less time. So where rows have third or fourth entries, 32 places have
// dense steps. Steps without entries are left out, but there is one at least. A row tile is
//
//   header   [header_bytes]       32-bit words: the number of sparse steps, and of dense ones (from bit 16 on), which
//                                 are the first; then for each the row that it reads (bits 24 to 31), the column (16
//                                 to 23), and its first place
//   dense    [dense_bytes]        values of the dense steps, [2048] each, as wgmma_operand.h has them
//   values   [sparse steps][2048]
//   places   [sparse steps][256]
#pragma once

#include <cstdint>
#include <vector>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"

namespace sparseconv::cuda {

// Up to so many channels are few.
constexpr int64_t kMaxFewChannels = 128;

struct WindowForm {
  int places = 0;     // of input channels, a multiple of 32
  int row_tiles = 0;  // of 64 output channels; the last one may have fewer
  int max_steps = 0;  // of a row tile; the first that has as many has `dense_steps` among them
  int dense_steps = 0;
  int header_bytes = 0, dense_bytes = 0;
  int tile_bytes = 0;  // of the longest row tile; all take as much
};

struct WindowWeight {
  WindowForm form;
  std::vector<uint8_t> tiles;     // [row_tiles][tile_bytes]
  std::vector<int32_t> channels;  // [row_tiles][places], -1 at a place without one
};

// Whether these kernels may run the node: windows of one group, of few channels, or of more of them and one row, whose
// steps, one of each tap and 32 channels, fit the shared memory of a block. The weight must have the form of the other
// kernels of warpgroups, too (HasWgmmaForm).
bool HasWindowForm(const ConvGeometry& geometry, int64_t max_shared_bytes);

WindowWeight PackWindowWeight(const SparseWeight& weight, const ConvGeometry& geometry);

}  // namespace sparseconv::cuda
