// How the flat kernel's weight is packed and its launch planned, for Python: see test_flat_plan.py.

#include "cuda/flat_plan.h"
#include "cuda/flat_weight.h"

using namespace sparseconv;
using namespace sparseconv::cuda;

extern "C" {

// `entries` tells of each weight, [K][C / group][R][S], whether it is none of zero. layer: C, K, group, R, S, strides,
// dilations, pads before X, then sizes of X and of Y, batch, bytes of an element, multiprocessors. Returns 0 where the
// weight is not packed; else writes its steps and pairs, row tiles and whether they are dense, and returns 1. Returns 2
// where there is a launch as well, with its cycles, eights of pixels, tiles and blocks.
__attribute__((visibility("default"))) int probe_flat(const unsigned char* entries, const long long* layer,
                                                      double* found) {
  ConvGeometry geometry;
  geometry.in_channels = layer[0];
  geometry.out_channels = layer[1];
  geometry.group = layer[2];
  geometry.kernel_shape = {1, layer[3], layer[4]};
  geometry.strides = {1, layer[5], layer[6]};
  geometry.dilations = {1, layer[7], layer[8]};
  geometry.pads_begin = {0, layer[9], layer[10]};
  geometry.spatial_rank = 2;
  ResolvedGeometry sizes;
  sizes.in_dims = {1, layer[11], layer[12]};
  sizes.out_dims = {1, layer[13], layer[14]};
  sizes.pads_begin = geometry.pads_begin;

  SparseWeight weight;
  const long long columns = layer[0] / layer[2] * layer[3] * layer[4];
  weight.row_begin.push_back(0);
  for (long long row = 0; row < layer[1]; ++row) {
    for (long long column = 0; column < columns; ++column) {
      if (entries[row * columns + column] == 0) continue;
      weight.columns.push_back(static_cast<uint32_t>(column));
      weight.values.push_back(1.0f);
    }
    weight.row_begin.push_back(static_cast<int64_t>(weight.columns.size()));
  }
  if (!HasFlatForm(geometry)) return 0;
  const auto packed = PackFlatWeight(weight, geometry);
  if (!packed) return 0;
  found[0] = static_cast<double>(packed->form.num_steps);
  found[1] = static_cast<double>(packed->form.num_pairs);
  found[2] = packed->form.row_tiles;
  found[3] = packed->form.products == FlatProducts::kDense;

  DeviceFacts device{};
  device.architecture = 90;
  device.max_shared_bytes = 227 << 10;
  device.num_multiprocessors = static_cast<int>(layer[17]);
  const auto launch = ChooseFlatLaunch(geometry, sizes, layer[15], device, packed->form, layer[16]);
  if (!launch) return 1;
  found[4] = launch->cycles;
  found[5] = launch->blocks;
  found[6] = launch->params.num_tiles;
  found[7] = launch->shape.grid[0];
  return 2;
}

}  // extern "C"
