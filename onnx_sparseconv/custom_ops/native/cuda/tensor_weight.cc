#include "tensor_weight.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../checked.h"
#include "../half.h"
#include "sparse_pair.h"

namespace sparseconv::cuda {
namespace {

// Of a step's column.
constexpr int kChannelBits = 12, kLineBits = 10;
constexpr int64_t kMaxTaps = 1 << 10;  // more are for nobody, and take memory for each
constexpr int64_t kMaxLines = 1 << kLineBits, kMaxPlaces = 1 << (32 - kChannelBits - kLineBits);
constexpr int kLanes = 32;
constexpr int kLaneWords = 4;
// Shared memory reads 8 columns of 16 bytes at a time, from different banks if their addresses differ modulo 8.
constexpr int kBanks = 8;
// Columns of a chunk: enough that a step that is not full hardly counts. Where a block has less shared memory than the
// larger number wants, tiles would be small, and if it were all columns, none would be staged while others are
// multiplied.
constexpr int64_t kWantedColumns = 288, kFewColumns = 144;
constexpr int kAmpleSharedBytes = 160 << 10;
constexpr int64_t kMaxChunkChannels = 64;

using RowMask = uint64_t;

int CountRows(RowMask rows) { return __builtin_popcountll(rows); }

// A column of the chunk, and the rows whose non-zeros in it have no place yet.
struct Column {
  int index;
  RowMask rows;
};

// The columns of one tile and chunk that are still to be placed, by bank, those with more rows behind.
using Pool = std::array<std::vector<Column>, kBanks>;

struct Placed {
  int column = -1;
  RowMask rows = 0;
};

using StepPlan = std::array<Placed, kTensorColumns>;

// Rows of a quad that have one non-zero at least, and two.
struct Filled {
  RowMask one = 0, two = 0;

  void Add(RowMask rows) {
    two |= one & rows;
    one |= rows;
  }
};

// Takes the column that fits best: one of a bank that is not used if there is any, and of these, one all of whose rows
// have room if there is any.
Placed Take(Pool* pool, unsigned used_banks, const Filled& filled) {
  std::array<int, kBanks> order;
  for (int bank = 0; bank < kBanks; ++bank) order[bank] = bank;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const bool a_used = used_banks >> a & 1, b_used = used_banks >> b & 1;
    return a_used != b_used ? b_used : (*pool)[a].size() > (*pool)[b].size();
  });
  int best_bank = -1, best_count = 0;
  size_t best_at = 0;
  for (const int bank : order) {
    const auto& columns = (*pool)[bank];
    const bool is_used = used_banks >> bank & 1;
    if (is_used && best_bank >= 0) break;
    for (size_t at = columns.size(); at-- > 0;) {
      const RowMask rows = columns[at].rows & ~filled.two;
      const bool fits = rows == columns[at].rows;
      const int count = fits ? CountRows(~RowMask{0}) + 1 : CountRows(rows);
      if (count > best_count) best_bank = bank, best_at = at, best_count = count;
      if (fits) break;
    }
    if (best_count > CountRows(~RowMask{0})) break;
  }
  if (best_bank < 0) return {};
  auto& columns = (*pool)[best_bank];
  Column& column = columns[best_at];
  const Placed placed{column.index, column.rows & ~filled.two};
  column.rows &= filled.two;
  Column rest = column;
  columns.erase(columns.begin() + static_cast<std::ptrdiff_t>(best_at));
  if (rest.rows != 0) {
    const auto place = std::lower_bound(columns.begin(), columns.end(), rest, [](const Column& a, const Column& b) {
      return CountRows(a.rows) < CountRows(b.rows);
    });
    columns.insert(place, rest);
  }
  return placed;
}

class Packer {
 public:
  Packer(const SparseWeight& weight, const ConvGeometry& geometry, const TensorForm& form)
      : weight_(weight), geometry_(geometry), form_(form), taps_(static_cast<int>(geometry.taps())) {
    values_.resize(static_cast<size_t>(form.chunk_channels) * static_cast<size_t>(taps_) *
                   static_cast<size_t>(form.tile_rows));
    rows_.resize(static_cast<size_t>(form.chunk_channels) * static_cast<size_t>(taps_));
  }

