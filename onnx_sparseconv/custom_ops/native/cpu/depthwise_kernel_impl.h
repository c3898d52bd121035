// The loops of `DepthwiseJob` (tile_kernel.h) over the vector type of vec_impl.h.
//
// A vector holds neighbouring outputs of one row, and several rows are summed together, since they share most of what
// they read. X is read where it lies: lanes whose tap falls on padding are masked, rows of padding are left out.

#include "vec_impl.h"

namespace sparseconv::cpu {
namespace {

// What a load brings for a vector of outputs: here all lanes columns of X.
struct WholeVectors {
  Vec operator()(int, const float* p) const { return Load(p); }
};

// The same where some lanes read padding: the first lane reads column `begin` by the first tap, and X has the columns
// [0, num_columns). Each load has lanes of its own.
template <int kKernel, int kStride>
struct PartsOfVectors {
  PartsOfVectors(int64_t begin, int64_t dilation, int64_t num_columns) {
    for (int t = 0; t < kKernel; t += kStride) {
      for (int half = 0; half < kStride; ++half) {
        const int64_t first = begin + t * dilation + half * kLanes;
        lanes[t + half] = LaneRange(ClampToVector(-first), ClampToVector(num_columns - first));
      }
    }
  }
  Vec operator()(int load, const float* p) const { return lanes[load].Load(p); }
  LaneRange lanes[kKernel + kStride - 1];
};

// Rows of X that some outputs read, in their order: where a vector begins in row i, by its first tap, is
// begin + i * pitch. Rows before `first` and from `end` on are padding.
struct Rows {
  const float* x;
  int64_t begin, pitch;
  int first, end;
};

// Adds to the sums of kRows rows of outputs what tap `t` of their windows' rows reads in row `i` of X.
template <int kKernel, int kStride, int kRows>
inline void AddTap(int i, int t, Vec x, const Vec (&taps)[kKernel * kKernel], Vec (&sums)[kRows]) {
  KeepInRegister(&x);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const int k = i - r * kStride;
    if (k >= 0 && k < kKernel) sums[r] = MultiplyAdd(taps[k * kKernel + t], x, sums[r]);
  }
}

// Adds to the sums of kRows rows of outputs what they read of X. With a stride of 2, two neighbouring taps read every
// other column of the same. Each tap is read when it is multiplied: the weights of a window of 5x5 take most registers.
template <int kKernel, int kStride, int kRows, typename LoadFunction>
inline void AddWindows(const Rows& rows, int64_t dilation, const Vec (&taps)[kKernel * kKernel],
                       const LoadFunction& load, Vec (&sums)[kRows]) {
  constexpr int kInputs = (kRows - 1) * kStride + kKernel;
  int64_t at = rows.begin;
#pragma GCC unroll 16
  for (int i = 0; i < kInputs; ++i, at += rows.pitch) {
    if (i < rows.first || i >= rows.end) continue;
    const float* const x = rows.x + at;
#pragma GCC unroll 8
    for (int t = 0; t < kKernel; t += kStride) {
      if constexpr (kStride == 1) {
        AddTap<kKernel, kStride>(i, t, load(t, x + t * dilation), taps, sums);
      } else {
        const Vec low = load(t, x + t), high = load(t + 1, x + t + kLanes);
        AddTap<kKernel, kStride>(i, t, Even(low, high), taps, sums);
        if (t + 1 < kKernel) AddTap<kKernel, kStride>(i, t + 1, Odd(low, high), taps, sums);
      }
    }
  }
}

// A channel of X, or of Y, and all that belongs to it.
struct DepthwiseMap {
  const float* x;
  const float* residual;  // null where absent
  float* y;
  float bias;
};

// kRows rows of outputs, the first of which is `out_row`. With dilation they lie as far apart as the rows that each
// reads, so that they share these.
template <int kKernel, int kStride, int kRows>
void ComputeRows(const DepthwiseJob& job, const DepthwiseMap& map, const float* weight, ActivateFunction activate,
                 int64_t out_row) {
  constexpr int kInputs = (kRows - 1) * kStride + kKernel;
  // Copies, which no store can change.
  const int64_t in_columns = job.in_columns, out_columns = job.out_columns, dilation = job.column_dilation;
  const int64_t step = job.row_dilation, out_pitch = step * out_columns;
  float* const y = map.y + out_row * out_columns;
  const float* const residual = map.residual == nullptr ? nullptr : map.residual + out_row * out_columns;
  const int64_t in_row = out_row * kStride - job.pad_rows;
  Rows rows{map.x, 0, step * in_columns, 0, 0};
  if (step == 1) {
    rows.first = ClampTo(kInputs, -in_row);
    rows.end = ClampTo(kInputs, job.in_rows - in_row);
  } else {
    while (rows.first < kInputs && in_row + rows.first * step < 0) ++rows.first;
    while (rows.end < kInputs && in_row + rows.end * step < job.in_rows) ++rows.end;
  }
  Vec taps[kKernel * kKernel];
  for (int i = 0; i < kKernel * kKernel; ++i) taps[i] = Broadcast(weight[i]);
  const Vec low = Broadcast(job.output.low), high = Broadcast(job.output.high), bias = Broadcast(map.bias);
  for (int64_t c = 0; c < out_columns; c += kLanes) {
    const int64_t column = c * kStride - job.pad_columns;
    const int64_t last_read = column + kStride * kLanes - 1 + (kKernel - 1) * dilation;
    rows.begin = in_row * in_columns + column;
    Vec sums[kRows];
    for (Vec& sum : sums) sum = bias;
    if (column >= 0 && last_read < in_columns) {
      AddWindows<kKernel, kStride, kRows>(rows, dilation, taps, WholeVectors{}, sums);
    } else {
      const PartsOfVectors<kKernel, kStride> parts(column, dilation, in_columns);
      AddWindows<kKernel, kStride, kRows>(rows, dilation, taps, parts, sums);
    }
    const int count = ClampToVector(out_columns - c);
    if (residual != nullptr) {
      for (int r = 0; r < kRows; ++r) sums[r] = sums[r] + LoadN(residual + r * out_pitch + c, count);
    }
    for (Vec& sum : sums) sum = Min(high, Max(low, sum));
    if (count == kLanes) {
      for (int r = 0; r < kRows; ++r) Store(y + r * out_pitch + c, sums[r]);
    } else {
      for (int r = 0; r < kRows; ++r) StoreN(y + r * out_pitch + c, sums[r], count);
    }
  }
  // Other activations are applied while the rows are in the first-level cache.
  if (activate != nullptr && step == 1) {
    activate(y, kRows * out_columns, job.output);
  } else if (activate != nullptr) {
    for (int r = 0; r < kRows; ++r) activate(y + r * out_pitch, out_columns, job.output);
  }
}

// Outputs of a map that is activated as a whole.
constexpr int64_t kMaxSmallMap = 4096;

// Rows that are summed together: as many sums as the registers hold beside the window's weights, or fewer, which suit
// maps of few rows. Maps of well-known networks have multiples of seven.
struct RowsAtOnce {
  int many, few;
};
constexpr RowsAtOnce RowsOf(int kernel) {
  if (kernel == 1) return {1, 1};
  return {kernel <= 5 && kLanes == 16 ? 7 : 4, 2};
}

// Outputs are computed from X and the residual, which are not Y, so some may be computed twice.
template <int kKernel, int kStride, int kRows>
void ComputeMapBy(const DepthwiseJob& job, const DepthwiseMap& map, const float* weight, ActivateFunction activate) {
  const int64_t step = job.row_dilation;
  for (int64_t first = 0; first < step && first < job.out_rows; ++first) {
    const int64_t num_rows = (job.out_rows - first + step - 1) / step;
    int64_t row = 0;
    for (; row + kRows <= num_rows; row += kRows) {
      ComputeRows<kKernel, kStride, kRows>(job, map, weight, activate, first + row * step);
    }
    // The last ones, some of them once more.
    if (row < num_rows) {
      ComputeRows<kKernel, kStride, kRows>(job, map, weight, activate, first + (num_rows - kRows) * step);
    }
  }
}

template <int kKernel, int kStride>
void ComputeMap(const DepthwiseJob& job, const DepthwiseMap& map, const float* weight, ActivateFunction activate) {
  constexpr RowsAtOnce kRows = RowsOf(kKernel);
  // With strides and dilation, rows of outputs share what they read otherwise than this counts.
  const int64_t num_rows = kStride > 1 && job.row_dilation > 1 ? 0 : job.out_rows / job.row_dilation;
  if (num_rows >= kRows.many) {
    ComputeMapBy<kKernel, kStride, kRows.many>(job, map, weight, activate);
  } else if (num_rows >= kRows.few) {
    ComputeMapBy<kKernel, kStride, kRows.few>(job, map, weight, activate);
  } else {
    ComputeMapBy<kKernel, kStride, 1>(job, map, weight, activate);
  }
}

using MapFunction = void (*)(const DepthwiseJob&, const DepthwiseMap&, const float*, ActivateFunction);

MapFunction ChooseMap(int kernel, int stride) {
  switch (kernel) {
    case 3:
      return stride == 1 ? ComputeMap<3, 1> : ComputeMap<3, 2>;
    case 5:
      return stride == 1 ? ComputeMap<5, 1> : ComputeMap<5, 2>;
    case 7:
      return stride == 1 ? ComputeMap<7, 1> : ComputeMap<7, 2>;
    default:
      return ComputeMap<1, 1>;
  }
}

void RunDepthwise(const DepthwiseJob& job) {
  const TileOutput& out = job.output;
  const ActivateFunction activate = ChooseActivate(out.activation);
  const MapFunction compute = ChooseMap(job.kernel, job.stride);
  // A map that stays in the first-level cache is activated as a whole: what was just stored of a row, with fewer lanes
  // than a vector, cannot be loaded before it has reached the cache.
  const int64_t plane = job.out_rows * job.out_columns;
  const bool is_small = plane <= kMaxSmallMap;
  for (int64_t channel = job.channel_begin; channel < job.channel_end; ++channel) {
    const int64_t at = channel * out.channel_stride;
    const DepthwiseMap map{
        job.input + (channel / job.channels_per_input - job.first_input) * job.in_rows * job.in_columns,
        out.residual == nullptr ? nullptr : static_cast<const float*>(out.residual) + at,
        static_cast<float*>(out.y) + at, Bias(out, channel)};
    compute(job, map, job.weight + channel * job.kernel * job.kernel, is_small ? nullptr : activate);
    if (is_small && activate != nullptr) activate(map.y, plane, out);
  }
}

}  // namespace
}  // namespace sparseconv::cpu
