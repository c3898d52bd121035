// 1x1 convolution by warpgroups of tensor cores (sm_90a), halves, zeros and all.
//
// A 1x1 convolution waits for memory, not for products, and tensor cores read operands in one order of channels. Where
// zeros are left out, that is not the order in which they lie in X, so that each 16 bytes are copied by a thread of
// their own (pointwise_conv.cuh). Here, channels stay in their order: the copy engine brings all of a chunk at once.
//
// X is brought in one of two ways:
//
//   boxes    64 channels of 64 neighbouring positions, of planes that begin at multiples of 16 bytes. The copy engine
//            lays them out as the tensor cores read them.
//   planes   64 channels of whole planes, which lie one behind the other in X, wherever they begin: one copy for each
//            image. Three warps pack them: a channel's eight neighbouring positions, a segment, become 16 bytes.
//
// Boxes are swizzled by where they lie in shared memory, in eights of rows of 128 bytes. So stages begin at a multiple
// of 1024 bytes: where shared memory that is dynamic does, for there is none else.
//
// There is a block for each multiprocessor, which computes tile after tile. Two warpgroups multiply, each 64 output
// channels by all positions of the tile, and one thread asks for copies. A warp's outputs leave by the copy engine,
// too, while the next tile is computed; where they go, the residual was brought before.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "gemm_params.h"
#include "intrinsics.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// `kSegments`: of a tile, eight positions each.
template <int kSegments, bool kHasBoxes>
class GemmConv {
 public:
  __device__ __forceinline__ GemmConv(const GemmParams& params, const void* shared)
      : p_(params),
        warp_(static_cast<int>(Uniform(threadIdx.x / 32))),
        stages_(SharedAddress(shared)),
        weights_(stages_ + static_cast<unsigned>(params.num_stages) * kStageBytes),
        raws_(weights_ + static_cast<unsigned>(params.num_weights * kGemmWeightBytes)),
        outputs_(raws_ + static_cast<unsigned>(params.num_raws * params.raw_bytes)),
        barriers_(outputs_ + static_cast<unsigned>(kGemmProductWarps * params.output_bytes)) {}

  __device__ __forceinline__ void Run() {
    LetNextLaunchBegin();
    InitBarriers();
    if (warp_ < kGemmProductWarps) {
      TakeRegisters<kProductRegisters>();
      WaitForLaunchBefore();
      Multiply();
    } else {
      GiveUpRegisters<kStagingRegisters>();
      if (warp_ == kGemmProductWarps) {
        if (IsElected()) Stage();
      } else if constexpr (!kHasBoxes) {
        Pack();
      }
    }
  }

