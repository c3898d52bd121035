// The part of a generated kernel that does not depend on the weights: which outputs a block computes, how its input
// gets into shared memory, how results leave. params.h describes the layout of shared memory.
//
// After Dong et al. (2020) and SparseRT (2020): the weights are instructions. The generated text defines a type `Code`
// with the constants of a GeneratedPlan and the straight-line code of every chunk of every tile:
//
//   struct Code {
//     static constexpr int kTileChannels = .., kNumTiles = .., kChunkChannels = .., (see below)
//     // Words of the input that a slot reads in a chunk channel: word a is at input row
//     // out_row * stride - pad + kRow[a] and column slot * columns_per_slot * stride + kColumn[a].
//     static constexpr int kNumWords, kRow[], kColumn[];
//     using Sums = ..;  // of one thread: kTileChannels outputs of its slot
//     static __device__ void RunChunk(int tile, int chunk, Sums& sums, const Shared (&words)[kNumWords]);
//   };
//
// A block computes one tile, for one group of slots after the other, and never another tile: so its code stays in the
// instruction cache of its multiprocessor. The pipeline of staged chunks runs on from group to group.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"
#include "sums.cuh"

namespace sparseconv::cuda {

// The slots that a block computes in one go, and the input rows that they read.
struct Group {
  int first_image;
  int num_images;
  int first_slot;
  int num_slots;  // in each image
  int first_row;
  int num_rows;
  int first_column;  // 0, and columns to the end of the row, unless a single row is read
  int num_columns;
};

template <class Code>
class Generated {
 public:
  explicit __device__ __forceinline__ Generated(const GeneratedParams& params, int tile, Shared stages, Shared batch,
                                                Shared barriers)
      : p_(params), tile_(tile), stages_(stages), batch_(batch), barriers_(barriers) {
    const int num_units = Code::kNumTiles * p_.num_splits;
    split_ = static_cast<int>(blockIdx.x) % num_units / Code::kNumTiles;
    lane_ = static_cast<int>(blockIdx.x) / num_units;
    const int num_chunks = p_.chunk_end - p_.chunk_begin;
    chunk_begin_ = p_.chunk_begin + num_chunks * split_ / p_.num_splits;
    chunk_end_ = p_.chunk_begin + num_chunks * (split_ + 1) / p_.num_splits;
    row_slots_ = (p_.out_w + kColumnsPerSlot - 1) / kColumnsPerSlot;
  }

  __device__ __forceinline__ void Run() {
    Prepare();
    next_group_ = lane_;
    next_chunk_ = chunk_begin_;
    // The first round only fills the stages: what stages a chunk is a good part of the code, so it stands in one place.
    int stage = 0;
    unsigned round = 0;
    for (int index = lane_; index < p_.num_groups; index += p_.num_lanes) {
      const Group group = Locate(index);
      const Place place = PlaceOf(group);
      Shared words[Code::kNumWords];
      FindWords(group, place, stage, words);
      typename Code::Sums sums;
      sums.Clear();
      // All threads of a warp agree: warps without a slot leave the issue slots to the others.
      const int num_busy = (group.num_images - 1) * p_.group_slots + group.num_slots;
      const bool is_busy = static_cast<int>(threadIdx.x) / kWarp * kWarp < num_busy;
      for (int chunk = chunk_begin_; chunk < chunk_end_;) {
        if (round > 0) {
          AwaitStage(stage, (round - 1) % 2);
          if (is_busy) Code::RunChunk(tile_, chunk, sums, words);
          __syncthreads();
          ++chunk;
        }
        StageNext(stage);
        const bool is_last = ++stage == Code::kNumStages;
        const int step = is_last ? -(Code::kNumStages - 1) * kStageBytes : kStageBytes;
#pragma unroll
        for (int i = 0; i < Code::kNumWords; ++i) words[i] += static_cast<Shared>(step);
        if (is_last) {
          stage = 0;
          ++round;
        }
      }
      Finish(place, sums);
    }
  }

 private:
  using Element = typename Code::Sums::Element;
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kColumnsPerSlot = Code::Sums::kColumns;
  static constexpr int kVector = 16 / kSize;  // elements of 16 bytes
  static constexpr int kZeroBytes = 16;
  static constexpr int kStageBytes = Code::kChunkChannels * Code::kChannelPitch;
  static constexpr int kWarp = 32;

  // Where a thread's slot lies.
  struct Place {
    bool is_active;
    int image;  // of the group
    int batch_index;
    int out_row;
    int slot_column;
  };

  __device__ __forceinline__ bool IsBulk() const {
#if SPARSECONV_HAS_BULK_COPIES
    return p_.staging == kBulkStaging;
#else
    return false;
#endif
  }

