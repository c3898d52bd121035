// The plans of one node for the input sizes that it has lately seen.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "plan.h"

namespace sparseconv::cpu {

// Bounded, least recently used first to go. A plan that is in use outlives its eviction.
class PlanCache {
 public:
  // The plan for `key`; `make()` makes a new one, outside the lock.
  template <typename Make>
  std::shared_ptr<const Plan> GetOrMake(const PlanKey& key, Make make) {
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
  static constexpr size_t kCapacity = 8;

  // Needs the lock.
  std::shared_ptr<const Plan> Find(const PlanKey& key) {
    const auto found =
        std::find_if(plans_.begin(), plans_.end(), [&](const auto& entry) { return entry.first == key; });
    if (found == plans_.end()) return nullptr;
    std::rotate(found, found + 1, plans_.end());
    return plans_.back().second;
  }

  std::mutex mutex_;
  std::vector<std::pair<PlanKey, std::shared_ptr<const Plan>>> plans_;  // most recently used last
};

}  // namespace sparseconv::cpu
