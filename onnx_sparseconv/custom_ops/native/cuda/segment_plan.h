// How the tensor-core kernel for 1x1 (kernels/cuda/segment_conv.cuh) is launched for one input size: a pure function of
// the node, of its weight's form and of facts. segment_params.h says what the fields mean.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/segment_params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "tensor_plan.h"

namespace sparseconv::cuda {

struct SegmentLaunch {
  SegmentParams params{};  // all but the pointers, and `has_vectors`, which depends on them
  double cycles = 0.0;     // of a multiprocessor, about
  LaunchShape shape;
};

// Of 1x1 without strides and padding. Nothing where planes are not of a multiple of 4 positions, or these are too many,
// or no tile of outputs fits shared memory. `batch` is at least 1.
std::optional<SegmentLaunch> ChooseSegmentLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                 int64_t batch, const DeviceFacts& device, const TensorFacts& facts);

// What X or its sources, Y and the residual have to begin at multiples of, in bytes.
uintptr_t SegmentAlignment(int64_t element_bytes);

}  // namespace sparseconv::cuda
