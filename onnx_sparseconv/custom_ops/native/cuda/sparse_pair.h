// What sparse tensor cores read of four neighbouring columns of a row.
#pragma once

#include <cstdint>
#include <utility>

namespace sparseconv::cuda {

constexpr int kQuadColumns = 4;

// At most two values of four columns, and where they stand: two bits each, the first one lower.
struct SparsePair {
  uint16_t values[2] = {0, 0};  // halves
  unsigned places = 0 | 1 << 2;
};

// Of the entries of four columns, at most two: `value(i)` where `has(i)`.
template <class Has, class Value>
SparsePair MakeSparsePair(const Has& has, const Value& value) {
  SparsePair pair;
  int count = 0, places[2] = {0, 0};
  for (int i = 0; i < kQuadColumns; ++i) {
    if (!has(i)) continue;
    places[count] = i;
    pair.values[count++] = value(i);
  }
  if (count == 0) return pair;
  // The second place must be behind the first: a zero goes to the last place, or, if that is taken, to the first.
  if (count == 1) {
    places[1] = kQuadColumns - 1;
    if (places[0] == places[1]) {
      std::swap(pair.values[0], pair.values[1]);
      places[0] = 0;
    }
  }
  pair.places = static_cast<unsigned>(places[0] | places[1] << 2);
  return pair;
}

}  // namespace sparseconv::cuda
