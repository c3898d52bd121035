#include "node_kernels.h"

#include "../checked.h"
#include "depthwise_plan.h"
#include "gemm_weight.h"
#include "half_rounding.h"
#include "provider.h"
#include "space_to_depth.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {
namespace {

constexpr int kMinArchitecture = 75;

// The kernels of warpgroups that a session may ask for, and what they run.
struct WarpgroupChoice {
  KernelChoice choice;
  RunningKernel runs;
  const char *name, *form;
};
constexpr char kWarpgroupForm[] = "1-D and 2-D, and 1x1x1, kernels of up to 49 taps";
constexpr WarpgroupChoice kWarpgroupChoices[] = {
    {KernelChoice::kWgmma, RunningKernel::kWgmma, "warpgroup", kWarpgroupForm},
    {KernelChoice::kCluster, RunningKernel::kCluster, "cluster", kWarpgroupForm},
    {KernelChoice::kFlat, RunningKernel::kFlat, "flat",
     "windows of 64 to 2048 channels of a group, weights of up to 64 MiB with their zeros"},
    {KernelChoice::kGemm, RunningKernel::kGemm, "gemm",
     "1x1 of one group, without padding, and without strides, or in 2-D with strides of 2, weights of up to 64 MiB "
     "with their zeros"},
};

// The one that a session asks for, or null.
const WarpgroupChoice* FindWarpgroupChoice(KernelChoice choice) {
  for (const WarpgroupChoice& candidate : kWarpgroupChoices) {
    if (candidate.choice == choice) return &candidate;
  }
  return nullptr;
}

[[noreturn]] void Refuse(const WarpgroupChoice& asked) {
  Fail("'sparseconv.cuda_kernel' asks for the ", asked.name, " kernel, which runs ", asked.form,
       "; groups of 8 output channels at least, weights that are halves, or finite floats; on compute capability 9.0 "
       "alone");
}

int Attribute(Device device, DeviceAttribute attribute) {
  int value = 0;
  GetDriver().device_attribute(&value, attribute, device);
  return value;
}

DeviceFacts ReadFacts(Device device) {
  DeviceFacts facts;
  facts.architecture = 10 * Attribute(device, kComputeCapabilityMajor) + Attribute(device, kComputeCapabilityMinor);
  facts.num_multiprocessors = Attribute(device, kMultiprocessorCount);
  facts.max_shared_bytes = Attribute(device, kMaxSharedMemoryPerBlockOptin);
  if (facts.architecture < kMinArchitecture) {
    Fail("the GPU has compute capability ", facts.architecture / 10, ".", facts.architecture % 10,
         ", 7.5 is needed; run the model on the CPUExecutionProvider");
  }
  return facts;
}

}  // namespace

NodeKernels::NodeKernels(const OpDescription& description, const ort::NodeInfo& node,
                         const SparseConvAttributes& attributes)
    : op(description),
      name(node.Name()),
      geometry(attributes.geometry),
      activation(attributes.activation),
      pool(attributes.pool),
      source_begins(attributes.source_begins),
      context(node.DeviceId()) {
  CheckCsrGeometry(geometry);
  const ScopedContext scope(context.handle());
  device = ReadFacts(context.device());
  LoadDepthwiseProduct(attributes);
  LoadWgmmaProduct(attributes);
  LoadTensorProduct(attributes);
  if (!is_half() && (tensor || wgmma)) was_recomputed.emplace(context);
  LoadImage(node, attributes);
  library_kernels.emplace(is_half(), device);
  csr_weight.emplace(context, attributes.weight);
}

void NodeKernels::LoadDepthwiseProduct(const SparseConvAttributes& attributes) {
  const bool must_run = op.cuda.kernel == KernelChoice::kDepthwise;
  if (op.cuda.kernel != KernelChoice::kAuto && !must_run) return;
  if (!HasDepthwiseForm(geometry)) {
    if (must_run) {
      Fail(
          "'sparseconv.cuda_kernel' asks for the depthwise kernel, which runs 1-D and 2-D, with as many groups as "
          "input and as output channels, and kernels of up to 1024 taps");
    }
    return;
  }
  depthwise.emplace(context, DepthwiseWeight(attributes.weight, geometry));
  likely = RunningKernel::kDepthwise;
}

