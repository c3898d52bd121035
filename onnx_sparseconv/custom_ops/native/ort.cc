#include "ort.h"

#include <limits>
#include <memory>

namespace sparseconv::ort {
namespace {

constexpr size_t kAlignment = 64;
constexpr const char* kMend = "; convert the model again with onnx-sparseconv";

struct StatusDeleter {
  const OrtApi* api;
  void operator()(OrtStatus* status) const { ReleaseStatus::Call(api, status); }
};

struct TypeShapeDeleter {
  const OrtApi* api;
  void operator()(OrtTypeShape* info) const { ReleaseTypeShape::Call(api, info); }
};
using TypeShapePtr = std::unique_ptr<OrtTypeShape, TypeShapeDeleter>;

TypeShapePtr GetTypeShape(const OrtApi* api, const OrtValue* value) {
  OrtTypeShape* info = nullptr;
  Check(api, GetTensorTypeAndShape::Call(api, value, &info));
  return TypeShapePtr(info, TypeShapeDeleter{api});
}

const void* GetData(const OrtApi* api, const OrtValue* value) {
  void* data = nullptr;
  Check(api, GetTensorMutableData::Call(api, const_cast<OrtValue*>(value), &data));
  return data;
}

void CheckAttribute(const OrtApi* api, OrtStatus* status, const char* name, const char* type) {
  if (!Succeeded(api, status)) Fail("attribute '", name, "' is missing or is not ", type, kMend);
}

#if defined(_WIN32)
constexpr PathChar kLogFile[] = L"onnx_sparseconv";
#else
constexpr PathChar kLogFile[] = "onnx_sparseconv";
#endif

void LogWarning(const OrtApi* api, const OrtLogger* logger, const std::string& message) {
  Check(api, LoggerLogMessage::Call(api, logger, kWarning, message.c_str(), kLogFile, 0, "SparseConv"));
}

}  // namespace

void Check(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::unique_ptr<OrtStatus, StatusDeleter> owner(status, StatusDeleter{api});
  throw Error(GetErrorMessage::Call(api, status));
}

bool Succeeded(const OrtApi* api, OrtStatus* status) noexcept {
  if (status == nullptr) return true;
  ReleaseStatus::Call(api, status);
  return false;
}

std::string ToString(const Shape& shape) {
  if (shape.rank > kMaxRank) return Concat("of rank ", shape.rank);
  std::string text = "[";
  for (size_t i = 0; i < shape.rank; ++i) text += (i ? ", " : "") + std::to_string(shape.dims[i]);
  return text + "]";
}

bool Context::GetInput(size_t index, TensorView* tensor) const {
  const OrtValue* value = nullptr;
  Check(api_, KernelContextGetInput::Call(api_, context_, index, &value));
  if (value == nullptr) return false;
  const TypeShapePtr info = GetTypeShape(api_, value);
  Check(api_, GetTensorElementType::Call(api_, info.get(), &tensor->element_type));
  Check(api_, GetDimensionsCount::Call(api_, info.get(), &tensor->shape.rank));
  if (tensor->shape.rank <= kMaxRank) {
    Check(api_, GetDimensions::Call(api_, info.get(), tensor->shape.dims.data(), tensor->shape.rank));
  }
  Check(api_, GetTensorMemoryInfo::Call(api_, value, &tensor->memory_info));
  tensor->data = GetData(api_, value);
  return true;
}

void* Context::GetOutput(size_t index, const Shape& shape) const {
  OrtValue* value = nullptr;
  Check(api_, KernelContextGetOutput::Call(api_, context_, index, shape.dims.data(), shape.rank, &value));
  return const_cast<void*>(GetData(api_, value));
}

void* Context::GetStream() const {
  void* stream = nullptr;
  Check(api_, KernelContextGetStream::Call(api_, context_, &stream));
  return stream;
}

bool Context::AllowsTf32() const {
  // As the CUDA provider numbers what it lends to custom ops. An option that is off looks like one that there is not.
  constexpr int kVersion = 3, kUseTf32 = 10011;
  void* value = nullptr;
  return Succeeded(api_, KernelContextGetResource::Call(api_, context_, kVersion, kUseTf32, &value)) &&
         value != nullptr;
}

void Context::Warn(const std::string& message) const {
  const OrtLogger* logger = nullptr;
  Check(api_, KernelContextGetLogger::Call(api_, context_, &logger));
  LogWarning(api_, logger, message);
}

Allocator::Allocator(const Context& context, const OrtMemoryInfo* memory_info) : api_(context.api()) {
  Check(api_, KernelContextGetAllocator::Call(api_, context.get(), memory_info, &allocator_));
}

Scratch::Scratch(const Allocator& allocator, size_t num_floats) : allocator_(allocator) {
  if (num_floats > (std::numeric_limits<size_t>::max() - kAlignment) / sizeof(float)) {
    Fail("scratch memory of ", num_floats, " floats is too much");
  }
  const size_t bytes = num_floats * sizeof(float) + kAlignment;
  Check(allocator.api_, AllocatorAlloc::Call(allocator.api_, allocator.allocator_, bytes, &memory_));
  if (memory_ == nullptr) throw std::bad_alloc();
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory_);
  data_ = reinterpret_cast<float*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

Scratch::~Scratch() {
  Succeeded(allocator_.api_, AllocatorFree::Call(allocator_.api_, allocator_.allocator_, memory_));
}

DeviceScratch::DeviceScratch(const Context& context, const OrtMemoryInfo* memory_info, size_t bytes)
    : allocator_(context, memory_info) {
  const OrtApi* api = context.api();
  // Up to 1.20 at least, ONNX Runtime asks a stream here that may be null.
  Check(api, context.GetStream() == nullptr
                 ? AllocatorAlloc::Call(api, allocator_.allocator_, bytes, &data_)
                 : KernelContextGetScratchBuffer::Call(api, context.get(), memory_info, bytes, &data_));
  if (data_ == nullptr) Fail("could not allocate ", bytes, " bytes of scratch memory");
}

DeviceScratch::~DeviceScratch() {
  Succeeded(allocator_.api_, AllocatorFree::Call(allocator_.api_, allocator_.allocator_, data_));
}

std::string NodeInfo::Name() const {
  size_t size = 0;
  Succeeded(api_, KernelInfoGetNodeName::Call(api_, info_, nullptr, &size));
  std::string name(size, '\0');
  if (size == 0 || !Succeeded(api_, KernelInfoGetNodeName::Call(api_, info_, name.data(), &size))) return "";
  return name.c_str();
}

int NodeInfo::DeviceId() const {
  OrtAllocator* allocator = nullptr;
  Check(api_, KernelInfoGetAllocator::Call(api_, info_, kMemoryDefault, &allocator));
  const OrtMemoryInfo* memory_info = nullptr;
  int id = 0;
  const bool is_known = Succeeded(api_, AllocatorGetInfo::Call(api_, allocator, &memory_info)) &&
                        Succeeded(api_, MemoryInfoGetId::Call(api_, memory_info, &id));
  ReleaseAllocator::Call(api_, allocator);
  if (!is_known) Fail("the execution provider does not tell which device it uses");
  return id;
}

void NodeInfo::Warn(const std::string& message) const {
  const OrtLogger* logger = nullptr;
  Check(api_, KernelInfoGetLogger::Call(api_, info_, &logger));
  LogWarning(api_, logger, message);
}

bool NodeInfo::HasInts(const char* name) const {
  size_t size = 0;
  return Succeeded(api_, KernelInfoGetInt64Array::Call(api_, info_, name, nullptr, &size)) && size > 0;
}

int64_t NodeInfo::Int(const char* name) const {
  int64_t value = 0;
  CheckAttribute(api_, KernelInfoGetInt64::Call(api_, info_, name, &value), name, "an INT");
  return value;
}

float NodeInfo::Float(const char* name) const {
  float value = 0;
  CheckAttribute(api_, KernelInfoGetFloat::Call(api_, info_, name, &value), name, "a FLOAT");
  return value;
}

std::string NodeInfo::String(const char* name) const {
  size_t size = 0;
  Succeeded(api_, KernelInfoGetString::Call(api_, info_, name, nullptr, &size));
  std::string value(size + 1, '\0');
  size = value.size();
  CheckAttribute(api_, KernelInfoGetString::Call(api_, info_, name, value.data(), &size), name, "a STRING");
  return value.c_str();
}

std::vector<int64_t> NodeInfo::Ints(const char* name) const {
  size_t size = 0;
  CheckAttribute(api_, KernelInfoGetInt64Array::Call(api_, info_, name, nullptr, &size), name, "INTS");
  std::vector<int64_t> values(size);
  if (size > 0) {
    CheckAttribute(api_, KernelInfoGetInt64Array::Call(api_, info_, name, values.data(), &size), name, "INTS");
  }
  return values;
}

NodeInfo::Tensor::Tensor(const OrtApi* api, const OrtKernelInfo* info, const char* name) : api_(api) {
  OrtAllocator* allocator = nullptr;  // the process-wide default; not owned
  Check(api, GetAllocatorWithDefaultOptions::Call(api, &allocator));
  CheckAttribute(api, KernelInfoGetTensor::Call(api, info, name, allocator, &value_), name, "a readable TENSOR");
  try {
    const TypeShapePtr type_shape = GetTypeShape(api, value_);
    Check(api, GetTensorElementType::Call(api, type_shape.get(), &element_type_));
    Check(api, GetDimensionsCount::Call(api, type_shape.get(), &rank_));
    std::vector<int64_t> dims(rank_);
    Check(api, GetDimensions::Call(api, type_shape.get(), dims.data(), rank_));
    size_ = 1;
    for (const int64_t dim : dims) {
      // The runtime has allocated the tensor, so a product that overflows can only come from a zero among huge sizes.
      if (dim <= 0) size_ = 0;
      size_ = size_ == 0 ? 0 : size_ * static_cast<size_t>(dim);
    }
    data_ = GetData(api, value_);
  } catch (...) {
    ReleaseValue::Call(api, value_);
    throw;
  }
}

NodeInfo::Tensor::~Tensor() { ReleaseValue::Call(api_, value_); }

}  // namespace sparseconv::ort
