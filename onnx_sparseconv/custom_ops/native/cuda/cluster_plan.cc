#include "cluster_plan.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "../checked.h"
#include "divisor.h"
#include "tensor_launch.h"
#include "wgmma_plan.h"
#include "wgmma_weight.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kOctet = 8, kPixelBytes = 16;
constexpr int64_t kUnit = 128;      // of what lies in shared memory
constexpr int64_t kBankWords = 32;  // of it
constexpr int64_t kBatchSteps = 4;
constexpr int64_t kMaxGrid = 65535;  // of y and z
constexpr int64_t kMoreCuts = 3;     // of a row, than are needed
// Cycles of a multiprocessor, about: fitted to layers of 64 to 2048 channels, 4 to 64 images, on an H200.
constexpr double kBeginCycles = 8400.0;    // of a block, and for the blocks of a cluster to wait for each other
constexpr double kNextCycles = 5600.0;     // the same of a block behind another one
constexpr double kTaskCycles = 55.0;       // to stage columns of eight channels, by a warp
constexpr double kFloatTaskCycles = 65.0;  // .. of floats
constexpr double kBytesACycle = 32.0;      // of the weight
constexpr double kPositionCycles = 0.75;   // of a step, for a position of a warpgroup
constexpr double kOutputCycles = 0.43;     // to finish an output
constexpr double kPartCycles = 0.12;       // .. and to add a part to it
// Of X and Y, that are in caches; others pass through memory, beyond all that.
constexpr double kCachedBytes = 4e6;

// The chunks of all blocks of rows, each cut into parts of about as many steps.
struct Parts {
  std::vector<unsigned short> begins;  // first chunks, of all blocks; behind the last one, their number
  int64_t max_chunks = 0, max_steps = 0;

  Parts(const WgmmaFacts& facts, int64_t parts) {
    const auto& steps = facts.chunk_steps;
    for (size_t block = 0; block + 1 < facts.block_begins.size(); ++block) {
      const size_t end = facts.block_begins[block + 1];
      int64_t left = 0;
      for (size_t i = facts.block_begins[block]; i < end; ++i) left += steps[i];
      size_t chunk = facts.block_begins[block];
      for (int64_t part = 0; part < parts; ++part) {
        begins.push_back(static_cast<unsigned short>(chunk));
        const size_t begin = chunk;
        int64_t sum = 0;
        // Up to where the part has as many steps as those behind it will have.
        while (chunk < end &&
               (part + 1 == parts || 2 * (parts - part) * sum + (parts - part) * steps[chunk] <= 2 * left)) {
          sum += steps[chunk++];
        }
        left -= sum;
        max_chunks = std::max(max_chunks, static_cast<int64_t>(chunk - begin));
        max_steps = std::max(max_steps, sum);
      }
    }
    begins.push_back(static_cast<unsigned short>(steps.size()));
  }
};

class Planner {
 public:
  Planner(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, const DeviceFacts& device,
          const WgmmaFacts& facts, int64_t x_alignment)
      : geometry_(geometry),
        sizes_(Flattened(geometry, sizes)),
        batch_(batch),
        device_(device),
        facts_(facts),
        out_h_(sizes_.out_dims[1]),
        out_w_(sizes_.out_dims[2]),
        reach_y_((geometry.kernel_shape[1] - 1) * geometry.dilations[1]),
        reach_x_((geometry.kernel_shape[2] - 1) * geometry.dilations[2]),
        planes_{PlanesOf(1), PlanesOf(2)},
        x_columns_(ColumnsOfX(x_alignment)),
        memory_(MemoryCycles(std::max(NumBytes() - kCachedBytes, 0.0), device)) {}

