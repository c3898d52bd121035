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
// With more of them there is less of the first-level cache: slower, on an H200.
constexpr int64_t kWgmmaStages = 2;
constexpr int64_t kInputUnit = 128;
// Cycles of a multiprocessor, about: fitted to 3x3 layers of 64 to 512 channels, 64 images, on an H200.
constexpr double kPositionCycles = 4.6;  // of a step, for a position of a warpgroup
constexpr double kChunkCycles = 150.0;   // for warps to wait for each other
constexpr double kOverlap = 0.3;         // what the lesser of those add to the greatest
// How a block's input gets to shared memory: bytes from the second-level cache a cycle, cycles to stage a column of 8
// images, and to begin and to store.
struct StagingCosts {
  double bytes_a_cycle, column_cycles, block_cycles;
};
constexpr StagingCosts kDirect = {32.0, 0.6, 21500.0};
constexpr StagingCosts kInterleaved = {32.0, 0.25, 13000.0};
// To interleave X: bytes read and written a cycle, and a launch.
constexpr double kMemoryBytesACycle = 15.0;
constexpr double kLaunchCycles = 4000.0;
constexpr int64_t kInterleaveThreads = 256;
constexpr int64_t kMaxGrid = 65535;                    // of y and z
constexpr int64_t kLinePixels = 8, kSectorPixels = 2;  // of the second-level cache

constexpr double kPixelBytes = 2.0 * kTensorImages * kWgmmaChannels;

// Runs of positions of a block, and their outputs.
struct Tiling {
  int positions;
  int64_t run_w, run_lines;
  int64_t runs_x, runs_y;

  int64_t tile_w() const { return runs_x * run_w; }
  int64_t tile_h() const { return runs_y * run_lines; }
  int64_t runs() const { return runs_x * runs_y; }
};

// What a tile reads.
struct Window {
  int64_t rows, columns;
  int64_t line_pitch, line_pixels;  // from a row of outputs to the next one
  int64_t input_bytes;              // of a stage
};

// Input of a block.
struct WgmmaStaging {
  StagingCosts costs;
  int64_t table_bytes;
  double chunk_bytes, chunk_columns;
  double before_cycles = 0.0;  // of the whole launch
  std::optional<InterleaveLaunch> interleave;
};

