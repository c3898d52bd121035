#include "octet_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <vector>

#include "../checked.h"
#include "divisor.h"
#include "tensor_launch.h"
#include "tensor_map.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kOctet = 8, kPixelBytes = 2 * kOctet;
constexpr int64_t kMostApart = 7;                           // pixels between phases
constexpr int64_t kStagedColumns = 32, kStagedPlaces = 32;  // of a task, and of all staging warps
// More rows of a ring than that only take time to set up, no product has room for more rows of outputs, and with more
// rows of a tile nothing more is saved.
constexpr int64_t kMaxOctetRows = 32, kMaxGroupRows = 30, kMaxTileRows = 2048;
// Cycles of a multiprocessor, about: fitted to 3x3 layers of 64 and 128 channels, 1 and 64 images, on an H200. What
// multiplies, stages and stores shares the path to shared memory, so it adds up.
constexpr double kSharedBytesACycle = 128.0;
constexpr double kProductShare = 1.25;  // of the cycles that sparse products read shared memory
// Of dense ones, which read half as much, eight positions, and the least.
constexpr double kDenseBlockCycles = 2.9, kLeastDenseCycles = 45.0;
// Products that add to the same sums wait for each other, which counts where rows are short.
constexpr double kLeastProductCycles = 64.0, kLeastBlockCycles = 4.3;
constexpr double kGroupCycles = 200.0;       // of a warpgroup's rows of outputs
constexpr double kBlockCycles = 35.0;        // to finish eight positions of it
constexpr double kStagedCycles = 0.04;       // a pixel of a channel
constexpr double kWaitingShare = 1.25;       // where the warpgroups wait for each other's rows
constexpr double kAloneShare = 1.6;          // where one of them has all of a tile, and waits for the next one's rows
constexpr double kSharingShare = 1.05;       // where they share a place for outputs
constexpr double kMemoryBytesACycle = 15.0;  // of X and Y
constexpr double kElementCycles = 0.4;       // to store an output of a window by itself
constexpr double kBeginCycles = 8500.0;      // of a block
// What blocks wait for in the beginning, where X is in no cache: all of it from so many bytes on.
constexpr double kColdCycles = 3000.0, kColdBytes = 16e6;

// Of X, that all blocks have on its way to the second-level cache: with more, rows are driven out before they are read.
constexpr int64_t kAheadBytes = int64_t{1} << 23;
constexpr int64_t kShortRowBytes = 128;  // of a channel, at most
constexpr int kBoxChannels = 16;         // of a warp's outputs

// Elements of Y that are stored together: where planes do not begin at multiples of 16 bytes, one by one.
int64_t StoredTogether(const ResolvedGeometry& sizes) {
  return sizes.out_dims[1] * sizes.out_dims[2] % kOctet == 0 ? kOctet : 1;
}

// Whether the kernel for words has to run it: more channels than registers hold, or elements that are stored one by
// one.
bool NeedsWords(const WindowForm& weight, const ResolvedGeometry& sizes) {
  return weight.places > kMaxFewChannels || StoredTogether(sizes) == 1;
}

