// Several tensors that are read as if they were concatenated.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

// One of them.
struct Source {
  const void* x;
  int begin, channels;
};

// The one that has a channel of X. Indexed by constants alone: else parameters go to local memory first.
__device__ __forceinline__ Source FindSource(const Sources& sources, int channel) {
  Source found = {sources.x[0], 0, sources.begins[1]};
#pragma unroll
  for (int i = 1; i < kMaxSources; ++i) {
    if (i >= sources.count || channel < sources.begins[i]) continue;
    found.x = sources.x[i];
    found.begin = sources.begins[i];
    found.channels = sources.begins[i + 1] - sources.begins[i];
  }
  return found;
}

// Its number, for parameters that may be indexed (__grid_constant__, or by reference).
__device__ __forceinline__ int FindSourceNumber(const Sources& sources, int channel) {
  int source = 0;
#pragma unroll 1
  while (source + 1 < sources.count && channel >= sources.begins[source + 1]) ++source;
  return source;
}

}  // namespace sparseconv::cuda
