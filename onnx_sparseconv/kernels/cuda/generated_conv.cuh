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
//     // Inputs that X is concatenated of, where the code reads these, and the first channel in X of each, and of none.
//     static constexpr int kNumSources, kSourceBegin[];
//     using Sums = ..;  // of one thread: kTileChannels outputs of its slot
//     static __device__ void RunChunk(int tile, int chunk, Sums& sums, const Shared (&words)[kNumWords]);
//   };
//
// Where the code is long, each tile is a program of its own, and the kernel another one, which calls them: the
// assembler allocates the registers of a whole program at once, in a time that grows with the square of its length.
//
// A block computes one tile, for one group of slots after the other, and never another tile: so all warps of its
// multiprocessor run the same code at about the same time. The pipeline of staged chunks runs on from group to group.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"
#include "sums.cuh"

namespace sparseconv::cuda {

// What a block needs now and then waits in shared memory. From there it is loaded each time, so nothing of it, nor what
// is computed from it, takes registers of the chunks' code: with too few, the assembler puts loads right before what
// needs them, and all warps wait for shared memory.
enum NoteIndex : int { kZero, kLane, kSplit, kChunkBegin, kChunkEnd, kNumNotes };

constexpr int kMaxStages = 2;
// So that zeros can lie in the bank of shared memory of what they stand for.
constexpr int kStageAlignment = kZeroBankBytes;

// What tiles that are programs of their own share with the kernel, which calls them without arguments: those would take
// registers. The linker lets the stages follow at once, but tiles count on their alignment.
struct __align__(kStageAlignment) BlockState {
  GeneratedParams params;
  unsigned long long barriers[2 * kMaxStages];
  unsigned notes[kNumNotes];
};

// Static shared memory of a block at most: plans leave so much.
constexpr int kMaxStaticBytes = 256;
static_assert(sizeof(BlockState) <= kMaxStaticBytes);

// The slots that a block computes in one go.
struct Group {
  int first_image;
  int first_slot;  // of that image
  int num_slots;   // of all images
  int num_images;
};

// What a group reads of an image: whole rows, or columns of a single one. Contiguous in either case.
struct Part {
  int first_row;
  int num_rows;
  int first_column;  // 0, and columns to the end of the row, unless a single row is read
  int num_columns;
};

template <class Code>
class Generated {
 public:
  // `notes`: kNumNotes words of shared memory.
  explicit __device__ __forceinline__ Generated(const GeneratedParams& params, int tile, Shared stages, Shared barriers,
                                                Shared notes)
      : p_(params), tile_(tile), stages_(stages), barriers_(barriers), notes_(notes) {}

  __device__ __forceinline__ void Run() const {
    Prepare();
    if constexpr (kHasStagingWarp) {
      if (threadIdx.x >= ComputingThreads()) {
        StageAll();
        return;
      }
    } else {
#pragma unroll 1
      for (int stage = 0; stage < Code::kNumStages; ++stage) StageAhead(Note(kLane), Note(kChunkBegin) + stage, stage);
    }
    int stage = 0;
    unsigned parity = 0;
#pragma unroll 1
    for (int index = Note(kLane); index < p_.num_groups; index += p_.num_lanes) {
      Shared words[Code::kNumWords];
      bool is_busy;
      {
        const Group group = Locate(index);
        FindWords(PartOf(group, 0), PlaceOf(group), stage, words);
        // All threads of a warp agree: warps without a slot leave the issue slots to the others.
        is_busy = static_cast<int>(threadIdx.x) / kWarp * kWarp < group.num_slots;
      }
      typename Code::Sums sums;
      Begin(sums);
      const int chunk_end = Note(kChunkEnd);
#pragma unroll 1
      for (int chunk = Note(kChunkBegin); chunk < chunk_end; ++chunk) {
        AwaitStage(stage, parity);
        if (is_busy) Code::RunChunk(tile_, chunk, sums, words);
        ReleaseStage(index, chunk, stage);
        const bool is_last = ++stage == Code::kNumStages;
        const int step = is_last ? -(Code::kNumStages - 1) * kStageBytes : kStageBytes;
#pragma unroll
        for (int i = 0; i < Code::kNumWords; ++i) words[i] += static_cast<Shared>(step);
        if (is_last) {
          stage = 0;
          parity ^= 1;
        }
      }
      // Not the place from above, whose registers the chunks' code needs.
      Finish(PlaceOf(Locate(index + Note(kZero))), sums);
    }
  }