struct Estimate {
  double cycles = std::numeric_limits<double>::infinity();
  WgmmaLaunch launch;
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const WgmmaFacts& facts)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        facts_(facts),
        stride_y_(geometry.strides[1]),
        stride_x_(geometry.strides[2]),
        reach_y_((geometry.kernel_shape[1] - 1) * geometry.dilations[1]),
        reach_x_((geometry.kernel_shape[2] - 1) * geometry.dilations[2]) {}

  std::optional<WgmmaLaunch> Choose() {
    const int64_t out_h = sizes_.out_dims[1], out_w = sizes_.out_dims[2];
    const int64_t runs = kWarpgroups / facts_.form.row_tiles;
    for (const int positions : kWgmmaPositions) {
      // As few runs in a row as can be, of even width in rows of even width, where that takes no further one.
      const int64_t in_row = CeilDivide(out_w, int64_t{positions});
      int64_t run_w = CeilDivide(out_w, in_row);
      if (out_w % 2 == 0 && run_w % 2 != 0 && run_w < positions) ++run_w;
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
    Window window;
    window.rows = (tiling.tile_h() - 1) * stride_y_ + reach_y_ + 1;
    window.columns = (tiling.tile_w() - 1) * stride_x_ + reach_x_ + 1;
    window.line_pitch = CeilDivide(window.columns, stride_x_);
    window.line_pixels = stride_y_ * stride_x_ * window.line_pitch;
    if ((tiling.run_lines - 1) * window.line_pixels + tiling.run_w > tiling.positions) return false;
    if (tiling.tile_h() * tiling.tile_w() > kWgmmaProductThreads) return true;

    // Positions behind a run's last output read what lies there.
    const int64_t last_run =
        (tiling.runs_y - 1) * tiling.run_lines * window.line_pixels + (tiling.runs_x - 1) * tiling.run_w;
    const int64_t last_tap =
        (reach_y_ * stride_x_ + std::min(reach_x_, stride_x_ - 1)) * window.line_pitch + reach_x_ / stride_x_;
    const int64_t pixels =
        std::max(window.rows * stride_x_ * window.line_pitch, last_run + last_tap + int64_t{tiling.positions});
    window.input_bytes = CeilDivide(pixels * kWgmmaPixelBytes, kInputUnit) * kInputUnit;
    const auto units = TensorUnits::Choose(facts_.x_columns, sizes_.in_dims[2], stride_x_, kWgmmaChannels, window.rows,
                                           window.columns, kStagingThreads);
    WgmmaStaging direct;
    direct.costs = kDirect;
    direct.table_bytes = units.table_bytes;
    direct.chunk_bytes = static_cast<double>(window.rows * (window.columns + 16)) * kPixelBytes;
    direct.chunk_columns = static_cast<double>(units.count * units.columns);
    if (!facts_.interleave.value_or(false)) Consider(tiling, window, units, direct);
    if (!facts_.interleave.value_or(true)) return true;
    if (const auto interleaved = Interleaved(tiling, window)) Consider(tiling, window, units, *interleaved);
    return true;
  }

  int64_t TilesX(const Tiling& tiling) const { return CeilDivide(sizes_.out_dims[2], tiling.tile_w()); }
  int64_t TilesY(const Tiling& tiling) const { return CeilDivide(sizes_.out_dims[1], tiling.tile_h()); }

  // Nothing where X is too large for it.
  std::optional<WgmmaStaging> Interleaved(const Tiling& tiling, const Window& window) const {
    const int64_t tiles_x = TilesX(tiling), tiles_y = TilesY(tiling);
    // Windows begin at lines of the cache where that costs little, else at their sectors.
    int64_t window_columns = CeilDivide(window.columns, kLinePixels) * kLinePixels;
    if (8 * window_columns > 9 * window.columns)
      window_columns = CeilDivide(window.columns, kSectorPixels) * kSectorPixels;
    const int64_t columns = tiles_x * window_columns;
    const int64_t rows = (tiles_y * tiling.tile_h() - 1) * stride_y_ + reach_y_ + 1;
    const int64_t eights = CeilDivide(batch_, int64_t{kTensorImages});
    constexpr int64_t kMaxPixels = int64_t{1} << 31;  // of an eight of images, in all channels
    if (geometry_.in_channels > kMaxGrid || eights > kMaxGrid || rows >= kMaxPixels / columns ||
        rows * columns >= kMaxPixels / geometry_.in_channels) {
      return std::nullopt;
    }
    InterleaveLaunch interleave;
    InterleaveParams& params = interleave.params;
    params.batch = static_cast<int>(batch_);
    params.in_channels = static_cast<int>(geometry_.in_channels);
    params.in_h = static_cast<int>(sizes_.in_dims[1]);
    params.in_w = static_cast<int>(sizes_.in_dims[2]);
    params.rows = static_cast<int>(rows);
    params.windows = static_cast<int>(tiles_x);
    params.window_columns = static_cast<int>(window_columns);
    params.window_step = static_cast<int>(tiling.tile_w() * stride_x_);
    for (size_t i = 0; i < 2; ++i) params.pads_begin[i] = static_cast<int>(sizes_.pads_begin[i + 1]);
    const int64_t threads = std::min(CeilDivide(rows * columns, int64_t{32}) * 32, kInterleaveThreads);
    interleave.shape.threads = static_cast<unsigned>(threads);
    interleave.shape.grid[0] = static_cast<unsigned>(CeilDivide(rows * columns, threads));
    interleave.shape.grid[1] = static_cast<unsigned>(CeilDivide(geometry_.in_channels, int64_t{kInterleaveChannels}));
    interleave.shape.grid[2] = static_cast<unsigned>(eights);
    interleave.bytes = static_cast<size_t>(eights) * static_cast<size_t>(geometry_.in_channels) *
                       static_cast<size_t>(rows * columns) * 2 * kTensorImages;

    WgmmaStaging staging;
    staging.costs = kInterleaved;
    staging.table_bytes = CeilDivide(window.rows * window.columns * int64_t{8}, kBarrierBytes) * kBarrierBytes;
    staging.chunk_bytes = static_cast<double>(window.rows * window.columns) * kPixelBytes;
    staging.chunk_columns = static_cast<double>(window.rows * window.columns * kWgmmaChannels);
    const double x_bytes = 2.0 * static_cast<double>(batch_ * geometry_.in_channels) *
                           static_cast<double>(sizes_.in_dims[1] * sizes_.in_dims[2]);
    staging.before_cycles = kLaunchCycles + (x_bytes + static_cast<double>(interleave.bytes)) /
                                                (kMemoryBytesACycle * device_.num_multiprocessors);
    staging.interleave = interleave;
    return staging;
  }

  void Consider(const Tiling& tiling, const Window& window, const TensorUnits& units, const WgmmaStaging& staging) {
    const WgmmaForm& form = facts_.form;
    const int64_t stage_bytes = CeilDivide(window.input_bytes + facts_.max_chunk_bytes, kInputUnit) * kInputUnit;
    const int64_t block_rows = int64_t{form.row_tiles} * kWgmmaTileRows;
    const int64_t sum_pitch = tiling.runs() * tiling.positions | 1;
    const int64_t sum_bytes = block_rows * (kTensorImages / 2) * sum_pitch * int64_t{4};
    const int64_t room =
        device_.max_shared_bytes - kReservedSharedBytes - staging.table_bytes - kWgmmaStages * kBarrierBytes;
    const int64_t stages_bytes = std::max(kWgmmaStages * stage_bytes, sum_bytes - staging.table_bytes);
    if (stages_bytes > room) return;

    const int64_t tiles_x = TilesX(tiling), tiles_y = TilesY(tiling);
    int64_t blocks = CheckedMultiply(geometry_.group * form.blocks_per_group, tiles_x * tiles_y, "the grid");
    blocks = CheckedMultiply(blocks, CeilDivide(batch_, int64_t{kTensorImages}), "the grid");
    if (blocks > std::numeric_limits<int32_t>::max()) return;

    const double all_blocks = static_cast<double>(geometry_.group * form.blocks_per_group);
    const double chunks = static_cast<double>(facts_.num_chunks) / all_blocks;
    const double steps = static_cast<double>(facts_.num_steps) / all_blocks;  // of one run
    const double product = steps * static_cast<double>(tiling.runs() * tiling.positions) * kPositionCycles;
    const double bytes = steps * 2304.0 + chunks * staging.chunk_bytes;
    const double parts[] = {product, bytes / staging.costs.bytes_a_cycle,
                            chunks * staging.chunk_columns * staging.costs.column_cycles};
    const double greatest = std::max({parts[0], parts[1], parts[2]});
    const double block = greatest + kOverlap * (parts[0] + parts[1] + parts[2] - greatest) + chunks * kChunkCycles +
                         staging.costs.block_cycles;
    const double cycles =
        staging.before_cycles + static_cast<double>(CeilDivide(blocks, int64_t{device_.num_multiprocessors})) * block;
    if (cycles >= best_.cycles) return;

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
    tile.tile_h = static_cast<int>(tiling.tile_h());
    tile.tile_w = static_cast<int>(tiling.tile_w());
    tile.product_warps = kWgmmaProductThreads / 32;
    tile.warps_m = form.row_tiles;
    tile.num_stages = static_cast<int>(kWgmmaStages);
    tile.stage_bytes = static_cast<int>(stage_bytes);
    tile.in_rows = static_cast<int>(window.rows);
    tile.in_columns = static_cast<int>(window.columns);
    tile.line_pitch = static_cast<int>(window.line_pitch);
    units.Fill(stride_x_, sizes_.pads_begin[2], tile.line_pitch, &tile);
    tile.is_y_paired = tiling.run_w % 2 == 0 && window.line_pixels % 2 == 0 && sizes_.out_dims[2] % 2 == 0;
    tile.sum_pitch = static_cast<int>(sum_pitch);
    params.header_bytes = form.header_bytes;
    params.input_bytes = static_cast<int>(window.input_bytes);
    params.table_bytes = static_cast<int>(stages_bytes - kWgmmaStages * stage_bytes + staging.table_bytes);
    params.run_w = static_cast<int>(tiling.run_w);
    params.run_lines = static_cast<int>(tiling.run_lines);
    best_.launch.interleave = staging.interleave;
    if (staging.interleave) {
      const InterleaveParams& x = staging.interleave->params;
      params.x_rows = x.rows;
      params.x_row_pixels = x.windows * x.window_columns;
      params.x_window_columns = x.window_columns;
    }
    best_.launch.positions = tiling.positions;
    best_.launch.shape.grid[0] = static_cast<unsigned>(blocks);
    best_.launch.shape.threads = kWgmmaThreads;
    best_.launch.shape.dynamic_shared_bytes =
        static_cast<unsigned>(stages_bytes + staging.table_bytes + kWgmmaStages * kBarrierBytes);
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const WgmmaFacts& facts_;
  const int64_t stride_y_, stride_x_, reach_y_, reach_x_;
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
  return geometry.taps() > 1 &&
         AreProductsWorth(facts.num_steps * kWgmmaChannels * kWgmmaTileRows, facts.num_entries, batch);
}

std::optional<WgmmaLaunch> ChooseWgmmaLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WgmmaFacts& facts) {
  if (sizes.in_dims[1] == 0 || sizes.in_dims[2] == 0) return std::nullopt;
  return Planner(geometry, sizes, batch, device, facts).Choose();
}

}  // namespace sparseconv::cuda
