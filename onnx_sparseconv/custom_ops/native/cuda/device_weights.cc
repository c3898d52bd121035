#include "device_weights.h"

namespace sparseconv::cuda {
namespace {

constexpr int kClusterArchitecture = 90;

size_t RoundedUp(size_t bytes) { return (bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes; }

template <class Value>
size_t BytesOf(const std::vector<Value>& values) {
  return values.size() * sizeof(Value);
}

}  // namespace

TensorProduct::TensorProduct(const Context& context, const DeviceFacts& device, const TensorWeight& weight,
                             const std::vector<float>& scales)
    : begins_offset(RoundedUp(weight.steps.size())),
      scales_offset(begins_offset + RoundedUp(BytesOf(weight.step_begins))),
      memory(context, scales_offset + RoundedUp(BytesOf(scales))),
      kernels(scales.empty(), weight.form.tile_rows, device.architecture,
              device.max_shared_bytes - kReservedSharedBytes) {
  facts.form = weight.form;
  facts.num_steps = weight.step_begins.empty() ? 0 : weight.step_begins.back();
  facts.max_steps = weight.max_steps;
  facts.element_bytes = scales.empty() ? sizeof(uint16_t) : sizeof(float);
  memory.Upload(0, weight.steps.data(), weight.steps.size());
  memory.Upload(begins_offset, weight.step_begins.data(), BytesOf(weight.step_begins));
  if (!scales.empty()) memory.Upload(scales_offset, scales.data(), BytesOf(scales));
  SynchronizeUploads();  // the host's arrays go now
}

WgmmaProduct::WgmmaProduct(const Context& context, const DeviceFacts& device, const WgmmaWeight& weight,
                           const WgmmaFacts& about, const std::vector<float>& scales)
    : facts(about),
      chunk_begins(RoundedUp(weight.chunks.size())),
      block_begins(chunk_begins + RoundedUp(BytesOf(weight.chunk_begins))),
      channels(block_begins + RoundedUp(BytesOf(weight.block_begins))),
      taps(channels + RoundedUp(BytesOf(weight.channels))),
      scales_offset(taps + RoundedUp(BytesOf(weight.taps))),
      memory(context, scales_offset + RoundedUp(BytesOf(scales))),
      kernels(scales.empty(), device.max_shared_bytes - kReservedSharedBytes),
      clusters(scales.empty(), device.max_shared_bytes - kReservedSharedBytes),
      pointwise(scales.empty(), device.max_shared_bytes - kReservedSharedBytes) {
  memory.Upload(0, weight.chunks.data(), weight.chunks.size());
  memory.Upload(chunk_begins, weight.chunk_begins.data(), BytesOf(weight.chunk_begins));
  memory.Upload(block_begins, weight.block_begins.data(), BytesOf(weight.block_begins));
  memory.Upload(channels, weight.channels.data(), BytesOf(weight.channels));
  memory.Upload(taps, weight.taps.data(), BytesOf(weight.taps));
  if (!scales.empty()) memory.Upload(scales_offset, scales.data(), BytesOf(scales));
  SynchronizeUploads();  // the host's arrays go now
}

DepthwiseProduct::DepthwiseProduct(const Context& context, const std::vector<float>& weight)
    : memory(context, BytesOf(weight)) {
  memory.Upload(0, weight.data(), BytesOf(weight));
  SynchronizeUploads();  // the host's array goes now
}

WindowProduct::WindowProduct(const Context& context, const DeviceFacts& device, const WindowWeight& weight,
                             bool is_half)
    : form(weight.form),
      channels(RoundedUp(weight.tiles.size())),
      memory(context, channels + RoundedUp(BytesOf(weight.channels))),
      plain(is_half, OctetForm::kPlain, device.max_shared_bytes - kReservedSharedBytes),
      words(is_half, OctetForm::kWords, device.max_shared_bytes - kReservedSharedBytes),
      strided(is_half, OctetForm::kStrides, device.max_shared_bytes - kReservedSharedBytes),
      space_to_depth(is_half) {
  if (is_half) ring.emplace(device.max_shared_bytes - kReservedSharedBytes);
  memory.Upload(0, weight.tiles.data(), weight.tiles.size());
  memory.Upload(channels, weight.channels.data(), BytesOf(weight.channels));
  SynchronizeUploads();  // the host's arrays go now
}

FlatProduct::FlatProduct(const Context& context, const DeviceFacts& device, const FlatWeight& weight, bool is_half)
    : form(weight.form),
      chunk_begins(RoundedUp(weight.chunks.size())),
      tile_begins(chunk_begins + RoundedUp(BytesOf(weight.chunk_begins))),
      octets(tile_begins + RoundedUp(BytesOf(weight.tile_begins))),
      channels(octets + RoundedUp(BytesOf(weight.octets))),
      places(channels + RoundedUp(BytesOf(weight.channels))),
      memory(context, places + RoundedUp(BytesOf(weight.places))),
      kernels(is_half, weight.form.products, device.max_shared_bytes - kReservedSharedBytes) {
  memory.Upload(0, weight.chunks.data(), weight.chunks.size());
  memory.Upload(chunk_begins, weight.chunk_begins.data(), BytesOf(weight.chunk_begins));
  memory.Upload(tile_begins, weight.tile_begins.data(), BytesOf(weight.tile_begins));
  memory.Upload(octets, weight.octets.data(), BytesOf(weight.octets));
  memory.Upload(channels, weight.channels.data(), BytesOf(weight.channels));
  memory.Upload(places, weight.places.data(), BytesOf(weight.places));
  SynchronizeUploads();  // the host's arrays go now
}

GemmProduct::GemmProduct(const Context& context, const DeviceFacts& device, const std::vector<uint8_t>& weight,
                         bool is_half)
    : memory(context, weight.size()),
      boxes(is_half, true, false, device.max_shared_bytes - kReservedSharedBytes),
      planes(is_half, false, false, device.max_shared_bytes - kReservedSharedBytes),
      ready_boxes(is_half, true, true, device.max_shared_bytes - kReservedSharedBytes),
      ready_planes(is_half, false, true, device.max_shared_bytes - kReservedSharedBytes),
      pack(is_half) {
  memory.Upload(0, weight.data(), weight.size());
  SynchronizeUploads();  // the host's array goes now
}

GeneratedImage::GeneratedImage(const Image& image, const DeviceFacts& device)
    : plan(image.plan), architecture(image.architecture), min_batch(image.min_batch), library(image.code) {
  const Driver& driver = GetDriver();
  function = library.Function("sparseconv_generated");
  driver.function_attribute(&facts.static_shared_bytes, kStaticSharedBytes, function);
  const int64_t shared = SharedBytes(plan);
  // Else no launch is ever planned.
  if (shared + facts.static_shared_bytes > device.max_shared_bytes) return;
  driver.set_function_attribute(function, kMaxDynamicSharedBytes, static_cast<int>(shared));
  driver.resident_blocks(&facts.blocks_a_multiprocessor, function, plan.threads + plan.staging_threads,
                         static_cast<size_t>(shared));
  if (device.architecture < kClusterArchitecture || facts.blocks_a_multiprocessor < 1) return;
  LaunchShape pair;
  pair.grid[0] = pair.cluster = 2;
  pair.threads = static_cast<unsigned>(plan.threads + plan.staging_threads);
  pair.dynamic_shared_bytes = static_cast<unsigned>(shared);
  facts.pairs = ActiveClusters(function, pair);
}

}  // namespace sparseconv::cuda
