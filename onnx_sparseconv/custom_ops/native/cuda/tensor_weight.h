// A weight in the form that the tensor-core kernel reads (kernels/cuda/tensor_conv.cuh): rows of output channels whose
// columns are sorted into steps of 32, in which hardly a row has more than two non-zeros in four neighbours.
//
// A tile of `tile_rows` output channels of one group, times a chunk of input channels, is a sequence of steps. The step
// of s = tile_rows / 16 subtiles is
//
//   values   [s][32 lanes][8]   halves: operand A of mma.sp.m16n8k32, two of four columns
//   words    [32 lanes][4]      32 bits each: metadata of subtiles 0 and 1, of 2 and 3, and the lane's column,
//                               c | line << 12 | place << 22 with channel c of the chunk (see TensorParams); the last
//                               is 0
//
// Steps of a tile follow each other through all chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../attributes.h"

namespace sparseconv::cuda {

constexpr int kSubtileRows = 16;
constexpr int kTensorColumns = 32;  // of a step

struct TensorForm {
  int tile_rows = 64;  // 32 or 64
  int tiles_per_group = 1;
  int chunk_channels = 32;
  int num_chunks = 1;

  int subtiles() const { return tile_rows / kSubtileRows; }
  size_t step_bytes() const { return size_t{512} * static_cast<size_t>(subtiles() + 1); }
};

struct TensorWeight {
  TensorForm form;
  std::vector<uint8_t> steps;
  std::vector<uint32_t> step_begins;  // [group * tiles_per_group][num_chunks + 1]
  int max_steps = 0;                  // of a tile in a chunk
};

// Whether the kernel's columns can say all channels and taps of the node, and halves all of its weights: a float16 node
// may carry floats.
bool HasTensorForm(const SparseWeight& weight, const ConvGeometry& geometry);

// `max_shared_bytes`: of a block.
TensorForm ChooseTensorForm(const ConvGeometry& geometry, int max_shared_bytes);

TensorWeight PackTensorWeight(const SparseWeight& weight, const ConvGeometry& geometry, const TensorForm& form);

}  // namespace sparseconv::cuda
