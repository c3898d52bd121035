#include "settings.h"

#include <array>
#include <utility>

#include "../error.h"
#include "../parse_number.h"

namespace sparseconv::cuda {
namespace {

constexpr int kMaxParts = 4096;

template <typename Value, size_t kCount>
using Names = std::array<std::pair<const char*, Value>, kCount>;

template <typename Value, size_t kCount>
Value Choose(const char* key, const std::string& text, const Names<Value, kCount>& names) {
  std::string all;
  for (const auto& [name, value] : names) {
    if (text == name) return value;
    all += Concat(all.empty() ? "" : ", ", name);
  }
  Fail("session config entry '", key, "' must be one of ", all, ", found '", text, "'");
}

int ParseParts(const char* key, const std::string& text) {
  if (text == "auto") return 0;
  if (const auto value = ParseNumber(text, 1, kMaxParts)) return static_cast<int>(*value);
  Fail("session config entry '", key, "' must be auto or a number from 1 to ", kMaxParts, ", found '", text, "'");
}

}  // namespace

Settings ParseSettings(const std::function<std::optional<std::string>(const char* key)>& read) {
  Settings settings;
  if (const char* key = "sparseconv.cuda_kernel"; const auto text = read(key)) {
    settings.kernel = Choose(key, *text,
                             Names<KernelChoice, 10>{{{"auto", KernelChoice::kAuto},
                                                      {"csr", KernelChoice::kCsr},
                                                      {"depthwise", KernelChoice::kDepthwise},
                                                      {"tensor", KernelChoice::kTensor},
                                                      {"segments", KernelChoice::kSegments},
                                                      {"wgmma", KernelChoice::kWgmma},
                                                      {"flat", KernelChoice::kFlat},
                                                      {"gemm", KernelChoice::kGemm},
                                                      {"cluster", KernelChoice::kCluster},
                                                      {"generated", KernelChoice::kGenerated}}});
  }
  if (const char* key = "sparseconv.cuda_sub_batch"; const auto text = read(key)) {
    settings.sub_batch = Choose(key, *text, Names<int, 5>{{{"auto", 0}, {"1", 1}, {"2", 2}, {"4", 4}, {"8", 8}}});
  }
  if (const char* key = "sparseconv.cuda_passes"; const auto text = read(key)) {
    settings.passes = ParseParts(key, *text);
  }
  if (const char* key = "sparseconv.cuda_splits"; const auto text = read(key)) {
    settings.splits = ParseParts(key, *text);
  }
  if (const char* key = "sparseconv.cuda_staging"; const auto text = read(key)) {
    settings.staging = Choose(key, *text,
                              Names<std::optional<Staging>, 4>{{{"auto", std::nullopt},
                                                                {"bulk", kBulkStaging},
                                                                {"vector", kVectorStaging},
                                                                {"element", kElementStaging}}});
  }
  if (settings.passes > 1 && settings.splits > 1) {
    Fail("session config entries 'sparseconv.cuda_passes' and 'sparseconv.cuda_splits' cannot both be above 1, found ",
         settings.passes, " and ", settings.splits);
  }
  return settings;
}

}  // namespace sparseconv::cuda
