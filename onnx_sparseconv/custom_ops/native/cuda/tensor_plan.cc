#include "tensor_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>

#include "../checked.h"
#include "divisor.h"
#include "eights.h"
#include "tensor_launch.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kQuarters = 4;  // of a multiprocessor, each with its own tensor core
constexpr int kMaxWarps = kMaxTensorThreads / kWarp;
constexpr int kMaxProductWarps = 8;
constexpr int64_t kPixelBytes = 2 * kTensorImages;
constexpr int64_t kMaxTileRows = 8;      // of outputs
constexpr int64_t kFewProductWarps = 4;  // fewer are for what leaves no choice
constexpr int kWidePositions = 8;
constexpr int64_t kManyStagingWarps = 8, kSomeStagingWarps = 4, kFewStagingWarps = 2;
constexpr int64_t kMaxParts = 16;  // of a tile's chunks
constexpr int64_t kSectorBytes = 32;
// Cycles of a multiprocessor, fitted to some seven hundred launches of layers of all kinds on an H100, with 1 to 32
// images, of several plans each.
constexpr double kProductCycles = 6.5;       // of mma.sp.m16n8k32, on one quarter
constexpr double kWideProductFactor = 1.65;  // of kernels that are short of registers
constexpr double kStepCycles = 270.0;        // that a warp waits in a step, for what it reads
constexpr double kSharedCycles = 1.3;        // of 128 bytes of shared memory
constexpr double kSharedUnitCycles = 18.0;   // of shared memory, for a unit of a warp, times kSharedCycles
constexpr double kUnitCycles = 350.0;        // to stage one unit of a warp
constexpr double kL2BytesACycle = 40.0;      // of a multiprocessor
constexpr int64_t kRowBytes = 76;            // that a row of the input costs more than its own
constexpr double kChunkCycles = 210.0;       // until the first of a chunk arrives
constexpr double kOverlap = 0.06;            // what the lesser of those add to the greatest
constexpr double kStrideFactor = 1.36;       // of a chunk, where columns that are read together lie apart
constexpr double kLaunchAndFirstCycles = 6500.0;
constexpr double kBlockCycles = 830.0;        // before the first chunk, and behind the last one
constexpr double kFloatBlockCycles = 4100.0;  // more, of floats
constexpr double kOutputCycles = 0.22;        // of a block's outputs
constexpr double kShareCycles = 94.0;         // of a warp that shares in the steps of others
constexpr double kStoredBytesACycle = 10.25;  // of a multiprocessor
constexpr double kFloatBytesACycle = 5.0;     // likewise, of what floats have more than halves
constexpr double kReduceCycles = 3500.0;      // of the launch that adds up parts
constexpr double kReducePartCycles = 440.0;

// The least number that is 1 more than a multiple of 8: neighbouring lines and channels then begin in other banks.
int64_t OddPitch(int64_t pixels) { return RoundUp(pixels - 1, 8) + 1; }

int64_t Extent(int64_t outputs, int64_t kernel, int64_t stride, int64_t dilation) {
  return (outputs - 1) * stride + (kernel - 1) * dilation + 1;
}

