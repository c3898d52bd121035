// Convolutions with strides, as ones without: what lies between rows and columns that are one stride apart becomes
// channels of their own ("space to depth"), in a copy of X. So kernels run them that know no strides, and that with few
// channels have room for more of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"

namespace sparseconv::cuda {

// Whether the convolution has strides, one group, and so few channels that there are few in the copy.
bool HasFewPlaces(const ConvGeometry& geometry);

// The convolution of the copy. It has no padding, which is part of the copy, so it is the same for all inputs.
ConvGeometry WithoutStrides(const ConvGeometry& geometry);
SparseWeight WithoutStrides(const SparseWeight& weight, const ConvGeometry& geometry);

// `sizes` are those of the convolution with strides; rows of the copy are multiples of 8.
ResolvedGeometry WithoutStrides(const ResolvedGeometry& sizes, const ConvGeometry& geometry);

// How the copy is made.
struct SpaceToDepthLaunch {
  SpaceToDepthParams params{};  // all but the pointers
  size_t bytes = 0;             // of the copy
  double cycles = 0.0;          // of a multiprocessor, about, that it takes more than a launch without it
  LaunchShape shape;
};

// `copied` are the sizes of the convolution of the copy, `batch` is at least 1. Nothing where the copy is too large.
std::optional<SpaceToDepthLaunch> ChooseSpaceToDepth(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                     const ResolvedGeometry& copied, int64_t batch,
                                                     int64_t element_bytes, const DeviceFacts& device);

}  // namespace sparseconv::cuda
