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

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

template <int kSubtiles, int kPositions>
class TensorConv {
 public:
  __device__ __forceinline__ TensorConv(const TensorParams& params, const void* shared)
      : p_(params), stages_(SharedAddress(shared)) {}

  __device__ __forceinline__ void Run() {
    const Tile tile = TileAt(static_cast<int>(blockIdx.x));
    if (Warp() < p_.product_warps) {
      Multiply(tile);
    } else if (p_.is_x_paired) {
      Stage<true>(tile);
    } else {
      Stage<false>(tile);
    }
    __syncthreads();
    Finish(tile);
  }

 private:
  static constexpr int kStepBytes = 512 * (kSubtiles + 1);
  static constexpr int kRows = 16 * kSubtiles;
  static constexpr int kImagePairs = kTensorImages / 2;
  // Low bits of a unit's target: which of its columns are needed, and whether they lie in the input or in the padding.
  static constexpr unsigned kHasLeft = 1, kHasRight = 2, kIsInside = 4;

  // Outputs that a block computes at a time.
  struct Tile {
    int first_image, images;  // 8, but for the last ones
    int group, first_row_tile;
    int y, x;
  };

  // One or two neighbouring columns of an input row, of one channel and all images, on their way to shared memory.
  struct Unit {
    unsigned words[kTensorImages];
    unsigned target;  // of the left column, in bytes from the stage's begin, and flags
  };

  static __device__ __forceinline__ int Warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ unsigned Lane() { return threadIdx.x % 32; }

  static __device__ __forceinline__ int Split(int dividend, int divisor, int& remainder) {
    const int quotient = dividend / divisor;
    remainder = dividend - quotient * divisor;
    return quotient;
  }

  __device__ __forceinline__ Tile TileAt(int index) const {
    Tile tile;
    int row_block, x, y;
    index = Split(index, p_.row_blocks, row_block);
    index = Split(index, p_.tiles_x, x);
    tile.first_image = Split(index, p_.tiles_y, y) * kTensorImages;
    tile.images = min(p_.batch - tile.first_image, kTensorImages);
    tile.group = Split(row_block, p_.row_blocks_per_group, tile.first_row_tile);
    tile.first_row_tile *= p_.warps_m;
    tile.y = y * p_.tile_h;
    tile.x = x * p_.tile_w;
    return tile;
  }

  __device__ __forceinline__ Shared StageAddress(int chunk) const {
    return stages_ + (chunk % 2 == 0 ? 0u : static_cast<unsigned>(p_.stage_bytes));
  }
  // The steps of a row tile of the block, behind the input.
  __device__ __forceinline__ Shared StepAddress(int chunk, int row_tile) const {
    return StageAddress(chunk) + static_cast<unsigned>(p_.input_bytes + row_tile * p_.max_steps * kStepBytes);
  }
  __device__ __forceinline__ Shared UnitAddress(int unit) const {
    return stages_ + 2u * static_cast<unsigned>(p_.stage_bytes) + 8u * static_cast<unsigned>(unit);
  }
  // Where the steps of each chunk begin.
  __device__ __forceinline__ const unsigned* StepBegins(const Tile& tile, int row_tile) const {
    return p_.step_begins + (tile.group * p_.row_tiles_per_group + row_tile) * (p_.num_chunks + 1);
  }

  // Named barriers, two for each stage: that it was filled, and that it may be filled again.
  static __device__ __forceinline__ int FilledBarrier(int chunk) { return 1 + chunk % 2; }
  static __device__ __forceinline__ int FreeBarrier(int chunk) { return 3 + chunk % 2; }

  // --- staging ------------------------------------------------------------------------------------------------------

  // The units that a thread has on their way.
  struct Batch {
    Unit units[kTensorUnits];
  };

  // Where a staging thread stands: at a batch of a chunk.
  struct Cursor {
    int chunk, batch;
  };

  // What the staging threads share.
  struct Staging {
    const Half* input;  // the first channel of the tile's group and first image
    long long image;    // elements
    unsigned plane;     // elements
    int images;
    int first, threads;
  };

