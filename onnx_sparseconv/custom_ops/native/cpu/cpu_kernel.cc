#include "cpu_kernel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <thread>

#include "../checked.h"
#include "../plan_cache.h"
#include "depthwise.h"
#include "isa.h"
#include "max_pool.h"
#include "pack.h"
#include "plan.h"

namespace sparseconv::cpu {
namespace {

constexpr int64_t kMaxTaps = 1 << 16;
// Images are cut until their parts keep this share of the threads busy.
constexpr double kMinBusyShare = 0.75;
// The cells of all images are packed before the sums start only where they are no more than this.
constexpr int64_t kMaxSharedCells = int64_t{16} << 20;
constexpr int64_t kPackTaskCells = 4 << 10;      // about 1 us
constexpr int64_t kPoolTaskElements = 16 << 10;  // some 5 us
// Plans of a node: a shape of X has up to ten, by batch sizes and by where X lies.
constexpr size_t kMaxPlans = 16;
// What a thread keeps at most.
constexpr int64_t kMaxKeptFloats = int64_t{1} << 20;
// Storing a row costs about as much as this many entries.
constexpr int64_t kRowCost = 4;

// A call whose X and Y take more bytes waits for memory, if it does not fetch ahead: no core's own cache holds as much.
constexpr int64_t kStreamedBytes = int64_t{4} << 20;

class CpuKernel final : public Kernel {
 public:
  CpuKernel(const OpDescription& op, SparseConvAttributes attributes)
      : op_(op),
        attributes_(std::move(attributes)),
        kernels_(ChooseKernels(op.cpu_isa)),
        num_threads_(op.cpu_threads > 0 ? op.cpu_threads : std::max(1u, std::thread::hardware_concurrency())) {
    if (attributes_.geometry.taps() > kMaxTaps) {
      Fail("a kernel of ", attributes_.geometry.taps(), " taps is more than the CPU kernel can address (", kMaxTaps,
           ")");
    }
    if (HasDepthwiseForm(attributes_.geometry)) {
      depthwise_weight_ = DepthwiseWeight(attributes_.weight, attributes_.geometry);
    }
  }

  std::string name() const override { return Concat("cpu.", kernels_.isa); }
  void Compute(const ort::Context& context) const override;

 private:
  struct Call;
  const void* Concatenate(const ort::Context& context, const Inputs& inputs, const ort::Allocator& allocator,
                          std::optional<ort::Scratch>* scratch) const;
  bool ReadsSources(const Inputs& inputs) const;
  template <typename Body>
  void ForChannels(const Call& call, int64_t image, const Body& body) const;
  void Pack(const Call& call, const Chunk& chunk, int64_t image, int64_t channel_begin, int64_t channel_end,
            float* cells) const;
  void Convolve(const Call& call) const;
  void Pool(const ort::Context& context, const Inputs& inputs, const Axes& dims, const Axes& pooled_dims,
            const void* from, void* y) const;
  int64_t ThreadsOfImage(int64_t batch) const;
  int64_t RowBlockBegin(int64_t block, int64_t num_blocks) const;
  void ComputeDepthwise(const Call& call) const;
  void ComputeVectors(const Call& call) const;
  TileOutput OutputOf(const Call& call, int64_t image) const;
  void ComputeInPlace(const Call& call) const;
  void ComputePackingLocally(const Call& call) const;
  void ComputePackingFirst(const Call& call) const;
  void RunChunk(const Call& call, const Chunk& chunk, int64_t image, const float* cells, int64_t row_begin,
                int64_t row_end, Ahead ahead = {}) const;
  Ahead AheadOf(const Call& call, int64_t chunk) const;
  const void* Image(const Call& call, int64_t image) const;
  InputAccess AccessTo(const Inputs& inputs) const {
    if (is_half()) return InputAccess::kConvert;
    if (IsInSources(inputs)) return InputAccess::kSources;
    return reinterpret_cast<uintptr_t>(inputs.x.data) % kCacheLine == 0 ? InputAccess::kAligned
                                                                        : InputAccess::kUnaligned;
  }
  // Whether X lies in several tensors, which have not been joined.
  static bool IsInSources(const Inputs& inputs) { return inputs.num_sources > 0 && inputs.x.data == nullptr; }
  bool is_half() const { return op_.element_type == ort::kFloat16; }
  size_t element_size() const { return is_half() ? sizeof(uint16_t) : sizeof(float); }

