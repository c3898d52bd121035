#include "ring_plan.h"

#include <algorithm>
#include <limits>

#include "../checked.h"
#include "eights.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

// Bytes from a pixel of the ring to the next one.
constexpr int64_t PixelBytes(int places) { return 16 * int64_t{places} + 16; }

// More rows of a ring than that only take shared memory.
constexpr int64_t kMaxRingRows = 16;
// With more, staging takes longer than the other kernel for windows.
constexpr int64_t kMaxChannels = 96;
constexpr int64_t kUnitPlaces = 2, kBlockColumns = 4 * kRingColumns;
// Cycles of a multiprocessor, about: fitted to 3x3 layers of 64 channels, 1 to 64 images, on an H200. All of it shares
// the path to shared memory, so it adds up.
constexpr double kSharedBytesACycle = 128.0;
constexpr double kProductShare = 0.85;  // of the cycles that products read shared memory
// Of dense products, which read half as much and wait for tensor cores, and the least.
constexpr double kDensePositionCycles = 4.0, kLeastDenseCycles = 45.0;
constexpr double kLineCycles = 620.0;    // to finish a row of outputs
constexpr double kUnitCycles = 91.0;     // to stage two places of a block of columns
constexpr double kBeginCycles = 4700.0;  // of a block

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const Eights& eights,
          const DeviceFacts& device, const WindowForm& weight)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        eights_(eights),
        device_(device),
        weight_(weight),
        stride_y_(geometry.strides[1]),
        stride_x_(geometry.strides[2]),
        window_rows_((geometry.kernel_shape[1] - 1) * geometry.dilations[1] + 1),
        window_columns_((geometry.kernel_shape[2] - 1) * geometry.dilations[2] + 1) {}

  std::optional<RingLaunch> Choose() {
    for (const int positions : kRingPositions) {
      for (int64_t rows = 1; rows <= eights_.rows; ++rows) Try(positions, rows);
    }
    return best_;
  }

 private:
  void Try(int positions, int64_t tile_rows) {
    // Positions behind a row's last output read what lies there.
    const int64_t row_pixels = (positions - 1) * stride_x_ + window_columns_;
    const int64_t pixel_bytes = PixelBytes(weight_.places), row_bytes = row_pixels * pixel_bytes;
    const int64_t in_rows = (tile_rows - 1) * stride_y_ + window_rows_;
    // A row's first column may lie anywhere in its first octet.
    const int64_t blocks_of_row = CeilDivide(row_pixels + kRingColumns - 1, kBlockColumns);
    const int64_t units = weight_.places / kUnitPlaces * blocks_of_row;  // places are a multiple of 32
    const int64_t besides = weight_.tile_bytes + 4 * (weight_.places + units) + 16;
    const int64_t room = device_.max_shared_bytes - kReservedSharedBytes - besides;
    const int64_t ring_rows = std::min({room / (row_bytes + 16), in_rows, kMaxRingRows});
    if (ring_rows < window_rows_) return;

    const int64_t tiles_x = CeilDivide(sizes_.out_dims[2], int64_t{positions});
    const int64_t tiles_y = CeilDivide(eights_.rows, tile_rows);
    const int64_t of_eights = CheckedMultiply(tiles_x * tiles_y, eights_.count, "the tiles");
    const int64_t tiles = CheckedMultiply(of_eights, weight_.row_tiles, "the tiles");
    const int64_t blocks =
        std::min<int64_t>(of_eights, std::max(device_.num_multiprocessors / weight_.row_tiles, 1)) * weight_.row_tiles;
    if (tiles > std::numeric_limits<int32_t>::max() - blocks) return;

    const double products =
        (weight_.max_steps - weight_.dense_steps) * (64.0 * 8 * positions + 2048.0) / kSharedBytesACycle +
        weight_.dense_steps * std::max(kDensePositionCycles * positions, kLeastDenseCycles);
    const double line = kProductShare * products + kLineCycles;
    const double of_tile = static_cast<double>(in_rows * units) * kUnitCycles + static_cast<double>(tile_rows) * line;
    const double cycles = kBeginCycles + static_cast<double>(CeilDivide(tiles, blocks)) * of_tile;
    if (best_ && cycles >= best_->cycles) return;

    RingLaunch& launch = best_.emplace();
    launch.positions = positions;
    launch.cycles = cycles;
    RingParams& params = launch.params;
    params.weight_bytes = weight_.tile_bytes;
    params.header_bytes = weight_.header_bytes;
    params.dense_bytes = weight_.dense_bytes;
    params.places = weight_.places;
    params.row_tiles = weight_.row_tiles;
    params.window_rows = static_cast<int>(window_rows_);
    params.ring_rows = static_cast<int>(ring_rows);
    params.row_pixels = static_cast<int>(row_pixels);
    params.pixel_bytes = static_cast<int>(pixel_bytes);
    params.row_blocks = static_cast<int>(blocks_of_row);
    params.row_units = static_cast<int>(units);
    params.tiles_x = static_cast<int>(tiles_x);
    params.tiles_y = static_cast<int>(tiles_y);
    params.tile_rows = static_cast<int>(tile_rows);
    params.num_tiles = static_cast<int>(tiles);
    FillSizes(&params);
    launch.shape.grid[0] = static_cast<unsigned>(blocks);
    launch.shape.threads = kRingThreads;
    launch.shape.begins_early = true;
    launch.shape.dynamic_shared_bytes = static_cast<unsigned>(ring_rows * (row_bytes + 16) + besides);
  }

  void FillSizes(RingParams* params) const {
    const int64_t x_plane = sizes_.in_dims[1] * sizes_.in_dims[2], x_image = geometry_.in_channels * x_plane;
    const int64_t y_plane = sizes_.out_dims[1] * sizes_.out_dims[2], y_image = geometry_.out_channels * y_plane;
    const bool has_strips = eights_.strips != 0;
    params->out_channels = static_cast<int>(geometry_.out_channels);
    params->in_h = static_cast<int>(sizes_.in_dims[1]);
    params->in_w = static_cast<int>(sizes_.in_dims[2]);
    params->out_h = static_cast<int>(eights_.rows);
    params->out_w = static_cast<int>(sizes_.out_dims[2]);
    params->last_rows = static_cast<int>(eights_.last_rows);
    for (size_t i = 0; i < 2; ++i) {
      params->strides[i] = static_cast<int>(geometry_.strides[i + 1]);
      params->pads_begin[i] = static_cast<int>(sizes_.pads_begin[i + 1]);
    }
    params->num_eights = static_cast<int>(eights_.count);
    params->parts = has_strips ? static_cast<int>(eights_.strips) : kTensorImages;
    params->last_parts = has_strips ? params->parts : static_cast<int>(batch_ - (eights_.count - 1) * kTensorImages);
    params->part_rows = has_strips ? static_cast<int>(eights_.rows * stride_y_) : 0;
    params->x_plane = static_cast<int>(x_plane);
    params->y_plane = static_cast<int>(y_plane);
    params->x_part = has_strips ? params->part_rows * sizes_.in_dims[2] : x_image;
    params->x_eight = has_strips ? x_image : kTensorImages * x_image;
    params->y_part = has_strips ? eights_.rows * sizes_.out_dims[2] : y_image;
    params->y_eight = has_strips ? y_image : kTensorImages * y_image;
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const Eights eights_;
  const DeviceFacts& device_;
  const WindowForm& weight_;
  const int64_t stride_y_, stride_x_, window_rows_, window_columns_;
  std::optional<RingLaunch> best_;
};

}  // namespace

std::optional<RingLaunch> ChooseRingLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, const WindowForm& weight) {
  const int64_t in_h = sizes.in_dims[1], in_w = sizes.in_dims[2], out_h = sizes.out_dims[1], out_w = sizes.out_dims[2];
  if (geometry.in_channels > kMaxChannels || in_h == 0 || in_w == 0 || in_w % kRingColumns != 0 ||
      out_w % kRingColumns != 0)
    return std::nullopt;
  // The kernel counts a plane's elements, and rows and columns beyond it, in ints.
  constexpr int64_t kMaxPlane = int64_t{1} << 30;
  if (CheckedMultiply(in_h, in_w, "a plane of X") > kMaxPlane ||
      CheckedMultiply(out_h, out_w, "a plane of Y") > kMaxPlane) {
    return std::nullopt;
  }
  return ChooseOfEights(geometry, sizes, batch, out_h, [&](const Eights& eights) {
    return Planner(geometry, sizes, batch, eights, device, weight).Choose();
  });
}

}  // namespace sparseconv::cuda
