// What the kernels of warpgroups of sparse tensor cores have in common (sm_90a).
//
// They multiply halves and add up floats. X, Y, bias and residual are of a type T, Half or float; floats are rounded to
// halves before (interleave.cuh, gather.cuh), to as many bits as TF32 has.
//
// Two whole matrices are read from shared memory by the tensor cores themselves (wgmma.mma_async.sp): they find eight
// halves of eight channels in 128 contiguous bytes. So a pixel of a stage holds 8 halves of 32 channels, and what the
// host (wgmma_weight.cc) chooses is the order of the channels: four neighbours are such that hardly a row has three
// non-zeros among them. Channels that are left with non-zeros come once more.
//
// There is a block for each multiprocessor, which computes tile after tile. Two warpgroups multiply, each 64 output
// channels by up to 32 pixels; their sums stay in registers, as floats. The third warpgroup stages: while the sums of a
// tile are stored, the next one is staged.
#pragma once

#include "magnitude.cuh"
#include "recompute.cuh"
#include "tensor_tile.cuh"

namespace sparseconv::cuda {

// What is the same in all lanes, so that the compiler knows: products are for warps that do not part.
template <class Value>
__device__ __forceinline__ Value Uniform(Value value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
}

// What is done to a channel's sums of products: those of floats have a weight that was scaled such that it is well
// within the range of halves.
template <class T>
struct Finish {
  float scale, bias;

  __device__ __forceinline__ float operator()(float sum) const {
    return sizeof(T) == sizeof(float) ? sum * scale + bias : sum + bias;
  }
  // The same, unforeseen.
  __device__ __forceinline__ Finish Unforeseen() const { return {cuda::Unforeseen(scale), cuda::Unforeseen(bias)}; }
};

// Neighbouring elements, so many bytes of them: a half, or a whole vector of 4, 8 or 16 bytes.
template <int kBytes>
struct Columns {
  unsigned words[(kBytes + 3) / 4] = {};

  __device__ __forceinline__ void Load(const void* from) { LoadFrom<false>(from); }
  // The same of what other blocks read, too.
  __device__ __forceinline__ void LoadCached(const void* from) { LoadFrom<true>(from); }

  __device__ __forceinline__ void LoadShared(Shared from) {
    if constexpr (kBytes == 2) {
      words[0] = LoadSharedHalf(from);
    } else if constexpr (kBytes == 4) {
      words[0] = cuda::LoadShared(from);
    } else if constexpr (kBytes == 8) {
      LoadSharedPair(from, words[0], words[1]);
    } else {
      Set(LoadSharedVector(from));
    }
  }

  __device__ __forceinline__ void Store(void* to) const {
    if constexpr (kBytes == 2) {
      StoreOnce(static_cast<Half*>(to), Lower(words[0]));
    } else if constexpr (kBytes == 4) {
      StoreOnce(static_cast<unsigned*>(to), words[0]);
    } else if constexpr (kBytes == 8) {
      StoreOnce(static_cast<uint2*>(to), uint2{words[0], words[1]});
    } else {
      StoreOnce(static_cast<uint4*>(to), uint4{words[0], words[1], words[2], words[3]});
    }
  }

  __device__ __forceinline__ void StoreShared(Shared to) const {
    if constexpr (kBytes == 2) {
      StoreSharedHalf(to, Lower(words[0]));
    } else {
#pragma unroll
      for (unsigned i = 0; i < kBytes / 4; ++i) cuda::StoreShared(to + 4 * i, words[i]);
    }
  }

  template <bool kIsCached>
  __device__ __forceinline__ void LoadFrom(const void* from) {
    if constexpr (kBytes == 2) {
      words[0] = Loaded<kIsCached>(static_cast<const Half*>(from));
    } else if constexpr (kBytes == 4) {
      words[0] = Loaded<kIsCached>(static_cast<const unsigned*>(from));
    } else if constexpr (kBytes == 8) {
      const uint2 pair = Loaded<kIsCached>(static_cast<const uint2*>(from));
      words[0] = pair.x, words[1] = pair.y;
    } else {
      Set(Loaded<kIsCached>(static_cast<const uint4*>(from)));
    }
  }

