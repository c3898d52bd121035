#include "shape_inference.h"

#include <array>
#include <atomic>
#include <string>
#include <utility>

#include "attributes.h"

namespace sparseconv {
namespace {

constexpr int64_t kUnknown = -1;
// As in ReadAttributes: sums and products of two of these stay in 64 bits.
constexpr int64_t kMaxValue = int64_t{1} << 31;

const ort::OrtOpAttr* FindAttribute(const ort::OrtApi* api, const ort::OrtShapeInferContext* context,
                                    const char* name) {
  const ort::OrtOpAttr* attribute = nullptr;
  if (!ort::Succeeded(api, ort::ShapeInferGetAttribute::Call(api, context, name, &attribute))) return nullptr;
  return attribute;
}

bool ReadInt(const ort::OrtApi* api, const ort::OrtShapeInferContext* context, const char* name, int64_t* value) {
  const ort::OrtOpAttr* attribute = FindAttribute(api, context, name);
  size_t size = 0;
  return attribute != nullptr &&
         ort::Succeeded(api, ort::ReadOpAttr::Call(api, attribute, ort::kAttrInt, value, sizeof(*value), &size));
}

// Reads exactly `count` values in [0, kMaxValue].
bool ReadInts(const ort::OrtApi* api, const ort::OrtShapeInferContext* context, const char* name, size_t count,
              int64_t* values) {
  const ort::OrtOpAttr* attribute = FindAttribute(api, context, name);
  size_t size = 0;
  const size_t wanted = count * sizeof(int64_t);
  if (attribute == nullptr ||
      !ort::Succeeded(api, ort::ReadOpAttr::Call(api, attribute, ort::kAttrInts, values, wanted, &size)) ||
      size != wanted) {
    return false;
  }
  for (size_t i = 0; i < count; ++i) {
    if (values[i] < 0 || values[i] > kMaxValue) return false;
  }
  return true;
}

AutoPad ReadAutoPad(const ort::OrtApi* api, const ort::OrtShapeInferContext* context) {
  const ort::OrtOpAttr* attribute = FindAttribute(api, context, "auto_pad");
  std::array<char, 16> text{};
  size_t size = 0;
  if (attribute != nullptr && ort::Succeeded(api, ort::ReadOpAttr::Call(api, attribute, ort::kAttrString, text.data(),
                                                                        text.size() - 1, &size))) {
    if (std::string(text.data()) == "SAME_UPPER") return AutoPad::kSameUpper;
    if (std::string(text.data()) == "SAME_LOWER") return AutoPad::kSameLower;
  }
  return AutoPad::kNotSet;
}

// The attributes that decide the size of Y. False where one of them cannot be read.
bool ReadGeometry(const ort::OrtApi* api, const ort::OrtShapeInferContext* context, size_t spatial_rank,
                  ConvGeometry* geometry) {
  const auto read = [&](const char* name, Axes* axes) {
    return ReadInts(api, context, name, spatial_rank, axes->data() + kSpatialAxes - spatial_rank);
  };
  geometry->spatial_rank = spatial_rank;
  geometry->auto_pad = ReadAutoPad(api, context);
  if (!read("kernel_shape", &geometry->kernel_shape) || !read("strides", &geometry->strides) ||
      !read("dilations", &geometry->dilations)) {
    return false;
  }
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    if (geometry->kernel_shape[i] == 0 || geometry->strides[i] == 0 || geometry->dilations[i] == 0) return false;
  }
  if (geometry->auto_pad != AutoPad::kNotSet) return true;
  std::array<int64_t, 2 * kSpatialAxes> pads{};
  if (!ReadInts(api, context, "pads", 2 * spatial_rank, pads.data())) return false;
  for (size_t i = 0; i < spatial_rank; ++i) {
    geometry->pads_begin[kSpatialAxes - spatial_rank + i] = pads[i];
    geometry->pads_end[kSpatialAxes - spatial_rank + i] = pads[spatial_rank + i];
  }
  return true;
}

// The pool as a convolution, which makes outputs of the same size.
bool ReadPool(const ort::OrtApi* api, const ort::OrtShapeInferContext* context, size_t spatial_rank,
              ConvGeometry* geometry) {
  const size_t first = kSpatialAxes - spatial_rank;
  std::array<int64_t, 2 * kSpatialAxes> pads{};
  if (!ReadInts(api, context, "pool_kernel_shape", spatial_rank, geometry->kernel_shape.data() + first) ||
      !ReadInts(api, context, "pool_strides", spatial_rank, geometry->strides.data() + first) ||
      !ReadInts(api, context, "pool_pads", 2 * spatial_rank, pads.data())) {
    return false;
  }
  geometry->spatial_rank = spatial_rank;
  for (size_t i = 0; i < spatial_rank; ++i) {
    if (geometry->kernel_shape[first + i] == 0 || geometry->strides[first + i] == 0) return false;
    geometry->pads_begin[first + i] = pads[i];
    geometry->pads_end[first + i] = pads[spatial_rank + i];
  }
  return true;
}

// Every unknown size gets a name of its own: an unnamed one makes the runtime warn at every run, and equal names would
// say that the sizes are equal.
std::string NewSymbol() {
  static std::atomic<uint64_t> counter{0};
  return "sparseconv_unknown_" + std::to_string(counter.fetch_add(1, std::memory_order_relaxed));
}

bool KeepsSize(const ConvGeometry& geometry, size_t axis) {
  const int64_t extent = (geometry.kernel_shape[axis] - 1) * geometry.dilations[axis] + 1;
  if (geometry.strides[axis] != 1) return false;
  return geometry.auto_pad != AutoPad::kNotSet || geometry.pads_begin[axis] + geometry.pads_end[axis] == extent - 1;
}

struct OutputDims {
  size_t rank = 0;
  std::array<int64_t, ort::kMaxRank> sizes{};
  std::array<std::string, ort::kMaxRank> symbols;
};

// Replaces the sizes of the spatial axes, each by itself, since some may be known and others not.
void InferSpatial(const ConvGeometry& geometry, OutputDims* dims) {
  for (size_t i = 0; i < geometry.spatial_rank; ++i) {
    const size_t axis = kSpatialAxes - geometry.spatial_rank + i, dim = i + 2;
    const int64_t size = std::exchange(dims->sizes[dim], kUnknown);
    if (size >= 0) {
      Axes sizes = geometry.kernel_shape;
      for (size_t a = 0; a < kSpatialAxes; ++a)
        sizes[a] = (sizes[a] - 1) * geometry.dilations[a] + 1;  // never too small
      sizes[axis] = size;
      try {
        dims->sizes[dim] = Resolve(geometry, sizes).out_dims[axis];
      } catch (const Error&) {
        // The kernel reports it when it runs.
      }
    } else if (!KeepsSize(geometry, axis)) {
      dims->symbols[dim].clear();
    }
  }
}

void ForgetSpatial(OutputDims* dims) {
  for (size_t dim = 2; dim < dims->rank; ++dim) {
    dims->sizes[dim] = kUnknown;
    dims->symbols[dim].clear();
  }
}

void SetOutput(const ort::OrtApi* api, ort::OrtShapeInferContext* context, int element_type, OutputDims* out) {
  ort::OrtTypeShape* info = nullptr;
  if (!ort::Succeeded(api, ort::CreateTypeShape::Call(api, &info))) return;
  std::array<const char*, ort::kMaxRank> symbols{};
  for (size_t i = 0; i < out->rank; ++i) {
    if (out->sizes[i] == kUnknown && out->symbols[i].empty()) out->symbols[i] = NewSymbol();
    symbols[i] = out->symbols[i].c_str();
  }
  if (ort::Succeeded(api, ort::SetTensorElementType::Call(api, info, element_type)) &&
      ort::Succeeded(api, ort::SetDimensions::Call(api, info, out->sizes.data(), out->rank)) &&
      ort::Succeeded(api, ort::SetSymbolicDimensions::Call(api, info, symbols.data(), out->rank))) {
    ort::Succeeded(api, ort::ShapeInferSetOutputTypeShape::Call(api, context, 0, info));
  }
  ort::ReleaseTypeShape::Call(api, info);
}

void Infer(const ort::OrtApi* api, ort::OrtShapeInferContext* context, bool has_pool) {
  ort::OrtTypeShape* x = nullptr;  // borrowed
  int element_type = ort::kUndefined;
  ort::Shape in;
  std::array<const char*, ort::kMaxRank> in_symbols{};
  if (!ort::Succeeded(api, ort::ShapeInferGetInputTypeShape::Call(api, context, 0, &x)) || x == nullptr ||
      !ort::Succeeded(api, ort::GetTensorElementType::Call(api, x, &element_type)) ||
      !ort::Succeeded(api, ort::GetDimensionsCount::Call(api, x, &in.rank)) || in.rank < 3 || in.rank > ort::kMaxRank ||
      !ort::Succeeded(api, ort::GetDimensions::Call(api, x, in.dims.data(), in.rank)) ||
      !ort::Succeeded(api, ort::GetSymbolicDimensions::Call(api, x, in_symbols.data(), in.rank))) {
    return;
  }
  OutputDims out;
  out.rank = in.rank;
  out.sizes.fill(kUnknown);
  for (size_t dim = 0; dim < in.rank; ++dim) {
    if (dim == 1) continue;
    out.sizes[dim] = in.dims[dim] >= 0 ? in.dims[dim] : kUnknown;
    if (in_symbols[dim] != nullptr) out.symbols[dim] = in_symbols[dim];
  }
  int64_t out_channels = 0;
  if (ReadInt(api, context, "out_channels", &out_channels) && out_channels > 0) out.sizes[1] = out_channels;
  ConvGeometry geometry, pool;
  const bool is_known =
      ReadGeometry(api, context, in.rank - 2, &geometry) && (!has_pool || ReadPool(api, context, in.rank - 2, &pool));
  if (is_known) {
    InferSpatial(geometry, &out);
    if (has_pool) InferSpatial(pool, &out);
  } else {
    ForgetSpatial(&out);
  }
  SetOutput(api, context, element_type, &out);
}

}  // namespace

void InferOutputShape(const ort::OrtApi* api, ort::OrtShapeInferContext* context, bool has_pool) noexcept {
  try {
    Infer(api, context, has_pool);
  } catch (...) {
    // Shape inference is an aid: without it the runtime learns the shape from the kernel.
  }
}

}  // namespace sparseconv
