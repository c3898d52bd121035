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
#include <string>
#include <vector>

#include "half.h"
#include "params.h"

using namespace sparseconv::cuda;
using sparseconv::FloatToHalf;
using sparseconv::HalfToFloat;

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int kMaxWeights = 1 << 14;

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

thread_local std::string error;

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
  Launch(const GeneratedPlan& plan, const GeneratedParams& params, unsigned shared_bytes)
      : plan_(plan),
        p_(params),
        is_half_(plan.element_type == 10),
        size_(is_half_ ? 2 : 4),
        vector_(16 / size_),
        row_slots_((p_.out_w + plan.columns_per_slot - 1) / plan.columns_per_slot),
        plane_slots_(p_.out_h * row_slots_),
        num_values_(static_cast<long long>(p_.batch) * plan.out_channels * p_.out_h * p_.out_w),
        stage_(static_cast<size_t>(plan.chunk_channels) * plan.channel_pitch),
        written_(static_cast<size_t>(num_values_ * p_.num_splits)) {
    Require(shared_bytes == stage_.size() * plan.num_stages, "%u bytes of shared memory", shared_bytes);
    Require(p_.images_per_group == 1 || p_.groups_per_image == 1, "several images, and parts of one");
    Require(p_.images_per_group * p_.group_slots <= plan.threads, "more slots than threads");
    Require(p_.image_pitch % 16 == 0, "image_pitch is %d", p_.image_pitch);
    Require(p_.chunk_begin < p_.chunk_end && p_.chunk_end <= plan.num_chunks, "chunks %d to %d", p_.chunk_begin,
            p_.chunk_end);
    Require(p_.num_splits == 1 || (p_.partial_in == nullptr && p_.partial_out != nullptr), "splits without a place");
    Require(p_.epilogue.activation == plan.activation, "activation %d", p_.epilogue.activation);
    const int images = p_.groups_per_image > 1 ? p_.batch : (p_.batch + p_.images_per_group - 1) / p_.images_per_group;
    Require(p_.num_groups == images * p_.groups_per_image, "%d groups", p_.num_groups);
    Require(static_cast<long long>(p_.groups_per_image) * p_.group_slots >= plane_slots_, "too few slots");
    if (p_.staging != kElementStaging) {
      Require(reinterpret_cast<size_t>(p_.x) % 16 == 0, "X is not aligned");
      Require(p_.row_pitch == p_.in_w, "row_pitch is %d", p_.row_pitch);
    }
  }

  void Run(unsigned num_blocks) {
    const unsigned units = static_cast<unsigned>(plan_.num_tiles * p_.num_splits);
    Require(num_blocks == units * static_cast<unsigned>(p_.num_lanes), "%u blocks", num_blocks);
    for (unsigned block = 0; block < num_blocks; ++block) {
      const int tile = static_cast<int>(block % plan_.num_tiles);
      const int split = static_cast<int>(block / plan_.num_tiles % p_.num_splits);
      for (int group = static_cast<int>(block / units); group < p_.num_groups; group += p_.num_lanes) {
        RunGroup(tile, split, group);
      }
    }
    for (const int times : written_) Require(times == 1, "an output was written %d times", times);
  }

 private:
  struct Group {
    int first_image, num_images, first_slot, num_slots, first_row, num_rows, first_column, num_columns;
  };

  Group Locate(int index) const {
    Group group{};
    if (p_.groups_per_image > 1) {
      group.first_image = index / p_.groups_per_image;
      group.num_images = 1;
      group.first_slot = index % p_.groups_per_image * p_.group_slots;
      group.num_slots = std::min(p_.group_slots, plane_slots_ - group.first_slot);
      Require(group.num_slots > 0, "group %d is empty", index);
    } else {
      group.first_image = index * p_.images_per_group;
      group.num_images = std::min(p_.images_per_group, p_.batch - group.first_image);
      group.num_slots = plane_slots_;
    }
    const int first = group.first_slot / row_slots_, last = (group.first_slot + group.num_slots - 1) / row_slots_;
    group.first_row = std::clamp(first * plan_.strides[0] - plan_.pads_begin[0], 0, p_.in_h);
    const int reach = (plan_.kernel_shape[0] - 1) * plan_.dilations[0] + 1;
    group.num_rows =
        std::max(std::min(last * plan_.strides[0] - plan_.pads_begin[0] + reach, p_.in_h) - group.first_row, 0);
    group.num_columns = p_.in_w;
    if (reach == 1 && first == last) {
      // Only the columns that its taps read, from an even one for halves.
      const int step = plan_.strides[1] * plan_.columns_per_slot;
      const int begin = group.first_slot % row_slots_, end = (group.first_slot + group.num_slots - 1) % row_slots_ + 1;
      const int reach_w = (plan_.kernel_shape[1] - 1) * plan_.dilations[1] + 1;
      group.first_column = std::clamp(begin * step - plan_.pads_begin[1], 0, p_.in_w);
      group.first_column -= group.first_column % plan_.columns_per_slot;
      const int last_column = end * step - plan_.strides[1] - plan_.pads_begin[1] + reach_w;
      group.num_columns = std::max(std::min(last_column, p_.in_w) - group.first_column, 0);
    }
    return group;
  }

  int Misalignment(const Group& group) const {
    return p_.staging == kElementStaging ? 0 : (group.first_row * p_.in_w + group.first_column) % vector_;
  }
  int Skew(int channel) const { return channel * plan_.plane_residue % vector_; }
  int GroupOut() const { return plan_.out_channels / plan_.group; }
  int GroupIn() const { return plan_.in_channels / plan_.group; }
  int FirstChannel(int tile) const { return tile * plan_.tile_channels / GroupOut() * GroupIn(); }

  void RunGroup(int tile, int split, int index) {
    const Group group = Locate(index);
    const int num_chunks = p_.chunk_end - p_.chunk_begin;
    const int begin = p_.chunk_begin + num_chunks * split / p_.num_splits;
    const int end = p_.chunk_begin + num_chunks * (split + 1) / p_.num_splits;
    const int first_out = tile * plan_.tile_channels;
    const int num_out = std::min(plan_.tile_channels, plan_.out_channels - first_out);
    const int slots = group.num_images * group.num_slots;
    std::vector<float> sums(static_cast<size_t>(slots * num_out * plan_.columns_per_slot));
    for (int chunk = begin; chunk < end; ++chunk) {
      Stage(group, FirstChannel(tile), chunk);
      for (int slot = 0; slot < slots; ++slot) {
        for (int k = 0; k < num_out; ++k) {
          for (int column = 0; column < plan_.columns_per_slot; ++column) {
            sums[static_cast<size_t>((slot * num_out + k) * plan_.columns_per_slot + column)] +=
                Sum(group, tile, chunk, slot, first_out + k, column);
          }
        }
      }
    }
    for (int slot = 0; slot < slots; ++slot) {
      for (int k = 0; k < num_out; ++k) {
        for (int column = 0; column < plan_.columns_per_slot; ++column) {
          Store(group, split, slot, first_out + k, column,
                sums[static_cast<size_t>((slot * num_out + k) * plan_.columns_per_slot + column)]);
        }
      }
    }
  }

  void Stage(const Group& group, int first_channel, int chunk) {
    std::memset(stage_.data(), 0xFF, stage_.size());  // NaN in both types
    const int channels = std::min(plan_.chunk_channels, plan_.tile_in_channels - chunk * plan_.chunk_channels);
    for (int c = 0; c < channels; ++c) {
      const int channel = first_channel + chunk * plan_.chunk_channels + c;
      Require(channel < plan_.in_channels, "channel %d is read", channel);
      for (int image = 0; image < group.num_images; ++image) StageRows(group, c, channel, image);
    }
  }

  void StageRows(const Group& group, int c, int channel, int image) {
    if (group.num_rows == 0 || group.num_columns == 0) return;
    const long long plane = static_cast<long long>(group.first_image + image) * plan_.in_channels + channel;
    const long long first = plane * p_.in_h * p_.in_w + group.first_row * p_.in_w + group.first_column;
    const long long total = static_cast<long long>(p_.batch) * plan_.in_channels * p_.in_h * p_.in_w;
    const auto* x = static_cast<const char*>(p_.x);
    const int place = 16 + image * p_.image_pitch;
    if (p_.staging != kElementStaging) {
      const int lead = Misalignment(group) + Skew(c);
      const int bytes = ((lead + group.num_rows * group.num_columns) * size_ + 15) / 16 * 16;
      const long long begin = (first - lead) * size_;
      Require(begin % 16 == 0 && begin >= 0 && begin + bytes <= total * size_, "a copy from %lld, %d bytes", begin,
              bytes);
      Require(bytes <= p_.image_pitch, "%d bytes in %d", bytes, p_.image_pitch);
      Require(place + bytes <= plan_.channel_pitch, "byte %d of a channel", place + bytes);
      std::memcpy(&stage_[static_cast<size_t>(c) * plan_.channel_pitch + place], x + begin, bytes);
      return;
    }
    const int columns = plan_.columns_per_slot;
    const int pitch =
        group.num_columns < p_.in_w ? (group.num_columns + columns - 1) / columns * columns : p_.row_pitch;
    const int last = place + Skew(c) * size_ + group.num_rows * pitch * size_;
    Require(last <= plan_.channel_pitch, "byte %d of a channel", last);
    Require(group.num_rows * pitch * size_ <= p_.image_pitch, "%d rows in %d bytes", group.num_rows, p_.image_pitch);
    for (int row = 0; row < group.num_rows; ++row) {
      char* to = &stage_[static_cast<size_t>(c) * plan_.channel_pitch + place + (Skew(c) + row * pitch) * size_];
      std::memset(to, 0, static_cast<size_t>(pitch * size_));
      std::memcpy(to, x + (first + row * p_.in_w) * size_, static_cast<size_t>(group.num_columns * size_));
    }
  }

  struct Place {
    int image, row, column;
  };

  Place PlaceOf(const Group& group, int slot, int column) const {
    const int in_image = group.first_slot + slot % group.num_slots;
    return {slot / group.num_slots, in_image / row_slots_, in_image % row_slots_ * plan_.columns_per_slot + column};
  }

  float Sum(const Group& group, int tile, int chunk, int slot, int out_channel, int column) const {
    const Place place = PlaceOf(group, slot, column);
    if (place.column >= p_.out_w) return 0;
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
            sum += value * Staged(group, c, place.image, row, w);
          }
        }
      }
    }
    return sum;
  }

  float Staged(const Group& group, int c, int image, int row, int column) const {
    Require(row >= group.first_row && row < group.first_row + group.num_rows, "row %d is not staged", row);
    Require(column >= group.first_column && column < group.first_column + group.num_columns, "column %d is not staged",
            column);
    const int at = c * plan_.channel_pitch + Skew(c) * size_ + 16 + image * p_.image_pitch +
                   (Misalignment(group) + (row - group.first_row) * p_.row_pitch + column - group.first_column) * size_;
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

  void Store(const Group& group, int split, int slot, int out_channel, int column, float sum) {
    const Place place = PlaceOf(group, slot, column);
    if (place.column >= p_.out_w) return;
    const long long plane = static_cast<long long>(group.first_image + place.image) * plan_.out_channels + out_channel;
    const long long index = (plane * p_.out_h + place.row) * p_.out_w + place.column;
    ++written_[static_cast<size_t>(split * num_values_ + index)];
    if (p_.partial_in != nullptr) sum += p_.partial_in[index];
    if (p_.partial_out != nullptr) {
      p_.partial_out[split * p_.partial_stride + index] = sum;
      return;
    }
    if (p_.epilogue.bias != nullptr) sum += Read(p_.epilogue.bias, out_channel);
    if (p_.epilogue.residual != nullptr) sum += Read(p_.epilogue.residual, index);
    if (p_.epilogue.activation == kRelu) sum = std::max(sum, 0.0f);
    if (is_half_) {
      static_cast<uint16_t*>(p_.y)[index] = FloatToHalf(sum);
    } else {
      static_cast<float*>(p_.y)[index] = sum;
    }
  }

  const GeneratedPlan plan_;
  const GeneratedParams p_;
  const bool is_half_;
  const int size_;
  const int vector_;
  const int row_slots_;
  const int plane_slots_;
  const long long num_values_;
  std::vector<char> stage_;
  std::vector<int> written_;
};

}  // namespace

EXPORT int cuda_on_host_has_kernel(const char* name) { return std::strcmp(name, "sparseconv_generated") == 0; }

EXPORT const char* cuda_on_host_error() { return error.c_str(); }

EXPORT int cuda_on_host_launch(const char* name, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                               void** params) {
  if (!cuda_on_host_has_kernel(name)) return 1;
  try {
    const GeneratedPlan plan = reference_data.plan;
    Require(grid[1] == 1 && grid[2] == 1 && static_cast<int>(block[0]) == plan.threads, "%u threads", block[0]);
    Launch(plan, *static_cast<const GeneratedParams*>(params[0]), shared_bytes).Run(grid[0]);
    return 0;
  } catch (const std::exception& caught) {
    error = caught.what();
    return 2;
  }
}
