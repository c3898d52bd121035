// From an image to one for a convolution without strides: of rows and columns, those that lie one stride apart become a
// map, and there is a channel for each place between (see SpaceToDepthParams).
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

__device__ __forceinline__ void StoreFour(float* to, const float (&values)[4]) {
  StoreOnce(reinterpret_cast<uint4*>(to),
            {FloatToBits(values[0]), FloatToBits(values[1]), FloatToBits(values[2]), FloatToBits(values[3])});
}
__device__ __forceinline__ void StoreFour(Half* to, const Half (&values)[4]) {
  StoreOnce(reinterpret_cast<uint2*>(to), {Joined(values[0], values[1]), Joined(values[2], values[3])});
}

// T is the type of X, Half or float. Each thread has four neighbouring columns of a row, of each place between strides.
template <class T>
__device__ __forceinline__ void SpaceToDepth(const SpaceToDepthParams& p) {
  constexpr int kColumns = kSpaceToDepthColumns;
  LetNextLaunchBegin();
  WaitForLaunchBefore();
  const auto vectors = static_cast<unsigned>(p.out_w / kColumns), index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= p.num_threads) return;
  const unsigned line = index / vectors, map = line / static_cast<unsigned>(p.out_h);
  const int column = static_cast<int>(index - line * vectors) * kColumns;
  const int row = static_cast<int>(line - map * static_cast<unsigned>(p.out_h));
  const T* x = static_cast<const T*>(p.x) + static_cast<long long>(map) * p.in_h * p.in_w;
  const long long plane = static_cast<long long>(p.out_h) * p.out_w;
  T* out = static_cast<T*>(p.out) + (p.strides[0] * p.strides[1] * (map * plane) + row * p.out_w + column);
  for (int place_y = 0; place_y < p.strides[0]; ++place_y) {
    const int y = row * p.strides[0] + place_y - p.pads_begin[0];
    const bool has_row = y >= 0 && y < p.in_h;
#pragma unroll 4
    for (int place_x = 0; place_x < p.strides[1]; ++place_x, out += plane) {
      T values[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int at = (column + i) * p.strides[1] + place_x - p.pads_begin[1];
        values[i] = has_row && at >= 0 && at < p.in_w ? LoadWritten(x + (y * p.in_w + at)) : T{0};
      }
      StoreFour(out, values);
    }
  }
}

}  // namespace sparseconv::cuda
