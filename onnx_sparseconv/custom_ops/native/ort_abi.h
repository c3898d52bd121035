// The part of ONNX Runtime's C ABI that a custom-op library needs.
//
// The C API is an append-only table of function pointers: a function keeps its slot in every release. This header names
// the slots that are used here and gives each its signature, so the library builds without ONNX Runtime's headers and
// runs on every release from 1.17 on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparseconv::ort {

// Opaque types. They are only ever handled by pointer.
struct OrtApi;
struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtOpAttr;
struct OrtValue;
struct OrtTypeShape;  // "tensor type and shape info"
struct OrtAllocator;
struct OrtMemoryInfo;
struct OrtLogger;

struct OrtApiBase {
  const OrtApi* (*get_api)(uint32_t version);
  const char* (*get_version_string)();
};

// First release whose table has everything below: 1.17.
constexpr uint32_t kApiVersion = 17;
// First release whose table has what the CUDA kernels need as well: 1.18.
constexpr uint32_t kCudaApiVersion = 18;

enum StatusCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kUint16 = 4,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kUint32 = 12
};
enum OpAttrType : int { kAttrInt = 1, kAttrInts = 2, kAttrString = 5 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum MemoryType : int { kMemoryDefault = 0 };
enum DeviceType : int { kCpuDevice = 0, kGpuDevice = 1 };
enum Severity : int { kWarning = 2 };

#if defined(_WIN32)
using PathChar = wchar_t;
#else
using PathChar = char;
#endif

// One function of the table: its slot and its signature.
template <int kSlot, typename Signature>
struct ApiFunction;

template <int kSlot, typename Result, typename... Args>
struct ApiFunction<kSlot, Result(Args...)> {
  static Result Call(const OrtApi* api, Args... args) {
    using Pointer = Result (*)(Args...);
    return reinterpret_cast<const Pointer*>(api)[kSlot](args...);
  }
};

using CreateStatus = ApiFunction<0, OrtStatus*(int, const char*)>;
using GetErrorMessage = ApiFunction<2, const char*(const OrtStatus*)>;
using ReleaseStatus = ApiFunction<93, void(OrtStatus*)>;

using CreateCustomOpDomain = ApiFunction<26, OrtStatus*(const char*, OrtCustomOpDomain**)>;
using CustomOpDomainAdd = ApiFunction<27, OrtStatus*(OrtCustomOpDomain*, const struct OrtCustomOp*)>;
using AddCustomOpDomain = ApiFunction<28, OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>;
using HasSessionConfigEntry = ApiFunction<237, OrtStatus*(const OrtSessionOptions*, const char*, int*)>;
using GetSessionConfigEntry = ApiFunction<238, OrtStatus*(const OrtSessionOptions*, const char*, char*, size_t*)>;

using GetTensorMutableData = ApiFunction<51, OrtStatus*(OrtValue*, void**)>;
using GetTensorTypeAndShape = ApiFunction<65, OrtStatus*(const OrtValue*, OrtTypeShape**)>;
using GetTensorMemoryInfo = ApiFunction<194, OrtStatus*(const OrtValue*, const OrtMemoryInfo**)>;
using ReleaseValue = ApiFunction<96, void(OrtValue*)>;
using MemoryInfoGetId = ApiFunction<72, OrtStatus*(const OrtMemoryInfo*, int*)>;
using MemoryInfoGetDeviceType = ApiFunction<225, void(const OrtMemoryInfo*, int*)>;

using CreateTypeShape = ApiFunction<57, OrtStatus*(OrtTypeShape**)>;
using SetTensorElementType = ApiFunction<58, OrtStatus*(OrtTypeShape*, int)>;
using SetDimensions = ApiFunction<59, OrtStatus*(OrtTypeShape*, const int64_t*, size_t)>;
using GetTensorElementType = ApiFunction<60, OrtStatus*(const OrtTypeShape*, int*)>;
using GetDimensionsCount = ApiFunction<61, OrtStatus*(const OrtTypeShape*, size_t*)>;
using GetDimensions = ApiFunction<62, OrtStatus*(const OrtTypeShape*, int64_t*, size_t)>;
using GetSymbolicDimensions = ApiFunction<63, OrtStatus*(const OrtTypeShape*, const char**, size_t)>;
using SetSymbolicDimensions = ApiFunction<271, OrtStatus*(OrtTypeShape*, const char**, size_t)>;
using ReleaseTypeShape = ApiFunction<99, void(OrtTypeShape*)>;

using AllocatorAlloc = ApiFunction<75, OrtStatus*(OrtAllocator*, size_t, void**)>;
using AllocatorFree = ApiFunction<76, OrtStatus*(OrtAllocator*, void*)>;
using AllocatorGetInfo = ApiFunction<77, OrtStatus*(const OrtAllocator*, const OrtMemoryInfo**)>;
using GetAllocatorWithDefaultOptions = ApiFunction<78, OrtStatus*(OrtAllocator**)>;
using ReleaseAllocator = ApiFunction<132, void(OrtAllocator*)>;

using KernelInfoGetFloat = ApiFunction<85, OrtStatus*(const OrtKernelInfo*, const char*, float*)>;
using KernelInfoGetInt64 = ApiFunction<86, OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)>;
using KernelInfoGetString = ApiFunction<87, OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)>;
using KernelInfoGetInt64Array = ApiFunction<163, OrtStatus*(const OrtKernelInfo*, const char*, int64_t*, size_t*)>;
using KernelInfoGetTensor = ApiFunction<236, OrtStatus*(const OrtKernelInfo*, const char*, OrtAllocator*, OrtValue**)>;
using KernelInfoGetNodeName = ApiFunction<244, OrtStatus*(const OrtKernelInfo*, char*, size_t*)>;
using KernelInfoGetLogger = ApiFunction<245, OrtStatus*(const OrtKernelInfo*, const OrtLogger**)>;
using KernelInfoGetAllocator = ApiFunction<278, OrtStatus*(const OrtKernelInfo*, int, OrtAllocator**)>;
using LoggerLogMessage =
    ApiFunction<247, OrtStatus*(const OrtLogger*, int, const char*, const PathChar*, int, const char*)>;

