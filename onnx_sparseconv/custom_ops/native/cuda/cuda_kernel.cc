#include "cuda_kernel.h"

#include <atomic>
#include <string>

#include "../checked.h"
#include "../plan_cache.h"
#include "call_launch.h"
#include "call_plan.h"
#include "concatenate_plan.h"
#include "driver.h"
#include "node_kernels.h"
#include "provider.h"

namespace sparseconv::cuda {
namespace {

// More than on the CPU: the batch is part of the key, and a plan is small.
constexpr size_t kMaxPlans = 32;

class CudaKernel final : public Kernel {
 public:
  CudaKernel(const OpDescription& op, const ort::NodeInfo& node, const SparseConvAttributes& attributes)
      : node_(op, node, attributes), has_warned_(node_.has_warned), running_(node_.likely) {}

  std::string name() const override;
  void Compute(const ort::Context& context) const override;

 private:
  void WarnOnce(const ort::Context& context, const Plan& plan) const;
  void WarnOfRange(const ort::Context& context) const;

  const NodeKernels node_;
  mutable PlanCache<PlanKey, Plan, kMaxPlans> plans_;
  mutable std::atomic<bool> has_warned_, has_warned_of_range_{false};
  mutable std::atomic<RunningKernel> running_;  // in the last call, at first the likely one
};

std::string CudaKernel::name() const {
  switch (running_.load(std::memory_order_relaxed)) {
    case RunningKernel::kCsr:
      return "cuda.csr";
    case RunningKernel::kDepthwise:
      return "cuda.depthwise";
    case RunningKernel::kTensor:
      return "cuda.tensor";
    case RunningKernel::kSegments:
      return "cuda.segments";
    case RunningKernel::kWgmma:
      return "cuda.wgmma";
    case RunningKernel::kFlat:
      return "cuda.flat";
    case RunningKernel::kGemm:
      return "cuda.gemm";
    case RunningKernel::kCluster:
      return "cuda.cluster";
    case RunningKernel::kGenerated:
      break;
  }
  return Concat("cuda.generated(sm_", node_.image->architecture, ")");
}

void CudaKernel::WarnOnce(const ort::Context& context, const Plan& plan) const {
  if (has_warned_.exchange(true)) return;
  const char* kernel = plan.kernel() == RunningKernel::kCsr         ? "CSR"
                       : plan.kernel() == RunningKernel::kDepthwise ? "depthwise"
                       : plan.kernel() == RunningKernel::kTensor    ? "tensor-core"
                       : plan.kernel() == RunningKernel::kSegments  ? "segment"
                       : plan.kernel() == RunningKernel::kFlat      ? "flat"
                       : plan.kernel() == RunningKernel::kGemm      ? "gemm"
                       : plan.kernel() == RunningKernel::kCluster   ? "cluster"
                                                                    : "warpgroup";
  context.Warn(Concat(node_.op.name(), " node '", node_.name, "' runs the ", kernel,
                      " kernel for X of this shape, and may not run its own code for others: its image for sm_",
                      node_.image->architecture, " does not fit, ", plan.reason));
}

void CudaKernel::WarnOfRange(const ort::Context& context) const {
  if (has_warned_of_range_.exchange(true)) return;
  context.Warn(Concat(
      node_.op.name(), " node '", node_.name,
      "': outputs of a call were computed once more, without tensor cores, which takes far longer: what they read "
      "of X has values beyond 65504, or all of it is below 2^-10. With the provider option use_tf32=0, or the "
      "session config entry 'sparseconv.cuda_kernel' set to csr, all calls run without tensor cores"));
}

void CheckPlace(const ort::OrtApi* api, const std::string& name, const ort::TensorView& tensor) {
  if (tensor.data == nullptr || tensor.memory_info == nullptr) return;
  int type = kDeviceType;
  ort::MemoryInfoGetDeviceType::Call(api, tensor.memory_info, &type);
  if (type != kDeviceType) Fail("input ", name, " must be in the memory of the GPU");
}

StreamHandle StreamOf(const ort::Context& context) {
  void* stream = context.GetStream();
  // The CPU provider has none, and the stand-in for the driver takes any.
  if (kIsEmulated && stream == nullptr) stream = reinterpret_cast<void*>(1);
  return static_cast<StreamHandle>(stream);
}

void CudaKernel::Compute(const ort::Context& context) const {
  const Inputs inputs = ReadInputs(context, node_.op, node_.geometry, node_.source_begins);
  CheckPlace(context.api(), "X", inputs.x);
  for (size_t i = 0; i < inputs.num_sources; ++i) CheckPlace(context.api(), SourceName(i), inputs.sources[i]);
  CheckPlace(context.api(), "B", inputs.bias);
  CheckPlace(context.api(), "Z", inputs.residual);
  // Sources are copied to where X is aligned, or the pointwise kernel sees to it; but for code that reads them itself.
  const auto x_address = reinterpret_cast<uintptr_t>(inputs.x.data);
  const uintptr_t read_addresses = x_address | (node_.code_reads_sources() ? AddressesOf(inputs) : 0);
  const PlanKey key{inputs.batch, inputs.in_dims, read_addresses % kVectorBytes == 0,
                    x_address % (2 * kPairBytes) == 0 ? 4
                    : x_address % kPairBytes == 0     ? 2
                                                      : 1,
                    node_.was_recomputed && context.AllowsTf32()};
  const auto plan = plans_.GetOrMake(key, [&] { return MakePlan(node_, key); });
  const ort::Shape shape = OutputShape(inputs, node_.geometry, plan->sizes.out_dims);
  const Axes y_dims =
      node_.pool ? PooledDims(*node_.pool, plan->sizes.out_dims, node_.geometry.spatial_rank) : plan->sizes.out_dims;
  void* y = context.GetOutput(0, node_.pool ? PooledShape(shape, node_.geometry, y_dims) : shape);
  if (inputs.batch == 0) return;
  if (!plan->reason.empty()) WarnOnce(context, *plan);
  if (node_.was_recomputed && node_.was_recomputed->IsSet()) WarnOfRange(context);

  const StreamHandle stream = StreamOf(context);
  ContextHandle stream_context = node_.context.handle();
  if (stream != nullptr) GetDriver().stream_context(stream, &stream_context);
  if (stream_context != node_.context.handle()) {
    Fail("the stream of this call belongs to another GPU or context than the one in which the session was created");
  }
  const ScopedContext scope(stream_context);
  running_.store(LaunchCall(node_, {context, inputs, *plan, y, stream}, y_dims), std::memory_order_relaxed);
}

}  // namespace

std::unique_ptr<Kernel> CreateCudaKernel(const OpDescription& op, const ort::NodeInfo& node,
                                         SparseConvAttributes attributes) {
  return std::make_unique<CudaKernel>(op, node, attributes);
}

}  // namespace sparseconv::cuda
