#include "segment_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>

#include "../checked.h"
#include "divisor.h"
#include "segments.h"
#include "tensor_launch.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kQuarters = 4;  // of a multiprocessor, each with its own tensor core
constexpr int64_t kMaxWarps = kMaxSegmentThreads / kWarp, kMinWarps = 4;
constexpr int64_t kResidentWarps = kSegmentBlocks * kMaxWarps;
constexpr int64_t kMinPlaneUnit = 4;  // positions
constexpr int64_t kMaxStages = 4, kFloatStages = 2;
constexpr int64_t kFloatPieces = 2, kBatchPieces = 4;  // of a segment, and of a batch of a thread
constexpr int64_t kPieceBytes = 16 * kWarp;            // of a warp
// Cycles of a multiprocessor, fitted to some nine hundred launches of thirty layers on an H100, with 1 to 64 images.
constexpr double kProductCycles = 24.5;  // of mma.sp.m16n8k32, with all that is done around it, on one quarter
constexpr double kL2BytesACycle = 23.5;  // of a multiprocessor
constexpr double kPieceCycles = 29.0;    // of a warp that loads, rounds and stores 128 floats
constexpr double kOutputCycles = 0.046, kFloatOutputCycles = 0.226;
constexpr double kShareCycles = 350.0;  // of a warp that shares in the steps of others
// Until what a warp asked for is there: a chunk of halves, a batch of floats, a step.
constexpr double kChunkCycles = 774.0, kBatchCycles = 835.0, kStepCycles = 790.0;
constexpr double kTileCycles = 2640.0;        // of a block, to begin a tile and to store it
constexpr double kFloatBlockCycles = 3530.0;  // more, of floats
constexpr double kOverlap = 0.27;             // what the lesser of work, waiting and memory add to the greatest
constexpr double kLaunchAndFirstCycles = 7000.0;
constexpr double kReduceCycles = 2000.0;  // of the launch that adds up parts
constexpr double kReducePartCycles = 470.0;

// Segments of a warp, for a weight in tiles of so many rows.
constexpr int WarpSegments(int tile_rows) { return tile_rows == 64 ? 4 : 8; }

// A tile of outputs, and who computes it.
struct Tiling {
  int64_t warps_m, runs, warps_k;
  int64_t stages;
  int64_t parts;  // of the chunks

  int64_t base_warps() const { return warps_m * runs; }  // that have outputs of their own
  int64_t warps() const { return base_warps() * warps_k; }
};

