#include "window_weight.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../checked.h"
#include "../half.h"
#include "wgmma_operand.h"

namespace sparseconv::cuda {
namespace {

constexpr int kStepPlaces = kWgmmaChannels;
constexpr int kStepQuads = kStepPlaces / kQuadColumns;
// With more than few channels, the other kernel for windows is faster, but where no row of X is read twice: what is
// staged once more for each 64 outputs is little then.
constexpr int64_t kMaxChannels = 512, kMaxSteps = 64;
// What a step's word has room for.
constexpr int64_t kMaxReach = 256;
// Search for a better order ends after so many passes over all pairs of places, found or not.
constexpr int kMaxPasses = 8;
constexpr int64_t kHeaderUnit = 128;

// A set of rows of a row tile.
using Rows = uint64_t;

int Count(Rows rows) { return __builtin_popcountll(rows); }

// The order of a row tile's channels. A step that only some rows need takes as long as one that all need: so what
// counts is, first of all, how many taps of 32 places have such rows.
class ChannelOrder {
 public:
  // `rows` is [channels][taps]: the rows that have an entry.
  ChannelOrder(const std::vector<Rows>& rows, int channels, int places, int taps)
      : rows_(rows),
        taps_(taps),
        order_(static_cast<size_t>(places), -1),
        more_(static_cast<size_t>(places / kQuadColumns * taps)) {
    Fill(channels);
    for (int quad = 0; quad < places / kQuadColumns; ++quad) CountMore(quad);
    for (int pass = 0; pass < kMaxPasses && Improve(); ++pass) {
    }
  }

  // The channel of each place, or -1.
  const std::vector<int>& places() const { return order_; }

 private:
  static constexpr int kStepCost = 8;  // of a further step, in entries that need it

  Rows At(int channel, int tap) const { return channel < 0 ? 0 : rows_[static_cast<size_t>(channel * taps_ + tap)]; }

  // Channels with most entries first, each beside those with which fewest entries are the third of their neighbours; no
  // more of them together than have to be.
  void Fill(int channels) {
    const size_t quads = order_.size() / kQuadColumns, together = (static_cast<size_t>(channels) + quads - 1) / quads;
    std::vector<std::pair<int, int>> left;  // minus the number of entries, and the channel
    for (int channel = 0; channel < channels; ++channel) {
      int count = 0;
      for (int tap = 0; tap < taps_; ++tap) count += Count(At(channel, tap));
      left.emplace_back(-count, channel);
    }
    std::sort(left.begin(), left.end());
    for (size_t begin = 0; begin < order_.size() && !left.empty(); begin += kQuadColumns) {
      std::vector<Rows> one(static_cast<size_t>(taps_)), two(static_cast<size_t>(taps_));
      for (size_t i = 0; i < together && !left.empty(); ++i) {
        const auto third = [&](const std::pair<int, int>& candidate) {
          int count = 0;
          for (int tap = 0; tap < taps_; ++tap)
            count += Count(At(candidate.second, tap) & two[static_cast<size_t>(tap)]);
          return count;
        };
        const auto best = std::min_element(left.begin(), left.end(),
                                           [&](const auto& a, const auto& b) { return third(a) < third(b); });
        order_[begin + i] = best->second;
        for (int tap = 0; tap < taps_; ++tap) {
          const auto t = static_cast<size_t>(tap);
          two[t] |= one[t] & At(best->second, tap);
          one[t] |= At(best->second, tap);
        }
        left.erase(best);
      }
    }
  }

  // Rows with three entries or four in a quad, for each tap.
  void CountMore(int quad) {
    const int* of = &order_[static_cast<size_t>(quad * kQuadColumns)];
    for (int tap = 0; tap < taps_; ++tap) {
      const Rows a = At(of[0], tap), b = At(of[1], tap), c = At(of[2], tap), d = At(of[3], tap);
      more_[static_cast<size_t>(quad * taps_ + tap)] = Count((a & b & (c | d)) | (c & d & (a | b)));
    }
  }

