// What a node's kernels read besides a call's tensors: its weight in device memory, in each kernel's form, and these
// kernels themselves; its own code likewise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "csr_plan.h"
#include "driver.h"
#include "flat_weight.h"
#include "gemm_plan.h"
#include "generated_plan.h"
#include "images.h"
#include "library_kernels.h"
#include "tensor_plan.h"
#include "tensor_weight.h"
#include "wgmma_plan.h"
#include "wgmma_weight.h"
#include "window_weight.h"

namespace sparseconv::cuda {

// What vectors are aligned to, and two halves in one word.
constexpr uintptr_t kVectorBytes = 16;
constexpr uintptr_t kPairBytes = 4;

// The weight as the tensor-core kernel reads it, in device memory, and that kernel.
struct TensorProduct {
  // `scales` are those of a ScaledWeight, and none where X is of halves.
  TensorProduct(const Context& context, const DeviceFacts& device, const TensorWeight& weight,
                const std::vector<float>& scales);

  // All pointers to the weight.
  template <class Params>
  void Fill(Params* params) const {
    params->steps = memory.at(0);
    params->step_begins = static_cast<const unsigned*>(memory.at(begins_offset));
    params->scales = static_cast<const float*>(memory.at(scales_offset));
  }

  TensorFacts facts;
  const size_t begins_offset, scales_offset;
  const Memory memory;
  const TensorKernels kernels;
  std::optional<SegmentKernels> segments;  // of 1x1, where they may run
};

// The weight as the warpgroup kernels read it, in device memory, and these kernels.
struct WgmmaProduct {
  // `scales` are those of a ScaledWeight, and none where X is of halves.
  WgmmaProduct(const Context& context, const DeviceFacts& device, const WgmmaWeight& weight, const WgmmaFacts& about,
               const std::vector<float>& scales);

  // Of the weight's rows; of floats alone.
  const float* scales() const { return static_cast<const float*>(memory.at(scales_offset)); }

  // All pointers to the weight.
  void Fill(WarpgroupParams* params) const {
    params->scales = scales();
    params->chunks = memory.at(0);
    params->chunk_begins = static_cast<const unsigned*>(memory.at(chunk_begins));
    params->block_begins = static_cast<const unsigned*>(memory.at(block_begins));
    params->channels = static_cast<const int*>(memory.at(channels));
  }

  const WgmmaFacts facts;
  const size_t chunk_begins, block_begins, channels, taps, scales_offset;  // offsets
  const Memory memory;
  const WgmmaKernels kernels;
  const ClusterKernels clusters;
  const PointwiseKernels pointwise;
};

// The weight as the kernel for depthwise convolutions reads it, likewise.
struct DepthwiseProduct {
  DepthwiseProduct(const Context& context, const std::vector<float>& weight);

  const Memory memory;
};

// The weight as the kernels for windows of few channels read it, likewise.
struct WindowProduct {
  WindowProduct(const Context& context, const DeviceFacts& device, const WindowWeight& weight, bool is_half);

  // All pointers to the weight.
  template <class Params>
  void Fill(Params* params) const {
    params->weight = memory.at(0);
    params->channels = static_cast<const int*>(memory.at(channels));
  }

  const WindowForm form;
  const size_t channels;  // offset
  const Memory memory;
  std::optional<RingKernels> ring;  // of halves alone
  const OctetKernels& Octets(OctetForm form) const {
    return form == OctetForm::kWords ? words : form == OctetForm::kStrides ? strided : plain;
  }
  const OctetKernels plain, words, strided;
  const SpaceToDepthKernel space_to_depth;
};

// The weight as the flat kernel reads it, likewise.
struct FlatProduct {
  FlatProduct(const Context& context, const DeviceFacts& device, const FlatWeight& weight, bool is_half);

  // All pointers to the weight.
  void Fill(FlatParams* params) const {
    params->chunks = memory.at(0);
    params->chunk_begins = static_cast<const unsigned*>(memory.at(chunk_begins));
    params->tile_begins = static_cast<const unsigned*>(memory.at(tile_begins));
    params->octets = static_cast<const int*>(memory.at(octets));
  }
  void Fill(FlattenParams* params) const {
    params->channels = static_cast<const int*>(memory.at(channels));
    params->places = static_cast<const int*>(memory.at(places));
  }

  const FlatForm form;
  const size_t chunk_begins, tile_begins, octets, channels, places;  // offsets
  const Memory memory;
  const FlatKernels kernels;
};

// The weight with its zeros, as the gemm kernels read it, likewise.
struct GemmProduct {
  GemmProduct(const Context& context, const DeviceFacts& device, const std::vector<uint8_t>& weight, bool is_half);

  const Memory memory;
  const GemmKernels boxes, planes, ready_boxes, ready_planes;
  const PackKernel pack;

  const GemmKernels& Kernels(bool has_boxes, bool is_ready) const {
    if (is_ready) return has_boxes ? ready_boxes : ready_planes;
    return has_boxes ? boxes : planes;
  }
};

// The node's own kernel, loaded.
struct GeneratedImage {
  GeneratedImage(const Image& image, const DeviceFacts& device);

  const GeneratedPlan plan;
  const unsigned architecture;
  const int64_t min_batch;
  const Library library;
  FunctionHandle function = nullptr;
  GeneratedFacts facts;
};

}  // namespace sparseconv::cuda
