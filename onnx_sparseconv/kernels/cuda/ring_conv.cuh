// Sparse convolution of windows with few channels by warpgroups of sparse tensor cores (float16, sm_90a).
//
// As in wgmma_conv.cuh, a pixel holds 8 halves of each channel, those of 8 images or of 8 strips of one, and weights
// without structure become 2:4 by an order of the channels. But with few channels, products take a small part of the
// time: what counts is that X is read once, as it is, that no row is staged twice, and that outputs leave while others
// are computed.
//
// So all channels of a pixel lie in shared memory together, and a block goes down a column of `kPositions` outputs:
// rows of X enter a ring of rows, each once for all rows of outputs that read it. The warps that stage turn columns of
// images into images of columns in registers. The weight stays in shared memory: all steps of the block's 64 output
// channels. Non-zeros that do not fit into 2:4, three or four in four neighbours, have steps of their own, which read
// the same pixels (window_weight.h).
//
// Two warpgroups multiply, each a row of outputs by itself: while one stores, the other keeps the tensor cores busy. A
// thread has runs of neighbouring outputs in its registers, and stores them from there.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"
#include "row_ring.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

template <int kPositions>
class RingConv : private RowRing<RingConv<kPositions>> {
 public:
  __device__ __forceinline__ RingConv(const RingParams& params, const void* shared)
      : p_(params),
        ring_(SharedAddress(shared)),
        row_bytes_(static_cast<unsigned>(params.row_pixels * params.pixel_bytes)),
        weight_(ring_ + static_cast<unsigned>(params.ring_rows) * row_bytes_) {}

  __device__ __forceinline__ void Run() {
    LetNextLaunchBegin();
    Prepare();
    if (Uniform(threadIdx.x / 32) < kRingProductThreads / 32) {
      TakeRegisters<kProductRegisters>();
      Multiply();
    } else {
      GiveUpRegisters<kStagingRegisters>();
      Stage();
    }
  }

 private:
  friend class RowRing<RingConv<kPositions>>;
  using Base = RowRing<RingConv<kPositions>>;
  using Base::Advance;
  using Base::Release;
  using Base::WaitForRow;
  using Cursor = typename Base::Cursor;

  static constexpr int kRows = 64;
  // Of 168 for each thread: the sums of 32 positions need more.
  static constexpr int kProductRegisters = 176, kStagingRegisters = 152;
  static constexpr int kStagingWarps = (kRingThreads - kRingProductThreads) / 32;
  static constexpr int kUnitPlaces = 2, kUnitOctets = 4, kTaskUnits = 4;
  static constexpr unsigned kPlaceBytes = 16;
  static constexpr unsigned kValueBytes = 2048, kMetaBytes = 256;  // of a step
  static constexpr unsigned kMatrixBytes = 128;
  static constexpr unsigned kPartSteps = 4;  // whose products are on their way together

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ __forceinline__ Shared Channels() const { return weight_ + static_cast<unsigned>(p_.weight_bytes); }
  __device__ __forceinline__ Shared Units() const { return Channels() + static_cast<unsigned>(4 * p_.places); }
  __device__ __forceinline__ int ring_rows() const { return p_.ring_rows; }
  __device__ __forceinline__ Shared Filled(int slot) const {
    return Units() + static_cast<unsigned>(4 * p_.row_units + 16 * slot);
  }
  __device__ __forceinline__ Shared Emptied(int slot) const { return Filled(slot) + 8; }
  __device__ __forceinline__ Shared WeightArrived() const { return Filled(p_.ring_rows); }

  // Of the block.
  __device__ __forceinline__ int RowTile() const { return static_cast<int>(blockIdx.x) % p_.row_tiles; }

