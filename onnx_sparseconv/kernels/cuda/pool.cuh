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
  LetNextLaunchBegin();
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  WaitForLaunchBefore();
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

// 2-D windows of kSize x kSize, 2 or 3, with strides of 2, where rows are whole vectors, each row has half as many
// outputs, and 3x3 begin one column before the map. Each thread makes the outputs of one vector of the map. Launch as
// above.
template <class T, int kBytes, int kSize>
__device__ __forceinline__ void MaxPoolVectors(const PoolParams& p) {
  LetNextLaunchBegin();
  using In = typename PoolVector<kBytes>::Type;
  using Out = typename PoolVector<kBytes / 2>::Type;
  constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  const float least = -BitsToFloat(0x7F800000u);
  const int width = p.in_dims[2], height = p.in_dims[1];
  const auto row_vectors = static_cast<unsigned>(width / kElements), out_h = static_cast<unsigned>(p.out_dims[1]);
  const auto step = static_cast<long long>(gridDim.x) * blockDim.x;
  WaitForLaunchBefore();
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_threads; i += step) {
    // From the end, which was written last and may still be in the second-level cache. The host leaves more outputs
    // than 32 bits count to the general kernel.
    const auto thread = static_cast<unsigned>(p.num_threads - 1 - i);
    const unsigned row = thread / row_vectors, map = row / out_h, vector = thread - row * row_vectors;
    const int first = 2 * static_cast<int>(row - map * out_h) - p.pads_begin[1];
    const T* from = static_cast<const T*>(p.x) + static_cast<long long>(map) * height * width + vector * kElements;
    union {
      In vector;
      T values[kElements];
    } lines[kSize];
    T left[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const int y = first + k;
      if (y < 0 || y >= height) continue;
      const T* line = from + static_cast<long long>(y) * width;
      lines[k].vector = LoadOnce(reinterpret_cast<const In*>(line));
      if (kSize == 3 && vector > 0) left[k] = LoadWritten(line - 1);
    }
    float before = least, columns[kElements];
#pragma unroll
    for (int c = 0; c < kElements; ++c) columns[c] = least;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      if (first + k < 0 || first + k >= height) continue;
#pragma unroll
      for (int c = 0; c < kElements; ++c) columns[c] = AtLeast(columns[c], ToFloat(lines[k].values[c]));
      if (kSize == 3 && vector > 0) before = AtLeast(before, ToFloat(left[k]));
    }
    union {
      Out vector;
      T values[kElements / 2];
    } outputs;
#pragma unroll
    for (int c = 0; c < kElements; c += 2) {
      float largest = AtLeast(columns[c], columns[c + 1]);
      if (kSize == 3) largest = AtLeast(largest, c == 0 ? before : columns[c - 1]);
      StoreRounded(outputs.values + c / 2, largest);
    }
    reinterpret_cast<Out*>(static_cast<T*>(p.y))[thread] = outputs.vector;
  }
}

// 2-D windows of kSize x kSize, 2 or 3, with strides of 2, of any padding, and of rows of any length: a warp has 32
// neighbouring columns of kPoolRows rows of outputs, and reads what their windows cover once from memory. Launch as
// above, with 32 threads for each of these.
constexpr int kPoolRows = 4;

template <class T, int kSize>
__device__ __forceinline__ void MaxPoolRows(const PoolParams& p) {
  LetNextLaunchBegin();
  constexpr int kInRows = 2 * (kPoolRows - 1) + kSize;
  const float least = -BitsToFloat(0x7F800000u);
  const int width = p.in_dims[2], height = p.in_dims[1], out_w = p.out_dims[2], out_h = p.out_dims[1];
  const unsigned groups = (static_cast<unsigned>(out_w) + 31) / 32;
  const unsigned bands = (static_cast<unsigned>(out_h) + kPoolRows - 1) / kPoolRows;
  const unsigned tasks = static_cast<unsigned>(p.num_threads / 32), warps = gridDim.x * (blockDim.x / 32);
  WaitForLaunchBefore();
  for (unsigned i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < tasks; i += warps) {
    const unsigned task = tasks - 1 - i, band_of_all = task / groups, map = band_of_all / bands;  // as above
    const int column = static_cast<int>((task - band_of_all * groups) * 32 + threadIdx.x % 32);
    const int row = static_cast<int>(band_of_all - map * bands) * kPoolRows;
    const int first_x = 2 * column - p.pads_begin[2], first_y = 2 * row - p.pads_begin[1];
    const T* from = static_cast<const T*>(p.x) + static_cast<long long>(map) * height * width;
    float lines[kInRows];
#pragma unroll
    for (int y = 0; y < kInRows; ++y) {
      lines[y] = least;
      const bool has_line = first_y + y >= 0 && first_y + y < height && column < out_w;
      const T* line = from + static_cast<long long>(first_y + y) * width;
#pragma unroll
      for (int x = 0; x < kSize; ++x) {
        const bool is_inside = has_line && first_x + x >= 0 && first_x + x < width;
        lines[y] = AtLeast(lines[y], is_inside ? LoadElement(line + first_x + x) : least);
      }
    }
    if (column >= out_w) continue;
    T* to = static_cast<T*>(p.y) + (static_cast<long long>(map) * out_h + row) * out_w + column;
#pragma unroll
    for (int r = 0; r < kPoolRows; ++r, to += out_w) {
      if (row + r >= out_h) break;
      float largest = lines[2 * r];
#pragma unroll
      for (int y = 1; y < kSize; ++y) largest = AtLeast(largest, lines[2 * r + y]);
      StoreRounded(to, largest);
    }
  }
}

}  // namespace sparseconv::cuda
