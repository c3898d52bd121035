// Copies the input of one chunk into cells (see plan.h): padding filled in, phases apart, float16 made float.
#pragma once

#include <cstdint>

#include "plan.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {

// Packs channels [channel_begin, channel_end) of an image.
//   image: channel 0 of the image, float or float16 bits.
//   cells: cells of channel 0; channels are plan.channel_cells apart.
void PackChunk(const Plan& plan, const ConvGeometry& conv, const Chunk& chunk, const TileKernels& kernels, bool is_half,
               const void* image, int64_t channel_begin, int64_t channel_end, float* cells);

}  // namespace sparseconv::cpu
