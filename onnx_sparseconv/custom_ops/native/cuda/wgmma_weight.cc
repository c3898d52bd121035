#include "wgmma_weight.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../checked.h"
#include "../half.h"
#include "wgmma_operand.h"

namespace sparseconv::cuda {
namespace {

constexpr int kMaxRowTiles = 2;
constexpr int kPlaces = kWgmmaChannels;  // of a chunk
constexpr size_t kChunkUnit = 16;
// Of a window; none that is wider fits a stage.
constexpr int64_t kMaxReach = 1 << 16;
// With fewer channels, or rows, next to nothing of a chunk, or a tile, is the weight's. Where it is little, a plan
// tells whether the kernel pays all the same.
constexpr int64_t kMinRows = 8;
// Packing keeps a block of rows with its zeros. No layer has as many columns, but a node may say so.
constexpr int64_t kMaxColumns = 1 << 20;
// Of a chunk: with more, it leaves no room for what its taps read.
constexpr int64_t kMaxChunkSteps = 25;

// A set of rows of a block.
struct Rows {
  std::array<uint64_t, kMaxRowTiles> bits{};

  bool Has(int row) const { return (bits[static_cast<size_t>(row / 64)] >> (row % 64) & 1) != 0; }
  void Add(int row) { bits[static_cast<size_t>(row / 64)] |= uint64_t{1} << (row % 64); }
  bool Empty() const { return bits[0] == 0 && bits[1] == 0; }
  int Count() const { return __builtin_popcountll(bits[0]) + __builtin_popcountll(bits[1]); }

  friend Rows operator&(const Rows& a, const Rows& b) { return {{a.bits[0] & b.bits[0], a.bits[1] & b.bits[1]}}; }
  friend Rows operator|(const Rows& a, const Rows& b) { return {{a.bits[0] | b.bits[0], a.bits[1] | b.bits[1]}}; }
  friend Rows operator-(const Rows& a, const Rows& b) { return {{a.bits[0] & ~b.bits[0], a.bits[1] & ~b.bits[1]}}; }
};

// A channel that stands at a place, and the rows that have an entry there, for each tap.
struct Placed {
  int channel = -1;
  std::vector<Rows> rows;
};

// The order of one block: places, four of which are neighbours.
class ChannelOrder {
 public:
  // `rows` is [channels][taps]: the rows of the block that have an entry. The channels from `begin` to `end` count.
  ChannelOrder(std::vector<Rows> rows, int taps, int64_t begin, int64_t end)
      : left_(std::move(rows)), taps_(taps), begin_(static_cast<int>(begin)), end_(static_cast<int>(end)) {}

  std::vector<Placed> Choose() {
    std::vector<Placed> places;
    pool_ = Left();
    while (!pool_.empty()) {
      FillQuad(&places);
      if (pool_.empty()) pool_ = Left();
    }
    return places;
  }

 private:
  // Channels with entries that have no place yet, those with most first.
  std::vector<int> Left() const {
    std::vector<std::pair<int, int>> found;  // minus the number of entries, and the channel
    for (int channel = begin_; channel < end_; ++channel) {
      int count = 0;
      for (int tap = 0; tap < taps_; ++tap) count += At(channel, tap).Count();
      if (count > 0) found.emplace_back(-count, channel);
    }
    std::sort(found.begin(), found.end());
    std::vector<int> channels;
    for (const auto& one : found) channels.push_back(one.second);
    return channels;
  }

  void FillQuad(std::vector<Placed>* places) {
    std::vector<Rows> one(static_cast<size_t>(taps_)), two(static_cast<size_t>(taps_));
    for (int i = 0; i < kQuadColumns; ++i) {
      Placed placed;
      if (!pool_.empty()) {
        const auto best = Best(two);
        placed.channel = *best;
        pool_.erase(best);
        placed.rows.resize(static_cast<size_t>(taps_));
        for (size_t tap = 0; tap < static_cast<size_t>(taps_); ++tap) {
          Rows& left = left_[static_cast<size_t>(placed.channel * taps_) + tap];
          placed.rows[tap] = left - two[tap];
          left = left & two[tap];
          two[tap] = two[tap] | (one[tap] & placed.rows[tap]);
          one[tap] = one[tap] | placed.rows[tap];
        }
      }
      places->push_back(std::move(placed));
    }
  }

  // The channel of the pool that leaves the fewest entries behind, where the rows of `two` are full.
  std::vector<int>::iterator Best(const std::vector<Rows>& two) {
    auto best = pool_.begin();
    int fewest = -1;
    for (auto at = pool_.begin(); at != pool_.end() && fewest != 0; ++at) {
      int behind = 0;
      for (int tap = 0; tap < taps_ && (fewest < 0 || behind < fewest); ++tap) {
        behind += (At(*at, tap) & two[static_cast<size_t>(tap)]).Count();
      }
      if (fewest < 0 || behind < fewest) best = at, fewest = behind;
    }
    return best;
  }

