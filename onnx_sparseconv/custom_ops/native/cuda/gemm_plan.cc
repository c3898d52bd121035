#include "gemm_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../checked.h"
#include "divisor.h"
#include "segments.h"
#include "tensor_launch.h"
#include "tensor_map.h"
#include "wgmma_plan.h"
#include "wgmma_weight.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kVector = 16, kFloatVector = kVector / kFloatBytes;
constexpr int64_t kStep = 2;  // where there are strides
// What is read behind a raw stage, at most: a piece.
constexpr int64_t kMaxBeyond = kStep * kFloatBytes * kGemmPiecePositions;
constexpr int64_t kSharedUnit = 128;
// Of a stage, and of all residuals.
constexpr int64_t kBarrierBytes = 16, kResidualBarrierBytes = 8 * kGemmProductWarps * kMaxGemmOutputs;
// Stages are few: what is asked for ahead of them is no faster.
constexpr int64_t kMaxBoxStages = 4, kMaxReadyStages = 4, kPackedStages = 2, kRawStages = 2, kMinStages = 2,
                  kMaxWeights = 4;
// Of floats: where tiles have so few chunks, there had better be room for the outputs of two.
constexpr int64_t kFewChunks = 2;
// What `GemmConv::MoveOf` has bits for.
constexpr int64_t kMaxRawBytes = int64_t{1} << 16;
// Cycles of a multiprocessor, about: fitted to 90 layers of ResNet-50, MobileNetV2 and YOLOv8n of each type, 2 to 64
// images, on an H100. Those of halves are 10% off (root mean square). Those of floats are such that of these layers,
// the fastest kernel is taken, but for 0.2% of the time in the mean; the others lose more where there is a residual.
struct Costs {
  double bytes_a_cycle, least;  // to stage a chunk; planes, and floats, are packed, too
  double store;                 // a segment of a tile
  double begin;                 // of a block
};
constexpr Costs kBoxCosts = {62.0, 430.0, 80.0, 2500.0}, kPlaneCosts = {31.0, 780.0, 80.0, 2500.0},
                kFloatBoxCosts = {36.0, 0.0, 72.0, 400.0}, kStridedCosts = {24.0, 0.0, 72.0, 400.0},
                kFloatPlaneCosts = {36.0, 0.0, 160.0, 400.0}, kReadyCosts = {62.0, 430.0, 80.0, 2500.0},
                kReadyFloatCosts = {62.0, 430.0, 72.0, 2500.0};
// Of what copies X, besides a launch, which waits for the one before, and what memory takes; and more of halves where
// that makes it ready and there are strides.
constexpr double kGatherCycles = 2250.0, kStridedPackCycles = 4000.0;

int64_t PackedStageBytes(int segments) { return RoundUp(int64_t{segments} * kGemmPackedPitch, kGemmStageUnit); }

