#include "tensor_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "../checked.h"
#include "tensor_launch.h"

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
// Fitted to the times of some hundred launches on an H200, in units of their own.
constexpr double kProductCycles = 16.0;     // of mma.sp.m16n8k32, on one quarter
constexpr double kWideProductFactor = 1.3;  // of kernels that are short of registers
constexpr double kSharedCycles = 2.0;       // of 128 bytes of shared memory
constexpr double kSharedUnitCycles = 18.0;  // of shared memory, for a unit of a warp, times kSharedCycles
constexpr double kUnitCycles = 480.0;       // to stage one unit of a warp
constexpr double kL2BytesACycle = 17.0;     // of a multiprocessor
constexpr int64_t kRowBytes = 76;           // that a row of the input costs more than its own
constexpr double kChunkCycles = 2150.0;     // until the first of a chunk arrives
constexpr double kOverlap = 0.6;            // what the lesser of those add to the greatest
// Cycles of a multiprocessor, about, by some eighty layers of all kinds on an H100.
constexpr double kUnitsToCycles = 0.32;
constexpr double kStrideFactor = 1.4;    // of a chunk, where columns that are read together lie apart
constexpr double kOneChunkFactor = 2.6;  // where a tile has one chunk: then none is staged while another is multiplied
constexpr double kBeginCycles = 8800.0;
constexpr double kStoredBytesACycle = 7.2;  // of a multiprocessor
constexpr double kFloatBytesACycle = 5.2;   // likewise, of what floats have more than halves
constexpr int64_t kHalfBytes = 2;

// The least number that is 1 more than a multiple of 8: neighbouring lines and channels then begin in other banks.
int64_t OddPitch(int64_t pixels) { return RoundUp(pixels - 1, 8) + 1; }

int64_t Extent(int64_t outputs, int64_t kernel, int64_t stride, int64_t dilation) {
  return (outputs - 1) * stride + (kernel - 1) * dilation + 1;
}