// Bytes from a channel of outputs in shared memory to the next one.
int64_t OutputPitch(int blocks, int64_t element_bytes) { return kOctet * element_bytes * int64_t{blocks | 1}; }

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const WindowForm& weight, int64_t element_bytes)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        weight_(weight),
        element_bytes_(element_bytes),
        in_w_(sizes.in_dims[2]),
        out_h_(sizes.out_dims[1]),
        out_w_(sizes.out_dims[2]),
        pad_left_(sizes.pads_begin[2]),
        row_stride_(geometry.strides[1]),
        column_stride_(geometry.strides[2]),
        phases_(row_stride_ * column_stride_),
        window_rows_((geometry.kernel_shape[1] - 1) * geometry.dilations[1] / row_stride_ + 1),
        window_columns_((geometry.kernel_shape[2] - 1) * geometry.dilations[2] + 1),
        stored_(StoredTogether(sizes)),
        is_words_(NeedsWords(weight, sizes)) {
    if (is_words_) {
      blocks_.assign(std::begin(kWordBlocks), std::end(kWordBlocks));
    } else if (phases_ > 1) {
      blocks_.assign(std::begin(kStridedBlocks), std::end(kStridedBlocks));
    } else {
      blocks_.assign(std::begin(kOctetBlocks), std::end(kOctetBlocks));
    }
  }

  std::optional<OctetLaunch> Choose() {
    // Whole rows of X, with zeros beside them; a row's first output reads the zeros.
    const int64_t read = (out_w_ - 1) * column_stride_ + window_columns_;
    TryGroups({1, out_w_, pad_left_, in_w_, 0, 0, PixelsOf(std::max(pad_left_ + in_w_, read))});
    if (stored_ > 1 && (in_w_ % kOctet != 0 || out_w_ % kOctet != 0)) return best_;
    // Columns of tiles, with what is beside them.
    const int64_t halo = RoundUp(pad_left_, kOctet);
    const int64_t most = kOctet * blocks_.back();
    for (int64_t columns = kOctet; columns < std::min(out_w_, most + 1); columns += kOctet) {
      const int64_t tiles = CeilDivide(out_w_, columns);
      if (columns > kOctet && CeilDivide(out_w_, columns - kOctet) == tiles) continue;
      const int64_t staged = RoundUp(halo - pad_left_ + (columns - 1) * column_stride_ + window_columns_, kOctet);
      TryGroups({tiles, columns, 0, staged, halo, halo - pad_left_, PixelsOf(staged)});
    }
    return best_;
  }

 private:
  struct Columns {
    int64_t tiles, of_tile;
    int64_t lead, staged, halo;
    int64_t first;   // place of a row that its first output reads first
    int64_t pixels;  // of a row, at one place between strides
  };

  // That so many columns take, an even number.
  int64_t PixelsOf(int64_t columns) const { return RoundUp(CeilDivide(columns, column_stride_), 2); }

  void TryGroups(const Columns& columns) {
    const int64_t parts = CeilDivide(columns.staged, kStagedColumns), groups = weight_.places / kStagedPlaces;
    if (!CanStage(parts, groups)) return;
    if (columns.pixels < kOctet) return;  // eight positions lie in two rows at most
    for (int64_t rows = 1; rows <= std::min(out_h_, kMaxGroupRows); ++rows) {
      const int64_t positions = (rows - 1) * columns.pixels + columns.of_tile;
      for (const int blocks : blocks_) {
        if (positions > kOctet * blocks) continue;
        // Rows of outputs begin with pairs.
        if (rows * out_w_ % stored_ != 0 || (rows > 1 && out_w_ % 2 != 0)) break;
        for (int64_t tile_rows = 1; tile_rows <= std::min(out_h_, kMaxTileRows); ++tile_rows) {
          if (tile_rows * out_w_ % stored_ != 0) continue;
          if (!Try(columns, rows, blocks, tile_rows, kOctetWarpgroups)) Try(columns, rows, blocks, tile_rows, 1);
        }
        break;
      }
    }
  }

  // What a warp has of a row is in its registers, twice as many for floats; of words, in several passes.
  bool CanStage(int64_t parts, int64_t groups) const {
    if (is_words_) return true;
    if (element_bytes_ > kHalfBytes) return parts <= 2 || (parts <= 4 && groups <= 2) || (parts <= 8 && groups == 1);
    if (in_w_ % kOctet != 0) return parts <= 2;
    return parts <= 4 || (parts <= 8 && groups <= 2);
  }

  // Whether there is room for the rows of both warpgroups; with fewer buffers, there may be.
  bool Try(const Columns& columns, int64_t group_rows, int blocks, int64_t tile_rows, int buffers) {
    const int64_t octets = weight_.places / kOctet, copies = group_rows - 1;
    const int64_t row_bytes = octets * phases_ * columns.pixels * kPixelBytes;
    const int64_t apart = phases_ > 1 ? octets * phases_ * kMostApart * kPixelBytes : 0;
    const int64_t besides = buffers * 64 * OutputPitch(blocks, element_bytes_) + kBoxAlignment + weight_.tile_bytes +
                            4 * weight_.places + 8 + kOctetDumpBytes + apart;
    const int64_t room = device_.max_shared_bytes - kReservedSharedBytes - besides - copies * row_bytes;
    const int64_t inputs_pitch =
        RoundUp(4 * weight_.max_steps, 16) + 32;           // two kinds, and a vector more is loaded than used
    const int64_t of_row = row_bytes + 16 + inputs_pitch;  // with its barriers
    const int64_t ring_rows = std::min(room / of_row, kMaxOctetRows);
    const bool has_room = ring_rows >= window_rows_ + 2 * group_rows - 1;
    if (ring_rows < std::max(window_rows_ + group_rows - 1, int64_t{StagingSets(blocks)})) return has_room;

    const int64_t tiles_y = CeilDivide(out_h_, tile_rows);
    const int64_t of_images = CheckedMultiply(columns.tiles * tiles_y, batch_, "the tiles");
    const int64_t tiles = CheckedMultiply(of_images, weight_.row_tiles, "the tiles");
    const int64_t num_blocks =
        std::min<int64_t>(of_images, std::max(device_.num_multiprocessors / weight_.row_tiles, 1)) * weight_.row_tiles;
    if (tiles > std::numeric_limits<int32_t>::max() - num_blocks) return has_room;

    const auto in_rows = static_cast<double>(row_stride_ * (tile_rows - 1 + window_rows_));
    const auto groups = static_cast<double>(CeilDivide(tile_rows, group_rows));
    const double product = kProductShare * (512.0 * blocks + 2304.0) / kSharedBytesACycle;
    const double least = phases_ > 1 ? kLeastProductCycles + kLeastBlockCycles * blocks : 0.0;
    const double products = (weight_.max_steps - weight_.dense_steps) * std::max(product, least) +
                            weight_.dense_steps * std::max({kDenseBlockCycles * blocks, kLeastDenseCycles, least});
    double computing = groups * (products + kBlockCycles * blocks + kGroupCycles);
    if (!has_room && groups > 1) computing *= kWaitingShare;
    if (!has_room && groups == 1 && tiles > num_blocks) computing *= kAloneShare;
    if (groups > 1 && buffers < kOctetWarpgroups) computing *= kSharingShare;
    const double staging = in_rows * static_cast<double>(columns.staged * weight_.places) * kStagedCycles;
    const auto x_bytes = static_cast<double>(columns.staged * weight_.places * element_bytes_);
    const auto y_bytes = static_cast<double>(columns.of_tile * 64 * element_bytes_);
    if (stored_ == 1 && window_rows_ > 1) {
      computing += kElementCycles * static_cast<double>(tile_rows * columns.of_tile * 64);
    }
    const double moving = (in_rows * x_bytes + static_cast<double>(tile_rows) * y_bytes) / kMemoryBytesACycle;
    const auto all_x_bytes =
        static_cast<double>(element_bytes_ * batch_ * geometry_.in_channels * sizes_.in_dims[1] * in_w_);
    const double cycles = kBeginCycles + kColdCycles * std::min(1.0, all_x_bytes / kColdBytes) +
                          static_cast<double>(CeilDivide(tiles, num_blocks)) * std::max(computing + staging, moving);
    if (best_ && cycles >= best_->cycles) return has_room;

    OctetLaunch& launch = best_.emplace();
    launch.form = is_words_ ? OctetForm::kWords : phases_ > 1 ? OctetForm::kStrides : OctetForm::kPlain;
    launch.blocks = blocks;
    launch.cycles = cycles;
    OctetParams& params = launch.params;
    params.weight_bytes = weight_.tile_bytes;
    params.header_bytes = weight_.header_bytes;
    params.dense_bytes = weight_.dense_bytes;
    params.places = weight_.places;
    params.inputs_pitch = static_cast<int>(inputs_pitch);
    params.in_channels = static_cast<int>(geometry_.in_channels);
    params.out_channels = static_cast<int>(geometry_.out_channels);
    params.in_h = static_cast<int>(sizes_.in_dims[1]);
    params.in_w = static_cast<int>(in_w_);
    params.out_h = static_cast<int>(out_h_);
    params.out_w = static_cast<int>(out_w_);
    params.pad_top = static_cast<int>(sizes_.pads_begin[1]);
    params.stride_shifts[0] = row_stride_ == 2;
    params.stride_shifts[1] = column_stride_ == 2;
    params.window_rows = static_cast<int>(window_rows_);
    params.ring_rows = static_cast<int>(ring_rows);
    const int64_t phase_pixels = (ring_rows + copies) * columns.pixels;
    params.phase_bytes = static_cast<int>((phase_pixels + Apart(phase_pixels, columns)) * kPixelBytes);
    params.first_pixel = static_cast<int>(columns.first);
    params.row_pixels = static_cast<int>(columns.pixels);
    params.lead_pixels = static_cast<int>(columns.lead);
    params.staged_columns = static_cast<int>(columns.staged);
    params.halo_columns = static_cast<int>(columns.halo);
    params.group_rows = static_cast<int>(group_rows);
    params.staging_sets = StagingSets(blocks);
    const bool has_few_rows = tiles <= num_blocks && tile_rows <= kOctetWarpgroups * group_rows;
    params.rows_ahead = RowsAhead(columns, num_blocks, has_few_rows);
    params.run = static_cast<int>(RunOf(columns, group_rows, tile_rows));
    if (params.run != 0) params.by_run = MakeDivisor(params.run);
    params.out_buffers = buffers;
    params.row_tiles = weight_.row_tiles;
    params.tiles_x = static_cast<int>(columns.tiles);
    params.tiles_y = static_cast<int>(tiles_y);
    params.by_row_tiles = MakeDivisor(weight_.row_tiles);
    params.by_tiles_x = MakeDivisor(columns.tiles);
    params.by_tiles_y = MakeDivisor(tiles_y);
    params.tile_rows = static_cast<int>(tile_rows);
    params.tile_columns = static_cast<int>(columns.of_tile);
    params.num_tiles = static_cast<int>(tiles);
    launch.shape.grid[0] = static_cast<unsigned>(num_blocks);
    launch.shape.threads =
        blocks <= kMaxBlocksOfTwoSets ? kOctetThreads<kMaxBlocksOfTwoSets> : kOctetThreads<kMaxBlocksOfTwoSets + 1>;
    launch.shape.begins_early = true;
    launch.shape.dynamic_shared_bytes = static_cast<unsigned>(ring_rows * of_row + copies * row_bytes + besides);
    return has_room;
  }

  // Positions that each group of rows has together in a plane, or 0 where some have others. Of wide rows of halves, the
  // copy engine brings what is ahead, and what it stores is faster in smaller pieces.
  int64_t RunOf(const Columns& columns, int64_t group_rows, int64_t tile_rows) const {
    if (is_words_ || HasWideHalves()) return 0;
    if (columns.tiles > 1) return group_rows == 1 && out_w_ % columns.of_tile == 0 ? columns.of_tile : 0;
    const bool are_whole = out_h_ % group_rows == 0 && (tile_rows % group_rows == 0 || tile_rows == out_h_);
    return are_whole ? group_rows * out_w_ : 0;
  }

  // Of warps that stage. Of wide rows of floats, two would have more on its way than the first-level cache has room
  // for.
  int StagingSets(int blocks) const {
    const bool has_wide_floats = element_bytes_ > kHalfBytes && phases_ == 1 && HasWideRows();
    return blocks <= kMaxBlocksOfTwoSets && !has_wide_floats ? 2 : 1;
  }

  bool HasWideRows() const { return in_w_ * element_bytes_ > kShortRowBytes; }
  bool HasWideHalves() const { return element_bytes_ == kHalfBytes && HasWideRows(); }

  // Rows of X that the second-level cache gets at a time, while as many are read. Of tiles of columns, a block would
  // bring what others read. Of wide halves, a block that has but a few rows reads them as soon as the copy engine could
  // bring them, channel by channel.
  int RowsAhead(const Columns& columns, int64_t num_blocks, bool has_few_rows) const {
    if (columns.tiles > 1 || is_words_ || (has_few_rows && HasWideHalves())) return 0;
    const int64_t row_bytes = in_w_ * geometry_.in_channels * element_bytes_ * num_blocks / weight_.row_tiles;
    int rows = 1;
    while (4 * rows * row_bytes <= kAheadBytes) rows *= 2;
    return rows;
  }

  // Pixels between the phases of columns: eight lanes store four of each at a time, which shall lie in different banks.
  int64_t Apart(int64_t pixels, const Columns& columns) const {
    if (phases_ == 1) return 0;
    const int64_t wanted = columns.lead % 2 == 0 ? 4 : 5;
    return (wanted + kOctet - pixels % kOctet) % kOctet;
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const WindowForm& weight_;
  const int64_t element_bytes_;
  const int64_t in_w_, out_h_, out_w_, pad_left_;
  const int64_t row_stride_, column_stride_, phases_;  // 1 or 2; places between strides
  const int64_t window_rows_;                          // of the ring, which has a row for each stride
  const int64_t window_columns_;
  const int64_t stored_;  // elements of Y, together
  const bool is_words_;
  std::vector<int> blocks_;  // of the kernels, ascending
  std::optional<OctetLaunch> best_;
};

}  // namespace

