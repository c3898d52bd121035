// What runs a call of a node: of all kernels that can, the one that takes the fewest cycles.
#pragma once

#include <optional>
#include <string>

#include "../attributes.h"
#include "cluster_plan.h"
#include "csr_plan.h"
#include "depthwise_plan.h"
#include "flat_plan.h"
#include "gemm_plan.h"
#include "generated_plan.h"
#include "node_kernels.h"
#include "octet_plan.h"
#include "pointwise_plan.h"
#include "ring_plan.h"
#include "segment_plan.h"
#include "space_to_depth.h"
#include "tensor_plan.h"
#include "wgmma_plan.h"

namespace sparseconv::cuda {

// What a plan depends on, besides the node and the GPU.
struct PlanKey {
  int64_t batch;
  Axes in_dims;
  bool is_x_aligned;
  int x_columns;     // halves that X is aligned to: 4, 2 or 1
  bool allows_tf32;  // floats may be rounded to as many bits as TF32 has

  bool operator==(const PlanKey& other) const {
    return batch == other.batch && in_dims == other.in_dims && is_x_aligned == other.is_x_aligned &&
           x_columns == other.x_columns && allows_tf32 == other.allows_tf32;
  }
};

struct Plan {
  ResolvedGeometry sizes;
  CsrLaunch csr;
  std::optional<DepthwiseLaunch> depthwise;
  std::optional<TensorLaunch> tensor;
  std::optional<SegmentLaunch> segments;  // before `tensor`, where tensors begin where that can read and store them
  std::optional<WgmmaLaunch> wgmma;
  std::optional<ClusterLaunch> cluster;  // before all others of warpgroups
  // Before `wgmma`, where Y and the residual begin at multiples of 16 bytes; one of them at most.
  std::optional<OctetLaunch> octets;
  std::optional<SpaceToDepthLaunch> space_to_depth;  // in front of `octets`, where there are strides
  std::optional<RingLaunch> ring;
  std::optional<FlatLaunch> flat;  // instead of these
  std::optional<PointwiseLaunch> pointwise;
  std::optional<GemmLaunch> gemm;  // before `pointwise`, where Y and the residual begin at multiples of 16 bytes
  std::optional<GeneratedLaunch> generated;
  std::string reason;  // why the node's image cannot run; empty where it does, or where another kernel is faster

  RunningKernel kernel() const {
    if (generated) return RunningKernel::kGenerated;
    if (cluster) return RunningKernel::kCluster;
    if (flat) return RunningKernel::kFlat;
    if (gemm) return RunningKernel::kGemm;
    if (wgmma || octets || ring || pointwise) return RunningKernel::kWgmma;
    if (depthwise) return RunningKernel::kDepthwise;
    if (segments) return RunningKernel::kSegments;
    return tensor ? RunningKernel::kTensor : RunningKernel::kCsr;
  }

  void LeaveWarpgroups() {
    wgmma.reset();
    cluster.reset();
    octets.reset();
    ring.reset();
    flat.reset();
    pointwise.reset();
    gemm.reset();
  }
};

// Throws `Error` where what the session asks for cannot run the call.
Plan MakePlan(const NodeKernels& node, const PlanKey& key);

// Whether the kernel for clusters reads the sources of X, if there are any, where they are.
bool CanClusterReadSources(const NodeKernels& node, const ResolvedGeometry& sizes);

}  // namespace sparseconv::cuda
