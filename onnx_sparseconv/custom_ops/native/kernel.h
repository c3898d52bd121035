// A kernel: what an execution provider runs for one node.
#pragma once

#include <memory>
#include <string>

#include "attributes.h"
#include "cuda/settings.h"
#include "ort.h"

namespace sparseconv {

// A further provider needs an entry here, in `ProviderName` (op.cc), in the table of ops and in `CreateKernel`.
enum class Provider { kCpu, kCuda };

// Instruction set that the CPU kernels use.
enum class CpuIsa { kAuto, kPortable, kAvx2, kAvx512 };

// What an op does besides convolution, bias and activation: nothing, add a residual before the activation, or take the
// maximum of windows behind it.
enum class OpKind { kConv, kConvAdd, kConvMaxPool };

// What distinguishes the registered ops.
struct OpDescription {
  OpKind kind;
  int element_type;  // of X, B, Z and Y
  Provider provider;
  CpuIsa cpu_isa;
  cuda::Settings cuda;

  bool has_residual() const { return kind == OpKind::kConvAdd; }
  bool has_pool() const { return kind == OpKind::kConvMaxPool; }
  const char* name() const {
    return has_residual() ? "SparseConvAdd" : has_pool() ? "SparseConvMaxPool" : "SparseConv";
  }
};

// Immutable but for caches that lock: Compute is called concurrently.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void Compute(const ort::Context& context) const = 0;
  // What runs, for `SparseConvDescribeKernels`; "cpu.avx512", say. Where that depends on the input, what ran last.
  virtual std::string name() const = 0;
};

std::unique_ptr<Kernel> CreateKernel(const OpDescription& op, const ort::NodeInfo& node);

// The inputs of one call, checked against the attributes. Independent of the provider.
struct Inputs {
  ort::TensorView x;
  ort::TensorView bias;      // data is null where absent
  ort::TensorView residual;  // the same
  int64_t batch = 0;
  Axes in_dims{1, 1, 1};
};

Inputs ReadInputs(const ort::Context& context, const OpDescription& op, const ConvGeometry& geometry);

// The shape of what the convolution makes, which is Y's where it is not pooled. Throws `Error` where it has too many
// elements or the residual has another shape.
ort::Shape OutputShape(const Inputs& inputs, const ConvGeometry& geometry, const Axes& out_dims);

// The shape of Y where what the convolution makes, of `shape`, is pooled to maps of `pooled_dims`.
ort::Shape PooledShape(ort::Shape shape, const ConvGeometry& geometry, const Axes& pooled_dims);

}  // namespace sparseconv