 private:
  using Element = typename Code::Sums::Element;
  using Word = typename Code::Sums::Word;  // of a slot's columns
  static constexpr int kSize = static_cast<int>(sizeof(Element));
  static constexpr int kColumnsPerSlot = Code::Sums::kColumns;
  static constexpr int kVector = 16 / kSize;  // elements of 16 bytes
  static constexpr bool kHasStagingWarp = Code::kStagingThreads > 0;
  static constexpr bool kIsPacked = Code::kImagePitch > 0;
  static constexpr bool kHasSources = Code::kNumSources > 0;
  static constexpr int kZeroBytes = Code::kZeroBytes;
  static constexpr int kStageBytes = Code::kStageBytes;
  static constexpr int kWarp = 32;

  // Where a thread's slot lies.
  struct Place {
    bool is_active;
    int image;  // counted from the group's first
    int batch_index;
    int out_row;
    int slot_column;
  };

  // The launch has no more of them than a group has slots; the others of a block only stage.
  static __device__ __forceinline__ unsigned ComputingThreads() { return blockDim.x - Code::kStagingThreads; }

  // Those that stage a chunk together.
  static __device__ __forceinline__ int StagingThread() {
    return static_cast<int>(kHasStagingWarp ? threadIdx.x % kWarp : threadIdx.x);
  }
  static __device__ __forceinline__ int StagingThreads() {
    return kHasStagingWarp ? kWarp : static_cast<int>(blockDim.x);
  }

  __device__ __forceinline__ int Note(NoteIndex index) const {
    return static_cast<int>(LoadShared(notes_ + static_cast<Shared>(index * 4)));
  }

  __device__ __forceinline__ void TakeNotes() const {
    const int num_units = Code::kNumTiles * p_.num_splits;
    const int block = static_cast<int>(blockIdx.x), cluster = block / p_.cluster_blocks;
    const int split = cluster % num_units / Code::kNumTiles;
    const int num_chunks = p_.chunk_end - p_.chunk_begin;
    const int notes[kNumNotes] = {
        0,
        cluster / num_units * p_.cluster_blocks + block % p_.cluster_blocks,
        split,
        p_.chunk_begin + num_chunks * split / p_.num_splits,
        p_.chunk_begin + num_chunks * (split + 1) / p_.num_splits,
    };
#pragma unroll
    for (int i = 0; i < kNumNotes; ++i) {
      StoreShared(notes_ + static_cast<Shared>(i * 4), static_cast<unsigned>(notes[i]));
    }
  }

