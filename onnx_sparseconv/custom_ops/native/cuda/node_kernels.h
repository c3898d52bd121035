// What a node is, and all that its calls run: made when the session is created, and immutable.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../attributes.h"
#include "../kernel.h"
#include "../ort.h"
#include "csr_plan.h"
#include "device_weights.h"
#include "driver.h"
#include "library_kernels.h"

namespace sparseconv::cuda {

enum class RunningKernel { kCsr, kDepthwise, kTensor, kSegments, kWgmma, kFlat, kGemm, kCluster, kGenerated };

struct NodeKernels {
  // Loads what may run the node. Throws `Error` where the session asks for what cannot.
  NodeKernels(const OpDescription& description, const ort::NodeInfo& node, const SparseConvAttributes& attributes);

  bool is_half() const { return op.element_type == ort::kFloat16; }
  size_t element_bytes() const { return is_half() ? sizeof(uint16_t) : sizeof(float); }
  // Whether the node's own code reads its inputs where they are, and not what they are concatenated to.
  bool code_reads_sources() const { return image && ReadsSources(image->plan); }

  const OpDescription op;
  const std::string name;
  const ConvGeometry geometry;
  const Activation activation;
  const std::optional<PoolGeometry> pool;
  const std::vector<int64_t> source_begins;  // as of SparseConvAttributes
  // In the order of their dependence: the context is the last to go.
  const Context context;
  DeviceFacts device;
  std::optional<LibraryKernels> library_kernels;  // there is one, once all is loaded
  std::optional<CsrWeight> csr_weight;            // likewise
  std::optional<DepthwiseProduct> depthwise;
  std::optional<TensorProduct> tensor;
  std::optional<WgmmaProduct> wgmma;
  std::optional<WindowProduct> windows;
  std::optional<WindowProduct> copied_windows;  // of the convolution without strides
  std::optional<FlatProduct> flat;
  std::optional<GemmProduct> gemm;
  std::optional<HostFlag> was_recomputed;  // a call of floats that are rounded
  std::optional<GeneratedImage> image;
  RunningKernel likely = RunningKernel::kCsr;  // what calls will run, most of them
  bool has_warned = false;                     // that no image of the node fits

 private:
  void LoadDepthwiseProduct(const SparseConvAttributes& attributes);
  void LoadTensorProduct(const SparseConvAttributes& attributes);
  void LoadWgmmaProduct(const SparseConvAttributes& attributes);
  void LoadFlatProduct(const SparseWeight& halves);
  void LoadGemmProduct(const SparseWeight& halves);
  template <class Load>
  void IfMemoryIsLeft(KernelChoice loaded, const Load& load) const;
  void LoadImage(const ort::NodeInfo& node, const SparseConvAttributes& attributes);
  void WarnOfImage(const ort::NodeInfo& node, const std::string& reason);
};

}  // namespace sparseconv::cuda
