// The plans of one node for the inputs that it has lately seen.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace sparseconv {

// Bounded, least recently used first to go. A plan that is in use outlives its eviction.
template <typename Key, typename Plan, size_t kCapacity = 8>
class PlanCache {
 public:
  // The plan for `key`; `make()` makes a new one, outside the lock.
  template <typename Make>
  std::shared_ptr<const Plan> GetOrMake(const Key& key, Make make) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (auto plan = Find(key)) return plan;
    }
    auto plan = std::make_shared<const Plan>(make());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto made_meanwhile = Find(key)) return made_meanwhile;
    if (plans_.size() == kCapacity) plans_.erase(plans_.begin());
    plans_.emplace_back(key, plan);
    return plan;
  }

 private:
  // Needs the lock.
  std::shared_ptr<const Plan> Find(const Key& key) {
    const auto found =
        std::find_if(plans_.begin(), plans_.end(), [&](const auto& entry) { return entry.first == key; });
    if (found == plans_.end()) return nullptr;
    std::rotate(found, found + 1, plans_.end());
    return plans_.back().second;
  }

  std::mutex mutex_;
  std::vector<std::pair<Key, std::shared_ptr<const Plan>>> plans_;  // most recently used last
};

}  // namespace sparseconv