  __device__ __forceinline__ void Prepare() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int slot = 0; slot < p_.ring_rows; ++slot) {
        InitBarrier(Filled(slot), static_cast<unsigned>(min(kStagingWarps, p_.row_units / kTaskUnits)));
        InitBarrier(Emptied(slot), kRingProductThreads / 32);
      }
      InitBarrier(WeightArrived(), 1);
      FenceBarrierInit();
      const auto bytes = static_cast<unsigned>(p_.weight_bytes);
      ExpectBytes(WeightArrived(), bytes);
      CopyBulkCached(weight_, static_cast<const unsigned char*>(p_.weight) + static_cast<size_t>(RowTile()) * bytes,
                     bytes, WeightArrived());
      Arrive(WeightArrived());
    }
    for (int place = thread; place < p_.places; place += kRingThreads) {
      StoreShared(Channels() + static_cast<unsigned>(4 * place),
                  static_cast<unsigned>(p_.channels[RowTile() * p_.places + place]));
    }
    __syncthreads();
  }

  struct Tile {
    int eight, y, x;
    int lines;    // rows of outputs
    int in_rows;  // of X
    int parts;
  };

  __device__ __forceinline__ Tile TileAt(int index) const {
    Tile tile;
    int rest = index / p_.row_tiles;
    tile.x = rest % p_.tiles_x * kPositions;
    rest /= p_.tiles_x;
    tile.y = rest % p_.tiles_y * p_.tile_rows;
    tile.eight = rest / p_.tiles_y;
    tile.lines = min(p_.tile_rows, p_.out_h - tile.y);
    tile.in_rows = (tile.lines - 1) * p_.strides[0] + p_.window_rows;
    tile.parts = tile.eight + 1 < p_.num_eights ? p_.parts : p_.last_parts;
    return tile;
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  // A row is staged in units of two places and four octets of columns of X, one of each for each of 8 lanes: a lane
  // turns 8 images of an octet into 8 pixels of a place. Lanes of a unit load 64 contiguous bytes for each place: 16
  // bytes of many channels at once take the first-level cache eight times as long. Four units are a task of a warp,
  // which has every fourth of a row's.
  struct Task {
    int index;  // of the tile, beyond all where there is no task
    Tile tile;
    int row;         // of the tile
    int first;       // unit
    unsigned parts;  // a bit for each part whose row lies inside of X
  };

  // A unit's word in the table: its first octet, and its first place.
  static constexpr unsigned kUnitOctet = 16;

  __device__ __forceinline__ void PlanUnits(int thread) const {
    for (int unit = thread; unit < p_.row_units; unit += 32 * kStagingWarps) {
      const int group = unit / p_.row_blocks, block = unit - group * p_.row_blocks;
      StoreShared(Units() + static_cast<unsigned>(4 * unit), static_cast<unsigned>(block * kUnitOctets) << kUnitOctet |
                                                                 static_cast<unsigned>(group * kUnitPlaces));
    }
    WaitAtBarrier(1, 32 * kStagingWarps);
  }

  __device__ __forceinline__ void Begin(Task& task, int warp) const {
    task.first = kTaskUnits * warp;
    const int y = (task.tile.y * p_.strides[0] - p_.pads_begin[0]) + task.row;
    task.parts = 0;
#pragma unroll
    for (int part = 0; part < kTensorImages; ++part) {
      const auto row = static_cast<unsigned>(y + part * p_.part_rows);  // beyond all where it is negative
      if (part < task.tile.parts && row < static_cast<unsigned>(p_.in_h)) task.parts |= 1u << part;
    }
  }

  __device__ __forceinline__ void Advance(Task& task, int warp) const {
    task.first += kTaskUnits * kStagingWarps;
    if (task.first < p_.row_units) return;
    if (++task.row == task.tile.in_rows) {
      task.row = 0;
      task.index += static_cast<int>(gridDim.x);
      if (task.index < p_.num_tiles) task.tile = TileAt(task.index);
    }
    Begin(task, warp);
  }

  // What a lane moves: the first of its columns, counted from the row's first pixel, and its place, which may have no
  // channel (-1).
  struct LaneUnit {
    int pixel = 0, place = 0, channel = -1;
  };

  // The columns of a unit's octet, of each part, that are on their way.
  struct Columns {
    int pixel = 0, place = 0;
    bool exists = false;
    uint4 parts[kTensorImages] = {};
  };

  // Where a warp stores: in a row, of which it has so many tasks left.
  struct Storing {
    Cursor at;
    int left;
  };

  // While the columns of a task are stored, those of the next two are on their way, and what says where those of the
  // third lie.
  __device__ __forceinline__ void Stage() const {
    const int thread = static_cast<int>(threadIdx.x) - kRingProductThreads, warp = Uniform(thread / 32);
    PlanUnits(thread);
    Task task{static_cast<int>(blockIdx.x), TileAt(static_cast<int>(blockIdx.x)), 0, 0, 0};
    if (task.index >= p_.num_tiles || kTaskUnits * warp >= p_.row_units) return;
    Begin(task, warp);
    const int row_tasks = (p_.row_units / kTaskUnits - warp + kStagingWarps - 1) / kStagingWarps;
    Storing storing{{}, row_tasks};
    WaitForLaunchBefore();
    LaneUnit next = UnitOf(task);
    Columns a, b, c;
    LoadNext(task, warp, next, a);
    LoadNext(task, warp, next, b);
    while (true) {
      LoadNext(task, warp, next, c);
      if (!a.exists) break;
      StoreNext(storing, row_tasks, a);
      LoadNext(task, warp, next, a);
      if (!b.exists) break;
      StoreNext(storing, row_tasks, b);
      LoadNext(task, warp, next, b);
      if (!c.exists) break;
      StoreNext(storing, row_tasks, c);
    }
  }

  __device__ __forceinline__ void LoadNext(Task& task, int warp, LaneUnit& next, Columns& columns) const {
    columns.exists = task.index < p_.num_tiles;
    if (!columns.exists) return;
    columns.pixel = next.pixel;
    columns.place = next.place;
    Load(task, next, columns);
    Advance(task, warp);
    next = UnitOf(task);
  }

  __device__ __forceinline__ void StoreNext(Storing& storing, int row_tasks, Columns& columns) const {
    if (storing.at.row >= p_.ring_rows) WaitForBarrier(Emptied(storing.at.slot), storing.at.parity ^ 1);
    Store(storing.at.slot, columns);
    if (--storing.left > 0) return;
    FenceSharedForTensorCores();
    __syncwarp();
    if (Lane() == 0) Arrive(Filled(storing.at.slot));
    Advance(storing.at);
    storing.left = row_tasks;
  }

  static __device__ __forceinline__ int LaneOctet() { return Lane() % kUnitOctets; }

  __device__ __forceinline__ LaneUnit UnitOf(const Task& task) const {
    const int unit = task.first + Lane() / (kUnitPlaces * kUnitOctets);
    const unsigned word = LoadShared(Units() + static_cast<unsigned>(4 * unit));
    const int first = task.tile.x * p_.strides[1] - p_.pads_begin[1];
    const int lead = static_cast<int>(static_cast<unsigned>(first) % kRingColumns);  // of negative ones, too
    LaneUnit found;
    found.pixel = (static_cast<int>(word >> kUnitOctet) + LaneOctet()) * kRingColumns - lead;
    found.place = static_cast<int>(word & 0xFFFFu) + Lane() / kUnitOctets % kUnitPlaces;
    found.channel = static_cast<int>(LoadShared(Channels() + static_cast<unsigned>(4 * found.place)));
    return found;
  }

  // Columns outside of X are zeros, rows and channels too.
  __device__ __forceinline__ void Load(const Task& task, const LaneUnit& unit, Columns& columns) const {
    const Tile& tile = task.tile;
    const int x = tile.x * p_.strides[1] - p_.pads_begin[1] + unit.pixel;
    const int y = tile.y * p_.strides[0] - p_.pads_begin[0] + task.row;
    const bool is_column =
        unit.channel >= 0 && static_cast<unsigned>(x) < static_cast<unsigned>(p_.in_w) && unit.pixel < p_.row_pixels;
    const unsigned parts = is_column ? task.parts : 0;
    const Half* from = static_cast<const Half*>(p_.x) + tile.eight * p_.x_eight +
                       (static_cast<long long>(unit.channel) * p_.x_plane + y * p_.in_w + x);
#pragma unroll
    for (int part = 0; part < kTensorImages; ++part, from += p_.x_part) {
      columns.parts[part] = (parts & 1u << part) != 0 ? LoadWritten(reinterpret_cast<const uint4*>(from)) : uint4{};
    }
  }

  // Lanes of a unit store pixels of different octets, 8 pixels apart, whose banks of shared memory are the same: so
  // each begins with another pair of pixels.
  __device__ __forceinline__ void Store(int slot, Columns& columns) const {
    const Shared to =
        ring_ + static_cast<unsigned>(slot) * row_bytes_ + static_cast<unsigned>(columns.place) * kPlaceBytes;
    const bool is_odd = LaneOctet() % 2 != 0, is_upper = LaneOctet() / 2 != 0;
#pragma unroll
    for (int part = 0; part < kTensorImages; ++part) {
      uint4& words = columns.parts[part];
      if (is_odd) words = {words.y, words.x, words.w, words.z};
      if (is_upper) words = {words.z, words.w, words.x, words.y};
    }
#pragma unroll
    for (int i = 0; i < kRingColumns; ++i) {
      unsigned halves[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        halves[pair] = SelectBytes(Word(columns.parts[2 * pair], i / 2), Word(columns.parts[2 * pair + 1], i / 2),
                                   i % 2 == 0 ? kLowerHalves : kUpperHalves);
      }
      const int pixel = columns.pixel + (i ^ 2 * LaneOctet());
      StoreSharedVectorIf(static_cast<unsigned>(pixel) < static_cast<unsigned>(p_.row_pixels) ? 1 : 0,
                          to + static_cast<unsigned>(pixel * p_.pixel_bytes), halves);
    }
  }

  static __device__ __forceinline__ unsigned Word(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply() {
    const int warpgroup = static_cast<int>(Uniform(threadIdx.x / 128));
    WaitForBarrier(WeightArrived(), 0);
    WaitForLaunchBefore();
    const unsigned counts = Uniform(LoadShared(weight_)), sparse = counts & 0xFFFFu, dense = counts >> 16;
    const float biases[2] = {BiasOf(0), BiasOf(1)};
    Cursor filled, released;
    int first = 0;  // row of the stream at which the tile begins
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      const Tile tile = TileAt(index);
      for (int line = warpgroup; line < tile.lines; line += kRingWarpgroups) {
        const int begin = first + line * p_.strides[0];
        Release(begin, filled, released);
        while (filled.row < begin + p_.window_rows) WaitForRow(filled);
        MultiplySteps<true>(released.slot, 0, dense);
        MultiplySteps<false>(released.slot, dense, sparse);
        // What is filled and was read for the last time is free before outputs are stored.
        const int next =
            line + kRingWarpgroups < tile.lines ? begin + kRingWarpgroups * p_.strides[0] : first + tile.in_rows;
        Release(min(next, filled.row), filled, released);
        StoreLine(tile, line, biases);
      }
      first += tile.in_rows;
      Release(first, filled, released);
    }
  }

  // So many steps of a kind, that come behind others. A part of them is always on its way while what the next one needs
  // is loaded. Metadata of a product must stay in its register until that is complete; see wgmma_conv.cuh. So there are
  // two sets of it.
  template <bool kIsDense>
  __device__ __forceinline__ void MultiplySteps(int slot, unsigned behind, unsigned steps) {
    const Shared values = weight_ + static_cast<unsigned>(p_.header_bytes + (kIsDense ? 0 : p_.dense_bytes));
    const Matrix a = MatrixAt(Uniform(values), kMatrixBytes, 2 * kMatrixBytes);
    const unsigned position_bytes = static_cast<unsigned>(p_.strides[1] * p_.pixel_bytes);
    const Shared words = weight_ + 4 + 4 * behind;
    const Shared meta = values + steps * kValueBytes + threadIdx.x % 128 / 32 * 64 +
                        static_cast<unsigned>(Lane() / 4 * 8 + Lane() % 2 * 4);
    unsigned metas[2][kPartSteps] = {};
    for (unsigned begin = 0; begin < steps; begin += 2 * kPartSteps) {
#pragma unroll
      for (unsigned part = 0; part < 2; ++part) {
        const unsigned first = begin + part * kPartSteps;
        if (first >= steps) break;
        unsigned pixels[kPartSteps];
#pragma unroll
        for (unsigned i = 0; i < kPartSteps; ++i) {
          if (!kIsDense) LoadSharedIf(first + i < steps, metas[part][i], meta + (first + i) * kMetaBytes);
          pixels[i] = PixelAt(LoadShared(words + 4 * min(first + i, steps - 1)), slot);
        }
        FenceSums();
#pragma unroll
        for (unsigned i = 0; i < kPartSteps; ++i) {
          if (first + i >= steps) continue;
          const Matrix of_step = Moved(a, (first + i) * kValueBytes);
          const Matrix b = MatrixAt(Uniform(pixels[i]), kMatrixBytes, position_bytes);
          if constexpr (kIsDense) {
            MultiplyDense(sums_, of_step, b, first + i > 0);
          } else {
            MultiplySparse(sums_, of_step, b, metas[part][i], behind + first + i > 0);
          }
        }
        CommitProducts();
        WaitForProducts<1>();
      }
    }
    // Products of another shape are in no order with these.
    WaitForProducts<0>();
  }

  // Of a step: the row that it reads, and where in it the first position's pixels lie.
  __device__ __forceinline__ Shared PixelAt(unsigned step, int slot) const {
    int row = slot + static_cast<int>(step >> 24);
    if (row >= p_.ring_rows) row -= p_.ring_rows;
    return ring_ + static_cast<unsigned>(row) * row_bytes_ +
           (step >> 16 & 0xFFu) * static_cast<unsigned>(p_.pixel_bytes) + (step & 0xFFFFu) * kPlaceBytes;
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // A thread has sums of two channels, 8 apart, and of two parts of a pixel: each a run of neighbouring outputs,
  // kVectors times 16 bytes. Neighbouring lanes, which have the same channels, exchange theirs: each then has the same
  // places of the runs of both, and they store up to 64 contiguous bytes together.
  static constexpr int kVectors = kPositions / kRingColumns;
  static constexpr int kExchanging = kVectors < 4 ? kVectors : 4;
  using Vectors = unsigned[kVectors][4];

  // To what the lanes have of all their runs, from what each has of its own, and back.
  static __device__ __forceinline__ void Exchange(Vectors& run) {
#pragma unroll
    for (int distance = 1; distance < kExchanging; distance *= 2) {
      const bool is_upper = (Lane() & distance) != 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if ((i & distance) != 0) continue;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          unsigned &lower = run[i][word], &upper = run[i | distance][word];
          const unsigned received = __shfl_xor_sync(0xFFFFFFFFu, is_upper ? lower : upper, distance);
          (is_upper ? lower : upper) = received;
        }
      }
    }
  }

  __device__ __forceinline__ void StoreLine(const Tile& tile, int line, const float (&biases)[2]) const {
    const int y = tile.y + line, lane = Lane();
    const int channel = RowTile() * kRows + static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4;
    // Of the lanes that exchange: the first one's first part, and which of every kExchanging vectors this one stores.
    const int first_part = lane % 4 / kExchanging * kExchanging * 2;
    const int x = tile.x + lane % kExchanging * kRingColumns;
    const long long first = tile.eight * p_.y_eight + first_part * p_.y_part +
                            (static_cast<long long>(channel) * p_.y_plane + y * p_.out_w + x);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const bool is_channel = channel + 8 * upper < p_.out_channels;
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        bool exists[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int part = first_part + 2 * (i % kExchanging) + odd;
          exists[i] = is_channel && x + ColumnOf(i) < p_.out_w && part < tile.parts &&
                      y < (part + 1 < p_.parts ? p_.out_h : p_.last_rows);
        }
        StoreRun(first + odd * p_.y_part + static_cast<long long>(8 * upper) * p_.y_plane, exists, 2 * upper + odd,
                 biases[upper]);
      }
    }
    // Behind code in which threads part, the compiler else lets products wait for each other.
    WaitAtBarrier(2 + static_cast<int>(threadIdx.x) / 32, 32);
  }

  // Of vector i after an exchange, counted from the lane's first column; and where it lies behind that.
  static __device__ __forceinline__ constexpr int ColumnOf(int i) {
    return i / kExchanging * kExchanging * kRingColumns;
  }
  __device__ __forceinline__ long long OffsetOf(int i) const { return i % kExchanging * (2 * p_.y_part) + ColumnOf(i); }

  // Of the sums `which` of each position.
  __device__ __forceinline__ void StoreRun(long long at, const bool (&exists)[kVectors], int which, float bias) const {
    const Epilogue& e = p_.epilogue;
    Vectors run = {};
    if (e.residual != nullptr) {
      const Half* from = static_cast<const Half*>(e.residual) + at;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!exists[i]) continue;
        const uint4 words = LoadOnce(reinterpret_cast<const uint4*>(from + OffsetOf(i)));
        run[i][0] = words.x, run[i][1] = words.y, run[i][2] = words.z, run[i][3] = words.w;
      }
      Exchange(run);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Floats<kRingColumns> sums;
