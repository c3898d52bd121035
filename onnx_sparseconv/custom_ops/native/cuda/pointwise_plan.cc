#include "pointwise_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "../checked.h"
#include "segments.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kStageUnit = 128;
constexpr int64_t kMaxStages = 6;
// Of all stages: what they take of shared memory is no first-level cache, by way of which copies go.
constexpr int64_t kMaxStagesBytes = 150 << 10;
constexpr int64_t kMinRunSegments = 4;
constexpr int kMaxSegments = kPointwiseSegments[std::size(kPointwiseSegments) - 1];
// Cycles of a multiprocessor, about: fitted to the 1x1 layers of ResNet-50, 64 images, on an H200.
constexpr double kTileCycles = 3260.0;       // to begin a tile and to store it
constexpr double kWideTileCycles = 2060.0;   // more with the most segments
constexpr double kFloatTileCycles = 3000.0;  // more where outputs are floats
constexpr double kChunkCycles = 309.0;       // for warps to wait for each other
constexpr double kSegmentCycles = 18.9;      // to copy a segment of a chunk
constexpr double kRoundedCycles = 60.0;      // to load, round and store one of floats
constexpr double kBeginCycles = 2000.0;      // of a block
constexpr int kMinPlaneUnit = 4;             // positions: planes that are no multiple of it are gathered
constexpr int64_t kGatherBlocks = 8;         // of a multiprocessor

// Runs of segments of a tile: of several whole planes, or of a part of one.
struct Tiling {
  int segments;
  int64_t run_images, run_segments;
  int64_t runs_images, runs_segments;  // of the tile

  int64_t images() const { return runs_images * run_images; }
  int64_t columns() const { return runs_segments * run_segments; }
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const WgmmaFacts& facts, bool is_gathered)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        facts_(facts),
        is_gathered_(is_gathered),
        plane_(PositionsOf(sizes.out_dims)) {}

  std::optional<PointwiseLaunch> Choose() {
    const int64_t runs = kWarpgroups / facts_.form.row_tiles, all = SegmentsOf(plane_);
    for (const int segments : kPointwiseSegments) {
      for (int64_t images = 1; images * all <= segments; ++images) Consider({segments, images, all, runs, 1});
      for (int64_t part = std::min<int64_t>(segments, all - 1); part >= std::min(kMinRunSegments, all); --part) {
        Consider({segments, 1, part, 1, runs});
      }
    }
    if (best_.segments == 0) return std::nullopt;
    return best_;
  }

 private:
  void Consider(const Tiling& tiling) {
    const WgmmaForm& form = facts_.form;
    const int64_t runs = tiling.runs_images * tiling.runs_segments;
    const int64_t input_bytes = runs * tiling.segments * kWgmmaPixelBytes;
    const int64_t stage_bytes = CeilDivide(input_bytes + facts_.max_chunk_bytes, kStageUnit) * kStageUnit;
    const int64_t rows = form.row_tiles * int64_t{kWgmmaTileRows};
    const int64_t table_bytes = (facts_.max_block_chunks * kWgmmaChannels + rows) * int64_t{4};
    const int64_t fixed_bytes = table_bytes + kPointwisePartBytes;
    const int64_t room = device_.max_shared_bytes - kReservedSharedBytes - fixed_bytes;
    const int64_t wanted = std::clamp<int64_t>(kMaxStagesBytes / stage_bytes, 1, kMaxStages);
    const int64_t stages = std::min(room / (stage_bytes + kBarrierBytes), wanted);
    if (stages <= 0) return;

    const int64_t tiles_x = CeilDivide(SegmentsOf(plane_), tiling.columns());
    const int64_t tiles_y = CeilDivide(batch_, tiling.images());
    const int64_t all_blocks = geometry_.group * form.blocks_per_group;
    const int64_t tiles = CheckedMultiply(CheckedMultiply(all_blocks, tiles_x, "the tiles"), tiles_y, "the tiles");
    // A block's last index goes beyond them.
    if (tiles > std::numeric_limits<int32_t>::max() / 2) return;
    // All tiles of a block are of one row block.
    const int64_t rounds = std::max<int64_t>(device_.num_multiprocessors / all_blocks, 1);
    const int64_t blocks = std::min(tiles, rounds * all_blocks);

    const double chunks = static_cast<double>(facts_.num_chunks) / static_cast<double>(all_blocks);
    const auto segments = static_cast<double>(tiling.images() * tiling.columns());
    const bool is_float = facts_.element_bytes > 2;
    const double of_tile =
        kTileCycles + (tiling.segments == kMaxSegments ? kWideTileCycles : 0.0) + (is_float ? kFloatTileCycles : 0.0);
    const double of_segment = is_float && !is_gathered_ ? kRoundedCycles : kSegmentCycles;
    const double of_chunks = chunks * (kChunkCycles + segments * of_segment);
    Sharing sharing{1, static_cast<double>(CeilDivide(tiles, blocks)) * (of_tile + of_chunks)};
    if (blocks == tiles && tiles <= device_.num_multiprocessors)
      sharing = ShareChunks(tiles, chunks, of_chunks, of_tile, facts_.element_bytes * NumValues(), device_);
    const double cycles = kLaunchCycles + kBeginCycles + sharing.cycles;
    if (best_.segments != 0 && cycles >= best_.cycles) return;

    best_ = PointwiseLaunch{};
    best_.cycles = cycles;
    PointwiseParams& params = best_.params;
    FillTiles(
        geometry_, sizes_, batch_, form,
        {tiles_x, tiles_y, tiling.images(), tiling.columns(), tiles, stages, stage_bytes, input_bytes, table_bytes},
        &params.common);
    params.chunk_bytes = facts_.max_chunk_bytes;
    params.plane = static_cast<int>(plane_);
    params.run_images = static_cast<int>(tiling.run_images);
    params.run_segments = static_cast<int>(tiling.run_segments);
    params.run_step_images = tiling.runs_images > 1 ? params.run_images : 0;
    params.run_step_segments = tiling.runs_segments > 1 ? params.run_segments : 0;
    params.out_columns = MaxColumns(facts_);
    while (params.plane % params.out_columns != 0) params.out_columns /= 2;
    params.y_part = PartValues(NumValues());
    best_.segments = tiling.segments;
    best_.shape.grid[0] = static_cast<unsigned>(blocks);
    best_.shape.grid[1] = static_cast<unsigned>(sharing.parts);
    best_.shape.threads = kWgmmaThreads;
    best_.shape.begins_early = true;
    best_.shape.dynamic_shared_bytes = static_cast<unsigned>(stages * (stage_bytes + kBarrierBytes) + fixed_bytes);
  }

  int64_t NumValues() const { return batch_ * geometry_.out_channels * plane_; }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const WgmmaFacts& facts_;
  const bool is_gathered_;
  const int64_t plane_;
  PointwiseLaunch best_;
};

}  // namespace

