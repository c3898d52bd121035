#include "generated_plan.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "../checked.h"
#include "divisor.h"
#include "images.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int64_t kWarp = 32;
// Of a multiprocessor; each runs its own warps.
constexpr int64_t kQuarters = 4;
// What a turn costs besides, in warps of a quarter.
constexpr double kTurnCost = 1.0;
constexpr double kInstructionBytes = 16;
// Of a bulk copy; measured on an H200.
constexpr double kCopyCycles = 100;
// Of the launch that adds up the sums of splits, and what it and they move of memory in a cycle of a multiprocessor; as
// in kernels/plan.py.
constexpr double kReduceCycles = 3000, kMemoryBytesACycle = 12.7;
// By how much pairs of blocks are faster, at least.
constexpr double kPairGain = 1.04;
constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxBlockThreads = 1024;
constexpr int kBulkArchitecture = 90;
// What groups stage is counted group by group as long as there are no more than this.
constexpr int64_t kMaxCountedGroups = 4096;

int64_t ElementBytes(const GeneratedPlan& plan) { return plan.element_type == ort::kFloat16 ? 2 : 4; }

int64_t Round16(int64_t bytes) { return CeilDivide(bytes, kVectorBytes) * kVectorBytes; }

// How a batch is cut into groups; see GeneratedParams.
struct Grouping {
  Staging staging = kElementStaging;
  int64_t group_slots = 1;
  int64_t num_groups = 1;
  int64_t row_pitch = 1;
  int64_t image_pitch = 0;
};

int64_t ResidentBlocks(const DeviceFacts& device, const GeneratedFacts& facts) {
  return static_cast<int64_t>(device.num_multiprocessors) * facts.blocks_a_multiprocessor;
}

// Splits that share the chunks of a call with fewer units of work than the GPU runs at a time.
int64_t ChooseSplits(const GeneratedPlan& plan, int64_t num_groups, const DeviceFacts& device,
                     const GeneratedFacts& facts, const Settings& settings) {
  const int64_t most = plan.num_chunks, least = plan.min_passes;
  if (settings.splits > 1) return std::clamp<int64_t>(settings.splits, std::min(least, most), most);
  if (settings.splits == 1) return 1;
  if (settings.passes > 1) return 1;
  const int64_t units = plan.num_tiles * num_groups;
  const int64_t splits = std::clamp<int64_t>(ResidentBlocks(device, facts) / units, 1, most);
  return splits == 1 ? 1 : std::max(splits, least);
}

// Finds groups for one way of staging.
class GroupSearch {
 public:
  GroupSearch(const GeneratedPlan& plan, const PlaneSizes& sizes, Staging staging, const DeviceFacts& device,
              const GeneratedFacts& facts, const Settings& settings)
      : plan_(plan),
        sizes_(sizes),
        staging_(staging),
        device_(device),
        facts_(facts),
        settings_(settings),
        element_bytes_(ElementBytes(plan)),
        vector_(kVectorBytes / element_bytes_),
        row_slots_(CeilDivide(sizes.out_w, plan.columns_per_slot)),
        plane_slots_(sizes.out_h * row_slots_),
        num_slots_(sizes.batch * plane_slots_),
        row_pitch_(staging == kElementStaging ? CeilDivide(sizes.in_w, plan.columns_per_slot) * plan.columns_per_slot
                                              : sizes.in_w) {}

