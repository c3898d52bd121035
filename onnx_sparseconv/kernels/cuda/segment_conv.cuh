// Sparse convolution of windows of three columns by warpgroups of sparse tensor cores (float16, sm_90a).
//
// As in pointwise_conv.cuh, the tensor cores read X as it lies in memory: eight neighbouring columns of a row, a
// *segment*, are 16 bytes that are copied to shared memory and nowhere else, in whatever order of channels the block's
// 64 output channels have. A window's rows are other rows of a ring in shared memory, but its columns begin between
// segments, where no operand may begin. So sums are moved instead of X: a warpgroup sums what each of the window's
// three columns adds at the *same* positions, and where all is summed, moves the sums of the left one by a column to
// the right, and those of the right one to the left, by way of neighbouring lanes.
//
//   y[x] = left[x - 1] + middle[x] + right[x + 1],    left[x] = sum of w[.., 0] * X[x], and so on
//
// Rows of X enter the ring, each once for all rows of outputs that read it. Nothing waits for a copy but those that
// need its row: as many are on their way as the ring has room for. A step of the weight is one tap of 32 channels, as
// in ring_conv.cuh; all of them stay in shared memory. Outputs leave by way of shared memory and the copy engine, a
// residual comes by the same way.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"
#include "row_ring.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

template <int kGroupRows, int kRowSegments>
class SegmentConv : private RowRing<SegmentConv<kGroupRows, kRowSegments>> {
 public:
  __device__ __forceinline__ SegmentConv(const SegmentParams& params, const void* shared)
      : p_(params),
        ring_(SharedAddress(shared)),
        row_bytes_(static_cast<unsigned>(kRowSegments * params.segment_bytes)),
        outputs_(ring_ + static_cast<unsigned>(params.ring_rows + kGroupRows - 1) * row_bytes_),
        weight_(outputs_ + static_cast<unsigned>(kProductWarps * kWarpRows) * kOutputPitch) {}

  __device__ __forceinline__ void Run() {
    LetNextLaunchBegin();
    Prepare();
    if (IsProductWarp()) {
      TakeRegisters<kProductRegisters>();
      Multiply();
    } else {
      GiveUpRegisters<kStagingRegisters>();
      Stage();
    }
  }

 private:
  friend class RowRing<SegmentConv<kGroupRows, kRowSegments>>;
  using Base = RowRing<SegmentConv<kGroupRows, kRowSegments>>;
  using Base::Advance;
  using Base::Release;
  using Base::WaitForRow;
  using Cursor = typename Base::Cursor;

  static constexpr int kRows = 64, kWarpRows = 16;
  static constexpr int kSegments = kRowSegments * kGroupRows;
  // Bytes from a channel's outputs to the next one's, an odd multiple of 16.
  static constexpr unsigned kOutputPitch = 16 * (kSegments | 1);
  // Of 168 for each thread.
  static constexpr int kProductRegisters = 232, kStagingRegisters = 40;
  static constexpr int kProductWarps = kSegmentWarpgroups * kWarpgroupThreads / 32;
  static constexpr int kStagingWarps = kWarpgroupThreads / 32;
  static constexpr int kColumns = 3;                           // of the window
  static constexpr int kFirstTurnBarrier = 1 + kProductWarps;  // numbered barriers: those before are warps' own
  static constexpr unsigned kPlaceBytes = 16;
  static constexpr unsigned kValueBytes = 2048, kMetaBytes = 256;  // of a step
  static constexpr unsigned kMatrixBytes = 128;
  static constexpr int kRowLanes = kRowSegments <= 4 ? 4 : kRowSegments <= 8 ? 8 : 16;  // that copy a channel's row
  static constexpr unsigned kLaneSteps = kMaxSegmentSteps / 32;
  static constexpr unsigned kBatchSteps = 2;  // of each column, whose products are on their way together
  static constexpr unsigned kNoPlane = 0xFFFFFFFFu;

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ __forceinline__ int Warp() { return static_cast<int>(Uniform(threadIdx.x / 32)); }
  static __device__ __forceinline__ bool IsProductWarp() { return Warp() < kProductWarps; }

