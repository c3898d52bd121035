// How the kernel for depthwise convolutions (kernels/cuda/depthwise_conv.cuh) is launched for a call, and its weight.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"

namespace sparseconv::cuda {

// Windows that there are kernels for.
struct DepthwiseWindow {
  const char* name;
  int size, stride;  // 0 for any
  int half_columns;  // of an item, in float16
};
template <int kSize, int kStride>
constexpr DepthwiseWindow MakeDepthwiseWindow(const char* name) {
  return {name, kSize, kStride, kDepthwiseColumns<true, kSize, kStride>};
}
constexpr DepthwiseWindow kDepthwiseWindows[] = {MakeDepthwiseWindow<0, 0>("any"),   MakeDepthwiseWindow<3, 1>("3x3"),
                                                 MakeDepthwiseWindow<5, 1>("5x5"),   MakeDepthwiseWindow<7, 1>("7x7"),
                                                 MakeDepthwiseWindow<3, 2>("3x3s2"), MakeDepthwiseWindow<5, 2>("5x5s2"),
                                                 MakeDepthwiseWindow<1, 1>("1x1")};
constexpr int kAnyWindow = 0, kPointWindow = static_cast<int>(std::size(kDepthwiseWindows)) - 1;

struct DepthwiseLaunch {
  DepthwiseParams params;   // all but the pointers
  int window = kAnyWindow;  // of kDepthwiseWindows
  LaunchShape shape;
};

// Whether a convolution is one that the kernel takes: 1-D or 2-D, as many groups as input and as output channels, and
// not too large a window.
bool HasDepthwiseForm(const ConvGeometry& geometry);

// A pure function. Nothing where even a row of outputs needs more shared memory than a block has, or there are more
// planes than the kernel can count.
std::optional<DepthwiseLaunch> ChooseDepthwiseLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                     int64_t batch, int64_t element_bytes, const DeviceFacts& device);

}  // namespace sparseconv::cuda
