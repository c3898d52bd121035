// How the ring kernel (kernels/cuda/ring_conv.cuh) is launched for a call.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "window_weight.h"

namespace sparseconv::cuda {

// Positions of a row of outputs that there are kernels for.
constexpr int kRingPositions[] = {8, 16, 32};

struct RingLaunch {
  RingParams params{};  // all but the pointers
  int positions = 0;
  double cycles = 0.0;  // of a multiprocessor, about
  LaunchShape shape;
};

// Nothing where rows of X or Y are no multiples of 8, where the window's rows and the weight do not fit shared memory,
// or where the tensors are too large. X, Y and the residual must begin at multiples of 16 bytes. `batch` is at least 1.
std::optional<RingLaunch> ChooseRingLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, const WindowForm& weight);

}  // namespace sparseconv::cuda
