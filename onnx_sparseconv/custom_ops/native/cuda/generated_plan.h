// How a generated image is launched for one input size: pure functions of the image's plan and of facts. params.h says
// what the fields mean.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "settings.h"

namespace sparseconv::cuda {

// Sizes of the last two axes. A pointwise plan may cut its planes into rows as it likes; `ChooseLaunch` does.
struct PlaneSizes {
  int64_t batch = 1;
  int64_t in_h = 1, in_w = 1;
  int64_t out_h = 1, out_w = 1;
};

// What of the loaded image and of the call decides about its launch.
struct GeneratedFacts {
  bool is_x_aligned = false;        // X begins at a multiple of 16 bytes
  int static_shared_bytes = 0;      // of the image
  int blocks_a_multiprocessor = 1;  // that are resident at the same time
  int pairs = 0;                    // clusters of two blocks that are; 0 where there are no clusters
};

struct GeneratedLaunch {
  // All but the pointers, and the chunks of a pass.
  GeneratedParams params{};
  int num_passes = 1;  // launches, each for a range of chunks, the first one adding to nothing; 1 if num_splits > 1
  int num_chunks = 1;
  int64_t num_values = 0;  // of Y
  LaunchShape shape;
};

// The sizes as the plan sees them. Nothing where it was not made for such an input, with the reason.
std::optional<PlaneSizes> FindPlaneSizes(const GeneratedPlan& plan, const ResolvedGeometry& sizes, int64_t batch,
                                         std::string* reason);

// Nothing where the image cannot run, with the reason.
std::optional<GeneratedLaunch> ChooseLaunch(const GeneratedPlan& plan, const PlaneSizes& sizes,
                                            const DeviceFacts& device, const GeneratedFacts& facts,
                                            const Settings& settings, std::string* reason);

// Dynamic shared memory of a block.
int64_t SharedBytes(const GeneratedPlan& plan);

std::string ToString(const GeneratedLaunch& launch);

}  // namespace sparseconv::cuda
