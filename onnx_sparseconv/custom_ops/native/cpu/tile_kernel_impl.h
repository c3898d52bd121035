// The loops of `TileJob` and `VectorJob` (tile_kernel.h), and those that copy X, over the vector type of vec_impl.h.

#include "vec_impl.h"

namespace sparseconv::cpu {
namespace {

struct FloatElement {
  using Type = float;
  static Vec LoadAll(const float* p) { return Load(p); }
  static Vec LoadSome(const float* p, int n) { return LoadN(p, n); }
  static void StoreAll(float* p, Vec v) { Store(p, v); }
  static void StoreSome(float* p, Vec v, int n) { StoreN(p, v, n); }
};

struct HalfElement {
  using Type = uint16_t;
  static Vec LoadAll(const uint16_t* p) { return LoadHalf(p); }
  static Vec LoadSome(const uint16_t* p, int n) { return LoadHalfN(p, n); }
  static void StoreAll(uint16_t* p, Vec v) { StoreHalf(p, v); }
  static void StoreSome(uint16_t* p, Vec v, int n) { StoreHalfN(p, v, n); }
};

// Adds the residual, activates and stores `count` positions.
template <typename Element, int kCode>
inline void StoreRun(const float* sums, const typename Element::Type* residual, typename Element::Type* y, int count,
                     const TileOutput& out) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vec sum = Load(sums + i);
    if (residual != nullptr) sum = sum + Element::LoadAll(residual + i);
    Element::StoreAll(y + i, Activate<kCode>(sum, out));
  }
  if (i < count) {
    const int rest = count - i;
    Vec sum = Load(sums + i);  // `sums` is long enough: it ends with a spare vector
    if (residual != nullptr) sum = sum + Element::LoadSome(residual + i, rest);
    Element::StoreSome(y + i, Activate<kCode>(sum, out), rest);
  }
}

template <typename Element, int kCode>
void StoreRow(const float* sums, int64_t row, const TileOutput& out) {
  using Type = typename Element::Type;
  Type* y = static_cast<Type*>(out.y) + row * out.channel_stride;
  const Type* residual =
      out.residual == nullptr ? nullptr : static_cast<const Type*>(out.residual) + row * out.channel_stride;
  for (const Run* run = out.runs; run != out.runs + out.num_runs; ++run) {
    StoreRun<Element, kCode>(sums + run->begin, residual == nullptr ? nullptr : residual + run->output, y + run->output,
                             run->length, out);
  }
}

using StoreRowFunction = void (*)(const float*, int64_t, const TileOutput&);

template <typename Element>
StoreRowFunction ChooseStoreRow(int activation) {
  return ForActivation(activation,
                       [](auto code) -> StoreRowFunction { return StoreRow<Element, decltype(code)::value>; });
}

