// Floats on tensor cores that multiply halves: a half has as many bits of a number as TF32, to which ONNX Runtime's own
// Conv rounds floats, but fewer exponents. So rows of the weight are scaled, and where X lies beyond the range of
// halves, which only the GPU sees, the call is computed once more by a kernel that needs none.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"

namespace sparseconv::cuda {

struct ScaledWeight {
  SparseWeight weight;        // of values that are halves
  std::vector<float> scales;  // [rows], powers of two: the weight's row is about the scaled one times its scale
};

// The largest value of each row becomes one of 1 to 2. Nothing where a value is infinite or none.
std::optional<ScaledWeight> ScaleToHalves(const SparseWeight& weight);

// How the kernel is launched that computes a call once more, or finds that it need not.
struct RecomputeLaunch {
  int block_rows = 1;
  LaunchShape shape;
};

// `batch` is at least 1, `num_entries` are the weight's.
RecomputeLaunch ChooseRecomputeLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                      int64_t num_entries, const DeviceFacts& device);

}  // namespace sparseconv::cuda
