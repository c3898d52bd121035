#include "wgmma_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../checked.h"
#include "eights.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

// One only where two do not fit: then nobody stages while others multiply. The third saves 5 to 10% where tiles are
// small, and nothing else; a fourth, nothing.
constexpr int64_t kWgmmaStages = 3;
constexpr int64_t kInputUnit = 128;
constexpr int64_t kMoreRuns = 3;  // in a row, than are needed
// Cycles of a multiprocessor, about: fitted to 3x3 layers of 64 to 512 channels, 64 images, on an H200.
constexpr double kPositionCycles = 4.6;  // of a step, for a position of a warpgroup
constexpr double kChunkCycles = 150.0;   // for warps to wait for each other
constexpr double kOverlap = 0.3;         // what the lesser of those add to the greatest
constexpr double kColumnCycles = 0.25;   // to copy a column of 8 images
constexpr double kBytesACycle = 32.0;    // from the second-level cache
constexpr double kStoreCycles = 9000.0;  // for a tile's outputs, and to begin the next one
// More where they are floats, for each position of a warpgroup but the first ones; and those beyond what the
// second-level cache keeps are written to memory before the launch is complete.
constexpr double kFloatPositionCycles = 350.0;
constexpr double kFirstPositions = 13.0;
constexpr double kKeptBytes = 30e6;
constexpr double kBeginCycles = 3000.0;  // of a block
// With the most positions, some of what a thread has does not fit its registers.
constexpr double kFullCycles = 1500.0;
// Bytes read and written a cycle.
constexpr double kMemoryBytesACycle = 15.0;
constexpr double kMaxParts = 16.0;  // of a tile's chunks
constexpr int64_t kInterleaveThreads = 256;
constexpr int64_t kInterleaveChannels = 4;
// Of floats, since each notes how large its values are, and all blocks of the launch behind look at all.
constexpr int64_t kMaxSeen = 4096;
constexpr int64_t kMaxGrid = 65535;                    // of y and z
constexpr int64_t kLinePixels = 8, kSectorPixels = 2;  // of the second-level cache

