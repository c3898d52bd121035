// From images to lines of octets of channels, which windows read as one long row (see FlattenParams).
#pragma once

#include "divide.cuh"
#include "flat_params.h"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "shared_elements.cuh"

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

// An octet of some rows of an image. T is the type of X, Half or float; `shared` has room for a chunk's rows of eight
// channels, and a barrier.
template <class T>
__device__ __forceinline__ void FlattenRows(const FlattenParams& p, const void* shared) {
  constexpr int kOctet = 8, kElementBytes = sizeof(T);
  LetNextLaunchBegin();
  const int thread = static_cast<int>(threadIdx.x), octet = static_cast<int>(blockIdx.y);
  const int image = Divide(static_cast<int>(blockIdx.x), p.by_chunks);
  const int chunk = static_cast<int>(blockIdx.x) - image * p.chunks;
  const int first_row = chunk * p.chunk_rows, end_row = min(first_row + p.chunk_rows, p.image.rows);
  const int first_y = max(first_row - p.pads_begin[0], 0), end_y = min(end_row - p.pads_begin[0], p.in_h);
  const Shared room = SharedAddress(shared), arrived = room + static_cast<unsigned>(kOctet * p.channel_bytes);
  if (thread == 0) {
    InitBarrier(arrived, 1);
    FenceBarrierInit();
  }
  OctetChannels channels;
  channels.Load(p.channels, octet);
  // Copies begin at multiples of 16 bytes, in memory as in shared memory.
  const unsigned char* from[kOctet];
  unsigned skipped[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const long long plane = static_cast<long long>(image) * p.in_channels + channels.of[i];
    from[i] = static_cast<const unsigned char*>(p.x) + kElementBytes * ((plane * p.in_h + first_y) * p.in_w);
    skipped[i] = static_cast<unsigned>(reinterpret_cast<unsigned long long>(from[i]) % 16);
  }
  __syncthreads();
  WaitForLaunchBefore();
  if (thread == 0) {
    const auto bytes = static_cast<unsigned>(kElementBytes * max(end_y - first_y, 0) * p.in_w);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (channels.of[i] < 0 || bytes == 0) continue;
      const unsigned copied = (skipped[i] + bytes + 15) / 16 * 16;
      ExpectBytes(arrived, copied);
      CopyBulk(room + static_cast<unsigned>(i * p.channel_bytes), from[i] - skipped[i], copied, arrived);
    }
    Arrive(arrived);
  }
  WaitForBarrier(arrived, 0);

  Magnitude magnitude;
  const int first = (image * p.image.rows + first_row) * p.image.row_pixels;
  const bool is_last = image == p.batch - 1 && chunk == p.chunks - 1;
  const int end = is_last ? p.num_pixels : min(first + (end_row - first_row) * p.image.row_pixels, p.num_pixels);
  uint4* out = static_cast<uint4*>(p.out) + static_cast<long long>(octet) * p.num_pixels;
  for (int pixel = first + thread; pixel < end; pixel += static_cast<int>(blockDim.x)) {
    const int row = Divide(pixel - first, p.image.by_row_pixels);
    const int y = first_row + row - p.pads_begin[0];
    const int x = pixel - first - row * p.image.row_pixels - p.pads_begin[1];
    const bool is_inside = y >= first_y && y < end_y && static_cast<unsigned>(x) < static_cast<unsigned>(p.in_w);
    const auto at = static_cast<unsigned>(kElementBytes * ((y - first_y) * p.in_w + x));
    T values[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      values[i] = T{0};
      if (is_inside && channels.of[i] >= 0) {
        values[i] = LoadSharedAs<T>(room + static_cast<unsigned>(i * p.channel_bytes) + skipped[i] + at);
      }
    }
    out[pixel] = RoundedEight(values, magnitude);
  }
  NoteSeen<T, 2>(p.seen, magnitude);
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
  NoteSeen<T, 2>(p.seen, magnitude);
}

}  // namespace sparseconv::cuda
