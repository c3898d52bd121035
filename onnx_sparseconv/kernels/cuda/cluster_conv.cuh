// Sparse convolution of few images by clusters of blocks on sparse tensor cores (sm_90a): one launch, in which all
// multiprocessors have a part of the channels, and sums meet in shared memory.
//
// With few images there are few tiles of outputs, and what takes time is what waits for something else: launches for
// each other, products for X, sums for sums. So nothing here goes round. A block brings its chunks of the weight
// (wgmma_weight.h) by bulk copies, before the launch in front of it is complete, and all that its tile reads of their
// channels, as octets of channels (octet_conv.cuh): one copy in shared memory serves all taps. It multiplies once. Then
// each block of the cluster takes a part of the tile's rows, adds up what all have of them, in float and always in the
// same order, by loads from each other's shared memory, and stores the outputs.
//
// Lines of pixels go on from a row of outputs to the next one, so that short rows fill a product. With strides,
// neighbouring pixels are those that neighbouring outputs read, and what lies between has planes of its own.
#pragma once

#include "divide.cuh"
#include "magnitude.cuh"
#include "sources.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// `T`: the type of X, Y, bias and residual, Half or float. `kBlocks`: of eight positions, that a warpgroup computes.
template <class T, int kBlocks>
class ClusterConv : private Warpgroups {
 public:
  __device__ __forceinline__ ClusterConv(const ClusterParams& params, const void* shared)
      : Warpgroups(params.common, shared),
        p_(params),
        warp_(static_cast<int>(Uniform(threadIdx.x / 32))),
        rank_(ClusterRank()),
        tile_(TileOfBlock(params)),
        first_chunk_(BeginOf(rank_)),
        num_chunks_(BeginOf(rank_ + 1) - first_chunk_),
        inputs_(stages_ + kClusterHeadBytes),
        values_(inputs_ + static_cast<unsigned>(w_.input_bytes)),
        metas_(values_ + static_cast<unsigned>(p_.max_steps * t_.warps_m) * kValueBytes),
        table_(metas_ + static_cast<unsigned>(p_.max_steps * t_.warps_m) * kPlaceBytes),
        channels_(table_ + static_cast<unsigned>(4 * p_.max_steps)) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    LetNextLaunchBegin();
    Prepare();
    __syncthreads();
    WaitForLaunchBefore();
    const int row = static_cast<int>(threadIdx.x);
    const bool has_row = row < t_.warps_m * kRows;
    const Finish<T> finish = has_row ? FinishOf<T>(tile_, tile_.first_row_tile * kRows + row) : Finish<T>{};
    Stage();
    if (has_row) StoreSharedPair(FinishAt(row), finish.scale, finish.bias);
    FenceSharedForTensorCores();
    __syncthreads();
    if (IsProductWarp()) {
      const unsigned steps = Multiply();
      WaitAtBarrier(kSumsBarrier, kWgmmaProductThreads);  // what sums take the place of was read for the last time
      KeepSums(steps);
    } else if (kIsFloat && warp_ == kClusterWarps - 1) {
      StoreShared(SeenByBlock(), OrInWarp(Lane() < kClusterWarps ? LoadShared(SeenByWarp(Lane())) : 0));
    }
    ArriveAtCluster();
    WaitForCluster();
    const unsigned seen = kIsFloat ? SeenByCluster() : 0;
    if (p_.out_columns == 1) {
      FinishTile<1, kMaxClusterParts>();
    } else if (p_.parts <= kFewParts) {
      FinishTile<2, kFewParts>();
    } else {
      FinishTile<2, kMaxClusterParts>();
    }
    // Until all have read its sums, a block stays.
    ArriveAtClusterToLeave();
    WaitForCluster();
    return DidHalvesHold(seen);
  }

  // Of the tile's rows, each block computes those once more that it finished, since blocks do not wait for each other's
  // stores. To be called by all threads of it.
  __device__ __forceinline__ void RecomputeTiles() const {
    __syncthreads();
    OutputBox box = BoxOf(tile_);
    box.rows = min(t_.tile_h, t_.out_h - tile_.y);
    box.columns = min(t_.tile_w, t_.out_w - tile_.x);
    const int begin = FirstRowOf(rank_), end = FirstRowOf(rank_ + 1), channels = box.channels;
    for (int first = 0; first < channels; first += kRows) {
      box.channels = min(end, channels - first) - begin;
      for (int image = tile_.first_image; image < min(tile_.first_image + p_.images, t_.batch); ++image) {
        box.first = ((FirstPlane(tile_, image) + first + begin) * t_.out_h + tile_.y) * t_.out_w + tile_.x;
        Recompute(box);
      }
    }
  }

 private:
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  static constexpr int kOctet = 8;
  static constexpr unsigned kOctetPixelBytes = 16;
  static constexpr int kTasksAtOnce = sizeof(T) == sizeof(float) ? 2 : 4;
  static constexpr int kSumsBarrier = 1;
  static constexpr int kFewParts = 4;
  static constexpr int kMaxRows = 2 * kRows;  // of a tile
  // Products that add to the same sums wait for each other; where registers hold them, there are two sets of sums.
  static constexpr int kChains = kBlocks <= 15 ? 2 : 1;
  static constexpr unsigned kBatchSteps = 4;  // whose products are on their way together

  __device__ __forceinline__ Shared WeightArrived() const { return stages_; }
  // What is done to the sums of the block's channels, behind the barrier: a bias may come from far.
  __device__ __forceinline__ Shared FinishAt(int row) const { return stages_ + 16u + static_cast<unsigned>(8 * row); }
  // What each warp saw of X, and the block, behind those.
  __device__ __forceinline__ Shared SeenByWarp(unsigned warp) const { return FinishAt(kMaxRows) + 4 * warp; }
  __device__ __forceinline__ Shared SeenByBlock() const { return SeenByWarp(kClusterWarps); }
  __device__ __forceinline__ bool HasTwoRuns() const { return t_.warps_m == 1; }

  static __device__ __forceinline__ Tile TileOfBlock(const ClusterParams& p) {
    const TileParams& t = p.common.tile;
    Tile tile = {};
    tile.row_block = static_cast<int>(blockIdx.y);
    if (t.groups > 1) tile.group = Split(tile.row_block, t.row_blocks_per_group, tile.row_block);
    tile.first_row_tile = tile.row_block * t.warps_m;
    const int index = static_cast<int>(blockIdx.z), row = Divide(index, p.by_tiles_x);
    const int images = Divide(row, p.by_tiles_y);
    tile.first_image = images * p.images;
    tile.x = (index - row * t.tiles_x) * t.tile_w;
    tile.y = (row - images * t.tiles_y) * t.tile_h;
    return tile;
  }

  // The first chunk of a part of the tile's.
  __device__ __forceinline__ int BeginOf(unsigned part) const {
    return p_.part_begins[blockIdx.y * static_cast<unsigned>(p_.parts) + part];
  }

  // --- before X ---------------------------------------------------------------------------------------------------

  // The weight's part is fetched, and listed where the steps read, and where channels lie in an image: nothing here is
  // what another launch writes. Each warp has chunks of its own. What is far away is asked for at once.
  __device__ __forceinline__ void Prepare() const {
    const int num_places = num_chunks_ * kWgmmaChannels, thread = static_cast<int>(threadIdx.x);
    const int* channels = w_.channels + first_chunk_ * kWgmmaChannels;
    const int channel = thread < num_places ? channels[thread] : 0;
    const bool has_chunk = warp_ < num_chunks_;
    const Steps steps = has_chunk ? StepsOf(warp_) : Steps{};
    const unsigned tap = has_chunk ? TapsOf(warp_)[Lane()] : 0;
    if (thread == 0) {
      InitBarrier(WeightArrived(), kClusterWarps);
      FenceBarrierInit();
    }
    __syncthreads();
    if (has_chunk) {
      FetchWeight(steps);
      if (Lane() < steps.count) ListStep(warp_, steps, Lane(), tap);
    }
    for (int chunk = warp_; chunk < num_chunks_; chunk += kClusterWarps) {
      const Steps more = StepsOf(chunk);
      if (chunk != warp_) FetchWeight(more);
      for (unsigned step = Lane() + (chunk == warp_ ? 32 : 0); step < more.count; step += 32) {
        ListStep(chunk, more, step, TapsOf(chunk)[step]);
      }
    }
    if (Lane() == 0) Arrive(WeightArrived());
    if (thread < num_places) ListChannel(thread, channel);
    for (int place = thread + kClusterThreads; place < num_places; place += kClusterThreads) {
      ListChannel(place, channels[place]);
    }
  }

  // Where a place's channel lies in an image of X, or of its source, and above that, which one that is.
  __device__ __forceinline__ void ListChannel(int place, int channel) const {
    const int source = FindSourceNumber(p_.sources, channel);
    const auto before = static_cast<unsigned>((channel - p_.sources.begins[source]) * (t_.in_h * t_.in_w));
    StoreShared(channels_ + static_cast<unsigned>(4 * place),
                static_cast<unsigned>(sizeof(T)) * before | static_cast<unsigned>(source) << kClusterSourceShift);
  }

  // Steps of a chunk, or of none, and of all of the part's before it.
  struct Steps {
    unsigned begin;  // of the chunk, in units of 16 bytes
    unsigned before, count;
  };
  __device__ __forceinline__ Steps StepsOf(int chunk) const {
    const unsigned* begins = w_.chunk_begins + first_chunk_;
    const unsigned first = begins[0], begin = begins[chunk], end = begins[min(chunk + 1, num_chunks_)];
    const auto header = static_cast<unsigned>(w_.header_bytes) / 16;
    constexpr unsigned kStep = (kValueBytes + kPlaceBytes) / 16;
    const int shift = t_.warps_m - 1;  // one row tile or two
    return {begin, (begin - first - static_cast<unsigned>(chunk) * header) / kStep >> shift,
            chunk < num_chunks_ ? (end - begin - header) / kStep >> shift : 0};
  }

  // The values of all steps lie together, and behind them where they stand.
  __device__ __forceinline__ void FetchWeight(const Steps& steps) const {
    if (Lane() != 0) return;
    const auto row_tiles = static_cast<unsigned>(t_.warps_m);
    const unsigned value_bytes = steps.count * row_tiles * kValueBytes;
    const unsigned place_bytes = steps.count * row_tiles * kPlaceBytes;
    const unsigned char* values =
        static_cast<const unsigned char*>(w_.chunks) + 16 * static_cast<size_t>(steps.begin) + w_.header_bytes;
    ExpectBytes(WeightArrived(), value_bytes + place_bytes);
    CopyBulkCached(values_ + steps.before * row_tiles * kValueBytes, values, value_bytes, WeightArrived());
    CopyBulkCached(metas_ + steps.before * row_tiles * kPlaceBytes, values + value_bytes, place_bytes, WeightArrived());
  }

  __device__ __forceinline__ const unsigned char* TapsOf(int chunk) const {
    return p_.taps + static_cast<size_t>(first_chunk_ + chunk) * kMaxWgmmaTaps;
  }

  // Where a step's matrices lie, as the tensor cores want it (the lower word of a Matrix), for the first run.
  __device__ __forceinline__ void ListStep(int chunk, const Steps& steps, unsigned step, unsigned tap) const {
    const auto octet_bytes = static_cast<unsigned>(p_.octet_bytes);
    const Shared first = inputs_ + static_cast<unsigned>(chunk * kWgmmaChannels / kOctet) * octet_bytes;
    StoreShared(table_ + 4 * (steps.before + step),
                LowerWord(MatrixAt(first + p_.tap_bytes[tap], octet_bytes, kMatrixBytes)));
  }

  // --- X ------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Stage() const {
    if (p_.x_columns == 4) {
      StageColumns<4>();
    } else if (p_.x_columns == 2) {
      StageColumns<2>();
    } else {
      StageColumns<1>();
    }
  }

  // What a lane loads at a time: `kColumns` neighbouring columns of the eight channels of an octet. Pixels that lie
  // together in shared memory belong to lanes whose octets differ, else they would lie in the same banks.
  template <int kColumns>
  struct Task {
    Columns<kColumns* static_cast<int>(sizeof(T))> channels[kOctet];
    Shared first = 0;  // pixel
    int column = 0;    // of that, in its line
  };

  template <int kColumns>
  __device__ __forceinline__ void StageColumns() const {
    constexpr int kItems = 32 / kColumns;
    // Vectors of a line begin at multiples of `kColumns` in X; with more than one, there are no strides between.
    const int first_column = tile_.x * t_.strides[1] - t_.pads_begin[1];
    const int shift = first_column & (kColumns - 1);
    const int items = p_.planes[0] * p_.planes[1] * p_.plane_rows * p_.images * p_.line_vectors;
    const int segments = (items + kItems - 1) / kItems;
    const int tasks = segments * (num_chunks_ * kWgmmaChannels / (kOctet * kColumns));
    Magnitude magnitude;
    for (int begin = warp_; begin < tasks; begin += kTasksAtOnce * kClusterWarps) {
      Task<kColumns> loaded[kTasksAtOnce];
#pragma unroll
      for (int i = 0; i < kTasksAtOnce; ++i) {
        const int task = begin + i * kClusterWarps;
        const int group = Divide(task, p_.by_segments), segment = task - group * segments;
        const int item = segment * kItems + static_cast<int>(Lane()) / kColumns;
        loaded[i].column = p_.line_pixels;
        if (task < tasks && item < items) {
          LoadTask(group * kColumns + static_cast<int>(Lane()) % kColumns, item, first_column, shift, loaded[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTasksAtOnce; ++i) StoreTask(loaded[i], magnitude);
    }
    if constexpr (kIsFloat) {
      StoreShared(SeenByWarp(static_cast<unsigned>(warp_)), OrInWarp(magnitude.Seen()));
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void LoadTask(int octet, int item, int first_column, int shift,
                                           Task<kColumns>& task) const {
    const int line = Divide(item, p_.by_line_vectors), plane_line = Divide(line, p_.by_images);
    const int image = tile_.first_image + line - plane_line * p_.images;
    int row = plane_line, plane_row = 0, plane_column = 0;
    if (p_.planes[0] * p_.planes[1] > 1) {
      plane_row = Split(Split(plane_line, p_.plane_rows, row), p_.planes[1], plane_column);
    }
    task.column = (item - line * p_.line_vectors) * kColumns - shift;
    const int y = (tile_.y + row) * t_.strides[0] + plane_row - t_.pads_begin[0];
    const int x = first_column + task.column * t_.strides[1] + plane_column;
    task.first = inputs_ + static_cast<unsigned>(octet * p_.octet_bytes) +
                 static_cast<unsigned>(line * p_.line_pixels + task.column) * kOctetPixelBytes;
    if (static_cast<unsigned>(y) >= static_cast<unsigned>(t_.in_h) ||
        static_cast<unsigned>(x) >= static_cast<unsigned>(t_.in_w) || image >= t_.batch) {
      return;
    }
    const Shared channels = channels_ + static_cast<unsigned>(4 * kOctet * octet);
    const uint4 lower = LoadSharedVector(channels), upper = LoadSharedVector(channels + 16);
    const unsigned char* from = ImageOf(image, lower.x) + sizeof(T) * (y * t_.in_w + x);
    const unsigned begins[kOctet] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
#pragma unroll
    for (int i = 0; i < kOctet; ++i) task.channels[i].LoadCached(from + begins[i]);
  }

  // An image of X, of the tile's group, or of a source: that of a listed channel, of whose entry in the list all has to
  // be added to this. Channels that are staged together are of one source.
  __device__ __forceinline__ const unsigned char* ImageOf(int image, unsigned listed) const {
    const int plane = t_.in_h * t_.in_w;
    if (p_.sources.count == 0) {
      const long long before = static_cast<long long>(image) * t_.in_channels + tile_.group * t_.group_in_channels;
      return static_cast<const unsigned char*>(t_.x) + sizeof(T) * (before * plane);
    }
    const unsigned source = listed >> kClusterSourceShift;
    const long long before =
        static_cast<long long>(image) * (p_.sources.begins[source + 1] - p_.sources.begins[source]);
    return static_cast<const unsigned char*>(p_.sources.x[source]) + sizeof(T) * (before * plane) -
           (source << kClusterSourceShift);
  }

  template <int kColumns>
  __device__ __forceinline__ void StoreTask(const Task<kColumns>& task, Magnitude& magnitude) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      unsigned words[kOctet / 2];
#pragma unroll
      for (int pair = 0; pair < kOctet / 2; ++pair) {
        words[pair] = PairOf(task.channels[2 * pair].words, task.channels[2 * pair + 1].words, i, magnitude);
      }
      const auto column = static_cast<unsigned>(task.column + i);
      StoreSharedVectorIf(column < static_cast<unsigned>(p_.line_pixels), task.first + i * kOctetPixelBytes, words);
    }
  }

  // Column i of two channels, as halves.
  template <int kWords>
  static __device__ __forceinline__ unsigned PairOf(const unsigned (&a)[kWords], const unsigned (&b)[kWords], int i,
                                                    Magnitude& magnitude) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return magnitude.Rounded(BitsToFloat(a[i]), BitsToFloat(b[i]));
    } else {
      return SelectBytes(a[i / 2], b[i / 2], i % 2 == 0 ? kLowerHalves : kUpperHalves);
    }
  }

  // --- products -----------------------------------------------------------------------------------------------------

  // Returns the steps. A batch is always on its way while what the next one needs is loaded. Metadata of a product must
  // stay in its register until that is complete; see wgmma_conv.cuh. So there are two sets of it, and one for steps
  // that are left. Within a batch there are no branches, else the compiler has each product wait for the one before.
  __device__ __forceinline__ unsigned Multiply() {
    const unsigned steps = Uniform(StepsOf(num_chunks_).before), batched = steps - steps % kBatchSteps;
    const auto warpgroup = static_cast<unsigned>(warp_) / 4;
    Operands operands;
    operands.row_tile = HasTwoRuns() ? 0 : warpgroup;
    operands.run = HasTwoRuns() ? warpgroup * static_cast<unsigned>(p_.run_step_y * p_.line_pixels + p_.run_step_x) : 0;
    unsigned metas[2][kBatchSteps] = {}, rest[kBatchSteps] = {};
    WaitForBarrier(WeightArrived(), 0);
    uint4 next = LoadSharedVector(table_);
    for (unsigned begin = 0; begin < batched; begin += 2 * kBatchSteps) {
#pragma unroll
      for (unsigned part = 0; part < 2; ++part) {
        const unsigned first = begin + part * kBatchSteps;
        if (first >= batched) break;
        const uint4 inputs = next;
        next = LoadSharedVector(table_ + 4 * (first + kBatchSteps));
        MultiplyBatch<kBatchSteps>(operands, inputs, steps, first, metas[part]);
        WaitForProducts<1>();
      }
    }
    static_assert(kBatchSteps == 4);
    if (steps % kBatchSteps == 1) MultiplyBatch<1>(operands, next, steps, batched, rest);
    if (steps % kBatchSteps == 2) MultiplyBatch<2>(operands, next, steps, batched, rest);
    if (steps % kBatchSteps == 3) MultiplyBatch<3>(operands, next, steps, batched, rest);
    WaitForProducts<0>();
    return steps;
  }

  // What differs from a warpgroup to the other.
  struct Operands {
    unsigned row_tile;
    unsigned run;  // where it begins, in pixels
  };

  template <unsigned kSteps>
  __device__ __forceinline__ void MultiplyBatch(const Operands& operands, const uint4& inputs, unsigned steps,
                                                unsigned first, unsigned (&metas)[kBatchSteps]) {
    const auto row_tiles = static_cast<unsigned>(t_.warps_m);
    const unsigned begin = first * row_tiles + operands.row_tile;
    const Matrix a = MatrixAt(values_ + begin * kValueBytes, kMatrixBytes, 2 * kMatrixBytes);
    const Shared meta =
        metas_ + begin * kPlaceBytes + static_cast<unsigned>(warp_ % 4 * 64) + Lane() / 4 * 8 + Lane() % 2 * 4;
    const unsigned of_steps[kBatchSteps] = {inputs.x, inputs.y, inputs.z, inputs.w};
#pragma unroll
    for (unsigned i = 0; i < kSteps; ++i) LoadSharedIf(steps, metas[i], meta + i * row_tiles * kPlaceBytes);
    FenceSums();
#pragma unroll
    for (unsigned i = 0; i < kSteps; ++i) {
      // A Matrix counts in pixels, 16 bytes.
      MultiplySparseOctets(sums_[i % kChains], Moved(a, i * row_tiles * kValueBytes),
                           MatrixOf(of_steps[i] + operands.run, kMatrixBytes), metas[i],
                           first + i >= unsigned{kChains});
    }
    CommitProducts();
  }

  // --- sums ---------------------------------------------------------------------------------------------------------

  // Of a row of a warpgroup's.
  __device__ __forceinline__ Shared SumsOf(int warpgroup, int row) const {
    return inputs_ + static_cast<unsigned>(4 * (warpgroup * kRows + row) * p_.sums_pitch);
  }

  // Of a set that no step added to, there are none.
  __device__ __forceinline__ void KeepSums(unsigned steps) const {
    const Shared first = SumsOf(warp_ / 4, warp_ % 4 * 16 + static_cast<int>(Lane()) / 4) + Lane() % 4 * 8;
    const Shared upper = first + static_cast<unsigned>(4 * 8 * p_.sums_pitch);
#pragma unroll
    for (unsigned block = 0; block < kBlocks; ++block) {
      const auto sum = [&](unsigned i) {
        const float first_sum = steps > 0 ? sums_[0][4 * block + i] : 0.0f;
        return steps < unsigned{kChains} || kChains == 1 ? first_sum : first_sum + sums_[kChains - 1][4 * block + i];
      };
      StoreSharedPair(first + 32 * block, sum(0), sum(1));
      StoreSharedPair(upper + 32 * block, sum(2), sum(3));
    }
  }

  // Of each row tile, the first row that a block finishes.
  __device__ __forceinline__ int FirstRowOf(unsigned rank) const { return static_cast<int>(rank) * kRows / p_.parts; }

  // Of the tile's outputs, a block finishes so many rows of each warpgroup's; a thread, `kColumns` neighbours at a
  // time, some of them at once, since what it loads is far away.
  template <int kColumns, int kParts>
  __device__ __forceinline__ void FinishTile() const {
    constexpr int kAtOnce = 24 / kParts;
    const int begin = FirstRowOf(rank_), rows = FirstRowOf(rank_ + 1) - begin;
    const int vectors = p_.run_w / kColumns, of_row = p_.run_lines * vectors, count = 2 * rows * of_row;
    Shared parts[kParts];
#pragma unroll
    for (unsigned part = 0; part < kParts; ++part) {
      parts[part] = ClusterAddress(inputs_, min(part, static_cast<unsigned>(p_.parts) - 1));
    }
    for (int first = static_cast<int>(threadIdx.x); first < count; first += kAtOnce * kClusterThreads) {
      Output<kColumns, kParts> outputs[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // Beyond the last output, what is done to it is read from further places of shared memory, and not used.
        const int index = first + i * kClusterThreads, line_row = Divide(index, p_.by_out_row[kColumns - 1]);
        const int place = index - line_row * of_row, line = Divide(place, p_.by_out_vectors[kColumns - 1]);
        const int warpgroup = line_row >= rows ? 1 : 0, row = begin + line_row - warpgroup * rows;
        LoadOutput(warpgroup, row, line, (place - line * vectors) * kColumns, index < count, parts, outputs[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) StoreOutput(outputs[i]);
    }
  }

  // Neighbouring outputs of a channel, of which parts of sums are on their way.
  template <int kColumns, int kParts>
  struct Output {
    bool exists;
    Shared finish;
    long long index;  // in Y
    uint2 parts[kParts];
    Columns<kColumns* static_cast<int>(sizeof(T))> residual;
  };

  template <int kColumns, int kParts>
  __device__ __forceinline__ void LoadOutput(int warpgroup, int row, int line, int column, bool exists,
                                             const Shared (&parts)[kParts], Output<kColumns, kParts>& output) const {
    const int run = HasTwoRuns() ? warpgroup : 0, row_tile = HasTwoRuns() ? 0 : warpgroup;
    const int tile_line = run * p_.run_step_y + line, row_of_tile = Divide(tile_line, p_.by_images);
    const int image = tile_.first_image + tile_line - row_of_tile * p_.images;
    const int y = tile_.y + row_of_tile, x = tile_.x + run * p_.run_step_x + column;
    const int channel = (tile_.first_row_tile + row_tile) * kRows + row;
    output.exists = exists && channel < t_.group_out_channels && y < t_.out_h && x < t_.out_w && image < t_.batch;
    output.finish = FinishAt(row_tile * kRows + row);
    const int plane = image * t_.out_channels + tile_.group * t_.group_out_channels + channel;
    output.index = static_cast<long long>(plane) * (t_.out_h * t_.out_w) + (y * t_.out_w + x);
    const Shared offset =
        SumsOf(warpgroup, row) - inputs_ + static_cast<unsigned>(4 * (line * p_.line_pixels + column));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      output.parts[part] = LoadClusterPairIf<kColumns>(output.exists && part < p_.parts, parts[part] + offset);
    }
    if (t_.epilogue.residual != nullptr && output.exists) {
      output.residual.Load(static_cast<const T*>(t_.epilogue.residual) + output.index);
    }
  }

  // Parts are added up in their order.
  template <int kColumns, int kParts>
  __device__ __forceinline__ void StoreOutput(const Output<kColumns, kParts>& output) const {
    const Epilogue& e = t_.epilogue;
    Floats<kColumns> sums = {};
#pragma unroll
    for (const uint2& part : output.parts) {
      sums.at[0] += BitsToFloat(part.x);
      if constexpr (kColumns == 2) sums.at[1] += BitsToFloat(part.y);
    }
    unsigned scale, bias;
    LoadSharedPair(output.finish, scale, bias);
    const Finish<T> finish{BitsToFloat(scale), BitsToFloat(bias)};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      sums.at[i] = finish(sums.at[i]);
      if constexpr (sizeof(T) == sizeof(float)) {
        sums.at[i] += BitsToFloat(output.residual.words[i]);
      } else {
        sums.at[i] += ToFloat(i == 0 ? Lower(output.residual.words[0]) : Upper(output.residual.words[0]));
      }
    }
    if (HasActivation()) sums = ActivateElsewhere<Half>(e.activation, sums, e.alpha, e.beta);
    Columns<kColumns* static_cast<int>(sizeof(T))> outputs;
    if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) outputs.words[i] = Bounded<T>(e.bounds, sums.at + i);
    } else {
      const float pair[] = {sums.at[0], sums.at[kColumns - 1]};
      outputs.words[0] = Bounded<T>(e.bounds, pair);
    }
    if (output.exists) outputs.Store(static_cast<T*>(t_.y) + output.index);
  }

  // --- what halves could not hold -----------------------------------------------------------------------------------

  // In all channels of the tile, so the blocks of a cluster agree. By a load that is on its way with those of sums.
  __device__ __forceinline__ unsigned SeenByCluster() const {
    const unsigned part = min(Lane(), static_cast<unsigned>(p_.parts) - 1);
    return OrInWarp(LoadClusterPairIf<1>(true, ClusterAddress(SeenByBlock(), part)).x);
  }

  const ClusterParams& p_;
  const int warp_;
  const unsigned rank_;
  const Tile tile_;
  const int first_chunk_, num_chunks_;
  const Shared inputs_, values_, metas_, table_, channels_;
  float sums_[kChains][4 * kBlocks];
};

}  // namespace sparseconv::cuda
