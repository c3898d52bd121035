"""Fold what scales and shifts the channels of a convolution's input into its weight and bias."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.passes.activations import match_gate
from onnx_sparseconv.passes.base import (
    ConstantLookup,
    RefusedError,
    is_standard,
    require_sole_reader,
    sole_producer,
)
from onnx_sparseconv.passes.channel_affine import AFFINE_OPS, ChannelAffine, read_affine
from onnx_sparseconv.passes.conv_layer import ConvLayer
from onnx_sparseconv.passes.fold import FoldBefore, producer

ShapeLookup = Callable[[str], tuple[int | None, ...] | None]


class FoldScaleBefore(FoldBefore):
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
        layers: as in `Fold`.
        pinned: as in `Fold`.
        constant: as in `Fold`.
        shape_of: shape of a tensor by its name, as it follows from the model's inputs; None where not even the rank is
            known.
    """

    def __init__(
        self,
        layers: MutableMapping[int, ConvLayer],
        pinned: AbstractSet[str],
        constant: ConstantLookup,
        shape_of: ShapeLookup,
    ) -> None:
        super().__init__(layers, pinned, constant)
        self._shape_of = shape_of

    def _folded(self, convolution: gs.Node, node: gs.Node) -> tuple[ConvLayer, gs.Tensor] | None:
        if not is_standard(node, *AFFINE_OPS):
            return None
        layer = self._layers[id(convolution)]
        affine = read_affine(node, layer.rank, self._constant)
        if affine is None or self._is_for_dense_conv(affine.data) or self._ends_activation(node, affine.data):
            return None
        require_sole_reader(node.outputs[0], self._pinned)
        if affine.may_broadcast:
            require_shape(affine, layer, self._shape_of)
        return layer.with_scaled_input(affine.scale, affine.shift), affine.data

    def _is_for_dense_conv(self, data: gs.Tensor) -> bool:
        source = sole_producer(data, self._pinned)
        return source is not None and is_standard(source, "Conv") and id(source) not in self._layers

    def _ends_activation(self, node: gs.Node, data: gs.Tensor) -> bool:
        """Whether ``node`` is the last of an activation behind a chosen convolution, or behind its residual."""
        multiply = producer(data)
        if multiply is None:
            return False
        matches = ((x, match_gate(multiply, x, self._constant)) for x in multiply.inputs)
        return any(self._comes_from_chosen(x) for x, match in matches if match is not None and match.nodes[-1] is node)

    def _comes_from_chosen(self, tensor: gs.Tensor) -> bool:
        maker = producer(tensor)
        if maker is None:
            return False
        sources = map(producer, maker.inputs) if is_standard(maker, "Add", "Sum") else iter(())
        return id(maker) in self._layers or any(id(source) in self._layers for source in sources if source)


def require_shape(affine: ChannelAffine, layer: ConvLayer, shape_of: ShapeLookup) -> None:
    """Check that what an operator in front of a convolution reads has the axes and channels of its result.

    Raises:
        RefusedError: that is not certain.
    """
    shape = shape_of(affine.data.name)
    if shape is None or len(shape) != layer.rank or shape[1] != layer.in_channels:
        raise RefusedError("it may broadcast its operand, whose shape is not known to be that of its result")
