#include "wgmma_plan.h"

#include <algorithm>
#include <limits>

#include "../checked.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kWarpgroups = kWgmmaProductThreads / 128;
constexpr int64_t kStagingThreads = kWgmmaThreads - kWgmmaProductThreads;
constexpr int64_t kBarrierBytes = 16;
constexpr int64_t kInputUnit = 128;
// Steps, against those of a weight whose channels come once each: with more, the tensor-core kernel is faster (3x3
// layers of 64 to 512 channels, 64 images, H200).
constexpr double kMaxRepeats = 1.2;
// Cycles of a multiprocessor, about.
constexpr double kPositionCycles = 4.6;  // of a step, for a position of a warpgroup
constexpr double kL2BytesACycle = 20.0;  // of a multiprocessor
constexpr double kColumnCycles = 0.8;    // to stage a column of 8 images
constexpr double kChunkCycles = 150.0;   // for warps to wait for each other
constexpr double kBlockCycles = 6000.0;  // to begin and to store
constexpr double kOverlap = 0.3;         // what the lesser of those add to the greatest

// Runs of positions of a block, and their outputs.
struct Tiling {
  int positions;
  int64_t run_w, run_lines;
  int64_t runs_x, runs_y;
};

struct Estimate {
  double cycles = std::numeric_limits<double>::infinity();
  WgmmaLaunch launch;
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const WgmmaFacts& facts)
      : geometry_(geometry), sizes_(sizes), batch_(batch), device_(device), facts_(facts) {}

  std::optional<WgmmaLaunch> Choose() {
    const int64_t out_h = sizes_.out_dims[1], out_w = sizes_.out_dims[2];
    const int64_t runs = kWarpgroups / facts_.form.row_tiles;
    for (const int positions : kWgmmaPositions) {
      // As few runs in a row as can be, of even width where that takes no further one.
      const int64_t in_row = CeilDivide(out_w, int64_t{positions});
      int64_t run_w = CeilDivide(out_w, in_row);
      if (run_w % 2 != 0 && run_w < positions) ++run_w;
      for (int64_t runs_x = 1; runs_x <= std::min(runs, in_row); runs_x *= 2) {
        const int64_t max_lines = in_row == 1 ? std::min<int64_t>(out_h, positions) : 1;
        for (int64_t lines = 1; lines <= max_lines; ++lines) {
          if (!Try({positions, run_w, lines, runs_x, runs / runs_x})) break;
        }
      }
    }
    if (best_.launch.positions == 0) return std::nullopt;
    return best_.launch;
  }

 private:
  // Whether the runs' lines fit their positions.
  bool Try(const Tiling& tiling) {
    const WgmmaForm& form = facts_.form;
    const int64_t stride_y = geometry_.strides[1], stride_x = geometry_.strides[2];
    const int64_t tile_w = tiling.runs_x * tiling.run_w, tile_h = tiling.runs_y * tiling.run_lines;
    const int64_t reach_y = (geometry_.kernel_shape[1] - 1) * geometry_.dilations[1];
    const int64_t reach_x = (geometry_.kernel_shape[2] - 1) * geometry_.dilations[2];
    const int64_t in_rows = (tile_h - 1) * stride_y + reach_y + 1;
    const int64_t in_columns = (tile_w - 1) * stride_x + reach_x + 1;
    const int64_t line_pitch = CeilDivide(in_columns, stride_x);
    const int64_t line_pixels = stride_y * stride_x * line_pitch;
    if ((tiling.run_lines - 1) * line_pixels + tiling.run_w > tiling.positions) return false;

    // Positions behind a run's last output read what lies there.
    const int64_t last_run = (tiling.runs_y - 1) * tiling.run_lines * line_pixels + (tiling.runs_x - 1) * tiling.run_w;
    const int64_t last_tap = (reach_y * stride_x + std::min(reach_x, stride_x - 1)) * line_pitch + reach_x / stride_x;
    const int64_t pixels = std::max(in_rows * stride_x * line_pitch, last_run + last_tap + int64_t{tiling.positions});
    const int64_t input_bytes = CeilDivide(pixels * kWgmmaPixelBytes, kInputUnit) * kInputUnit;
    const int64_t stage_bytes = CeilDivide(input_bytes + facts_.max_chunk_bytes, kInputUnit) * kInputUnit;
    const auto units = TensorUnits::Choose(facts_.x_columns, sizes_.in_dims[2], stride_x, kWgmmaChannels, in_rows,
                                           in_columns, kStagingThreads);
    const int64_t block_rows = int64_t{form.row_tiles} * kWgmmaTileRows;
    const int64_t sum_pitch = tiling.runs_x * tiling.runs_y * tiling.positions | 1;
    const int64_t sum_bytes = block_rows * (kTensorImages / 2) * sum_pitch * int64_t{4};
    const int64_t room =
        device_.max_shared_bytes - kReservedSharedBytes - units.table_bytes - kMaxWgmmaStages * kBarrierBytes;
    const int64_t num_stages = std::min<int64_t>(room / stage_bytes, kMaxWgmmaStages);
    const int64_t stages_bytes = std::max(num_stages * stage_bytes, sum_bytes - units.table_bytes);
    if (num_stages < 2 || stages_bytes > room || tile_h * tile_w > kWgmmaProductThreads) return true;

    const int64_t tiles_x = CeilDivide(sizes_.out_dims[2], tile_w), tiles_y = CeilDivide(sizes_.out_dims[1], tile_h);
    int64_t blocks = CheckedMultiply(geometry_.group * form.blocks_per_group, tiles_x * tiles_y, "the grid");
    blocks = CheckedMultiply(blocks, CeilDivide(batch_, int64_t{kTensorImages}), "the grid");
    if (blocks > std::numeric_limits<int32_t>::max()) return true;

    const double all_blocks = static_cast<double>(geometry_.group * form.blocks_per_group);
    const double chunks = static_cast<double>(facts_.num_chunks) / all_blocks;
    const double steps = static_cast<double>(facts_.num_steps) / all_blocks;  // of one run
    const double runs = static_cast<double>(tiling.runs_x * tiling.runs_y);
    const double product = steps * runs * kPositionCycles * tiling.positions;
    const double pixel_bytes = 2.0 * kTensorImages * kWgmmaChannels;
    const double bytes = steps * 2304.0 + chunks * static_cast<double>(in_rows * (in_columns + 16)) * pixel_bytes;
    const double staging = chunks * static_cast<double>(units.count * units.columns) * kColumnCycles;
    const double parts[] = {product, bytes / kL2BytesACycle, staging};
    const double greatest = std::max({parts[0], parts[1], parts[2]});
    const double block =
        greatest + kOverlap * (parts[0] + parts[1] + parts[2] - greatest) + chunks * kChunkCycles + kBlockCycles;
    const double cycles = static_cast<double>(CeilDivide(blocks, int64_t{device_.num_multiprocessors})) * block;
    if (cycles >= best_.cycles) return true;

    best_.cycles = cycles;
    best_.launch = WgmmaLaunch{};
    WgmmaParams& params = best_.launch.params;
    TileParams& tile = params.tile;
    FillSizes(geometry_, sizes_, batch_, &tile);
    tile.row_blocks_per_group = form.blocks_per_group;
    tile.row_blocks = static_cast<int>(geometry_.group * form.blocks_per_group);
    tile.row_tiles_per_group = form.blocks_per_group * form.row_tiles;
    tile.tiles_x = static_cast<int>(tiles_x);
    tile.tiles_y = static_cast<int>(tiles_y);
    tile.tile_h = static_cast<int>(tile_h);
    tile.tile_w = static_cast<int>(tile_w);
    tile.product_warps = kWgmmaProductThreads / 32;
    tile.warps_m = form.row_tiles;
    tile.num_stages = static_cast<int>(num_stages);
    tile.stage_bytes = static_cast<int>(stage_bytes);
    tile.in_rows = static_cast<int>(in_rows);
    tile.in_columns = static_cast<int>(in_columns);
    tile.line_pitch = static_cast<int>(line_pitch);
    units.Fill(stride_x, sizes_.pads_begin[2], tile.line_pitch, &tile);
    tile.is_y_paired = tiling.run_w % 2 == 0 && line_pixels % 2 == 0 && sizes_.out_dims[2] % 2 == 0;
    tile.sum_pitch = static_cast<int>(sum_pitch);
    params.header_bytes = form.header_bytes;
    params.input_bytes = static_cast<int>(input_bytes);
    params.table_bytes = static_cast<int>(stages_bytes - num_stages * stage_bytes + units.table_bytes);
    params.run_w = static_cast<int>(tiling.run_w);
    params.run_lines = static_cast<int>(tiling.run_lines);
    best_.launch.positions = tiling.positions;
    best_.launch.shape.grid[0] = static_cast<unsigned>(blocks);
    best_.launch.shape.threads = kWgmmaThreads;
    best_.launch.shape.dynamic_shared_bytes =
        static_cast<unsigned>(stages_bytes + units.table_bytes + num_stages * kBarrierBytes);
    return true;
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const WgmmaFacts& facts_;
  Estimate best_;
};

}  // namespace

