// What the eight parts of a pixel are that the kernels of warpgroups for windows read together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "../checked.h"

namespace sparseconv::cuda {

// Images, or strips of one image, which are neighbouring rows of its outputs.
struct Eights {
  int64_t count;
  int64_t strips;     // of an image, 0 where an eight is of images
  int64_t rows;       // of outputs, in an image or a strip
  int64_t last_rows;  // in the last one

  static Eights OfImages(int64_t batch, int64_t out_h) {
    return {CeilDivide(batch, int64_t{kTensorImages}), 0, out_h, out_h};
  }
  static Eights OfStrips(int64_t batch, int64_t out_h) {
    const int64_t rows = CeilDivide(out_h, int64_t{kTensorImages}), strips = CeilDivide(out_h, rows);
    return {batch, strips, rows, out_h - (strips - 1) * rows};
  }
};

// Where the outputs of an eight's parts lie in Y, and how many rows these have.
template <class Params>
void FillEights(const Eights& eights, int64_t out_channels, int64_t out_h, int64_t out_w, Params* params) {
  const int64_t plane = out_h * out_w, image = out_channels * plane;
  const bool has_strips = eights.strips != 0;
  params->images = has_strips ? static_cast<int>(eights.strips) : kTensorImages;
  params->last_rows = static_cast<int>(eights.last_rows);
  params->y_plane = static_cast<int>(plane);
  params->y_image = static_cast<int>(has_strips ? eights.rows * out_w : image);
  params->y_eight = has_strips ? image : kTensorImages * image;
}

// Whether 32 bits count all strips, and the pixels from the padding before an image to the end of the last strip's
// windows, as kernels that read strips do.
inline bool CanCountStrips(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, int64_t out_h) {
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
  const int64_t extent = (geometry.kernel_shape[1] - 1) * geometry.dilations[1] + 1;
  const int64_t read = RoundUp(out_h, int64_t{kTensorImages}) * geometry.strides[1] + extent;
  const int64_t width = std::max<int64_t>(sizes.in_dims[2], 1);
  return batch <= kMaxInt / kTensorImages && read <= kMaxInt / width - sizes.pads_begin[1];
}

// The launch that takes fewest cycles, of what `choose(eights)` finds, if anything.
template <class Choose>
auto ChooseOfEights(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, int64_t out_h,
                    const Choose& choose) {
  auto launch = choose(Eights::OfImages(batch, out_h));
  // No part of a pixel is empty, or strips cannot be read.
  if (batch % kTensorImages == 0 || !CanCountStrips(geometry, sizes, batch, out_h)) return launch;
  auto strips = choose(Eights::OfStrips(batch, out_h));
  return strips && (!launch || strips->cycles < launch->cycles) ? strips : launch;
}

}  // namespace sparseconv::cuda
