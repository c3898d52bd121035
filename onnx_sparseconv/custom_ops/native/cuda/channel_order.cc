#include "channel_order.h"

#include <algorithm>
#include <utility>

#include "../../../kernels/cuda/params.h"

namespace sparseconv::cuda {
namespace {

constexpr int kStepCost = 8;  // of a further step, in entries that need it

// Most are empty, and a count is not one instruction on every CPU.
int Count(TileRows rows) { return rows == 0 ? 0 : __builtin_popcountll(rows); }

int CostOf(int more) { return more + (more > 0 ? kStepCost : 0); }

}  // namespace

ChannelOrder::ChannelOrder(const std::vector<TileRows>& rows, int channels, int places, int sets, int further_places)
    : rows_(rows),
      sets_(sets),
      step_quads_(further_places / kQuadColumns),
      order_(static_cast<size_t>(places), -1),
      more_(Index(places / kQuadColumns, 0)),
      step_more_(Index(places / further_places, 0)),
      quad_more_(static_cast<size_t>(places / kQuadColumns)),
      changes_(static_cast<size_t>(2 * sets)) {
  Fill(channels);
  for (int quad = 0; quad < places / kQuadColumns; ++quad) {
    for (int set = 0; set < sets_; ++set) {
      const int more = more_[Index(quad, set)] = MoreOf(quad, set);
      step_more_[Index(quad / step_quads_, set)] += more;
      quad_more_[static_cast<size_t>(quad)] += more;
    }
  }
}

// Channels with most entries first, each beside those with which fewest entries are the third of their neighbours; no
// more of them together than have to be.
void ChannelOrder::Fill(int channels) {
  const size_t quads = order_.size() / kQuadColumns, together = (static_cast<size_t>(channels) + quads - 1) / quads;
  std::vector<std::pair<int, int>> left;  // minus the number of entries, and the channel
  for (int channel = 0; channel < channels; ++channel) {
    int count = 0;
    for (int set = 0; set < sets_; ++set) count += Count(At(channel, set));
    left.emplace_back(-count, channel);
  }
  std::sort(left.begin(), left.end());
  for (size_t begin = 0; begin < order_.size() && !left.empty(); begin += kQuadColumns) {
    std::vector<TileRows> one(static_cast<size_t>(sets_)), two(static_cast<size_t>(sets_));
    for (size_t i = 0; i < together && !left.empty(); ++i) {
      auto best = left.begin();
      int fewest = -1;
      for (auto at = left.begin(); at != left.end() && fewest != 0; ++at) {
        int third = 0;
        for (int set = 0; set < sets_ && (fewest < 0 || third < fewest); ++set) {
          third += Count(At(at->second, set) & two[static_cast<size_t>(set)]);
        }
        if (fewest < 0 || third < fewest) best = at, fewest = third;
      }
      order_[begin + i] = best->second;
      for (int set = 0; set < sets_; ++set) {
        const auto s = static_cast<size_t>(set);
        two[s] |= one[s] & At(best->second, set);
        one[s] |= At(best->second, set);
      }
      left.erase(best);
    }
  }
}

// Rows with three entries or four in a quad.
int ChannelOrder::MoreOf(int quad, int set) const {
  const int* const of = &order_[static_cast<size_t>(quad * kQuadColumns)];
  const TileRows a = At(of[0], set), b = At(of[1], set), c = At(of[2], set), d = At(of[3], set);
  return Count((a & b & (c | d)) | (c & d & (a | b)));
}

void ChannelOrder::Improve(int max_passes, int64_t max_sets) {
  sets_left_ = max_sets;
  for (int pass = 0; pass < max_passes && ImprovePairs(); ++pass) {
  }
}

// Returns whether any exchange saved something, and there may be more. Nothing is saved where neither quad has a third
// entry.
bool ChannelOrder::ImprovePairs() {
  bool has_improved = false;
  for (size_t i = 0; i < order_.size(); ++i) {
    for (size_t j = 0; j < order_.size() && quad_more_[i / kQuadColumns] > 0; ++j) {
      if (i / kQuadColumns == j / kQuadColumns || order_[i] == order_[j]) continue;
      sets_left_ -= sets_;
      if (sets_left_ < 0) return false;
      has_improved = TryExchange(i, j) || has_improved;
    }
  }
  return has_improved;
}

bool ChannelOrder::TryExchange(size_t i, size_t j) {
  const int quads[2] = {static_cast<int>(i) / kQuadColumns, static_cast<int>(j) / kQuadColumns};
  const int steps[2] = {quads[0] / step_quads_, quads[1] / step_quads_};
  std::swap(order_[i], order_[j]);
  int saved = 0;
  for (int set = 0; set < sets_; ++set) {
    int* const by = &changes_[static_cast<size_t>(2 * set)];
    for (int k = 0; k < 2; ++k) by[k] = MoreOf(quads[k], set) - more_[Index(quads[k], set)];
    if (by[0] == 0 && by[1] == 0) continue;
    const int before = step_more_[Index(steps[0], set)], other = step_more_[Index(steps[1], set)];
    if (steps[0] == steps[1]) {
      saved += CostOf(before) - CostOf(before + by[0] + by[1]);
    } else {
      saved += CostOf(before) - CostOf(before + by[0]) + CostOf(other) - CostOf(other + by[1]);
    }
  }
  if (saved <= 0) {
    std::swap(order_[i], order_[j]);
    return false;
  }
  for (int k = 0; k < 2; ++k) {
    for (int set = 0; set < sets_; ++set) {
      const int by = changes_[static_cast<size_t>(2 * set + k)];
      more_[Index(quads[k], set)] += by;
      step_more_[Index(steps[k], set)] += by;
      quad_more_[static_cast<size_t>(quads[k])] += by;
    }
  }
  return true;
}

int64_t ChannelOrder::further_steps() const {
  return std::count_if(step_more_.begin(), step_more_.end(), [](int more) { return more > 0; });
}

}  // namespace sparseconv::cuda
