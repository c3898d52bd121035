// How the inputs of a Concat are copied together (kernels/cuda/concatenate.cuh), for kernels that know of one X.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../../kernels/cuda/params.h"
#include "../kernel.h"
#include "csr_plan.h"
#include "driver.h"

namespace sparseconv::cuda {

// Bytes that there are kernels to copy at a time, the best first.
constexpr int kConcatenateUnits[] = {16, 4, 2};

struct ConcatenateLaunch {
  ConcatenateParams params{};  // all but `out`
  int unit_bytes = 0;
  size_t bytes = 0;  // of X
  LaunchShape shape;
};

// Where the inputs of a call lie, and which channels of X they are: `begins` are those of SparseConvAttributes.
Sources SourcesOf(const Inputs& inputs, const std::vector<int64_t>& begins);

// What the addresses of all sources of X are multiples of, if it is a small power of two; 0 where there are none.
uintptr_t AddressesOf(const Inputs& inputs);

// Whether the sources begin at, and all their images take, multiples of so many bytes.
bool AreMultiplesOf(int64_t unit_bytes, const Inputs& inputs, const std::vector<int64_t>& begins, int64_t plane_bytes);

// For a call of at least one image.
ConcatenateLaunch ChooseConcatenateLaunch(const Inputs& inputs, const std::vector<int64_t>& begins,
                                          int64_t element_bytes, const DeviceFacts& device);

// Cycles of a multiprocessor that it takes, about, for X of so many bytes.
double ConcatenateCycles(double bytes, const DeviceFacts& device);

}  // namespace sparseconv::cuda
