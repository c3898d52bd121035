// Depthwise convolutions on the CPU: which are computed map by map from X as it lies, without cells.
//
// A row of a depthwise weight has too few entries for the sums over cells (plan.h) to pay for packing them.
#pragma once

#include "../attributes.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {

// Whether the node is one whose maps may be computed so.
bool HasDepthwiseForm(const ConvGeometry& conv);

// Whether `DepthwiseJob` takes floats of these sizes.
bool IsDepthwise(const ConvGeometry& conv, const ResolvedGeometry& sizes);

// The job of all channels of an image, but for its pointers and outputs.
DepthwiseJob MakeDepthwiseJob(const ConvGeometry& conv, const ResolvedGeometry& sizes);

}  // namespace sparseconv::cpu
