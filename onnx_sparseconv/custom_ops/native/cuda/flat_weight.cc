#include "flat_weight.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>

#include "../checked.h"
#include "../half.h"
#include "channel_order.h"
#include "wgmma_operand.h"

namespace sparseconv::cuda {
namespace {

constexpr int kOctetPlaces = 8;
constexpr size_t kChunkUnit = 16;
constexpr int64_t kHeaderUnit = 128;
// Fewer channels are read by octets, where X is, or take too little time for another launch.
constexpr int64_t kMinChannels = 64;
// An order takes time to find that grows with the squares of these.
constexpr int64_t kMaxChannels = 2048;
// Of taps, in rows and columns of X.
constexpr int64_t kMaxReach = 256;
// Of a chunk: with more, it leaves little room for what its taps read.
constexpr int64_t kMaxChunkSteps = 18;  // pairs among them
constexpr size_t kPairCountShift = 16;  // of a chunk's first word
// Of the search for a better order, which takes about 15 ns a set.
// There is no such order for more entries, and with so many sets to be looked at for the first one, it takes a second.
constexpr double kMaxDensity = 0.3;
constexpr int64_t kMaxLookedAt = int64_t{1} << 31;
constexpr int kMaxPasses = 4;
constexpr int64_t kMaxSets = 1'500'000;
// Octets with strays for each step, in the beginning. With more of them, dense steps are faster.
constexpr double kMaxStrayOctets = 1.2;

// Taps that read the same rows and columns between strides, those at `row` and `column`.
struct Place {
  int row, column;
  std::vector<int> taps;
};

std::vector<Place> PlacesOf(const ConvGeometry& geometry) {
  std::vector<Place> places;
  const int64_t width = geometry.kernel_shape[2];
  for (int64_t tap = 0; tap < geometry.taps(); ++tap) {
    const auto row = static_cast<int>(tap / width * geometry.dilations[1] % geometry.strides[1]);
    const auto column = static_cast<int>(tap % width * geometry.dilations[2] % geometry.strides[2]);
    auto at = std::find_if(places.begin(), places.end(),
                           [&](const Place& place) { return place.row == row && place.column == column; });
    if (at == places.end()) at = places.insert(at, {row, column, {}});
    at->taps.push_back(static_cast<int>(tap));
  }
  return places;
}

class Packer {
 public:
  Packer(const SparseWeight& weight, const ConvGeometry& geometry, FlatProducts products)
      : weight_(weight),
        geometry_(geometry),
        is_dense_(products == FlatProducts::kDense),
        chunk_places_((is_dense_ ? kFlatDenseOctets : kFlatOctets) * kOctetPlaces),
        taps_(static_cast<int>(geometry.taps())),
        channels_(static_cast<int>(geometry.group_in_channels())),
        group_tiles_(static_cast<int>(CeilDivide(geometry.group_out_channels(), int64_t{kWgmmaTileRows}))),
        group_places_(static_cast<int>(RoundUp(geometry.group_in_channels(), int64_t{chunk_places_}))),
        places_(PlacesOf(geometry)),
        rows_(static_cast<size_t>(channels_) * static_cast<size_t>(taps_ * group_tiles_)) {
    FlatForm& form = packed_.form;
    form.products = products;
    form.row_tiles_per_group = group_tiles_;
    form.row_tiles = group_tiles_ * static_cast<int>(geometry.group);
    form.num_octets = static_cast<int>(geometry.group) * group_places_ / kOctetPlaces;
    form.num_places = static_cast<int>(places_.size());
    for (const Place& place : places_) packed_.places.push_back(place.row << 16 | place.column);
    form.header_bytes = static_cast<int>(CeilDivide(4 * (kMaxChunkSteps + 1), kHeaderUnit) * kHeaderUnit);
  }

  std::optional<FlatWeight> Pack() {
    for (int group = 0; group < static_cast<int>(geometry_.group); ++group) {
      ReadGroup(group);
      const std::optional<std::vector<int>> order = is_dense_ ? AnyOrder() : FindOrder();
      if (!order) return {};
      for (const int channel : *order) packed_.channels.push_back(channel < 0 ? -1 : group * channels_ + channel);
      for (int tile = 0; tile < group_tiles_; ++tile) AddTile(group, tile, *order);
    }
    packed_.tile_begins.push_back(static_cast<uint32_t>(packed_.octets.size()));
    packed_.chunk_begins.push_back(static_cast<uint32_t>(packed_.chunks.size() / kChunkUnit));
    packed_.form.num_chunks = static_cast<int64_t>(packed_.octets.size());
    return std::move(packed_);
  }

