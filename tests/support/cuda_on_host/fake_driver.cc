// A stand-in for libcuda.so.1: device memory is the host's, a stream runs its work at once, and what is loaded is code
// that was compiled for the host (see cuda_on_host_launch). It is stricter than a driver where that shows mistakes:
// work outside of a context, launches beyond the limits of a GPU, handles that no longer live.
//
// Tests set it up through the functions whose names begin with fake_cuda_.

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../../../onnx_sparseconv/kernels/cuda/params.h"
#include "tensor_map.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchFailed = 719,
};

using LaunchOnHost = int (*)(const char*, const unsigned*, const unsigned*, unsigned, void**);
using LaunchClustersOnHost = int (*)(const char*, const unsigned*, const unsigned*, unsigned, unsigned, void**);
using HasKernel = int (*)(const char*);
using GetErrorText = const char* (*)();

struct Context {
  int device;
};

struct Library;

struct Function {
  Library* library;
  const Context* context;
  std::string name;
  int max_dynamic_shared_bytes;
};

struct Kernel {
  Library* library;
  std::string name;
};

struct Library {
  void* handle = nullptr;
  int file = -1;  // open as long as the library: dlopen knows what it has loaded by its path
  LaunchOnHost launch = nullptr;
  LaunchClustersOnHost launch_clusters = nullptr;  // optional: to some code it is all the same
  HasKernel has_kernel = nullptr;
  GetErrorText error = nullptr;  // optional
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::vector<std::unique_ptr<Function>> functions;
};

struct Fault {
  int nth;  // 1 is the next call
  int code;
};

constexpr int kNumDevices = 2;
constexpr int kDefaultSharedBytes = 48 << 10;
constexpr int kStaticSharedBytes = 64;

struct State {
  std::mutex mutex;
  bool is_initialized = false;
  Context contexts[kNumDevices] = {{0}, {1}};
  int retained[kNumDevices] = {0, 0};
  std::set<void*> blocks;
  std::set<Library*> libraries;
  std::map<std::string, long> calls;
  std::map<std::string, Fault> faults;
  std::string launches;
  std::map<std::string, std::string> texts;  // PTX that was loaded last, by its first kernel
  sparseconv::cuda::GeneratedParams last_generated{};
  int pushed = 0;
  // What fake_cuda_set_device sets.
  int architecture = 90;
  int num_multiprocessors = 4;
  int max_shared_bytes = 227 << 10;
  int blocks_a_multiprocessor = 1;
  int stream_device = 0;
};

State& state() {
  static auto* const instance = new State;  // sessions may end after main
  return *instance;
}

thread_local std::vector<Context*> context_stack;
thread_local std::string launch_error;

Context* Current() { return context_stack.empty() ? nullptr : context_stack.back(); }

// Counts a call; the result that a test has asked for, or kSuccess.
int Enter(const char* function) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  ++s.calls[function];
  const auto fault = s.faults.find(function);
  if (fault == s.faults.end() || --fault->second.nth > 0) return kSuccess;
  const int code = fault->second.code;
  s.faults.erase(fault);
  return code;
}

int EnterContext(const char* function) {
  const int result = Enter(function);
  if (result != kSuccess) return result;
  return Current() == nullptr ? kInvalidContext : kSuccess;
}

// The driver is not told an image's size either.
size_t ElfBytes(const unsigned char* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof(header));
  return header.e_shoff + static_cast<size_t>(header.e_shnum) * header.e_shentsize;
}

void Close(Library* library) {
  if (library->handle != nullptr) dlclose(library->handle);
  if (library->file >= 0) close(library->file);
}

void OpenPath(const char* path, Library* library) {
  library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library->handle == nullptr) {
    std::fprintf(stderr, "fake CUDA driver: %s\n", dlerror());
    return;
  }
  library->launch = reinterpret_cast<LaunchOnHost>(dlsym(library->handle, "cuda_on_host_launch"));
  library->launch_clusters =
      reinterpret_cast<LaunchClustersOnHost>(dlsym(library->handle, "cuda_on_host_launch_clusters"));
  library->has_kernel = reinterpret_cast<HasKernel>(dlsym(library->handle, "cuda_on_host_has_kernel"));
  library->error = reinterpret_cast<GetErrorText>(dlsym(library->handle, "cuda_on_host_error"));
}