// The same pointer, of which the compiler does not know where it comes from. Otherwise it keeps every sum that the
// vectors of a tile have in common in a register of its own, and adds to it what is left, once for each load.
inline const float* Opaque(const float* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

// The hot loop: one broadcast weight and `kVectors` loads and multiply-adds an entry. Vectors lie side by side, but for
// the last, which begins `last` cells from the first.
template <int kVectors>
inline void AddEntry(const Entry& entry, const float* input, int64_t last, Vec (&sums)[kVectors]) {
  const Vec weight = Broadcast(entry.value);
  const float* source = Opaque(input + entry.offset);
  for (int v = 0; v + 1 < kVectors; ++v) sums[v] = MultiplyAdd(weight, Load(source + v * kLanes), sums[v]);
  sums[kVectors - 1] = MultiplyAdd(weight, Load(source + last), sums[kVectors - 1]);
}

// Entries whose sums have to be kept apart so that a multiply-add need not wait for the one before it.
constexpr int NumSets(int num_vectors) { return num_vectors > kMaxSplitVectors ? 1 : 4; }

template <int kVectors>
inline void Accumulate(const Entry* entry, const Entry* end, const float* input, int64_t last, Vec (&sums)[kVectors]) {
  constexpr int kSets = NumSets(kVectors);
  if constexpr (kSets > 1) {
    if (end - entry >= 2 * kSets) {
      Vec others[kSets - 1][kVectors];
      for (auto& set : others) {
        for (Vec& sum : set) sum = Broadcast(0.0f);
      }
      for (; end - entry >= kSets; entry += kSets) {
        AddEntry<kVectors>(entry[0], input, last, sums);
        for (int s = 1; s < kSets; ++s) AddEntry<kVectors>(entry[s], input, last, others[s - 1]);
      }
      for (const auto& set : others) {
        for (int v = 0; v < kVectors; ++v) sums[v] = sums[v] + set[v];
      }
    }
  }
  for (; entry != end; ++entry) AddEntry<kVectors>(*entry, input, last, sums);
}

// Entries of one row and block: those of each shift are summed at aligned positions, then moved to where they belong.
template <int kVectors>
inline void AccumulateShifts(const TileJob& job, const float* input, const uint32_t* segment, Vec (&sums)[kVectors]) {
  for (int32_t s = 0; s < job.num_shifts; ++s) {
    const Entry *begin = job.entries + segment[s], *end = job.entries + segment[s + 1];
    if (job.shifts[s] == 0) {
      Accumulate<kVectors>(begin, end, input, job.last_vector, sums);
    } else if (begin != end) {
      Vec aligned[kVectors + 1];
      for (int v = 0; v <= kVectors; ++v) aligned[v] = Broadcast(0.0f);
      Accumulate<kVectors + 1>(begin, end, input, kVectors * kLanes, aligned);
      const LaneShift shift(job.shifts[s]);
      for (int v = 0; v < kVectors; ++v) sums[v] = sums[v] + shift(aligned[v], aligned[v + 1]);
    }
  }
}

// Into the second-level cache, so that the first keeps what the sums at hand read. In a function of its own: the loops
// around the sums call it once a row.
__attribute__((noinline)) void FetchAhead(const TileJob& job, int64_t row) {
  constexpr int kSecondLevel = 2;  // what __builtin_prefetch calls locality
  const TileOutput& out = job.output;
  const int64_t element = out.is_half ? sizeof(uint16_t) : sizeof(float);
  const char* y = static_cast<const char*>(out.y) + row * out.channel_stride * element;
  for (const Run* run = out.runs; run != out.runs + out.num_runs; ++run) {
    const char* end = y + (run->output + run->length) * element;
    for (const char* line = y + run->output * element; line < end; line += kCacheLine)
      __builtin_prefetch(line, 1, kSecondLevel);
  }
  Ahead& ahead = *job.ahead;
  for (int64_t i = 0; i < ahead.lines_a_row && ahead.channels_left > 0; ++i) {
    __builtin_prefetch(ahead.line, 0, kSecondLevel);
    ahead.line += kCacheLine;
    if (--ahead.lines_left > 0) continue;
    --ahead.channels_left;
    ahead.line += ahead.channel_stride - ahead.channel_lines * kCacheLine;
    ahead.lines_left = ahead.channel_lines;
  }
}

// The rows of a job that belong to one panel.
struct PanelRows {
  int64_t panel_begin;
  int64_t panel_end;
  int64_t begin;
  int64_t end;
};

// Whether the outputs of a tile go to Y as they lie in registers.
inline bool IsStoredWhole(const TileJob& job) {
  const TileOutput& out = job.output;
  return job.num_blocks == 1 && !out.is_half && out.num_runs == 1 && out.runs->begin == 0 &&
         out.runs->length == job.last_vector + kLanes && ChooseActivate(out.activation) == nullptr;
}

template <int kVectors>
inline void StoreWhole(const TileJob& job, int64_t row, const Vec (&sums)[kVectors]) {
  const TileOutput& out = job.output;
  const int64_t at = row * out.channel_stride + out.runs->output;
  float* const y = static_cast<float*>(out.y) + at;
  const float* const residual = out.residual == nullptr ? nullptr : static_cast<const float*>(out.residual) + at;
  const Vec low = Broadcast(out.low), high = Broadcast(out.high);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t place = v + 1 < kVectors ? v * kLanes : job.last_vector;
    const Vec sum = residual == nullptr ? sums[v] : sums[v] + Load(residual + place);
    Store(y + place, Min(high, Max(low, sum)));
  }
}

