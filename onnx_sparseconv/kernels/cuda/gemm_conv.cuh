// 1x1 convolution by warpgroups of tensor cores (sm_90a), zeros and all.
//
// A 1x1 convolution waits for memory, not for products, and tensor cores read operands in one order of channels. Where
// zeros are left out, that is not the order in which they lie in X, so that each 16 bytes are copied by a thread of
// their own (pointwise_conv.cuh). Here, channels stay in their order: the copy engine brings all of a chunk at once.
//
// X is brought in one of two ways:
//
//   boxes    64 channels of neighbouring positions, of planes that begin at multiples of 16 bytes. Of halves, the copy
//            engine lays them out as the tensor cores read them, 64 positions each.
//   planes   64 channels of whole planes, which lie one behind the other in X, wherever they begin: one copy for each
//            image.
//
// With strides of two, X of floats comes in boxes of every second row, of which every second column is packed.
//
// Planes, and all floats, come to raw stages, from which three warps pack them: a channel's eight neighbouring
// positions, a segment, become 16 bytes. Floats are rounded to halves then. Or a launch before did that (pack.cuh), and
// X comes as it is *ready* to be multiplied.
//
// Boxes of halves are swizzled by where they lie in shared memory, in eights of rows of 128 bytes. So stages begin at a
// multiple of 1024 bytes: where shared memory that is dynamic does, for there is none else.
//
// There is a block for each multiprocessor, which computes tile after tile. Two warpgroups multiply, each 64 output
// channels by all positions of the tile, and one thread asks for copies. A warp's outputs leave by the copy engine,
// too, while the next tile is computed; where they go, the residual was brought before. Floats may have two such places
// in turn: the residual of the next tile is then on its way while outputs are finished.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "gemm_params.h"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "recompute.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// `T` is Half or float, `kSegments` those of a tile, eight positions each. Of X that is ready, `kHasBoxes` is about
// outputs alone; of halves, these are planes then.
template <class T, int kSegments, bool kHasBoxes, bool kIsReady = false>
class GemmConv {
 public:
  __device__ __forceinline__ GemmConv(const GemmParams& params, const void* shared)
      : p_(params),
        shared_(shared),
        warp_(static_cast<int>(Uniform(threadIdx.x / 32))),
        stages_(SharedAddress(shared)),
        weights_(stages_ + static_cast<unsigned>(params.num_stages) * kStageBytes),
        raws_(weights_ + static_cast<unsigned>(params.num_weights * kGemmWeightBytes)),
        outputs_(raws_ + static_cast<unsigned>(params.num_raws * params.raw_bytes)),
        barriers_(outputs_ + static_cast<unsigned>(kGemmProductWarps * NumOutputs() * params.output_bytes)) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    LetNextLaunchBegin();
    if (kIsFloat && !kIsReady && (!kHasBoxes || p_.x_step > 1)) ClearRawStages();
    InitBarriers();
    unsigned seen = 0;
    if (warp_ < kGemmProductWarps) {
      TakeRegisters<kProductRegisters>();
      WaitForLaunchBefore();
      Multiply();
    } else {
      GiveUpRegisters<kStagingRegisters>();
      if (warp_ == kGemmProductWarps) {
        if (IsElected()) Stage();
      } else if constexpr (kIsPacked && !kIsReady) {
        seen = Pack();
      } else if constexpr (kIsFloat) {
        WaitForLaunchBefore();
        seen =
            SeenBefore(p_.recompute, static_cast<int>(threadIdx.x) - (kGemmThreads - kPackingThreads), kPackingThreads);
      }
    }
    return !kIsFloat || DidHalvesHold(SeenByBlock(seen));
  }

  // Of all the block's tiles, what was computed. To be called by all threads.
  __device__ __forceinline__ void RecomputeTiles() const {
    WaitForBulkStores();  // or they would come later
    __syncthreads();
    ForTiles([&](const Tile& tile) { RecomputeTile(tile); });
  }

 private:
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float), kIsPacked = kIsFloat || !kHasBoxes;
  static constexpr int kProductRegisters = 192, kStagingRegisters = 120;  // of 168 for each thread
  static constexpr int kWarps = kWarpgroupThreads / 32;                   // of a warpgroup
  static constexpr int kWarpRows = kGemmBoxRows, kRowTileRows = 64;
  static constexpr int kPackingThreads = kGemmThreads - 32 * (kGemmProductWarps + 1);
  static constexpr int kSums = 4 * kSegments;
  static constexpr int kBoxes = kIsFloat ? 1 : kSegments / kGemmBoxSegments;  // of a tile
  static constexpr unsigned kMatrixBytes = 128, kElementBytes = sizeof(T),
                            kSegmentBytes = kElementBytes * kSegmentPositions;
  // Of a box of halves: a channel or row, the eight of them after which the order of 16 bytes begins anew, and all of
  // X.
  static constexpr unsigned kBoxRowBytes = 2 * kGemmBoxPositions, kSwizzledBytes = 8 * kBoxRowBytes,
                            kBoxBytes = kGemmChannels * kBoxRowBytes, kOutputBoxBytes = kWarpRows * kBoxRowBytes;
  static constexpr unsigned kPackedBytes =
      (kSegments * kGemmPackedPitch + kGemmStageUnit - 1) / kGemmStageUnit * kGemmStageUnit;
  static constexpr unsigned kStageBytes = kIsPacked ? kPackedBytes : kBoxes * kBoxBytes;
  // Steps of a chunk, and from one to the next of the weight, and of X.
  static constexpr int kSteps = kGemmChannels / kGemmStepChannels;
  static constexpr unsigned kWeightStepBytes = 2 * kRowTileRows * kGemmStepChannels,
                            kInputStepBytes = kIsPacked ? 2 * kMatrixBytes : kGemmStepChannels * kBoxRowBytes;
  static constexpr unsigned kRowTileBytes = kSteps * kWeightStepBytes;

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % 32); }

  // A ring of stages: where a thread stands, and how often all of them were filled before.
  struct Position {
    int stage = 0;
    unsigned round = 0;

    __device__ __forceinline__ void Advance(int count) {
      if (++stage < count) return;
      stage = 0;
      ++round;
    }
  };

  // Barriers of the rings, one behind the other, and of the residuals.
  __device__ __forceinline__ Shared Filled(int ring) const { return barriers_ + static_cast<unsigned>(16 * ring); }
  __device__ __forceinline__ Shared Emptied(int ring) const { return Filled(ring) + 8; }
  __device__ __forceinline__ int WeightRing(int stage) const { return p_.num_stages + stage; }
  __device__ __forceinline__ int RawRing(int stage) const { return p_.num_stages + p_.num_weights + stage; }
  // Of a warp's places for outputs.
  __device__ __forceinline__ Shared ResidualFilled(int warp, int place) const {
    return Filled(RawRing(p_.num_raws)) + static_cast<unsigned>(8 * (kMaxGemmOutputs * warp + place));
  }

  __device__ __forceinline__ Shared StageAddress(int stage) const {
    return stages_ + static_cast<unsigned>(stage) * kStageBytes;
  }
  __device__ __forceinline__ Shared WeightAddress(int stage) const {
    return weights_ + static_cast<unsigned>(stage * kGemmWeightBytes);
  }
  __device__ __forceinline__ Shared RawAddress(int stage) const {
    return raws_ + static_cast<unsigned>(stage * p_.raw_bytes);
  }
  __device__ __forceinline__ int NumOutputs() const { return kIsFloat ? p_.num_outputs : 1; }
  // Of the warp's outputs, one of its places.
  __device__ __forceinline__ Shared OutputsAt(int place) const {
    return outputs_ + static_cast<unsigned>((warp_ * NumOutputs() + place) * p_.output_bytes);
  }

  __device__ __forceinline__ void InitBarriers() const {
    if (threadIdx.x == 0) {
      for (int ring = 0; ring < RawRing(p_.num_raws); ++ring) {
        const bool is_packed = kIsPacked && !kIsReady && ring < p_.num_stages;
        InitBarrier(Filled(ring), is_packed ? kPackingThreads : 1);
        InitBarrier(Emptied(ring), ring < RawRing(0) ? kGemmProductWarps : kPackingThreads);
      }
      for (int warp = 0; warp < kGemmProductWarps; ++warp) {
        for (int place = 0; place < kMaxGemmOutputs; ++place) InitBarrier(ResidualFilled(warp, place), 1);
      }
      FenceBarrierInit();
    }
    __syncthreads();
  }

  struct Tile {
    int row_block, place;  // in boxes, or in images, of so many a tile
  };

  __device__ __forceinline__ Tile TileAt(int index) const {
    const int place = Divide(index, p_.by_row_blocks);
    return {index - place * p_.row_blocks, place};
  }

  static __device__ __forceinline__ int FirstTile() { return static_cast<int>(blockIdx.x); }
  static __device__ __forceinline__ int TileAfter(int index) { return index + static_cast<int>(gridDim.x); }

  // Calls function(tile) for the block's tiles.
  template <class Function>
  __device__ __forceinline__ void ForTiles(const Function& function) const {
    for (int index = FirstTile(); index < p_.num_tiles; index = TileAfter(index)) function(TileAt(index));
  }

  __device__ __forceinline__ int FirstImage(const Tile& tile) const { return tile.place * p_.tile_images; }
  __device__ __forceinline__ int Images(const Tile& tile) const {
    return min(p_.tile_images, p_.batch - FirstImage(tile));
  }

  // Where a box of a tile lies. There may be no such image. Of floats, in lines, too.
  struct BoxPlace {
    int image, position, line;
  };

  __device__ __forceinline__ BoxPlace PlaceOfBox(const Tile& tile, int box) const {
    const int index = tile.place * kBoxes + box, image = Divide(index, p_.by_image_boxes);
    const int of_image = index - image * p_.image_boxes;
    return {image, of_image * (kIsFloat ? p_.out_pitch : kGemmBoxPositions), of_image * p_.tile_lines};
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  // By one thread.
  __device__ __forceinline__ void Stage() const {
    Position x, weight;
    ForTiles([&](const Tile& tile) {
      const auto* chunks = static_cast<const unsigned char*>(p_.weight) +
                           static_cast<size_t>(tile.row_block) * p_.num_chunks * kGemmWeightBytes;
      for (int chunk = 0; chunk < p_.num_chunks; ++chunk) {
        StageWeight(weight, chunks + static_cast<size_t>(chunk) * kGemmWeightBytes);
        WaitForLaunchBefore();  // the weight needs no such wait
        if constexpr (kIsReady) {
          StageReady(x, tile, chunk);
        } else if constexpr (!kHasBoxes) {
          StagePlanes(x, tile, chunk);
        } else if constexpr (kIsFloat) {
          StageRawBox(x, tile, chunk);
        } else {
          StageBoxes(x, tile, chunk);
        }
      }
    });
  }

  __device__ __forceinline__ void WaitForEmptied(int ring, const Position& at) const {
    if (at.round > 0) WaitForBarrier(Emptied(ring), (at.round - 1) % 2);
  }

  __device__ __forceinline__ void StageWeight(Position& at, const void* from) const {
    const int ring = WeightRing(at.stage);
    WaitForEmptied(ring, at);
    ExpectBytes(Filled(ring), kGemmWeightBytes);
    CopyBulkCached(WeightAddress(at.stage), from, kGemmWeightBytes, Filled(ring));
    Arrive(Filled(ring));
    at.Advance(p_.num_weights);
  }

  __device__ __forceinline__ void StageReady(Position& at, const Tile& tile, int chunk) const {
    const auto* from = static_cast<const unsigned char*>(p_.x) +
                       (static_cast<size_t>(tile.place) * p_.num_chunks + chunk) * kStageBytes;
    WaitForEmptied(at.stage, at);
    ExpectBytes(Filled(at.stage), kStageBytes);
    CopyBulkCached(StageAddress(at.stage), from, kStageBytes, Filled(at.stage));
    Arrive(Filled(at.stage));
    at.Advance(p_.num_stages);
  }

  // What lies outside of X comes as zeros.
  __device__ __forceinline__ void StageBoxes(Position& at, const Tile& tile, int chunk) const {
    WaitForEmptied(at.stage, at);
    ExpectBytes(Filled(at.stage), kStageBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const BoxPlace place = PlaceOfBox(tile, box);
      CopyBox(StageAddress(at.stage) + static_cast<unsigned>(box) * kBoxBytes, &p_.x_map, place.position,
              chunk * kGemmChannels, place.image, Filled(at.stage));
    }
    Arrive(Filled(at.stage));
    at.Advance(p_.num_stages);
  }

  // As StageBoxes, of floats. With strides, a box is rows, and channels of all images follow each other.
  __device__ __forceinline__ void StageRawBox(Position& at, const Tile& tile, int chunk) const {
    const int ring = RawRing(at.stage), channel = chunk * kGemmChannels;
    const BoxPlace place = PlaceOfBox(tile, 0);
    WaitForEmptied(ring, at);
    ExpectBytes(Filled(ring), RawImageBytes());
    if (p_.x_step == 1) {
      CopyBox(RawAddress(at.stage), &p_.x_map, place.position, channel, place.image, Filled(ring));
    } else {
      CopyBox(RawAddress(at.stage), &p_.x_map, 0, place.line, place.image * p_.in_channels + channel, Filled(ring));
    }
    Arrive(Filled(ring));
    at.Advance(p_.num_raws);
  }

  __device__ __forceinline__ int Channels(int chunk) const {
    return min(kGemmChannels, p_.in_channels - chunk * kGemmChannels);
  }

  __device__ __forceinline__ void StagePlanes(Position& at, const Tile& tile, int chunk) const {
    const int ring = RawRing(at.stage), images = Images(tile);
    const auto bytes = static_cast<unsigned>(Channels(chunk) * p_.x_plane_bytes);
    const long long image_bytes = static_cast<long long>(p_.in_channels) * p_.x_plane_bytes;
    const auto* from = static_cast<const unsigned char*>(p_.x) + FirstImage(tile) * image_bytes +
                       static_cast<long long>(chunk) * kGemmChannels * p_.x_plane_bytes;
    Shared to = RawAddress(at.stage);
    WaitForEmptied(ring, at);
    ExpectBytes(Filled(ring), static_cast<unsigned>(images) * bytes);
    for (int image = 0; image < images; ++image, from += image_bytes, to += RawImageBytes()) {
      CopyBulkCached(to, from, bytes, Filled(ring));
    }
    Arrive(Filled(ring));
    at.Advance(p_.num_raws);
  }

  __device__ __forceinline__ unsigned RawImageBytes() const {
    return static_cast<unsigned>(kGemmChannels * p_.x_plane_bytes);
  }

  // --- packing ------------------------------------------------------------------------------------------------------

  // What is packed of floats is looked at, whether a copy brought it or not: so all of a raw stage is floats.
  __device__ __forceinline__ void ClearRawStages() const {
    const auto bytes = static_cast<unsigned>(p_.num_raws * p_.raw_bytes);
    for (unsigned byte = 16 * threadIdx.x; byte < bytes; byte += 16 * kGemmThreads) {
      StoreSharedPair(raws_ + byte, 0u, 0u);
      StoreSharedPair(raws_ + byte + 8, 0u, 0u);
    }
    FenceSharedForTensorCores();  // and the copy engine; the barrier behind it is that of InitBarriers
  }

  // Pieces, of four positions, half a segment, that a thread moves from each raw stage to a packed one: from where to
  // where; unforeseen, or both would be worked out before the loop, and take more registers. Neighbouring threads move
  // neighbours. Segments behind those of the images become anything, for their columns are not stored. Channels that
  // there are not become zeros where they are halves: what lies there may be no number. Of floats, it is seen then.
  static constexpr int kPieces = 2 * kSegments * kGemmChannels,
                       kThreadPieces = (kPieces + kPackingThreads - 1) / kPackingThreads;
  static constexpr unsigned kPieceBytes = kGemmPiecePositions * kElementBytes,
                            kPackedPieceBytes = kGemmPiecePositions * 2, kMoveBits = 16;

  // Returns what was seen of floats.
  __device__ __forceinline__ unsigned Pack() const {
    const int thread = static_cast<int>(threadIdx.x) - (kGemmThreads - kPackingThreads);
    unsigned moves[kThreadPieces];
#pragma unroll
    for (int i = 0; i < kThreadPieces; ++i) moves[i] = MoveOf(thread + i * kPackingThreads);
    const int last_pieces = kIsFloat ? kPieces : 2 * kSegments * Channels(p_.num_chunks - 1);
    Magnitude magnitude;
    Position raw, packed;
    ForTiles([&](const Tile&) {
      for (int chunk = 0; chunk < p_.num_chunks; ++chunk) {
        WaitForBarrier(Filled(RawRing(raw.stage)), raw.round % 2);
        WaitForEmptied(packed.stage, packed);
        const Shared from = RawAddress(raw.stage), to = StageAddress(packed.stage);
        if (kIsFloat && kHasBoxes && p_.x_step > 1) {
          PackChunk<2>(moves, thread, from, to, magnitude, [](int) { return true; });
        } else if (chunk + 1 == p_.num_chunks && last_pieces < kPieces) {
          PackChunk<1>(moves, thread, from, to, magnitude, [&](int piece) { return piece < last_pieces; });
        } else {
          PackChunk<1>(moves, thread, from, to, magnitude, [](int) { return true; });
        }
        FenceSharedForTensorCores();
        Arrive(Filled(packed.stage));
        Arrive(Emptied(RawRing(raw.stage)));
        raw.Advance(p_.num_raws);
        packed.Advance(p_.num_stages);
      }
    });
    return magnitude.Seen();
  }

  // `kStep` is that of X; `exists(piece)`: whether it is of a channel that there is.
  template <int kStep, class Exists>
  static __device__ __forceinline__ void PackChunk(const unsigned (&moves)[kThreadPieces], int thread, Shared from,
                                                   Shared to, Magnitude& magnitude, const Exists& exists) {
    constexpr int kAtOnce = (kIsFloat ? 10 : 12) / kStep;
#pragma unroll
    for (int first = 0; first < kThreadPieces; first += kAtOnce) {
      unsigned words[kAtOnce][kPieceBytes / 4];
#pragma unroll
      for (int i = 0; i < kAtOnce && first + i < kThreadPieces; ++i) {
        const unsigned move = Unforeseen(moves[first + i]);
        LoadPiece<kStep>(from + (move & ((1u << kMoveBits) - 1)), words[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce && first + i < kThreadPieces; ++i) {
        const int piece = thread + (first + i) * kPackingThreads;
        const bool is_kept = exists(piece);
        const Shared at = to + (Unforeseen(moves[first + i]) >> kMoveBits);
        const bool is_piece = (first + i + 1) * kPackingThreads <= kPieces || piece < kPieces;
        const uint2 halves = Rounded(words[i], magnitude);
        if (is_piece) StoreSharedPair(at, is_kept ? halves.x : 0, is_kept ? halves.y : 0);
      }
    }
  }

  // Whole planes of floats begin anywhere.
  template <int kStep>
  static __device__ __forceinline__ void LoadPiece(Shared from, unsigned (&words)[kPieceBytes / 4]) {
    if constexpr (!kIsFloat) {
      LoadSharedPair(from, words[0], words[1]);
    } else if constexpr (kStep == 2) {
      const uint4 first = LoadSharedVector(from), second = LoadSharedVector(from + kPieceBytes);
      words[0] = first.x, words[1] = first.z, words[2] = second.x, words[3] = second.z;
    } else if constexpr (kHasBoxes) {
      const uint4 four = LoadSharedVector(from);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else {
#pragma unroll
      for (unsigned i = 0; i < kGemmPiecePositions; ++i) words[i] = LoadShared(from + 4 * i);
    }
  }

  static __device__ __forceinline__ uint2 Rounded(const unsigned (&words)[kPieceBytes / 4], Magnitude& magnitude) {
    if constexpr (kIsFloat) {
      return {magnitude.Rounded(BitsToFloat(words[0]), BitsToFloat(words[1])),
              magnitude.Rounded(BitsToFloat(words[2]), BitsToFloat(words[3]))};
    } else {
      return {words[0], words[1]};
    }
  }

  __device__ __forceinline__ unsigned MoveOf(int piece) const {
    const int channel = piece / (2 * kSegments), half_segment = piece % (2 * kSegments);
    const int segment = half_segment / 2, line = Divide(segment, p_.by_line_segments);
    const int of_line = half_segment - 2 * line * p_.line_segments;
    const bool is_read =
        channel < kGemmChannels && line < p_.tile_lines && of_line * kGemmPiecePositions < p_.line_positions;
    const unsigned from = static_cast<unsigned>(channel * p_.x_plane_bytes + line * p_.x_line_bytes) +
                          static_cast<unsigned>(of_line * p_.x_step) * kPieceBytes;
    const auto to = static_cast<unsigned>(segment * kGemmPackedPitch + channel * 16) +
                    static_cast<unsigned>(half_segment % 2) * kPackedPieceBytes;
    return (is_read ? from : 0) | to << kMoveBits;
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply() {
    Position x, weight;
    Position place;  // of outputs: the warp's, of which it keeps some of each tile
    const bool is_ahead = NumOutputs() > 1;
    if (is_ahead) StageResidual(FirstTile(), 0);
    for (int index = FirstTile(); index < p_.num_tiles; index = TileAfter(index)) {
      const Tile tile = TileAt(index);
      const int channel = FirstChannel(tile);
      const Finish<T> lower = FinishOf(channel), upper = FinishOf(channel + kWarpRows / 2);
      const bool exists = channel < p_.out_channels;
      for (int chunk = 0; chunk < p_.num_chunks; ++chunk) {
        WaitForBarrier(Filled(x.stage), x.round % 2);
        WaitForBarrier(Filled(WeightRing(weight.stage)), weight.round % 2);
        MultiplyChunk(x, weight, chunk > 0);
        // Some products are always on their way while the next ones are waited for.
        if (chunk > 0) Release(x, weight);
        if (chunk == 0 && !is_ahead) StageResidual(index, 0);
        x.Advance(p_.num_stages);
        weight.Advance(p_.num_weights);
      }
      WaitForProducts<0>();
      Release(x, weight);
      if (is_ahead) StageResidual(TileAfter(index), exists ? 1 - place.stage : place.stage);
      if (!exists) continue;
      if (p_.epilogue.residual != nullptr) {
        WaitForBarrier(ResidualFilled(warp_, place.stage), place.round % 2);
      } else {
        // Outputs of a tile before have left.
        if (is_ahead) {
          WaitForBulkReads<kMaxGemmOutputs - 1>();
        } else {
          WaitForBulkReads();
        }
        WaitForWarp();
      }
      kept_ = OutputsAt(place.stage);
      KeepTile(lower.Unforeseen(), upper.Unforeseen());
      FenceSharedForTensorCores();  // and the copy engine
      WaitForWarp();
      if (IsElected()) StoreTile(tile, channel);
      place.Advance(NumOutputs());
    }
    WaitForBulkReads();  // shared memory goes with the block
  }

  __device__ __forceinline__ void MultiplyChunk(const Position& x, const Position& weight, bool keeps_sums) {
    const Shared values = WeightAddress(weight.stage) + static_cast<unsigned>(warp_ / kWarps) * kRowTileBytes;
    const Matrix a = MatrixAt(Uniform(values), kMatrixBytes, 2 * kMatrixBytes);
    const Shared stage = Uniform(StageAddress(x.stage));
    const Matrix b = kIsPacked ? MatrixAt(stage, kMatrixBytes, kGemmPackedPitch)
                               : SwizzledMatrixAt(stage, kSwizzledBytes, kBoxBytes);
    FenceSums();
#pragma unroll
    for (unsigned step = 0; step < kSteps; ++step) {
      MultiplyDense(sums_, Moved(a, step * kWeightStepBytes), Moved(b, step * kInputStepBytes), keeps_sums || step > 0);
    }
    CommitProducts();
    WaitForProducts<1>();
  }

  // The stages before these.
  __device__ __forceinline__ void Release(const Position& x, const Position& weight) const {
    if (!IsElected()) return;
    Arrive(Emptied((x.stage == 0 ? p_.num_stages : x.stage) - 1));
    Arrive(Emptied(WeightRing((weight.stage == 0 ? p_.num_weights : weight.stage) - 1)));
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // What is stored of a warp lies as [images][16][plane], or as [boxes][16][64] in the copy engine's order, or of
  // floats as one box, [16][positions].

  __device__ __forceinline__ int FirstChannel(const Tile& tile) const {
    return tile.row_block * kGemmRows + warp_ * kWarpRows;
  }

  __device__ __forceinline__ Finish<T> FinishOf(int first_channel) const {
    const int channel = first_channel + Lane() / 4;
    const auto* bias = static_cast<const T*>(p_.epilogue.bias);
    const bool exists = channel < p_.out_channels;
    return {kIsFloat && exists ? p_.scales[channel] : 1.0f,
            bias != nullptr && exists ? LoadElement(bias + channel) : 0.0f};
  }

  __device__ __forceinline__ void KeepTile(const Finish<T>& lower, const Finish<T>& upper) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums_[i] = (i / 2 % 2 == 0 ? lower : upper)(sums_[i]);
    if (p_.epilogue.residual != nullptr) AddResidual();
    ActivateSums();
    StoreSums();
  }

  // The word of two outputs of a segment lies in a box where the copy engine expects it: 16 bytes of a row are in
  // another place of its 128 in each of eight rows.
  __device__ __forceinline__ Shared AddressInBox(int segment, int upper) const {
    const int row = Lane() / 4;
    const int place = segment % kGemmBoxSegments ^ row;
    return kept_ + static_cast<unsigned>(segment / kGemmBoxSegments) * kOutputBoxBytes +
           static_cast<unsigned>(row + upper * kWarpRows / 2) * kBoxRowBytes +
           static_cast<unsigned>(place * 16 + Lane() % 4 * 4);
  }

  // From one of the thread's rows to the other one, but for boxes of halves.
  __device__ __forceinline__ unsigned UpperBytes() const {
    return kElementBytes * static_cast<unsigned>(kWarpRows / 2 * p_.out_pitch);
  }

  // Where the thread's outputs of a segment lie, in the first of its rows, and how many there are of the two, if that
  // is positive.
  struct PairPlace {
    Shared at;
    int count;
  };

  // Walks through the segments of several lines.
  class LineWalk {
   public:
    __device__ __forceinline__ LineWalk(const GemmParams& params, const PairPlace& first)
        : p_(params), place_(first), lines_(params.tile_lines), segment_(params.line_segments) {}

    __device__ __forceinline__ PairPlace Next() {
      const PairPlace place = lines_ > 0 ? place_ : PairPlace{place_.at, 0};
      place_.at += kSegmentBytes;
      place_.count -= kSegmentPositions;
      if (--segment_ == 0) {
        const int whole = p_.line_segments * kSegmentPositions;
        segment_ = p_.line_segments;
        place_.count += whole;
        place_.at += kElementBytes * static_cast<unsigned>(p_.line_pitch - whole);
        --lines_;
      }
      return place;
    }

   private:
    const GemmParams& p_;
    PairPlace place_;
    int lines_, segment_;
  };

  // Calls function(the thread's two neighbouring sums, their address, how many of them are outputs) for all of them.
  template <class Function>
  __device__ __forceinline__ void ForPairs(const Function& function) {
    if constexpr (kHasBoxes && !kIsFloat) {
#pragma unroll
      for (int i = 0; i < 2 * kSegments; ++i) function(sums_ + 2 * i, AddressInBox(i / 2, i % 2), 2);
      return;
    }
    // Unforeseen: or the places of one walk would be kept for the next one.
    const auto pair = static_cast<unsigned>(Lane() / 4 * p_.out_pitch + Lane() % 4 * 2);
    const PairPlace first = {Unforeseen(kept_ + kElementBytes * pair), p_.line_positions - Lane() % 4 * 2};
    const auto of_segment = [&](int segment, const PairPlace& place) {
      function(sums_ + 4 * segment, place.at, place.count);
      function(sums_ + 4 * segment + 2, place.at + UpperBytes(), place.count);
    };
    if (p_.tile_lines == 1) {
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        of_segment(segment, {first.at + static_cast<unsigned>(segment) * kSegmentBytes,
                             first.count - segment * kSegmentPositions});
      }
    } else {
      LineWalk walk(p_, first);
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) of_segment(segment, walk.Next());
    }
  }

  // Whether two outputs are a word, or of floats a pair: in lines of an odd size, every second one begins within one.
  __device__ __forceinline__ bool HasPairs() const {
    return (kHasBoxes && !kIsFloat) || (p_.out_pitch | p_.line_positions) % 2 == 0;
  }

  __device__ __forceinline__ void AddResidual() {
    if (HasPairs()) {
      ForPairs([](float* pair, Shared at, int count) {
        if (count > 0) AddPair(at, pair);
      });
    } else {
      ForPairs([](float* pair, Shared at, int count) {
        if (count > 0) pair[0] += LoadKept(at);
        if (count > 1) pair[1] += LoadKept(at + kElementBytes);
      });
    }
  }

  static __device__ __forceinline__ void AddPair(Shared at, float* pair) {
    if constexpr (kIsFloat) {
      unsigned words[2];
      LoadSharedPair(at, words[0], words[1]);
      pair[0] += BitsToFloat(words[0]);
      pair[1] += BitsToFloat(words[1]);
    } else {
      const Half2 residual = LoadShared(at);
      pair[0] += ToFloat(Lower(residual));
      pair[1] += ToFloat(Upper(residual));
    }
  }

  static __device__ __forceinline__ float LoadKept(Shared at) {
    if constexpr (kIsFloat) {
      return BitsToFloat(LoadShared(at));
    } else {
      return ToFloat(LoadSharedHalf(at));
    }
  }

  __device__ __forceinline__ void StoreSums() {
    if (HasPairs()) {
      ForPairs([&](const float* pair, Shared at, int count) {
        StorePair(pair, at, count > 0, count > 0, /*together=*/true);
      });
    } else {
      ForPairs([&](const float* pair, Shared at, int count) {
        StorePair(pair, at, count > 0, count > 1, /*together=*/false);
      });
    }
  }

  __device__ __forceinline__ void StorePair(const float* pair, Shared at, bool has_first, bool has_second,
                                            bool together) const {
    const Bounds& bounds = p_.epilogue.bounds;
    if constexpr (kIsFloat) {
      const unsigned outputs[] = {Bounded<T>(bounds, pair), Bounded<T>(bounds, pair + 1)};
      if (together) {
        if (has_first) StoreSharedPair(at, outputs[0], outputs[1]);
        return;
      }
      if (has_first) StoreShared(at, outputs[0]);
      if (has_second) StoreShared(at + kElementBytes, outputs[1]);
    } else {
      const Half2 outputs = Bounded<T>(bounds, pair);
      if (together) {
        if (has_first) StoreShared(at, outputs);
        return;
      }
      if (has_first) StoreSharedHalf(at, Lower(outputs));
      if (has_second) StoreSharedHalf(at + kElementBytes, Upper(outputs));
    }
  }

  __device__ __forceinline__ void ActivateSums() {
    const Epilogue& e = p_.epilogue;
    if (IsBound(e.activation)) return;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      Floats<4> outputs;
#pragma unroll
      for (int i = 0; i < 4; ++i) outputs.at[i] = sums_[4 * segment + i];
      outputs = ActivateElsewhere<Half>(e.activation, outputs, e.alpha, e.beta);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[4 * segment + i] = outputs.at[i];
    }
  }

  // Of whole planes, where those of the warp's channels begin in Y, or in the residual, and bytes of an image.
  __device__ __forceinline__ long long FirstByte(const Tile& tile, int channel) const {
    return PlaneBytes() * (static_cast<long long>(FirstImage(tile)) * p_.out_channels + channel);
  }
  __device__ __forceinline__ unsigned PlanesBytes(int channel) const {
    return static_cast<unsigned>(PlaneBytes() * min(kWarpRows, p_.out_channels - channel));
  }
  __device__ __forceinline__ long long ImageBytes() const {
    return static_cast<long long>(PlaneBytes()) * p_.out_channels;
  }
  __device__ __forceinline__ int PlaneBytes() const { return static_cast<int>(kElementBytes) * p_.plane; }
  // Of a box of outputs.
  __device__ __forceinline__ unsigned OutputBoxBytes() const { return kIsFloat ? 2 * UpperBytes() : kOutputBoxBytes; }

  // Where there is such a tile, and the warp has outputs of it: brings its residual to a place from which all outputs
  // have left.
  __device__ __forceinline__ void StageResidual(int index, int place) const {
    if (p_.epilogue.residual == nullptr || index >= p_.num_tiles) return;
    const Tile tile = TileAt(index);
    const int channel = FirstChannel(tile);
    if (channel < p_.out_channels && IsElected()) CopyResidual(tile, channel, place);
  }

  // By one thread, as what follows.
  __device__ __forceinline__ void CopyResidual(const Tile& tile, int channel, int place) const {
    const Shared barrier = ResidualFilled(warp_, place);
    Shared to = OutputsAt(place);
    WaitForBulkReads();
    if constexpr (kHasBoxes) {
      ExpectBytes(barrier, kBoxes * OutputBoxBytes());
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box, to += OutputBoxBytes()) {
        const BoxPlace at = PlaceOfBox(tile, box);
        CopyBox(to, &p_.residual_map, at.position, channel, at.image, barrier);
      }
    } else {
      const int images = Images(tile);
      const unsigned bytes = PlanesBytes(channel);
      const auto* from = static_cast<const unsigned char*>(p_.epilogue.residual) + FirstByte(tile, channel);
      ExpectBytes(barrier, static_cast<unsigned>(images) * bytes);
      for (int image = 0; image < images; ++image, from += ImageBytes(), to += 2 * UpperBytes()) {
        CopyBulkCached(to, from, bytes, barrier);
      }
    }
    Arrive(barrier);
  }

  // What lies outside of Y is not stored.
  __device__ __forceinline__ void StoreTile(const Tile& tile, int channel) const {
    Shared from = kept_;
    if constexpr (kHasBoxes) {
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box, from += OutputBoxBytes()) {
        const BoxPlace at = PlaceOfBox(tile, box);
        StoreBox(&p_.y_map, from, at.position, channel, at.image);
      }
    } else {
      const int images = Images(tile);
      const unsigned bytes = PlanesBytes(channel);
      auto* to = static_cast<unsigned char*>(p_.y) + FirstByte(tile, channel);
      for (int image = 0; image < images; ++image, to += ImageBytes(), from += 2 * UpperBytes()) {
        StoreBulk(to, from, bytes);
      }
    }
    CommitBulkStores();
  }

  // Of floats: what was computed of a tile, image by image.
  __device__ __forceinline__ void RecomputeTile(const Tile& tile) const {
    const int row = tile.row_block * kGemmRows;
    const BoxPlace place = kHasBoxes ? PlaceOfBox(tile, 0) : BoxPlace{FirstImage(tile), 0, 0};
    OutputBox box;
    box.channels = min(kGemmRows, p_.out_channels - row);
    box.rows = 1;
    box.columns = min(p_.out_pitch, p_.plane - place.position);
    box.share = 0;
    box.shares = 1;
    for (int i = 0; i < (kHasBoxes ? 1 : Images(tile)); ++i) {
      box.first = (static_cast<long long>(place.image + i) * p_.out_channels + row) * p_.plane + place.position;
      Recompute(p_.recompute, box, const_cast<void*>(shared_));
    }
  }

  // A barrier, not __syncwarp: behind that, the compiler lets products wait for each other.
  __device__ __forceinline__ void WaitForWarp() const { WaitAtBarrier(1 + warp_, 32); }

  const GemmParams& p_;
  const void* const shared_;
  const int warp_;
  const Shared stages_, weights_, raws_, outputs_, barriers_;
  Shared kept_ = 0;  // where outputs of the tile go
  float sums_[kSums];
};

}  // namespace sparseconv::cuda