// What follows `begin` in PTX, as far as it is a word.
std::string WordBehind(const char* begin, const char* ptx) {
  const char* found = std::strstr(ptx, begin);
  if (found == nullptr) return "";
  found += std::strlen(begin);
  return std::string(found, std::strspn(found, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"));
}

// What was compiled for the host from the same source: that of the files which the test names, separated by colons,
// that has the kernels.
int OpenHostCode(const std::vector<std::string>& kernels, Library* library) {
  const char* paths = std::getenv("CUDA_ON_HOST_LIBRARY_KERNELS");
  std::istringstream split(paths == nullptr ? "" : paths);
  for (std::string path; std::getline(split, path, ':');) {
    Library candidate;
    OpenPath(path.c_str(), &candidate);
    const auto has = [&](const std::string& kernel) { return candidate.has_kernel(kernel.c_str()) != 0; };
    if (candidate.has_kernel != nullptr && std::all_of(kernels.begin(), kernels.end(), has)) {
      *library = std::move(candidate);
      return kSuccess;
    }
    Close(&candidate);
  }
  std::fprintf(stderr, "fake CUDA driver: no file of CUDA_ON_HOST_LIBRARY_KERNELS has %s\n", kernels[0].c_str());
  return kInvalidImage;
}

// Host code for that which has the text's first kernel.
int OpenPtx(const char* ptx, Library* library) {
  const std::string target = WordBehind(".target sm_", ptx), kernel = WordBehind(".entry ", ptx);
  if (kernel.empty() || target.back() == 'a') return kInvalidImage;
  if (std::atoi(target.c_str()) > state().architecture) return kNoBinaryForGpu;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().texts[kernel] = ptx;
  }
  return OpenHostCode({kernel}, library);
}

// Likewise, for that which has all kernels of GPU code.
int OpenCubin(const unsigned char* cubin, Library* library) {
  const std::string code = ".text.", kernel = code + "sparseconv_";
  Elf64_Ehdr header;
  std::memcpy(&header, cubin, sizeof(header));
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  std::memcpy(sections.data(), cubin + header.e_shoff, sections.size() * sizeof(Elf64_Shdr));
  const char* names = reinterpret_cast<const char*>(cubin + sections[header.e_shstrndx].sh_offset);
  std::vector<std::string> kernels;
  for (const Elf64_Shdr& section : sections) {
    const std::string name = names + section.sh_name;
    if (name.rfind(kernel, 0) == 0) kernels.push_back(name.substr(code.size()));
  }
  const int result = kernels.empty() ? kInvalidImage : OpenHostCode(kernels, library);
  if (result != kSuccess) return result;
  return static_cast<int>(header.e_flags & 0xFF) == state().architecture ? kSuccess : kNoBinaryForGpu;
}

bool IsCubin(const unsigned char* elf) {
  Elf64_Ehdr header;
  std::memcpy(&header, elf, sizeof(header));
  return header.e_machine == EM_CUDA;
}

// Loads the library's own code as kernels that the test names, and a test's image as what it is.
int Open(const unsigned char* code, Library* library) {
  constexpr unsigned char kFatBinary[] = {0x50, 0xED, 0x55, 0xBA};
  if (std::memcmp(code, kFatBinary, sizeof(kFatBinary)) == 0) return kInvalidImage;
  if (std::memcmp(code, ELFMAG, SELFMAG) != 0) return OpenPtx(reinterpret_cast<const char*>(code), library);
  if (IsCubin(code)) return OpenCubin(code, library);
  library->file = memfd_create("gpu_image", 0);
  const size_t size = ElfBytes(code);
  const std::string path = "/proc/self/fd/" + std::to_string(library->file);
  if (library->file >= 0 && write(library->file, code, size) == static_cast<ssize_t>(size)) {
    OpenPath(path.c_str(), library);
  }
  return library->launch == nullptr || library->has_kernel == nullptr ? kInvalidImage : kSuccess;
}

const char* ErrorName(int code) {
  switch (code) {
    case kInvalidValue:
      return "CUDA_ERROR_INVALID_VALUE";
    case kOutOfMemory:
      return "CUDA_ERROR_OUT_OF_MEMORY";
    case kNotInitialized:
      return "CUDA_ERROR_NOT_INITIALIZED";
    case 100:
      return "CUDA_ERROR_NO_DEVICE";
    case kInvalidDevice:
      return "CUDA_ERROR_INVALID_DEVICE";
    case kInvalidImage:
      return "CUDA_ERROR_INVALID_IMAGE";
    case kInvalidContext:
      return "CUDA_ERROR_INVALID_CONTEXT";
    case kNoBinaryForGpu:
      return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case kInvalidHandle:
      return "CUDA_ERROR_INVALID_HANDLE";
    case kNotFound:
      return "CUDA_ERROR_NOT_FOUND";
    case 700:
      return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case kLaunchFailed:
      return "CUDA_ERROR_LAUNCH_FAILED";
    default:
      return nullptr;
  }
}

// Memory of the GPU, or of the host for its use: here, they are the same.
int Allocate(const char* function, void** pointer, size_t bytes) {
  const int result = EnterContext(function);
  if (result != kSuccess) return result;
  if (bytes == 0) return kInvalidValue;
  void* block = nullptr;
  if (posix_memalign(&block, 256, bytes) != 0) return kOutOfMemory;
  std::memset(block, 0xFF, bytes);  // NaN, and columns that lead nowhere
  *pointer = block;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.blocks.insert(block);
  return kSuccess;
}

int Free(const char* function, void* block) {
  const int result = Enter(function);
  if (Current() == nullptr) return kInvalidContext;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.blocks.erase(block) == 0) return kInvalidValue;
  free(block);
  return result;
}

}  // namespace