  TensorWeight Pack() {
    TensorWeight packed;
    packed.form = form_;
    for (int64_t group = 0; group < geometry_.group; ++group) {
      for (int tile = 0; tile < form_.tiles_per_group; ++tile) {
        StartTile(group, tile);
        for (int chunk = 0; chunk < form_.num_chunks; ++chunk) {
          packed.step_begins.push_back(static_cast<uint32_t>(packed.steps.size() / form_.step_bytes()));
          PackChunk(chunk, &packed.steps);
          const size_t steps = packed.steps.size() / form_.step_bytes() - packed.step_begins.back();
          packed.max_steps = std::max(packed.max_steps, static_cast<int>(steps));
        }
        packed.step_begins.push_back(static_cast<uint32_t>(packed.steps.size() / form_.step_bytes()));
      }
    }
    return packed;
  }

 private:
  void StartTile(int64_t group, int tile) {
    const int64_t first = static_cast<int64_t>(tile) * form_.tile_rows;
    const int64_t end = std::min(first + form_.tile_rows, geometry_.group_out_channels());
    next_.clear();
    end_.clear();
    for (int64_t k = group * geometry_.group_out_channels() + first; first + static_cast<int64_t>(next_.size()) < end;
         ++k) {
      next_.push_back(weight_.row_begin[static_cast<size_t>(k)]);
      end_.push_back(weight_.row_begin[static_cast<size_t>(k) + 1]);
    }
  }

  // Where a column of the chunk lies in shared memory: the channel, the line of the channel, the place in the line.
  struct Place {
    int64_t channel, line, place;
  };

  Place PlaceOf(int column) const {
    const int64_t width = geometry_.kernel_shape[2], stride = geometry_.strides[2], tap = column % taps_;
    const int64_t x = tap % width * geometry_.dilations[2];
    return {column / taps_, tap / width * geometry_.dilations[1] * stride + x % stride, x / stride};
  }

  // Channels and lines lie a multiple of 8 and one pixel apart.
  int Bank(int column) const {
    const Place at = PlaceOf(column);
    return static_cast<int>((at.channel + at.line + at.place) % kBanks);
  }

  void PackChunk(int chunk, std::vector<uint8_t>* steps) {
    std::fill(rows_.begin(), rows_.end(), 0);
    const int64_t first = static_cast<int64_t>(chunk) * form_.chunk_channels * taps_;
    const int64_t last = first + static_cast<int64_t>(form_.chunk_channels) * taps_;
    for (size_t row = 0; row < next_.size(); ++row) {
      for (; next_[row] < end_[row]; ++next_[row]) {
        const auto entry = static_cast<size_t>(next_[row]);
        if (weight_.columns[entry] >= last) break;
        const size_t column = weight_.columns[entry] - static_cast<size_t>(first);
        rows_[column] |= RowMask{1} << row;
        values_[column * static_cast<size_t>(form_.tile_rows) + row] = FloatToHalf(weight_.values[entry]);
      }
    }
    Pool pool;
    for (size_t column = 0; column < rows_.size(); ++column) {
      const int index = static_cast<int>(column);
      if (rows_[column] != 0) pool[static_cast<size_t>(Bank(index))].push_back({index, rows_[column]});
    }
    for (auto& columns : pool) {
      std::stable_sort(columns.begin(), columns.end(),
                       [](const Column& a, const Column& b) { return CountRows(a.rows) < CountRows(b.rows); });
    }
    const auto is_empty = [](const std::vector<Column>& columns) { return columns.empty(); };
    while (!std::all_of(pool.begin(), pool.end(), is_empty)) Write(PlanStep(&pool), steps);
  }

  StepPlan PlanStep(Pool* pool) const {
    StepPlan plan;
    for (int phase = 0; phase < kTensorColumns / kBanks; ++phase) {
      unsigned used_banks = 0;
      for (int quad = 0; quad < kBanks / kQuadColumns; ++quad) {
        Filled filled;
        for (int i = 0; i < kQuadColumns; ++i) {
          const Placed placed = Take(pool, used_banks, filled);
          plan[static_cast<size_t>(phase * kBanks + quad * kQuadColumns + i)] = placed;
          if (placed.column < 0) continue;
          filled.Add(placed.rows);
          used_banks |= 1u << Bank(placed.column);
        }
      }
    }
    return plan;
  }

  SparsePair PairOf(const StepPlan& plan, int row, int quad) const {
    const auto placed = [&](int i) -> const Placed& { return plan[static_cast<size_t>(quad * kQuadColumns + i)]; };
    return MakeSparsePair(
        [&](int i) { return (placed(i).rows >> row & 1) != 0; },
        [&](int i) {
          return values_[static_cast<size_t>(placed(i).column) * static_cast<size_t>(form_.tile_rows) +
                         static_cast<size_t>(row)];
        });
  }