  // Of the steps that two quads are part of.
  int Cost(int quad, int other) const {
    int cost = 0;
    for (const int step : {quad / kStepQuads, other / kStepQuads}) {
      for (int tap = 0; tap < taps_; ++tap) {
        int more = 0;
        for (int q = step * kStepQuads; q < (step + 1) * kStepQuads; ++q)
          more += more_[static_cast<size_t>(q * taps_ + tap)];
        cost += more + (more > 0 ? kStepCost : 0);
      }
      if (quad / kStepQuads == other / kStepQuads) break;
    }
    return cost;
  }

  // Exchanges places as long as that saves something. Returns whether any did.
  bool Improve() {
    bool has_improved = false;
    for (size_t i = 0; i < order_.size(); ++i) {
      for (size_t j = (i / kQuadColumns + 1) * kQuadColumns; j < order_.size(); ++j) {
        if (order_[i] == order_[j]) continue;
        const int quad = static_cast<int>(i) / kQuadColumns, other = static_cast<int>(j) / kQuadColumns;
        const int before = Cost(quad, other);
        if (before == 0) continue;
        Exchange(i, j);
        if (Cost(quad, other) < before) {
          has_improved = true;
        } else {
          Exchange(i, j);
        }
      }
    }
    return has_improved;
  }

  void Exchange(size_t i, size_t j) {
    std::swap(order_[i], order_[j]);
    CountMore(static_cast<int>(i) / kQuadColumns);
    CountMore(static_cast<int>(j) / kQuadColumns);
  }

  const std::vector<Rows>& rows_;
  const int taps_;
  std::vector<int> order_;
  std::vector<int> more_;  // [quads][taps]
};

class Packer {
 public:
  Packer(const SparseWeight& weight, const ConvGeometry& geometry)
      : weight_(weight),
        geometry_(geometry),
        taps_(static_cast<int>(geometry.taps())),
        channels_(static_cast<int>(geometry.in_channels)),
        rows_(static_cast<size_t>(channels_ * taps_)),
        values_(rows_.size() * kWgmmaTileRows) {
    packed_.form.places = static_cast<int>(CeilDivide(geometry.in_channels, int64_t{kStepPlaces})) * kStepPlaces;
    packed_.form.row_tiles = static_cast<int>(CeilDivide(geometry.out_channels, int64_t{kWgmmaTileRows}));
  }

  WindowWeight Pack() {
    std::vector<Steps> tiles;
    for (int tile = 0; tile < packed_.form.row_tiles; ++tile) {
      ReadTile(tile);
      const ChannelOrder order(rows_, channels_, packed_.form.places, taps_);
      packed_.channels.insert(packed_.channels.end(), order.places().begin(), order.places().end());
      tiles.push_back(MakeSteps(order.places()));
      packed_.form.max_steps = std::max(packed_.form.max_steps, static_cast<int>(tiles.back().words.size()));
    }
    packed_.form.header_bytes =
        static_cast<int>(CeilDivide(int64_t{4} * (packed_.form.max_steps + 1), kHeaderUnit) * kHeaderUnit);
    packed_.form.tile_bytes =
        packed_.form.header_bytes + packed_.form.max_steps * static_cast<int>(kWgmmaValueBytes + kWgmmaPlaceBytes);
    packed_.tiles.resize(static_cast<size_t>(packed_.form.row_tiles) * static_cast<size_t>(packed_.form.tile_bytes));
    for (size_t tile = 0; tile < tiles.size(); ++tile) {
      WriteTile(tiles[tile], packed_.tiles.data() + tile * static_cast<size_t>(packed_.form.tile_bytes));
    }
    return std::move(packed_);
  }

 private:
  struct Steps {
    std::vector<uint32_t> words;
    std::vector<uint8_t> values, places;
  };

  void ReadTile(int tile) {
    std::fill(rows_.begin(), rows_.end(), 0);
    const int64_t first = int64_t{tile} * kWgmmaTileRows;
    const int64_t count = std::min<int64_t>(kWgmmaTileRows, geometry_.out_channels - first);
    for (int64_t row = 0; row < count; ++row) {
      const auto k = static_cast<size_t>(first + row);
      for (auto entry = static_cast<size_t>(weight_.row_begin[k]);
           entry < static_cast<size_t>(weight_.row_begin[k + 1]); ++entry) {
        const size_t column = weight_.columns[entry];
        rows_[column] |= Rows{1} << row;
        values_[column * kWgmmaTileRows + static_cast<size_t>(row)] = FloatToHalf(weight_.values[entry]);
      }
    }
  }

