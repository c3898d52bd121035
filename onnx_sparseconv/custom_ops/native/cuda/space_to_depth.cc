#include "space_to_depth.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "../checked.h"
#include "wgmma_plan.h"
#include "window_weight.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kRowUnit = 8;
constexpr int64_t kThreads = 256;

// Where a tap reads, along an axis: so many rows or columns of the copy further, at a place between strides.
struct TapPlace {
  int64_t step, place;
};

TapPlace PlaceOf(const ConvGeometry& geometry, size_t axis, int64_t tap) {
  const int64_t offset = tap * geometry.dilations[axis];
  return {offset / geometry.strides[axis], offset % geometry.strides[axis]};
}

}  // namespace

bool HasFewPlaces(const ConvGeometry& geometry) {
  const int64_t height = geometry.strides[1], width = geometry.strides[2];
  return geometry.group == 1 && geometry.strides[0] == 1 && (height > 1 || width > 1) && height <= kMaxFewChannels &&
         width <= kMaxFewChannels && geometry.in_channels <= kMaxFewChannels / (height * width);
}

ConvGeometry WithoutStrides(const ConvGeometry& geometry) {
  ConvGeometry copied = geometry;
  copied.in_channels *= geometry.strides[1] * geometry.strides[2];
  for (size_t axis = 1; axis < kSpatialAxes; ++axis) {
    copied.kernel_shape[axis] = PlaceOf(geometry, axis, geometry.kernel_shape[axis] - 1).step + 1;
  }
  copied.strides = copied.dilations = {1, 1, 1};
  copied.pads_begin = copied.pads_end = {0, 0, 0};
  copied.auto_pad = AutoPad::kNotSet;
  return copied;
}

SparseWeight WithoutStrides(const SparseWeight& weight, const ConvGeometry& geometry) {
  const ConvGeometry copied = WithoutStrides(geometry);
  const auto column_of = [&](int64_t column) {
    const int64_t channel = column / geometry.taps(), tap = column % geometry.taps();
    const TapPlace y = PlaceOf(geometry, 1, tap / geometry.kernel_shape[2]);
    const TapPlace x = PlaceOf(geometry, 2, tap % geometry.kernel_shape[2]);
    const int64_t copied_channel = (channel * geometry.strides[1] + y.place) * geometry.strides[2] + x.place;
    return static_cast<uint32_t>((copied_channel * copied.kernel_shape[1] + y.step) * copied.kernel_shape[2] + x.step);
  };
  SparseWeight found{weight.row_begin, {}, {}};
  std::vector<std::pair<uint32_t, float>> row;
  for (size_t k = 0; k + 1 < weight.row_begin.size(); ++k) {
    row.clear();
    for (auto i = static_cast<size_t>(weight.row_begin[k]); i < static_cast<size_t>(weight.row_begin[k + 1]); ++i) {
      row.emplace_back(column_of(weight.columns[i]), weight.values[i]);
    }
    std::sort(row.begin(), row.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [column, value] : row) {
      found.columns.push_back(column);
      found.values.push_back(value);
    }
  }
  return found;
}

ResolvedGeometry WithoutStrides(const ResolvedGeometry& sizes, const ConvGeometry& geometry) {
  const ConvGeometry copied = WithoutStrides(geometry);
  ResolvedGeometry found;
  found.out_dims = sizes.out_dims;
  found.in_dims = {1, sizes.out_dims[1] + copied.kernel_shape[1] - 1,
                   RoundUp(sizes.out_dims[2] + copied.kernel_shape[2] - 1, kRowUnit)};
  return found;
}

std::optional<SpaceToDepthLaunch> ChooseSpaceToDepth(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                     const ResolvedGeometry& copied, int64_t batch,
                                                     int64_t element_bytes, const DeviceFacts& device) {
  SpaceToDepthLaunch launch;
  SpaceToDepthParams& params = launch.params;
  for (size_t i = 0; i < 2; ++i) {
    params.strides[i] = static_cast<int>(geometry.strides[i + 1]);
    params.pads_begin[i] = static_cast<int>(sizes.pads_begin[i + 1]);
  }
  params.in_h = static_cast<int>(sizes.in_dims[1]);
  params.in_w = static_cast<int>(sizes.in_dims[2]);
  params.out_h = static_cast<int>(copied.in_dims[1]);
  params.out_w = static_cast<int>(copied.in_dims[2]);
  const int64_t maps = CheckedMultiply(batch, geometry.in_channels, "the maps of X");
  const int64_t plane = CheckedMultiply(copied.in_dims[1], copied.in_dims[2], "a plane of X without strides");
  const int64_t threads = CheckedMultiply(maps, plane / kSpaceToDepthColumns, "X without strides");
  if (threads > std::numeric_limits<int32_t>::max() - kThreads) return std::nullopt;
  params.num_threads = static_cast<unsigned>(threads);
  const int64_t places = geometry.strides[1] * geometry.strides[2];
  launch.bytes = static_cast<size_t>(
      CheckedMultiply(CheckedMultiply(maps, plane, "X without strides"), places * element_bytes, "X without strides"));
  const double x_bytes = static_cast<double>(maps * sizes.in_dims[1] * sizes.in_dims[2] * element_bytes);
  launch.cycles = kLaunchCycles + MemoryCycles(x_bytes + static_cast<double>(launch.bytes), device);
  launch.shape.threads = static_cast<unsigned>(kThreads);
  launch.shape.grid[0] = static_cast<unsigned>(CeilDivide(threads, kThreads));
  launch.shape.begins_early = true;
  return launch;
}

}  // namespace sparseconv::cuda
