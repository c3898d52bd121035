#include "cuda_kernel.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "../checked.h"
#include "../half.h"
#include "../plan_cache.h"
#include "cluster_plan.h"
#include "concatenate_plan.h"
#include "csr_plan.h"
#include "depthwise_plan.h"
#include "driver.h"
#include "generated_plan.h"
#include "half_rounding.h"
#include "images.h"
#include "library_kernels.h"
#include "octet_plan.h"
#include "pointwise_plan.h"
#include "pool_plan.h"
#include "provider.h"
#include "ring_plan.h"
#include "space_to_depth.h"
#include "tensor_plan.h"
#include "tensor_weight.h"
#include "wgmma_plan.h"
#include "wgmma_weight.h"
#include "window_weight.h"

namespace sparseconv::cuda {
namespace {

constexpr int kMinArchitecture = 75;
constexpr unsigned kReduceThreads = 256;
// Few, so that the little that there is spreads over the multiprocessors.
constexpr unsigned kReduceVectorThreads = 64;
constexpr int kClusterArchitecture = 90;
constexpr int64_t kMaxReduceBlocks = 1 << 16;
constexpr uintptr_t kVectorBytes = 16;
constexpr uintptr_t kPairBytes = 4;  // of halves
// More than on the CPU: the batch is part of the key, and a plan is small.
constexpr size_t kMaxPlans = 32;

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

enum class RunningKernel { kCsr, kDepthwise, kTensor, kWgmma, kCluster, kGenerated };

struct Plan {
  ResolvedGeometry sizes;
  CsrLaunch csr;
  std::optional<DepthwiseLaunch> depthwise;
  std::optional<TensorLaunch> tensor;
  std::optional<WgmmaLaunch> wgmma;
  std::optional<ClusterLaunch> cluster;  // before all others of warpgroups
  // Before `wgmma`, where Y and the residual begin at multiples of 16 bytes; one of them at most.
  std::optional<OctetLaunch> octets;
  std::optional<SpaceToDepthLaunch> space_to_depth;  // in front of `octets`, where there are strides
  std::optional<RingLaunch> ring;
  std::optional<PointwiseLaunch> pointwise;
  std::optional<GeneratedLaunch> generated;
  std::string reason;  // why the node's image cannot run; empty where it does, or where another kernel is faster

  RunningKernel kernel() const {
    if (generated) return RunningKernel::kGenerated;
    if (cluster) return RunningKernel::kCluster;
    if (wgmma || octets || ring || pointwise) return RunningKernel::kWgmma;
    if (depthwise) return RunningKernel::kDepthwise;
    return tensor ? RunningKernel::kTensor : RunningKernel::kCsr;
  }