 private:
  // The channel of each place, or -1.
  std::vector<int> AnyOrder() const {
    std::vector<int> order(static_cast<size_t>(group_places_), -1);
    std::iota(order.begin(), order.begin() + channels_, 0);
    return order;
  }

  std::optional<std::vector<int>> FindOrder() const {
    ChannelOrder order(rows_, channels_, group_places_, taps_ * group_tiles_, kOctetPlaces);
    const auto steps = static_cast<double>(group_places_ / chunk_places_ * taps_ * group_tiles_);
    if (static_cast<double>(order.further_steps()) > kMaxStrayOctets * steps) return {};
    order.Improve(kMaxPasses, kMaxSets);
    return order.places();
  }

  size_t SetIndex(int channel, int tap, int tile) const {
    return static_cast<size_t>(channel * taps_ + tap) * static_cast<size_t>(group_tiles_) + static_cast<size_t>(tile);
  }

  void ReadGroup(int group) {
    std::fill(rows_.begin(), rows_.end(), 0);
    const int64_t first = group * geometry_.group_out_channels();
    for (int64_t row = 0; row < geometry_.group_out_channels(); ++row) {
      ForEntries(first + row, [&](size_t column, float) {
        const auto c = static_cast<int>(column);
        rows_[SetIndex(c / taps_, c % taps_, static_cast<int>(row / kWgmmaTileRows))] |= TileRows{1}
                                                                                         << row % kWgmmaTileRows;
      });
    }
  }

  // Calls function(column, value) for the entries of a row of the weight.
  template <class Function>
  void ForEntries(int64_t row, const Function& function) const {
    const auto k = static_cast<size_t>(row);
    for (auto entry = static_cast<size_t>(weight_.row_begin[k]); entry < static_cast<size_t>(weight_.row_begin[k + 1]);
         ++entry) {
      function(weight_.columns[entry], weight_.values[entry]);
    }
  }

  void AddTile(int group, int tile, const std::vector<int>& order) {
    packed_.tile_begins.push_back(static_cast<uint32_t>(packed_.octets.size()));
    values_.assign(static_cast<size_t>(channels_ * taps_) * kWgmmaTileRows, 0);
    const int64_t first = int64_t{tile} * kWgmmaTileRows;
    const int64_t count = std::min<int64_t>(kWgmmaTileRows, geometry_.group_out_channels() - first);
    for (int64_t row = 0; row < count; ++row) {
      ForEntries(group * geometry_.group_out_channels() + first + row, [&](size_t column, float value) {
        values_[column * kWgmmaTileRows + static_cast<size_t>(row)] = FloatToHalf(value);
      });
    }
    for (size_t place = 0; place < places_.size(); ++place) {
      int octet = static_cast<int>(place) * packed_.form.num_octets + group * group_places_ / kOctetPlaces;
      for (int begin = 0; begin < group_places_; begin += chunk_places_, octet += chunk_places_ / kOctetPlaces) {
        AddChunks(places_[place], tile, &order[static_cast<size_t>(begin)], octet);
      }
    }
  }

  // Of one tap: the entries of 32 places that are the first two of their neighbours; of 16, all. Or a pair, which has
  // no places.
  struct Step {
    uint32_t word = 0;
    bool is_pair = false;
    std::array<uint8_t, kWgmmaValueBytes> values{};
    std::array<uint8_t, kWgmmaPlaceBytes> places{};
  };
  // An octet of a chunk, and a tap. What is there to have a pair has no entries in it.
  struct OctetTap {
    int octet, tap;
    bool has_strays = true;
  };

