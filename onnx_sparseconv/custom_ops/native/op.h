// The ops as ONNX Runtime sees them.
#pragma once

#include "kernel.h"
#include "ort_abi.h"

namespace sparseconv {

constexpr const char* kDomain = "ai.sparseconv";

// An entry of the custom-op domain. It lives as long as the process: sessions keep pointers to it.
struct Op : ort::OrtCustomOp {
  // Without `infer_shapes` the runtime learns the shape of Y only from the kernel.
  Op(const ort::OrtApi* api, const OpDescription& description, bool infer_shapes);

  const ort::OrtApi* api;  // only for shape inference, which is not given one
  OpDescription description;
};

}  // namespace sparseconv
