// The kernels that the library itself carries, as PTX: the CSR convolution, the sum of partial results, and the
// convolutions on tensor cores.
#pragma once

#include <map>
#include <memory>

#include "csr_plan.h"
#include "driver.h"

namespace sparseconv::cuda {

// Their functions for one element type, in the context that was current when this was made. All nodes of the process
// share the compiled PTX, as long as there is one.
class LibraryKernels {
 public:
  explicit LibraryKernels(bool is_half);

  // `sub_batch` is 1, 2, 4 or 8.
  FunctionHandle Csr(int sub_batch) const;
  FunctionHandle Reduce() const { return reduce_; }

 private:
  std::shared_ptr<const Library> library_;
  FunctionHandle csr_[4];
  FunctionHandle reduce_;
};

// The tensor-core kernels for a weight in tiles of `tile_rows`, likewise. The GPU must have sparse tensor cores.
class TensorKernels {
 public:
  // A block may then use `max_shared_bytes`.
  TensorKernels(int tile_rows, int max_shared_bytes);

  // `positions` is one of TensorPositions.
  FunctionHandle Product(int positions) const { return products_.at(positions); }

 private:
  std::shared_ptr<const Library> library_;
  std::map<int, FunctionHandle> products_;
};

// The warpgroup kernels, likewise. The GPU must be of kWgmmaArchitecture.
class WgmmaKernels {
 public:
  explicit WgmmaKernels(int max_shared_bytes);

  // `positions` is one of kWgmmaPositions.
  FunctionHandle Product(int positions) const { return products_.at(positions); }

 private:
  std::shared_ptr<const Library> library_;
  std::map<int, FunctionHandle> products_;
};

}  // namespace sparseconv::cuda
