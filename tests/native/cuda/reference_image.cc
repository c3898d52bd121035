// A GPU image for tests of how images are launched: what params.h says of `sparseconv_generated`, written down a second
// time, slowly and for any plan and weight. The test puts both into `reference_data`, in the compiled file.
//
// It stages into memory of its own, as the launch asks, and reads the input only from there. A launch that would read
// or write out of place, or leaves an output out, is an error.

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "half.h"
#include "params.h"

using namespace sparseconv::cuda;
using sparseconv::FloatToHalf;
using sparseconv::HalfToFloat;

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int kMaxWeights = 1 << 14;
static_assert(kGeneratedZeroBytes == 144, "reference.py has the number too");

struct ReferenceData {
  char magic[16];
  GeneratedPlan plan;
  float weights[kMaxWeights];  // dense, [K, C / group, R, S]
};

// Exported, so that the compiler cannot believe its values.
extern "C" {
__attribute__((visibility("default"))) ReferenceData reference_data = {"reference-image", {}, {}};
}

namespace {

// No std::string: one that is destroyed with its thread would keep this image loaded until then.
thread_local char error[256];

__attribute__((format(printf, 2, 3))) void Require(bool holds, const char* format, ...) {
  if (holds) return;
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  throw std::runtime_error(text);
}

class Launch {
 public:
  Launch(const GeneratedPlan& plan, const GeneratedParams& params, int block_threads, unsigned shared_bytes)
      : plan_(plan),
        p_(params),
        is_half_(plan.element_type == 10),
        size_(is_half_ ? 2 : 4),
        vector_(16 / size_),
        columns_(plan.columns_per_slot),
        row_slots_((p_.out_w + columns_ - 1) / columns_),
        plane_slots_(p_.out_h * row_slots_),
        num_values_(static_cast<long long>(p_.num_slots / plane_slots_) * plan.out_channels * p_.out_h * p_.out_w),
        is_packed_(plan.image_pitch > 0),
        zero_bytes_(!is_packed_              ? kGeneratedZeroBytes
                    : plan.is_pointwise != 0 ? 0
                                             : Round16(plan.chunk_channels * plan.channel_pitch) + kZeroBankBytes),
        stage_(is_packed_ ? static_cast<size_t>(zero_bytes_ + plan.stage_images * plan.image_pitch)
                          : static_cast<size_t>(plan.chunk_channels) * plan.channel_pitch),
        written_(static_cast<size_t>(num_values_ * p_.num_splits)) {
    const int threads = block_threads - plan.staging_threads;
    Require(threads >= 32 && threads % 32 == 0 && threads <= plan.threads, "%d threads", block_threads);
    Require(p_.group_slots >= 1 && p_.group_slots <= threads, "%d slots for %d threads", p_.group_slots, threads);
    Require(shared_bytes == stage_.size() * plan.num_stages, "%u bytes of shared memory", shared_bytes);
    CheckGroups();
    CheckChunks();
    CheckStaging();
    CheckOutputs();
  }

  void Run(unsigned num_blocks) {
    const unsigned units = static_cast<unsigned>(plan_.num_tiles * p_.num_splits);
    Require(num_blocks == units * static_cast<unsigned>(p_.num_lanes), "%u blocks", num_blocks);
    for (unsigned block = 0; block < num_blocks; ++block) {
      const unsigned cluster = block / static_cast<unsigned>(p_.cluster_blocks);
      const unsigned rank = block % static_cast<unsigned>(p_.cluster_blocks);
      const int tile = static_cast<int>(cluster % units) % plan_.num_tiles;
      const int split = static_cast<int>(cluster % units) / plan_.num_tiles;
      for (int group = static_cast<int>(cluster / units * p_.cluster_blocks + rank); group < p_.num_groups;
           group += p_.num_lanes) {
        RunGroup(tile, split, group);
      }
    }
    for (const int times : written_) Require(times == 1, "an output was written %d times", times);
  }

 private:
  // What a group reads of one image. Slots are counted within the image.
  struct Part {
    int image, first_slot, end_slot;
    int first_row, num_rows, first_column, num_columns;
    int offset;  // bytes, behind the zeros of a channel
  };

  // Of a slot's column.
  struct Place {
    const Part* part;
    int row, column;
  };

