// From images to eights of images, or of strips of one, in which a pixel of a channel is 16 contiguous bytes (see
// InterleaveParams).
#pragma once

#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "params.h"

namespace sparseconv::cuda {

// All channels of the block, of one pixel. T is the type of X, Half or float.
template <class T>
__device__ __forceinline__ void InterleavePixel(const InterleaveParams& p, int pixel, Magnitude& magnitude) {
  const int row_pixels = p.windows * p.window_columns;
  const int row = pixel / row_pixels, place = pixel - row * row_pixels;
  const int window = place / p.window_columns, column = place - window * p.window_columns;
  const int y = row - p.pads_begin[0], x = window * p.window_step + column - p.pads_begin[1];
  const int first_channel = static_cast<int>(blockIdx.y) * p.block_channels;
  const int channels = min(p.in_channels - first_channel, p.block_channels);
  const auto eight = static_cast<long long>(blockIdx.z);
  const long long plane = static_cast<long long>(p.in_h) * p.in_w, image = p.in_channels * plane;
  const long long step = p.strips == 0 ? image : static_cast<long long>(p.strip_step) * p.in_w;
  const long long first_image = p.strips == 0 ? eight * kTensorImages : eight;
  const int images = p.strips == 0 ? p.batch - static_cast<int>(first_image) : p.strips;
  bool is_inside[kTensorImages];
#pragma unroll
  for (int j = 0; j < kTensorImages; ++j) {
    const int image_y = y + j * p.strip_step;
    is_inside[j] = j < images && image_y >= 0 && image_y < p.in_h && x >= 0 && x < p.in_w;
  }
  const T* from = static_cast<const T*>(p.x) + first_image * image + first_channel * plane + (y * p.in_w + x);
  uint4* to = static_cast<uint4*>(p.out) + (eight * p.in_channels + first_channel) * (p.rows * row_pixels) + pixel;
  WaitForLaunchBefore();
#pragma unroll 2
  for (int i = 0; i < channels; ++i, from += plane, to += p.rows * row_pixels) {
    T values[kTensorImages];
#pragma unroll
    for (int j = 0; j < kTensorImages; ++j) values[j] = is_inside[j] ? LoadOnce(from + j * step) : T{0};
    *to = RoundedEight(values, magnitude);
  }
}

template <class T>
__device__ __forceinline__ void Interleave(const InterleaveParams& p) {
  LetNextLaunchBegin();
  Magnitude magnitude;
  const int pixel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (pixel < p.rows * p.windows * p.window_columns) {
    InterleavePixel<T>(p, pixel, magnitude);
  } else {
    WaitForLaunchBefore();
  }
  NoteSeen<T, 3>(p.seen, magnitude);
}

}  // namespace sparseconv::cuda
