// How the tensor-core kernel (tensor_conv.cuh) gets its input and weights into shared memory: some warps of a block
// stage them, in chunks of channels, while the others multiply. A pixel of a channel is that of 8 images, 16 contiguous
// bytes, so that what a tap reads is aligned wherever it is. Floats are rounded to halves as they are stored.
#pragma once

#include "magnitude.cuh"
#include "tensor_tile.cuh"

namespace sparseconv::cuda {

// T is the type of X. kStepBytes: of a step of a row tile, see tensor_weight.h.
template <class T, int kStepBytes>
class TensorInput : protected TensorTile {
 protected:
  __device__ __forceinline__ TensorInput(const TensorParams& params, const void* shared)
      : TensorTile(params.tile, shared), p_(params) {}

  // What of the first stages does not wait for any input: their weights, and padding, which is the same for all chunks.
  // To be called by the threads that do not stage, each of which has to wait for its copies before the first chunk.
  __device__ __forceinline__ void StageFirst(const Tile& tile) {
    const int thread = static_cast<int>(threadIdx.x), threads = 32 * p_.product_warps;
    const bool has_second = FirstChunk() + 1 < EndChunk();
    if (FirstChunk() < EndChunk()) {
      for (int i = 0; i < t_.warps_m && tile.first_row_tile + i < t_.row_tiles_per_group; ++i) {
        const unsigned* begins = StepBegins(tile, tile.first_row_tile + i) + FirstChunk();
        const unsigned first = begins[0], second = begins[1], third = begins[has_second ? 2 : 1];
        CopySteps(StepAddress(0, i), first, second, thread, threads);
        CopySteps(StepAddress(1, i), second, third, thread, threads);
      }
    }
    CommitCopies();
    StorePadding(WindowOf(tile), thread / 32, p_.product_warps);
  }

  // To be called by the staging threads. Returns what a thread saw of X, where that is floats; see magnitude.cuh.
  __device__ __forceinline__ unsigned Stage(const Tile& tile) {
    Staging staging;
    staging.first = static_cast<int>(threadIdx.x) - 32 * p_.product_warps;
    staging.threads = static_cast<int>(blockDim.x) - 32 * p_.product_warps;
    const int plane = t_.in_h * t_.in_w;
    staging.plane = static_cast<unsigned>(plane / p_.unit_columns);
    const T* image = static_cast<const T*>(t_.x) + EightOf(tile) * p_.x_eight +
                     static_cast<long long>(tile.group * t_.group_in_channels) * plane;
#pragma unroll
    for (int i = 0; i < kTensorImages; ++i) staging.images[i] = image + static_cast<long long>(i) * p_.x_image;
    Magnitude magnitude;
    if (p_.unit_columns == kMostColumns) {
      StageChunks<kMostColumns>(tile, staging, magnitude);
    } else if (kMostColumns > 2 && p_.unit_columns == 2) {
      StageChunks<2>(tile, staging, magnitude);
    } else {
      StageChunks<1>(tile, staging, magnitude);
    }
    return magnitude.Seen();
  }

  // With as many images, or strips of one, as it has.
  __device__ __forceinline__ Tile TileOfBlock() const {
    TilePlace place;
    int index = static_cast<int>(blockIdx.x);
    index = Split(index, t_.row_blocks_per_group, p_.by_row_blocks, place.row_block);
    index = Split(index, t_.groups, p_.by_groups, place.group);
    index = Split(index, t_.tiles_x, p_.by_tiles_x, place.column);
    place.eight = Split(index, t_.tiles_y, p_.by_tiles_y, place.row);
    Tile tile = TileAt(place);
    tile.images = min(tile.images, p_.images);
    return tile;
  }
  static __device__ __forceinline__ int EightOf(const Tile& tile) { return tile.first_image / kTensorImages; }

