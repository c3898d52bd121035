// How the segment kernel (kernels/cuda/segment_conv.cuh) is launched for a call.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "ring_weight.h"

namespace sparseconv::cuda {

// The rows of a warpgroup's sums, and segments of each, that there are kernels for.
struct SegmentForm {
  int rows, segments;
};
constexpr SegmentForm kSegmentForms[] = {{1, 8}, {1, 14}, {1, 15}, {2, 7}, {3, 4}};

struct SegmentLaunch {
  SegmentParams params{};  // all but the pointers
  size_t form = 0;         // of kSegmentForms
  double cycles = 0.0;     // of a multiprocessor, about
  LaunchShape shape;
};

// Nothing where windows do not have three columns, the middle one of which is the output's own, where rows are no
// multiples of 8, where the window's rows and the weight do not fit shared memory, or where the tensors are too large.
// X, Y and the residual must begin at multiples of 16 bytes. `batch` is at least 1.
std::optional<SegmentLaunch> ChooseSegmentLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                 int64_t batch, const DeviceFacts& device, const RingForm& weight);

// Whether a launch is faster than the CSR kernel's `csr_cycles`.
bool IsWorthLaunching(const SegmentLaunch& launch, double csr_cycles);

}  // namespace sparseconv::cuda
