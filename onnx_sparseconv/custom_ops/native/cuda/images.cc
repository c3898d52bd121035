#include "images.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../checked.h"

namespace sparseconv::cuda {
namespace {

constexpr unsigned kMaxImages = 64;
constexpr unsigned kMaxBatch = 0x7FFFFFFF;
constexpr size_t kImageAlignment = 16;
constexpr unsigned kMinArchitecture = 10, kMaxArchitecture = 999;
constexpr int kMaxThreads = 1024, kWarp = 32, kMaxStages = 64;
constexpr int kVectorBytes = 16;

template <typename... Parts>
[[noreturn]] void FailContainer(const Parts&... parts) {
  Fail("attribute 'cuda_images' ", parts..., "; convert the model again with onnx-sparseconv");
}

// The file may place anything anywhere.
template <typename T>
T Read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

uint32_t Crc32(const uint8_t* data, size_t size) {
  static const auto table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < made.size(); ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0u);
      made[i] = value;
    }
    return made;
  }();
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; ++i) crc = crc >> 8 ^ table[(crc ^ data[i]) & 0xFF];
  return ~crc;
}

// A 64-bit little-endian ELF: of its header, the program and section tables and what they point to.
bool IsWholeElf(const uint8_t* image, size_t size) {
  constexpr std::array<uint8_t, 6> kStart{0x7F, 'E', 'L', 'F', 2, 1};
  constexpr size_t kHeaderBytes = 64, kProgramBytes = 56, kSectionBytes = 64;
  constexpr uint32_t kSectionWithoutBytes = 8;
  if (size < kHeaderBytes || !std::equal(kStart.begin(), kStart.end(), image)) return false;
  const auto is_inside = [&](uint64_t offset, uint64_t bytes) { return bytes <= size && offset <= size - bytes; };

  const auto programs = Read<uint64_t>(image + 32), sections = Read<uint64_t>(image + 40);
  const auto program_bytes = Read<uint16_t>(image + 54), num_programs = Read<uint16_t>(image + 56);
  const auto section_bytes = Read<uint16_t>(image + 58), num_sections = Read<uint16_t>(image + 60);
  // Where there are more than these fields can count, the first section says how many.
  constexpr uint16_t kMorePrograms = 0xFFFF;
  if (num_programs == kMorePrograms || (num_sections == 0 && sections != 0)) return false;
  if (num_programs > 0 && (program_bytes != kProgramBytes || !is_inside(programs, num_programs * kProgramBytes))) {
    return false;
  }
  if (num_sections > 0 && (section_bytes != kSectionBytes || !is_inside(sections, num_sections * kSectionBytes))) {
    return false;
  }
  for (size_t i = 0; i < num_programs; ++i) {
    const uint8_t* program = image + programs + i * kProgramBytes;
    if (!is_inside(Read<uint64_t>(program + 8), Read<uint64_t>(program + 32))) return false;
  }
  for (size_t i = 0; i < num_sections; ++i) {
    const uint8_t* section = image + sections + i * kSectionBytes;
    if (Read<uint32_t>(section + 4) == kSectionWithoutBytes) continue;
    if (!is_inside(Read<uint64_t>(section + 24), Read<uint64_t>(section + 32))) return false;
  }
  return true;
}

// A fat binary, in which the code may be compressed: a header, then entries, each with a header of its own.
bool IsWholeFatBinary(const uint8_t* image, size_t size) {
  constexpr uint32_t kMagic = 0xBA55ED50;
  constexpr size_t kHeaderBytes = 16;  // and at least as many of each entry
  if (size <= kHeaderBytes || Read<uint32_t>(image) != kMagic || Read<uint16_t>(image + 6) != kHeaderBytes ||
      Read<uint64_t>(image + 8) != size - kHeaderBytes) {
    return false;
  }
  for (size_t at = kHeaderBytes; at < size;) {
    if (size - at < kHeaderBytes) return false;
    const auto header = Read<uint32_t>(image + at + 4);
    const auto code = Read<uint64_t>(image + at + 8);
    if (header < kHeaderBytes || header > size - at || code > size - at - header) return false;
    at += header + static_cast<size_t>(code);
  }
  return true;
}

// The driver is given an image's address and not its size, so what the image says of its own size must be true.
bool IsWholeBinary(const uint8_t* image, size_t size) {
  return IsWholeElf(image, size) || IsWholeFatBinary(image, size);
}

bool IsPrintable(const char* text, size_t capacity) {
  const char* end = std::find(text, text + capacity, '\0');
  return end != text + capacity && std::all_of(text, end, [](char c) { return c >= ' ' && c <= '~'; });
}

// Checks that a plan belongs to the node and could be one; each check names what it found.
class PlanCheck {
 public:
  PlanCheck(const GeneratedPlan& plan, unsigned architecture) : plan_(plan), architecture_(architecture) {}