  // The groups that take least time, of those that fit: whole warps, whole images, or equal parts of an image; less
  // than a warp where that does not fit.
  std::optional<Grouping> Find() const {
    if (!CanStage()) return std::nullopt;
    std::vector<Grouping> found;
    const auto consider = [&](int64_t slots) {
      const int64_t group_slots = std::min(slots, num_slots_);
      if (MostBytes(group_slots) > Room()) return;
      found.push_back({staging_, group_slots, CeilDivide(num_slots_, group_slots), row_pitch_, WholeImageBytes()});
    };
    for (int64_t images = plan_.stage_images; images >= 1; --images) {
      if (images * plane_slots_ <= plan_.threads) consider(images * plane_slots_);
    }
    for (int64_t slots = plan_.threads; slots >= std::max<int64_t>(kWarp, plan_.threads / 4); slots -= kWarp) {
      consider(slots);
    }
    if (plane_slots_ <= plan_.threads) {
      consider(plan_.threads / plane_slots_ * plane_slots_);
    } else {
      consider(CeilDivide(plane_slots_, CeilDivide(plane_slots_, plan_.threads)));
    }
    for (int64_t slots = plan_.threads / 4; slots >= 1 && found.empty(); slots /= 2) consider(slots);
    return found.empty() ? std::nullopt : std::optional(Cheapest(found));
  }

 private:
  // Whether copies of 16 bytes can move channels of these sizes: each must begin where the code expects it.
  bool CanStage() const {
    const int64_t plane = sizes_.in_h * sizes_.in_w;
    if (IsPacked()) {
      // Rows stay as they are, whoever copies them: words of two halves must not begin at odd ones.
      if (sizes_.in_w % plan_.columns_per_slot != 0 || plane * element_bytes_ != plan_.channel_pitch) return false;
    }
    if (staging_ == kElementStaging) return true;
    if (element_bytes_ == 2 && (sizes_.in_w % 2 != 0 || plane % 2 != 0)) return false;
    if (plan_.plane_residue == 0 && plane % vector_ == 0) return true;
    if (ReadsSources(plan_)) return false;
    return (IsPacked() || plane % vector_ == plan_.plane_residue) && plan_.in_channels * plane % vector_ == 0 &&
           plan_.chunk_channels * plane % vector_ == 0 && TileStep() * plane % vector_ == 0;
  }

  // Input channels of which every tile's first one is a multiple: of whole groups, those of a tile, else those of one.
  int64_t TileStep() const {
    if (plan_.group == 1) return 0;
    const int64_t group_out_channels = plan_.out_channels / plan_.group;
    const int64_t groups = plan_.tile_channels % group_out_channels == 0 ? plan_.tile_channels / group_out_channels : 1;
    return groups * (plan_.in_channels / plan_.group);
  }

  // The groups that take the fewest cycles; where chunks would be split among too few of them, rather more groups and
  // fewer splits, if these take less with what splits cost.
  Grouping Cheapest(const std::vector<Grouping>& found) const {
    const auto cheapest = [&](auto cost) {
      return *std::min_element(found.begin(), found.end(),
                               [&](const Grouping& a, const Grouping& b) { return cost(a) < cost(b); });
    };
    const Grouping unsplit = cheapest([&](const Grouping& grouping) { return Cost(grouping); });
    const int64_t splits = SplitsOf(unsplit);
    return cheapest([&](const Grouping& grouping) {
      return SplitsOf(grouping) > splits ? std::numeric_limits<double>::infinity() : SplitCost(grouping);
    });
  }

  int64_t SplitsOf(const Grouping& grouping) const {
    return ChooseSplits(plan_, grouping.num_groups, device_, facts_, settings_);
  }

  // What a launch takes, in cycles, but for what does not depend on the groups: turns that each block takes, times what
  // takes longer in each: the code, on the busiest quarter of a multiprocessor, or the copies.
  double Cost(const Grouping& grouping) const {
    const int64_t max_lanes = ResidentBlocks(device_, facts_) / plan_.num_tiles;
    const int64_t lanes = std::clamp<int64_t>(max_lanes, 1, grouping.num_groups);
    const int64_t warps = CeilDivide(CeilDivide(grouping.group_slots, kWarp), kQuarters);
    const double instructions = static_cast<double>(plan_.code_bytes) / kInstructionBytes;
    const double compute = (static_cast<double>(warps) + kTurnCost) * instructions;
    // Groups that do not end with an image begin the next one.
    const int64_t across = plane_slots_ % grouping.group_slots == 0 || grouping.group_slots % plane_slots_ == 0 ? 0 : 1;
    const double images = static_cast<double>(grouping.group_slots) / static_cast<double>(plane_slots_);
    const double copies = (std::max(1.0, images) + static_cast<double>(across) * std::min(1.0, images)) *
                          static_cast<double>(IsPacked() ? plan_.num_chunks : plan_.tile_in_channels);
    const auto turns = static_cast<double>(CeilDivide(grouping.num_groups, lanes));
    return turns * std::max(compute, copies * kCopyCycles);
  }

