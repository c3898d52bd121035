// The CSR kernel on the host: which convolutions it can address, how it is launched, and where its weight lies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "driver.h"

namespace sparseconv::cuda {

// What of a GPU decides about launches.
struct DeviceFacts {
  int architecture = 0;  // 10 * major + minor
  int num_multiprocessors = 1;
  int max_shared_bytes = 0;  // of a block, its static ones included
  // Clusters of so many blocks that run at a time, where each block takes a multiprocessor; not of all GPUs.
  std::vector<int> max_clusters{};
};

// A launch of the CSR kernel for one input size.
struct CsrLaunch {
  int sub_batch = 1;
  int block_rows = 1;
  bool is_pixel = false;  // by the kernel for an image whose map is a pixel
  LaunchShape shape;
};

// Throws `Error` where the node has more channels or taps than the kernel can count.
void CheckCsrGeometry(const ConvGeometry& geometry);
// The same for an input's size and batch.
void CheckCsrSizes(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch);

// A pure function. `num_entries` are the weight's. `sub_batch` 0 leaves the choice to it. `batch` is at least 1.
CsrLaunch ChooseCsrLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                          int64_t num_entries, const DeviceFacts& device, int sub_batch);

// Of a multiprocessor, for a launch.
constexpr double kLaunchCycles = 4000.0;
// What a launch saves that may begin before the one in front of it is complete.
constexpr double kEarlyCycles = 1600.0;

// Cycles of a multiprocessor that the kernel takes, about.
double CsrCycles(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, int64_t num_entries,
                 const DeviceFacts& device);

std::string ToString(const CsrLaunch& launch);

// A node's weight in device memory. Made while `context` is current; it must outlive this.
class CsrWeight {
 public:
  CsrWeight(const Context& context, const SparseWeight& weight);

  // Sets the fields of `params` that depend on the weight.
  void Fill(CsrParams* params) const;
  int64_t num_entries() const { return num_entries_; }

 private:
  int64_t num_entries_;
  size_t columns_offset_;
  size_t row_begin_offset_;
  Memory memory_;
};

// All but the pointers to data.
CsrParams MakeCsrParams(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch);

}  // namespace sparseconv::cuda
