#include "pool_plan.h"

#include <algorithm>
#include <limits>

#include "../checked.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
// A grid goes on from where it ends.
constexpr int64_t kMaxBlocks = 1 << 20;

// Of MaxPoolRows: rows of outputs and columns that a warp has.
constexpr int64_t kRowsOfWarp = 4, kWarp = 32;

// Whether windows are those of MaxPoolRows.
bool FitsRows(const PoolGeometry& pool, const Axes& dims, const Axes& pooled_dims) {
  const int64_t size = pool.kernel_shape[2];
  return dims[0] == 1 && pooled_dims[0] == 1 && (size == 2 || size == 3) && pool.kernel_shape[1] == size &&
         pool.strides[1] == 2 && pool.strides[2] == 2;
}

// And those of MaxPoolVectors, whatever its vectors.
bool FitsVectors(const PoolGeometry& pool, const Axes& dims, const Axes& pooled_dims) {
  return FitsRows(pool, dims, pooled_dims) && pool.pads_begin[2] == pool.kernel_shape[2] - 2 && dims[2] % 2 == 0 &&
         pooled_dims[2] == dims[2] / 2;
}

// Bytes of the widest vector that rows of outputs at `y` allow; 0 where none does.
int VectorBytes(const Axes& dims, int element_bytes, uintptr_t y) {
  for (const int bytes : {16, 8, 4}) {
    if (bytes == element_bytes) break;
    const auto half = static_cast<uintptr_t>(bytes) / 2;
    if (dims[2] * element_bytes % bytes == 0 && y % half == 0) return bytes;
  }
  return 0;
}

}  // namespace

PoolLaunch ChoosePoolLaunch(const PoolGeometry& pool, const Axes& dims, const Axes& pooled_dims, int64_t num_maps,
                            int element_bytes, uintptr_t y) {
  PoolLaunch launch{};
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    if (std::max(dims[i], pooled_dims[i]) > kMaxInt) {
      Fail("what the node pools is longer than the CUDA kernel can count (", kMaxInt, ")");
    }
    launch.params.in_dims[i] = static_cast<int>(dims[i]);
    launch.params.out_dims[i] = static_cast<int>(pooled_dims[i]);
    launch.params.kernel_shape[i] = static_cast<int>(pool.kernel_shape[i]);
    launch.params.strides[i] = static_cast<int>(pool.strides[i]);
    launch.params.pads_begin[i] = static_cast<int>(pool.pads_begin[i]);
  }
  const int64_t outputs = num_maps * pooled_dims[0] * pooled_dims[1] * pooled_dims[2];
  launch.params.num_threads = outputs;
  const int vector_bytes = FitsVectors(pool, dims, pooled_dims) ? VectorBytes(dims, element_bytes, y) : 0;
  const int64_t vectors = vector_bytes == 0 ? 0 : outputs / (vector_bytes / 2 / element_bytes);
  // Their kernel divides in 32 bits.
  if (vector_bytes != 0 && vectors <= std::numeric_limits<uint32_t>::max()) {
    launch.size = static_cast<int>(pool.kernel_shape[2]);
    launch.vector_bytes = vector_bytes;
    launch.params.num_threads = vectors;
  } else if (FitsRows(pool, dims, pooled_dims)) {
    const int64_t tasks = num_maps * CeilDivide(pooled_dims[1], kRowsOfWarp) * CeilDivide(pooled_dims[2], kWarp);
    if (tasks <= kMaxInt) {
      launch.size = static_cast<int>(pool.kernel_shape[2]);
      launch.params.num_threads = kWarp * tasks;
    }
  }
  launch.shape.threads = static_cast<unsigned>(kThreads);
  launch.shape.grid[0] = static_cast<unsigned>(std::min(CeilDivide(launch.params.num_threads, kThreads), kMaxBlocks));
  return launch;
}

}  // namespace sparseconv::cuda