  // kPaired: units are pairs of columns. Each thread loads a batch while the one before it is stored, whether its stage
  // is free or not.
  template <bool kPaired>
  __device__ __forceinline__ void Stage(const Tile& tile) const {
    Staging staging;
    staging.first = static_cast<int>(threadIdx.x) - 32 * p_.product_warps;
    staging.threads = static_cast<int>(blockDim.x) - 32 * p_.product_warps;
    staging.plane = static_cast<unsigned>(p_.in_h * p_.in_w);
    staging.image = static_cast<long long>(p_.in_channels) * staging.plane;
    staging.images = tile.images;
    staging.input = static_cast<const Half*>(p_.x) + tile.first_image * staging.image +
                    static_cast<long long>(tile.group * p_.group_in_channels) * staging.plane;
    PlanUnits<kPaired>(tile, staging.first, staging.threads);
    const int num_batches = p_.num_chunks * p_.chunk_batches;
    Cursor loaded{0, 0}, stored{0, 0};
    Batch even, odd;
    LoadBatch<kPaired>(staging, loaded, even);
    for (int batch = 0; batch < num_batches; batch += 2) {
      if (batch + 1 < num_batches) LoadBatch<kPaired>(staging, loaded, odd);
      StoreBatch<kPaired>(tile, staging, stored, even);
      if (batch + 1 == num_batches) break;
      if (batch + 2 < num_batches) LoadBatch<kPaired>(staging, loaded, even);
      StoreBatch<kPaired>(tile, staging, stored, odd);
    }
  }

  __device__ __forceinline__ bool Advance(Cursor& cursor) const {
    if (++cursor.batch < p_.chunk_batches) return false;
    cursor.batch = 0;
    ++cursor.chunk;
    return true;
  }

  template <bool kPaired>
  __device__ __forceinline__ void LoadBatch(const Staging& staging, Cursor& cursor, Batch& batch) const {
    const unsigned begin = static_cast<unsigned>(cursor.chunk * p_.chunk_channels) * staging.plane;
    const int unit = staging.first + cursor.batch * kTensorUnits * staging.threads;
#pragma unroll
    for (int i = 0; i < kTensorUnits; ++i) {
      Load<kPaired>(staging, unit + i * staging.threads, begin, batch.units[i]);
    }
    Advance(cursor);
  }

  // With the first batch of a stage, its steps are on their way as well; with the last one, it is filled.
  template <bool kPaired>
  __device__ __forceinline__ void StoreBatch(const Tile& tile, const Staging& staging, Cursor& cursor,
                                             const Batch& batch) const {
    const int chunk = cursor.chunk;
    if (cursor.batch == 0) {
      if (chunk >= 2) WaitAtBarrier(FreeBarrier(chunk), blockDim.x);
      StageSteps(tile, chunk, staging);
    }
#pragma unroll
    for (int i = 0; i < kTensorUnits; ++i) Store<kPaired>(batch.units[i], StageAddress(chunk));
    if (!Advance(cursor)) return;
    WaitForCopies<0>();
    ArriveAtBarrier(FilledBarrier(chunk), blockDim.x);
  }

  // Columns of a row that positions one stride apart read with the same tap are neighbours.
  __device__ __forceinline__ int PlaceOf(int column) const {
    const int stride = p_.strides[1];
    if (stride == 1) return column;
    const int quotient = (column + stride) / stride - 1;  // column is -1 at least
    return (column - quotient * stride) * p_.line_pitch + quotient;
  }

