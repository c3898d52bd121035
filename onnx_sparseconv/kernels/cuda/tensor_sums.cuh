// The sums of a warp of the kernels on sparse tensor cores from sm_80 on, and the products that add to them.
//
// A position is eight neighbouring halves of each channel in shared memory: what a product reads of it as eight
// columns.
#pragma once

#include "intrinsics.cuh"

namespace sparseconv::cuda {

// Of kSubtiles * 16 rows and kPositions positions of eight values each.
template <int kSubtiles, int kPositions>
class TensorSums {
 public:
  // Of a step of kSubtiles subtiles; see tensor_weight.h.
  static constexpr int kStepBytes = 512 * (kSubtiles + 1);
  // What `Keep` takes for a warp.
  static constexpr unsigned kKeptBytes = 512 * kSubtiles * kPositions;

  // Of a subtile and a position, those of row lane / 4 are 0 and 1, those of row lane / 4 + 8 are 2 and 3: of its
  // values 2 * (lane % 4) and the next one.
  float at[kSubtiles][kPositions][4];

  // Adds the products of steps `first`, `first` + `stride`, .. below `end`, of which the first of all lies at `steps`
  // for this lane. `offset` of a step's word says where its column for this lane begins, behind `input`; positions are
  // 16 bytes apart.
  template <class Offset>
  __device__ __forceinline__ void Multiply(Shared input, Shared steps, int first, int end, int stride,
                                           const Offset& offset) {
    const unsigned step_bytes = static_cast<unsigned>(stride * kStepBytes);
    Shared step = steps + static_cast<unsigned>(first * kStepBytes);
#pragma unroll 1
    for (int i = first; i < end; i += stride, step += step_bytes) {
      const uint4 words = LoadSharedVector(step + kSubtiles * 512);
      uint4 values[kSubtiles];
#pragma unroll
      for (int m = 0; m < kSubtiles; ++m) values[m] = LoadSharedVector(step + m * 512);
      const Shared from = input + offset(words.z);
      unsigned inputs[2][4];
      LoadMatrices(from, inputs[0]);
#pragma unroll
      for (int j = 0; j < kPositions; ++j) {
        if (j + 1 < kPositions) LoadMatrices(from + 16 * (j + 1), inputs[(j + 1) % 2]);
#pragma unroll
        for (int m = 0; m < kSubtiles; ++m) {
          const unsigned meta = m < 2 ? words.x : words.y;
          if (m % 2 == 0) {
            MultiplySparse<0>(at[m][j], values[m], inputs[j % 2], meta);
          } else {
            MultiplySparse<1>(at[m][j], values[m], inputs[j % 2], meta);
          }
        }
      }
    }
  }

  // Stores them to shared memory, for another warp to add them; `to` and `from` are this lane's first vector.
  __device__ __forceinline__ void Keep(Shared to) const {
#pragma unroll
    for (int i = 0; i < kSubtiles * kPositions; ++i) {
      const float (&sums)[4] = at[i / kPositions][i % kPositions];
      const unsigned words[] = {FloatToBits(sums[0]), FloatToBits(sums[1]), FloatToBits(sums[2]), FloatToBits(sums[3])};
      StoreSharedVectorIf(1, to + 512u * i, words);
    }
  }

  __device__ __forceinline__ void AddKept(Shared from) {
#pragma unroll
    for (int i = 0; i < kSubtiles * kPositions; ++i) {
      const uint4 words = LoadSharedVector(from + 512u * i);
      float (&sums)[4] = at[i / kPositions][i % kPositions];
      sums[0] += BitsToFloat(words.x);
      sums[1] += BitsToFloat(words.y);
      sums[2] += BitsToFloat(words.z);
      sums[3] += BitsToFloat(words.w);
    }
  }
};

}  // namespace sparseconv::cuda