  // Takes notes, zeroes the words that taps outside of the input read, and makes the barriers.
  __device__ __forceinline__ void Prepare() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) TakeNotes();
    if constexpr (kZeroBytes > 0) {
      constexpr int kZeroWords = kZeroBytes / 4;
      constexpr int kRuns = kIsPacked ? Code::kNumStages : Code::kNumStages * Code::kChunkChannels;
      constexpr int kStep = kIsPacked ? kStageBytes : Code::kChannelPitch;
      for (int i = thread; i < kRuns * kZeroWords; i += static_cast<int>(blockDim.x)) {
        StoreShared(stages_ + static_cast<Shared>(i / kZeroWords * kStep + i % kZeroWords * 4), 0u);
      }
    }
    if constexpr (kHasStagingWarp) {
      if (thread < Code::kNumStages) {
        InitBarrier(Filled(thread), 1);
        InitBarrier(Emptied(thread), ComputingThreads());
      }
      FenceBarrierInit();
    }
    __syncthreads();
  }

  // The barriers of a stage: its copies have arrived; every computing thread is done with it.
  __device__ __forceinline__ Shared Filled(int stage) const { return barriers_ + static_cast<Shared>(stage * 16); }
  __device__ __forceinline__ Shared Emptied(int stage) const { return Filled(stage) + 8; }

  __device__ __forceinline__ int RowSlots() const { return (p_.out_w + kColumnsPerSlot - 1) / kColumnsPerSlot; }
  __device__ __forceinline__ int PlaneSlots() const { return p_.out_h * RowSlots(); }

  __device__ __forceinline__ Group Locate(int index) const {
    const int first = index * p_.group_slots;
    Group group;
    group.first_image = Divide(first, p_.by_plane_slots);
    group.first_slot = first - group.first_image * PlaneSlots();
    group.num_slots = min(p_.group_slots, p_.num_slots - first);
    group.num_images = Divide(group.first_slot + group.num_slots - 1, p_.by_plane_slots) + 1;
    return group;
  }

  // `image` is counted from the group's first.
  __device__ __forceinline__ Part PartOf(const Group& group, int image) const {
    const int begin = image == 0 ? group.first_slot : 0;
    const int last = min(group.first_slot + group.num_slots - image * PlaneSlots(), PlaneSlots()) - 1;
    const int first_out_row = Divide(begin, p_.by_row_slots), last_out_row = Divide(last, p_.by_row_slots);
    Part part;
    part.first_row = min(max(first_out_row * Code::kStrideH - Code::kPadTop, 0), p_.in_h);
    const int end_row = min(last_out_row * Code::kStrideH - Code::kPadTop + Code::kReachH, p_.in_h);
    part.num_rows = max(end_row - part.first_row, 0);
    part.first_column = 0;
    part.num_columns = p_.in_w;
    if (Code::kReachH == 1 && first_out_row == last_out_row) {
      constexpr int kStep = Code::kStrideW * kColumnsPerSlot;
      const int row_begin = first_out_row * RowSlots();
      // Even, so that words of two halves stay whole.
      part.first_column =
          min(max((begin - row_begin) * kStep - Code::kPadLeft, 0), p_.in_w) / kColumnsPerSlot * kColumnsPerSlot;
      const int end = min((last - row_begin + 1) * kStep - Code::kStrideW - Code::kPadLeft + Code::kReachW, p_.in_w);
      part.num_columns = max(end - part.first_column, 0);
    }
    return part;
  }

  __device__ __forceinline__ Place PlaceOf(const Group& group) const {
    const int thread = static_cast<int>(threadIdx.x);
    Place place;
    place.is_active = thread < group.num_slots;
    place.image = Divide(group.first_slot + thread, p_.by_plane_slots);
    place.batch_index = group.first_image + place.image;
    const int slot = group.first_slot + thread - place.image * PlaneSlots();
    place.out_row = Divide(slot, p_.by_row_slots);
    place.slot_column = slot - place.out_row * RowSlots();
    return place;
  }

  // Elements between a multiple of 16 bytes and the first staged one of chunk channel 0.
  __device__ __forceinline__ int Misalignment(const Part& part) const {
    return p_.staging == kElementStaging
               ? 0
               : static_cast<int>(static_cast<unsigned>(part.first_row * p_.in_w + part.first_column) % kVector);
  }

  // The same for another channel, on top of it.
  static __device__ __forceinline__ int Skew(int channel) {
    return Code::kPlaneResidue == 0 ? 0
                                    : static_cast<int>(static_cast<unsigned>(channel * Code::kPlaneResidue) % kVector);
  }

  // Elements from a staged row to the next; those of halves are filled up to even.
  __device__ __forceinline__ int RowPitch(const Part& part) const {
    return part.num_rows == 1 ? part.num_columns + part.num_columns % kColumnsPerSlot : p_.row_pitch;
  }

  // Bytes from a channel's first image to its second, if a group has so many: a multiple of 16, with room for any skew.
  __device__ __forceinline__ int FirstImageBytes(const Part& part) const {
    constexpr int kMaxSkew = Code::kPlaneResidue == 0 ? 0 : kVector - 1;
    return ((Misalignment(part) + kMaxSkew + part.num_rows * RowPitch(part)) * kSize + 15) / 16 * 16;
  }

  // Where an image's part begins in a channel; or its planes, in a packed stage.
  __device__ __forceinline__ int OffsetOf(const Part& first, int image) const {
    if constexpr (kIsPacked) return image * Code::kImagePitch;
    return image == 0 ? 0 : FirstImageBytes(first) + (image - 1) * p_.image_pitch;
  }

  // Addresses of the words of chunk channel 0 in a stage. Words outside of the input become zeros before it, in the
  // same bank of shared memory: so they never conflict with the words of other threads.
  __device__ __forceinline__ void FindWords(const Part& first, const Place& place, int stage,
                                            Shared (&words)[Code::kNumWords]) const {
    const Shared zeros = stages_ + static_cast<Shared>(stage * kStageBytes);
    // Every image but the first begins with its first row.
    const int first_element =
        !kIsPacked && place.image == 0 ? first.first_row * p_.row_pitch + first.first_column - Misalignment(first) : 0;
    const Shared image = zeros + static_cast<Shared>(kZeroBytes + OffsetOf(first, place.image) - first_element * kSize);
    const int top = place.out_row * Code::kStrideH - Code::kPadTop;
    const int left = place.slot_column * (Code::kStrideW * kColumnsPerSlot);
#pragma unroll
    for (int i = 0; i < Code::kNumWords; ++i) {
      const int row = top + Code::Row(i), column = left + Code::Column(i);
      const bool is_inside = place.is_active && static_cast<unsigned>(row) < static_cast<unsigned>(p_.in_h) &&
                             static_cast<unsigned>(column) < static_cast<unsigned>(p_.in_w);
      const Shared address = image + static_cast<Shared>((row * p_.row_pitch + column) * kSize);
      // Without zeros, only threads without a slot come here, and it does not matter what they read.
      words[i] = is_inside ? address : zeros + (kZeroBytes == 0 ? 0 : (address - zeros) % kZeroBankBytes);
    }
  }

  // Stages a chunk of a group, counted on into the groups that follow. Every thread takes part.
  __device__ __forceinline__ void StageAhead(int index, int chunk, int stage) const {
    const int chunk_end = Note(kChunkEnd), num_chunks = chunk_end - Note(kChunkBegin);
    while (chunk >= chunk_end) {
      chunk -= num_chunks;
      index += p_.num_lanes;
    }
    if (index < p_.num_groups) StageChunk(Locate(index), chunk, To(stage));
    CommitCopies();
  }

  // Where a stage begins, behind its first zeros.
  __device__ __forceinline__ Shared To(int stage) const {
    return stages_ + static_cast<Shared>(stage * kStageBytes + kZeroBytes);
  }

  // Begins to copy a chunk, 16 bytes or an element at a time.
  __device__ __forceinline__ void StageChunk(const Group& group, int chunk, Shared to) const {
    if constexpr (kIsPacked) {
      StagePacked(group, chunk, to);
    } else if (p_.staging == kElementStaging) {
      StageElements(group, chunk, to);
    } else {
      StageVectors(group, chunk, to);
    }
  }

  // The last warp stages every chunk that this block computes, as soon as there is room: the others never wait for it
  // to compute anything, nor for each other, and have no code for it. For bulk copies all its lanes count along, so
  // that what it computes is the same for a warp, and one of them copies; each of them the planes of another image,
  // where they are packed.
  __device__ __forceinline__ void StageAll() const {
    const int chunk_begin = Note(kChunkBegin), chunk_end = Note(kChunkEnd);
    int stage = 0;
    unsigned round = 0;
#pragma unroll 1
    for (int index = Note(kLane); index < p_.num_groups; index += p_.num_lanes) {
      const Group group = Locate(index);
      const Part first = PartOf(group, 0);
#pragma unroll 1
      for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
        if (round > 0) WaitForBarrier(Emptied(stage), (round - 1) % 2);
        const Shared to = To(stage);
        if (p_.staging != kBulkStaging) {
          StageChunk(group, chunk, to);
          CommitCopies();
          WaitForCopies<0>();
          __syncwarp();
        } else if constexpr (kIsPacked) {
          StagePackedBulk(group, chunk, to, Filled(stage));
        } else {
          StageBulk(group.first_image, first, chunk, to, Filled(stage));
#pragma unroll 1
          for (int image = 1; image < group.num_images; ++image) {
            StageBulk(group.first_image + image, PartOf(group, image), chunk,
                      to + static_cast<Shared>(OffsetOf(first, image)), Filled(stage));
          }
        }
        if (IsElected()) Arrive(Filled(stage));
        if (++stage == Code::kNumStages) {
          stage = 0;
          ++round;
        }
      }
    }
  }

  __device__ __forceinline__ void AwaitStage(int stage, unsigned parity) const {
    if constexpr (kHasStagingWarp) {
      WaitForBarrier(Filled(stage), parity);
    } else {
      WaitForCopies<Code::kNumStages - 1>();
      __syncthreads();
    }
  }

  // Done with a chunk and its stage, where one that comes later may be written now. Each lane arrives for what it read
  // itself: one that did for all would have to wait for the others first.
  __device__ __forceinline__ void ReleaseStage(int index, int chunk, int stage) const {
    if constexpr (kHasStagingWarp) {
      Arrive(Emptied(stage));
    } else {
      __syncthreads();
      StageAhead(index + Note(kZero), chunk + Code::kNumStages, stage);
    }
  }

  // Where planes begin of the input that has a channel of X; all of X, where there is a single one.
  struct Planes {
    const void* x;
    int begin;  // its first channel in X
    int end;
  };

  __device__ __forceinline__ Planes PlanesOf(int channel) const {
    Planes planes = {p_.x, 0, Code::kInChannels};
    if constexpr (kHasSources) {
      planes.end = Code::SourceBegin(1);
#pragma unroll
      for (int i = 1; i < Code::kNumSources; ++i) {
        if (channel < Code::SourceBegin(i)) continue;
        planes = {p_.more_x[i - 1], Code::SourceBegin(i), Code::SourceBegin(i + 1)};
      }
    }
    return planes;
  }

  // First element of a part in a channel (of those that the tile reads).
  __device__ __forceinline__ const Element* Source(int image, const Part& part, int channel) const {
    const int first = tile_ * Code::kTileChannels / Code::kGroupOutChannels * Code::kGroupInChannels;
    const Planes planes = PlanesOf(channel);
    const long long plane =
        static_cast<long long>(image) * (planes.end - planes.begin) + first + channel - planes.begin;
    return static_cast<const Element*>(planes.x) + plane * (p_.in_h * p_.in_w) + part.first_row * p_.in_w +
           part.first_column;
  }

  // Channels of a chunk: the last one may have fewer.
  static __device__ __forceinline__ int ChannelsOf(int chunk) {
    return min(Code::kChunkChannels, Code::kTileInChannels - chunk * Code::kChunkChannels);
  }

  // Bytes of a part of a channel that begins `lead` elements after a multiple of 16 bytes, from there to another one.
  static __device__ __forceinline__ int VectorBytes(const Part& part, int lead) {
    return ((lead + part.num_rows * part.num_columns) * kSize + 15) / 16 * 16;
  }

  // Calls copy(offset, from, bytes) for the planes of a chunk that follow each other in memory: for all of them at
  // once, or for those of each input.
  template <class Copy>
  __device__ __forceinline__ void ForPlanes(int image, int chunk, Copy copy) const {
    const Part whole = {0, p_.in_h, 0, p_.in_w};
    const int first = chunk * Code::kChunkChannels, channels = ChannelsOf(chunk);
    if constexpr (!kHasSources) {
      copy(0, Source(image, whole, first), channels * Code::kChannelPitch);
    } else {
#pragma unroll 1
      for (int done = 0; done < channels;) {
        const int end = min(PlanesOf(first + done).end - first, channels);
        copy(done * Code::kChannelPitch, Source(image, whole, first + done), (end - done) * Code::kChannelPitch);
        done = end;
      }
    }
  }

  // Copies the planes of a chunk in as few pieces for each image; each lane, of another image.
  __device__ __forceinline__ void StagePackedBulk(const Group& group, int chunk, Shared to, Shared barrier) const {
#pragma unroll 1
    for (int image = static_cast<int>(threadIdx.x) % kWarp; image < group.num_images; image += kWarp) {
      ExpectBytes(barrier, static_cast<unsigned>(ChannelsOf(chunk) * Code::kChannelPitch));
      const Shared planes = to + static_cast<Shared>(image * Code::kImagePitch);
      ForPlanes(group.first_image + image, chunk, [&](int offset, const Element* from, int bytes) {
        CopyBulk(planes + static_cast<Shared>(offset), from, static_cast<unsigned>(bytes), barrier);
      });
    }
    __syncwarp();
  }

  // Copies each channel of an image's part in one piece.
  __device__ __forceinline__ void StageBulk(int image, const Part& part, int chunk, Shared to, Shared barrier) const {
    if (part.num_rows * part.num_columns == 0) return;
    const int channels = ChannelsOf(chunk), misalignment = Misalignment(part), first = chunk * Code::kChunkChannels;
    const Element* from = Source(image, part, first) - misalignment;
    const int plane = p_.in_h * p_.in_w;
    // To look up an input takes longer than a copy: once for all of its channels.
    [[maybe_unused]] int end = PlanesOf(first).end - first;
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      if constexpr (kHasSources) {
        if (channel == end) {
          from = Source(image, part, first + channel) - misalignment;
          end = PlanesOf(first + channel).end - first;
        }
      }
      const int skew = Skew(channel);
      const auto bytes = static_cast<unsigned>(VectorBytes(part, misalignment + skew));
      if (IsElected()) {
        ExpectBytes(barrier, bytes);
        CopyBulk(to, from - skew, bytes, barrier);
      }
      from += plane;
      to += static_cast<Shared>(Code::kChannelPitch);
    }
  }

  __device__ __forceinline__ void StagePacked(const Group& group, int chunk, Shared to) const {
    const int thread = StagingThread(), threads = StagingThreads();
#pragma unroll 1
    for (int image = 0; image < group.num_images; ++image) {
      ForPlanes(group.first_image + image, chunk, [&](int offset, const Element* from, int bytes) {
        const Shared planes = to + static_cast<Shared>(offset);
        if (p_.staging == kElementStaging) {
#pragma unroll 1
          for (int i = thread; i < bytes / kSize; i += threads) {
            CopyElement(planes + static_cast<Shared>(i * kSize), from + i);
          }
        } else {
#pragma unroll 1
          for (int b = thread * 16; b < bytes; b += threads * 16) {
            CopyAsync16(planes + static_cast<Shared>(b), reinterpret_cast<const char*>(from) + b);
          }
        }
      });
      to += static_cast<Shared>(Code::kImagePitch);
    }
  }

  static __device__ __forceinline__ void CopyElement(Shared to, const float* from) { CopyAsync4(to, from); }
  static __device__ __forceinline__ void CopyElement(Shared to, const Half* from) {
    StoreSharedHalf(to, LoadReadOnly(from));
  }

  // Loops of asynchronous copies are not unrolled: nothing waits for one copy before the next, and code is dear.
  __device__ __forceinline__ void StageVectors(const Group& group, int chunk, Shared to) const {
    const int warp = StagingThread() / kWarp, lane = StagingThread() % kWarp;
    const Part first = PartOf(group, 0);
#pragma unroll 1
    for (int image = 0; image < group.num_images; ++image) {
      const Part part = PartOf(group, image);
      if (part.num_rows * part.num_columns == 0) continue;
      const Shared offset = to + static_cast<Shared>(OffsetOf(first, image));
#pragma unroll 1
      for (int channel = warp; channel < ChannelsOf(chunk); channel += StagingThreads() / kWarp) {
        const int lead = Misalignment(part) + Skew(channel);
        const auto* from = reinterpret_cast<const char*>(
            Source(group.first_image + image, part, chunk * Code::kChunkChannels + channel) - lead);
        const Shared rows = offset + static_cast<Shared>(channel * Code::kChannelPitch);
#pragma unroll 1
        for (int b = lane * 16; b < VectorBytes(part, lead); b += kWarp * 16) {
          CopyAsync16(rows + static_cast<Shared>(b), from + b);
        }
      }
    }
  }

  __device__ __forceinline__ void StageElements(const Group& group, int chunk, Shared to) const {
    const int warp = StagingThread() / kWarp, lane = StagingThread() % kWarp;
    const Part first = PartOf(group, 0);
#pragma unroll 1
    for (int image = 0; image < group.num_images; ++image) {
      const Part part = PartOf(group, image);
      const Shared offset = to + static_cast<Shared>(OffsetOf(first, image));
#pragma unroll 1
      for (int channel = warp; channel < ChannelsOf(chunk); channel += StagingThreads() / kWarp) {
        const Element* from = Source(group.first_image + image, part, chunk * Code::kChunkChannels + channel);
        CopyRows(offset + static_cast<Shared>(channel * Code::kChannelPitch + Skew(channel) * kSize), from, part, lane);
      }
    }
  }

  // Copies rows element by element; those of halves are filled up to the pitch with zeros.
  __device__ __forceinline__ void CopyRows(Shared to, const float* from, const Part& part, int lane) const {
#pragma unroll 1
    for (int i = lane; i < part.num_rows * part.num_columns; i += kWarp) {
      CopyElement(to + static_cast<Shared>(i * 4), from + i);
    }
  }

  __device__ __forceinline__ void CopyRows(Shared to, const Half* from, const Part& part, int lane) const {
    const int pitch = RowPitch(part);
    for (int i = lane; i < part.num_rows * pitch; i += kWarp) {
      const int row = i / pitch, column = i - row * pitch;
      const Half value = column < part.num_columns ? LoadReadOnly(from + row * p_.in_w + column) : Half{0};
      StoreSharedHalf(to + static_cast<Shared>(i * 2), value);
    }
  }

  // Where the sums of a slot lie in `out` and `addend`.
  struct Outputs {
    int first;  // output channel of the tile's first sum
    int plane;  // elements from a channel to the next
    long long origin;
    bool has_right;  // of halves: the slot's second column exists
  };

  __device__ __forceinline__ Outputs OutputsOf(const Place& place) const {
    Outputs outputs;
    outputs.first = tile_ * Code::kTileChannels;
    outputs.plane = p_.out_h * p_.out_w;
    const int column = place.slot_column * kColumnsPerSlot;
    outputs.origin = (static_cast<long long>(place.batch_index) * Code::kOutChannels + outputs.first) * outputs.plane +
                     place.out_row * p_.out_w + column;
    outputs.has_right = kColumnsPerSlot == 2 && column + 1 < p_.out_w;
    return outputs;
  }

  // Whether a tile that begins with output channel `first` has a k-th one. Known when the code is made, unless the last
  // tile is not full.
  static __device__ __forceinline__ bool Exists(int first, int k) {
    return Code::kOutChannels % Code::kTileChannels == 0 || first + k < Code::kOutChannels;
  }

  // Sums begin with the bias.
  __device__ __forceinline__ void Begin(typename Code::Sums& sums) const {
    const int first = tile_ * Code::kTileChannels;
    if (p_.bias == nullptr) {
#pragma unroll
      for (int k = 0; k < Code::kTileChannels; ++k) sums.Start(k, Word{});
    } else {
      const Element* bias = static_cast<const Element*>(p_.bias) + first;
#pragma unroll
      for (int k = 0; k < Code::kTileChannels; ++k) {
        sums.Start(k, Exists(first, k) ? Twice(LoadReadOnly(bias + k)) : Word{});
      }
    }
  }

  // Adds what is added to the convolution, at the end: what float16 sums begin with would make each of their roundings
  // larger.
  __device__ __forceinline__ void AddAddend(const Outputs& outputs, typename Code::Sums& sums) const {
    const Element* from = static_cast<const Element*>(p_.addend) + outputs.origin;
    if (kColumnsPerSlot == 1 || p_.is_paired) {
#pragma unroll
      for (int k = 0; k < Code::kTileChannels; ++k) {
        Word word{};
        if (Exists(outputs.first, k)) {
          word = LoadOnce(reinterpret_cast<const Word*>(from + static_cast<long long>(k) * outputs.plane));
        }
        sums.Add(k, word);
      }
    } else {
      if constexpr (kColumnsPerSlot == 2) {
#pragma unroll
        for (int k = 0; k < Code::kTileChannels; ++k) {
          Half left = 0, right = 0;
          const Element* at = from + static_cast<long long>(k) * outputs.plane;
          if (Exists(outputs.first, k)) left = LoadOnce(at);
          if (Exists(outputs.first, k) && outputs.has_right) right = LoadOnce(at + 1);
          sums.Add(k, Joined(left, right));
        }
      }
    }
  }

  // Stores the sums of a slot.
  __device__ __forceinline__ void Finish(const Place& place, typename Code::Sums& sums) const {
    if (!place.is_active) return;
    const Outputs outputs = OutputsOf(place);
    if (p_.addend != nullptr) AddAddend(outputs, sums);
    Element* to = static_cast<Element*>(p_.out) + Note(kSplit) * p_.split_stride + outputs.origin;
    const FinalActivation<Code::kActivation> activate(p_.is_final, p_.alpha, p_.beta);
    if (kColumnsPerSlot == 1 || p_.is_paired) {
#pragma unroll
      for (int k = 0; k < Code::kTileChannels; ++k) {
        const Word word = activate(sums.Finished(k));
        if (Exists(outputs.first, k)) {
          StoreOnce(reinterpret_cast<Word*>(to + static_cast<long long>(k) * outputs.plane), word);
        }
      }
    } else {
      if constexpr (kColumnsPerSlot == 2) {
#pragma unroll
        for (int k = 0; k < Code::kTileChannels; ++k) {
          const Word word = activate(sums.Finished(k));
          Element* at = to + static_cast<long long>(k) * outputs.plane;
          if (Exists(outputs.first, k)) StoreOnce(at, Lower(word));
          if (Exists(outputs.first, k) && outputs.has_right) StoreOnce(at + 1, Upper(word));
        }
      }
    }
  }

  const GeneratedParams& p_;
  const int tile_;
  const Shared stages_;
  const Shared barriers_;
  const Shared notes_;
};

