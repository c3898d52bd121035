// How planes are brought into the form that the kernels for 1x1 read (kernels/cuda/gather.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"

namespace sparseconv::cuda {

enum class GatherKind { kAny, kWhole, kColumns };  // the kernels of GatherParams

struct GatherLaunch {
  GatherParams params{};  // all but the pointers
  GatherKind kind = GatherKind::kAny;
  size_t bytes = 0;  // of what it writes, but what it sees of X
  LaunchShape shape;
};

// The positions of a plane that a convolution reads.
struct GatheredMap {
  int in_h = 0, in_w = 0, out_h = 0, out_w = 0;
  int strides[2] = {1, 1}, pads_begin[2] = {};
  bool is_whole = false;  // all positions, in their order: then they count as one row
};
inline GatheredMap WholePlane(int positions) { return {1, positions, 1, positions, {1, 1}, {}, true}; }

// What a load has of every second column, in bytes, of X that begins at a multiple of what `addresses` is one of; 0
// where it cannot be read so.
int LoadBytes(const GatheredMap& map, uintptr_t addresses, size_t element_bytes);

// Of all channels of each image. What is read begins at a multiple of what `addresses` is one of, or its sources do;
// whole planes may begin anywhere.
GatherLaunch GatherPlanes(int batch, int channels, const GatheredMap& map, const DeviceFacts& device,
                          uintptr_t addresses, size_t element_bytes);

// Bytes that it reads and writes of a plane. A row of X is read as a whole where only some of its columns are.
int64_t GatheredBytes(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t element_bytes);

}  // namespace sparseconv::cuda
