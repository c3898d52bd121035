// What the stand-in for the driver writes into a CUtensorMap, and the emulated copy engine reads.
#pragma once

#include <cstdint>

namespace cuda_on_host {

constexpr int kTensorAxes = 3;
constexpr uint32_t kTensorMapMark = 0x50414D54;

// The innermost axis first, which is contiguous. Boxes of halves may be swizzled by 128 bytes.
struct TensorMap {
  uint32_t mark;
  uint32_t element_bytes;
  bool is_swizzled;
  uint32_t box[kTensorAxes];
  unsigned char* first;
  uint64_t sizes[kTensorAxes];
  uint64_t strides[kTensorAxes - 1];  // in bytes
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace cuda_on_host
