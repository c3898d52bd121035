#include "max_pool.h"

#include <algorithm>

#include "../half.h"

namespace sparseconv::cpu {
namespace {

float ToFloat(float value) { return value; }
float ToFloat(uint16_t bits) { return HalfToFloat(bits); }
void Store(float value, float* to) { *to = value; }
void Store(float value, uint16_t* to) { *to = FloatToHalf(value); }

struct Range {
  int64_t begin, end;
};

// What a window of an axis covers of a map.
Range Window(const PoolGeometry& pool, size_t axis, int64_t output, int64_t size) {
  const int64_t first = output * pool.strides[axis] - pool.pads_begin[axis];
  return {std::max<int64_t>(first, 0), std::min(first + pool.kernel_shape[axis], size)};
}

// Windows of 2x2 beside each other, all within the map.
bool IsPairs(const PoolGeometry& pool, const Axes& in_dims) {
  const Axes none{0, 0, 0};
  return in_dims[0] == 1 && in_dims[1] >= 2 && in_dims[2] >= 2 && pool.kernel_shape == Axes{1, 2, 2} &&
         pool.strides[1] == 2 && pool.strides[2] == 2 && pool.pads_begin == none && pool.pads_end == none;
}

template <class Element>
void PoolPairs(const Axes& in_dims, const Axes& out_dims, const Element* in, Element* out) {
  for (int64_t h = 0; h < out_dims[1]; ++h) {
    const Element* above = in + 2 * h * in_dims[2];
    const Element* below = above + in_dims[2];
    // Without a branch or a call: compilers make vectors of it.
    for (int64_t w = 0; w < out_dims[2]; ++w) {
      const float left = std::max(ToFloat(above[2 * w]), ToFloat(below[2 * w]));
      const float right = std::max(ToFloat(above[2 * w + 1]), ToFloat(below[2 * w + 1]));
      Store(std::max(left, right), out++);
    }
  }
}

}  // namespace

template <class Element>
void MaxPoolMap(const PoolGeometry& pool, const Axes& in_dims, const Axes& out_dims, const Element* in, float* row,
                Element* out) {
  if (IsPairs(pool, in_dims)) return PoolPairs(in_dims, out_dims, in, out);
  const int64_t width = in_dims[2];
  for (int64_t d = 0; d < out_dims[0]; ++d) {
    const Range slices = Window(pool, 0, d, in_dims[0]);
    for (int64_t h = 0; h < out_dims[1]; ++h) {
      const Range rows = Window(pool, 1, h, in_dims[1]);
      // Rows first, all columns of them at once.
      bool is_first = true;
      for (int64_t slice = slices.begin; slice < slices.end; ++slice) {
        for (int64_t y = rows.begin; y < rows.end; ++y) {
          const Element* from = in + (slice * in_dims[1] + y) * width;
          if (is_first) {
            for (int64_t x = 0; x < width; ++x) row[x] = ToFloat(from[x]);
          } else {
            for (int64_t x = 0; x < width; ++x) row[x] = std::max(row[x], ToFloat(from[x]));
          }
          is_first = false;
        }
      }
      for (int64_t w = 0; w < out_dims[2]; ++w) {
        const Range columns = Window(pool, 2, w, width);
        float largest = row[columns.begin];
        for (int64_t x = columns.begin + 1; x < columns.end; ++x) largest = std::max(largest, row[x]);
        Store(largest, out++);
      }
    }
  }
}

template void MaxPoolMap(const PoolGeometry&, const Axes&, const Axes&, const float*, float*, float*);
template void MaxPoolMap(const PoolGeometry&, const Axes&, const Axes&, const uint16_t*, float*, uint16_t*);

}  // namespace sparseconv::cpu