  // The same with splits, whose sums are stored, read again, and stored.
  double SplitCost(const Grouping& grouping) const {
    const int64_t splits = SplitsOf(grouping);
    if (splits == 1) return Cost(grouping);
    const int64_t values = sizes_.batch * plan_.out_channels * sizes_.out_h * sizes_.out_w;
    const auto bytes = static_cast<double>(values * element_bytes_ * (splits + 1));
    const double reduced =
        kReduceCycles + bytes / static_cast<double>(device_.num_multiprocessors) / kMemoryBytesACycle;
    return Cost(grouping) / static_cast<double>(splits) + reduced;
  }

  int64_t ReachH() const { return (plan_.kernel_shape[0] - 1) * static_cast<int64_t>(plan_.dilations[0]) + 1; }
  int64_t ReachW() const { return (plan_.kernel_shape[1] - 1) * static_cast<int64_t>(plan_.dilations[1]) + 1; }

  // Input elements that the slots [begin, end) of an image read of a channel, as they are staged: whole rows, or part
  // of a single one.
  int64_t StagedElements(int64_t begin, int64_t end) const {
    const int64_t first_out_row = begin / row_slots_, last_out_row = (end - 1) / row_slots_;
    const int64_t first_row =
        std::clamp<int64_t>(first_out_row * plan_.strides[0] - plan_.pads_begin[0], 0, sizes_.in_h);
    const int64_t end_row =
        std::min<int64_t>(last_out_row * plan_.strides[0] - plan_.pads_begin[0] + ReachH(), sizes_.in_h);
    const int64_t rows = std::max<int64_t>(0, end_row - first_row);
    if (ReachH() > 1 || first_out_row != last_out_row) return rows * row_pitch_;
    const int64_t step = int64_t{plan_.strides[1]} * plan_.columns_per_slot;
    const int64_t first = std::clamp<int64_t>(begin % row_slots_ * step - plan_.pads_begin[1], 0, sizes_.in_w) /
                          plan_.columns_per_slot * plan_.columns_per_slot;
    const int64_t end_column = std::min<int64_t>(
        ((end - 1) % row_slots_ + 1) * step - plan_.strides[1] - plan_.pads_begin[1] + ReachW(), sizes_.in_w);
    const int64_t columns = std::max<int64_t>(0, end_column - first);
    return rows * (CeilDivide(columns, plan_.columns_per_slot) * plan_.columns_per_slot);
  }

  // Bytes of a channel that the group of slots [begin, begin + slots) takes, counted from the first one's image.
  int64_t StagedBytes(int64_t begin, int64_t slots) const {
    int64_t bytes = PartBytes(StagedElements(begin, std::min(begin + slots, plane_slots_)));
    int64_t left = begin + slots - plane_slots_;
    for (; left > plane_slots_; left -= plane_slots_) bytes += WholeImageBytes();
    return left > 0 ? bytes + PartBytes(StagedElements(0, left)) : bytes;
  }

  int64_t WholeImageBytes() const {
    return IsPacked() ? plan_.image_pitch : PartBytes(StagedElements(0, plane_slots_));
  }

