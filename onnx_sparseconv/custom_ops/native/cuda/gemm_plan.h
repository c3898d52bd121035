// How the gemm kernels (kernels/cuda/gemm_conv.cuh) are launched for a call.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/gemm_params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "gather_plan.h"

namespace sparseconv::cuda {

// Segments of a tile that there are kernels for, of boxes and of planes of halves, and of both of floats; and of X that
// is ready, of halves planes alone.
constexpr int kGemmBoxesSegments[] = {16, 32}, kGemmPlanesSegments[] = {16, 25, 32}, kGemmFloatSegments[] = {8, 13, 14};
constexpr int kReadyPlanesSegments[] = {16, 25, 32}, kReadyFloatBoxesSegments[] = {13, 14},
              kReadyFloatPlanesSegments[] = {14};

struct GemmLaunch {
  GemmParams params{};     // all but the pointers and the maps
  int segments = 0;        // of a tile
  bool has_boxes = false;  // else planes
  // What a launch before makes of X: of halves, planes that begin at multiples of 16 bytes, or of both types what is
  // ready to be multiplied.
  bool is_gathered = false, is_ready = false;
  GatheredMap map;      // what of X it reads, in 2-D; of 3-D, all planes are one row
  double cycles = 0.0;  // of a multiprocessor, about
  LaunchShape shape;

  bool is_copied() const { return is_gathered || is_ready; }
};

// Of what HasGemmForm holds of. Nothing where no tile fits shared memory, or an image of Y, or of floats of X, does not
// begin at multiples of 16 bytes, or the planes have such a size that the kernels cannot store them, X is empty, or X
// or Y is too large. `batch` is at least 1; `is_x_aligned`: whether X begins at a multiple of 16 bytes;
// `element_bytes`: 2 or 4.
std::optional<GemmLaunch> ChooseGemmLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, int64_t element_bytes, bool is_x_aligned);

// What makes X ready, which begins at `x`.
struct PackLaunch {
  PackParams params{};  // but for pointers to what it writes
  size_t bytes = 0;     // of that, but what it sees of X
  LaunchShape shape;
};
PackLaunch MakeReady(const GemmLaunch& launch, const void* x, size_t element_bytes);

// Fills in how boxes of X, Y and the residual are found, those that the launch has; they begin at multiples of 16
// bytes. The residual may be null.
void EncodeBoxes(const GemmLaunch& launch, bool is_half, GemmParams* params);

}  // namespace sparseconv::cuda
