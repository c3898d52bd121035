#include "call_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "../checked.h"
#include "concatenate_plan.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

// No launch takes for ever.
template <class Launch>
double CyclesOf(const std::optional<Launch>& launch) {
  return launch ? launch->cycles : std::numeric_limits<double>::infinity();
}

// Of an image of X.
double ImageBytes(const NodeKernels& node, const Axes& in_dims) {
  return static_cast<double>(node.geometry.in_channels) * static_cast<double>(in_dims[0]) *
         static_cast<double>(in_dims[1] * in_dims[2]) * static_cast<double>(node.element_bytes());
}

class Planner {
 public:
  explicit Planner(const NodeKernels& node) : node_(node) {}

  Plan Make(const PlanKey& key) const;

 private:
  bool PlanDepthwise(const PlanKey& key, Plan* plan) const;
  bool MayMultiplyHalves(const PlanKey& key) const;
  double PlanOthers(const PlanKey& key, Plan* plan) const;
  void PlanWithoutStrides(const PlanKey& key, Plan* plan) const;
  double PlanWindows(const PlanKey& key, Plan* plan) const;
  double PlanPointwise(const PlanKey& key, Plan* plan) const;
  double PlanFlat(const PlanKey& key, double others, Plan* plan) const;
  double PlanCluster(const PlanKey& key, Plan* plan) const;
  double SourceCycles(const PlanKey& key) const;
  void PlanWarpgroups(const PlanKey& key, double others, Plan* plan) const;

  const NodeKernels& node_;
};

// Whether the kernel for depthwise convolutions runs a call: wherever it can.
bool Planner::PlanDepthwise(const PlanKey& key, Plan* plan) const {
  if (!node_.depthwise) return false;
  plan->depthwise = ChooseDepthwiseLaunch(node_.geometry, plan->sizes, key.batch,
                                          static_cast<int64_t>(node_.element_bytes()), node_.device);
  if (!plan->depthwise && node_.op.cuda.kernel == KernelChoice::kDepthwise) {
    Fail("the depthwise kernel cannot run this call: a block has no room for its rows, or there are too many of them");
  }
  return plan->depthwise.has_value();
}

// Whether what multiplies halves may run a call: floats are rounded to as many bits as TF32 has, where the session
// allows that, or asks for such a kernel.
bool Planner::MayMultiplyHalves(const PlanKey& key) const {
  return node_.is_half() || key.allows_tf32 || node_.op.cuda.kernel != KernelChoice::kAuto;
}

// What runs a call that is not on warpgroups: a kernel for tensor cores where that is faster than the CSR kernel.
// Returns its cycles.
double Planner::PlanOthers(const PlanKey& key, Plan* plan) const {
  const double csr = CsrCycles(node_.geometry, plan->sizes, key.batch, node_.csr_weight->num_entries(), node_.device) +
                     SourceCycles(key);
  if (!node_.tensor || !MayMultiplyHalves(key)) return csr;
  TensorFacts facts = node_.tensor->facts;
  facts.x_columns = node_.is_half() ? key.x_columns : std::max(key.x_columns / 2, 1);
  const KernelChoice choice = node_.op.cuda.kernel;
  if (choice != KernelChoice::kSegments) {
    plan->tensor = ChooseTensorLaunch(node_.geometry, plan->sizes, key.batch, node_.device, facts);
    if (choice == KernelChoice::kTensor && !plan->tensor) {
      Fail("the tensor-core kernel cannot run this call: no tile of it fits");
    }
  }
  if (node_.tensor->segments) {
    plan->segments = ChooseSegmentLaunch(node_.geometry, plan->sizes, key.batch, node_.device, facts);
  }
  if (choice == KernelChoice::kSegments && !plan->segments) {
    Fail(
        "the segment kernel cannot run this call: it is for planes of a multiple of 4 positions, and its tiles have to "
        "fit");
  }
  // By segments, the sources of X are read where they are.
  const double tensor = CyclesOf(plan->tensor) + SourceCycles(key), segments = CyclesOf(plan->segments);
  if (segments >= tensor) plan->segments.reset();
  if (choice != KernelChoice::kAuto) return std::min(tensor, segments);
  if (segments >= csr) plan->segments.reset();
  if (tensor >= csr) plan->tensor.reset();
  return std::min({tensor, segments, csr});
}

