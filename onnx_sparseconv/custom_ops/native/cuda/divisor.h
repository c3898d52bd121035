// Makes a Divisor, by which kernels divide.
#pragma once

#include <cstdint>

#include "../../../kernels/cuda/params.h"

namespace sparseconv::cuda {

// `divisor` is positive, and less than 2^31.
inline Divisor MakeDivisor(int64_t divisor) {
  int shift = 0;
  while ((int64_t{1} << shift) < divisor) ++shift;
  const auto scale = static_cast<uint64_t>(1) << (31 + shift);
  return {static_cast<unsigned>((scale + static_cast<uint64_t>(divisor) - 1) / static_cast<uint64_t>(divisor)), shift};
}

}  // namespace sparseconv::cuda
