"""Operators that scale and shift each channel by constants, read as one form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.kernels.unified_csr import Array
from onnx_sparseconv.passes.base import (
    ConstantLookup,
    RefusedError,
    has_no_further_output,
    is_standard,
    number_attribute,
)

BATCH_NORM = "BatchNormalization"
AFFINE_OPS = (BATCH_NORM, "Mul", "Add", "Sub", "Div")
_EPSILON = 1e-5


@dataclass(frozen=True, eq=False)
class ChannelAffine:
    """``y = scale * x + shift``, for each channel.

    Attributes:
        data: x.
        scale, shift: float64, ``[C]``, or ``[1]`` where one number serves all channels.
        may_broadcast: whether y may have more channels or axes than x; then x's shape has to be known.
    """

    data: gs.Tensor
    scale: Array
    shift: Array
    may_broadcast: bool


def read_affine(node: gs.Node, rank: int, constant: ConstantLookup) -> ChannelAffine | None:
    """What ``node`` does, or None where it is nothing of the kind.

    Args:
        node: the node.
        rank: axes of what it computes.
        constant: finds values.

    Raises:
        RefusedError: it is of the kind, but not with constants, or not by channels.
    """
    if is_standard(node, BATCH_NORM):
        return _batch_norm(node, constant)
    if not is_standard(node, *AFFINE_OPS) or len(node.inputs) != 2:
        return None
    first, second = node.inputs
    left, right = constant(first), constant(second)
    if (left is None) == (right is None):
        return None
    if right is not None:
        numbers = _by_channel(right, rank)
        scale, shift = _with_constant_second(node.op, numbers)
        return ChannelAffine(first, scale, shift, right.ndim > 1 or right.size > 1)
    assert left is not None
    if node.op == "Div":
        return None
    numbers = _by_channel(left, rank)
    if node.op == "Sub":
        scale, shift = np.full(1, -1.0), numbers
    else:
        scale, shift = _with_constant_second(node.op, numbers)
    return ChannelAffine(second, scale, shift, left.ndim > 1 or left.size > 1)


def _with_constant_second(op: str, numbers: Array) -> tuple[Array, Array]:
    """Scale and shift of ``x op numbers``."""
    one, zero = np.ones(1), np.zeros(1)
    if op == "Mul":
        return numbers, zero
    if op == "Div":
        with np.errstate(divide="ignore"):
            return 1 / numbers, zero
    return one, numbers if op == "Add" else -numbers


def _by_channel(values: Array, rank: int) -> Array:
    """A constant as float64 ``[C]`` or ``[1]``; the second of ``rank`` axes are the channels."""
    shape = (1,) * (rank - values.ndim) + values.shape
    if len(shape) != rank or any(size != 1 for axis, size in enumerate(shape) if axis != 1):
        raise RefusedError(f"its constant of shape {list(values.shape)} is not one number for each channel")
    return values.astype(np.float64).reshape(-1)


def _batch_norm(node: gs.Node, constant: ConstantLookup) -> ChannelAffine:
    epsilon = number_attribute(node, "epsilon", _EPSILON)
    if number_attribute(node, "training_mode", 0) or not has_no_further_output(node):
        raise RefusedError("it is in training form")
    values = [constant(tensor) for tensor in node.inputs[1:5]]
    found = [v.astype(np.float64).reshape(-1) for v in values if v is not None]
    if len(found) != 4:
        raise RefusedError("its parameters are only known at run time")
    gamma, beta, mean, variance = found
    if {v.shape for v in found} != {gamma.shape}:
        raise RefusedError("its parameters have different numbers of channels")
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + epsilon)
        return ChannelAffine(node.inputs[0], scale, beta - mean * scale, may_broadcast=False)