// How tiles are spread over the GPU: blocks that a multiprocessor has room for, all of them, and tiles of a block.
struct Spread {
  int64_t resident, blocks, tiles;
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const TensorFacts& facts)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        facts_(facts),
        plane_(sizes.out_dims[0] * sizes.out_dims[1] * sizes.out_dims[2]),
        plane_segments_(CeilDivide(plane_, int64_t{kSegmentPositions})),
        warp_segments_(WarpSegments(facts.form.tile_rows)) {}

  std::optional<SegmentLaunch> Choose() {
    for (int64_t warps_m = 1; warps_m < 2 * facts_.form.tiles_per_group && warps_m <= kMaxWarps; warps_m *= 2) {
      for (int64_t runs = 1; warps_m * runs <= kMaxWarps; runs *= 2) {
        for (int64_t warps_k = 1; warps_m * runs * warps_k <= kMaxWarps; warps_k *= 2) {
          if (warps_m * runs * warps_k >= kMinWarps) TryStages({warps_m, runs, warps_k, 0, 1});
        }
      }
    }
    return best_;
  }

 private:
  void TryStages(Tiling tiling) {
    const int64_t chunks = facts_.form.num_chunks, blocks = std::max<int64_t>(Blocks(tiling), 1);
    for (const int64_t parts : PartsToTry(chunks, blocks, device_)) {
      tiling.parts = parts;
      const int64_t part_chunks = CeilDivide(chunks, parts);
      const int64_t max_stages = is_float() ? kFloatStages : std::clamp<int64_t>(part_chunks, 2, kMaxStages);
      tiling.stages = 2;
      const int64_t resident = ResidentBlocks(tiling);
      // Stages more are for nothing where they leave room for fewer blocks.
      for (; tiling.stages <= max_stages && ResidentBlocks(tiling) == resident; ++tiling.stages) Consider(tiling);
    }
  }

  bool is_float() const { return facts_.element_bytes > kHalfBytes; }
  int64_t BlockSegments(const Tiling& tiling) const { return tiling.runs * warp_segments_; }
  int64_t RowBlocks(const Tiling& tiling) const { return CeilDivide(facts_.form.tiles_per_group, tiling.warps_m); }
  // Of one part of the chunks.
  int64_t Blocks(const Tiling& tiling) const {
    const int64_t tiles = CeilDivide(batch_ * plane_segments_, BlockSegments(tiling));
    return CheckedMultiply(geometry_.group * RowBlocks(tiling), tiles, "the grid");
  }
  int64_t NumOutputs() const { return batch_ * geometry_.out_channels * plane_; }

  int64_t StepsBytes(const Tiling& tiling) const {
    return tiling.warps_m * facts_.max_steps * static_cast<int64_t>(facts_.form.step_bytes());
  }
  int64_t InputBytes(const Tiling& tiling) const {
    return facts_.form.chunk_channels * (BlockSegments(tiling) + 1) * kSegmentBytes;
  }
  int64_t ListBytes(const Tiling& tiling) const {
    return RoundUp(tiling.warps_m * (PartChunks(tiling) + 1) * int64_t{4}, kSegmentBytes);
  }
  int64_t PartChunks(const Tiling& tiling) const { return CeilDivide(int64_t{facts_.form.num_chunks}, tiling.parts); }

  int64_t SharedBytes(const Tiling& tiling) const {
    const int64_t kept_bytes = int64_t{512} * facts_.form.subtiles() * warp_segments_;  // of a warp's sums
    return std::max(tiling.stages * (InputBytes(tiling) + StepsBytes(tiling)) + ListBytes(tiling) +
                        (tiling.warps() - tiling.base_warps()) * kept_bytes,
                    int64_t{kRecomputeBytes});
  }

  // Of a multiprocessor; none where shared memory has no room for one.
  int64_t ResidentBlocks(const Tiling& tiling) const {
    return std::min(kResidentWarps / tiling.warps(),
                    device_.max_shared_bytes / (SharedBytes(tiling) + kReservedSharedBytes));
  }

  void Consider(const Tiling& tiling) {
    const TensorForm& form = facts_.form;
    const int64_t segments = BlockSegments(tiling), resident = ResidentBlocks(tiling);
    if (resident == 0) return;
    // Blocks of the same rows share out the segments, so many of them as the GPU runs at a time. One of floats has one
    // tile.
    const int64_t rows = geometry_.group * RowBlocks(tiling), tiles = CeilDivide(batch_ * plane_segments_, segments);
    const int64_t at_once = device_.num_multiprocessors * resident / (rows * tiling.parts);
    const int64_t runners = is_float() ? tiles : std::clamp<int64_t>(at_once, 1, tiles);
    if (CheckedMultiply(rows, runners, "the grid") > std::numeric_limits<int32_t>::max()) return;
    const double cycles = Cycles(tiling, {resident, rows * runners * tiling.parts, CeilDivide(tiles, runners)});
    if (best_ && cycles >= best_->cycles) return;

    best_.emplace();
    best_->cycles = cycles;
    SegmentParams& params = best_->params;
    FillSizes(geometry_, sizes_, batch_, &params.tile);
    params.tile.row_tiles_per_group = form.tiles_per_group;
    params.tile.row_blocks_per_group = static_cast<int>(RowBlocks(tiling));
    params.tile.warps_m = static_cast<int>(tiling.warps_m);
    params.tile.num_stages = static_cast<int>(tiling.stages);
    params.tile.stage_bytes = static_cast<int>(InputBytes(tiling) + StepsBytes(tiling));
    params.list_bytes = static_cast<int>(ListBytes(tiling));
    params.tile_step = static_cast<int>(runners * segments);
    params.runs = static_cast<int>(tiling.runs);
    params.warps_k = static_cast<int>(tiling.warps_k);
    while (int64_t{1} << params.segments_shift < segments) ++params.segments_shift;
    params.by_row_blocks = MakeDivisor(RowBlocks(tiling));
    params.by_groups = MakeDivisor(geometry_.group);
    params.by_plane_segments = MakeDivisor(plane_segments_);
    params.num_chunks = form.num_chunks;
    params.part_chunks = static_cast<int>(PartChunks(tiling));
    params.chunk_channels = form.chunk_channels;
    params.input_bytes = static_cast<int>(InputBytes(tiling));
    params.max_steps = facts_.max_steps;
    params.step_fills = KeepsSteps(tiling) ? params.tile.num_stages : std::numeric_limits<int32_t>::max();
    params.batches = static_cast<int>(Batches(tiling));
    params.plane = static_cast<int>(plane_);
    params.plane_segments = static_cast<int>(plane_segments_);
    params.num_segments = static_cast<int>(batch_ * plane_segments_);
    params.y_part = PartValues(NumOutputs());
    best_->shape.grid[0] = static_cast<unsigned>(rows * runners);
    best_->shape.grid[1] = static_cast<unsigned>(tiling.parts);
    best_->shape.threads = static_cast<unsigned>(tiling.warps() * kWarp);
    best_->shape.dynamic_shared_bytes = static_cast<unsigned>(SharedBytes(tiling));
  }

  // Whether a stage gets the same channels again and again, whose steps stay there.
  bool KeepsSteps(const Tiling& tiling) const {
    return !is_float() && tiling.parts == 1 && tiling.stages % facts_.form.num_chunks == 0;
  }
  // That a thread loads floats of a chunk in.
  int64_t Batches(const Tiling& tiling) const {
    const int64_t pieces = facts_.form.chunk_channels * BlockSegments(tiling) * kFloatPieces;
    return CeilDivide(pieces, tiling.warps() * kWarp * kBatchPieces);
  }

  // What a launch takes: the work of a multiprocessor, what a block waits for one after the other, and what memory
  // takes.
  double Cycles(const Tiling& tiling, const Spread& spread) const {
    const TensorForm& form = facts_.form;
    const double all_chunks = static_cast<double>(geometry_.group * form.tiles_per_group) * form.num_chunks;
    const double steps = static_cast<double>(facts_.num_steps) / all_chunks;  // of a tile in a chunk
    const auto base_warps = static_cast<double>(tiling.base_warps()), chunks = static_cast<double>(PartChunks(tiling));
    const auto input = static_cast<double>(form.chunk_channels * BlockSegments(tiling) * kSegmentBytes);
    const double step_bytes =
        KeepsSteps(tiling) ? 0.0 : static_cast<double>(tiling.warps_m) * steps * static_cast<double>(form.step_bytes());
    const double products = base_warps * steps * static_cast<double>(form.subtiles() * warp_segments_);
    const double bytes = step_bytes + input * static_cast<double>(facts_.element_bytes) / kHalfBytes;
    const double pieces = is_float() ? 2.0 * input / static_cast<double>(kPieceBytes) : 0.0;
    const double chunk =
        std::max({products * kProductCycles / kQuarters, bytes / kL2BytesACycle, pieces * kPieceCycles});
    const double outputs = base_warps * static_cast<double>(form.tile_rows * warp_segments_ * kSegmentPositions);
    const double shares = kShareCycles * (static_cast<double>(tiling.warps()) - base_warps);
    const double work = (is_float() ? kFloatOutputCycles : kOutputCycles) * outputs + chunks * chunk + shares;
    const double arrival = is_float() ? kBatchCycles * static_cast<double>(Batches(tiling))
                                      : kChunkCycles / static_cast<double>(tiling.stages - 1);
    const double warp_steps = std::ceil(steps / static_cast<double>(tiling.warps_k));
    const double waits =
        kTileCycles + chunks * (kStepCycles * warp_steps + arrival) + shares + (is_float() ? kFloatBlockCycles : 0.0);
    const int64_t at_once = std::min(spread.resident, CeilDivide(spread.blocks, int64_t{device_.num_multiprocessors}));
    const int64_t turns =
        is_float() ? CeilDivide(spread.blocks, device_.num_multiprocessors * spread.resident) : spread.tiles;
    const auto moved =
        static_cast<double>(facts_.element_bytes * (batch_ * geometry_.in_channels * plane_ + NumOutputs()));
    const double needs[] = {static_cast<double>(at_once * turns) * work, static_cast<double>(turns) * waits,
                            MemoryCycles(moved, device_)};
    const double greatest = *std::max_element(std::begin(needs), std::end(needs));
    const double sum = std::accumulate(std::begin(needs), std::end(needs), 0.0);
    return kLaunchAndFirstCycles + greatest + kOverlap * (sum - greatest) + ReduceCycles(tiling);
  }

  double ReduceCycles(const Tiling& tiling) const {
    if (tiling.parts == 1) return 0.0;
    const auto bytes = static_cast<double>((2 * tiling.parts + 1) * facts_.element_bytes * NumOutputs());
    return kReduceCycles + kReducePartCycles * static_cast<double>(tiling.parts) + MemoryCycles(bytes, device_);
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const TensorFacts& facts_;
  const int64_t plane_, plane_segments_;
  const int warp_segments_;
  std::optional<SegmentLaunch> best_;
};

}  // namespace

std::optional<SegmentLaunch> ChooseSegmentLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                 int64_t batch, const DeviceFacts& device, const TensorFacts& facts) {
  const int64_t plane = sizes.out_dims[0] * sizes.out_dims[1] * sizes.out_dims[2];
  if (plane % kMinPlaneUnit != 0) return std::nullopt;
  // The segments of all images are counted in ints, with those of a block behind the last one, and a plane's bytes.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() / 2;
  if (plane > kMax / facts.element_bytes || CheckedMultiply(batch, plane, "the positions") > kMax) return std::nullopt;
  return Planner(geometry, sizes, batch, device, facts).Choose();
}

uintptr_t SegmentAlignment(int64_t element_bytes) { return element_bytes > kHalfBytes ? 16 : 8; }

}  // namespace sparseconv::cuda
