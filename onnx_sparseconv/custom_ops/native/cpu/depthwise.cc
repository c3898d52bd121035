#include "depthwise.h"

#include "plan.h"

namespace sparseconv::cpu {
namespace {

bool HasWindow(const ConvGeometry& conv) {
  const int64_t kernel = conv.kernel_shape[1], stride = conv.strides[1];
  return conv.kernel_shape == Axes{1, kernel, kernel} && (kernel == 3 || kernel == 5 || kernel == 7) &&
         conv.strides[2] == stride && (stride == 1 || (stride == 2 && conv.dilations[2] == 1));
}

}  // namespace

bool HasDepthwiseForm(const ConvGeometry& conv) {
  return conv.group > 1 && conv.group_in_channels() == 1 && (conv.taps() == 1 || HasWindow(conv));
}

bool IsDepthwise(const ConvGeometry& conv, const ResolvedGeometry& sizes) {
  if (!HasDepthwiseForm(conv)) return false;
  const bool has_one_plane = sizes.in_dims[0] == 1 && sizes.out_dims[0] == 1 && sizes.pads_begin[0] == 0;
  return IsPointwise(conv, sizes) || (HasWindow(conv) && has_one_plane);
}

DepthwiseJob MakeDepthwiseJob(const ConvGeometry& conv, const ResolvedGeometry& sizes) {
  DepthwiseJob job{};
  const Axes &in = sizes.in_dims, &out = sizes.out_dims;
  const bool is_pointwise = IsPointwise(conv, sizes);
  job.kernel = static_cast<int>(conv.kernel_shape[2]);
  job.stride = static_cast<int>(conv.strides[2]);
  job.row_dilation = conv.dilations[1];
  job.column_dilation = conv.dilations[2];
  job.pad_rows = sizes.pads_begin[1];
  job.pad_columns = sizes.pads_begin[2];
  job.in_rows = in[1], job.in_columns = in[2];
  job.out_rows = out[1], job.out_columns = out[2];
  if (is_pointwise) {
    job.in_rows = job.out_rows = 1;
    job.in_columns = job.out_columns = in[0] * in[1] * in[2];
  }
  job.channels_per_input = conv.group_out_channels();
  return job;
}

}  // namespace sparseconv::cpu