  // Where the units of a chunk lie in X, from the chunk's first channel on, and in the stage: the same for all chunks.
  // A thread only reads what it wrote itself.
  template <bool kPaired>
  __device__ __forceinline__ void PlanUnits(const Tile& tile, int first, int threads) const {
    const int first_y = tile.y * p_.strides[0] - p_.pads_begin[0];
    const int first_x = tile.x * p_.strides[1] - p_.pads_begin[1];
    for (int unit = first; unit < p_.chunk_batches * kTensorUnits * threads; unit += threads) {
      if (unit >= p_.units) {  // fills up a batch
        StoreShared(UnitAddress(unit), 0u);
        StoreShared(UnitAddress(unit) + 4, 0u);
        continue;
      }
      int pair, row;
      const int channel = Split(Split(unit, p_.row_units, pair), p_.in_rows, row);
      const int y = first_y + row;
      // Pairs begin at even columns of the input, so that one aligned load brings both.
      const int x = kPaired ? (first_x & ~1) + 2 * pair : first_x + pair;
      const int column = x - first_x;  // within the stage, -1 where the pair's left one is not needed
      unsigned target = 16u * static_cast<unsigned>(channel * p_.channel_pitch + row * p_.strides[1] * p_.line_pitch +
                                                    PlaceOf(column));
      if (column >= 0 && column < p_.in_columns) target |= kHasLeft;
      if (kPaired && column + 1 < p_.in_columns) target |= kHasRight;
      if (static_cast<unsigned>(y) < static_cast<unsigned>(p_.in_h) &&
          static_cast<unsigned>(x) < static_cast<unsigned>(p_.in_w)) {
        target |= kIsInside;
      }
      StoreShared(UnitAddress(unit), static_cast<unsigned>((channel * p_.in_h + y) * p_.in_w + x));
      StoreShared(UnitAddress(unit) + 4, target);
    }
  }

  __device__ __forceinline__ void StageSteps(const Tile& tile, int chunk, const Staging& staging) const {
    for (int i = 0; i < p_.warps_m && tile.first_row_tile + i < p_.row_tiles_per_group; ++i) {
      const unsigned* begins = StepBegins(tile, tile.first_row_tile + i) + chunk;
      const unsigned bytes = (begins[1] - begins[0]) * kStepBytes;
      const unsigned char* from =
          static_cast<const unsigned char*>(p_.steps) + static_cast<size_t>(begins[0]) * kStepBytes;
      const Shared to = StepAddress(chunk, i);
      const unsigned stride = static_cast<unsigned>(staging.threads) * 16;
      for (unsigned at = static_cast<unsigned>(staging.first) * 16; at < bytes; at += stride) {
        CopyAsync16Cached(to + at, from + at);
      }
    }
    CommitCopies();
  }

  template <bool kPaired>
  __device__ __forceinline__ void Load(const Staging& staging, int unit, unsigned begin, Unit& staged) const {
    unsigned offset;
    LoadSharedPair(UnitAddress(unit), offset, staged.target);
    offset += begin;
    // The last chunk may have fewer channels.
    const bool is_inside =
        (staged.target & kIsInside) != 0 && offset < static_cast<unsigned>(p_.group_in_channels) * staging.plane;
    const Half* from = staging.input + (is_inside ? offset : 0u);
    // Images that the batch does not have are the last one once more: nothing is stored of them.
#pragma unroll
    for (int i = 0; i < kTensorImages; ++i) {
      if constexpr (kPaired) {
        staged.words[i] = LoadReadOnly(reinterpret_cast<const Half2*>(from));
      } else {
        staged.words[i] = LoadReadOnly(from);
      }
      from += i + 1 < staging.images ? staging.image : 0;
    }
    if (!is_inside) staged.target &= ~kIsInside;
  }

  // From columns of images to images of columns.
  template <bool kPaired>
  __device__ __forceinline__ void Store(const Unit& staged, Shared stage) const {
    // Half of the lanes begin with the right column: else two lanes of eight would meet in each bank.
    const bool swap = kPaired && (threadIdx.x & 4) != 0;
    const bool is_inside = (staged.target & kIsInside) != 0;
    const unsigned select_first = swap ? kUpperHalves : kLowerHalves,
                   select_second = swap ? kLowerHalves : kUpperHalves;
    unsigned first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned a = is_inside ? staged.words[2 * i] : 0u, b = is_inside ? staged.words[2 * i + 1] : 0u;
      first[i] = SelectBytes(a, b, select_first);
      second[i] = SelectBytes(a, b, select_second);
    }
    const Shared left = stage + (staged.target & ~15u), right = left + 16u * static_cast<unsigned>(p_.pair_step);
    StoreSharedVectorIf(staged.target & (swap ? kHasRight : kHasLeft), swap ? right : left, first);
    if (kPaired) StoreSharedVectorIf(staged.target & (swap ? kHasLeft : kHasRight), swap ? left : right, second);
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply(const Tile& tile) {
    const int row_tile = tile.first_row_tile + Warp() % p_.warps_m;
    const bool is_active = row_tile < p_.row_tiles_per_group;
    int x;
    const int y = Split(Warp() / p_.warps_m, p_.tile_w / kPositions, x);
    const unsigned first =
        16u * static_cast<unsigned>(y * p_.strides[0] * p_.strides[1] * p_.line_pitch + x * kPositions);
    StartSums(tile, row_tile);
    for (int chunk = 0; chunk < p_.num_chunks; ++chunk) {
      const unsigned* begins = StepBegins(tile, is_active ? row_tile : 0) + chunk;
      const unsigned steps = is_active ? begins[1] - begins[0] : 0;
      WaitAtBarrier(FilledBarrier(chunk), blockDim.x);
      MultiplyChunk(StageAddress(chunk) + first, StepAddress(chunk, Warp() % p_.warps_m) + Lane() * 16, steps);
      if (chunk + 2 < p_.num_chunks) ArriveAtBarrier(FreeBarrier(chunk), blockDim.x);
    }
  }