  void LeaveWarpgroups() {
    wgmma.reset();
    cluster.reset();
    octets.reset();
    ring.reset();
    pointwise.reset();
  }
};

Bounds BoundsOf(const Activation& activation, bool is_half) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float low = -kInfinity, high = kInfinity;
  if (activation.code == sparseconv::ActivationCode::kRelu) low = 0;
  if (activation.code == sparseconv::ActivationCode::kClip) low = activation.alpha, high = activation.beta;
  // Rounding keeps the order of numbers, so it may come before or behind.
  const auto word = [is_half](float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return is_half ? 0x10001u * FloatToHalf(value) : bits;
  };
  return {word(low), word(high)};
}

Epilogue EpilogueOf(const void* bias, const void* residual, const Activation& activation, bool is_half) {
  const Bounds bounds = BoundsOf(activation, is_half);
  return {bias, residual, static_cast<int>(activation.code), activation.alpha, activation.beta, bounds};
}

LaunchShape ReduceShape(int64_t count, unsigned threads) {
  LaunchShape shape;
  shape.threads = threads;
  shape.grid[0] = static_cast<unsigned>(std::min(CeilDivide(count, int64_t{threads}), kMaxReduceBlocks));
  return shape;
}

size_t BlocksOf(const LaunchShape& shape) { return size_t{shape.grid[0]} * shape.grid[1] * shape.grid[2]; }

size_t RoundedUp(size_t bytes) { return (bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes; }

template <class Value>
size_t BytesOf(const std::vector<Value>& values) {
  return values.size() * sizeof(Value);
}

// No launch takes for ever.
template <class Launch>
double CyclesOf(const std::optional<Launch>& launch) {
  return launch ? launch->cycles : std::numeric_limits<double>::infinity();
}

// The weight as the tensor-core kernel reads it, in device memory, and that kernel.
struct TensorProduct {
  // `scales` are those of a ScaledWeight, and none where X is of halves.
  TensorProduct(const Context& context, const DeviceFacts& device, const TensorWeight& weight,
                const std::vector<float>& scales)
      : begins_offset(RoundedUp(weight.steps.size())),
        scales_offset(begins_offset + RoundedUp(BytesOf(weight.step_begins))),
        memory(context, scales_offset + RoundedUp(BytesOf(scales))),
        kernels(scales.empty(), weight.form.tile_rows, device.max_shared_bytes - kReservedSharedBytes) {
    facts.form = weight.form;
    facts.num_steps = weight.step_begins.empty() ? 0 : weight.step_begins.back();
    facts.max_steps = weight.max_steps;
    facts.element_bytes = scales.empty() ? sizeof(uint16_t) : sizeof(float);
    memory.Upload(0, weight.steps.data(), weight.steps.size());
    memory.Upload(begins_offset, weight.step_begins.data(), BytesOf(weight.step_begins));
    if (!scales.empty()) memory.Upload(scales_offset, scales.data(), BytesOf(scales));
    SynchronizeUploads();  // the host's arrays go now
  }

  // All pointers to the weight.
  void Fill(TensorParams* params) const {
    params->steps = memory.at(0);
    params->step_begins = static_cast<const unsigned*>(memory.at(begins_offset));
    params->scales = static_cast<const float*>(memory.at(scales_offset));
  }

  TensorFacts facts;
  const size_t begins_offset, scales_offset;
  const Memory memory;
  const TensorKernels kernels;
};

// The weight as the warpgroup kernels read it, in device memory, and these kernels.
struct WgmmaProduct {
  // `scales` are those of a ScaledWeight, and none where X is of halves.
  WgmmaProduct(const Context& context, const DeviceFacts& device, const WgmmaWeight& weight, const WgmmaFacts& about,
               const std::vector<float>& scales)
      : facts(about),
        chunk_begins(RoundedUp(weight.chunks.size())),
        block_begins(chunk_begins + RoundedUp(BytesOf(weight.chunk_begins))),
        channels(block_begins + RoundedUp(BytesOf(weight.block_begins))),
        taps(channels + RoundedUp(BytesOf(weight.channels))),
        scales_offset(taps + RoundedUp(BytesOf(weight.taps))),
        memory(context, scales_offset + RoundedUp(BytesOf(scales))),
        kernels(scales.empty(), device.max_shared_bytes - kReservedSharedBytes),
        clusters(scales.empty(), device.max_shared_bytes - kReservedSharedBytes),
        pointwise(scales.empty(), device.max_shared_bytes - kReservedSharedBytes) {
    memory.Upload(0, weight.chunks.data(), weight.chunks.size());
    memory.Upload(chunk_begins, weight.chunk_begins.data(), BytesOf(weight.chunk_begins));
    memory.Upload(block_begins, weight.block_begins.data(), BytesOf(weight.block_begins));
    memory.Upload(channels, weight.channels.data(), BytesOf(weight.channels));
    memory.Upload(taps, weight.taps.data(), BytesOf(weight.taps));
    if (!scales.empty()) memory.Upload(scales_offset, scales.data(), BytesOf(scales));
    SynchronizeUploads();  // the host's arrays go now
  }

  // Of the weight's rows; of floats alone.
  const float* scales() const { return static_cast<const float*>(memory.at(scales_offset)); }

  // All pointers to the weight.
  void Fill(WarpgroupParams* params) const {
    params->scales = scales();
    params->chunks = memory.at(0);
    params->chunk_begins = static_cast<const unsigned*>(memory.at(chunk_begins));
    params->block_begins = static_cast<const unsigned*>(memory.at(block_begins));
    params->channels = static_cast<const int*>(memory.at(channels));
  }

  const WgmmaFacts facts;
  const size_t chunk_begins, block_begins, channels, taps, scales_offset;  // offsets
  const Memory memory;
  const WgmmaKernels kernels;
  const ClusterKernels clusters;
  const PointwiseKernels pointwise;
};

// The weight as the kernel for depthwise convolutions reads it, likewise.
struct DepthwiseProduct {
  DepthwiseProduct(const Context& context, const std::vector<float>& weight) : memory(context, BytesOf(weight)) {
    memory.Upload(0, weight.data(), BytesOf(weight));
    SynchronizeUploads();  // the host's array goes now
  }

  const Memory memory;
};

// The weight as the kernels for windows of few channels read it, likewise.
struct WindowProduct {
  WindowProduct(const Context& context, const DeviceFacts& device, const WindowWeight& weight, bool is_half)
      : form(weight.form),
        channels(RoundedUp(weight.tiles.size())),
        memory(context, channels + RoundedUp(BytesOf(weight.channels))),
        octets(is_half, false, device.max_shared_bytes - kReservedSharedBytes),
        words(is_half, true, device.max_shared_bytes - kReservedSharedBytes),
        space_to_depth(is_half) {
    if (is_half) ring.emplace(device.max_shared_bytes - kReservedSharedBytes);
    memory.Upload(0, weight.tiles.data(), weight.tiles.size());
    memory.Upload(channels, weight.channels.data(), BytesOf(weight.channels));
    SynchronizeUploads();  // the host's arrays go now
  }

  // All pointers to the weight.
  template <class Params>
  void Fill(Params* params) const {
    params->weight = memory.at(0);
    params->channels = static_cast<const int*>(memory.at(channels));
  }

  const WindowForm form;
  const size_t channels;  // offset
  const Memory memory;
  std::optional<RingKernels> ring;  // of halves alone
  const OctetKernels octets, words;
  const SpaceToDepthKernel space_to_depth;
};

// The node's own kernel, loaded.
struct GeneratedImage {
  GeneratedImage(const Image& image, const DeviceFacts& device)
      : plan(image.plan), architecture(image.architecture), min_batch(image.min_batch), library(image.code) {
    const Driver& driver = GetDriver();
    function = library.Function("sparseconv_generated");
    driver.function_attribute(&facts.static_shared_bytes, kStaticSharedBytes, function);
    const int64_t shared = SharedBytes(plan);
    // Else no launch is ever planned.
    if (shared + facts.static_shared_bytes > device.max_shared_bytes) return;
    driver.set_function_attribute(function, kMaxDynamicSharedBytes, static_cast<int>(shared));
    driver.resident_blocks(&facts.blocks_a_multiprocessor, function, plan.threads + plan.staging_threads,
                           static_cast<size_t>(shared));
    if (device.architecture < kClusterArchitecture || facts.blocks_a_multiprocessor < 1) return;
    LaunchShape pair;
    pair.grid[0] = pair.cluster = 2;
    pair.threads = static_cast<unsigned>(plan.threads + plan.staging_threads);
    pair.dynamic_shared_bytes = static_cast<unsigned>(shared);
    facts.pairs = ActiveClusters(function, pair);
  }

  const GeneratedPlan plan;
  const unsigned architecture;
  const int64_t min_batch;
  const Library library;
  FunctionHandle function = nullptr;
  GeneratedFacts facts;
};

class CudaKernel final : public Kernel {
 public:
  CudaKernel(const OpDescription& op, const ort::NodeInfo& node, SparseConvAttributes attributes);

  std::string name() const override;
  void Compute(const ort::Context& context) const override;

 private:
  // One call, ready to be launched.
  struct Call {
    const ort::Context& context;
    const Inputs& inputs;
    const Plan& plan;
    Epilogue epilogue;
    void* y;
    StreamHandle stream;
  };

  void LoadImage(const ort::NodeInfo& node, const SparseConvAttributes& attributes);
  void LoadDepthwiseProduct(const SparseConvAttributes& attributes);
  void LoadTensorProduct(const SparseConvAttributes& attributes);
  void LoadWgmmaProduct(const SparseConvAttributes& attributes);
  void WarnOfImage(const ort::NodeInfo& node, const std::string& reason);
  Plan MakePlan(const PlanKey& key) const;
  bool PlanDepthwise(const PlanKey& key, Plan* plan) const;
  bool MayMultiplyHalves(const PlanKey& key) const;
  double PlanOthers(const PlanKey& key, Plan* plan) const;
  void PlanWithoutStrides(const PlanKey& key, Plan* plan) const;
  double PlanWindows(const PlanKey& key, Plan* plan) const;
  double PlanPointwise(const PlanKey& key, Plan* plan) const;
  double PlanCluster(const PlanKey& key, Plan* plan) const;
  double SourceCycles(const PlanKey& key) const;
  void PlanWarpgroups(const PlanKey& key, double others, Plan* plan) const;
  void WarnOnce(const ort::Context& context, const Plan& plan) const;
  void WarnOfRange(const ort::Context& context) const;
  static RunningKernel KernelOf(const Call& call);
  void Launch(const Call& call) const;
  template <class Params>
  void LaunchLibrary(FunctionHandle function, LaunchShape shape, const Params& params, StreamHandle stream) const;
  template <class Params>
  static void FillTile(const Call& call, Params* tile);
  CsrParams MakeCallCsrParams(const Call& call) const;
  void LaunchCsr(const Call& call) const;
  void LaunchDepthwise(const Call& call) const;
  void LaunchTensor(const Call& call) const;
  void LaunchWgmma(const Call& call) const;
  void LaunchCluster(const Call& call) const;
  void LaunchOctets(const Call& call) const;
  void LaunchRing(const Call& call) const;
  void* LendHalves(const Call& call, size_t bytes, size_t num_seen, unsigned** seen, RecomputeParams* recompute,
                   std::optional<ort::DeviceScratch>* scratch) const;
  void LaunchPointwise(const Call& call) const;
  void FillRecompute(const Call& call, RecomputeParams* recompute) const;
  bool CanClusterReadSources(const ResolvedGeometry& sizes) const;
  bool ReadsSources(const Plan& plan, const Inputs& inputs) const;
  const void* Concatenate(const ort::Context& context, const Inputs& inputs, StreamHandle stream,
                          std::optional<ort::DeviceScratch>* scratch) const;
  void LaunchSplits(const Call& call) const;
  void LaunchPasses(const Call& call) const;
  void LendSums(const Call& call, const LaunchShape& shape, int64_t part_values, WarpgroupParams* params,
                std::optional<ort::DeviceScratch>* sums) const;
  ReduceParams MakeReduceParams(const Call& call, const void* partial, int num_splits, int64_t part_values) const;
  void ReduceParts(const Call& call, const WarpgroupParams& params, const LaunchShape& shape,
                   int64_t part_values) const;
  void Pool(const Call& call, const Axes& pooled_dims, void* y) const;
  GeneratedParams MakeGeneratedParams(const Call& call) const;
  Epilogue MakeEpilogue(const Inputs& inputs) const;
  size_t NumOutputs(const Call& call) const;
  bool is_half() const { return op_.element_type == ort::kFloat16; }
  size_t element_bytes() const { return is_half() ? sizeof(uint16_t) : sizeof(float); }

  const OpDescription op_;
  const std::string node_name_;
  const ConvGeometry geometry_;
  const Activation activation_;
  const std::optional<PoolGeometry> pool_;
  const std::vector<int64_t> source_begins_;  // as of SparseConvAttributes
  // In the order of their dependence: the context is the last to go.
  const Context context_;
  DeviceFacts device_;
  std::optional<LibraryKernels> library_kernels_;
  std::optional<CsrWeight> csr_weight_;
  std::optional<DepthwiseProduct> depthwise_;
  std::optional<TensorProduct> tensor_;
  std::optional<WgmmaProduct> wgmma_;
  std::optional<WindowProduct> windows_;
  std::optional<WindowProduct> copied_windows_;  // of the convolution without strides
  std::optional<HostFlag> was_recomputed_;       // a call of floats that are rounded
  std::optional<GeneratedImage> image_;
  mutable PlanCache<PlanKey, Plan, kMaxPlans> plans_;
  mutable std::atomic<bool> has_warned_{false}, has_warned_of_range_{false};
  mutable std::atomic<RunningKernel> running_{RunningKernel::kCsr};  // in the last call, at first the likely one
};

CudaKernel::CudaKernel(const OpDescription& op, const ort::NodeInfo& node, SparseConvAttributes attributes)
    : op_(op),
      node_name_(node.Name()),
      geometry_(attributes.geometry),
      activation_(attributes.activation),
      pool_(attributes.pool),
      source_begins_(attributes.source_begins),
      context_(node.DeviceId()) {
  CheckCsrGeometry(geometry_);
  const ScopedContext scope(context_.handle());
  device_ = ReadFacts(context_.device());
  LoadDepthwiseProduct(attributes);
  LoadWgmmaProduct(attributes);
  LoadTensorProduct(attributes);
  if (!is_half() && (tensor_ || wgmma_)) was_recomputed_.emplace(context_);
  LoadImage(node, attributes);
  library_kernels_.emplace(is_half(), device_);
  csr_weight_.emplace(context_, attributes.weight);
}

void CudaKernel::LoadDepthwiseProduct(const SparseConvAttributes& attributes) {
  const bool must_run = op_.cuda.kernel == KernelChoice::kDepthwise;
  if (op_.cuda.kernel != KernelChoice::kAuto && !must_run) return;
  if (!HasDepthwiseForm(geometry_)) {
    if (must_run) {
      Fail(
          "'sparseconv.cuda_kernel' asks for the depthwise kernel, which runs 1-D and 2-D, with as many groups as "
          "input and as output channels, and kernels of up to 1024 taps");
    }
    return;
  }
  depthwise_.emplace(context_, DepthwiseWeight(attributes.weight, geometry_));
  running_.store(RunningKernel::kDepthwise);
}

void CudaKernel::LoadTensorProduct(const SparseConvAttributes& attributes) {
  const bool must_run = op_.cuda.kernel == KernelChoice::kTensor;
  if (op_.cuda.kernel != KernelChoice::kAuto && !must_run) return;
  // Where floats may run on warpgroups, these are the faster ones.
  if (!is_half() && wgmma_ && !must_run) return;
  const bool can_load = device_.architecture >= kMinTensorArchitecture;
  const auto scaled = can_load && !is_half() ? ScaleToHalves(attributes.weight) : std::nullopt;
  const SparseWeight& halves = scaled ? scaled->weight : attributes.weight;
  if (!can_load || !HasTensorForm(halves, geometry_)) {
    if (must_run) {
      Fail(
          "'sparseconv.cuda_kernel' asks for the tensor-core kernel, which runs 1-D and 2-D, weights that are halves, "
          "or "
          "finite floats, on compute capability 8.0 and later");
    }
    return;
  }
  tensor_.emplace(context_, device_,
                  PackTensorWeight(halves, geometry_, ChooseTensorForm(geometry_, device_.max_shared_bytes)),
                  scaled ? scaled->scales : std::vector<float>());
  // Whether floats run there, the calls' provider decides.
  if (is_half() && !wgmma_) running_.store(RunningKernel::kTensor);
}

void CudaKernel::LoadWgmmaProduct(const SparseConvAttributes& attributes) {
  const bool must_cluster = op_.cuda.kernel == KernelChoice::kCluster;
  const bool must_run = op_.cuda.kernel == KernelChoice::kWgmma || must_cluster;
  if (op_.cuda.kernel != KernelChoice::kAuto && !must_run) return;
  const bool can_load = device_.architecture == kWgmmaArchitecture && GetDriver().version >= kWgmmaDriver;
  const auto scaled = can_load && !is_half() ? ScaleToHalves(attributes.weight) : std::nullopt;
  const SparseWeight& halves = scaled ? scaled->weight : attributes.weight;
  if (!can_load || !HasWgmmaForm(halves, geometry_)) {
    if (must_run) {
      Fail("'sparseconv.cuda_kernel' asks for the ", must_cluster ? "cluster" : "warpgroup",
           " kernel, which runs 1-D and 2-D, and 1x1x1; weights that are "
           "halves, or finite floats, groups of 8 output channels at least, kernels of up to 49 taps; on "
           "compute capability 9.0 alone, with a driver for CUDA 12.2 or later");
    }
    return;
  }
  const WgmmaWeight weight = PackWgmmaWeight(halves, geometry_, ChooseWgmmaForm(geometry_), source_begins_);
  const WgmmaFacts facts = FactsOf(weight, halves.values.size(), element_bytes());
  if (!must_run && !IsWorthWarpgroups(facts, geometry_)) return;
  wgmma_.emplace(context_, device_, weight, facts, scaled ? scaled->scales : std::vector<float>());
  device_.max_clusters = wgmma_->clusters.MaxClusters();
  if (HasWindowForm(geometry_, device_.max_shared_bytes)) {
    windows_.emplace(context_, device_, PackWindowWeight(halves, geometry_), is_half());
  }
  if (HasFewPlaces(geometry_) && HasWindowForm(WithoutStrides(geometry_), device_.max_shared_bytes)) {
    const SparseWeight copied = WithoutStrides(halves, geometry_);
    copied_windows_.emplace(context_, device_, PackWindowWeight(copied, WithoutStrides(geometry_)), is_half());
  }
  // Whether floats run there, the calls' provider decides.
  if (is_half()) running_.store(must_cluster ? RunningKernel::kCluster : RunningKernel::kWgmma);
}

// Finds the node's image for this GPU. Where it carries some but none that fits, says so.
void CudaKernel::LoadImage(const ort::NodeInfo& node, const SparseConvAttributes& attributes) {
  const auto container = node.GetTensor("cuda_images");
  if (container.element_type() != ort::kUint8) {
    Fail("attribute 'cuda_images' must be a tensor of uint8, found element type ", container.element_type());
  }
  const auto images = ParseImages(container.data<uint8_t>(), container.size(), attributes);
  const bool must_run = op_.cuda.kernel == KernelChoice::kGenerated;
  if (op_.cuda.kernel != KernelChoice::kAuto && !must_run) return;
  if (images.empty()) {
    if (must_run) Fail("'sparseconv.cuda_kernel' asks for the generated kernel, and the node carries no image");
    return;
  }
  std::string reason;
  const Image* image = ChooseImage(images, op_.element_type, device_.architecture, GetDriver().version, &reason);
  if (image == nullptr) {
    if (must_run) Fail("'sparseconv.cuda_kernel' asks for the generated kernel, and ", reason);
    WarnOfImage(node, reason);
    return;
  }
  // The driver wants its images aligned.
  const std::vector<uint8_t> code(image->code, image->code + image->size);
  Image aligned = *image;
  aligned.code = code.data();
  try {
    image_.emplace(aligned, device_);
  } catch (const DriverError& error) {
    // The driver knows best what it can load.
    if (must_run || (error.result() != kInvalidImage && error.result() != kNoBinaryForGpu)) throw;
    WarnOfImage(node, Concat("its image for sm_", image->architecture, " does not fit, ", error.what()));
    return;
  }
  running_.store(RunningKernel::kGenerated);
}

void CudaKernel::WarnOfImage(const ort::NodeInfo& node, const std::string& reason) {
  has_warned_.store(true);
  const std::string kernel = depthwise_          ? "the depthwise kernel"
                             : tensor_ || wgmma_ ? "a kernel on tensor cores, or with little work the CSR kernel"
                                                 : "the CSR kernel";
  node.Warn(Concat(op_.name(), " node '", node_name_, "' runs ", kernel, ": ", reason));
}

std::string CudaKernel::name() const {
  switch (running_.load(std::memory_order_relaxed)) {
    case RunningKernel::kCsr:
      return "cuda.csr";
    case RunningKernel::kDepthwise:
      return "cuda.depthwise";
    case RunningKernel::kTensor:
      return "cuda.tensor";
    case RunningKernel::kWgmma:
      return "cuda.wgmma";
    case RunningKernel::kCluster:
      return "cuda.cluster";
    case RunningKernel::kGenerated:
      break;
  }
  return Concat("cuda.generated(sm_", image_->architecture, ")");
}

// Whether the kernel for depthwise convolutions runs a call: wherever it can.
bool CudaKernel::PlanDepthwise(const PlanKey& key, Plan* plan) const {
  if (!depthwise_) return false;
  plan->depthwise =
      ChooseDepthwiseLaunch(geometry_, plan->sizes, key.batch, static_cast<int64_t>(element_bytes()), device_);
  if (!plan->depthwise && op_.cuda.kernel == KernelChoice::kDepthwise) {
    Fail("the depthwise kernel cannot run this call: a block has no room for its rows, or there are too many of them");
  }
  return plan->depthwise.has_value();
}

// Whether what multiplies halves may run a call: floats are rounded to as many bits as TF32 has, where the session
// allows that, or asks for such a kernel.
bool CudaKernel::MayMultiplyHalves(const PlanKey& key) const {
  return is_half() || key.allows_tf32 || op_.cuda.kernel != KernelChoice::kAuto;
}

// What runs a call that is not on warpgroups: the kernel for tensor cores where that is faster than the CSR kernel.
// Returns its cycles.
double CudaKernel::PlanOthers(const PlanKey& key, Plan* plan) const {
  const double csr =
      CsrCycles(geometry_, plan->sizes, key.batch, csr_weight_->num_entries(), device_) + SourceCycles(key);
  if (!tensor_ || !MayMultiplyHalves(key)) return csr;
  TensorFacts facts = tensor_->facts;
  facts.x_columns = is_half() ? key.x_columns : std::max(key.x_columns / 2, 1);
  plan->tensor = ChooseTensorLaunch(geometry_, plan->sizes, key.batch, device_, facts);
  const double tensor = CyclesOf(plan->tensor) + SourceCycles(key);
  if (op_.cuda.kernel == KernelChoice::kTensor) {
    if (!plan->tensor) Fail("the tensor-core kernel cannot run this call: no tile of it fits");
    return tensor;
  }
  if (tensor >= csr) plan->tensor.reset();
  return std::min(tensor, csr);
}

// By octets, from a copy of X without strides. Without these, that kernel runs no such node.
void CudaKernel::PlanWithoutStrides(const PlanKey& key, Plan* plan) const {
  const ResolvedGeometry copied = WithoutStrides(plan->sizes, geometry_);
  const auto bytes = static_cast<int64_t>(element_bytes());
  plan->space_to_depth = ChooseSpaceToDepth(geometry_, plan->sizes, copied, key.batch, bytes, device_);
  if (!plan->space_to_depth) return;
  plan->octets = ChooseOctetLaunch(WithoutStrides(geometry_), copied, key.batch, device_, copied_windows_->form, bytes,
                                   /*is_copied=*/true);
  if (plan->octets) plan->octets->cycles += plan->space_to_depth->cycles;
}

// By the fastest one of the kernels of warpgroups but for clusters, without regard to others. Returns its cycles.
double CudaKernel::PlanWindows(const PlanKey& key, Plan* plan) const {
  plan->wgmma = ChooseWgmmaLaunch(geometry_, plan->sizes, key.batch, device_, wgmma_->facts);
  if (windows_ && key.is_x_aligned) {
    plan->octets = ChooseOctetLaunch(geometry_, plan->sizes, key.batch, device_, windows_->form,
                                     static_cast<int64_t>(element_bytes()), /*is_copied=*/false);
    if (!plan->octets && windows_->ring) {
      plan->ring = ChooseRingLaunch(geometry_, plan->sizes, key.batch, device_, windows_->form);
    }
  }
  if (copied_windows_) PlanWithoutStrides(key, plan);
  const double wgmma = CyclesOf(plan->wgmma), octets = CyclesOf(plan->octets), ring = CyclesOf(plan->ring);
  if (octets >= std::min(wgmma, ring)) plan->octets.reset();
  if (ring >= std::min(wgmma, CyclesOf(plan->octets))) plan->ring.reset();
  return std::min({wgmma, octets, ring});
}

// The same of 1x1.
double CudaKernel::PlanPointwise(const PlanKey& key, Plan* plan) const {
  plan->pointwise = ChoosePointwiseLaunch(geometry_, plan->sizes, key.batch, device_, wgmma_->facts);
  const bool reads_sources = plan->pointwise && plan->pointwise->is_whole;
  return CyclesOf(plan->pointwise) + (reads_sources ? 0.0 : SourceCycles(key));
}

// The same by clusters.
double CudaKernel::PlanCluster(const PlanKey& key, Plan* plan) const {
  const int64_t x_alignment = key.is_x_aligned ? kVectorBytes : kPairBytes / 2 * static_cast<int64_t>(key.x_columns);
  plan->cluster = ChooseClusterLaunch(geometry_, plan->sizes, key.batch, device_, wgmma_->facts, x_alignment);
  return CyclesOf(plan->cluster) + (CanClusterReadSources(plan->sizes) ? 0.0 : SourceCycles(key));
}

// Whether the kernel for clusters reads the sources of X, if there are any, where they are.
bool CudaKernel::CanClusterReadSources(const ResolvedGeometry& sizes) const {
  const auto image = static_cast<double>(geometry_.in_channels) * static_cast<double>(sizes.in_dims[0]) *
                     static_cast<double>(sizes.in_dims[1] * sizes.in_dims[2]);
  return IsPointwise(geometry_) && IsPlain(geometry_) && sizes.out_dims == sizes.in_dims &&
         image * static_cast<double>(element_bytes()) < static_cast<double>(1 << kClusterSourceShift);
}

// What it takes to copy the sources of X together; nothing where X is one.
double CudaKernel::SourceCycles(const PlanKey& key) const {
  if (source_begins_.empty()) return 0.0;
  const auto plane = static_cast<double>(key.in_dims[0]) * static_cast<double>(key.in_dims[1]) *
                     static_cast<double>(key.in_dims[2] * static_cast<int64_t>(element_bytes()));
  return ConcatenateCycles(static_cast<double>(key.batch * geometry_.in_channels) * plane, device_);
}

// On warpgroups, where that is faster than what takes `others` cycles.
void CudaKernel::PlanWarpgroups(const PlanKey& key, double others, Plan* plan) const {
  const KernelChoice choice = op_.cuda.kernel;
  double cycles = std::numeric_limits<double>::infinity();
  if (choice != KernelChoice::kCluster) {
    cycles = IsPointwise(geometry_) ? PlanPointwise(key, plan) : PlanWindows(key, plan);
    if (choice == KernelChoice::kWgmma && std::isinf(cycles)) {
      Fail("the warpgroup kernel cannot run this call: no tile of it fits, or the tensors are too large");
    }
  }
  if (choice != KernelChoice::kWgmma) {
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

Plan CudaKernel::MakePlan(const PlanKey& key) const {
  Plan plan;
  plan.sizes = Resolve(geometry_, key.in_dims);
  CheckCsrSizes(geometry_, plan.sizes, key.batch);
  if (key.batch == 0) return plan;
  plan.csr = ChooseCsrLaunch(geometry_, plan.sizes, key.batch, csr_weight_->num_entries(), device_, op_.cuda.sub_batch);
  const bool must_run_image = op_.cuda.kernel == KernelChoice::kGenerated;
  if (image_ && (must_run_image || key.batch >= image_->min_batch)) {
    if (const auto sizes = FindPlaneSizes(image_->plan, plan.sizes, key.batch, &plan.reason)) {
      GeneratedFacts facts = image_->facts;
      facts.is_x_aligned = key.is_x_aligned;
      plan.generated = ChooseLaunch(image_->plan, *sizes, device_, facts, op_.cuda, &plan.reason);
    }
    if (plan.generated) return plan;
    if (must_run_image) {
      Fail("the image for sm_", image_->architecture, " cannot run this call: ", plan.reason);
    }
  }
  if (PlanDepthwise(key, &plan)) return plan;
  const double others = PlanOthers(key, &plan);
  if (wgmma_ && MayMultiplyHalves(key)) PlanWarpgroups(key, others, &plan);
  return plan;
}

void CudaKernel::WarnOnce(const ort::Context& context, const Plan& plan) const {
  if (has_warned_.exchange(true)) return;
  const char* kernel = plan.kernel() == RunningKernel::kCsr         ? "CSR"
                       : plan.kernel() == RunningKernel::kDepthwise ? "depthwise"
                       : plan.kernel() == RunningKernel::kTensor    ? "tensor-core"
                       : plan.kernel() == RunningKernel::kCluster   ? "cluster"
                                                                    : "warpgroup";
  context.Warn(Concat(op_.name(), " node '", node_name_, "' runs the ", kernel,
                      " kernel for X of this shape, and may not run its own code for others: its image for sm_",
                      image_->architecture, " does not fit, ", plan.reason));
}

void CudaKernel::WarnOfRange(const ort::Context& context) const {
  if (has_warned_of_range_.exchange(true)) return;
  context.Warn(Concat(
      op_.name(), " node '", node_name_,
      "': outputs of a call were computed once more, without tensor cores, which takes far longer: what they read "
      "of X has values beyond 65504, or all of it is below 2^-10. With the provider option use_tf32=0, or the "
      "session config entry 'sparseconv.cuda_kernel' set to csr, all calls run without tensor cores"));
}

void CheckPlace(const ort::OrtApi* api, const char* name, const ort::TensorView& tensor) {
  if (tensor.data == nullptr || tensor.memory_info == nullptr) return;
  int type = kDeviceType;
  ort::MemoryInfoGetDeviceType::Call(api, tensor.memory_info, &type);
  if (type != kDeviceType) Fail("input ", name, " must be in the memory of the GPU");
}

bool AreVectors(const void* y, const void* residual) {
  return (reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(residual)) % kVectorBytes == 0;
}

bool IsPaired(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPairBytes == 0; }

StreamHandle StreamOf(const ort::Context& context) {
  void* stream = context.GetStream();
  // The CPU provider has none, and the stand-in for the driver takes any.
  if (kIsEmulated && stream == nullptr) stream = reinterpret_cast<void*>(1);
  return static_cast<StreamHandle>(stream);
}

void CudaKernel::Compute(const ort::Context& context) const {
  Inputs inputs = ReadInputs(context, op_, geometry_, source_begins_);
  CheckPlace(context.api(), "X", inputs.x);
  for (size_t i = 0; i < inputs.num_sources; ++i) CheckPlace(context.api(), "X", inputs.sources[i]);
  CheckPlace(context.api(), "B", inputs.bias);
  CheckPlace(context.api(), "Z", inputs.residual);
  // Sources are copied to where X is aligned, or the pointwise kernel sees to it.
  const auto x_address = reinterpret_cast<uintptr_t>(inputs.x.data);
  const PlanKey key{inputs.batch, inputs.in_dims, x_address % kVectorBytes == 0,
                    x_address % (2 * kPairBytes) == 0 ? 4
                    : x_address % kPairBytes == 0     ? 2
                                                      : 1,
                    was_recomputed_ && context.AllowsTf32()};
  const auto plan = plans_.GetOrMake(key, [&] { return MakePlan(key); });
  const ort::Shape shape = OutputShape(inputs, geometry_, plan->sizes.out_dims);
  const Axes y_dims = pool_ ? PooledDims(*pool_, plan->sizes.out_dims, geometry_.spatial_rank) : plan->sizes.out_dims;
  void* y = context.GetOutput(0, pool_ ? PooledShape(shape, geometry_, y_dims) : shape);
  if (inputs.batch == 0) return;
  if (!plan->reason.empty()) WarnOnce(context, *plan);
  if (was_recomputed_ && was_recomputed_->IsSet()) WarnOfRange(context);

  const StreamHandle stream = StreamOf(context);
  ContextHandle stream_context = context_.handle();
  if (stream != nullptr) GetDriver().stream_context(stream, &stream_context);
  if (stream_context != context_.handle()) {
    Fail("the stream of this call belongs to another GPU or context than the one in which the session was created");
  }
  const ScopedContext scope(stream_context);
  std::optional<ort::DeviceScratch> concatenated;
  if (inputs.num_sources > 0 && !ReadsSources(*plan, inputs)) {
    inputs.x.data = Concatenate(context, inputs, stream, &concatenated);
  }
  Call call{context, inputs, *plan, MakeEpilogue(inputs), y, stream};
  if (pool_) {
    const ort::DeviceScratch convolved(context, inputs.x.memory_info, NumOutputs(call) * element_bytes());
    call.y = convolved.data();
    Launch(call);
    Pool(call, y_dims, y);
  } else {
    Launch(call);
  }
}

Epilogue CudaKernel::MakeEpilogue(const Inputs& inputs) const {
  return EpilogueOf(inputs.bias.data, inputs.residual.data, activation_, is_half());
}

// What runs a call: the plan's kernel, but where only one could that needs Y and the residual aligned, and one is not.
RunningKernel CudaKernel::KernelOf(const Call& call) {
  const bool needs_vectors =
      (call.plan.octets || call.plan.ring) && !call.plan.wgmma && !call.plan.cluster && !call.plan.generated;
  return needs_vectors && !AreVectors(call.y, call.epilogue.residual) ? RunningKernel::kCsr : call.plan.kernel();
}

void CudaKernel::Launch(const Call& call) const {
  const RunningKernel kernel = KernelOf(call);
  running_.store(kernel, std::memory_order_relaxed);
  if (kernel == RunningKernel::kCsr) {
    LaunchCsr(call);
  } else if (kernel == RunningKernel::kDepthwise) {
    LaunchDepthwise(call);
  } else if (kernel == RunningKernel::kTensor) {
    LaunchTensor(call);
  } else if (call.plan.cluster) {
    LaunchCluster(call);
  } else if (call.plan.pointwise) {
    LaunchPointwise(call);
  } else if (call.plan.octets && AreVectors(call.y, call.epilogue.residual)) {
    LaunchOctets(call);
  } else if (call.plan.ring && AreVectors(call.y, call.epilogue.residual)) {
    LaunchRing(call);
  } else if (call.plan.wgmma) {
    LaunchWgmma(call);
  } else if (call.plan.generated->params.num_splits > 1) {
    LaunchSplits(call);
  } else {
    LaunchPasses(call);
  }
}

// Launches one of the library's kernels for every GPU.
template <class Params>
void CudaKernel::LaunchLibrary(FunctionHandle function, LaunchShape shape, const Params& params,
                               StreamHandle stream) const {
  shape.begins_early = library_kernels_->begin_early();
  cuda::Launch(function, shape, params, stream);
}

// All but the rows of a block.
CsrParams CudaKernel::MakeCallCsrParams(const Call& call) const {
  CsrParams params = MakeCsrParams(geometry_, call.plan.sizes, call.inputs.batch);
  params.x = call.inputs.x.data;
  params.y = call.y;
  params.epilogue = call.epilogue;
  csr_weight_->Fill(&params);
  return params;
}

void CudaKernel::LaunchCsr(const Call& call) const {
  CsrParams params = MakeCallCsrParams(call);
  const CsrLaunch& launch = call.plan.csr;
  params.block_rows = launch.block_rows;
  const FunctionHandle kernel = launch.is_pixel ? library_kernels_->Pixel() : library_kernels_->Csr(launch.sub_batch);
  LaunchLibrary(kernel, launch.shape, params, call.stream);
}

void CudaKernel::LaunchDepthwise(const Call& call) const {
  const DepthwiseLaunch& launch = *call.plan.depthwise;
  DepthwiseParams params = launch.params;
  FillTile(call, &params);
  params.weight = static_cast<const float*>(depthwise_->memory.at(0));
  LaunchLibrary(library_kernels_->Depthwise(launch.window), launch.shape, params, call.stream);
}

template <class Params>
void CudaKernel::FillTile(const Call& call, Params* tile) {
  tile->x = call.inputs.x.data;
  tile->y = call.y;
  tile->epilogue = call.epilogue;
}

// Lends memory of the session's allocator for what a warpgroup kernel reads instead of a tensor of the call.
void* Lend(const ort::Context& context, const Inputs& inputs, size_t bytes,
           std::optional<ort::DeviceScratch>* scratch) {
  try {
    return scratch->emplace(context, inputs.x.memory_info, bytes).data();
  } catch (const Error& error) {
    Fail(error.what(), "; with the session config entry 'sparseconv.cuda_kernel' set to csr, none is needed");
  }
}

// The most columns, up to `columns`, that addresses are multiples of.
int ColumnsAt(uintptr_t addresses, int columns, size_t element_bytes) {
  while (columns > 1 && addresses % (element_bytes * static_cast<size_t>(columns)) != 0) columns /= 2;
  return columns;
}

// The same where both Y and the residual, or null, have to be.
int ColumnsOfBoth(const void* y, const void* residual, int columns, size_t element_bytes) {
  return ColumnsAt(reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(residual), columns, element_bytes);
}

void CudaKernel::LaunchTensor(const Call& call) const {
  const TensorLaunch& launch = *call.plan.tensor;
  TensorParams params = launch.params;
  FillTile(call, &params.tile);
  params.is_y_paired = params.is_y_paired && ColumnsOfBoth(call.y, call.epilogue.residual, 2, element_bytes()) == 2;
  tensor_->Fill(&params);
  FillRecompute(call, &params.recompute);
  cuda::Launch(tensor_->kernels.Product(launch.positions), launch.shape, params, call.stream);
}

// Where blocks share tiles, they store sums that are not final, in memory that is lent for them, and behind these, what
// they saw of floats that they, or launches before, rounded to halves.
void CudaKernel::LendSums(const Call& call, const LaunchShape& shape, int64_t part_values, WarpgroupParams* params,
                          std::optional<ort::DeviceScratch>* sums) const {
  const unsigned parts = shape.grid[1];
  if (parts == 1) return;
  const size_t bytes = parts * static_cast<size_t>(part_values) * element_bytes();
  params->tile.y = Lend(call.context, call.inputs, bytes + BlocksOf(shape) * sizeof(unsigned), sums);
  params->tile.epilogue = EpilogueOf(nullptr, nullptr, {}, is_half());
  params->seen = reinterpret_cast<unsigned*>(static_cast<unsigned char*>(params->tile.y) + bytes);
}

void CudaKernel::LaunchWgmma(const Call& call) const {
  const WgmmaLaunch& launch = *call.plan.wgmma;
  WgmmaParams params = launch.params;
  TileParams& tile = params.common.tile;
  FillTile(call, &tile);
  wgmma_->Fill(&params.common);
  std::optional<ort::DeviceScratch> x, sums;
  LendSums(call, launch.shape, params.y_part, &params.common, &sums);
  params.out_columns = ColumnsOfBoth(tile.y, tile.epilogue.residual, params.out_columns, element_bytes());
  InterleaveParams interleave = launch.interleave.params;
  interleave.x = tile.x;
  FillRecompute(call, &params.common.recompute);
  tile.x = interleave.out = LendHalves(call, launch.interleave.bytes, BlocksOf(launch.interleave.shape),
                                       &interleave.seen, &params.common.recompute, &x);
  cuda::Launch(wgmma_->kernels.Interleave(), launch.interleave.shape, interleave, call.stream);
  cuda::Launch(wgmma_->kernels.Product(launch.positions), launch.shape, params, call.stream);
  if (sums) ReduceParts(call, params.common, launch.shape, params.y_part);
}

// Lends so many bytes for X as halves, and behind them, where these are rounded, for what is seen of X then.
void* CudaKernel::LendHalves(const Call& call, size_t bytes, size_t num_seen, unsigned** seen,
                             RecomputeParams* recompute, std::optional<ort::DeviceScratch>* scratch) const {
  if (is_half()) return Lend(call.context, call.inputs, bytes, scratch);
  auto* memory =
      static_cast<unsigned char*>(Lend(call.context, call.inputs, bytes + num_seen * sizeof(unsigned), scratch));
  recompute->seen = *seen = reinterpret_cast<unsigned*>(memory + bytes);
  recompute->num_seen = static_cast<int>(num_seen);
  return memory;
}

// For floats, which are rounded to halves: all but what an earlier launch sees of X.
void CudaKernel::FillRecompute(const Call& call, RecomputeParams* recompute) const {
  if (is_half()) return;
  recompute->csr = MakeCallCsrParams(call);
  recompute->csr.block_rows = 1;
  if (call.inputs.x.data == nullptr) recompute->sources = SourcesOf(call.inputs, source_begins_);
  recompute->happened = was_recomputed_->at();
}

void CudaKernel::LaunchCluster(const Call& call) const {
  const ClusterLaunch& launch = *call.plan.cluster;
  ClusterParams params = launch.params;
  TileParams& tile = params.common.tile;
  FillTile(call, &tile);
  wgmma_->Fill(&params.common);
  params.taps = static_cast<const unsigned char*>(wgmma_->memory.at(wgmma_->taps));
  params.out_columns = ColumnsOfBoth(tile.y, tile.epilogue.residual, params.out_columns, element_bytes());
  if (tile.x == nullptr) params.sources = SourcesOf(call.inputs, source_begins_);
  FillRecompute(call, &params.common.recompute);
  cuda::Launch(wgmma_->clusters.Product(launch.blocks), launch.shape, params, call.stream);
}

void CudaKernel::LaunchOctets(const Call& call) const {
  const OctetLaunch& launch = *call.plan.octets;
  OctetParams params = launch.params;
  FillTile(call, &params);
  const WindowProduct& windows = call.plan.space_to_depth ? *copied_windows_ : *windows_;
  windows.Fill(&params);
  params.scales = wgmma_->scales();
  FillRecompute(call, &params.recompute);
  std::optional<ort::DeviceScratch> scratch;
  if (call.plan.space_to_depth) {
    SpaceToDepthLaunch before = *call.plan.space_to_depth;
    before.params.x = params.x;
    params.x = before.params.out = Lend(call.context, call.inputs, before.bytes, &scratch);
    cuda::Launch(windows.space_to_depth.Get(), before.shape, before.params, call.stream);
  }
  const OctetKernels& kernels = launch.is_words ? windows.words : windows.octets;
  cuda::Launch(kernels.Product(launch.blocks), launch.shape, params, call.stream);
}

void CudaKernel::LaunchRing(const Call& call) const {
  const RingLaunch& launch = *call.plan.ring;
  RingParams params = launch.params;
  FillTile(call, &params);
  windows_->Fill(&params);
  cuda::Launch(windows_->ring->Product(launch.positions), launch.shape, params, call.stream);
}

// What the addresses of all sources are multiples of, if it is a small power of two.
uintptr_t AddressesOf(const Inputs& inputs) {
  uintptr_t addresses = 0;
  for (size_t i = 0; i < inputs.num_sources; ++i) addresses |= reinterpret_cast<uintptr_t>(inputs.sources[i].data);
  return addresses;
}

// Whether the sources of X are read where they are: by the kernel for 1x1, or what gathers planes for it, and by
// clusters, if all begin where these can read them.
bool CudaKernel::ReadsSources(const Plan& plan, const Inputs& inputs) const {
  if (plan.kernel() == RunningKernel::kWgmma) return plan.pointwise && plan.pointwise->is_whole;
  if (plan.kernel() != RunningKernel::kCluster || !CanClusterReadSources(plan.sizes)) return false;
  return AddressesOf(inputs) % (element_bytes() * static_cast<size_t>(plan.cluster->params.x_columns)) == 0;
}

// X of its sources, in memory that is lent for it.
const void* CudaKernel::Concatenate(const ort::Context& context, const Inputs& inputs, StreamHandle stream,
                                    std::optional<ort::DeviceScratch>* scratch) const {
  ConcatenateLaunch launch =
      ChooseConcatenateLaunch(inputs, source_begins_, static_cast<int64_t>(element_bytes()), device_);
  if (launch.bytes == 0) return inputs.sources[0].data;  // nothing but padding is read
  launch.params.out = scratch->emplace(context, inputs.x.memory_info, launch.bytes).data();
  LaunchLibrary(library_kernels_->Concatenate(launch.unit_bytes), launch.shape, launch.params, stream);
  return launch.params.out;
}

void CudaKernel::LaunchPointwise(const Call& call) const {
  const PointwiseLaunch& launch = *call.plan.pointwise;
  PointwiseParams params = launch.params;
  TileParams& tile = params.common.tile;
  FillTile(call, &tile);
  wgmma_->Fill(&params.common);
  std::optional<ort::DeviceScratch> x, residual, sums;
  LendSums(call, launch.shape, params.y_part, &params.common, &sums);
  // The residual of halves is staged, as X is.
  const auto residual_begin = is_half() ? 0 : reinterpret_cast<uintptr_t>(tile.epilogue.residual);
  params.kept_bounds = residual_begin == 0 ? tile.epilogue.bounds : BoundsOf({}, is_half());
  params.out_columns =
      ColumnsAt(reinterpret_cast<uintptr_t>(tile.y) | residual_begin, params.out_columns, element_bytes());
  RecomputeParams& recompute = params.common.recompute;
  FillRecompute(call, &recompute);
  const bool has_sources = tile.x == nullptr;
  if (has_sources) params.sources = SourcesOf(call.inputs, source_begins_);
  const auto gathered = [&](const void*& planes, GatherLaunch gather, std::optional<ort::DeviceScratch>& scratch) {
    gather.params.x = planes;
    if (planes == nullptr) gather.params.sources = params.sources;
    planes = gather.params.out =
        LendHalves(call, gather.bytes, BlocksOf(gather.shape), &gather.params.seen, &recompute, &scratch);
    cuda::Launch(wgmma_->pointwise.Gather(), gather.shape, gather.params, call.stream);
    return GatheredPlaneBytes(launch);
  };
  const auto x_begin = has_sources ? AddressesOf(call.inputs) : reinterpret_cast<uintptr_t>(tile.x);
  if (launch.is_whole) params.x_plane_bytes = PlaneBytes(x_begin, launch, element_bytes());
  params.rounds_x = !is_half() && params.x_plane_bytes != 0;
  if (params.x_plane_bytes == 0) {
    params.x_plane_bytes = gathered(tile.x, GatherX(launch, device_), x);
    params.sources.count = 0;  // they are together now
  }
  if (is_half() && tile.epilogue.residual != nullptr) {
    params.residual_plane_bytes =
        PlaneBytes(reinterpret_cast<uintptr_t>(tile.epilogue.residual), launch, element_bytes());
    if (params.residual_plane_bytes == 0) {
      params.residual_plane_bytes = gathered(tile.epilogue.residual, GatherResidual(launch, device_), residual);
    }
  }
  cuda::Launch(wgmma_->pointwise.Product(launch.segments), launch.shape, params, call.stream);
  if (sums) ReduceParts(call, params.common, launch.shape, params.y_part);
}

// One launch of all chunks that starts from nothing and stores its sums as they are.
GeneratedParams CudaKernel::MakeGeneratedParams(const Call& call) const {
  GeneratedParams params = call.plan.generated->params;
  params.x = call.inputs.x.data;
  params.out = call.y;
  params.alpha = call.epilogue.alpha;
  params.beta = call.epilogue.beta;
  params.chunk_end = call.plan.generated->num_chunks;
  params.is_paired = params.out_w % 2 == 0 && IsPaired(call.y) && IsPaired(call.epilogue.residual);
  return params;
}

// Every split of the chunks adds up its part; a second kernel adds the parts and finishes the outputs.
void CudaKernel::LaunchSplits(const Call& call) const {
  const GeneratedLaunch& launch = *call.plan.generated;
  const auto values = static_cast<size_t>(launch.num_values);
  const auto splits = static_cast<size_t>(launch.params.num_splits);
  if (values > std::numeric_limits<size_t>::max() / element_bytes() / splits) Fail("the partial sums overflow memory");
  const ort::DeviceScratch partial(call.context, call.inputs.x.memory_info, values * splits * element_bytes());
  GeneratedParams params = MakeGeneratedParams(call);
  params.out = partial.data();
  cuda::Launch(image_->function, launch.shape, params, call.stream);

  const ReduceParams reduce = MakeReduceParams(call, partial.data(), params.num_splits, launch.num_values);
  LaunchLibrary(library_kernels_->Reduce(), ReduceShape(launch.num_values, kReduceThreads), reduce, call.stream);
}

// Adds up sums that are not final, `num_splits` of each output, and finishes these.
ReduceParams CudaKernel::MakeReduceParams(const Call& call, const void* partial, int num_splits,
                                          int64_t part_values) const {
  const Axes& dims = call.plan.sizes.out_dims;
  ReduceParams reduce{};
  reduce.y = call.y;
  reduce.epilogue = call.epilogue;
  reduce.partial = partial;
  reduce.part_values = part_values;
  reduce.num_splits = num_splits;
  reduce.out_channels = static_cast<int>(geometry_.out_channels);
  reduce.plane = static_cast<int>(dims[0] * dims[1] * dims[2]);
  reduce.num_values = static_cast<int64_t>(NumOutputs(call));
  return reduce;
}

// The same of what blocks of a warpgroup kernel share.
void CudaKernel::ReduceParts(const Call& call, const WarpgroupParams& params, const LaunchShape& shape,
                             int64_t part_values) const {
  const ReduceParams reduce = MakeReduceParams(call, params.tile.y, static_cast<int>(shape.grid[1]), part_values);
  const int64_t vectors = CeilDivide(part_values, kReduceBytes / static_cast<int64_t>(element_bytes()));
  LaunchShape reduce_shape = ReduceShape(vectors, kReduceVectorThreads);
  reduce_shape.begins_early = true;
  if (is_half()) return cuda::Launch(wgmma_->kernels.Reduce(), reduce_shape, reduce, call.stream);
  RecomputeParams recompute = params.recompute;
  recompute.seen = params.seen;
  recompute.num_seen = static_cast<int>(BlocksOf(shape));
  cuda::Launch(wgmma_->kernels.Reduce(), reduce_shape, ReduceRoundedParams{reduce, recompute}, call.stream);
}

// The first pass begins with the bias and the residual, each later one with what the one before it left in Y; the last
// one finishes the outputs.
void CudaKernel::LaunchPasses(const Call& call) const {
  const GeneratedLaunch& launch = *call.plan.generated;
  GeneratedParams params = MakeGeneratedParams(call);
  for (int64_t pass = 0; pass < launch.num_passes; ++pass) {
    params.chunk_begin = static_cast<int>(launch.num_chunks * pass / launch.num_passes);
    params.chunk_end = static_cast<int>(launch.num_chunks * (pass + 1) / launch.num_passes);
    params.bias = pass == 0 ? call.epilogue.bias : nullptr;
    params.addend = pass == 0 ? call.epilogue.residual : call.y;
    params.is_final = pass + 1 == launch.num_passes;
    cuda::Launch(image_->function, launch.shape, params, call.stream);
  }
}

// Elements that the convolution makes. `OutputShape` has seen that they can be counted.
size_t CudaKernel::NumOutputs(const Call& call) const {
  const Axes& dims = call.plan.sizes.out_dims;
  return static_cast<size_t>(call.inputs.batch * geometry_.out_channels * dims[0] * dims[1] * dims[2]);
}

// Pools what the convolution left in the call's y.
void CudaKernel::Pool(const Call& call, const Axes& pooled_dims, void* y) const {
  PoolLaunch launch =
      ChoosePoolLaunch(*pool_, call.plan.sizes.out_dims, pooled_dims, call.inputs.batch * geometry_.out_channels,
                       static_cast<int>(element_bytes()), reinterpret_cast<uintptr_t>(y));
  launch.params.x = call.y;
  launch.params.y = y;
  LaunchLibrary(library_kernels_->Pool(launch.size, launch.vector_bytes), launch.shape, launch.params, call.stream);
}

}  // namespace

std::unique_ptr<Kernel> CreateCudaKernel(const OpDescription& op, const ort::NodeInfo& node,
                                         SparseConvAttributes attributes) {
  return std::make_unique<CudaKernel>(op, node, std::move(attributes));
}

}  // namespace sparseconv::cuda
