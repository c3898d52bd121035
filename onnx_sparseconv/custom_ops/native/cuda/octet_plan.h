// How the octet kernel (kernels/cuda/octet_conv.cuh) is launched for a call.
#pragma once

#include <cstdint>
#include <optional>

#include "../../../kernels/cuda/params.h"
#include "../attributes.h"
#include "csr_plan.h"
#include "driver.h"
#include "window_weight.h"

namespace sparseconv::cuda {

// Eights of positions of a warpgroup that there are kernels for.
constexpr int kOctetBlocks[] = {8, 15, 28, 29}, kWordBlocks[] = {8, 15}, kStridedBlocks[] = {8, 15};
constexpr int64_t kMaxOctetStride = 2;

struct OctetLaunch {
  OctetParams params{};  // all but the pointers
  OctetForm form = OctetForm::kPlain;
  int blocks = 0;       // of those of its form
  double cycles = 0.0;  // of a multiprocessor, about
  LaunchShape shape;
};

// Nothing where windows move by more than two rows or columns, where rows of X are no multiples of 4, where windows
// have several rows, or strides, and planes of Y are no multiples of 8, unless X has few channels and was copied for
// it, where the window's rows and the weight do not fit shared memory, or where the tensors are too large. X, Y and the
// residual must begin at multiples of 16 bytes. `batch` is at least 1; `element_bytes` are of X and Y, 4 for floats.
std::optional<OctetLaunch> ChooseOctetLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                                             const DeviceFacts& device, const WindowForm& weight, int64_t element_bytes,
                                             bool is_copied);

// Of the call's Y, which `params` points to, for the copy engine. Throws where the driver refuses.
void EncodeOutputs(const OctetLaunch& launch, int64_t batch, int64_t element_bytes, OctetParams* params);

}  // namespace sparseconv::cuda
