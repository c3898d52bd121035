#include "plan.h"

#include <algorithm>
#include <limits>

#include "../checked.h"

namespace sparseconv::cpu {
namespace {

constexpr int64_t kMaxCells = std::numeric_limits<int32_t>::max();
// Right and left padding of neighbouring rows share cells; more than this many is not worth looking for.
constexpr int64_t kMaxOverlap = 16;
// Vector multiply-adds of one chunk: some 30 us, long against the cost of a task, short against a layer.
constexpr int64_t kChunkWork = 100000;
// A packed chunk should stay in the second-level cache, the part of it that one block of channels reads in the first.
constexpr int64_t kChunkBytes = 384 << 10;
constexpr int64_t kBlockBytes = 24 << 10;
// Entries of a row in one block, on average: enough to pay for keeping partial sums in memory.
constexpr int64_t kMinBlockEntries = 16;

AxisPhases MakePhases(int64_t kernel, int64_t stride, int64_t dilation) {
  AxisPhases axis;
  for (int64_t r = 0; r < kernel; ++r) {
    const int64_t phase = r * dilation % stride, step = r * dilation / stride;
    const auto found = std::find(axis.phases.begin(), axis.phases.end(), phase);
    const auto index = static_cast<size_t>(found - axis.phases.begin());
    if (found == axis.phases.end()) {
      axis.phases.push_back(phase);
      axis.last_step.push_back(step);
    }
    axis.last_step[index] = std::max(axis.last_step[index], step);
    axis.tap_phase.push_back(index);
    axis.tap_step.push_back(step);
    axis.max_step = std::max(axis.max_step, step);
  }
  return axis;
}

// Cells at the end of a row that may be the first cells of the next row: ones that nobody reads, or padding on both
// sides.
int64_t RowOverlap(const ConvGeometry& conv, const Plan& plan, int64_t row_cells) {
  const AxisPhases& axis = plan.axes[2];
  const int64_t out_size = plan.geometry.out_dims[2];
  const auto works = [&](int64_t overlap) {
    for (size_t f = 0; f < axis.phases.size(); ++f) {
      const auto is_padding = [&](int64_t cell) {
        const int64_t coordinate = cell * conv.strides[2] + axis.phases[f] - plan.geometry.pads_begin[2];
        return coordinate < 0 || coordinate >= plan.geometry.in_dims[2];
      };
      for (int64_t lead = 0; lead < overlap; ++lead) {
        const int64_t trail = row_cells - overlap + lead;
        const bool is_read = trail < out_size + axis.last_step[f];
        if (is_read && !(is_padding(trail) && is_padding(lead))) return false;
      }
    }
    return true;
  };
  int64_t overlap = std::min(kMaxOverlap, row_cells - out_size);
  while (overlap > 0 && !works(overlap)) --overlap;
  return overlap;
}

void LayOutCells(const ConvGeometry& conv, Plan* plan) {
  const Axes& out = plan->geometry.out_dims;
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    plan->axes[i] = MakePhases(conv.kernel_shape[i], conv.strides[i], conv.dilations[i]);
    plan->num_phases *= static_cast<int64_t>(plan->axes[i].phases.size());
  }
  const int64_t row_cells = out[2] + plan->axes[2].max_step;
  plan->row_pitch = row_cells - RowOverlap(conv, *plan, row_cells);
  plan->plane_rows = out[1] + plan->axes[1].max_step;
  const int64_t row_step = plan->row_pitch;
  const int64_t plane_step = CheckedMultiply(plan->plane_rows, row_step, "the size of a padded plane");
  const int64_t cells = CheckedMultiply(out[0] + plan->axes[0].max_step, plane_step, "the size of a padded channel");
  if (cells > kMaxCells) Fail("a padded channel of ", cells, " values is more than the CPU kernel can address");
  plan->num_positions = (out[0] - 1) * plane_step + (out[1] - 1) * row_step + out[2];
  plan->halo = plan->axes[0].max_step * plane_step + plan->axes[1].max_step * row_step + plan->axes[2].max_step;
}

bool CanReadInPlace(const ConvGeometry& conv, const Plan& plan, int lanes) {
  const ResolvedGeometry& g = plan.geometry;
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    if (conv.strides[i] != 1 || g.in_dims[i] != g.out_dims[i] + plan.axes[i].max_step) return false;
  }
  // Without padding on either side, cells and input have the same rows, unless rows overlap.
  return plan.row_pitch == g.in_dims[2] && plan.num_positions >= lanes;
}