 private:
  static constexpr int kProductRegisters = 192, kStagingRegisters = 120;  // of 168 for each thread
  static constexpr int kWarps = kWarpgroupThreads / 32;                   // of a warpgroup
  static constexpr int kWarpRows = kGemmBoxRows, kRowTileRows = 64;
  static constexpr int kPackingThreads = kGemmThreads - 32 * (kGemmProductWarps + 1);
  static constexpr int kSums = 4 * kSegments;
  static constexpr int kBoxes = kSegments / kGemmBoxSegments;  // of a tile
  static constexpr unsigned kMatrixBytes = 128, kSegmentBytes = 2 * kSegmentPositions;
  // Of a box: a channel or row, the eight of them after which the order of 16 bytes begins anew, and all of X.
  static constexpr unsigned kBoxRowBytes = 2 * kGemmBoxPositions, kSwizzledBytes = 8 * kBoxRowBytes,
                            kBoxBytes = kGemmChannels * kBoxRowBytes, kOutputBoxBytes = kWarpRows * kBoxRowBytes;
  static constexpr unsigned kStageBytes =
      kHasBoxes ? kBoxes * kBoxBytes : (kSegments * kGemmPackedPitch + 127) / 128 * 128;
  // Steps of a chunk, and from one to the next of the weight, and of X.
  static constexpr int kSteps = kGemmChannels / kGemmStepChannels;
  static constexpr unsigned kWeightStepBytes = 2 * kRowTileRows * kGemmStepChannels,
                            kInputStepBytes = kHasBoxes ? kGemmStepChannels * kBoxRowBytes : 2 * kMatrixBytes;
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
  __device__ __forceinline__ Shared ResidualFilled() const {
    return Filled(p_.num_stages + p_.num_weights + p_.num_raws) + static_cast<unsigned>(8 * warp_);
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
  // Of the warp's outputs.
  __device__ __forceinline__ Shared Outputs() const {
    return outputs_ + static_cast<unsigned>(warp_ * p_.output_bytes);
  }

  __device__ __forceinline__ void InitBarriers() const {
    if (threadIdx.x == 0) {
      for (int ring = 0; ring < RawRing(p_.num_raws); ++ring) {
        const bool is_packed = !kHasBoxes && ring < p_.num_stages;
        InitBarrier(Filled(ring), is_packed ? kPackingThreads : 1);
        InitBarrier(Emptied(ring), ring < RawRing(0) ? kGemmProductWarps : kPackingThreads);
      }
      for (int warp = 0; warp < kGemmProductWarps; ++warp) {
        InitBarrier(Filled(RawRing(p_.num_raws)) + static_cast<unsigned>(8 * warp), 1);
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

  // Calls function(tile) for the block's tiles.
  template <class Function>
  __device__ __forceinline__ void ForTiles(const Function& function) const {
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      function(TileAt(index));
    }
  }

  __device__ __forceinline__ int FirstImage(const Tile& tile) const { return tile.place * p_.tile_images; }
  __device__ __forceinline__ int Images(const Tile& tile) const {
    return min(p_.tile_images, p_.batch - FirstImage(tile));
  }

  // Where a box of a tile lies. There may be no such image.
  struct BoxPlace {
    int image, position;
  };

  __device__ __forceinline__ BoxPlace PlaceOfBox(const Tile& tile, int box) const {
    const int index = tile.place * kBoxes + box, image = Divide(index, p_.by_image_boxes);
    return {image, (index - image * p_.image_boxes) * kGemmBoxPositions};
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
        if constexpr (kHasBoxes) {
          StageBoxes(x, tile, chunk);
        } else {
          StagePlanes(x, tile, chunk);
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

  // Pieces of 8 bytes, half a segment, that a thread moves from each raw stage to a packed one: from where to where;
  // unforeseen, or both would be worked out before the loop, and take more registers. Neighbouring threads move
  // neighbours. Segments behind those of the images become anything, for their columns are not stored. Channels that
  // there are not become zeros: what lies there may be no number.
  static constexpr int kPieces = 2 * kSegments * kGemmChannels,
                       kThreadPieces = (kPieces + kPackingThreads - 1) / kPackingThreads;
  static constexpr unsigned kMoveBits = 16;

  __device__ __forceinline__ void Pack() const {
    const int thread = static_cast<int>(threadIdx.x) - (kGemmThreads - kPackingThreads);
    unsigned moves[kThreadPieces];
#pragma unroll
    for (int i = 0; i < kThreadPieces; ++i) moves[i] = MoveOf(thread + i * kPackingThreads);
    const int last_pieces = 2 * kSegments * Channels(p_.num_chunks - 1);
    Position raw, packed;
    ForTiles([&](const Tile&) {
      for (int chunk = 0; chunk < p_.num_chunks; ++chunk) {
        WaitForBarrier(Filled(RawRing(raw.stage)), raw.round % 2);
        WaitForEmptied(packed.stage, packed);
        const Shared from = RawAddress(raw.stage), to = StageAddress(packed.stage);
        if (chunk + 1 == p_.num_chunks && last_pieces < kPieces) {
          PackChunk(moves, thread, from, to, [&](int piece) { return piece < last_pieces; });
        } else {
          PackChunk(moves, thread, from, to, [](int) { return true; });
        }
        FenceSharedForTensorCores();
        Arrive(Filled(packed.stage));
        Arrive(Emptied(RawRing(raw.stage)));
        raw.Advance(p_.num_raws);
        packed.Advance(p_.num_stages);
      }
    });
  }

  // `exists(piece)`: whether it is of a channel that there is.
  template <class Exists>
  static __device__ __forceinline__ void PackChunk(const unsigned (&moves)[kThreadPieces], int thread, Shared from,
                                                   Shared to, const Exists& exists) {
    constexpr int kAtOnce = 12;
#pragma unroll
    for (int first = 0; first < kThreadPieces; first += kAtOnce) {
      unsigned words[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce && first + i < kThreadPieces; ++i) {
        const unsigned move = Unforeseen(moves[first + i]);
        LoadSharedPair(from + (move & ((1u << kMoveBits) - 1)), words[i][0], words[i][1]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce && first + i < kThreadPieces; ++i) {
        const int piece = thread + (first + i) * kPackingThreads;
        const bool is_kept = exists(piece);
        const Shared at = to + (Unforeseen(moves[first + i]) >> kMoveBits);
        const bool is_piece = (first + i + 1) * kPackingThreads <= kPieces || piece < kPieces;
        if (is_piece) StoreSharedPair(at, is_kept ? words[i][0] : 0, is_kept ? words[i][1] : 0);
      }
    }
  }

  __device__ __forceinline__ unsigned MoveOf(int piece) const {
    const int channel = piece / (2 * kSegments), half_segment = piece % (2 * kSegments);
    const int segment = half_segment / 2, image = segment / p_.image_segments;
    const bool is_read = channel < kGemmChannels && image < p_.tile_images;
    const unsigned from = static_cast<unsigned>(image) * RawImageBytes() +
                          static_cast<unsigned>(channel * p_.x_plane_bytes) +
                          static_cast<unsigned>(half_segment - 2 * image * p_.image_segments) * kGemmPieceBytes;
    const auto to =
        static_cast<unsigned>(segment * kGemmPackedPitch + channel * 16 + half_segment % 2 * kGemmPieceBytes);
    return (is_read ? from : 0) | to << kMoveBits;
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply() {
    Position x, weight;
    unsigned before = 0;  // tiles
    ForTiles([&](const Tile& tile) {
      const int channel = tile.row_block * kGemmRows + warp_ * kWarpRows;
      const Finish<Half> lower = FinishOf(channel), upper = FinishOf(channel + kWarpRows / 2);
      const bool exists = channel < p_.out_channels, has_residual = exists && p_.epilogue.residual != nullptr;
      for (int chunk = 0; chunk < p_.num_chunks; ++chunk) {
        WaitForBarrier(Filled(x.stage), x.round % 2);
        WaitForBarrier(Filled(WeightRing(weight.stage)), weight.round % 2);
        MultiplyChunk(x, weight, chunk > 0);
        // Some products are always on their way while the next ones are waited for.
        if (chunk > 0) Release(x, weight);
        if (chunk == 0 && has_residual && IsElected()) StageResidual(tile, channel);
        x.Advance(p_.num_stages);
        weight.Advance(p_.num_weights);
      }
      WaitForProducts<0>();
      Release(x, weight);
      if (!exists) return;
      if (has_residual) {
        WaitForBarrier(ResidualFilled(), before++ % 2);
      } else {
        WaitForBulkReads();  // outputs of the tile before have left
        WaitForWarp();
      }
      KeepTile(lower.Unforeseen(), upper.Unforeseen());
      FenceSharedForTensorCores();  // and the copy engine
      WaitForWarp();
      if (IsElected()) StoreTile(tile, channel);
    });
    WaitForBulkReads();  // shared memory goes with the block
  }

  __device__ __forceinline__ void MultiplyChunk(const Position& x, const Position& weight, bool keeps_sums) {
    const Shared values = WeightAddress(weight.stage) + static_cast<unsigned>(warp_ / kWarps) * kRowTileBytes;
    const Matrix a = MatrixAt(Uniform(values), kMatrixBytes, 2 * kMatrixBytes);
    const Shared stage = Uniform(StageAddress(x.stage));
    const Matrix b = kHasBoxes ? SwizzledMatrixAt(stage, kSwizzledBytes, kBoxBytes)
                               : MatrixAt(stage, kMatrixBytes, kGemmPackedPitch);
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

  // What is stored of a warp lies as [images][16][plane], or as [boxes][16][64] in the copy engine's order.

  __device__ __forceinline__ Finish<Half> FinishOf(int first_channel) const {
    const int channel = first_channel + Lane() / 4;
    const auto* bias = static_cast<const Half*>(p_.epilogue.bias);
    return {1.0f, bias != nullptr && channel < p_.out_channels ? LoadElement(bias + channel) : 0.0f};
  }

  __device__ __forceinline__ void KeepTile(const Finish<Half>& lower, const Finish<Half>& upper) {
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
    return Outputs() + static_cast<unsigned>(segment / kGemmBoxSegments) * kOutputBoxBytes +
           static_cast<unsigned>(row + upper * kWarpRows / 2) * kBoxRowBytes +
           static_cast<unsigned>(place * 16 + Lane() % 4 * 4);
  }

  // From one of the thread's rows of whole planes to the other one.
  __device__ __forceinline__ unsigned UpperBytes() const { return static_cast<unsigned>(kWarpRows * p_.plane); }

  // Where the thread's outputs of a segment lie, in the first of its rows, and how many there are of the two, if that
  // is positive.
  struct PairPlace {
    Shared at;
    int count;
  };

  // Walks through the segments of several images.
  class PlaneWalk {
   public:
    __device__ __forceinline__ PlaneWalk(const GemmParams& params, const PairPlace& first)
        : p_(params), place_(first), images_(params.tile_images), segment_(params.image_segments) {}

    __device__ __forceinline__ PairPlace Next() {
      const PairPlace place = images_ > 0 ? place_ : PairPlace{place_.at, 0};
      place_.at += kSegmentBytes;
      place_.count -= kSegmentPositions;
      if (--segment_ == 0) {
        const int whole = p_.image_segments * kSegmentPositions;
        segment_ = p_.image_segments;
        place_.count += whole;
        place_.at += static_cast<unsigned>(2 * (kWarpRows * p_.plane - whole));
        --images_;
      }
      return place;
    }

   private:
    const GemmParams& p_;
    PairPlace place_;
    int images_, segment_;
  };

  // Calls function(the thread's two neighbouring sums, their address, how many of them are outputs) for all of them.
  template <class Function>
  __device__ __forceinline__ void ForPairs(const Function& function) {
    if constexpr (kHasBoxes) {
#pragma unroll
      for (int i = 0; i < 2 * kSegments; ++i) function(sums_ + 2 * i, AddressInBox(i / 2, i % 2), 2);
      return;
    }
    // Unforeseen: or the places of one walk would be kept for the next one.
    const PairPlace first = {
        Unforeseen(Outputs() + static_cast<unsigned>(2 * (Lane() / 4 * p_.plane + Lane() % 4 * 2))),
        p_.plane - Lane() % 4 * 2};
    const auto of_segment = [&](int segment, const PairPlace& place) {
      function(sums_ + 4 * segment, place.at, place.count);
      function(sums_ + 4 * segment + 2, place.at + UpperBytes(), place.count);
    };
    if (p_.tile_images == 1) {
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        of_segment(segment, {first.at + static_cast<unsigned>(segment) * kSegmentBytes,
                             first.count - segment * kSegmentPositions});
      }
    } else {
      PlaneWalk walk(p_, first);
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) of_segment(segment, walk.Next());
    }
  }

  // Whether two outputs are a word: in planes of an odd size, every second row begins within one.
  __device__ __forceinline__ bool HasWords() const { return kHasBoxes || p_.plane % 2 == 0; }

  __device__ __forceinline__ void AddResidual() {
    if (HasWords()) {
      ForPairs([](float* pair, Shared at, int count) {
        if (count < 1) return;
        const Half2 residual = LoadShared(at);
        pair[0] += ToFloat(Lower(residual));
        pair[1] += ToFloat(Upper(residual));
      });
    } else {
      ForPairs([](float* pair, Shared at, int count) {
        if (count > 0) pair[0] += ToFloat(LoadSharedHalf(at));
        if (count > 1) pair[1] += ToFloat(LoadSharedHalf(at + 2));
      });
    }
  }

  __device__ __forceinline__ void StoreSums() {
    if (HasWords()) {
      ForPairs([&](const float* pair, Shared at, int count) {
        const Half2 outputs = Bounded<Half>(p_.epilogue.bounds, pair);
        if (count > 0) StoreShared(at, outputs);
      });
    } else {
      ForPairs([&](const float* pair, Shared at, int count) {
        const Half2 outputs = Bounded<Half>(p_.epilogue.bounds, pair);
        if (count > 0) StoreSharedHalf(at, Lower(outputs));
        if (count > 1) StoreSharedHalf(at + 2, Upper(outputs));
      });
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
    return 2 * p_.plane * (static_cast<long long>(FirstImage(tile)) * p_.out_channels + channel);
  }
  __device__ __forceinline__ unsigned PlanesBytes(int channel) const {
    return static_cast<unsigned>(2 * p_.plane * min(kWarpRows, p_.out_channels - channel));
  }
  __device__ __forceinline__ long long ImageBytes() const {
    return 2 * static_cast<long long>(p_.plane) * p_.out_channels;
  }

  // By one thread, as what follows: to where outputs of the tile before have left.
  __device__ __forceinline__ void StageResidual(const Tile& tile, int channel) const {
    const Shared barrier = ResidualFilled();
    Shared to = Outputs();
    WaitForBulkReads();
    if constexpr (kHasBoxes) {
      ExpectBytes(barrier, kBoxes * kOutputBoxBytes);
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box, to += kOutputBoxBytes) {
        const BoxPlace place = PlaceOfBox(tile, box);
        CopyBox(to, &p_.residual_map, place.position, channel, place.image, barrier);
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
    Shared from = Outputs();
    if constexpr (kHasBoxes) {
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box, from += kOutputBoxBytes) {
        const BoxPlace place = PlaceOfBox(tile, box);
        StoreBox(&p_.y_map, from, place.position, channel, place.image);
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

  // A barrier, not __syncwarp: behind that, the compiler lets products wait for each other.
  __device__ __forceinline__ void WaitForWarp() const { WaitAtBarrier(1 + warp_, 32); }

  const GemmParams& p_;
  const int warp_;
  const Shared stages_, weights_, raws_, outputs_, barriers_;
  float sums_[kSums];
};

}  // namespace sparseconv::cuda