void NodeKernels::LoadTensorProduct(const SparseConvAttributes& attributes) {
  const bool must_run = op.cuda.kernel == KernelChoice::kTensor || op.cuda.kernel == KernelChoice::kSegments;
  if (op.cuda.kernel != KernelChoice::kAuto && !must_run) return;
  // Where floats may run on warpgroups, these are the faster ones.
  if (!is_half() && wgmma && !must_run) return;
  const bool has_tensor_cores = device.architecture >= kMinTensorArchitecture;
  const auto scaled = has_tensor_cores && !is_half() ? ScaleToHalves(attributes.weight) : std::nullopt;
  const bool can_load = has_tensor_cores && (is_half() || scaled);
  const SparseWeight& halves = scaled ? scaled->weight : attributes.weight;
  const bool is_plain = IsPointwise(geometry) && IsPlain(geometry);
  const bool must_be_plain = op.cuda.kernel == KernelChoice::kSegments;
  if (!can_load || !HasTensorForm(halves, geometry) || (must_be_plain && !is_plain)) {
    if (must_run) {
      Fail("'sparseconv.cuda_kernel' asks for the ",
           must_be_plain ? "segment kernel, which runs 1x1 without strides and padding"
                         : "tensor-core kernel, which runs 1-D and 2-D",
           ", weights that are halves, or finite floats, on compute capability 8.0 and later");
    }
    return;
  }
  tensor.emplace(context, device,
                 PackTensorWeight(halves, geometry, ChooseTensorForm(geometry, device.max_shared_bytes)),
                 scaled ? scaled->scales : std::vector<float>());
  // Warpgroups have a kernel of their own for 1x1.
  if (is_plain && !wgmma && op.cuda.kernel != KernelChoice::kTensor) {
    tensor->segments.emplace(is_half(), tensor->facts.form.tile_rows, device.architecture,
                             device.max_shared_bytes - kReservedSharedBytes);
  }
  // Whether floats run there, the calls' provider decides, unless the session does.
  if (must_run || (is_half() && !wgmma)) {
    likely = tensor->segments ? RunningKernel::kSegments : RunningKernel::kTensor;
  }
}

void NodeKernels::LoadWgmmaProduct(const SparseConvAttributes& attributes) {
  const WarpgroupChoice* const asked = FindWarpgroupChoice(op.cuda.kernel);
  if (op.cuda.kernel != KernelChoice::kAuto && asked == nullptr) return;
  const bool has_warpgroups = device.architecture == kWgmmaArchitecture;
  const auto scaled = has_warpgroups && !is_half() ? ScaleToHalves(attributes.weight) : std::nullopt;
  const bool can_load = has_warpgroups && (is_half() || scaled);
  const SparseWeight& halves = scaled ? scaled->weight : attributes.weight;
  if (!can_load || !HasWgmmaForm(halves, geometry)) {
    if (asked != nullptr) Refuse(*asked);
    return;
  }
  const WgmmaWeight weight = PackWgmmaWeight(halves, geometry, ChooseWgmmaForm(geometry), source_begins);
  const WgmmaFacts facts = FactsOf(weight, halves.values.size(), element_bytes());
  if (asked == nullptr && !IsWorthWarpgroups(facts, geometry)) return;
  wgmma.emplace(context, device, weight, facts, scaled ? scaled->scales : std::vector<float>());
  device.max_clusters = wgmma->clusters.MaxClusters();
  if (HasWindowForm(geometry, device.max_shared_bytes)) {
    windows.emplace(context, device, PackWindowWeight(halves, geometry), is_half());
  }
  if (HasFewPlaces(geometry) && HasWindowForm(WithoutStrides(geometry), device.max_shared_bytes)) {
    const SparseWeight copied = WithoutStrides(halves, geometry);
    copied_windows.emplace(context, device, PackWindowWeight(copied, WithoutStrides(geometry)), is_half());
  }
  if (asked == nullptr || asked->choice == KernelChoice::kFlat) LoadFlatProduct(halves);
  if (asked == nullptr || asked->choice == KernelChoice::kGemm) LoadGemmProduct(halves);
  if (asked != nullptr &&
      ((asked->choice == KernelChoice::kFlat && !flat) || (asked->choice == KernelChoice::kGemm && !gemm))) {
    Refuse(*asked);
  }
  // Whether floats run there, the calls' provider decides, unless the session does.
  if (asked != nullptr) {
    likely = asked->runs;
  } else if (is_half()) {
    likely = RunningKernel::kWgmma;
  }
}

