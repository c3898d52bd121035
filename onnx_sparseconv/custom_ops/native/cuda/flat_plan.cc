#include "flat_plan.h"

#include <algorithm>
#include <limits>

#include "../checked.h"
#include "divisor.h"
#include "tensor_launch.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kFlatStages = 3;  // more wait for nothing
constexpr int64_t kPixelBytes = 16;
constexpr int64_t kPixelUnit = 8;     // of pixels that begin at lines of memory
constexpr int64_t kMinRowPixels = 8;  // no eight pixels lie in three rows
constexpr int64_t kFlattenThreads = 256, kMaxFlattenThreads = 1024;
// Of the rows that a block has brought by the copy engine, about, and the most. Of floats, few blocks are better, see
// below. Copies of small planes take longer than the other kernel.
constexpr int64_t kHalfRowsBytes = 8192, kFloatRowsBytes = 32768, kMostRowsBytes = 48 * 1024;
// Likewise, where a warp of the flat kernel has them brought, two stages of which are enough beside that.
constexpr int64_t kRestRowsBytes = 6144, kLeastStages = 2;
constexpr int64_t kLeastRowsPlane = 128;
constexpr int64_t kOctet = 8, kAligned = 16;
// Of floats, since each block notes how large its values are, and all blocks of the launch behind look at all.
constexpr int64_t kMaxSeen = 8192;
constexpr int64_t kMaxGrid = 65535;  // of y
// What kernels count in ints.
constexpr int64_t kMaxCount = int64_t{1} << 30;
// Cycles of a multiprocessor, about: fitted to 3x3 layers of 128 to 512 channels, 8 to 64 images, on an H100; those of
// dense products to 31 launches of 64 to 512 channels, 4 to 64 images, on an H200.
struct Costs {
  double step, step_block;    // of a step, and more for eight pixels of each warpgroup
  double store, store_block;  // likewise for a tile's outputs, and to begin the next one
  double begin;               // of a block
  double chunk;               // for warps to wait for each other
  double staged_bytes;        // a cycle, where staging takes longer than products: with strides, chunks have few taps
};
constexpr Costs kHalfCosts = {94.0, 6.7, 1900.0, 139.0, 7700.0, 150.0, 32.0};
constexpr Costs kFloatCosts = {45.0, 8.2, 4300.0, 337.0, 5700.0, 150.0, 32.0};
constexpr Costs kDenseHalfCosts = {20.5, 6.9, 1900.0, 139.0, 7700.0, 360.0, 40.0};
constexpr Costs kDenseFloatCosts = {47.0, 5.4, 4300.0, 337.0, 5700.0, 360.0, 40.0};
constexpr double kStepBytes = 2304.0, kDenseStepBytes = 2048.0;
// To make X flat: of its launch, and bytes read and written a cycle.
constexpr double kFlattenCycles = 2000.0, kFlattenBytesACycle = 15.0;
// What is left of X to be made flat beside products takes so much of that still, of halves more, for there, products
// wait for shared memory most. With fewer turns of tiles, the second one would wait.
constexpr double kHalfBeside = 0.8, kFloatBeside = 0.55;
constexpr int64_t kLeastHalfTurns = 3, kLeastFloatTurns = 2;

// Rows, or columns, of flat images.
struct FlatAxis {
  int64_t size, stride, dilation, kernel, pad, out;

  int64_t OffsetOf(int64_t tap) const { return tap * dilation / stride; }
  int64_t BetweenOf(int64_t tap) const { return tap * dilation % stride; }

  bool IsPadding(int64_t pixel, int64_t between) const {
    const int64_t at = pixel * stride + between - pad;
    return at < 0 || at >= size;
  }

  // How many of them: as few as can be, where those that are read behind the last one are zeros, and are zeros, too, as
  // the first of the next row or image.
  int64_t Count(int64_t least) const {
    for (int64_t count = std::max(out, least);; ++count) {
      bool fits = true;
      for (int64_t tap = 0; tap < kernel && fits; ++tap) {
        for (int64_t pixel = count; pixel < out + OffsetOf(tap) && fits; ++pixel) {
          fits = IsPadding(pixel, BetweenOf(tap)) && IsPadding(pixel % count, BetweenOf(tap));
        }
      }
      if (fits) return count;
    }
  }
};

