// The inner loops of the CPU kernel: one tile of output positions, for a range of output channels.
//
// There is one implementation (tile_kernel_impl.h), compiled once for each instruction set. This header is all that
// those files share with the rest. They see no standard library templates: an inline function that the compiler emits
// in a file built for AVX-512 could be the copy that the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparseconv::cpu {

constexpr int kMaxLanes = 16;
constexpr int kMaxVectors = 8;
// Output channels whose partial sums are kept while one block of input channels is in the first-level cache.
constexpr int kPanelRows = 32;

// Consecutive output positions of a tile that exist (others fall on padding) and lie side by side in Y.
struct Run {
  int32_t begin;   // within the tile
  int32_t length;  // positions
  int64_t output;  // index of the first within a channel of Y
};

// The output's part of a tile. Pointers are to channel 0 of the image; Y and the residual have the same layout.
struct TileOutput {
  const Run* runs;
  int32_t num_runs;
  bool is_half;          // type of bias, residual and y: float16 or float
  const void* bias;      // null where absent
  const void* residual;  // null where absent
  void* y;
  int64_t channel_stride;  // positions of one channel
  int activation;          // ActivationCode
  float alpha;
  float beta;
};

// Sums, for every row k in [row_begin, row_end) and every position i of the tile,
//   bias[k] + sum over entries e of row k, in order: values[e] * input[group(k) * group_stride + offsets[e] + i]
// and stores the activated result. Entries are walked block by block (see Plan); the order of a sum is always that of
// its entries, so results do not depend on tiles, blocks or threads.
struct TileJob {
  const float* input;  // first position of the tile, first channel of `first_group`
  int64_t first_group;
  int64_t group_stride;
  int64_t rows_per_group;
  const float* values;
  const int32_t* offsets;
  const uint32_t* segments;  // entries of row k, block b: segments[k * num_blocks + b] up to the next one
  int32_t num_blocks;
  int64_t row_begin;
  int64_t row_end;
  int32_t num_vectors;  // 1 to kMaxVectors
  TileOutput output;
};

struct TileKernels {
  const char* isa;
  int lanes;
  void (*run)(const TileJob& job);
  // target[i] = source[i * stride], converted to float.
  void (*copy_floats)(const float* source, int64_t stride, int64_t count, float* target);
  void (*copy_halves)(const uint16_t* source, int64_t stride, int64_t count, float* target);
};

// The kernels of one instruction set.
const TileKernels& PortableKernels();
const TileKernels& Avx2Kernels();
const TileKernels& Avx512Kernels();

}  // namespace sparseconv::cpu
