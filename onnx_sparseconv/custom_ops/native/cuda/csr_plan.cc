#include "csr_plan.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "../checked.h"

namespace sparseconv::cuda {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxTaps = int64_t{1} << 29;
constexpr int64_t kMaxGridYZ = 65535;
constexpr int64_t kWarp = 32;
constexpr int64_t kThreads = 128;
// Blocks for each multiprocessor that are worth more than a larger sub-batch.
constexpr int64_t kWantedBlocks = 4;
constexpr size_t kAlignment = 256;

size_t AlignedBytes(size_t count) { return (count * sizeof(uint32_t) + kAlignment - 1) / kAlignment * kAlignment; }

void CopyAxes(const Axes& from, int (&to)[kSpatialAxes]) {
  std::transform(from.begin(), from.end(), to, [](int64_t value) { return static_cast<int>(value); });
}

void CheckElements(const char* what, int64_t channels, const Axes& dims) {
  int64_t count = channels;
  for (const int64_t dim : dims) count = CheckedMultiply(count, dim, what);
  if (count > kMaxInt) {
    Fail(what, " has ", count, " elements for each image, more than the CUDA kernel can address (", kMaxInt, ")");
  }
}

}  // namespace

void CheckCsrGeometry(const ConvGeometry& geometry) {
  if (geometry.in_channels > kMaxInt) {
    Fail(geometry.in_channels, " input channels are more than the CUDA kernel can count (", kMaxInt, ")");
  }
  if (geometry.taps() > kMaxTaps) {
    Fail("a kernel of ", geometry.taps(), " taps is more than the CUDA kernel can address (", kMaxTaps, ")");
  }
}

void CheckCsrSizes(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch) {
  if (batch > kMaxInt) Fail("a batch of ", batch, " is more than the CUDA kernel can count (", kMaxInt, ")");
  CheckElements("X", geometry.in_channels, sizes.in_dims);
  CheckElements("Y", geometry.out_channels, sizes.out_dims);
  for (size_t i = 0; i < kSpatialAxes; ++i) {
    const int64_t extent = (geometry.kernel_shape[i] - 1) * geometry.dilations[i] + 1;
    const int64_t last = CheckedMultiply(sizes.out_dims[i] - 1, geometry.strides[i], "a coordinate of X");
    if (sizes.in_dims[i] > kMaxInt || last > kMaxInt - extent) {
      Fail("X and its padding are longer than the CUDA kernel can address (", kMaxInt, ")");
    }
  }
}

CsrLaunch ChooseCsrLaunch(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch,
                          const DeviceFacts& device, int sub_batch) {
  const int64_t plane = sizes.out_dims[0] * sizes.out_dims[1] * sizes.out_dims[2];
  const int64_t threads = std::min(kThreads, CeilDivide(plane, kWarp) * kWarp);
  const int64_t blocks = CeilDivide(plane, threads) * geometry.out_channels;
  CsrLaunch launch;
  launch.sub_batch = sub_batch;
  if (sub_batch == 0) {
    // An entry that was read serves a whole sub-batch, as long as that leaves enough blocks to fill the GPU.
    launch.sub_batch = 8;
    while (launch.sub_batch > 1 && (launch.sub_batch > batch || blocks * CeilDivide(batch, launch.sub_batch) <
                                                                    kWantedBlocks * device.num_multiprocessors)) {
      launch.sub_batch /= 2;
    }
  }
  launch.shape.threads = static_cast<unsigned>(threads);
  launch.shape.grid[0] = static_cast<unsigned>(CeilDivide(plane, threads));
  launch.shape.grid[1] = static_cast<unsigned>(std::min(geometry.out_channels, kMaxGridYZ));
  launch.shape.grid[2] = static_cast<unsigned>(std::min(CeilDivide(batch, launch.sub_batch), kMaxGridYZ));
  return launch;
}

double CsrCycles(const ConvGeometry& geometry, int64_t num_entries, int64_t outputs, const DeviceFacts& device) {
  // Fitted to float16 3x3 layers of 64 to 512 channels, one to four images, on an H200: a call, an entry of a row, for
  // which each thread waits, and entries that a multiprocessor computes.
  constexpr double kCallCycles = 8250.0, kEntryCycles = 69.0, kEntriesACycle = 7.9;
  const auto entries = static_cast<double>(num_entries);
  return kCallCycles + kEntryCycles * entries / static_cast<double>(geometry.out_channels) +
         entries * static_cast<double>(outputs) / (kEntriesACycle * device.num_multiprocessors);
}

std::string ToString(const CsrLaunch& launch) {
  const LaunchShape& shape = launch.shape;
  return Concat("csr sub_batch=", launch.sub_batch, " grid=", shape.grid[0], "x", shape.grid[1], "x", shape.grid[2],
                " threads=", shape.threads);
}

CsrWeight::CsrWeight(const Context& context, const SparseWeight& weight)
    : columns_offset_(AlignedBytes(weight.values.size())),
      row_begin_offset_(columns_offset_ + AlignedBytes(weight.columns.size())),
      memory_(context, row_begin_offset_ + AlignedBytes(weight.row_begin.size())) {
  const std::vector<uint32_t> row_begin(weight.row_begin.begin(), weight.row_begin.end());
  memory_.Upload(0, weight.values.data(), weight.values.size() * sizeof(float));
  memory_.Upload(columns_offset_, weight.columns.data(), weight.columns.size() * sizeof(uint32_t));
  memory_.Upload(row_begin_offset_, row_begin.data(), row_begin.size() * sizeof(uint32_t));
  // The host's arrays go when this ends, and the stream of the first run waits for nothing.
  SynchronizeUploads();
}

void CsrWeight::Fill(CsrParams* params) const {
  params->values = static_cast<const float*>(memory_.at(0));
  params->columns = static_cast<const unsigned*>(memory_.at(columns_offset_));
  params->row_begin = static_cast<const unsigned*>(memory_.at(row_begin_offset_));
}

CsrParams MakeCsrParams(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch) {
  CsrParams params{};
  params.batch = static_cast<int>(batch);
  params.in_channels = static_cast<int>(geometry.in_channels);
  params.out_channels = static_cast<int>(geometry.out_channels);
  params.group_in_channels = static_cast<int>(geometry.group_in_channels());
  params.group_out_channels = static_cast<int>(geometry.group_out_channels());
  CopyAxes(sizes.in_dims, params.in_dims);
  CopyAxes(sizes.out_dims, params.out_dims);
  CopyAxes(sizes.pads_begin, params.pads_begin);
  CopyAxes(geometry.kernel_shape, params.kernel_shape);
  CopyAxes(geometry.strides, params.strides);
  CopyAxes(geometry.dilations, params.dilations);
  return params;
}

}  // namespace sparseconv::cuda
