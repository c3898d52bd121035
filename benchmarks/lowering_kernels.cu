// Lowering (im2col) and what comes after the product, for the baselines that multiply matrices. All sizes are macros,
// which `lowering.kernel_source` writes in front of this file.
//
// Launch: x = vectors of output positions, y = channels, z = images. Every thread has VECTOR neighbouring positions of
// a channel of an image, one float or two halves, and stores them at once; positions are a multiple of VECTOR. Longer
// vectors would cost more than they save: the values of a tap are not aligned as its outputs are, so each is loaded by
// itself, and the loads of a warp should be neighbours.
#include "intrinsics.cuh"

using sparseconv::cuda::LoadReadOnly;
using sparseconv::cuda::ToFloat;

#if ELEMENT_BYTES == 2
using Element = sparseconv::cuda::Half;
#else
using Element = float;
#endif

struct alignas(VECTOR* ELEMENT_BYTES) Vector {
  Element values[VECTOR];
};

__device__ __forceinline__ void StoreRounded(Element* to, const float (&values)[VECTOR]) {
#if ELEMENT_BYTES == 4
  *to = values[0];
#elif VECTOR == 2
  *reinterpret_cast<sparseconv::cuda::Half2*>(to) = sparseconv::cuda::ToHalves(values[0], values[1]);
#else
  *to = sparseconv::cuda::ToHalf(values[0]);
#endif
}

// Writes the lowered rows of a channel, one for each tap; a tap outside of the input gives a zero.
extern "C" __global__ void __launch_bounds__(256)
    lower(const Element* x, Element* lowered, long long image_stride, long long row_stride) {
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
  if (first >= POSITIONS) return;
  const int channel = static_cast<int>(blockIdx.y);
  const long long image = static_cast<long long>(blockIdx.z);
  const Element* plane = x + (image * IN_CHANNELS + channel) * (IN_HEIGHT * IN_WIDTH);
  Element* to = lowered + image * image_stride + channel * (KERNEL_HEIGHT * KERNEL_WIDTH) * row_stride + first;
  int top[VECTOR], left[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    top[v] = (first + v) / OUT_WIDTH * STRIDE_HEIGHT - PAD_HEIGHT;
    left[v] = (first + v) % OUT_WIDTH * STRIDE_WIDTH - PAD_WIDTH;
  }
#pragma unroll
  for (int r = 0; r < KERNEL_HEIGHT; ++r) {
#pragma unroll
    for (int s = 0; s < KERNEL_WIDTH; ++s) {
      Vector row;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        const int h = top[v] + r, w = left[v] + s;
        const bool is_inside = static_cast<unsigned>(h) < IN_HEIGHT && static_cast<unsigned>(w) < IN_WIDTH;
        row.values[v] = is_inside ? LoadReadOnly(plane + h * IN_WIDTH + w) : Element{0};
      }
      *reinterpret_cast<Vector*>(to + (r * KERNEL_WIDTH + s) * row_stride) = row;
    }
  }
}

// y = relu(product + bias), y in the order [image, channel, position]; the product may lie in y itself.
extern "C" __global__ void __launch_bounds__(256)
    finish(const Element* product, Element* y, const Element* bias, long long image_stride, long long channel_stride) {
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
  if (first >= POSITIONS) return;
  const int channel = static_cast<int>(blockIdx.y);
  const long long image = static_cast<long long>(blockIdx.z);
  const float added = ToFloat(LoadReadOnly(bias + channel));
  const Vector sums =
      *reinterpret_cast<const Vector*>(product + image * image_stride + channel * channel_stride + first);
  float values[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    const float sum = ToFloat(sums.values[v]) + added;
    values[v] = sum < 0.0f ? 0.0f : sum;  // NaN stays NaN
  }
  StoreRounded(y + (image * OUT_CHANNELS + channel) * POSITIONS + first, values);
}
