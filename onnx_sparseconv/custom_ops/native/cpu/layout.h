// Where the cells of a plan lie (see plan.h), and which of the ways to lay them out is the cheapest.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan.h"

namespace sparseconv::cpu {

constexpr int64_t kMaxCells = std::numeric_limits<int32_t>::max();
// Entries that a row has in one block of input channels, on average, where reading them from the first-level cache
// saves twice what the block costs: loading and storing the partial sums, and moving those of each shift.
double MinBlockEntries(double num_vectors, double num_shifts);

struct Layout {
  int64_t row_pitch = 0;
  bool in_place = false;
  bool has_shifts = false;
  double cost = 0;
};

// Offset of each tap within the cells of a channel and phase, and the phase.
struct TapPlace {
  int64_t phase;
  int64_t cell;
};

// The phases of one axis and the steps of its taps.
AxisPhases MakePhases(int64_t kernel, int64_t stride, int64_t dilation);

// The cheapest layout for the sizes and phases of `plan`, by value because candidates are laid out in it: the input
// read in place; cells of every sensible row pitch, with shifts and without.
Layout ChooseLayout(const ConvGeometry& conv, const SparseWeight& weight, const TileKernels& kernels,
                    const PlanKey& key, Plan plan);

// Sets what follows from the row pitch. Throws `Error` where a channel is more than the kernel can address.
void LayOutCells(int64_t row_pitch, Plan* plan);

std::vector<TapPlace> PlaceTaps(const ConvGeometry& conv, const Plan& plan);

// The distinct shifts of the taps, increasing.
std::vector<int32_t> ShiftsOf(const std::vector<TapPlace>& places, int lanes);

}  // namespace sparseconv::cpu