  __device__ __forceinline__ Shared Planes() const { return weight_ + static_cast<unsigned>(p_.weight_bytes); }
  __device__ __forceinline__ int ring_rows() const { return p_.ring_rows; }
  __device__ __forceinline__ Shared Filled(int slot) const {
    return Planes() + static_cast<unsigned>(4 * p_.places + 16 * slot);
  }
  __device__ __forceinline__ Shared Emptied(int slot) const { return Filled(slot) + 8; }
  __device__ __forceinline__ Shared WeightArrived() const { return Filled(p_.ring_rows); }
  __device__ __forceinline__ Shared ResidualArrived(int warp) const {
    return WeightArrived() + static_cast<unsigned>(8 + 8 * warp);
  }

  // Of the block.
  __device__ __forceinline__ int RowTile() const { return static_cast<int>(blockIdx.x) % p_.row_tiles; }

  __device__ __forceinline__ void Prepare() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int slot = 0; slot < p_.ring_rows; ++slot) {
        InitBarrier(Filled(slot), 32 * kStagingWarps);
        InitBarrier(Emptied(slot), kProductWarps);
      }
      InitBarrier(WeightArrived(), 1);
      for (int warp = 0; warp < kProductWarps; ++warp) InitBarrier(ResidualArrived(warp), 1);
      FenceBarrierInit();
      const auto bytes = static_cast<unsigned>(p_.weight_bytes);
      ExpectBytes(WeightArrived(), bytes);
      CopyBulkCached(weight_, static_cast<const unsigned char*>(p_.weight) + static_cast<size_t>(RowTile()) * bytes,
                     bytes, WeightArrived());
      Arrive(WeightArrived());
    }
    for (int place = thread; place < p_.places; place += kSegmentThreads) {
      const int channel = p_.channels[RowTile() * p_.places + place];
      StoreShared(
          Planes() + static_cast<unsigned>(4 * place),
          channel < 0 ? kNoPlane : static_cast<unsigned>(channel) * static_cast<unsigned>(2 * p_.in_h * p_.width));
    }
    __syncthreads();
  }

  struct Tile {
    int image, y;
    int first;     // segment of outputs
    int staged;    // first segment of X
    int segments;  // of outputs
    int lines;     // rows of outputs
    int in_rows;   // of X
  };

  // A tile stages the segments of its outputs, and one on each side where there is one; behind a row there are zeros.
  __device__ __forceinline__ Tile TileAt(int index) const {
    const int row_segments = p_.width / kSegmentPositions;
    Tile tile;
    int rest = index / p_.row_tiles;
    tile.first = rest % p_.tiles_x * p_.tile_segments;
    rest /= p_.tiles_x;
    tile.y = rest % p_.tiles_y * p_.tile_rows;
    tile.image = rest / p_.tiles_y;
    tile.staged = max(tile.first - 1, 0);
    tile.segments = min(p_.tile_segments, row_segments - tile.first);
    tile.lines = min(p_.tile_rows, p_.out_h - tile.y);
    tile.in_rows = tile.lines - 1 + p_.window_rows;
    return tile;
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  // Neighbouring lanes copy neighbouring segments of a channel, a warp those of several channels at once.
  __device__ __forceinline__ void Stage() const {
    constexpr int kShares = 32 / kRowLanes;
    const int segment = Lane() % kRowLanes, count = p_.places / (kStagingWarps * kShares);
    const int first_place = ((Warp() - kProductWarps) * kShares + Lane() / kRowLanes) * count;
    const Shared planes = Planes() + static_cast<unsigned>(4 * first_place);
    const Shared to =
        ring_ + static_cast<unsigned>(segment * p_.segment_bytes) + static_cast<unsigned>(first_place) * kPlaceBytes;
    const int row_bytes = 2 * p_.width;
    WaitForLaunchBefore();
    Cursor at;
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      const Tile tile = TileAt(index);
      const bool is_column = tile.staged + segment < p_.width / kSegmentPositions;
      const unsigned char* x =
          static_cast<const unsigned char*>(p_.x) +
          static_cast<long long>(tile.image) * p_.in_channels * (static_cast<long long>(p_.in_h) * row_bytes) +
          (is_column ? (tile.staged + segment) * static_cast<int>(kPlaceBytes) : 0);
      for (int row = 0; row < tile.in_rows; ++row, Advance(at)) {
        if (at.row >= p_.ring_rows) WaitForBarrier(Emptied(at.slot), at.parity ^ 1);
        const int y = tile.y - p_.pad_top + row;
        const bool exists = is_column && static_cast<unsigned>(y) < static_cast<unsigned>(p_.in_h);
        const unsigned char* from = x + (exists ? y * row_bytes : 0);
        if (segment < kRowSegments) {
          StageRow(to + static_cast<unsigned>(at.slot) * row_bytes_, from, planes, count, exists);
          if (at.slot < kGroupRows - 1) {
            StageRow(to + static_cast<unsigned>(at.slot + p_.ring_rows) * row_bytes_, from, planes, count, exists);
          }
        }
        ArriveAfterCopies(Filled(at.slot));
      }
    }
  }

  static __device__ __forceinline__ void StageRow(Shared to, const unsigned char* from, Shared planes, int count,
                                                  bool is_inside) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const unsigned plane = LoadShared(planes + static_cast<unsigned>(4 * i));
      const bool exists = is_inside && plane != kNoPlane;
      CopyAsync16OrZeros(to + static_cast<unsigned>(i) * kPlaceBytes, from + (exists ? plane : 0), exists);
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
    const unsigned steps = Uniform(LoadShared(weight_));
    unsigned begins[kColumns + 1] = {0, 0, 0, steps};
    for (unsigned i = 0; i < steps; ++i) {
      const unsigned column = LoadShared(weight_ + 4 + 4 * i) >> 16 & 0xFFu;
      if (column < 1) ++begins[1];
      if (column < 2) ++begins[2];
    }
    begins[1] = Uniform(begins[1]);
    begins[2] = Uniform(begins[2]);
    const float biases[2] = {BiasOf(0), BiasOf(1)};
    const auto warpgroup = static_cast<int>(Uniform(threadIdx.x / kWarpgroupThreads));
    constexpr int step = kSegmentWarpgroups * kGroupRows;
    if (warpgroup == 1) PassTurn(warpgroup, false);
    Cursor filled, released;
    unsigned parity = 0;  // of the residual's barrier
    int first = 0;        // row of the stream at which the tile begins
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      const Tile tile = TileAt(index);
      for (int begin = 0; begin < tile.lines; begin += step) {
        const bool is_last = begin + step >= tile.lines && index + static_cast<int>(gridDim.x) >= p_.num_tiles;
        const int line = begin + warpgroup * kGroupRows;
        if (line >= tile.lines) {
          WaitForTurn(warpgroup);
          PassTurn(warpgroup, is_last);
          continue;
        }
        const Group group{line, min(kGroupRows, tile.lines - line)};
        if (p_.epilogue.residual != nullptr) FetchResidual(tile, group);
        Release(first + line, filled, released);
        while (filled.row < first + line + group.lines - 1 + p_.window_rows) WaitForRow(filled);
        FenceSharedForTensorCores();  // copies arrive without a thread that could
        WaitForTurn(warpgroup);
        MultiplyGroup(released.slot, begins);
        PassTurn(warpgroup, is_last);
        WaitForProducts<0>();
        // What is filled and was read for the last time is free before outputs are stored.
        const int next = line + step < tile.lines ? first + line + step : first + tile.in_rows;
        Release(min(next, filled.row), filled, released);
        StoreGroup(tile, group, biases, parity);
        parity ^= 1;
      }
      first += tile.in_rows;
      Release(first, filled, released);
    }
    WaitForBulkReads();
  }

  // The warpgroups take turns at the tensor cores. Else both would multiply at the same time, and then both store.
  static __device__ __forceinline__ void WaitForTurn(int warpgroup) {
    WaitAtBarrier(kFirstTurnBarrier + warpgroup, 2 * kWarpgroupThreads);
  }
  // To the other one. The first takes no turn after the last one of all.
  static __device__ __forceinline__ void PassTurn(int warpgroup, bool is_last) {
    if (warpgroup == 0 || !is_last) ArriveAtBarrier(kFirstTurnBarrier + 1 - warpgroup, 2 * kWarpgroupThreads);
  }

  // A batch is always on its way while what the next one needs is loaded. Metadata of a product must stay in its
  // register until that is complete; see wgmma_conv.cuh. So there are two sets of it. Within a batch there are no
  // branches, else the compiler has each product wait for the one before; steps that only some columns have come last.
  __device__ __forceinline__ void MultiplyGroup(int slot, const unsigned (&begins)[kColumns + 1]) {
    const unsigned steps = begins[kColumns];
    const Shared values = weight_ + static_cast<unsigned>(p_.header_bytes);
    const Shared meta = values + steps * kValueBytes + threadIdx.x % kWarpgroupThreads / 32 * 64 +
                        static_cast<unsigned>(Lane() / 4 * 8 + Lane() % 2 * 4);
    const Matrix a = MatrixAt(Uniform(values), kMatrixBytes, 2 * kMatrixBytes);
    // Each lane knows where the segments of some steps lie.
    Shared inputs[kLaneSteps];
#pragma unroll
    for (unsigned i = 0; i < kLaneSteps; ++i) {
      inputs[i] = InputOf(min(static_cast<unsigned>(Lane()) + 32 * i, steps - 1), slot);
    }
    unsigned least = steps, most = 0;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      least = min(least, begins[column + 1] - begins[column]);
      most = max(most, begins[column + 1] - begins[column]);
    }
    unsigned metas[2][kBatchSteps][kColumns] = {};
    const unsigned batched = least - least % kBatchSteps;
    for (unsigned begin = 0; begin < batched; begin += 2 * kBatchSteps) {
#pragma unroll
      for (unsigned part = 0; part < 2; ++part) {
        const unsigned first = begin + part * kBatchSteps;
        if (first >= batched) break;
        Shared from[kBatchSteps][kColumns];
#pragma unroll
        for (unsigned i = 0; i < kBatchSteps; ++i) {
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            const unsigned step = begins[column] + first + i;
            LoadSharedIf(steps, metas[part][i][column], meta + step * kMetaBytes);
            from[i][column] = OfStep(inputs, step);
          }
        }
        FenceSums();
#pragma unroll
        for (unsigned i = 0; i < kBatchSteps; ++i) {
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            MultiplySparse(sums_[column], Moved(a, (begins[column] + first + i) * kValueBytes),
                           InputAt(from[i][column]), metas[part][i][column], first + i > 0);
          }
        }
        CommitProducts();
        WaitForProducts<1>();
      }
    }
    if (batched < most) WaitForProducts<0>();
    for (unsigned at = batched; at < most; ++at) {
      Shared from[kColumns];
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        const unsigned step = min(begins[column] + at, steps - 1);
        LoadSharedIf(steps, metas[0][0][column], meta + step * kMetaBytes);
        from[column] = OfStep(inputs, step);
      }
      FenceSums();
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        const unsigned step = begins[column] + at;
        if (step < begins[column + 1]) {
          MultiplySparse(sums_[column], Moved(a, step * kValueBytes), InputAt(from[column]), metas[0][0][column],
                         at > 0);
        }
      }
      CommitProducts();
      WaitForProducts<0>();
    }
  }

  // Where the first segment of a step's channels lies, in the row that it reads.
  __device__ __forceinline__ Shared InputOf(unsigned step, int slot) const {
    const unsigned word = LoadShared(weight_ + 4 + 4 * step);
    int row = slot + static_cast<int>(word >> 24);
    if (row >= p_.ring_rows) row -= p_.ring_rows;
    return ring_ + static_cast<unsigned>(row) * row_bytes_ + (word & 0xFFFFu) * kPlaceBytes;
  }

  static __device__ __forceinline__ Shared OfStep(const Shared (&inputs)[kLaneSteps], unsigned step) {
    Shared input = inputs[0];
#pragma unroll
    for (unsigned i = 1; i < kLaneSteps; ++i) {
      if (step >= 32 * i) input = inputs[i];
    }
    return __shfl_sync(0xFFFFFFFFu, input, static_cast<int>(step % 32));
  }

  __device__ __forceinline__ Matrix InputAt(Shared first) const {
    return MatrixAt(first, kMatrixBytes, static_cast<unsigned>(p_.segment_bytes));
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int FirstChannel() const {
    return RowTile() * kRows + static_cast<int>(threadIdx.x % kWarpgroupThreads / 32) * kWarpRows;
  }
  __device__ __forceinline__ Shared Outputs() const {
    return outputs_ + static_cast<unsigned>(Warp() * kWarpRows) * kOutputPitch;
  }

  // Calls move(element of Y, shared memory, bytes) for what lies together of a group's outputs. A warp has 16 channels;
  // each of its first 16 lanes moves those of one.
  template <class Move>
  __device__ __forceinline__ void ForRuns(const Tile& tile, const Group& group, const Move& move) const {
    const int channel = FirstChannel() + Lane();
    Shared shared = Outputs() + static_cast<unsigned>(Lane()) * kOutputPitch +
                    static_cast<unsigned>(tile.first - tile.staged) * kPlaceBytes;
    if (Lane() >= kWarpRows || channel >= p_.out_channels) return;
    long long at =
        ((static_cast<long long>(tile.image) * p_.out_channels + channel) * p_.out_h + tile.y + group.line) * p_.width +
        tile.first * kSegmentPositions;
    const bool is_whole = kGroupRows == 1 || tile.segments == kRowSegments;
    const int runs = is_whole ? 1 : group.lines;
    const unsigned bytes = static_cast<unsigned>((is_whole ? group.lines : 1) * tile.segments) * kPlaceBytes;
    for (int run = 0; run < runs; ++run, at += p_.width, shared += kRowSegments * kPlaceBytes) move(at, shared, bytes);
  }

  // A residual comes to where the last outputs have left.
  __device__ __forceinline__ void FetchResidual(const Tile& tile, const Group& group) const {
    WaitForBulkReads();
    WaitForWarp();
    const Shared barrier = ResidualArrived(Warp());
    if (Lane() == 0) {
      const int channels = min(max(p_.out_channels - FirstChannel(), 0), kWarpRows);
      if (channels > 0) {
        ExpectBytes(barrier, static_cast<unsigned>(channels * group.lines * tile.segments) * kPlaceBytes);
      }
      Arrive(barrier);
    }
    WaitForWarp();
    const auto* residual = static_cast<const Half*>(p_.epilogue.residual);
    ForRuns(tile, group,
            [&](long long at, Shared shared, unsigned bytes) { CopyBulk(shared, residual + at, bytes, barrier); });
  }

  // Finishes outputs, and sends them off.
  __device__ __forceinline__ void StoreGroup(const Tile& tile, const Group& group, const float (&biases)[2],
                                             unsigned parity) const {
    WaitForBulkReads();
    WaitForWarp();
    if (p_.epilogue.residual != nullptr) WaitForBarrier(ResidualArrived(Warp()), parity);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) KeepRow(upper, biases[upper]);
    FenceSharedForTensorCores();  // and the copy engine
    WaitForWarp();
    auto* y = static_cast<Half*>(p_.y);
    ForRuns(tile, group, [&](long long at, Shared shared, unsigned bytes) { StoreBulk(y + at, shared, bytes); });
    CommitBulkStores();
    // Behind code in which threads part, the compiler else lets products wait for each other.
    WaitForWarp();
  }

  __device__ __forceinline__ void WaitForWarp() const { WaitAtBarrier(1 + static_cast<int>(threadIdx.x) / 32, 32); }

  // What the lane `distance` further of the same four has.
  static __device__ __forceinline__ float FromLane(float value, int distance) {
    return ShuffledHere(value, (Lane() & ~3) | ((Lane() + distance) & 3));
  }

  // The outputs of one of the thread's two channels: two neighbours of each segment.
  __device__ __forceinline__ void KeepRow(int upper, float bias) const {
    const Epilogue& e = p_.epilogue;
    const Half2 least = e.activation == kRelu ? 0u : kTwiceMinusInfinity;
    const bool is_first = Lane() % 4 == 0, is_last = Lane() % 4 == 3;
    const Shared to = Outputs() + static_cast<unsigned>(Lane() / 4 + 8 * upper) * kOutputPitch +
                      static_cast<unsigned>(Lane() % 4 * 4);
    constexpr int kAtOnce = 4;  // segments
    float left_before = 0.0f, right = FromLane(sums_[2][2 * upper], 1);
#pragma unroll
    for (int first = 0; first < kSegments; first += kAtOnce) {
      Floats<2 * kAtOnce> outputs;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int segment = first + i, sum = 4 * segment + 2 * upper;
        if (segment >= kSegments) {
          outputs.at[2 * i] = outputs.at[2 * i + 1] = 0.0f;
          continue;
        }
        // Beyond a row's ends there is nothing.
        const float before = segment % kRowSegments == 0 ? 0.0f : left_before;
        const float left = FromLane(sums_[0][sum + 1], 3);
        const float right_behind = segment + 1 < kSegments ? FromLane(sums_[2][sum + 4], 1) : 0.0f;
        const float behind = segment % kRowSegments == kRowSegments - 1 ? 0.0f : right_behind;
        outputs.at[2 * i] = sums_[1][sum] + sums_[2][sum + 1] + (is_first ? before : left);
        outputs.at[2 * i + 1] = sums_[1][sum + 1] + sums_[0][sum] + (is_last ? behind : right);
        left_before = left;
        right = right_behind;
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) outputs.at[i] += bias;
      if (e.residual != nullptr) {
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kSegments; ++i) {
          const Half2 pair = LoadShared(to + static_cast<unsigned>(first + i) * kPlaceBytes);
          outputs.at[2 * i] += ToFloat(Lower(pair));
          outputs.at[2 * i + 1] += ToFloat(Upper(pair));
        }
      }
      if (e.activation != kNoActivation && e.activation != kRelu) {
        outputs = ActivateElsewhere(e.activation, outputs, e.alpha, e.beta);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce && first + i < kSegments; ++i) {
        StoreShared(to + static_cast<unsigned>(first + i) * kPlaceBytes,
                    AtLeast(least, ToHalves(outputs.at[2 * i], outputs.at[2 * i + 1])));
      }
    }
  }

  // Of the thread's channels, the same for all tiles.
  __device__ __forceinline__ float BiasOf(int upper) const {
    const auto* bias = static_cast<const Half*>(p_.epilogue.bias);
    const int channel = FirstChannel() + Lane() / 4 + 8 * upper;
    return bias != nullptr && channel < p_.out_channels ? LoadElement(bias + channel) : 0.0f;
  }

  const SegmentParams& p_;
  const Shared ring_;
  const unsigned row_bytes_;
  const Shared outputs_, weight_;
  float sums_[kColumns][4 * kSegments];
};

}  // namespace sparseconv::cuda