// Appends the runs of the positions [begin, end) of a tile that starts at `start`.
void AppendRuns(int64_t start, int64_t begin, int64_t end, Plan* plan) {
  const Axes& out = plan->geometry.out_dims;
  const size_t first_run = plan->runs.size();
  for (int64_t row = begin / plan->row_pitch; row * plan->row_pitch < end; ++row) {
    const int64_t o0 = row / plan->plane_rows, o1 = row % plan->plane_rows;
    if (o0 >= out[0] || o1 >= out[1]) continue;
    const int64_t row_start = row * plan->row_pitch;
    const int64_t run_begin = std::max(row_start, begin), run_end = std::min(row_start + out[2], end);
    if (run_begin >= run_end) continue;
    const int64_t output = (o0 * out[1] + o1) * out[2] + run_begin - row_start;
    if (plan->runs.size() > first_run) {
      Run& last = plan->runs.back();
      if (last.begin + last.length == run_begin - start && last.output + last.length == output) {
        last.length += static_cast<int32_t>(run_end - run_begin);
        continue;
      }
    }
    plan->runs.push_back({static_cast<int32_t>(run_begin - start), static_cast<int32_t>(run_end - run_begin), output});
  }
}

void AppendTile(int64_t begin, int64_t end, int32_t num_vectors, int lanes, Plan* plan) {
  int64_t start = begin;
  // In place, no lane may reach beyond the channel: the last tile begins earlier and stores only what is left.
  if (plan->in_place) start = std::min(start, plan->num_positions - num_vectors * lanes);
  const size_t first_run = plan->runs.size();
  AppendRuns(start, begin, end, plan);
  plan->tiles.push_back({start, num_vectors, first_run, plan->runs.size()});
}

// Cuts the positions into tiles of nearly equal numbers of vectors.
void CutTiles(int lanes, Plan* plan) {
  const int64_t num_vectors = CeilDivide(plan->num_positions, lanes);
  if (plan->in_place && num_vectors <= kMaxVectors && plan->num_positions % lanes != 0) {
    // Fewer positions than one tile's lanes: whole vectors, then one more that overlaps them.
    const int64_t whole = plan->num_positions / lanes * lanes;
    AppendTile(0, whole, static_cast<int32_t>(whole / lanes), lanes, plan);
    AppendTile(whole, plan->num_positions, 1, lanes, plan);
    return;
  }
  const int64_t num_tiles = CeilDivide(num_vectors, kMaxVectors);
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t begin = num_vectors * i / num_tiles, end = num_vectors * (i + 1) / num_tiles;
    AppendTile(begin * lanes, std::min(end * lanes, plan->num_positions), static_cast<int32_t>(end - begin), lanes,
               plan);
  }
}

int64_t ChooseNumChunks(const ConvGeometry& conv, int lanes, const Plan& plan) {
  const auto num_tiles = static_cast<int64_t>(plan.tiles.size());
  const int64_t by_work = plan.work / kChunkWork;
  if (plan.in_place) return std::clamp<int64_t>(by_work, 1, num_tiles);
  // Every chunk packs its own halo, so a chunk is a few times longer, unless it would not fit the cache.
  const int64_t min_length = std::max<int64_t>(lanes * kMaxVectors, 4 * plan.halo);
  const int64_t with_halo = std::min(by_work, plan.num_positions / min_length);
  const int64_t bytes_a_position = conv.in_channels * plan.num_phases * static_cast<int64_t>(sizeof(float));
  const int64_t by_cache =
      bytes_a_position > kChunkBytes ? num_tiles : bytes_a_position * plan.num_positions / kChunkBytes;
  const int64_t max_by_halo = plan.num_positions / std::max<int64_t>(1, plan.halo);
  return std::clamp<int64_t>(std::max(with_halo, std::min(by_cache, max_by_halo)), 1, num_tiles);
}

void CutChunks(const ConvGeometry& conv, int lanes, Plan* plan) {
  const int64_t num_chunks = ChooseNumChunks(conv, lanes, *plan);
  const auto num_tiles = static_cast<int64_t>(plan->tiles.size());
  int64_t longest = 0;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const auto begin = static_cast<size_t>(num_tiles * i / num_chunks);
    const auto end = static_cast<size_t>(num_tiles * (i + 1) / num_chunks);
    plan->chunks.push_back({plan->tiles[begin].start, begin, end});
    const Tile& last = plan->tiles[end - 1];
    longest = std::max(longest, last.start + last.num_vectors * lanes - plan->tiles[begin].start);
  }
  if (plan->in_place) {
    plan->channel_cells = plan->in_plane;
    return;
  }
  // An odd number of cache lines, so that channels do not all fall on the same cache sets.
  plan->chunk_cells = (longest + plan->halo + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  if (plan->chunk_cells / kMaxLanes % 2 == 0) plan->chunk_cells += kMaxLanes;
  plan->channel_cells = CheckedMultiply(plan->num_phases, plan->chunk_cells, "the size of a packed channel");
}

