// A weight in the form that the gemm kernels read (kernels/cuda/gemm_params.h): zeros and all, in the order in which
// the tensor cores read it.
#pragma once

#include <cstdint>
#include <vector>

#include "../../../kernels/cuda/gemm_params.h"
#include "../attributes.h"

namespace sparseconv::cuda {

// Whether the kernels may run the node: 1x1 of one group, without padding, and without strides, or in 2-D with strides
// of two, of a weight that takes little memory with its zeros. It must have the form of the other kernels of
// warpgroups, too (HasWgmmaForm).
bool HasGemmForm(const ConvGeometry& geometry);

// [row blocks][chunks] of kGemmWeightBytes; rows and channels that there are not are zeros.
std::vector<uint8_t> PackGemmWeight(const SparseWeight& weight, const ConvGeometry& geometry);

}  // namespace sparseconv::cuda
