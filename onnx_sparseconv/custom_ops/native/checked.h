// Integer arithmetic on sizes that come from a file: an overflow is an error, not a wrap-around.
#pragma once

#include <cstdint>
#include <limits>

#include "error.h"

namespace sparseconv {

// The product of two sizes, neither negative. `what` names it in the error.
inline int64_t CheckedMultiply(int64_t a, int64_t b, const char* what) {
  if (b != 0 && a > std::numeric_limits<int64_t>::max() / b) Fail(what, " overflows 64 bits (", a, " x ", b, ")");
  return a * b;
}

inline int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t value, int64_t unit) { return CeilDivide(value, unit) * unit; }

}  // namespace sparseconv
