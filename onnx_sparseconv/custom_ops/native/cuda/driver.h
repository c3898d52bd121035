// The part of the CUDA driver API that the kernels need, opened at run time: the library loads on machines without
// CUDA, and builds without CUDA's headers.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "../error.h"

namespace sparseconv::cuda {

// Names and values as in the driver's own interface.
using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using ContextHandle = struct CUctx_st*;
using LibraryHandle = struct CUlib_st*;
using KernelHandle = struct CUkern_st*;
using FunctionHandle = struct CUfunc_st*;
using StreamHandle = struct CUstream_st*;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kInvalidImage = 200;
constexpr Result kNoBinaryForGpu = 209;

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum FunctionAttribute : int {
  kStaticSharedBytes = 1,
  kMaxDynamicSharedBytes = 8,
};

enum LaunchAttributeId : int {
  kClusterDimension = 4,
  kBeginsEarly = 6,  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
};

struct LaunchAttribute {
  int id = 0;
  int padding = 0;
  unsigned value[16] = {};
};

struct LaunchConfig {
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned dynamic_shared_bytes = 0;
  StreamHandle stream = nullptr;
  const LaunchAttribute* attributes = nullptr;
  unsigned num_attributes = 0;
};

// What `Check` throws.
class DriverError : public Error {
 public:
  DriverError(Result result, const std::string& message) : Error(message), result_(result) {}
  Result result() const { return result_; }

 private:
  Result result_;
};

// Throws `DriverError` with the driver's name of the error, the function and what to do, unless `result` is kSuccess.
void Check(Result result, const char* function);

template <typename Signature>
class EntryPoint;

// One function of the driver. A call throws where the driver reports an error.
template <typename... Args>
class EntryPoint<Result(Args...)> {
 public:
  using Pointer = Result (*)(Args...);

  explicit EntryPoint(const char* name) : name_(name) {}

  void operator()(Args... args) const { Check(pointer_(args...), name_); }
  // For destructors, where nothing can be done about an error.
  bool Try(Args... args) const noexcept { return pointer_(args...) == kSuccess; }

  const char* name() const { return name_; }
  explicit operator bool() const { return pointer_ != nullptr; }
  void Resolve(void* symbol) { pointer_ = reinterpret_cast<Pointer>(symbol); }

 private:
  const char* name_;
  Pointer pointer_ = nullptr;
};

struct Driver {
  EntryPoint<Result(unsigned flags)> init{"cuInit"};
  EntryPoint<Result(int*)> driver_version{"cuDriverGetVersion"};
  EntryPoint<Result(Device*, int ordinal)> device_get{"cuDeviceGet"};
  EntryPoint<Result(int*, int attribute, Device)> device_attribute{"cuDeviceGetAttribute"};
  EntryPoint<Result(ContextHandle*, Device)> primary_context_retain{"cuDevicePrimaryCtxRetain"};
  EntryPoint<Result(Device)> primary_context_release{"cuDevicePrimaryCtxRelease_v2"};
  EntryPoint<Result(ContextHandle*)> context_current{"cuCtxGetCurrent"};
  EntryPoint<Result(ContextHandle)> context_push{"cuCtxPushCurrent_v2"};
  EntryPoint<Result(ContextHandle*)> context_pop{"cuCtxPopCurrent_v2"};
  EntryPoint<Result(Device*)> context_device{"cuCtxGetDevice"};
  EntryPoint<Result(DevicePointer*, size_t)> memory_allocate{"cuMemAlloc_v2"};
  EntryPoint<Result(DevicePointer)> memory_free{"cuMemFree_v2"};
  EntryPoint<Result(void**, size_t, unsigned flags)> host_allocate{"cuMemHostAlloc"};
  EntryPoint<Result(void*)> host_free{"cuMemFreeHost"};
  EntryPoint<Result(DevicePointer, const void*, size_t)> copy_to_device{"cuMemcpyHtoD_v2"};
  EntryPoint<Result(StreamHandle)> stream_synchronize{"cuStreamSynchronize"};
  EntryPoint<Result(StreamHandle, ContextHandle*)> stream_context{"cuStreamGetCtx"};
  EntryPoint<Result(LibraryHandle*, const void* code, int* jit_options, void** jit_values, unsigned num_jit_options,
                    int* options, void** values, unsigned num_options)>
      library_load{"cuLibraryLoadData"};
  EntryPoint<Result(LibraryHandle)> library_unload{"cuLibraryUnload"};
  EntryPoint<Result(KernelHandle*, LibraryHandle, const char* name)> library_kernel{"cuLibraryGetKernel"};
  EntryPoint<Result(FunctionHandle*, KernelHandle)> kernel_function{"cuKernelGetFunction"};
  // Since CUDA 12.4. Older drivers load a function when it is first launched.
  EntryPoint<Result(FunctionHandle)> function_load{"cuFuncLoad"};
  EntryPoint<Result(int*, int attribute, FunctionHandle)> function_attribute{"cuFuncGetAttribute"};
  EntryPoint<Result(FunctionHandle, int attribute, int value)> set_function_attribute{"cuFuncSetAttribute"};
  EntryPoint<Result(int*, FunctionHandle, int block_size, size_t dynamic_shared_bytes)> resident_blocks{
      "cuOccupancyMaxActiveBlocksPerMultiprocessor"};
  EntryPoint<Result(int*, FunctionHandle, const LaunchConfig*)> active_clusters{"cuOccupancyMaxActiveClusters"};
  // The map of a tensor, of 128 bytes that begin at a multiple of 64; sizes, and all strides but the first, in bytes.
  EntryPoint<Result(void* map, int element_type, unsigned num_axes, void* address, const unsigned long long* sizes,
                    const unsigned long long* strides, const unsigned* box, const unsigned* element_strides,
                    int interleave, int swizzle, int promotion, int fill)>
      encode_tensor_map{"cuTensorMapEncodeTiled"};
  EntryPoint<Result(const LaunchConfig*, FunctionHandle, void** params, void** extra)> launch_config{
      "cuLaunchKernelEx"};
  EntryPoint<Result(FunctionHandle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                    unsigned block_y, unsigned block_z, unsigned dynamic_shared_bytes, StreamHandle, void** params,
                    void** extra)>
      launch{"cuLaunchKernel"};