// By octets, from a copy of X without strides, where that takes less than from X as it is.
void Planner::PlanWithoutStrides(const PlanKey& key, Plan* plan) const {
  const ResolvedGeometry copied = WithoutStrides(plan->sizes, node_.geometry);
  const auto bytes = static_cast<int64_t>(node_.element_bytes());
  auto copy = ChooseSpaceToDepth(node_.geometry, plan->sizes, copied, key.batch, bytes, node_.device);
  if (!copy) return;
  auto octets = ChooseOctetLaunch(WithoutStrides(node_.geometry), copied, key.batch, node_.device,
                                  node_.copied_windows->form, bytes, /*is_copied=*/true);
  if (!octets || octets->cycles + copy->cycles >= CyclesOf(plan->octets)) return;
  octets->cycles += copy->cycles;
  plan->octets = std::move(octets);
  plan->space_to_depth = std::move(copy);
}

// By the fastest one of the kernels of warpgroups but for clusters, without regard to others. Returns its cycles.
double Planner::PlanWindows(const PlanKey& key, Plan* plan) const {
  plan->wgmma = ChooseWgmmaLaunch(node_.geometry, plan->sizes, key.batch, node_.device, node_.wgmma->facts);
  if (node_.windows && key.is_x_aligned) {
    plan->octets = ChooseOctetLaunch(node_.geometry, plan->sizes, key.batch, node_.device, node_.windows->form,
                                     static_cast<int64_t>(node_.element_bytes()), /*is_copied=*/false);
    // Without strides, octets are always the faster.
    if (node_.windows->ring && (!plan->octets || plan->octets->form == OctetForm::kStrides)) {
      plan->ring = ChooseRingLaunch(node_.geometry, plan->sizes, key.batch, node_.device, node_.windows->form);
    }
  }
  if (node_.copied_windows) PlanWithoutStrides(key, plan);
  const double wgmma = CyclesOf(plan->wgmma), octets = CyclesOf(plan->octets), ring = CyclesOf(plan->ring);
  if (octets >= std::min(wgmma, ring)) plan->octets.reset();
  if (ring >= std::min(wgmma, CyclesOf(plan->octets))) plan->ring.reset();
  return std::min({wgmma, octets, ring});
}

// The same of 1x1.
double Planner::PlanPointwise(const PlanKey& key, Plan* plan) const {
  plan->pointwise = ChoosePointwiseLaunch(node_.geometry, plan->sizes, key.batch, node_.device, node_.wgmma->facts);
  const bool reads_sources = plan->pointwise && plan->pointwise->is_whole;
  const double sparse = CyclesOf(plan->pointwise) + (reads_sources ? 0.0 : SourceCycles(key));
  if (!node_.gemm) return sparse;
  plan->gemm = ChooseGemmLaunch(node_.geometry, plan->sizes, key.batch, node_.device,
                                static_cast<int64_t>(node_.element_bytes()), key.is_x_aligned);
  const double gemm = CyclesOf(plan->gemm) + SourceCycles(key);
  if (node_.op.cuda.kernel == KernelChoice::kGemm) {
    plan->pointwise.reset();
    return gemm;
  }
  if (gemm >= sparse) plan->gemm.reset();
  return std::min(sparse, gemm);
}

// From flat X, where that takes less than what takes `others` cycles. Returns the lesser of both.
double Planner::PlanFlat(const PlanKey& key, double others, Plan* plan) const {
  auto flat = ChooseFlatLaunch(node_.geometry, plan->sizes, key.batch, node_.device, node_.flat->form,
                               static_cast<int64_t>(node_.element_bytes()));
  const double cycles = CyclesOf(flat);
  if (cycles >= others) return others;
  plan->LeaveWarpgroups();
  plan->flat = std::move(flat);
  return cycles;
}

// By clusters, likewise.
double Planner::PlanCluster(const PlanKey& key, Plan* plan) const {
  const uintptr_t x_alignment =
      key.is_x_aligned ? kVectorBytes : kPairBytes / 2 * static_cast<uintptr_t>(key.x_columns);
  plan->cluster = ChooseClusterLaunch(node_.geometry, plan->sizes, key.batch, node_.device, node_.wgmma->facts,
                                      static_cast<int64_t>(x_alignment));
  return CyclesOf(plan->cluster) + (CanClusterReadSources(node_, plan->sizes) ? 0.0 : SourceCycles(key));
}

