#include "gemm_weight.h"

#include <cstring>

#include "../checked.h"
#include "../half.h"
#include "wgmma_operand.h"
#include "wgmma_weight.h"

namespace sparseconv::cuda {
namespace {

static_assert(kGemmStepChannels == kWgmmaValueColumns);
constexpr size_t kRowTileRows = kWgmmaTileRows, kStepBytes = kWgmmaValueBytes;
constexpr size_t kRowTileBytes = kGemmChannels / kGemmStepChannels * kStepBytes;

int64_t RowBlocks(const ConvGeometry& geometry) { return CeilDivide(geometry.out_channels, int64_t{kGemmRows}); }
int64_t Chunks(const ConvGeometry& geometry) { return CeilDivide(geometry.in_channels, int64_t{kGemmChannels}); }

// Where an element of a chunk lies in it: of each row tile, the values of each step.
size_t PlaceOf(size_t row, size_t channel) {
  return row / kRowTileRows * kRowTileBytes + channel / kGemmStepChannels * kStepBytes +
         WgmmaValueAt(static_cast<int>(row % kRowTileRows), static_cast<int>(channel % kGemmStepChannels));
}

}  // namespace

bool HasGemmForm(const ConvGeometry& geometry) {
  ConvGeometry plain = geometry;
  if (geometry.strides == Axes{1, 2, 2}) plain.strides = {1, 1, 1};
  if (!IsPointwise(plain) || !IsPlain(plain) || geometry.group != 1) return false;
  return RowBlocks(geometry) <= kMaxDenseWeightBytes / kGemmWeightBytes / Chunks(geometry);
}

std::vector<uint8_t> PackGemmWeight(const SparseWeight& weight, const ConvGeometry& geometry) {
  const auto chunks = static_cast<size_t>(Chunks(geometry)), rows = static_cast<size_t>(geometry.out_channels);
  std::vector<uint8_t> packed(static_cast<size_t>(RowBlocks(geometry)) * chunks * kGemmWeightBytes);
  for (size_t row = 0; row < rows; ++row) {
    for (auto entry = static_cast<size_t>(weight.row_begin[row]);
         entry < static_cast<size_t>(weight.row_begin[row + 1]); ++entry) {
      const size_t channel = weight.columns[entry];
      const uint16_t half = FloatToHalf(weight.values[entry]);
      const size_t chunk = row / kGemmRows * chunks + channel / kGemmChannels;
      const size_t place = PlaceOf(row % kGemmRows, channel % kGemmChannels);
      std::memcpy(packed.data() + chunk * kGemmWeightBytes + place, &half, sizeof(half));
    }
  }
  return packed;
}

}  // namespace sparseconv::cuda
