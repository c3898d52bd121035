// The GPU kernel images that a node carries. They come from a file: nothing in them is believed unchecked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../../../kernels/cuda/image_format.h"
#include "../attributes.h"

namespace sparseconv::cuda {

struct Image {
  unsigned architecture = 0;
  unsigned min_driver = 0;
  unsigned min_batch = 0;  // calls with fewer images had better run the library's own kernels
  GeneratedPlan plan{};
  const uint8_t* code = nullptr;  // points into the container
  size_t size = 0;
};

// Whether code reads the inputs that X is concatenated of where they are.
inline bool ReadsSources(const GeneratedPlan& plan) { return plan.source_channels[0] > 0; }

// Reads the attribute `cuda_images` of a node. Throws `Error` where the container is damaged, or holds an image that
// was made for another node.
std::vector<Image> ParseImages(const uint8_t* container, size_t size, const SparseConvAttributes& attributes);

// The best image for a device (architecture as 10 * major + minor) and a driver. Null where none fits, with the reason.
const Image* ChooseImage(const std::vector<Image>& images, int element_type, int architecture, int driver_version,
                         std::string* reason);

}  // namespace sparseconv::cuda
