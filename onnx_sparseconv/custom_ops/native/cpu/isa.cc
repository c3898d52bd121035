#include "isa.h"

namespace sparseconv::cpu {
namespace {

// SPARSECONV_X86_KERNELS: the build has the AVX2 and AVX-512 files.
bool IsSupported(CpuIsa isa) {
  switch (isa) {
#ifdef SPARSECONV_X86_KERNELS
    case CpuIsa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case CpuIsa::kAvx512:
      return __builtin_cpu_supports("avx512f") && IsSupported(CpuIsa::kAvx2);
#else
    case CpuIsa::kAvx2:
    case CpuIsa::kAvx512:
      return false;
#endif
    default:
      return true;
  }
}

}  // namespace

CpuIsa ParseIsa(const std::string& text) {
  CpuIsa isa;
  if (text == "auto") {
    isa = CpuIsa::kAuto;
  } else if (text == "portable") {
    isa = CpuIsa::kPortable;
  } else if (text == "avx2") {
    isa = CpuIsa::kAvx2;
  } else if (text == "avx512") {
    isa = CpuIsa::kAvx512;
  } else {
    Fail("session config entry 'sparseconv.cpu_isa' must be auto, portable, avx2 or avx512, found '", text, "'");
  }
  if (!IsSupported(isa)) {
    Fail("session config entry 'sparseconv.cpu_isa' asks for '", text,
         "', which this machine does not support; use auto");
  }
  return isa;
}

const TileKernels& ChooseKernels(CpuIsa isa) {
#ifdef SPARSECONV_X86_KERNELS
  if (isa == CpuIsa::kAvx512 || (isa == CpuIsa::kAuto && IsSupported(CpuIsa::kAvx512))) return Avx512Kernels();
  if (isa == CpuIsa::kAvx2 || (isa == CpuIsa::kAuto && IsSupported(CpuIsa::kAvx2))) return Avx2Kernels();
#else
  static_cast<void>(isa);
#endif
  return PortableKernels();
}

}  // namespace sparseconv::cpu
