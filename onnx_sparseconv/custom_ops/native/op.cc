#include "op.h"

#include <exception>
#include <memory>
#include <new>
#include <string>

#include "cuda/provider.h"
#include "kernel_registry.h"
#include "shape_inference.h"
#include "utf8.h"

namespace sparseconv {
namespace {

const char* ProviderName(Provider provider) {
  switch (provider) {
    case Provider::kCpu:
      return "CPUExecutionProvider";
    case Provider::kCuda:
      return cuda::kProviderName;
  }
  return nullptr;
}

const char* ShortName(Provider provider) {
  switch (provider) {
    case Provider::kCpu:
      return "cpu";
    case Provider::kCuda:
      return "cuda";
  }
  return "unknown";
}

std::string ReasonOf(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? "out of memory" : error.what();
}

// A kernel with what is needed around it: the API that created it, and its place in the registry.
class Node {
 public:
  Node(const ort::OrtApi* api, const OpDescription& op, const std::string& name, std::unique_ptr<Kernel> kernel)
      : api_(api), op_(op), kernel_(std::move(kernel)) {
    record_.node = name;
    record_.op = op.name();
    record_.provider = ShortName(op.provider);
    record_.kernel = kernel_.get();
    KernelRegistry::Instance().Add(&record_);
  }
  ~Node() { KernelRegistry::Instance().Remove(&record_); }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  ort::OrtStatus* Compute(ort::OrtKernelContext* context) noexcept {
    return ort::ReturnStatus(api_, ort::kInvalidArgument, [&] {
      try {
        kernel_->Compute(ort::Context(api_, context));
      } catch (const std::exception& error) {
        Fail(op_.name(), " node '", record_.node, "': ", ReasonOf(error));
      }
      record_.runs.fetch_add(1, std::memory_order_relaxed);
    });
  }

 private:
  const ort::OrtApi* api_;
  const OpDescription op_;
  KernelRecord record_;
  std::unique_ptr<Kernel> kernel_;
};

const OpDescription& Describe(const ort::OrtCustomOp* op) { return static_cast<const Op*>(op)->description; }

ort::OrtStatus* CreateNode(const ort::OrtCustomOp* op, const ort::OrtApi* api, const ort::OrtKernelInfo* info,
                           void** node) noexcept {
  return ort::ReturnStatus(api, ort::kInvalidArgument, [&] {
    const OpDescription& description = Describe(op);
    const ort::NodeInfo node_info(api, info);
    const std::string name = AsUtf8(node_info.Name());
    try {
      auto kernel = CreateKernel(description, node_info);
      *node = new Node(api, description, name, std::move(kernel));
    } catch (const std::exception& error) {
      Fail(description.name(), " node '", name, "': ", ReasonOf(error));
    }
  });
}

size_t InputCount(const ort::OrtCustomOp* op) { return Describe(op).num_inputs(); }

}  // namespace

Op::Op(const ort::OrtApi* api, const OpDescription& description, bool infer_shapes)
    : ort::OrtCustomOp{}, api(api), description(description) {
  version = ort::kApiVersion;
  get_name = [](const OrtCustomOp* op) { return Describe(op).name(); };
  get_execution_provider_type = [](const OrtCustomOp* op) { return ProviderName(Describe(op).provider); };
  get_input_type_count = InputCount;
  get_input_type = [](const OrtCustomOp* op, size_t) { return Describe(op).element_type; };
  get_input_characteristic = [](const OrtCustomOp*, size_t index) -> int {
    return index == 1 ? ort::kOptional : ort::kRequired;  // B
  };
  get_input_memory_type = [](const OrtCustomOp*, size_t) -> int { return ort::kMemoryDefault; };
  get_output_type_count = [](const OrtCustomOp*) -> size_t { return 1; };
  get_output_type = [](const OrtCustomOp* op, size_t) { return Describe(op).element_type; };
  get_output_characteristic = [](const OrtCustomOp*, size_t) -> int { return ort::kRequired; };
  create_kernel_v2 = CreateNode;
  kernel_compute_v2 = [](void* node, ort::OrtKernelContext* context) {
    return static_cast<Node*>(node)->Compute(context);
  };
  kernel_destroy = [](void* node) { delete static_cast<Node*>(node); };
  if (infer_shapes) {
    infer_output_shape = [](const OrtCustomOp* op, ort::OrtShapeInferContext* context) -> ort::OrtStatus* {
      InferOutputShape(static_cast<const Op*>(op)->api, context, Describe(op).has_pool());
      return nullptr;
    };
  }
  get_start_version = [](const OrtCustomOp*) { return 1; };
  get_end_version = [](const OrtCustomOp*) { return 1; };
}

}  // namespace sparseconv