  Steps MakeSteps(const std::vector<int>& order) const {
    Steps steps;
    for (int tap = 0; tap < taps_; ++tap) {
      for (int first = 0; first < packed_.form.places; first += kStepPlaces) {
        for (int level = 0; level < 2; ++level) AddStep({order, tap, first, level}, false, &steps);
      }
    }
    if (steps.words.empty()) AddStep({order, 0, 0, 0}, true, &steps);
    return steps;
  }

  // The entries of a tap of 32 places that are the first two of their neighbours (level 0), or the others (level 1).
  struct Step {
    const std::vector<int>& order;
    int tap, first, level;
  };

  void AddStep(const Step& step, bool may_be_empty, Steps* steps) const {
    bool is_empty = true;
    uint8_t values[kWgmmaValueBytes], places[kWgmmaPlaceBytes];
    WriteWgmmaOperand(
        [&](int row, int quad) {
          std::array<size_t, kQuadColumns> columns{};
          std::array<bool, kQuadColumns> has{};
          int found = 0;
          for (size_t i = 0; i < kQuadColumns; ++i) {
            const int channel = step.order[static_cast<size_t>(step.first + quad * kQuadColumns) + i];
            if (channel < 0) continue;
            columns[i] = static_cast<size_t>(channel * taps_ + step.tap);
            if ((rows_[columns[i]] >> row & 1) != 0) has[i] = found++ / 2 == step.level;
            is_empty = is_empty && !has[i];
          }
          return MakeSparsePair(
              [&](int i) { return has[static_cast<size_t>(i)]; },
              [&](int i) {
                return values_[columns[static_cast<size_t>(i)] * kWgmmaTileRows + static_cast<size_t>(row)];
              });
        },
        values, places);
    if (is_empty && !may_be_empty) return;
    const int64_t width = geometry_.kernel_shape[2];
    const int64_t y = step.tap / width * geometry_.dilations[1], x = step.tap % width * geometry_.dilations[2];
    steps->words.push_back(static_cast<uint32_t>(y << 24 | x << 16 | step.first));
    steps->values.insert(steps->values.end(), std::begin(values), std::end(values));
    steps->places.insert(steps->places.end(), std::begin(places), std::end(places));
  }

  void WriteTile(const Steps& steps, uint8_t* tile) const {
    const auto count = static_cast<uint32_t>(steps.words.size());
    std::memcpy(tile, &count, sizeof(count));
    std::memcpy(tile + sizeof(count), steps.words.data(), steps.words.size() * sizeof(uint32_t));
    uint8_t* const values = tile + packed_.form.header_bytes;
    std::memcpy(values, steps.values.data(), steps.values.size());
    std::memcpy(values + steps.values.size(), steps.places.data(), steps.places.size());
  }

  const SparseWeight& weight_;
  const ConvGeometry& geometry_;
  const int taps_, channels_;
  std::vector<Rows> rows_;        // [channels][taps], of the row tile
  std::vector<uint16_t> values_;  // [channels][taps][rows]; stale where there is no entry
  WindowWeight packed_;
};

}  // namespace

bool HasWindowForm(const ConvGeometry& geometry, int64_t max_shared_bytes) {
  const int64_t reach_y = (geometry.kernel_shape[1] - 1) * geometry.dilations[1];
  const int64_t reach_x = (geometry.kernel_shape[2] - 1) * geometry.dilations[2];
  const bool is_window = geometry.group == 1 && geometry.taps() > 1 && geometry.kernel_shape[0] == 1;
  if (!is_window || geometry.in_channels > kMaxChannels || reach_y >= kMaxReach || reach_x >= kMaxReach) return false;
  const int64_t steps = CeilDivide(geometry.in_channels, int64_t{kStepPlaces}) * geometry.taps();
  if (geometry.in_channels > kMaxFewChannels && (reach_y > 0 || steps > kMaxSteps)) return false;
  return steps * static_cast<int64_t>(kWgmmaValueBytes + kWgmmaPlaceBytes) < max_shared_bytes;
}

WindowWeight PackWindowWeight(const SparseWeight& weight, const ConvGeometry& geometry) {
  return Packer(weight, geometry).Pack();
}

}  // namespace sparseconv::cuda
