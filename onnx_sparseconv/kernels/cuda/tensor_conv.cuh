// Sparse convolution on the sparse tensor cores (float16, sm_80 and later).
//
// A tensor core multiplies a matrix with at most two non-zeros in every four of a row (2:4) by a dense one, at up to
// twice the rate of two dense matrices. Weights pruned without structure are not of this form, but the product does not
// care in which order the columns come: the host (tensor_weight.cc) sorts the columns (channel, tap) of a tile of
// output channels such that hardly a row has more than two non-zeros in four neighbours, leaves out columns that the
// whole tile has no weight in, and gives what is left over further columns. Columns can be read in any order since the
// input is not lowered: it is staged in shared memory as [channel][row][column][8 images], so what column (c, r, s) of
// the lowered matrix holds for one position and 8 images are 16 contiguous bytes, at the position's address plus an
// offset that belongs to the column. ldmatrix gathers 32 of those.
//
// A product warp computes kSubtiles * 16 output channels at kPositions neighbouring positions of 8 images; its sums
// stay in registers, as floats. The product warps of a block share the staged input and weights, which the other warps
// bring: input channels come in chunks, two stages.
#pragma once

#include "tensor_tile.cuh"

namespace sparseconv::cuda {

template <int kSubtiles, int kPositions>
class TensorConv : private TensorTile<TensorConv<kSubtiles, kPositions>> {
  using Base = TensorTile<TensorConv>;
  friend Base;

 public:
  __device__ __forceinline__ TensorConv(const TensorParams& params, const void* shared)
      : Base(params.tile, shared), p_(params) {}

  __device__ __forceinline__ void Run() {
    const Tile tile = this->TileAt(static_cast<int>(blockIdx.x));
    if (Base::Warp() < t_.product_warps) {
      Multiply(tile);
    } else {
      this->Stage(tile);
    }
    __syncthreads();
    this->Finish(tile);
  }

 private:
  using Base::Lane;
  using Base::Split;
  using Base::stages_;
  using Base::t_;
  using Base::Warp;
  using typename Base::Position;
  using typename Base::Staging;
  using typename Base::Tile;

  static constexpr int kStepBytes = 512 * (kSubtiles + 1);
  static constexpr int kRows = 16 * kSubtiles;
  static constexpr int kBatches = 2;
  static constexpr unsigned kPixelBytes = 16;

  // --- staging ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ unsigned ChannelBytes() const {
    return kPixelBytes * static_cast<unsigned>(p_.channel_pitch);
  }
  __device__ __forceinline__ int NumChunks(const Tile&) const { return p_.num_chunks; }
  __device__ __forceinline__ void ChooseChannels(const Tile&, int) const {}
  __device__ __forceinline__ int ChunkChannels() const { return p_.chunk_channels; }
  // The last chunk may have fewer; what stands at the other places is not read.
  __device__ __forceinline__ unsigned Channel(int chunk, unsigned place) const {
    return min(static_cast<unsigned>(chunk * p_.chunk_channels) + place,
               static_cast<unsigned>(t_.group_in_channels - 1));
  }
  // The steps of a row tile of the block, behind the input.
  __device__ __forceinline__ Shared StepAddress(int stage, int row_tile) const {
    return this->StageAddress(stage) + static_cast<unsigned>(p_.input_bytes + row_tile * p_.max_steps * kStepBytes);
  }
  // Where the steps of each chunk begin.
  __device__ __forceinline__ const unsigned* StepBegins(const Tile& tile, int row_tile) const {
    return p_.step_begins + (tile.group * t_.row_tiles_per_group + row_tile) * (p_.num_chunks + 1);
  }

  // Named barriers, two for each stage: that it was filled, and that it may be filled again.
  static __device__ __forceinline__ int FilledBarrier(int stage) { return 1 + stage; }
  static __device__ __forceinline__ int FreeBarrier(int stage) { return 3 + stage; }

  __device__ __forceinline__ void BeginStage(const Tile& tile, const Position& at, const Staging& staging) const {
    if (at.round > 0) WaitAtBarrier(FreeBarrier(at.stage), blockDim.x);
    StageSteps(tile, at, staging);
  }

  __device__ __forceinline__ void EndStage(int stage) const {
    WaitForCopies<0>();
    ArriveAtBarrier(FilledBarrier(stage), blockDim.x);
  }

