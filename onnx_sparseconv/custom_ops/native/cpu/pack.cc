#include "pack.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../checked.h"

namespace sparseconv::cpu {
namespace {

// What TileKernels::copy_rows knows.
constexpr int64_t kMaxCopyStride = 2;

// Rows of the input behind one phase of the cells.
struct PhaseView {
  Axes offset;         // input coordinate of cell 0 along each axis; negative in the padding
  int64_t begin, end;  // cells of a row that are not padding
};

PhaseView ViewPhase(const Plan& plan, const ConvGeometry& conv, int64_t phase) {
  PhaseView view;
  for (size_t i = kSpatialAxes; i-- > 0;) {
    const auto& phases = plan.axes[i].phases;
    const auto count = static_cast<int64_t>(phases.size());
    view.offset[i] = phases[static_cast<size_t>(phase % count)] - plan.geometry.pads_begin[i];
    phase /= count;
  }
  const int64_t stride = conv.strides[2], size = plan.geometry.in_dims[2];
  view.begin = view.offset[2] >= 0 ? 0 : CeilDivide(-view.offset[2], stride);
  view.end = view.offset[2] >= size ? 0 : CeilDivide(size - view.offset[2], stride);
  view.begin = std::min(view.begin, plan.row_pitch);
  view.end = std::clamp(view.end, view.begin, plan.row_pitch);
  return view;
}

void CopyRow(const float* source, int64_t stride, int64_t count, const TileKernels& kernels, float* target) {
  kernels.copy_floats(source, stride, count, target);
}

void CopyRow(const uint16_t* source, int64_t stride, int64_t count, const TileKernels& kernels, float* target) {
  kernels.copy_halves(source, stride, count, target);
}

// Packs the cells [begin, begin + plan.chunk_cells) of one channel and phase.
template <typename T>
void PackPhase(const Plan& plan, const ConvGeometry& conv, const PhaseView& view, const TileKernels& kernels,
               const T* channel, int64_t begin, float* target) {
  const Axes& in = plan.geometry.in_dims;
  const int64_t end = begin + plan.chunk_cells;
  int64_t row = begin / plan.row_pitch;
  int64_t i0 = row / plan.plane_rows, i1 = row % plan.plane_rows;
  for (int64_t cell = begin; cell < end; ++row) {
    const int64_t row_start = row * plan.row_pitch;
    const int64_t row_end = std::min(row_start + plan.row_pitch, end);
    const int64_t y0 = i0 * conv.strides[0] + view.offset[0], y1 = i1 * conv.strides[1] + view.offset[1];
    if constexpr (std::is_same_v<T, float>) {
      // Whole rows of the input at once.
      if (cell == row_start && conv.strides[2] <= kMaxCopyStride && y0 >= 0 && y0 < in[0] && y1 >= 0 && y1 < in[1]) {
        const int64_t num_rows = std::min(
            {plan.plane_rows - i1, CeilDivide(in[1] - y1, conv.strides[1]), (end - kMaxLanes - cell) / plan.row_pitch});
        if (num_rows > 0) {
          const T* source = channel + (y0 * in[1] + y1) * in[2] + view.begin * conv.strides[2] + view.offset[2];
          kernels.copy_rows(source, conv.strides[2], conv.strides[1] * in[2], num_rows, view.begin,
                            view.end - view.begin, plan.row_pitch, target);
          target += num_rows * plan.row_pitch;
          cell += num_rows * plan.row_pitch;
          row += num_rows - 1;
          i1 += num_rows;
          if (i1 == plan.plane_rows) {
            i1 = 0;
            ++i0;
          }
          continue;
        }
      }
    }
    if (++i1 == plan.plane_rows) {
      i1 = 0;
      ++i0;
    }
    if (y0 < 0 || y0 >= in[0] || y1 < 0 || y1 >= in[1]) {
      target = std::fill_n(target, row_end - cell, 0.0f);
    } else {
      const int64_t copy_begin = std::clamp(row_start + view.begin, cell, row_end);
      const int64_t copy_end = std::clamp(row_start + view.end, copy_begin, row_end);
      target = std::fill_n(target, copy_begin - cell, 0.0f);
      if (copy_begin < copy_end) {
        const int64_t y2 = (copy_begin - row_start) * conv.strides[2] + view.offset[2];
        const T* source = channel + (y0 * in[1] + y1) * in[2] + y2;
        CopyRow(source, conv.strides[2], copy_end - copy_begin, kernels, target);
        target += copy_end - copy_begin;
      }
      target = std::fill_n(target, row_end - copy_end, 0.0f);
    }
    cell = row_end;
  }
}

template <typename T>
void PackChannels(const Plan& plan, const ConvGeometry& conv, const Chunk& chunk, const TileKernels& kernels,
                  const ImageChannels& channels, float* cells) {
  for (int64_t phase = 0; phase < plan.num_phases; ++phase) {
    const PhaseView view = ViewPhase(plan, conv, phase);
    const T* source = static_cast<const T*>(channels.data);
    for (int64_t channel = channels.begin; channel < channels.end; ++channel, source += plan.in_plane) {
      float* target = cells + channel * plan.channel_cells + phase * plan.chunk_cells;
      PackPhase(plan, conv, view, kernels, source, chunk.start, target);
    }
  }
}

}  // namespace

void PackChunk(const Plan& plan, const ConvGeometry& conv, const Chunk& chunk, const TileKernels& kernels, bool is_half,
               const ImageChannels& channels, float* cells) {
  if (is_half) {
    PackChannels<uint16_t>(plan, conv, chunk, kernels, channels, cells);
  } else {
    PackChannels<float>(plan, conv, chunk, kernels, channels, cells);
  }
}

}  // namespace sparseconv::cpu
