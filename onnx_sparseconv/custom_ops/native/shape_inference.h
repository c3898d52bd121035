#pragma once

#include "ort_abi.h"

namespace sparseconv {

// Gives Y its type and what can be said of its shape.
//
// It runs before the attributes have been validated, so it takes nothing for granted, and where something does not fit
// it says nothing: an error from here would be ignored and leaked, and the kernel's creation reports it anyway.
// `has_pool`: whether the op pools.
void InferOutputShape(const ort::OrtApi* api, ort::OrtShapeInferContext* context, bool has_pool) noexcept;

}  // namespace sparseconv
