#include "attributes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "checked.h"
#include "half.h"

namespace sparseconv {
namespace {

// Sizes, strides, pads and dilations above this are refused, so that their sums and products of two stay in 64 bits.
constexpr int64_t kMaxGeometryValue = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxInputSize = int64_t{1} << 61;
constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();

const char* TypeName(int element_type) {
  switch (element_type) {
    case ort::kFloat:
      return "float";
    case ort::kFloat16:
      return "float16";
    case ort::kUint16:
      return "uint16";
    case ort::kUint32:
      return "uint32";
    case ort::kInt32:
      return "int32";
    case ort::kInt64:
      return "int64";
    default:
      return "another type";
  }
}

void CheckType(const ort::NodeInfo::Tensor& tensor, const char* name, int wanted, int or_wanted) {
  const int found = tensor.element_type();
  if (found == wanted || found == or_wanted) return;
  Fail("attribute '", name, "' must be a tensor of ", TypeName(wanted),
       or_wanted == wanted ? "" : Concat(" or ", TypeName(or_wanted)), ", found ", TypeName(found), " (element type ",
       found, ")");
}

void CheckSize(const ort::NodeInfo::Tensor& tensor, const char* name, int64_t wanted) {
  if (static_cast<int64_t>(tensor.size()) == wanted) return;
  Fail("attribute '", name, "' must have ", wanted, " elements, found ", tensor.size());
}

int64_t ReadScalar(const ort::NodeInfo& node, const char* name) {
  const auto tensor = node.GetTensor(name);
  CheckType(tensor, name, ort::kInt64, ort::kInt64);
  CheckSize(tensor, name, 1);
  return *tensor.data<int64_t>();
}

std::vector<int64_t> ReadInts(const ort::NodeInfo& node, const char* name, size_t wanted, int64_t min) {
  std::vector<int64_t> values = node.Ints(name);
  if (values.size() != wanted) Fail("attribute '", name, "' must have ", wanted, " entries, found ", values.size());
  for (const int64_t value : values) {
    if (value >= min && value <= kMaxGeometryValue) continue;
    Fail("entries of attribute '", name, "' must lie in ", min, "..", kMaxGeometryValue, ", found ", value);
  }
  return values;
}

Axes ToAxes(const int64_t* values, size_t count, int64_t fill) {
  Axes axes;
  axes.fill(fill);
  std::copy_n(values, count, axes.end() - static_cast<ptrdiff_t>(count));
  return axes;
}

// A message must be one short line of valid UTF-8, whatever the file holds.
std::string Printable(std::string text) {
  if (text.size() > 40) text = text.substr(0, 40) + "...";
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

AutoPad ReadAutoPad(const ort::NodeInfo& node) {
  const std::string text = node.String("auto_pad");
  if (text == "NOTSET") return AutoPad::kNotSet;
  if (text == "SAME_UPPER") return AutoPad::kSameUpper;
  if (text == "SAME_LOWER") return AutoPad::kSameLower;
  Fail("attribute 'auto_pad' must be NOTSET, SAME_UPPER or SAME_LOWER, found '", Printable(text), "'");
}

// The dense weight's shape, (K, C / group, D1..Dn). The number of its columns fits 32 bits, its size 64.
std::vector<int64_t> ReadWeightShape(const ort::NodeInfo& node) {
  const auto tensor = node.GetTensor("weight_shape");
  CheckType(tensor, "weight_shape", ort::kInt64, ort::kInt64);
  if (tensor.rank() != 1 || tensor.size() < 3 || tensor.size() > ort::kMaxRank) {
    Fail("attribute 'weight_shape' must be a vector of 3 to 5 sizes (1 to 3 spatial axes), found ", tensor.size());
  }
  std::vector<int64_t> shape(tensor.data<int64_t>(), tensor.data<int64_t>() + tensor.size());
  int64_t columns = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 1 || shape[i] > kMaxGeometryValue) {
      Fail("sizes in attribute 'weight_shape' must lie in 1..", kMaxGeometryValue, ", found ", shape[i]);
    }
    if (i > 0) columns = CheckedMultiply(columns, shape[i], "the product of the sizes in 'weight_shape'");
  }
  const int64_t elements = CheckedMultiply(columns, shape[0], "the product of the sizes in 'weight_shape'");
  if (elements > kMaxGeometryValue) {
    Fail("attribute 'weight_shape' asks for ", elements, " elements, more than ", kMaxGeometryValue);
  }
  return shape;
}

ConvGeometry ReadGeometry(const ort::NodeInfo& node, const std::vector<int64_t>& weight_shape) {
  ConvGeometry geometry;
  const size_t rank = weight_shape.size() - 2;
  geometry.spatial_rank = rank;
  const auto kernel_shape = ReadInts(node, "kernel_shape", rank, 1);
  if (!std::equal(kernel_shape.begin(), kernel_shape.end(), weight_shape.begin() + 2)) {
    Fail("attribute 'kernel_shape' contradicts the spatial sizes in 'weight_shape'");
  }
  geometry.kernel_shape = ToAxes(kernel_shape.data(), rank, 1);
  geometry.strides = ToAxes(ReadInts(node, "strides", rank, 1).data(), rank, 1);
  geometry.dilations = ToAxes(ReadInts(node, "dilations", rank, 1).data(), rank, 1);
  geometry.auto_pad = ReadAutoPad(node);
  if (geometry.auto_pad == AutoPad::kNotSet) {
    const auto pads = ReadInts(node, "pads", 2 * rank, 0);
    geometry.pads_begin = ToAxes(pads.data(), rank, 0);
    geometry.pads_end = ToAxes(pads.data() + rank, rank, 0);
  } else {
    if (node.HasInts("pads")) Fail("attribute 'pads' must be absent beside a SAME auto_pad");
    // As in ONNX Runtime's Conv.
    if (geometry.dilations != Axes{1, 1, 1}) Fail("attribute 'dilations' must be 1 beside a SAME auto_pad");
  }

  geometry.out_channels = node.Int("out_channels");
  if (geometry.out_channels != weight_shape[0]) {
    Fail("attribute 'out_channels' must be weight_shape[0] = ", weight_shape[0], ", found ", geometry.out_channels);
  }
  geometry.group = node.Int("group");
  if (geometry.group < 1 || geometry.out_channels % geometry.group != 0) {
    Fail("attribute 'group' must divide the ", geometry.out_channels, " output channels, found ", geometry.group);
  }
  geometry.in_channels = CheckedMultiply(weight_shape[1], geometry.group, "the number of input channels");
  return geometry;
}

PoolGeometry ReadPool(const ort::NodeInfo& node, size_t rank) {
  PoolGeometry pool;
  const auto kernel_shape = ReadInts(node, "pool_kernel_shape", rank, 1);
  const auto pads = ReadInts(node, "pool_pads", 2 * rank, 0);
  for (size_t i = 0; i < 2 * rank; ++i) {
    if (pads[i] < kernel_shape[i % rank]) continue;
    Fail("entries of attribute 'pool_pads' must be less than those of 'pool_kernel_shape', found ", pads[i], " beside ",
         kernel_shape[i % rank]);
  }
  pool.kernel_shape = ToAxes(kernel_shape.data(), rank, 1);
  pool.strides = ToAxes(ReadInts(node, "pool_strides", rank, 1).data(), rank, 1);
  pool.pads_begin = ToAxes(pads.data(), rank, 0);
  pool.pads_end = ToAxes(pads.data() + rank, rank, 0);
  return pool;
}

// Channels at which the inputs of a SparseConvConcat begin in X, and the number of all.
std::vector<int64_t> ReadSources(const ort::NodeInfo& node, size_t count, const ConvGeometry& geometry) {
  const bool is_depthwise = geometry.group == geometry.in_channels && geometry.group == geometry.out_channels;
  if (geometry.group != 1 && !is_depthwise) {
    Fail("attribute 'group' must be 1, or the channels of both X and Y, where inputs are concatenated, found ",
         geometry.group);
  }
  std::vector<int64_t> begins{0};
  for (const int64_t channels : ReadInts(node, "input_channels", count, 1)) begins.push_back(begins.back() + channels);
  if (begins.back() != geometry.in_channels) {
    Fail("attribute 'input_channels' must add up to group * weight_shape[1] = ", geometry.in_channels, ", found ",
         begins.back());
  }
  return begins;
}

bool UsesAlpha(ActivationCode code) {
  return code == ActivationCode::kClip || code == ActivationCode::kLeakyRelu || code == ActivationCode::kHardSigmoid;
}

Activation ReadActivation(const ort::NodeInfo& node) {
  const int64_t code = ReadScalar(node, "activation");
  if (code < 0 || code > static_cast<int64_t>(ActivationCode::kSilu)) {
    Fail("attribute 'activation' must be a code from 0 to 7, found ", code);
  }
  const Activation activation{static_cast<ActivationCode>(code), node.Float("alpha"), node.Float("beta")};
  const bool uses_alpha = UsesAlpha(activation.code);
  const bool uses_beta = uses_alpha && activation.code != ActivationCode::kLeakyRelu;
  if ((uses_alpha && std::isnan(activation.alpha)) || (uses_beta && std::isnan(activation.beta))) {
    Fail("attributes 'alpha' and 'beta' must be numbers for activation ", code, ", found NaN");
  }
  return activation;
}

// ONNX Runtime may run a float16 node whose neighbours have no float16 kernel in float, with Casts around it. So the
// float kernel takes nodes of both types.
void CheckElementType(const ort::NodeInfo& node, int kernel_type) {
  const int64_t found = node.Int("element_type");
  if (found == kernel_type || (kernel_type == ort::kFloat && found == ort::kFloat16)) return;
  Fail("attribute 'element_type' must be ", kernel_type, " (", TypeName(kernel_type), "), the type of X, found ",
       found);
}

// The stored arrays, before their order is undone. Rows are in stored order.
struct StoredRows {
  std::vector<int64_t> begin;  // first entry of each stored row, and the end of the last
  std::vector<int64_t> order;  // output channel of each stored row
};

StoredRows ReadRows(const ort::NodeInfo& node, int64_t out_channels, int64_t num_columns) {
  const int64_t height = ReadScalar(node, "weight_slice_height");
  if (height < 1 || height > out_channels) {
    Fail("attribute 'weight_slice_height' must lie in 1..", out_channels, ", found ", height);
  }
  // The sizes of these tensors bound K before anything of that size is allocated.
  const auto order = node.GetTensor("weight_row_order");
  CheckType(order, "weight_row_order", ort::kInt32, ort::kInt32);
  CheckSize(order, "weight_row_order", out_channels);
  const auto nnz = node.GetTensor("weight_nnz_per_row");
  CheckType(nnz, "weight_nnz_per_row", ort::kInt32, ort::kInt32);
  CheckSize(nnz, "weight_nnz_per_row", CeilDivide(out_channels, height));

  StoredRows rows;
  rows.begin.reserve(static_cast<size_t>(out_channels) + 1);
  rows.begin.push_back(0);
  std::vector<bool> seen(static_cast<size_t>(out_channels), false);
  for (int64_t p = 0; p < out_channels; ++p) {
    const int64_t channel = order.data<int32_t>()[p];
    if (channel < 0 || channel >= out_channels || seen[static_cast<size_t>(channel)]) {
      Fail("attribute 'weight_row_order' must be a permutation of 0..", out_channels - 1, ", found ", channel,
           " at row ", p);
    }
    seen[static_cast<size_t>(channel)] = true;
    rows.order.push_back(channel);
    const int64_t count = nnz.data<int32_t>()[p / height];
    if (count < 1 || count > num_columns) {
      Fail("entries of attribute 'weight_nnz_per_row' must lie in 1..", num_columns, ", found ", count, " for slice ",
           p / height);
    }
    rows.begin.push_back(rows.begin.back() + count);
    if (rows.begin.back() > kMaxEntries) Fail("attribute 'weight_nnz_per_row' asks for more than 2^31 - 1 entries");
  }
  return rows;
}

std::vector<float> ReadValues(const ort::NodeInfo& node, int64_t num_entries) {
  const auto tensor = node.GetTensor("weight_values");
  CheckType(tensor, "weight_values", ort::kFloat, ort::kFloat16);
  CheckSize(tensor, "weight_values", num_entries);
  if (tensor.element_type() == ort::kFloat) {
    return std::vector<float>(tensor.data<float>(), tensor.data<float>() + num_entries);
  }
  std::vector<float> values(static_cast<size_t>(num_entries));
  std::transform(tensor.data<uint16_t>(), tensor.data<uint16_t>() + num_entries, values.begin(), HalfToFloat);
  return values;
}

std::vector<uint32_t> ReadColumns(const ort::NodeInfo& node, int64_t num_entries) {
  const auto tensor = node.GetTensor("weight_columns");
  CheckType(tensor, "weight_columns", ort::kUint16, ort::kUint32);
  CheckSize(tensor, "weight_columns", num_entries);
  if (tensor.element_type() == ort::kUint16) {
    return std::vector<uint32_t>(tensor.data<uint16_t>(), tensor.data<uint16_t>() + num_entries);
  }
  return std::vector<uint32_t>(tensor.data<uint32_t>(), tensor.data<uint32_t>() + num_entries);
}

void CheckColumns(const StoredRows& rows, const std::vector<uint32_t>& columns, int64_t num_columns) {
  for (size_t p = 0; p < rows.order.size(); ++p) {
    for (int64_t e = rows.begin[p]; e < rows.begin[p + 1]; ++e) {
      const uint32_t column = columns[static_cast<size_t>(e)];
      if (column >= num_columns) {
        Fail("entries of attribute 'weight_columns' must be below ", num_columns, ", found ", column, " at entry ", e);
      }
      if (e > rows.begin[p] && column <= columns[static_cast<size_t>(e) - 1]) {
        Fail("attribute 'weight_columns' must increase strictly within a row, it does not at entry ", e);
      }
    }
  }
}

bool IsPositiveZero(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits == 0;
}

SparseWeight ReadWeight(const ort::NodeInfo& node, int64_t out_channels, int64_t num_columns) {
  const StoredRows rows = ReadRows(node, out_channels, num_columns);
  const std::vector<float> values = ReadValues(node, rows.begin.back());
  const std::vector<uint32_t> columns = ReadColumns(node, rows.begin.back());
  CheckColumns(rows, columns, num_columns);

  std::vector<size_t> stored_row(rows.order.size());
  for (size_t p = 0; p < rows.order.size(); ++p) stored_row[static_cast<size_t>(rows.order[p])] = p;
  SparseWeight weight;
  weight.row_begin.push_back(0);
  for (const size_t p : stored_row) {
    for (auto e = static_cast<size_t>(rows.begin[p]); e < static_cast<size_t>(rows.begin[p + 1]); ++e) {
      if (IsPositiveZero(values[e])) continue;
      weight.values.push_back(values[e]);
      weight.columns.push_back(columns[e]);
    }
    weight.row_begin.push_back(static_cast<int64_t>(weight.values.size()));
  }
  weight.values.shrink_to_fit();
  weight.columns.shrink_to_fit();
  return weight;
}

}  // namespace