  int version = 0;  // as cuDriverGetVersion counts: 12010 is CUDA 12.1
};

// Opens the driver at the first call. Throws `Error` where there is none, or one that is too old; the next call then
// tries again.
const Driver& GetDriver();

// The context in which a kernel's memory and code live: the current one if it is of the wanted device, else the
// device's primary context, which is held as long as this object.
class Context {
 public:
  explicit Context(int device_ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  ContextHandle handle() const { return handle_; }
  Device device() const { return device_; }

 private:
  Device device_ = 0;
  ContextHandle handle_ = nullptr;
  bool is_retained_ = false;
};

// Makes a context current for a scope.
class ScopedContext {
 public:
  explicit ScopedContext(ContextHandle context) { GetDriver().context_push(context); }
  ~ScopedContext() {
    ContextHandle popped = nullptr;
    GetDriver().context_pop.Try(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
};

// Device memory. It must be made while `context` is current, and `context` must outlive it.
class Memory {
 public:
  Memory(const Context& context, size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Copies from the host, at an offset in bytes. The copy may not have ended: see SynchronizeUploads.
  void Upload(size_t offset, const void* from, size_t bytes) const;
  const void* at(size_t offset) const { return reinterpret_cast<const void*>(pointer_ + offset); }

 private:
  const Context& context_;
  DevicePointer pointer_ = 0;
};

// A word of the host's memory that kernels may set; at first 0. It must be made while `context` is current, and
// `context` must outlive it.
class HostFlag {
 public:
  explicit HostFlag(const Context& context);
  ~HostFlag();
  HostFlag(const HostFlag&) = delete;
  HostFlag& operator=(const HostFlag&) = delete;

  unsigned* at() const { return word_; }  // in kernels, too
  // Whether some kernel that has run until now has set it.
  bool IsSet() const { return *static_cast<volatile unsigned*>(word_) != 0; }

 private:
  const Context& context_;
  unsigned* word_ = nullptr;
};

// Waits until all uploads of the current context have ended.
void SynchronizeUploads();

// A loaded image: a cubin, or PTX text that ends with a NUL. The driver keeps a copy.
class Library {
 public:
  explicit Library(const void* code);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // A kernel for the current context, loaded.
  FunctionHandle Function(const char* name) const;

 private:
  LibraryHandle handle_ = nullptr;
};

struct LaunchShape {
  unsigned grid[3] = {1, 1, 1};
  unsigned threads = 1;
  unsigned dynamic_shared_bytes = 0;
  unsigned cluster = 1;       // blocks, along x
  bool begins_early = false;  // while the launch before is not complete: its kernel waits by itself
};

// What a launch of this shape asks for besides its grid.
std::vector<LaunchAttribute> AttributesOf(const LaunchShape& shape);

// How many clusters of this shape run at a time.
int ActiveClusters(FunctionHandle function, const LaunchShape& shape);

// A launch that is more than a grid of blocks.
void LaunchWithAttributes(FunctionHandle function, const LaunchShape& shape,
                          const std::vector<LaunchAttribute>& attributes, void** arguments, StreamHandle stream);

// Launches a kernel whose only parameter is a `Params`.
template <typename Params>
void Launch(FunctionHandle function, const LaunchShape& shape, const Params& params, StreamHandle stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  if (const auto attributes = AttributesOf(shape); !attributes.empty()) {
    LaunchWithAttributes(function, shape, attributes, arguments, stream);
    return;
  }
  GetDriver().launch(function, shape.grid[0], shape.grid[1], shape.grid[2], shape.threads, 1, 1,
                     shape.dynamic_shared_bytes, stream, arguments, nullptr);
}

}  // namespace sparseconv::cuda
