// Under which execution provider the CUDA kernels are registered.
//
// Tests on machines without a GPU build the library a second time: there only the CUDA kernels are registered, and for
// the CPU provider, so that a plain ONNX Runtime runs everything on this side of the driver's interface. The driver is
// then a stand-in whose device memory is the host's.
#pragma once

#include "../ort_abi.h"

namespace sparseconv::cuda {

#ifdef SPARSECONV_EMULATED_CUDA
constexpr bool kIsEmulated = true;
constexpr const char* kProviderName = "CPUExecutionProvider";
constexpr int kDeviceType = ort::kCpuDevice;
#else
constexpr bool kIsEmulated = false;
constexpr const char* kProviderName = "CUDAExecutionProvider";
constexpr int kDeviceType = ort::kGpuDevice;
#endif

}  // namespace sparseconv::cuda
