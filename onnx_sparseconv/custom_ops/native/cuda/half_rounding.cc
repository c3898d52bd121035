#include "half_rounding.h"

#include <algorithm>
#include <cmath>

#include "../half.h"

namespace sparseconv::cuda {

std::optional<ScaledWeight> ScaleToHalves(const SparseWeight& weight) {
  ScaledWeight scaled{weight, {}};
  const size_t rows = weight.row_begin.size() - 1;
  scaled.scales.reserve(rows);
  for (size_t row = 0; row < rows; ++row) {
    const auto begin = scaled.weight.values.begin() + weight.row_begin[row];
    const auto end = scaled.weight.values.begin() + weight.row_begin[row + 1];
    float largest = 0.0f;
    for (auto value = begin; value != end; ++value) {
      if (!std::isfinite(*value)) return std::nullopt;
      largest = std::max(largest, std::fabs(*value));
    }
    const int exponent = largest > 0.0f ? std::ilogb(largest) : 0;
    std::transform(begin, end, begin,
                   [&](float value) { return HalfToFloat(FloatToHalf(std::ldexp(value, -exponent))); });
    scaled.scales.push_back(std::ldexp(1.0f, exponent));
  }
  return scaled;
}

}  // namespace sparseconv::cuda