// The code of a single tile in the place of that of all.
template <class Tile>
struct OneTile : Tile {
  static __device__ __forceinline__ void RunChunk(int, int chunk, typename Tile::Sums& sums,
                                                  const Shared (&words)[Tile::kNumWords]) {
    Tile::RunChunk(chunk, sums, words);
  }
};

template <class Plan>
__device__ __forceinline__ int TileOfBlock(const GeneratedParams& params) {
  return static_cast<int>(blockIdx.x) / params.cluster_blocks % Plan::kNumTiles;
}

// Copies the kernel's parameters to where its tiles find them.
__device__ __forceinline__ void ShareParams(const GeneratedParams& params, BlockState& state) {
  static_assert(sizeof(GeneratedParams) % 4 == 0);
  const auto* from = reinterpret_cast<const unsigned*>(&params);
  auto* to = reinterpret_cast<unsigned*>(&state.params);
  for (unsigned i = threadIdx.x; i < sizeof(GeneratedParams) / 4; i += blockDim.x) to[i] = from[i];
  __syncthreads();
}

}  // namespace sparseconv::cuda

// The kernel of a plan, all of it one function: what does not depend on the weights is there once, for all tiles.
#define SPARSECONV_GENERATED_KERNEL(name, Code)                                                        \
  extern "C" __global__ void __launch_bounds__(Code::kThreads + Code::kStagingThreads, 1)              \
      name(const __grid_constant__ sparseconv::cuda::GeneratedParams params) {                         \
    using namespace sparseconv::cuda;                                                                  \
    extern __shared__ __align__(kStageAlignment) unsigned char stages[];                               \
    __shared__ __align__(16) unsigned long long barriers[2 * Code::kNumStages];                        \
    __shared__ unsigned notes[kNumNotes];                                                              \
    Generated<Code>(params, TileOfBlock<Code>(params), SharedAddress(stages), SharedAddress(barriers), \
                    SharedAddress(notes))                                                              \
        .Run();                                                                                        \
  }

