#include "plan.h"

#include <algorithm>

#include "../checked.h"
#include "depthwise.h"
#include "layout.h"

namespace sparseconv::cpu {
namespace {

// Vector multiply-adds of one chunk: some 60 us, so that threads that began late, or are slower, compute fewer.
constexpr int64_t kChunkWork = 100000;
// And of the shortest task, some 5 us: a thread begins 2 us after a call, the sixteenth one 10 us.
constexpr int64_t kTaskWork = 6000;
constexpr int64_t kDepthwiseTaskWork = 4000;
constexpr int64_t kMinTaskRows = 8;
// Storing and packing a vector, in multiply-adds, for cutting the work into tasks.
constexpr int64_t kStoreWork = 4;
constexpr int64_t kPackWork = 4;
// A packed chunk should stay in the second-level cache, the part of it that one block of channels reads in the first.
constexpr int64_t kChunkBytes = 384 << 10;
constexpr int64_t kBlockBytes = 32 << 10;
// Where a block has to be this much larger for enough entries, there is none.
constexpr double kMaxBlockExcess = 4;
// Tiles may be shorter than the registers allow by this factor: tasks for other positions share less than tasks for
// other rows do.
constexpr int64_t kMaxShortening = 3;
// Shorter ones make their sums in another order, and no sum may depend on the number of threads.
constexpr int64_t kMinVectors = kMaxSplitVectors + 1;
// Chunks and row blocks give an image this share of its parts at least.
constexpr double kMinPartsShare = 0.75;

int64_t MaxVectors(const TileKernels& kernels, const Plan& plan) {
  return plan.shifts.size() > 1 ? kernels.max_shifted_vectors : kernels.max_vectors;
}

int64_t NumParts(int64_t work, int64_t task_work, const PlanKey& key) {
  return std::clamp<int64_t>(work / task_work, 1, key.num_threads);
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
  // In place, no lane may reach beyond the channel: the last vector then begins earlier and overlaps the one before it.
  // Where it is the only one, so does the tile, which stores only what is left.
  const int64_t last_lane = plan->in_place ? plan->num_positions : begin + num_vectors * lanes;
  const int64_t last_vector = std::min<int64_t>(begin + (num_vectors - 1) * lanes, last_lane - lanes);
  const int64_t start = std::min(begin, last_vector);
  const size_t first_run = plan->runs.size();
  AppendRuns(start, begin, end, plan);
  plan->tiles.push_back({start, num_vectors, static_cast<int32_t>(last_vector - start), first_run, plan->runs.size()});
}

// The largest number of chunks up to `max_chunks` with which, cut into row blocks, hardly a part is missing.
int64_t LargestWithParts(int64_t max_chunks, int64_t num_parts) {
  const auto parts_with = [&](int64_t chunks) { return chunks * std::max<int64_t>(1, num_parts / chunks); };
  int64_t chunks = max_chunks;
  while (chunks > 1 && static_cast<double>(parts_with(chunks)) < kMinPartsShare * static_cast<double>(num_parts)) {
    --chunks;
  }
  return chunks;
}

int64_t ChooseNumChunks(const ConvGeometry& conv, const TileKernels& kernels, const Plan& plan) {
  const int64_t max_vectors = MaxVectors(kernels, plan);
  const int64_t min_vectors = std::max(kMinVectors, CeilDivide(max_vectors, kMaxShortening));
  const int64_t max_chunks = std::max<int64_t>(1, plan.num_positions / (kernels.lanes * min_vectors));
  const int64_t by_work = std::max(plan.work / kChunkWork, plan.num_parts);
  int64_t chunks = by_work;
  if (!plan.in_place) {
    // Every chunk packs its own halo, so a chunk has some vectors and is a few halos long: fewer where there would be
    // too few chunks for the threads, or a chunk would not fit the cache.
    const auto with_halo = [&](int64_t wanted, int64_t vectors, int64_t halos) {
      return std::min(wanted, plan.num_positions / std::max(kernels.lanes * vectors, halos * plan.halo));
    };
    const int64_t bytes_a_position = conv.in_channels * plan.num_phases * static_cast<int64_t>(sizeof(float));
    const int64_t by_cache =
        bytes_a_position > kChunkBytes ? max_chunks : bytes_a_position * plan.num_positions / kChunkBytes;
    chunks = std::max({with_halo(by_work, kMaxVectors, 4), with_halo(plan.num_parts, 1, 2), with_halo(by_cache, 1, 1)});
  }
  chunks = std::clamp<int64_t>(chunks, 1, max_chunks);
  if (chunks < plan.num_parts) return LargestWithParts(chunks, plan.num_parts);
  const int64_t whole = CeilDivide(chunks, plan.num_parts) * plan.num_parts;
  return whole <= max_chunks ? whole : whole - plan.num_parts;
}

// Cuts the positions into chunks of equal numbers of tiles, of nearly equal numbers of vectors. Chunks are as many as
// threads, or a multiple: each of ONNX Runtime's threads begins with its own part of the tasks, so it computes the same
// part of the map in layer after layer and reads what it wrote itself, and not what lies in the other cores' caches.
// Where that would make chunks too short, rows are cut as well.
void CutTiles(const ConvGeometry& conv, const TileKernels& kernels, Plan* plan) {
  const int lanes = kernels.lanes;
  const int64_t num_chunks = ChooseNumChunks(conv, kernels, *plan);
  const int64_t max_row_blocks = CeilDivide(conv.out_channels, kMinTaskRows);
  plan->num_row_blocks = std::clamp<int64_t>(plan->num_parts / num_chunks, 1, max_row_blocks);
  const int64_t num_vectors = CeilDivide(plan->num_positions, lanes);
  const int64_t tiles_a_chunk = CeilDivide(CeilDivide(num_vectors, MaxVectors(kernels, *plan)), num_chunks);
  const int64_t num_tiles = tiles_a_chunk * num_chunks;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t begin = num_vectors * i / num_tiles, end = num_vectors * (i + 1) / num_tiles;
    AppendTile(begin * lanes, std::min(end * lanes, plan->num_positions), static_cast<int32_t>(end - begin), lanes,
               plan);
  }
  int64_t longest = 0;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const auto begin = static_cast<size_t>(tiles_a_chunk * i), end = static_cast<size_t>(tiles_a_chunk * (i + 1));
    plan->chunks.push_back({plan->tiles[begin].start, begin, end});
    const Tile& last = plan->tiles[end - 1];
    longest = std::max(longest, last.start + last.num_vectors * lanes - plan->tiles[begin].start);
  }
  if (plan->in_place) {
    plan->channel_cells = plan->in_plane;
    return;
  }
  if (plan->shifts.size() > 1) longest += lanes;  // shifted sums reach one vector beyond the tile
  // An odd number of cache lines, so that channels do not all fall on the same cache sets.
  plan->chunk_cells = (longest + plan->halo + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  if (plan->chunk_cells / kMaxLanes % 2 == 0) plan->chunk_cells += kMaxLanes;
  plan->channel_cells = CheckedMultiply(plan->num_phases, plan->chunk_cells, "the size of a packed channel");
}

// With shifts, the order of a sum depends on the blocks, and they on nothing that depends on the number of threads: the
// tiles that they are chosen for are as long as the registers allow.
int64_t ChooseBlockChannels(const ConvGeometry& conv, const SparseWeight& weight, const TileKernels& kernels,
                            const Plan& plan) {
  const int64_t channels = conv.group_in_channels();
  if (conv.group_out_channels() < 4) return channels;
  const int64_t tile_vectors = std::min(MaxVectors(kernels, plan), CeilDivide(plan.num_positions, kernels.lanes));
  const int64_t tile_cells = tile_vectors * kernels.lanes;
  const int64_t cells =
      std::min(plan.num_phases * (tile_cells + plan.halo),
               conv.kernel_shape[0] * conv.kernel_shape[1] * (tile_cells + plan.axes[2].max_step + 1));
  const int64_t by_cache = kBlockBytes / static_cast<int64_t>(sizeof(float)) / cells;
  const double entries_a_channel = static_cast<double>(weight.values.size()) / static_cast<double>(conv.out_channels) /
                                   static_cast<double>(channels);
  const double min_entries =
      MinBlockEntries(static_cast<double>(tile_vectors), static_cast<double>(plan.shifts.size()));
  if (min_entries > kMaxBlockExcess * entries_a_channel * static_cast<double>(by_cache)) return channels;
  const auto by_entries = static_cast<int64_t>(min_entries / entries_a_channel);
  return std::clamp<int64_t>(std::max(by_cache, by_entries), 1, channels);
}

void MakeEntries(const ConvGeometry& conv, const SparseWeight& weight, const TileKernels& kernels, Plan* plan) {
  if (CheckedMultiply(conv.group_in_channels(), plan->channel_cells, "the size of a packed group") > kMaxCells) {
    Fail("a group of ", conv.group_in_channels(), " input channels of ", plan->channel_cells,
         " padded values is more than the CPU kernel can address");
  }
  const std::vector<TapPlace> places = PlaceTaps(conv, *plan);
  const bool has_shifts = plan->shifts.size() > 1;
  const int64_t taps = conv.taps();
  const int64_t block_channels = ChooseBlockChannels(conv, weight, kernels, *plan);
  plan->num_blocks = static_cast<int32_t>(CeilDivide(conv.group_in_channels(), block_channels));
  plan->entries.reserve(weight.columns.size());
  plan->segments.reserve(
      static_cast<size_t>(conv.out_channels) * static_cast<size_t>(plan->num_blocks) * plan->shifts.size() + 1);
  const auto num_rows = static_cast<size_t>(conv.out_channels);
  for (size_t panel = 0; panel < num_rows; panel += kPanelRows) {
    const size_t panel_end = std::min(panel + kPanelRows, num_rows);
    std::vector<size_t> next;  // entry of each row
    for (size_t row = panel; row < panel_end; ++row) next.push_back(static_cast<size_t>(weight.row_begin[row]));
    for (int64_t block = 0; block < plan->num_blocks; ++block) {
      for (size_t row = panel; row < panel_end; ++row) {
        const auto row_end = static_cast<size_t>(weight.row_begin[row + 1]);
        const size_t begin = next[row - panel];
        size_t end = begin;
        while (end < row_end && weight.columns[end] / taps / block_channels == block) ++end;
        next[row - panel] = end;
        for (const int32_t shift : plan->shifts) {
          plan->segments.push_back(static_cast<uint32_t>(plan->entries.size()));
          for (size_t e = begin; e < end; ++e) {
            const int64_t channel = weight.columns[e] / taps;
            const TapPlace& place = places[static_cast<size_t>(weight.columns[e] % taps)];
            if (has_shifts && place.cell % kernels.lanes != shift) continue;
            const int64_t offset = channel * plan->channel_cells + place.phase * plan->chunk_cells + place.cell - shift;
            plan->entries.push_back({static_cast<int32_t>(offset), weight.values[e]});
          }
        }
      }
    }
  }
  plan->segments.push_back(static_cast<uint32_t>(plan->entries.size()));
}

PlanForm ChooseForm(const ConvGeometry& conv, const ResolvedGeometry& sizes) {
  if (IsDepthwise(conv, sizes)) return PlanForm::kDepthwise;
  return IsVector(conv, sizes) ? PlanForm::kVector : PlanForm::kCells;
}

// Makes one row of all positions where neighbours do not matter.
void JoinRows(const ConvGeometry& conv, Plan* plan) {
  ResolvedGeometry& geometry = plan->geometry;
  if (!IsPointwise(conv, geometry)) return;
  geometry.in_dims = geometry.out_dims = {1, 1, plan->in_plane};
}

}  // namespace

