#include "concatenate_plan.h"

#include <algorithm>

#include "../checked.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {
namespace {

static_assert(kMaxSources == kMaxConcatInputs);

constexpr int64_t kThreads = 256;
constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kImagesAThread = 4;
// Of a multiprocessor: enough to keep as many loads on their way as it has room for.
constexpr int64_t kBlocks = 16;

}  // namespace

Sources SourcesOf(const Inputs& inputs, const std::vector<int64_t>& begins) {
  Sources sources{};
  sources.count = static_cast<int>(inputs.num_sources);
  for (size_t i = 0; i < inputs.num_sources; ++i) sources.x[i] = inputs.sources[i].data;
  for (size_t i = 0; i < begins.size(); ++i) sources.begins[i] = static_cast<int>(begins[i]);
  return sources;
}

uintptr_t AddressesOf(const Inputs& inputs) {
  uintptr_t addresses = 0;
  for (size_t i = 0; i < inputs.num_sources; ++i) addresses |= reinterpret_cast<uintptr_t>(inputs.sources[i].data);
  return addresses;
}

bool AreMultiplesOf(int64_t unit_bytes, const Inputs& inputs, const std::vector<int64_t>& begins, int64_t plane_bytes) {
  if (AddressesOf(inputs) % static_cast<uintptr_t>(unit_bytes) != 0) return false;
  return std::all_of(begins.begin(), begins.end(),
                     [&](int64_t begin) { return begin * plane_bytes % unit_bytes == 0; });
}

ConcatenateLaunch ChooseConcatenateLaunch(const Inputs& inputs, const std::vector<int64_t>& begins,
                                          int64_t element_bytes, const DeviceFacts& device) {
  ConcatenateLaunch launch;
  const int64_t plane = inputs.in_dims[0] * inputs.in_dims[1] * inputs.in_dims[2] * element_bytes;
  const int64_t image = CheckedMultiply(plane, begins.back(), "an image of X in bytes");
  launch.bytes = static_cast<size_t>(CheckedMultiply(image, inputs.batch, "the size of X in bytes"));
  ConcatenateParams& params = launch.params;
  params.sources = SourcesOf(inputs, begins);
  params.batch = static_cast<int>(inputs.batch);
  for (const int unit : kConcatenateUnits) {
    launch.unit_bytes = unit;
    if (AreMultiplesOf(unit, inputs, begins, plane)) break;
  }
  for (size_t i = 0; i < begins.size(); ++i) {
    params.sources.begins[i] = static_cast<int>(begins[i] * plane / launch.unit_bytes);
  }
  params.units = params.sources.begins[inputs.num_sources];
  const int64_t columns = CeilDivide(params.units, kThreads), most = kBlocks * device.num_multiprocessors;
  launch.shape.threads = static_cast<unsigned>(kThreads);
  launch.shape.grid[0] = static_cast<unsigned>(std::clamp<int64_t>(columns, 1, most));
  const int64_t rows = std::max<int64_t>(CeilDivide(inputs.batch, kImagesAThread), most / launch.shape.grid[0]);
  launch.shape.grid[1] = static_cast<unsigned>(std::min({rows, inputs.batch, kMaxGridY}));
  return launch;
}

double ConcatenateCycles(double bytes, const DeviceFacts& device) {
  return kLaunchCycles + MemoryCycles(2.0 * bytes, device);
}

}  // namespace sparseconv::cuda