  // Zeroes the words that taps outside of the input read, and makes the barriers.
  __device__ __forceinline__ void Prepare() {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < Code::kNumStages * Code::kChunkChannels * (kZeroBytes / 4); i += Code::kThreads) {
      StoreShared(stages_ + static_cast<Shared>(i / 4 * Code::kChannelPitch + i % 4 * 4), 0u);
    }
#if SPARSECONV_HAS_BULK_COPIES
    if (thread < Code::kNumStages) InitBarrier(Barrier(thread), kWarp);
    FenceBarrierInit();
#endif
    __syncthreads();
  }

  __device__ __forceinline__ Shared Barrier(int stage) const { return barriers_ + static_cast<Shared>(stage * 8); }

  __device__ __forceinline__ Group Locate(int index) const {
    const int plane_slots = p_.out_h * row_slots_;
    Group group;
    if (p_.groups_per_image > 1) {
      group.first_image = index / p_.groups_per_image;
      group.num_images = 1;
      group.first_slot = index % p_.groups_per_image * p_.group_slots;
      group.num_slots = min(p_.group_slots, plane_slots - group.first_slot);
    } else {
      group.first_image = index * p_.images_per_group;
      group.num_images = min(p_.images_per_group, p_.batch - group.first_image);
      group.first_slot = 0;
      group.num_slots = plane_slots;
    }
    const int first_out_row = group.first_slot / row_slots_;
    const int last_out_row = (group.first_slot + group.num_slots - 1) / row_slots_;
    group.first_row = min(max(first_out_row * Code::kStrideH - Code::kPadTop, 0), p_.in_h);
    const int end_row = min(last_out_row * Code::kStrideH - Code::kPadTop + Code::kReachH, p_.in_h);
    group.num_rows = max(end_row - group.first_row, 0);
    group.first_column = 0;
    group.num_columns = p_.in_w;
    if (Code::kReachH == 1 && first_out_row == last_out_row) {
      const int first = group.first_slot % row_slots_, last = (group.first_slot + group.num_slots - 1) % row_slots_;
      constexpr int kStep = Code::kStrideW * kColumnsPerSlot;
      // Even, so that words of two halves stay whole.
      group.first_column = min(max(first * kStep - Code::kPadLeft, 0), p_.in_w) / kColumnsPerSlot * kColumnsPerSlot;
      const int end = min((last + 1) * kStep - Code::kStrideW - Code::kPadLeft + Code::kReachW, p_.in_w);
      group.num_columns = max(end - group.first_column, 0);
    }
    return group;
  }

  __device__ __forceinline__ Place PlaceOf(const Group& group) const {
    const int thread = static_cast<int>(threadIdx.x);
    Place place;
    place.image = thread / p_.group_slots;
    const int slot = thread - place.image * p_.group_slots;
    place.is_active = place.image < group.num_images && slot < group.num_slots;
    place.batch_index = group.first_image + place.image;
    place.out_row = (group.first_slot + slot) / row_slots_;
    place.slot_column = (group.first_slot + slot) % row_slots_;
    return place;
  }

  // Elements between a multiple of 16 bytes and the first staged one of chunk channel 0.
  __device__ __forceinline__ int Misalignment(const Group& group) const {
    return p_.staging == kElementStaging
               ? 0
               : static_cast<int>(static_cast<unsigned>(group.first_row * p_.in_w + group.first_column) % kVector);
  }

  // The same for another channel, on top of it.
  static __device__ __forceinline__ int Skew(int channel) {
    return Code::kPlaneResidue == 0 ? 0
                                    : static_cast<int>(static_cast<unsigned>(channel * Code::kPlaneResidue) % kVector);
  }

  // Addresses of the words of chunk channel 0 in a stage. Words outside of the input become the zeros before it.
  __device__ __forceinline__ void FindWords(const Group& group, const Place& place, int stage,
                                            Shared (&words)[Code::kNumWords]) const {
    const Shared zeros = stages_ + static_cast<Shared>(stage * kStageBytes);
    const Shared image =
        zeros + static_cast<Shared>(kZeroBytes + place.image * p_.image_pitch + Misalignment(group) * kSize);
    const int top = place.out_row * Code::kStrideH - Code::kPadTop;
    const int left = place.slot_column * (Code::kStrideW * kColumnsPerSlot);
#pragma unroll
    for (int i = 0; i < Code::kNumWords; ++i) {
      const int row = top + Code::Row(i), column = left + Code::Column(i);
      const bool is_inside = place.is_active && static_cast<unsigned>(row) < static_cast<unsigned>(p_.in_h) &&
                             static_cast<unsigned>(column) < static_cast<unsigned>(p_.in_w);
      const int offset = ((row - group.first_row) * p_.row_pitch + column - group.first_column) * kSize;
      words[i] = is_inside ? image + static_cast<Shared>(offset) : zeros;
    }
  }

