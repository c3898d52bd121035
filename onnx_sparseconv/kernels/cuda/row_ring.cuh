// A ring of rows of X in shared memory, as the kernels for windows of few channels have it: rows enter one after the
// other, through all tiles of a block, and each is there until all warps that multiply have released it.
#pragma once

#include "intrinsics.cuh"

namespace sparseconv::cuda {

// `Conv` has ring_rows(), and the barriers Filled(slot) and Emptied(slot).
template <class Conv>
class RowRing {
 protected:
  // A row of the block's stream of them, and where in the ring it lies; parity of how often that was filled before.
  struct Cursor {
    int row = 0, slot = 0;
    unsigned parity = 0;
  };

  __device__ __forceinline__ void Advance(Cursor& cursor, int rows = 1) const {
    cursor.row += rows;
    cursor.slot += rows;
    if (cursor.slot < conv().ring_rows()) return;
    cursor.slot -= conv().ring_rows();
    cursor.parity ^= 1;
  }

  __device__ __forceinline__ void WaitForRow(Cursor& filled) const {
    WaitForBarrier(conv().Filled(filled.slot), filled.parity);
    Advance(filled);
  }

  // Releases rows up to `end`, each when it is filled: also those that others read.
  __device__ __forceinline__ void Release(int end, Cursor& filled, Cursor& released) const {
    while (released.row < end) {
      if (filled.row == released.row) WaitForRow(filled);
      if (threadIdx.x % 32 == 0) Arrive(conv().Emptied(released.slot));
      Advance(released);
    }
  }

 private:
  __device__ __forceinline__ const Conv& conv() const { return static_cast<const Conv&>(*this); }
};

}  // namespace sparseconv::cuda
