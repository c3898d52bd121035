// The kernels that the library carries, as PTX, for GPUs of compute capability 9.0. kernels/library_ptx.py makes the
// PTX.
#include "gather.cuh"
#include "interleave.cuh"
#include "params.h"
#include "pointwise_conv.cuh"
#include "wgmma_conv.cuh"

using sparseconv::cuda::Gather;
using sparseconv::cuda::GatherParams;
using sparseconv::cuda::Interleave;
using sparseconv::cuda::InterleaveParams;
using sparseconv::cuda::kWgmmaThreads;
using sparseconv::cuda::PointwiseConv;
using sparseconv::cuda::PointwiseParams;
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

#define SPARSECONV_POINTWISE_KERNEL(segments)                          \
  extern "C" __global__ void __launch_bounds__(kWgmmaThreads, 1)       \
      sparseconv_pointwise_s##segments(const PointwiseParams params) { \
    extern __shared__ uint4 wgmma_stages[];                            \
    PointwiseConv<segments>(params, wgmma_stages).Run();               \
  }

SPARSECONV_POINTWISE_KERNEL(24)
SPARSECONV_POINTWISE_KERNEL(32)

extern "C" __global__ void sparseconv_gather(const GatherParams params) { Gather(params); }
