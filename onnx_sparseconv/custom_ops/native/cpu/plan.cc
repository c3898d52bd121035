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
// Storing and packing a vector, in multiply-adds, for cutting the work into tasks.
constexpr int64_t kStoreWork = 4;
constexpr int64_t kPackWork = 4;
// A packed chunk should stay in the second-level cache, the part of it that one block of channels reads in the first.
constexpr int64_t kChunkBytes = 384 << 10;
constexpr int64_t kBlockBytes = 32 << 10;
// Entries of a row in one block and shift, on average: enough to pay for keeping partial sums in memory.
constexpr int64_t kMinBlockEntries = 8;
// Costs by which layouts are compared, in multiply-adds of vectors that straddle cache lines (measured, see
// docs/cpu-kernel.md): ending the loop over the entries of one shift; moving one vector by its shift; packing a vector;
// packing a row.
constexpr double kSegmentCost = 12;
constexpr double kMoveCost = 1.5;
constexpr double kPackVectorCost = 2;
constexpr double kPackRowCost = 8;

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

// Whether rows of cells may begin every `pitch` cells: what two rows then share is read by none of them, or padding on
// both sides.
bool IsValidPitch(const ConvGeometry& conv, const Plan& plan, int64_t pitch) {
  const AxisPhases& axis = plan.axes[2];
  const int64_t out_size = plan.geometry.out_dims[2];
  const int64_t overlap = out_size + axis.max_step - pitch;
  for (size_t f = 0; f < axis.phases.size(); ++f) {
    const auto is_padding = [&](int64_t cell) {
      const int64_t coordinate = cell * conv.strides[2] + axis.phases[f] - plan.geometry.pads_begin[2];
      return coordinate < 0 || coordinate >= plan.geometry.in_dims[2];
    };
    for (int64_t lead = 0; lead < overlap; ++lead) {
      const int64_t trail = pitch + lead;
      const bool is_read = trail < out_size + axis.last_step[f];
      if (is_read && !(is_padding(trail) && is_padding(lead))) return false;
    }
  }
  return true;
}

