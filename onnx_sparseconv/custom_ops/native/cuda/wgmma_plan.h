// How the warpgroup kernel (kernels/cuda/wgmma_conv.cuh) is launched for a call.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "wgmma_weight.h"

namespace sparseconv::cuda {

// Its code is for this architecture alone, and for drivers from CUDA 12.2 on.
constexpr int kWgmmaArchitecture = 90;
constexpr int kWgmmaDriver = 12020;
// Positions of a warpgroup that there are kernels for.
constexpr int kWgmmaPositions[] = {24, 28, 30, 32};

// What of the packed weight and of the call decides about the launch.
struct WgmmaFacts {
  WgmmaForm form;
  int64_t num_entries = 0;  // of the weight
  int64_t num_steps = 0;    // of all blocks, times their row tiles
  int64_t num_chunks = 0;   // of all blocks
  int max_chunk_bytes = 0;
  int x_columns = 4;               // X begins at a multiple of so many halves: 4, 2 or 1
  std::optional<bool> interleave;  // X, before; no value leaves the choice to the plan
};

WgmmaFacts FactsOf(const WgmmaWeight& packed, size_t num_entries);

// What interleaves X before.
struct InterleaveLaunch {
  InterleaveParams params{};  // all but the pointers
  size_t bytes = 0;           // of what it writes
  LaunchShape shape;
};

struct WgmmaLaunch {
  WgmmaParams params{};  // all but the pointers, and `is_y_paired`, which depends on one
  int positions = 0;     // of a warpgroup
  LaunchShape shape;
  std::optional<InterleaveLaunch> interleave;
};

// Whether the kernel is faster than the others that need no image, about: for windows and enough images.
bool IsWorthWarpgroups(const ConvGeometry& geometry, const WgmmaFacts& facts, int64_t batch);

// Nothing where no tile of outputs fits shared memory, or X is empty. `batch` is at least 1.
std::optional<WgmmaLaunch> ChooseWgmmaLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WgmmaFacts& facts);

}  // namespace sparseconv::cuda
