// Sparse 1x1 convolution by warpgroups of sparse tensor cores (sm_90a).
//
// A 1x1 convolution multiplies the weight by planes of X as they lie in memory, row after row. So 8 neighbouring
// positions of a plane, a segment, are what 8 images are to the kernel for windows: X is staged as it is, in copies of
// 16 bytes (or twice 8), in whatever order of channels a block of rows has; nothing is interleaved before. Where planes
// do not begin at multiples of 8 bytes, or positions are not neighbours (strides, padding), gather.cuh brings them into
// this form.
//
// Such a layer waits for memory, not for products. So there are many stages: copies of a tile are on their way while
// the one before it is finished. A residual takes the same way: behind a tile's channels, the planes of the residual
// are staged like further channels, 32 of them at a time, and added to the sums from there. One of floats is added
// where outputs are stored.
//
// Where X is concatenated of several tensors, a chunk's channels are of one of them (wgmma_weight.cc), which is read
// where it is: a chunk of another one begins elsewhere, and there is no more to it.
//
// Floats are rounded to halves on their way: they come by registers, a chunk ahead of those that are stored. So the
// warps that stage have more registers than those that multiply.
#pragma once

#include "magnitude.cuh"
#include "sources.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

template <class T, int kSegments>
class PointwiseConv : private Warpgroups {
 public:
  __device__ __forceinline__ PointwiseConv(const PointwiseParams& params, const void* shared)
      : Warpgroups(params.common, shared),
        p_(params),
        chunks_(ChunksOf(TileAt(static_cast<int>(blockIdx.x)))),
        part_(Filled(t_.num_stages) + threadIdx.x / 32 * kPartSegments * kPitch) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    LetNextLaunchBegin();
    InitBarriers();
    unsigned seen = 0;
    if (IsProductWarp()) {
      if constexpr (kIsFloat) GiveUpRegisters<kProductRegisters>();
      WaitForLaunchBefore();
      Multiply();
    } else if constexpr (kIsFloat) {
      TakeRegisters<kStagingRegisters>();
      if (p_.rounds_x != 0) {
        seen = Runs() == 1 ? StageFloats<1>() : StageFloats<2>();
      } else {
        Stage();
        seen = SeenBefore();
      }
    } else {
      Stage();
    }
    return !kIsFloat || AreOutputsDone(seen);
  }

  // Of all the block's tiles, what was computed. To be called by all threads.
  __device__ __forceinline__ void RecomputeTiles() const {
    ForTiles([&](const Tile& tile) { RecomputeTile(tile); });
  }

 private:
  static constexpr unsigned kRunBytes = kSegments * kWgmmaPixelBytes;  // of a stage
  static constexpr int kMaxRuns = 2;
  static constexpr int kWarpRows = 16;
  // Of 168 for each thread.
  static constexpr int kProductRegisters = 160, kStagingRegisters = 184;
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  // Of outputs on their way: positions of a segment lie together, of 16 rows.
  static constexpr int kOutBytes = kSegmentPositions * sizeof(T);
  static constexpr int kPitch = kWarpRows * kOutBytes + 16;
  static constexpr int kPartSegments = kPointwisePartSegments * sizeof(Half) / sizeof(T);
  static_assert(kWgmmaProductThreads / 32 * kPartSegments * kPitch <= kPointwisePartBytes);
  static constexpr int kParts = kSegments / kPartSegments;

  __device__ __forceinline__ int Runs() const {
    return kWgmmaProductThreads / static_cast<int>(kWarpgroup) / t_.warps_m;
  }

  // Where a segment of a run lies: images and segments from where the tile begins. There is no such image for those
  // behind the run's.
  struct SegmentPlace {
    int image, segment;
  };

  __device__ __forceinline__ SegmentPlace PlaceOfSegment(int run, int index) const {
    SegmentPlace place;
    place.image = 0;
    place.segment = index;
    if (p_.run_images > 1) place.image = Split(index, p_.run_segments, place.segment);
    place.image += run * p_.run_step_images;
    place.segment += run * p_.run_step_segments;
    if (index >= p_.run_images * p_.run_segments) place.image = t_.batch;
    return place;
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  // Channels that follow each other in memory, of each image.
  struct Planes {
    const unsigned char* x;  // the first image's first one
    int channels;            // from one image to the next
  };

  // Those of X that a tile's chunk reads; of a source, where there are several. The chunk's entries in the table, which
  // are multiples of 8 bytes, have the source's number in their lowest bits, for which this begins as much earlier.
  __device__ __forceinline__ Planes PlanesOfX(const Tile& tile, int source) const {
    if (p_.sources.count == 0) {
      const long long first = static_cast<long long>(tile.group) * t_.group_in_channels;
      return {static_cast<const unsigned char*>(t_.x) + first * p_.x_plane_bytes, t_.in_channels};
    }
    return {static_cast<const unsigned char*>(p_.sources.x[source]) - source,
            p_.sources.begins[source + 1] - p_.sources.begins[source]};
  }

  // Of a chunk.
  __device__ __forceinline__ int ChunkSource(int chunk) const {
    if (p_.sources.count == 0) return 0;
    return static_cast<int>(LoadShared(Table() + static_cast<unsigned>(4 * kWgmmaChannels * chunk)) % kMaxSources);
  }

  // The lane's segments of a tile, one of each run, in the first channel of what the tile reads.
  struct Source {
    const unsigned char* from[kMaxRuns];
    int bytes[kMaxRuns];  // of the plane, from there on; 0 or less where there is no such segment
    unsigned plane_bytes;
  };

  // Each warp copies a quarter of a chunk's channels, each lane a segment of each run. Where runs are short, its halves
  // copy different channels.
  __device__ __forceinline__ void Stage() const {
    const bool is_paired = p_.run_images * p_.run_segments <= 32 / 2;
    const int lane = static_cast<int>(Lane()) % (is_paired ? 32 / 2 : 32);
    SegmentPlace places[kMaxRuns];
#pragma unroll
    for (int run = 0; run < kMaxRuns; ++run) places[run] = PlaceOfSegment(run, lane);
    const auto source_of = [&](const Planes& planes, unsigned plane_bytes, const Tile& tile) {
      Source source;
      source.plane_bytes = plane_bytes;
#pragma unroll
      for (int run = 0; run < kMaxRuns; ++run) {
        const int image = tile.y + places[run].image, first = (tile.x + places[run].segment) * kPixelBytes;
        const bool exists = run < Runs() && image < t_.batch;
        source.bytes[run] = exists ? static_cast<int>(plane_bytes) - first : 0;
        source.from[run] = planes.x + static_cast<long long>(image) * planes.channels * plane_bytes + first;
      }
      return source;
    };
    ListPlanes();
    Position at;
    const auto stage = [&](const Source& source) {
      if (is_paired) {
        StagePlanes<2>(at, source);
      } else {
        StagePlanes<1>(at, source);
      }
    };
    ForTiles([&](const Tile& tile) {
      Source x;
      int known = -1;  // which one that is
      for (at.chunk = 0; at.chunk < chunks_.count; Advance(at)) {
        WaitForEmptied(at);
        // The warps take turns.
        if (at.chunk % kStagingWarps == StagingWarp() && Lane() == 0) StageChunk(at.stage, at.chunk);
        const int number = ChunkSource(at.chunk);
        if (number != known) x = source_of(PlanesOfX(tile, number), p_.x_plane_bytes, tile);
        known = number;
        WaitForLaunchBefore();  // the weight, and where planes lie, need no such wait
        stage(x);
      }
      if (kIsFloat || t_.epilogue.residual == nullptr) return;
      WaitForLaunchBefore();
      const long long first = static_cast<long long>(tile.group) * t_.group_out_channels;
      Planes planes;
      planes.x = static_cast<const unsigned char*>(t_.epilogue.residual) + first * p_.residual_plane_bytes;
      planes.channels = t_.out_channels;
      const Source residual = source_of(planes, p_.residual_plane_bytes, tile);
      for (; at.chunk < chunks_.count + t_.warps_m * kRows / kWgmmaChannels; Advance(at)) {
        WaitForEmptied(at);
        stage(residual);
      }
    });
  }

  // By one thread: the part of the weight.
  __device__ __forceinline__ void StageChunk(int stage, int chunk) const {
    const auto bytes = static_cast<unsigned>(p_.chunk_bytes);
    StageWeight(stage, static_cast<size_t>(chunks_.first + chunk) * bytes, bytes);
  }

  // Where the plane of a channel of X begins, behind the first one of its group, or of its source, and which that is.
  __device__ __forceinline__ unsigned PlaneOfX(int channel) const {
    const int source = FindSourceNumber(p_.sources, channel);
    return p_.x_plane_bytes * static_cast<unsigned>(channel - p_.sources.begins[source]) |
           static_cast<unsigned>(source);
  }

  // Where the planes of all chunks begin, and those of the block's rows in the residual: known once, and waited for
  // never again.
  __device__ __forceinline__ void ListPlanes() const {
    constexpr int kThreads = 32 * kStagingWarps;
    const int* channels = w_.channels + chunks_.first * kWgmmaChannels;
    const int count = chunks_.count * kWgmmaChannels, rows = t_.warps_m * kRows;
    const int first_row = TileAt(static_cast<int>(blockIdx.x)).first_row_tile * kRows;
    for (int i = static_cast<int>(threadIdx.x) - kWgmmaProductThreads; i < count + rows; i += kThreads) {
      const unsigned plane =
          i < count
              ? PlaneOfX(channels[i])
              : p_.residual_plane_bytes * static_cast<unsigned>(min(first_row + i - count, t_.group_out_channels - 1));
      StoreShared(Table() + static_cast<unsigned>(4 * i), plane);
    }
    WaitAtBarrier(1, kThreads);
  }

  // Of places of the table, from `first` on.
  template <int kCount>
  __device__ __forceinline__ void PlanesOf(int first, unsigned (&planes)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 four = LoadSharedVector(Table() + static_cast<unsigned>(4 * (first + i)));
      planes[i] = four.x, planes[i + 1] = four.y, planes[i + 2] = four.z, planes[i + 3] = four.w;
    }
  }

  // Those of a chunk that the warp stages; each of kShares shares of its lanes some of them.
  template <int kShares>
  __device__ __forceinline__ void StagePlanes(const Position& at, const Source& source) const {
    constexpr int kCount = kPlaces / kShares, kShareLanes = 32 / kShares;
    const int lane = static_cast<int>(Lane());
    const int first_place = StagingWarp() * kPlaces + lane / kShareLanes * kCount;
    unsigned planes[kCount];
    PlanesOf(at.chunk * kWgmmaChannels + first_place, planes);
    const Shared to = StageAddress(at.stage) + static_cast<unsigned>(first_place) * kPixelBytes +
                      static_cast<unsigned>(lane % kShareLanes) * kWgmmaPixelBytes;
#pragma unroll
    for (int run = 0; run < kMaxRuns; ++run) {
      const Shared first = to + static_cast<unsigned>(run) * kRunBytes;
      if (source.plane_bytes % kPixelBytes == 0) {
        if (source.bytes[run] > 0) Copy<16>(first, source.from[run], planes);
      } else {
        if (source.bytes[run] > 0) Copy<8>(first, source.from[run], planes);
        if (source.bytes[run] > 8) Copy<8>(first + 8, source.from[run] + 8, planes);
      }
    }
    ArriveAfterCopies(Filled(at.stage));
  }

  // A piece is four neighbouring positions of a channel, 16 bytes of floats. Neighbouring lanes have neighbouring ones;
  // of a chunk, a lane has two of each run, of each channel that the warp stages.
  static constexpr int kPiecePositions = 4, kSegmentPieces = kSegmentPositions / kPiecePositions;
  static constexpr int kLanePieces = kMaxRuns * kSegmentPieces;

  // Where the lane's pieces lie in the first channel that a tile reads; null for those that there are not.
  struct Pieces {
    const unsigned char* from[kLanePieces];
  };

  __device__ __forceinline__ SegmentPlace PlaceOfPiece(int piece) const {
    return PlaceOfSegment(piece / kSegmentPieces, SegmentOfPiece(piece));
  }
  static __device__ __forceinline__ int SegmentOfPiece(int piece) {
    return piece % kSegmentPieces * (32 / kSegmentPieces) + static_cast<int>(Lane()) / kSegmentPieces;
  }
  // In its segment; the same for all of a lane's.
  static __device__ __forceinline__ int PieceOfSegment() { return static_cast<int>(Lane()) % kSegmentPieces; }

  // None of a tile behind the last one.
  __device__ __forceinline__ Pieces PiecesOf(int index, int source) const {
    Pieces pieces;
    const Tile tile = TileAt(min(index, w_.num_tiles - 1));
    const Planes planes = PlanesOfX(tile, source);
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i) {
      const SegmentPlace place = PlaceOfPiece(i);
      const int image = tile.y + place.image,
                first = (tile.x + place.segment) * kSegmentPositions + PieceOfSegment() * kPiecePositions;
      const bool exists = index < w_.num_tiles && i / kSegmentPieces < Runs() && image < t_.batch && first < p_.plane;
      pieces.from[i] = exists ? planes.x + static_cast<long long>(image) * planes.channels * p_.x_plane_bytes +
                                    first * static_cast<int>(sizeof(float))
                              : nullptr;
    }
    return pieces;
  }

  // The registers of the lane hold the next chunk, of two runs, or the next two, of one run. They are stored as soon as
  // there is a stage, and each piece makes room for one that is further ahead. Returns what was seen of X.
  template <int kRuns>
  __device__ __forceinline__ unsigned StageFloats() const {
    constexpr int kAhead = kMaxRuns / kRuns, kPieces = kRuns * kSegmentPieces;
    ListPlanes();
    WaitForLaunchBefore();
    Magnitude magnitude;
    uint4 words[kAhead][kPieces][kPlaces] = {};
    unsigned exist_of[kAhead] = {};                       // a bit for each of the lane's pieces that there is
    int index = static_cast<int>(blockIdx.x), chunk = 0;  // of what is loaded next
    int source = ChunkSource(0);
    Pieces pieces = PiecesOf(index, source);
    unsigned planes[kPlaces];
    const auto find_planes = [&] { PlanesOf(chunk * kWgmmaChannels + StagingWarp() * kPlaces, planes); };
    const auto load = [&](int i, uint4(&to)[kPlaces]) {
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        ReloadVectorIf(pieces.from[i] != nullptr, pieces.from[i] + planes[j], to[j]);
      }
    };
    const auto go_on = [&](unsigned& exist) {
      exist = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) exist |= pieces.from[i] != nullptr ? 1u << i : 0u;
      if (++chunk < chunks_.count) {
        const int next = ChunkSource(chunk);
        if (next == source) return;
        source = next;
      } else {
        chunk = 0;
        index += static_cast<int>(gridDim.x);
        source = ChunkSource(0);
      }
      pieces = PiecesOf(index, source);
    };
    const int tiles = (w_.num_tiles - index + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    int left = chunks_.count * tiles;
    if (left > 0) {
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        find_planes();
#pragma unroll
        for (int i = 0; i < kPieces; ++i) load(i, words[ahead][i]);
        go_on(exist_of[ahead]);
      }
    }
    Position at;
    const auto stage = [&](uint4(&held)[kPieces][kPlaces], unsigned& exist) {
      WaitForEmptied(at);
      if (at.chunk % kStagingWarps == StagingWarp() && Lane() == 0) StageChunk(at.stage, at.chunk);
      find_planes();
      const Shared to = StageAddress(at.stage) + static_cast<unsigned>(StagingWarp() * kPlaces) * kPixelBytes +
                        static_cast<unsigned>(PieceOfSegment()) * kPixelBytes / kSegmentPieces;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if ((exist >> i & 1u) != 0) {
          StorePiece(held[i],
                     to + static_cast<unsigned>(i / kSegmentPieces) * kRunBytes +
                         static_cast<unsigned>(SegmentOfPiece(i)) * kWgmmaPixelBytes,
                     magnitude);
        }
        load(i, held[i]);
      }
      go_on(exist);
      FenceSharedForTensorCores();
      Arrive(Filled(at.stage));
      Advance(at);
      if (at.chunk == chunks_.count) at.chunk = 0;
    };
    for (; left > 0; left -= kAhead) {
      stage(words[0], exist_of[0]);
      if (kAhead > 1 && left > 1) stage(words[kAhead - 1], exist_of[kAhead - 1]);
    }
    return magnitude.Seen();
  }

  static __device__ __forceinline__ void StorePiece(const uint4 (&words)[kPlaces], Shared to, Magnitude& magnitude) {
#pragma unroll
    for (unsigned j = 0; j < kPlaces; ++j) {
      const uint4& w = words[j];
      StoreSharedPair(to + j * kPixelBytes, magnitude.Rounded(BitsToFloat(w.x), BitsToFloat(w.y)),
                      magnitude.Rounded(BitsToFloat(w.z), BitsToFloat(w.w)));
    }
  }

  // The same bytes of some channels: nothing but copies, for a chunk has hundreds of them.
  template <int kBytes, int kCount>
  static __device__ __forceinline__ void Copy(Shared to, const unsigned char* from, const unsigned (&planes)[kCount]) {
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      if constexpr (kBytes == 16) {
        CopyAsync16ByLines(to + i * kPixelBytes, from + planes[i]);
      } else {
        CopyAsync8(to + i * kPixelBytes, from + planes[i]);
      }
    }
  }

  // --- products -----------------------------------------------------------------------------------------------------

  // Where a warpgroup's operands lie in a stage.
  struct Operands {
    unsigned values, places, input;
  };

  __device__ __forceinline__ void Multiply() {
    const int warpgroup = Uniform(static_cast<int>(threadIdx.x / kWarpgroup));
    int row_tile;
    const int run = Split(warpgroup, t_.warps_m, row_tile);
    const auto weight = static_cast<unsigned>(w_.input_bytes + w_.header_bytes);
    Operands operands;
    operands.values = weight + static_cast<unsigned>(row_tile) * kValueBytes;
    operands.places = weight + static_cast<unsigned>(t_.warps_m) * kValueBytes +
                      static_cast<unsigned>(row_tile) * kPlaceBytes + threadIdx.x % kWarpgroup / 32 * 64 +
                      Lane() / 4 * 8 + Lane() % 2 * 4;
    operands.input = static_cast<unsigned>(run) * kRunBytes;
    unsigned meta = 0;
    Position at;
    const int num_chunks = Uniform(chunks_.count);
    const Finishes<T> finishes = FinishesOf<T>(TileAt(static_cast<int>(blockIdx.x)), row_tile);
    ForTiles([&](const Tile& tile) {
      if (kIsFloat && t_.epilogue.residual != nullptr) PrefetchResidual(OutputsOf(tile, row_tile), run);
      if (num_chunks == 0) ClearSums();
      for (at.chunk = 0; at.chunk < num_chunks; Advance(at)) {
        WaitForBarrier(Filled(at.stage), at.round % 2);
        FenceSharedForTensorCores();  // copies arrive without a thread that could
        // Metadata stay in their register until the product is complete (see wgmma_conv.cuh): what follows may change
        // it or not, as far as the compiler knows.
        LoadSharedIf(static_cast<unsigned>(num_chunks), meta, StageAddress(at.stage) + operands.places);
        MultiplyChunk(StageAddress(at.stage), operands, meta, at.chunk > 0);
        Release(at.stage);
      }
      if (!kIsFloat && t_.epilogue.residual != nullptr) AddResiduals(at, row_tile, operands.input);
      StoreTile(OutputsOf(tile, row_tile), run, finishes);
    });
  }

  __device__ __forceinline__ void ClearSums() {
#pragma unroll
    for (int i = 0; i < 4 * kSegments; ++i) sums_[i] = 0.0f;
  }

  // One product, and waits for it: there is time, for the next chunk is still being copied.
  __device__ __forceinline__ void MultiplyChunk(Shared stage, const Operands& operands, const unsigned& meta,
                                                bool keeps_sums) {
    FenceSums();
    MultiplySparse(sums_, MatrixAt(Uniform(stage + operands.values), kMatrixBytes, 2 * kMatrixBytes),
                   MatrixAt(Uniform(stage + operands.input), kMatrixBytes, kWgmmaPixelBytes), meta, keeps_sums);
    CommitProducts();
    WaitForProducts<0>();
  }

  // 32 rows of the residual a stage, for two warps of a warpgroup.
  __device__ __forceinline__ void AddResiduals(Position& at, int row_tile, unsigned input) {
    constexpr int kStageWarps = kWgmmaChannels / kWarpRows;
    const int warp = Uniform(static_cast<int>(threadIdx.x % kWarpgroup) / 32);
    const int mine = (row_tile * kRows + warp * kWarpRows) / kWgmmaChannels;
    const unsigned first =
        input + (static_cast<unsigned>(warp % kStageWarps * kWarpRows) + Lane() / 4) * kPixelBytes + Lane() % 4 * 4;
    for (int i = 0; i < t_.warps_m * kRows / kWgmmaChannels; ++i) {
      WaitForBarrier(Filled(at.stage), at.round % 2);
      if (i == mine) {
        const Shared from = StageAddress(at.stage) + first;
#pragma unroll
        for (int j = 0; j < kSegments; ++j) {
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            const Half2 pair =
                LoadShared(from + static_cast<unsigned>(j * kWgmmaPixelBytes + upper * kWarpRows / 2 * 16));
            sums_[4 * j + 2 * upper] += ToFloat(Lower(pair));
            sums_[4 * j + 2 * upper + 1] += ToFloat(Upper(pair));
          }
        }
      }
      Release(at.stage);
      Advance(at);
    }
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // Where the sums of a warp belong in Y.
  struct Outputs {
    long long first;  // index of that of its first channel, in the tile's first image and at its first segment
    int images;       // of the tile's, those that are in Y
    int place;        // positions of a plane before the tile's first
    int channels;     // those that are in Y
  };

  __device__ __forceinline__ Outputs OutputsOf(const Tile& tile, int row_tile) const {
    Outputs outputs;
    const int channel = FirstChannel(tile, row_tile);
    outputs.place = tile.x * kSegmentPositions;
    outputs.first =
        blockIdx.y * p_.y_part +
        (static_cast<long long>(tile.y) * t_.out_channels + tile.group * t_.group_out_channels + channel) * p_.plane +
        outputs.place;
    outputs.images = t_.batch - tile.y;
    outputs.channels = t_.group_out_channels - channel;
    return outputs;
  }

  __device__ __forceinline__ void StoreTile(const Outputs& outputs, int run, const Finishes<T>& finishes) const {
    if constexpr (kIsFloat) {
      if (!HasActivation() && p_.run_images == 1 && p_.out_columns >= kPair) {
        if (t_.epilogue.residual != nullptr) return StorePairs<true>(outputs, run, finishes);
        return StorePairs<false>(outputs, run, finishes);
      }
    }
    StoreParts(outputs, run, finishes);
  }

  // Floats of even planes are stored as they lie in registers: of a segment's row, four lanes have 32 bytes, two
  // neighbouring columns each; and memory writes no less than 32 bytes. A thread has a pair of a row, and one of the
  // row kUpper behind it.
  static constexpr int kPair = 2, kUpper = kWarpRows / 2;

  // Where a run, which is of one image, lies in Y and in the residual.
  struct RunOutputs {
    long long index;  // of its first column, in the tile's first row
    int columns;      // that are in Y
  };

  __device__ __forceinline__ RunOutputs OutputsOfRun(const Outputs& outputs, int run) const {
    const SegmentPlace begin = PlaceOfSegment(run, 0);
    const int before = begin.segment * kSegmentPositions;
    const int columns = min(p_.plane - outputs.place - before, p_.run_segments * kSegmentPositions);
    return {outputs.first + static_cast<long long>(begin.image) * t_.out_channels * p_.plane + before,
            begin.image < outputs.images ? columns : 0};
  }

  // The thread's pairs of it.
  struct Pairs {
    long long index;  // of the first one
    int ends[2];      // of the columns that are in Y, counted from there, of both rows
  };

  __device__ __forceinline__ Pairs PairsOf(const Outputs& outputs, int run) const {
    const int row = static_cast<int>(Lane()) / 4, column = static_cast<int>(Lane()) % 4 * kPair;
    const RunOutputs all = OutputsOfRun(outputs, run);
    Pairs pairs;
    pairs.index = all.index + static_cast<long long>(row) * p_.plane + column;
    pairs.ends[0] = row < outputs.channels ? all.columns - column : 0;
    pairs.ends[1] = row + kUpper < outputs.channels ? all.columns - column : 0;
    return pairs;
  }

  template <bool kHasResidual>
  __device__ __forceinline__ void StorePairs(const Outputs& outputs, int run, const Finishes<T>& finishes) const {
    constexpr int kAtOnce = kHasResidual ? 2 : 1;  // segments of which residuals are on their way together
    const long long upper_row = static_cast<long long>(kUpper) * p_.plane;
    // What is added to sums would be before the last products are waited for.
    const Finish<T> lower = finishes.lower.Unforeseen(), upper = finishes.upper.Unforeseen();
    const Bounds& bounds = t_.epilogue.bounds;
    const Pairs pairs = PairsOf(outputs, run);
    float* const to[] = {static_cast<float*>(t_.y) + pairs.index, static_cast<float*>(t_.y) + pairs.index + upper_row};
    const float* const from = static_cast<const float*>(t_.epilogue.residual) + pairs.index;
#pragma unroll
    for (int first = 0; first < kSegments; first += kAtOnce) {
      uint2 residuals[kAtOnce][2] = {};
      if (kHasResidual) {
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          const int column = (first + i / 2) * kSegmentPositions;
          if (column < pairs.ends[i % 2]) {
            residuals[i / 2][i % 2] = LoadOnce(reinterpret_cast<const uint2*>(from + i % 2 * upper_row + column));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const int column = (first + i / 2) * kSegmentPositions;
        const float* pair = sums_ + 2 * kPair * (first + i / 2) + kPair * (i % 2);
        float sums[kPair];
#pragma unroll
        for (int j = 0; j < kPair; ++j) {
          sums[j] = (i % 2 == 0 ? lower : upper)(pair[j]);
          if (kHasResidual) sums[j] += BitsToFloat(j == 0 ? residuals[i / 2][i % 2].x : residuals[i / 2][i % 2].y);
        }
        if (column < pairs.ends[i % 2]) {
          StoreOnce(reinterpret_cast<uint2*>(to[i % 2] + column),
                    uint2{Bounded<T>(bounds, sums), Bounded<T>(bounds, sums + 1)});
        }
      }
    }
  }

  // Has a tile's residual come to the second-level cache, while products are computed.
  __device__ __forceinline__ void PrefetchResidual(const Outputs& outputs, int run) const {
    constexpr int kLineBytes = 128, kLineColumns = kLineBytes / static_cast<int>(sizeof(float));
    constexpr int kLines = kSegments * kSegmentPositions / kLineColumns;
    const RunOutputs all = OutputsOfRun(outputs, run);
    const auto* first = static_cast<const float*>(t_.epilogue.residual) + all.index;
    for (int i = static_cast<int>(Lane()); i < kWarpRows * kLines; i += 32) {
      const int row = i / kLines, column = i % kLines * kLineColumns;
      if (row < outputs.channels && column < all.columns)
        PrefetchLine(first + static_cast<long long>(row) * p_.plane + column);
    }
  }

  // Outputs pass through shared memory, a part of a warp's at a time: so neighbouring lanes store neighbours.
  __device__ __forceinline__ void StoreParts(const Outputs& outputs, int run, const Finishes<T>& finishes) const {
    const int segments = p_.run_images * p_.run_segments;
#pragma unroll 1
    for (int i = 0; i < kParts && i * kPartSegments < segments; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // Sums must be named by constants. What is added to them would be for all parts before the first one.
        if (part == i) KeepPart(part, {finishes.lower.Unforeseen(), finishes.upper.Unforeseen()});
      }
      WaitForWarp();
      StorePart(outputs, run, i);
      WaitForWarp();
    }
  }

  __device__ __forceinline__ Shared PartAddress(int segment, int row) const {
    return part_ + static_cast<unsigned>(segment * kPitch + row * kOutBytes);
  }

  // Whether the residual is still to be added to what is stored.
  __device__ __forceinline__ bool AddsAtStores() const { return kIsFloat && t_.epilogue.residual != nullptr; }

  // Finishes outputs, but those to which a residual is still to be added.
  __device__ __forceinline__ void KeepPart(int part, const Finishes<T>& finishes) const {
    const Epilogue& e = t_.epilogue;
    const bool is_final = !AddsAtStores();
    constexpr int kAtOnce = 4;  // segments
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
      for (int first = 0; first < kPartSegments; first += kAtOnce) {
        Floats<2 * kAtOnce> sums;
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          const int segment = part * kPartSegments + first + i / 2;
          sums.at[i] = (upper == 0 ? finishes.lower : finishes.upper)(sums_[4 * segment + 2 * upper + i % 2]);
        }
        if (is_final && HasActivation()) sums = ActivateElsewhere<Half>(e.activation, sums, e.alpha, e.beta);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const Shared to = PartAddress(first + i, static_cast<int>(Lane()) / 4 + 8 * upper) +
                            Lane() % 4 * static_cast<unsigned>(2 * sizeof(T));
          const float* pair = sums.at + 2 * i;
          if constexpr (kIsFloat) {
            StoreSharedPair(to, Bounded<T>(p_.kept_bounds, pair), Bounded<T>(p_.kept_bounds, pair + 1));
          } else {
            StoreShared(to, Bounded<T>(p_.kept_bounds, pair));
          }
        }
      }
    }
  }

  __device__ __forceinline__ void StorePart(const Outputs& outputs, int run, int part) const {
    if (p_.out_columns == 8) {
      if constexpr (!kIsFloat) StoreColumns<8>(outputs, run, part);
    } else if (p_.out_columns == 4) {
      StoreColumns<4>(outputs, run, part);
    } else if (p_.out_columns == 2) {
      StoreColumns<2>(outputs, run, part);
    } else {
      StoreColumns<1>(outputs, run, part);
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void StoreColumns(const Outputs& outputs, int run, int part) const {
    constexpr int kPositions = kPartSegments * kSegmentPositions;
    constexpr int kRowLanes = kPositions / kColumns < 32 ? kPositions / kColumns : 32;
    constexpr int kRowsAtOnce = 32 / kRowLanes;
    const int lane = static_cast<int>(Lane()), row = lane / kRowLanes;
#pragma unroll 1
    for (int position = lane % kRowLanes * kColumns; position < kPositions; position += kRowLanes * kColumns) {
      const int segment = position / kSegmentPositions, column = position % kSegmentPositions;
      const SegmentPlace place = PlaceOfSegment(run, part * kPartSegments + segment);
      const int step = place.segment * kSegmentPositions + column;
      if (place.image >= outputs.images || outputs.place + step >= p_.plane) continue;
      const long long first =
          outputs.first + (static_cast<long long>(place.image) * t_.out_channels + row) * p_.plane + step;
      const Shared from = PartAddress(segment, row) + static_cast<unsigned>(static_cast<int>(sizeof(T)) * column);
      const int rows = outputs.channels - row;
      if constexpr (kIsFloat) {
        if (AddsAtStores()) {
          StoreSums<kColumns, kRowsAtOnce>(first, from, rows);
          continue;
        }
      }
      T* to = static_cast<T*>(t_.y) + first;
#pragma unroll 4
      for (int i = 0; i < kWarpRows; i += kRowsAtOnce, to += kRowsAtOnce * p_.plane) {
        if (i >= rows) break;
        Columns<kColumns * sizeof(T)> columns;
        columns.LoadShared(from + static_cast<unsigned>(i * kOutBytes));
        columns.Store(to);
      }
    }
  }

  // Outputs from index `first` on, kRowsAtOnce rows apart, with the residual: several of it are on their way together.
  template <int kColumns, int kRowsAtOnce>
  __device__ __forceinline__ void StoreSums(long long first, Shared from, int rows) const {
    constexpr int kAtOnce = kWarpRows / kRowsAtOnce < 4 ? kWarpRows / kRowsAtOnce : 4, kCount = kVector<float>;
    const Epilogue& e = t_.epilogue;
    const long long step = static_cast<long long>(kRowsAtOnce) * p_.plane;
#pragma unroll 1
    for (int begin = 0; begin < kWarpRows; begin += kAtOnce * kRowsAtOnce, first += kAtOnce * step) {
      Columns<kColumns * sizeof(T)> residuals[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i * kRowsAtOnce < rows) residuals[i].Load(static_cast<const T*>(e.residual) + first + i * step);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i * kRowsAtOnce >= rows) break;
        Columns<kColumns * sizeof(T)> columns;
        columns.LoadShared(from + static_cast<unsigned>((begin + i * kRowsAtOnce) * kOutBytes));
        Floats<kCount> sums = {};
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          sums.at[j] = BitsToFloat(columns.words[j]) + BitsToFloat(residuals[i].words[j]);
        }
        if (HasActivation()) sums = ActivateElsewhere<Half>(e.activation, sums, e.alpha, e.beta);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) columns.words[j] = Bounded<T>(e.bounds, sums.at + j);
        columns.Store(static_cast<T*>(t_.y) + first + i * step);
      }
    }
  }

  // --- what halves could not hold -----------------------------------------------------------------------------------

  __device__ __forceinline__ void RecomputeTile(const Tile& tile) const {
    const int end = min(tile.y + t_.tile_h, t_.batch), first = tile.x * kSegmentPositions;
    OutputBox box = BoxOf(tile);
    box.columns = min(t_.tile_w * kSegmentPositions, p_.plane - first);
    for (int image = tile.y; image < end; ++image) {
      box.first = FirstPlane(tile, image) * p_.plane + first;
      Recompute(box);
    }
  }

  const PointwiseParams& p_;
  const Chunks chunks_;
  const Shared part_;  // of the warp
  float sums_[4 * kSegments];
};

}  // namespace sparseconv::cuda