void LayOutCells(int64_t row_pitch, Plan* plan) {
  const Axes& out = plan->geometry.out_dims;
  plan->row_pitch = row_pitch;
  plan->plane_rows = out[1] + plan->axes[1].max_step;
  const int64_t plane_step = CheckedMultiply(plan->plane_rows, row_pitch, "the size of a padded plane");
  const int64_t cells = CheckedMultiply(out[0] + plan->axes[0].max_step, plane_step, "the size of a padded channel");
  if (cells > kMaxCells) Fail("a padded channel of ", cells, " values is more than the CPU kernel can address");
  plan->num_positions = (out[0] - 1) * plane_step + (out[1] - 1) * row_pitch + out[2];
  plan->halo = plan->axes[0].max_step * plane_step + plan->axes[1].max_step * row_pitch + plan->axes[2].max_step;
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
void CutTiles(const TileKernels& kernels, Plan* plan) {
  const int lanes = kernels.lanes;
  const int64_t max_vectors = plan->shifts.size() > 1 ? kernels.max_shifted_vectors : kernels.max_vectors;
  const int64_t num_vectors = CeilDivide(plan->num_positions, lanes);
  if (plan->in_place && num_vectors <= max_vectors && plan->num_positions % lanes != 0) {
    // Fewer positions than one tile's lanes: whole vectors, then one more that overlaps them.
    const int64_t whole = plan->num_positions / lanes * lanes;
    AppendTile(0, whole, static_cast<int32_t>(whole / lanes), lanes, plan);
    AppendTile(whole, plan->num_positions, 1, lanes, plan);
    return;
  }
  const int64_t num_tiles = CeilDivide(num_vectors, max_vectors);
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
  if (plan->shifts.size() > 1) longest += lanes;  // shifted sums reach one vector beyond the tile
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
  const double min_entries =
      static_cast<double>(kMinBlockEntries) * static_cast<double>(std::max<size_t>(2, plan.shifts.size()));
  if (entries_a_channel * static_cast<double>(channels) <= min_entries) return channels;
  const auto by_entries = static_cast<int64_t>(min_entries / entries_a_channel);
  return std::clamp<int64_t>(std::max(by_cache, by_entries), 1, channels);
}

// Offset of each tap within the cells of a channel and phase, and the phase.
struct TapPlace {
  int64_t phase;
  int64_t cell;
};

std::vector<TapPlace> PlaceTaps(const ConvGeometry& conv, const Plan& plan) {
  std::vector<TapPlace> places;
  const auto& [first, second, third] = plan.axes;
  for (size_t r = 0; r < static_cast<size_t>(conv.kernel_shape[0]); ++r) {
    for (size_t s = 0; s < static_cast<size_t>(conv.kernel_shape[1]); ++s) {
      for (size_t t = 0; t < static_cast<size_t>(conv.kernel_shape[2]); ++t) {
        const size_t phase = (first.tap_phase[r] * second.phases.size() + second.tap_phase[s]) * third.phases.size() +
                             third.tap_phase[t];
        const int64_t cell =
            (first.tap_step[r] * plan.plane_rows + second.tap_step[s]) * plan.row_pitch + third.tap_step[t];
        places.push_back({static_cast<int64_t>(phase), cell});
      }
    }
  }
  return places;
}

// The distinct shifts of the taps, increasing.
std::vector<int32_t> ShiftsOf(const std::vector<TapPlace>& places, int lanes) {
  std::vector<int32_t> shifts;
  for (const TapPlace& place : places) shifts.push_back(static_cast<int32_t>(place.cell % lanes));
  std::sort(shifts.begin(), shifts.end());
  shifts.erase(std::unique(shifts.begin(), shifts.end()), shifts.end());
  return shifts;
}

struct Layout {
  int64_t row_pitch = 0;
  bool in_place = false;
  bool has_shifts = false;
  double cost = 0;
};

// Cost of the sums of one image, without shifts.
double SumsCost(const SparseWeight& weight, const Plan& plan, const TileKernels& kernels, bool is_aligned) {
  const auto vectors = static_cast<double>(CeilDivide(plan.num_positions, kernels.lanes));
  return static_cast<double>(weight.values.size()) * vectors * (is_aligned ? kernels.shifted_cost : 1.0);
}

// Cost of the sums of one image with shifts.
double ShiftedSumsCost(const ConvGeometry& conv, const SparseWeight& weight, const std::vector<int64_t>& tap_entries,
                       const Plan& plan, const TileKernels& kernels, const std::vector<TapPlace>& places,
                       double num_shifts) {
  const auto vectors = static_cast<double>(CeilDivide(plan.num_positions, kernels.lanes));
  const double tile = std::min<double>(kernels.max_shifted_vectors, vectors);
  double sums = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const bool is_shifted = places[i].cell % kernels.lanes != 0;
    const double reach = is_shifted ? (tile + 1) / tile : 1.0;  // shifted sums reach one vector beyond the tile
    sums += static_cast<double>(tap_entries[i]) * vectors * kernels.shifted_cost * reach;
  }
  const auto rows = static_cast<double>(conv.out_channels);
  const double entries_a_row = static_cast<double>(weight.values.size()) / rows;
  const double blocks = std::max(1.0, entries_a_row / (2.0 * kMinBlockEntries * num_shifts));
  const double segments = rows * vectors / tile * blocks * (num_shifts - 1);
  return sums + segments * (kSegmentCost + kMoveCost * tile);
}

// Cost of one image whose cells, laid out as in `plan`, are packed.
double PackedCost(const ConvGeometry& conv, const SparseWeight& weight, const std::vector<int64_t>& tap_entries,
                  const Plan& plan, const TileKernels& kernels, bool has_shifts) {
  const int64_t cells = plan.num_positions + plan.halo;
  const double vectors_a_channel = static_cast<double>(cells) / kernels.lanes;
  const auto rows_a_channel = static_cast<double>(CeilDivide(cells, plan.row_pitch));
  const double packing = static_cast<double>(conv.in_channels * plan.num_phases) *
                         (vectors_a_channel * kPackVectorCost + rows_a_channel * kPackRowCost);
  const std::vector<TapPlace> places = PlaceTaps(conv, plan);
  const std::vector<int32_t> shifts = ShiftsOf(places, kernels.lanes);
  if (!has_shifts) return packing + SumsCost(weight, plan, kernels, shifts.size() == 1);
  return packing +
         ShiftedSumsCost(conv, weight, tap_entries, plan, kernels, places, static_cast<double>(shifts.size()));
}

// The cheapest of: the input in place; cells of every sensible row pitch, with shifts and without.
Layout ChooseLayout(const ConvGeometry& conv, const SparseWeight& weight, const TileKernels& kernels,
                    InputAccess access, Plan plan) {
  std::vector<int64_t> tap_entries(static_cast<size_t>(conv.taps()));
  for (const uint32_t column : weight.columns) ++tap_entries[static_cast<size_t>(column % conv.taps())];
  const int64_t row_cells = plan.geometry.out_dims[2] + plan.axes[2].max_step;
  const int64_t longest = CeilDivide(row_cells, kernels.lanes) * kernels.lanes;
  const int64_t overlap = std::min(kMaxOverlap, plan.axes[2].max_step);
  Layout best;
  for (int64_t pitch = std::max<int64_t>(1, row_cells - overlap); pitch <= longest; ++pitch) {
    if (!IsValidPitch(conv, plan, pitch)) continue;
    LayOutCells(pitch, &plan);
    const auto consider = [&](bool in_place, bool has_shifts, double cost) {
      if (best.row_pitch == 0 || cost < best.cost) best = {pitch, in_place, has_shifts, cost};
    };
    if (access != InputAccess::kConvert && CanReadInPlace(conv, plan, kernels.lanes)) {
      const bool is_aligned = access == InputAccess::kAligned && plan.in_plane % kernels.lanes == 0;
      consider(true, false, SumsCost(weight, plan, kernels, is_aligned));
    }
    consider(false, false, PackedCost(conv, weight, tap_entries, plan, kernels, false));
    consider(false, true, PackedCost(conv, weight, tap_entries, plan, kernels, true));
  }
  return best;
}

