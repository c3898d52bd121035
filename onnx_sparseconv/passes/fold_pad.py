"""Fold a Pad with zeros into the convolution after it."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.passes.base import RefusedError, is_standard, number_attribute, require_sole_reader
from onnx_sparseconv.passes.conv_layer import ConvLayer
from onnx_sparseconv.passes.fold import FoldBefore

# More than that is no padding that a convolution is made with; kernels bound it, too.
MAX_PAD = 1 << 20


class FoldPad(FoldBefore):
    """Add the amounts of a Pad to the padding of the chosen Conv that reads it.

    1. The mode is ``constant`` and the value is zero, or absent.
    2. The amounts (and the axes, which Pad has from opset 18 on) are constants, none negative, and zero for the batch
       and the channels.
    3. The convolution's own padding is known, and not negative: not a SAME ``auto_pad`` that depends on sizes at run
       time, or whose strides are larger than the kernel.
    4. The convolution is the only reader of the Pad's output, which is not pinned.
    """

    def _folded(self, convolution: gs.Node, node: gs.Node) -> tuple[ConvLayer, gs.Tensor] | None:
        if not is_standard(node, "Pad"):
            return None
        require_sole_reader(node.outputs[0], self._pinned)
        if _mode(node) != "constant":
            raise RefusedError(f"its mode is {_mode(node)}, not constant")
        value = self._value(node)
        if value is None or value != 0:
            raise RefusedError("it pads with something else than zero")
        layer = self._layers[id(convolution)]
        return layer.with_pads(self._spatial_amounts(node, layer.rank)), node.inputs[0]

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
