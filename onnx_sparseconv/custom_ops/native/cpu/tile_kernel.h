// The inner loops of the CPU kernel: one tile of output positions, for a range of output channels.
//
// There is one implementation (tile_kernel_impl.h), compiled once for each instruction set. This header is all that
// those files share with the rest. They see no standard library templates: an inline function that the compiler emits
// in a file built for AVX-512 could be the copy that the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparseconv::cpu {

constexpr int kCacheLine = 64;  // bytes
constexpr int kMaxLanes = 16;
constexpr int kMaxVectors = 14;
// Tiles of so many vectors make several sums of each row, and add these up.
constexpr int kMaxSplitVectors = 2;
// Output channels whose partial sums are kept while one block of input channels is in the first-level cache: few, so
// that the sums stay there too.
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
  float low;  // bounds of Relu and Clip; infinite where there are none
  float high;
};

// What is fetched into the caches while sums are made: the lines of X that the next task will read, a few for each row
// of the job at hand. The lines of Y that a row will be stored to are fetched as well. Calls whose tensors stay in the
// caches fetch nothing.
struct Ahead {
  const char* line = nullptr;  // of X, the next to be fetched
  int64_t lines_left = 0;      // of its channel
  int64_t channels_left = 0;   // with that one
  int64_t channel_lines = 0;   // of each channel
  int64_t channel_stride = 0;  // bytes from one channel's first line to the next one's
  int64_t lines_a_row = 0;     // to fetch for each row of a job
};

// One non-zero weight and where the input values lie that it multiplies.
struct Entry {
  int32_t offset;  // in cells, from the tile's first position in the group's first channel
  float value;
};

// Sums, for every row k in [row_begin, row_end) and every position i of the tile,
//   bias[k] + sum over entries e of row k, in order: value[e] * input[group(k) * group_stride + offset[e] + i +
//   shift[e]]
// and stores the activated result. Entries are walked block by block and, within a block, shift by shift (see Plan).
// The order of a sum is that of the plan, whatever the tile and the thread, so results do not depend on the number of
// threads.
//
// A load that straddles two cache lines costs two. So where a plan has shifts, offsets are whole vectors: what belongs
// to one shift is summed at aligned positions, one vector further than the tile, and then moved by the shift, once.
struct TileJob {
  const float* input;  // first position of the tile, first channel of `first_group`
  int64_t first_group;
  int64_t group_stride;
  int64_t rows_per_group;
  const Entry* entries;
  // Where the entries of a segment begin: panel by panel, block by block, row by row, shift by shift, as they are
  // walked, so that memory is read in one go. Segments end where the next one begins.
  const uint32_t* segments;
  const int32_t* shifts;  // increasing, 0 to lanes - 1
  int32_t num_shifts;
  int32_t num_blocks;
  int64_t num_rows;
  int64_t row_begin;
  int64_t row_end;
  int32_t num_vectors;  // 1 to kMaxVectors
  int32_t last_vector;  // first position of the last one; the others lie side by side
  TileOutput output;
  Ahead* ahead;  // null where nothing is fetched ahead
};

// Depthwise convolution of floats by a square window, of maps of two axes: all outputs of the channels [channel_begin,
// channel_end) of an image. For every output, bias + the products of all taps, row by row; then residual and
// activation.
struct DepthwiseJob {
  int kernel;  // 3, 5 or 7; or 1, with a stride of 1 and no padding
  int stride;  // 1 or 2, along both axes; 2 without dilation along columns
  int64_t row_dilation;
  int64_t column_dilation;
  int64_t pad_rows;  // before the first
  int64_t pad_columns;
  int64_t in_rows;
  int64_t in_columns;
  int64_t out_rows;
  int64_t out_columns;
  const float* input;  // channel `first_input` of X
  int64_t first_input;
  const float* weight;         // [channels, kernel, kernel], of all channels of Y
  int64_t channels_per_input;  // channels of Y that read one of X
  int64_t channel_begin;       // of Y
  int64_t channel_end;
  TileOutput output;  // without runs
};

// Maps of one position by a window of one tap: for every row k in [row_begin, row_end), bias[k] + the sum over its
// entries of value * X[group(k) * group_channels + column]; then residual and activation. Of floats.
struct VectorJob {
  const float* input;          // X, of all channels
  const int64_t* entry_begin;  // of each row, and of one more
  const uint32_t* columns;
  const float* values;
  int64_t rows_per_group;
  int64_t group_channels;
  int64_t row_begin;
  int64_t row_end;
  TileOutput output;  // without runs
};

struct TileKernels {
  const char* isa;
  int lanes;
  int max_vectors;          // of a tile: what the registers hold
  int max_shifted_vectors;  // of a tile whose plan has shifts: what they hold twice
  double shifted_cost;      // time of an aligned load and multiply-add over that of one that may straddle cache lines
  void (*run)(const TileJob& job);
  // Writes `num_rows` rows of `row_pitch` cells: `lead` zeros, then `count` values, then zeros. `source` is the first
  // value; values lie `stride` (1 or 2) apart, rows `source_pitch`. Writes up to kMaxLanes cells beyond the last row.
  void (*copy_rows)(const float* source, int64_t stride, int64_t source_pitch, int64_t num_rows, int64_t lead,
                    int64_t count, int64_t row_pitch, float* target);
  // target[i] = source[i * stride], converted to float.
  void (*copy_floats)(const float* source, int64_t stride, int64_t count, float* target);
  void (*copy_halves)(const uint16_t* source, int64_t stride, int64_t count, float* target);
  void (*run_depthwise)(const DepthwiseJob& job);
  void (*run_vector)(const VectorJob& job);
};

// The kernels of one instruction set.
const TileKernels& PortableKernels();
const TileKernels& Avx2Kernels();
const TileKernels& Avx512Kernels();

}  // namespace sparseconv::cpu