void MakeEntries(const ConvGeometry& conv, const SparseWeight& weight, const TileKernels& kernels, Plan* plan) {
  if (CheckedMultiply(conv.group_in_channels(), plan->channel_cells, "the size of a packed group") > kMaxCells) {
    Fail("a group of ", conv.group_in_channels(), " input channels of ", plan->channel_cells,
         " padded values is more than the CPU kernel can address");
  }
  const std::vector<TapPlace> places = PlaceTaps(conv, *plan);
  const bool has_shifts = plan->shifts.size() > 1;
  const int64_t taps = conv.taps();
  const int64_t block_channels = ChooseBlockChannels(conv, weight, kernels.lanes, *plan);
  plan->num_blocks = static_cast<int32_t>(CeilDivide(conv.group_in_channels(), block_channels));
  plan->entries.reserve(weight.columns.size());
  plan->segments.reserve(
      static_cast<size_t>(conv.out_channels) * static_cast<size_t>(plan->num_blocks) * plan->shifts.size() + 1);
  for (size_t row = 0; row + 1 < weight.row_begin.size(); ++row) {
    auto block_end = static_cast<size_t>(weight.row_begin[row]);
    const auto row_end = static_cast<size_t>(weight.row_begin[row + 1]);
    for (int64_t block = 0; block < plan->num_blocks; ++block) {
      const size_t block_begin = block_end;
      while (block_end < row_end && weight.columns[block_end] / taps / block_channels == block) ++block_end;
      for (const int32_t shift : plan->shifts) {
        plan->segments.push_back(static_cast<uint32_t>(plan->entries.size()));
        for (size_t e = block_begin; e < block_end; ++e) {
          const int64_t channel = weight.columns[e] / taps;
          const TapPlace& place = places[static_cast<size_t>(weight.columns[e] % taps)];
          if (has_shifts && place.cell % kernels.lanes != shift) continue;
          const int64_t offset = channel * plan->channel_cells + place.phase * plan->chunk_cells + place.cell - shift;
          plan->entries.push_back({static_cast<int32_t>(offset), weight.values[e]});
        }
      }
    }
  }
  plan->segments.push_back(static_cast<uint32_t>(plan->entries.size()));
}

}  // namespace

Plan MakePlan(const ConvGeometry& geometry, const SparseWeight& weight, const PlanKey& key,
              const TileKernels& kernels) {
  const Axes& in_dims = key.in_dims;
  Plan plan;
  plan.geometry = Resolve(geometry, in_dims);
  const Axes& out = plan.geometry.out_dims;
  plan.in_plane =
      CheckedMultiply(CheckedMultiply(in_dims[0], in_dims[1], "the size of X"), in_dims[2], "the size of X");
  plan.out_plane = CheckedMultiply(CheckedMultiply(out[0], out[1], "the size of Y"), out[2], "the size of Y");
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    plan.axes[i] = MakePhases(geometry.kernel_shape[i], geometry.strides[i], geometry.dilations[i]);
    plan.num_phases *= static_cast<int64_t>(plan.axes[i].phases.size());
  }
  const Layout layout = ChooseLayout(geometry, weight, kernels, key.access, plan);
  plan.in_place = layout.in_place;
  LayOutCells(layout.row_pitch, &plan);
  if (layout.has_shifts) plan.shifts = ShiftsOf(PlaceTaps(geometry, plan), kernels.lanes);
  if (plan.shifts.size() == 1) plan.shifts = {0};
  const int64_t work_a_vector = static_cast<int64_t>(weight.values.size()) + kStoreWork * geometry.out_channels +
                                kPackWork * geometry.in_channels * plan.num_phases;
  plan.work = CheckedMultiply(work_a_vector, CeilDivide(plan.num_positions, kernels.lanes), "the work for an image");
  CutTiles(kernels, &plan);
  CutChunks(geometry, kernels.lanes, &plan);
  MakeEntries(geometry, weight, kernels, &plan);
  return plan;
}

}  // namespace sparseconv::cpu