// Runs of positions of a tile, and their outputs.
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
  int64_t line_pitch;   // pixels, from a row of outputs to the next one
  int64_t own_columns;  // of a row, that have pixels of their own; of the last row, all have
  int64_t input_bytes;  // of a stage

  int64_t more_columns() const { return columns - own_columns; }
  int64_t pixels() const { return rows * own_columns + more_columns(); }
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const Eights& eights,
          const DeviceFacts& device, const WgmmaFacts& facts)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        eights_(eights),
        device_(device),
        facts_(facts),
        stride_y_(geometry.strides[1]),
        stride_x_(geometry.strides[2]),
        reach_y_((geometry.kernel_shape[1] - 1) * geometry.dilations[1]),
        reach_x_((geometry.kernel_shape[2] - 1) * geometry.dilations[2]) {}

  // As few runs in a row as can be, or some more where what these read has no room.
  std::optional<WgmmaLaunch> Choose() {
    for (int64_t more = 0; more <= kMoreRuns && !best_; ++more) TryRuns(more);
    return best_;
  }

 private:
  // So many runs more in a row than are needed.
  void TryRuns(int64_t more) {
    const int64_t out_h = eights_.rows, out_w = sizes_.out_dims[2];
    const int64_t runs = kWarpgroups / facts_.form.row_tiles;
    for (const int positions : kWgmmaPositions) {
      // Of even width in rows of even width, where that takes no further one.
      const int64_t in_row = std::min(CeilDivide(out_w, int64_t{positions}) + more, out_w);
      int64_t run_w = CeilDivide(out_w, in_row);
      if (out_w % 2 == 0 && run_w % 2 != 0 && run_w < positions) ++run_w;
      for (int64_t runs_x = 1; runs_x <= std::min(runs, in_row); runs_x *= 2) {
        const int64_t max_lines = in_row == 1 ? std::min<int64_t>(out_h, positions) : 1;
        for (int64_t lines = 1; lines <= max_lines; ++lines) {
          const Tiling tiling{positions, run_w, lines, runs_x, runs / runs_x};
          const bool fits = Try(tiling, PixelsOfLine(tiling));
          if (!fits && !Try(tiling, PixelsBetweenLines(tiling))) break;
        }
      }
    }
  }

  int64_t ColumnsOf(const Tiling& tiling) const { return (tiling.tile_w() - 1) * stride_x_ + reach_x_ + 1; }

  // Of columns that neighbouring outputs read. Pairs of outputs are stored together.
  int64_t PixelsOfLine(const Tiling& tiling) const {
    const int64_t pixels = CeilDivide(ColumnsOf(tiling), stride_x_);
    return tiling.run_lines > 1 && tiling.run_w % 2 == 0 ? RoundUp(pixels, 2) : pixels;
  }

  // From a line to the next one where zeros behind a row are also those before the next.
  int64_t PixelsBetweenLines(const Tiling& tiling) const {
    if (stride_x_ > 1 || stride_y_ > 1 || tiling.run_lines == 1) return PixelsOfLine(tiling);
    const int64_t columns = ColumnsOf(tiling), before = sizes_.pads_begin[2];
    const int64_t behind = columns - before - sizes_.in_dims[2];
    // With more of them than windows reach, whole outputs would lie between: each has a position of its own.
    const int64_t pixels = std::max(columns - std::clamp<int64_t>(behind, 0, before), tiling.run_w);
    return RoundUp(pixels, tiling.run_w % 2 == 0 ? 2 : 1);
  }

  // Whether the runs' lines fit their positions.
  bool Try(const Tiling& tiling, int64_t line_pitch) {
    Window window;
    window.rows = (tiling.tile_h() - 1) * stride_y_ + reach_y_ + 1;
    window.columns = ColumnsOf(tiling);
    window.line_pitch = line_pitch;
    window.own_columns = std::min(window.columns, line_pitch * stride_x_);
    if ((tiling.run_lines - 1) * line_pitch + tiling.run_w > tiling.positions) return false;

    // Positions behind a run's last output read what lies there.
    const int64_t last_run = (tiling.runs_y - 1) * tiling.run_lines * line_pitch + (tiling.runs_x - 1) * tiling.run_w;
    int64_t last_tap = 0;
    for (int64_t tap = 0; tap < geometry_.taps(); ++tap) last_tap = std::max(last_tap, PixelOfTap(window, tap));
    const int64_t pixels = std::max(window.rows * stride_x_ * line_pitch + window.more_columns(),
                                    last_run + last_tap + int64_t{tiling.positions});
    window.input_bytes = RoundUp(pixels * kWgmmaPixelBytes, kInputUnit);
    if (const auto interleave = Interleaved(tiling, window)) Consider(tiling, window, *interleave);
    return true;
  }

  int64_t TilesX(const Tiling& tiling) const { return CeilDivide(sizes_.out_dims[2], tiling.tile_w()); }
  int64_t TilesY(const Tiling& tiling) const { return CeilDivide(eights_.rows, tiling.tile_h()); }

  // Nothing where X is too large for it.
  std::optional<InterleaveLaunch> Interleaved(const Tiling& tiling, const Window& window) const {
    const int64_t tiles_x = TilesX(tiling), tiles_y = TilesY(tiling);
    // Windows begin at lines of the cache where that costs little, else at their sectors.
    int64_t window_columns = RoundUp(window.columns, kLinePixels);
    if (8 * window_columns > 9 * window.columns) window_columns = RoundUp(window.columns, kSectorPixels);
    const int64_t columns = tiles_x * window_columns;
    const int64_t rows = (tiles_y * tiling.tile_h() - 1) * stride_y_ + reach_y_ + 1;
    constexpr int64_t kMaxPixels = int64_t{1} << 28;  // of an eight, in all channels: 4 GB
    if (geometry_.in_channels > kMaxGrid || eights_.count > kMaxGrid || rows >= kMaxPixels / columns ||
        rows * columns >= kMaxPixels / geometry_.in_channels) {
      return std::nullopt;
    }
    InterleaveLaunch interleave;
    InterleaveParams& params = interleave.params;
    params.batch = static_cast<int>(batch_);
    params.in_channels = static_cast<int>(geometry_.in_channels);
    params.in_h = static_cast<int>(sizes_.in_dims[1]);
    params.in_w = static_cast<int>(sizes_.in_dims[2]);
    params.strips = static_cast<int>(eights_.strips);
    params.strip_step = eights_.strips == 0 ? 0 : static_cast<int>(eights_.rows * stride_y_);
    params.rows = static_cast<int>(rows);
    params.windows = static_cast<int>(tiles_x);
    params.window_columns = static_cast<int>(window_columns);
    params.window_step = static_cast<int>(tiling.tile_w() * stride_x_);
    for (size_t i = 0; i < 2; ++i) params.pads_begin[i] = static_cast<int>(sizes_.pads_begin[i + 1]);
    const int64_t threads = std::min(CeilDivide(rows * columns, int64_t{32}) * 32, kInterleaveThreads);
    interleave.shape.threads = static_cast<unsigned>(threads);
    interleave.shape.begins_early = true;
    interleave.shape.grid[0] = static_cast<unsigned>(CeilDivide(rows * columns, threads));
    interleave.shape.grid[2] = static_cast<unsigned>(eights_.count);
    const int64_t others = int64_t{interleave.shape.grid[0]} * eights_.count;
    int64_t channels = kInterleaveChannels;
    if (facts_.element_bytes > 2) {
      while (channels < geometry_.in_channels && CeilDivide(geometry_.in_channels, channels) * others > kMaxSeen) {
        channels *= 2;
      }
    }
    params.block_channels = static_cast<int>(channels);
    interleave.shape.grid[1] = static_cast<unsigned>(CeilDivide(geometry_.in_channels, channels));
    interleave.bytes = static_cast<size_t>(eights_.count) * static_cast<size_t>(geometry_.in_channels) *
                       static_cast<size_t>(rows * columns) * 2 * kTensorImages;
    return interleave;
  }

  double InterleaveCycles(const InterleaveLaunch& interleave) const {
    const double x_bytes = static_cast<double>(facts_.element_bytes * batch_ * geometry_.in_channels) *
                           static_cast<double>(sizes_.in_dims[1] * sizes_.in_dims[2]);
    return kLaunchCycles + MemoryCycles(x_bytes + static_cast<double>(interleave.bytes), device_);
  }

  void Consider(const Tiling& tiling, const Window& window, const InterleaveLaunch& interleave) {
    const WgmmaForm& form = facts_.form;
    const int64_t stage_bytes = RoundUp(window.input_bytes + facts_.max_chunk_bytes, kInputUnit);
    const int64_t table_bytes = RoundUp(window.pixels() * int64_t{8}, kBarrierBytes);
    const int64_t room = device_.max_shared_bytes - kReservedSharedBytes - table_bytes - kWgmmaRowBytes;
    const int64_t stages = std::min(room / (stage_bytes + kBarrierBytes), kWgmmaStages);
    if (stages <= 0) return;
    const int64_t shared_bytes = stages * (stage_bytes + kBarrierBytes) + table_bytes + kWgmmaRowBytes;

    const int64_t tiles_x = TilesX(tiling), tiles_y = TilesY(tiling);
    int64_t tiles = CheckedMultiply(geometry_.group * form.blocks_per_group, tiles_x * tiles_y, "the tiles");
    tiles = CheckedMultiply(tiles, eights_.count, "the tiles");
    // A block's last index goes beyond them.
    if (tiles > std::numeric_limits<int32_t>::max() - device_.num_multiprocessors) return;
    const int64_t blocks = std::min<int64_t>(tiles, device_.num_multiprocessors);

    const auto all_blocks = static_cast<double>(geometry_.group * form.blocks_per_group);
    const double chunks = static_cast<double>(facts_.num_chunks) / all_blocks;
    const double steps = static_cast<double>(facts_.num_steps) / all_blocks;  // of one run
    const double product = steps * static_cast<double>(tiling.runs() * tiling.positions) * kPositionCycles;
    const double columns = chunks * static_cast<double>(window.pixels() * kWgmmaChannels);
    const double bytes = steps * 2304.0 + columns * 2.0 * kTensorImages;
    const double needs[] = {product, bytes / kBytesACycle, columns * kColumnCycles};
    const double greatest = std::max({needs[0], needs[1], needs[2]});
    const double sums =
        greatest + (stages > 1 ? kOverlap : 1.0) * (needs[0] + needs[1] + needs[2] - greatest) + chunks * kChunkCycles;
    const bool is_float = facts_.element_bytes > 2;
    const double outputs = kStoreCycles + (tiling.positions == kMaxWgmmaPositions ? kFullCycles : 0.0) +
                           (is_float ? kFloatPositionCycles * (tiling.positions - kFirstPositions) : 0.0);
    const int64_t y_bytes = facts_.element_bytes * NumValues();
    const double more_bytes = std::max(static_cast<double>(y_bytes) - kKeptBytes, 0.0);
    const double written = is_float ? MemoryCycles(more_bytes, device_) : 0.0;
    const double before = InterleaveCycles(interleave) + kBeginCycles + written;
    const Sharing sharing = ShareChunks(tiles, chunks, sums, outputs, y_bytes, device_);
    if (best_ && before + sharing.cycles >= best_->cycles) return;

    WgmmaLaunch& launch = best_.emplace();
    launch.cycles = before + sharing.cycles;
    WgmmaParams& params = launch.params;
    ResolvedGeometry sizes = sizes_;
    sizes.out_dims[1] = eights_.rows;
    FillTiles(geometry_, sizes, eights_.strips == 0 ? batch_ : eights_.count * kTensorImages, form,
              {tiles_x, tiles_y, tiling.tile_h(), tiling.tile_w(), tiles, stages, stage_bytes, window.input_bytes,
               table_bytes},
              &params.common);
    TileParams& tile = params.common.tile;
    tile.in_rows = static_cast<int>(window.rows);
    tile.in_columns = static_cast<int>(window.own_columns);
    params.more_columns = static_cast<int>(window.more_columns());
    tile.line_pitch = static_cast<int>(window.line_pitch);
    FillTaps(window, &params);
    FillOutputs(tiling, window, &params);
    params.run_w = static_cast<int>(tiling.run_w);
    params.run_lines = static_cast<int>(tiling.run_lines);
    params.x_rows = interleave.params.rows;
    params.x_row_pixels = interleave.params.windows * interleave.params.window_columns;
    params.x_window_columns = interleave.params.window_columns;
    FillEights(eights_, geometry_.out_channels, sizes_.out_dims[1], sizes_.out_dims[2], &params);
    params.y_part = PartValues(NumValues());
    launch.interleave = interleave;
    launch.positions = tiling.positions;
    launch.shape.grid[0] = static_cast<unsigned>(blocks);
    launch.shape.grid[1] = static_cast<unsigned>(sharing.parts);
    launch.shape.threads = kWgmmaThreads;
    launch.shape.begins_early = true;
    launch.shape.dynamic_shared_bytes = static_cast<unsigned>(shared_bytes);
  }

  int64_t NumValues() const { return batch_ * geometry_.out_channels * sizes_.out_dims[1] * sizes_.out_dims[2]; }

  // What a tap reads for the tile's first output, as WgmmaConv::PixelOf counts pixels.
  int64_t PixelOfTap(const Window& window, int64_t tap) const {
    const int64_t width = geometry_.kernel_shape[2];
    const int64_t y = tap / width * geometry_.dilations[1], x = tap % width * geometry_.dilations[2];
    const int64_t place = y % stride_y_;
    const int64_t line = place * (window.rows / stride_y_) + std::min(place, window.rows % stride_y_) + y / stride_y_;
    return (x % stride_x_ * window.rows + line) * window.line_pitch + x / stride_x_;
  }

  void FillTaps(const Window& window, WgmmaParams* params) const {
    params->taps = static_cast<int>(geometry_.taps());
    for (int64_t tap = 0; tap < geometry_.taps(); ++tap) {
      params->tap_bytes[tap] = static_cast<unsigned>(PixelOfTap(window, tap) * kWgmmaPixelBytes);
    }
  }

  void FillOutputs(const Tiling& tiling, const Window& window, WgmmaParams* params) const {
    const int64_t out_w = sizes_.out_dims[2];
    for (int64_t i = 0; i < kMaxWgmmaPositions; ++i) {
      const int64_t line = i / window.line_pitch, column = i % window.line_pitch;
      const bool is_output = i < tiling.positions && line < tiling.run_lines && column < tiling.run_w;
      params->run_outputs[i] = is_output ? static_cast<int>(line * out_w + column) : -1;
    }
    params->out_columns = MaxColumns(facts_);
    while (out_w % params->out_columns != 0 || tiling.run_w % params->out_columns != 0 ||
           (tiling.run_lines > 1 && window.line_pitch % params->out_columns != 0)) {
      params->out_columns /= 2;
    }
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const Eights eights_;
  const DeviceFacts& device_;
  const WgmmaFacts& facts_;
  const int64_t stride_y_, stride_x_, reach_y_, reach_x_;
  std::optional<WgmmaLaunch> best_;
};

}  // namespace

