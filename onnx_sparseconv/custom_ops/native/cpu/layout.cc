#include "layout.h"

#include <algorithm>

#include "../checked.h"

namespace sparseconv::cpu {
namespace {

// Right and left padding of neighbouring rows share cells; more than this many is not worth looking for.
constexpr int64_t kMaxOverlap = 16;
// Costs by which layouts are compared, estimates in multiply-adds of vectors that straddle cache lines: ending the loop
// over the entries of one shift; moving one vector by its shift; packing a vector; packing a row.
constexpr double kSegmentCost = 12;
constexpr double kMoveCost = 1.5;
constexpr double kPackVectorCost = 2;
constexpr double kPackRowCost = 8;
// Several threads wait for each other between packing and sums, and read what others have packed. It is counted where
// either way makes the same sums in the same order.
constexpr double kSharedPackingFactor = 3;
// What a block costs a row, in cycles, measured: by itself and for each vector; for every shift but the first.
constexpr double kBlockCost = 35;
constexpr double kBlockVectorCost = 3.5;
constexpr double kBlockShiftCost = 20;
constexpr double kBlockShiftVectorCost = 3;
// What a vector costs less from the first-level cache than from the second, in cycles.
constexpr double kFirstLevelGain = 0.9;
constexpr double kMinBlockGain = 2;

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

bool CanReadInPlace(const ConvGeometry& conv, const Plan& plan, int lanes) {
  const ResolvedGeometry& g = plan.geometry;
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    if (conv.strides[i] != 1 || g.in_dims[i] != g.out_dims[i] + plan.axes[i].max_step) return false;
  }
  // Without padding on either side, cells and input have the same rows, unless rows overlap.
  return plan.row_pitch == g.in_dims[2] && plan.num_positions >= lanes;
}

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
  const double blocks = std::max(1.0, entries_a_row / MinBlockEntries(tile, num_shifts));
  const double segments = rows * vectors / tile * blocks * (num_shifts - 1);
  return sums + segments * (kSegmentCost + kMoveCost * tile);
}

// Cost of packing the cells of one image.
double PackingCost(const ConvGeometry& conv, const Plan& plan, int lanes) {
  const int64_t cells = plan.num_positions + plan.halo;
  const double vectors_a_channel = static_cast<double>(cells) / lanes;
  const auto rows_a_channel = static_cast<double>(CeilDivide(cells, plan.row_pitch));
  return static_cast<double>(conv.in_channels * plan.num_phases) *
         (vectors_a_channel * kPackVectorCost + rows_a_channel * kPackRowCost);
}

// Cells of a channel, if its rows had this pitch.
double CellsOf(int64_t row_pitch, const Plan& plan) {
  const Axes& out = plan.geometry.out_dims;
  return static_cast<double>(out[0] + plan.axes[0].max_step) * static_cast<double>(out[1] + plan.axes[1].max_step) *
         static_cast<double>(row_pitch);
}

}  // namespace

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

std::vector<int32_t> ShiftsOf(const std::vector<TapPlace>& places, int lanes) {
  std::vector<int32_t> shifts;
  for (const TapPlace& place : places) shifts.push_back(static_cast<int32_t>(place.cell % lanes));
  std::sort(shifts.begin(), shifts.end());
  shifts.erase(std::unique(shifts.begin(), shifts.end()), shifts.end());
  return shifts;
}

double MinBlockEntries(double num_vectors, double num_shifts) {
  const double cost = kBlockCost + kBlockVectorCost * num_vectors +
                      (num_shifts - 1) * (kBlockShiftCost + kBlockShiftVectorCost * num_vectors);
  return kMinBlockGain * cost / (kFirstLevelGain * num_vectors);
}

Layout ChooseLayout(const ConvGeometry& conv, const SparseWeight& weight, const TileKernels& kernels,
                    const PlanKey& key, Plan plan) {
  std::vector<int64_t> tap_entries(static_cast<size_t>(conv.taps()));
  for (const uint32_t column : weight.columns) ++tap_entries[static_cast<size_t>(column % conv.taps())];
  const int64_t row_cells = plan.geometry.out_dims[2] + plan.axes[2].max_step;
  const int64_t longest = CeilDivide(row_cells, kernels.lanes) * kernels.lanes;
  const int64_t overlap = std::min(kMaxOverlap, plan.axes[2].max_step);
  Layout best;
  for (int64_t pitch = std::max<int64_t>(1, row_cells - overlap); pitch <= longest; ++pitch) {
    if (!IsValidPitch(conv, plan, pitch)) continue;
    if (best.row_pitch != 0 && CellsOf(pitch, plan) > static_cast<double>(kMaxCells)) break;
    LayOutCells(pitch, &plan);
    const auto consider = [&](bool in_place, bool has_shifts, double cost) {
      if (best.row_pitch == 0 || cost < best.cost) best = {pitch, in_place, has_shifts, cost};
    };
    if (IsInPlace(key.access) && CanReadInPlace(conv, plan, kernels.lanes)) {
      const bool is_aligned =
          key.access == InputAccess::kAligned && plan.in_plane % kernels.lanes == 0 && conv.taps() == 1;
      consider(true, false, SumsCost(weight, plan, kernels, is_aligned));
    }
    const double packing =
        PackingCost(conv, plan, kernels.lanes) * (key.num_threads > 1 && conv.taps() == 1 ? kSharedPackingFactor : 1.0);
    const std::vector<TapPlace> places = PlaceTaps(conv, plan);
    const size_t num_shifts = ShiftsOf(places, kernels.lanes).size();
    consider(false, false, packing + SumsCost(weight, plan, kernels, num_shifts == 1));
    consider(
        false, true,
        packing + ShiftedSumsCost(conv, weight, tap_entries, plan, kernels, places, static_cast<double>(num_shifts)));
  }
  return best;
}

}  // namespace sparseconv::cpu
