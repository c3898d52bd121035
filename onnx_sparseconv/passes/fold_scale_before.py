"""Fold what scales and shifts the channels of a convolution's input into its weight and bias."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.passes.activations import match_gate
from onnx_sparseconv.passes.base import (
    ConstantLookup,
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    is_standard,
    members,
    remove,
    require_sole_reader,
    sole_producer,
)
from onnx_sparseconv.passes.channel_affine import AFFINE_OPS, ChannelAffine, read_affine
from onnx_sparseconv.passes.conv_layer import ConvLayer

ShapeLookup = Callable[[str], tuple[int | None, ...] | None]


class FoldScaleBefore:
    """Fold BatchNormalization, Mul, Add, Sub and Div in front of a chosen Conv into it. Zeros of the weight stay zero.

    1. A BatchNormalization is in its form for inference: no training mode, no further outputs.
    2. Its parameters, or the other operand, are constants that callers cannot set.
    3. The constant is one number, or one for each input channel; the operand certainly has the channels and axes of the
       convolution's input, so that nothing is broadcast.
    4. What shifts is only folded where the convolution does not pad: the padded zeros would not be shifted. Scaling
       always is.
    5. The bias of the convolution is a constant, or absent.
    6. The convolution is the only reader of the node's output, which is not pinned.
    7. Scale and shift are finite, and what is folded keeps the precision of the weight's type (`ConvLayer`).
    8. What stands behind another Conv that alone feeds it is left: a dense Conv takes it in at session creation.
    9. What ends an activation that is spelled out (``x * Clip(x + 3, 0, 6) / 6``) behind a chosen Conv, or behind its
       residual, is left to `FuseActivation`.

    Args:
        layers: of the chosen nodes, by ``id`` of the gs.Node; brought up to date.
        pinned: names of tensors that have to stay.
        constant: finds values.
        shape_of: shape of a tensor by its name, None where not even the rank is known.
    """

    title = "folded into the convolutions after them"

    def __init__(
        self,
        layers: MutableMapping[int, ConvLayer],
        pinned: AbstractSet[str],
        constant: ConstantLookup,
        shape_of: ShapeLookup,
    ) -> None:
        self._layers = layers
        self._pinned = pinned
        self._constant = constant
        self._shape_of = shape_of

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fold what can be folded in ``graph`` itself."""
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        own = members(graph)
        for convolution in [node for node in graph.nodes if id(node) in self._layers]:
            while (node := _producer(convolution.inputs[0])) is not None and id(node) in own:
                try:
                    found = self._folded(convolution, node)
                except RefusedError as refused:
                    refusals.append(Refusal(node, str(refused)))
                    break
                if found is None:
                    break
                self._layers[id(convolution)], data = found
                edits.append(Edit(convolution, node.op, node.name))
                convolution.inputs[0] = data
                own.discard(id(node))
                remove(graph, [node])
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _folded(self, convolution: gs.Node, node: gs.Node) -> tuple[ConvLayer, gs.Tensor] | None:
        if not is_standard(node, *AFFINE_OPS):
            return None
        layer = self._layers[id(convolution)]
        affine = read_affine(node, layer.rank, self._constant)
        if affine is None or self._is_for_dense_conv(affine.data) or self._ends_activation(node, affine.data):
            return None
        require_sole_reader(node.outputs[0], self._pinned)
        if affine.may_broadcast:
            self._require_shape(affine, layer)
        return layer.with_scaled_input(affine.scale, affine.shift), affine.data

    def _is_for_dense_conv(self, data: gs.Tensor) -> bool:
        producer = sole_producer(data, self._pinned)
        return producer is not None and is_standard(producer, "Conv") and id(producer) not in self._layers

    def _ends_activation(self, node: gs.Node, data: gs.Tensor) -> bool:
        """Whether ``node`` is the last of an activation behind a chosen convolution, or behind its residual."""
        multiply = _producer(data)
        if multiply is None:
            return False
        matches = ((x, match_gate(multiply, x, self._constant)) for x in multiply.inputs)
        return any(self._comes_from_chosen(x) for x, match in matches if match is not None and match.nodes[-1] is node)

    def _comes_from_chosen(self, tensor: gs.Tensor) -> bool:
        producer = _producer(tensor)
        if producer is None:
            return False
        sources = map(_producer, producer.inputs) if is_standard(producer, "Add", "Sum") else iter(())
        return id(producer) in self._layers or any(id(source) in self._layers for source in sources if source)

    def _require_shape(self, affine: ChannelAffine, layer: ConvLayer) -> None:
        shape = self._shape_of(affine.data.name)
        if shape is None or len(shape) != layer.rank or shape[1] != layer.in_channels:
            raise RefusedError("it may broadcast its operand, whose shape is not known to be that of its result")


def _producer(tensor: gs.Tensor) -> gs.Node | None:
    return tensor.inputs[0] if len(tensor.inputs) == 1 else None
