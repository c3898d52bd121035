// Sparse convolution of windows of few channels by warpgroups of sparse tensor cores (sm_90a), at one image as at many.
//
// The tensor cores read eight neighbouring channels of a pixel, an *octet*, as 16 bytes, and may begin at any pixel of
// a row. So one copy of a row of X in shared memory serves all taps of the window: each begins at another pixel, and
// all add to the same sums. X has channels far apart, though. The warps that stage load vectors of eight columns of
// eight channels, and store them transposed (stmatrix), in whatever order of channels the block's 64 output channels
// have. Floats are rounded to halves between, to as many bits as TF32 has.
//
// Rows of X enter a ring of rows, each once for all rows of outputs that read it, with the zeros between them that
// windows read beside a row. A product's positions go on from a row to the next one, those zeros included, so that
// narrow rows fill it as well as wide ones. Where windows move by two rows or columns, every second one of X follows
// the other, and those between have a place of their own, so that positions are neighbours there, too. The weight stays
// in shared memory, a step for each tap of 32 channels, or of 16 (window_weight.h). Two warpgroups multiply in turn:
// while one stores its outputs, by way of shared memory and the copy engine, the other keeps the tensor cores busy.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "params.h"
#include "recompute.cuh"
#include "row_ring.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// `T`: the type of X, Y, bias and residual, Half or float. `kBlocks`: of eight positions, that a warpgroup computes at
// a time.
template <class T, int kBlocks, OctetForm kForm = OctetForm::kPlain>
class OctetConv : private RowRing<OctetConv<T, kBlocks, kForm>> {
 public:
  __device__ __forceinline__ OctetConv(const OctetParams& params, const void* shared)
      : p_(params),
        shared_(shared),
        warp_(static_cast<int>(Uniform(threadIdx.x / 32))),
        row_tile_(static_cast<int>(blockIdx.x) -
                  Divide(static_cast<int>(blockIdx.x), params.by_row_tiles) * params.row_tiles),
        ring_(SharedAddress(shared)),
        row_bytes_(static_cast<unsigned>(params.row_pixels) * kPixelBytes),
        plane_bytes_(static_cast<unsigned>(params.phase_bytes) << (RowShift() + ColumnShift())),
        outputs_((Dump() + kOctetDumpBytes + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment),
        weight_(outputs_ + static_cast<unsigned>(params.out_buffers) * kBufferBytes),
        planes_(weight_ + static_cast<unsigned>(params.weight_bytes)),
        inputs_(planes_ + static_cast<unsigned>(4 * params.places)),
        barriers_(inputs_ + static_cast<unsigned>(params.ring_rows * params.inputs_pitch)) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    LetNextLaunchBegin();
    Prepare();
    unsigned seen = 0;
    if (IsProductWarp()) {
      ChangeRegisters<kProductRegisters>();
      Multiply();
    } else {
      ChangeRegisters<kStagingRegisters>();
      seen = Stage();
    }
    return !kIsFloat || DidHalvesHold(SeenByBlock(seen));
  }

