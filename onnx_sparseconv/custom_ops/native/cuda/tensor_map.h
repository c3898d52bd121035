// Tensor maps, by which the copy engine finds boxes of tensors of three axes.
#pragma once

#include <cstdint>

#include "../../../kernels/cuda/params.h"

namespace sparseconv::cuda {

// A tensor's axes, from the innermost on, which is contiguous: elements, and from one to the next of the outer ones. A
// stride is a multiple of 16 bytes, and the last one of the one before.
constexpr int kTensorAxes = 3;
struct TensorAxes {
  int64_t sizes[kTensorAxes], strides[kTensorAxes - 1];
};

// How elements of a box lie in shared memory: one after the other, or, of halves whose box has 128 bytes of the
// innermost axis, as tensor cores read them.
enum class BoxLayout { kHalves, kSwizzledHalves, kFloats };

// `tensor`, in device memory, begins at a multiple of 16 bytes; a box has so many elements of each axis, 256 at most,
// and multiples of 16 bytes of the innermost one. Throws where the driver refuses.
void EncodeTensorMap(const void* tensor, const TensorAxes& axes, const int (&box)[kTensorAxes], BoxLayout layout,
                     TensorMap* map);

}  // namespace sparseconv::cuda