// What tests call.

EXPORT void fake_cuda_set_device(int architecture, int num_multiprocessors, int max_shared_bytes,
                                 int blocks_a_multiprocessor) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.architecture = architecture;
  s.num_multiprocessors = num_multiprocessors;
  s.max_shared_bytes = max_shared_bytes;
  s.blocks_a_multiprocessor = blocks_a_multiprocessor;
}

// The PTX that was loaded last, of those that begin with a kernel; "" for none. Until the next load.
EXPORT const char* fake_cuda_text(const char* first_kernel) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.texts[first_kernel].c_str();
}

// To which device all streams belong.
EXPORT void fake_cuda_set_stream_device(int device) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.stream_device = device;
}

// The nth call from now on fails with `code`, once; what gives something back does so nevertheless, as it does where
// earlier work has failed. A null function withdraws all that was asked for.
EXPORT void fake_cuda_fail(const char* function, int nth, int code) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (function == nullptr) {
    s.faults.clear();
  } else {
    s.faults[function] = {nth, code};
  }
}

EXPORT long fake_cuda_calls(const char* function) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.calls.find(function);
  return found == s.calls.end() ? 0 : found->second;
}

// Calls of all functions.
EXPORT long fake_cuda_all_calls() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  long sum = 0;
  for (const auto& [name, count] : s.calls) sum += count;
  return sum;
}

// Memory, libraries, retained contexts and pushed contexts that have not been given back.
EXPORT long fake_cuda_live() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  long sum = static_cast<long>(s.blocks.size() + s.libraries.size()) + s.pushed;
  for (const int count : s.retained) sum += count;
  return sum;
}

// One line a launch since the last call: the kernel, its grid, threads and dynamic shared bytes. Cut off at `capacity`.
EXPORT void fake_cuda_take_launches(char* buffer, size_t capacity) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  std::snprintf(buffer, capacity, "%s", s.launches.c_str());
  s.launches.clear();
}

// The parameters of the last launch of a generated kernel.
EXPORT void fake_cuda_last_generated(sparseconv::cuda::GeneratedParams* params) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  *params = s.last_generated;
}

// What the library calls.

EXPORT int cuGetErrorName(int code, const char** name) {
  *name = ErrorName(code);
  return *name == nullptr ? kInvalidValue : kSuccess;
}

EXPORT int cuGetErrorString(int code, const char** text) {
  *text = nullptr;
  if (ErrorName(code) != nullptr) *text = code == kLaunchFailed ? launch_error.c_str() : "text of the error";
  return *text == nullptr ? kInvalidValue : kSuccess;
}

