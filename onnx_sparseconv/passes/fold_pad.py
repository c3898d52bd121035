"""Fold a Pad with zeros into the convolution after it."""

from __future__ import annotations

from collections.abc import MutableMapping
from collections.abc import Set as AbstractSet

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.passes.base import (
    ConstantLookup,
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    is_standard,
    members,
    remove,
    require_plain_attributes,
    require_sole_reader,
)
from onnx_sparseconv.passes.conv_layer import ConvLayer

# More than that is no padding that a convolution is made with; kernels bound it, too.
MAX_PAD = 1 << 20


class FoldPad:
    """Add the amounts of a Pad to the padding of the chosen Conv that reads it.

    1. The mode is ``constant`` and the value is zero, or absent.
    2. The amounts (and the axes, which Pad has from opset 18 on) are constants, none negative, and zero for the batch
       and the channels.
    3. The convolution's own padding is known: not a SAME ``auto_pad`` that depends on sizes at run time.
    4. The convolution is the only reader of the Pad's output, which is not pinned.

    Args:
        layers: of the chosen nodes, by ``id`` of the gs.Node; brought up to date.
        pinned: names of tensors that have to stay.
        constant: finds values.
    """

    title = "folded into the convolutions after them"

    def __init__(
        self, layers: MutableMapping[int, ConvLayer], pinned: AbstractSet[str], constant: ConstantLookup
    ) -> None:
        self._layers = layers
        self._pinned = pinned
        self._constant = constant

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fold what can be folded in ``graph`` itself."""
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        own = members(graph)
        for convolution in [node for node in graph.nodes if id(node) in self._layers]:
            x = convolution.inputs[0]
            pad = x.inputs[0] if len(x.inputs) == 1 else None
            if pad is None or id(pad) not in own or not is_standard(pad, "Pad"):
                continue
            try:
                self._layers[id(convolution)] = self._folded(pad, self._layers[id(convolution)])
            except RefusedError as refused:
                refusals.append(Refusal(pad, str(refused)))
                continue
            edits.append(Edit(convolution, pad.op, pad.name))
            convolution.inputs[0] = pad.inputs[0]
            own.discard(id(pad))
            remove(graph, [pad])
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _folded(self, pad: gs.Node, layer: ConvLayer) -> ConvLayer:
        require_plain_attributes(pad)
        require_sole_reader(pad.outputs[0], self._pinned)
        if pad.attrs.get("mode", "constant") != "constant":
            raise RefusedError(f"its mode is {pad.attrs['mode']}, not constant")
        value = self._value(pad)
        if value is None or value != 0:
            raise RefusedError("it pads with something else than zero")
        return layer.with_pads(self._spatial_amounts(pad, layer.rank))

    def _value(self, pad: gs.Node) -> float | None:
        if len(pad.inputs) < 3 or pad.inputs[2].is_empty():
            return float(pad.attrs.get("value", 0.0))
        value = self._constant(pad.inputs[2])
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def _spatial_amounts(self, pad: gs.Node, rank: int) -> tuple[int, ...]:
        amounts = np.asarray(pad.attrs.get("pads", ())) if len(pad.inputs) < 2 else self._constant(pad.inputs[1])
        axes: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = np.arange(rank)
        if len(pad.inputs) > 3 and not pad.inputs[3].is_empty():
            axes = self._constant(pad.inputs[3])
        if amounts is None or axes is None:
            raise RefusedError("its amounts are only known at run time")
        if amounts.size != 2 * axes.size or any(not -rank <= axis < rank for axis in axes.tolist()):
            raise RefusedError("its amounts and axes do not fit the convolution's input")
        both = np.zeros((2, rank), np.int64)
        for axis, begin, end in zip(axes.tolist(), *amounts.reshape(2, -1).tolist(), strict=True):
            both[:, axis] += begin, end
        if (both < 0).any():
            raise RefusedError("it crops: an amount is negative")
        if both[:, :2].any():
            raise RefusedError("it pads the batch or the channels")
        if both.max() > MAX_PAD:
            raise RefusedError("its amounts are no padding that a convolution is made with")
        return tuple(int(amount) for amount in both[:, 2:].reshape(-1))