  __device__ __forceinline__ void StartSums(const Tile& tile, int row_tile) {
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = row_tile * kRows + m * 16 + static_cast<int>(Lane()) / 4 + 8 * i;
        const bool has_bias = p_.epilogue.bias != nullptr && channel < p_.group_out_channels;
        const float bias =
            has_bias
                ? LoadElement(static_cast<const Half*>(p_.epilogue.bias) + tile.group * p_.group_out_channels + channel)
                : 0.0f;
#pragma unroll
        for (int j = 0; j < kPositions; ++j) sums_[m][j][2 * i] = sums_[m][j][2 * i + 1] = bias;
      }
    }
  }

  // Where a column begins, in bytes from position (0, 0).
  __device__ __forceinline__ unsigned Offset(unsigned column) const {
    const unsigned channel = column & 0xFFFu, line = column >> 12 & 0x3FFu, place = column >> 22;
    return 16u *
           (channel * static_cast<unsigned>(p_.channel_pitch) + line * static_cast<unsigned>(p_.line_pitch) + place);
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

  // Sums pass through shared memory, so that neighbouring threads store neighbouring columns: those of two images in a
  // word where they can be rounded at once, else first those of the even images, then those of the odd ones.
  __device__ __forceinline__ void Finish(const Tile& tile) const {
    const Epilogue& e = p_.epilogue;
    if (e.residual == nullptr && (e.activation == kRelu || e.activation == kNoActivation)) {
      KeepSums([](float even, float odd) { return ToHalves(even, odd); });
      __syncthreads();
      if (p_.is_y_paired) {
        StoreHalves<2>(tile);
      } else {
        StoreHalves<1>(tile);
      }
      return;
    }
    for (int odd = 0; odd < 2; ++odd) {
      KeepSums([odd](float even_sum, float odd_sum) { return FloatToBits(odd == 0 ? even_sum : odd_sum); });
      __syncthreads();
      if (p_.is_y_paired) {
        StoreSums<2>(tile, odd);
      } else {
        StoreSums<1>(tile, odd);
      }
      __syncthreads();
    }
  }

  // Writes word(sum of an even image, sum of the next one) for each pair of images, to [rows][pairs][sum_pitch].
  template <class Word>
  __device__ __forceinline__ void KeepSums(const Word& word) const {
    if (Warp() >= p_.product_warps) return;
    const int first_row = Warp() % p_.warps_m * kRows + static_cast<int>(Lane()) / 4;
    const int first_slot = Warp() / p_.warps_m * kPositions;
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (first_row + m * 16 + 8 * i) * kImagePairs + static_cast<int>(Lane()) % 4;
        const Shared to = stages_ + 4u * static_cast<unsigned>(row * p_.sum_pitch + first_slot);
#pragma unroll
        for (int j = 0; j < kPositions; ++j) {
          StoreShared(to + 4 * j, word(sums_[m][j][2 * i], sums_[m][j][2 * i + 1]));
        }
      }
    }
  }

  // Calls store(index of the even image's output in Y, address of the word, whether there is an odd image) for all
  // outputs of the tile, for kWidth columns at a time. A thread keeps its place in the tile and its images, and goes
  // through the channels.
  template <int kWidth, class Store>
  __device__ __forceinline__ void ForOutputs(const Tile& tile, const Store& store) const {
    const int places = p_.tile_h * p_.tile_w / kWidth;
    int place, column;
    const int row = Split(static_cast<int>(threadIdx.x), places, place);
    const int slot = place * kWidth;
    const int y = tile.y + Split(slot, p_.tile_w, column), x = tile.x + column;
    const int rows_at_once = static_cast<int>(blockDim.x) / places;
    const int pairs_at_once = rows_at_once >= kImagePairs ? kImagePairs : rows_at_once >= 2 ? 2 : 1;
    const int channels_at_once = rows_at_once / pairs_at_once;
    if (row >= channels_at_once * pairs_at_once || y >= p_.out_h || x >= p_.out_w) return;
    const int plane = p_.out_h * p_.out_w;
    const int first_channel = tile.first_row_tile * kRows;
    const int channels = min(p_.warps_m * kRows, p_.group_out_channels - first_channel);
    for (int pair = row % pairs_at_once; 2 * pair < tile.images; pair += pairs_at_once) {
      const int first = row / pairs_at_once;
      const long long k = tile.group * p_.group_out_channels + first_channel + first;
      long long index =
          (static_cast<long long>(tile.first_image + 2 * pair) * p_.out_channels + k) * plane + y * p_.out_w + x;
      Shared from = stages_ + 4u * static_cast<unsigned>((first * kImagePairs + pair) * p_.sum_pitch + slot);
      for (int channel = first; channel < channels; channel += channels_at_once) {
        store(index, from, 2 * pair + 1 < tile.images);
        index += static_cast<long long>(channels_at_once) * plane;
        from += 4u * static_cast<unsigned>(channels_at_once * kImagePairs * p_.sum_pitch);
      }
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void StoreHalves(const Tile& tile) const {
    Half* const outputs = static_cast<Half*>(p_.y);
    const long long image = static_cast<long long>(p_.out_channels) * p_.out_h * p_.out_w;
    const bool is_relu = p_.epilogue.activation == kRelu;
    ForOutputs<kWidth>(tile, [&](long long index, Shared from, bool has_odd) {
      Half2 left = LoadShared(from);
      if (is_relu) left = AtLeastZero(left);
      if constexpr (kWidth == 1) {
        StoreOnce(outputs + index, Lower(left));
        if (has_odd) StoreOnce(outputs + index + image, Upper(left));
      } else {
        Half2 right = LoadShared(from + 4);
        if (is_relu) right = AtLeastZero(right);
        StoreOnce(reinterpret_cast<Half2*>(outputs + index), SelectBytes(left, right, kLowerHalves));
        if (has_odd)
          StoreOnce(reinterpret_cast<Half2*>(outputs + index + image), SelectBytes(left, right, kUpperHalves));
      }
    });
  }

  template <int kWidth>
  __device__ __forceinline__ void StoreSums(const Tile& tile, int odd) const {
    const long long image = static_cast<long long>(p_.out_channels) * p_.out_h * p_.out_w;
    ForOutputs<kWidth>(tile, [&](long long index, Shared from, bool has_odd) {
      if (odd == 1 && !has_odd) return;
      index += odd * image;
      const float left = Finished(index, BitsToFloat(LoadShared(from)));
      Half* const output = static_cast<Half*>(p_.y) + index;
      if constexpr (kWidth == 1) {
        StoreOnce(output, ToHalf(left));
      } else {
        const float right = Finished(index + 1, BitsToFloat(LoadShared(from + 4)));
        StoreOnce(reinterpret_cast<Half2*>(output), ToHalves(left, right));
      }
    });
  }

  __device__ __forceinline__ float Finished(long long index, float sum) const {
    const Epilogue& e = p_.epilogue;
    if (e.residual != nullptr) sum += ToFloat(LoadOnce(static_cast<const Half*>(e.residual) + index));
    return Activate(e.activation, sum, e.alpha, e.beta);
  }

  const TensorParams& p_;
  const Shared stages_;
  float sums_[kSubtiles][kPositions][4];
};

}  // namespace sparseconv::cuda