  void CheckGroups() const {
    Require(p_.num_slots > 0 && p_.num_slots % plane_slots_ == 0, "%d slots", p_.num_slots);
    Require(p_.num_groups == (p_.num_slots - 1) / p_.group_slots + 1, "%d groups", p_.num_groups);
    Require(p_.num_lanes >= 1 && p_.num_lanes <= p_.num_groups, "%d lanes", p_.num_lanes);
    Require(p_.cluster_blocks == 1 || (p_.cluster_blocks == 2 && p_.num_lanes % 2 == 0), "clusters of %d blocks",
            p_.cluster_blocks);
    CheckDivisor(p_.by_row_slots, row_slots_);
    CheckDivisor(p_.by_plane_slots, plane_slots_);
  }

  // Of every number that could be divided, those around multiples are the ones that go wrong.
  void CheckDivisor(const Divisor& by, int divisor) const {
    const auto check = [&](long long n) {
      if (n < 0 || n >= p_.num_slots + 2048LL) return;
      const unsigned long long product = static_cast<unsigned long long>(2 * n) * by.multiplier;
      const long long quotient = static_cast<long long>(product >> 32) >> by.shift;
      Require(quotient == n / divisor, "%lld / %d would be %lld", n, divisor, quotient);
    };
    Require(by.shift >= 0 && by.shift < 32, "a shift by %d", by.shift);
    const long long last = (p_.num_slots + 2048LL) / divisor, step = std::max(1LL, last / 1000);
    for (long long quotient = 0; quotient <= last + step; quotient += step) {
      for (int i = -1; i <= 1; ++i) check(std::min(quotient, last) * divisor + i);
    }
  }

  void CheckChunks() const {
    Require(p_.chunk_begin >= 0 && p_.chunk_begin < p_.chunk_end && p_.chunk_end <= plan_.num_chunks, "chunks %d to %d",
            p_.chunk_begin, p_.chunk_end);
    Require(p_.num_splits >= 1 && p_.num_splits <= p_.chunk_end - p_.chunk_begin, "%d splits", p_.num_splits);
  }

  void CheckStaging() const {
    Require(p_.image_pitch % 16 == 0, "image_pitch is %d", p_.image_pitch);
    if (is_packed_) {
      Require(p_.in_h * p_.in_w * size_ == plan_.channel_pitch, "planes of %d x %d", p_.in_h, p_.in_w);
      Require(p_.in_w % columns_ == 0, "rows of %d", p_.in_w);
      Require(p_.image_pitch == plan_.image_pitch, "image_pitch is %d", p_.image_pitch);
    }
    if (p_.staging == kElementStaging) {
      Require(p_.row_pitch == (p_.in_w + columns_ - 1) / columns_ * columns_, "row_pitch is %d", p_.row_pitch);
      return;
    }
    Require(p_.staging == kBulkStaging || p_.staging == kVectorStaging, "staging is %d", p_.staging);
    Require(reinterpret_cast<size_t>(p_.x) % 16 == 0, "X is not aligned");
    Require(p_.row_pitch == p_.in_w && p_.in_w % columns_ == 0, "row_pitch is %d", p_.row_pitch);
  }

  void CheckOutputs() const {
    Require(p_.out != nullptr, "nowhere to write");
    Require(p_.is_final == 0 || p_.is_final == 1, "is_final is %d", p_.is_final);
    if (p_.num_splits > 1) {
      Require(p_.addend == nullptr && p_.bias == nullptr && p_.is_final == 0, "splits of sums that are not partial");
      Require(p_.split_stride >= num_values_, "splits overlap: %lld", p_.split_stride);
    }
    if (is_half_ && p_.is_paired != 0) {
      const auto is_even = [](const void* pointer) { return reinterpret_cast<size_t>(pointer) % 4 == 0; };
      Require(p_.out_w % 2 == 0 && (p_.num_splits == 1 || p_.split_stride % 2 == 0), "pairs in rows of %d", p_.out_w);
      Require(is_even(p_.out) && is_even(p_.addend), "pairs at odd halves");
    }
  }

  std::vector<Part> PartsOf(int index) const {
    const int first = index * p_.group_slots, end = std::min(first + p_.group_slots, p_.num_slots);
    std::vector<Part> parts;
    for (int slot = first; slot < end; ++slot) {
      const int image = slot / plane_slots_;
      if (parts.empty() || parts.back().image != image) {
        parts.push_back({image, slot % plane_slots_, 0, 0, 0, 0, 0, 0});
      }
      parts.back().end_slot = slot % plane_slots_ + 1;
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      if (is_packed_) {
        parts[i].num_rows = p_.in_h;
        parts[i].num_columns = p_.in_w;
        parts[i].offset = static_cast<int>(i) * p_.image_pitch;
        continue;
      }
      Locate(parts[i]);
      if (i > 0) parts[i].offset = FirstBytes(parts[0]) + static_cast<int>(i - 1) * p_.image_pitch;
      CheckPart(parts[i], i > 0);
    }
    return parts;
  }