FlatAxis AxisOf(const ConvGeometry& geometry, const ResolvedGeometry& sizes, size_t axis) {
  return {sizes.in_dims[axis],         geometry.strides[axis], geometry.dilations[axis],
          geometry.kernel_shape[axis], sizes.pads_begin[axis], sizes.out_dims[axis]};
}

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const FlatForm& weight, int64_t element_bytes)
      : geometry_(geometry),
        sizes_(sizes),
        batch_(batch),
        device_(device),
        weight_(weight),
        element_bytes_(element_bytes),
        is_float_(element_bytes > kHalfBytes),
        is_dense_(weight.products == FlatProducts::kDense),
        chunk_octets_(is_dense_ ? kFlatDenseOctets : kFlatOctets),
        y_(AxisOf(geometry, sizes, 1)),
        x_(AxisOf(geometry, sizes, 2)),
        row_pixels_(x_.Count(kMinRowPixels)),
        rows_(y_.Count(1)) {
    for (int64_t tap = 0; tap < geometry.taps(); ++tap) reach_ = std::max(reach_, PixelOf(tap));
  }

  std::optional<FlatLaunch> Choose() {
    const int64_t image = CheckedMultiply(rows_, row_pixels_, "the pixels of an image");
    const int64_t plane = CheckedMultiply(y_.out, x_.out, "a plane of Y");
    const int64_t in_plane = CheckedMultiply(y_.size, x_.size, "a plane of X");
    if (image >= kMaxCount / batch_ || plane >= kMaxCount / batch_ || in_plane >= kMaxCount) return {};
    for (const int blocks : kFlatBlocks) Try(blocks);
    return best_;
  }

 private:
  // From the pixel that a tap reads with the first offset to the one it reads.
  int64_t PixelOf(int64_t tap) const {
    const int64_t width = geometry_.kernel_shape[2];
    return y_.OffsetOf(tap / width) * row_pixels_ + x_.OffsetOf(tap % width);
  }

  const Costs& CostsOfKernel() const {
    if (is_dense_) return is_float_ ? kDenseFloatCosts : kDenseHalfCosts;
    return is_float_ ? kFloatCosts : kHalfCosts;
  }

  void Try(int blocks) {
    const int64_t tile_pixels = kFlatWarpgroups * 8 * int64_t{blocks};
    const int64_t stage_pixels = RoundUp(tile_pixels + reach_, kPixelUnit);
    const int64_t stage_bytes = RoundUp(chunk_octets_ * kPixelBytes * stage_pixels + weight_.max_chunk_bytes, 128);
    const int64_t room = device_.max_shared_bytes - kReservedSharedBytes - kFlatBesides;
    int64_t stages = std::min(room / (stage_bytes + 16), kFlatStages);
    if (stages <= 0) return;
    // The last pixel that is an output is in one of the tiles.
    const int64_t pixels = (batch_ - 1) * rows_ * row_pixels_ + (y_.out - 1) * row_pixels_ + x_.out;
    const int64_t runs = CeilDivide(pixels, tile_pixels);
    const int64_t tiles = CheckedMultiply(runs, weight_.row_tiles, "the tiles");
    if (tiles > std::numeric_limits<int32_t>::max() - device_.num_multiprocessors) return;
    const auto flatten = Flatten(RoundUp((runs - 1) * tile_pixels + stage_pixels, kPixelUnit));
    if (!flatten) return;

    const int64_t num_blocks = std::min<int64_t>(tiles, device_.num_multiprocessors);
    const int64_t turns = CeilDivide(tiles, num_blocks);
    const int64_t first_tiles = turns >= (is_float_ ? kLeastFloatTurns : kLeastHalfTurns) ? num_blocks : tiles;
    const int64_t first_pixels = (first_tiles - 1) / weight_.row_tiles * tile_pixels + stage_pixels;
    const auto rows = ChooseRows(*flatten, first_pixels, room - std::min(stages, kLeastStages) * (stage_bytes + 16));
    if (rows) stages = std::min((room - rows->shared_bytes) / (stage_bytes + 16), stages);
    const double steps = static_cast<double>(weight_.num_steps) / weight_.row_tiles;
    const double chunks = static_cast<double>(weight_.num_chunks) / weight_.row_tiles;
    const Costs& costs = CostsOfKernel();
    const double pairs = static_cast<double>(weight_.num_pairs) / weight_.row_tiles;
    const Costs& of_pairs = is_float_ ? kDenseFloatCosts : kDenseHalfCosts;
    const double products =
        steps * (costs.step + blocks * costs.step_block) + pairs * (of_pairs.step + blocks * of_pairs.step_block);
    const double staged = chunks * static_cast<double>(chunk_octets_ * kPixelBytes * stage_pixels) +
                          steps * (is_dense_ ? kDenseStepBytes : kStepBytes) + pairs * kDenseStepBytes;
    const double of_tile = std::max(products, staged / costs.staged_bytes) + chunks * costs.chunk + costs.store +
                           blocks * costs.store_block;
    const auto x_bytes = static_cast<double>(element_bytes_ * batch_ * geometry_.in_channels * y_.size * x_.size);
    const double saved = rows ? rows->left * (1.0 - (is_float_ ? kFloatBeside : kHalfBeside)) : 0.0;
    const double before = kFlattenCycles + (1.0 - saved) * (x_bytes + static_cast<double>(flatten->bytes)) /
                                               (kFlattenBytesACycle * device_.num_multiprocessors);
    const double cycles = before + costs.begin + static_cast<double>(turns) * of_tile;
    if (best_ && cycles >= best_->cycles) return;

    FlatLaunch& launch = best_.emplace();
    launch.blocks = blocks;
    launch.cycles = cycles;
    launch.flatten = *flatten;
    FlatParams& params = launch.params;
    if (rows) {
      launch.flatten_rows = rows->launch;
      params.rest = rows->rest;
    }
    for (int64_t tap = 0; tap < geometry_.taps(); ++tap) {
      params.tap_bytes[tap] = static_cast<unsigned>(kPixelBytes * PixelOf(tap));
    }
    params.image = flatten->params.image;
    params.out_channels = static_cast<int>(geometry_.out_channels);
    params.group_out_channels = static_cast<int>(geometry_.group_out_channels());
    params.out_h = static_cast<int>(y_.out);
    params.out_w = static_cast<int>(x_.out);
    const int64_t plane = y_.out * x_.out;
    params.num_outputs = static_cast<int>(batch_ * plane);
    while ((element_bytes_ << (params.out_shift + 1)) <= kMaxStoredBytes && plane % (2 << params.out_shift) == 0) {
      ++params.out_shift;
    }
    params.by_plane = MakeDivisor(plane);
    params.by_row_tiles = MakeDivisor(weight_.row_tiles);
    params.row_tiles = weight_.row_tiles;
    params.row_tiles_per_group = weight_.row_tiles_per_group;
    params.num_tiles = static_cast<int>(tiles);
    params.octet_bytes = kPixelBytes * flatten->params.num_pixels;
    params.stage_pixels = static_cast<int>(stage_pixels);
    params.num_stages = static_cast<int>(stages);
    params.stage_bytes = static_cast<int>(stage_bytes);
    params.header_bytes = weight_.header_bytes;
    launch.shape.grid[0] = static_cast<unsigned>(num_blocks);
    launch.shape.threads = kFlatThreads;
    launch.shape.begins_early = true;
    launch.shape.dynamic_shared_bytes =
        static_cast<unsigned>(stages * (stage_bytes + 16) + kFlatBesides + (rows ? rows->shared_bytes : 0));
  }

  // X made flat by rows, and what of it is left to the flat kernel.
  struct Rows {
    FlattenLaunch launch;
    FlatRest rest{};
    int64_t shared_bytes = 0;  // of the flat kernel, for that
    double left = 0.0;         // what share of X that is
  };

  // What lies behind `first_pixels`, which tiles of the first turn read, is left where there is room for it.
  std::optional<Rows> ChooseRows(const FlattenLaunch& flatten, int64_t first_pixels, int64_t room) const {
    if (auto first = FlattenRows(flatten, kRestRowsBytes)) {
      const unsigned chunks = first->shape.grid[0], first_chunks = ChunksOf(first->params, first_pixels);
      const int64_t bytes =
          kFlatAssistingWarps * kFlatRestSlots * (kFlatRestHeader + kOctet * first->params.channel_bytes);
      first->shape.grid[0] = first_chunks;
      if (first_chunks < chunks && bytes <= room && !HasTooMany(first->shape)) {
        Rows rows{*first};
        rows.launch.params.progress_words = static_cast<int>(1 + 2 * (chunks - first_chunks));
        rows.rest.first_chunk = static_cast<int>(first_chunks);
        rows.rest.num_units = (chunks - first_chunks) * first->shape.grid[1];
        rows.rest.by_octets = MakeDivisor(weight_.num_octets);
        rows.shared_bytes = bytes;
        rows.left = 1.0 - static_cast<double>(first_chunks) / chunks;
        return rows;
      }
    }
    const auto all = FlattenRows(flatten, is_float_ ? kFloatRowsBytes : kHalfRowsBytes);
    if (!all || HasTooMany(all->shape)) return {};
    return Rows{*all};
  }

  bool HasTooMany(const LaunchShape& shape) const {
    return is_float_ && int64_t{shape.grid[0]} * shape.grid[1] > kMaxSeen;
  }

  // Of rows of all images, how many have the first so many pixels.
  unsigned ChunksOf(const FlattenParams& params, int64_t pixels) const {
    const int64_t image = (pixels - 1) / (rows_ * row_pixels_);
    if (image >= batch_) return static_cast<unsigned>(batch_ * params.chunks);
    const int64_t row = (pixels - 1) % (rows_ * row_pixels_) / row_pixels_;
    return static_cast<unsigned>(image * params.chunks + row / params.chunk_rows + 1);
  }

  // The same by rows that the copy engine brings, about so many bytes of them at a time; nothing where it cannot, or
  // should not.
  std::optional<FlattenLaunch> FlattenRows(FlattenLaunch flatten, int64_t rows_bytes) const {
    const int64_t row_bytes = element_bytes_ * x_.size;
    if (geometry_.strides[1] > 1 || geometry_.strides[2] > 1 || y_.size * x_.size < kLeastRowsPlane) return {};
    if (geometry_.in_channels * y_.size * row_bytes % kAligned != 0) return {};
    const int64_t chunks = std::min(CeilDivide(kOctet * rows_ * row_bytes, rows_bytes), rows_);
    FlattenParams& params = flatten.params;
    const int64_t chunk_rows = CeilDivide(rows_, chunks);
    params.chunk_rows = static_cast<int>(chunk_rows);
    params.chunks = static_cast<int>(CeilDivide(rows_, chunk_rows));
    params.by_chunks = MakeDivisor(params.chunks);
    const int64_t channel_bytes = RoundUp(chunk_rows * row_bytes, kAligned) + kAligned;
    const int64_t bytes = kOctet * channel_bytes + 8;
    if (bytes > kMostRowsBytes) return {};
    params.channel_bytes = static_cast<int>(channel_bytes);
    flatten.shape.threads = kFlattenRowsThreads;
    flatten.shape.grid[0] = static_cast<unsigned>(batch_ * params.chunks);
    flatten.shape.grid[1] = static_cast<unsigned>(weight_.num_octets);
    flatten.shape.dynamic_shared_bytes = static_cast<unsigned>(bytes);
    return flatten;
  }

  // Nothing where there are too many.
  std::optional<FlattenLaunch> Flatten(int64_t pixels) const {
    if (pixels >= kMaxCount || weight_.num_octets > kMaxGrid) return {};
    FlattenLaunch flatten;
    FlattenParams& params = flatten.params;
    params.image = {static_cast<int>(rows_), static_cast<int>(row_pixels_), MakeDivisor(row_pixels_),
                    MakeDivisor(rows_ * row_pixels_)};
    params.batch = static_cast<int>(batch_);
    params.in_channels = static_cast<int>(geometry_.in_channels);
    params.in_h = static_cast<int>(y_.size);
    params.in_w = static_cast<int>(x_.size);
    for (size_t i = 0; i < 2; ++i) {
      params.strides[i] = static_cast<int>(geometry_.strides[i + 1]);
      params.pads_begin[i] = static_cast<int>(sizes_.pads_begin[i + 1]);
    }
    params.num_pixels = static_cast<int>(pixels);
    params.num_places = weight_.num_places;
    params.num_octets = weight_.num_octets;
    flatten.shape.begins_early = true;
    int64_t threads = kFlattenThreads, octets = 1;
    const auto blocks = [&] { return CeilDivide(pixels, threads) * CeilDivide(int64_t{weight_.num_octets}, octets); };
    if (is_float_) {
      while (threads < kMaxFlattenThreads && blocks() > kMaxSeen) threads *= 2;
      while (octets < weight_.num_octets && blocks() > kMaxSeen) octets *= 2;
    }
    params.block_octets = static_cast<int>(octets);
    flatten.shape.threads = static_cast<unsigned>(threads);
    flatten.shape.grid[0] = static_cast<unsigned>(CeilDivide(pixels, threads));
    flatten.shape.grid[1] = static_cast<unsigned>(CeilDivide(int64_t{weight_.num_octets}, octets));
    flatten.bytes = static_cast<size_t>(weight_.num_places * weight_.num_octets) * static_cast<size_t>(pixels) *
                    size_t{kPixelBytes};
    return flatten;
  }

  const ConvGeometry& geometry_;
  const ResolvedGeometry& sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const FlatForm& weight_;
  const int64_t element_bytes_;
  const bool is_float_, is_dense_;
  const int64_t chunk_octets_;
  const FlatAxis y_, x_;
  const int64_t row_pixels_, rows_;
  int64_t reach_ = 0;  // pixels, from the one that the first tap reads to the last one that any does
  std::optional<FlatLaunch> best_;
};

}  // namespace

std::optional<FlatLaunch> ChooseFlatLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                           const DeviceFacts& device, const FlatForm& weight, int64_t element_bytes) {
  if (sizes.in_dims[1] == 0 || sizes.in_dims[2] == 0 || weight.row_tiles == 0) return {};
  return Planner(geometry, sizes, batch, device, weight, element_bytes).Choose();
}

}  // namespace sparseconv::cuda
