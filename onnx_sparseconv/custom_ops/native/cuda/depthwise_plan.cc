#include "depthwise_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "../../../kernels/cuda/scale_params.h"
#include "../checked.h"
#include "divisor.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGridY = 65535;
// The weight is kept with its zeros, which must not be more than memory has room for, whatever a node says.
constexpr int64_t kMaxTaps = 1024;
constexpr int64_t kWarp = 32;
constexpr int64_t kVectorBytes = 16;
// Items of a band: enough that rows which two bands read hardly count, and few enough that several blocks run beside
// each other; and columns of kDepthwiseRows outputs of a block's planes. Measured on an H100.
constexpr int64_t kWantedItems = 448, kWantedColumns = 448;
// Blocks for each multiprocessor that are worth more than that, of bands and of planes; and those of which shared
// memory should have room, else one would wait for what another could bring.
constexpr int64_t kWantedBands = 2, kWantedBlocks = 8, kWantedResident = 4;

// Whether each output has one input, at the same place.
bool IsPointwise(const ConvGeometry& geometry, const ResolvedGeometry& sizes) {
  return geometry.taps() == 1 && sizes.out_dims == sizes.in_dims && sizes.pads_begin[1] == 0 &&
         sizes.pads_begin[2] == 0 && geometry.strides[1] == 1 && geometry.strides[2] == 1;
}

// Of the kernel for a geometry of several taps, or with strides or padding.
int WindowOf(const ConvGeometry& geometry, const ResolvedGeometry& sizes) {
  const int64_t size = geometry.kernel_shape[2], stride = geometry.strides[2];
  // How far the last column's window reaches beyond the map.
  const int64_t behind = (sizes.out_dims[2] - 1) * stride - sizes.pads_begin[2] + size - sizes.in_dims[2];
  if (geometry.kernel_shape[1] != size || geometry.strides[1] != stride || geometry.dilations[1] != 1 ||
      geometry.dilations[2] != 1 || sizes.pads_begin[2] > size / 2 || behind > size / 2) {
    return kAnyWindow;
  }
  for (int i = 0; i < static_cast<int>(std::size(kDepthwiseWindows)); ++i) {
    const DepthwiseWindow& window = kDepthwiseWindows[i];
    if (window.size == size && window.stride == stride && size > 1) return i;
  }
  return kAnyWindow;
}

// Of the kernel for one tap.
DepthwiseLaunch ScaleLaunch(int64_t planes, int64_t channels, int64_t plane_elements, int64_t element_bytes,
                            int64_t num_multiprocessors) {
  DepthwiseLaunch launch{};
  launch.window = kPointWindow;
  DepthwiseParams& params = launch.params;
  params.num_planes = static_cast<int>(planes), params.channels = static_cast<int>(channels);
  params.in_h = params.out_h = 1;
  params.in_w = params.out_w = params.strip_items = static_cast<int>(plane_elements);
  params.by_strip_items = MakeDivisor(plane_elements);
  params.by_channels = MakeDivisor(channels);
  const int64_t vectors = CeilDivide(planes * plane_elements * element_bytes, kVectorBytes);
  // A vector a thread until there are threads enough.
  const int64_t enough = kScaleBlocks * num_multiprocessors;
  const int64_t blocks = CeilDivide(vectors, int64_t{kMaxDepthwiseThreads});
  launch.shape.threads = kMaxDepthwiseThreads;
  launch.shape.grid[0] =
      static_cast<unsigned>(std::max(std::min(blocks, enough), CeilDivide(blocks, int64_t{kScaleVectors})));
  return launch;
}

// What a block computes; several bands are of one plane.
struct Blocks {
  int64_t planes, band_rows, strips;
};

}  // namespace

bool HasDepthwiseForm(const ConvGeometry& geometry) {
  return geometry.spatial_rank <= 2 && geometry.group == geometry.in_channels &&
         geometry.group == geometry.out_channels && geometry.taps() <= kMaxTaps;
}

