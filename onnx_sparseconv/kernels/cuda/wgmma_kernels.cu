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

#define SPARSECONV_WGMMA_KERNEL(positions)                       \
  extern "C" __global__ void __launch_bounds__(kWgmmaThreads, 1) \
      sparseconv_wgmma_p##positions(const WgmmaParams params) {  \
    extern __shared__ uint4 wgmma_stages[];                      \
    WgmmaConv<positions>(params, wgmma_stages).Run();            \
  }

SPARSECONV_WGMMA_KERNEL(24)
SPARSECONV_WGMMA_KERNEL(28)
SPARSECONV_WGMMA_KERNEL(30)
SPARSECONV_WGMMA_KERNEL(32)

extern "C" __global__ void sparseconv_interleave(const InterleaveParams params) { Interleave(params); }
