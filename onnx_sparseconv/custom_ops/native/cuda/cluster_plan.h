// How the cluster kernel (kernels/cuda/cluster_conv.cuh) is launched for a call.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {

// Eights of positions of a warpgroup that there are kernels for.
constexpr int kClusterBlocks[] = {8, 15, 19, 29};

struct ClusterLaunch {
  ClusterParams params{};  // all but the pointers; where Y or the residual is not aligned, fewer `out_columns`
  int blocks = 0;          // of kClusterBlocks
  double cycles = 0.0;     // of a multiprocessor, about
  LaunchShape shape;
};

// Nothing where no tile of outputs fits shared memory with its part of the weight, there are too many blocks of rows or
// chunks, X is empty, a tensor is too large, or the GPU runs no clusters. X begins at a multiple of `x_alignment`
// bytes. `batch` is at least 1.
std::optional<ClusterLaunch> ChooseClusterLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes,
                                                 int64_t batch, const DeviceFacts& device, const WgmmaFacts& facts,
                                                 int64_t x_alignment);

}  // namespace sparseconv::cuda
