#include "generated_plan.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "../checked.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int64_t kZeroBytes = 16;
constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int kBulkArchitecture = 90;
// Code beyond this does not stay in the instruction cache of a multiprocessor.
constexpr int64_t kResidentCodeBytes = 96 << 10;
// Rows are counted group by group as long as there are no more groups than this.
constexpr int64_t kMaxCountedGroups = 4096;

int64_t Round16(int64_t bytes) { return CeilDivide(bytes, kVectorBytes) * kVectorBytes; }

// How a plan's images are cut into groups; see GeneratedParams.
struct Grouping {
  Staging staging = kElementStaging;
  int64_t in_h = 1, in_w = 1, out_h = 1, out_w = 1;  // a pointwise plane as rows
  int64_t images_per_group = 1;
  int64_t groups_per_image = 1;
  int64_t group_slots = 1;
  int64_t row_pitch = 1;
  int64_t image_pitch = 0;
  int64_t num_groups = 1;
  int64_t staged_elements = 0;  // of all groups, for one channel
};

// Finds groups for one way of staging and one way to cut the planes into rows.
class GroupSearch {
 public:
  GroupSearch(const GeneratedPlan& plan, const PlaneSizes& sizes, Staging staging)
      : plan_(plan),
        sizes_(sizes),
        staging_(staging),
        element_bytes_(plan.element_type == ort::kFloat16 ? 2 : 4),
        vector_(kVectorBytes / element_bytes_),
        row_slots_(CeilDivide(sizes.out_w, plan.columns_per_slot)),
        plane_slots_(sizes.out_h * row_slots_),
        row_pitch_(staging == kElementStaging ? CeilDivide(sizes.in_w, plan.columns_per_slot) * plan.columns_per_slot
                                              : sizes.in_w) {}

  // Whether copies of 16 bytes can move channels of these sizes: each must begin where the code expects it.
  bool CanStage() const {
    if (staging_ == kElementStaging) return true;
    const int64_t plane = sizes_.in_h * sizes_.in_w;
    if (element_bytes_ == 2 && (sizes_.in_w % 2 != 0 || plane % 2 != 0)) return false;
    if (plan_.plane_residue == 0 && plane % vector_ == 0) return true;
    const int64_t group_in_channels = plan_.in_channels / plan_.group;
    return plane % vector_ == plan_.plane_residue && plan_.in_channels * plane % vector_ == 0 &&
           plan_.chunk_channels * plane % vector_ == 0 &&
           (plan_.group == 1 || group_in_channels * plane % vector_ == 0);
  }

  std::optional<Grouping> Find() const {
    if (auto whole = FindWholeImages()) return whole;
    // Fewer and fewer slots, by about an eighth each time.
    for (int64_t groups = std::max<int64_t>(2, CeilDivide(plane_slots_, plan_.threads)); groups <= plane_slots_;
         groups = std::max(groups + 1, groups * 9 / 8)) {
      const int64_t slots = CeilDivide(plane_slots_, groups);
      // Groups of whole rows need fewer input rows for as many slots.
      const int64_t whole_rows = CeilDivide(sizes_.out_h, groups) * row_slots_;
      if (whole_rows <= plan_.threads) {
        if (auto found = FindParts(whole_rows)) return found;
      }
      if (auto found = FindParts(slots)) return found;
    }
    return plane_slots_ == 1 ? std::nullopt : FindParts(1);
  }

 private:
  std::optional<Grouping> FindWholeImages() const {
    if (plane_slots_ > plan_.threads || !CanStage()) return std::nullopt;
    const int64_t image_pitch = ImagePitch(StagedElements(0, plane_slots_), 0);
    const int64_t images =
        std::min({sizes_.batch, plan_.threads / plane_slots_, Room() / std::max<int64_t>(image_pitch, 1)});
    if (images < 1) return std::nullopt;
    // As many groups, but of nearly the same number of images.
    const int64_t images_per_group = CeilDivide(sizes_.batch, CeilDivide(sizes_.batch, images));
    Grouping grouping = Make(plane_slots_, image_pitch);
    grouping.images_per_group = images_per_group;
    grouping.num_groups = CeilDivide(sizes_.batch, images_per_group);
    grouping.staged_elements = sizes_.batch * sizes_.in_h * row_pitch_;
    return grouping;
  }

  std::optional<Grouping> FindParts(int64_t slots) const {
    const int64_t groups = CeilDivide(plane_slots_, slots);
    if (groups < 2) return std::nullopt;
    int64_t most = 0, sum = 0;
    if (groups <= kMaxCountedGroups) {
      for (int64_t begin = 0; begin < plane_slots_; begin += slots) {
        const int64_t elements = StagedElements(begin, std::min(begin + slots, plane_slots_));
        most = std::max(most, elements);
        sum += elements;
      }
    } else {
      most = MostStagedElements(slots);
      sum = most * groups;
    }
    const int64_t image_pitch = ImagePitch(most, vector_ - 1);
    if (image_pitch > Room() || !CanStage()) return std::nullopt;
    Grouping grouping = Make(slots, image_pitch);
    grouping.groups_per_image = groups;
    grouping.num_groups = CheckedMultiply(sizes_.batch, groups, "the number of groups");
    grouping.staged_elements = CheckedMultiply(sizes_.batch, sum, "the size of the staged input");
    return grouping;
  }

