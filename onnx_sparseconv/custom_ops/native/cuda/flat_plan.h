// How the flat kernel (kernels/cuda/flat_conv.cuh), and what makes X flat for it, are launched for a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/flat_params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "flat_weight.h"

namespace sparseconv::cuda {

// Eights of pixels of a warpgroup that there are kernels for.
constexpr int kFlatBlocks[] = {16, 24, 28, 30, kMaxFlatBlocks};

struct FlattenLaunch {
  FlattenParams params{};  // all but the pointers
  size_t bytes = 0;        // of flat X
  LaunchShape shape;
};

struct FlatLaunch {
  FlatParams params{};  // all but the pointers; where these are not aligned, a smaller `out_shift`
  int blocks = 0;       // of kFlatBlocks
  double cycles = 0.0;  // of a multiprocessor, about, with those of the launch before
  LaunchShape shape;
  FlattenLaunch flatten;
  // Instead, where X begins at a multiple of 16 bytes, of all chunks of rows but those that `params.rest` has.
  std::optional<FlattenLaunch> flatten_rows;
};

// Nothing where a tile's pixels do not fit shared memory, X is empty, or the tensors are too large. `batch` is at least
// 1; `element_bytes` are of X and Y, 4 for floats.
std::optional<FlatLaunch> ChooseFlatLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, const FlatForm& weight, int64_t element_bytes);

}  // namespace sparseconv::cuda
