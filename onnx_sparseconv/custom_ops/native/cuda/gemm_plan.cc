#include "gemm_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../checked.h"
#include "divisor.h"
#include "segments.h"
#include "tensor_launch.h"
#include "wgmma_plan.h"
#include "wgmma_weight.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kHalfBytes = 2, kVector = 16;
constexpr int64_t kSharedUnit = 128;
constexpr int64_t kBarrierBytes = 16;
// Stages are few: what is asked for ahead of them is no faster.
constexpr int64_t kMaxBoxStages = 4, kPackedStages = 2, kRawStages = 2, kMinStages = 2, kMaxWeights = 4;
// Cycles of a multiprocessor, about: fitted to 90 layers of ResNet-50, MobileNetV2 and YOLOv8n, 2 to 64 images, on an
// H100; they are 10% off (root mean square).
constexpr double kBeginCycles = 2500.0;  // of a block
constexpr double kStoreCycles = 80.0;    // of a segment of a tile
// To stage a chunk: bytes a cycle, and the least. Planes are packed, too.
struct StagingCosts {
  double bytes_a_cycle, least;
};
constexpr StagingCosts kBoxCosts = {62.0, 430.0}, kPlaneCosts = {31.0, 780.0};
constexpr double kGatherCycles = 2250.0;  // besides a launch, which waits for the one before, and what memory takes

bool IsVectors(int64_t bytes) { return bytes % kVector == 0; }

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          bool is_x_aligned)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        is_x_aligned_(is_x_aligned),
        plane_(PositionsOf(sizes.out_dims)),
        chunks_(CeilDivide(geometry.in_channels, int64_t{kGemmChannels})),
        row_blocks_(CeilDivide(geometry.out_channels, int64_t{kGemmRows})) {}

  std::optional<GemmLaunch> Choose() {
    for (const int segments : kGemmBoxesSegments) TryBoxes(segments);
    for (const int segments : kGemmPlanesSegments) TryPlanes(segments);
    return best_;
  }

 private:
  // What a tile takes of shared memory, in bytes of a stage; and stages.
  struct Room {
    int64_t stage, num_stages;
    int64_t raw, num_raws;
    int64_t output;  // of a warp
  };

  void TryBoxes(int segments) {
    if (!IsVectors(kHalfBytes * plane_)) return;
    const int64_t boxes = segments / kGemmBoxSegments;
    const int64_t image_boxes = CeilDivide(plane_, int64_t{kGemmBoxPositions});
    const int64_t box_bytes = kHalfBytes * kGemmBoxPositions;
    Room room{boxes * kGemmChannels * box_bytes, kMaxBoxStages, 0, 0, boxes * kGemmBoxRows * box_bytes};
    GemmLaunch launch;
    launch.has_boxes = true;
    launch.is_gathered = !is_x_aligned_;
    GemmParams& params = launch.params;
    params.image_boxes = static_cast<int>(image_boxes);
    params.by_image_boxes = MakeDivisor(image_boxes);
    Consider(segments, room, CeilDivide(CheckedMultiply(batch_, image_boxes, "the boxes"), boxes), &launch);
  }

  void TryPlanes(int segments) {
    const int64_t image_segments = SegmentsOf(plane_), images = std::min(segments / image_segments, batch_);
    if (images == 0 || !IsVectors(kHalfBytes * plane_ * geometry_.out_channels)) return;
    const int64_t whole_bytes = kHalfBytes * plane_;
    GemmLaunch launch;
    launch.is_gathered =
        !is_x_aligned_ || whole_bytes % kGemmPieceBytes != 0 || !IsVectors(whole_bytes * geometry_.in_channels);
    const int64_t plane_bytes = launch.is_gathered ? image_segments * kSegmentBytes : whole_bytes;
    Room room;
    room.stage = RoundUp(int64_t{segments} * kGemmPackedPitch, kSharedUnit);
    room.num_stages = kPackedStages;
    // The last segment of the last channel goes beyond its plane.
    room.raw = RoundUp(images * kGemmChannels * plane_bytes + kSegmentBytes, kSharedUnit);
    room.num_raws = kRawStages;
    room.output = images * kGemmBoxRows * whole_bytes;
    GemmParams& params = launch.params;
    params.x_plane_bytes = static_cast<int>(plane_bytes);
    params.image_segments = static_cast<int>(image_segments);
    params.tile_images = static_cast<int>(images);
    Consider(segments, room, CeilDivide(batch_, images), &launch);
  }

  // `places`: tiles of one row block.
  void Consider(int segments, Room room, int64_t places, GemmLaunch* launch) {
    const int64_t fixed =
        room.num_raws * (room.raw + kBarrierBytes) + kGemmProductWarps * (room.output + kBarrierBytes);
    const int64_t left = device_.max_shared_bytes - kReservedSharedBytes - fixed;
    const int64_t of_stage = room.stage + kBarrierBytes, of_weight = kGemmWeightBytes + kBarrierBytes;
    // Of the weight, no fewer chunks are asked for ahead than of X.
    room.num_stages = std::min(room.num_stages, left / (of_stage + of_weight));
    if (room.num_stages < kMinStages) return;
    const int64_t weights = std::min((left - room.num_stages * of_stage) / of_weight, kMaxWeights);
    const int64_t tiles = CheckedMultiply(places, row_blocks_, "the tiles");
    if (tiles > std::numeric_limits<int32_t>::max() - device_.num_multiprocessors) return;
    const int64_t blocks = std::min<int64_t>(tiles, device_.num_multiprocessors);
    launch->cycles = CyclesOf(*launch, segments, CeilDivide(tiles, blocks));
    if (best_ && launch->cycles >= best_->cycles) return;

    GemmParams& params = launch->params;
    params.batch = static_cast<int>(batch_);
    params.in_channels = static_cast<int>(geometry_.in_channels);
    params.out_channels = static_cast<int>(geometry_.out_channels);
    params.plane = static_cast<int>(plane_);
    params.num_chunks = static_cast<int>(chunks_);
    params.num_tiles = static_cast<int>(tiles);
    params.row_blocks = static_cast<int>(row_blocks_);
    params.by_row_blocks = MakeDivisor(row_blocks_);
    params.num_stages = static_cast<int>(room.num_stages);
    params.num_weights = static_cast<int>(weights);
    params.num_raws = static_cast<int>(room.num_raws);
    params.raw_bytes = static_cast<int>(room.raw);
    params.output_bytes = static_cast<int>(room.output);
    launch->segments = segments;
    launch->shape.grid[0] = static_cast<unsigned>(blocks);
    launch->shape.threads = kGemmThreads;
    launch->shape.begins_early = true;
    launch->shape.dynamic_shared_bytes =
        static_cast<unsigned>(fixed + room.num_stages * of_stage + weights * of_weight);
    best_ = *launch;
  }

  double CyclesOf(const GemmLaunch& launch, int segments, int64_t rounds) const {
    const int64_t of_channel =
        launch.has_boxes ? kSegmentBytes * segments : int64_t{launch.params.tile_images} * launch.params.x_plane_bytes;
    const StagingCosts& costs = launch.has_boxes ? kBoxCosts : kPlaneCosts;
    const auto bytes = static_cast<double>(kGemmChannels * of_channel + kGemmWeightBytes);
    const double of_tile =
        static_cast<double>(chunks_) * std::max(bytes / costs.bytes_a_cycle, costs.least) + kStoreCycles * segments;
    const auto planes = static_cast<double>(batch_ * (geometry_.in_channels + geometry_.out_channels));
    const double memory = MemoryCycles(planes * static_cast<double>(kHalfBytes * plane_), device_);
    const double cycles = kLaunchCycles + kBeginCycles + std::hypot(memory, static_cast<double>(rounds) * of_tile);
    if (!launch.is_gathered) return cycles;
    const auto gathered = static_cast<double>(2 * kHalfBytes * batch_ * geometry_.in_channels * plane_);
    return cycles + kLaunchCycles + kGatherCycles + MemoryCycles(gathered, device_);
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const bool is_x_aligned_;
  const int64_t plane_, chunks_, row_blocks_;
  std::optional<GemmLaunch> best_;
};

