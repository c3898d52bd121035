// What session config entries say about the CUDA kernels, for benchmarks and tests. Nothing needs to be set.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <tuple>

#include "../../../kernels/cuda/params.h"

namespace sparseconv::cuda {

// kAuto: the node's own image where it can run, or the depthwise kernel; else the warpgroup kernel or the tensor-core
// kernel where they pay, else the CSR kernel. All but kAuto and kCsr: an error where they cannot run.
enum class KernelChoice { kAuto, kCsr, kDepthwise, kTensor, kSegments, kWgmma, kFlat, kGemm, kCluster, kGenerated };

// 0 and "no value" leave the choice to the plan.
struct Settings {
  KernelChoice kernel = KernelChoice::kAuto;
  int sub_batch = 0;
  int passes = 0;
  int splits = 0;
  std::optional<Staging> staging;

  bool operator<(const Settings& other) const {
    return std::tie(kernel, sub_batch, passes, splits, staging) <
           std::tie(other.kernel, other.sub_batch, other.passes, other.splits, other.staging);
  }
};

// `read(key)` gives the value of a config entry, or nothing. Throws `Error` for a bad value.
Settings ParseSettings(const std::function<std::optional<std::string>(const char* key)>& read);

}  // namespace sparseconv::cuda
