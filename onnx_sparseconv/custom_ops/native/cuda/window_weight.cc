#include "window_weight.h"

#include <algorithm>
#include <cstring>

#include "../checked.h"
#include "../half.h"
#include "channel_order.h"
#include "wgmma_operand.h"

namespace sparseconv::cuda {
namespace {

constexpr int kStepPlaces = kWgmmaChannels;
// With more than few channels, the other kernel for windows is faster, but where no row of X is read twice: what is
// staged once more for each 64 outputs is little then.
constexpr int64_t kMaxChannels = 512, kMaxSteps = 64;
// What a step's word has room for.
constexpr int64_t kMaxReach = 256;
// Search for a better order ends after so many passes over all pairs of places, or so many of their sets, found or not.
constexpr int kMaxPasses = 8;
constexpr int64_t kMaxSets = int64_t{1} << 24;
constexpr int64_t kHeaderUnit = 128;

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
      ChannelOrder order(rows_, channels_, packed_.form.places, taps_);
      order.Improve(kMaxPasses, kMaxSets);
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
        rows_[column] |= TileRows{1} << row;
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
    uint8_t values[kWgmmaValueBytes], places[kWgmmaPlaceBytes];
    const auto column = [&](int channel) { return static_cast<size_t>(channel * taps_ + step.tap); };
    const bool has_entries = WriteWgmmaLevel(
        &step.order[static_cast<size_t>(step.first)], step.level,
        [&](int channel, int row) { return (rows_[column(channel)] >> row & 1) != 0; },
        [&](int channel, int row) { return values_[column(channel) * kWgmmaTileRows + static_cast<size_t>(row)]; },
        values, places);
    if (!has_entries && !may_be_empty) return;
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
  std::vector<TileRows> rows_;    // [channels][taps], of the row tile
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
