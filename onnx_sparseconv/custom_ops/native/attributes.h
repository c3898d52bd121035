// What a node of one of the ops says, read and checked. Independent of the execution provider.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ort.h"

namespace sparseconv {

// Every convolution is treated as a 3-D one; the leading axes of a 1-D or 2-D node have size, kernel and stride 1.
constexpr size_t kSpatialAxes = 3;
using Axes = std::array<int64_t, kSpatialAxes>;

enum class AutoPad { kNotSet, kSameUpper, kSameLower };

// Codes of the `activation` attribute.
enum class ActivationCode : int { kNone, kRelu, kClip, kLeakyRelu, kHardSwish, kHardSigmoid, kSigmoid, kSilu };

struct Activation {
  ActivationCode code = ActivationCode::kNone;
  float alpha = 0;
  float beta = 0;
};

// Where the taps of the convolution fall.
struct ConvGeometry {
  size_t spatial_rank = 0;  // of the node: 1 to 3
  Axes kernel_shape{1, 1, 1};
  Axes strides{1, 1, 1};
  Axes dilations{1, 1, 1};
  Axes pads_begin{0, 0, 0};
  Axes pads_end{0, 0, 0};
  AutoPad auto_pad = AutoPad::kNotSet;
  int64_t group = 1;
  int64_t in_channels = 0;
  int64_t out_channels = 0;

  int64_t group_in_channels() const { return in_channels / group; }
  int64_t group_out_channels() const { return out_channels / group; }
  int64_t taps() const { return kernel_shape[0] * kernel_shape[1] * kernel_shape[2]; }
};

// The weight by output channel: entries of channel k are row_begin[k] .. row_begin[k + 1] - 1, columns increasing.
// The slices and the row order of the stored form are undone, and entries of value +0 (marked zeros) are left out.
struct SparseWeight {
  std::vector<int64_t> row_begin;
  std::vector<uint32_t> columns;
  std::vector<float> values;
};

// The weight of a depthwise layer with all of its zeros, [out_channels, taps].
std::vector<float> DepthwiseWeight(const SparseWeight& weight, const ConvGeometry& geometry);

// Windows of which the maximum is taken. Windows are clipped to the map; none lies outside of it as a whole, since
// paddings are less than the window.
struct PoolGeometry {
  Axes kernel_shape{1, 1, 1};
  Axes strides{1, 1, 1};
  Axes pads_begin{0, 0, 0};
  Axes pads_end{0, 0, 0};
};

struct SparseConvAttributes {
  ConvGeometry geometry;
  SparseWeight weight;
  Activation activation;
  std::optional<PoolGeometry> pool;  // of SparseConvMaxPool
  // Of a SparseConvConcat, the first channel of each of its inputs in X, and the number of all; else empty.
  std::vector<int64_t> source_begins;
};

// What the op of a node is, as far as its attributes depend on it.
struct OpForm {
  int element_type = 0;  // for which the kernel is registered
  bool has_pool = false;
  size_t num_sources = 0;  // inputs that are concatenated to X; 0 where X is one
};

// Reads the attributes of a node and checks them against docs/op-spec.md. Throws `Error`.
SparseConvAttributes ReadAttributes(const ort::NodeInfo& node, const OpForm& form);

// Sizes and paddings that follow from the size of the input.
struct ResolvedGeometry {
  Axes in_dims{1, 1, 1};
  Axes out_dims{1, 1, 1};
  Axes pads_begin{0, 0, 0};
};

// Resolves auto_pad and computes the output's size, as ONNX Conv does. Throws `Error` where the input is too small.
ResolvedGeometry Resolve(const ConvGeometry& geometry, const Axes& in_dims);

// The size of what a pool makes of maps of `dims`, of which `spatial_rank` axes are the node's. As in newer
// versions of ONNX Runtime, a map that is smaller than a window, by less than a stride, gives one output. Throws
// `Error` where it is smaller by more.
Axes PooledDims(const PoolGeometry& pool, const Axes& dims, size_t spatial_rank);

}  // namespace sparseconv
