// From images to lines of octets of channels, which windows read as one long row (see FlattenParams).
#pragma once

#include "divide.cuh"
#include "flat_params.h"
#include "intrinsics.cuh"
#include "magnitude.cuh"

namespace sparseconv::cuda {

// The channels of an octet.
struct OctetChannels {
  int of[8];

  __device__ __forceinline__ void Load(const int* channels, int octet) {
    const uint4* from = reinterpret_cast<const uint4*>(channels) + 2 * octet;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = from[i];
      of[4 * i] = static_cast<int>(four.x), of[4 * i + 1] = static_cast<int>(four.y);
      of[4 * i + 2] = static_cast<int>(four.z), of[4 * i + 3] = static_cast<int>(four.w);
    }
  }
};

// All octets of the block, of one pixel of each place. T is the type of X, Half or float. Lines that one of several
// places has read a part of are near when the next one does.
template <class T, bool kHasPlaces>
__device__ __forceinline__ void FlattenPixel(const FlattenParams& p, int pixel, Magnitude& magnitude) {
  constexpr int kOctet = 8;
  const int image = Divide(pixel, p.image.by_pixels);
  const int rest = pixel - image * p.image.rows * p.image.row_pixels;
  const int row = Divide(rest, p.image.by_row_pixels), column = rest - row * p.image.row_pixels;
  const int first = static_cast<int>(blockIdx.y) * p.block_octets;
  const int end = min(first + p.block_octets, p.num_octets);
  const long long plane = static_cast<long long>(p.in_h) * p.in_w;
  const T* x = static_cast<const T*>(p.x) + static_cast<long long>(image) * p.in_channels * plane;
  OctetChannels channels;
  channels.Load(p.channels, first);  // needs no wait
  WaitForLaunchBefore();
  for (int octet = first; octet < end; ++octet) {
    uint4* out = static_cast<uint4*>(p.out) + (static_cast<long long>(octet) * p.num_pixels + pixel);
#pragma unroll 2
    for (int place = 0; place < p.num_places; ++place) {
      const int between = p.places[place];
      const int y = row * p.strides[0] + (between >> 16) - p.pads_begin[0];
      const int at = column * p.strides[1] + (between & 0xFFFF) - p.pads_begin[1];
      const bool is_inside = image < p.batch && static_cast<unsigned>(y) < static_cast<unsigned>(p.in_h) &&
                             static_cast<unsigned>(at) < static_cast<unsigned>(p.in_w);
      T values[kOctet];
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const int channel = channels.of[i];
        const T* from = x + (channel * plane + (y * p.in_w + at));
        values[i] = is_inside && channel >= 0 ? (kHasPlaces ? LoadWritten(from) : LoadOnce(from)) : T{0};
      }
      out[static_cast<long long>(place) * p.num_octets * p.num_pixels] = RoundedEight(values, magnitude);
    }
    channels.Load(p.channels, min(octet + 1, end - 1));
  }
}

template <class T>
__device__ __forceinline__ void Flatten(const FlattenParams& p) {
  LetNextLaunchBegin();
  Magnitude magnitude;
  const int pixel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (pixel < p.num_pixels && p.num_places > 1) {
    FlattenPixel<T, true>(p, pixel, magnitude);
  } else if (pixel < p.num_pixels) {
    FlattenPixel<T, false>(p, pixel, magnitude);
  } else {
    WaitForLaunchBefore();
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    const unsigned seen = SeenByBlock(magnitude.Seen());
    if (threadIdx.x == 0) p.seen[blockIdx.y * gridDim.x + blockIdx.x] = seen;
  }
}

}  // namespace sparseconv::cuda
