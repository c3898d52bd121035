"""SparseConv nodes and models made by hand, and their float64 oracle."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_sparseconv.custom_ops.function_body import make_functions
from onnx_sparseconv.custom_ops.schema import (
    CONCAT_OPS,
    DOMAIN,
    ELEMENT_TYPES,
    SPARSE_CONV_ADD,
    SPARSE_CONV_MAX_POOL,
    Activation,
    ConvGeometry,
    PoolGeometry,
    SparseConvAttributes,
)
from onnx_sparseconv.kernels.unified_csr import encode
from tests.support.sparse_models import max_pool

# Of 2-D nodes that pool: windows that overlap, and differ by axis.
POOL = PoolGeometry((3, 2), (2, 1), (1, 0, 0, 1))

# Parameters that make every activation differ from every other one.
PARAMETERS = {Activation.CLIP: (-0.5, 0.75), Activation.LEAKY_RELU: (0.125, 0.0), Activation.HARD_SIGMOID: (0.25, 0.5)}


def attributes_for(
    weight: np.ndarray[Any, Any],
    *,
    activation: Activation = Activation.NONE,
    element_type: Any = None,
    slice_height: int | None = None,
    **geometry: Any,
) -> SparseConvAttributes:
    """Attributes of a convolution with this weight; geometry as in Conv, pads of 1 at both ends unless given."""
    n = weight.ndim - 2
    group = geometry.pop("group", 1)
    defaults = {"kernel_shape": weight.shape[2:], "strides": (1,) * n, "pads": (1,) * (2 * n), "dilations": (1,) * n}
    alpha, beta = PARAMETERS.get(activation, (0.0, 0.0))
    return SparseConvAttributes(
        geometry=ConvGeometry(**(defaults | geometry), group=group),
        weight=encode(weight, group, slice_height),
        element_type=np.dtype(element_type or weight.dtype),
        activation=activation,
        alpha=alpha,
        beta=beta,
    )


def split_channels(channels: int, parts: int) -> tuple[int, ...]:
    """So many parts of the channels, of at least one each and the last the largest."""
    bounds = [round(channels * (i / parts) ** 2) for i in range(parts + 1)]
    bounds = [max(bound, i) for i, bound in enumerate(bounds)]
    return tuple(end - start for start, end in itertools.pairwise(bounds))


def split_x(op_type: str, x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """X as the inputs of a node that `sparse_node` made: whole, or in the parts of `split_channels`."""
    if op_type not in CONCAT_OPS:
        return {"X": x}
    ends = np.cumsum(split_channels(x.shape[1], CONCAT_OPS[op_type]))
    parts = np.split(x, ends[:-1], axis=1)
    return {"X" if i == 0 else f"X{i + 1}": np.ascontiguousarray(part) for i, part in enumerate(parts)}


def sparse_node(
    attributes: SparseConvAttributes, op_type: str, inputs: Sequence[str], output: str = "Y", name: str = "sparse"
) -> NodeProto:
    if op_type == SPARSE_CONV_MAX_POOL:
        attributes = dataclasses.replace(attributes, pool=POOL)
    if op_type in CONCAT_OPS and not attributes.input_channels:
        channels = split_channels(attributes.weight.weight_shape[1], CONCAT_OPS[op_type])
        attributes = dataclasses.replace(attributes, input_channels=channels)
    node = helper.make_node(op_type, list(inputs), [output], name=name, domain=DOMAIN)
    for key, value in attributes.to_node_attributes().items():
        tensor = numpy_helper.from_array(value, key) if isinstance(value, np.ndarray) else value
        node.attribute.append(helper.make_attribute(key, tensor))
    return node


def sparse_model(
    attributes: SparseConvAttributes,
    op_type: str,
    *,
    opset: int = 17,
    ir_version: int = 8,
    bias: np.ndarray[Any, Any] | None = None,
) -> ModelProto:
    """A model of one node: X (in the parts of `split_channels`, where the op reads several), and Z for the residual,
    in; Y out; batch and sizes dynamic.
    """
    element_type = ELEMENT_TYPES[attributes.element_type]
    shape = attributes.weight.weight_shape
    spatial = [f"d{i}" for i in range(len(shape) - 2)]
    residual = op_type == SPARSE_CONV_ADD
    channels = (shape[1] * attributes.geometry.group,)
    if op_type in CONCAT_OPS:
        channels = attributes.input_channels or split_channels(shape[1], CONCAT_OPS[op_type])
    parts = ["X", *(f"X{i}" for i in range(2, len(channels) + 1))]
    names = ["X", "B" if bias is not None else "", *(["Z"] if residual else parts[1:])]
    inputs = [
        helper.make_tensor_value_info(name, element_type, ["n", count, *spatial])
        for name, count in zip(parts, channels, strict=True)
    ]
    if residual:
        inputs.append(helper.make_tensor_value_info("Z", element_type, [None] * len(shape)))
    graph = helper.make_graph(
        [sparse_node(attributes, op_type, names)],
        "g",
        inputs,
        [helper.make_tensor_value_info("Y", element_type, [None] * len(shape))],
        [numpy_helper.from_array(bias, "B")] if bias is not None else [],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        ir_version=ir_version,
        functions=make_functions([op_type], opset),
    )


def convolve(
    x: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any],
    *,
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    dilations: Sequence[int] = (),
    group: int = 1,
) -> np.ndarray[Any, Any]:
    """ONNX Conv in float64, one kernel tap at a time."""
    n = weight.ndim - 2
    strides, dilations, pads = strides or (1,) * n, dilations or (1,) * n, pads or (0,) * (2 * n)
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)])
    out = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(x.shape[2:], weight.shape[2:], strides, dilations, strict=True)
    ]
    batch, per_group = x.shape[0], weight.shape[0] // group
    grouped = x.reshape(batch, group, weight.shape[1], *x.shape[2:])
    kernels = weight.reshape(group, per_group, *weight.shape[1:])
    result = np.zeros((batch, group, per_group, math.prod(out)))
    for tap in np.ndindex(*weight.shape[2:]):
        window = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in zip(tap, dilations, out, strides, strict=True)
        )
        read = grouped[(..., *window)]
        result += kernels[(..., *tap)] @ read.reshape(*read.shape[:3], result.shape[3])
    return result.reshape(batch, weight.shape[0], *out)


def pooled(op_type: str, *values: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """What an op makes of 2-D maps behind its activation: `POOL` of them, or they themselves."""
    return [max_pool(POOL, x) if op_type == SPARSE_CONV_MAX_POOL else x for x in values]


def activate(x: np.ndarray[Any, Any], attributes: SparseConvAttributes) -> np.ndarray[Any, Any]:
    """The activation of `attributes`, in float64."""
    alpha, beta = attributes.alpha, attributes.beta
    sigmoid = 1 / (1 + np.exp(-x))
    results = {
        Activation.NONE: x,
        Activation.RELU: np.maximum(x, 0),
        Activation.CLIP: np.clip(x, alpha, beta),
        Activation.LEAKY_RELU: np.where(x < 0, alpha * x, x),
        Activation.HARD_SWISH: x * np.clip(x / 6 + 0.5, 0, 1),
        Activation.HARD_SIGMOID: np.clip(alpha * x + beta, 0, 1),
        Activation.SIGMOID: sigmoid,
        Activation.SILU: x * sigmoid,
    }
    return results[attributes.activation]
