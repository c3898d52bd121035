// How the kernel of scale_channels.cuh is launched; what it is passed is DepthwiseParams.
#pragma once

namespace sparseconv::cuda {

// Vectors that a thread has on their way at once, and blocks that a multiprocessor should have registers for.
constexpr int kScaleVectors = 2, kScaleBlocks = 5;

}  // namespace sparseconv::cuda
