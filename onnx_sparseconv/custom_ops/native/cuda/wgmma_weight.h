// A weight in the form that the warpgroup kernels read (kernels/cuda/warpgroups.cuh): the channels of a block of rows
// in an order in which hardly a row has more than two non-zeros in four neighbours, for any tap.
//
// A block of `row_tiles` * 64 output channels of one group is a sequence of chunks of 32 places. A place holds an input
// channel, or none; a channel may have several, for one place takes what fits beside its neighbours, and another one
// what is left. Where X is concatenated of several sources, all channels of a chunk are of one of them. Each tap that
// the places of a chunk have entries of is a step: with 1x1, one, so all chunks are as long. Where there are many, they
// are shared out among several chunks of the same places. A chunk is
//
//   header   [header_bytes]             32-bit words: the number of steps, then each step's tap
//   values   [steps][row_tiles][2048]   as wgmma_operand.h has them
//   places   [steps][row_tiles][256]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "wgmma_operand.h"

namespace sparseconv::cuda {

struct WgmmaForm {
  int row_tiles = 1;         // of a block, 1 or 2: those have one order of channels
  int blocks_per_group = 1;  // the last one may have fewer rows
  int header_bytes = 128;
};

struct WgmmaWeight {
  WgmmaForm form;
  std::vector<uint8_t> chunks;
  std::vector<uint32_t> chunk_begins;  // [chunks + 1], in units of 16 bytes
  std::vector<uint32_t> block_begins;  // [group * blocks_per_group + 1], first chunks
  std::vector<int32_t> channels;       // [chunks][kWgmmaChannels], of the group
  std::vector<uint8_t> taps;           // [chunks][kMaxWgmmaTaps], of the steps, as in the headers
  int64_t num_steps = 0;               // of all blocks, times their row tiles
  int max_chunk_bytes = 0;

  // Of a chunk, in each row tile.
  uint32_t StepsOf(size_t chunk) const;
};

// 1x1, and 1x1x1.
bool IsPointwise(const ConvGeometry& geometry);

// Without strides and padding: a pointwise convolution then reads all positions in their order, in 3-D too.
bool IsPlain(const ConvGeometry& geometry);

// Whether a kernel can run the node, whose groups have more than a few channels.
bool HasWgmmaForm(const SparseWeight& weight, const ConvGeometry& geometry);

WgmmaForm ChooseWgmmaForm(const ConvGeometry& geometry);

// `source_begins` are those of SparseConvAttributes.
WgmmaWeight PackWgmmaWeight(const SparseWeight& weight, const ConvGeometry& geometry, const WgmmaForm& form,
                            const std::vector<int64_t>& source_begins);

}  // namespace sparseconv::cuda
