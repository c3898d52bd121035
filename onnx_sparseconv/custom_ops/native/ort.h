// A thin checked wrapper of the C ABI: every status is looked at, every object has an owner.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "error.h"
#include "ort_abi.h"

namespace sparseconv::ort {

// X, W and Y have at most three spatial axes.
constexpr size_t kMaxRank = 5;

// Throws `Error` with the runtime's own message unless `status` is null. Releases it.
void Check(const OrtApi* api, OrtStatus* status);

// Releases `status` and says whether it was a success.
bool Succeeded(const OrtApi* api, OrtStatus* status) noexcept;

// Calls `body`; turns whatever it throws into a status, since no exception may cross the C boundary.
template <typename Body>
OrtStatus* ReturnStatus(const OrtApi* api, StatusCode code, Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return CreateStatus::Call(api, kFail, "SparseConv: out of memory");
  } catch (const std::exception& error) {
    return CreateStatus::Call(api, code, error.what());
  } catch (...) {
    return CreateStatus::Call(api, kFail, "SparseConv: unknown error");
  }
}

// Sizes of a tensor without a heap allocation: Compute must not allocate.
struct Shape {
  size_t rank = 0;  // the true rank, even where `dims` is too short to hold it
  std::array<int64_t, kMaxRank> dims{};

  bool operator==(const Shape& other) const { return rank == other.rank && dims == other.dims; }
  bool operator!=(const Shape& other) const { return !(*this == other); }
};

std::string ToString(const Shape& shape);

// An input or output tensor; not owned.
struct TensorView {
  const void* data = nullptr;
  int element_type = kUndefined;
  Shape shape;
  const OrtMemoryInfo* memory_info = nullptr;
};

// One call of a kernel.
class Context {
 public:
  Context(const OrtApi* api, OrtKernelContext* context) : api_(api), context_(context) {}

  // False where an optional input is absent.
  bool GetInput(size_t index, TensorView* tensor) const;
  void* GetOutput(size_t index, const Shape& shape) const;
  // The GPU's stream of this call, null on the CPU.
  void* GetStream() const;
  // Whether the CUDA provider's own float operators may round their inputs to TF32, as they do by default; false where
  // it does not say.
  bool AllowsTf32() const;
  // Through the session's logger.
  void Warn(const std::string& message) const;

  // Runs `body(i)` for every i below `count` on the session's threads, in any order. `body` must not throw.
  template <typename Body>
  void ParallelFor(size_t count, const Body& body) const {
    static_assert(std::is_nothrow_invocable_v<const Body&, size_t>, "an exception must not reach the thread pool");
    const auto call = [](void* data, size_t index) { (*static_cast<const Body*>(data))(index); };
    Check(api_, KernelContextParallelFor::Call(api_, context_, call, count, count, const_cast<Body*>(&body)));
  }

  const OrtApi* api() const { return api_; }
  OrtKernelContext* get() const { return context_; }

 private:
  const OrtApi* api_;
  OrtKernelContext* context_;
};

// The session's own allocator (an arena, unless the user disabled it). Thread-safe.
class Allocator {
 public:
  Allocator(const Context& context, const OrtMemoryInfo* memory_info);
  ~Allocator() { ReleaseAllocator::Call(api_, allocator_); }
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

 private:
  friend class Scratch;
  friend class DeviceScratch;
  const OrtApi* api_;
  OrtAllocator* allocator_ = nullptr;
};

// Floats from the session's allocator, aligned to a cache line.
class Scratch {
 public:
  Scratch(const Allocator& allocator, size_t num_floats);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* data() const { return data_; }

 private:
  const Allocator& allocator_;
  void* memory_ = nullptr;
  float* data_ = nullptr;
};

// Memory of the device of `memory_info` that later work on this call's stream may use: it may be released before that
// work is done, and waits for nothing.
class DeviceScratch {
 public:
  DeviceScratch(const Context& context, const OrtMemoryInfo* memory_info, size_t bytes);
  ~DeviceScratch();
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;

  void* data() const { return data_; }

 private:
  const Allocator allocator_;
  void* data_ = nullptr;
};

// What a kernel can read of its node when it is created. Every reader throws where the attribute is missing or has
// another type, and names the attribute.
class NodeInfo {
 public:
  NodeInfo(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  std::string Name() const;
  // Ordinal of the device of the node's execution provider, 0 for the CPU.
  int DeviceId() const;
  // Through the session's logger.
  void Warn(const std::string& message) const;
  bool HasInts(const char* name) const;
  int64_t Int(const char* name) const;
  float Float(const char* name) const;
  std::string String(const char* name) const;
  std::vector<int64_t> Ints(const char* name) const;

  // Owns the bytes of a TENSOR attribute.
  class Tensor {
   public:
    Tensor(const OrtApi* api, const OrtKernelInfo* info, const char* name);
    ~Tensor();
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    int element_type() const { return element_type_; }
    // Number of axes, and of elements in all.
    size_t rank() const { return rank_; }
    size_t size() const { return size_; }
    template <typename T>
    const T* data() const {
      return static_cast<const T*>(data_);
    }

   private:
    const OrtApi* api_;
    OrtValue* value_ = nullptr;
    const void* data_ = nullptr;
    int element_type_ = kUndefined;
    size_t rank_ = 0;
    size_t size_ = 0;
  };
  Tensor GetTensor(const char* name) const { return Tensor(api_, info_, name); }

 private:
  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

}  // namespace sparseconv::ort
