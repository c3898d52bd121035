"""Shapes of a model's tensors, as far as ONNX's shape inference knows them."""

from __future__ import annotations

import math

import onnx
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from onnx_sparseconv.converter.model_view import Scope, iterate_nodes

Shape = tuple[int | None, ...]

# Shape inference reads the values of small initializers (the shape of a Reshape); weights would only cost memory.
MAX_VALUE_ELEMENTS = 1024


class ShapeMap:
    """Shapes by scope and name.

    Args:
        proto: the model; it is not changed, and its weights are not copied.
    """

    def __init__(self, proto: ModelProto) -> None:
        self._shapes: dict[tuple[tuple[int | str, ...], str], tuple[int | str | None, ...]] = {}
        light = _without_weights(proto)
        try:
            _refuse_zero_strides(light)
            light = onnx.shape_inference.infer_shapes(light, data_prop=True)
        except Exception:  # inference is a help, not a need: what the model itself states is still used
            self.complete = False
        else:
            self.complete = True
        self._collect((), light.graph)

    def get(self, name: str, scope: Scope) -> Shape | None:
        """Shape of a tensor seen from ``scope``, unknown sizes None; None when not even its rank is known."""
        shape = self._find(name, scope)
        return None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)

    def are_same(self, first: str, second: str, scope: Scope) -> bool:
        """Whether two tensors certainly have one shape: all sizes are equal numbers, or the same symbol."""
        shape = self._find(first, scope)
        return shape is not None and None not in shape and shape == self._find(second, scope)

    def _find(self, name: str, scope: Scope) -> tuple[int | str | None, ...] | None:
        inner: Scope | None = scope
        while inner is not None:
            shape = self._shapes.get((inner.position, name))
            if shape is not None:
                return shape
            inner = inner.parent
        return None

    def _collect(self, position: tuple[int | str, ...], graph: GraphProto) -> None:
        for info in (*graph.input, *graph.value_info, *graph.output):
            shape = _shape_of(info)
            if shape is not None:
                self._shapes[position, info.name] = shape
        for index, node in enumerate(graph.node):
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    self._collect((*position, index, attribute.name), attribute.g)


def _shape_of(info: ValueInfoProto) -> tuple[int | str | None, ...] | None:
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.dim_value > 0 else d.dim_param or None for d in tensor.shape.dim)


def _refuse_zero_strides(proto: ModelProto) -> None:
    """Version 1.17 of onnx divides by the strides of a convolution or pooling, which ends the process when one is 0.

    Raises:
        ValueError: a stride is 0.
    """
    nodes = [n for owner in (proto.graph, *proto.functions) for n in iterate_nodes(owner.node)]
    if any(a.name == "strides" and 0 in a.ints for n in nodes for a in n.attribute):
        raise ValueError("a stride is 0")


def _without_weights(proto: ModelProto) -> ModelProto:
    """A copy of the model whose large initializers have a type and dims but no data."""
    light = ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    graph = light.graph
    graph.name = proto.graph.name
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(proto.graph, field))
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) <= MAX_VALUE_ELEMENTS:
            graph.initializer.append(tensor)
        else:
            graph.initializer.append(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
    return light
