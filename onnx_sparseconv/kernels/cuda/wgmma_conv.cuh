// Sparse convolution by warpgroups of sparse tensor cores (float16, sm_90a).
//
// As in tensor_conv.cuh, weights without structure become 2:4 by another order of what is summed, and the input is
// staged as pixels of 8 images. Here two whole matrices are read from shared memory by the tensor cores themselves
// (wgmma.mma_async.sp): they find eight columns in 128 contiguous bytes. So a pixel holds the 8 images of 32 channels,
// 32 columns are the same tap of 32 channels, and what the host (wgmma_weight.cc) chooses is the order of the channels:
// four neighbours are such that hardly a row has three non-zeros among them, for any tap. Channels that are left with
// non-zeros come once more.
//
// Each block has an order of channels of its own, so blocks share nothing that is staged: what turns columns of images
// into images of columns is done again for each 64 outputs. Where that is often, X is interleaved before
// (kIsInterleaved, interleave.cuh), and staging is copies of 16 bytes.
//
// A warpgroup computes 64 output channels at kPositions neighbouring pixels of 8 images; its sums stay in registers, as
// floats. Two multiply, the third stages. Positions go on from a row of outputs to the next one: what lies
// between, where a row ends, is computed and dropped.
#pragma once

#include "tensor_tile.cuh"

namespace sparseconv::cuda {

template <int kPositions, bool kIsInterleaved>
class WgmmaConv : private TensorTile<WgmmaConv<kPositions, kIsInterleaved>> {
  using Base = TensorTile<WgmmaConv>;
  friend Base;

 public:
  __device__ __forceinline__ WgmmaConv(const WgmmaParams& params, const void* shared)
      : Base(params.tile, shared), p_(params) {}

