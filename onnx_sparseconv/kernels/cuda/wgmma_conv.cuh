// Sparse convolution by warpgroups of sparse tensor cores (sm_90a).
//
// As in tensor_conv.cuh, weights without structure become 2:4 by another order of what is summed, and the input is
// staged as pixels of 8 images; warpgroups.cuh says in which order. 32 columns are the same tap of 32 channels.
//
// Each block of rows has an order of channels of its own, so such blocks share nothing that is staged: what turns
// columns of images into images of columns would be done again for each 64 outputs. So it is done before, once
// (interleave.cuh), and staging is copies of 16 bytes.
//
// A warpgroup computes 64 output channels at kPositions neighbouring pixels of 8 images. Positions go on from a row of
// outputs to the next one: what lies between, where a row ends, is computed and dropped. Where there are few images,
// eight strips of an image stand for eight images.
#pragma once

#include "warpgroups.cuh"

namespace sparseconv::cuda {

template <class T, int kPositions>
class WgmmaConv : private Warpgroups {
 public:
  __device__ __forceinline__ WgmmaConv(const WgmmaParams& params, const void* shared)
      : Warpgroups(params.common, shared),
        p_(params),
        rows_(Filled(t_.num_stages) + threadIdx.x / 32 * kPartRows * kWgmmaRowPitch) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    LetNextLaunchBegin();
    InitBarriers();
    unsigned seen = 0;
    if (IsProductWarp()) {
      WaitForLaunchBefore();
      Multiply();
    } else {
      Stage();
      if constexpr (kIsFloat) seen = SeenBefore();
    }
    return !kIsFloat || AreOutputsDone(seen);
  }

  // Of all the block's tiles, what was computed. To be called by all threads.
  __device__ __forceinline__ void RecomputeTiles() const {
    ForTiles([&](const Tile& tile) { RecomputeTile(tile); });
  }

 private:
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  static constexpr unsigned kStepsAtOnce = 9;

  // --- staging ------------------------------------------------------------------------------------------------------

