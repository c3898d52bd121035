"""Rounding numbers to float16: whether they fit, what is lost, and how they are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper

from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import SparseConvAttributes
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.kernels.unified_csr import Array, decode, encode
from onnx_sparseconv.passes.conv_layer import ConvLayer

# Bounds beyond float16's range may become its largest number: no value of the tensor that they bound is larger.
SATURATING = frozenset({"Clip", "Max", "Min"})
_VARIANCE_INPUT = 4
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Lost:
    """Non-zero weights that float16 rounds to zero, of so many non-zeros."""

    name: str
    zeros: int
    nonzeros: int


def to_half(values: Array) -> Array:
    """Numbers in float16, those beyond its range as Inf; rounded once, to nearest."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float16)


def overflows(values: Array) -> bool:
    """Whether a finite number is Inf in float16."""
    return bool((np.isfinite(values) & ~np.isfinite(to_half(values))).any())


def vanishing(values: Array) -> int:
    """How many numbers that are not zero are zero in float16."""
    return int(np.count_nonzero((values != 0) & (to_half(values) == 0)))


def through_half(layer: ConvLayer, source: np.dtype[Any], name: str) -> tuple[ConvLayer, Lost | None]:
    """A layer of the type of its source, what folding has scaled rounded from float64 to what float16 can hold.

    When it becomes float16 later on, nothing is rounded a second time.

    Args:
        layer: a layer for which it was checked that what was folded fits into float16, if ``source`` is float32.
        source: the type that its weight had.
        name: of the layer.
    """
    if source != np.float32:
        return layer, None
    weight, bias = layer.weight, layer.bias
    lost = None
    if weight.dtype == np.float64:
        lost = _loss(weight, name)
        weight = to_half(weight).astype(np.float64)
    if bias is not None and bias.dtype == np.float64:
        bias = to_half(bias).astype(np.float64)
    return replace(layer, weight=weight, bias=bias, dtype=source), lost


def constant_problem(node: NodeProto, index: int, tensor: TensorProto, *, is_heavy: bool) -> str:
    """Why a node cannot take a constant in float16; empty when it can.

    Small numbers may vanish among others, as in a weight or a bias, but not as a divisor, and not all of a constant,
    as the epsilon that keeps a divisor from zero.

    Args:
        node: the reader.
        index: which of its inputs the constant is.
        tensor: the constant, float32.
        is_heavy: whether the node gains from float16 by itself.

    Raises:
        ModelError: the constant's data are broken.
    """
    values = _values(tensor)
    name = tensor.name or node.input[index]
    if node.op_type not in SATURATING and overflows(values):
        finite = np.abs(values[np.isfinite(values)])
        return f"its constant {name!r} holds {finite.max():.3g}, float16 ends at {_LARGEST:.0f}"
    if node.op_type == "BatchNormalization":
        return _variance_problem(node, name, values) if index == _VARIANCE_INPUT else ""
    lost = vanishing(values)
    is_divisor = node.op_type == "Div" and index == 1
    if lost and not is_heavy and (is_divisor or lost == np.count_nonzero(values)):
        smallest = np.abs(values[values != 0]).min()
        return f"its constant {name!r} holds {smallest:.3g}, which is zero in float16"
    return ""


def _variance_problem(node: NodeProto, name: str, variance: Array) -> str:
    """Variances are used with epsilon added; so much of them has to survive."""
    epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
    exact = variance.astype(np.float64)
    with np.errstate(invalid="ignore"):  # what is infinite stays so
        lost = np.abs(to_half(variance).astype(np.float64) - exact)
    wrong = lost > 2 * np.finfo(np.float16).eps * (exact + epsilon)
    return f"its variances {name!r} are too small for float16" if wrong.any() else ""


def constant_loss(tensor: TensorProto, name: str) -> Lost | None:
    """What float16 takes from a weight; None where it takes nothing."""
    return _loss(_values(tensor), name)


def _values(tensor: TensorProto) -> Array:
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ModelError(f"tensor {tensor.name!r}: its data cannot be read: {error}") from error


def _loss(values: Array, name: str) -> Lost | None:
    zeros = vanishing(values)
    return Lost(name, zeros, int(np.count_nonzero(values))) if zeros else None


def half_tensor(tensor: TensorProto, name: str) -> TensorProto:
    """A float32 tensor in float16, under another name; numbers beyond the range become the largest (see above)."""
    values = _values(tensor)
    bounded = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values)
    result = numpy_helper.from_array(to_half(bounded), name)
    result.doc_string = tensor.doc_string
    return result


def sparse_to_half(node: NodeProto) -> tuple[SparseConvAttributes, Lost | None]:
    """The attributes of a float SparseConv node as a float16 one.

    Weights that vanish are taken out of the stored ones. GPU images, which are those of the float node, stay.

    Raises:
        FormatError: the attributes are broken.
        OverflowError: a weight does not fit into float16.
    """
    attributes = attributes_from_proto(node)
    weight = attributes.weight
    if overflows(weight.values):
        largest = np.abs(weight.values[np.isfinite(weight.values)]).max()
        raise OverflowError(f"its weight holds {largest:.3g}, float16 ends at {_LARGEST:.0f}")
    if weight.weight_shape[0] == attributes.geometry.group and math.prod(weight.weight_shape[1:]) == 1:
        # Depthwise with one tap: its few weights stay float32, with what `FuseScale` made of them.
        return replace(attributes, element_type=np.dtype(np.float16)), None
    if vanishing(weight.values):
        dense = decode(weight)
        rounded = to_half(dense)
        rounded[(rounded == 0) & (dense != 0)] = 0  # +0: it is no zero of the source, which would keep its sign
        half = encode(rounded, attributes.geometry.group)
    else:
        half = replace(weight, values=to_half(weight.values))
    result = replace(attributes, weight=half, element_type=np.dtype(np.float16))
    return result, _loss(weight.values, node.name)


def write_sparse(node: NodeProto, attributes: SparseConvAttributes) -> None:
    """Put attributes into a sparse node in place of those that it has; others stay."""
    wanted = attributes.to_node_attributes()
    for attribute in node.attribute:
        value = wanted.get(attribute.name)
        if isinstance(value, np.ndarray) and attribute.type == AttributeProto.TENSOR:
            attribute.t.CopyFrom(numpy_helper.from_array(value, attribute.t.name))
        elif attribute.name == "element_type":
            attribute.i = int(wanted["element_type"])