  // Pairs come last.
  void AddChunks(const Place& place, int tile, const int* channels, int octet) {
    std::vector<Step> steps;
    for (const int tap : place.taps) AddStep(tap, tile, channels, &steps);
    if (!is_dense_) AddPairs(place, tile, channels, &steps);
    const auto count = static_cast<int64_t>(steps.size()), parts = CeilDivide(count, kMaxChunkSteps);
    for (int64_t part = 0; part < parts; ++part) {
      AddChunk(&steps[static_cast<size_t>(part * count / parts)],
               static_cast<size_t>((part + 1) * count / parts - part * count / parts), octet);
    }
  }

  void AddStep(int tap, int tile, const int* channels, std::vector<Step>* steps) const {
    Step step;
    step.word = static_cast<uint32_t>(tap);
    const auto has_entry = [&](int channel, int row) { return (RowsOf(channel, tap, tile) >> row & 1) != 0; };
    const auto value = [&](int channel, int row) { return ValueOf(channel, tap, row); };
    const bool has_entries =
        is_dense_ ? WriteDenseWgmma(channels, has_entry, value, step.values.data())
                  : WriteWgmmaLevel(channels, 0, has_entry, value, step.values.data(), step.places.data());
    if (has_entries) steps->push_back(step);
  }

  // Octets are paired with those behind them, or with themselves where the taps are of one row.
  void AddPairs(const Place& place, int tile, const int* channels, std::vector<Step>* steps) const {
    std::vector<OctetTap> left;
    for (int octet = 0; octet < kFlatOctets; ++octet) {
      for (const int tap : place.taps) {
        TileRows strays = 0;
        for (int i = 0; i < kOctetPlaces; ++i) strays |= StraysOf(&channels[octet * kOctetPlaces], i, tap, tile);
        if (strays != 0) left.push_back({octet, tap});
      }
    }
    const auto width = static_cast<int>(geometry_.kernel_shape[2]);
    while (!left.empty()) {
      const OctetTap first = left.front();
      left.erase(left.begin());
      // The last ones have most octets before them.
      const auto found = std::find_if(left.rbegin(), left.rend(), [&](const OctetTap& other) {
        return other.octet > first.octet || other.tap / width == first.tap / width;
      });
      if (found != left.rend()) {
        AddPair(first, *found, tile, channels, steps);
        left.erase(std::next(found).base());
      } else if (first.octet + 1 < kFlatOctets) {
        AddPair(first, {kFlatOctets - 1, first.tap, false}, tile, channels, steps);
      } else {
        AddPair({0, first.tap, false}, first, tile, channels, steps);
      }
    }
  }

  void AddPair(const OctetTap& first, const OctetTap& second, int tile, const int* channels,
               std::vector<Step>* steps) const {
    Step pair;
    pair.is_pair = true;
    pair.word = static_cast<uint32_t>(first.octet | first.tap << 8 | second.octet << 16) |
                static_cast<uint32_t>(second.tap) << 24;
    for (int column = 0; column < 2 * kOctetPlaces; ++column) {
      const OctetTap& of = column < kOctetPlaces ? first : second;
      const int* octet = &channels[of.octet * kOctetPlaces];
      const int place = column % kOctetPlaces;
      const TileRows strays = of.has_strays ? StraysOf(octet, place, of.tap, tile) : 0;
      for (int row = 0; row < kWgmmaTileRows; ++row) {
        if ((strays >> row & 1) == 0) continue;
        const uint16_t half = ValueOf(octet[place], of.tap, row);
        std::memcpy(pair.values.data() + WgmmaValueAt(row, column), &half, sizeof(half));
      }
    }
    steps->push_back(pair);
  }

  // The rows of which the entry at a place of an octet is the third of its neighbours, or the fourth.
  TileRows StraysOf(const int* octet, int place, int tap, int tile) const {
    TileRows any = 0, two = 0;  // of those before
    for (int i = place / kQuadColumns * kQuadColumns; i < place; ++i) {
      two |= any & RowsOf(octet[i], tap, tile);
      any |= RowsOf(octet[i], tap, tile);
    }
    return two & RowsOf(octet[place], tap, tile);
  }

  // That have an entry of a channel, or of none.
  TileRows RowsOf(int channel, int tap, int tile) const {
    return channel < 0 ? 0 : rows_[SetIndex(channel, tap, tile)];
  }
  uint16_t ValueOf(int channel, int tap, int row) const {
    return values_[static_cast<size_t>(channel * taps_ + tap) * kWgmmaTileRows + static_cast<size_t>(row)];
  }

