"""Shapes of a model's tensors, as far as ONNX's shape inference knows them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto

from onnx_sparseconv.converter.model_view import Scope
from onnx_sparseconv.converter.sizes import EqualSizes, NamedShape
from onnx_sparseconv.converter.unsure_sizes import hide_unsure_sizes
from onnx_sparseconv.nodes import iterate_nodes, recursive_function, subgraphs

Shape = tuple[int | None, ...]

# Shape inference reads the values of small initializers (the shape of a Reshape); weights would only cost memory.
MAX_VALUE_ELEMENTS = 1024
# Operators that slide a window over the axes behind the first two, and inputs that have only these.
_WINDOWED = frozenset({"Conv", "ConvInteger", "QLinearConv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})
_FLAT = 2
# From this IR version on, an initializer that is also an input has a value that callers may set.
_OVERRIDABLE_IR_VERSION = 4


class ShapeMap:
    """Shapes by scope and name.

    Args:
        proto: the model; it is not changed, and its weights are not copied.
        inferred_only: to take nothing but what follows from the model's inputs. What it states of other tensors may be
            of a time when its inputs had other sizes, and ONNX Runtime runs it all the same.
    """

    def __init__(self, proto: ModelProto, *, inferred_only: bool = False) -> None:
        self._proto, self._inferred_only = proto, inferred_only
        # None hides a tensor of the same name around an input of a body of which nothing is known.
        self._shapes: dict[tuple[tuple[int | str, ...], str], NamedShape | None] = {}
        light = _without_weights(proto)
        # Before anything is forgotten: inference would end the process on some of what the model states.
        self.complete = _can_be_inferred(light)
        if inferred_only:
            _forget_statements(light)
        if self.complete:
            try:
                light = _infer(light, certain=inferred_only)
            except Exception:  # inference is a help, not a need: what the model itself states is still used
                self.complete = False
        self._collect((), light.graph)
        self._equal = EqualSizes()
        self._compare_sizes(((),), {}, light.graph)

    @functools.cached_property
    def certain(self) -> ShapeMap:
        """Only what follows from the model's inputs, made of the model as it is when this is first asked for.

        Whatever changes what a model computes has to ask this one.
        """
        return self if self._inferred_only else ShapeMap(self._proto, inferred_only=True)

    def get(self, name: str, scope: Scope) -> Shape | None:
        """Shape of a tensor seen from ``scope``, unknown sizes None; None when not even its rank is known."""
        shape = self._find(name, scope)
        return None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)

    def of_model(self, name: str) -> NamedShape | None:
        """The same of a tensor of the model's own graph, with the names of sizes that have one."""
        return self._shapes.get(((), name))

    def are_same(self, first: str, second: str, scope: Scope) -> bool:
        """Whether two tensors certainly have one shape: all sizes are equal numbers, or the same symbol, or made of the
        same symbol in the same way. Whoever asks `certain` knows that this does not hang on what the model states.
        """
        one, other = self._find(first, scope), self._find(second, scope)
        if one is None or other is None or None in one:
            return False
        return self._equal.canonical(one) == self._equal.canonical(other)

    def _find(self, name: str, scope: Scope) -> NamedShape | None:
        positions = []
        inner: Scope | None = scope
        while inner is not None:
            positions.append(inner.position)
            inner = inner.parent
        return self._first_of(positions, name)

    def _first_of(self, positions: Iterable[tuple[int | str, ...]], name: str) -> NamedShape | None:
        return next((self._shapes[at, name] for at in positions if (at, name) in self._shapes), None)

    def _compare_sizes(
        self, positions: tuple[tuple[int | str, ...], ...], constants: Mapping[str, NamedShape], graph: GraphProto
    ) -> None:
        """Bring together the sizes in a graph.

        Args:
            positions: of the graph, and of those around it, from the inside to the outside.
            constants: shapes of initializers around it.
            graph: the graph.
        """
        given = {info.name for info in graph.input}
        own = {t.name: tuple(t.dims) for t in graph.initializer}
        constants = {name: shape for name, shape in constants.items() if name not in given} | own
        for index, node in enumerate(graph.node):
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    inside = (*positions[0], index, attribute.name)
                    self._compare_sizes((inside, *positions), constants, attribute.g)
            self._equal.read(node, lambda name: self._first_of(positions, name) or constants.get(name))

    def _collect(self, position: tuple[int | str, ...], graph: GraphProto) -> None:
        self._shapes |= {(position, info.name): None for info in graph.input}
        for info in (*graph.input, *graph.value_info, *graph.output):
            shape = _shape_of(info)
            if shape is not None:
                self._shapes[position, info.name] = shape
        for index, node in enumerate(graph.node):
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    self._collect((*position, index, attribute.name), attribute.g)


