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
    number_attribute,
    remove,
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
        require_sole_reader(pad.outputs[0], self._pinned)
        if _mode(pad) != "constant":
            raise RefusedError(f"its mode is {_mode(pad)}, not constant")
        value = self._value(pad)
        if value is None or value != 0:
            raise RefusedError("it pads with something else than zero")
        return layer.with_pads(self._spatial_amounts(pad, layer.rank))

    def _value(self, pad: gs.Node) -> float | None:
        if len(pad.inputs) < 3 or pad.inputs[2].is_empty():
            return number_attribute(pad, "value", 0.0)
        value = self._constant(pad.inputs[2])
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def _integers(self, pad: gs.Node, index: int, absent: object) -> list[int]:
        """An input that holds integers; ``absent`` is the attribute that it was before opset 11."""
        if len(pad.inputs) <= index:
            values = absent
        else:
            found = self._constant(pad.inputs[index])
            values = None if found is None else found.reshape(-1).tolist()
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise RefusedError("its amounts are only known at run time")
        return values

    def _spatial_amounts(self, pad: gs.Node, rank: int) -> tuple[int, ...]:
        amounts, axes = self._integers(pad, 1, pad.attrs.get("pads", [])), list(range(rank))
        if len(pad.inputs) > 3 and not pad.inputs[3].is_empty():
            axes = self._integers(pad, 3, [])
        places = {axis % rank for axis in axes if -rank <= axis < rank}
        if len(amounts) != 2 * len(axes) or len(places) != len(axes):
            raise RefusedError("its amounts and axes do not fit the convolution's input")
        both = np.zeros((2, rank), np.int64)
        both[:, axes] = np.reshape(amounts, (2, -1))
        if (both < 0).any():
            raise RefusedError("it crops: an amount is negative")
        if both[:, :2].any():
            raise RefusedError("it pads the batch or the channels")
        if both.max() > MAX_PAD:
            raise RefusedError("its amounts are no padding that a convolution is made with")
        return tuple(int(amount) for amount in both[:, 2:].reshape(-1))


def _mode(pad: gs.Node) -> str:
    mode = pad.attrs.get("mode", "constant")
    return mode if isinstance(mode, str) else "an argument of a function"
