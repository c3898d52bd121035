// The live kernels of the process, so that a tool can say which kernel ran each node.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernel.h"

namespace sparseconv {

struct KernelRecord {
  std::string node;
  std::string op;
  std::string provider;
  const Kernel* kernel = nullptr;  // alive as long as the record is registered
  std::atomic<uint64_t> runs{0};
};

class KernelRegistry {
 public:
  static KernelRegistry& Instance();

  void Add(const KernelRecord* record);
  void Remove(const KernelRecord* record);
  // A JSON array, in the order in which the kernels were created.
  std::string ToJson() const;

 private:
  mutable std::mutex mutex_;
  std::vector<const KernelRecord*> records_;
};

}  // namespace sparseconv
