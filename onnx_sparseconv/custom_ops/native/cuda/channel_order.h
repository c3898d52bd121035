// An order of input channels in which few rows of a weight have more than two non-zeros in four neighbours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse_pair.h"
#include "wgmma_operand.h"

namespace sparseconv::cuda {

// Rows of a row tile.
using TileRows = uint64_t;
static_assert(sizeof(TileRows) * 8 == kWgmmaTileRows);

// What counts is, first of all, how many steps there are, for one that only some rows need takes as long as one that
// all need. A step multiplies some places, those of one tap, by a row tile: a *set* of rows. It has the first two
// entries of each four neighbours; where any row has more, there is a further step, of as many places or fewer.
class ChannelOrder {
 public:
  // `rows` is [channels][sets]: the rows that have an entry; it must outlive this. `further_places` are those of a
  // further step, a multiple of 4; `places` is a multiple of that.
  ChannelOrder(const std::vector<TileRows>& rows, int channels, int places, int sets, int further_places);

  // Exchanges places as long as that saves something, in so many passes over all pairs of them at most, and as long as
  // no more sets of pairs were looked at.
  void Improve(int max_passes, int64_t max_sets);

  // The channel of each place, or -1.
  const std::vector<int>& places() const { return order_; }
  int64_t further_steps() const;

 private:
  TileRows At(int channel, int set) const { return channel < 0 ? 0 : rows_[Index(channel, set)]; }
  size_t Index(int of, int set) const {
    return static_cast<size_t>(of) * static_cast<size_t>(sets_) + static_cast<size_t>(set);
  }
  void Fill(int channels);
  int MoreOf(int quad, int set) const;
  bool ImprovePairs();
  bool TryExchange(size_t i, size_t j);

  const std::vector<TileRows>& rows_;
  const int sets_;
  const int step_quads_;  // of a further step
  std::vector<int> order_;
  std::vector<int> more_;       // [quads][sets], rows with three entries or four
  std::vector<int> step_more_;  // [further steps][sets], their sums
  std::vector<int> quad_more_;  // [quads], likewise
  std::vector<int> changes_;    // [sets][2], of the two quads of an exchange
  int64_t sets_left_ = 0;       // to be looked at
};

}  // namespace sparseconv::cuda