std::optional<DepthwiseLaunch> ChooseDepthwiseLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                     int64_t batch, int64_t element_bytes, const DeviceFacts& device) {
  const auto& [in_d, in_h, in_w] = sizes.in_dims;
  const auto& [out_d, out_h, out_w] = sizes.out_dims;
  const int64_t planes = batch * geometry.in_channels;
  if (planes > kMaxInt) return std::nullopt;
  if (IsPointwise(geometry, sizes) && planes <= kMaxInt / (out_h * out_w)) {
    return ScaleLaunch(planes, geometry.in_channels, out_h * out_w, element_bytes, device.num_multiprocessors);
  }
  DepthwiseLaunch launch{};
  launch.window = WindowOf(geometry, sizes);
  const bool is_any = launch.window == kAnyWindow;
  const int64_t item_rows = is_any ? 1 : kDepthwiseRows;
  const bool is_half = element_bytes == sizeof(uint16_t);
  const int64_t item_columns = is_half ? kDepthwiseWindows[launch.window].half_columns : 1;

  const int64_t plane_strips = CeilDivide(out_h, item_rows), strip_items = CeilDivide(out_w, item_columns);
  const int64_t in_offset = is_any ? 0 : RoundUp(in_w * element_bytes + 2 * kDepthwiseSlackBytes, kVectorBytes);
  // Where a block's outputs begin. Of X it keeps a row at least, which is read to be masked.
  const auto out_offset = [&](const Blocks& blocks) {
    const int64_t reach = (blocks.band_rows - 1) * geometry.strides[1];
    const int64_t window = (geometry.kernel_shape[1] - 1) * geometry.dilations[1] + 1;
    const int64_t rows = blocks.planes > 1 ? in_h : std::min(reach + window, in_h);
    const int64_t bytes = blocks.planes * rows * in_w * element_bytes;
    return in_offset + RoundUp(bytes + kVectorBytes + kDepthwiseSlackBytes, kVectorBytes);
  };
  const auto shared_bytes = [&](const Blocks& blocks) {
    return out_offset(blocks) + blocks.planes * blocks.band_rows * out_w * element_bytes + kVectorBytes;
  };
  const auto bands_of = [&](int64_t strips) {
    return Blocks{1, strips == plane_strips ? out_h : strips * item_rows, strips};
  };

  const int64_t enough_strips = planes * plane_strips / (kWantedBands * device.num_multiprocessors);
  int64_t strips = std::clamp<int64_t>(std::min(kWantedItems / strip_items, enough_strips), 1, plane_strips);
  const int64_t most_bytes = device.max_shared_bytes - kReservedSharedBytes;
  while (strips > 1 && shared_bytes(bands_of(strips)) > most_bytes / kWantedResident) strips /= 2;
  Blocks blocks = bands_of(strips);
  if (shared_bytes(blocks) > most_bytes) return std::nullopt;
  const int64_t bands = CeilDivide(out_h, blocks.band_rows);
  if (bands > kMaxGridY) return std::nullopt;
  if (bands == 1) {
    const int64_t enough = std::max<int64_t>(planes / (kWantedBlocks * device.num_multiprocessors), 1);
    blocks.planes = std::clamp<int64_t>(kWantedColumns / (strips * out_w), 1, enough);
    while (blocks.planes > 1 && shared_bytes(blocks) > most_bytes / kWantedResident) blocks.planes /= 2;
  }

  DepthwiseParams& params = launch.params;
  params.num_planes = static_cast<int>(planes);
  params.channels = static_cast<int>(geometry.in_channels);
  params.in_h = static_cast<int>(in_h), params.in_w = static_cast<int>(in_w);
  params.out_h = static_cast<int>(out_h), params.out_w = static_cast<int>(out_w);
  params.kernel_h = static_cast<int>(geometry.kernel_shape[1]);
  params.kernel_w = static_cast<int>(geometry.kernel_shape[2]);
  params.stride_h = static_cast<int>(geometry.strides[1]), params.stride_w = static_cast<int>(geometry.strides[2]);
  params.dilation_h = static_cast<int>(geometry.dilations[1]);
  params.dilation_w = static_cast<int>(geometry.dilations[2]);
  params.pad_top = static_cast<int>(sizes.pads_begin[1]), params.pad_left = static_cast<int>(sizes.pads_begin[2]);
  params.block_planes = static_cast<int>(blocks.planes);
  params.band_rows = static_cast<int>(blocks.band_rows);
  params.strips = static_cast<int>(blocks.strips);
  params.strip_items = static_cast<int>(strip_items);
  params.in_offset = static_cast<int>(in_offset);
  params.out_offset = static_cast<int>(out_offset(blocks));
  params.by_strip_items = MakeDivisor(strip_items);
  params.by_strips = MakeDivisor(blocks.strips);
  params.by_channels = MakeDivisor(geometry.in_channels);

  const int64_t items = blocks.planes * blocks.strips * strip_items,
                rounds = CeilDivide(items, int64_t{kMaxDepthwiseThreads});
  launch.shape.threads = static_cast<unsigned>(RoundUp(CeilDivide(items, rounds), kWarp));
  launch.shape.grid[0] = static_cast<unsigned>(CeilDivide(planes, blocks.planes));
  launch.shape.grid[1] = static_cast<unsigned>(bands);
  launch.shape.dynamic_shared_bytes = static_cast<unsigned>(shared_bytes(blocks));
  return launch;
}

}  // namespace sparseconv::cuda
