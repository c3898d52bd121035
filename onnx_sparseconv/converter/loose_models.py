"""Models that break a rule of ONNX which ONNX Runtime does not insist on: they are loaded as if they kept it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from onnx_sparseconv.converter.model_view import initializer_names
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.nodes import subgraphs

_STATE_IT = "state its shape, with names for sizes that are open"


def sort_nodes(owner: GraphProto | FunctionProto) -> bool:
    """Put each node behind those whose outputs it reads, in the graph or function and in its subgraphs; return whether
    one was in front of them. Nodes that need not be moved keep their order; those of a circle keep their places.

    ONNX Runtime's own tool that turns models into float16 adds its Cast nodes at the end.
    """
    inner = [sort_nodes(graph) for node in owner.node for graph in subgraphs(node)]
    makers = {name: index for index, node in enumerate(owner.node) for name in node.output if name}
    order: list[int] = []
    placed: set[int] = set()
    for index in range(len(owner.node)):
        _place(owner, makers, index, order, placed)
    if order == list(range(len(owner.node))):
        return any(inner)
    nodes = [owner.node[index] for index in order]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del owner.node[:]
    owner.node.extend(copies)
    return True


def _place(
    owner: GraphProto | FunctionProto, makers: dict[str, int], index: int, order: list[int], placed: set[int]
) -> None:
    """Append a node that is not placed yet, behind what it reads. Without recursion: chains of nodes are long."""
    begun: set[int] = set()
    stack = [index]
    while stack:
        at = stack[-1]
        if at in placed:
            stack.pop()
            continue
        begun.add(at)
        before = (makers[name] for name in _read_by(owner.node[at]) if name in makers)
        waiting = next((one for one in before if one not in placed and one not in begun), None)
        if waiting is not None:
            stack.append(waiting)
            continue
        order.append(at)
        placed.add(at)
        stack.pop()


def _read_by(node: NodeProto) -> Iterator[str]:
    """Names that a node reads, by itself or in its subgraphs from around them."""
    yield from node.input
    for graph in subgraphs(node):
        own = _defined_in(graph)
        read = [name for inner in graph.node for name in _read_by(inner)] + [output.name for output in graph.output]
        yield from (name for name in read if name not in own)


def name_graph(proto: ModelProto) -> bool:
    """Name the main graph where it has no name; return whether it had none."""
    if proto.graph.name:
        return False
    proto.graph.name = "graph"
    return True


def name_apart(proto: ModelProto) -> bool:
    """Rename initializers of subgraphs that have the name of a tensor around them; return whether there are such.

    ONNX forbids them, though its checker does not see it, and ONNX Runtime reads the inner one.
    """
    owners = (proto.graph, *proto.functions)
    taken = {name for owner in owners for name in _names_within(owner)}
    renamed = [_name_apart_below(owner, frozenset(), taken) for owner in owners]
    return any(renamed)


def _name_apart_below(owner: GraphProto | FunctionProto, outer: frozenset[str], taken: set[str]) -> bool:
    """The same of the subgraphs of a graph or function, which has ``outer`` names around it."""
    changed = False
    around = outer | _defined_in(owner)
    for graph in (graph for node in owner.node for graph in subgraphs(node)):
        for name in sorted(initializer_names(graph) & around):
            new = next(one for n in itertools.count(1) if (one := f"{name}_{n}") not in taken)
            taken.add(new)
            _rename_in(graph, name, new)
            changed = True
        changed |= _name_apart_below(graph, around, taken)
    return changed


def _rename_in(graph: GraphProto, old: str, new: str) -> None:
    """Rename a tensor that a graph defines, there and in the subgraphs that read it."""
    named = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for item in (*named, *graph.input, *graph.output, *graph.value_info):
        if item.name == old:
            item.name = new
    for annotation in graph.quantization_annotation:
        if annotation.tensor_name == old:
            annotation.tensor_name = new
        for parameter in annotation.quant_parameter_tensor_names:
            if parameter.value == old:
                parameter.value = new
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for body in subgraphs(node):
            if old not in _defined_in(body):
                _rename_in(body, old, new)


def _defined_in(owner: GraphProto | FunctionProto) -> frozenset[str]:
    """Names of the tensors that a graph or a function has by itself."""
    made = frozenset(name for node in owner.node for name in node.output)
    if isinstance(owner, FunctionProto):
        return made | frozenset(owner.input)
    return made | {i.name for i in owner.input} | initializer_names(owner)


def _names_within(owner: GraphProto | FunctionProto) -> Iterator[str]:
    """Names of all tensors of a graph or function, and of its subgraphs, also of such as are only described."""
    yield from _defined_in(owner)
    if isinstance(owner, GraphProto):
        yield from (info.name for info in owner.value_info)
    for node in owner.node:
        yield from node.input
        for graph in subgraphs(node):
            yield from _names_within(graph)


def state_output_shapes(proto: ModelProto) -> bool:
    """Give outputs of the model that have a type but no shape the one that is inferred; return whether there are such.

    Raises:
        ModelError: the shape of one cannot be inferred, or that of an input is not stated.
    """
    for info in filter(_lacks_shape, proto.graph.input):
        raise ModelError(f"the model's input {info.name!r} has a type but no shape, which ONNX asks for: {_STATE_IT}")
    unstated = [info for info in proto.graph.output if _lacks_shape(info)]
    shapes = ShapeMap(proto) if unstated else None
    for info in unstated:
        shape = shapes.of_model(info.name) if shapes is not None else None
        if shape is None:
            raise ModelError(
                f"the model's output {info.name!r} has a type but no shape, which ONNX asks for, and none can be "
                f"inferred: {_STATE_IT}"
            )
        element_type = info.type.tensor_type.elem_type
        info.type.CopyFrom(onnx.helper.make_tensor_type_proto(element_type, shape))
    return bool(unstated)


def _lacks_shape(info: onnx.ValueInfoProto) -> bool:
    return info.type.HasField("tensor_type") and not info.type.tensor_type.HasField("shape")