std::optional<PointwiseLaunch> ChoosePointwiseLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                     int64_t batch, const DeviceFacts& device,
                                                     const WgmmaFacts& facts) {
  if (PositionsOf(sizes.in_dims) == 0) return std::nullopt;
  // Bytes of an image, and the segments of all, are ints.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t channels = std::max(geometry.in_channels, geometry.out_channels);
  const int64_t plane = std::max(PositionsOf(sizes.in_dims), PositionsOf(sizes.out_dims));
  const int64_t segments = CheckedMultiply(channels, SegmentsOf(plane), "an image");
  if (segments > kMax / (kSegmentPositions * facts.element_bytes) || segments > kMax / batch) return std::nullopt;
  const bool is_whole = IsPlain(geometry);
  const bool is_gathered = !is_whole || PositionsOf(sizes.out_dims) % kMinPlaneUnit != 0;
  auto launch = Planner(geometry, sizes, batch, device, facts, is_gathered).Choose();
  if (!launch) return launch;
  launch->is_whole = is_whole;
  if (is_gathered) {
    const int64_t bytes = GatheredBytes(geometry, sizes, facts.element_bytes);
    launch->cycles += kLaunchCycles + MemoryCycles(static_cast<double>(batch * geometry.in_channels * bytes), device);
  }
  return launch;
}

unsigned PlaneBytes(uintptr_t addresses, const PointwiseLaunch& launch, size_t element_bytes) {
  const auto bytes = static_cast<unsigned>(launch.params.plane * element_bytes);
  // Copies of 8 bytes are of halves alone, and of planes that are no multiple of 16: that, the kernel goes by.
  const unsigned unit = element_bytes > 2 || bytes % 16 == 0 ? 16 : 8;
  return bytes % unit == 0 && addresses % unit == 0 ? bytes : 0;
}

unsigned GatheredPlaneBytes(const PointwiseLaunch& launch) {
  return static_cast<unsigned>(SegmentsOf(launch.params.plane) * kSegmentBytes);
}

GatherLaunch GatherX(const PointwiseLaunch& launch, const DeviceFacts& device, uintptr_t addresses,
                     size_t element_bytes) {
  const TileParams& tile = launch.params.common.tile;
  GatheredMap map = WholePlane(launch.params.plane);
  if (!launch.is_whole) {
    map = {tile.in_h, tile.in_w, tile.out_h, tile.out_w};
    for (size_t i = 0; i < 2; ++i) {
      map.strides[i] = tile.strides[i];
      map.pads_begin[i] = tile.pads_begin[i];
    }
  }
  return GatherPlanes(tile.batch, tile.in_channels, map, device, addresses, element_bytes);
}

GatherLaunch GatherResidual(const PointwiseLaunch& launch, const DeviceFacts& device) {
  const TileParams& tile = launch.params.common.tile;
  return GatherPlanes(tile.batch, tile.out_channels, WholePlane(launch.params.plane), device, 0, sizeof(uint16_t));
}

}  // namespace sparseconv::cuda
