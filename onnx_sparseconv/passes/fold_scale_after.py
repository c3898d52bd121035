"""Fold what scales and shifts the channels of a convolution's result into its weight and bias."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnx_sparseconv.passes.base import (
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    is_standard,
    members,
    remove,
    require_sole_reader,
    take_output,
)
from onnx_sparseconv.passes.channel_affine import AFFINE_OPS, read_affine
from onnx_sparseconv.passes.conv_layer import ConvLayer
from onnx_sparseconv.passes.fold import Fold


class FoldScaleAfter(Fold):
    """Fold BatchNormalization, Mul, Add, Sub and Div behind a chosen Conv into it. Zeros of the weight stay zero.

    1. A BatchNormalization is in its form for inference: no training mode, no further outputs.
    2. Its parameters, or the other operand, are constants that callers cannot set.
    3. The constant is one number, or one for each output channel; it does not broadcast the result.
    4. The bias of the convolution is a constant, or absent; what is added to a convolution without one becomes it.
    5. The node is the only reader of the convolution's result, which is not pinned.
    6. Scale and shift are finite, and what is folded keeps the precision of the weight's type (`ConvLayer`).
    7. The convolution takes the node's output; then the next node behind it is looked at.
    """

    title = "folded into the convolutions before them"

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fold what can be folded in ``graph`` itself."""
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        own = members(graph)
        for convolution in [node for node in graph.nodes if id(node) in self._layers]:
            again = True
            while again:
                again = False
                for node in [n for n in convolution.outputs[0].outputs if id(n) in own]:
                    try:
                        layer = self._folded(convolution, node)
                    except RefusedError as refused:
                        refusals.append(Refusal(node, str(refused)))
                        continue
                    if layer is None:
                        continue
                    self._layers[id(convolution)] = layer
                    edits.append(Edit(convolution, node.op, node.name))
                    take_output(convolution, node)
                    own.discard(id(node))
                    remove(graph, [node])
                    again = True
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _folded(self, convolution: gs.Node, node: gs.Node) -> ConvLayer | None:
        if not is_standard(node, *AFFINE_OPS):
            return None
        layer, result = self._layers[id(convolution)], convolution.outputs[0]
        affine = read_affine(node, layer.rank, self._constant)
        if affine is None or affine.data is not result:
            return None
        require_sole_reader(result, self._pinned)
        return layer.with_scaled_output(affine.scale, affine.shift)
