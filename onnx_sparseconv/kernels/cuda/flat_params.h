// What the host passes to the kernels for flat X (flat_conv.cuh, flatten.cuh), as of params.h.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

// X made flat: octets of channels, 16 bytes a pixel, and of each octet the pixels of all images in one line. An image
// is `rows` rows of `row_pixels` pixels, which begin with what windows read before X, and may end before all that they
// read behind it: where the next row, or image, begins with zeros, these serve for both.
struct FlatImage {
  int rows, row_pixels;
  Divisor by_row_pixels, by_pixels;  // of a row, and of an image
};

// Makes X flat: `sparseconv_flatten`, and `sparseconv_flatten_f32`, which rounds floats to halves. out
// [places][octets][pixels] of 16 bytes, where each place between strides that windows read has pixels one stride apart;
// pixels outside of X, and those behind the last image, are zeros.
//
// Grid: x = pixels of all images and those behind them, y = blocks of octets, each in all places.
//
// `sparseconv_flatten_rows` and `sparseconv_flatten_rows_f32` do the same without strides, where images of X begin at
// multiples of 16 bytes: the copy engine brings some rows of an octet's channels. Grid: x = chunks of rows of all
// images, or the first of them, y = octets. See FlatRest for the others.
constexpr int kFlattenRowsThreads = 128;
struct FlattenParams {
  const void* x;  // [N, C, in_h, in_w]
  void* out;
  unsigned* seen;       // of floats, [gridDim.y][gridDim.x], as of InterleaveParams
  const int* channels;  // [octets][8]; -1 for none
  const int* places;    // [num_places], row and column between strides, `row << 16 | column`
  FlatImage image;
  int batch, in_channels;
  int in_h, in_w;
  int strides[2];
  int pads_begin[2];
  int num_pixels;  // of an octet
  int num_places, num_octets, block_octets;
  // By rows alone:
  int chunk_rows, chunks;  // of an image
  Divisor by_chunks;
  int channel_bytes;   // of shared memory, for a channel's rows
  unsigned* progress;  // of FlatRest, to be set to zeros
  int progress_words;
};

// What a launch that makes X flat by rows has left of it: the chunks from `first_chunk` on, which the flat kernel makes
// flat itself, while it computes what needs none of them. Its blocks take units, an octet of a chunk each.
struct FlatRest {
  FlattenParams flatten;
  int first_chunk;
  unsigned num_units;
  Divisor by_octets;
  unsigned* progress;  // units that were taken; then, of each chunk, octets that are flat, and what was seen of floats
};
// Of the flat kernel, warps that take units, and slots of each, with a barrier before a unit's rows.
constexpr int kFlatAssistingWarps = 3, kFlatRestSlots = 2;
constexpr int kFlatRestHeader = 16;

// The flat kernels on sm_90a: `sparseconv_flat_n<blocks>`, float16, and `sparseconv_flat_f32_n<blocks>`, for windows of
// many channels; `sparseconv_flat_dense_n<blocks>` and `sparseconv_flat_dense_f32_n<blocks>`, for those with few zeros.
// A warpgroup computes up to `blocks` times eight neighbouring pixels at a time. flat_conv.cuh says how it works.
//
// A tile is so many pixels for each warpgroup, of 64 output channels. A stage holds `stage_pixels` of each of the
// octets of a chunk, and behind them the chunk's part of the weight. Behind all stages are outputs on their way to Y.
//
// Blocks compute the tiles blockIdx.x, blockIdx.x + gridDim.x, ..; row tiles of all groups go first.
enum class FlatProducts { kSparse, kDense };
constexpr int kFlatOctets = 4, kFlatDenseOctets = 2;  // of a chunk
constexpr int kFlatWarpgroups = 2;
constexpr int kFlatThreads = kWarpgroupThreads * (kFlatWarpgroups + 1);
struct FlatParams {
  const void* x;  // flat
  void* y;        // [N, K, OH, OW]
  Epilogue epilogue;
  const float* scales;  // [K], as of WarpgroupParams
  RecomputeParams recompute;
  const void* chunks;            // see flat_weight.h
  const unsigned* chunk_begins;  // [chunks + 1], in units of 16 bytes
  const unsigned* tile_begins;   // [row_tiles + 1], first chunks
  const int* octets;             // [chunks], the first octet of each
  FlatRest rest;
  unsigned tap_bytes[kMaxWgmmaTaps];  // from a pixel to the one that it reads with each tap
  FlatImage image;
  int out_channels, group_out_channels;
  int out_h, out_w;
  int num_outputs;  // of a channel, in all images
  int out_shift;  // 1 << out_shift outputs are stored together, up to 16 bytes: planes of Y are multiples of them, and
                  // Y and the residual begin at such
  Divisor by_plane, by_row_tiles;
  int row_tiles, row_tiles_per_group;
  int num_tiles;
  long long octet_bytes;  // of X
  int stage_pixels;
  int num_stages, stage_bytes;
  int header_bytes;  // of a chunk
};

// On their way to Y, outputs of a warp lie in 16 rows of 512 bytes, and 16 more that keep them apart, and let them
// begin where Y has a vector. Behind them are two tables, each of a tile: its first chunk and the one behind its last,
// and for each pixel, where its outputs lie in the rows.
constexpr int kFlatRowBytes = 512 + 16;
constexpr int kFlatWarps = kFlatWarpgroups * kWarpgroupThreads / 32;  // that multiply
constexpr int kMaxFlatBlocks = 32;
constexpr int kFlatTableHeader = 16;
constexpr int kFlatTableBytes = kFlatTableHeader + 2 * 8 * kMaxFlatBlocks * kFlatWarpgroups;
constexpr int kFlatTables = 2;
// Behind these, two barriers for each table, each warp's rows, and each stage; and where some of X is left to be made
// flat, a barrier and room for each slot of the warps that do.
constexpr int kFlatBesides = kFlatWarps * (16 * kFlatRowBytes + 16) + kFlatTables * (kFlatTableBytes + 16);

}  // namespace sparseconv::cuda