  Grouping Make(int64_t slots, int64_t image_pitch) const {
    Grouping grouping;
    grouping.staging = staging_;
    grouping.in_h = sizes_.in_h;
    grouping.in_w = sizes_.in_w;
    grouping.out_h = sizes_.out_h;
    grouping.out_w = sizes_.out_w;
    grouping.group_slots = slots;
    grouping.row_pitch = row_pitch_;
    grouping.image_pitch = image_pitch;
    return grouping;
  }

  int64_t ReachH() const { return (plan_.kernel_shape[0] - 1) * static_cast<int64_t>(plan_.dilations[0]) + 1; }
  int64_t ReachW() const { return (plan_.kernel_shape[1] - 1) * static_cast<int64_t>(plan_.dilations[1]) + 1; }

  // Input elements that the slots [begin, end) of an image read of a channel: whole rows, or part of a single one.
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

  // What any group of so many slots reads of a channel, at most.
  int64_t MostStagedElements(int64_t slots) const {
    if (ReachH() == 1 && sizes_.out_h == 1) {
      // Part of the only row, and a column more where the first one is odd.
      const int64_t columns = (slots * plan_.columns_per_slot - 1) * plan_.strides[1] + ReachW();
      return std::min(row_pitch_, (CeilDivide(columns, plan_.columns_per_slot) + 1) * plan_.columns_per_slot);
    }
    // The worst place to begin is the last slot of a row.
    const int64_t out_rows = std::min(sizes_.out_h, CeilDivide(row_slots_ - 1 + slots, row_slots_));
    return std::min(sizes_.in_h, (out_rows - 1) * plan_.strides[0] + ReachH()) * row_pitch_;
  }

  // Copies of 16 bytes also bring what lies before the first element: up to `misalignment` elements, and those by
  // which a channel is skewed.
  int64_t ImagePitch(int64_t elements, int64_t misalignment) const {
    const int64_t skew = plan_.plane_residue == 0 ? 0 : vector_ - 1;
    const int64_t lead = staging_ == kElementStaging ? 0 : misalignment + skew;
    return Round16((lead + elements) * element_bytes_);
  }

  // Bytes of a channel that images may take.
  int64_t Room() const {
    const int64_t skew = staging_ == kElementStaging && plan_.plane_residue != 0 ? kVectorBytes - element_bytes_ : 0;
    return plan_.channel_pitch - kZeroBytes - skew;
  }

  const GeneratedPlan& plan_;
  const PlaneSizes& sizes_;
  const Staging staging_;
  const int64_t element_bytes_;
  const int64_t vector_;  // elements of 16 bytes
  const int64_t row_slots_;
  const int64_t plane_slots_;
  const int64_t row_pitch_;
};

bool IsBetter(const Grouping& a, const Grouping& b) {
  const auto key = [](const Grouping& g) { return std::make_tuple(g.staging, g.num_groups, g.staged_elements); };
  return key(a) < key(b);
}

// The best groups for one way of staging. Planes of a pointwise plan are single rows, or rows of any length that
// divides them: a group then needs to stage only a part.
std::optional<Grouping> FindGrouping(const GeneratedPlan& plan, const PlaneSizes& sizes, Staging staging) {
  std::optional<Grouping> best = GroupSearch(plan, sizes, staging).Find();
  if (plan.is_pointwise == 0) return best;
  const int64_t plane = sizes.in_h * sizes.in_w;
  std::vector<int64_t> heights;
  for (int64_t divisor = 2; divisor * divisor <= plane; ++divisor) {
    if (plane % divisor == 0) heights.insert(heights.end(), {divisor, plane / divisor});
  }
  // Of equal ones, that with the longest rows.
  std::sort(heights.begin(), heights.end());
  for (const int64_t height : heights) {
    PlaneSizes rows = sizes;
    rows.in_h = rows.out_h = height;
    rows.in_w = rows.out_w = plane / height;
    const auto found = GroupSearch(plan, rows, staging).Find();
    if (found && (!best || IsBetter(*found, *best))) best = found;
  }
  return best;
}

std::optional<Grouping> FindGrouping(const GeneratedPlan& plan, const PlaneSizes& sizes, const DeviceFacts& device,
                                     const GeneratedFacts& facts, const Settings& settings) {
  for (const Staging staging : {kBulkStaging, kVectorStaging, kElementStaging}) {
    if (settings.staging.has_value() && settings.staging != staging) continue;
    if (staging == kBulkStaging && device.architecture < kBulkArchitecture) continue;
    if (staging != kElementStaging && !facts.is_x_aligned) continue;
    if (auto found = FindGrouping(plan, sizes, staging)) return found;
  }
  return std::nullopt;
}