std::vector<float> DepthwiseWeight(const SparseWeight& weight, const ConvGeometry& geometry) {
  const auto taps = static_cast<size_t>(geometry.taps());
  std::vector<float> values(static_cast<size_t>(geometry.out_channels) * taps);
  for (size_t row = 0; row + 1 < weight.row_begin.size(); ++row) {
    for (auto entry = static_cast<size_t>(weight.row_begin[row]);
         entry < static_cast<size_t>(weight.row_begin[row + 1]); ++entry) {
      values[row * taps + weight.columns[entry]] = weight.values[entry];
    }
  }
  return values;
}

SparseConvAttributes ReadAttributes(const ort::NodeInfo& node, const OpForm& form) {
  CheckElementType(node, form.element_type);
  const std::vector<int64_t> weight_shape = ReadWeightShape(node);
  SparseConvAttributes attributes;
  attributes.geometry = ReadGeometry(node, weight_shape);
  attributes.activation = ReadActivation(node);
  const ConvGeometry& geometry = attributes.geometry;
  if (form.has_pool) attributes.pool = ReadPool(node, geometry.spatial_rank);
  if (form.num_sources > 0) attributes.source_begins = ReadSources(node, form.num_sources, geometry);
  attributes.weight = ReadWeight(node, geometry.out_channels, geometry.group_in_channels() * geometry.taps());
  return attributes;
}

