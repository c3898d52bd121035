// The kernels that the library itself carries, as PTX: the CSR convolution, and the sum of partial results.
#pragma once

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

}  // namespace sparseconv::cuda
