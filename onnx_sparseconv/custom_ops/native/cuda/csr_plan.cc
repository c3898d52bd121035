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
// Images are counted up to a multiple of those that a block has at a time, and up to a whole grid of them.
constexpr int64_t kMaxBatch = kMaxInt - kMaxGridYZ - 7;
constexpr int64_t kWarp = 32;
constexpr int64_t kThreads = 128;
// As many entries as a block should have: what it does before and behind them takes as long.
constexpr int64_t kWantedEntries = 64;
// Threads for each multiprocessor that are worth more than that, or than a larger sub-batch: measured on an H200.
constexpr int64_t kWantedThreads = 768;
// Entries of a row that are worth a sub-batch of 8: with more of them, 8 images share too little of the cache.
constexpr int64_t kShortRow = 16;
constexpr size_t kAlignment = 256;
// Of the kernel for one pixel: threads of a block, a row for each warp, and entries that it begins with.
constexpr int64_t kPixelThreads = 128;
constexpr int64_t kPixelRowEntries = 128;

// Whether that kernel runs a call. With more images, clusters are faster.
bool IsPixel(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch) {
  constexpr Axes kOne{1, 1, 1};
  return batch == 1 && geometry.taps() == 1 && geometry.group == 1 && sizes.in_dims == kOne && sizes.out_dims == kOne &&
         sizes.pads_begin == Axes{};
}

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
  if (batch > kMaxBatch) Fail("a batch of ", batch, " is more than the CUDA kernel can count (", kMaxBatch, ")");
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
                          int64_t num_entries, const DeviceFacts& device, int sub_batch) {
  const int64_t plane = sizes.out_dims[0] * sizes.out_dims[1] * sizes.out_dims[2], rows = geometry.out_channels;
  const int64_t threads = std::min(kThreads, CeilDivide(plane, kWarp) * kWarp), columns = CeilDivide(plane, threads);
  const int64_t row_entries = CeilDivide(num_entries, rows);
  const auto fills = [&](int64_t images, int64_t block_rows) {
    const auto blocks = static_cast<double>(columns) * static_cast<double>(CeilDivide(rows, block_rows)) *
                        static_cast<double>(CeilDivide(batch, images));
    return blocks * static_cast<double>(threads) >= static_cast<double>(kWantedThreads * device.num_multiprocessors);
  };
  CsrLaunch launch;
  launch.sub_batch = sub_batch;
  if (sub_batch == 0 && IsPixel(geometry, sizes, batch)) {
    launch.is_pixel = true;
    launch.shape.threads = static_cast<unsigned>(kPixelThreads);
    launch.shape.grid[0] = static_cast<unsigned>(CeilDivide(rows, kPixelThreads / kWarp));
    launch.sub_batch = 1;
    return launch;
  }
  if (sub_batch == 0) {
    // An entry that was read serves a whole sub-batch, as long as that leaves enough threads to fill the GPU.
    launch.sub_batch = row_entries < kShortRow ? 8 : 4;
    while (launch.sub_batch > 1 && (launch.sub_batch > batch || !fills(launch.sub_batch, 1))) {
      launch.sub_batch /= 2;
    }
  }
  launch.block_rows =
      static_cast<int>(std::clamp<int64_t>(kWantedEntries / std::max<int64_t>(row_entries, 1), 1, rows));
  while (launch.block_rows > 1 && !fills(launch.sub_batch, launch.block_rows)) launch.block_rows /= 2;
  launch.shape.threads = static_cast<unsigned>(threads);
  launch.shape.grid[0] = static_cast<unsigned>(columns);
  launch.shape.grid[1] = static_cast<unsigned>(std::min(CeilDivide(rows, int64_t{launch.block_rows}), kMaxGridYZ));
  launch.shape.grid[2] = static_cast<unsigned>(std::min(CeilDivide(batch, launch.sub_batch), kMaxGridYZ));
  return launch;
}

double CsrCycles(const ConvGeometry& geometry, const ResolvedGeometry& sizes, int64_t batch, int64_t num_entries,
                 const DeviceFacts& device) {
  // Fitted to 3x3 and 1x1 layers of ResNets and VGG-16 in both types, one to four images, on an H200: a call; an entry
  // of a row, for which each thread waits, and more so where it looks at the border; entries, likewise, and outputs
  // that a multiprocessor computes. Entries of windows: by the CSR kernel's times of one image in papers*.json, and
  // where several share what is read, by layers of all kinds on an H100.
  constexpr double kCallCycles = 4400.0, kWindowEntryCycles = 58.0, kEntryCycles = 22.0;
  constexpr double kEntriesACycle = 9.3, kOutputsACycle = 1.3;
  constexpr int64_t kSharingImages = 4;
  const double window_entries_a_cycle = batch < kSharingImages ? 6.0 : 7.7;
  const auto entries = static_cast<double>(num_entries), rows = static_cast<double>(geometry.out_channels);
  const auto outputs = static_cast<double>(batch * sizes.out_dims[0] * sizes.out_dims[1] * sizes.out_dims[2]);
  if (IsPixel(geometry, sizes, batch)) {
    // Not fitted: about what the few kernels take that were seen in networks.
    constexpr double kPixelCallCycles = 2500.0, kRoundCycles = 500.0, kRowCycles = 60.0;
    return kLaunchCycles + kPixelCallCycles + kRoundCycles * entries / rows / kPixelRowEntries +
           kRowCycles * rows / device.num_multiprocessors;
  }
  const bool is_window = geometry.taps() > 1;
  const double waits = entries / rows * (is_window ? kWindowEntryCycles : kEntryCycles);
  const double of_output = entries / (is_window ? window_entries_a_cycle : kEntriesACycle) + rows / kOutputsACycle;
  return kLaunchCycles + kCallCycles + waits + outputs * of_output / device.num_multiprocessors;
}

std::string ToString(const CsrLaunch& launch) {
  const LaunchShape& shape = launch.shape;
  if (launch.is_pixel) return Concat("pixel grid=", shape.grid[0], " threads=", shape.threads);
  return Concat("csr sub_batch=", launch.sub_batch, " rows=", launch.block_rows, " grid=", shape.grid[0], "x",
                shape.grid[1], "x", shape.grid[2], " threads=", shape.threads);
}

CsrWeight::CsrWeight(const Context& context, const SparseWeight& weight)
    : num_entries_(static_cast<int64_t>(weight.values.size())),
      columns_offset_(AlignedBytes(weight.values.size())),
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
