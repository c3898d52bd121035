// What the kernels on sparse tensor cores share: the tile of outputs that a block computes, the input on its way to
// shared memory, and outputs on their way from there.
//
// Some warps of a block multiply, the others stage. The input is staged in chunks of channels. A pixel (a row's column)
// of a channel is that of 8 images, 16 contiguous bytes, so that what a tap reads is aligned wherever it is.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

// `Kernel` derives from this, and has
//   kBatches                            of units that a staging thread has on their way
//   kPixelBytes                         from a pixel of a channel to the next one of its line
//   ChannelBytes()                      from a channel of a chunk to the next one
//   NumChunks(tile)
//   ChooseChannels(tile, chunk)         called by all staging threads before they load the chunk's units
//   ChunkChannels()                     places of a chunk
//   Channel(chunk, place)               of the group: the one at that place of the chunk; any, where there is none
//   BeginStage(tile, position, staging) called before a chunk's units are stored
//   EndStage(stage)                     called behind that
//   KeepSums(word)                      has threads with sums write word(that of an even image, that of the next one)
//                                       to SumAddress
//   SlotOf(y, x)                        where the sum of an output of the tile is kept, among those of its row
template <class Kernel>
class TensorTile {
 protected:
  __device__ __forceinline__ TensorTile(const TileParams& params, const void* shared)
      : t_(params), stages_(SharedAddress(shared)) {}

  // Outputs that a block computes.
  struct Tile {
    int first_image, images;  // 8, but for the last ones
    int group, first_row_tile;
    int y, x;
  };

  // Where a warp stands: at a chunk, and the stage that holds it; all stages were filled `round` times before.
  struct Position {
    int chunk = 0, stage = 0, round = 0;
  };

  __device__ __forceinline__ void Advance(Position& position) const {
    ++position.chunk;
    if (++position.stage < t_.num_stages) return;
    position.stage = 0;
    ++position.round;
  }

  // What the staging threads share.
  struct Staging {
    // The first channel of the tile's group of each image. Images that the batch does not have are the last one once
    // more: nothing is stored of them.
    const Half* images[kTensorImages];
    unsigned plane;  // units, of `unit_columns`
    int first, threads;
    int batches;  // that a thread stages a chunk in
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
    index = Split(index, t_.row_blocks, row_block);
    index = Split(index, t_.tiles_x, x);
    tile.first_image = Split(index, t_.tiles_y, y) * kTensorImages;
    tile.images = min(t_.batch - tile.first_image, kTensorImages);
    tile.group = Split(row_block, t_.row_blocks_per_group, tile.first_row_tile);
    tile.first_row_tile *= t_.warps_m;
    tile.y = y * t_.tile_h;
    tile.x = x * t_.tile_w;
    return tile;
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ Shared StageAddress(int stage) const {
    return stages_ + static_cast<unsigned>(stage * t_.stage_bytes);
  }

  // To be called by the staging threads.
  __device__ __forceinline__ void Stage(const Tile& tile) {
    Staging staging;
    staging.first = static_cast<int>(threadIdx.x) - 32 * t_.product_warps;
    staging.threads = static_cast<int>(blockDim.x) - 32 * t_.product_warps;
    const int plane = t_.in_h * t_.in_w;
    staging.plane = static_cast<unsigned>(plane / t_.unit_columns);
    const long long image_size = static_cast<long long>(t_.in_channels) * plane;
    const Half* image = static_cast<const Half*>(t_.x) + tile.first_image * image_size +
                        static_cast<long long>(tile.group * t_.group_in_channels) * plane;
#pragma unroll
    for (int i = 0; i < kTensorImages; ++i) {
      staging.images[i] = image;
      if (i + 1 < tile.images) image += image_size;
    }
    if (t_.unit_columns == 4) {
      StageChunks<4>(tile, staging);
    } else if (t_.unit_columns == 2) {
      StageChunks<2>(tile, staging);
    } else {
      StageChunks<1>(tile, staging);
    }
  }

  // Columns of a row that positions one stride apart read with the same tap are neighbours.
  __device__ __forceinline__ int PlaceOf(int column) const {
    const int stride = t_.strides[1];
    if (stride == 1) return column;
    const int quotient = (column + 4 * stride) / stride - 4;  // column is -3 at least
    return (column - quotient * stride) * t_.line_pitch + quotient;
  }

