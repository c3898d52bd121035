// Floats on tensor cores that multiply halves: a half has as many bits of a number as TF32, to which ONNX Runtime's own
// Conv rounds floats, but fewer exponents. So rows of the weight are scaled, and where X lies beyond the range of
// halves, which only the GPU sees, outputs that read it are computed once more without them.
#pragma once

#include <optional>
#include <vector>

#include "../attributes.h"

namespace sparseconv::cuda {

struct ScaledWeight {
  SparseWeight weight;        // of values that are halves
  std::vector<float> scales;  // [rows], powers of two: the weight's row is about the scaled one times its scale
};

// The largest value of each row becomes one of 1 to 2. Nothing where a value is infinite or none.
std::optional<ScaledWeight> ScaleToHalves(const SparseWeight& weight);

}  // namespace sparseconv::cuda