  const OpDescription op_;
  const SparseConvAttributes attributes_;
  const TileKernels& kernels_;
  const int64_t num_threads_;            // of the session, or as many as there are processors
  std::vector<float> depthwise_weight_;  // empty where the layer has not the form
  mutable PlanCache<PlanKey, Plan, kMaxPlans> plans_;
};

struct CpuKernel::Call {
  const ort::Context& context;
  const Inputs& inputs;
  const Plan& plan;
  char* y;
  bool is_streamed;  // X and Y take more than kStreamedBytes
};

template <typename Body>
void RunTasks(const ort::Context& context, int64_t count, const Body& body) {
  if (count == 1) {
    body(size_t{0});
  } else {
    context.ParallelFor(static_cast<size_t>(count), body);
  }
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kHasFences = true;  // behind each allocation
#else
constexpr bool kHasFences = false;
#endif

// What a thread keeps. A thread that ends may still run a session, after the destructors of its objects: so these have
// none, and an object of its own frees them.
thread_local float* kept_memory = nullptr;
thread_local int64_t kept_size = 0;

void FreeKeptMemory() {
  ::operator delete(kept_memory, std::align_val_t{kCacheLine});
  kept_memory = nullptr;
  kept_size = 0;
}

// Memory of `count` floats for the calling thread, until it asks again; aligned to a cache line. It is kept for the
// thread's next task, since it is in the thread's caches, and since threads that allocate together wait for each other.
float* KeptMemory(int64_t count) {
  struct FreedAtTheEnd {
    ~FreedAtTheEnd() { FreeKeptMemory(); }
  };
  static thread_local const FreedAtTheEnd freed_at_the_end;
  static_cast<void>(&freed_at_the_end);
  if (count > kept_size || (kHasFences && count != kept_size)) {
    FreeKeptMemory();
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    kept_memory = static_cast<float*>(::operator new(bytes, std::align_val_t{kCacheLine}));
    kept_size = count;
  }
  return kept_memory;
}

void CpuKernel::Compute(const ort::Context& context) const {
  const ConvGeometry& geometry = attributes_.geometry;
  Inputs inputs = ReadInputs(context, op_, geometry, attributes_.source_begins);
  std::optional<ort::Allocator> allocator_of_x;
  std::optional<ort::Scratch> concatenated;
  if (inputs.num_sources > 0 && inputs.batch > 0 && !ReadsSources(inputs)) {
    allocator_of_x.emplace(context, inputs.x.memory_info);
    inputs.x.data = Concatenate(context, inputs, *allocator_of_x, &concatenated);
  }
  const PlanKey key{inputs.in_dims, AccessTo(inputs), ThreadsOfImage(inputs.batch)};
  const auto plan = plans_.GetOrMake(key, [&] { return MakePlan(geometry, attributes_.weight, key, kernels_); });
  const ort::Shape shape = OutputShape(inputs, geometry, plan->out_dims);
  // Without images, planes may have more elements than 64 bits count.
  const int64_t image_elements =
      inputs.batch > 0 ? geometry.in_channels * plan->in_plane + geometry.out_channels * plan->out_plane : 0;
  const bool is_streamed =
      inputs.batch > 0 && image_elements * static_cast<int64_t>(element_size()) > kStreamedBytes / inputs.batch;
  if (!attributes_.pool) {
    void* y = context.GetOutput(0, shape);
    if (inputs.batch > 0) Convolve({context, inputs, *plan, static_cast<char*>(y), is_streamed});
    return;
  }
  const Axes pooled_dims = PooledDims(*attributes_.pool, plan->out_dims, geometry.spatial_rank);
  void* y = context.GetOutput(0, PooledShape(shape, geometry, pooled_dims));
  if (inputs.batch == 0) return;
  const ort::Allocator allocator(context, inputs.x.memory_info);
  const auto bytes = static_cast<size_t>(inputs.batch * geometry.out_channels * plan->out_plane) * element_size();
  const ort::Scratch convolved(allocator, (bytes + sizeof(float) - 1) / sizeof(float));
  Convolve({context, inputs, *plan, reinterpret_cast<char*>(convolved.data()), is_streamed});
  Pool(context, inputs, plan->out_dims, pooled_dims, convolved.data(), y);
}

// Whether the sources of X are read where they lie: all but maps of one position, which are small.
bool CpuKernel::ReadsSources(const Inputs& inputs) const {
  return is_half() || !IsVector(attributes_.geometry, Resolve(attributes_.geometry, inputs.in_dims));
}

// X as one tensor. Its sources may be as many as they like: each image of each is a task.
const void* CpuKernel::Concatenate(const ort::Context& context, const Inputs& inputs, const ort::Allocator& allocator,
                                   std::optional<ort::Scratch>* scratch) const {
  const Axes& dims = inputs.in_dims;
  int64_t plane = static_cast<int64_t>(element_size());
  for (const int64_t size : dims) plane = CheckedMultiply(plane, size, "a plane of X in bytes");
  const std::vector<int64_t>& begins = attributes_.source_begins;
  const int64_t image = CheckedMultiply(plane, begins.back(), "an image of X in bytes");
  const int64_t bytes = CheckedMultiply(image, inputs.batch, "the size of X in bytes");
  scratch->emplace(allocator, static_cast<size_t>(CeilDivide(bytes, static_cast<int64_t>(sizeof(float)))));
  char* const x = reinterpret_cast<char*>((*scratch)->data());
  if (bytes == 0) return x;
  const auto count = static_cast<int64_t>(inputs.num_sources);
  RunTasks(context, inputs.batch * count, [&](size_t task) noexcept {
    const int64_t batch_index = static_cast<int64_t>(task) / count;
    const size_t source = task % inputs.num_sources;
    const int64_t part = (begins[source + 1] - begins[source]) * plane;
    std::memcpy(x + batch_index * image + begins[source] * plane,
                static_cast<const char*>(inputs.sources[source].data) + batch_index * part, static_cast<size_t>(part));
  });
  return x;
}

void CpuKernel::Convolve(const Call& call) const {
  if (call.plan.form == PlanForm::kDepthwise) return ComputeDepthwise(call);
  if (call.plan.form == PlanForm::kVector) return ComputeVectors(call);
  if (call.plan.in_place) {
    ComputeInPlace(call);
  } else if (call.plan.num_row_blocks == 1) {
    ComputePackingLocally(call);
  } else {
    ComputePackingFirst(call);
  }
}

// Calls `body(data, first, last)` for the channels [first, last) of an image that lie side by side from `data` on: all
// of X, or each of its sources.
template <typename Body>
void CpuKernel::ForChannels(const Call& call, int64_t image, const Body& body) const {
  if (!IsInSources(call.inputs)) {
    return body(static_cast<const char*>(Image(call, image)), int64_t{0}, attributes_.geometry.in_channels);
  }
  for (size_t source = 0; source < call.inputs.num_sources; ++source) {
    const int64_t first = attributes_.source_begins[source], last = attributes_.source_begins[source + 1];
    const auto before = static_cast<size_t>(image * (last - first) * call.plan.in_plane) * element_size();
    body(static_cast<const char*>(call.inputs.sources[source].data) + before, first, last);
  }
}

// Tasks are channels of an image.
void CpuKernel::ComputeDepthwise(const Call& call) const {
  const ConvGeometry& geometry = attributes_.geometry;
  const DepthwiseJob job = MakeDepthwiseJob(geometry, call.plan.geometry);
  const int64_t num_parts = std::min(call.plan.num_parts, geometry.out_channels);
  RunTasks(call.context, call.inputs.batch * num_parts, [&](size_t index) noexcept {
    const auto task = static_cast<int64_t>(index);
    const int64_t part = task % num_parts, image = task / num_parts;
    DepthwiseJob own = job;
    own.weight = depthwise_weight_.data();
    own.output = OutputOf(call, image);
    const int64_t begin = geometry.out_channels * part / num_parts;
    const int64_t end = geometry.out_channels * (part + 1) / num_parts;
    ForChannels(call, image, [&](const char* data, int64_t first, int64_t last) {
      own.input = reinterpret_cast<const float*>(data);
      own.first_input = first;
      own.channel_begin = std::max(begin, first * job.channels_per_input);
      own.channel_end = std::min(end, last * job.channels_per_input);
      if (own.channel_begin < own.channel_end) kernels_.run_depthwise(own);
    });
  });
}

// Tasks are rows of an image.
void CpuKernel::ComputeVectors(const Call& call) const {
  const ConvGeometry& geometry = attributes_.geometry;
  const SparseWeight& weight = attributes_.weight;
  const int64_t num_parts = call.plan.num_parts;
  RunTasks(call.context, call.inputs.batch * num_parts, [&](size_t index) noexcept {
    const auto task = static_cast<int64_t>(index);
    const int64_t image = task / num_parts, part = task % num_parts;
    VectorJob job{};
    job.input = static_cast<const float*>(Image(call, image));
    job.entry_begin = weight.row_begin.data();
    job.columns = weight.columns.data();
    job.values = weight.values.data();
    job.rows_per_group = geometry.group_out_channels();
    job.group_channels = geometry.group_in_channels();
    job.row_begin = RowBlockBegin(part, num_parts);
    job.row_end = RowBlockBegin(part + 1, num_parts);
    job.output = OutputOf(call, image);
    kernels_.run_vector(job);
  });
}

// Pools all maps that the convolution made.
void CpuKernel::Pool(const ort::Context& context, const Inputs& inputs, const Axes& dims, const Axes& pooled_dims,
                     const void* from, void* y) const {
  const int64_t num_maps = inputs.batch * attributes_.geometry.out_channels;
  const int64_t map = dims[0] * dims[1] * dims[2];
  const int64_t num_tasks =
      std::clamp<int64_t>(map * num_maps / kPoolTaskElements, 1, std::min(num_maps, num_threads_));
  const int64_t pooled_map = pooled_dims[0] * pooled_dims[1] * pooled_dims[2];
  const ort::Allocator allocator(context, inputs.x.memory_info);
  const ort::Scratch rows(allocator, static_cast<size_t>(CheckedMultiply(num_tasks, dims[2], "the size of its rows")));
  const auto pool = [&](auto* in, auto* out, size_t task) {
    const auto index = static_cast<int64_t>(task);
    for (int64_t i = num_maps * index / num_tasks; i < num_maps * (index + 1) / num_tasks; ++i) {
      MaxPoolMap(*attributes_.pool, dims, pooled_dims, in + i * map, rows.data() + index * dims[2],
                 out + i * pooled_map);
    }
  };
  RunTasks(context, num_tasks, [&](size_t task) noexcept {
    if (is_half()) {
      pool(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(y), task);
    } else {
      pool(static_cast<const float*>(from), static_cast<float*>(y), task);
    }
  });
}

// Threads for each image, such that as many tasks leave few of all threads idle. Each number makes plans of its own, so
// there are few: all threads, a half, a quarter, an eighth, and one.
int64_t CpuKernel::ThreadsOfImage(int64_t batch) const {
  if (batch >= 4 * num_threads_) return 1;
  const auto is_enough = [&](int64_t threads) {
    const int64_t rounds = CeilDivide(batch * threads, num_threads_);
    return static_cast<double>(batch * threads) >= kMinBusyShare * static_cast<double>(rounds * num_threads_);
  };
  for (const int64_t threads : {int64_t{1}, CeilDivide(num_threads_, int64_t{8}), CeilDivide(num_threads_, int64_t{4}),
                                CeilDivide(num_threads_, int64_t{2})}) {
    if (is_enough(threads)) return threads;
  }
  return num_threads_;
}

// First row of a block, such that blocks have about the same work.
int64_t CpuKernel::RowBlockBegin(int64_t block, int64_t num_blocks) const {
  const auto& row_begin = attributes_.weight.row_begin;
  const int64_t num_rows = attributes_.geometry.out_channels;
  const auto work_before = [&](int64_t row) { return row_begin[static_cast<size_t>(row)] + kRowCost * row; };
  const auto wanted = static_cast<int64_t>(static_cast<double>(work_before(num_rows)) * static_cast<double>(block) /
                                           static_cast<double>(num_blocks));
  int64_t low = 0, high = num_rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (work_before(middle) < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return block == num_blocks ? num_rows : low;
}

void CpuKernel::ComputeInPlace(const Call& call) const {
  const auto num_chunks = static_cast<int64_t>(call.plan.chunks.size());
  const int64_t num_row_blocks = call.plan.num_row_blocks;
  const auto body = [&](size_t index) noexcept {
    const auto task = static_cast<int64_t>(index);
    const int64_t block = task % num_row_blocks, chunk = task / num_row_blocks % num_chunks;
    const int64_t image = task / num_row_blocks / num_chunks;
    const Chunk& part = call.plan.chunks[static_cast<size_t>(chunk)];
    const float* cells = static_cast<const float*>(Image(call, image)) + part.start;
    // Tasks for other rows read the same lines.
    const Ahead ahead = num_row_blocks == 1 ? AheadOf(call, task + 1) : Ahead{};
    RunChunk(call, part, image, cells, RowBlockBegin(block, num_row_blocks), RowBlockBegin(block + 1, num_row_blocks),
             ahead);
  };
  RunTasks(call.context, call.inputs.batch * num_chunks * num_row_blocks, body);
}

// Packs channels of an image, from wherever they lie.
void CpuKernel::Pack(const Call& call, const Chunk& chunk, int64_t image, int64_t channel_begin, int64_t channel_end,
                     float* cells) const {
  ForChannels(call, image, [&](const char* data, int64_t first, int64_t last) {
    const int64_t begin = std::max(first, channel_begin), end = std::min(last, channel_end);
    if (begin >= end) return;
    const auto at = static_cast<size_t>((begin - first) * call.plan.in_plane) * element_size();
    PackChunk(call.plan, attributes_.geometry, chunk, kernels_, is_half(), {data + at, begin, end}, cells);
  });
}

// Every task packs the chunk that it computes: with many images, its cells are still in the cache.
void CpuKernel::ComputePackingLocally(const Call& call) const {
  const ConvGeometry& geometry = attributes_.geometry;
  const ort::Allocator allocator(call.context, call.inputs.x.memory_info);
  const int64_t num_cells =
      CheckedMultiply(geometry.in_channels, call.plan.channel_cells, "the size of the packed input");
  const auto num_chunks = static_cast<int64_t>(call.plan.chunks.size());
  std::atomic<bool> failed{false};
  const auto body = [&](size_t index) noexcept {
    try {
      const auto task = static_cast<int64_t>(index);
      const Chunk& chunk = call.plan.chunks[static_cast<size_t>(task % num_chunks)];
      const int64_t image = task / num_chunks;
      std::optional<ort::Scratch> scratch;
      float* cells = nullptr;
      if (num_cells <= kMaxKeptFloats) {
        cells = KeptMemory(num_cells);
      } else {
        cells = scratch.emplace(allocator, static_cast<size_t>(num_cells)).data();
      }
      Pack(call, chunk, image, 0, geometry.in_channels, cells);
      RunChunk(call, chunk, image, cells, 0, geometry.out_channels, AheadOf(call, task + 1));
    } catch (...) {
      failed.store(true, std::memory_order_relaxed);
    }
  };
  RunTasks(call.context, call.inputs.batch * num_chunks, body);
  if (failed.load()) Fail("could not allocate ", num_cells, " floats of scratch memory");
}

// With few images, all cells are packed first, and the tasks that then compute different output channels share them.
// Every task packs what no other has begun to pack, and waits for what others have: they run, so it is not for long.
void CpuKernel::ComputePackingFirst(const Call& call) const {
  const ConvGeometry& geometry = attributes_.geometry;
  const int64_t part_cells =
      CheckedMultiply(geometry.in_channels, call.plan.channel_cells, "the size of the packed input");
  const auto num_chunks = static_cast<int64_t>(call.plan.chunks.size());
  const int64_t num_parts = call.inputs.batch * num_chunks, num_row_blocks = call.plan.num_row_blocks;
  if (part_cells > kMaxSharedCells / num_parts) return ComputePackingLocally(call);

  const ort::Allocator allocator(call.context, call.inputs.x.memory_info);
  const ort::Scratch cells(allocator, static_cast<size_t>(part_cells * num_parts));
  const auto chunk_of = [&](int64_t part) -> const Chunk& {
    return call.plan.chunks[static_cast<size_t>(part % num_chunks)];
  };
  const int64_t slices_a_part =
      std::clamp<int64_t>(part_cells / kPackTaskCells, 1, std::min(geometry.in_channels, num_row_blocks));
  const int64_t num_slices = num_parts * slices_a_part;
  std::atomic<int64_t> num_begun{0}, num_packed{0};
  RunTasks(call.context, num_parts * num_row_blocks, [&](size_t index) noexcept {
    for (int64_t i = num_begun++; i < num_slices; i = num_begun++) {
      const int64_t part = i / slices_a_part, slice = i % slices_a_part;
      Pack(call, chunk_of(part), part / num_chunks, geometry.in_channels * slice / slices_a_part,
           geometry.in_channels * (slice + 1) / slices_a_part, cells.data() + part * part_cells);
      ++num_packed;
    }
    while (num_packed < num_slices) std::this_thread::yield();
    const int64_t part = static_cast<int64_t>(index) / num_row_blocks,
                  block = static_cast<int64_t>(index) % num_row_blocks;
    RunChunk(call, chunk_of(part), part / num_chunks, cells.data() + part * part_cells,
             RowBlockBegin(block, num_row_blocks), RowBlockBegin(block + 1, num_row_blocks));
  });
}

// What a task that computes all rows of a chunk fetches for one of the call's chunks, counted through its images:
// nothing where there is no such chunk, or X stays in the caches.
Ahead CpuKernel::AheadOf(const Call& call, int64_t chunk) const {
  const ConvGeometry& geometry = attributes_.geometry;
  const Plan& plan = call.plan;
  const auto element = static_cast<int64_t>(element_size());
  const auto num_chunks = static_cast<int64_t>(plan.chunks.size());
  const int64_t num_tasks = num_chunks * call.inputs.batch;
  // Where each thread has one task, the next one is another thread's.
  if (!call.is_streamed || IsInSources(call.inputs) || chunk >= num_tasks || num_tasks <= num_threads_) return {};
  const Chunk& part = plan.chunks[static_cast<size_t>(chunk % num_chunks)];
  // A channel's share of X is that of its positions, about.
  const auto share = [&](int64_t position) {
    return static_cast<int64_t>(static_cast<double>(plan.in_plane) * static_cast<double>(position) /
                                static_cast<double>(plan.num_positions));
  };
  const Tile& last = plan.tiles[part.tile_end - 1];
  const int64_t end = std::min(last.start + last.num_vectors * int64_t{kernels_.lanes}, plan.num_positions);
  const int64_t first = share(part.start);
  Ahead ahead;
  ahead.line = static_cast<const char*>(Image(call, chunk / num_chunks)) + first * element;
  ahead.channel_lines = CeilDivide((share(end) - first) * element, int64_t{kCacheLine});
  ahead.lines_left = ahead.channel_lines;
  ahead.channels_left = ahead.channel_lines > 0 ? geometry.in_channels : 0;
  ahead.channel_stride = plan.in_plane * element;
  const auto num_tiles = static_cast<int64_t>(part.tile_end - part.tile_begin);
  ahead.lines_a_row = CeilDivide(ahead.channel_lines * geometry.in_channels, num_tiles * geometry.out_channels);
  return ahead;
}

const void* CpuKernel::Image(const Call& call, int64_t image) const {
  const int64_t elements = image * attributes_.geometry.in_channels * call.plan.in_plane;
  return static_cast<const char*>(call.inputs.x.data) + static_cast<size_t>(elements) * element_size();
}

// Where outputs of an image go, but for the runs of a tile.
TileOutput CpuKernel::OutputOf(const Call& call, int64_t image) const {
  const auto offset =
      static_cast<size_t>(image * attributes_.geometry.out_channels * call.plan.out_plane) * element_size();
  const void* residual = call.inputs.residual.data;
  TileOutput output{};
  output.is_half = is_half();
  output.bias = call.inputs.bias.data;
  output.residual = residual == nullptr ? nullptr : static_cast<const char*>(residual) + offset;
  output.y = call.y + offset;
  output.channel_stride = call.plan.out_plane;
  output.activation = static_cast<int>(attributes_.activation.code);
  output.alpha = attributes_.activation.alpha;
  output.beta = attributes_.activation.beta;
  const ActivationCode code = attributes_.activation.code;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  output.low = code == ActivationCode::kRelu ? 0 : code == ActivationCode::kClip ? output.alpha : -kInfinity;
  output.high = code == ActivationCode::kClip ? output.beta : kInfinity;
  return output;
}

// Computes rows of the tiles of a chunk. `cells` points to channel 0 at the chunk's first position.
void CpuKernel::RunChunk(const Call& call, const Chunk& chunk, int64_t image, const float* cells, int64_t row_begin,
                         int64_t row_end, Ahead ahead) const {
  if (row_begin == row_end) return;
  const ConvGeometry& geometry = attributes_.geometry;
  const Plan& plan = call.plan;
  TileJob job{};
  job.rows_per_group = geometry.group_out_channels();
  job.first_group = row_begin / job.rows_per_group;
  job.group_stride = geometry.group_in_channels() * plan.channel_cells;
  job.entries = plan.entries.data();
  job.segments = plan.segments.data();
  job.shifts = plan.shifts.data();
  job.num_shifts = static_cast<int32_t>(plan.shifts.size());
  job.num_blocks = plan.num_blocks;
  job.num_rows = geometry.out_channels;
  job.row_begin = row_begin;
  job.row_end = row_end;
  job.ahead = call.is_streamed ? &ahead : nullptr;

  job.output = OutputOf(call, image);

  for (size_t i = chunk.tile_begin; i < chunk.tile_end; ++i) {
    const Tile& tile = plan.tiles[i];
    job.input = cells + (tile.start - chunk.start) + job.first_group * job.group_stride;
    job.num_vectors = tile.num_vectors;
    job.last_vector = tile.last_vector;
    job.output.runs = plan.runs.data() + tile.run_begin;
    job.output.num_runs = static_cast<int32_t>(tile.run_end - tile.run_begin);
    kernels_.run(job);
  }
}

}  // namespace

std::unique_ptr<Kernel> CreateCpuKernel(const OpDescription& op, SparseConvAttributes attributes) {
  return std::make_unique<CpuKernel>(op, std::move(attributes));
}

}  // namespace sparseconv::cpu
