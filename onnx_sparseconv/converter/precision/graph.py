"""A model's nodes and tensors over all its graphs, with the element types that they have before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnx_sparseconv.converter.precision.ops import Signature, element_type, signature
from onnx_sparseconv.nodes import subgraphs


@dataclass(eq=False)
class Tensor:
    """A named value.

    Attributes:
        name: its name.
        element_type: ``onnx.TensorProto.DataType``, None where it is not known (or no tensor).
        scope: where it is defined.
        producer: the node that makes it; None for inputs and initializers.
        stored: its data, where it is an initializer that nobody may override, or the value of a Constant.
        readers: nodes that read it, with the number of the input.
        is_output: whether it is an output of its graph.
    """

    name: str
    element_type: int | None
    scope: GraphScope
    producer: Node | None = None
    stored: TensorProto | None = None
    readers: list[tuple[Node, int]] = field(default_factory=list)
    is_output: bool = False

    @property
    def is_float(self) -> bool:
        """Whether it is a float32 tensor."""
        return self.element_type == TensorProto.FLOAT


@dataclass(eq=False)
class Node:
    """A node and the tensors that it reads (None: absent, or unknown) and makes."""

    proto: NodeProto
    scope: GraphScope
    signature: Signature
    inputs: list[Tensor | None]
    outputs: list[Tensor | None] = field(default_factory=list)
    bodies: list[GraphScope] = field(default_factory=list)

    @property
    def op(self) -> str:
        """The operator's name."""
        return str(self.proto.op_type)

    @property
    def label(self) -> str:
        """A name for people."""
        return self.proto.name or next((name for name in self.proto.output if name), self.op)


@dataclass(eq=False)
class GraphScope:
    """A graph: the main one, or one in a node's attribute. ``path`` is for people, empty for the main graph."""

    proto: GraphProto
    path: str
    parent: GraphScope | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def find(self, name: str) -> Tensor | None:
        """The tensor of a name, as nodes of this graph see it."""
        scope: GraphScope | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope.parent
        return None


def read_graph(proto: ModelProto, opset: int) -> GraphScope:
    """The main graph of a model, with all that is in it. Model-local functions are left out."""
    overridable = {i.name for i in proto.graph.input} if proto.ir_version >= 4 else set()
    return _read(proto.graph, "", None, opset, overridable)


def all_nodes(scope: GraphScope) -> Iterator[Node]:
    """The nodes of a graph and of the graphs in them, each before what it holds."""
    for node in scope.nodes:
        yield node
        for body in node.bodies:
            yield from all_nodes(body)


def all_scopes(scope: GraphScope) -> Iterator[GraphScope]:
    """A graph and the graphs in its nodes."""
    yield scope
    for node in scope.nodes:
        for body in node.bodies:
            yield from all_scopes(body)


def _read(graph: GraphProto, path: str, parent: GraphScope | None, opset: int, overridable: set[str]) -> GraphScope:
    scope = GraphScope(graph, path, parent)
    stated = {i.name: _stated_type(i.type) for i in (*graph.value_info, *graph.output, *graph.input)}
    for info in graph.input:
        scope.tensors[info.name] = Tensor(info.name, stated[info.name], scope)
    for sparse in graph.sparse_initializer:
        scope.tensors[sparse.values.name] = Tensor(sparse.values.name, sparse.values.data_type, scope)
    for stored in graph.initializer:
        data = None if stored.name in overridable else stored
        scope.tensors[stored.name] = Tensor(stored.name, stored.data_type, scope, stored=data)
    for proto in graph.node:
        inputs = [scope.find(name) if name else None for name in proto.input]
        node = Node(proto, scope, signature(proto, opset), inputs)
        label = proto.name or next((name for name in proto.output if name), proto.op_type)
        for body in subgraphs(proto):
            inner = f"{path}/{label}/{body.name}".lstrip("/")
            node.bodies.append(_read(body, inner, scope, opset, set()))
        for index, tensor in enumerate(inputs):
            if tensor is not None:
                tensor.readers.append((node, index))
        for index, name in enumerate(proto.output):
            inferred = _output_type(node, index)
            known = stated.get(name) if inferred is None else inferred
            node.outputs.append(Tensor(name, known, scope, node, _stored(proto)) if name else None)
        scope.tensors |= {t.name: t for t in node.outputs if t is not None}
        scope.nodes.append(node)
    for info in graph.output:
        if info.name in scope.tensors:
            scope.tensors[info.name].is_output = True
    return scope


def _stated_type(type_proto) -> int | None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return (type_proto.tensor_type.elem_type or None) if type_proto.HasField("tensor_type") else None


def _stored(node: NodeProto) -> TensorProto | None:
    """The tensor in a Constant node."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return next((a.t for a in node.attribute if a.name == "value" and not a.ref_attr_name), None)


def _output_type(node: Node, index: int) -> int | None:
    """Element type of an output, as far as the operator's schema tells it."""
    proto = node.proto
    if node.bodies:
        return _body_output_type(node, index)
    attributes = {a.name: a for a in proto.attribute}
    if proto.op_type == "Cast" and "to" in attributes:
        return int(attributes["to"].i)
    if proto.op_type == "Constant":
        return _constant_type(proto)
    if proto.op_type == "ConstantOfShape":
        return int(attributes["value"].t.data_type) if "value" in attributes else TensorProto.FLOAT
    if "dtype" in attributes:  # EyeLike and the random ones
        return int(attributes["dtype"].i)
    if proto.op_type in ("RandomNormal", "RandomUniform"):
        return int(TensorProto.FLOAT)
    type_name = node.signature.outputs[index]
    fixed = element_type(type_name)
    if fixed is not None or not type_name:
        return fixed
    bound = [
        t for t, name in zip(node.inputs, node.signature.inputs, strict=True) if t is not None and name == type_name
    ]
    return next((t.element_type for t in bound if t.element_type is not None), None)


def _constant_type(proto: NodeProto) -> int | None:
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.TENSOR:
            return int(attribute.t.data_type)
        if attribute.type == AttributeProto.SPARSE_TENSOR:
            return int(attribute.sparse_tensor.values.data_type)
        if attribute.type in (AttributeProto.FLOAT, AttributeProto.FLOATS):
            return int(TensorProto.FLOAT)
        if attribute.type in (AttributeProto.INT, AttributeProto.INTS):
            return int(TensorProto.INT64)
    return None


def _body_output_type(node: Node, index: int) -> int | None:
    """Element type of an output of If, Loop or Scan: that of the body's output, which a Loop has one more of."""
    position = index + 1 if node.op == "Loop" else index
    for body in node.bodies:
        outputs = body.proto.output
        if position < len(outputs):
            tensor = body.find(outputs[position].name)
            if tensor is not None and tensor.element_type is not None:
                return tensor.element_type
    return None
