// The container of GPU kernel images in the node attribute `cuda_images`. Little endian:
//
//   ContainerHeader, ImageHeader[num_images], then the images, each at a multiple of 16 bytes.
//
// An empty attribute (no bytes at all) holds no image.
#pragma once

#include "params.h"

namespace sparseconv::cuda {

constexpr unsigned kContainerMagic = 0x4D494353;  // "SCIM"
constexpr unsigned kContainerVersion = 3;

struct ContainerHeader {
  unsigned magic;
  unsigned version;
  unsigned num_images;
  unsigned header_bytes;  // sizeof(ImageHeader)
};

struct ImageHeader {
  unsigned architecture;  // 75, 80, 86, 90, ..: runs on GPUs of the same major number and at least the same minor one
  unsigned min_driver;    // as cuDriverGetVersion counts: 12090 is CUDA 12.9
  unsigned long long offset;  // of the image from the container's begin
  unsigned long long size;    // a cubin, or a fat binary with one
  unsigned checksum;          // CRC-32 (zlib's) of the image
  unsigned min_batch;         // images in a call from which on it is the fastest kernel of its node
  char compiler[32];          // "NVRTC 12.9", NUL-terminated
  GeneratedPlan plan;
};

}  // namespace sparseconv::cuda
