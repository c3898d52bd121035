#include "tensor_map.h"

#include "driver.h"
#include "tensor_launch.h"

namespace sparseconv::cuda {

void EncodeTensorMap(const void* tensor, const TensorAxes& axes, const int (&box)[kTensorAxes], BoxLayout layout,
                     TensorMap* map) {
  constexpr int kHalves = 6, kFloats = 7;  // CU_TENSOR_MAP_DATA_TYPE_FLOAT16, .._FLOAT32
  constexpr int kNotInterleaved = 0, kNotSwizzled = 0, kSwizzle128 = 3, kPromote128 = 2, kZeros = 0;
  const bool is_half = layout != BoxLayout::kFloats;
  unsigned long long sizes[kTensorAxes], strides[kTensorAxes - 1];
  unsigned lengths[kTensorAxes], steps[kTensorAxes];
  for (int i = 0; i < kTensorAxes; ++i) {
    sizes[i] = static_cast<unsigned long long>(axes.sizes[i]);
    lengths[i] = static_cast<unsigned>(box[i]);
    steps[i] = 1;
  }
  for (int i = 0; i + 1 < kTensorAxes; ++i) {
    strides[i] = static_cast<unsigned long long>((is_half ? kHalfBytes : kFloatBytes) * axes.strides[i]);
  }
  GetDriver().encode_tensor_map(map, is_half ? kHalves : kFloats, kTensorAxes, const_cast<void*>(tensor), sizes,
                                strides, lengths, steps, kNotInterleaved,
                                layout == BoxLayout::kSwizzledHalves ? kSwizzle128 : kNotSwizzled, kPromote128, kZeros);
}

}  // namespace sparseconv::cuda
