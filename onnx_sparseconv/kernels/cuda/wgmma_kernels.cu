// The kernels that the library carries, as PTX, for GPUs of compute capability 9.0. kernels/library_ptx.py makes the
// PTX.
#include "interleave.cuh"
#include "params.h"
#include "wgmma_conv.cuh"

using sparseconv::cuda::Interleave;
using sparseconv::cuda::InterleaveParams;
using sparseconv::cuda::kWgmmaThreads;
using sparseconv::cuda::WgmmaConv;
using sparseconv::cuda::WgmmaParams;

#define SPARSECONV_WGMMA_KERNEL(name, positions, is_interleaved)                                             \
  extern "C" __global__ void __launch_bounds__(kWgmmaThreads, 1) name##positions(const WgmmaParams params) { \
    extern __shared__ uint4 wgmma_stages[];                                                                  \
    WgmmaConv<positions, is_interleaved>(params, wgmma_stages).Run();                                        \
  }
#define SPARSECONV_WGMMA_KERNELS(positions)                     \
  SPARSECONV_WGMMA_KERNEL(sparseconv_wgmma_p, positions, false) \
  SPARSECONV_WGMMA_KERNEL(sparseconv_wgmma_interleaved_p, positions, true)

SPARSECONV_WGMMA_KERNELS(24)
SPARSECONV_WGMMA_KERNELS(28)
SPARSECONV_WGMMA_KERNELS(30)
SPARSECONV_WGMMA_KERNELS(32)

extern "C" __global__ void sparseconv_interleave(const InterleaveParams params) { Interleave(params); }
