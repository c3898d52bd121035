#include "driver.h"

#include <algorithm>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#ifndef SPARSECONV_LIBCUDA
#if defined(_WIN32)
#define SPARSECONV_LIBCUDA "nvcuda.dll"
#else
#define SPARSECONV_LIBCUDA "libcuda.so.1"
#endif
#endif

namespace sparseconv::cuda {
namespace {

// The first whose PTX compiler takes the kernels that the library carries.
constexpr int kMinDriverVersion = 12010;
constexpr const char* kNoDriverAdvice = "; install the NVIDIA driver, or run the model on the CPUExecutionProvider";

// The driver stays open until the process ends, as the memory and code in it may.
class OpenLibrary {
 public:
  OpenLibrary() {
#if defined(_WIN32)
    handle_ = LoadLibraryA(SPARSECONV_LIBCUDA);
    if (handle_ == nullptr) Fail("could not open the CUDA driver ", SPARSECONV_LIBCUDA, kNoDriverAdvice);
#else
    handle_ = dlopen(SPARSECONV_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
      const char* reason = dlerror();
      Fail("could not open the CUDA driver (", reason == nullptr ? SPARSECONV_LIBCUDA : reason, ")", kNoDriverAdvice);
    }
#endif
  }

  void* Find(const char* name) const {
#if defined(_WIN32)
    return reinterpret_cast<void*>(GetProcAddress(handle_, name));
#else
    return dlsym(handle_, name);
#endif
  }

