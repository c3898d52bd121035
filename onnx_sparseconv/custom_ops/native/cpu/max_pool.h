// The maximum of windows, behind a convolution.
#pragma once

#include "../attributes.h"

namespace sparseconv::cpu {

// Pools one map of `in_dims` to one of `out_dims`. `row` is scratch for as many floats as the last axis of `in_dims`
// has. Floats, or halves as bits; whether a NaN among others comes through depends on where it stands.
template <class Element>
void MaxPoolMap(const PoolGeometry& pool, const Axes& in_dims, const Axes& out_dims, const Element* in, float* row,
                Element* out);

extern template void MaxPoolMap(const PoolGeometry&, const Axes&, const Axes&, const float*, float*, float*);
extern template void MaxPoolMap(const PoolGeometry&, const Axes&, const Axes&, const uint16_t*, float*, uint16_t*);

}  // namespace sparseconv::cpu
