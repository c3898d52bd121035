// What the host passes to the tensor-core kernel for 1x1 (segment_conv.cuh), as of params.h.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

// The tensor-core kernel for 1x1: `sparseconv_segments_r<subtiles>`, float16, and
// `sparseconv_segments_f32_r<subtiles>`, floats that it rounds. segment_conv.cuh says how it works. For convolutions of
// planes as they are: neither strides nor padding.
//
// The segments of all images follow each other. A stage holds [chunk_channels][segments of a block + 1] of them, and
// the chunk's steps of all row tiles. All planes begin at multiples of 8 bytes, of floats at multiples of 16.
//
// Grid: x = blocks, row tiles first, then groups: a block has the segments that it begins with, and those `tile_step`,
// 2 * `tile_step`, .. further. y = parts of the chunks. Where there are several, the tile's y is memory for their sums,
// which are not final.
struct SegmentParams {
  TileParams tile;              // of its sizes, those that say nothing of rows and columns
  const void* steps;            // as of TensorParams
  const unsigned* step_begins;  // likewise
  const float* scales;          // likewise
  Sources sources;
  int tile_step;
  int runs;            // of segments, that a block computes, each by a warp
  int warps_k;         // that share the steps of the same outputs
  int segments_shift;  // a block has 1 << segments_shift segments
  Divisor by_row_blocks, by_groups, by_plane_segments;
  int num_chunks;
  int part_chunks;  // of a part, but for the last one, which may have fewer
  int chunk_channels;
  int input_bytes;  // of a stage, behind which are steps
  int max_steps;    // of a row tile in a chunk
  int list_bytes;   // behind the stages, of the list of steps
  int step_fills;   // stages that get steps as well; those behind have the same ones as the stage had
  int batches;      // that a thread loads floats of a chunk in
  int plane;        // positions of a channel, a multiple of 4
  int plane_segments, num_segments;
  int has_vectors;   // planes of X or its sources, of Y and of the residual begin at multiples of 16 bytes
  long long y_part;  // from one part of the chunks to the next, of sums that are not final
  RecomputeParams recompute;
  unsigned* seen;  // as of TensorParams
};
constexpr int kMaxSegmentThreads = 256;
// Blocks of so many threads of which a multiprocessor has registers for two.
constexpr int kSegmentBlocks = 2;

}  // namespace sparseconv::cuda