  __device__ __forceinline__ void Run() {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < t_.num_stages; ++stage) {
        InitBarrier(Filled(stage), kWgmmaThreads - kWgmmaProductThreads);
        InitBarrier(Emptied(stage), kWgmmaProductThreads / 32);
      }
      FenceBarrierInit();
    }
    __syncthreads();
    const Tile tile = this->TileAt(static_cast<int>(blockIdx.x));
    const unsigned* begins = p_.block_begins + tile.group * t_.row_blocks_per_group + tile.first_row_tile / t_.warps_m;
    first_chunk_ = static_cast<int>(begins[0]);
    num_chunks_ = static_cast<int>(begins[1]) - first_chunk_;
    if (!IsProductWarp()) {
      if constexpr (kIsInterleaved) {
        StageInterleaved(tile);
      } else {
        this->Stage(tile);
      }
    } else {
      Multiply(tile);
    }
    __syncthreads();  // nobody reads stages any more
    this->Finish(tile);
  }

 private:
  using Base::Lane;
  using Base::Split;
  using Base::stages_;
  using Base::t_;
  using typename Base::Position;
  using typename Base::Staging;
  using typename Base::Tile;

  static constexpr int kRows = 64;
  static constexpr int kBatches = 3;
  static constexpr unsigned kPixelBytes = kWgmmaPixelBytes;
  static constexpr unsigned kWarpgroup = 128;
  static constexpr int kStagingWarps = (kWgmmaThreads - kWgmmaProductThreads) / 32;
  static constexpr unsigned kStepsAtOnce = 9;
  // Bytes of the weight, of 64 rows and 32 columns: two of four values, and where they stand.
  static constexpr unsigned kValueBytes = 2048, kPlaceBytes = 256;
  // Matrices of 8 x 16 bytes lie in a row: in a weight's, the next one has the next columns, the one behind it the next
  // rows; in a pixel, the next one has the next channels, and in the next pixel, the next position.
  static constexpr unsigned kMatrixBytes = 128;

  // What is the same in all lanes, so that the compiler knows: products are for warps that do not part.
  template <class Value>
  static __device__ __forceinline__ Value Uniform(Value value) {
    return __shfl_sync(0xFFFFFFFFu, value, 0);
  }

  static __device__ __forceinline__ bool IsProductWarp() {
    return Uniform(threadIdx.x / 32) < kWgmmaProductThreads / 32;
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int NumChunks(const Tile&) const { return num_chunks_; }
  __device__ __forceinline__ Shared Filled(int stage) const {
    return stages_ + static_cast<unsigned>(t_.num_stages * t_.stage_bytes + p_.table_bytes + 16 * stage);
  }
  __device__ __forceinline__ Shared Emptied(int stage) const { return Filled(stage) + 8; }

  static __device__ __forceinline__ unsigned ChannelBytes() { return 16; }
  static __device__ __forceinline__ int ChunkChannels() { return kWgmmaChannels; }

  // Each lane keeps one.
  __device__ __forceinline__ void ChooseChannels(const Tile&, int chunk) {
    channel_ = p_.channels[(first_chunk_ + chunk) * kWgmmaChannels + static_cast<int>(Lane())];
  }
  __device__ __forceinline__ unsigned Channel(int, unsigned place) const {
    return static_cast<unsigned>(__shfl_sync(0xFFFFFFFFu, channel_, static_cast<int>(place)));
  }

  __device__ __forceinline__ void BeginStage(const Tile&, const Position& at, const Staging& staging) const {
    BeginStage(at, staging.first == 0);
  }
  __device__ __forceinline__ void BeginStage(const Position& at, bool is_first) const {
    if (at.round > 0) WaitForBarrier(Emptied(at.stage), (at.round - 1) % 2);
    if (!is_first) return;
    const unsigned* begins = p_.chunk_begins + first_chunk_ + at.chunk;
    const unsigned bytes = 16 * (begins[1] - begins[0]);
    ExpectBytes(Filled(at.stage), bytes);
    CopyBulkCached(this->StageAddress(at.stage) + static_cast<unsigned>(p_.input_bytes),
                   static_cast<const unsigned char*>(p_.chunks) + 16 * static_cast<size_t>(begins[0]), bytes,
                   Filled(at.stage));
  }

  __device__ __forceinline__ void EndStage(int stage) const {
    FenceSharedForTensorCores();
    Arrive(Filled(stage));
  }

  // Of an interleaved X: each warp copies a quarter of a chunk's channels, each lane a pixel of 32 at a time.
  __device__ __forceinline__ void StageInterleaved(const Tile& tile) {
    constexpr int kPlaces = kWgmmaChannels / kStagingWarps;
    const int first = static_cast<int>(threadIdx.x) - kWgmmaProductThreads;
    const int first_place = first / 32 * kPlaces;
    const int pixels = t_.in_rows * t_.in_columns;
    if (num_chunks_ > 0) ChooseChannels(tile, 0);
    PlanPixels(first, pixels);
    const auto plane = static_cast<unsigned>(p_.x_rows * p_.x_row_pixels);
    const auto eight = static_cast<long long>(tile.first_image / kTensorImages);
    const uint4* x = static_cast<const uint4*>(t_.x) +
                     (eight * t_.in_channels + tile.group * t_.group_in_channels) * plane +
                     (tile.y * t_.strides[0] * p_.x_row_pixels + tile.x / t_.tile_w * p_.x_window_columns);
    for (Position at; at.chunk < num_chunks_; this->Advance(at)) {
      unsigned planes[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) planes[i] = Channel(at.chunk, static_cast<unsigned>(first_place + i)) * plane;
      if (at.chunk + 1 < num_chunks_) ChooseChannels(tile, at.chunk + 1);  // on their way meanwhile
      BeginStage(at, first == 0);
      const Shared stage = this->StageAddress(at.stage) + static_cast<unsigned>(first_place) * ChannelBytes();
      for (int pixel = static_cast<int>(Lane()); pixel < pixels; pixel += 32) {
        unsigned offset, to;
        LoadSharedPair(PixelAddress(pixel), offset, to);
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          CopyAsync16ByLines(stage + to + static_cast<unsigned>(i) * ChannelBytes(), x + (offset + planes[i]));
        }
      }
      ArriveAfterCopies(Filled(at.stage));
    }
  }

  // Where a tile's pixels lie in a plane of X, in pixels, and in a stage, in bytes: the same for all channels.
  __device__ __forceinline__ void PlanPixels(int first, int pixels) const {
    for (int pixel = first; pixel < pixels; pixel += 32 * kStagingWarps) {
      int column;
      const int row = Split(pixel, t_.in_columns, column);
      StoreShared(PixelAddress(pixel), static_cast<unsigned>(row * p_.x_row_pixels + column));
      StoreShared(PixelAddress(pixel) + 4, this->PixelBytes(row, column));
    }
    WaitAtBarrier(1, 32 * kStagingWarps);
  }
  __device__ __forceinline__ Shared PixelAddress(int pixel) const {
    return stages_ + static_cast<unsigned>(t_.num_stages * t_.stage_bytes + 8 * pixel);
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply(const Tile& tile) {
    const unsigned group = threadIdx.x / kWarpgroup;
    const unsigned row_tile = group % static_cast<unsigned>(t_.warps_m);
    StartSums(tile, row_tile);
    const Shared first = kPixelBytes * FirstPixel();
    const unsigned values = static_cast<unsigned>(p_.input_bytes + p_.header_bytes) + row_tile * kValueBytes;
    const unsigned places =
        row_tile * kPlaceBytes + threadIdx.x % kWarpgroup / 32 * 64 + Lane() / 4 * 8 + Lane() % 2 * 4;
    const int num_chunks = Uniform(num_chunks_);
    for (Position at; at.chunk < num_chunks; this->Advance(at)) {
      WaitForBarrier(Filled(at.stage), at.round % 2);
      if constexpr (kIsInterleaved) FenceSharedForTensorCores();  // copies arrive without a thread that could
      MultiplyChunk(this->StageAddress(at.stage), first, values, places);
      if (Lane() == 0) Arrive(Emptied(at.stage));
    }
  }

  // The pixel that the warpgroup's first position reads with the first tap.
  __device__ __forceinline__ unsigned FirstPixel() const {
    int x;
    const int run = static_cast<int>(threadIdx.x / kWarpgroup) / t_.warps_m;
    const int y = Split(run, t_.tile_w / p_.run_w, x) * p_.run_lines;
    return static_cast<unsigned>(y * LinePixels() + x * p_.run_w);
  }

  // From a row of outputs to the next one.
  __device__ __forceinline__ int LinePixels() const { return t_.strides[0] * t_.strides[1] * t_.line_pitch; }

  __device__ __forceinline__ void StartSums(const Tile& tile, unsigned row_tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = (tile.first_row_tile + static_cast<int>(row_tile)) * kRows + FirstRow() + 8 * i;
      const float bias = this->BiasOf(tile, channel);
#pragma unroll
      for (int j = 0; j < kPositions; ++j) sums_[4 * j + 2 * i] = sums_[4 * j + 2 * i + 1] = bias;
    }
  }

  // Of the row tile; the thread has the row 8 behind it, too.
  static __device__ __forceinline__ int FirstRow() {
    return static_cast<int>(threadIdx.x % kWarpgroup) / 32 * 16 + static_cast<int>(Lane()) / 4;
  }

  // A tap of 32 channels for each step. The metadata of a product must stay in its register until the product is
  // complete (seen on an H200: the PTX manual says so of sums and of A alone), so each step has one of its own.
  __device__ __forceinline__ void MultiplyChunk(Shared stage, unsigned first, unsigned values, unsigned places) {
    const Shared header = stage + static_cast<unsigned>(p_.input_bytes);
    const unsigned steps = Uniform(LoadShared(header));
    const auto row_tiles = static_cast<unsigned>(t_.warps_m);
    Shared a = stage + values;
    const Shared meta = header + static_cast<unsigned>(p_.header_bytes) + steps * row_tiles * kValueBytes + places;
    for (unsigned begin = 0; begin < steps; begin += kStepsAtOnce) {
      unsigned metas[kStepsAtOnce], taps[kStepsAtOnce];
#pragma unroll
      for (unsigned i = 0; i < kStepsAtOnce; ++i) {
        const unsigned step = min(begin + i, steps - 1);
        metas[i] = LoadShared(meta + step * row_tiles * kPlaceBytes);
        taps[i] = LoadShared(header + 4 + 4 * step);
      }
      FenceSums();
#pragma unroll
      for (unsigned i = 0; i < kStepsAtOnce; ++i) {
        if (begin + i < steps) {
          const unsigned pixel = (taps[i] & 0xFFFFu) * static_cast<unsigned>(t_.line_pitch) + (taps[i] >> 16);
          MultiplySparse(sums_, MatrixDescriptor(a, kMatrixBytes, 2 * kMatrixBytes),
                         MatrixDescriptor(stage + first + pixel * kPixelBytes, kMatrixBytes, kPixelBytes), metas[i]);
          a += row_tiles * kValueBytes;
        }
      }
      CommitProducts();
      WaitForProducts<0>();
    }
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // All positions of the runs, one after the other.
  __device__ __forceinline__ int SlotOf(int y, int x) const {
    int line, column;
    const int run = Split(y, p_.run_lines, line) * (t_.tile_w / p_.run_w) + Split(x, p_.run_w, column);
    return run * kPositions + line * LinePixels() + column;
  }

  template <class Word>
  __device__ __forceinline__ void KeepSums(const Word& word) const {
    if (!IsProductWarp()) return;
    const int group = static_cast<int>(threadIdx.x / kWarpgroup);
    const int row = group % t_.warps_m * kRows + FirstRow();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Shared to = this->SumAddress(row + 8 * i, static_cast<int>(Lane()) % 4, group / t_.warps_m * kPositions);
#pragma unroll
      for (int j = 0; j < kPositions; ++j) {
        StoreShared(to + 4 * j, word(sums_[4 * j + 2 * i], sums_[4 * j + 2 * i + 1]));
      }
    }
  }

  const WgmmaParams& p_;
  int first_chunk_, num_chunks_;  // of the block
  int channel_;                   // of a staging thread
  float sums_[4 * kPositions];
};

}  // namespace sparseconv::cuda
