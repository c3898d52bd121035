#include "call_launch.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "../../../kernels/cuda/scale_params.h"
#include "../checked.h"
#include "../half.h"
#include "concatenate_plan.h"
#include "pool_plan.h"

namespace sparseconv::cuda {
namespace {

constexpr unsigned kReduceThreads = 256;
// Few, so that the little that there is spreads over the multiprocessors.
constexpr unsigned kReduceVectorThreads = 64;
constexpr int64_t kMaxReduceBlocks = 1 << 16;

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

bool AreVectors(const void* y, const void* residual) {
  return (reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(residual)) % kVectorBytes == 0;
}

bool IsPaired(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPairBytes == 0; }

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

// All of a call's tensors that kernels read or write whole planes of, together.
uintptr_t TensorAddresses(const Call& call) {
  const auto of = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  const uintptr_t x = call.inputs.x.data == nullptr ? AddressesOf(call.inputs) : of(call.inputs.x.data);
  return x | of(call.y) | of(call.epilogue.residual);
}

class Launcher {
 public:
  explicit Launcher(const NodeKernels& node) : node_(node) {}

  RunningKernel Run(Call call, const Axes& y_dims) const;

 private:
  RunningKernel Launch(const Call& call) const;
  RunningKernel KernelOf(const Call& call) const;
  template <class Params>
  void LaunchLibrary(FunctionHandle function, LaunchShape shape, const Params& params, StreamHandle stream) const;
  CsrParams MakeCallCsrParams(const Call& call) const;
  void LaunchCsr(const Call& call) const;
  void LaunchDepthwise(const Call& call) const;
  template <class Params>
  static void FillTile(const Call& call, Params* tile);
  bool CanRunSegments(const Call& call) const;
  void LaunchTensor(const Call& call) const;
  void LaunchSegments(const Call& call) const;
  void LendSums(const Call& call, const LaunchShape& shape, int64_t part_values, TileParams* tile, unsigned** seen,
                std::optional<ort::DeviceScratch>* sums) const;
  void LaunchWgmma(const Call& call) const;
  void* LendHalves(const Call& call, size_t bytes, size_t num_seen, unsigned** seen, RecomputeParams* recompute,
                   std::optional<ort::DeviceScratch>* scratch) const;
  void FillRecompute(const Call& call, RecomputeParams* recompute) const;
  void LaunchCluster(const Call& call) const;
  void LaunchOctets(const Call& call) const;
  void LaunchRing(const Call& call) const;
  void LaunchFlat(const Call& call) const;
  void LaunchGemm(const Call& call) const;
  bool ReadsSources(const Call& call) const;
  bool CanScaleSources(const Call& call) const;
  const void* Concatenate(const ort::Context& context, const Inputs& inputs, StreamHandle stream,
                          std::optional<ort::DeviceScratch>* scratch) const;
  void LaunchPointwise(const Call& call) const;
  GeneratedParams MakeGeneratedParams(const Call& call) const;
  void LaunchSplits(const Call& call) const;
  ReduceParams MakeReduceParams(const Call& call, const void* partial, int num_splits, int64_t part_values) const;
  // Sums that are not final, and what adds them up.
  struct Parts {
    FunctionHandle reduce;
    const void* sums;
    int64_t values;  // of a part
    const unsigned* seen;
    RecomputeParams recompute;
  };
  template <class Params>
  Parts PartsOf(const Params& params) const;
  template <class Params>
  Parts TensorPartsOf(const Params& params) const;
  void ReduceParts(const Call& call, const Parts& parts, const LaunchShape& shape) const;
  void LaunchPasses(const Call& call) const;
  size_t NumOutputs(const Call& call) const;
  void Pool(const Call& call, const Axes& pooled_dims, void* y) const;

