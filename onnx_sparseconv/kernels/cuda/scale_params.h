// What the kernel of scale_channels.cuh is passed, and how it is launched.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

// `sparseconv_depthwise_1x1_<f32|f16>`. Where there are sources, `map.x` is null, every source begins at a multiple of
// 16 bytes, as does each of their images and Y, and no plane is smaller than that.
struct ScaleParams {
  DepthwiseParams map;
  Sources sources;
};

// Vectors that a thread has on their way at once, and blocks that a multiprocessor should have registers for.
constexpr int kScaleVectors = 2, kScaleBlocks = 5;

}  // namespace sparseconv::cuda
