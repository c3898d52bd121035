// Sparse 1x1 convolution on the sparse tensor cores (sm_80 and later), of planes of X as they lie in memory.
//
// Products and weights are those of tensor_conv.cuh. But a 1x1 convolution, without strides and padding, multiplies
// planes: 8 neighbouring positions of one, a segment, take the place of the 8 images there, and are 16 contiguous bytes
// of X already. So halves are staged by asynchronous copies, several chunks ahead, and nothing is turned around; floats
// come by registers and are rounded on their way. One image fills products as well as many do. Where X is concatenated
// of several tensors, each channel is read where it is.
//
// All warps of a block stage, and all multiply: warps_m row tiles by `runs` runs of kSegments segments, each by warps_k
// warps, which take turns at the steps. Such a layer waits for memory, not for products: so blocks go on from tile to
// tile, of the same rows, and have copies of the next one on their way while they store; and where a stage gets the
// same channels again and again, their weights stay.
#pragma once

#include "divide.cuh"
#include "recompute.cuh"
#include "segment_params.h"
#include "sources.cuh"
#include "tensor_sums.cuh"
#include "tensor_tile.cuh"

namespace sparseconv::cuda {

// T is the type of X and Y.
template <class T, int kSubtiles, int kSegments>
class SegmentConv : private TensorTile {
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  using Sums = TensorSums<kSubtiles, kSegments>;
  static constexpr int kRows = 16 * kSubtiles;

 public:
  __device__ __forceinline__ SegmentConv(const SegmentParams& params, const void* shared)
      : TensorTile(params.tile, shared), p_(params), shared_(shared) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    const unsigned seen = kIsFloat ? SumRounded() : SumCopied();
    if constexpr (!kIsFloat) return true;
    const unsigned all = SeenByBlock(seen);
    if (gridDim.y == 1) return DidHalvesHold(all);
    // What adds up the parts will tell.
    if (threadIdx.x == 0) p_.seen[blockIdx.y * gridDim.x + blockIdx.x] = all;
    return true;
  }

  // Of all the block's tiles, what was computed. To be called by all threads.
  __device__ __forceinline__ void RecomputeTiles() const {
    for (Tile tile = FirstTile(); tile.x < p_.num_segments; tile.x += p_.tile_step) {
      const int first_channel = tile.first_row_tile * kRows;
      OutputBox box;
      box.channels = min(t_.warps_m * kRows, t_.group_out_channels - first_channel);
      box.rows = 1;
      box.share = 0;
      box.shares = 1;
      const int end = min(tile.x + BlockSegments(), p_.num_segments);
      for (int segment = tile.x; segment < end;) {
        const SegmentPlace place = PlaceOfSegment(segment);
        const int count = min(end - segment, p_.plane_segments - place.first / kSegmentPositions);  // of this image
        box.columns = min(count * kSegmentPositions, p_.plane - place.first);
        box.first = FirstOutput(tile, place, first_channel);
        Recompute(p_.recompute, box, const_cast<void*>(shared_));
        segment += count;
      }
    }
  }

 private:
  static constexpr unsigned kSegmentBytes = kSegmentPositions * sizeof(Half);

  // --- places -------------------------------------------------------------------------------------------------------

  // Of the block's tiles, which are of the same rows; `x` is the first segment, `tile_step` of them further is the next
  // tile.
  __device__ __forceinline__ Tile FirstTile() const {
    Tile tile = {};
    int index = static_cast<int>(blockIdx.x);
    index = Split(index, t_.row_blocks_per_group, p_.by_row_blocks, tile.row_block);
    index = Split(index, t_.groups, p_.by_groups, tile.group);
    tile.first_row_tile = tile.row_block * t_.warps_m;
    tile.x = index * BlockSegments();
    return tile;
  }

  __device__ __forceinline__ int BlockSegments() const { return 1 << p_.segments_shift; }