ResolvedGeometry Resolve(const ConvGeometry& geometry, const Axes& in_dims) {
  ResolvedGeometry resolved;
  resolved.in_dims = in_dims;
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    if (in_dims[i] > kMaxInputSize) Fail("an axis of X of size ", in_dims[i], " is too long");
    const int64_t stride = geometry.strides[i];
    const int64_t extent = (geometry.kernel_shape[i] - 1) * geometry.dilations[i] + 1;
    int64_t pads = geometry.pads_begin[i] + geometry.pads_end[i];
    resolved.pads_begin[i] = geometry.pads_begin[i];
    if (geometry.auto_pad != AutoPad::kNotSet) {
      pads = std::max<int64_t>(0, (CeilDivide(in_dims[i], stride) - 1) * stride + extent - in_dims[i]);
      resolved.pads_begin[i] = geometry.auto_pad == AutoPad::kSameLower ? (pads + 1) / 2 : pads / 2;
    }
    if (in_dims[i] + pads < extent) {
      const size_t axis = i + geometry.spatial_rank - kSpatialAxes + 2;
      Fail("axis ", axis, " of X is too small: size ", in_dims[i], " with ", pads,
           " of padding is less than the kernel's extent of ", extent);
    }
    resolved.out_dims[i] = (in_dims[i] + pads - extent) / stride + 1;
  }
  return resolved;
}

Axes PooledDims(const PoolGeometry& pool, const Axes& dims, size_t spatial_rank) {
  Axes pooled;
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    const int64_t pads = pool.pads_begin[i] + pool.pads_end[i];
    pooled[i] = (dims[i] + pads - pool.kernel_shape[i]) / pool.strides[i] + 1;
    if (pooled[i] < 1) {
      Fail("axis ", i + spatial_rank - kSpatialAxes + 2, " of the convolution's output is too small: size ", dims[i],
           " with ", pads, " of padding is less than the pool's window of ", pool.kernel_shape[i]);
    }
  }
  return pooled;
}

}  // namespace sparseconv