def _infer(proto: ModelProto, *, certain: bool) -> ModelProto:
    """The model with the shapes that onnx infers; which of these sizes are certain, onnx does not say."""
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    while certain and hide_unsure_sizes(proto, inferred):
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    return inferred


def _shape_of(info: ValueInfoProto) -> NamedShape | None:
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.dim_value > 0 else d.dim_param or None for d in tensor.shape.dim)


def _can_be_inferred(proto: ModelProto) -> bool:
    """Whether shape inference of all supported versions of onnx survives a model."""
    try:
        if recursive_function(proto.functions):
            return False
        _refuse_zero_strides(proto)
        _refuse_other_axes(proto)
    except Exception:  # very deep calls, too: whatever cannot be looked at is not inferred
        return False
    return True


def _refuse_zero_strides(proto: ModelProto) -> None:
    """Version 1.17 of onnx divides by the strides of a convolution or pooling, which ends the process when one is 0.

    Raises:
        ValueError: a stride is 0.
    """
    nodes = [n for owner in (proto.graph, *proto.functions) for n in iterate_nodes(owner.node)]
    if any(a.name == "strides" and 0 in a.ints for n in nodes for a in n.attribute):
        raise ValueError("a stride is 0")


def _refuse_other_axes(proto: ModelProto) -> None:
    """Versions of onnx before 1.20 end the process where a window slides over an input of two axes, or of other axes
    than its weight has.

    Only what the model itself states is looked at, and functions must not be recursive.

    Raises:
        ValueError: a convolution or pooling has such an input.
    """
    functions = {(f.domain, f.name): f for f in proto.functions}
    seen = set()  # functions, and axes of their inputs: calls may double from one to the next

    def refuse(nodes: Iterable[NodeProto], ranks: dict[str, int]) -> None:
        for node in iterate_nodes(nodes):
            given = [ranks.get(name) for name in node.input]
            if node.domain in {"", "ai.onnx"} and node.op_type in _WINDOWED and given and given[0] is not None:
                weight = given[1] if node.op_type == "Conv" and len(given) > 1 else None
                if given[0] == _FLAT or weight not in {None, given[0]}:
                    raise ValueError(f"the input of a {node.op_type} has {given[0]} axes")
            called = functions.get((node.domain, node.op_type))
            call = (node.domain, node.op_type, *given)
            if called is not None and call not in seen:
                seen.add(call)
                refuse(called.node, {a: r for a, r in zip(called.input, given, strict=False) if r is not None})

    stated = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    ranks = {info.name: len(shape) for info in stated if (shape := _shape_of(info)) is not None}
    refuse(proto.graph.node, ranks | {t.name: len(t.dims) for t in proto.graph.initializer})


def _forget_statements(proto: ModelProto) -> None:
    """Drop what a model states of shapes, but for its inputs: these alone are checked when it is run."""
    graph = proto.graph
    for info in graph.input:
        if not info.type.HasField("tensor_type"):
            _forget_shape(info.type)  # of what is in a sequence, nothing is checked
    if proto.ir_version >= _OVERRIDABLE_IR_VERSION:
        given = {i.name for i in graph.input}
        constant = [t for t in graph.initializer if t.name not in given]
        del graph.initializer[:]
        graph.initializer.extend(constant)
    _forget_in_graph(graph)
    for function in proto.functions:
        _forget_in_bodies(function.node)


def _forget_in_graph(graph: GraphProto) -> None:
    del graph.value_info[:]
    for output in graph.output:
        _forget_shape(output.type)
    _forget_in_bodies(graph.node)


def _forget_in_bodies(nodes: Iterable[NodeProto]) -> None:
    """The same in subgraphs, whose inputs are not checked: what a Loop carries may change its size."""
    for body in (body for node in nodes for body in subgraphs(node)):
        for info in body.input:
            _forget_shape(info.type)
        _forget_in_graph(body)


def _forget_shape(kind: TypeProto) -> None:
    if kind.HasField("tensor_type"):
        kind.tensor_type.ClearField("shape")
    elif kind.HasField("sequence_type"):
        _forget_shape(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _forget_shape(kind.optional_type.elem_type)


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