// Of planes [batch, channels]: boxes of `rows` of them.
void Encode(const void* planes, int64_t plane, int64_t channels, int64_t batch, unsigned rows, TensorMap* map) {
  constexpr int kHalves = 6, kAxes = 3;  // CU_TENSOR_MAP_DATA_TYPE_FLOAT16
  constexpr int kNotInterleaved = 0, kSwizzle128 = 3, kPromote128 = 2, kZeros = 0;
  const unsigned long long sizes[kAxes] = {static_cast<unsigned long long>(plane),
                                           static_cast<unsigned long long>(channels),
                                           static_cast<unsigned long long>(batch)};
  const unsigned long long strides[kAxes - 1] = {static_cast<unsigned long long>(kHalfBytes * plane),
                                                 static_cast<unsigned long long>(kHalfBytes * plane * channels)};
  const unsigned box[kAxes] = {kGemmBoxPositions, rows, 1}, steps[kAxes] = {1, 1, 1};
  GetDriver().encode_tensor_map(map, kHalves, kAxes, const_cast<void*>(planes), sizes, strides, box, steps,
                                kNotInterleaved, kSwizzle128, kPromote128, kZeros);
}

}  // namespace

std::optional<GemmLaunch> ChooseGemmLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, bool is_x_aligned) {
  const int64_t in_plane = PositionsOf(sizes.in_dims), plane = PositionsOf(sizes.out_dims);
  if (in_plane == 0 || plane == 0) return {};
  // Segments of all images, and bytes of an image, are ints.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t channels = std::max(geometry.in_channels, geometry.out_channels);
  const int64_t segments = CheckedMultiply(channels, SegmentsOf(std::max(in_plane, plane)), "an image");
  if (segments > kMax / kSegmentBytes || segments > kMax / batch) return {};
  return Planner(geometry, sizes, batch, device, is_x_aligned).Choose();
}

void EncodeBoxes(const void* x, void* y, const void* residual, GemmParams* params) {
  const int64_t plane = params->plane, batch = params->batch;
  Encode(x, plane, params->in_channels, batch, kGemmChannels, &params->x_map);
  Encode(y, plane, params->out_channels, batch, kGemmBoxRows, &params->y_map);
  if (residual != nullptr) Encode(residual, plane, params->out_channels, batch, kGemmBoxRows, &params->residual_map);
}

}  // namespace sparseconv::cuda
