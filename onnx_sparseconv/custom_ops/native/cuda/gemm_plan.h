// How the gemm kernels (kernels/cuda/gemm_conv.cuh) are launched for a call.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/gemm_params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"

namespace sparseconv::cuda {

// Segments of a tile that there are kernels for, of boxes and of planes.
constexpr int kGemmBoxesSegments[] = {16, 32}, kGemmPlanesSegments[] = {16, 25, 32};

struct GemmLaunch {
  GemmParams params{};       // all but the pointers and the maps
  int segments = 0;          // of a tile
  bool has_boxes = false;    // else planes
  bool is_gathered = false;  // planes of X are brought to where they begin at multiples of 16 bytes before
  double cycles = 0.0;       // of a multiprocessor, about
  LaunchShape shape;
};

// Of what HasGemmForm holds of. Nothing where no tile fits shared memory, or an image of Y does not begin at multiples
// of 16 bytes, or the planes of Y have such a size that the kernels cannot store them, X is empty, or X or Y is too
// large. `batch` is at least 1; `is_x_aligned`: whether X begins at a multiple of 16 bytes.
std::optional<GemmLaunch> ChooseGemmLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, bool is_x_aligned);

// Fills in how boxes of X, Y and the residual are found, which begin at multiples of 16 bytes; the residual may be
// null.
void EncodeBoxes(const void* x, void* y, const void* residual, GemmParams* params);

}  // namespace sparseconv::cuda