// A tile of outputs, and who computes it.
struct Tiling {
  int positions;
  int64_t tile_h, tile_w;
  int64_t warps_m;
  int64_t staging_warps;
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const TensorFacts& facts)
      : geometry_(geometry), sizes_(sizes), batch_(batch), device_(device), facts_(facts) {}

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
        for (int64_t tile_h = 1; tile_h <= std::min(sizes_.out_dims[1], kMaxTileRows); ++tile_h) {
          TryRows({positions, tile_h, tile_w, 1, 0}, runs * tile_h, min_product_warps, &best);
        }
      }
    }
    return best;
  }

  // Tries all numbers of row tiles that a block can compute.
  void TryRows(Tiling tiling, int64_t warps_p, int64_t min_product_warps, std::optional<TensorLaunch>* best) const {
    for (int64_t warps_m = 1; warps_m * warps_p <= kMaxProductWarps; warps_m *= 2) {
      if (warps_m >= 2 * facts_.form.tiles_per_group) break;
      if (warps_m * warps_p < min_product_warps) continue;
      tiling.warps_m = warps_m;
      for (const int64_t staging_warps : {4, 2}) {
        if (warps_m * warps_p + staging_warps > kMaxWarps) continue;
        tiling.staging_warps = staging_warps;
        const auto launch = Evaluate(tiling, warps_m * warps_p);
        if (launch && (!*best || launch->cycles < (*best)->cycles)) *best = launch;
      }
    }
  }

  std::optional<TensorLaunch> Evaluate(const Tiling& tiling, int64_t product_warps) const {
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
    const int64_t shared_bytes =
        std::max({2 * stage_bytes + units.table_bytes, rows * (kTensorImages / 2) * sum_pitch * int64_t{4},
                  int64_t{kRecomputeBytes}});
    if (shared_bytes + kReservedSharedBytes > device_.max_shared_bytes) return std::nullopt;
    const int64_t threads = product_warps * kWarp + staging_threads;
    if (slots > threads) return std::nullopt;  // each output of a channel has a thread that stores it

    const int64_t group_blocks = CeilDivide(form.tiles_per_group, tiling.warps_m);
    const int64_t tiles_x = CeilDivide(sizes_.out_dims[2], tiling.tile_w);
    const int64_t tiles_y = CeilDivide(sizes_.out_dims[1], tiling.tile_h);
    int64_t blocks = CheckedMultiply(geometry_.group * group_blocks, tiles_x * tiles_y, "the grid");
    blocks = CheckedMultiply(blocks, CeilDivide(batch_, kTensorImages), "the grid");
    if (blocks > std::numeric_limits<int32_t>::max()) return std::nullopt;

    TensorLaunch launch;
    TensorParams& params = launch.params;
    FillSizes(geometry_, sizes_, batch_, &params.tile);
    params.tile.row_tiles_per_group = form.tiles_per_group;
    params.tile.row_blocks_per_group = static_cast<int>(group_blocks);
    params.tile.tiles_x = static_cast<int>(tiles_x);
    params.tile.tiles_y = static_cast<int>(tiles_y);
    params.tile.tile_h = static_cast<int>(tiling.tile_h);
    params.tile.tile_w = static_cast<int>(tiling.tile_w);
    params.product_warps = static_cast<int>(product_warps);
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
    launch.shape.threads = static_cast<unsigned>(threads);
    launch.shape.dynamic_shared_bytes = static_cast<unsigned>(shared_bytes);
    launch.cycles = Cycles(params, tiling, units.count * units.columns / 2, blocks, shared_bytes);
    return launch;
  }

  // What a launch takes: chunks of the block that computes most of them, each as long as what it needs most of.
  double Cycles(const TensorParams& params, const Tiling& tiling, int64_t num_pairs, int64_t blocks,
                int64_t shared_bytes) const {
    const TensorForm& form = facts_.form;
    const int64_t warps = params.product_warps + tiling.staging_warps;
    const int64_t resident = std::max<int64_t>(
        std::min(kMaxWarps / warps, device_.max_shared_bytes / (shared_bytes + kReservedSharedBytes)), 1);
    const double all_chunks = static_cast<double>(geometry_.group * form.tiles_per_group) * form.num_chunks;
    const double steps = static_cast<double>(facts_.num_steps) / all_chunks;  // of a tile in a chunk
    const auto subtiles = static_cast<double>(form.subtiles()), positions = static_cast<double>(tiling.positions);
    const double units = static_cast<double>(num_pairs) / kWarp;
    const double rounds =
        static_cast<double>(CeilDivide(params.product_warps * resident, kQuarters)) / static_cast<double>(resident);
    const double wide = tiling.positions == kWidePositions ? kWideProductFactor : 1.0;
    const double product = rounds * steps * subtiles * positions * kProductCycles * wide;
    const double shared = params.product_warps * steps * 4.0 * (positions + subtiles + 1.0) +
                          params.tile.warps_m * steps * 4.0 * (subtiles + 1.0) + units * kSharedUnitCycles;
    const int64_t row_bytes = params.tile.in_columns * kHalfBytes + kRowBytes;
    const double bytes = params.tile.warps_m * steps * static_cast<double>(form.step_bytes()) +
                         static_cast<double>(form.chunk_channels * params.tile.in_rows * row_bytes * kTensorImages);
    const double staging = units * kUnitCycles / static_cast<double>(tiling.staging_warps * resident);
    const double parts[] = {product, shared * kSharedCycles, bytes / kL2BytesACycle, staging};
    const double greatest = *std::max_element(std::begin(parts), std::end(parts));
    const double sum = std::accumulate(std::begin(parts), std::end(parts), 0.0);
    const double chunk = (greatest + kOverlap * (sum - greatest) + kChunkCycles / static_cast<double>(resident)) *
                         (geometry_.strides[2] > 1 ? kStrideFactor : 1.0) *
                         (form.num_chunks == 1 ? kOneChunkFactor : 1.0);
    const int64_t rounds_of_blocks = CeilDivide(blocks, device_.num_multiprocessors * resident) * resident;
    const auto outputs = static_cast<double>(batch_ * geometry_.out_channels) *
                         static_cast<double>(sizes_.out_dims[1] * sizes_.out_dims[2]);
    const auto inputs = static_cast<double>(batch_ * geometry_.in_channels) *
                        static_cast<double>(sizes_.in_dims[1] * sizes_.in_dims[2]);
    const double moved =
        static_cast<double>(kHalfBytes) * outputs / kStoredBytesACycle +
        static_cast<double>(facts_.element_bytes - kHalfBytes) * (inputs + outputs) / kFloatBytesACycle;
    return kBeginCycles + kUnitsToCycles * static_cast<double>(rounds_of_blocks * form.num_chunks) * chunk +
           moved / device_.num_multiprocessors;
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const TensorFacts& facts_;
};

}  // namespace

std::vector<int> TensorPositions(int tile_rows) {
  if (tile_rows == 64) return {7, 8};
  return {14, 16};
}

std::optional<TensorLaunch> ChooseTensorLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                               int64_t batch, const DeviceFacts& device, const TensorFacts& facts) {
  if (sizes.in_dims[1] == 0 || sizes.in_dims[2] == 0) return std::nullopt;
  return Planner(geometry, sizes, batch, device, facts).Choose();
}

}  // namespace sparseconv::cuda