  __device__ __forceinline__ void StageSteps(const Tile& tile, const Position& at, const Staging& staging) const {
    for (int i = 0; i < t_.warps_m && tile.first_row_tile + i < t_.row_tiles_per_group; ++i) {
      const unsigned* begins = StepBegins(tile, tile.first_row_tile + i) + at.chunk;
      const unsigned bytes = (begins[1] - begins[0]) * kStepBytes;
      const unsigned char* from =
          static_cast<const unsigned char*>(p_.steps) + static_cast<size_t>(begins[0]) * kStepBytes;
      const Shared to = StepAddress(at.stage, i);
      const unsigned stride = static_cast<unsigned>(staging.threads) * 16;
      for (unsigned byte = static_cast<unsigned>(staging.first) * 16; byte < bytes; byte += stride) {
        CopyAsync16Cached(to + byte, from + byte);
      }
    }
    CommitCopies();
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply(const Tile& tile) {
    const int row_tile = tile.first_row_tile + Warp() % t_.warps_m;
    const bool is_active = row_tile < t_.row_tiles_per_group;
    int x;
    const int y = Split(Warp() / t_.warps_m, t_.tile_w / kPositions, x);
    const unsigned first =
        16u * static_cast<unsigned>(y * t_.strides[0] * t_.strides[1] * t_.line_pitch + x * kPositions);
    StartSums(tile, row_tile);
    Position at;
    for (; at.chunk < p_.num_chunks; this->Advance(at)) {
      const unsigned* begins = StepBegins(tile, is_active ? row_tile : 0) + at.chunk;
      const unsigned steps = is_active ? begins[1] - begins[0] : 0;
      WaitAtBarrier(FilledBarrier(at.stage), blockDim.x);
      MultiplyChunk(this->StageAddress(at.stage) + first, StepAddress(at.stage, Warp() % t_.warps_m) + Lane() * 16,
                    steps);
      if (at.chunk + 2 < p_.num_chunks) ArriveAtBarrier(FreeBarrier(at.stage), blockDim.x);
    }
  }

  __device__ __forceinline__ void StartSums(const Tile& tile, int row_tile) {
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = row_tile * kRows + m * 16 + static_cast<int>(Lane()) / 4 + 8 * i;
        const float bias = this->BiasOf(tile, channel);
#pragma unroll
        for (int j = 0; j < kPositions; ++j) sums_[m][j][2 * i] = sums_[m][j][2 * i + 1] = bias;
      }
    }
  }

  // Where a column begins, in bytes from position (0, 0).
  __device__ __forceinline__ unsigned Offset(unsigned column) const {
    const unsigned channel = column & 0xFFFu, line = column >> 12 & 0x3FFu, place = column >> 22;
    return 16u *
           (channel * static_cast<unsigned>(p_.channel_pitch) + line * static_cast<unsigned>(t_.line_pitch) + place);
  }

  // The steps of a chunk, each of 32 columns, for the warp's positions, the first of which reads `input`.
  __device__ __forceinline__ void MultiplyChunk(Shared input, Shared step, unsigned steps) {
#pragma unroll 1
    for (unsigned i = 0; i < steps; ++i, step += kStepBytes) {
      const uint4 words = LoadSharedVector(step + kSubtiles * 512);
      uint4 values[kSubtiles];
#pragma unroll
      for (int m = 0; m < kSubtiles; ++m) values[m] = LoadSharedVector(step + m * 512);
      const Shared from = input + Offset(words.z);
      unsigned inputs[2][4];
      LoadMatrices(from, inputs[0]);
#pragma unroll
      for (int j = 0; j < kPositions; ++j) {
        if (j + 1 < kPositions) LoadMatrices(from + 16 * (j + 1), inputs[(j + 1) % 2]);
#pragma unroll
        for (int m = 0; m < kSubtiles; ++m) {
          const unsigned meta = m < 2 ? words.x : words.y;
          if (m % 2 == 0) {
            MultiplySparse<0>(sums_[m][j], values[m], inputs[j % 2], meta);
          } else {
            MultiplySparse<1>(sums_[m][j], values[m], inputs[j % 2], meta);
          }
        }
      }
    }
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int SlotOf(int y, int x) const { return y * t_.tile_w + x; }

  template <class Word>
  __device__ __forceinline__ void KeepSums(const Word& word) const {
    if (Warp() >= t_.product_warps) return;
    const int first_row = Warp() % t_.warps_m * kRows + static_cast<int>(Lane()) / 4;
    const int first_slot = Warp() / t_.warps_m * kPositions;
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Shared to = this->SumAddress(first_row + m * 16 + 8 * i, static_cast<int>(Lane()) % 4, first_slot);
#pragma unroll
        for (int j = 0; j < kPositions; ++j) {
          StoreShared(to + 4 * j, word(sums_[m][j][2 * i], sums_[m][j][2 * i + 1]));
        }
      }
    }
  }

  const TensorParams& p_;
  float sums_[kSubtiles][kPositions][4];
};

}  // namespace sparseconv::cuda
