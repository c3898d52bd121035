#include "window_weight.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../checked.h"
#include "../half.h"
#include "channel_order.h"
#include "wgmma_operand.h"

namespace sparseconv::cuda {
namespace {

constexpr int kStepPlaces = kWgmmaChannels, kDensePlaces = kWgmmaValueColumns;
constexpr uint32_t kDenseCountShift = 16;
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
      ChannelOrder order(rows_, channels_, packed_.form.places, taps_, kStepPlaces);
      order.Improve(kMaxPasses, kMaxSets);
      packed_.channels.insert(packed_.channels.end(), order.places().begin(), order.places().end());
      tiles.push_back(MakeSteps(order.places()));
      const Steps& steps = tiles.back();
      if (steps.count() > packed_.form.max_steps) {
        packed_.form.max_steps = steps.count();
        packed_.form.dense_steps = steps.dense.count();
      }
    }
    packed_.form.header_bytes =
        static_cast<int>(CeilDivide(int64_t{4} * (packed_.form.max_steps + 1), kHeaderUnit) * kHeaderUnit);
    size_t dense_bytes = 0, sparse_bytes = 0;
    for (const Steps& steps : tiles) {
      dense_bytes = std::max(dense_bytes, steps.dense.values.size());
      sparse_bytes = std::max(sparse_bytes, steps.sparse.values.size() + steps.sparse.places.size());
    }
    packed_.form.dense_bytes = static_cast<int>(dense_bytes);
    packed_.form.tile_bytes = packed_.form.header_bytes + static_cast<int>(dense_bytes + sparse_bytes);
    packed_.tiles.resize(static_cast<size_t>(packed_.form.row_tiles) * static_cast<size_t>(packed_.form.tile_bytes));
    for (size_t tile = 0; tile < tiles.size(); ++tile) {
      WriteTile(tiles[tile], packed_.tiles.data() + tile * static_cast<size_t>(packed_.form.tile_bytes));
    }
    return std::move(packed_);
  }

 private:
  // Of one kind.
  struct Sequence {
    std::vector<uint32_t> words;
    std::vector<uint8_t> values, places;

    int count() const { return static_cast<int>(words.size()); }
  };

  struct Steps {
    Sequence dense, sparse;

    int count() const { return dense.count() + sparse.count(); }
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
      for (int first = 0; first < packed_.form.places; first += kStepPlaces) AddSteps({order, tap, first}, &steps);
    }
    if (steps.count() == 0) AddDense({order, 0, 0}, {}, &steps.dense);
    return steps;
  }

  // Of a tap, and of 32 places or 16.
  struct Part {
    const std::vector<int>& order;
    int tap, first;

    const int* channels() const { return &order[static_cast<size_t>(first)]; }
  };
  using Values = std::array<uint8_t, kWgmmaValueBytes>;

  void AddSteps(const Part& part, Steps* steps) const {
    const auto has_entry = [&](int channel, int row) { return HasEntry(channel, part.tap, row); };
    const auto value = [&](int channel, int row) { return ValueOf(channel, part.tap, row); };
    Values values;
    std::array<uint8_t, kWgmmaPlaceBytes> places;
    if (WriteWgmmaLevel(part.channels(), 1, has_entry, value, values.data(), places.data())) {
      for (const Part& half : {part, Part{part.order, part.tap, part.first + kDensePlaces}}) {
        if (WriteDenseWgmma(half.channels(), has_entry, value, values.data())) AddDense(half, values, &steps->dense);
      }
    } else if (WriteWgmmaLevel(part.channels(), 0, has_entry, value, values.data(), places.data())) {
      Sequence& sparse = steps->sparse;
      sparse.words.push_back(WordOf(part));
      sparse.values.insert(sparse.values.end(), values.begin(), values.end());
      sparse.places.insert(sparse.places.end(), places.begin(), places.end());
    }
  }

  void AddDense(const Part& part, const Values& values, Sequence* dense) const {
    dense->words.push_back(WordOf(part));
    dense->values.insert(dense->values.end(), values.begin(), values.end());
  }

  uint32_t WordOf(const Part& part) const {
    const int64_t width = geometry_.kernel_shape[2];
    const int64_t y = part.tap / width * geometry_.dilations[1], x = part.tap % width * geometry_.dilations[2];
    return static_cast<uint32_t>(y << 24 | x << 16 | part.first);
  }

  size_t ColumnOf(int channel, int tap) const { return static_cast<size_t>(channel * taps_ + tap); }
  bool HasEntry(int channel, int tap, int row) const { return (rows_[ColumnOf(channel, tap)] >> row & 1) != 0; }
  uint16_t ValueOf(int channel, int tap, int row) const {
    return values_[ColumnOf(channel, tap) * kWgmmaTileRows + static_cast<size_t>(row)];
  }

  void WriteTile(const Steps& steps, uint8_t* tile) const {
    const auto counts = static_cast<uint32_t>(steps.sparse.count()) | static_cast<uint32_t>(steps.dense.count())
                                                                          << kDenseCountShift;
    std::memcpy(tile, &counts, sizeof(counts));
    uint8_t* words = tile + sizeof(counts);
    for (const Sequence* sequence : {&steps.dense, &steps.sparse}) {
      words = std::copy_n(reinterpret_cast<const uint8_t*>(sequence->words.data()),
                          sequence->words.size() * sizeof(uint32_t), words);
    }
    uint8_t* const values = tile + packed_.form.header_bytes;
    std::copy(steps.dense.values.begin(), steps.dense.values.end(), values);
    uint8_t* const places =
        std::copy(steps.sparse.values.begin(), steps.sparse.values.end(), values + packed_.form.dense_bytes);
    std::copy(steps.sparse.places.begin(), steps.sparse.places.end(), places);
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
