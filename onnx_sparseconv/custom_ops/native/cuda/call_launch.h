// Launches what a plan says.
#pragma once

#include "../attributes.h"
#include "../kernel.h"
#include "../ort.h"
#include "call_plan.h"
#include "driver.h"
#include "node_kernels.h"

namespace sparseconv::cuda {

// One call of a node, ready to be launched.
struct Call {
  const ort::Context& context;
  Inputs inputs;
  const Plan& plan;
  void* y;
  StreamHandle stream;
  Epilogue epilogue{};  // the launch fills it in
};

// Launches a call on its stream; `y_dims` are the sizes of Y. Returns what runs it: the plan's kernel, or another one
// where that cannot run tensors that begin where these do.
RunningKernel LaunchCall(const NodeKernels& node, const Call& call, const Axes& y_dims);

}  // namespace sparseconv::cuda
