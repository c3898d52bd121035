// Stands in for ONNX Runtime's own header when the tests compile examples/cpp: just the functions that the example
// calls, under their own names and in their own places of the table. Programs use the header of an ONNX Runtime
// release.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct OrtAllocator;
struct OrtEnv;
struct OrtMemoryInfo;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 };
enum OrtAllocatorType { OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType { ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1 };

// Each gap is given by the places that it covers.
#define UNUSED(first, last) void* unused_##first[last - first + 1]

struct OrtApi {
  UNUSED(0, 1);
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(OrtLoggingLevel, const char*, OrtEnv**);
  UNUSED(4, 6);
  OrtStatus* (*CreateSession)(const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**);
  UNUSED(8, 8);
  OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const*, const OrtValue* const*, size_t,
                    const char* const*, size_t, OrtValue**);
  OrtStatus* (*CreateSessionOptions)(OrtSessionOptions**);
  UNUSED(11, 35);
  OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  OrtStatus* (*SessionGetOutputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  UNUSED(38, 48);
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void*, size_t, const int64_t*, size_t,
                                               ONNXTensorElementDataType, OrtValue**);
  UNUSED(50, 50);
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
  UNUSED(52, 59);
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*);
  UNUSED(61, 63);
  OrtStatus* (*GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
  UNUSED(66, 68);
  OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
  UNUSED(70, 75);
  OrtStatus* (*AllocatorFree)(OrtAllocator*, void*);
  UNUSED(77, 77);
  OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
  UNUSED(79, 91);
  void (*ReleaseEnv)(OrtEnv*);
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  UNUSED(97, 98);
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  void (*ReleaseSessionOptions)(OrtSessionOptions*);
  UNUSED(101, 227);
  OrtStatus* (*RegisterCustomOpsLibrary_V2)(OrtSessionOptions*, const char*);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t);
  const char* (*GetVersionString)();
};

extern "C" const OrtApiBase* OrtGetApiBase();
