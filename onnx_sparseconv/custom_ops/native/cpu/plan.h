// How the CPU kernel computes one node for one input size: everything that follows from the sizes and not from the
// data.
//
// The input is seen as planes of cells, one plane for each input channel and *phase*. The phases split the padded input
// by the stride: tap r of output o reads padded coordinate o * stride + r * dilation, which is cell o + step(r) of
// phase (r * dilation) mod stride. So for any stride and dilation, consecutive outputs read consecutive cells, and a
// tap is one offset (Park et al. call it stretched). Output positions are counted along the cells, with the row pitch
// of the cells: positions that fall on padding are computed and not stored, and small maps still fill whole vectors.
//
//   position(o) = (o0 * plane_rows + o1) * row_pitch + o2        offset(tap) has the same form, from the tap's steps
//
// A tap whose offset is no multiple of the vector's length would load across cache lines. Where it pays, offsets are
// split into whole vectors and a *shift*, and entries are summed shift by shift (see TileJob). A row pitch of whole
// vectors leaves few shifts but computes more positions that are not stored; `MakePlan` weighs the pitches against each
// other.
//
// Positions are cut into tiles of a few vectors (what the inner loop keeps in registers), and tiles are gathered in
// chunks (what one task packs and computes). Where the input already has the layout of the cells, it is read in place.
#pragma once

#include <cstdint>
#include <vector>

#include "../attributes.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {

// Whether the values of X may be read where they lie: halves may not, nor may what lies in several tensors, unless it
// is read channel by channel; and loads of floats that do not begin at a cache line cost more.
enum class InputAccess { kConvert, kSources, kUnaligned, kAligned };

constexpr bool IsInPlace(InputAccess access) {
  return access == InputAccess::kUnaligned || access == InputAccess::kAligned;
}

// What a plan depends on, besides the node.
struct PlanKey {
  Axes in_dims;
  InputAccess access;
  int64_t num_threads;  // that share an image
  bool operator==(const PlanKey& other) const {
    return in_dims == other.in_dims && access == other.access && num_threads == other.num_threads;
  }
};

// The cells along one axis.
struct AxisPhases {
  std::vector<int64_t> phases;     // distinct (r * dilation) mod stride
  std::vector<size_t> tap_phase;   // index into `phases` of each tap
  std::vector<int64_t> tap_step;   // (r * dilation) div stride of each tap
  std::vector<int64_t> last_step;  // largest step among the taps of each phase
  int64_t max_step = 0;
};

struct Tile {
  int64_t start;  // position of its first lane
  int32_t num_vectors;
  int32_t last_vector;  // see TileJob
  size_t run_begin;     // of Plan::runs
  size_t run_end;
};

struct Chunk {
  int64_t start;  // first position, where packing begins
  size_t tile_begin;
  size_t tile_end;
};

// What is computed otherwise than by sums over cells: maps of a depthwise layer (depthwise.h), and maps of one position
// by a window of one tap. Of such a plan, only sizes and work are set.
enum class PlanForm { kCells, kDepthwise, kVector };

struct Plan {
  PlanForm form = PlanForm::kCells;
  Axes out_dims{1, 1, 1};     // of Y
  ResolvedGeometry geometry;  // as it is computed: where neighbours do not matter, all positions are one row
  std::array<AxisPhases, kSpatialAxes> axes;
  int64_t num_phases = 1;
  int64_t plane_rows = 1;  // rows of cells for each step along axis 0
  int64_t row_pitch = 0;
  int64_t num_positions = 0;
  int64_t halo = 0;  // cells read beyond the last position

  bool in_place = false;      // cells are the input itself
  int64_t chunk_cells = 0;    // cells of one channel and phase in a packed chunk
  int64_t channel_cells = 0;  // distance between two channels, in cells
  int64_t in_plane = 0;       // elements of one channel of X
  int64_t out_plane = 0;      // and of Y

  std::vector<Run> runs;
  std::vector<Tile> tiles;
  std::vector<Chunk> chunks;
  // Tasks for each image: as many as keep its threads busy, but none shorter than starting it is worth.
  int64_t num_parts = 1;
  // Parts into which the output channels are cut, where there are fewer chunks than tasks.
  int64_t num_row_blocks = 1;

  std::vector<Entry> entries;      // in the order of the segments
  std::vector<uint32_t> segments;  // see TileJob
  std::vector<int32_t> shifts{0};
  int32_t num_blocks = 1;  // blocks of input channels

  int64_t work = 0;  // for one image, in multiply-adds of vectors
};

// Whether the maps of X and Y have one position, and the window one tap.
bool IsVector(const ConvGeometry& conv, const ResolvedGeometry& sizes);

// Whether every output is made of the input at its own position.
bool IsPointwise(const ConvGeometry& conv, const ResolvedGeometry& sizes);

// Throws `Error` where the sizes are more than the kernel can address.
Plan MakePlan(const ConvGeometry& geometry, const SparseWeight& weight, const PlanKey& key, const TileKernels& kernels);

}  // namespace sparseconv::cpu