// A panel of rows, block by block: what a block reads of the input stays in the first-level cache for the whole panel.
template <int kVectors, bool kShifted>
void RunPanel(const TileJob& job, const PanelRows& rows, StoreRowFunction store_row) {
  constexpr int kTile = kVectors * kLanes;
  alignas(64) float partial[kPanelRows * kTile + kLanes];  // a spare vector for the last run
  const int64_t first_group = rows.begin / job.rows_per_group;
  const bool is_stored_whole = IsStoredWhole(job);
  for (int32_t block = 0; block < job.num_blocks; ++block) {
    const float* input = job.input + (first_group - job.first_group) * job.group_stride;
    int64_t group_end = (first_group + 1) * job.rows_per_group;
    const int64_t rows_before =
        rows.panel_begin * job.num_blocks + block * (rows.panel_end - rows.panel_begin) + rows.begin - rows.panel_begin;
    const uint32_t* segment = job.segments + rows_before * job.num_shifts;
    for (int64_t row = rows.begin; row < rows.end; ++row, segment += job.num_shifts) {
      if (job.ahead != nullptr && block == job.num_blocks - 1) FetchAhead(job, row);
      float* row_partial = partial + (job.num_blocks == 1 ? 0 : (row - rows.begin) * kTile);
      Vec sums[kVectors];
      if (block == 0) {
        const Vec bias = Broadcast(Bias(job.output, row));
        for (int v = 0; v < kVectors; ++v) sums[v] = bias;
      } else {
        for (int v = 0; v + 1 < kVectors; ++v) sums[v] = Load(row_partial + v * kLanes);
        sums[kVectors - 1] = Load(row_partial + job.last_vector);
      }
      if (row == group_end) {
        group_end += job.rows_per_group;
        input += job.group_stride;
      }
      if constexpr (kShifted) {
        AccumulateShifts<kVectors>(job, input, segment, sums);
      } else {
        Accumulate<kVectors>(job.entries + segment[0], job.entries + segment[1], input, job.last_vector, sums);
      }
      if (is_stored_whole) {
        StoreWhole<kVectors>(job, row, sums);
        continue;
      }
      for (int v = 0; v + 1 < kVectors; ++v) Store(row_partial + v * kLanes, sums[v]);
      Store(row_partial + job.last_vector, sums[kVectors - 1]);
      if (block == job.num_blocks - 1) store_row(row_partial, row, job.output);
    }
  }
}

template <int kVectors>
void RunTile(const TileJob& job) {
  const StoreRowFunction store_row = job.output.is_half ? ChooseStoreRow<HalfElement>(job.output.activation)
                                                        : ChooseStoreRow<FloatElement>(job.output.activation);
  for (int64_t panel = job.row_begin / kPanelRows * kPanelRows; panel < job.row_end; panel += kPanelRows) {
    const int64_t panel_end = panel + kPanelRows < job.num_rows ? panel + kPanelRows : job.num_rows;
    const PanelRows rows{panel, panel_end, panel < job.row_begin ? job.row_begin : panel,
                         panel_end < job.row_end ? panel_end : job.row_end};
    if (job.num_shifts > 1) {
      RunPanel<kVectors, true>(job, rows, store_row);
    } else {
      RunPanel<kVectors, false>(job, rows, store_row);
    }
  }
}

template <int kVectors>
void RunTileOf(const TileJob& job) {
  if constexpr (kVectors > 1) {
    if (job.num_vectors < kVectors) return RunTileOf<kVectors - 1>(job);
  }
  RunTile<kVectors>(job);
}

