// The pure functions that plan launches, for Python: see test_launches.py.

#include <cstdio>
#include <cstring>

#include "cuda/generated_plan.h"

using namespace sparseconv;
using namespace sparseconv::cuda;

namespace {

void Print(const std::string& text, char* buffer, int capacity) {
  std::snprintf(buffer, static_cast<size_t>(capacity), "%s", text.c_str());
}

Axes ToAxes(const long long* values) { return {values[0], values[1], values[2]}; }

}  // namespace

extern "C" {

// `plan` is a GeneratedPlan's numbers; sizes: batch, in_h, in_w, out_h, out_w; device: architecture, multiprocessors,
// shared bytes; facts: aligned, static shared bytes, blocks a multiprocessor, pairs; settings: passes, splits, staging
// or -1. Returns 1 and the launch as text, or 0 and the reason.
__attribute__((visibility("default"))) int probe_generated(const int* plan_numbers, const long long* sizes,
                                                           const int* device_numbers, const int* facts_numbers,
                                                           const int* settings_numbers, char* text, int capacity) {
  GeneratedPlan plan;
  std::memcpy(&plan, plan_numbers, sizeof(plan));
  const PlaneSizes plane{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
  const DeviceFacts device{device_numbers[0], device_numbers[1], device_numbers[2]};
  const GeneratedFacts facts{facts_numbers[0] != 0, facts_numbers[1], facts_numbers[2], facts_numbers[3]};
  Settings settings;
  settings.passes = settings_numbers[0];
  settings.splits = settings_numbers[1];
  if (settings_numbers[2] >= 0) settings.staging = static_cast<Staging>(settings_numbers[2]);
  std::string reason;
  const auto launch = ChooseLaunch(plan, plane, device, facts, settings, &reason);
  Print(launch ? ToString(*launch) : reason, text, capacity);
  return launch ? 1 : 0;
}

// The CSR launch for `out_channels`, output sizes and a weight of `num_entries`.
__attribute__((visibility("default"))) void probe_csr(const long long* out_dims, long long out_channels,
                                                      long long batch, long long num_entries, int num_multiprocessors,
                                                      int sub_batch, char* text, int capacity) {
  ConvGeometry geometry;
  geometry.out_channels = out_channels;
  ResolvedGeometry sizes;
  sizes.out_dims = ToAxes(out_dims);
  const DeviceFacts device{90, num_multiprocessors, 0};
  Print(ToString(ChooseCsrLaunch(geometry, sizes, batch, num_entries, device, sub_batch)), text, capacity);
}

}  // extern "C"
