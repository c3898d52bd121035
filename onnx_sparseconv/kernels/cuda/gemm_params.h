// What the host passes to the gemm kernels (gemm_conv.cuh), as of params.h.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

// Tiles are 128 rows, a row tile for each of two warpgroups, and chunks 64 input channels. The weight is
// [row blocks][chunks] of 16 KiB, each [2 row tiles][4 steps][8][2] matrices of 8 rows and 8 channels, in halves.
constexpr int kGemmRows = 128, kGemmChannels = 64, kGemmStepChannels = 16;
constexpr int kGemmWeightBytes = 2 * kGemmRows * kGemmChannels;
constexpr int kGemmThreads = 3 * kWarpgroupThreads;
constexpr int kGemmProductWarps = 8;
// A box: neighbouring positions of a plane, of halves 64, and rows or channels.
constexpr int kGemmBoxPositions = 64, kGemmBoxRows = 16;
constexpr int kGemmBoxSegments = kGemmBoxPositions / 8;
// Of a packed stage, from a segment's channels to those of the next one: 16 bytes of each, and 16 that keep them apart.
constexpr int kGemmPackedPitch = 16 * kGemmChannels + 16;
constexpr int kGemmStageUnit = 128;  // bytes, of which a packed stage takes whole ones
// Positions of a channel that are packed at a time.
constexpr int kGemmPiecePositions = 4;
// Outputs of a tile may wait to be stored while those of the next one come; of floats alone.
constexpr int kMaxGemmOutputs = 2;

// Positions of a tile are lines, which lie together in a raw stage and in Y: planes of images, or with strides rows of
// outputs. Of boxes without strides, a tile is one line.
//
// The gemm kernels on sm_90a, for 1x1 of one group: `sparseconv_gemm_boxes_s<segments>` and
// `sparseconv_gemm_planes_s<segments>`, and with f32_ before s for float, of so many times eight positions a tile.
// gemm_conv.cuh says how they work. Of X that is ready (PackParams), gemm_ready_planes and gemm_ready_boxes.
//
// Blocks compute the tiles blockIdx.x, blockIdx.x + gridDim.x, ..; row blocks go first.
//
// Shared memory: `num_stages` of X as products read it, `num_weights` chunks of the weight, `num_raws` stages of X that
// are still to be packed, what each product warp has of outputs, `num_outputs` times, and barriers.
struct GemmParams {
  // Of boxes alone, but for X with strides: X with 64 channels a box, Y and the residual with 16 rows.
  TensorMap x_map, y_map, residual_map;
  const void* x;  // of planes without strides, or what is ready
  void* y;
  Epilogue epilogue;
  const void* weight;
  const float* scales;  // of floats: of each output channel
  int batch, in_channels, out_channels;
  int plane;          // positions, of Y
  int x_step;         // positions of X from one to the next that is read: 1, or of floats 2
  int x_plane_bytes;  // from a channel to the next one of X in a raw stage
  int x_line_bytes;   // likewise, from a line to the next one
  int out_pitch;      // positions from a channel to the next one of outputs: a plane's, or of floats a box's
  int num_chunks;
  int num_tiles, row_blocks;
  Divisor by_row_blocks;
  // Of boxes: those of an image; a tile has so many neighbouring ones as its segments hold, one of floats.
  int image_boxes;
  Divisor by_image_boxes;
  int tile_images;  // of planes
  // But for boxes of halves: lines of a tile, segments and positions of a line, and positions from one to the next of a
  // warp's outputs.
  int tile_lines, line_segments, line_positions, line_pitch;
  Divisor by_line_segments;
  int num_stages, num_weights, num_raws, num_outputs;
  int raw_bytes;     // of a raw stage, a multiple of 128
  int output_bytes;  // of a warp, a multiple of 1024 for boxes of halves, of 128 for boxes of floats, else of 16
  RecomputeParams recompute;
};

// Brings X into the form in which the gemm kernels multiply it, as halves: `sparseconv_pack`, and of floats
// `sparseconv_pack_f32`. Of a tile's chunk, out has [segments][64 channels][8 positions], kGemmPackedPitch bytes from a
// segment to the next one; channels that there are not are zeros, positions behind a plane's last one anything.
//
// A line is a plane, or of boxes a part of one; a tile has some.
//
// Grid: x = lines of all images, y = block_channels of all chunks. A block has up to kPackPieces segments of channels.
constexpr int kPackThreads = 256, kPackPieces = 512;
// It has the positions of a line, which are up to so many, in shared memory: as they lie in X, or channel by channel.
constexpr int kMaxPackedLine = 256;
constexpr int kPackSlabBytes = 16 * (kPackPieces + kGemmChannels);
struct PackParams {
  const void* x;   // [N, C, in_h, in_w]
  void* out;       // [tiles of a row block][chunks][stage_bytes]
  unsigned* seen;  // of floats, [gridDim.x * gridDim.y], as of InterleaveParams
  int in_channels, num_chunks;
  int block_channels;  // a multiple of 8 that divides those of a chunk
  int in_h, in_w;
  int out_w, plane;    // of the output
  int strides[2];      // without padding
  int load_bytes;      // as of GatherParams; or kPackWhole, of halves, or kPackAny
  int tile_lines;      // of a tile
  int image_lines;     // of an image
  int line_positions;  // from one to the next of an image
  int line_segments;
  Divisor by_line_segments;
  int stage_bytes;
};
constexpr int kPackAny = 0, kPackWhole = -1;

}  // namespace sparseconv::cuda