  // Whole rows; but where taps and slots stay in one row, only the columns that the taps read, from an even one for
  // halves.
  void Locate(Part& part) const {
    const int first = part.first_slot / row_slots_, last = (part.end_slot - 1) / row_slots_;
    const int reach = (plan_.kernel_shape[0] - 1) * plan_.dilations[0] + 1;
    part.first_row = std::clamp(first * plan_.strides[0] - plan_.pads_begin[0], 0, p_.in_h);
    const int end_row = std::min(last * plan_.strides[0] - plan_.pads_begin[0] + reach, p_.in_h);
    part.num_rows = std::max(end_row - part.first_row, 0);
    part.num_columns = p_.in_w;
    if (reach > 1 || first != last) return;
    const int step = plan_.strides[1] * columns_;
    const int reach_w = (plan_.kernel_shape[1] - 1) * plan_.dilations[1] + 1;
    part.first_column = std::clamp(part.first_slot % row_slots_ * step - plan_.pads_begin[1], 0, p_.in_w);
    part.first_column -= part.first_column % columns_;
    const int last_column = (part.end_slot - 1) % row_slots_ * step + (columns_ - 1) * plan_.strides[1];
    const int end_column = std::min(last_column - plan_.pads_begin[1] + reach_w, p_.in_w);
    part.num_columns = std::max(end_column - part.first_column, 0);
  }

  // Elements from one staged row of a part to the next.
  int PitchOf(const Part& part) const {
    return part.num_columns < p_.in_w ? (part.num_columns + columns_ - 1) / columns_ * columns_ : p_.row_pitch;
  }

  static int Round16(int bytes) { return (bytes + 15) / 16 * 16; }

  // Room of a group's first image, where another one follows: whatever the skew of a channel.
  int FirstBytes(const Part& part) const {
    const int skew = plan_.plane_residue == 0 ? 0 : vector_ - 1;
    return Round16((Misalignment(part) + skew + part.num_rows * PitchOf(part)) * size_);
  }

  void CheckPart(const Part& part, bool follows) const {
    Require(part.num_rows <= 1 || PitchOf(part) == p_.row_pitch, "rows of %d elements", PitchOf(part));
    if (!follows) return;
    Require(part.first_slot == 0 && part.first_row == 0 && part.first_column == 0, "an image from slot %d on",
            part.first_slot);
    if (part.num_rows * part.num_columns == 0) return;
    const int skew = plan_.plane_residue == 0 ? 0 : vector_ - 1;
    const int bytes = (skew + part.num_rows * PitchOf(part)) * size_;
    Require(bytes <= p_.image_pitch, "%d bytes in %d", bytes, p_.image_pitch);
  }

  int Misalignment(const Part& part) const {
    return is_packed_ || p_.staging == kElementStaging ? 0 : (part.first_row * p_.in_w + part.first_column) % vector_;
  }
  int Skew(int channel) const { return channel * plan_.plane_residue % vector_; }
  int GroupOut() const { return plan_.out_channels / plan_.group; }
  int GroupIn() const { return plan_.in_channels / plan_.group; }
  int FirstChannel(int tile) const { return tile * plan_.tile_channels / GroupOut() * GroupIn(); }

  std::vector<Place> PlacesOf(const std::vector<Part>& parts) const {
    std::vector<Place> places;
    for (const Part& part : parts) {
      for (int slot = part.first_slot; slot < part.end_slot; ++slot) {
        for (int i = 0; i < columns_; ++i) {
          const int column = slot % row_slots_ * columns_ + i;
          if (column < p_.out_w) places.push_back({&part, slot / row_slots_, column});
        }
      }
    }
    return places;
  }

