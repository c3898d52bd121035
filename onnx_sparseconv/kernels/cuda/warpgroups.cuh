// What the kernels of warpgroups of sparse tensor cores have in common (float16, sm_90a).
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

#include "tensor_tile.cuh"

namespace sparseconv::cuda {

// What is the same in all lanes, so that the compiler knows: products are for warps that do not part.
template <class Value>
__device__ __forceinline__ Value Uniform(Value value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
}

class Warpgroups : protected TensorTile {
 protected:
  __device__ __forceinline__ Warpgroups(const WarpgroupParams& params, const void* shared)
      : TensorTile(params.tile, shared), w_(params) {}

  static constexpr int kRows = 64;
  static constexpr unsigned kPixelBytes = 16;  // of a channel
  static constexpr unsigned kWarpgroup = 128;
  static constexpr int kStagingWarps = (kWgmmaThreads - kWgmmaProductThreads) / 32;
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
        InitBarrier(Emptied(stage), kWgmmaProductThreads / 32);
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

  __device__ __forceinline__ void Release(int stage) const {
    if (Lane() == 0) Arrive(Emptied(stage));
  }

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

  // Biases of the thread's channels.
  struct Biases {
    float lower, upper;
  };

  // Of the warp; those of the thread are the one Lane() / 4 behind it, and the one 8 behind that.
  __device__ __forceinline__ int FirstChannel(const Tile& tile, int row_tile) const {
    return (tile.first_row_tile + row_tile) * kRows + static_cast<int>(threadIdx.x % kWarpgroup) / 32 * 16;
  }

  __device__ __forceinline__ Biases BiasesOf(const Tile& tile, int row_tile) const {
    const int channel = FirstChannel(tile, row_tile) + static_cast<int>(Lane()) / 4;
    return {BiasOf(tile, channel), BiasOf(tile, channel + 8)};
  }

  // A barrier, not __syncwarp: behind that, the compiler lets products wait for each other.
  __device__ __forceinline__ void WaitForWarp() const { WaitAtBarrier(2 + static_cast<int>(threadIdx.x) / 32, 32); }

  // Neighbouring halves.
  template <int kColumns>
  struct Columns {
    Half2 pairs[(kColumns + 1) / 2] = {};

    __device__ __forceinline__ void Load(const Half* from) {
      if constexpr (kColumns == 1) {
        pairs[0] = LoadOnce(from);
      } else if constexpr (kColumns == 2) {
        pairs[0] = LoadOnce(reinterpret_cast<const Half2*>(from));
      } else if constexpr (kColumns == 4) {
        const uint2 words = LoadOnce(reinterpret_cast<const uint2*>(from));
        pairs[0] = words.x, pairs[1] = words.y;
      } else {
        Set(LoadOnce(reinterpret_cast<const uint4*>(from)));
      }
    }

    __device__ __forceinline__ void LoadShared(Shared from) {
      if constexpr (kColumns == 1) {
        pairs[0] = LoadSharedHalf(from);
      } else if constexpr (kColumns == 2) {
        pairs[0] = cuda::LoadShared(from);
      } else if constexpr (kColumns == 4) {
        LoadSharedPair(from, pairs[0], pairs[1]);
      } else {
        Set(LoadSharedVector(from));
      }
    }

    __device__ __forceinline__ void Store(Half* to) const {
      if constexpr (kColumns == 1) {
        StoreOnce(to, Lower(pairs[0]));
      } else if constexpr (kColumns == 2) {
        StoreOnce(reinterpret_cast<Half2*>(to), pairs[0]);
      } else if constexpr (kColumns == 4) {
        StoreOnce(reinterpret_cast<uint2*>(to), uint2{pairs[0], pairs[1]});
      } else {
        StoreOnce(reinterpret_cast<uint4*>(to), uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
      }
    }

    __device__ __forceinline__ void StoreShared(Shared to) const {
      if constexpr (kColumns == 1) {
        StoreSharedHalf(to, Lower(pairs[0]));
      } else {
#pragma unroll
        for (unsigned i = 0; i < kColumns / 2; ++i) cuda::StoreShared(to + 4 * i, pairs[i]);
      }
    }

    __device__ __forceinline__ void Set(const uint4& words) {
      pairs[0] = words.x, pairs[1] = words.y, pairs[2] = words.z, pairs[3] = words.w;
    }
  };

  const WarpgroupParams& w_;
};

}  // namespace sparseconv::cuda