  std::optional<ClusterLaunch> Choose() {
    const auto num_blocks = static_cast<int64_t>(facts_.block_begins.size()) - 1;
    const int64_t most = std::clamp<int64_t>(facts_.max_block_chunks, 1, kMaxClusterParts);
    for (int64_t parts = 1; parts <= most && parts * num_blocks <= kMaxAllClusterParts; ++parts) {
      if (device_.max_clusters[static_cast<size_t>(parts)] == 0) break;
      const Parts chunks(facts_, parts);
      if (chunks.max_chunks > kMaxClusterChunks) continue;
      for (const int blocks : kClusterBlocks) {
        const int64_t positions = kOctet * blocks, least = CeilDivide(out_w_, positions);
        for (int64_t cuts = least; cuts <= std::min(least + kMoreCuts, out_w_); ++cuts) {
          int64_t run_w = CeilDivide(out_w_, cuts);
          if (out_w_ % 2 == 0 && run_w % 2 != 0 && run_w < positions) ++run_w;
          for (int64_t lines = 1; lines <= std::min(out_h_, positions); ++lines) {
            if (facts_.form.row_tiles > 1) {
              if (!Try(chunks, parts, {blocks, run_w, lines, 1, 1, 1})) break;
              continue;
            }
            const bool fits = Try(chunks, parts, {blocks, run_w, lines, 1, 2, 1});
            if (cuts > 1) Try(chunks, parts, {blocks, run_w, lines, 2, 1, 1});
            if (!fits) break;
          }
        }
        TryImages(chunks, parts, blocks);
      }
    }
    return best_;
  }

 private:
  struct Tiling {
    int blocks;
    int64_t run_w, run_lines;
    int64_t runs_x, runs_y;
    int64_t images;  // with several, all of their outputs

    int64_t tile_w() const { return runs_x * run_w; }
  };

  // A pointwise convolution of all positions in their order is one of a single row.
  static ResolvedGeometry Flattened(const ConvGeometry& geometry, const ResolvedGeometry& sizes) {
    if (!IsPointwise(geometry) || !IsPlain(geometry)) return sizes;
    ResolvedGeometry flat = sizes;
    flat.in_dims = {1, 1, sizes.in_dims[0] * sizes.in_dims[1] * sizes.in_dims[2]};
    flat.out_dims = flat.in_dims;
    return flat;
  }

  // Places between strides that taps read.
  int64_t PlanesOf(size_t axis) const {
    const int64_t stride = geometry_.strides[axis], dilation = geometry_.dilations[axis];
    if (geometry_.kernel_shape[axis] == 1 || dilation % stride == 0) return 1;
    return std::min(stride, (geometry_.kernel_shape[axis] - 1) * dilation + 1);
  }

  // Of X and Y.
  double NumBytes() const {
    const auto values = [](int64_t channels, const Axes& dims) {
      return static_cast<double>(channels) * static_cast<double>(dims[1] * dims[2]);
    };
    return static_cast<double>(facts_.element_bytes * batch_) *
           (values(geometry_.in_channels, sizes_.in_dims) + values(geometry_.out_channels, sizes_.out_dims));
  }

  int ColumnsOfX(int64_t alignment) const {
    int columns = geometry_.strides[2] == 1 ? 4 : 1;
    while (columns > 1 && (alignment % (columns * facts_.element_bytes) != 0 || sizes_.in_dims[2] % columns != 0)) {
      columns /= 2;
    }
    return columns;
  }

  // Tiles of whole maps of several images.
  void TryImages(const Parts& chunks, int64_t parts, int blocks) {
    const int64_t runs = kWarpgroups / facts_.form.row_tiles;
    for (int64_t images = 2; images <= batch_; ++images) {
      if (!Try(chunks, parts, {blocks, out_w_, CeilDivide(images * out_h_, runs), 1, runs, images})) break;
    }
  }