  uint32_t ColumnWord(const StepPlan& plan, int lane) const {
    const Place at = PlaceOf(std::max(plan[static_cast<size_t>(lane)].column, 0));
    return static_cast<uint32_t>(at.channel | at.line << kChannelBits | at.place << (kChannelBits + kLineBits));
  }

  void Write(const StepPlan& plan, std::vector<uint8_t>* steps) const {
    const size_t begin = steps->size();
    steps->resize(begin + form_.step_bytes());
    uint8_t* const to = steps->data() + begin;
    std::array<uint32_t, kLanes * kLaneWords> words{};
    for (int lane = 0; lane < kLanes; ++lane) {
      words[static_cast<size_t>(lane * kLaneWords + 2)] = ColumnWord(plan, lane);
    }
    for (int subtile = 0; subtile < form_.subtiles(); ++subtile) {
      for (int lane = 0; lane < kLanes; ++lane) {
        uint16_t halves[8];
        for (int part = 0; part < 4; ++part) {
          const int row = subtile * kSubtileRows + lane / 4 + part % 2 * 8;
          const SparsePair pair = PairOf(plan, row, lane % 4 + part / 2 * 4);
          halves[2 * part] = pair.values[0];
          halves[2 * part + 1] = pair.values[1];
        }
        std::memcpy(to + (subtile * kLanes + lane) * sizeof(halves), halves, sizeof(halves));
        // Lanes 0 and 1 of each four give the metadata of even subtiles, lanes 2 and 3 that of odd ones: the first of
        // them for columns 0 to 15.
        if (lane % 4 / 2 != subtile % 2) continue;
        uint32_t word = 0;
        for (int part = 0; part < 2; ++part) {
          for (int i = 0; i < 4; ++i) {
            const SparsePair pair = PairOf(plan, subtile * kSubtileRows + lane / 4 + part * 8, lane % 2 * 4 + i);
            word |= pair.places << (16 * part + 4 * i);
          }
        }
        words[static_cast<size_t>(lane * kLaneWords + subtile / 2)] = word;
      }
    }
    std::memcpy(to + form_.subtiles() * kLanes * 16, words.data(), words.size() * sizeof(uint32_t));
  }

  const SparseWeight& weight_;
  const ConvGeometry& geometry_;
  const TensorForm form_;
  const int taps_;
  std::vector<int64_t> next_, end_;  // entries of each row of the tile that are still to come
  std::vector<uint16_t> values_;     // [column of the chunk][row of the tile]; stale where `rows_` has no bit
  std::vector<RowMask> rows_;        // [column of the chunk]
};

}  // namespace

bool HasTensorForm(const SparseWeight& weight, const ConvGeometry& geometry) {
  const int64_t stride_x = geometry.strides[2];
  const int64_t last_y = CheckedMultiply(geometry.kernel_shape[1] - 1, geometry.dilations[1], "the kernel's height");
  const int64_t last_x = CheckedMultiply(geometry.kernel_shape[2] - 1, geometry.dilations[2], "the kernel's width");
  return std::all_of(weight.values.begin(), weight.values.end(), IsHalf) && geometry.kernel_shape[0] == 1 &&
         geometry.taps() <= kMaxTaps && geometry.spatial_rank < kSpatialAxes && last_y < kMaxLines &&
         stride_x < kMaxLines && last_y * stride_x + stride_x <= kMaxLines && last_x / stride_x < kMaxPlaces;
}

TensorForm ChooseTensorForm(const ConvGeometry& geometry, int max_shared_bytes) {
  TensorForm form;
  const int64_t rows = geometry.group_out_channels();
  form.tile_rows = rows <= 32 ? 32 : 64;
  form.tiles_per_group = static_cast<int>(CeilDivide(rows, form.tile_rows));
  const bool is_one_chunk = geometry.group_in_channels() <= std::max<int64_t>(kWantedColumns / geometry.taps(), 1);
  const int64_t columns = max_shared_bytes < kAmpleSharedBytes || is_one_chunk ? kFewColumns : kWantedColumns;
  const int64_t wanted = std::max<int64_t>(columns / geometry.taps(), 1);
  form.chunk_channels = static_cast<int>(std::min({wanted, kMaxChunkChannels, geometry.group_in_channels()}));
  form.num_chunks = static_cast<int>(CeilDivide(geometry.group_in_channels(), form.chunk_channels));
  return form;
}

TensorWeight PackTensorWeight(const SparseWeight& weight, const ConvGeometry& geometry, const TensorForm& form) {
  return Packer(weight, geometry, form).Pack();
}

}  // namespace sparseconv::cuda