// The same in several programs: one with the kernel, whose `Plan::RunTile(tile)` calls the function of a tile ..
#define SPARSECONV_LINKED_KERNEL(name, Plan)                                              \
  __shared__ sparseconv::cuda::BlockState sparseconv_state;                               \
  extern "C" __global__ void __launch_bounds__(Plan::kThreads + Plan::kStagingThreads, 1) \
      name(const __grid_constant__ sparseconv::cuda::GeneratedParams params) {            \
    sparseconv::cuda::ShareParams(params, sparseconv_state);                              \
    Plan::RunTile(sparseconv::cuda::TileOfBlock<Plan>(params));                           \
  }

// .. and one for each tile. Its function does not return: so it keeps nothing of its caller's.
#define SPARSECONV_LINKED_TILE(name, Tile, tile)                                                              \
  extern __shared__ sparseconv::cuda::BlockState sparseconv_state;                                            \
  extern "C" __device__ __noinline__ void name() {                                                            \
    using namespace sparseconv::cuda;                                                                         \
    static_assert(Tile::kNumStages <= kMaxStages);                                                            \
    extern __shared__ __align__(kStageAlignment) unsigned char stages[];                                      \
    Generated<OneTile<Tile>>(sparseconv_state.params, tile, SharedAddress(stages),                            \
                             SharedAddress(sparseconv_state.barriers), SharedAddress(sparseconv_state.notes)) \
        .Run();                                                                                               \
    ExitThread();                                                                                             \
  }
