// A kernel: what an execution provider runs for one node.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "attributes.h"
#include "cuda/settings.h"
#include "ort.h"

namespace sparseconv {

// A further provider needs an entry here, in `ProviderName` (op.cc), in the table of ops and in `CreateKernel`.
enum class Provider { kCpu, kCuda };

// Instruction set that the CPU kernels use.
enum class CpuIsa { kAuto, kPortable, kAvx2, kAvx512 };

// What an op does besides convolution, bias and activation: nothing, add a residual before the activation, take the
// maximum of windows behind it, or concatenate its inputs to X before all else.
enum class OpKind { kConv, kConvAdd, kConvMaxPool, kConvConcat };

// Inputs that an op may concatenate to X.
constexpr size_t kMinConcatInputs = 2, kMaxConcatInputs = 8;

// What distinguishes the registered ops.
struct OpDescription {
  OpKind kind;
  size_t num_sources;  // that are concatenated to X, of kConvConcat; else 0
  int element_type;    // of X, B, Z and Y
  Provider provider;
  CpuIsa cpu_isa;
  int64_t cpu_threads;  // of a session; 0 where it is not known
  cuda::Settings cuda;

  bool has_residual() const { return kind == OpKind::kConvAdd; }
  bool has_pool() const { return kind == OpKind::kConvMaxPool; }
  const char* name() const {
    constexpr const char* kConcats[] = {"SparseConvConcat2", "SparseConvConcat3", "SparseConvConcat4",
                                        "SparseConvConcat5", "SparseConvConcat6", "SparseConvConcat7",
                                        "SparseConvConcat8"};
    static_assert(std::size(kConcats) == kMaxConcatInputs - kMinConcatInputs + 1);
    if (kind == OpKind::kConvConcat) return kConcats[num_sources - kMinConcatInputs];
    return has_residual() ? "SparseConvAdd" : has_pool() ? "SparseConvMaxPool" : "SparseConv";
  }
  // X, B and Z, or X, B and what else is concatenated to X.
  size_t num_inputs() const { return has_residual() ? 3 : std::max<size_t>(num_sources, 1) + 1; }
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
  // Where there are sources, the shape of their concatenation, and no data until a kernel has made it.
  ort::TensorView x;
  std::array<ort::TensorView, kMaxConcatInputs> sources;  // those that are concatenated to X
  size_t num_sources = 0;
  ort::TensorView bias;      // data is null where absent
  ort::TensorView residual;  // the same
  int64_t batch = 0;
  Axes in_dims{1, 1, 1};
};

// The schema's name of one of the inputs that are concatenated to X.
std::string SourceName(size_t index);

// `source_begins` are those of SparseConvAttributes.
Inputs ReadInputs(const ort::Context& context, const OpDescription& op, const ConvGeometry& geometry,
                  const std::vector<int64_t>& source_begins);

// The shape of what the convolution makes, which is Y's where it is not pooled. Throws `Error` where it has too many
// elements or the residual has another shape.
ort::Shape OutputShape(const Inputs& inputs, const ConvGeometry& geometry, const Axes& out_dims);

// The shape of Y where what the convolution makes, of `shape`, is pooled to maps of `pooled_dims`.
ort::Shape PooledShape(ort::Shape shape, const ConvGeometry& geometry, const Axes& pooled_dims);

}  // namespace sparseconv
