// The pool on the host: which kernel takes the maximum of windows, and how it is launched.
#pragma once

#include <cstdint>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "driver.h"

namespace sparseconv::cuda {

struct PoolLaunch {
  PoolParams params;     // all but the pointers
  int size = 0;          // of the windows, 2 or 3, in the kernels for those; 0: the kernel for any window
  int vector_bytes = 0;  // that a thread of these reads of a row
  LaunchShape shape;
};

// A pure function.
//
// num_maps: of dims, that the convolution made.
// element_bytes: 4 or 2.
// y: where the maps of pooled_dims go.
// Throws `Error` where an axis is longer than the kernels can count.
PoolLaunch ChoosePoolLaunch(const PoolGeometry& pool, const Axes& dims, const Axes& pooled_dims, int64_t num_maps,
                            int element_bytes, uintptr_t y);

}  // namespace sparseconv::cuda
