#pragma once

#include <memory>

#include "../kernel.h"

namespace sparseconv::cpu {

std::unique_ptr<Kernel> CreateCpuKernel(const OpDescription& op, SparseConvAttributes attributes);

}  // namespace sparseconv::cpu