EXPORT int cuInit(unsigned) {
  const int result = Enter("cuInit");
  if (result != kSuccess) return result;
  state().is_initialized = true;
  return kSuccess;
}

EXPORT int cuDriverGetVersion(int* version) {
  const int result = Enter("cuDriverGetVersion");
  const char* asked = std::getenv("FAKE_CUDA_DRIVER_VERSION");
  *version = asked == nullptr ? 12080 : std::atoi(asked);
  return result;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  const int result = Enter("cuDeviceGet");
  if (result != kSuccess) return result;
  if (!state().is_initialized) return kNotInitialized;
  if (ordinal < 0 || ordinal >= kNumDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int result = Enter("cuDeviceGetAttribute");
  if (result != kSuccess) return result;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  switch (attribute) {
    case 16:
      *value = s.num_multiprocessors;
      return kSuccess;
    case 75:
      *value = s.architecture / 10;
      return kSuccess;
    case 76:
      *value = s.architecture % 10;
      return kSuccess;
    case 97:
      *value = s.max_shared_bytes;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

EXPORT int cuDevicePrimaryCtxRetain(Context** context, int device) {
  const int result = Enter("cuDevicePrimaryCtxRetain");
  if (result != kSuccess) return result;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  ++s.retained[device];
  *context = &s.contexts[device];
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  const int result = Enter("cuDevicePrimaryCtxRelease_v2");
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  --s.retained[device];
  return result;
}

EXPORT int cuCtxGetCurrent(Context** context) {
  const int result = Enter("cuCtxGetCurrent");
  if (result == kSuccess) *context = Current();
  return result;
}

EXPORT int cuCtxPushCurrent_v2(Context* context) {
  const int result = Enter("cuCtxPushCurrent_v2");
  if (result != kSuccess) return result;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  context_stack.push_back(context);
  ++s.pushed;
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(Context** context) {
  const int result = Enter("cuCtxPopCurrent_v2");
  if (Current() == nullptr) return kInvalidContext;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  *context = Current();
  context_stack.pop_back();
  --s.pushed;
  return result;
}

EXPORT int cuCtxGetDevice(int* device) {
  const int result = EnterContext("cuCtxGetDevice");
  if (result == kSuccess) *device = Current()->device;
  return result;
}

EXPORT int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  void* block = nullptr;
  const int result = Allocate("cuMemAlloc_v2", &block, bytes);
  if (result == kSuccess) *pointer = reinterpret_cast<unsigned long long>(block);
  return result;
}

EXPORT int cuMemFree_v2(unsigned long long pointer) { return Free("cuMemFree_v2", reinterpret_cast<void*>(pointer)); }

EXPORT int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) { return Allocate("cuMemHostAlloc", pointer, bytes); }

EXPORT int cuMemFreeHost(void* pointer) { return Free("cuMemFreeHost", pointer); }

EXPORT int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
  const int result = EnterContext("cuMemcpyHtoD_v2");
  if (result != kSuccess) return result;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}

EXPORT int cuStreamSynchronize(void*) { return EnterContext("cuStreamSynchronize"); }

EXPORT int cuStreamGetCtx(void* stream, Context** context) {
  const int result = Enter("cuStreamGetCtx");
  if (result != kSuccess) return result;
  if (stream == nullptr) return kInvalidHandle;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  *context = &s.contexts[s.stream_device];
  return kSuccess;
}

EXPORT int cuLibraryLoadData(Library** library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  int result = Enter("cuLibraryLoadData");
  if (result != kSuccess) return result;
  auto made = std::make_unique<Library>();
  result = Open(static_cast<const unsigned char*>(code), made.get());
  if (result != kSuccess) {
    Close(made.get());
    return result;
  }
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  *library = made.release();
  s.libraries.insert(*library);
  return kSuccess;
}

EXPORT int cuLibraryUnload(Library* library) {
  const int result = Enter("cuLibraryUnload");
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.libraries.erase(library) == 0) return kInvalidHandle;
  Close(library);
  delete library;
  return result;
}

EXPORT int cuLibraryGetKernel(Kernel** kernel, Library* library, const char* name) {
  const int result = Enter("cuLibraryGetKernel");
  if (result != kSuccess) return result;
  if (library->has_kernel(name) == 0) return kNotFound;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  library->kernels.push_back(std::make_unique<Kernel>(Kernel{library, name}));
  *kernel = library->kernels.back().get();
  return kSuccess;
}