WgmmaFacts FactsOf(const WgmmaWeight& packed, size_t num_entries) {
  WgmmaFacts facts;
  facts.form = packed.form;
  facts.num_entries = static_cast<int64_t>(num_entries);
  facts.num_steps = packed.num_steps;
  facts.num_chunks = static_cast<int64_t>(packed.chunk_begins.size()) - 1;
  facts.max_chunk_bytes = packed.max_chunk_bytes;
  return facts;
}

bool IsWorthWarpgroups(const ConvGeometry& geometry, const WgmmaFacts& facts, int64_t batch) {
  if (geometry.taps() == 1) return false;
  const int64_t chunks = CeilDivide(geometry.group_in_channels(), int64_t{kWgmmaChannels});
  const int64_t tiles = geometry.group * facts.form.blocks_per_group * facts.form.row_tiles;
  const auto steps = static_cast<double>(chunks * tiles * geometry.taps());  // of a weight without a zero, in its order
  if (static_cast<double>(facts.num_steps) > kMaxRepeats * steps) return false;
  return AreProductsWorth(facts.num_steps * kWgmmaChannels * kWgmmaTileRows, facts.num_entries, batch);
}

std::optional<WgmmaLaunch> ChooseWgmmaLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WgmmaFacts& facts) {
  if (sizes.in_dims[1] == 0 || sizes.in_dims[2] == 0) return std::nullopt;
  return Planner(geometry, sizes, batch, device, facts).Choose();
}

}  // namespace sparseconv::cuda
