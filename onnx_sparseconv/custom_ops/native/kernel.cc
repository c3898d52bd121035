#include "kernel.h"

#include <algorithm>

#include "checked.h"
#include "cpu/cpu_kernel.h"
#include "cuda/cuda_kernel.h"

namespace sparseconv {

std::unique_ptr<Kernel> CreateKernel(const OpDescription& op, const ort::NodeInfo& node) {
  SparseConvAttributes attributes = ReadAttributes(node, {op.element_type, op.has_pool(), op.num_sources});
  switch (op.provider) {
    case Provider::kCpu:
      return cpu::CreateCpuKernel(op, std::move(attributes));
    case Provider::kCuda:
      return cuda::CreateCudaKernel(op, node, std::move(attributes));
  }
  Fail("unknown execution provider");
}

std::string SourceName(size_t index) { return index == 0 ? "X" : "X" + std::to_string(index + 1); }

// X of its sources: their shape, but for the channels. Throws `Error` where they do not fit together.
static void ReadSources(const ort::Context& context, const std::vector<int64_t>& begins, Inputs* inputs) {
  inputs->num_sources = begins.size() - 1;
  for (size_t i = 0; i < inputs->num_sources; ++i) {
    ort::TensorView& source = inputs->sources[i];
    const std::string name = SourceName(i);
    if (!context.GetInput(i == 0 ? 0 : i + 1, &source)) Fail("input ", name, " is absent");
    if (i == 0) inputs->x = source;
    ort::Shape wanted = inputs->x.shape;
    wanted.dims[1] = begins[i + 1] - begins[i];
    if (i == 0 && (wanted.rank < 2 || source.shape != wanted)) {
      Fail("input X must have ", wanted.dims[1], " channels, found shape ", ToString(source.shape));
    }
    if (source.shape != wanted) {
      Fail("input ", name, " must have ", wanted.dims[1], " channels and else the shape of X, ",
           ToString(inputs->x.shape), ", found ", ToString(source.shape));
    }
  }
  inputs->x.data = nullptr;
  inputs->x.shape.dims[1] = begins.back();
}

Inputs ReadInputs(const ort::Context& context, const OpDescription& op, const ConvGeometry& geometry,
                  const std::vector<int64_t>& source_begins) {
  Inputs inputs;
  if (op.num_sources > 0) {
    ReadSources(context, source_begins, &inputs);
  } else if (!context.GetInput(0, &inputs.x)) {
    Fail("input X is absent");
  }
  const ort::Shape& shape = inputs.x.shape;
  if (shape.rank != geometry.spatial_rank + 2) {
    Fail("input X must have rank ", geometry.spatial_rank + 2, " (N, C and ", geometry.spatial_rank,
         " spatial axes), found shape ", ToString(shape));
  }
  if (shape.dims[1] != geometry.in_channels) {
    Fail("input X must have ", geometry.in_channels, " channels, found shape ", ToString(shape));
  }
  inputs.batch = shape.dims[0];
  std::copy_n(shape.dims.begin() + 2, geometry.spatial_rank,
              inputs.in_dims.end() - static_cast<ptrdiff_t>(geometry.spatial_rank));

  if (context.GetInput(1, &inputs.bias)) {
    const ort::Shape& bias = inputs.bias.shape;
    if (bias.rank != 1 || bias.dims[0] != geometry.out_channels) {
      Fail("input B must have shape [", geometry.out_channels, "], found ", ToString(bias));
    }
  }
  if (op.has_residual() && !context.GetInput(2, &inputs.residual)) Fail("input Z is absent");
  return inputs;
}

// Throws `Error` where 64 bits cannot count the bytes of a tensor of this shape.
static void CheckCountable(const ort::Shape& shape) {
  int64_t count = sizeof(float);
  for (size_t i = 0; i < shape.rank; ++i) count = CheckedMultiply(count, shape.dims[i], "the size of Y in bytes");
}

ort::Shape OutputShape(const Inputs& inputs, const ConvGeometry& geometry, const Axes& out_dims) {
  ort::Shape shape;
  shape.rank = inputs.x.shape.rank;
  shape.dims[0] = inputs.batch;
  shape.dims[1] = geometry.out_channels;
  std::copy(out_dims.end() - static_cast<ptrdiff_t>(geometry.spatial_rank), out_dims.end(), shape.dims.begin() + 2);
  CheckCountable(shape);
  // What is present but empty may have no data, either.
  const bool has_residual = inputs.residual.memory_info != nullptr;
  if (has_residual && inputs.residual.shape != shape) {
    Fail("input Z must have the shape of Y, ", ToString(shape), ", found ", ToString(inputs.residual.shape));
  }
  return shape;
}

ort::Shape PooledShape(ort::Shape shape, const ConvGeometry& geometry, const Axes& pooled_dims) {
  std::copy(pooled_dims.end() - static_cast<ptrdiff_t>(geometry.spatial_rank), pooled_dims.end(),
            shape.dims.begin() + 2);
  CheckCountable(shape);
  return shape;
}

}  // namespace sparseconv