  void RunGroup(int tile, int split, int index) {
    const std::vector<Part> parts = PartsOf(index);
    const std::vector<Place> places = PlacesOf(parts);
    const int num_chunks = p_.chunk_end - p_.chunk_begin;
    const int begin = p_.chunk_begin + num_chunks * split / p_.num_splits;
    const int end = p_.chunk_begin + num_chunks * (split + 1) / p_.num_splits;
    const int first_out = tile * plan_.tile_channels;
    const int num_out = std::min(plan_.tile_channels, plan_.out_channels - first_out);
    std::vector<float> sums(places.size() * num_out);
    for (int chunk = begin; chunk < end; ++chunk) {
      Stage(parts, FirstChannel(tile), chunk);
      float* sum = sums.data();
      for (const Place& place : places) {
        for (int k = 0; k < num_out; ++k) *sum++ += Sum(place, tile, chunk, first_out + k);
      }
    }
    const float* sum = sums.data();
    for (const Place& place : places) {
      for (int k = 0; k < num_out; ++k) Store(place, split, first_out + k, *sum++);
    }
  }

  void Stage(const std::vector<Part>& parts, int first_channel, int chunk) {
    std::memset(stage_.data(), 0xFF, stage_.size());  // NaN in both types
    const int channels = std::min(plan_.chunk_channels, plan_.tile_in_channels - chunk * plan_.chunk_channels);
    if (is_packed_) {
      Require(parts.size() <= static_cast<size_t>(plan_.stage_images), "%zu images", parts.size());
      for (const Part& part : parts) StagePlanes(part, first_channel + chunk * plan_.chunk_channels, channels);
      return;
    }
    for (int c = 0; c < channels; ++c) {
      const int channel = first_channel + chunk * plan_.chunk_channels + c;
      Require(channel < plan_.in_channels, "channel %d is read", channel);
      int free = 0;  // behind the part before
      for (const Part& part : parts) {
        if (part.num_rows * part.num_columns == 0) continue;
        Require(part.offset >= free && part.offset % 16 == 0, "a part at byte %d, behind %d", part.offset, free);
        free = part.offset + StagePart(part, c, channel);
        Require(kGeneratedZeroBytes + free <= plan_.channel_pitch, "byte %d of a channel", kGeneratedZeroBytes + free);
      }
    }
  }

  void StagePlanes(const Part& part, int first_channel, int channels) {
    Require(first_channel + channels <= plan_.in_channels, "channel %d is read", first_channel + channels);
    const long long plane = static_cast<long long>(part.image) * plan_.in_channels + first_channel;
    const long long begin = plane * plan_.channel_pitch;
    const int bytes = channels * plan_.channel_pitch;
    Require(p_.staging == kElementStaging || (begin % 16 == 0 && bytes % 16 == 0), "a copy from %lld, %d bytes", begin,
            bytes);
    const size_t place = static_cast<size_t>(zero_bytes_ + part.offset);
    Require(bytes <= p_.image_pitch && place + static_cast<size_t>(bytes) <= stage_.size(), "%d bytes of planes",
            bytes);
    std::memcpy(&stage_[place], static_cast<const char*>(p_.x) + begin, static_cast<size_t>(bytes));
  }

  // Returns the bytes from the part's offset on.
  int StagePart(const Part& part, int c, int channel) {
    const long long plane = static_cast<long long>(part.image) * plan_.in_channels + channel;
    const long long first = plane * p_.in_h * p_.in_w + part.first_row * p_.in_w + part.first_column;
    const long long total = static_cast<long long>(p_.num_slots / plane_slots_) * plan_.in_channels * p_.in_h * p_.in_w;
    const auto* x = static_cast<const char*>(p_.x);
    const size_t place = static_cast<size_t>(c) * plan_.channel_pitch + kGeneratedZeroBytes + part.offset;
    if (p_.staging != kElementStaging) {
      const int lead = Misalignment(part) + Skew(c);
      const int bytes = Round16((lead + part.num_rows * part.num_columns) * size_);
      const long long begin = (first - lead) * size_;
      Require(begin % 16 == 0 && begin >= 0 && begin + bytes <= total * size_, "a copy from %lld, %d bytes", begin,
              bytes);
      Require(place + bytes <= stage_.size(), "a copy to %zu, %d bytes", place, bytes);
      std::memcpy(&stage_[place], x + begin, bytes);
      return bytes;
    }
    const int pitch = PitchOf(part);
    const int bytes = (Skew(c) + part.num_rows * pitch) * size_;
    Require(place + bytes <= stage_.size(), "copies to %zu, %d bytes", place, bytes);
    for (int row = 0; row < part.num_rows; ++row) {
      char* to = &stage_[place + static_cast<size_t>((Skew(c) + row * pitch) * size_)];
      std::memset(to, 0, static_cast<size_t>(pitch * size_));
      std::memcpy(to, x + (first + row * p_.in_w) * size_, static_cast<size_t>(part.num_columns * size_));
    }
    return bytes;
  }