WgmmaFacts FactsOf(const WgmmaWeight& packed, size_t num_entries, size_t element_bytes) {
  WgmmaFacts facts;
  facts.element_bytes = static_cast<int64_t>(element_bytes);
  facts.form = packed.form;
  facts.num_entries = static_cast<int64_t>(num_entries);
  facts.num_steps = packed.num_steps;
  facts.num_chunks = static_cast<int64_t>(packed.chunk_begins.size()) - 1;
  facts.max_chunk_bytes = packed.max_chunk_bytes;
  facts.block_begins = packed.block_begins;
  for (size_t i = 1; i < packed.chunk_begins.size(); ++i) {
    facts.chunk_steps.push_back(static_cast<int64_t>(packed.StepsOf(i - 1)));
  }
  for (size_t i = 1; i < packed.block_begins.size(); ++i) {
    const int64_t chunks = packed.block_begins[i] - packed.block_begins[i - 1];
    facts.max_block_chunks = std::max(facts.max_block_chunks, chunks);
  }
  return facts;
}

void FillTiles(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const WgmmaForm& form,
               const WarpgroupTiles& tiles, WarpgroupParams* params) {
  TileParams& tile = params->tile;
  FillSizes(geometry, sizes, batch, &tile);
  tile.row_blocks_per_group = form.blocks_per_group;
  tile.row_tiles_per_group = form.blocks_per_group * form.row_tiles;
  tile.tiles_x = static_cast<int>(tiles.tiles_x);
  tile.tiles_y = static_cast<int>(tiles.tiles_y);
  tile.tile_h = static_cast<int>(tiles.tile_h);
  tile.tile_w = static_cast<int>(tiles.tile_w);
  tile.warps_m = form.row_tiles;
  tile.num_stages = static_cast<int>(tiles.stages);
  tile.stage_bytes = static_cast<int>(tiles.stage_bytes);
  params->num_tiles = static_cast<int>(tiles.all);
  params->header_bytes = form.header_bytes;
  params->input_bytes = static_cast<int>(tiles.input_bytes);
  params->table_bytes = static_cast<int>(tiles.table_bytes);
}