  void Run(const SparseConvAttributes& attributes) const {
    const ConvGeometry& geometry = attributes.geometry;
    if (plan_.element_type != ort::kFloat && plan_.element_type != ort::kFloat16) {
      FailImage("element_type", plan_.element_type);
    }
    Equal("in_channels", plan_.in_channels, geometry.in_channels);
    Equal("out_channels", plan_.out_channels, geometry.out_channels);
    Equal("group", plan_.group, geometry.group);
    Equal("activation", plan_.activation, static_cast<int64_t>(attributes.activation.code));
    InRange("is_pointwise", plan_.is_pointwise, 0, 1);
    if (plan_.is_pointwise != 0) {
      const Axes ones{1, 1, 1}, zeros{0, 0, 0};
      if (geometry.kernel_shape != ones || geometry.strides != ones || geometry.pads_begin != zeros ||
          geometry.pads_end != zeros) {
        FailImage("is_pointwise", plan_.is_pointwise);
      }
    }
    if (geometry.kernel_shape[0] != 1) FailImage("the number of taps along the depth", 1);
    Axis("kernel_shape", plan_.kernel_shape, geometry.kernel_shape);
    Axis("strides", plan_.strides, geometry.strides);
    // The step between taps means nothing where there is one.
    for (int i = 0; i < 2; ++i) {
      if (plan_.kernel_shape[i] > 1) Equal("dilations", plan_.dilations[i], geometry.dilations[AxisOf(i)]);
    }
    for (const int dilation : plan_.dilations) InRange("dilations", dilation, 1, kMaxInt);
    for (const int pad : plan_.pads_begin) InRange("pads_begin", pad, 0, kMaxInt);
    if (geometry.auto_pad == AutoPad::kNotSet) Axis("pads_begin", plan_.pads_begin, geometry.pads_begin);
    Shape();
    Sources(attributes.source_begins);
  }

 private:
  static constexpr int kMaxInt = 0x7FFFFFFF;

  static size_t AxisOf(int i) { return kSpatialAxes - 2 + static_cast<size_t>(i); }

  [[noreturn]] void FailImage(const char* field, int64_t found) const {
    FailContainer("holds an image for sm_", architecture_, " that is not for this node: ", field, " is ", found);
  }
  void Equal(const char* field, int64_t found, int64_t wanted) const {
    if (found != wanted) FailImage(field, found);
  }
  void InRange(const char* field, int64_t found, int64_t min, int64_t max) const {
    if (found < min || found > max) FailImage(field, found);
  }
  void Axis(const char* field, const int (&found)[2], const Axes& wanted) const {
    for (int i = 0; i < 2; ++i) Equal(field, found[i], wanted[AxisOf(i)]);
  }

  // How the work is cut.
  void Shape() const {
    const bool is_half = plan_.element_type == ort::kFloat16;
    InRange("tile_channels", plan_.tile_channels, 1, plan_.out_channels);
    Equal("num_tiles", plan_.num_tiles, CeilDivide(plan_.out_channels, plan_.tile_channels));
    InRange("tile_in_channels", plan_.tile_in_channels, 1, plan_.in_channels);
    InRange("chunk_channels", plan_.chunk_channels, 1, plan_.tile_in_channels);
    Equal("num_chunks", plan_.num_chunks, CeilDivide(plan_.tile_in_channels, plan_.chunk_channels));
    Equal("columns_per_slot", plan_.columns_per_slot, is_half ? 2 : 1);
    InRange("threads", plan_.threads, kWarp, kMaxThreads);
    Equal("threads", plan_.threads, plan_.threads / kWarp * kWarp);
    InRange("min_passes", plan_.min_passes, 1, plan_.num_chunks);
    InRange("staging_threads", plan_.staging_threads, 0, std::min(kWarp, kMaxThreads - plan_.threads));
    Equal("staging_threads", plan_.staging_threads, plan_.staging_threads / kWarp * kWarp);
    InRange("num_stages", plan_.num_stages, 1, kMaxStages);
    const int element_bytes = is_half ? 2 : 4;
    InRange("image_pitch", plan_.image_pitch, 0, kMaxInt / kMaxStages);
    Equal("image_pitch", plan_.image_pitch, plan_.image_pitch / kVectorBytes * kVectorBytes);
    if (plan_.image_pitch == 0) {
      const int most = kMaxInt / plan_.num_stages / plan_.chunk_channels;
      InRange("channel_pitch", plan_.channel_pitch, 2 * kVectorBytes, most);
      Equal("channel_pitch", plan_.channel_pitch, plan_.channel_pitch / kVectorBytes * kVectorBytes);
      InRange("plane_residue", plan_.plane_residue, 0, kVectorBytes / element_bytes - 1);
      Equal("stage_images", plan_.stage_images, 0);
    } else {
      InRange("channel_pitch", plan_.channel_pitch, element_bytes, plan_.image_pitch / plan_.chunk_channels);
      Equal("channel_pitch", plan_.channel_pitch, plan_.channel_pitch / element_bytes * element_bytes);
      Equal("plane_residue", plan_.plane_residue, 0);
      InRange("stage_images", plan_.stage_images, 1, kMaxInt / kMaxStages / plan_.image_pitch - 1);
    }
    InRange("code_bytes", plan_.code_bytes, 0, kMaxInt);
  }