  const Rows& At(int channel, int tap) const { return left_[static_cast<size_t>(channel * taps_ + tap)]; }

  std::vector<Rows> left_;  // entries that have no place yet
  const int taps_, begin_, end_;
  std::vector<int> pool_;
};

class Packer {
 public:
  Packer(const SparseWeight& weight, const ConvGeometry& geometry, const WgmmaForm& form,
         const std::vector<int64_t>& source_begins)
      : weight_(weight),
        geometry_(geometry),
        form_(form),
        source_begins_(source_begins),
        taps_(static_cast<int>(geometry.taps())) {
    if (source_begins_.empty()) source_begins_ = {0, geometry.group_in_channels()};
    packed_.form = form;
  }

  WgmmaWeight Pack() {
    for (int64_t group = 0; group < geometry_.group; ++group) {
      for (int block = 0; block < form_.blocks_per_group; ++block) {
        packed_.block_begins.push_back(static_cast<uint32_t>(packed_.chunk_begins.size()));
        PackBlock(group, block);
      }
    }
    packed_.block_begins.push_back(static_cast<uint32_t>(packed_.chunk_begins.size()));
    packed_.chunk_begins.push_back(static_cast<uint32_t>(packed_.chunks.size() / kChunkUnit));
    return std::move(packed_);
  }

 private:
  int block_rows() const { return form_.row_tiles * kWgmmaTileRows; }

  size_t ValueIndex(int row, int channel, int tap) const {
    return static_cast<size_t>(channel * taps_ + tap) * static_cast<size_t>(block_rows()) + static_cast<size_t>(row);
  }

  void PackBlock(int64_t group, int block) {
    const size_t columns = static_cast<size_t>(geometry_.group_in_channels()) * static_cast<size_t>(taps_);
    values_.resize(columns * static_cast<size_t>(block_rows()));
    std::vector<Rows> rows(columns);
    const int64_t first = int64_t{block} * block_rows();
    const int64_t count = std::min<int64_t>(block_rows(), geometry_.group_out_channels() - first);
    for (int row = 0; row < static_cast<int>(count); ++row) {
      const auto k = static_cast<size_t>(group * geometry_.group_out_channels() + first + row);
      for (auto entry = static_cast<size_t>(weight_.row_begin[k]);
           entry < static_cast<size_t>(weight_.row_begin[k + 1]); ++entry) {
        const size_t column = weight_.columns[entry];
        rows[column].Add(row);
        values_[column * static_cast<size_t>(block_rows()) + static_cast<size_t>(row)] =
            FloatToHalf(weight_.values[entry]);
      }
    }
    for (size_t source = 1; source < source_begins_.size(); ++source) {
      const std::vector<Placed> places =
          ChannelOrder(rows, taps_, source_begins_[source - 1], source_begins_[source]).Choose();
      for (size_t begin = 0; begin < places.size(); begin += kPlaces) {
        Chunk chunk{};
        for (size_t i = 0; i < kPlaces; ++i) chunk[i] = begin + i < places.size() ? &places[begin + i] : &kNobody;
        WriteChunk(chunk);
      }
    }
  }

  using Chunk = std::array<const Placed*, kPlaces>;

  static bool HasEntry(const Placed& placed, int tap) {
    return placed.channel >= 0 && !placed.rows[static_cast<size_t>(tap)].Empty();
  }

  void WriteChunk(const Chunk& chunk) {
    std::vector<int> taps;
    for (int tap = 0; tap < taps_; ++tap) {
      if (std::any_of(chunk.begin(), chunk.end(), [&](const Placed* placed) { return HasEntry(*placed, tap); })) {
        taps.push_back(tap);
      }
    }
    const auto count = static_cast<int64_t>(taps.size()), parts = CeilDivide(count, kMaxChunkSteps);
    for (int64_t part = 0; part < parts; ++part) {
      WriteSteps(chunk, {taps.begin() + part * count / parts, taps.begin() + (part + 1) * count / parts});
    }
  }