  // The most that any group takes. Groups begin at multiples of their slots; where there are many, any beginning
  // counts.
  int64_t MostBytes(int64_t slots) const {
    if (IsPacked()) {
      const bool is_even = slots % plane_slots_ == 0 || plane_slots_ % slots == 0;
      const int64_t images = is_even ? CeilDivide(slots, plane_slots_) : (slots - 2) / plane_slots_ + 2;
      return std::min(images, sizes_.batch) * plan_.image_pitch;
    }
    const int64_t groups = CeilDivide(num_slots_, slots);
    int64_t most = 0;
    if (groups <= kMaxCountedGroups) {
      for (int64_t first = 0; first < num_slots_; first += slots) {
        most = std::max(most, StagedBytes(first % plane_slots_, std::min(slots, num_slots_ - first)));
      }
      return most;
    }
    // The worst beginnings are last slots of a row. Far from the top, and from where a group reaches the next image,
    // one row is like another.
    const int64_t rows = sizes_.out_h, tail = rows - slots / row_slots_ - 2;
    const int64_t head = plan_.pads_begin[0] + ReachH();
    for (int64_t row = 0; row < rows; row = row == head && row < tail ? tail : row + 1) {
      most = std::max(most, StagedBytes(row * row_slots_ + row_slots_ - 1, slots));
    }
    if (ReachH() == 1) most += PartBytes(plan_.columns_per_slot * int64_t{plan_.strides[1]} + ReachW());
    return most;
  }

  // Copies of 16 bytes also bring what lies before the first element, and channels are skewed.
  int64_t PartBytes(int64_t elements) const {
    if (staging_ == kElementStaging) return Round16((elements + MaxSkew()) * element_bytes_);
    return Round16((vector_ - 1 + MaxSkew() + elements) * element_bytes_);
  }

  int64_t MaxSkew() const { return plan_.plane_residue == 0 ? 0 : vector_ - 1; }

  // Bytes of a channel that images may take; or of a packed stage.
  int64_t Room() const {
    return IsPacked() ? int64_t{plan_.stage_images} * plan_.image_pitch : plan_.channel_pitch - kGeneratedZeroBytes;
  }

  bool IsPacked() const { return plan_.image_pitch > 0; }

  const GeneratedPlan& plan_;
  const PlaneSizes& sizes_;
  const Staging staging_;
  const DeviceFacts& device_;
  const GeneratedFacts& facts_;
  const Settings& settings_;
  const int64_t element_bytes_;
  const int64_t vector_;  // elements of 16 bytes
  const int64_t row_slots_;
  const int64_t plane_slots_;
  const int64_t num_slots_;
  const int64_t row_pitch_;
};

std::optional<Grouping> FindGrouping(const GeneratedPlan& plan, const PlaneSizes& sizes, const DeviceFacts& device,
                                     const GeneratedFacts& facts, const Settings& settings) {
  for (const Staging staging : {kBulkStaging, kVectorStaging, kElementStaging}) {
    if (settings.staging.has_value() && settings.staging != staging) continue;
    if (staging == kBulkStaging && (device.architecture < kBulkArchitecture || plan.staging_threads == 0)) continue;
    if (staging != kElementStaging && !facts.is_x_aligned) continue;
    if (auto found = GroupSearch(plan, sizes, staging, device, facts, settings).Find()) return found;
  }
  return std::nullopt;
}

// Passes cost memory traffic: no more than accuracy needs, if nobody asks for more.
int64_t ChoosePasses(const GeneratedPlan& plan, int64_t splits, const Settings& settings) {
  if (splits > 1) return 1;
  return std::clamp<int64_t>(settings.passes, plan.min_passes, plan.num_chunks);
}

// Blocks of a tile and split that take turns at the groups, and how many of them make a cluster.
struct Lanes {
  int64_t count = 1;
  int64_t cluster_blocks = 1;
};

// As many as are resident, with the same number of groups. In pairs, where not all run the same code anyway: two
// neighbouring multiprocessors then fetch it once.
Lanes ChooseLanes(int64_t num_groups, int64_t units, const DeviceFacts& device, const GeneratedFacts& facts) {
  const int64_t most = std::clamp<int64_t>(ResidentBlocks(device, facts) / units, 1, num_groups);
  const int64_t turns = CeilDivide(num_groups, most);
  const int64_t lanes = CeilDivide(num_groups, turns);
  if (units == 1) return {lanes, 1};
  for (const int64_t even : {lanes + lanes % 2, lanes / 2 * 2}) {
    if (even < 2 || even > num_groups || even * units > 2 * int64_t{facts.pairs}) continue;
    const auto even_turns = static_cast<double>(CeilDivide(num_groups, even));
    if (even_turns <= kPairGain * static_cast<double>(turns)) return {even, 2};
  }
  return {lanes, 1};
}