  // Each warp copies a quarter of a chunk's channels, each lane a pixel of 32 at a time.
  __device__ __forceinline__ void Stage() const {
    const int first = static_cast<int>(threadIdx.x) - kWgmmaProductThreads;
    const int first_place = first / 32 * kPlaces;
    const int pixels = t_.in_rows * t_.in_columns + p_.more_columns;
    const auto plane = static_cast<unsigned>(p_.x_rows * p_.x_row_pixels);
    PlanPixels(first, pixels);
    Position at;
    ForTiles([&](const Tile& tile) {
      const Chunks chunks = ChunksOf(tile);
      const auto eight = static_cast<long long>(tile.first_image / kTensorImages);
      const unsigned char* x =
          static_cast<const unsigned char*>(t_.x) +
          kPixelBytes * ((eight * t_.in_channels + tile.group * t_.group_in_channels) * plane +
                         (tile.y * t_.strides[0] * p_.x_row_pixels + tile.column * p_.x_window_columns));
      // Each lane keeps one channel of a chunk; that of the next chunk is on its way meanwhile.
      int next_channel = chunks.count > 0 ? ChannelOf(chunks.first) : 0;
      for (at.chunk = 0; at.chunk < chunks.count; Advance(at)) {
        const int channel = next_channel;
        if (at.chunk + 1 < chunks.count) next_channel = ChannelOf(chunks.first + at.chunk + 1);
        unsigned planes[kPlaces];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          planes[i] = kPixelBytes * plane * static_cast<unsigned>(__shfl_sync(0xFFFFFFFFu, channel, first_place + i));
        }
        WaitForEmptied(at);
        if (first == 0) {
          const unsigned* begins = w_.chunk_begins + chunks.first + at.chunk;
          StageWeight(at.stage, 16 * static_cast<size_t>(begins[0]), 16 * (begins[1] - begins[0]));
        }
        WaitForLaunchBefore();  // the weight, and where things lie, need no such wait
        const Shared stage = StageAddress(at.stage) + static_cast<unsigned>(first_place) * kPixelBytes;
        for (int pixel = static_cast<int>(Lane()); pixel < pixels; pixel += 32) {
          unsigned offset, to;
          LoadSharedPair(PixelAddress(pixel), offset, to);
#pragma unroll
          for (unsigned i = 0; i < kPlaces; ++i) {
            CopyAsync16ByLines(stage + to + i * kPixelBytes, x + (offset + planes[i]));
          }
        }
        ArriveAfterCopies(Filled(at.stage));
      }
    });
  }

  // That of the lane's place in a chunk.
  __device__ __forceinline__ int ChannelOf(int chunk) const {
    return w_.channels[chunk * kWgmmaChannels + static_cast<int>(Lane())];
  }

  // Where a tile's pixels lie in a plane of X and in a stage, in bytes: the same for all channels.
  __device__ __forceinline__ void PlanPixels(int first, int pixels) const {
    for (int pixel = first; pixel < pixels; pixel += 32 * kStagingWarps) {
      const int row = min(pixel / t_.in_columns, t_.in_rows - 1), column = pixel - row * t_.in_columns;
      StoreShared(PixelAddress(pixel), kPixelBytes * static_cast<unsigned>(row * p_.x_row_pixels + column));
      StoreShared(PixelAddress(pixel) + 4, kWgmmaPixelBytes * static_cast<unsigned>(PixelOf(row, column)));
    }
    WaitAtBarrier(1, 32 * kStagingWarps);
  }
  // Which one it is in a stage. Pixels that outputs beside and below each other read with the same tap are neighbours,
  // and in lines that follow each other.
  __device__ __forceinline__ int PixelOf(int row, int column) const {
    int row_place, column_place;
    const int line = Split(row, t_.strides[0], row_place), at = Split(column, t_.strides[1], column_place);
    int longer;  // so many of the places have one line more
    const int lines = Split(t_.in_rows, t_.strides[0], longer);
    const int first = column_place * t_.in_rows + row_place * lines + min(row_place, longer);
    return (first + line) * t_.line_pitch + at;
  }
  __device__ __forceinline__ Shared PixelAddress(int pixel) const { return Table() + static_cast<unsigned>(8 * pixel); }

  // --- products -----------------------------------------------------------------------------------------------------

  // The row and column of the tile at which the warpgroup's run begins.
  struct RunPlace {
    int y, x;
  };

  __device__ __forceinline__ void Multiply() {
    const unsigned row_tile = threadIdx.x / kWarpgroup % static_cast<unsigned>(t_.warps_m);
    const RunPlace run = RunOf();
    const unsigned first = kWgmmaPixelBytes * static_cast<unsigned>(run.y * t_.line_pitch + run.x);
    const unsigned values = static_cast<unsigned>(w_.input_bytes + w_.header_bytes) + row_tile * kValueBytes;
    const unsigned places =
        row_tile * kPlaceBytes + threadIdx.x % kWarpgroup / 32 * 64 + Lane() / 4 * 8 + Lane() % 2 * 4;
    unsigned metas[kStepsAtOnce] = {};
    Position at;
    ForTiles([&](const Tile& tile) {
      const Chunks chunks = ChunksOf(tile);
      const int num_chunks = Uniform(chunks.count);
      const Finishes<T> finishes = FinishesOf<T>(tile, static_cast<int>(row_tile));
      if (num_chunks == 0) ClearSums();
      for (at.chunk = 0; at.chunk < num_chunks; Advance(at)) {
        WaitForBarrier(Filled(at.stage), at.round % 2);
        FenceSharedForTensorCores();  // copies arrive without a thread that could
        MultiplyChunk(at, first, values, places, metas);
        if (t_.num_stages == 1 || at.chunk + 1 == num_chunks) {
          WaitForProducts<0>();
          Release(at.stage);
        }
      }
      StoreTile(OutputsOf(tile, static_cast<int>(row_tile), run), finishes);
    });
  }

  __device__ __forceinline__ void ClearSums() {
#pragma unroll
    for (int i = 0; i < 4 * kPositions; ++i) sums_[i] = 0.0f;
  }

  __device__ __forceinline__ RunPlace RunOf() const {
    int x;
    const int run = static_cast<int>(threadIdx.x / kWarpgroup) / t_.warps_m;
    const int y = Split(run, t_.tile_w / p_.run_w, x);
    return {y * p_.run_lines, x * p_.run_w};
  }

  // A tap of 32 channels for each step. Most chunks have all taps, one after the other.
  __device__ __forceinline__ void MultiplyChunk(const Position& at, unsigned first, unsigned values, unsigned places,
                                                unsigned (&metas)[kStepsAtOnce]) {
    const Shared stage = StageAddress(at.stage), header = stage + static_cast<unsigned>(w_.input_bytes);
    const unsigned steps = Uniform(LoadShared(header));
    const auto row_tiles = static_cast<unsigned>(t_.warps_m);
    ChunkSteps chunk;
    chunk.steps = steps;
    chunk.header = header;
    chunk.meta = header + static_cast<unsigned>(w_.header_bytes) + steps * row_tiles * kValueBytes + places;
    chunk.a = MatrixAt(Uniform(stage + values), kMatrixBytes, 2 * kMatrixBytes);
    chunk.b = MatrixAt(Uniform(stage + first), kMatrixBytes, kWgmmaPixelBytes);
    if (steps == static_cast<unsigned>(p_.taps)) {
      MultiplySteps<true>(at, chunk, metas);
    } else {
      MultiplySteps<false>(at, chunk, metas);
    }
  }

  struct ChunkSteps {
    unsigned steps;
    Shared header, meta;
    Matrix a, b;  // of the first step; for the first tap
  };

  // Some products are always on their way while what the next ones need is loaded, also from one chunk to the next: the
  // stage before is released when the first of this one are behind it.
  //
  // The metadata of a product must stay in its register until the product is complete (seen on an H200: the PTX manual
  // says so of sums and of A alone). So those of a part of the steps are loaded when another part has followed the last
  // one in these registers, and that one is complete; and they keep them even where there is no such step.
  template <bool kHasAllTaps>
  __device__ __forceinline__ void MultiplySteps(const Position& at, const ChunkSteps& chunk,
                                                unsigned (&metas)[kStepsAtOnce]) {
    const auto row_tiles = static_cast<unsigned>(t_.warps_m);
    const unsigned steps = chunk.steps;
    for (unsigned begin = 0; begin < steps; begin += kStepsAtOnce) {
#pragma unroll
      for (unsigned part = 0; part < kStepParts; ++part) {
        if (begin + StepPart(part) >= steps) {
          if (part == 1) WaitForProducts<0>();  // none follows the first one, whose registers are the next to be loaded
          break;
        }
        unsigned taps[kStepsAtOnce];
#pragma unroll
        for (unsigned i = StepPart(part); i < StepPart(part + 1); ++i) {
          LoadSharedIf(begin + i < steps, metas[i], chunk.meta + (begin + i) * row_tiles * kPlaceBytes);
          if (!kHasAllTaps) taps[i] = LoadShared(chunk.header + 4 + 4 * min(begin + i, steps - 1));
        }
        FenceSums();
#pragma unroll
        for (unsigned i = StepPart(part); i < StepPart(part + 1); ++i) {
          if (begin + i < steps) {
            const unsigned tap = kHasAllTaps ? p_.tap_bytes[begin + i] : p_.tap_bytes[Uniform(taps[i])];
            MultiplySparse(sums_, Moved(chunk.a, (begin + i) * row_tiles * kValueBytes), Moved(chunk.b, tap), metas[i],
                           i > 0 || begin > 0 || at.chunk > 0);
          }
        }
        CommitProducts();
        WaitForProducts<1>();
        if (part == 0 && begin == 0 && at.chunk > 0 && t_.num_stages > 1) {
          Release((at.stage == 0 ? t_.num_stages : at.stage) - 1);
        }
      }
    }
  }

  // The first step of a part; there are three. The first part is short, for the stage before waits for it.
  static constexpr unsigned kStepParts = 3;
  static __device__ __forceinline__ constexpr unsigned StepPart(unsigned part) { return part == 0 ? 0 : 4 * part - 3; }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // Outputs pass through shared memory, a part of a warp's at a time: those of 8 channels of 4 images, a row of 64
  // bytes for each. So neighbouring lanes store neighbouring columns.
  static constexpr int kPartRows = 32;
  static constexpr int kPartPositions = 64 / sizeof(T);
  static constexpr int kParts = 4 * kMaxWgmmaPositions / kPartPositions;

  // Which of a thread's sums make up a part: of its two channels, of the images of a pair, and of its positions.
  struct Part {
    int upper, odd, first;

    __device__ __forceinline__ explicit Part(int index)
        : upper(index / 2 % 2), odd(index % 2), first(index / 4 * kPartPositions) {}
  };

  // Where the sums of a warp belong in Y.
  struct Outputs {
    long long first;       // index of that of its first channel and image, of its first position
    int image, channel;    // from one to the next
    unsigned end;          // of `run_outputs`, those below are in Y
    int last_end;          // .. of the last image
    int channels, images;  // that are
  };

  __device__ __forceinline__ Outputs OutputsOf(const Tile& tile, int row_tile, const RunPlace& run) const {
    Outputs outputs;
    const int y = tile.y + run.y, x = tile.x + run.x, channel = FirstChannel(tile, row_tile);
    outputs.channel = p_.y_plane;
    outputs.image = p_.y_image;
    outputs.first = blockIdx.y * p_.y_part + tile.first_image / kTensorImages * p_.y_eight +
                    ((tile.group * t_.group_out_channels + channel) * outputs.channel + y * t_.out_w + x);
    outputs.end = static_cast<unsigned>(EndOfRun(t_.out_h - y, x));
    outputs.last_end = EndOfRun(p_.last_rows - y, x);
    outputs.channels = t_.group_out_channels - channel;
    outputs.images = min(tile.images, p_.images);
    return outputs;
  }

  // Of `run_outputs`, where so many rows are left, and a run begins at column x: a tile's last one may lie beyond a
  // row.
  __device__ __forceinline__ int EndOfRun(int rows, int x) const {
    if (rows <= 0 || x >= t_.out_w) return 0;
    return p_.run_lines == 1 ? t_.out_w - x : rows * t_.out_w;
  }

  __device__ __forceinline__ void StoreTile(const Outputs& outputs, const Finishes<T>& finishes) const {
#pragma unroll 1
    for (int i = 0; i < kParts && Part(i).first < kPositions; ++i) {
      if (t_.epilogue.residual != nullptr) {
        MovePart<false>(outputs, Part(i));
        WaitForWarp();
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // They must be named by constants. What is added to them would be for all parts before the first one.
        if (part == i) KeepPart(Part(part), (Part(part).upper == 0 ? finishes.lower : finishes.upper).Unforeseen());
      }
      WaitForWarp();
      MovePart<true>(outputs, Part(i));
      WaitForWarp();
    }
  }

  // Of a part, positions being counted from its first.
  __device__ __forceinline__ Shared RowAddress(int row, int position) const {
    return rows_ + static_cast<unsigned>(row * kWgmmaRowPitch + static_cast<int>(sizeof(T)) * position);
  }

  // Finishes outputs, where the residuals are that belong to them.
  __device__ __forceinline__ void KeepPart(const Part& part, const Finish<T>& finish) const {
    constexpr int kCount = kVector<T>;
    const Epilogue& e = t_.epilogue;
#pragma unroll
    for (int first = 0; first < kPartPositions; first += kCount) {
      if (part.first + first >= kPositions) continue;
      const Shared address = RowAddress(static_cast<int>(Lane()), first);
      Floats<kCount> sums;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int position = part.first + first + i;
        sums.at[i] = position < kPositions ? finish(sums_[4 * position + 2 * part.upper + part.odd]) : 0.0f;
      }
      if (e.residual != nullptr) Add<T>(LoadSharedVector(address), sums);
      if (HasActivation()) sums = ActivateElsewhere<Half>(e.activation, sums, e.alpha, e.beta);
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = Bounded<T>(e.bounds, sums.at + i * kCount / 4);
      StoreSharedVectorIf(1, address, words);
    }
  }

  // Outputs to Y, or residuals from where they belong to outputs.
  template <bool kIsOutput>
  __device__ __forceinline__ void MovePart(const Outputs& outputs, const Part& part) const {
    if (p_.out_columns == 8) {
      if constexpr (sizeof(T) == sizeof(Half)) MoveColumns<kIsOutput, 8>(outputs, part);
    } else if (p_.out_columns == 4) {
      MoveColumns<kIsOutput, 4>(outputs, part);
    } else if (p_.out_columns == 2) {
      MoveColumns<kIsOutput, 2>(outputs, part);
    } else {
      MoveColumns<kIsOutput, 1>(outputs, part);
    }
  }

  template <bool kIsOutput, int kColumns>
  __device__ __forceinline__ void MoveColumns(const Outputs& outputs, const Part& part) const {
    constexpr int kRowLanes = kPartPositions / kColumns, kLaneRows = 32 / kRowLanes;  // at a time
    constexpr int kAtOnce = kLaneRows == 8 ? 2 : 4;
    const int lane = static_cast<int>(Lane()), position = lane % kRowLanes * kColumns;
    // Rows go through the pairs of images, then through the channels. Those of a lane are kLaneRows apart.
    const int row = lane / kRowLanes, output = p_.run_outputs[part.first + position];
    const int all = outputs.images - (output < outputs.last_end ? 0 : 1);
    const int images = static_cast<unsigned>(output) < outputs.end ? all - part.odd - row % 4 * 2 : 0;
    const int channels = outputs.channels - row / 4 - 8 * part.upper;
    const long long index = outputs.first + (row / 4 + 8 * part.upper) * outputs.channel +
                            (row % 4 * 2 + part.odd) * outputs.image + output;
    // Of residuals, nothing is stored.
    T* first = static_cast<T*>(kIsOutput ? t_.y : const_cast<void*>(t_.epilogue.residual)) + index;
    const Shared shared = RowAddress(row, position);
#pragma unroll
    for (int next = 0; next < kPartRows; next += kAtOnce * kLaneRows) {
      Columns<kColumns * sizeof(T)> columns[kAtOnce];
      T* at = first;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int skipped = next + i * kLaneRows;
        if (kIsOutput) {
          columns[i].LoadShared(shared + static_cast<unsigned>(skipped * kWgmmaRowPitch));
        } else {
          if (skipped % 4 * 2 < images && skipped / 4 < channels) columns[i].Load(at);
          at += RowStep<kLaneRows>(outputs, skipped);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int skipped = next + i * kLaneRows;
        if (kIsOutput) {
          if (skipped % 4 * 2 < images && skipped / 4 < channels) columns[i].Store(at);
          at += RowStep<kLaneRows>(outputs, skipped);
        } else {
          columns[i].StoreShared(shared + static_cast<unsigned>(skipped * kWgmmaRowPitch));
        }
      }
      first = at;
    }
  }

  // In the tensor, from where a lane's row belongs to where its next one does, `skipped` rows behind its first one.
  template <int kLaneRows>
  static __device__ __forceinline__ int RowStep(const Outputs& outputs, int skipped) {
    const int next = skipped + kLaneRows;
    return (next / 4 - skipped / 4) * outputs.channel + (next % 4 - skipped % 4) * 2 * outputs.image;
  }

  // --- what halves could not hold -----------------------------------------------------------------------------------

  __device__ __forceinline__ void RecomputeTile(const Tile& tile) const {
    const int images = min(tile.images, p_.images);
    OutputBox box = BoxOf(tile);
    box.columns = min(t_.tile_w, t_.out_w - tile.x);
    for (int i = 0; i < images; ++i) {
      box.rows = min(t_.tile_h, (i + 1 < images ? t_.out_h : p_.last_rows) - tile.y);
      box.first = tile.first_image / kTensorImages * p_.y_eight + static_cast<long long>(i) * p_.y_image +
                  FirstPlane(tile, 0) * p_.y_plane + (tile.y * t_.out_w + tile.x);
      Recompute(box);
    }
  }

  const WgmmaParams& p_;
  const Shared rows_;  // of the warp's parts
  float sums_[4 * kPositions];
};

}  // namespace sparseconv::cuda