  // Whether the run's lines fit its positions.
  bool Try(const Parts& chunks, int64_t parts, const Tiling& tiling) {
    const bool are_pairs = out_w_ % 2 == 0 && tiling.run_w % 2 == 0;
    const int64_t line_pixels = RoundUp(tiling.tile_w() + reach_x_ / geometry_.strides[2], are_pairs ? 2 : 1);
    const int64_t positions = kOctet * tiling.blocks;
    if ((tiling.run_lines - 1) * line_pixels + tiling.run_w > positions) return false;
    const int64_t tile_h = std::min(CeilDivide(tiling.runs_y * tiling.run_lines, tiling.images), out_h_);
    const int64_t plane_rows = tile_h + reach_y_ / geometry_.strides[1];
    const int64_t lines = planes_[0] * planes_[1] * plane_rows * tiling.images;
    // Octets of the same pixel lie in other banks.
    const int64_t octet_bytes = RoundUp(kPixelBytes * (lines * line_pixels - 1), kUnit) + kPixelBytes;
    const int64_t octets = chunks.max_chunks * (kWgmmaChannels / kOctet);
    const int64_t input_bytes = RoundUp(octets * octet_bytes, kUnit);
    const int64_t max_steps = RoundUp(chunks.max_steps, kBatchSteps);
    const int64_t weight_bytes = max_steps * facts_.form.row_tiles * kStepBytes;
    const int64_t lists = 4 * (max_steps + chunks.max_chunks * kWgmmaChannels);
    // Rows of sums that are stored together lie in other banks.
    const int64_t sums_pitch = RoundUp(positions - kOctet, kBankWords / 2) + kOctet;
    const int64_t sums_bytes = kWarpgroups * kWgmmaTileRows * 4 * sums_pitch;
    const int64_t shared_bytes = kClusterHeadBytes + std::max(input_bytes + weight_bytes + lists, sums_bytes);
    if (shared_bytes > device_.max_shared_bytes - kReservedSharedBytes) return true;

    const int64_t tiles_x = CeilDivide(out_w_, tiling.tile_w()), tiles_y = CeilDivide(out_h_, tile_h);
    const auto row_blocks = static_cast<int64_t>(facts_.block_begins.size()) - 1;
    const int64_t of_row_block = CheckedMultiply(tiles_x * tiles_y, CeilDivide(batch_, tiling.images), "the tiles");
    if (of_row_block > kMaxGrid || row_blocks > kMaxGrid) return true;
    const int64_t tiles = of_row_block * row_blocks;

    const int64_t vectors = CeilDivide(line_pixels + x_columns_ - 1, int64_t{x_columns_});
    const int64_t segments = CeilDivide(lines * vectors * x_columns_, int64_t{32});
    const int64_t tasks = segments * octets / x_columns_;
    const auto steps = static_cast<double>(chunks.max_steps);
    const bool is_float = facts_.element_bytes > 2;
    const double staging = std::max((is_float ? kFloatTaskCycles : kTaskCycles) * static_cast<double>(tasks),
                                    static_cast<double>(weight_bytes) / kBytesACycle);
    const double products = steps * kPositionCycles * static_cast<double>(kWarpgroups * positions);
    const auto outputs = static_cast<double>(kWarpgroups * kWgmmaTileRows * tiling.run_lines * tiling.run_w) /
                         static_cast<double>(parts);
    const double finishing = (kOutputCycles + kPartCycles * static_cast<double>(parts)) * outputs;
    const int64_t waves = CeilDivide(tiles, int64_t{device_.max_clusters[static_cast<size_t>(parts)]});
    const double cycles = kBeginCycles - kNextCycles +
                          static_cast<double>(waves) * (kNextCycles + staging + products + finishing) + memory_;
    if (best_ && cycles >= best_->cycles) return true;

    ClusterLaunch& launch = best_.emplace();
    launch.blocks = tiling.blocks;
    launch.cycles = cycles;
    ClusterParams& params = launch.params;
    FillTiles(geometry_, sizes_, batch_, facts_.form,
              {tiles_x, tiles_y, tile_h, tiling.tile_w(), tiles, 1, 0, input_bytes, 0}, &params.common);
    params.parts = static_cast<int>(parts);
    std::copy(chunks.begins.begin(), chunks.begins.end(), params.part_begins);
    FillTaps(plane_rows, tiling.images * line_pixels, &params);
    for (size_t axis = 0; axis < 2; ++axis) params.planes[axis] = static_cast<int>(planes_[axis]);
    params.images = static_cast<int>(tiling.images);
    params.plane_rows = static_cast<int>(plane_rows);
    params.line_pixels = static_cast<int>(line_pixels);
    params.octet_bytes = static_cast<int>(octet_bytes);
    params.x_columns = x_columns_;
    params.line_vectors = static_cast<int>(vectors);
    params.by_tiles_x = MakeDivisor(tiles_x);
    params.by_tiles_y = MakeDivisor(tiles_y);
    params.by_images = MakeDivisor(tiling.images);
    params.by_line_vectors = MakeDivisor(vectors);
    params.by_segments = MakeDivisor(segments);
    for (const int columns : {1, 2}) {
      const int64_t of_line = std::max<int64_t>(tiling.run_w / columns, 1);
      params.by_out_vectors[columns - 1] = MakeDivisor(of_line);
      params.by_out_row[columns - 1] = MakeDivisor(of_line * tiling.run_lines);
    }
    params.run_lines = static_cast<int>(tiling.run_lines);
    params.run_w = static_cast<int>(tiling.run_w);
    params.run_step_y = tiling.runs_y > 1 ? params.run_lines : 0;
    params.run_step_x = tiling.runs_x > 1 ? params.run_w : 0;
    params.max_steps = static_cast<int>(max_steps);
    params.sums_pitch = static_cast<int>(sums_pitch);
    params.out_columns = are_pairs ? 2 : 1;
    launch.shape.grid[0] = static_cast<unsigned>(parts);
    launch.shape.grid[1] = static_cast<unsigned>(row_blocks);
    launch.shape.grid[2] = static_cast<unsigned>(of_row_block);
    launch.shape.threads = kClusterThreads;
    launch.shape.cluster = static_cast<unsigned>(parts);
    launch.shape.begins_early = true;
    launch.shape.dynamic_shared_bytes = static_cast<unsigned>(shared_bytes);
    return true;
  }