  // What a warp computes: a row tile of the block and a run of segments, and which share of the steps.
  struct WarpPlace {
    int row_tile, run, share;
  };

  __device__ __forceinline__ WarpPlace PlaceOfWarp() const {
    WarpPlace place;
    place.share = SplitFew(SplitFew(Warp(), t_.warps_m, place.row_tile), p_.runs, place.run);
    return place;
  }
  __device__ __forceinline__ int BaseWarps() const { return t_.warps_m * p_.runs; }

  // Of all segments: its image, its first position in the plane, and how many of its positions there are, 8, 4 or none.
  struct SegmentPlace {
    int image, first, columns;
  };

  __device__ __forceinline__ SegmentPlace PlaceOfSegment(int segment) const {
    SegmentPlace place;
    place.image = Split(segment, p_.plane_segments, p_.by_plane_segments, place.first);
    place.first *= kSegmentPositions;
    place.columns = segment < p_.num_segments ? min(p_.plane - place.first, kSegmentPositions) : 0;
    return place;
  }

  // Index in Y, or among the sums of this part of the chunks, of a channel of the tile's group.
  __device__ __forceinline__ long long FirstOutput(const Tile& tile, const SegmentPlace& place, int channel) const {
    const long long plane =
        static_cast<long long>(place.image) * t_.out_channels + tile.group * t_.group_out_channels + channel;
    return plane * p_.plane + place.first;
  }

