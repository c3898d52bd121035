// The kernels that the library itself carries: the CSR convolution, the depthwise one, the sum of partial results,
// the pool behind a convolution, and the convolutions on tensor cores.
#pragma once

#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../../kernels/cuda/flat_params.h"
#include "csr_plan.h"
#include "depthwise_plan.h"
#include "driver.h"
#include "gather_plan.h"

namespace sparseconv::cuda {

// From which on the library's kernels may be launched to begin early: 10 * major + minor.
constexpr int kEarlyArchitecture = 90;

// Their functions for one element type, in the context that was current when this was made. All nodes of the process
// share the loaded code, as long as there is one.
class LibraryKernels {
 public:
  LibraryKernels(bool is_half, const DeviceFacts& device);

  // Whether launches of these may begin early.
  bool begin_early() const { return begin_early_; }
  // `sub_batch` is 1, 2, 4 or 8.
  FunctionHandle Csr(int sub_batch) const;
  // Of an image whose map is a pixel.
  FunctionHandle Pixel() const { return pixel_; }
  // `window` is one of kDepthwiseWindows.
  FunctionHandle Depthwise(int window) const { return depthwise_[window]; }
  FunctionHandle Reduce() const { return reduce_; }
  // `unit_bytes` is 16, 4 or 2.
  FunctionHandle Concatenate(int unit_bytes) const { return concatenate_.at(unit_bytes); }
  // `size` and `vector_bytes` are those of a PoolLaunch.
  FunctionHandle Pool(int size, int vector_bytes) const { return pools_.at({size, vector_bytes}); }

 private:
  const bool begin_early_;
  std::shared_ptr<const Library> library_;
  FunctionHandle csr_[4];
  FunctionHandle depthwise_[std::size(kDepthwiseWindows)];
  FunctionHandle reduce_, pixel_;
  std::map<int, FunctionHandle> concatenate_;
  std::map<std::pair<int, int>, FunctionHandle> pools_;
};

// The kernels on tensor cores that differ in one number alone, mostly the positions of a warp or warpgroup, likewise.
class ProductKernels {
 public:
  // `number` is one of those that there are kernels for.
  FunctionHandle Product(int number) const { return products_.at(number); }

 protected:
  // Kernels of names `prefix` and the number of positions; a block may then use `max_shared_bytes`.
  ProductKernels(std::shared_ptr<const Library> library, const std::string& prefix, const std::vector<int>& positions,
                 int max_shared_bytes);

  const Library& library() const { return *library_; }

 private:
  std::shared_ptr<const Library> library_;
  std::map<int, FunctionHandle> products_;
};

// Those for a weight in tiles of `tile_rows`. The GPU must have sparse tensor cores.
class TensorKernels : public ProductKernels {
 public:
  TensorKernels(bool is_half, int tile_rows, int architecture, int max_shared_bytes);
  // As of WgmmaKernels.
  FunctionHandle Reduce() const { return reduce_; }

 private:
  FunctionHandle reduce_;
};

// Those for 1x1, of halves or floats, likewise: the one for a tile's subtiles.
class SegmentKernels : public ProductKernels {
 public:
  SegmentKernels(bool is_half, int tile_rows, int architecture, int max_shared_bytes);
};

// Those of warpgroups for windows, and what interleaves their X. The GPU must be of kWgmmaArchitecture.
class WgmmaKernels : public ProductKernels {
 public:
  WgmmaKernels(bool is_half, int max_shared_bytes);
  FunctionHandle Interleave() const { return interleave_; }
  // Adds up parts of sums. Of floats, computes them once more where halves did not hold X.
  FunctionHandle Reduce() const { return reduce_; }

 private:
  FunctionHandle interleave_, reduce_;
};

// Those of warpgroups for windows of few channels, of halves. The GPU must be of kWgmmaArchitecture.
class RingKernels : public ProductKernels {
 public:
  explicit RingKernels(int max_shared_bytes);
};

// Those of warpgroups for windows of few channels, by octets, or for words. The GPU must be of kWgmmaArchitecture.
class OctetKernels : public ProductKernels {
 public:
  OctetKernels(bool is_half, OctetForm form, int max_shared_bytes);
};

// Those of warpgroups for flat X, and what makes it flat. The GPU must be of kWgmmaArchitecture.
class FlatKernels : public ProductKernels {
 public:
  FlatKernels(bool is_half, FlatProducts products, int max_shared_bytes);
  FunctionHandle Flatten(bool by_rows) const { return by_rows ? flatten_rows_ : flatten_; }

 private:
  FunctionHandle flatten_, flatten_rows_;
};

// Those of warpgroups for 1x1 with its zeros, of boxes or of planes, and those of X that is ready. The GPU must be of
// kWgmmaArchitecture.
class GemmKernels : public ProductKernels {
 public:
  GemmKernels(bool is_half, bool has_boxes, bool is_ready, int max_shared_bytes);
};

// One kernel, which copies X before another one reads it. The GPU must be of kWgmmaArchitecture.
class CopyKernel {
 public:
  FunctionHandle Get() const { return function_; }

 protected:
  CopyKernel(std::shared_ptr<const Library> library, const char* name);

 private:
  std::shared_ptr<const Library> library_;
  FunctionHandle function_;
};

// Brings X into the form in which the gemm kernels multiply it.
struct PackKernel : CopyKernel {
  explicit PackKernel(bool is_half);
};

// Copies X such that there are no strides.
struct SpaceToDepthKernel : CopyKernel {
  explicit SpaceToDepthKernel(bool is_half);
};

// Those of warpgroups for few images, by clusters. The GPU must be of kWgmmaArchitecture.
class ClusterKernels : public ProductKernels {
 public:
  ClusterKernels(bool is_half, int max_shared_bytes);
  // As of DeviceFacts.
  const std::vector<int>& MaxClusters() const { return max_clusters_; }

 private:
  std::vector<int> max_clusters_{0};
};

// Those of warpgroups for 1x1, by segments, and what gathers planes for them. The GPU must be of kWgmmaArchitecture.
class PointwiseKernels : public ProductKernels {
 public:
  PointwiseKernels(bool is_half, int max_shared_bytes);
  FunctionHandle Gather(GatherKind kind) const { return gathers_[static_cast<size_t>(kind)]; }

 private:
  std::vector<FunctionHandle> gathers_;  // by GatherKind
};

}  // namespace sparseconv::cuda