std::optional<OctetLaunch> ChooseOctetLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WindowForm& weight, int64_t element_bytes,
                                             bool is_copied) {
  const int64_t in_h = sizes.in_dims[1], in_w = sizes.in_dims[2], out_h = sizes.out_dims[1], out_w = sizes.out_dims[2];
  if (geometry.strides[1] > kMaxOctetStride || geometry.strides[2] > kMaxOctetStride) return {};
  const bool has_strides = geometry.strides[1] > 1 || geometry.strides[2] > 1;
  // Half an octet of columns is loaded at once.
  if (in_h == 0 || in_w == 0 || in_w % (kOctet / 2) != 0) return {};
  // Words are windows of one row. By the kernel for these, others are slower than with X interleaved before; but for
  // the few channels of a first layer, of whose places most would be empty then.
  const bool is_first = is_copied && weight.places <= kStagedPlaces;
  if ((geometry.kernel_shape[1] > 1 || has_strides) && NeedsWords(weight, sizes) && !is_first) return {};
  // The kernel counts the bytes of an image of X in an unsigned, and what lies in a plane, and beyond it, in ints.
  constexpr int64_t kMaxImage = int64_t{1} << 29;
  if (CheckedMultiply(CheckedMultiply(in_h, in_w, "a plane of X"), geometry.in_channels, "an image of X") > kMaxImage ||
      CheckedMultiply(out_h, out_w, "a plane of Y") > kMaxImage) {
    return {};
  }
  return Planner(geometry, sizes, batch, device, weight, element_bytes).Choose();
}

void EncodeOutputs(const OctetLaunch& launch, int64_t batch, int64_t element_bytes, OctetParams* params) {
  if (params->run == 0) return;
  const int64_t run = params->run, plane = int64_t{params->out_h} * params->out_w;
  const auto pitch = static_cast<int>(OutputPitch(launch.blocks, element_bytes) / element_bytes);
  EncodeTensorMap(params->y, {{run, plane / run, batch * params->out_channels}, {run, plane}}, {pitch, 1, kBoxChannels},
                  element_bytes == kHalfBytes ? BoxLayout::kHalves : BoxLayout::kFloats, &params->y_map);
}

}  // namespace sparseconv::cuda
