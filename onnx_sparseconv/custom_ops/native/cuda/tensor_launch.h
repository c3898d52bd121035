// What launches of the kernels on tensor cores have in common: when they pay, and sizes; and the units in which one of
// them stages its input (kernels/cuda/tensor_input.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "../checked.h"

namespace sparseconv::cuda {

// Of the shared memory that a block may have at most, left to the driver.
constexpr int kReservedSharedBytes = 1024;

// Of an element.
constexpr int64_t kHalfBytes = 2, kFloatBytes = 4;

// What a launch takes from the call as it is.
inline void FillSizes(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, TileParams* tile) {
  tile->batch = static_cast<int>(batch);
  tile->in_channels = static_cast<int>(geometry.in_channels);
  tile->out_channels = static_cast<int>(geometry.out_channels);
  tile->groups = static_cast<int>(geometry.group);
  tile->group_in_channels = static_cast<int>(geometry.group_in_channels());
  tile->group_out_channels = static_cast<int>(geometry.group_out_channels());
  tile->in_h = static_cast<int>(sizes.in_dims[1]);
  tile->in_w = static_cast<int>(sizes.in_dims[2]);
  tile->out_h = static_cast<int>(sizes.out_dims[1]);
  tile->out_w = static_cast<int>(sizes.out_dims[2]);
  for (size_t i = 0; i < 2; ++i) {
    tile->strides[i] = static_cast<int>(geometry.strides[i + 1]);
    tile->pads_begin[i] = static_cast<int>(sizes.pads_begin[i + 1]);
  }
}

// Neighbouring columns that one load brings, and the table of units in shared memory.
struct TensorUnits {
  int columns = 1;
  int64_t count = 0;  // of a chunk, at most
  int64_t table_bytes = 0;

  // `x_columns`: as many as X is aligned to. Columns of a unit are a constant apart in the stage at strides 1 and 2.
  static TensorUnits Choose(int x_columns, int64_t element_bytes, int64_t in_w, int64_t stride_x, int64_t channels,
                            int64_t in_rows, int64_t in_columns, int64_t threads) {
    constexpr int64_t kEntryBytes = 8, kUnitBytes = 8;
    const auto most = static_cast<int>(kUnitBytes / element_bytes);
    TensorUnits units;
    for (const int columns : {4, 2}) {
      if (columns <= std::min(x_columns, most) && in_w % columns == 0 && stride_x <= 2) {
        units.columns = columns;
        break;
      }
    }
    // They begin at multiples of their columns in X, not in the tile.
    const int64_t in_row = (in_columns + 2 * units.columns - 2) / units.columns;
    units.count = CeilDivide(channels, int64_t{units.columns}) * units.columns * in_rows * in_row;
    const int64_t at_once = (units.columns == most ? kWideTensorUnits : kTensorUnits) * threads;
    units.table_bytes = CeilDivide(units.count, at_once) * at_once * kEntryBytes;
    return units;
  }

  void Fill(int64_t stride_x, int64_t pad_x, int line_pitch, TensorParams* params) const {
    params->unit_columns = columns;
    for (int i = 0; i < 3; ++i) {
      // From a column in line `pad_x % 2` of its row to the one `i + 1` further.
      const int column = static_cast<int>(pad_x % 2) + i + 1;
      params->column_steps[i] =
          stride_x == 1 ? i + 1 : (column % 2 - static_cast<int>(pad_x % 2)) * line_pitch + column / 2;
    }
  }
};

}  // namespace sparseconv::cuda
