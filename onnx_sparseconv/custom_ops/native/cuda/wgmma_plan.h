// How the warpgroup kernel (kernels/cuda/wgmma_conv.cuh) is launched for a call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "wgmma_weight.h"

namespace sparseconv::cuda {

// Its code is for this architecture alone.
constexpr int kWgmmaArchitecture = 90;
// Positions of a warpgroup that there are kernels for.
constexpr int kWgmmaPositions[] = {16, 24, 28, 30, kMaxWgmmaPositions};
// Bytes that a thread stores together.
constexpr int64_t kMaxStoredBytes = 16;
// That multiply, of a block.
constexpr int64_t kWarpgroups = kWgmmaProductThreads / 128;
// Of a stage: one barrier for when it is filled, one for when it is free.
constexpr int64_t kBarrierBytes = 16;

// What of the packed weight and of the call decides about the launch.
struct WgmmaFacts {
  WgmmaForm form;
  int64_t element_bytes = 2;  // of X and Y: 4 for floats, which are rounded to halves before
  int64_t num_entries = 0;    // of the weight
  int64_t num_steps = 0;      // of all blocks, times their row tiles
  int64_t num_chunks = 0;     // of all blocks
  int max_chunk_bytes = 0;
  int64_t max_block_chunks = 0;
  std::vector<uint32_t> block_begins;  // as of WgmmaWeight
  std::vector<int64_t> chunk_steps;    // of each chunk
};

WgmmaFacts FactsOf(const WgmmaWeight& packed, size_t num_entries, size_t element_bytes);

// Elements that a thread stores together, at most.
int MaxColumns(const WgmmaFacts& facts);

// Tiles of outputs and their stages, as both kernels of warpgroups have them; see TileParams and WarpgroupParams.
struct WarpgroupTiles {
  int64_t tiles_x, tiles_y;
  int64_t tile_h, tile_w;
  int64_t all;
  int64_t stages, stage_bytes, input_bytes, table_bytes;
};

// All that follows from these and from the call's sizes. `batch` and `sizes` as the tile sees them.
void FillTiles(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const WgmmaForm& form,
               const WarpgroupTiles& tiles, WarpgroupParams* params);

// What interleaves X before.
struct InterleaveLaunch {
  InterleaveParams params{};  // all but the pointers
  size_t bytes = 0;           // of what it writes, but what it sees of X
  LaunchShape shape;
};

struct WgmmaLaunch {
  WgmmaParams params{};  // all but the pointers; where these are not aligned, fewer `out_columns`
  int positions = 0;     // of a warpgroup
  double cycles = 0.0;   // of a multiprocessor, about
  LaunchShape shape;
  InterleaveLaunch interleave;
};

// Parts of a tile's chunks that blocks share, where there are tiles for a few multiprocessors only, and the cycles of
// a multiprocessor that it takes, about.
struct Sharing {
  int64_t parts = 1;
  double cycles = 0.0;
};

// `of_chunks` and `of_tile` are the cycles of all of a tile's chunks, and of what comes with a tile; `num_bytes` are
// those of the whole output.
Sharing ShareChunks(int64_t tiles, double chunks, double of_chunks, double of_tile, int64_t num_bytes,
                    const DeviceFacts& device);

// To read and write so many bytes in a launch before or behind the kernel.
double MemoryCycles(double bytes, const DeviceFacts& device);

// From a part of sums of `num_values` outputs to the next one.
int64_t PartValues(int64_t num_values);

// Whether a kernel of warpgroups may ever be faster than the CSR kernel, about: not with next to no weights.
bool IsWorthWarpgroups(const WgmmaFacts& facts, const ConvGeometry& geometry);

// Nothing where no tile of outputs fits shared memory, X is empty, or X or Y is too large. `batch` is at least 1.
std::optional<WgmmaLaunch> ChooseWgmmaLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WgmmaFacts& facts);

}  // namespace sparseconv::cuda