  // Where a pixel lies in a stage, and in the channel.
  __device__ __forceinline__ unsigned PixelBytes(int row, int column) const {
    return static_cast<unsigned>(row * t_.strides[1] * t_.line_pitch + PlaceOf(column)) * Kernel::kPixelBytes;
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // What the sums of a channel of the tile's group begin with; there may be no such channel.
  __device__ __forceinline__ float BiasOf(const Tile& tile, int channel) const {
    const bool has_bias = t_.epilogue.bias != nullptr && channel < t_.group_out_channels;
    return has_bias
               ? LoadElement(static_cast<const Half*>(t_.epilogue.bias) + tile.group * t_.group_out_channels + channel)
               : 0.0f;
  }

  // To be called by all threads. Sums pass through shared memory, so that neighbouring threads store
  // neighbouring columns: those of two images in a word where they can be rounded at once, else first those of the even
  // images, then those of the odd ones.
  __device__ __forceinline__ void Finish(const Tile& tile) const {
    const Epilogue& e = t_.epilogue;
    if (e.residual == nullptr && (e.activation == kRelu || e.activation == kNoActivation)) {
      self().KeepSums([](float even, float odd) { return ToHalves(even, odd); });
      __syncthreads();
      if (t_.is_y_paired) {
        StoreHalves<2>(tile);
      } else {
        StoreHalves<1>(tile);
      }
      return;
    }
    for (int odd = 0; odd < 2; ++odd) {
      self().KeepSums([odd](float even_sum, float odd_sum) { return FloatToBits(odd == 0 ? even_sum : odd_sum); });
      __syncthreads();
      if (t_.is_y_paired) {
        StoreSums<2>(tile, odd);
      } else {
        StoreSums<1>(tile, odd);
      }
      __syncthreads();
    }
  }

  // Of the block's row, a pair of images, and a slot; see `SlotOf`.
  __device__ __forceinline__ Shared SumAddress(int row, int pair, int slot) const {
    return stages_ + 4u * static_cast<unsigned>((row * kImagePairs + pair) * t_.sum_pitch + slot);
  }

  const TileParams& t_;
  const Shared stages_;

 private:
  static constexpr int kImagePairs = kTensorImages / 2;
  // A unit's target: in its low bits, which of its columns are needed; the first column's place, in bytes from the
  // stage's begin; above, the channel's place in the chunk.
  static constexpr unsigned kTargetBytes = 0xFFFF0;
  static constexpr int kChannelShift = 20;

  // Neighbouring columns of an input row, of one channel and all images, on their way to shared memory.
  template <int kColumns>
  struct Unit {
    uint2 words[kTensorImages];
    unsigned target;
  };

  // The units that a thread has on their way.
  template <int kColumns>
  struct Batch {
    static constexpr int kUnits = kColumns == 4 ? kWideTensorUnits : kTensorUnits;
    Unit<kColumns> units[kUnits];
  };

  // Of a staging thread: at a batch of a chunk.
  struct Cursor : Position {
    int batch = 0;
  };

  __device__ __forceinline__ Kernel& self() { return static_cast<Kernel&>(*this); }
  __device__ __forceinline__ const Kernel& self() const { return static_cast<const Kernel&>(*this); }

  // Units are of kColumns columns. Each thread has batches on their way while an earlier one is stored, whether their
  // stages are free or not.
  template <int kColumns>
  __device__ __forceinline__ void StageChunks(const Tile& tile, Staging& staging) {
    const int num_chunks = self().NumChunks(tile);
    if (num_chunks == 0) return;
    const Window window = WindowOf(tile);
    PlanUnits<kColumns>(window, staging);
    StorePadding(window, staging);
    const int num_batches = num_chunks * staging.batches;
    Cursor loaded, stored;
    Batch<kColumns> batches[Kernel::kBatches];
#pragma unroll
    for (int i = 0; i + 1 < Kernel::kBatches; ++i) {
      if (i < num_batches) LoadBatch<kColumns>(tile, staging, loaded, batches[i]);
    }
    for (int first = 0; first < num_batches; first += Kernel::kBatches) {
#pragma unroll
      for (int i = 0; i < Kernel::kBatches; ++i) {
        if (first + i == num_batches) break;
        const int next = i + Kernel::kBatches - 1;
        if (first + next < num_batches) LoadBatch<kColumns>(tile, staging, loaded, batches[next % Kernel::kBatches]);
        StoreBatch<kColumns>(tile, staging, stored, batches[i]);
      }
    }
  }

  // Whether that was the last batch of the chunk.
  __device__ __forceinline__ bool AdvanceBatch(const Staging& staging, Cursor& cursor) const {
    if (++cursor.batch < staging.batches) return false;
    cursor.batch = 0;
    this->Advance(cursor);
    return true;
  }

  template <int kColumns>
  __device__ __forceinline__ void LoadBatch(const Tile& tile, const Staging& staging, Cursor& cursor,
                                            Batch<kColumns>& batch) {
    if (cursor.batch == 0) self().ChooseChannels(tile, cursor.chunk);
    const int unit = staging.first + cursor.batch * Batch<kColumns>::kUnits * staging.threads;
#pragma unroll
    for (int i = 0; i < Batch<kColumns>::kUnits; ++i) {
      Load<kColumns>(staging, unit + i * staging.threads, cursor.chunk, batch.units[i]);
    }
    AdvanceBatch(staging, cursor);
  }

  template <int kColumns>
  __device__ __forceinline__ void StoreBatch(const Tile& tile, const Staging& staging, Cursor& cursor,
                                             const Batch<kColumns>& batch) {
    const Position at = cursor;
    if (cursor.batch == 0) self().BeginStage(tile, at, staging);
    const Shared stage = StageAddress(at.stage);
#pragma unroll
    for (int i = 0; i < Batch<kColumns>::kUnits; ++i) Store<kColumns>(batch.units[i], stage);
    if (AdvanceBatch(staging, cursor)) self().EndStage(at.stage);
  }

  // What a tile reads of a channel, as rows and columns of the tile: those that lie in the input, the others are
  // padding.
  struct Window {
    int first_y, first_x;  // of the input, where the tile begins
    int row, row_end, column, column_end;
  };

  __device__ __forceinline__ Window WindowOf(const Tile& tile) const {
    Window window;
    window.first_y = tile.y * t_.strides[0] - t_.pads_begin[0];
    window.first_x = tile.x * t_.strides[1] - t_.pads_begin[1];
    window.row = max(-window.first_y, 0);
    window.row_end = max(min(t_.in_rows, t_.in_h - window.first_y), window.row);
    window.column = max(-window.first_x, 0);
    window.column_end = max(min(t_.in_columns, t_.in_w - window.first_x), window.column);
    return window;
  }

  // Padding is the same for all chunks. A warp stores that of a row at a time.
  __device__ __forceinline__ void StorePadding(const Window& window, const Staging& staging) {
    for (int row = staging.first / 32; row < t_.in_rows; row += staging.threads / 32) {
      const bool has_inside = row >= window.row && row < window.row_end;
      StoreZeros(row, 0, has_inside ? window.column : t_.in_columns);
      if (has_inside) StoreZeros(row, window.column_end, t_.in_columns);
    }
  }

  // Of all channels and stages.
  __device__ __forceinline__ void StoreZeros(int row, int column, int column_end) {
    const unsigned zeros[4] = {0, 0, 0, 0};
    for (; column < column_end; ++column) {
      const Shared pixel = StageAddress(0) + PixelBytes(row, column);
      for (int place = static_cast<int>(Lane()); place < self().ChunkChannels(); place += 32) {
        Shared to = pixel + static_cast<unsigned>(place) * self().ChannelBytes();
        for (int stage = 0; stage < t_.num_stages; ++stage, to += static_cast<unsigned>(t_.stage_bytes)) {
          StoreSharedVectorIf(1, to, zeros);
        }
      }
    }
  }

  // Two words each, behind the stages.
  __device__ __forceinline__ Shared UnitAddress(int unit) const {
    return stages_ + static_cast<unsigned>(t_.num_stages * t_.stage_bytes) + 8u * static_cast<unsigned>(unit);
  }

  // Where the units of a chunk lie in the plane of their channel, in units, and in the stage: the same for all chunks.
  // A thread only reads what it wrote itself.
  //
  // As many lanes as a unit has columns have the same columns of neighbouring channels: so eight of them, whose vectors
  // are stored together, meet eight banks.
  template <int kColumns>
  __device__ __forceinline__ void PlanUnits(const Window& window, Staging& staging) {
    const int rows = max(window.row_end - window.row, 1);
    const bool is_empty = window.row_end == window.row || window.column_end == window.column;
    // Units begin at multiples of their columns in the input, so that one aligned load brings all.
    const int first_x = (window.first_x + window.column) / kColumns * kColumns;
    const int row_units = max((window.first_x + window.column_end - first_x + kColumns - 1) / kColumns, 1);
    const int places = (self().ChunkChannels() + kColumns - 1) / kColumns;
    const int units = is_empty ? 0 : places * kColumns * rows * row_units;
    const int at_once = Batch<kColumns>::kUnits * staging.threads;
    staging.batches = max((units + at_once - 1) / at_once, 1);
    // Units of a thread are `threads` apart: so many columns, rows and places.
    Place at = PlaceOfUnit(staging.first / kColumns, rows, row_units);
    const Place step = PlaceOfUnit(staging.threads / kColumns, rows, row_units);
    for (int unit = staging.first; unit < staging.batches * at_once; unit += staging.threads) {
      unsigned offset = 0, target = 0;  // of what only fills up a batch
      const int place = at.place * kColumns + unit % kColumns;
      if (unit < units && place < self().ChunkChannels()) {
        const int row = window.row + at.row, x = first_x + at.unit * kColumns;
        const int column = x - window.first_x;  // negative where the first ones are not needed
        offset = static_cast<unsigned>((window.first_y + row) * t_.in_w + x) / kColumns;
        // A first column that is not needed may lie before the stage.
        target = (static_cast<unsigned>(place) * self().ChannelBytes() + PixelBytes(row, column)) & kTargetBytes;
        target |= static_cast<unsigned>(place) << kChannelShift;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (column + i >= 0 && column + i < t_.in_columns) target |= 1u << i;
        }
      }
      StoreShared(UnitAddress(unit), offset);
      StoreShared(UnitAddress(unit) + 4, target);
      at.unit += step.unit;
      at.row += step.row;
      at.place += step.place;
      if (at.unit >= row_units) at.unit -= row_units, ++at.row;
      if (at.row >= rows) at.row -= rows, ++at.place;
    }
  }