// What it takes to copy the sources of X together; nothing where X is one.
double Planner::SourceCycles(const PlanKey& key) const {
  if (node_.source_begins.empty()) return 0.0;
  return ConcatenateCycles(static_cast<double>(key.batch) * ImageBytes(node_, key.in_dims), node_.device);
}

// On warpgroups, where that is faster than what takes `others` cycles.
void Planner::PlanWarpgroups(const PlanKey& key, double others, Plan* plan) const {
  const KernelChoice choice = node_.op.cuda.kernel;
  double cycles = std::numeric_limits<double>::infinity();
  if (choice != KernelChoice::kCluster && choice != KernelChoice::kFlat) {
    cycles = IsPointwise(node_.geometry) ? PlanPointwise(key, plan) : PlanWindows(key, plan);
    // Where only the address of X is in the way, the CSR kernel runs.
    if (choice == KernelChoice::kGemm && !plan->gemm && (node_.is_half() || key.is_x_aligned)) {
      Fail(
          "the gemm kernel cannot run this call: no tile of it fits, planes have such a size that it cannot copy them, "
          "or the tensors are too large");
    }
    if (choice == KernelChoice::kWgmma && std::isinf(cycles)) {
      Fail("the warpgroup kernel cannot run this call: no tile of it fits, or the tensors are too large");
    }
  }
  if (node_.flat) cycles = PlanFlat(key, cycles, plan);
  if (choice == KernelChoice::kFlat && !plan->flat) {
    Fail("the flat kernel cannot run this call: no tile of it fits, or the tensors are too large");
  }
  if (choice == KernelChoice::kAuto || choice == KernelChoice::kCluster) {
    const double clusters = PlanCluster(key, plan);
    if (choice == KernelChoice::kCluster && !plan->cluster) {
      Fail(
          "the cluster kernel cannot run this call: no tile of it fits with its part of the weight, the tensors or the "
          "weight are too large, or this GPU runs no clusters");
    }
    if (clusters >= cycles) plan->cluster.reset();
    cycles = std::min(cycles, clusters);
  }
  if (choice == KernelChoice::kAuto && cycles - kEarlyCycles >= others) plan->LeaveWarpgroups();
}

Plan Planner::Make(const PlanKey& key) const {
  Plan plan;
  plan.sizes = Resolve(node_.geometry, key.in_dims);
  CheckCsrSizes(node_.geometry, plan.sizes, key.batch);
  if (key.batch == 0) return plan;
  plan.csr = ChooseCsrLaunch(node_.geometry, plan.sizes, key.batch, node_.csr_weight->num_entries(), node_.device,
                             node_.op.cuda.sub_batch);
  const bool must_run_image = node_.op.cuda.kernel == KernelChoice::kGenerated;
  if (node_.image && (must_run_image || key.batch >= node_.image->min_batch)) {
    if (const auto sizes = FindPlaneSizes(node_.image->plan, plan.sizes, key.batch, &plan.reason)) {
      GeneratedFacts facts = node_.image->facts;
      facts.is_x_aligned = key.is_x_aligned;
      plan.generated = ChooseLaunch(node_.image->plan, *sizes, node_.device, facts, node_.op.cuda, &plan.reason);
    }
    if (plan.generated) return plan;
    if (must_run_image) {
      Fail("the image for sm_", node_.image->architecture, " cannot run this call: ", plan.reason);
    }
  }
  if (PlanDepthwise(key, &plan)) return plan;
  const double others = PlanOthers(key, &plan);
  if (node_.wgmma && MayMultiplyHalves(key)) PlanWarpgroups(key, others, &plan);
  return plan;
}

}  // namespace

Plan MakePlan(const NodeKernels& node, const PlanKey& key) { return Planner(node).Make(key); }

bool CanClusterReadSources(const NodeKernels& node, const ResolvedGeometry& sizes) {
  return IsPointwise(node.geometry) && IsPlain(node.geometry) && sizes.out_dims == sizes.in_dims &&
         ImageBytes(node, sizes.in_dims) < static_cast<double>(1 << kClusterSourceShift);
}

}  // namespace sparseconv::cuda