  float Sum(const Place& place, int tile, int chunk, int out_channel) const {
    const int in_group = out_channel / GroupOut() * GroupIn();
    float sum = 0;
    for (int c = 0; c < plan_.chunk_channels; ++c) {
      const int channel = FirstChannel(tile) + chunk * plan_.chunk_channels + c;
      if (chunk * plan_.chunk_channels + c >= plan_.tile_in_channels) break;
      if (channel < in_group || channel >= in_group + GroupIn()) continue;
      for (int r = 0; r < plan_.kernel_shape[0]; ++r) {
        for (int s = 0; s < plan_.kernel_shape[1]; ++s) {
          const int row = place.row * plan_.strides[0] - plan_.pads_begin[0] + r * plan_.dilations[0];
          const int w = place.column * plan_.strides[1] - plan_.pads_begin[1] + s * plan_.dilations[1];
          if (row < 0 || row >= p_.in_h || w < 0 || w >= p_.in_w) continue;
          const int weight =
              ((out_channel * GroupIn() + channel - in_group) * plan_.kernel_shape[0] + r) * plan_.kernel_shape[1] + s;
          if (const float value = reference_data.weights[weight]; value != 0) {
            sum += value * Staged(*place.part, c, row, w);
          }
        }
      }
    }
    return sum;
  }

  float Staged(const Part& part, int c, int row, int column) const {
    Require(row >= part.first_row && row < part.first_row + part.num_rows, "row %d is not staged", row);
    Require(column >= part.first_column && column < part.first_column + part.num_columns, "column %d is not staged",
            column);
    const int at = c * plan_.channel_pitch + Skew(c) * size_ + zero_bytes_ + part.offset +
                   (Misalignment(part) + (row - part.first_row) * p_.row_pitch + column - part.first_column) * size_;
    if (is_half_) {
      Require((at - column % 2 * 2) % 4 == 0, "a pair of halves at byte %d", at);
      uint16_t value;
      std::memcpy(&value, &stage_[static_cast<size_t>(at)], sizeof(value));
      return HalfToFloat(value);
    }
    float value;
    std::memcpy(&value, &stage_[static_cast<size_t>(at)], sizeof(value));
    return value;
  }

  float Read(const void* from, long long index) const {
    return is_half_ ? HalfToFloat(static_cast<const uint16_t*>(from)[index]) : static_cast<const float*>(from)[index];
  }

  void Store(const Place& place, int split, int out_channel, float sum) {
    const long long plane = static_cast<long long>(place.part->image) * plan_.out_channels + out_channel;
    const long long index = (plane * p_.out_h + place.row) * p_.out_w + place.column;
    ++written_[static_cast<size_t>(split * num_values_ + index)];
    if (p_.bias != nullptr) sum += Read(p_.bias, out_channel);
    if (p_.addend != nullptr) sum += Read(p_.addend, index);
    if (p_.is_final != 0 && plan_.activation == kRelu) sum = std::max(sum, 0.0f);
    const long long to = split * p_.split_stride + index;
    if (is_half_) {
      static_cast<uint16_t*>(p_.out)[to] = FloatToHalf(sum);
    } else {
      static_cast<float*>(p_.out)[to] = sum;
    }
  }

  const GeneratedPlan plan_;
  const GeneratedParams p_;
  const bool is_half_;
  const int size_;
  const int vector_;   // elements of 16 bytes
  const int columns_;  // of a slot
  const int row_slots_;
  const int plane_slots_;
  const long long num_values_;
  const bool is_packed_;
  const int zero_bytes_;
  std::vector<char> stage_;
  std::vector<int> written_;
};

}  // namespace

EXPORT int cuda_on_host_has_kernel(const char* name) { return std::strcmp(name, "sparseconv_generated") == 0; }

EXPORT const char* cuda_on_host_error() { return error; }

EXPORT int cuda_on_host_launch(const char* name, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                               void** params) {
  if (!cuda_on_host_has_kernel(name)) return 1;
  try {
    const GeneratedPlan plan = reference_data.plan;
    Require(grid[1] == 1 && grid[2] == 1 && block[1] == 1 && block[2] == 1, "a grid or block of several axes");
    const auto& launched = *static_cast<const GeneratedParams*>(params[0]);
    Launch(plan, launched, static_cast<int>(block[0]), shared_bytes).Run(grid[0]);
    return 0;
  } catch (const std::exception& caught) {
    std::snprintf(error, sizeof(error), "%s", caught.what());
    return 2;
  }
}