int64_t ChooseBlockChannels(const ConvGeometry& conv, const SparseWeight& weight, int lanes, const Plan& plan) {
  const int64_t channels = conv.group_in_channels();
  if (conv.group_out_channels() < 4) return channels;
  const int64_t tile_cells = plan.tiles.front().num_vectors * lanes;
  const int64_t cells =
      std::min(plan.num_phases * (tile_cells + plan.halo),
               conv.kernel_shape[0] * conv.kernel_shape[1] * (tile_cells + plan.axes[2].max_step + 1));
  const int64_t by_cache = kBlockBytes / static_cast<int64_t>(sizeof(float)) / cells;
  const double entries_a_channel = static_cast<double>(weight.values.size()) / static_cast<double>(conv.out_channels) /
                                   static_cast<double>(channels);
  if (entries_a_channel * static_cast<double>(channels) <= kMinBlockEntries) return channels;
  const auto by_entries = static_cast<int64_t>(kMinBlockEntries / entries_a_channel);
  return std::clamp<int64_t>(std::max(by_cache, by_entries), 1, channels);
}

// Offset of each tap within a channel's cells.
std::vector<int64_t> TapOffsets(const ConvGeometry& conv, const Plan& plan) {
  std::vector<int64_t> offsets;
  const auto& [first, second, third] = plan.axes;
  for (size_t r = 0; r < static_cast<size_t>(conv.kernel_shape[0]); ++r) {
    for (size_t s = 0; s < static_cast<size_t>(conv.kernel_shape[1]); ++s) {
      for (size_t t = 0; t < static_cast<size_t>(conv.kernel_shape[2]); ++t) {
        const size_t phase = (first.tap_phase[r] * second.phases.size() + second.tap_phase[s]) * third.phases.size() +
                             third.tap_phase[t];
        const int64_t cell =
            (first.tap_step[r] * plan.plane_rows + second.tap_step[s]) * plan.row_pitch + third.tap_step[t];
        offsets.push_back(static_cast<int64_t>(phase) * plan.chunk_cells + cell);
      }
    }
  }
  return offsets;
}

void StretchOffsets(const ConvGeometry& conv, const SparseWeight& weight, int lanes, Plan* plan) {
  if (CheckedMultiply(conv.group_in_channels(), plan->channel_cells, "the size of a packed group") > kMaxCells) {
    Fail("a group of ", conv.group_in_channels(), " input channels of ", plan->channel_cells,
         " padded values is more than the CPU kernel can address");
  }
  const std::vector<int64_t> tap_offsets = TapOffsets(conv, *plan);
  const int64_t taps = conv.taps();
  const int64_t block_channels = ChooseBlockChannels(conv, weight, lanes, *plan);
  plan->num_blocks = static_cast<int32_t>(CeilDivide(conv.group_in_channels(), block_channels));
  plan->offsets.resize(weight.columns.size());
  plan->segments.reserve(static_cast<size_t>(conv.out_channels) * static_cast<size_t>(plan->num_blocks) + 1);
  for (size_t row = 0; row + 1 < weight.row_begin.size(); ++row) {
    auto e = static_cast<size_t>(weight.row_begin[row]);
    const auto row_end = static_cast<size_t>(weight.row_begin[row + 1]);
    for (int64_t block = 0; block < plan->num_blocks; ++block) {
      plan->segments.push_back(static_cast<uint32_t>(e));
      for (; e < row_end && weight.columns[e] / taps / block_channels == block; ++e) {
        const int64_t channel = weight.columns[e] / taps, tap = weight.columns[e] % taps;
        plan->offsets[e] = static_cast<int32_t>(channel * plan->channel_cells + tap_offsets[static_cast<size_t>(tap)]);
      }
    }
  }
  plan->segments.push_back(static_cast<uint32_t>(weight.columns.size()));
}

}  // namespace

Plan MakePlan(const ConvGeometry& geometry, const SparseWeight& weight, const Axes& in_dims, int lanes,
              bool may_read_in_place) {
  Plan plan;
  plan.geometry = Resolve(geometry, in_dims);
  const Axes& out = plan.geometry.out_dims;
  plan.in_plane =
      CheckedMultiply(CheckedMultiply(in_dims[0], in_dims[1], "the size of X"), in_dims[2], "the size of X");
  plan.out_plane = CheckedMultiply(CheckedMultiply(out[0], out[1], "the size of Y"), out[2], "the size of Y");
  LayOutCells(geometry, &plan);
  plan.work = CheckedMultiply(static_cast<int64_t>(weight.values.size()) + geometry.out_channels,
                              CeilDivide(plan.num_positions, lanes), "the work for an image");
  plan.in_place = may_read_in_place && CanReadInPlace(geometry, plan, lanes);
  CutTiles(lanes, &plan);
  CutChunks(geometry, lanes, &plan);
  StretchOffsets(geometry, weight, lanes, &plan);
  return plan;
}

}  // namespace sparseconv::cpu
