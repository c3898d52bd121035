// How the tensor-core kernel is launched for one input size: a pure function of the node, of its weight's form and of
// facts. params.h says what the fields mean.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "tensor_launch.h"
#include "tensor_weight.h"

namespace sparseconv::cuda {

constexpr int kMinTensorArchitecture = 80;

// What of the packed weight and of the call decides about the launch.
struct TensorFacts {
  TensorForm form;
  int64_t num_steps = 0;      // of all tiles and chunks
  int max_steps = 0;          // of a tile in a chunk
  int x_columns = 4;          // X begins at a multiple of so many elements: 4, 2 or 1
  int64_t element_bytes = 2;  // of X and Y
};

struct TensorLaunch {
  TensorParams params{};  // all but the pointers, and `is_y_paired`, which depends on one, with FillStores
  int positions = 0;      // of a warp
  double cycles = 0.0;    // of a multiprocessor, about
  LaunchShape shape;
};

// Positions of a warp that there are kernels for, for a weight in tiles of so many rows.
std::vector<int> TensorPositions(int tile_rows);

// Numbers of parts of a tile's chunks that may be worth it, the least first, as many as there are multiprocessors for.
std::vector<int64_t> PartsToTry(int64_t chunks, int64_t blocks, const DeviceFacts& device);

// Shares the outputs of a tile out among a block's threads, once `is_y_paired` is known.
void FillStores(int threads, TensorParams* params);

// Nothing where no tile of outputs fits shared memory, or X is empty. `batch` is at least 1.
std::optional<TensorLaunch> ChooseTensorLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                               int64_t batch, const DeviceFacts& device, const TensorFacts& facts);

}  // namespace sparseconv::cuda
