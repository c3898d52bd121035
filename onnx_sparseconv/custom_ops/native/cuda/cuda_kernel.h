#pragma once

#include <memory>

#include "../kernel.h"

namespace sparseconv::cuda {

// Uploads the weight and loads the code. Throws `Error`.
std::unique_ptr<Kernel> CreateCudaKernel(const OpDescription& op, const ort::NodeInfo& node,
                                         SparseConvAttributes attributes);

}  // namespace sparseconv::cuda