using KernelContextGetInput = ApiFunction<90, OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>;
using KernelContextGetOutput =
    ApiFunction<91, OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>;
using KernelContextGetAllocator =
    ApiFunction<253, OrtStatus*(const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator**)>;
using KernelContextGetScratchBuffer =
    ApiFunction<277, OrtStatus*(const OrtKernelContext*, const OrtMemoryInfo*, size_t, void**)>;
using KernelContextGetResource = ApiFunction<265, OrtStatus*(const OrtKernelContext*, int, int, void**)>;
using KernelContextGetStream = ApiFunction<193, OrtStatus*(const OrtKernelContext*, void**)>;
using KernelContextGetLogger = ApiFunction<246, OrtStatus*(const OrtKernelContext*, const OrtLogger**)>;
using KernelContextParallelFor =
    ApiFunction<274, OrtStatus*(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>;

using ShapeInferGetInputTypeShape = ApiFunction<268, OrtStatus*(const OrtShapeInferContext*, size_t, OrtTypeShape**)>;
using ShapeInferGetAttribute =
    ApiFunction<269, OrtStatus*(const OrtShapeInferContext*, const char*, const OrtOpAttr**)>;
using ShapeInferSetOutputTypeShape =
    ApiFunction<270, OrtStatus*(const OrtShapeInferContext*, size_t, const OrtTypeShape*)>;
using ReadOpAttr = ApiFunction<272, OrtStatus*(const OrtOpAttr*, int, void*, size_t, size_t*)>;

// The description of one op that is handed to ONNX Runtime. It reads the fields up to those of `version`.
struct OrtCustomOp {
  uint32_t version;
  void* (*create_kernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);  // replaced by create_kernel_v2
  const char* (*get_name)(const OrtCustomOp*);
  const char* (*get_execution_provider_type)(const OrtCustomOp*);
  int (*get_input_type)(const OrtCustomOp*, size_t);
  size_t (*get_input_type_count)(const OrtCustomOp*);
  int (*get_output_type)(const OrtCustomOp*, size_t);
  size_t (*get_output_type_count)(const OrtCustomOp*);
  void (*kernel_compute)(void*, OrtKernelContext*);  // replaced by kernel_compute_v2
  void (*kernel_destroy)(void*);
  int (*get_input_characteristic)(const OrtCustomOp*, size_t);
  int (*get_output_characteristic)(const OrtCustomOp*, size_t);
  int (*get_input_memory_type)(const OrtCustomOp*, size_t);
  void* variadic[4];
  OrtStatus* (*create_kernel_v2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*kernel_compute_v2)(void*, OrtKernelContext*);
  OrtStatus* (*infer_output_shape)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*get_start_version)(const OrtCustomOp*);
  int (*get_end_version)(const OrtCustomOp*);
  void* in_place_and_alias[4];  // since version 18
};
static_assert(sizeof(void*) != 8 || (sizeof(OrtCustomOp) == 208 && offsetof(OrtCustomOp, create_kernel_v2) == 136),
              "the layout of OrtCustomOp is part of the ABI");

}  // namespace sparseconv::ort
