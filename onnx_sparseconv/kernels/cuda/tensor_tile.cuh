// The tiles of outputs that blocks of the kernels on sparse tensor cores compute, and where its input lies in shared
// memory: a stage holds a chunk of channels, as pixels (a row's columns) of 8 images.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

class TensorTile {
 protected:
  __device__ __forceinline__ TensorTile(const TileParams& params, const void* shared)
      : t_(params), stages_(SharedAddress(shared)) {}

  // Of all outputs.
  struct Tile {
    int first_image, images;  // 8, but for the last ones
    int group, row_block, first_row_tile;
    int column;  // of tiles
    int y, x;
  };

  // Where a tile is among all: digits of its number, the fastest first.
  struct TilePlace {
    int row_block, group, column, row, eight;
  };

  // Where a warp stands: at a chunk, and the stage that holds it; all stages were filled `round` times before.
  struct Position {
    int chunk = 0, stage = 0, round = 0;
  };

  __device__ __forceinline__ void Advance(Position& position) const {
    ++position.chunk;
    if (++position.stage < t_.num_stages) return;
    position.stage = 0;
    ++position.round;
  }

  static __device__ __forceinline__ int Warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ unsigned Lane() { return threadIdx.x % 32; }

  static __device__ __forceinline__ int Split(int dividend, int divisor, int& remainder) {
    const int quotient = dividend / divisor;
    remainder = dividend - quotient * divisor;
    return quotient;
  }

  // The same by a number that the host has prepared.
  static __device__ __forceinline__ int Split(int dividend, int divisor, const Divisor& by, int& remainder) {
    const int quotient = Divide(dividend, by);
    remainder = dividend - quotient * divisor;
    return quotient;
  }

  // The same of numbers below 2^22, in fewer instructions.
  static __device__ __forceinline__ int SplitFew(int dividend, int divisor, int& remainder) {
    auto quotient = static_cast<int>(static_cast<float>(dividend) * Reciprocal(static_cast<float>(divisor)));
    remainder = dividend - quotient * divisor;
    if (remainder < 0) --quotient, remainder += divisor;
    if (remainder >= divisor) ++quotient, remainder -= divisor;
    return quotient;
  }

  __device__ __forceinline__ TilePlace PlaceOfTile(int index) const {
    TilePlace place;
    index = Split(index, t_.row_blocks_per_group, place.row_block);
    index = Split(index, t_.groups, place.group);
    index = Split(index, t_.tiles_x, place.column);
    place.eight = Split(index, t_.tiles_y, place.row);
    return place;
  }

  // Adds numbers, without divisions.
  __device__ __forceinline__ void Advance(TilePlace& place, const TilePlace& step) const {
    int carry = 0;
    place.row_block = AddDigits(place.row_block, step.row_block, t_.row_blocks_per_group, carry);
    place.group = AddDigits(place.group, step.group, t_.groups, carry);
    place.column = AddDigits(place.column, step.column, t_.tiles_x, carry);
    place.row = AddDigits(place.row, step.row, t_.tiles_y, carry);
    place.eight += step.eight + carry;
  }

  static __device__ __forceinline__ int AddDigits(int a, int b, int base, int& carry) {
    const int sum = a + b + carry;
    carry = sum >= base ? 1 : 0;
    return carry != 0 ? sum - base : sum;
  }

  __device__ __forceinline__ Tile TileAt(const TilePlace& place) const {
    Tile tile;
    tile.first_image = place.eight * kTensorImages;
    tile.images = min(t_.batch - tile.first_image, kTensorImages);
    tile.group = place.group;
    tile.row_block = place.row_block;
    tile.first_row_tile = place.row_block * t_.warps_m;
    tile.column = place.column;
    tile.y = place.row * t_.tile_h;
    tile.x = place.column * t_.tile_w;
    return tile;
  }

  __device__ __forceinline__ Tile TileAt(int index) const { return TileAt(PlaceOfTile(index)); }

  __device__ __forceinline__ Shared StageAddress(int stage) const {
    return stages_ + static_cast<unsigned>(stage * t_.stage_bytes);
  }

  // Columns of a row that positions one stride apart read with the same tap are neighbours.
  __device__ __forceinline__ int PlaceOf(int column) const {
    const int stride = t_.strides[1];
    if (stride == 1) return column;
    const int quotient = (column + 4 * stride) / stride - 4;  // column is -3 at least
    return (column - quotient * stride) * t_.line_pitch + quotient;
  }

  // Which one a pixel is in a stage.
  __device__ __forceinline__ unsigned PixelAt(int row, int column) const {
    return static_cast<unsigned>(row * t_.strides[1] * t_.line_pitch + PlaceOf(column));
  }

  // Of a channel of the tile's group; there may be no such channel. T is the type of the bias.
  template <class T = Half>
  __device__ __forceinline__ float BiasOf(const Tile& tile, int channel) const {
    const bool has_bias = t_.epilogue.bias != nullptr && channel < t_.group_out_channels;
    const T* biases = static_cast<const T*>(t_.epilogue.bias);
    return has_bias ? LoadElementOnce(biases + tile.group * t_.group_out_channels + channel) : 0.0f;
  }

  const TileParams& t_;
  const Shared stages_;
};

}  // namespace sparseconv::cuda