EXPORT int cuKernelGetFunction(Function** function, Kernel* kernel) {
  const int result = EnterContext("cuKernelGetFunction");
  if (result != kSuccess) return result;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto& functions = kernel->library->functions;
  functions.push_back(
      std::make_unique<Function>(Function{kernel->library, Current(), kernel->name, kDefaultSharedBytes}));
  *function = functions.back().get();
  return kSuccess;
}

EXPORT int cuFuncLoad(Function*) { return EnterContext("cuFuncLoad"); }

EXPORT int cuFuncGetAttribute(int* value, int attribute, Function*) {
  const int result = EnterContext("cuFuncGetAttribute");
  if (result != kSuccess) return result;
  if (attribute != 1) return kInvalidValue;
  *value = kStaticSharedBytes;
  return kSuccess;
}

EXPORT int cuFuncSetAttribute(Function* function, int attribute, int value) {
  const int result = EnterContext("cuFuncSetAttribute");
  if (result != kSuccess) return result;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (attribute != 8 || value + kStaticSharedBytes > s.max_shared_bytes) return kInvalidValue;
  function->max_dynamic_shared_bytes = std::max(value, kDefaultSharedBytes);
  return kSuccess;
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int, size_t) {
  const int result = EnterContext("cuOccupancyMaxActiveBlocksPerMultiprocessor");
  if (result == kSuccess) *blocks = state().blocks_a_multiprocessor;
  return result;
}

// As in the driver's own interface.
struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

constexpr int kClusterDimension = 4, kBeginsEarly = 6;
constexpr unsigned kMaxCluster = 8;

// What a launch asks for besides its grid.
struct Attributes {
  const unsigned* cluster = nullptr;
  const unsigned* begins_early = nullptr;
};

// Returns whether they are such as the library may ask for, each once at most: clusters along x that the grid consists
// of, and to begin early.
static bool ReadAttributes(const LaunchConfig& config, Attributes* read) {
  if (config.num_attributes != 0 && config.attributes == nullptr) return false;
  for (unsigned i = 0; i < config.num_attributes; ++i) {
    const LaunchAttribute& attribute = config.attributes[i];
    if (attribute.id != kClusterDimension && attribute.id != kBeginsEarly) return false;
    const unsigned*& value = attribute.id == kClusterDimension ? read->cluster : read->begins_early;
    if (value != nullptr) return false;
    value = attribute.value;
  }
  const unsigned* cluster = read->cluster;
  if (read->begins_early != nullptr && *read->begins_early > 1) return false;
  return cluster == nullptr || (cluster[0] > 0 && cluster[0] <= kMaxCluster && cluster[1] == 1 && cluster[2] == 1 &&
                                config.grid[0] % cluster[0] == 0);
}

EXPORT int cuOccupancyMaxActiveClusters(int* clusters, Function*, const LaunchConfig* config) {
  const int result = EnterContext("cuOccupancyMaxActiveClusters");
  if (result != kSuccess) return result;
  Attributes attributes;
  if (!ReadAttributes(*config, &attributes) || attributes.cluster == nullptr) return kInvalidValue;
  const State& s = state();
  *clusters = s.num_multiprocessors * s.blocks_a_multiprocessor / static_cast<int>(attributes.cluster[0]);
  return kSuccess;
}