#pragma unroll
      for (int k = 0; k < kRingColumns; ++k) sums.at[k] = sums_[4 * (kRingColumns * i + k) + which] + bias;
      if (e.residual != nullptr) {
#pragma unroll
        for (int k = 0; k < kRingColumns; ++k) {
          sums.at[k] += ToFloat(k % 2 == 0 ? Lower(run[i][k / 2]) : Upper(run[i][k / 2]));
        }
      }
      if (!IsBound(e.activation)) sums = ActivateElsewhere<Half>(e.activation, sums, e.alpha, e.beta);
#pragma unroll
      for (int k = 0; k < 4; ++k) run[i][k] = Bounded<Half>(e.bounds, sums.at + 2 * k);
    }
    Exchange(run);
    Half* to = static_cast<Half*>(p_.y) + at;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!exists[i]) continue;
      StoreOnce(reinterpret_cast<uint4*>(to + OffsetOf(i)), uint4{run[i][0], run[i][1], run[i][2], run[i][3]});
    }
  }

  // Of the thread's channels, the same for all tiles.
  __device__ __forceinline__ float BiasOf(int upper) const {
    const auto* bias = static_cast<const Half*>(p_.epilogue.bias);
    const int channel = RowTile() * kRows + static_cast<int>(threadIdx.x % 128 / 32) * 16 + Lane() / 4 + 8 * upper;
    return bias != nullptr && channel < p_.out_channels ? LoadElement(bias + channel) : 0.0f;
  }

  const RingParams& p_;
  const Shared ring_;
  const unsigned row_bytes_;
  const Shared weight_;
  float sums_[4 * kPositions];
};

}  // namespace sparseconv::cuda