  // Of the block's part of the chunks.
  __device__ __forceinline__ int FirstChunk() const { return static_cast<int>(blockIdx.y) * p_.part_chunks; }
  __device__ __forceinline__ int EndChunk() const { return min(FirstChunk() + p_.part_chunks, p_.num_chunks); }
  // The last chunk may have fewer than the others.
  __device__ __forceinline__ int ChunkChannels(int chunk) const {
    return min(p_.chunk_channels, t_.group_in_channels - chunk * p_.chunk_channels);
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  // A stage holds the segments of a channel one after the other, and one that is empty: an odd number of them.
  __device__ __forceinline__ unsigned ChannelBytes() const {
    return kSegmentBytes * static_cast<unsigned>(BlockSegments() + 1);
  }

  __device__ __forceinline__ Shared StepAddress(int stage, int row_tile) const {
    return StageAddress(stage) + static_cast<unsigned>(p_.input_bytes + row_tile * p_.max_steps * Sums::kStepBytes);
  }
  // Where the steps of each chunk of the part begin, of a row tile of the block: listed once, in shared memory.
  __device__ __forceinline__ Shared StepBegin(int row_tile, int chunk) const {
    return StageAddress(t_.num_stages) +
           4u * static_cast<unsigned>(row_tile * (p_.part_chunks + 1) + chunk - FirstChunk());
  }

  // To be called by all threads, before a barrier.
  __device__ __forceinline__ void ListSteps(const Tile& tile) const {
    const int first = FirstChunk(), entries = EndChunk() - first + 1;
    for (int i = 0; i < t_.warps_m; ++i) {
      // A row tile that there is not has no steps.
      const bool exists = tile.first_row_tile + i < t_.row_tiles_per_group;
      const unsigned* begins =
          p_.step_begins +
          (tile.group * t_.row_tiles_per_group + (exists ? tile.first_row_tile + i : 0)) * (p_.num_chunks + 1) + first;
      for (int chunk = static_cast<int>(threadIdx.x); chunk < entries; chunk += static_cast<int>(blockDim.x)) {
        StoreShared(StepBegin(i, first + chunk), begins[exists ? chunk : 0]);
      }
    }
  }

  // Asks for the steps of a chunk, of all row tiles of the block.
  __device__ __forceinline__ void StageSteps(int chunk, int stage) const {
    for (int i = 0; i < t_.warps_m; ++i) {
      const Shared begins = StepBegin(i, chunk);
      const unsigned begin = LoadShared(begins), bytes = (LoadShared(begins + 4) - begin) * Sums::kStepBytes;
      const unsigned char* from = static_cast<const unsigned char*>(p_.steps) +
                                  static_cast<size_t>(begin) * Sums::kStepBytes + threadIdx.x * 16;
      Shared to = StepAddress(stage, i) + threadIdx.x * 16;
      for (unsigned byte = threadIdx.x * 16; byte < bytes; byte += blockDim.x * 16) {
        CopyAsync16Cached(to, from);
        to += blockDim.x * 16;
        from += blockDim.x * 16;
      }
    }
  }

  // What a thread reads of each channel: the same of all chunks.
  struct Reader {
    const unsigned char* from;  // of the first channel of the tile's group, where X is one tensor
    SegmentPlace place;         // `first` and `columns` are those of the thread's piece
  };

  // Pieces are so many positions of a plane, and neighbouring threads have neighbouring ones.
  template <int kPiecePositions>
  __device__ __forceinline__ Reader ReaderOf(const Tile& tile) const {
    constexpr int kPieces = kSegmentPositions / kPiecePositions;
    const int piece = static_cast<int>(threadIdx.x) & (BlockSegments() * kPieces - 1);
    Reader reader;
    reader.place = PlaceOfSegment(tile.x + piece / kPieces);
    reader.place.first += piece % kPieces * kPiecePositions;
    reader.place.columns -= piece % kPieces * kPiecePositions;
    const long long plane =
        static_cast<long long>(reader.place.image) * t_.in_channels + tile.group * t_.group_in_channels;
    reader.from = static_cast<const unsigned char*>(t_.x) + (plane * p_.plane + reader.place.first) * sizeof(T);
    return reader;
  }

  // The thread's piece of a channel. Only of one group X has sources.
  template <bool kHasSources>
  __device__ __forceinline__ const unsigned char* PieceOf(const Reader& reader, int channel) const {
    const long long plane_bytes = static_cast<long long>(p_.plane) * sizeof(T);
    if constexpr (!kHasSources) return reader.from + channel * plane_bytes;
    const int source = FindSourceNumber(p_.sources, channel);
    const int begin = p_.sources.begins[source], channels = p_.sources.begins[source + 1] - begin;
    const long long plane = static_cast<long long>(reader.place.image) * channels + channel - begin;
    return static_cast<const unsigned char*>(p_.sources.x[source]) + plane * plane_bytes +
           reader.place.first * sizeof(T);
  }

  // Where the block is among the chunks of its part, of all its tiles, one after the other.
  struct Cursor {
    Tile tile;
    int chunk, stage;
  };

  __device__ __forceinline__ Cursor Begin() const { return {FirstTile(), FirstChunk(), 0}; }
  __device__ __forceinline__ bool IsAtEnd(const Cursor& at) const { return at.tile.x >= p_.num_segments; }
  // Whether that was the last chunk of a tile.
  __device__ __forceinline__ bool Advance(Cursor& at) const {
    at.stage = at.stage + 1 == t_.num_stages ? 0 : at.stage + 1;
    if (++at.chunk < EndChunk()) return false;
    at.chunk = FirstChunk();
    at.tile.x += p_.tile_step;
    return true;
  }

  // Halves, `num_stages` - 1 chunks ahead.
  __device__ __forceinline__ unsigned SumCopied() {
    const WarpPlace warp = PlaceOfWarp();
    const int ahead = t_.num_stages - 1;
    Cursor next = Begin(), at = next;
    Reader reader = ReaderOf<kSegmentPositions>(next.tile);
    int fills = 0;
    ListSteps(next.tile);
    __syncthreads();
    // One group of copies each, also where there is nothing to copy, so that they can be counted.
    const auto stage_next = [&] {
      if (!IsAtEnd(next)) {
        StageCopies(reader, next.chunk, next.stage);
        if (fills++ < p_.step_fills) StageSteps(next.chunk, next.stage);
        if (Advance(next)) reader = ReaderOf<kSegmentPositions>(next.tile);
      }
      CommitCopies();
    };
    for (int i = 0; i < ahead; ++i) stage_next();
    while (!IsAtEnd(at)) {
      if (at.chunk == FirstChunk()) StartSums(at.tile, warp);
      if (ahead == 1) {
        WaitForCopies<0>();
      } else if (ahead == 2) {
        WaitForCopies<1>();
      } else {
        WaitForCopies<2>();
      }
      __syncthreads();  // the chunk is there, and the stage of the one before is free
      stage_next();
      Multiply(warp, at.chunk, at.stage, 0, 1);
      const Tile tile = at.tile;
      if (Advance(at)) Finish(tile, warp);
    }
    return 0;
  }

  __device__ __forceinline__ void StageCopies(const Reader& reader, int chunk, int stage) const {
    if (reader.place.columns <= 0) return;
    if (p_.sources.count != 0) {
      CopyChannels<true, false>(reader, chunk, stage);
    } else if (p_.has_vectors != 0) {
      CopyChannels<false, true>(reader, chunk, stage);
    } else {
      CopyChannels<false, false>(reader, chunk, stage);
    }
  }

  // kIsVector: all copies are of 16 bytes.
  template <bool kHasSources, bool kIsVector>
  __device__ __forceinline__ void CopyChannels(const Reader& reader, int chunk, int stage) const {
    const int first = chunk * p_.chunk_channels, count = ChunkChannels(chunk);
    const int step = static_cast<int>(blockDim.x) >> p_.segments_shift;
    const int segment = static_cast<int>(threadIdx.x) & (BlockSegments() - 1);
    int place = static_cast<int>(threadIdx.x) >> p_.segments_shift;
    Shared to = StageAddress(stage) + static_cast<unsigned>(place) * ChannelBytes() +
                static_cast<unsigned>(segment) * kSegmentBytes;
    const unsigned to_step = static_cast<unsigned>(step) * ChannelBytes();
    const long long from_step = static_cast<long long>(step) * p_.plane * static_cast<long long>(sizeof(T));
    const unsigned char* from = kHasSources ? nullptr : PieceOf<false>(reader, first + place);
#pragma unroll kIsVector ? 4 : 1
    for (; place < count; place += step, to += to_step) {
      if constexpr (kHasSources) from = PieceOf<true>(reader, first + place);
      if (kIsVector || p_.has_vectors != 0) {
        CopyAsync16ByLines(to, from);
      } else {
        CopyAsync8(to, from);
        if (reader.place.columns > kSegmentPositions / 2) CopyAsync8(to + 8, from + 8);
      }
      from += from_step;
    }
  }

  // Floats, which a thread loads in batches of as many pieces, while others are multiplied.
  static constexpr int kPieceFloats = 4, kBatchPieces = 4;
  struct Batch {
    uint4 pieces[kBatchPieces];
  };

  // Two stages: while a chunk is multiplied, the next one is loaded, rounded and stored. A block has one tile: with
  // more, where it stands would take registers that loads and sums need. Returns what was seen of X.
  __device__ __forceinline__ unsigned SumRounded() {
    const WarpPlace warp = PlaceOfWarp();
    const Tile tile = FirstTile();
    const Reader reader = ReaderOf<kPieceFloats>(tile);
    Magnitude magnitude;
    Batch batch;
    const int end = EndChunk();
    int chunk = FirstChunk(), stage = 0;
    ListSteps(tile);
    StartSums(tile, warp);
    LoadBatch(reader, chunk, 0, batch);
    __syncthreads();
    StageSteps(chunk, 0);
    CommitCopies();
    for (int i = 0; i < p_.batches; ++i) {
      StoreBatch(batch, ChunkChannels(chunk), i, 0, magnitude);
      LoadNext(reader, chunk, i, end, batch);
    }
    WaitForCopies<0>();
    __syncthreads();
    for (; chunk < end; ++chunk, stage ^= 1) {
      const int next = chunk + 1, channels = next < end ? ChunkChannels(next) : 0;
      if (next < end) StageSteps(next, stage ^ 1);
      CommitCopies();
      for (int i = 0; i < p_.batches; ++i) {
        StoreBatch(batch, channels, i, stage ^ 1, magnitude);
        LoadNext(reader, next, i, end, batch);
        Multiply(warp, chunk, stage, i, p_.batches);
      }
      WaitForCopies<0>();
      __syncthreads();
    }
    Finish(tile, warp);
    return magnitude.Seen();
  }

  // The batch behind one of a chunk.
  __device__ __forceinline__ void LoadNext(const Reader& reader, int chunk, int index, int end, Batch& batch) const {
    if (++index == p_.batches) index = 0, ++chunk;
    if (chunk < end) LoadBatch(reader, chunk, index, batch);
  }

  // Where the pieces of a thread are among the channels of a chunk: `first`, and so many channels further, each.
  struct Places {
    int first, step;
  };

  __device__ __forceinline__ Places PlacesOf(int batch) const {
    const int shift = p_.segments_shift + 1, step = static_cast<int>(blockDim.x) >> shift;
    return {(static_cast<int>(threadIdx.x) >> shift) + batch * kBatchPieces * step, step};
  }

  __device__ __forceinline__ void LoadBatch(const Reader& reader, int chunk, int index, Batch& batch) const {
    if (p_.sources.count != 0) {
      LoadPieces<true>(reader, chunk, index, batch);
    } else {
      LoadPieces<false>(reader, chunk, index, batch);
    }
  }

  template <bool kHasSources>
  __device__ __forceinline__ void LoadPieces(const Reader& reader, int chunk, int index, Batch& batch) const {
    const int first = chunk * p_.chunk_channels, count = reader.place.columns > 0 ? ChunkChannels(chunk) : 0;
    const Places places = PlacesOf(index);
#pragma unroll
    for (int i = 0; i < kBatchPieces; ++i) {
      const int place = places.first + i * places.step;
      batch.pieces[i] = LoadVectorIf(place < count, PieceOf<kHasSources>(reader, first + place));
    }
  }

  // Of a chunk of `count` channels.
  __device__ __forceinline__ void StoreBatch(const Batch& batch, int count, int index, int stage,
                                             Magnitude& magnitude) const {
    const int piece = static_cast<int>(threadIdx.x) & (2 * BlockSegments() - 1);
    const Places places = PlacesOf(index);
    const Shared to = StageAddress(stage) + static_cast<unsigned>(piece) * (kSegmentBytes / 2);
#pragma unroll
    for (int i = 0; i < kBatchPieces; ++i) {
      const int place = places.first + i * places.step;
      const uint4& words = batch.pieces[i];
      const Half2 lower = magnitude.Rounded(BitsToFloat(words.x), BitsToFloat(words.y));
      const Half2 upper = magnitude.Rounded(BitsToFloat(words.z), BitsToFloat(words.w));
      if (place < count) StoreSharedPair(to + static_cast<unsigned>(place) * ChannelBytes(), lower, upper);
    }
  }

  // --- products -----------------------------------------------------------------------------------------------------

  // Sums of halves begin with the bias; those of floats are of a scaled weight.
  __device__ __forceinline__ void StartSums(const Tile& tile, const WarpPlace& warp) {
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float bias = kIsFloat || warp.share != 0 ? 0.0f : BiasOf(tile, ChannelOf(tile, warp, m, i));
#pragma unroll
        for (int j = 0; j < kSegments; ++j) sums_.at[m][j][2 * i] = sums_.at[m][j][2 * i + 1] = bias;
      }
    }
  }

  // Of the tile's group, that the lane's sums 2i and 2i + 1 of a subtile belong to.
  static __device__ __forceinline__ int ChannelOf(const Tile& tile, const WarpPlace& warp, int subtile, int i) {
    return (tile.first_row_tile + warp.row_tile) * kRows + subtile * 16 + static_cast<int>(Lane()) / 4 + 8 * i;
  }

  // One of `parts` parts of the warp's share of a chunk's steps.
  __device__ __forceinline__ void Multiply(const WarpPlace& warp, int chunk, int stage, int part, int parts) {
    const Shared begins = StepBegin(warp.row_tile, chunk);
    const int steps = static_cast<int>(LoadShared(begins + 4) - LoadShared(begins));
    const Shared input = StageAddress(stage) + static_cast<unsigned>(warp.run * kSegments) * kSegmentBytes;
    const unsigned channel_bytes = ChannelBytes();
    sums_.Multiply(input, StepAddress(stage, warp.row_tile) + Lane() * 16, warp.share + part * p_.warps_k, steps,
                   p_.warps_k * parts, [channel_bytes](unsigned column) { return (column & 0xFFFu) * channel_bytes; });
  }

  // --- outputs ------------------------------------------------------------------------------------------------------
  //
  // Four lanes have the sums of a row: of each segment two each. They exchange them, so that each stores 16 bytes at a
  // time, a piece: of halves a whole segment, of floats half of one.

  static constexpr int kPieces = kIsFloat ? kSegments / 2 : kSegments / 4;  // of a row, that a lane stores
  // Of sums that are exchanged together.
  static constexpr int kGroup = kSegments / kPieces;

  // To be called by all threads.
  __device__ __forceinline__ void Finish(const Tile& tile, const WarpPlace& warp) {
    if (p_.warps_k > 1) AddShares(warp);
    if (warp.share > 0) return;
    const int lane = static_cast<int>(Lane()) % 4, row = (tile.first_row_tile + warp.row_tile) * kRows;
    long long first[kPieces];  // outputs, of the lane's first row
    int columns[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int segment = i * kGroup + (kIsFloat ? lane % 2 : lane);
      SegmentPlace place = PlaceOfSegment(tile.x + warp.run * kSegments + segment);
      if constexpr (kIsFloat) {
        place.first += lane / 2 * kPieceFloats;
        place.columns -= lane / 2 * kPieceFloats;
      }
      first[i] = FirstOutput(tile, place, row + static_cast<int>(Lane()) / 4) + blockIdx.y * p_.y_part;
      columns[i] = place.columns;
    }
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = ChannelOf(tile, warp, m, half);
        const bool exists = channel < t_.group_out_channels;
        const long long below = static_cast<long long>(16 * m + 8 * half) * p_.plane;
        float scale = 1.0f, bias = 0.0f;
        if constexpr (kIsFloat) {
          if (exists) scale = p_.scales[tile.group * t_.group_out_channels + channel];
          bias = BiasOf<float>(tile, channel);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          float sums[2 * kGroup];
#pragma unroll
          for (int j = 0; j < 2 * kGroup; ++j) {
            const float sum = sums_.at[m][i * kGroup + j / 2][2 * half + j % 2];
            sums[j] = kIsFloat ? sum * scale + bias : sum;
          }
          StorePiece(sums, first[i] + below, exists ? columns[i] : 0);
        }
      }
    }
  }

  // Of warps that have the same outputs, the first one gets the sums of the others, in their order: through shared
  // memory behind the list of steps. To be called by all threads.
  __device__ __forceinline__ void AddShares(const WarpPlace& warp) {
    const int base_warps = BaseWarps();
    const Shared kept = StageAddress(t_.num_stages) + static_cast<unsigned>(p_.list_bytes) + 16u * Lane();
    if (warp.share > 0) sums_.Keep(kept + static_cast<unsigned>(Warp() - base_warps) * Sums::kKeptBytes);
    __syncthreads();
    for (int share = 1; share < p_.warps_k && warp.share == 0; ++share) {
      sums_.AddKept(kept + static_cast<unsigned>((share - 1) * base_warps + Warp()) * Sums::kKeptBytes);
    }
  }

  // Of two words, a lane gives one to the lane `mask` away, and gets the same one of that: the first words of both go
  // to the lower lane, the second ones to the upper one. Done twice, it changes nothing.
  static __device__ __forceinline__ void Exchange(unsigned mask, unsigned& first, unsigned& second) {
    const bool is_upper = (Lane() & mask) != 0;
    const unsigned got = __shfl_xor_sync(0xFFFFFFFFu, is_upper ? first : second, static_cast<int>(mask));
    (is_upper ? first : second) = got;
  }

  // From two neighbours of each segment to a piece; `Spread` goes back.
  static __device__ __forceinline__ void Gather(unsigned (&words)[4]) {
    if constexpr (kIsFloat) {
      ExchangePairs(words);
    } else {
      ExchangeNeighbours(words);
      ExchangeHalves(words);
    }
  }
  static __device__ __forceinline__ void Spread(unsigned (&words)[4]) {
    if constexpr (kIsFloat) {
      ExchangePairs(words);
    } else {
      ExchangeHalves(words);
      ExchangeNeighbours(words);
    }
  }
  static __device__ __forceinline__ void ExchangePairs(unsigned (&words)[4]) {
    Exchange(1, words[0], words[2]);
    Exchange(1, words[1], words[3]);
  }
  static __device__ __forceinline__ void ExchangeNeighbours(unsigned (&words)[4]) {
    Exchange(1, words[0], words[1]);
    Exchange(1, words[2], words[3]);
  }
  static __device__ __forceinline__ void ExchangeHalves(unsigned (&words)[4]) {
    Exchange(2, words[0], words[2]);
    Exchange(2, words[1], words[3]);
  }

  // Of `columns` columns, 8, 4 or none; as many sums as make four words.
  template <int kCount>
  __device__ __forceinline__ void StorePiece(const float (&sums)[kCount], long long index, int columns) const {
    static_assert(kCount * sizeof(T) == 16);
    const Epilogue& e = t_.epilogue;
    const bool exists = columns > 0, has_second = columns > kSegmentPositions / 2, is_vector = p_.has_vectors != 0;
    Floats<kCount> all;
#pragma unroll
    for (int i = 0; i < kCount; ++i) all.at[i] = sums[i];
    if (e.residual != nullptr) {
      const T* from = static_cast<const T*>(e.residual) + index;
      const uint4 four = is_vector ? LoadVectorIf(exists, from) : LoadHalfVectorsIf(exists, has_second, from);
      unsigned residuals[] = {four.x, four.y, four.z, four.w};
      Spread(residuals);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kIsFloat) {
          all.at[i] += BitsToFloat(residuals[i]);
        } else {
          all.at[i] += ToFloat(i % 2 == 0 ? Lower(residuals[i / 2]) : Upper(residuals[i / 2]));
        }
      }
    }
    if (!IsBound(e.activation)) all = ActivateElsewhere<Half>(e.activation, all, e.alpha, e.beta);
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Bounded<T>(e.bounds, all.at + i * (kCount / 4));
    Gather(words);
    if (!exists) return;
    T* to = static_cast<T*>(t_.y) + index;
    if (is_vector) {
      StoreOnce(reinterpret_cast<uint4*>(to), uint4{words[0], words[1], words[2], words[3]});
    } else {
      StoreOnce(reinterpret_cast<uint2*>(to), uint2{words[0], words[1]});
      if (has_second) StoreOnce(reinterpret_cast<uint2*>(to) + 1, uint2{words[2], words[3]});
    }
  }

  const SegmentParams& p_;
  const void* const shared_;
  Sums sums_;
};

}  // namespace sparseconv::cuda
