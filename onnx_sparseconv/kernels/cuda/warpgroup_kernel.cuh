// How the kernels of warpgroups are declared.
#pragma once

// What comes last is the type of what runs: of a Params and the block's shared memory.
#define SPARSECONV_WARPGROUP_KERNEL(name, Params, threads, ...)                                                       \
  extern "C" __global__ void __launch_bounds__(threads, 1) sparseconv_##name(const __grid_constant__ Params params) { \
    extern __shared__ uint4 wgmma_stages[];                                                                           \
    __VA_ARGS__(params, wgmma_stages).Run();                                                                          \
  }