std::optional<std::string> FindObstacle(const GeneratedPlan& plan, const PlaneSizes& sizes, const DeviceFacts& device,
                                        const GeneratedFacts& facts) {
  const int64_t shared = SharedBytes(plan) + facts.static_shared_bytes;
  if (shared > device.max_shared_bytes) {
    return Concat("it needs ", shared, " bytes of shared memory, this GPU has ", device.max_shared_bytes);
  }
  if (facts.blocks_a_multiprocessor < 1) return "this GPU has too few registers or too little shared memory for it";
  if (plan.element_type == ort::kFloat16 && plan.plane_residue % 2 != 0) {
    return "its float16 planes begin at odd elements";
  }
  const int64_t last_tile = (int64_t{plan.num_tiles} - 1) * plan.tile_channels;
  const int64_t last_group = last_tile / (plan.out_channels / plan.group);
  if (last_group * (plan.in_channels / plan.group) + plan.tile_in_channels > plan.in_channels) {
    return "its last tile reads input channels that X does not have";
  }
  if (sizes.in_h * sizes.in_w == 0) return "the input is empty";
  // The kernel counts slots a block beyond the last one.
  if (CheckedMultiply(sizes.batch, sizes.out_h * sizes.out_w, "the size of Y") > kMaxInt - 2 * kMaxBlockThreads) {
    return Concat("a batch of ", sizes.batch, " is more than it can count");
  }
  return std::nullopt;
}

}  // namespace

int64_t SharedBytes(const GeneratedPlan& plan) {
  const int64_t channels = int64_t{plan.chunk_channels} * plan.channel_pitch;
  if (plan.image_pitch == 0) return plan.num_stages * channels;
  const int64_t zeros = plan.is_pointwise != 0 ? 0 : Round16(channels) + kZeroBankBytes;
  return plan.num_stages * (zeros + int64_t{plan.stage_images} * plan.image_pitch);
}

std::optional<PlaneSizes> FindPlaneSizes(const GeneratedPlan& plan, const ResolvedGeometry& sizes, int64_t batch,
                                         std::string* reason) {
  PlaneSizes plane;
  plane.batch = batch;
  if (plan.is_pointwise != 0) {
    plane.in_w = plane.out_w = sizes.out_dims[0] * sizes.out_dims[1] * sizes.out_dims[2];
  } else {
    if (sizes.in_dims[0] != 1 || sizes.out_dims[0] != 1 || sizes.pads_begin[0] != 0) {
      *reason = Concat("it is for inputs without depth, X has a depth of ", sizes.in_dims[0]);
      return std::nullopt;
    }
    if (sizes.pads_begin[1] != plan.pads_begin[0] || sizes.pads_begin[2] != plan.pads_begin[1]) {
      *reason = Concat("it is for a padding of [", plan.pads_begin[0], ", ", plan.pads_begin[1],
                       "] at the begin, this size of X has [", sizes.pads_begin[1], ", ", sizes.pads_begin[2], "]");
      return std::nullopt;
    }
    plane.in_h = sizes.in_dims[1];
    plane.in_w = sizes.in_dims[2];
    plane.out_h = sizes.out_dims[1];
    plane.out_w = sizes.out_dims[2];
  }
  return plane;
}