void RunJob(const TileJob& job) { RunTileOf<kMaxVectors>(job); }

// Four sums in turn, so that a multiply-add need not wait for the one before it.
inline float Dot(const float* values, const uint32_t* columns, int64_t count, const float* x) {
  float sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int s = 0; s < 4; ++s) sums[s] += values[i + s] * x[columns[i + s]];
  }
  for (; i < count; ++i) sums[0] += values[i] * x[columns[i]];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void RunVector(const VectorJob& job) {
  const TileOutput& out = job.output;
  float* const y = static_cast<float*>(out.y);
  for (int64_t row = job.row_begin; row < job.row_end; ++row) {
    const int64_t begin = job.entry_begin[row], end = job.entry_begin[row + 1];
    const float* const x = job.input + row / job.rows_per_group * job.group_channels;
    float sum = Bias(out, row) + Dot(job.values + begin, job.columns + begin, end - begin, x);
    if (out.residual != nullptr) sum += static_cast<const float*>(out.residual)[row];
    y[row] = sum;
  }
  ForActivation(out.activation, [&](auto code) {
    ActivateFloats<decltype(code)::value>(y + job.row_begin, job.row_end - job.row_begin, out);
  });
}

// source[i * kStride] for the lanes i in [first, last), zero in the others.
template <int kStride>
inline Vec LoadStrided(const float* source, int first, int last) {
  if constexpr (kStride == 1) {
    return LaneRange(first, last).Load(source);
  } else {
    const int begin = 2 * first, end = 2 * last - 1;
    return Even(LaneRange(ClampToVector(begin), ClampToVector(end)).Load(source),
                LaneRange(ClampToVector(begin - kLanes), ClampToVector(end - kLanes)).Load(source + kLanes));
  }
}

template <int kStride>
void CopyFloatsOf(const float* source, int64_t count, float* target) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(target + i, LoadStrided<kStride>(source + kStride * i, 0, kLanes));
  const auto rest = static_cast<int>(count - i);
  if (rest > 0) StoreN(target + i, LoadStrided<kStride>(source + kStride * i, 0, rest), rest);
}

void CopyFloats(const float* source, int64_t stride, int64_t count, float* target) {
  if (stride == 1) {
    CopyFloatsOf<1>(source, count, target);
  } else if (stride == 2) {
    CopyFloatsOf<2>(source, count, target);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = source[stride * i];
  }
}

template <int kStride>
void CopyRowsOf(const float* source, int64_t source_pitch, int64_t num_rows, int64_t lead, int64_t count,
                int64_t row_pitch, float* target) {
  for (int64_t row = 0; row < num_rows; ++row, source += source_pitch, target += row_pitch) {
    for (int64_t cell = 0; cell < row_pitch; cell += kLanes) {
      const float* from = source + kStride * (cell - lead);
      if (cell >= lead && cell + kLanes <= lead + count) {
        Store(target + cell, LoadStrided<kStride>(from, 0, kLanes));
      } else {
        Store(target + cell,
              LoadStrided<kStride>(from, ClampToVector(lead - cell), ClampToVector(lead + count - cell)));
      }
    }
  }
}

void CopyRows(const float* source, int64_t stride, int64_t source_pitch, int64_t num_rows, int64_t lead, int64_t count,
              int64_t row_pitch, float* target) {
  if (stride == 1) {
    CopyRowsOf<1>(source, source_pitch, num_rows, lead, count, row_pitch, target);
  } else {
    CopyRowsOf<2>(source, source_pitch, num_rows, lead, count, row_pitch, target);
  }
}

void CopyHalves(const uint16_t* source, int64_t stride, int64_t count, float* target) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    uint16_t halves[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) halves[lane] = source[(i + lane) * stride];
    Store(target + i, LoadHalf(stride == 1 ? source + i : halves));
  }
  for (; i < count; ++i) target[i] = HalfToFloat(source[i * stride]);
}

}  // namespace
}  // namespace sparseconv::cpu