  // Of a unit: in its row, among the rows, and among as many channels as it has columns.
  struct Place {
    int unit, row, place;
  };

  static __device__ __forceinline__ Place PlaceOfUnit(int unit, int rows, int row_units) {
    Place at;
    at.place = Split(Split(unit, row_units, at.unit), rows, at.row);
    return at;
  }

  template <int kColumns>
  __device__ __forceinline__ void Load(const Staging& staging, int unit, int chunk, Unit<kColumns>& staged) {
    unsigned offset;
    LoadSharedPair(UnitAddress(unit), offset, staged.target);
    offset += self().Channel(chunk, staged.target >> kChannelShift) * staging.plane;
#pragma unroll
    for (int i = 0; i < kTensorImages; ++i) {
      if constexpr (kColumns == 4) {
        staged.words[i] = LoadReadOnly(reinterpret_cast<const uint2*>(staging.images[i]) + offset);
      } else if constexpr (kColumns == 2) {
        staged.words[i].x = LoadReadOnly(reinterpret_cast<const Half2*>(staging.images[i]) + offset);
      } else {
        staged.words[i].x = LoadReadOnly(staging.images[i] + offset);
      }
    }
  }

  // From columns of images to images of columns.
  template <int kColumns>
  __device__ __forceinline__ void Store(const Unit<kColumns>& staged, Shared stage) const {
    const unsigned first = staged.target & kTargetBytes;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      unsigned images[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 &even = staged.words[2 * i], &odd = staged.words[2 * i + 1];
        images[i] = SelectBytes(column < 2 ? even.x : even.y, column < 2 ? odd.x : odd.y,
                                column % 2 == 0 ? kLowerHalves : kUpperHalves);
      }
      const unsigned step = column == 0 ? 0u : static_cast<unsigned>(t_.column_steps[column - 1]) * Kernel::kPixelBytes;
      StoreSharedVectorIf(staged.target & 1u << column, stage + ((first + step) & kTargetBytes), images);
    }
  }