// A tile of outputs, and who computes it.
struct Tiling {
  int positions;
  int64_t tile_h, tile_w;
  int64_t warps_m, warps_k;
  int64_t product_warps, staging_warps;
  int64_t parts = 1;  // of the chunks
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const Eights& eights,
          const DeviceFacts& device, const TensorFacts& facts)
      : geometry_(geometry), sizes_(sizes), batch_(batch), eights_(eights), device_(device), facts_(facts) {}

  std::optional<TensorLaunch> Choose() const {
    auto launch = Choose(kFewProductWarps);
    return launch ? launch : Choose(1);
  }

 private:
  std::optional<TensorLaunch> Choose(int64_t min_product_warps) const {
    std::optional<TensorLaunch> best;
    for (const int positions : TensorPositions(facts_.form.tile_rows)) {
      for (int64_t tile_w = positions; tile_w < sizes_.out_dims[2] + positions; tile_w += positions) {
        const int64_t runs = tile_w / positions;
        if (runs > kMaxProductWarps) break;
        for (int64_t tile_h = 1; tile_h <= std::min(eights_.rows, kMaxTileRows); ++tile_h) {
          TryRows({positions, tile_h, tile_w, 1, 1, 0, 0}, runs * tile_h, min_product_warps, &best);
        }
      }
    }
    return best;
  }

  // Tries all numbers of row tiles that a block can compute, and of warps that share steps.
  void TryRows(Tiling tiling, int64_t warps_p, int64_t min_product_warps, std::optional<TensorLaunch>* best) const {
    for (tiling.warps_m = 1; tiling.warps_m * warps_p <= kMaxProductWarps; tiling.warps_m *= 2) {
      if (tiling.warps_m >= 2 * facts_.form.tiles_per_group) break;
      const bool are_few = Blocks(tiling) < device_.num_multiprocessors;
      for (tiling.warps_k = 1;; tiling.warps_k *= 2) {
        tiling.product_warps = tiling.warps_m * warps_p * tiling.warps_k;
        if (tiling.product_warps > kMaxProductWarps || (tiling.warps_k > 1 && !are_few)) break;
        if (tiling.product_warps >= min_product_warps) TryStaging(tiling, best);
      }
    }
  }

  // The same of warps that stage, and of parts of the chunks, as many as there are multiprocessors for.
  void TryStaging(Tiling tiling, std::optional<TensorLaunch>* best) const {
    const int64_t chunks = facts_.form.num_chunks, blocks = std::max<int64_t>(Blocks(tiling), 1);
    const std::vector<int64_t> all_parts = PartsToTry(chunks, blocks, device_);
    for (const int64_t staging_warps : {kManyStagingWarps, kSomeStagingWarps, kFewStagingWarps}) {
      if (tiling.product_warps + staging_warps > kMaxWarps) continue;
      if (staging_warps == kManyStagingWarps && eights_.strips == 0) continue;
      tiling.staging_warps = staging_warps;
      for (const int64_t parts : all_parts) {
        tiling.parts = parts;
        const auto launch = Evaluate(tiling);
        if (!launch) break;
        if (!*best || launch->cycles < (*best)->cycles) *best = launch;
      }
    }
  }

  int64_t TilesX(const Tiling& tiling) const { return CeilDivide(sizes_.out_dims[2], tiling.tile_w); }
  int64_t TilesY(const Tiling& tiling) const { return CeilDivide(eights_.rows, tiling.tile_h); }
  int64_t GroupBlocks(const Tiling& tiling) const { return CeilDivide(facts_.form.tiles_per_group, tiling.warps_m); }

  // Of one part of the chunks.
  int64_t Blocks(const Tiling& tiling) const {
    const int64_t blocks =
        CheckedMultiply(geometry_.group * GroupBlocks(tiling), TilesX(tiling) * TilesY(tiling), "the grid");
    return CheckedMultiply(blocks, eights_.count, "the grid");
  }

  std::optional<TensorLaunch> Evaluate(const Tiling& tiling) const {
    const TensorForm& form = facts_.form;
    const int64_t stride_y = geometry_.strides[1], stride_x = geometry_.strides[2];
    const int64_t in_rows = Extent(tiling.tile_h, geometry_.kernel_shape[1], stride_y, geometry_.dilations[1]);
    const int64_t in_columns = Extent(tiling.tile_w, geometry_.kernel_shape[2], stride_x, geometry_.dilations[2]);
    const int64_t line_pitch = OddPitch(CeilDivide(in_columns, stride_x));
    const int64_t channel_pitch = OddPitch(in_rows * stride_x * line_pitch);
    const int64_t input_bytes = form.chunk_channels * channel_pitch * kPixelBytes;
    const int64_t step_bytes = static_cast<int64_t>(form.step_bytes());
    const int64_t stage_bytes = input_bytes + tiling.warps_m * facts_.max_steps * step_bytes;
    const int64_t staging_threads = tiling.staging_warps * kWarp;
    const auto units = TensorUnits::Choose(facts_.x_columns, facts_.element_bytes, sizes_.in_dims[2], stride_x,
                                           form.chunk_channels, in_rows, in_columns, staging_threads);
    const int64_t slots = tiling.tile_h * tiling.tile_w, sum_pitch = slots | 1;
    const int64_t rows = tiling.warps_m * form.tile_rows;
    const int64_t shared_bytes = std::max({2 * stage_bytes + units.table_bytes,
                                           rows * (kTensorImages / 2) * sum_pitch * int64_t{4} + OtherSumBytes(tiling),
                                           int64_t{kRecomputeBytes}});
    if (shared_bytes + kReservedSharedBytes > device_.max_shared_bytes) return std::nullopt;
    if (input_bytes >= kTensorStageBytes) return std::nullopt;
    const int64_t threads = tiling.product_warps * kWarp + staging_threads;
    if (slots > threads) return std::nullopt;  // each output of a channel has a thread that stores it

    const int64_t blocks = Blocks(tiling);
    if (blocks > std::numeric_limits<int32_t>::max()) return std::nullopt;

    TensorLaunch launch;
    TensorParams& params = launch.params;
    FillSizes(geometry_, sizes_, batch_, &params.tile);
    FillParts(&params);
    params.tile.row_tiles_per_group = form.tiles_per_group;
    params.tile.row_blocks_per_group = static_cast<int>(GroupBlocks(tiling));
    params.tile.tiles_x = static_cast<int>(TilesX(tiling));
    params.tile.tiles_y = static_cast<int>(TilesY(tiling));
    params.tile.tile_h = static_cast<int>(tiling.tile_h);
    params.tile.tile_w = static_cast<int>(tiling.tile_w);
    params.product_warps = static_cast<int>(tiling.product_warps);
    params.warps_k = static_cast<int>(tiling.warps_k);
    params.by_row_blocks = MakeDivisor(GroupBlocks(tiling));
    params.by_groups = MakeDivisor(geometry_.group);
    params.by_tiles_x = MakeDivisor(TilesX(tiling));
    params.by_tiles_y = MakeDivisor(TilesY(tiling));
    params.by_tile_w = MakeDivisor(tiling.tile_w);
    params.tile.warps_m = static_cast<int>(tiling.warps_m);
    params.num_chunks = form.num_chunks;
    params.chunk_channels = form.chunk_channels;
    params.tile.in_rows = static_cast<int>(in_rows);
    params.tile.in_columns = static_cast<int>(in_columns);
    params.tile.line_pitch = static_cast<int>(line_pitch);
    units.Fill(stride_x, sizes_.pads_begin[2], params.tile.line_pitch, &params);
    params.channel_pitch = static_cast<int>(channel_pitch);
    params.input_bytes = static_cast<int>(input_bytes);
    params.tile.num_stages = 2;
    params.tile.stage_bytes = static_cast<int>(stage_bytes);
    params.max_steps = facts_.max_steps;
    params.is_y_paired = tiling.tile_w % 2 == 0 && sizes_.out_dims[2] % 2 == 0;
    params.sum_pitch = static_cast<int>(sum_pitch);
    launch.positions = tiling.positions;
    launch.shape.grid[0] = static_cast<unsigned>(blocks);
    launch.shape.grid[1] = static_cast<unsigned>(tiling.parts);
    launch.shape.threads = static_cast<unsigned>(threads);
    launch.shape.dynamic_shared_bytes = static_cast<unsigned>(shared_bytes);
    launch.cycles = Cycles(params, tiling, units.count * units.columns / 2, blocks * tiling.parts, shared_bytes);
    return launch;
  }

  // Of the sums of warps that share in the steps of others.
  int64_t OtherSumBytes(const Tiling& tiling) const {
    const int64_t warps = tiling.product_warps - tiling.product_warps / tiling.warps_k;
    return warps * facts_.form.subtiles() * tiling.positions * kWarp * int64_t{4 * sizeof(float)};
  }

  // All that depends on what the parts of a pixel are.
  void FillParts(TensorParams* params) const {
    FillEights(eights_, geometry_.out_channels, sizes_.out_dims[1], sizes_.out_dims[2], params);
    params->y_part = PartValues(batch_ * geometry_.out_channels * sizes_.out_dims[1] * sizes_.out_dims[2]);
    const int64_t image = geometry_.in_channels * sizes_.in_dims[1] * sizes_.in_dims[2];
    if (eights_.strips == 0) {
      params->x_image = static_cast<int>(image);
      params->x_eight = kTensorImages * image;
      return;
    }
    params->tile.batch = static_cast<int>(eights_.count * kTensorImages);
    params->tile.out_h = static_cast<int>(eights_.rows);
    params->row_step = static_cast<int>(eights_.rows * geometry_.strides[1]);
    params->x_image = static_cast<int>(params->row_step * sizes_.in_dims[2]);
    params->x_eight = image;
  }

  // What a launch takes: chunks of the block that computes most of them, each as long as what it needs most of.
  double Cycles(const TensorParams& params, const Tiling& tiling, int64_t num_pairs, int64_t blocks,
                int64_t shared_bytes) const {
    const TensorForm& form = facts_.form;
    const int64_t warps = tiling.product_warps + tiling.staging_warps;
    const int64_t resident = std::max<int64_t>(
        std::min(kMaxWarps / warps, device_.max_shared_bytes / (shared_bytes + kReservedSharedBytes)), 1);
    const double all_chunks = static_cast<double>(geometry_.group * form.tiles_per_group) * form.num_chunks;
    const double steps = static_cast<double>(facts_.num_steps) / all_chunks;  // of a tile in a chunk
    const auto subtiles = static_cast<double>(form.subtiles()), positions = static_cast<double>(tiling.positions);
    const double units = static_cast<double>(num_pairs) / kWarp;
    const int64_t base_warps = tiling.product_warps / tiling.warps_k;
    const double rounds =
        static_cast<double>(CeilDivide(tiling.product_warps * resident, kQuarters)) / static_cast<double>(resident);
    const double wide = tiling.positions == kWidePositions ? kWideProductFactor : 1.0;
    // Warps that share steps have whole ones.
    const double warp_steps = tiling.warps_k == 1 ? steps : std::ceil(steps / static_cast<double>(tiling.warps_k));
    const double product = warp_steps * (rounds * subtiles * positions * kProductCycles * wide + kStepCycles);
    const double shared = static_cast<double>(base_warps) * steps * 4.0 * (positions + subtiles + 1.0) +
                          static_cast<double>(tiling.warps_m) * steps * 4.0 * (subtiles + 1.0) +
                          units * kSharedUnitCycles;
    const int64_t row_bytes = params.tile.in_columns * kHalfBytes + kRowBytes;
    const double bytes = static_cast<double>(tiling.warps_m) * steps * static_cast<double>(form.step_bytes()) +
                         static_cast<double>(form.chunk_channels * params.tile.in_rows * row_bytes * kTensorImages);
    const double staging = units * kUnitCycles / static_cast<double>(tiling.staging_warps * resident);
    const double needs[] = {product, shared * kSharedCycles, bytes / kL2BytesACycle, staging};
    const double greatest = *std::max_element(std::begin(needs), std::end(needs));
    const double sum = std::accumulate(std::begin(needs), std::end(needs), 0.0);
    const double chunk = (greatest + kOverlap * (sum - greatest) + kChunkCycles / static_cast<double>(resident)) *
                         (geometry_.strides[2] > 1 ? kStrideFactor : 1.0);
    const bool is_float = facts_.element_bytes > kHalfBytes;
    const auto tile_outputs = static_cast<double>(tiling.tile_h * tiling.tile_w * tiling.warps_m * form.tile_rows);
    const double block = kBlockCycles + (is_float ? kFloatBlockCycles : 0.0) +
                         kOutputCycles * tile_outputs * kTensorImages +
                         kShareCycles * static_cast<double>(tiling.product_warps - base_warps);
    const int64_t chunks = CeilDivide(int64_t{form.num_chunks}, tiling.parts);
    const int64_t rounds_of_blocks = CeilDivide(blocks, device_.num_multiprocessors * resident) * resident;
    return kLaunchAndFirstCycles + MovedCycles(tiling) + ReduceCycles(tiling) +
           static_cast<double>(rounds_of_blocks) *
               (block / static_cast<double>(resident) + static_cast<double>(chunks) * chunk);
  }

  double NumOutputs() const {
    return static_cast<double>(batch_ * geometry_.out_channels) *
           static_cast<double>(sizes_.out_dims[1] * sizes_.out_dims[2]);
  }

  // To bring outputs to memory; of floats, inputs as well have more bytes.
  double MovedCycles(const Tiling& tiling) const {
    const int64_t out_w = sizes_.out_dims[2], bytes = std::min(tiling.tile_w, out_w) * facts_.element_bytes;
    // What a tile has of a row may begin and end within sectors.
    const bool has_sectors =
        tiling.tile_w >= out_w || (bytes % kSectorBytes == 0 && out_w * facts_.element_bytes % kSectorBytes == 0);
    const double sectors =
        has_sectors ? 1.0 : static_cast<double>(bytes + kSectorBytes - kHalfBytes) / static_cast<double>(bytes);
    const auto inputs = static_cast<double>(batch_ * geometry_.in_channels) *
                        static_cast<double>(sizes_.in_dims[1] * sizes_.in_dims[2]);
    const double moved =
        static_cast<double>(kHalfBytes) * NumOutputs() * sectors / kStoredBytesACycle +
        static_cast<double>(facts_.element_bytes - kHalfBytes) * (inputs + NumOutputs()) / kFloatBytesACycle;
    return moved / device_.num_multiprocessors;
  }

  double ReduceCycles(const Tiling& tiling) const {
    if (tiling.parts == 1) return 0.0;
    const auto bytes = static_cast<double>((2 * tiling.parts + 1) * facts_.element_bytes) * NumOutputs();
    return kReduceCycles + kReducePartCycles * static_cast<double>(tiling.parts) + MemoryCycles(bytes, device_);
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const Eights eights_;
  const DeviceFacts& device_;
  const TensorFacts& facts_;
};

}  // namespace

