// Which instruction set the CPU kernels use.
#pragma once

#include <string>

#include "../kernel.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {

// The value of the session config entry `sparseconv.cpu_isa`: auto, portable, avx2 or avx512. Throws `Error` for any
// other one, and for one that this machine or this build does not have.
CpuIsa ParseIsa(const std::string& text);

// The tile kernels of an instruction set that `ParseIsa` has let through; the best one for `kAuto`.
const TileKernels& ChooseKernels(CpuIsa isa);

}  // namespace sparseconv::cpu