  template <bool kIsCached, class Value>
  static __device__ __forceinline__ Value Loaded(const Value* from) {
    if constexpr (kIsCached) {
      return LoadWritten(from);
    } else {
      return LoadOnce(from);
    }
  }

  __device__ __forceinline__ void Set(const uint4& four) {
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  }
};

class Warpgroups : protected TensorTile {
 protected:
  __device__ __forceinline__ Warpgroups(const WarpgroupParams& params, const void* shared)
      : TensorTile(params.tile, shared), w_(params), shared_(shared) {}

  static constexpr int kRows = 64;
  static constexpr unsigned kPixelBytes = 16;  // of a channel
  static constexpr unsigned kWarpgroup = 128;
  static constexpr int kStagingWarps = kWgmmaStagingWarps;
  static constexpr int kPlaces = kWgmmaChannels / kStagingWarps;  // of a chunk, that a warp stages
  // Bytes of the weight, of 64 rows and 32 columns: two of four values, and where they stand.
  static constexpr unsigned kValueBytes = 2048, kPlaceBytes = 256;
  // Matrices of 8 x 16 bytes lie in a row: in a weight's, the next one has the next columns, the one behind it the next
  // rows; in a pixel, the next one has the next channels, and in the next pixel, the next position.
  static constexpr unsigned kMatrixBytes = 128;

  static __device__ __forceinline__ bool IsProductWarp() {
    return Uniform(threadIdx.x / 32) < kWgmmaProductThreads / 32;
  }

  // Of a warp that stages, among those.
  static __device__ __forceinline__ int StagingWarp() { return Warp() - kWgmmaProductThreads / 32; }