static int LaunchNow(Function* function, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned cluster,
                     unsigned shared_bytes, void* stream, void** params, void** extra) {
  const bool is_empty = std::any_of(grid, grid + 3, [](unsigned size) { return size == 0; }) ||
                        std::any_of(block, block + 3, [](unsigned size) { return size == 0; });
  if (is_empty || grid[0] > 0x7FFFFFFFu || grid[1] > 65535 || grid[2] > 65535 ||
      block[0] * block[1] * block[2] > 1024 ||
      shared_bytes > static_cast<unsigned>(function->max_dynamic_shared_bytes) || extra != nullptr) {
    return kInvalidValue;
  }
  if (function->context != Current() || stream == nullptr) return kInvalidHandle;
  {
    State& s = state();
    const std::lock_guard<std::mutex> lock(s.mutex);
    char line[256];
    std::snprintf(line, sizeof(line), "%s %ux%ux%u %u %u\n", function->name.c_str(), grid[0], grid[1], grid[2],
                  block[0], shared_bytes);
    s.launches += line;
    if (function->name == "sparseconv_generated") {
      s.last_generated = *static_cast<const sparseconv::cuda::GeneratedParams*>(params[0]);
    }
  }
  const Library& library = *function->library;
  const char* name = function->name.c_str();
  switch (library.launch_clusters != nullptr ? library.launch_clusters(name, grid, block, cluster, shared_bytes, params)
                                             : library.launch(name, grid, block, shared_bytes, params)) {
    case 0:
      return kSuccess;
    case 1:
      return kNotFound;
    default:
      launch_error = library.error == nullptr ? "no text" : library.error();
      return kLaunchFailed;
  }
}

EXPORT int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** params,
                          void** extra) {
  const int result = EnterContext("cuLaunchKernel");
  if (result != kSuccess) return result;
  return LaunchNow(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, 1, shared_bytes, stream, params,
                   extra);
}

// Of what the library asks for alone: boxes of three axes, of halves, which may be swizzled by 128 bytes, or floats.
EXPORT int cuTensorMapEncodeTiled(void* map, int element_type, unsigned num_axes, void* address,
                                  const unsigned long long* sizes, const unsigned long long* strides,
                                  const unsigned* box, const unsigned* element_strides, int interleave, int swizzle,
                                  int promotion, int fill) {
  using cuda_on_host::kTensorAxes;
  const int result = EnterContext("cuTensorMapEncodeTiled");
  if (result != kSuccess) return result;
  constexpr int kHalves = 6, kFloats = 7, kNotSwizzled = 0, kSwizzle128 = 3, kMaxPromotion = 3;
  const auto is_aligned = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  const bool is_half = element_type == kHalves;
  const unsigned row_bytes = (is_half ? 2 : 4) * box[0];
  bool is_valid = is_aligned(map, 64) && is_aligned(address, 16) && (is_half || element_type == kFloats) &&
                  num_axes == kTensorAxes && interleave == 0 &&
                  (swizzle == kNotSwizzled || (is_half && swizzle == kSwizzle128)) && promotion >= 0 &&
                  promotion <= kMaxPromotion && fill == 0 &&
                  (swizzle == kSwizzle128 ? row_bytes == 128 : row_bytes % 16 == 0);
  for (int i = 0; is_valid && i < kTensorAxes; ++i) {
    is_valid = sizes[i] > 0 && sizes[i] <= 1ull << 32 && box[i] > 0 && box[i] <= 256 && element_strides[i] == 1;
  }
  for (int i = 0; is_valid && i + 1 < kTensorAxes; ++i) {
    is_valid = strides[i] % 16 == 0 && strides[i] < 1ull << 40 && (i == 0 || strides[i] % strides[i - 1] == 0);
  }
  if (!is_valid) return kInvalidValue;
  cuda_on_host::TensorMap tensor = {cuda_on_host::kTensorMapMark,
                                    is_half ? 2u : 4u,
                                    swizzle == kSwizzle128,
                                    {},
                                    static_cast<unsigned char*>(address),
                                    {},
                                    {}};
  std::copy(box, box + kTensorAxes, tensor.box);
  std::copy(sizes, sizes + kTensorAxes, tensor.sizes);
  std::copy(strides, strides + kTensorAxes - 1, tensor.strides);
  std::memcpy(map, &tensor, sizeof(tensor));
  return kSuccess;
}

// Launches run one after the other, so it is all the same to them whether they begin early.
EXPORT int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params, void** extra) {
  const int result = EnterContext("cuLaunchKernelEx");
  if (result != kSuccess) return result;
  Attributes attributes;
  if (!ReadAttributes(*config, &attributes)) return kInvalidValue;
  if (config->num_attributes != 0 && state().architecture < 90) return kInvalidValue;
  const unsigned cluster = attributes.cluster == nullptr ? 1 : attributes.cluster[0];
  return LaunchNow(function, config->grid, config->block, cluster, config->shared_bytes, config->stream, params, extra);
}
