// From images to eights of images, in which a pixel of a channel is 16 contiguous bytes (see InterleaveParams).
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

__device__ __forceinline__ void Interleave(const InterleaveParams& p) {
  const int pixel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row_pixels = p.windows * p.window_columns;
  if (pixel >= p.rows * row_pixels) return;
  const int row = pixel / row_pixels, place = pixel - row * row_pixels;
  const int window = place / p.window_columns, column = place - window * p.window_columns;
  const int y = row - p.pads_begin[0], x = window * p.window_step + column - p.pads_begin[1];
  const bool is_inside = y >= 0 && y < p.in_h && x >= 0 && x < p.in_w;
  const int first_channel = static_cast<int>(blockIdx.y) * kInterleaveChannels;
  const int channels = min(p.in_channels - first_channel, kInterleaveChannels);
  const auto eight = static_cast<long long>(blockIdx.z);
  const int images = is_inside ? min(p.batch - static_cast<int>(eight) * kTensorImages, kTensorImages) : 0;
  const long long plane = static_cast<long long>(p.in_h) * p.in_w, image = p.in_channels * plane;
  const long long channel = eight * kTensorImages * p.in_channels + first_channel;
  const Half* from = static_cast<const Half*>(p.x) + channel * plane + (y * p.in_w + x);
  uint4* to = static_cast<uint4*>(p.out) + (eight * p.in_channels + first_channel) * (p.rows * row_pixels) + pixel;
#pragma unroll 2
  for (int i = 0; i < channels; ++i, from += plane, to += p.rows * row_pixels) {
    Half halves[kTensorImages];
#pragma unroll
    for (int j = 0; j < kTensorImages; ++j) halves[j] = j < images ? LoadReadOnly(from + j * image) : Half{0};
    *to = {Joined(halves[0], halves[1]), Joined(halves[2], halves[3]), Joined(halves[4], halves[5]),
           Joined(halves[6], halves[7])};
  }
}

}  // namespace sparseconv::cuda