  // To be called by all threads.
  __device__ __forceinline__ void InitBarriers() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < t_.num_stages; ++stage) {
        InitBarrier(Filled(stage), kWgmmaThreads - kWgmmaProductThreads);
        InitBarrier(Emptied(stage), kWgmmaProductThreads);
      }
      FenceBarrierInit();
    }
    __syncthreads();
  }

  __device__ __forceinline__ Shared Table() const {
    return stages_ + static_cast<unsigned>(t_.num_stages * t_.stage_bytes);
  }
  __device__ __forceinline__ Shared Filled(int stage) const {
    return Table() + static_cast<unsigned>(w_.table_bytes + 16 * stage);
  }
  __device__ __forceinline__ Shared Emptied(int stage) const { return Filled(stage) + 8; }

  // Each lane arrives for what it loaded itself: one that did for all would have to wait for the others first.
  __device__ __forceinline__ void Release(int stage) const { Arrive(Emptied(stage)); }

  // Those of a tile's row block that the block computes.
  struct Chunks {
    int first, count;
  };

  __device__ __forceinline__ Chunks ChunksOf(const Tile& tile) const {
    const unsigned* begins = w_.block_begins + tile.group * t_.row_blocks_per_group + tile.row_block;
    const unsigned count = begins[1] - begins[0];
    if (gridDim.y == 1) return {static_cast<int>(begins[0]), static_cast<int>(count)};
    const unsigned begin = count * blockIdx.y / gridDim.y, end = count * (blockIdx.y + 1) / gridDim.y;
    return {static_cast<int>(begins[0] + begin), static_cast<int>(end - begin)};
  }

  // Calls function(tile) for the block's tiles.
  template <class Function>
  __device__ __forceinline__ void ForTiles(const Function& function) const {
    const int blocks = static_cast<int>(gridDim.x);
    TilePlace place = PlaceOfTile(static_cast<int>(blockIdx.x));
    const TilePlace step = PlaceOfTile(blocks);
    for (int index = static_cast<int>(blockIdx.x); index < w_.num_tiles; index += blocks) {
      function(TileAt(place));
      Advance(place, step);
    }
  }
  using TensorTile::Advance;

  // --- what halves could not hold -----------------------------------------------------------------------------------

  // What earlier launches saw of X; each thread that stages knows a part.
  __device__ __forceinline__ unsigned SeenBefore() const {
    WaitForLaunchBefore();  // threads without a chunk have not
    return cuda::SeenBefore(w_.recompute, static_cast<int>(threadIdx.x) - kWgmmaProductThreads, 32 * kStagingWarps);
  }

  // Of the block, whether its outputs are what they should be. Parts of sums are for who adds them up to compute once
  // more. To be called by all threads, with what they saw of X.
  __device__ __forceinline__ bool AreOutputsDone(unsigned seen) const {
    seen = SeenByBlock(seen);
    if (gridDim.y == 1) return DidHalvesHold(seen);
    if (threadIdx.x == 0) w_.seen[blockIdx.y * gridDim.x + blockIdx.x] = seen;
    return true;
  }

  // The channels of a tile, of one image: what an output box has of them.
  __device__ __forceinline__ OutputBox BoxOf(const Tile& tile) const {
    OutputBox box;
    box.first = 0;
    box.channels = min(t_.warps_m * kRows, t_.group_out_channels - tile.first_row_tile * kRows);
    box.rows = box.columns = 1;
    box.share = 0;
    box.shares = 1;
    return box;
  }
  __device__ __forceinline__ long long FirstPlane(const Tile& tile, int image) const {
    return static_cast<long long>(image) * t_.out_channels + tile.group * t_.group_out_channels +
           tile.first_row_tile * kRows;
  }

  __device__ __forceinline__ void Recompute(const OutputBox& box) const {
    cuda::Recompute(w_.recompute, box, const_cast<void*>(shared_));
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void WaitForEmptied(const Position& at) const {
    if (at.round > 0) WaitForBarrier(Emptied(at.stage), (at.round - 1) % 2);
  }

  // To be called by one thread: copies a chunk's part of the weight.
  __device__ __forceinline__ void StageWeight(int stage, size_t first_byte, unsigned bytes) const {
    ExpectBytes(Filled(stage), bytes);
    CopyBulkCached(StageAddress(stage) + static_cast<unsigned>(w_.input_bytes),
                   static_cast<const unsigned char*>(w_.chunks) + first_byte, bytes, Filled(stage));
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // Of the thread's channels.
  template <class T>
  struct Finishes {
    Finish<T> lower, upper;
  };

  // Of the warp; those of the thread are the one Lane() / 4 behind it, and the one 8 behind that.
  __device__ __forceinline__ int FirstChannel(const Tile& tile, int row_tile) const {
    return (tile.first_row_tile + row_tile) * kRows + static_cast<int>(threadIdx.x % kWarpgroup) / 32 * 16;
  }

  template <class T>
  __device__ __forceinline__ Finishes<T> FinishesOf(const Tile& tile, int row_tile) const {
    const int channel = FirstChannel(tile, row_tile) + static_cast<int>(Lane()) / 4;
    return {FinishOf<T>(tile, channel), FinishOf<T>(tile, channel + 8)};
  }

  template <class T>
  __device__ __forceinline__ Finish<T> FinishOf(const Tile& tile, int channel) const {
    const bool is_scaled = sizeof(T) == sizeof(float) && channel < t_.group_out_channels;
    return {is_scaled ? w_.scales[tile.group * t_.group_out_channels + channel] : 1.0f, BiasOf<T>(tile, channel)};
  }

  // Neighbouring values, 16 bytes of them.
  template <class T>
  static constexpr int kVector = 16 / sizeof(T);

  template <class T>
  static __device__ __forceinline__ void Add(const uint4& vector, Floats<kVector<T>>& sums) {
    const unsigned words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if constexpr (sizeof(T) == sizeof(float)) {
        sums.at[i] += BitsToFloat(words[i]);
      } else {
        sums.at[i] += ToFloat(i % 2 == 0 ? Lower(words[i / 2]) : Upper(words[i / 2]));
      }
    }
  }

  // Whether there is more to do than what bounds do to what is stored.
  __device__ __forceinline__ bool HasActivation() const { return !IsBound(t_.epilogue.activation); }

  // A barrier, not __syncwarp: behind that, the compiler lets products wait for each other.
  __device__ __forceinline__ void WaitForWarp() const { WaitAtBarrier(2 + static_cast<int>(threadIdx.x) / 32, 32); }

  const WarpgroupParams& w_;
  const void* const shared_;
};

}  // namespace sparseconv::cuda
