#include "gather_plan.h"

#include <algorithm>
#include <limits>

#include "divisor.h"
#include "segments.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kGatherBlocks = 8;  // of a multiprocessor

}  // namespace

int LoadBytes(const GatheredMap& map, uintptr_t addresses, size_t element_bytes) {
  const bool is_every_second = 2 * map.out_w == map.in_w && map.strides[1] == 2 && map.pads_begin[0] == 0 &&
                               map.pads_begin[1] == 0 && (map.out_h - 1) * map.strides[0] < map.in_h;
  if (!is_every_second) return 0;
  const auto row = static_cast<uintptr_t>(map.in_w) * element_bytes;
  const uintptr_t begins =
      addresses | static_cast<uintptr_t>(map.strides[0]) * row | static_cast<uintptr_t>(map.in_h) * row;
  for (size_t bytes = kSegmentBytes; bytes >= 2 * element_bytes; bytes /= 2) {
    if (begins % bytes == 0 && row % bytes == 0) return static_cast<int>(bytes);
  }
  return 0;
}

GatherLaunch GatherPlanes(int batch, int channels, const GatheredMap& map, const DeviceFacts& device,
                          uintptr_t addresses, size_t element_bytes) {
  GatherLaunch gather;
  GatherParams& params = gather.params;
  params.plane_segments = static_cast<int>(SegmentsOf(map.out_h * map.out_w));
  params.num_segments = batch * channels * params.plane_segments;
  params.in_h = map.in_h;
  params.in_w = map.in_w;
  params.out_h = map.out_h;
  params.out_w = map.out_w;
  std::copy(std::begin(map.strides), std::end(map.strides), params.strides);
  std::copy(std::begin(map.pads_begin), std::end(map.pads_begin), params.pads_begin);
  params.is_whole = map.is_whole;
  params.channels = channels;
  gather.bytes = static_cast<size_t>(params.num_segments) * kSegmentBytes;
  gather.shape.threads = kGatherThreads;
  gather.shape.begins_early = true;
  gather.shape.grid[0] = static_cast<unsigned>(std::min(
      CeilDivide(int64_t{params.num_segments}, int64_t{kGatherThreads}), kGatherBlocks * device.num_multiprocessors));
  if (map.is_whole) {
    gather.kind = GatherKind::kWhole;
    params.plane_divisor = MakeDivisor(params.plane_segments);
    return gather;
  }
  params.load_bytes = LoadBytes(map, addresses, element_bytes);
  const int row_loads =
      params.load_bytes == 0 ? 0 : 2 * params.out_w / (params.load_bytes / static_cast<int>(element_bytes));
  const int64_t lines = int64_t{batch} * channels * params.out_h;
  if (row_loads > 0 && lines <= std::numeric_limits<int32_t>::max() / row_loads) {
    gather.kind = GatherKind::kColumns;
    params.num_lines = static_cast<int>(lines);
    params.row_divisor = MakeDivisor(row_loads);
    params.plane_divisor = MakeDivisor(params.out_h);
    return gather;
  }
  // Beside a block of the launch before, which takes nearly all shared memory, there would be too little first-level
  // cache for columns that are not neighbours.
  gather.shape.begins_early = false;
  return gather;
}

int64_t GatheredBytes(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t element_bytes) {
  return element_bytes * (PositionsOf(sizes.in_dims) / geometry.strides[1]) + 2 * PositionsOf(sizes.out_dims);
}

}  // namespace sparseconv::cuda