// Splits that share the chunks of a call with fewer units of work than the GPU runs at a time.
int64_t ChooseSplits(const GeneratedPlan& plan, int64_t num_groups, const DeviceFacts& device,
                     const Settings& settings) {
  if (settings.splits > 0) return std::min(settings.splits, plan.num_chunks);
  if (settings.passes > 1) return 1;
  const int64_t units = plan.num_tiles * num_groups;
  return std::clamp<int64_t>(device.num_multiprocessors / units, 1, plan.num_chunks);
}

// Passes whose code stays in the cache from one group of a block to the next; with one group there is no next.
int64_t ChoosePasses(const GeneratedPlan& plan, int64_t splits, bool has_one_group, const Settings& settings) {
  if (splits > 1) return 1;
  int64_t wanted = settings.passes;
  if (wanted == 0) wanted = has_one_group ? 1 : CeilDivide(std::max(plan.code_bytes, 1), kResidentCodeBytes);
  return std::min<int64_t>(wanted, plan.num_chunks);
}

// Blocks of a tile and split that take turns at the groups: as many as are resident, with the same number of groups.
int64_t ChooseLanes(int64_t num_groups, int64_t units, const DeviceFacts& device, const GeneratedFacts& facts) {
  const int64_t resident = static_cast<int64_t>(device.num_multiprocessors) * facts.blocks_a_multiprocessor;
  const int64_t lanes = std::clamp<int64_t>(resident / units, 1, num_groups);
  return CeilDivide(num_groups, CeilDivide(num_groups, lanes));
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
  return std::nullopt;
}

}  // namespace

int64_t SharedBytes(const GeneratedPlan& plan) {
  return int64_t{plan.num_stages} * plan.chunk_channels * plan.channel_pitch;
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
    *reason = Concat("it stages ", plan.channel_pitch, " bytes a channel, too few for planes of ", sizes.in_h, " x ",
                     sizes.in_w, settings.staging.has_value() ? " with the staging that was asked for" : "");
    return std::nullopt;
  }
  const int64_t num_splits = ChooseSplits(plan, grouping->num_groups, device, settings);
  const int64_t units = plan.num_tiles * num_splits;
  const int64_t num_lanes = ChooseLanes(grouping->num_groups, units, device, facts);
  const int64_t num_values =
      CheckedMultiply(sizes.batch * plan.out_channels, sizes.out_h * sizes.out_w, "the size of Y");
  if (grouping->num_groups > kMaxInt || units * num_lanes > kMaxInt) {
    *reason = Concat("a batch of ", sizes.batch, " is more than it can count");
    return std::nullopt;
  }

  GeneratedLaunch launch;
  launch.num_passes = static_cast<int>(ChoosePasses(plan, num_splits, num_lanes == grouping->num_groups, settings));
  launch.num_chunks = plan.num_chunks;
  launch.num_values = num_values;
  launch.shape.grid[0] = static_cast<unsigned>(units * num_lanes);
  launch.shape.threads = static_cast<unsigned>(plan.threads);
  launch.shape.dynamic_shared_bytes = static_cast<unsigned>(SharedBytes(plan));
  GeneratedParams& params = launch.params;
  params.partial_stride = num_values;
  params.num_splits = static_cast<int>(num_splits);
  params.num_lanes = static_cast<int>(num_lanes);
  params.staging = grouping->staging;
  params.batch = static_cast<int>(sizes.batch);
  params.in_h = static_cast<int>(grouping->in_h);
  params.in_w = static_cast<int>(grouping->in_w);
  params.out_h = static_cast<int>(grouping->out_h);
  params.out_w = static_cast<int>(grouping->out_w);
  params.num_groups = static_cast<int>(grouping->num_groups);
  params.images_per_group = static_cast<int>(grouping->images_per_group);
  params.groups_per_image = static_cast<int>(grouping->groups_per_image);
  params.group_slots = static_cast<int>(grouping->group_slots);
  params.row_pitch = static_cast<int>(grouping->row_pitch);
  params.image_pitch = static_cast<int>(grouping->image_pitch);
  return launch;
}

std::string ToString(const GeneratedLaunch& launch) {
  const GeneratedParams& p = launch.params;
  constexpr const char* kStagings[] = {"bulk", "vector", "element"};
  return Concat("generated staging=", kStagings[p.staging], " groups=", p.num_groups, " (", p.images_per_group,
                " images, 1/", p.groups_per_image, " of an image, ", p.group_slots, " slots) rows=", p.in_h, "x",
                p.in_w, " row_pitch=", p.row_pitch, " image_pitch=", p.image_pitch, " lanes=", p.num_lanes,
                " splits=", p.num_splits, " passes=", launch.num_passes, " grid=", launch.shape.grid[0],
                " threads=", launch.shape.threads, " shared_bytes=", launch.shape.dynamic_shared_bytes);
}

}  // namespace sparseconv::cuda