  void FillTaps(int64_t plane_rows, int64_t row_pixels, ClusterParams* params) const {
    const int64_t width = geometry_.kernel_shape[2];
    for (int64_t tap = 0; tap < geometry_.taps(); ++tap) {
      const int64_t y = tap / width * geometry_.dilations[1], x = tap % width * geometry_.dilations[2];
      const int64_t plane = y % geometry_.strides[1] * planes_[1] + x % geometry_.strides[2];
      const int64_t row = plane * plane_rows + y / geometry_.strides[1];
      params->tap_bytes[tap] = static_cast<unsigned>((row * row_pixels + x / geometry_.strides[2]) * kPixelBytes);
    }
  }

  static constexpr int64_t kStepBytes = kWgmmaValueBytes + kWgmmaPlaceBytes;

  const ConvGeometry& geometry_;
  const ResolvedGeometry sizes_;
  const int64_t batch_;
  const DeviceFacts& device_;
  const WgmmaFacts& facts_;
  const int64_t out_h_, out_w_, reach_y_, reach_x_;
  const int64_t planes_[2];
  const int x_columns_;
  const double memory_;  // cycles of the whole launch
  std::optional<ClusterLaunch> best_;
};

}  // namespace

std::optional<ClusterLaunch> ChooseClusterLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                 int64_t batch, const DeviceFacts& device, const WgmmaFacts& facts,
                                                 int64_t x_alignment) {
  const Axes& in = sizes.in_dims;
  const Axes& out = sizes.out_dims;
  if (in[0] * in[1] * in[2] == 0) return {};
  // The kernel counts the bytes of an image of X in an unsigned, and what lies in a plane, and beyond it, in ints.
  constexpr int64_t kMaxImage = int64_t{1} << 29;
  const int64_t x_plane = CheckedMultiply(in[0], CheckedMultiply(in[1], in[2], "a plane of X"), "a plane of X");
  const int64_t y_plane = CheckedMultiply(out[0], CheckedMultiply(out[1], out[2], "a plane of Y"), "a plane of Y");
  if (CheckedMultiply(x_plane, geometry.in_channels, "an image of X") > kMaxImage || y_plane > kMaxImage ||
      CheckedMultiply(batch, geometry.out_channels, "the planes of Y") > kMaxImage) {
    return {};
  }
  // First chunks are counted in 16 bits.
  if (facts.chunk_steps.size() > std::numeric_limits<unsigned short>::max()) return {};
  return Planner(geometry, sizes, batch, device, facts, x_alignment).Choose();
}

}  // namespace sparseconv::cuda
