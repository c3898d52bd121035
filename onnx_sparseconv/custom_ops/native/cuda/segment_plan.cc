#include "segment_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "../checked.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kColumns = 3;  // of a window
// More rows of a ring than that only take time to set up.
constexpr int64_t kMaxSegmentRows = 64;
// Cycles of a multiprocessor, about: fitted to 3x3 layers of 64 and 128 channels, 1 and 64 images, on an H200.
constexpr double kSharedBytesACycle = 128.0;
constexpr double kGroupCycles = 1550.0;      // to finish a warpgroup's outputs
constexpr double kRowCycles = 500.0;         // to stage a row
constexpr double kMemoryBytesACycle = 13.0;  // of X and Y
constexpr double kBeginCycles = 7900.0;      // of a block

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const RingForm& weight)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        weight_(weight),
        out_h_(sizes.out_dims[1]),
        row_segments_(sizes.out_dims[2] / kSegmentPositions),
        window_rows_((geometry.kernel_shape[1] - 1) * geometry.dilations[1] + 1) {}

  std::optional<SegmentLaunch> Choose() {
    for (size_t form = 0; form < std::size(kSegmentForms); ++form) {
      const int segments = kSegmentForms[form].segments;
      if (row_segments_ <= segments) {
        Try({form, 1, row_segments_});
      } else if (kSegmentForms[form].rows == 1) {
        // Tiles share a segment with each neighbour: the first and the last have one.
        for (int64_t tiles = 2; tiles <= row_segments_; ++tiles) {
          const int64_t tile = CeilDivide(row_segments_, tiles);
          if (tile + (tiles > 2 ? 2 : 1) > segments) continue;
          Try({form, CeilDivide(row_segments_, tile), tile});
          break;
        }
      }
    }
    return best_;
  }

 private:
  struct Columns {
    size_t form;
    int64_t tiles, tile_segments;
  };

  void Try(const Columns& columns) {
    for (int64_t rows = 1; rows <= out_h_; ++rows) Try(columns, rows);
  }

  void Try(const Columns& columns, int64_t tile_rows) {
    const auto [group_rows, row_segments] = kSegmentForms[columns.form];
    const int64_t segments = group_rows * row_segments;
    const int64_t segment_bytes = 16 * weight_.places + 16, row_bytes = row_segments * segment_bytes;
    const int64_t out_pitch = 16 * (segments | 1);
    const int64_t copies = group_rows - 1;
    const int64_t besides = kSegmentWarpgroups * (64 * out_pitch + 32) + weight_.tile_bytes + 4 * weight_.places + 8;
    const int64_t room = device_.max_shared_bytes - kReservedSharedBytes - besides - copies * row_bytes;
    const int64_t ring_rows = std::min(room / (row_bytes + 16), kMaxSegmentRows);
    if (ring_rows < window_rows_ + group_rows - 1) return;

    const int64_t tiles_y = CeilDivide(out_h_, tile_rows);
    const int64_t of_images = CheckedMultiply(columns.tiles * tiles_y, batch_, "the tiles");
    const int64_t tiles = CheckedMultiply(of_images, weight_.row_tiles, "the tiles");
    const int64_t blocks =
        std::min<int64_t>(of_images, std::max(device_.num_multiprocessors / weight_.row_tiles, 1)) * weight_.row_tiles;
    if (tiles > std::numeric_limits<int32_t>::max() - blocks) return;

    const auto in_rows = static_cast<double>(tile_rows - 1 + window_rows_);
    const auto staged_bytes = static_cast<double>(row_segments * weight_.places * 16);
    const auto stored_bytes = static_cast<double>(columns.tile_segments * 64 * 16);
    const double products = weight_.max_steps * (512.0 * static_cast<double>(segments) + 2304.0) / kSharedBytesACycle;
    const double computing =
        static_cast<double>(CeilDivide(tile_rows, group_rows)) * (products + kGroupCycles) + in_rows * kRowCycles;
    const double moving = (in_rows * staged_bytes + static_cast<double>(tile_rows) * stored_bytes) / kMemoryBytesACycle;
    const double cycles = kBeginCycles + static_cast<double>(CeilDivide(tiles, blocks)) * std::max(computing, moving);
    if (best_ && cycles >= best_->cycles) return;

    SegmentLaunch& launch = best_.emplace();
    launch.form = columns.form;
    launch.cycles = cycles;
    SegmentParams& params = launch.params;
    params.weight_bytes = weight_.tile_bytes;
    params.header_bytes = weight_.header_bytes;
    params.places = weight_.places;
    params.in_channels = static_cast<int>(geometry_.in_channels);
    params.out_channels = static_cast<int>(geometry_.out_channels);
    params.in_h = static_cast<int>(sizes_.in_dims[1]);
    params.out_h = static_cast<int>(out_h_);
    params.width = static_cast<int>(sizes_.in_dims[2]);
    params.pad_top = static_cast<int>(sizes_.pads_begin[1]);
    params.window_rows = static_cast<int>(window_rows_);
    params.ring_rows = static_cast<int>(ring_rows);
    params.tile_segments = static_cast<int>(columns.tile_segments);
    params.segment_bytes = static_cast<int>(segment_bytes);
    params.row_tiles = weight_.row_tiles;
    params.tiles_x = static_cast<int>(columns.tiles);
    params.tiles_y = static_cast<int>(tiles_y);
    params.tile_rows = static_cast<int>(tile_rows);
    params.num_tiles = static_cast<int>(tiles);
    launch.shape.grid[0] = static_cast<unsigned>(blocks);
    launch.shape.threads = kSegmentThreads;
    launch.shape.begins_early = true;
    launch.shape.dynamic_shared_bytes =
        static_cast<unsigned>((ring_rows + copies) * row_bytes + 16 * ring_rows + besides);
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const RingForm& weight_;
  const int64_t out_h_, row_segments_, window_rows_;
  std::optional<SegmentLaunch> best_;
};

}  // namespace

bool IsWorthLaunching(const SegmentLaunch& launch, double csr_cycles) {
  return launch.cycles - kEarlyCycles < csr_cycles;
}

std::optional<SegmentLaunch> ChooseSegmentLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                 int64_t batch, const DeviceFacts& device, const RingForm& weight) {
  const int64_t in_h = sizes.in_dims[1], width = sizes.in_dims[2];
  if (geometry.kernel_shape[2] != kColumns || geometry.dilations[2] != 1 || sizes.pads_begin[2] != 1) return {};
  if (geometry.strides[1] != 1 || geometry.strides[2] != 1 || sizes.out_dims[2] != width) return {};
  if (in_h == 0 || width == 0 || width % kSegmentPositions != 0) return {};
  // The kernel counts the bytes of an image of X in an unsigned, and rows beyond it in ints.
  constexpr int64_t kMaxImage = int64_t{1} << 29;
  if (CheckedMultiply(CheckedMultiply(in_h, width, "a plane of X"), geometry.in_channels, "an image of X") >
          kMaxImage ||
      sizes.out_dims[1] > kMaxImage) {
    return {};
  }
  if (weight.max_steps > kMaxSegmentSteps) return {};
  return Planner(geometry, sizes, batch, device, weight).Choose();
}

}  // namespace sparseconv::cuda
