// The three functions that the library exports.

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/isa.h"
#include "cuda/provider.h"
#include "cuda/settings.h"
#include "kernel_registry.h"
#include "op.h"
#include "ort.h"
#include "parse_number.h"

#if defined(_WIN32)
#define SPARSECONV_EXPORT extern "C" __declspec(dllexport)
#else
#define SPARSECONV_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace sparseconv {
namespace {

constexpr const char* kIsaConfigKey = "sparseconv.cpu_isa";
constexpr const char* kThreadsConfigKey = "sparseconv.cpu_threads";
constexpr int64_t kMaxThreads = 65536;

// What session config entries ask for; it is the same for all ops of a session.
struct Settings {
  CpuIsa cpu_isa = CpuIsa::kAuto;
  int64_t cpu_threads = 0;
  cuda::Settings cuda;
};

std::optional<std::string> ReadEntry(const ort::OrtApi* api, const ort::OrtSessionOptions* options, const char* key) {
  int has_entry = 0;
  ort::Check(api, ort::HasSessionConfigEntry::Call(api, options, key, &has_entry));
  if (!has_entry) return std::nullopt;
  size_t size = 0;
  ort::Succeeded(api, ort::GetSessionConfigEntry::Call(api, options, key, nullptr, &size));
  std::string value(size + 1, '\0');
  size = value.size();
  ort::Check(api, ort::GetSessionConfigEntry::Call(api, options, key, value.data(), &size));
  return value.c_str();
}

// How many threads a session has, its operators are not told otherwise. It decides into how many tasks they cut a call.
int64_t ParseThreads(const std::string& text) {
  if (const auto threads = ParseNumber(text, 0, kMaxThreads)) return *threads;
  Fail("session config entry '", kThreadsConfigKey, "' must be a number from 0 to ", kMaxThreads,
       " (0: as many as there are processors), found '", text, "'");
}

Settings ReadSettings(const ort::OrtApi* api, const ort::OrtSessionOptions* options) {
  Settings settings;
  if (const auto isa = ReadEntry(api, options, kIsaConfigKey)) settings.cpu_isa = cpu::ParseIsa(*isa);
  if (const auto threads = ReadEntry(api, options, kThreadsConfigKey)) settings.cpu_threads = ParseThreads(*threads);
  settings.cuda = cuda::ParseSettings([&](const char* key) { return ReadEntry(api, options, key); });
  return settings;
}

// Up to 1.23, ONNX Runtime reads through a null pointer when it prepares the shape inference of a custom op one of
// whose optional inputs is absent, as B may be.
bool CanInferShapes(const ort::OrtApiBase* base) {
  int major = 0, minor = 0;
  if (std::sscanf(base->get_version_string(), "%d.%d", &major, &minor) != 2) return false;
  return major > 1 || minor >= 24;
}

// All kinds of ops, with the inputs that they concatenate.
std::vector<std::pair<OpKind, size_t>> AllKinds() {
  std::vector<std::pair<OpKind, size_t>> kinds{{OpKind::kConv, 0}, {OpKind::kConvAdd, 0}, {OpKind::kConvMaxPool, 0}};
  for (size_t count = kMinConcatInputs; count <= kMaxConcatInputs; ++count)
    kinds.emplace_back(OpKind::kConvConcat, count);
  return kinds;
}

// The custom-op domain for one ONNX Runtime and one choice of settings. Sessions refer to it until they end, and
// nothing says when the last one has, so it is made once and never released.
ort::OrtCustomOpDomain* GetDomain(const ort::OrtApi* api, bool infer_shapes, bool has_cuda, const Settings& settings) {
  static std::mutex mutex;
  using Key = std::tuple<const ort::OrtApi*, CpuIsa, int64_t, cuda::Settings>;
  static auto* const domains = new std::map<Key, ort::OrtCustomOpDomain*>;
  const std::lock_guard<std::mutex> lock(mutex);
  ort::OrtCustomOpDomain*& domain = (*domains)[{api, settings.cpu_isa, settings.cpu_threads, settings.cuda}];
  if (domain != nullptr) return domain;

  ort::OrtCustomOpDomain* made = nullptr;
  ort::Check(api, ort::CreateCustomOpDomain::Call(api, kDomain, &made));
  for (const Provider provider : {Provider::kCpu, Provider::kCuda}) {
    if (provider == Provider::kCpu ? cuda::kIsEmulated : !has_cuda) continue;
    for (const auto& [kind, num_sources] : AllKinds()) {
      for (const int element_type : {ort::kFloat, ort::kFloat16}) {
        const OpDescription description{
            kind, num_sources, element_type, provider, settings.cpu_isa, settings.cpu_threads, settings.cuda};
        auto op = std::make_unique<Op>(api, description, infer_shapes);
        ort::Check(api, ort::CustomOpDomainAdd::Call(api, made, op.get()));
        op.release();
      }
    }
  }
  return domain = made;
}

}  // namespace
}  // namespace sparseconv

// Called by SessionOptions::RegisterCustomOpsLibrary.
SPARSECONV_EXPORT sparseconv::ort::OrtStatus* RegisterCustomOps(sparseconv::ort::OrtSessionOptions* options,
                                                                const sparseconv::ort::OrtApiBase* base) {
  using namespace sparseconv;
  const ort::OrtApi* api = base->get_api(ort::kApiVersion);
  if (api == nullptr) {
    // The function that makes a status has had its slot since the first version.
    const char* message = "onnx-sparseconv needs a newer ONNX Runtime (tested from 1.20 on); upgrade onnxruntime";
    return ort::CreateStatus::Call(base->get_api(1), ort::kFail, message);
  }
  return ort::ReturnStatus(api, ort::kInvalidArgument, [&] {
    const bool has_cuda = base->get_api(ort::kCudaApiVersion) != nullptr;
    auto* const domain = GetDomain(api, CanInferShapes(base), has_cuda, ReadSettings(api, options));
    ort::Check(api, ort::AddCustomOpDomain::Call(api, options, domain));
  });
}

SPARSECONV_EXPORT const char* SparseConvVersion() { return SPARSECONV_VERSION; }

// Writes a JSON array of the process's live kernels to `buffer`, cut off at `capacity`, and returns the bytes that the
// whole text needs, its NUL included; 0 when memory ran out.
SPARSECONV_EXPORT size_t SparseConvDescribeKernels(char* buffer, size_t capacity) {
  try {
    const std::string json = sparseconv::KernelRegistry::Instance().ToJson();
    if (buffer != nullptr && capacity > 0) {
      const size_t length = json.size() < capacity ? json.size() : capacity - 1;
      std::memcpy(buffer, json.data(), length);
      buffer[length] = '\0';
    }
    return json.size() + 1;
  } catch (...) {
    return 0;
  }
}
