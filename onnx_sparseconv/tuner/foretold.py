"""What layers that were not timed would take, by the rule for GPUs that are not at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnx_sparseconv.converter.conv_sites import ConvSite, output_sizes
from onnx_sparseconv.converter.gpu_predictions import GpuRule, predict
from onnx_sparseconv.kernels.gpu_time_constants import MODEL
from onnx_sparseconv.kernels.layer import Refusal
from onnx_sparseconv.tuner.layouts import Layout
from onnx_sparseconv.tuner.network import LayerCost, split_cost


@dataclass(frozen=True)
class ForetoldLayer:
    """Times of one layer at one shape, in microseconds.

    Attributes:
        dense_us: dense, by itself, in any layout.
        sparse_us: sparse; infinite for what the rule leaves dense, so that nobody chooses it.
        reorder_in_us, reorder_out_us: of changing the layout of its input and its output.
    """

    dense_us: float
    sparse_us: float
    reorder_in_us: float
    reorder_out_us: float

    def cost(self, layout: Layout) -> LayerCost:
        """What it costs in a layout."""
        if not layout.is_reordered:
            return LayerCost(self.dense_us, self.sparse_us)
        return split_cost(self.dense_us, self.sparse_us, self.reorder_in_us, self.reorder_out_us)


def foretell_layer(
    site: ConvSite, shape: Sequence[int] | None, rule: GpuRule | None, *, rewrite: bool
) -> ForetoldLayer | None:
    """Times of a layer, None where the rule says nothing of it.

    Args:
        site: the layer.
        shape: of its input, ``[N, C, D1..Dn]``; None where it is not known.
        rule: for the one architecture at hand; None: there is none.
        rewrite: whether the rule makes it sparse.
    """
    if rule is None or shape is None or site.weight is None or site.geometry is None:
        return None
    found = predict(replace(site, input_shape=tuple(shape)), rule, by_itself=True)
    if isinstance(found, Refusal):
        return None
    (one,) = found
    values = site.weight.values
    out_shape = (shape[0], values.shape[0], *(size or 0 for size in output_sizes(site.geometry, tuple(shape[2:]))))
    reorders = [MODEL.transpose_us(of_tensor, values.itemsize) for of_tensor in (shape, out_shape)]
    return ForetoldLayer(one.dense_us, one.sparse_us if rewrite else math.inf, *reorders)
