// The maximum of windows of what a convolution made, where a node pools. All that bounds it is memory.
#pragma once

#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"

namespace sparseconv::cuda {

constexpr int kMaxPoolThreads = 256;

// What a window of an axis covers of a map.
struct PoolRange {
  int begin, end;
};

__device__ __forceinline__ PoolRange WindowOf(const PoolParams& p, int axis, int output) {
  const long long first = static_cast<long long>(output) * p.strides[axis] - p.pads_begin[axis];
  const long long end = first + p.kernel_shape[axis];
  return {first < 0 ? 0 : static_cast<int>(first), end < p.in_dims[axis] ? static_cast<int>(end) : p.in_dims[axis]};
}

// One output, whatever its window. 64-bit divisions are slow, and seldom needed: `Index` is wide enough for all
// outputs.
template <class T, class Index>
__device__ __forceinline__ void MaxPoolAt(const PoolParams& p, Index output) {
  const Index row = output / static_cast<unsigned>(p.out_dims[2]), slice = row / static_cast<unsigned>(p.out_dims[1]);
  const Index map = slice / static_cast<unsigned>(p.out_dims[0]);
  const PoolRange columns = WindowOf(p, 2, static_cast<int>(output - row * static_cast<unsigned>(p.out_dims[2])));
  const PoolRange rows = WindowOf(p, 1, static_cast<int>(row - slice * static_cast<unsigned>(p.out_dims[1])));
  const PoolRange slices = WindowOf(p, 0, static_cast<int>(slice - map * static_cast<unsigned>(p.out_dims[0])));
  const auto first = static_cast<long long>(map) * p.in_dims[0];
  float largest = -BitsToFloat(0x7F800000u);
  for (int z = slices.begin; z < slices.end; ++z) {
    const T* line = static_cast<const T*>(p.x) + ((first + z) * p.in_dims[1] + rows.begin) * p.in_dims[2];
    for (int y = rows.begin; y < rows.end; ++y, line += p.in_dims[2]) {
      for (int x = columns.begin; x < columns.end; ++x) largest = AtLeast(largest, LoadElement(line + x));
    }
  }
  StoreRounded(static_cast<T*>(p.y) + output, largest);
}

// One thread an output. Launch: any blockDim.x up to kMaxPoolThreads; a grid smaller than the work is fine.
template <class T>
__device__ __forceinline__ void MaxPool(const PoolParams& p) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_threads; i += step) {
    if (p.num_threads <= 0xFFFFFFFFll) {
      MaxPoolAt<T>(p, static_cast<unsigned>(i));
    } else {
      MaxPoolAt<T>(p, static_cast<unsigned long long>(i));
    }
  }
}

template <int kBytes>
struct PoolVector;
template <>
struct PoolVector<16> {
  using Type = uint4;
};
template <>
struct PoolVector<8> {
  using Type = uint2;
};
template <>
struct PoolVector<4> {
  using Type = unsigned;
};
template <>
struct PoolVector<2> {
  using Type = Half;
};

// 2-D windows of 2x2 with strides of 2 and no padding, where rows are whole vectors. Each thread makes half a vector of
// outputs. A last row without a partner is left out. Launch as above.
template <class T, int kBytes>
__device__ __forceinline__ void MaxPoolPairs(const PoolParams& p) {
  using In = typename PoolVector<kBytes>::Type;
  using Out = typename PoolVector<kBytes / 2>::Type;
  constexpr int kOutputs = kBytes / 2 / static_cast<int>(sizeof(T));
  union Inputs {
    In vector;
    T values[2 * kOutputs];
  };
  union Outputs {
    Out vector;
    T values[kOutputs];
  };
  const int width = p.in_dims[2], row_vectors = width / (2 * kOutputs), out_h = p.out_dims[1];
  const auto step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_threads; i += step) {
    // The host leaves more of them to the general kernel.
    const auto thread = static_cast<unsigned>(i);
    const unsigned row = thread / static_cast<unsigned>(row_vectors);
    const unsigned map = row / static_cast<unsigned>(out_h);
    const unsigned column = thread - row * static_cast<unsigned>(row_vectors);
    const long long in_row =
        static_cast<long long>(map) * p.in_dims[1] + 2 * (row - map * static_cast<unsigned>(out_h));
    const T* from = static_cast<const T*>(p.x) + in_row * width + column * (2u * kOutputs);
    Inputs above, below;
    above.vector = LoadOnce(reinterpret_cast<const In*>(from));
    below.vector = LoadOnce(reinterpret_cast<const In*>(from + width));
    Outputs outputs;
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) {
      const float left = AtLeast(ToFloat(above.values[2 * k]), ToFloat(below.values[2 * k]));
      const float right = AtLeast(ToFloat(above.values[2 * k + 1]), ToFloat(below.values[2 * k + 1]));
      StoreRounded(outputs.values + k, AtLeast(left, right));
    }
    reinterpret_cast<Out*>(static_cast<T*>(p.y))[i] = outputs.vector;
  }
}

}  // namespace sparseconv::cuda
