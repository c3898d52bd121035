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

// An octet of a chunk of an image's rows, whose channels come to shared memory by the copy engine. To be used by whole
// warps: the first eight lanes of each have a channel each. T is the type of X, Half or float.
template <class T>
class FlatRows {
 public:
  // The lane's channel of an octet.
  static __device__ __forceinline__ int ChannelOf(const FlattenParams& p, int octet) {
    return p.channels[kOctet * octet + static_cast<int>(threadIdx.x % kOctet)];
  }

  FlatRows() = default;
  // `chunk` is of all images; `room` is for its rows of eight channels.
  __device__ __forceinline__ FlatRows(const FlattenParams& p, int chunk, int octet, int channel, Shared room)
      : octet_(octet) {
    image_ = Divide(chunk, p.by_chunks);
    chunk_ = chunk - image_ * p.chunks;
    first_row_ = chunk_ * p.chunk_rows;
    end_row_ = min(first_row_ + p.chunk_rows, p.image.rows);
    first_y_ = max(first_row_ - p.pads_begin[0], 0);
    end_y_ = min(end_row_ - p.pads_begin[0], p.in_h);
    const long long plane = static_cast<long long>(image_) * p.in_channels + channel;
    from_ = static_cast<const unsigned char*>(p.x) + kElementBytes * ((plane * p.in_h + first_y_) * p.in_w);
    const unsigned to = room + threadIdx.x % kOctet * static_cast<unsigned>(p.channel_bytes) + Skipped();
#pragma unroll
    for (int i = 0; i < kOctet; ++i) rows_[i] = __shfl_sync(0xFFFFFFFFu, channel < 0 ? kNone : to, i);
  }

  // By one warp. Copies begin at multiples of 16 bytes, in memory as in shared memory.
  __device__ __forceinline__ void Bring(const FlattenParams& p, Shared room, Shared arrived) const {
    const unsigned lane = threadIdx.x % 32;
    const auto bytes = static_cast<unsigned>(kElementBytes * max(end_y_ - first_y_, 0) * p.in_w);
    unsigned to = kNone;
#pragma unroll
    for (unsigned i = 0; i < kOctet; ++i) to = lane == i ? rows_[i] : to;
    if (lane < kOctet && to != kNone && bytes > 0) {
      const unsigned copied = (Skipped() + bytes + kAligned - 1) / kAligned * kAligned;
      ExpectBytes(arrived, copied);
      CopyBulk(room + lane * static_cast<unsigned>(p.channel_bytes), from_ - Skipped(), copied, arrived);
    }
    __syncwarp();
    if (lane == 0) Arrive(arrived);
  }

  // By so many threads, when all has come: each so many pixels at once.
  template <int kAtOnce>
  __device__ __forceinline__ void Write(const FlattenParams& p, int thread, int threads, Magnitude& magnitude) const {
    const int first = (image_ * p.image.rows + first_row_) * p.image.row_pixels;
    const bool is_last = image_ == p.batch - 1 && chunk_ == p.chunks - 1;
    const int end = is_last ? p.num_pixels : min(first + (end_row_ - first_row_) * p.image.row_pixels, p.num_pixels);
    uint4* out = static_cast<uint4*>(p.out) + static_cast<long long>(octet_) * p.num_pixels;
    for (int begin = first + thread; begin < end; begin += kAtOnce * threads) {
      T values[kAtOnce][kOctet];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) Load(p, begin + i * threads - first, values[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int pixel = begin + i * threads;
        if (pixel < end) out[pixel] = RoundedEight(values[i], magnitude);
      }
    }
  }

 private:
  static constexpr int kOctet = 8, kElementBytes = sizeof(T);
  static constexpr unsigned kAligned = 16, kNone = 0xFFFFFFFFu;

  __device__ __forceinline__ unsigned Skipped() const {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(from_) % kAligned);
  }

  // A pixel's channels, `pixel` of those of the chunk; zeros where that is padding.
  __device__ __forceinline__ void Load(const FlattenParams& p, int pixel, T (&values)[kOctet]) const {
    const int row = Divide(pixel, p.image.by_row_pixels);
    const int y = first_row_ + row - p.pads_begin[0], x = pixel - row * p.image.row_pixels - p.pads_begin[1];
    const bool is_inside = y >= first_y_ && y < end_y_ && static_cast<unsigned>(x) < static_cast<unsigned>(p.in_w);
    const auto at = static_cast<unsigned>(kElementBytes * ((y - first_y_) * p.in_w + x));
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      values[i] = T{0};
      if (is_inside && rows_[i] != kNone) values[i] = LoadSharedAs<T>(rows_[i] + at);
    }
  }

  int octet_, image_, chunk_;  // the chunk, of its image
  int first_row_, end_row_;    // of the flat image
  int first_y_, end_y_;        // of X
  const unsigned char* from_;  // where the lane's channel begins
  Shared rows_[kOctet];        // and where each is, or kNone
};

// `shared` has room for a chunk's rows of eight channels, and a barrier.
template <class T>
__device__ __forceinline__ void FlattenRows(const FlattenParams& p, const void* shared) {
  LetNextLaunchBegin();
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int chunk = static_cast<int>(blockIdx.x), octet = static_cast<int>(blockIdx.y);
  const Shared room = SharedAddress(shared), arrived = room + static_cast<unsigned>(8 * p.channel_bytes);
  if (thread == 0) {
    InitBarrier(arrived, 1);
    FenceBarrierInit();
  }
  const FlatRows<T> rows(p, chunk, octet, FlatRows<T>::ChannelOf(p, octet), room);
  __syncthreads();
  WaitForLaunchBefore();
  if (thread < 32) rows.Bring(p, room, arrived);
  if (chunk == 0 && octet == 0) {
    for (int word = thread; word < p.progress_words; word += threads) p.progress[word] = 0;
  }
  WaitForBarrier(arrived, 0);
  Magnitude magnitude;
  rows.template Write<1>(p, thread, threads, magnitude);
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