  // Of all the block's tiles, what was computed. To be called by all threads.
  __device__ __forceinline__ void RecomputeTiles() const {
    WaitForBulkStores();
    OutputBox box;
    box.channels = min(kRows, p_.out_channels - row_tile_ * kRows);
    box.share = 0;
    box.shares = 1;
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      const Tile tile = TileAt(index);
      box.rows = tile.lines;
      box.columns = tile.columns;
      const long long plane = static_cast<long long>(tile.image) * p_.out_channels + row_tile_ * kRows;
      box.first = (plane * p_.out_h + tile.y) * p_.out_w + tile.x;
      Recompute(p_.recompute, box, const_cast<void*>(shared_));
    }
  }

 private:
  friend class RowRing<OctetConv<T, kBlocks, kForm>>;
  using Base = RowRing<OctetConv<T, kBlocks, kForm>>;
  using Base::Advance;
  using Base::Release;
  using Base::WaitForRow;
  using Cursor = typename Base::Cursor;

  static constexpr bool kForWords = kForm == OctetForm::kWords, kHasStrides = kForm == OctetForm::kStrides;
  static constexpr int kRows = 64, kWarpRows = 16;
  static constexpr int kOctet = 8;  // channels of a pixel's 16 bytes, and columns that are loaded together
  static constexpr unsigned kPixelBytes = 16;
  static constexpr int kElementBytes = sizeof(T);
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  static constexpr int kVector = 16 / sizeof(T);  // elements that are stored, or loaded of a residual, together
  // Bytes of eight outputs, and from a channel's outputs to the next one's, an odd multiple of that.
  static constexpr unsigned kBlockBytes = kOctet * sizeof(T);
  static constexpr unsigned kOutPitch = kBlockBytes * (kBlocks | 1);
  static constexpr unsigned kBufferBytes = kRows * kOutPitch;
  // Where sums leave registers for it, two sets of warps may stage, every second row of the ring each.
  static constexpr int kThreads = kOctetThreads<kBlocks>, kSets = kOctetStagingSets<kBlocks>;
  static constexpr int kThreadRegisters = 65536 / kThreads / 8 * 8, kProductRegisters = kSets > 1 ? 144 : 192,
                       kStagingRegisters = kSets > 1 ? 112 : 120;
  static constexpr int kWarps = kWarpgroupThreads / 32;  // of a warpgroup
  static constexpr int kProductWarps = kOctetWarpgroups * kWarps;
  static constexpr int kStagingWarps = kOctetStagingWarps;  // of a set
  // Numbered barriers: those before are warps' own.
  static constexpr int kTurnBarriers = 1 + kProductWarps, kOutputBarriers = kTurnBarriers + kOctetWarpgroups,
                       kInputsBarrier = kOutputBarriers + kOctetWarpgroups;
  static constexpr unsigned kValueBytes = 2048, kMetaBytes = 256;  // of a step
  static constexpr unsigned kMatrixBytes = 128;
  static constexpr unsigned kBatchSteps = 4;  // whose products are on their way together
  // Lanes that have columns of the same channel, and all that they have, for eight channels at a time.
  static constexpr int kTaskLanes = 4, kTaskColumns = kOctet * kTaskLanes;
  static constexpr unsigned kNoPlane = 0xFFFFFFFFu;

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ bool IsProductWarp() const { return warp_ < kProductWarps; }

  template <int kRegisters>
  static __device__ __forceinline__ void ChangeRegisters() {
    if constexpr (kRegisters > kThreadRegisters) {
      TakeRegisters<kRegisters>();
    } else {
      GiveUpRegisters<kRegisters>();
    }
  }

  // Of strides, the binary logarithms. A row of the ring has as many rows of X, its *phases*, and a row of X as many
  // phases of columns; each phase of an octet is a ring of its own.
  __device__ __forceinline__ int RowShift() const { return kHasStrides ? p_.stride_shifts[0] : 0; }
  __device__ __forceinline__ int ColumnShift() const { return kHasStrides ? p_.stride_shifts[1] : 0; }
  static __device__ __forceinline__ int PhaseOf(int place, int shift) { return place & ((1 << shift) - 1); }
  // Where a place of a row of X, padding included, lies in the first row of the ring.
  __device__ __forceinline__ unsigned PixelAt(int row_phase, int place) const {
    const int phase = (row_phase << ColumnShift()) + PhaseOf(place, ColumnShift());
    return static_cast<unsigned>(phase * p_.phase_bytes) + static_cast<unsigned>(place >> ColumnShift()) * kPixelBytes;
  }

  // Behind the ring.
  __device__ __forceinline__ Shared Dump() const {
    return ring_ + static_cast<unsigned>(p_.places / kOctet) * plane_bytes_;
  }
  __device__ __forceinline__ int ring_rows() const { return p_.ring_rows; }
  __device__ __forceinline__ Shared Filled(int slot) const { return barriers_ + static_cast<unsigned>(16 * slot); }
  __device__ __forceinline__ Shared Emptied(int slot) const { return Filled(slot) + 8; }
  __device__ __forceinline__ Shared WeightArrived() const { return Filled(p_.ring_rows); }

  __device__ __forceinline__ void Prepare() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int slot = 0; slot < p_.ring_rows; ++slot) {
        InitBarrier(Filled(slot), kStagingWarps);
        InitBarrier(Emptied(slot), kProductWarps);
      }
      InitBarrier(WeightArrived(), 1);
      FenceBarrierInit();
      const auto bytes = static_cast<unsigned>(p_.weight_bytes);
      ExpectBytes(WeightArrived(), bytes);
      CopyBulkCached(weight_, static_cast<const unsigned char*>(p_.weight) + static_cast<size_t>(row_tile_) * bytes,
                     bytes, WeightArrived());
      Arrive(WeightArrived());
    }
    for (int place = thread; place < p_.places; place += kThreads) {
      const int channel = p_.channels[row_tile_ * p_.places + place];
      StoreShared(planes_ + static_cast<unsigned>(4 * place),
                  channel < 0
                      ? kNoPlane
                      : static_cast<unsigned>(channel) * static_cast<unsigned>(kElementBytes * p_.in_h * p_.in_w));
    }
    ZeroBesideRows(thread);
    FenceSharedForTensorCores();
    __syncthreads();
  }

  // What lies between the staged pixels of rows stays zero.
  __device__ __forceinline__ void ZeroBesideRows(int thread) const {
    const unsigned zeros[4] = {};
    if constexpr (kHasStrides) {
      const unsigned bytes = static_cast<unsigned>(p_.places / kOctet) * plane_bytes_;
      for (unsigned at = kPixelBytes * static_cast<unsigned>(thread); at < bytes; at += kPixelBytes * kThreads) {
        StoreSharedVectorIf(1, ring_ + at, zeros);
      }
      return;
    }
    const int beside = p_.row_pixels - p_.staged_columns, rows = p_.ring_rows + p_.group_rows - 1;
    for (int i = thread; i < p_.places / kOctet * rows * beside; i += kThreads) {
      const int pixel = i % beside;
      StoreSharedVectorIf(
          1,
          ring_ + static_cast<unsigned>(i / beside) * row_bytes_ +
              static_cast<unsigned>(pixel + (pixel < p_.lead_pixels ? 0 : p_.staged_columns)) * kPixelBytes,
          zeros);
    }
  }

  struct Tile {
    int image, y, x;
    int columns;  // of outputs
    int lines;    // rows of outputs
    int in_rows;  // of the ring
  };

  __device__ __forceinline__ Tile TileAt(int index) const {
    Tile tile;
    const int of_images = Divide(index, p_.by_row_tiles), column = Divide(of_images, p_.by_tiles_x);
    tile.image = Divide(column, p_.by_tiles_y);
    tile.x = (of_images - column * p_.tiles_x) * p_.tile_columns;
    tile.y = (column - tile.image * p_.tiles_y) * p_.tile_rows;
    tile.columns = min(p_.tile_columns, p_.out_w - tile.x);
    tile.lines = min(p_.tile_rows, p_.out_h - tile.y);
    tile.in_rows = tile.lines - 1 + p_.window_rows;
    return tile;
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  // A warp stages eight channels of 32 columns at a time, a task: each lane eight columns of one channel. It has all
  // tasks of every fourth eight channels. As many rows are on their way as registers hold. Returns what it saw of X.
  __device__ __forceinline__ unsigned Stage() const {
    if (Set() >= Sets()) return 0;
    const int parts = StagedParts();
    if constexpr (kForWords) {
      return StageRows<4, 2, kIsFloat ? 1 : 2, kOctet / 2>();
    } else if constexpr (kIsFloat) {
      // Twice the registers of halves.
      if (StagedGroups() <= 2) {
        if (parts == 1) return StageRows<2, 1, 4, kOctet>();
        if (parts == 2) return StageRows<2, 2, 2, kOctet>();
        if (parts <= 4) return StageRows<2, 4, 1, kOctet>();
        return StageRows<1, 8, 1, kOctet>();
      }
      if (parts == 1) return StageRows<4, 1, 2, kOctet>();
      return StageRows<4, 2, 1, kOctet>();
    } else {
      if (p_.in_w % kOctet != 0) return parts == 1 ? StageRows<4, 1, 2, 4>() : StageRows<4, 2, 1, 4>();
      if (StagedGroups() <= 2) {
        if (parts == 1) return StageRows<2, 1, 4, kOctet>();
        if (parts == 2) return StageRows<2, 2, 4, kOctet>();
        if (parts <= 4) return StageRows<2, 4, 2, kOctet>();
        return StageRows<2, 8, 1, kOctet>();
      }
      if (parts == 1) return StageRows<4, 1, 4, kOctet>();
      if (parts == 2) return StageRows<4, 2, 2, kOctet>();
      return StageRows<4, 4, 1, kOctet>();
    }
  }

  // The next row of X to be loaded, and of the lane: its first column of X, where that lies in the first channel's
  // plane, and in columns, from where on there is nothing in this row.
  struct Row {
    int index;  // of the tile, beyond all where there is no row
    int left;   // rows of the tile, this one included
    int y, column;
    int fetched;  // of X, from which on no row was brought ahead
    const unsigned char* from;
    unsigned end;
  };

  // To the next one of the set.
  template <int kAligned>
  __device__ __forceinline__ void Advance(Row& row) const {
    const int rows = RowsToNext(row.left);
    row.left -= rows;
    row.y += rows;
    row.from += rows * kElementBytes * p_.in_w;
    // What is skipped may be all of a tile.
#pragma unroll
    for (int crossed = 0; crossed < kSets; ++crossed) {
      if (row.left <= 0) BeginTile<kAligned>(row);
    }
    row.end = static_cast<unsigned>(row.y) < static_cast<unsigned>(p_.in_h) ? static_cast<unsigned>(p_.in_w) : 0u;
  }

  // The next one, of whose rows as many are skipped as `left` is below zero.
  template <int kAligned>
  __device__ __forceinline__ void BeginTile(Row& row) const {
    if (row.index < p_.num_tiles) row.index += static_cast<int>(gridDim.x);
    if (row.index >= p_.num_tiles) {
      row.y = -1;  // where there is nothing
      return;
    }
    const Tile tile = TileAt(row.index);
    row.y = (tile.y << RowShift()) - p_.pad_top - row.left;
    row.left += tile.in_rows << RowShift();
    row.column = (tile.x << ColumnShift()) - p_.halo_columns + Lane() % kTaskLanes * kVectorColumns<kAligned>;
    row.from = static_cast<const unsigned char*>(p_.x) +
               kElementBytes * (static_cast<long long>(tile.image) * p_.in_channels * p_.in_h * p_.in_w +
                                row.y * p_.in_w + row.column);
    row.fetched = row.y;
  }

  // From a row of X to the set's next one; behind the last phase of a row of the ring, over those of other sets. With
  // two phases, the last one is where the rows that are left are odd in number.
  __device__ __forceinline__ int RowsToNext(int left) const {
    if (RowShift() == 0) return Sets();
    return left % 2 == 0 ? 1 : 1 + 2 * (Sets() - 1);
  }

  // `kGroups` of eight channels and `kParts` tasks of each are what a warp may have of a row. While one is stored,
  // others are on their way, so many rows of them. Rows of X begin at multiples of `kAligned` halves, or four floats.
  // Where registers do not hold a row, it comes in several passes over groups, and over tasks of these.
  template <int kGroups, int kParts, int kPassesAhead, int kAligned>
  __device__ __forceinline__ unsigned StageRows() const {
    using Words = Loaded[kGroups][kParts];
    const int groups = StagedGroups(), parts = StagedParts();
    const int pixel = StoredPixel<kAligned>(), staged = p_.staged_columns - pixel;
    const Shared first = FirstStored(pixel);
    unsigned planes[kGroups];
    const auto find_planes = [&](int begin) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const bool exists = !kForWords || begin + group < groups;
        planes[group] = exists ? PlaneOf(min(begin + group, groups - 1)) : kNoPlane;
      }
    };
    find_planes(0);
    WaitForLaunchBefore();

    Row row = RowBeforeAll();
    int held = 0;  // rows of X
    // That are to be loaded: at first, those behind a row's last.
    Pass next = kForWords ? Pass{groups, parts} : Pass{0, 0};
    const auto advance = [&]() {
      const bool is_same_row = kForWords && Advance<kGroups, kParts>(next, groups, parts);
      if (kForWords) find_planes(next.group);
      if (is_same_row) return;
      Advance<kAligned>(row);
      held += row.index < p_.num_tiles;
      if constexpr (!kForWords) Prefetch(row, planes);
    };
    Words words[kPassesAhead];
