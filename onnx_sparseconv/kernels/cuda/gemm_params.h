// What the host passes to the gemm kernels (gemm_conv.cuh), as of params.h.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

// How the copy engine finds a box of a tensor: a CUtensorMap, which the driver encodes.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// Tiles are 128 rows, a row tile for each of two warpgroups, and chunks 64 input channels. The weight is
// [row blocks][chunks] of 16 KiB, each [2 row tiles][4 steps][8][2] matrices of 8 rows and 8 channels.
constexpr int kGemmRows = 128, kGemmChannels = 64, kGemmStepChannels = 16;
constexpr int kGemmWeightBytes = 2 * kGemmRows * kGemmChannels;
constexpr int kGemmThreads = 3 * kWarpgroupThreads;
constexpr int kGemmProductWarps = 8;
// A box: 64 neighbouring positions of a plane, and rows or channels.
constexpr int kGemmBoxPositions = 64, kGemmBoxRows = 16;
constexpr int kGemmBoxSegments = kGemmBoxPositions / 8;
// Of a packed stage, from a segment's channels to those of the next one: 16 bytes of each, and 16 that keep them apart.
constexpr int kGemmPackedPitch = 16 * kGemmChannels + 16;
// Bytes of planes that are packed at a time.
constexpr int kGemmPieceBytes = 8;

// The gemm kernels on sm_90a, for 1x1 of one group, float16: `sparseconv_gemm_boxes_s<segments>` and
// `sparseconv_gemm_planes_s<segments>`, of so many times eight positions a tile. gemm_conv.cuh says how they work.
//
// Blocks compute the tiles blockIdx.x, blockIdx.x + gridDim.x, ..; row blocks go first.
//
// Shared memory: `num_stages` of X as products read it, `num_weights` chunks of the weight, `num_raws` stages of planes
// that are still to be packed, what each product warp has of outputs, and barriers.
struct GemmParams {
  // Of boxes alone: X with 64 channels a box, Y and the residual with 16 rows.
  TensorMap x_map, y_map, residual_map;
  const void* x;  // of planes alone
  void* y;
  Epilogue epilogue;
  const void* weight;
  int batch, in_channels, out_channels;
  int plane;          // positions, of Y
  int x_plane_bytes;  // of planes alone, a multiple of 8; of all channels, a multiple of 16
  int num_chunks;
  int num_tiles, row_blocks;
  Divisor by_row_blocks;
  // Of boxes: those of an image; a tile has so many neighbouring ones as its segments hold. Of planes: segments of an
  // image, and images of a tile.
  int image_boxes;
  Divisor by_image_boxes;
  int image_segments, tile_images;
  int num_stages, num_weights, num_raws;
  int raw_bytes;     // of a raw stage, a multiple of 128
  int output_bytes;  // of a warp, a multiple of 1024 for boxes, else of 16
};

}  // namespace sparseconv::cuda