  // Of the block's part of the chunks.
  __device__ __forceinline__ int FirstChunk() const { return PartBegin(blockIdx.y); }
  __device__ __forceinline__ int EndChunk() const { return PartBegin(blockIdx.y + 1); }
  __device__ __forceinline__ int PartBegin(unsigned part) const {
    return static_cast<int>(static_cast<unsigned>(p_.num_chunks) * part / gridDim.y);
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

  const TensorParams& p_;

 private:
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  // Of a unit: eight bytes of a row.
  static constexpr int kMostColumns = 8 / static_cast<int>(sizeof(T));
  // Of units that a staging thread has on their way.
  static constexpr int kBatches = 2;
  static constexpr unsigned kPixelBytes = 16;
  // A unit's target: in its low bits, which of its columns are needed; the first column's place, in bytes from the
  // stage's begin; above, the channel's place in the chunk; and in the highest bits, which images have the row.
  static constexpr unsigned kTargetBytes = kTensorStageBytes - kPixelBytes;
  static constexpr int kChannelShift = 17, kImageShift = 24;
  static constexpr unsigned kChannelMask = 0x7F;
  static_assert(kTensorStageBytes == 1 << kChannelShift);

  // Neighbouring columns of an input row, of one channel and all images, on their way to shared memory.
  template <int kColumns>
  struct Unit {
    uint2 words[kTensorImages];
    unsigned target;
  };

  // The units that a thread has on their way.
  template <int kColumns>
  struct Batch {
    static constexpr int kUnits = kColumns == kMostColumns ? kWideTensorUnits : kTensorUnits;
    Unit<kColumns> units[kUnits];
  };

  // What the staging threads share.
  struct Staging {
    const T* images[kTensorImages];  // the first channel of the tile's group of each, if there is such an image
    unsigned plane;                  // units, of `unit_columns`
    int first, threads;
    int batches;  // that a thread stages a chunk in
  };

  // Of a staging thread: at a batch of a chunk.
  struct Cursor : Position {
    int batch = 0;
  };

  // Units are of kColumns columns. Each thread has batches on their way while an earlier one is stored, whether their
  // stages are free or not.
  template <int kColumns>
  __device__ __forceinline__ void StageChunks(const Tile& tile, Staging& staging, Magnitude& magnitude) {
    const int num_chunks = EndChunk() - FirstChunk();
    if (num_chunks == 0) return;
    Cursor loaded, stored;
    loaded.chunk = stored.chunk = FirstChunk();
    const Window window = WindowOf(tile);
    PlanUnits<kColumns>(tile, window, staging);
    const int num_batches = num_chunks * staging.batches;
    Batch<kColumns> batches[kBatches];
#pragma unroll
    for (int i = 0; i + 1 < kBatches; ++i) {
      if (i < num_batches) LoadBatch<kColumns>(tile, staging, loaded, batches[i]);
    }
    for (int first = 0; first < num_batches; first += kBatches) {
#pragma unroll
      for (int i = 0; i < kBatches; ++i) {
        if (first + i == num_batches) break;
        const int next = i + kBatches - 1;
        if (first + next < num_batches) LoadBatch<kColumns>(tile, staging, loaded, batches[next % kBatches]);
        StoreBatch<kColumns>(tile, staging, stored, batches[i], magnitude);
      }
    }
  }

  // Whether that was the last batch of the chunk.
  __device__ __forceinline__ bool AdvanceBatch(const Staging& staging, Cursor& cursor) const {
    if (++cursor.batch < staging.batches) return false;
    cursor.batch = 0;
    Advance(cursor);
    return true;
  }

  template <int kColumns>
  __device__ __forceinline__ void LoadBatch(const Tile& tile, const Staging& staging, Cursor& cursor,
                                            Batch<kColumns>& batch) {
    const int unit = staging.first + cursor.batch * Batch<kColumns>::kUnits * staging.threads;
#pragma unroll
    for (int i = 0; i < Batch<kColumns>::kUnits; ++i) {
      Load<kColumns>(staging, unit + i * staging.threads, cursor.chunk, batch.units[i]);
    }
    AdvanceBatch(staging, cursor);
  }

  template <int kColumns>
  __device__ __forceinline__ void StoreBatch(const Tile& tile, const Staging& staging, Cursor& cursor,
                                             const Batch<kColumns>& batch, Magnitude& magnitude) {
    const Position at = cursor;
    if (cursor.batch == 0) BeginStage(tile, at, staging);
    const Shared stage = StageAddress(at.stage);
#pragma unroll
    for (int i = 0; i < Batch<kColumns>::kUnits; ++i) Store<kColumns>(batch.units[i], stage, magnitude);
    if (AdvanceBatch(staging, cursor)) EndStage(at.stage);
  }

  // What a tile reads of a channel, as rows and columns of the tile: those that lie in the input, of a strip at least,
  // the others are padding.
  struct Window {
    int first_y, first_x;  // of the input, where the tile begins
    int row, row_end, column, column_end;
  };

  __device__ __forceinline__ Window WindowOf(const Tile& tile) const {
    Window window;
    window.first_y = tile.y * t_.strides[0] - t_.pads_begin[0];
    window.first_x = tile.x * t_.strides[1] - t_.pads_begin[1];
    window.row = max(-window.first_y - (tile.images - 1) * p_.row_step, 0);
    window.row_end = max(min(t_.in_rows, t_.in_h - window.first_y), window.row);
    window.column = max(-window.first_x, 0);
    window.column_end = max(min(t_.in_columns, t_.in_w - window.first_x), window.column);
    return window;
  }

  // A warp stores that of a row at a time.
  __device__ __forceinline__ void StorePadding(const Window& window, int warp, int warps) {
    for (int row = warp; row < t_.in_rows; row += warps) {
      const bool has_inside = row >= window.row && row < window.row_end;
      StoreZeros(row, 0, has_inside ? window.column : t_.in_columns);
      if (has_inside) StoreZeros(row, window.column_end, t_.in_columns);
    }
  }

  // Of all channels and stages.
  __device__ __forceinline__ void StoreZeros(int row, int column, int column_end) {
    const unsigned zeros[4] = {0, 0, 0, 0};
    for (; column < column_end; ++column) {
      const Shared pixel = StageAddress(0) + kPixelBytes * PixelAt(row, column);
      for (int place = static_cast<int>(Lane()); place < ChunkChannels(); place += 32) {
        Shared to = pixel + static_cast<unsigned>(place) * ChannelBytes();
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
  __device__ __forceinline__ void PlanUnits(const Tile& tile, const Window& window, Staging& staging) {
    const int rows = max(window.row_end - window.row, 1);
    const bool is_empty = window.row_end == window.row || window.column_end == window.column;
    // Units begin at multiples of their columns in the input, so that one aligned load brings all.
    const int first_x = (window.first_x + window.column) / kColumns * kColumns;
    const int row_units = max((window.first_x + window.column_end - first_x + kColumns - 1) / kColumns, 1);
    const int places = (ChunkChannels() + kColumns - 1) / kColumns;
    const int units = is_empty ? 0 : places * kColumns * rows * row_units;
    const int at_once = Batch<kColumns>::kUnits * staging.threads;
    staging.batches = max((units + at_once - 1) / at_once, 1);
    // Units of a thread are `threads` apart: so many columns, rows and places.
    Place at = PlaceOfUnit(staging.first / kColumns, rows, row_units);
    const Place step = PlaceOfUnit(staging.threads / kColumns, rows, row_units);
    for (int unit = staging.first; unit < staging.batches * at_once; unit += staging.threads) {
      unsigned offset = 0, target = 0;  // of what only fills up a batch
      const int place = at.place * kColumns + unit % kColumns;
      if (unit < units && place < ChunkChannels()) {
        const int row = window.row + at.row, x = first_x + at.unit * kColumns;
        const int column = x - window.first_x;  // negative where the first ones are not needed
        // In the first strip, the row may lie before the input.
        offset = static_cast<unsigned>((window.first_y + row) * (t_.in_w / kColumns) + x / kColumns);
        // A first column that is not needed may lie before the stage.
        target = (static_cast<unsigned>(place) * ChannelBytes() + kPixelBytes * PixelAt(row, column)) & kTargetBytes;
        target |= static_cast<unsigned>(place) << kChannelShift | ImagesWith(tile, window.first_y + row) << kImageShift;
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

  // A bit for each image, or strip, that has a row, which lies at `y` in the first one.
  __device__ __forceinline__ unsigned ImagesWith(const Tile& tile, int y) const {
    if (p_.row_step == 0) return (1u << tile.images) - 1;
    unsigned bits = 0;
    for (int i = 0; i < tile.images; ++i, y += p_.row_step) {
      if (y >= 0 && y < t_.in_h) bits |= 1u << i;
    }
    return bits;
  }

  // Of a unit: in its row, among the rows, and among as many channels as it has columns.
  struct Place {
    int unit, row, place;
  };

  static __device__ __forceinline__ Place PlaceOfUnit(int unit, int rows, int row_units) {
    Place at;
    at.place = SplitFew(SplitFew(unit, row_units, at.unit), rows, at.row);
    return at;
  }

  template <int kColumns>
  __device__ __forceinline__ void Load(const Staging& staging, int unit, int chunk, Unit<kColumns>& staged) {
    unsigned place;
    LoadSharedPair(UnitAddress(unit), place, staged.target);
    const int offset =
        static_cast<int>(place + Channel(chunk, staged.target >> kChannelShift & kChannelMask) * staging.plane);
#pragma unroll
    for (int i = 0; i < kTensorImages; ++i) {
      const unsigned has_row = staged.target & 1u << (kImageShift + i);
      if constexpr (kColumns == kMostColumns) {
        staged.words[i] = LoadReadOnlyIf(has_row, reinterpret_cast<const uint2*>(staging.images[i]) + offset);
      } else if constexpr (kIsFloat) {
        staged.words[i].x = FloatToBits(LoadReadOnlyIf(has_row, staging.images[i] + offset));
      } else if constexpr (kColumns == 2) {
        staged.words[i].x = LoadReadOnlyIf(has_row, reinterpret_cast<const Half2*>(staging.images[i]) + offset);
      } else {
        staged.words[i].x = LoadReadOnlyIf(has_row, staging.images[i] + offset);
      }
    }
  }

  // From columns of images to images of columns.
  template <int kColumns>
  __device__ __forceinline__ void Store(const Unit<kColumns>& staged, Shared stage, Magnitude& magnitude) const {
    const unsigned first = staged.target & kTargetBytes;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const unsigned is_needed = staged.target & 1u << column;
      unsigned images[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        images[i] = PairOf(staged.words[2 * i], staged.words[2 * i + 1], column, is_needed, magnitude);
      }
      const unsigned step = column == 0 ? 0u : static_cast<unsigned>(p_.column_steps[column - 1]) * kPixelBytes;
      StoreSharedVectorIf(is_needed, stage + ((first + step) & kTargetBytes), images);
    }
  }

  // A column of two images, as halves. What no tap needs is not to be seen.
  static __device__ __forceinline__ Half2 PairOf(const uint2& even, const uint2& odd, int column, unsigned is_needed,
                                                 Magnitude& magnitude) {
    if constexpr (kIsFloat) {
      const float lower = BitsToFloat(column == 0 ? even.x : even.y), upper = BitsToFloat(column == 0 ? odd.x : odd.y);
      return magnitude.Rounded(is_needed != 0 ? lower : 0.0f, is_needed != 0 ? upper : 0.0f);
    } else {
      return SelectBytes(column < 2 ? even.x : even.y, column < 2 ? odd.x : odd.y,
                         column % 2 == 0 ? kLowerHalves : kUpperHalves);
    }
  }

  __device__ __forceinline__ unsigned ChannelBytes() const {
    return kPixelBytes * static_cast<unsigned>(p_.channel_pitch);
  }
  __device__ __forceinline__ int ChunkChannels() const { return p_.chunk_channels; }
  // The last chunk may have fewer; what stands at the other places is not read.
  __device__ __forceinline__ unsigned Channel(int chunk, unsigned place) const {
    return min(static_cast<unsigned>(chunk * p_.chunk_channels) + place,
               static_cast<unsigned>(t_.group_in_channels - 1));
  }
  __device__ __forceinline__ void BeginStage(const Tile& tile, const Position& at, const Staging& staging) const {
    if (at.round == 0) return;  // see StageFirst
    WaitAtBarrier(FreeBarrier(at.stage), blockDim.x);
    StageSteps(tile, at, staging);
  }

  __device__ __forceinline__ void EndStage(int stage) const {
    WaitForCopies<0>();
    ArriveAtBarrier(FilledBarrier(stage), blockDim.x);
  }

  __device__ __forceinline__ void StageSteps(const Tile& tile, const Position& at, const Staging& staging) const {
    for (int i = 0; i < t_.warps_m && tile.first_row_tile + i < t_.row_tiles_per_group; ++i) {
      const unsigned* begins = StepBegins(tile, tile.first_row_tile + i) + at.chunk;
      CopySteps(StepAddress(at.stage, i), begins[0], begins[1], staging.first, staging.threads);
    }
    CommitCopies();
  }

  // By so many threads, of which this is one.
  __device__ __forceinline__ void CopySteps(Shared to, unsigned begin, unsigned end, int thread, int threads) const {
    const unsigned char* from = static_cast<const unsigned char*>(p_.steps) + static_cast<size_t>(begin) * kStepBytes;
    const unsigned bytes = (end - begin) * kStepBytes, stride = static_cast<unsigned>(threads) * 16;
#pragma unroll 4
    for (unsigned byte = static_cast<unsigned>(thread) * 16; byte < bytes; byte += stride) {
      CopyAsync16Cached(to + byte, from + byte);
    }
  }
};

}  // namespace sparseconv::cuda
