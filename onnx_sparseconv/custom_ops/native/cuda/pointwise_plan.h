// How the pointwise kernel (kernels/cuda/pointwise_conv.cuh) is launched for a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "gather_plan.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {

// Segments of a warpgroup that there are kernels for.
constexpr int kPointwiseSegments[] = {16, 24, 32};

struct PointwiseLaunch {
  PointwiseParams params{};  // all but the pointers; where these are not aligned, fewer `out_columns`
  int segments = 0;          // of a warpgroup
  bool is_whole = true;      // all positions of X are read, in their order; else X is gathered
  double cycles = 0.0;       // of a multiprocessor, about
  LaunchShape shape;
};

// Of what IsPointwise and HasWgmmaForm hold of. Nothing where no tile of outputs fits shared memory, X is empty, or X
// or Y is too large. `batch` is at least 1.
std::optional<PointwiseLaunch> ChoosePointwiseLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                     int64_t batch, const DeviceFacts& device, const WgmmaFacts& facts);

// Bytes of a plane where the first one of each tensor begins at a multiple of what `addresses` is one of, if the kernel
// can read them where they are, halves or floats; else 0.
unsigned PlaneBytes(uintptr_t addresses, const PointwiseLaunch& launch, size_t element_bytes);

// The same where they were gathered.
unsigned GatheredPlaneBytes(const PointwiseLaunch& launch);

// What brings planes of X, or of the residual, into the form that the kernel reads. X begins at a multiple of what
// `addresses` is one of, or its sources do.
GatherLaunch GatherX(const PointwiseLaunch& launch, const DeviceFacts& device, uintptr_t addresses,
                     size_t element_bytes);
GatherLaunch GatherResidual(const PointwiseLaunch& launch, const DeviceFacts& device);

}  // namespace sparseconv::cuda