int MaxColumns(const WgmmaFacts& facts) { return static_cast<int>(kMaxStoredBytes / facts.element_bytes); }

Sharing ShareChunks(int64_t tiles, double chunks, double of_chunks, double of_tile, int64_t num_bytes,
                    const DeviceFacts& device) {
  const int64_t multiprocessors = device.num_multiprocessors;
  Sharing best{1, static_cast<double>(CeilDivide(tiles, multiprocessors)) * (of_chunks + of_tile)};
  for (int64_t parts = 2; parts * tiles <= multiprocessors && parts <= std::min(chunks, kMaxParts); ++parts) {
    const double longest = std::ceil(chunks / static_cast<double>(parts)) / chunks;
    const auto bytes = static_cast<double>((2 * parts + 1) * num_bytes);
    const double cycles = longest * of_chunks + of_tile + kLaunchCycles + MemoryCycles(bytes, device);
    if (cycles < best.cycles) best = {parts, cycles};
  }
  return best;
}

double MemoryCycles(double bytes, const DeviceFacts& device) {
  return bytes / (kMemoryBytesACycle * device.num_multiprocessors);
}

int64_t PartValues(int64_t num_values) { return RoundUp(num_values, int64_t{kReduceBytes} / 2); }

bool IsWorthWarpgroups(const WgmmaFacts& facts, const ConvGeometry& geometry) {
  // Multiply-adds of tensor cores, of zeros as well, in the time that the CSR kernel takes for one of its own: measured
  // on wide 3x3 layers with 64 images on an H200, rounded down.
  constexpr int64_t kProductsAnEntry = 100;
  const int64_t channels = std::min<int64_t>(geometry.group_in_channels(), kWgmmaChannels);
  return facts.num_steps * channels * kWgmmaTileRows < kProductsAnEntry * facts.num_entries;
}

std::optional<WgmmaLaunch> ChooseWgmmaLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WgmmaFacts& facts) {
  if (sizes.in_dims[1] == 0 || sizes.in_dims[2] == 0) return std::nullopt;
  // Distances in Y between what a block stores are ints.
  const int64_t plane = CheckedMultiply(sizes.out_dims[1], sizes.out_dims[2], "a plane of Y");
  const int64_t images = CheckedMultiply(kTensorImages * geometry.out_channels, plane, "images of Y");
  if (images > std::numeric_limits<int32_t>::max()) return std::nullopt;
  return ChooseOfEights(geometry, sizes, batch, sizes.out_dims[1], [&](const Eights& eights) {
    return Planner(geometry, sizes, batch, eights, device, facts).Choose();
  });
}

}  // namespace sparseconv::cuda
