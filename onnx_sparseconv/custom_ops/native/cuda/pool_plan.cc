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

// Bytes of the widest vector that the kernel for pairs of rows can read; 0 where it does not fit.
int VectorBytes(const PoolGeometry& pool, const Axes& dims, int element_bytes, uintptr_t y) {
  const Axes none{0, 0, 0}, window{1, 2, 2};
  const bool is_pairs = pool.kernel_shape == window && pool.strides[1] == 2 && pool.strides[2] == 2 &&
                        pool.pads_begin == none && pool.pads_end == none && dims[0] == 1;
  for (const int bytes : {16, 8, 4}) {
    if (bytes == element_bytes || !is_pairs) break;
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
  const int vector_bytes = VectorBytes(pool, dims, element_bytes, y);
  const int64_t vectors = vector_bytes == 0 ? 0 : outputs / (vector_bytes / 2 / element_bytes);
  // The kernel for pairs of rows divides in 32 bits.
  if (vector_bytes != 0 && vectors <= std::numeric_limits<uint32_t>::max()) {
    launch.vector_bytes = vector_bytes;
    launch.params.num_threads = vectors;
  }
  launch.shape.threads = static_cast<unsigned>(kThreads);
  launch.shape.grid[0] = static_cast<unsigned>(std::min(CeilDivide(launch.params.num_threads, kThreads), kMaxBlocks));
  return launch;
}

}  // namespace sparseconv::cuda