bool IsVectors(int64_t bytes) { return bytes % kVector == 0; }

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          int64_t element_bytes, bool is_x_aligned)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        element_bytes_(element_bytes),
        is_x_aligned_(is_x_aligned),
        plane_(PositionsOf(sizes.out_dims)),
        step_(geometry.strides[2]),
        chunks_(CeilDivide(geometry.in_channels, int64_t{kGemmChannels})),
        row_blocks_(CeilDivide(geometry.out_channels, int64_t{kGemmRows})) {}

  std::optional<GemmLaunch> Choose() {
    if (element_bytes_ == kHalfBytes) {
      for (const int segments : kGemmBoxesSegments) TryBoxes(segments);
      for (const int segments : kGemmPlanesSegments) TryPlanes(segments);
      for (const int segments : kReadyPlanesSegments) TryReadyPlanes(segments);
      return best_;
    }
    if (is_x_aligned_ && HasRows()) {
      for (const int segments : kGemmFloatSegments) {
        TryFloatBoxes(segments);
        if (step_ == 1) TryFloatPlanes(segments);
      }
    }
    if (step_ > 1) {
      for (const int segments : kReadyFloatBoxesSegments) TryReadyBoxes(segments);
      for (const int segments : kReadyFloatPlanesSegments) TryReadyPlanes(segments);
    }
    return best_;
  }

 private:
  // What a tile takes of shared memory, in bytes of a stage; and stages.
  struct Room {
    int64_t stage, num_stages;
    int64_t raw, num_raws;
    int64_t output, num_outputs;  // of a warp
    int64_t num_weights;
  };

  // Whether the rows of X can be copied where there are strides: whole vectors, and a plane is so many times two rows,
  // as the driver wants it of a tensor's axes.
  bool HasRows() const {
    const int64_t height = sizes_.in_dims[1], rows_bytes = kStep * kFloatBytes * sizes_.in_dims[2];
    return step_ == 1 || (height % kStep == 0 && IsVectors(rows_bytes));
  }

  void TryBoxes(int segments) {
    if (!IsVectors(kHalfBytes * plane_)) return;
    const int64_t boxes = segments / kGemmBoxSegments;
    const int64_t image_boxes = CeilDivide(plane_, int64_t{kGemmBoxPositions});
    const int64_t box_bytes = kHalfBytes * kGemmBoxPositions;
    Room room{boxes * kGemmChannels * box_bytes, kMaxBoxStages, 0, 0, boxes * kGemmBoxRows * box_bytes, 1, 0};
    GemmLaunch launch;
    launch.has_boxes = true;
    launch.is_gathered = !is_x_aligned_ || step_ > 1;
    GemmParams& params = launch.params;
    params.image_boxes = static_cast<int>(image_boxes);
    params.by_image_boxes = MakeDivisor(image_boxes);
    if (!FindRoom(&room)) return;
    Consider(segments, room, CeilDivide(CheckedMultiply(batch_, image_boxes, "the boxes"), boxes), &launch);
  }

  void TryPlanes(int segments) {
    const int64_t images = std::min(segments / SegmentsOf(plane_), batch_), plane_bytes = kHalfBytes * plane_;
    if (images == 0 || !ArePlanes() || !is_x_aligned_ || step_ > 1) return;
    GemmLaunch launch;
    Room room{};
    room.stage = PackedStageBytes(segments);
    room.num_stages = kPackedStages;
    // The last segment of the last channel goes beyond its plane.
    room.raw = RoundUp(images * kGemmChannels * plane_bytes + kSegmentBytes, kSharedUnit);
    room.num_raws = kRawStages;
    room.output = images * kGemmBoxRows * plane_bytes;
    room.num_outputs = 1;
    GemmParams& params = launch.params;
    params.x_plane_bytes = static_cast<int>(plane_bytes);
    SetPlanes(images, &params);
    if (!FindRoom(&room)) return;
    Consider(segments, room, CeilDivide(batch_, images), &launch);
  }

  // Whether planes of X, of halves, can be brought and packed where they are, and those of Y stored.
  bool ArePlanes() const {
    const int64_t bytes = kHalfBytes * plane_;
    return plane_ % kGemmPiecePositions == 0 && IsVectors(bytes * geometry_.in_channels) &&
           IsVectors(bytes * geometry_.out_channels);
  }

  void TryReadyPlanes(int segments) {
    const int64_t images = std::min(segments / SegmentsOf(plane_), batch_), bytes = element_bytes_ * plane_;
    if (images == 0 || plane_ > kMaxPackedLine || !IsVectors(bytes * geometry_.out_channels)) return;
    GemmLaunch launch;
    SetPlanes(images, &launch.params);
    ConsiderReady(segments, images * kGemmBoxRows * bytes, CeilDivide(batch_, images), &launch);
  }

  // Of floats.
  void TryReadyBoxes(int segments) {
    if (!IsVectors(kFloatBytes * plane_)) return;
    GemmLaunch launch;
    const int64_t output = SetFloatBoxes(segments, &launch);
    ConsiderReady(segments, output, CheckedMultiply(batch_, launch.params.image_boxes, "the boxes"), &launch);
  }

  // `output`: bytes of a warp; `places`: tiles of one row block.
  void ConsiderReady(int segments, int64_t output, int64_t places, GemmLaunch* launch) {
    launch->is_ready = true;
    Room room{PackedStageBytes(segments), kMaxReadyStages, 0, 0, output, 1, 0};
    if (FindRoom(&room)) Consider(segments, room, places, launch);
  }

  void TryFloatBoxes(int segments) {
    if (!IsVectors(kFloatBytes * plane_)) return;
    if (step_ > 1) return TryRows(segments);
    GemmLaunch launch;
    const int64_t output = SetFloatBoxes(segments, &launch);
    ConsiderFloats(segments, output, CheckedMultiply(batch_, launch.params.image_boxes, "the boxes"), &launch);
  }

  // Boxes of all planes are of one size, and as few as there may be. Returns the bytes of a warp's outputs.
  int64_t SetFloatBoxes(int segments, GemmLaunch* launch) const {
    launch->has_boxes = true;
    GemmParams& params = launch->params;
    const int64_t image_boxes = CeilDivide(plane_, int64_t{segments} * kSegmentPositions);
    const int64_t positions = RoundUp(CeilDivide(plane_, image_boxes), kFloatVector);
    params.image_boxes = static_cast<int>(image_boxes);
    params.by_image_boxes = MakeDivisor(image_boxes);
    params.out_pitch = static_cast<int>(positions);
    params.x_plane_bytes = static_cast<int>(kFloatBytes * positions);
    SetLines(1, segments, positions, 0, &params);
    return RoundUp(kGemmBoxRows * kFloatBytes * positions, kSharedUnit);
  }

  // With strides, boxes of every second row.
  void TryRows(int segments) {
    const int64_t height = sizes_.out_dims[1], width = sizes_.out_dims[2], row_segments = SegmentsOf(width);
    int64_t rows = std::min(segments / row_segments, height);
    while (rows > 0 && rows * width % kFloatVector != 0) --rows;
    if (rows == 0) return;
    GemmLaunch launch;
    launch.has_boxes = true;
    GemmParams& params = launch.params;
    const int64_t image_boxes = CeilDivide(height, rows);
    params.image_boxes = static_cast<int>(image_boxes);
    params.by_image_boxes = MakeDivisor(image_boxes);
    params.out_pitch = static_cast<int>(rows * width);
    SetLines(rows, row_segments, width, width, &params);
    // Of every second row, whole vectors, up to the last column that is read.
    const int64_t columns = RoundUp(kStep * width - 1, kFloatVector);
    params.x_line_bytes = static_cast<int>(kFloatBytes * columns);
    params.x_plane_bytes = params.tile_lines * params.x_line_bytes;
    const int64_t output = RoundUp(kGemmBoxRows * kFloatBytes * params.out_pitch, kSharedUnit);
    ConsiderFloats(segments, output, CheckedMultiply(batch_, image_boxes, "the boxes"), &launch);
  }

  void TryFloatPlanes(int segments) {
    const int64_t images = std::min(segments / SegmentsOf(plane_), batch_), bytes = kFloatBytes * plane_;
    if (images == 0 || !IsVectors(bytes * geometry_.in_channels) || !IsVectors(bytes * geometry_.out_channels)) return;
    GemmLaunch launch;
    launch.params.x_plane_bytes = static_cast<int>(bytes);
    SetPlanes(images, &launch.params);
    ConsiderFloats(segments, images * kGemmBoxRows * bytes, CeilDivide(batch_, images), &launch);
  }

  // Lines are planes, of so many images a tile.
  void SetPlanes(int64_t images, GemmParams* params) const {
    params->tile_images = static_cast<int>(images);
    params->out_pitch = static_cast<int>(plane_);
    params->x_line_bytes = kGemmChannels * params->x_plane_bytes;
    SetLines(images, SegmentsOf(plane_), plane_, kGemmBoxRows * plane_, params);
  }

  static void SetLines(int64_t lines, int64_t segments, int64_t positions, int64_t pitch, GemmParams* params) {
    params->tile_lines = static_cast<int>(lines);
    params->line_segments = static_cast<int>(segments);
    params->line_positions = static_cast<int>(positions);
    params->line_pitch = static_cast<int>(pitch);
    params->by_line_segments = MakeDivisor(segments);
  }

  // `output`: bytes of a warp.
  void ConsiderFloats(int segments, int64_t output, int64_t places, GemmLaunch* launch) {
    Room room{};
    room.output = output;
    // The last piece of a line goes beyond it.
    const GemmParams& params = launch->params;
    const int64_t raw = XBytes(params);
    room.raw = RoundUp(raw + (launch->has_boxes && step_ == 1 ? 0 : kMaxBeyond), kSharedUnit);
    if (room.raw > kMaxRawBytes) return;
    room.stage = PackedStageBytes(segments);
    if (FindFloatRoom(&room)) Consider(segments, room, places, launch);
  }

  // Of a raw stage.
  static int64_t XBytes(const GemmParams& params) {
    return int64_t{kGemmChannels} * params.x_plane_bytes * std::max(params.tile_images, 1);
  }

  // All but the barriers of residuals.
  static int64_t BytesOf(const Room& room) {
    return room.num_stages * (room.stage + kBarrierBytes) + room.num_weights * (kGemmWeightBytes + kBarrierBytes) +
           room.num_raws * (room.raw + kBarrierBytes) + kGemmProductWarps * room.num_outputs * room.output;
  }

  bool Fits(const Room& room) const { return BytesOf(room) + kResidualBarrierBytes <= MaxBytes(); }
  int64_t MaxBytes() const { return device_.max_shared_bytes - kReservedSharedBytes; }

  // Of halves: stages of X as many as there is room for, up to those asked for. Of the weight, no fewer chunks are
  // asked for ahead than of X.
  bool FindRoom(Room* room) const {
    for (room->num_weights = room->num_stages; !Fits(*room); room->num_weights = --room->num_stages) {
      if (room->num_stages == kMinStages) return false;
    }
    FillWith(&Room::num_weights, kMaxWeights, room);
    return true;
  }

  // Of floats. A chunk is released when the next one is multiplied, or the tile ends.
  bool FindFloatRoom(Room* room) const {
    room->num_stages = room->num_weights = std::min(chunks_, kMinStages);
    room->num_raws = kRawStages;
    room->num_outputs = 1;
    if (!Fits(*room)) return false;
    if (chunks_ <= kFewChunks) FillWith(&Room::num_outputs, kMaxGemmOutputs, room);
    // Chunks that are asked for ahead are as many of the weight as of X.
    for (int64_t count = kMinStages; count <= kMaxWeights; ++count) {
      FillWith(&Room::num_weights, count, room);
      FillWith(&Room::num_raws, count, room);
    }
    FillWith(&Room::num_stages, kPackedStages, room);
    return true;
  }

  // As many of something, up to so many, as there is room for.
  void FillWith(int64_t Room::* count, int64_t most, Room* room) const {
    while (room->*count < most) {
      ++(room->*count);
      if (Fits(*room)) continue;
      --(room->*count);
      return;
    }
  }

  // `places`: tiles of one row block.
  void Consider(int segments, const Room& room, int64_t places, GemmLaunch* launch) {
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
    // What was copied has no strides.
    params.x_step = launch->is_copied() ? 1 : static_cast<int>(step_);
    launch->map = Map();
    if (params.out_pitch == 0) params.out_pitch = params.plane;
    params.num_chunks = static_cast<int>(chunks_);
    params.num_tiles = static_cast<int>(tiles);
    params.row_blocks = static_cast<int>(row_blocks_);
    params.by_row_blocks = MakeDivisor(row_blocks_);
    params.num_stages = static_cast<int>(room.num_stages);
    params.num_weights = static_cast<int>(room.num_weights);
    params.num_raws = static_cast<int>(room.num_raws);
    params.num_outputs = static_cast<int>(room.num_outputs);
    params.raw_bytes = static_cast<int>(room.raw);
    params.output_bytes = static_cast<int>(room.output);
    launch->segments = segments;
    launch->shape.grid[0] = static_cast<unsigned>(blocks);
    launch->shape.threads = kGemmThreads;
    launch->shape.begins_early = true;
    launch->shape.dynamic_shared_bytes = static_cast<unsigned>(BytesOf(room) + kResidualBarrierBytes);
    best_ = *launch;
  }

  GatheredMap Map() const {
    const auto &in = sizes_.in_dims, &out = sizes_.out_dims;
    if (step_ == 1) return WholePlane(static_cast<int>(plane_));
    GatheredMap map{static_cast<int>(in[1]), static_cast<int>(in[2]), static_cast<int>(out[1]),
                    static_cast<int>(out[2])};
    map.strides[0] = map.strides[1] = static_cast<int>(step_);
    return map;
  }

  const Costs& CostsOf(const GemmLaunch& launch) const {
    if (launch.is_ready) return element_bytes_ == kHalfBytes ? kReadyCosts : kReadyFloatCosts;
    if (element_bytes_ == kHalfBytes) return launch.has_boxes ? kBoxCosts : kPlaneCosts;
    if (step_ > 1) return kStridedCosts;
    return launch.has_boxes ? kFloatBoxCosts : kFloatPlaneCosts;
  }

  double CyclesOf(const GemmLaunch& launch, int segments, int64_t rounds) const {
    const bool is_half = element_bytes_ == kHalfBytes;
    const bool has_halves = launch.is_ready || (is_half && launch.has_boxes);
    const int64_t of_x = has_halves ? kGemmChannels * kSegmentBytes * segments : XBytes(launch.params);
    const Costs& costs = CostsOf(launch);
    const auto bytes = static_cast<double>(of_x + kGemmWeightBytes);
    const double of_tile =
        static_cast<double>(chunks_) * std::max(bytes / costs.bytes_a_cycle, costs.least) + costs.store * segments;
    // Of rows, all columns come.
    const int64_t of_position = launch.is_copied() ? kHalfBytes : step_ * element_bytes_;
    const auto moved = static_cast<double>(
        batch_ * (of_position * geometry_.in_channels + element_bytes_ * geometry_.out_channels) * plane_);
    const double memory = MemoryCycles(moved, device_);
    const double cycles = kLaunchCycles + costs.begin + std::hypot(memory, static_cast<double>(rounds) * of_tile);
    if (!launch.is_copied()) return cycles;
    const auto gathered =
        static_cast<double>(batch_ * geometry_.in_channels * GatheredBytes(geometry_, sizes_, element_bytes_));
    const double of_strides = is_half && launch.is_ready && step_ > 1 ? kStridedPackCycles : 0.0;
    return cycles + kLaunchCycles + kGatherCycles + of_strides + MemoryCycles(gathered, device_);
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const int64_t element_bytes_;
  const bool is_x_aligned_;
  const int64_t plane_, step_, chunks_, row_blocks_;
  std::optional<GemmLaunch> best_;
};