void FillStores(int threads, TensorParams* params) {
  params->store_words = params->tile.tile_h * params->tile.tile_w / (params->is_y_paired ? 2 : 1);
  params->by_store_words = MakeDivisor(params->store_words);
  const int rows = threads / params->store_words;
  while (params->store_pairs < 2 && rows >= 2 << params->store_pairs) ++params->store_pairs;
  params->store_channels = rows >> params->store_pairs;
}

std::vector<int64_t> PartsToTry(int64_t chunks, int64_t blocks, const DeviceFacts& device) {
  const int64_t most = std::min({kMaxParts, chunks, device.num_multiprocessors / blocks});
  std::vector<int64_t> found{1};
  for (int64_t parts = 2; parts <= most; ++parts) {
    // A part more is for nothing where the longest stays as long.
    if (CeilDivide(chunks, parts) < CeilDivide(chunks, parts - 1)) found.push_back(parts);
  }
  return found;
}

std::vector<int> TensorPositions(int tile_rows) {
  if (tile_rows == 64) return {7, 8};
  return {14, 16};
}

std::optional<TensorLaunch> ChooseTensorLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                               int64_t batch, const DeviceFacts& device, const TensorFacts& facts) {
  if (sizes.in_dims[1] == 0 || sizes.in_dims[2] == 0) return std::nullopt;
  return ChooseOfEights(geometry, sizes, batch, sizes.out_dims[1], [&](const Eights& eights) {
    return Planner(geometry, sizes, batch, eights, device, facts).Choose();
  });
}

}  // namespace sparseconv::cuda
