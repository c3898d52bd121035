// Elements of shared memory by their address.
#pragma once

#include "intrinsics.cuh"

namespace sparseconv::cuda {

template <class T>
__device__ __forceinline__ T LoadSharedAs(Shared address) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return BitsToFloat(LoadShared(address));
  } else {
    return LoadSharedHalf(address);
  }
}
__device__ __forceinline__ void StoreSharedAs(Shared address, float value) { StoreShared(address, FloatToBits(value)); }
__device__ __forceinline__ void StoreSharedAs(Shared address, Half value) { StoreSharedHalf(address, value); }

}  // namespace sparseconv::cuda