 private:
#if defined(_WIN32)
  HMODULE handle_ = nullptr;
#else
  void* handle_ = nullptr;
#endif
};

// Those that `Check` itself calls.
struct ErrorTexts {
  Result (*name)(Result, const char**) = nullptr;
  Result (*description)(Result, const char**) = nullptr;
};
ErrorTexts error_texts;

template <typename Signature>
void Resolve(const OpenLibrary& library, EntryPoint<Signature>* entry) {
  void* symbol = library.Find(entry->name());
  if (symbol == nullptr) Fail("the CUDA driver has no function ", entry->name(), "; install a newer NVIDIA driver");
  entry->Resolve(symbol);
}

template <typename... EntryPoints>
void ResolveAll(const OpenLibrary& library, EntryPoints*... entries) {
  (Resolve(library, entries), ...);
}

Driver OpenDriver() {
  const OpenLibrary library;
  using GetText = Result (*)(Result, const char**);
  error_texts.name = reinterpret_cast<GetText>(library.Find("cuGetErrorName"));
  error_texts.description = reinterpret_cast<GetText>(library.Find("cuGetErrorString"));
  Driver driver;
  ResolveAll(library, &driver.init, &driver.driver_version);
  driver.init(0);
  driver.driver_version(&driver.version);
  if (driver.version < kMinDriverVersion) {
    Fail("the NVIDIA driver supports CUDA up to ", driver.version / 1000, ".", driver.version % 1000 / 10,
         ", 12.1 is needed; install a newer driver");
  }
  ResolveAll(library, &driver.device_get, &driver.device_attribute, &driver.primary_context_retain,
             &driver.primary_context_release, &driver.context_current, &driver.context_push, &driver.context_pop,
             &driver.context_device, &driver.memory_allocate, &driver.memory_free, &driver.host_allocate,
             &driver.host_free, &driver.copy_to_device, &driver.stream_synchronize, &driver.stream_context,
             &driver.library_load, &driver.library_unload, &driver.library_kernel, &driver.kernel_function,
             &driver.function_attribute, &driver.set_function_attribute, &driver.resident_blocks,
             &driver.active_clusters, &driver.encode_tensor_map, &driver.launch_config, &driver.launch);
  driver.function_load.Resolve(library.Find(driver.function_load.name()));
  return driver;
}

const char* Advice(Result result) {
  switch (result) {
    case kOutOfMemory:
      return "the GPU's memory is full: free some of it, or run smaller inputs";
    case 100:  // CUDA_ERROR_NO_DEVICE
    case 101:  // CUDA_ERROR_INVALID_DEVICE
      return "no such GPU: compare nvidia-smi, CUDA_VISIBLE_DEVICES and the provider's device_id";
    case kInvalidImage:
    case kNoBinaryForGpu:
    case 218:  // CUDA_ERROR_INVALID_PTX
    case 222:  // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
      return "install a newer NVIDIA driver, or convert the model again for this GPU";
    case 900:  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    case 901:  // CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
      return "run the model with inputs of this shape before its CUDA graph is captured";
    default:
      // From 700 on, errors of earlier work on the GPU, after which its context is of no use.
      return result >= 700 && result < 800
                 ? "earlier work on the GPU has failed: start the process again, under compute-sanitizer to find it"
                 : "'sparseconv doctor' shows the driver and the GPU";
  }
}

}  // namespace

void Check(Result result, const char* function) {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* description = nullptr;
  if (error_texts.name != nullptr) error_texts.name(result, &name);
  if (error_texts.description != nullptr) error_texts.description(result, &description);
  throw DriverError(
      result, Concat("the CUDA driver's ", function, " failed with ", name == nullptr ? "an unknown error" : name, " (",
                     result, description == nullptr ? "" : Concat(", ", description), "); ", Advice(result)));
}

const Driver& GetDriver() {
  static const Driver driver = OpenDriver();
  return driver;
}

Context::Context(int device_ordinal) {
  const Driver& driver = GetDriver();
  driver.device_get(&device_, device_ordinal);
  driver.context_current(&handle_);
  Device current = 0;
  if (handle_ != nullptr) driver.context_device(&current);
  if (handle_ == nullptr || current != device_) {
    driver.primary_context_retain(&handle_, device_);
    is_retained_ = true;
  }
}

Context::~Context() {
  if (is_retained_) GetDriver().primary_context_release.Try(device_);
}

namespace {

// Calls free(driver) while the context is current. The driver may be gone where a session outlives main.
template <typename Free>
void InContext(const Context& context, const Free& free) {
  const Driver& driver = GetDriver();
  if (!driver.context_push.Try(context.handle())) return;
  free(driver);
  ContextHandle popped = nullptr;
  driver.context_pop.Try(&popped);
}

}  // namespace

Memory::Memory(const Context& context, size_t bytes) : context_(context) {
  GetDriver().memory_allocate(&pointer_, bytes);
}

Memory::~Memory() {
  InContext(context_, [&](const Driver& driver) { driver.memory_free.Try(pointer_); });
}

void Memory::Upload(size_t offset, const void* from, size_t bytes) const {
  if (bytes > 0) GetDriver().copy_to_device(pointer_ + offset, from, bytes);
}

HostFlag::HostFlag(const Context& context) : context_(context) {
  constexpr unsigned kForAllContexts = 1, kMapped = 2;
  void* word = nullptr;
  GetDriver().host_allocate(&word, sizeof(*word_), kForAllContexts | kMapped);
  word_ = static_cast<unsigned*>(word);
  *word_ = 0;
}

HostFlag::~HostFlag() {
  InContext(context_, [&](const Driver& driver) { driver.host_free.Try(word_); });
}

void SynchronizeUploads() { GetDriver().stream_synchronize(nullptr); }

namespace {

LaunchConfig ConfigOf(const LaunchShape& shape, const std::vector<LaunchAttribute>& attributes, StreamHandle stream) {
  LaunchConfig config;
  std::copy(shape.grid, shape.grid + 3, config.grid);
  config.block[0] = shape.threads;
  config.dynamic_shared_bytes = shape.dynamic_shared_bytes;
  config.stream = stream;
  config.attributes = attributes.data();
  config.num_attributes = static_cast<unsigned>(attributes.size());
  return config;
}

LaunchAttribute ClusterOf(const LaunchShape& shape) { return {kClusterDimension, 0, {shape.cluster, 1, 1}}; }

}  // namespace

int ActiveClusters(FunctionHandle function, const LaunchShape& shape) {
  const std::vector<LaunchAttribute> cluster{ClusterOf(shape)};
  const LaunchConfig config = ConfigOf(shape, cluster, nullptr);
  int count = 0;
  GetDriver().active_clusters(&count, function, &config);
  return count;
}

std::vector<LaunchAttribute> AttributesOf(const LaunchShape& shape) {
  // Older drivers cannot capture such launches in a CUDA graph.
  constexpr int kEarlyDriver = 12030;
  std::vector<LaunchAttribute> attributes;
  if (shape.cluster > 1) attributes.push_back(ClusterOf(shape));
  if (shape.begins_early && GetDriver().version >= kEarlyDriver) attributes.push_back({kBeginsEarly, 0, {1}});
  return attributes;
}

void LaunchWithAttributes(FunctionHandle function, const LaunchShape& shape,
                          const std::vector<LaunchAttribute>& attributes, void** arguments, StreamHandle stream) {
  const LaunchConfig config = ConfigOf(shape, attributes, stream);
  GetDriver().launch_config(&config, function, arguments, nullptr);
}

Library::Library(const void* code) {
  GetDriver().library_load(&handle_, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
}

Library::~Library() { GetDriver().library_unload.Try(handle_); }

FunctionHandle Library::Function(const char* name) const {
  const Driver& driver = GetDriver();
  KernelHandle kernel = nullptr;
  driver.library_kernel(&kernel, handle_, name);
  FunctionHandle function = nullptr;
  driver.kernel_function(&function, kernel);
  // Else the first launch would load it, and that may wait for all work of the context.
  if (driver.function_load) driver.function_load(function);
  return function;
}

}  // namespace sparseconv::cuda
