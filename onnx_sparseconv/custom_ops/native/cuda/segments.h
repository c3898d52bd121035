// Segments of planes, kSegmentPositions neighbouring positions each, as the kernels for 1x1 count them.
#pragma once

#include <cstdint>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "../checked.h"

namespace sparseconv::cuda {

constexpr int64_t kSegmentBytes = 2 * kSegmentPositions;  // of halves

inline int64_t PositionsOf(const Axes& dims) { return dims[0] * dims[1] * dims[2]; }
inline int64_t SegmentsOf(int64_t plane) { return CeilDivide(plane, int64_t{kSegmentPositions}); }

}  // namespace sparseconv::cuda
