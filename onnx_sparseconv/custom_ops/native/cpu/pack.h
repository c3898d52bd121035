// Copies the input of one chunk into cells (see plan.h): padding filled in, phases apart, float16 made float.
#pragma once

#include <cstdint>

#include "plan.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {

// Channels of an image that lie side by side, float or float16 bits.
struct ImageChannels {
  const void* data;  // of channel `begin`
  int64_t begin;
  int64_t end;
};

// Packs channels of an image. Cells are of channel 0; channels are plan.channel_cells apart.
void PackChunk(const Plan& plan, const ConvGeometry& conv, const Chunk& chunk, const TileKernels& kernels, bool is_half,
               const ImageChannels& channels, float* cells);

}  // namespace sparseconv::cpu