  // What the code reads: X, or each of the node's inputs.
  void Sources(const std::vector<int64_t>& begins) const {
    const bool reads_sources = ReadsSources(plan_);
    for (size_t i = 0; i < kMaxSources; ++i) {
      const int64_t wanted = reads_sources && i + 1 < begins.size() ? begins[i + 1] - begins[i] : 0;
      Equal("source_channels", plan_.source_channels[i], wanted);
    }
    if (!reads_sources) return;
    Equal("is_pointwise", plan_.is_pointwise, 1);
    Equal("plane_residue", plan_.plane_residue, 0);
    if (plan_.image_pitch > 0)
      Equal("channel_pitch", plan_.channel_pitch, plan_.channel_pitch / kVectorBytes * kVectorBytes);
  }

  const GeneratedPlan& plan_;
  const unsigned architecture_;
};

Image ParseImage(const uint8_t* container, size_t size, unsigned index, size_t begin,
                 const SparseConvAttributes& attributes) {
  const auto header = Read<ImageHeader>(container + sizeof(ContainerHeader) + index * sizeof(ImageHeader));
  if (header.architecture < kMinArchitecture || header.architecture > kMaxArchitecture) {
    FailContainer("names a GPU architecture ", header.architecture, " that there is not");
  }
  const std::string which = Concat("holds an image for sm_", header.architecture);
  if (header.min_batch > kMaxBatch || !IsPrintable(header.compiler, sizeof(header.compiler))) {
    FailContainer(which, " with a damaged header");
  }
  if (header.offset % kImageAlignment != 0 || header.offset < begin || header.offset > size || header.size == 0 ||
      header.size > size - header.offset) {
    FailContainer(which, " at byte ", header.offset, ", ", header.size, " bytes long, beyond its place in ", size);
  }
  Image image;
  image.architecture = header.architecture;
  image.min_driver = header.min_driver;
  image.min_batch = header.min_batch;
  image.plan = header.plan;
  image.code = container + header.offset;
  image.size = static_cast<size_t>(header.size);
  if (Crc32(image.code, image.size) != header.checksum) FailContainer(which, " whose checksum is wrong");
  if (!IsWholeBinary(image.code, image.size)) FailContainer(which, " that is no whole GPU binary");
  PlanCheck(image.plan, image.architecture).Run(attributes);
  return image;
}

}  // namespace

std::vector<Image> ParseImages(const uint8_t* container, size_t size, const SparseConvAttributes& attributes) {
  if (size == 0) return {};
  if (size < sizeof(ContainerHeader)) FailContainer("is cut off: it has ", size, " bytes");
  const auto header = Read<ContainerHeader>(container);
  if (header.magic != kContainerMagic) FailContainer("is no container of GPU images");
  if (header.version != kContainerVersion || header.header_bytes != sizeof(ImageHeader)) {
    FailContainer("is of version ", header.version, " with headers of ", header.header_bytes,
                  " bytes, this library reads version ", kContainerVersion, " with ", sizeof(ImageHeader));
  }
  if (header.num_images == 0 || header.num_images > kMaxImages ||
      header.num_images > (size - sizeof(header)) / sizeof(ImageHeader)) {
    FailContainer("cannot hold ", header.num_images, " images in ", size, " bytes");
  }
  std::vector<Image> images;
  size_t begin = sizeof(header) + header.num_images * sizeof(ImageHeader);
  for (unsigned i = 0; i < header.num_images; ++i) {
    images.push_back(ParseImage(container, size, i, begin, attributes));
    begin = static_cast<size_t>(images.back().code - container) + images.back().size;
    for (unsigned j = 0; j < i; ++j) {
      if (images[j].architecture == images[i].architecture) {
        FailContainer("holds two images for sm_", images[i].architecture);
      }
    }
  }
  return images;
}

const Image* ChooseImage(const std::vector<Image>& images, int element_type, int architecture, int driver_version,
                         std::string* reason) {
  const Image* best = nullptr;
  std::string refusals;
  for (const Image& image : images) {
    const auto image_architecture = static_cast<int>(image.architecture);
    const char* refusal = nullptr;
    if (image_architecture / 10 != architecture / 10 || image_architecture > architecture) {
      refusal = "is for another GPU";
    } else if (image.plan.element_type != element_type) {
      refusal = "is for the other element type";
    } else if (image.min_driver > static_cast<unsigned>(driver_version)) {
      refusal = "needs a newer driver";
    }
    if (refusal != nullptr) {
      refusals += Concat(refusals.empty() ? "" : ", ", "that for sm_", image_architecture, " ", refusal);
    } else if (best == nullptr || image.architecture > best->architecture) {
      best = &image;
    }
  }
  if (best == nullptr) {
    *reason = Concat("none of its images fits this GPU (sm_", architecture, ") and driver (CUDA ",
                     driver_version / 1000, ".", driver_version % 1000 / 10, "): ", refusals);
  }
  return best;
}

}  // namespace sparseconv::cuda