bool IsVector(const ConvGeometry& conv, const ResolvedGeometry& sizes) {
  const Axes one{1, 1, 1};
  return conv.taps() == 1 && sizes.in_dims == one && sizes.out_dims == one && sizes.pads_begin == Axes{0, 0, 0};
}

bool IsPointwise(const ConvGeometry& conv, const ResolvedGeometry& sizes) {
  return conv.taps() == 1 && conv.strides == Axes{1, 1, 1} && sizes.in_dims == sizes.out_dims;
}

Plan MakePlan(const ConvGeometry& geometry, const SparseWeight& weight, const PlanKey& key,
              const TileKernels& kernels) {
  const Axes& in_dims = key.in_dims;
  Plan plan;
  plan.geometry = Resolve(geometry, in_dims);
  const Axes out = plan.out_dims = plan.geometry.out_dims;
  plan.in_plane =
      CheckedMultiply(CheckedMultiply(in_dims[0], in_dims[1], "the size of X"), in_dims[2], "the size of X");
  plan.out_plane = CheckedMultiply(CheckedMultiply(out[0], out[1], "the size of Y"), out[2], "the size of Y");
  if (key.access != InputAccess::kConvert) plan.form = ChooseForm(geometry, plan.geometry);
  if (plan.form != PlanForm::kCells) {
    const int64_t outputs = CheckedMultiply(geometry.out_channels, plan.out_plane, "the size of Y");
    plan.work = plan.form == PlanForm::kVector
                    ? static_cast<int64_t>(weight.values.size())
                    : CheckedMultiply(outputs, geometry.taps() + kStoreWork, "the work for an image") / kernels.lanes;
    plan.num_parts = NumParts(plan.work, plan.form == PlanForm::kVector ? kTaskWork : kDepthwiseTaskWork, key);
    return plan;
  }
  JoinRows(geometry, &plan);
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    plan.axes[i] = MakePhases(geometry.kernel_shape[i], geometry.strides[i], geometry.dilations[i]);
    plan.num_phases *= static_cast<int64_t>(plan.axes[i].phases.size());
  }
  const Layout layout = ChooseLayout(geometry, weight, kernels, key, plan);
  plan.in_place = layout.in_place;
  LayOutCells(layout.row_pitch, &plan);
  if (layout.has_shifts) plan.shifts = ShiftsOf(PlaceTaps(geometry, plan), kernels.lanes);
  if (plan.shifts.size() == 1) plan.shifts = {0};
  const int64_t work_a_vector = static_cast<int64_t>(weight.values.size()) + kStoreWork * geometry.out_channels +
                                kPackWork * geometry.in_channels * plan.num_phases;
  plan.work = CheckedMultiply(work_a_vector, CeilDivide(plan.num_positions, kernels.lanes), "the work for an image");
  plan.num_parts = NumParts(plan.work, kTaskWork, key);
  CutTiles(geometry, kernels, &plan);
  MakeEntries(geometry, weight, kernels, &plan);
  return plan;
}

}  // namespace sparseconv::cpu