void NodeKernels::LoadFlatProduct(const SparseWeight& halves) {
  const auto packed = HasFlatForm(geometry) ? PackFlatWeight(halves, geometry) : std::nullopt;
  if (packed) IfMemoryIsLeft(KernelChoice::kFlat, [&] { flat.emplace(context, device, *packed, is_half()); });
}

void NodeKernels::LoadGemmProduct(const SparseWeight& halves) {
  if (!HasGemmForm(geometry)) return;
  IfMemoryIsLeft(KernelChoice::kGemm,
                 [&] { gemm.emplace(context, device, PackGemmWeight(halves, geometry), is_half()); });
}

// With its zeros, the weight may take far more memory than in other forms. Where there is none left, others do.
template <class Load>
void NodeKernels::IfMemoryIsLeft(KernelChoice loaded, const Load& load) const {
  try {
    load();
  } catch (const DriverError& error) {
    if (op.cuda.kernel == loaded || error.result() != kOutOfMemory) throw;
  }
}

// Finds the node's image for this GPU. Where it carries some but none that fits, says so.
void NodeKernels::LoadImage(const ort::NodeInfo& node, const SparseConvAttributes& attributes) {
  const auto container = node.GetTensor("cuda_images");
  if (container.element_type() != ort::kUint8) {
    Fail("attribute 'cuda_images' must be a tensor of uint8, found element type ", container.element_type());
  }
  const bool must_run = op.cuda.kernel == KernelChoice::kGenerated;
  if (op.cuda.kernel != KernelChoice::kAuto && !must_run) return;
  const auto images = ParseImages(container.data<uint8_t>(), container.size(), attributes);
  if (images.empty()) {
    if (must_run) Fail("'sparseconv.cuda_kernel' asks for the generated kernel, and the node carries no image");
    return;
  }
  std::string reason;
  const Image* chosen = ChooseImage(images, op.element_type, device.architecture, GetDriver().version, &reason);
  if (chosen == nullptr) {
    if (must_run) Fail("'sparseconv.cuda_kernel' asks for the generated kernel, and ", reason);
    WarnOfImage(node, reason);
    return;
  }
  // The driver wants its images aligned.
  const std::vector<uint8_t> code(chosen->code, chosen->code + chosen->size);
  Image aligned = *chosen;
  aligned.code = code.data();
  try {
    image.emplace(aligned, device);
  } catch (const DriverError& error) {
    // The driver knows best what it can load.
    if (must_run || (error.result() != kInvalidImage && error.result() != kNoBinaryForGpu)) throw;
    WarnOfImage(node, Concat("its image for sm_", chosen->architecture, " does not fit, ", error.what()));
    return;
  }
  likely = RunningKernel::kGenerated;
}

void NodeKernels::WarnOfImage(const ort::NodeInfo& node, const std::string& reason) {
  has_warned = true;
  const std::string kernel = depthwise         ? "the depthwise kernel"
                             : tensor || wgmma ? "a kernel on tensor cores, or with little work the CSR kernel"
                                               : "the CSR kernel";
  node.Warn(Concat(op.name(), " node '", name, "' runs ", kernel, ": ", reason));
}

}  // namespace sparseconv::cuda
