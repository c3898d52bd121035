"""Recognising the activation behind a convolution, however a model spells it.

A matcher looks at a tensor and returns what it found, or None. Whether others read what lies between is
the pass's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import Activation
from onnx_sparseconv.kernels.unified_csr import Array
from onnx_sparseconv.passes.base import PINNED, ConstantLookup, RefusedError, is_standard, number_attribute

FloatType = np.dtype[np.floating[Any]]

# Exporters write 1/6 with different numbers of digits.
_CLOSE = 2 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class Match:
    """An activation that was recognised.

    Attributes:
        nodes: the nodes that spell it; the last one makes its result.
        activation: its code.
        alpha, beta: its parameters.
        label: how it is spelled, for people.
    """

    nodes: tuple[gs.Node, ...]
    activation: Activation
    alpha: float = 0.0
    beta: float = 0.0
    label: str = ""


def closed_match(
    tensor: gs.Tensor,
    dtype: FloatType,
    constant: ConstantLookup,
    own: AbstractSet[int],
    pinned: AbstractSet[str],
) -> Match | None:
    """The activation that is applied to ``tensor``, and to which alone it goes; None where there is none.

    Args:
        tensor: what it is applied to.
        dtype: of the tensor.
        constant: finds values.
        own: ``id`` of the nodes that may be part of it.
        pinned: names of tensors that have to stay.

    Raises:
        RefusedError: one is of a form that the op cannot express, or others need ``tensor`` or what lies between.
    """
    refused: RefusedError | None = None
    for match in matches(tensor, dtype, constant):
        if any(id(node) not in own for node in match.nodes):
            continue
        try:
            _require_closed(tensor, match, pinned)
        except RefusedError as error:
            refused = refused or error
            continue
        return match
    if refused is not None:
        raise refused
    return None


def _require_closed(tensor: gs.Tensor, match: Match, pinned: AbstractSet[str]) -> None:
    nodes = {id(node) for node in match.nodes}
    between = [tensor, *(output for node in match.nodes[:-1] for output in node.outputs)]
    if any(each.name in pinned for each in between):
        raise RefusedError(f"a tensor between them {PINNED}")
    if any(id(reader) not in nodes for each in between for reader in each.outputs):
        raise RefusedError("other nodes read a tensor between them, too")


def matches(tensor: gs.Tensor, dtype: FloatType, constant: ConstantLookup) -> Iterator[Match]:
    """The activations that are applied to ``tensor``, those spelled in several nodes before those of a single one.

    Args:
        tensor: result of a convolution.
        dtype: of the tensor.
        constant: finds values.

    Raises:
        RefusedError: one is of a form that the op cannot express.
    """
    for node in tensor.outputs:
        found = match_gate(node, tensor, constant)
        if found is not None:
            yield found
    for node in tensor.outputs:
        found = match_node(node, dtype, constant)
        if found is not None:
            yield from _relu_and_clip(found, dtype, constant)
            yield found


def _relu_and_clip(relu: Match, dtype: FloatType, constant: ConstantLookup) -> Iterator[Match]:
    """``Clip(Relu(x), low, high)``, as Relu6 comes out of some exporters, is one Clip."""
    (node,) = relu.nodes
    for clip in node.outputs[0].outputs if relu.activation is Activation.RELU else ():
        if not is_standard(clip, "Clip"):
            continue
        try:
            _, low, high = _clip(clip, dtype, constant)
        except RefusedError:
            continue
        if max(low, 0.0) <= high:
            yield Match((node, clip), Activation.CLIP, max(low, 0.0), high, "Relu and Clip")


def match_node(node: gs.Node, dtype: FloatType, constant: ConstantLookup) -> Match | None:
    """The activation that one node applies, or None.

    Raises:
        RefusedError: it is one that the op cannot express.
    """
    reader = _SINGLE.get(node.op)
    if reader is None or not is_standard(node, node.op) or not node.outputs:
        return None
    activation, alpha, beta = reader(node, dtype, constant)
    if math.isnan(alpha) or math.isnan(beta):
        raise RefusedError("a parameter of it is not a number")
    return Match((node,), activation, alpha, beta, node.op)


_Parameters = tuple[Activation, float, float]


def _plain(activation: Activation) -> Callable[[gs.Node, FloatType, ConstantLookup], _Parameters]:
    return lambda _node, _dtype, _constant: (activation, 0.0, 0.0)


def _leaky_relu(node: gs.Node, _dtype: FloatType, _constant: ConstantLookup) -> _Parameters:
    return Activation.LEAKY_RELU, number_attribute(node, "alpha", 0.01), 0.0


def _hard_sigmoid(node: gs.Node, _dtype: FloatType, _constant: ConstantLookup) -> _Parameters:
    return Activation.HARD_SIGMOID, number_attribute(node, "alpha", 0.2), number_attribute(node, "beta", 0.5)


def _swish(node: gs.Node, _dtype: FloatType, _constant: ConstantLookup) -> _Parameters:
    alpha = number_attribute(node, "alpha", 1.0)
    if alpha != 1:
        raise RefusedError(f"its alpha is {alpha:g}; the op knows only 1")
    return Activation.SILU, 0.0, 0.0


def _clip(node: gs.Node, dtype: FloatType, constant: ConstantLookup) -> _Parameters:
    """Bounds are attributes before opset 11, inputs from then on; absent ones are the ends of the type."""
    limits = np.finfo(dtype)
    low, high = (
        _bound(node, index, name, float(end), constant)
        for index, name, end in ((1, "min", limits.min), (2, "max", limits.max))
    )
    if low > high:
        raise RefusedError(f"its bounds {low:g} and {high:g} are in the wrong order")
    return Activation.CLIP, low, high


def _bound(node: gs.Node, index: int, name: str, absent: float, constant: ConstantLookup) -> float:
    if len(node.inputs) <= index or node.inputs[index].is_empty():
        return number_attribute(node, name, absent)
    value = constant(node.inputs[index])
    if value is None or value.size != 1:
        raise RefusedError("its bounds are only known at run time")
    return float(value.reshape(-1)[0])


_SINGLE: dict[str, Callable[[gs.Node, FloatType, ConstantLookup], _Parameters]] = {
    "Relu": _plain(Activation.RELU),
    "Sigmoid": _plain(Activation.SIGMOID),
    "HardSwish": _plain(Activation.HARD_SWISH),
    "LeakyRelu": _leaky_relu,
    "HardSigmoid": _hard_sigmoid,
    "Swish": _swish,
    "Clip": _clip,
}
SINGLE_OPS = tuple(_SINGLE)


def match_gate(multiply: gs.Node, x: gs.Tensor, constant: ConstantLookup) -> Match | None:
    """``x * gate(x)``, with the gate in one or more nodes, of which ``multiply`` multiplies; None where it is not."""
    if not is_standard(multiply, "Mul") or len(multiply.inputs) != 2:
        return None
    first, second = multiply.inputs
    if (first is x) == (second is x):
        return None
    gate = _producer(second if first is x else first)
    if gate is None:
        return None
    if is_standard(gate, "Sigmoid"):
        unscaled = _times_one(gate.inputs[0], x, constant)
        return None if unscaled is None else Match((*unscaled, gate, multiply), Activation.SILU, label="x * Sigmoid(x)")
    if is_standard(gate, "HardSigmoid") and gate.inputs[0] is x:
        try:
            _, alpha, beta = _hard_sigmoid(gate, np.dtype(np.float32), constant)
        except RefusedError:
            return None
        if not (_is(alpha, 1 / 6) and _is(beta, 0.5)):
            return None
        return Match((gate, multiply), Activation.HARD_SWISH, label="x * HardSigmoid(x)")
    sixth, inner = _sixth_of(gate, constant)
    clip = _clip_of_shifted(_producer(inner) if inner is not None else gate, x, constant)
    if clip is None:
        return None
    label = "x * Clip(x + 3, 0, 6) / 6"
    if sixth is not None:
        return Match((*clip, sixth, multiply), Activation.HARD_SWISH, label=label)
    readers = multiply.outputs[0].outputs
    last, _ = _sixth_of(readers[0], constant) if len(readers) == 1 else (None, None)
    if last is None:
        return None
    return Match((*clip, multiply, last), Activation.HARD_SWISH, label=label)


def _times_one(tensor: gs.Tensor, x: gs.Tensor, constant: ConstantLookup) -> tuple[gs.Node, ...] | None:
    """The nodes, if any, between x and a tensor that is x; exporters of Swish write its beta of 1."""
    if tensor is x:
        return ()
    node = _producer(tensor)
    if node is None or not is_standard(node, "Mul") or len(node.inputs) != 2:
        return None
    for index in (0, 1):
        if node.inputs[index] is x and _is_number(node.inputs[1 - index], 1, constant):
            return (node,)
    return None


def _sixth_of(node: gs.Node, constant: ConstantLookup) -> tuple[gs.Node | None, gs.Tensor | None]:
    """``node`` and its operand if it computes ``operand / 6``."""
    if is_standard(node, "Div") and len(node.inputs) == 2 and _is_number(node.inputs[1], 6, constant):
        return node, node.inputs[0]
    if is_standard(node, "Mul") and len(node.inputs) == 2:
        for index in (0, 1):
            if _is_number(node.inputs[index], 1 / 6, constant):
                return node, node.inputs[1 - index]
    return None, None


def _clip_of_shifted(clip: gs.Node | None, x: gs.Tensor, constant: ConstantLookup) -> tuple[gs.Node, gs.Node] | None:
    """The two nodes of ``Clip(x + 3, 0, 6)``."""
    if clip is None or not is_standard(clip, "Clip"):
        return None
    try:
        _, low, high = _clip(clip, np.dtype(np.float32), constant)
    except RefusedError:
        return None
    add = _producer(clip.inputs[0])
    if (low, high) != (0, 6) or add is None or not is_standard(add, "Add") or len(add.inputs) != 2:
        return None
    for index in (0, 1):
        if add.inputs[index] is x and _is_number(add.inputs[1 - index], 3, constant):
            return add, clip
    return None


def _is_number(tensor: gs.Tensor, wanted: float, constant: ConstantLookup) -> bool:
    """Whether a tensor is this constant number, and does not broadcast what it meets."""
    try:
        value: Array | None = constant(tensor)
    except RefusedError:
        return False
    return value is not None and value.size == 1 and value.ndim <= 1 and _is(float(value.reshape(-1)[0]), wanted)


def _is(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=_CLOSE)


def _producer(tensor: gs.Tensor) -> gs.Node | None:
    return tensor.inputs[0] if len(tensor.inputs) == 1 else None