TensorAxes PlanesOf(const GemmParams& params, int64_t channels) {
  return {{params.plane, channels, params.batch}, {params.plane, params.plane * channels}};
}

// Every second row of X, of all its planes.
TensorAxes RowsOf(const GemmParams& params, const GatheredMap& map) {
  const int64_t height = map.in_h, width = map.in_w;
  return {{width, CeilDivide(height, kStep), int64_t{params.batch} * params.in_channels},
          {kStep * width, height * width}};
}

}  // namespace

std::optional<GemmLaunch> ChooseGemmLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, int64_t element_bytes, bool is_x_aligned) {
  const int64_t in_plane = PositionsOf(sizes.in_dims), plane = PositionsOf(sizes.out_dims);
  if (in_plane == 0 || plane == 0) return {};
  // Segments of all images, and bytes of an image, are ints.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t channels = std::max(geometry.in_channels, geometry.out_channels);
  const int64_t segments = CheckedMultiply(channels, SegmentsOf(std::max(in_plane, plane)), "an image");
  if (segments > kMax / kSegmentBytes || segments > kMax / batch) return {};
  return Planner(geometry, sizes, batch, device, element_bytes, is_x_aligned).Choose();
}

PackLaunch MakeReady(const GemmLaunch& launch, const void* x, size_t element_bytes) {
  PackLaunch pack;
  PackParams& params = pack.params;
  const GemmParams& gemm = launch.params;
  params.x = x;
  params.in_channels = gemm.in_channels;
  params.num_chunks = gemm.num_chunks;
  params.block_channels = kGemmChannels;
  while (params.block_channels * gemm.line_segments > kPackPieces) params.block_channels /= 2;
  params.in_h = launch.map.in_h;
  params.in_w = launch.map.in_w;
  params.out_w = launch.map.out_w;
  params.plane = gemm.plane;
  for (size_t i = 0; i < 2; ++i) params.strides[i] = launch.map.strides[i];
  params.load_bytes =
      launch.map.is_whole ? kPackWhole : LoadBytes(launch.map, reinterpret_cast<uintptr_t>(x), element_bytes);
  params.tile_lines = gemm.tile_lines;
  params.image_lines = launch.has_boxes ? gemm.image_boxes : 1;
  params.line_positions = gemm.out_pitch;
  params.line_segments = gemm.line_segments;
  params.by_line_segments = gemm.by_line_segments;
  params.stage_bytes = static_cast<int>(PackedStageBytes(launch.segments));
  const int64_t lines = int64_t{gemm.batch} * params.image_lines, tiles = CeilDivide(lines, int64_t{gemm.tile_lines});
  pack.bytes = static_cast<size_t>(tiles * gemm.num_chunks) * static_cast<size_t>(params.stage_bytes);
  pack.shape.grid[0] = static_cast<unsigned>(lines);
  pack.shape.grid[1] = static_cast<unsigned>(gemm.num_chunks * kGemmChannels / params.block_channels);
  pack.shape.threads = kPackThreads;
  pack.shape.begins_early = true;
  return pack;
}

void EncodeBoxes(const GemmLaunch& launch, bool is_half, GemmParams* params) {
  const int positions = is_half ? kGemmBoxPositions : params->out_pitch;
  const BoxLayout layout = is_half ? BoxLayout::kSwizzledHalves : BoxLayout::kFloats;
  if (params->x_step > 1) {
    const int columns = params->x_line_bytes / static_cast<int>(kFloatBytes);
    EncodeTensorMap(params->x, RowsOf(*params, launch.map), {columns, params->tile_lines, kGemmChannels}, layout,
                    &params->x_map);
  } else if (launch.has_boxes && !launch.is_ready) {
    EncodeTensorMap(params->x, PlanesOf(*params, params->in_channels), {positions, kGemmChannels, 1}, layout,
                    &params->x_map);
  }
  if (!launch.has_boxes) return;
  const auto encode = [&](const void* outputs, TensorMap* map) {
    EncodeTensorMap(outputs, PlanesOf(*params, params->out_channels), {positions, kGemmBoxRows, 1}, layout, map);
  };
  encode(params->y, &params->y_map);
  if (params->epilogue.residual != nullptr) encode(params->epilogue.residual, &params->residual_map);
}

}  // namespace sparseconv::cuda