  // Stages the chunk that is next in the order in which this block computes them. Every thread takes part. Loops of
  // asynchronous copies are not unrolled: nothing waits for one copy before the next, and code is dear.
  __device__ __forceinline__ void StageNext(int stage) {
    if (next_group_ < p_.num_groups) {
      const Group group = Locate(next_group_);
      const Shared to = stages_ + static_cast<Shared>(stage * kStageBytes + kZeroBytes);
#if SPARSECONV_HAS_BULK_COPIES
      if (p_.staging == kBulkStaging) {
        StageBulk(group, next_chunk_, to, Barrier(stage));
      } else
#endif
          if (p_.staging == kElementStaging) {
        StageElements(group, next_chunk_, to);
      } else {
        StageVectors(group, next_chunk_, to);
      }
      if (++next_chunk_ == chunk_end_) {
        next_chunk_ = chunk_begin_;
        next_group_ += p_.num_lanes;
      }
    }
    if (!IsBulk()) CommitCopies();
  }

  __device__ __forceinline__ void AwaitStage(int stage, unsigned parity) const {
#if SPARSECONV_HAS_BULK_COPIES
    if (p_.staging == kBulkStaging) {
      WaitForBarrier(Barrier(stage), parity);
      return;
    }
#endif
    WaitForCopies<Code::kNumStages - 1>();
    __syncthreads();
  }

  // First staged element of a channel (of those that the tile reads) of an image.
  __device__ __forceinline__ const Element* Source(const Group& group, int channel, int image) const {
    const int first = tile_ * Code::kTileChannels / Code::kGroupOutChannels * Code::kGroupInChannels;
    const long long plane = static_cast<long long>(group.first_image + image) * Code::kInChannels + first + channel;
    return static_cast<const Element*>(p_.x) + plane * (p_.in_h * p_.in_w) + group.first_row * p_.in_w +
           group.first_column;
  }

  // Channels of a chunk: the last one may have fewer.
  static __device__ __forceinline__ int ChannelsOf(int chunk) {
    return min(Code::kChunkChannels, Code::kTileInChannels - chunk * Code::kChunkChannels);
  }

  // Elements of one channel of an image: they are contiguous, since there are several rows only if they are whole.
  static __device__ __forceinline__ int StagedElements(const Group& group) {
    return group.num_rows * group.num_columns;
  }

  // Bytes of them, from a multiple of 16 bytes to another.
  __device__ __forceinline__ int VectorBytes(const Group& group, int lead) const {
    return ((lead + StagedElements(group)) * kSize + 15) / 16 * 16;
  }

#if SPARSECONV_HAS_BULK_COPIES
  // The first warp copies the rows of each channel and image in one piece.
  __device__ __forceinline__ void StageBulk(const Group& group, int chunk, Shared to, Shared barrier) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kWarp) return;
    const int channels = ChannelsOf(chunk);
    const int num_copies = StagedElements(group) == 0 ? 0 : channels * group.num_images;
    int total = 0;
#pragma unroll 1
    for (int i = thread; i < num_copies; i += kWarp) {
      total += VectorBytes(group, Misalignment(group) + Skew(i % channels));
    }
    ArriveExpecting(barrier, static_cast<unsigned>(total));
#pragma unroll 1
    for (int i = thread; i < num_copies; i += kWarp) {
      const int channel = i % channels, image = i / channels;
      const int lead = Misalignment(group) + Skew(channel);
      CopyBulk(to + static_cast<Shared>(channel * Code::kChannelPitch + image * p_.image_pitch),
               Source(group, chunk * Code::kChunkChannels + channel, image) - lead,
               static_cast<unsigned>(VectorBytes(group, lead)), barrier);
    }
  }