#pragma unroll
    for (int i = 0; i < kPassesAhead; ++i) {
      advance();
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (!kForWords && group >= groups) break;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          words[i][group][part] = LoadColumns<kAligned>(row, planes[group], next.part + part);
        }
      }
    }
    Magnitude magnitude;
    Cursor at;
    at.row = at.slot = Set();
    int phase = 0;    // of the row
    Pass pass{0, 0};  // that are to be stored
    // Whether there was a row to be stored, from `words`, where what is ahead comes to then.
    const auto store_next = [&](Words& words) __attribute__((always_inline)) {
      if (held == 0) return false;
      advance();
      WaitForSlot(at);
      Shared to = first + PixelAt(phase, 0) + static_cast<unsigned>(at.slot) * row_bytes_ +
                  static_cast<unsigned>(pass.group * kStagingWarps) * plane_bytes_;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (!kForWords && group >= groups) break;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (!kForWords || pass.group + group < groups) {
            StoreTask<kAligned>(Halves(words[group][part], magnitude), to, pass.part + part, staged, at.slot);
          }
          words[group][part] = LoadColumns<kAligned>(row, planes[group], next.part + part);
        }
        to += kStagingWarps * plane_bytes_;
      }
      if (kForWords && Advance<kGroups, kParts>(pass, groups, parts)) return true;
      --held;
      phase = PhaseOf(phase + 1, RowShift());
      if (phase == 0) FinishRow(at);
      return true;
    };
    while (ForEach<kPassesAhead>(words, store_next)) {
    }
    return magnitude.Seen();
  }

  // Calls a function for each element, until it returns false; returns whether it did not. A loop of its own would not
  // always be unrolled, and elements then be in local memory.
  template <int kCount, class Element, class Function>
  static __device__ __forceinline__ bool ForEach(Element* elements, const Function& function) {
    if constexpr (kCount == 0) {
      return true;
    } else {
      return function(elements[0]) && ForEach<kCount - 1>(elements + 1, function);
    }
  }

  // Of a row of X, the first of the groups and of their tasks that are loaded or stored at a time.
  struct Pass {
    int group, part;
  };
  // Whether the next one is of the same row.
  template <int kGroups, int kParts>
  static __device__ __forceinline__ bool Advance(Pass& pass, int groups, int parts) {
    pass.part += kParts;
    if (pass.part < parts) return true;
    pass.part = 0;
    pass.group += kGroups;
    if (pass.group < groups) return true;
    pass.group = 0;
    return false;
  }

  __device__ __forceinline__ int StagedGroups() const { return p_.places / (kOctet * kStagingWarps); }
  __device__ __forceinline__ int StagedParts() const { return (p_.staged_columns + kTaskColumns - 1) / kTaskColumns; }
  // Where the plane of the lane's channel lies in an image, in bytes, or kNoPlane.
  __device__ __forceinline__ unsigned PlaneOf(int group) const {
    const int place = kOctet * (kStagingWarps * group + warp_ % kStagingWarps) + Lane() / kTaskLanes;
    return LoadShared(planes_ + static_cast<unsigned>(4 * place));
  }
  // The row of a matrix that this lane says the place of; see Store.
  template <int kAligned>
  static __device__ __forceinline__ int StoredPixel() {
    const int other = Lane() % 8 / 2, matrix = Lane() / 8;
    if constexpr (kVectorColumns<kAligned> == kOctet) {
      return kOctet * other + 2 * ((matrix + other) % 4) + Lane() % 2;
    } else {
      const int word = matrix ^ other / 2;
      return kTaskColumns / 2 * (word / 2) + kVectorColumns<kAligned> * other + 2 * (word % 2) + Lane() % 2;
    }
  }
  // That pixel's, of the first row and the warp's first channels.
  __device__ __forceinline__ Shared FirstStored(int pixel) const {
    return ring_ + static_cast<unsigned>(warp_ % kStagingWarps) * plane_bytes_ + PixelAt(0, p_.lead_pixels + pixel);
  }

  __device__ __forceinline__ int Sets() const { return kSets > 1 ? p_.staging_sets : 1; }
  __device__ __forceinline__ int Set() const { return kSets > 1 ? (warp_ - kProductWarps) / kStagingWarps : 0; }
  // Which the first of the set follows.
  __device__ __forceinline__ Row RowBeforeAll() const {
    const int left = 1 + ((Sets() - 1 - Set()) << RowShift());
    return {static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), left, 0, 0, 0, nullptr, 0};
  }

  // Brings rows of the warp's channels to the second-level cache, some rows ahead, for all sets. Those of a channel lie
  // together, and memory gives several at once faster than one of each channel after the other. Short rows come by
  // lines, which lanes ask for together. Of wide ones, there are so many lines that loads would wait for them; the copy
  // engine brings those.
  template <int kGroups>
  __device__ __forceinline__ void Prefetch(Row& row, const unsigned (&planes)[kGroups]) const {
    constexpr unsigned kLineBytes = 128, kCopied = 16;
    if (p_.rows_ahead == 0 || row.y + p_.rows_ahead <= row.fetched || row.left <= 0 || Set() != 0) return;
    const int begin = max(row.fetched, 0), end = min(min(row.fetched + p_.rows_ahead, row.y + row.left), p_.in_h);
    row.fetched += p_.rows_ahead;
    const auto row_bytes = static_cast<unsigned>(kElementBytes * p_.in_w);
    const bool by_lines = row_bytes <= kLineBytes;
    if (begin >= end || (!by_lines && Lane() % kTaskLanes != 0)) return;
    const unsigned bytes = static_cast<unsigned>(end - begin) * row_bytes;
    const unsigned char* first = row.from - kElementBytes * row.column + (begin - row.y) * static_cast<int>(row_bytes);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group >= StagedGroups()) break;
      if (planes[group] == kNoPlane) continue;
      const unsigned char* from = first + planes[group];
      const auto skipped =
          static_cast<unsigned>(reinterpret_cast<unsigned long long>(from) % (by_lines ? kLineBytes : kCopied));
      if (by_lines) {
#pragma unroll 1
        for (unsigned at = Lane() % kTaskLanes * kLineBytes; at < skipped + bytes; at += kTaskLanes * kLineBytes) {
          PrefetchLine(from - skipped + at);
        }
      } else {
        PrefetchBulk(from - skipped, (skipped + bytes) / kCopied * kCopied);
      }
    }
  }
  __device__ __forceinline__ void WaitForSlot(const Cursor& at) const {
    if (at.row >= p_.ring_rows) WaitForBarrier(Emptied(at.slot), at.parity ^ 1);
  }
  __device__ __forceinline__ void FinishRow(Cursor& at) const {
    FenceSharedForTensorCores();
    __syncwarp();
    if (Lane() == 0) Arrive(Filled(at.slot));
    Base::Advance(at, Sets());
  }

  // What a lane loads of a channel: 16 bytes of halves, eight columns, or twice four: of floats, and where rows begin
  // at multiples of four. Four lanes' first vectors lie side by side, and so do their second ones, behind these.
  struct Loaded {
    uint4 vectors[sizeof(T) / sizeof(Half)];
  };
  template <int kAligned>
  static constexpr int kVectorColumns = kIsFloat ? 4 : kAligned;

  template <int kAligned>
  __device__ __forceinline__ Loaded LoadColumns(const Row& row, unsigned plane, int part) const {
    constexpr int kApart = kTaskColumns / 2;
    const auto column = static_cast<unsigned>(row.column + part * kTaskColumns);
    const unsigned end = plane == kNoPlane ? 0 : row.end;
    const unsigned char* from = row.from + plane + part * kElementBytes * kTaskColumns;
    const bool first = column < end, second = column + kApart < end;
    if constexpr (kIsFloat) {
      return {LoadVectorIf(first, from), LoadVectorIf(second, from + kElementBytes * kApart)};
    } else if constexpr (kAligned == kOctet) {
      return {LoadVectorIf(first, from)};
    } else {
      return {LoadHalfVectorsIf<kElementBytes * kApart>(first, second, from)};
    }
  }

  static __device__ __forceinline__ uint4 Halves(const Loaded& loaded, Magnitude& magnitude) {
    if constexpr (kIsFloat) {
      const uint4 &a = loaded.vectors[0], &b = loaded.vectors[1];
      return RoundedEight({BitsToFloat(a.x), BitsToFloat(a.y), BitsToFloat(a.z), BitsToFloat(a.w), BitsToFloat(b.x),
                           BitsToFloat(b.y), BitsToFloat(b.z), BitsToFloat(b.w)},
                          magnitude);
    } else {
      return loaded.vectors[0];
    }
  }

  // `to`: the lane's pixel in the first part of the row.
  template <int kAligned>
  __device__ __forceinline__ void StoreTask(const uint4& words, Shared to, int part, int staged, int slot) const {
    const bool exists = part * kTaskColumns < staged;
    const unsigned offset = static_cast<unsigned>(part * kTaskColumns >> ColumnShift()) * kPixelBytes;
    Store<kAligned>(words, exists ? to + offset : Dump(), exists, slot);
  }

  // Word i of each lane is one matrix of eight columns and eight channels, and its columns go to eight pixels. Those of
  // words with the same number would lie in the same banks of shared memory: of every lane of a channel where these
  // have eight columns each, of every second one where they have twice four. So lanes begin with another word.
  template <int kAligned>
  __device__ __forceinline__ void Store(uint4 w, Shared to, bool exists, int slot) const {
    const int other = Lane() % kTaskLanes;
    if constexpr (kVectorColumns<kAligned> == kOctet) {
      if (other % 2 != 0) w = {w.y, w.z, w.w, w.x};
      if (other / 2 != 0) w = {w.z, w.w, w.x, w.y};
    } else {
      if (other / 2 != 0) w = {w.y, w.x, w.w, w.z};
    }
    const unsigned words[4] = {w.x, w.y, w.z, w.w};
    StoreMatrices(to, words);
    if (slot < p_.group_rows - 1) {
      StoreMatrices(exists ? to + static_cast<unsigned>(p_.ring_rows) * row_bytes_ : to, words);
    }
  }

  // --- products -----------------------------------------------------------------------------------------------------

  // A warpgroup's rows of outputs.
  struct Group {
    int line, lines;
  };

  __device__ __forceinline__ void Multiply() {
    WaitForBarrier(WeightArrived(), 0);
    WaitForLaunchBefore();
    FindInputs(StepsOfWeight());
    const Finish<T> finishes[2] = {FinishOf(0), FinishOf(1)};
    const Places places = PlacesOfOutputs();
    const int warpgroup = warp_ / kWarps;
    const int step = kOctetWarpgroups * p_.group_rows;
    const bool share_outputs = p_.out_buffers < kOctetWarpgroups;
    if (warpgroup == 1) {
      PassTurn(kTurnBarriers, warpgroup, false);
      if (share_outputs) PassTurn(kOutputBarriers, warpgroup, false);
    }
    Cursor filled, released;
    int first = 0;  // row of the stream at which the tile begins
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      const Tile tile = TileAt(index);
      for (int begin = 0; begin < tile.lines; begin += step) {
        const bool is_last = begin + step >= tile.lines && index + static_cast<int>(gridDim.x) >= p_.num_tiles;
        const int line = begin + warpgroup * p_.group_rows;
        if (line >= tile.lines) {
          TakeTurn(kTurnBarriers, warpgroup);
          PassTurn(kTurnBarriers, warpgroup, is_last);
          if (share_outputs) {
            TakeTurn(kOutputBarriers, warpgroup);
            PassTurn(kOutputBarriers, warpgroup, is_last);
          }
          continue;
        }
        const Group group{line, min(p_.group_rows, tile.lines - line)};
        if (p_.epilogue.residual != nullptr && !share_outputs) FetchResidual(tile, group);
        Release(first + line, filled, released);
        while (filled.row < first + line + group.lines - 1 + p_.window_rows) WaitForRow(filled);
        TakeTurn(kTurnBarriers, warpgroup);
        MultiplyGroup(released.slot, StepsOfWeight());
        PassTurn(kTurnBarriers, warpgroup, is_last);
        if (share_outputs) {
          TakeTurn(kOutputBarriers, warpgroup);
          if (p_.epilogue.residual != nullptr) FetchResidual(tile, group);
        }
        WaitForProducts<0>();
        // What is filled and was read for the last time is free before outputs are stored.
        const int next = line + step < tile.lines ? first + line + step : first + tile.in_rows;
        Release(min(next, filled.row), filled, released);
        StoreGroup(tile, group, places, finishes);
        if (share_outputs) {
          WaitForBulkReads();
          PassTurn(kOutputBarriers, warpgroup, is_last);
        }
      }
      first += tile.in_rows;
      Release(first, filled, released);
    }
    WaitForBulkReads();
  }

  // The warpgroups take turns at the tensor cores, else both would multiply at the same time, and then both store; and
  // at what they have but one of.
  static __device__ __forceinline__ void TakeTurn(int barriers, int warpgroup) {
    WaitAtBarrier(barriers + warpgroup, 2 * kWarpgroupThreads);
  }
  // To the other one. The first takes no turn after the last one of all.
  static __device__ __forceinline__ void PassTurn(int barriers, int warpgroup, bool is_last) {
    if (warpgroup == 0 || !is_last) ArriveAtBarrier(barriers + 1 - warpgroup, 2 * kWarpgroupThreads);
  }

  // Of the weight; the dense ones are the first.
  struct Steps {
    unsigned sparse, dense;
  };
  __device__ __forceinline__ Steps StepsOfWeight() const {
    const unsigned counts = Uniform(LoadShared(weight_));
    return {counts & 0xFFFFu, counts >> 16};
  }

  // Where each step's matrices of the first eight positions lie, as the tensor cores want it (the lower word of a
  // Matrix), for a group whose first row of X is in any slot: what would take as long as a product, if it were found
  // out before each.
  __device__ __forceinline__ void FindInputs(const Steps& steps) const {
    for (int slot = warp_; slot < p_.ring_rows; slot += kProductWarps) {
      for (unsigned step = static_cast<unsigned>(Lane()); step < steps.dense + steps.sparse; step += 32) {
        const unsigned word = LoadShared(weight_ + 4 + 4 * step);
        const auto tap_row = static_cast<int>(word >> 24), tap_column = static_cast<int>(word >> 16 & 0xFFu);
        int row = slot + (tap_row >> RowShift());
        if (row >= p_.ring_rows) row -= p_.ring_rows;
        const Shared first = ring_ + (word & 0xFFFFu) / kOctet * plane_bytes_ +
                             static_cast<unsigned>(row) * row_bytes_ +
                             PixelAt(PhaseOf(tap_row, RowShift()), tap_column + p_.first_pixel);
        const Shared to =
            step < steps.dense ? InputsOf(slot) + 4 * step : SparseInputsOf(slot, steps) + 4 * (step - steps.dense);
        StoreShared(to, LowerWord(MatrixAt(first, plane_bytes_, kMatrixBytes)));
      }
    }
    WaitAtBarrier(kInputsBarrier, 32 * kProductWarps);
  }
  __device__ __forceinline__ Shared InputsOf(int slot) const {
    return inputs_ + static_cast<unsigned>(slot * p_.inputs_pitch);
  }
  // They are read by vectors, of one kind each.
  __device__ __forceinline__ Shared SparseInputsOf(int slot, const Steps& steps) const {
    return InputsOf(slot) + 4 * ((steps.dense + kBatchSteps - 1) / kBatchSteps * kBatchSteps);
  }

  __device__ __forceinline__ void MultiplyGroup(int slot, const Steps& steps) {
    if (steps.dense > 0) {
      MultiplyDenseSteps(slot, steps.dense);
      if (steps.sparse == 0) return;
      // Products of another shape are in no order with these.
      WaitForProducts<0>();
    }
    MultiplySparseSteps(slot, steps);
  }

  __device__ __forceinline__ void MultiplyDenseSteps(int slot, unsigned steps) {
    const unsigned batched = steps - steps % kBatchSteps;
    Shared inputs = InputsOf(slot);
    uint4 next = LoadSharedVector(inputs);
#pragma unroll 1
    for (unsigned first = 0; first < batched; first += kBatchSteps) {
      const uint4 of_batch = next;
      inputs += 4 * kBatchSteps;
      next = LoadSharedVector(inputs);
      MultiplyDenseBatch<kBatchSteps>(of_batch, first);
      WaitForProducts<1>();
    }
    if (steps % kBatchSteps == 1) MultiplyDenseBatch<1>(next, batched);
    if (steps % kBatchSteps == 2) MultiplyDenseBatch<2>(next, batched);
    if (steps % kBatchSteps == 3) MultiplyDenseBatch<3>(next, batched);
  }

  template <unsigned kSteps>
  __device__ __forceinline__ void MultiplyDenseBatch(const uint4& inputs, unsigned first) {
    const Matrix a = MatrixAt(DenseValues(), kMatrixBytes, 2 * kMatrixBytes);
    const unsigned of_steps[kBatchSteps] = {inputs.x, inputs.y, inputs.z, inputs.w};
    FenceSums();
#pragma unroll
    for (unsigned i = 0; i < kSteps; ++i) {
      MultiplyDenseOctets(sums_, Moved(a, (first + i) * kValueBytes), MatrixOf(of_steps[i], kMatrixBytes),
                          first + i > 0);
    }
    CommitProducts();
  }

  // A batch is always on its way while what the next one needs is loaded. Metadata of a product must stay in its
  // register until that is complete; see wgmma_conv.cuh. So there are two sets of it, and one for steps that are left.
  // Within a batch there are no branches, else the compiler has each product wait for the one before.
  __device__ __forceinline__ void MultiplySparseSteps(int slot, const Steps& steps) {
    unsigned metas[2][kBatchSteps] = {}, rest[kBatchSteps] = {};
    const unsigned batched = steps.sparse - steps.sparse % kBatchSteps;
    Shared inputs = SparseInputsOf(slot, steps);
    uint4 next = LoadSharedVector(inputs);
    for (unsigned begin = 0; begin < batched; begin += 2 * kBatchSteps) {
#pragma unroll
      for (unsigned part = 0; part < 2; ++part) {
        const unsigned first = begin + part * kBatchSteps;
        if (first >= batched) break;
        const uint4 of_batch = next;
        inputs += 4 * kBatchSteps;
        next = LoadSharedVector(inputs);
        MultiplyBatch<kBatchSteps>(of_batch, steps, first, metas[part]);
        WaitForProducts<1>();
      }
    }
    static_assert(kBatchSteps == 4);
    if (steps.sparse % kBatchSteps == 1) MultiplyBatch<1>(next, steps, batched, rest);
    if (steps.sparse % kBatchSteps == 2) MultiplyBatch<2>(next, steps, batched, rest);
    if (steps.sparse % kBatchSteps == 3) MultiplyBatch<3>(next, steps, batched, rest);
  }

  template <unsigned kSteps>
  __device__ __forceinline__ void MultiplyBatch(const uint4& inputs, const Steps& steps, unsigned first,
                                                unsigned (&metas)[kBatchSteps]) {
    const Shared meta = SparseValues() + steps.sparse * kValueBytes + static_cast<unsigned>(warp_ % kWarps * 64) +
                        static_cast<unsigned>(Lane() / 4 * 8 + Lane() % 2 * 4);
    const Matrix a = MatrixAt(SparseValues(), kMatrixBytes, 2 * kMatrixBytes);
    const unsigned of_steps[kBatchSteps] = {inputs.x, inputs.y, inputs.z, inputs.w};
#pragma unroll
    for (unsigned i = 0; i < kSteps; ++i) LoadSharedIf(steps.sparse, metas[i], meta + (first + i) * kMetaBytes);
    FenceSums();
#pragma unroll
    for (unsigned i = 0; i < kSteps; ++i) {
      MultiplySparseOctets(sums_, Moved(a, (first + i) * kValueBytes), MatrixOf(of_steps[i], kMatrixBytes), metas[i],
                           steps.dense + first + i > 0);
    }
    CommitProducts();
  }

  // Where these begin, the compiler knows to be the same in all lanes, as tensor cores want it.
  __device__ __forceinline__ Shared DenseValues() const { return weight_ + static_cast<unsigned>(p_.header_bytes); }
  __device__ __forceinline__ Shared SparseValues() const {
    return DenseValues() + static_cast<unsigned>(p_.dense_bytes);
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int FirstChannel() const { return row_tile_ * kRows + warp_ % kWarps * kWarpRows; }
  __device__ __forceinline__ Shared Outputs() const {
    return outputs_ + static_cast<unsigned>(warp_ % (p_.out_buffers * kWarps) * kWarpRows) * kOutPitch;
  }

  // Of the group's first output of the warp's first channel, in Y.
  __device__ __forceinline__ long long FirstElement(const Tile& tile, const Group& group) const {
    const long long plane = static_cast<long long>(tile.image) * p_.out_channels + FirstChannel();
    return (plane * p_.out_h + tile.y + group.line) * p_.out_w + tile.x;
  }

  // What lies together of a channel's outputs: a run.
  struct Runs {
    int count;
    int elements;  // of each
  };
  __device__ __forceinline__ Runs RunsOf(const Tile& tile, const Group& group) const {
    if (tile.columns == p_.out_w) return {1, group.lines * tile.columns};
    return {group.lines, tile.columns};
  }

  // A residual comes to where the last outputs have left. As many lanes as a run has vectors of 16 bytes copy them,
  // those of several channels at once where there are few.
  __device__ __forceinline__ void FetchResidual(const Tile& tile, const Group& group) const {
    WaitForBulkReads();
    WaitForWarp();
    if (StoresElements()) return MoveElements<false>(tile, group);
    const Runs runs = RunsOf(tile, group);
    const int vectors = runs.elements / kVector, channels = min(p_.out_channels - FirstChannel(), kWarpRows);
    const int shift = vectors <= 8 ? 3 : vectors <= 16 ? 4 : 5;  // of the lanes
    for (int run = 0; run < runs.count; ++run) {
      const T* from = static_cast<const T*>(p_.epilogue.residual) + FirstElement(tile, group) + run * p_.out_w;
      const Shared to = Outputs() + static_cast<unsigned>(kElementBytes * run * p_.tile_columns);
      for (int channel = Lane() >> shift; channel < channels; channel += 32 >> shift) {
        for (int vector = Lane() & ((1 << shift) - 1); vector < vectors; vector += 1 << shift) {
          CopyAsync16(to + static_cast<unsigned>(channel) * kOutPitch + static_cast<unsigned>(16 * vector),
                      from + static_cast<long long>(channel) * p_.out_h * p_.out_w + vector * kVector);
        }
      }
    }
    CommitCopies();
  }

  // By one lane.
  __device__ __forceinline__ void CopyOutputs(const Tile& tile, const Group& group) const {
    const Runs runs = RunsOf(tile, group);
    const int channels = min(p_.out_channels - FirstChannel(), kWarpRows);
    if constexpr (!kForWords) {
      if (runs.elements == p_.run && channels == kWarpRows) {
        const int run = Divide((tile.y + group.line) * p_.out_w + tile.x, p_.by_run);
        StoreBox(&p_.y_map, Outputs(), 0, run, tile.image * p_.out_channels + FirstChannel());
        return;
      }
    }
    const long long plane = static_cast<long long>(p_.out_h) * p_.out_w;
    for (int run = 0; run < runs.count; ++run) {
      T* to = static_cast<T*>(p_.y) + FirstElement(tile, group) + run * p_.out_w;
      Shared from = Outputs() + static_cast<unsigned>(kElementBytes * run * p_.tile_columns);
#pragma unroll 4
      for (int channel = 0; channel < channels; ++channel, to += plane, from += kOutPitch) {
        StoreBulk(to, from, static_cast<unsigned>(kElementBytes * runs.elements));
      }
    }
  }

  // Whether planes of Y do not begin at multiples of 16 bytes.
  __device__ __forceinline__ bool StoresElements() const { return kForWords && p_.out_h * p_.out_w % kOctet != 0; }

  // Where they do not, by all lanes: outputs to Y, or the residual from where it lies.
  template <bool kIsOutput>
  __device__ __forceinline__ void MoveElements(const Tile& tile, const Group& group) const {
    const Runs runs = RunsOf(tile, group);
    const int channels = min(p_.out_channels - FirstChannel(), kWarpRows);
    const long long plane = static_cast<long long>(p_.out_h) * p_.out_w;
    for (int run = 0; run < runs.count; ++run) {
      for (int column = Lane(); column < runs.elements; column += 32) {
        long long index = FirstElement(tile, group) + run * p_.out_w + column;
        Shared shared = Outputs() + static_cast<unsigned>(kElementBytes * (run * p_.tile_columns + column));
#pragma unroll 4
        for (int channel = 0; channel < channels; ++channel, index += plane, shared += kOutPitch) {
          Columns<kElementBytes> element;
          if (kIsOutput) {
            element.LoadShared(shared);
            element.Store(static_cast<T*>(p_.y) + index);
          } else {
            element.Load(static_cast<const T*>(p_.epilogue.residual) + index);
            element.StoreShared(shared);
          }
        }
      }
    }
  }

  // Of the thread's positions, two neighbours of each eight, a bit for each eight of them: whether there are outputs,
  // not what lies between rows, and whether there begins another row.
  struct Places {
    unsigned exist = 0, begin_rows = 0;
  };

  // Finishes outputs, and stores them.
  __device__ __forceinline__ void StoreGroup(const Tile& tile, const Group& group, const Places& places,
                                             const Finish<T> (&finishes)[2]) {
    WaitForBulkReads();
    if (p_.epilogue.residual != nullptr) WaitForCopies<0>();
    WaitForWarp();
    KeepOutputs(places, finishes);
    FenceSharedForTensorCores();  // and the copy engine
    WaitForWarp();
    if (StoresElements()) {
      MoveElements<true>(tile, group);
    } else if (IsElected()) {
      CopyOutputs(tile, group);
      CommitBulkStores();
    }
    // Behind code in which threads part, the compiler else lets products wait for each other.
    WaitForWarp();
  }

  __device__ __forceinline__ void WaitForWarp() const { WaitAtBarrier(1 + warp_, 32); }

  __device__ __forceinline__ Places PlacesOfOutputs() const {
    Places places;
    int column = Lane() % 4 * 2, row = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (column >= p_.row_pixels) {
        column -= p_.row_pixels;
        ++row;
        places.begin_rows |= 1u << block;
      }
      if (column < p_.tile_columns && row < p_.group_rows) places.exist |= 1u << block;
      column += 8;
    }
    return places;
  }

  // Where the outputs of a block begin, from where those of the one before did.
  __device__ __forceinline__ Shared FirstOutput() const {
    return Outputs() + static_cast<unsigned>(Lane() / 4) * kOutPitch +
           static_cast<unsigned>(Lane() % 4 * 2 * kElementBytes);
  }
  __device__ __forceinline__ unsigned Gap() const {
    return static_cast<unsigned>(kElementBytes * (p_.row_pixels - p_.tile_columns));
  }

  __device__ __forceinline__ void KeepOutputs(Places places, const Finish<T> (&finishes)[2]) {
    const Epilogue& e = p_.epilogue;
    // Bits are told apart here: kept apart for all tiles, they would take a register each.
    places.exist = Unforeseen(places.exist);
    places.begin_rows = Unforeseen(places.begin_rows);
    // Else sums would be finished before products were waited for.
    const Finish<T> lower = finishes[0].Unforeseen(), upper = finishes[1].Unforeseen();
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) sums_[i] = (i / 2 % 2 == 0 ? lower : upper)(sums_[i]);
    if (e.residual != nullptr) {
      Shared at = FirstOutput();
#pragma unroll
      for (unsigned block = 0; block < kBlocks; ++block) {
        SubtractIf(places.begin_rows, block, at, Gap());
        if ((places.exist >> block & 1u) != 0) {
#pragma unroll
          for (unsigned i = 0; i < 2; ++i) {
            const Shared from = at + kBlockBytes * block + 8 * i * kOutPitch;
            if constexpr (kIsFloat) {
              unsigned first, second;
              LoadSharedPair(from, first, second);
              sums_[4 * block + 2 * i] += BitsToFloat(first);
              sums_[4 * block + 2 * i + 1] += BitsToFloat(second);
            } else {
              const Half2 pair = LoadShared(from);
              sums_[4 * block + 2 * i] += ToFloat(Lower(pair));
              sums_[4 * block + 2 * i + 1] += ToFloat(Upper(pair));
            }
          }
        }
      }
    }
    if (!IsBound(e.activation)) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        Floats<4> outputs;