  void AddChunk(const Step* steps, size_t count, int octet) {
    FlatForm& form = packed_.form;
    const size_t begin = packed_.chunks.size();
    const auto num_pairs = static_cast<size_t>(std::count_if(steps, steps + count, std::mem_fn(&Step::is_pair)));
    const size_t num_steps = count - num_pairs, place_bytes = is_dense_ ? 0 : kWgmmaPlaceBytes;
    const size_t bytes = static_cast<size_t>(form.header_bytes) + count * kWgmmaValueBytes + num_steps * place_bytes;
    packed_.octets.push_back(octet);
    packed_.chunk_begins.push_back(static_cast<uint32_t>(begin / kChunkUnit));
    packed_.chunks.resize(begin + bytes);
    form.max_chunk_bytes = std::max(form.max_chunk_bytes, static_cast<int>(bytes));
    form.num_steps += static_cast<int64_t>(num_steps);
    form.num_pairs += static_cast<int64_t>(num_pairs);
    std::vector<uint32_t> words{static_cast<uint32_t>(num_steps | num_pairs << kPairCountShift)};
    uint8_t* const header = packed_.chunks.data() + begin;
    uint8_t* const values = header + form.header_bytes;
    for (size_t i = 0; i < count; ++i) {
      words.push_back(steps[i].word);
      std::memcpy(values + i * kWgmmaValueBytes, steps[i].values.data(), kWgmmaValueBytes);
    }
    for (size_t i = 0; i < num_steps; ++i) {
      std::memcpy(values + count * kWgmmaValueBytes + i * place_bytes, steps[i].places.data(), place_bytes);
    }
    std::memcpy(header, words.data(), words.size() * sizeof(uint32_t));
  }

  const SparseWeight& weight_;
  const ConvGeometry& geometry_;
  const bool is_dense_;
  const int chunk_places_;
  const int taps_, channels_;             // channels of a group
  const int group_tiles_, group_places_;  // of a group
  const std::vector<Place> places_;
  std::vector<TileRows> rows_;    // [channels][taps][row tiles], of the group
  std::vector<uint16_t> values_;  // [channels][taps][rows], of the row tile
  FlatWeight packed_;
};

}  // namespace

bool HasFlatForm(const ConvGeometry& geometry) {
  const int64_t reach_y = (geometry.kernel_shape[1] - 1) * geometry.dilations[1];
  const int64_t reach_x = (geometry.kernel_shape[2] - 1) * geometry.dilations[2];
  const int64_t channels = geometry.group_in_channels();
  return geometry.taps() > 1 && geometry.kernel_shape[0] == 1 && channels >= kMinChannels && channels <= kMaxChannels &&
         geometry.group_out_channels() <= kMaxChannels && reach_y < kMaxReach && reach_x < kMaxReach &&
         geometry.strides[1] < kMaxReach && geometry.strides[2] < kMaxReach;
}

std::optional<FlatWeight> PackFlatWeight(const SparseWeight& weight, const ConvGeometry& geometry) {
  const int64_t channels = geometry.group_in_channels(), rows = geometry.group_out_channels();
  const int64_t columns = channels * geometry.taps();
  const auto all = static_cast<double>(geometry.out_channels) * static_cast<double>(columns);
  const int64_t looked_at = columns * channels * CeilDivide(rows, int64_t{kWgmmaTileRows});
  if (static_cast<double>(weight.values.size()) <= kMaxDensity * all && looked_at <= kMaxLookedAt) {
    auto sparse = Packer(weight, geometry, FlatProducts::kSparse).Pack();
    if (sparse) return sparse;
  }
  constexpr int64_t kStepPlaces = kFlatDenseOctets * kOctetPlaces;
  const int64_t tiles = geometry.group * CeilDivide(rows, int64_t{kWgmmaTileRows});
  const int64_t steps = CeilDivide(channels, kStepPlaces) * geometry.taps();
  if (steps > kMaxDenseWeightBytes / static_cast<int64_t>(kWgmmaValueBytes) / tiles) return {};
  return Packer(weight, geometry, FlatProducts::kDense).Pack();
}

}  // namespace sparseconv::cuda