#endif

  __device__ __forceinline__ void StageVectors(const Group& group, int chunk, Shared to) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int channels = ChannelsOf(chunk);
    if (StagedElements(group) == 0) return;
    for (int i = warp; i < channels * group.num_images; i += Code::kThreads / kWarp) {
      const int channel = i % channels, image = i / channels;
      const int lead = Misalignment(group) + Skew(channel);
      const auto* from =
          reinterpret_cast<const char*>(Source(group, chunk * Code::kChunkChannels + channel, image) - lead);
      const Shared rows = to + static_cast<Shared>(channel * Code::kChannelPitch + image * p_.image_pitch);
#pragma unroll 1
      for (int b = lane * 16; b < VectorBytes(group, lead); b += kWarp * 16) {
        CopyAsync16(rows + static_cast<Shared>(b), from + b);
      }
    }
  }

  __device__ __forceinline__ void StageElements(const Group& group, int chunk, Shared to) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int channels = ChannelsOf(chunk);
    for (int i = warp; i < channels * group.num_images; i += Code::kThreads / kWarp) {
      const int channel = i % channels, image = i / channels;
      const Element* from = Source(group, chunk * Code::kChunkChannels + channel, image);
      const Shared rows =
          to + static_cast<Shared>(channel * Code::kChannelPitch + Skew(channel) * kSize + image * p_.image_pitch);
      CopyRows(rows, from, group, lane);
    }
  }

  // Copies rows element by element; those of halves are filled up to the pitch with zeros.
  __device__ __forceinline__ void CopyRows(Shared to, const float* from, const Group& group, int lane) const {
#pragma unroll 1
    for (int i = lane; i < StagedElements(group); i += kWarp) CopyAsync4(to + static_cast<Shared>(i * 4), from + i);
  }

  __device__ __forceinline__ void CopyRows(Shared to, const Half* from, const Group& group, int lane) const {
    const int pitch = group.num_rows == 1 ? group.num_columns + group.num_columns % 2 : p_.row_pitch;
    for (int i = lane; i < group.num_rows * pitch; i += kWarp) {
      const int row = i / pitch, column = i - row * pitch;
      const Half value = column < group.num_columns ? LoadReadOnly(from + row * p_.in_w + column) : Half{0};
      StoreSharedHalf(to + static_cast<Shared>(i * 2), value);
    }
  }

  // Finishes the sums of a slot and stores them, a few values at a time (see kBatch).
  __device__ __forceinline__ void Finish(const Place& place, const typename Code::Sums& sums) const {
    const int first = tile_ * Code::kTileChannels;
    const int channels = min(Code::kTileChannels, Code::kOutChannels - first);
    const long long origin =
        (static_cast<long long>(place.batch_index) * Code::kOutChannels + first) * (p_.out_h * p_.out_w) +
        place.out_row * p_.out_w + place.slot_column * kColumnsPerSlot;
    const int columns = min(kColumnsPerSlot, p_.out_w - place.slot_column * kColumnsPerSlot);
    const Shared own = batch_ + threadIdx.x * 4;
    constexpr int kPitch = Code::kThreads * 4;
    constexpr int kValues = Code::kTileChannels * kColumnsPerSlot;
#pragma unroll 1
    for (int batch = 0; batch * kBatch < kValues; ++batch) {
      StoreBatch<typename Code::Sums, kValues>(sums, batch, own, kPitch);
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        const int k = (batch * kBatch + i) / kColumnsPerSlot, column = (batch * kBatch + i) % kColumnsPerSlot;
        if (!place.is_active || k >= channels || column >= columns) continue;
        const float sum = BitsToFloat(LoadShared(own + static_cast<Shared>(i * kPitch)));
        FinishValue(sum, first + k, origin + static_cast<long long>(k) * (p_.out_h * p_.out_w) + column);
      }
    }
  }

  // `index` is that of the value in Y, and in each set of partial sums.
  __device__ __forceinline__ void FinishValue(float sum, int out_channel, long long index) const {
    // Not LoadReadOnly: the partial sums may be those that this kernel overwrites.
    if (p_.partial_in != nullptr) sum += p_.partial_in[index];
    if (p_.partial_out != nullptr) {
      p_.partial_out[split_ * p_.partial_stride + index] = sum;
      return;
    }
    if (p_.epilogue.bias != nullptr) sum += LoadElement(static_cast<const Element*>(p_.epilogue.bias) + out_channel);
    if (p_.epilogue.residual != nullptr) sum += LoadElement(static_cast<const Element*>(p_.epilogue.residual) + index);
    const float value = Activate<Code::kActivation>(sum, p_.epilogue.alpha, p_.epilogue.beta);
    StoreRounded(static_cast<Element*>(p_.y) + index, value);
  }

  const GeneratedParams& p_;
  const int tile_;
  const Shared stages_;
  const Shared batch_;
  const Shared barriers_;
  int split_, lane_;
  int chunk_begin_, chunk_end_;
  int row_slots_;
  int next_group_ = 0;
  int next_chunk_ = 0;
};

}  // namespace sparseconv::cuda

// The kernel of a plan, all of it one function: what does not depend on the weights is there once, for all tiles.
#define SPARSECONV_GENERATED_KERNEL(name, Code)                                                           \
  extern "C" __global__ void __launch_bounds__(Code::kThreads, 1)                                         \
      name(const __grid_constant__ GeneratedParams params) {                                              \
    extern __shared__ __align__(128) unsigned char stages[];                                              \
    __shared__ float batch[kBatch * Code::kThreads];                                                      \
    __shared__ __align__(8) unsigned long long barriers[Code::kNumStages];                                \
    Generated<Code> kernel(params, static_cast<int>(blockIdx.x % Code::kNumTiles), SharedAddress(stages), \
                           SharedAddress(batch), SharedAddress(barriers));                                \
    kernel.Run();                                                                                         \
  }