#pragma unroll
        for (int i = 0; i < 4; ++i) outputs.at[i] = sums_[4 * block + i];
        outputs = ActivateElsewhere<Half>(e.activation, outputs, e.alpha, e.beta);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[4 * block + i] = outputs.at[i];
      }
    }
    KeepSums(places);
  }

  __device__ __forceinline__ void KeepSums(const Places& places) const {
    const Bounds& bounds = p_.epilogue.bounds;
    Shared at = FirstOutput();
#pragma unroll
    for (unsigned block = 0; block < kBlocks; ++block) {
      SubtractIf(places.begin_rows, block, at, Gap());
      const float* sums = sums_ + 4 * block;
      const Shared to = at + kBlockBytes * block;
      if constexpr (kIsFloat) {
        const auto word = [&](int i) { return Bounded<T>(bounds, sums + i); };
        StoreSharedPairsIf(places.exist, block, to, word(0), word(1), to + 8 * kOutPitch, word(2), word(3));
        continue;
      }
      StoreSharedIf(places.exist, block, to, Bounded<T>(bounds, sums), to + 8 * kOutPitch,
                    Bounded<T>(bounds, sums + 2));
    }
  }

  // Of the thread's channels, the same for all tiles.
  __device__ __forceinline__ Finish<T> FinishOf(int upper) const {
    const auto* bias = static_cast<const T*>(p_.epilogue.bias);
    const int channel = FirstChannel() + Lane() / 4 + 8 * upper;
    if (channel >= p_.out_channels) return {1.0f, 0.0f};
    return {kIsFloat ? p_.scales[channel] : 1.0f, bias != nullptr ? LoadElement(bias + channel) : 0.0f};
  }

  const OctetParams& p_;
  const void* const shared_;
  const int warp_, row_tile_;
  const Shared ring_;
  const unsigned row_bytes_;
  const unsigned plane_bytes_;  // of all rows and phases, from eight channels to the next eight
  const Shared outputs_, weight_, planes_, inputs_, barriers_;
  float sums_[4 * kBlocks];
};

}  // namespace sparseconv::cuda