std::optional<GeneratedLaunch> ChooseLaunch(const GeneratedPlan& plan, const PlaneSizes& sizes,
                                            const DeviceFacts& device, const GeneratedFacts& facts,
                                            const Settings& settings, std::string* reason) {
  if (const auto obstacle = FindObstacle(plan, sizes, device, facts)) {
    *reason = *obstacle;
    return std::nullopt;
  }
  const auto grouping = FindGrouping(plan, sizes, device, facts, settings);
  if (!grouping) {
    const int64_t element_bytes = ElementBytes(plan);
    if (plan.image_pitch > 0 && sizes.in_h * sizes.in_w * element_bytes != plan.channel_pitch) {
      *reason = Concat("it is for planes of ", plan.channel_pitch / element_bytes, " elements, X has ", sizes.in_h,
                       " x ", sizes.in_w);
      return std::nullopt;
    }
    if (plan.image_pitch > 0) {
      *reason = Concat("it stages planes of ", sizes.in_h, " x ", sizes.in_w, " as they lie in memory, and ",
                       settings.staging.has_value() ? "cannot with the staging that was asked for"
                                                    : "words of two halves would begin at odd columns");
      return std::nullopt;
    }
    *reason = Concat("it stages ", plan.channel_pitch, " bytes a channel, too few for planes of ", sizes.in_h, " x ",
                     sizes.in_w, settings.staging.has_value() ? " with the staging that was asked for" : "");
    return std::nullopt;
  }
  const int64_t num_splits = ChooseSplits(plan, grouping->num_groups, device, facts, settings);
  const int64_t units = plan.num_tiles * num_splits;
  const Lanes lanes = ChooseLanes(grouping->num_groups, units, device, facts);
  const int64_t num_values =
      CheckedMultiply(sizes.batch * plan.out_channels, sizes.out_h * sizes.out_w, "the size of Y");

  GeneratedLaunch launch;
  launch.num_passes = static_cast<int>(ChoosePasses(plan, num_splits, settings));
  launch.num_chunks = plan.num_chunks;
  launch.num_values = num_values;
  launch.shape.grid[0] = static_cast<unsigned>(units * lanes.count);
  launch.shape.cluster = static_cast<unsigned>(lanes.cluster_blocks);
  launch.shape.threads = static_cast<unsigned>(CeilDivide(grouping->group_slots, kWarp) * kWarp + plan.staging_threads);
  launch.shape.dynamic_shared_bytes = static_cast<unsigned>(SharedBytes(plan));
  GeneratedParams& params = launch.params;
  params.split_stride = num_values;
  params.num_splits = static_cast<int>(num_splits);
  params.num_lanes = static_cast<int>(lanes.count);
  params.cluster_blocks = static_cast<int>(lanes.cluster_blocks);
  params.staging = grouping->staging;
  params.in_h = static_cast<int>(sizes.in_h);
  params.in_w = static_cast<int>(sizes.in_w);
  params.out_h = static_cast<int>(sizes.out_h);
  params.out_w = static_cast<int>(sizes.out_w);
  const int64_t row_slots = CeilDivide(sizes.out_w, int64_t{plan.columns_per_slot});
  params.num_groups = static_cast<int>(grouping->num_groups);
  params.group_slots = static_cast<int>(grouping->group_slots);
  params.num_slots = static_cast<int>(sizes.batch * sizes.out_h * row_slots);
  params.row_pitch = static_cast<int>(grouping->row_pitch);
  params.image_pitch = static_cast<int>(grouping->image_pitch);
  params.by_row_slots = MakeDivisor(row_slots);
  params.by_plane_slots = MakeDivisor(sizes.out_h * row_slots);
  return launch;
}

std::string ToString(const GeneratedLaunch& launch) {
  const GeneratedParams& p = launch.params;
  constexpr const char* kStagings[] = {"bulk", "vector", "element"};
  return Concat("generated staging=", kStagings[p.staging], " groups=", p.num_groups, " (", p.group_slots,
                " slots) rows=", p.in_h, "x", p.in_w, " row_pitch=", p.row_pitch, " image_pitch=", p.image_pitch,
                " lanes=", p.num_lanes, " cluster=", p.cluster_blocks, " splits=", p.num_splits,
                " passes=", launch.num_passes, " grid=", launch.shape.grid[0], " threads=", launch.shape.threads,
                " shared_bytes=", launch.shape.dynamic_shared_bytes);
}

}  // namespace sparseconv::cuda