  const NodeKernels& node_;
};

// With the sources of X copied together before, where its kernel does not read them itself, and the pool behind.
RunningKernel Launcher::Run(Call call, const Axes& y_dims) const {
  call.epilogue = EpilogueOf(call.inputs.bias.data, call.inputs.residual.data, node_.activation, node_.is_half());
  std::optional<ort::DeviceScratch> concatenated;
  if (call.inputs.num_sources > 0 && !ReadsSources(call)) {
    call.inputs.x.data = Concatenate(call.context, call.inputs, call.stream, &concatenated);
  }
  if (!node_.pool) return Launch(call);
  void* const y = call.y;
  const ort::DeviceScratch convolved(call.context, call.inputs.x.memory_info, NumOutputs(call) * node_.element_bytes());
  call.y = convolved.data();
  const RunningKernel kernel = Launch(call);
  Pool(call, y_dims, y);
  return kernel;
}

// What runs a call: the plan's kernel, but where only one could that needs tensors aligned, and one is not.
RunningKernel Launcher::KernelOf(const Call& call) const {
  const RunningKernel kernel = call.plan.kernel();
  const bool needs_vectors =
      (call.plan.octets || call.plan.ring) && !call.plan.wgmma && !call.plan.cluster && !call.plan.generated;
  if (needs_vectors && !AreVectors(call.y, call.epilogue.residual)) return RunningKernel::kCsr;
  if (kernel == RunningKernel::kGemm && !AreVectors(call.y, call.epilogue.residual)) {
    return call.plan.pointwise ? RunningKernel::kWgmma : RunningKernel::kCsr;
  }
  if (kernel == RunningKernel::kSegments && !CanRunSegments(call)) {
    return call.plan.tensor ? RunningKernel::kTensor : RunningKernel::kCsr;
  }
  return kernel;
}

RunningKernel Launcher::Launch(const Call& call) const {
  const RunningKernel kernel = KernelOf(call);
  if (kernel == RunningKernel::kCsr) {
    LaunchCsr(call);
  } else if (kernel == RunningKernel::kDepthwise) {
    LaunchDepthwise(call);
  } else if (kernel == RunningKernel::kTensor) {
    LaunchTensor(call);
  } else if (kernel == RunningKernel::kSegments) {
    LaunchSegments(call);
  } else if (call.plan.cluster) {
    LaunchCluster(call);
  } else if (call.plan.flat) {
    LaunchFlat(call);
  } else if (kernel == RunningKernel::kGemm) {
    LaunchGemm(call);
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
  return kernel;
}

// Launches one of the library's kernels for every GPU.
template <class Params>
void Launcher::LaunchLibrary(FunctionHandle function, LaunchShape shape, const Params& params,
                             StreamHandle stream) const {
  shape.begins_early = node_.library_kernels->begin_early();
  cuda::Launch(function, shape, params, stream);
}

// All but the rows of a block.
CsrParams Launcher::MakeCallCsrParams(const Call& call) const {
  CsrParams params = MakeCsrParams(node_.geometry, call.plan.sizes, call.inputs.batch);
  params.x = call.inputs.x.data;
  params.y = call.y;
  params.epilogue = call.epilogue;
  node_.csr_weight->Fill(&params);
  return params;
}

void Launcher::LaunchCsr(const Call& call) const {
  CsrParams params = MakeCallCsrParams(call);
  const CsrLaunch& launch = call.plan.csr;
  params.block_rows = launch.block_rows;
  const FunctionHandle kernel =
      launch.is_pixel ? node_.library_kernels->Pixel() : node_.library_kernels->Csr(launch.sub_batch);
  LaunchLibrary(kernel, launch.shape, params, call.stream);
}

void Launcher::LaunchDepthwise(const Call& call) const {
  const DepthwiseLaunch& launch = *call.plan.depthwise;
  DepthwiseParams params = launch.params;
  FillTile(call, &params);
  params.weight = static_cast<const float*>(node_.depthwise->memory.at(0));
  const FunctionHandle kernel = node_.library_kernels->Depthwise(launch.window);
  if (launch.window != kPointWindow) return LaunchLibrary(kernel, launch.shape, params, call.stream);
  ScaleParams scale{params, {}};
  if (params.x == nullptr) scale.sources = SourcesOf(call.inputs, node_.source_begins);
  LaunchLibrary(kernel, launch.shape, scale, call.stream);
}

template <class Params>
void Launcher::FillTile(const Call& call, Params* tile) {
  tile->x = call.inputs.x.data;
  tile->y = call.y;
  tile->epilogue = call.epilogue;
}

void Launcher::LaunchTensor(const Call& call) const {
  const TensorLaunch& launch = *call.plan.tensor;
  TensorParams params = launch.params;
  FillTile(call, &params.tile);
  std::optional<ort::DeviceScratch> sums;
  LendSums(call, launch.shape, params.y_part, &params.tile, &params.seen, &sums);
  params.is_y_paired =
      params.is_y_paired && ColumnsOfBoth(params.tile.y, params.tile.epilogue.residual, 2, node_.element_bytes()) == 2;
  FillStores(static_cast<int>(launch.shape.threads), &params);
  node_.tensor->Fill(&params);
  FillRecompute(call, &params.recompute);
  cuda::Launch(node_.tensor->kernels.Product(launch.positions), launch.shape, params, call.stream);
  if (sums) ReduceParts(call, TensorPartsOf(params), launch.shape);
}

// Whether there is a plan for it, and all tensors begin where it can read and store them.
bool Launcher::CanRunSegments(const Call& call) const {
  return call.plan.segments &&
         TensorAddresses(call) % SegmentAlignment(static_cast<int64_t>(node_.element_bytes())) == 0;
}

void Launcher::LaunchSegments(const Call& call) const {
  const SegmentLaunch& launch = *call.plan.segments;
  SegmentParams params = launch.params;
  FillTile(call, &params.tile);
  std::optional<ort::DeviceScratch> sums;
  LendSums(call, launch.shape, params.y_part, &params.tile, &params.seen, &sums);
  params.has_vectors = static_cast<size_t>(params.plane) * node_.element_bytes() % kVectorBytes == 0 &&
                       TensorAddresses(call) % kVectorBytes == 0;
  node_.tensor->Fill(&params);
  FillRecompute(call, &params.recompute);
  if (params.tile.x == nullptr) params.sources = SourcesOf(call.inputs, node_.source_begins);
  cuda::Launch(node_.tensor->segments->Product(node_.tensor->facts.form.subtiles()), launch.shape, params, call.stream);
  if (sums) ReduceParts(call, TensorPartsOf(params), launch.shape);
}

// Where blocks share tiles, they store sums that are not final, in memory that is lent for them, and behind these, what
// they saw of floats that they, or launches before, rounded to halves.
void Launcher::LendSums(const Call& call, const LaunchShape& shape, int64_t part_values, TileParams* tile,
                        unsigned** seen, std::optional<ort::DeviceScratch>* sums) const {
  const unsigned parts = shape.grid[1];
  if (parts == 1) return;
  const size_t bytes = parts * static_cast<size_t>(part_values) * node_.element_bytes();
  tile->y = Lend(call.context, call.inputs, bytes + BlocksOf(shape) * sizeof(unsigned), sums);
  tile->epilogue = EpilogueOf(nullptr, nullptr, {}, node_.is_half());
  *seen = reinterpret_cast<unsigned*>(static_cast<unsigned char*>(tile->y) + bytes);
}

void Launcher::LaunchWgmma(const Call& call) const {
  const WgmmaLaunch& launch = *call.plan.wgmma;
  WgmmaParams params = launch.params;
  TileParams& tile = params.common.tile;
  FillTile(call, &tile);
  node_.wgmma->Fill(&params.common);
  std::optional<ort::DeviceScratch> x, sums;
  LendSums(call, launch.shape, params.y_part, &tile, &params.common.seen, &sums);
  params.out_columns = ColumnsOfBoth(tile.y, tile.epilogue.residual, params.out_columns, node_.element_bytes());
  InterleaveParams interleave = launch.interleave.params;
  interleave.x = tile.x;
  FillRecompute(call, &params.common.recompute);
  tile.x = interleave.out = LendHalves(call, launch.interleave.bytes, BlocksOf(launch.interleave.shape),
                                       &interleave.seen, &params.common.recompute, &x);
  cuda::Launch(node_.wgmma->kernels.Interleave(), launch.interleave.shape, interleave, call.stream);
  cuda::Launch(node_.wgmma->kernels.Product(launch.positions), launch.shape, params, call.stream);
  if (sums) ReduceParts(call, PartsOf(params), launch.shape);
}

// Lends so many bytes for X as halves, and behind them, where these are rounded, for what is seen of X then.
void* Launcher::LendHalves(const Call& call, size_t bytes, size_t num_seen, unsigned** seen, RecomputeParams* recompute,
                           std::optional<ort::DeviceScratch>* scratch) const {
  if (node_.is_half()) return Lend(call.context, call.inputs, bytes, scratch);
  auto* memory =
      static_cast<unsigned char*>(Lend(call.context, call.inputs, bytes + num_seen * sizeof(unsigned), scratch));
  recompute->seen = *seen = reinterpret_cast<unsigned*>(memory + bytes);
  recompute->num_seen = static_cast<int>(num_seen);
  return memory;
}

// For floats, which are rounded to halves: all but what an earlier launch sees of X.
void Launcher::FillRecompute(const Call& call, RecomputeParams* recompute) const {
  if (node_.is_half()) return;
  recompute->csr = MakeCallCsrParams(call);
  recompute->csr.block_rows = 1;
  if (call.inputs.x.data == nullptr) recompute->sources = SourcesOf(call.inputs, node_.source_begins);
  recompute->happened = node_.was_recomputed->at();
}

void Launcher::LaunchCluster(const Call& call) const {
  const ClusterLaunch& launch = *call.plan.cluster;
  ClusterParams params = launch.params;
  TileParams& tile = params.common.tile;
  FillTile(call, &tile);
  node_.wgmma->Fill(&params.common);
  params.taps = static_cast<const unsigned char*>(node_.wgmma->memory.at(node_.wgmma->taps));
  params.out_columns = ColumnsOfBoth(tile.y, tile.epilogue.residual, params.out_columns, node_.element_bytes());
  if (tile.x == nullptr) params.sources = SourcesOf(call.inputs, node_.source_begins);
  FillRecompute(call, &params.common.recompute);
  cuda::Launch(node_.wgmma->clusters.Product(launch.blocks), launch.shape, params, call.stream);
}

void Launcher::LaunchOctets(const Call& call) const {
  const OctetLaunch& launch = *call.plan.octets;
  OctetParams params = launch.params;
  FillTile(call, &params);
  const WindowProduct& windows = call.plan.space_to_depth ? *node_.copied_windows : *node_.windows;
  windows.Fill(&params);
  params.scales = node_.wgmma->scales();
  FillRecompute(call, &params.recompute);
  std::optional<ort::DeviceScratch> scratch;
  if (call.plan.space_to_depth) {
    SpaceToDepthLaunch before = *call.plan.space_to_depth;
    before.params.x = params.x;
    params.x = before.params.out = Lend(call.context, call.inputs, before.bytes, &scratch);
    cuda::Launch(windows.space_to_depth.Get(), before.shape, before.params, call.stream);
  }
  EncodeOutputs(launch, call.inputs.batch, static_cast<int64_t>(node_.element_bytes()), &params);
  cuda::Launch(windows.Octets(launch.form).Product(launch.blocks), launch.shape, params, call.stream);
}

void Launcher::LaunchRing(const Call& call) const {
  const RingLaunch& launch = *call.plan.ring;
  RingParams params = launch.params;
  FillTile(call, &params);
  node_.windows->Fill(&params);
  cuda::Launch(node_.windows->ring->Product(launch.positions), launch.shape, params, call.stream);
}

void Launcher::LaunchFlat(const Call& call) const {
  const FlatLaunch& launch = *call.plan.flat;
  FlatParams params = launch.params;
  FillTile(call, &params);
  node_.flat->Fill(&params);
  params.scales = node_.wgmma->scales();
  const int columns = ColumnsOfBoth(params.y, params.epilogue.residual, 1 << params.out_shift, node_.element_bytes());
  while (1 << params.out_shift > columns) --params.out_shift;
  FillRecompute(call, &params.recompute);
  const bool by_rows = launch.flatten_rows && reinterpret_cast<uintptr_t>(params.x) % kVectorBytes == 0;
  FlattenLaunch before = by_rows ? *launch.flatten_rows : launch.flatten;
  if (node_.is_half() && params.epilogue.residual != nullptr) {
    // Warps that bring residuals have no time for X.
    if (by_rows) before.shape.grid[0] = static_cast<unsigned>(before.params.batch * before.params.chunks);
    before.params.progress_words = 0;
  }
  FlattenParams flatten = before.params;
  node_.flat->Fill(&flatten);
  flatten.x = params.x;
  std::optional<ort::DeviceScratch> x;
  const size_t progress_bytes = static_cast<size_t>(flatten.progress_words) * sizeof(unsigned);
  params.x = flatten.out =
      LendHalves(call, before.bytes + progress_bytes, BlocksOf(before.shape), &flatten.seen, &params.recompute, &x);
  flatten.progress = reinterpret_cast<unsigned*>(static_cast<unsigned char*>(flatten.out) + before.bytes);
  params.rest.flatten = flatten;
  params.rest.progress = flatten.progress;
  if (flatten.progress_words == 0) params.rest.num_units = 0;
  cuda::Launch(node_.flat->kernels.Flatten(by_rows), before.shape, flatten, call.stream);
  cuda::Launch(node_.flat->kernels.Product(launch.blocks), launch.shape, params, call.stream);
}

void Launcher::LaunchGemm(const Call& call) const {
  const GemmLaunch& launch = *call.plan.gemm;
  GemmParams params = launch.params;
  FillTile(call, &params);
  params.weight = node_.gemm->memory.at(0);
  params.scales = node_.wgmma->scales();
  FillRecompute(call, &params.recompute);
  std::optional<ort::DeviceScratch> x;
  if (launch.is_ready) {
    PackLaunch pack = MakeReady(launch, params.x, node_.element_bytes());
    params.x = pack.params.out =
        LendHalves(call, pack.bytes, BlocksOf(pack.shape), &pack.params.seen, &params.recompute, &x);
    cuda::Launch(node_.gemm->pack.Get(), pack.shape, pack.params, call.stream);
  } else if (launch.is_gathered) {
    GatherLaunch gather = GatherPlanes(params.batch, params.in_channels, launch.map, node_.device,
                                       reinterpret_cast<uintptr_t>(params.x), node_.element_bytes());
    gather.params.x = params.x;
    params.x = gather.params.out = Lend(call.context, call.inputs, gather.bytes, &x);
    cuda::Launch(node_.wgmma->pointwise.Gather(gather.kind), gather.shape, gather.params, call.stream);
  }
  EncodeBoxes(launch, node_.is_half(), &params);
  cuda::Launch(node_.gemm->Kernels(launch.has_boxes, launch.is_ready).Product(launch.segments), launch.shape, params,
               call.stream);
}

// Whether the sources of X are read where they are: by the kernels for 1x1, or what gathers planes for one of them, by
// clusters and what scales channels, if all begin where these can read them, and by code that was made for it.
bool Launcher::ReadsSources(const Call& call) const {
  const Plan& plan = call.plan;
  if (plan.kernel() == RunningKernel::kDepthwise) return CanScaleSources(call);
  if (node_.geometry.group != 1) return false;
  if (plan.generated) return node_.code_reads_sources();
  if (plan.kernel() == RunningKernel::kWgmma) return plan.pointwise && plan.pointwise->is_whole;
  if (plan.kernel() == RunningKernel::kSegments) return CanRunSegments(call);
  if (plan.kernel() != RunningKernel::kCluster || !CanClusterReadSources(node_, plan.sizes)) return false;
  return AddressesOf(call.inputs) % (node_.element_bytes() * static_cast<size_t>(plan.cluster->params.x_columns)) == 0;
}

// Whether vectors of X never cross from one source, or image, to another.
bool Launcher::CanScaleSources(const Call& call) const {
  const DepthwiseLaunch& launch = *call.plan.depthwise;
  constexpr auto kUnit = static_cast<int64_t>(kVectorBytes);
  const int64_t plane_bytes = launch.params.in_w * static_cast<int64_t>(node_.element_bytes());
  return launch.window == kPointWindow && plane_bytes >= kUnit && AreVectors(call.y, call.epilogue.residual) &&
         AreMultiplesOf(kUnit, call.inputs, node_.source_begins, plane_bytes);
}

// X of its sources, in memory that is lent for it.
const void* Launcher::Concatenate(const ort::Context& context, const Inputs& inputs, StreamHandle stream,
                                  std::optional<ort::DeviceScratch>* scratch) const {
  ConcatenateLaunch launch =
      ChooseConcatenateLaunch(inputs, node_.source_begins, static_cast<int64_t>(node_.element_bytes()), node_.device);
  if (launch.bytes == 0) return inputs.sources[0].data;  // nothing but padding is read
  launch.params.out = scratch->emplace(context, inputs.x.memory_info, launch.bytes).data();
  LaunchLibrary(node_.library_kernels->Concatenate(launch.unit_bytes), launch.shape, launch.params, stream);
  return launch.params.out;
}

void Launcher::LaunchPointwise(const Call& call) const {
  const PointwiseLaunch& launch = *call.plan.pointwise;
  PointwiseParams params = launch.params;
  TileParams& tile = params.common.tile;
  FillTile(call, &tile);
  node_.wgmma->Fill(&params.common);
  std::optional<ort::DeviceScratch> x, residual, sums;
  LendSums(call, launch.shape, params.y_part, &tile, &params.common.seen, &sums);
  // The residual of halves is staged, as X is.
  const auto residual_begin = node_.is_half() ? 0 : reinterpret_cast<uintptr_t>(tile.epilogue.residual);
  params.kept_bounds = residual_begin == 0 ? tile.epilogue.bounds : BoundsOf({}, node_.is_half());
  params.out_columns =
      ColumnsAt(reinterpret_cast<uintptr_t>(tile.y) | residual_begin, params.out_columns, node_.element_bytes());
  RecomputeParams& recompute = params.common.recompute;
  FillRecompute(call, &recompute);
  const bool has_sources = tile.x == nullptr;
  if (has_sources) params.sources = SourcesOf(call.inputs, node_.source_begins);
  const auto gathered = [&](const void*& planes, GatherLaunch gather, std::optional<ort::DeviceScratch>& scratch) {
    gather.params.x = planes;
    if (planes == nullptr) {
      gather.params.sources = params.sources;
      if (gather.kind == GatherKind::kWhole) gather.kind = GatherKind::kAny;  // planes do not follow each other
    }
    planes = gather.params.out =
        LendHalves(call, gather.bytes, BlocksOf(gather.shape), &gather.params.seen, &recompute, &scratch);
    cuda::Launch(node_.wgmma->pointwise.Gather(gather.kind), gather.shape, gather.params, call.stream);
    return GatheredPlaneBytes(launch);
  };
  const auto x_begin = has_sources ? AddressesOf(call.inputs) : reinterpret_cast<uintptr_t>(tile.x);
  if (launch.is_whole) params.x_plane_bytes = PlaneBytes(x_begin, launch, node_.element_bytes());
  params.rounds_x = !node_.is_half() && params.x_plane_bytes != 0;
  if (params.x_plane_bytes == 0) {
    params.x_plane_bytes = gathered(tile.x, GatherX(launch, node_.device, x_begin, node_.element_bytes()), x);
    params.sources.count = 0;  // they are together now
  }
  if (node_.is_half() && tile.epilogue.residual != nullptr) {
    params.residual_plane_bytes =
        PlaneBytes(reinterpret_cast<uintptr_t>(tile.epilogue.residual), launch, node_.element_bytes());
    if (params.residual_plane_bytes == 0) {
      params.residual_plane_bytes = gathered(tile.epilogue.residual, GatherResidual(launch, node_.device), residual);
    }
  }
  cuda::Launch(node_.wgmma->pointwise.Product(launch.segments), launch.shape, params, call.stream);
  if (sums) ReduceParts(call, PartsOf(params), launch.shape);
}

// One launch of all chunks that starts from nothing and stores its sums as they are.
GeneratedParams Launcher::MakeGeneratedParams(const Call& call) const {
  GeneratedParams params = call.plan.generated->params;
  params.x = call.inputs.x.data;
  if (node_.code_reads_sources()) {
    params.x = call.inputs.sources[0].data;
    for (size_t i = 1; i < call.inputs.num_sources; ++i) params.more_x[i - 1] = call.inputs.sources[i].data;
  }
  params.out = call.y;
  params.alpha = call.epilogue.alpha;
  params.beta = call.epilogue.beta;
  params.chunk_end = call.plan.generated->num_chunks;
  params.is_paired = params.out_w % 2 == 0 && IsPaired(call.y) && IsPaired(call.epilogue.residual);
  return params;
}

// Every split of the chunks adds up its part; a second kernel adds the parts and finishes the outputs.
void Launcher::LaunchSplits(const Call& call) const {
  const GeneratedLaunch& launch = *call.plan.generated;
  const auto values = static_cast<size_t>(launch.num_values);
  const auto splits = static_cast<size_t>(launch.params.num_splits);
  if (values > std::numeric_limits<size_t>::max() / node_.element_bytes() / splits)
    Fail("the partial sums overflow memory");
  const ort::DeviceScratch partial(call.context, call.inputs.x.memory_info, values * splits * node_.element_bytes());
  GeneratedParams params = MakeGeneratedParams(call);
  params.out = partial.data();
  cuda::Launch(node_.image->function, launch.shape, params, call.stream);

  const ReduceParams reduce = MakeReduceParams(call, partial.data(), params.num_splits, launch.num_values);
  LaunchLibrary(node_.library_kernels->Reduce(), ReduceShape(launch.num_values, kReduceThreads), reduce, call.stream);
}

// Adds up sums that are not final, `num_splits` of each output, and finishes these.
ReduceParams Launcher::MakeReduceParams(const Call& call, const void* partial, int num_splits,
                                        int64_t part_values) const {
  const Axes& dims = call.plan.sizes.out_dims;
  ReduceParams reduce{};
  reduce.y = call.y;
  reduce.epilogue = call.epilogue;
  reduce.partial = partial;
  reduce.part_values = part_values;
  reduce.num_splits = num_splits;
  reduce.out_channels = static_cast<int>(node_.geometry.out_channels);
  reduce.plane = static_cast<int>(dims[0] * dims[1] * dims[2]);
  reduce.num_values = static_cast<int64_t>(NumOutputs(call));
  return reduce;
}

// What blocks of a warpgroup kernel share.
template <class Params>
Launcher::Parts Launcher::PartsOf(const Params& params) const {
  const WarpgroupParams& common = params.common;
  return {node_.wgmma->kernels.Reduce(), common.tile.y, params.y_part, common.seen, common.recompute};
}

// The same of the kernels from sm_80 on.
template <class Params>
Launcher::Parts Launcher::TensorPartsOf(const Params& params) const {
  return {node_.tensor->kernels.Reduce(), params.tile.y, params.y_part, params.seen, params.recompute};
}

// The same of what blocks share; `shape` is that of their launch.
void Launcher::ReduceParts(const Call& call, const Parts& parts, const LaunchShape& shape) const {
  const ReduceParams reduce = MakeReduceParams(call, parts.sums, static_cast<int>(shape.grid[1]), parts.values);
  const int64_t vectors = CeilDivide(parts.values, kReduceBytes / static_cast<int64_t>(node_.element_bytes()));
  LaunchShape reduce_shape = ReduceShape(vectors, kReduceVectorThreads);
  reduce_shape.begins_early = shape.begins_early;
  if (node_.is_half()) return cuda::Launch(parts.reduce, reduce_shape, reduce, call.stream);
  RecomputeParams recompute = parts.recompute;
  recompute.seen = parts.seen;
  recompute.num_seen = static_cast<int>(BlocksOf(shape));
  cuda::Launch(parts.reduce, reduce_shape, ReduceRoundedParams{reduce, recompute}, call.stream);
}

// The first pass begins with the bias and the residual, each later one with what the one before it left in Y; the last
// one finishes the outputs.
void Launcher::LaunchPasses(const Call& call) const {
  const GeneratedLaunch& launch = *call.plan.generated;
  GeneratedParams params = MakeGeneratedParams(call);
  for (int64_t pass = 0; pass < launch.num_passes; ++pass) {
    params.chunk_begin = static_cast<int>(launch.num_chunks * pass / launch.num_passes);
    params.chunk_end = static_cast<int>(launch.num_chunks * (pass + 1) / launch.num_passes);
    params.bias = pass == 0 ? call.epilogue.bias : nullptr;
    params.addend = pass == 0 ? call.epilogue.residual : call.y;
    params.is_final = pass + 1 == launch.num_passes;
    cuda::Launch(node_.image->function, launch.shape, params, call.stream);
  }
}

// Elements that the convolution makes. `OutputShape` has seen that they can be counted.
size_t Launcher::NumOutputs(const Call& call) const {
  const Axes& dims = call.plan.sizes.out_dims;
  return static_cast<size_t>(call.inputs.batch * node_.geometry.out_channels * dims[0] * dims[1] * dims[2]);
}

// Pools what the convolution left in the call's y.
void Launcher::Pool(const Call& call, const Axes& pooled_dims, void* y) const {
  PoolLaunch launch = ChoosePoolLaunch(*node_.pool, call.plan.sizes.out_dims, pooled_dims,
                                       call.inputs.batch * node_.geometry.out_channels,
                                       static_cast<int>(node_.element_bytes()), reinterpret_cast<uintptr_t>(y));
  launch.params.x = call.y;
  launch.params.y = y;
  LaunchLibrary(node_.library_kernels->Pool(launch.size, launch.vector_bytes), launch.shape, launch.params,
                call.stream);
}

}  // namespace

RunningKernel LaunchCall(const NodeKernels& node, const Call& call, const Axes& y_dims) {
  return Launcher(node).Run(call, y_dims);
}

}  // namespace sparseconv::cuda
