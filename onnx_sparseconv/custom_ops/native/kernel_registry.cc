#include "kernel_registry.h"

#include <algorithm>
#include <cstdio>

namespace sparseconv {
namespace {

std::string Quote(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      quoted += escape;
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace

KernelRegistry& KernelRegistry::Instance() {
  // Never destroyed: a session may outlive the static objects of this library.
  static KernelRegistry* const instance = new KernelRegistry;
  return *instance;
}

void KernelRegistry::Add(const KernelRecord* record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.push_back(record);
}

void KernelRegistry::Remove(const KernelRecord* record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.erase(std::remove(records_.begin(), records_.end(), record), records_.end());
}

std::string KernelRegistry::ToJson() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string json = "[";
  for (const KernelRecord* record : records_) {
    if (json.size() > 1) json += ", ";
    json += "{\"node\": " + Quote(record->node) + ", \"op\": " + Quote(record->op) +
            ", \"provider\": " + Quote(record->provider) + ", \"kernel\": " + Quote(record->kernel->name()) +
            ", \"runs\": " + std::to_string(record->runs.load(std::memory_order_relaxed)) + "}";
  }
  return json + "]";
}

}  // namespace sparseconv
