// Division by numbers that a launch does not change; see Divisor.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

__device__ __forceinline__ int Divide(int n, const Divisor& divisor) {
  const auto product = static_cast<unsigned long long>(2u * static_cast<unsigned>(n)) * divisor.multiplier;
  return static_cast<int>(static_cast<unsigned>(product >> 32) >> divisor.shift);
}

}  // namespace sparseconv::cuda