  // A chunk of its own for some of its taps.
  void WriteSteps(const Chunk& chunk, const std::vector<int>& taps) {
    // At a place without one, any channel of the same source, for it meets nothing but zeros, as in a dense
    // convolution. The first place always has one.
    for (const Placed* placed : chunk) {
      packed_.channels.push_back(placed->channel >= 0 ? placed->channel : chunk[0]->channel);
    }
    const size_t begin = packed_.chunks.size(), tiles = taps.size() * static_cast<size_t>(form_.row_tiles);
    const size_t bytes = static_cast<size_t>(form_.header_bytes) + tiles * (kWgmmaValueBytes + kWgmmaPlaceBytes);
    packed_.chunk_begins.push_back(static_cast<uint32_t>(begin / kChunkUnit));
    packed_.max_chunk_bytes = std::max(packed_.max_chunk_bytes, static_cast<int>(bytes));
    packed_.num_steps += static_cast<int64_t>(tiles);
    packed_.chunks.resize(begin + bytes);
    uint8_t* const header = packed_.chunks.data() + begin;
    std::vector<uint32_t> words{static_cast<uint32_t>(taps.size())};
    for (const int tap : taps) words.push_back(static_cast<uint32_t>(tap));
    std::memcpy(header, words.data(), words.size() * sizeof(uint32_t));
    packed_.taps.insert(packed_.taps.end(), taps.begin(), taps.end());
    packed_.taps.resize(packed_.channels.size() / kPlaces * kMaxWgmmaTaps);
    uint8_t* values = header + form_.header_bytes;
    uint8_t* places = values + tiles * kWgmmaValueBytes;
    for (const int tap : taps) {
      for (int tile = 0; tile < form_.row_tiles; ++tile) {
        const int first_row = tile * kWgmmaTileRows;
        WriteWgmmaOperand([&](int row, int quad) { return PairOf(chunk, tap, first_row + row, quad); }, values, places);
        values += kWgmmaValueBytes;
        places += kWgmmaPlaceBytes;
      }
    }
  }

  SparsePair PairOf(const Chunk& chunk, int tap, int row, int quad) const {
    const auto placed = [&](int i) -> const Placed& { return *chunk[static_cast<size_t>(quad * kQuadColumns + i)]; };
    return MakeSparsePair(
        [&](int i) { return placed(i).channel >= 0 && placed(i).rows[static_cast<size_t>(tap)].Has(row); },
        [&](int i) { return values_[ValueIndex(row, placed(i).channel, tap)]; });
  }

  static inline const Placed kNobody{};

  const SparseWeight& weight_;
  const ConvGeometry& geometry_;
  const WgmmaForm form_;
  std::vector<int64_t> source_begins_;
  const int taps_;
  WgmmaWeight packed_;
  std::vector<uint16_t> values_;  // [column][row of the block]; stale where there is no entry
};

}  // namespace

uint32_t WgmmaWeight::StepsOf(size_t chunk) const {
  uint32_t steps;
  std::memcpy(&steps, chunks.data() + kChunkUnit * chunk_begins[chunk], sizeof(steps));
  return steps;
}

bool IsPointwise(const ConvGeometry& geometry) { return geometry.taps() == 1; }

bool IsPlain(const ConvGeometry& geometry) {
  return geometry.strides == Axes{1, 1, 1} && geometry.pads_begin == Axes{} && geometry.pads_end == Axes{};
}

bool HasWgmmaForm(const SparseWeight& weight, const ConvGeometry& geometry) {
  const bool is_plane = geometry.kernel_shape[0] == 1 && geometry.spatial_rank < kSpatialAxes;
  const int64_t reach_y = CheckedMultiply(geometry.kernel_shape[1] - 1, geometry.dilations[1], "the kernel's height");
  const int64_t reach_x = CheckedMultiply(geometry.kernel_shape[2] - 1, geometry.dilations[2], "the kernel's width");
  return (is_plane || (IsPointwise(geometry) && IsPlain(geometry))) && geometry.taps() <= kMaxWgmmaTaps &&
         reach_y < kMaxReach && reach_x < kMaxReach && geometry.strides[2] < kMaxReach &&
         geometry.group_out_channels() >= kMinRows && geometry.group_in_channels() <= kMaxColumns / geometry.taps() &&
         std::all_of(weight.values.begin(), weight.values.end(), IsHalf);
}

WgmmaForm ChooseWgmmaForm(const ConvGeometry& geometry) {
  WgmmaForm form;
  const int64_t rows = geometry.group_out_channels();
  // One tap leaves an order for twice as many rows, and they share the input, of which such a layer needs most.
  if (IsPointwise(geometry) && rows > kWgmmaTileRows) form.row_tiles = kMaxRowTiles;
  form.blocks_per_group = static_cast<int>(CeilDivide(rows, int64_t{form.row_tiles} * kWgmmaTileRows));
  form.header_bytes = static_cast<int>(CeilDivide(4 * (geometry.taps() + 1), int64_t{128}) * 128);
  return form;
}

WgmmaWeight PackWgmmaWeight(const SparseWeight& weight, const ConvGeometry& geometry, const WgmmaForm& form,
                            const std::vector<int64_t>& source_begins) {
  return Packer(weight, geometry, form, source_begins).Pack();
}

}  // namespace sparseconv::cuda
