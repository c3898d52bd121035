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
constexpr int kWgmmaPositions[] = {24, 28, 30, kMaxWgmmaPositions};
// Halves that a thread stores together.
constexpr int kMaxWgmmaColumns = 8;

// What of the packed weight and of the call decides about the launch.
struct WgmmaFacts {
  WgmmaForm form;
  int64_t num_entries = 0;  // of the weight
  int64_t num_steps = 0;    // of all blocks, times their row tiles
  int64_t num_chunks = 0;   // of all blocks
  int max_chunk_bytes = 0;
  int64_t max_block_chunks = 0;
};

WgmmaFacts FactsOf(const WgmmaWeight& packed, size_t num_entries);

// What interleaves X before.
struct InterleaveLaunch {
  InterleaveParams params{};  // all but the pointers
  size_t bytes = 0;           // of what it writes
  LaunchShape shape;
};

struct WgmmaLaunch {
  WgmmaParams params{};         // all but the pointers; where these are not aligned, fewer `out_columns`
  int positions = 0;            // of a warpgroup
  double used_positions = 0.0;  // share of them that has outputs
  LaunchShape shape;
  InterleaveLaunch interleave;
};

// Whether the kernel is faster than the others that need no image, about: for enough images.
bool IsWorthWarpgroups(const WgmmaFacts& facts, int64_t batch);

// Whether it has enough tiles, and these enough outputs. The tensor-core kernel has smaller ones.
bool FillsWarpgroups(const WgmmaLaunch& launch, const DeviceFacts& device);

// Nothing where no tile of outputs fits shared memory, X is empty, or X or Y is too large. `batch` is at least 1.
std::optional<WgmmaLaunch> ChooseWgmmaLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WgmmaFacts& facts);

}  // namespace sparseconv::cuda