  // Calls load(value, index of the even image's output in Y, address of the word, whether there is an odd image) and
  // then store(value, index, whether there is) for all outputs of the tile, for kWidth columns at a time. A thread
  // keeps its place in the tile and its images, and goes through the channels, several at a time: it waits for none of
  // its loads and stores alone.
  template <int kWidth, int kAtOnce, class Value, class Load, class Store>
  __device__ __forceinline__ void ForOutputs(const Tile& tile, const Load& load, const Store& store) const {
    const int places = t_.tile_h * t_.tile_w / kWidth;
    int place, column;
    const int row = Split(static_cast<int>(threadIdx.x), places, place);
    const int line = Split(place * kWidth, t_.tile_w, column);
    const int y = tile.y + line, x = tile.x + column;
    const int rows_at_once = static_cast<int>(blockDim.x) / places;
    const int pairs_at_once = rows_at_once >= kImagePairs ? kImagePairs : rows_at_once >= 2 ? 2 : 1;
    const int channels_at_once = rows_at_once / pairs_at_once;
    if (row >= channels_at_once * pairs_at_once || y >= t_.out_h || x >= t_.out_w) return;
    const int plane = t_.out_h * t_.out_w;
    const int first_channel = tile.first_row_tile * Kernel::kRows;
    const int channels = min(t_.warps_m * Kernel::kRows, t_.group_out_channels - first_channel);
    const long long index_step = static_cast<long long>(channels_at_once) * plane;
    const unsigned from_step = 4u * static_cast<unsigned>(channels_at_once * kImagePairs * t_.sum_pitch);
    for (int pair = row % pairs_at_once; 2 * pair < tile.images; pair += pairs_at_once) {
      const bool has_odd = 2 * pair + 1 < tile.images;
      const int channel = row / pairs_at_once;
      const long long k = tile.group * t_.group_out_channels + first_channel + channel;
      long long index =
          (static_cast<long long>(tile.first_image + 2 * pair) * t_.out_channels + k) * plane + y * t_.out_w + x;
      Shared from = SumAddress(channel, pair, self().SlotOf(line, column));
      for (int count = (channels - channel + channels_at_once - 1) / channels_at_once; count > 0; count -= kAtOnce) {
        Value values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i < count) load(values[i], index + i * index_step, from + static_cast<unsigned>(i) * from_step, has_odd);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i < count) store(values[i], index + i * index_step, has_odd);
        }
        index += kAtOnce * index_step;
        from += kAtOnce * from_step;
      }
    }
  }

  // Of neighbouring columns: of two images each.
  template <int kWidth>
  struct HalfPairs {
    Half2 columns[kWidth];
  };

  template <int kWidth>
  __device__ __forceinline__ void StoreHalves(const Tile& tile) const {
    Half* const outputs = static_cast<Half*>(t_.y);
    const long long image = static_cast<long long>(t_.out_channels) * t_.out_h * t_.out_w;
    const bool is_relu = t_.epilogue.activation == kRelu;
    const auto load = [&](HalfPairs<kWidth>& pairs, long long, Shared from, bool) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) pairs.columns[i] = LoadShared(from + 4u * static_cast<unsigned>(i));
    };
    const auto store = [&](HalfPairs<kWidth>& pairs, long long index, bool has_odd) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (is_relu) pairs.columns[i] = AtLeastZero(pairs.columns[i]);
      }
      if constexpr (kWidth == 1) {
        StoreOnce(outputs + index, Lower(pairs.columns[0]));
        if (has_odd) StoreOnce(outputs + index + image, Upper(pairs.columns[0]));
      } else {
        const Half2 left = pairs.columns[0], right = pairs.columns[1];
        StoreOnce(reinterpret_cast<Half2*>(outputs + index), SelectBytes(left, right, kLowerHalves));
        if (has_odd)
          StoreOnce(reinterpret_cast<Half2*>(outputs + index + image), SelectBytes(left, right, kUpperHalves));
      }
    };
    ForOutputs<kWidth, 1, HalfPairs<kWidth>>(tile, load, store);
  }

  // Of neighbouring columns of an image.
  template <int kWidth>
  struct Sums {
    float columns[kWidth];
    Half2 residual;
  };

  template <int kWidth>
  __device__ __forceinline__ void StoreSums(const Tile& tile, int odd) const {
    const Epilogue& e = t_.epilogue;
    const Half* const residual = static_cast<const Half*>(e.residual);
    const long long image = odd * static_cast<long long>(t_.out_channels) * t_.out_h * t_.out_w;
    const auto load = [&](Sums<kWidth>& sums, long long index, Shared from, bool has_odd) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sums.columns[i] = BitsToFloat(LoadShared(from + 4u * static_cast<unsigned>(i)));
      }
      sums.residual = 0;
      if (residual == nullptr || (odd == 1 && !has_odd)) return;
      if constexpr (kWidth == 1) {
        sums.residual = LoadOnce(residual + index + image);
      } else {
        sums.residual = LoadOnce(reinterpret_cast<const Half2*>(residual + index + image));
      }
    };
    const auto store = [&](const Sums<kWidth>& sums, long long index, bool has_odd) {
      if (odd == 1 && !has_odd) return;
      Half* const output = static_cast<Half*>(t_.y) + index + image;
      const float left = Finished(sums.columns[0], Lower(sums.residual));
      if constexpr (kWidth == 1) {
        StoreOnce(output, ToHalf(left));
      } else {
        StoreOnce(reinterpret_cast<Half2*>(output), ToHalves(left, Finished(sums.columns[1], Upper(sums.residual))));
      }
    };
    ForOutputs<kWidth, 2, Sums<kWidth>>(tile, load, store);
  }

  __device__ __forceinline__ float Finished(float sum, Half residual) const {
    const Epilogue& e = t_.epilogue;
    if (e.residual != nullptr) sum += ToFloat(residual);
    return Activate(e.activation, sum, e.alpha, e.beta);
  }
};

}  // namespace sparseconv::cuda
