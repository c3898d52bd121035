"""A model as onnx-graphsurgeon graphs to edit, and the way back into the original ModelProto.

graphsurgeon is pleasant for passes, but its export loses parts of a model: documentation and metadata, inputs that
are initializers, quantisation annotations, the place of outer-scope tensors. So its export is not used for whole
models. Passes edit the graphsurgeon graphs; `ModelView.write_back` compares them with what was imported and edits
the original proto: untouched nodes stay as they are, bit for bit, new nodes are exported one by one, and tensors
and nodes that only replaced nodes had used are removed.

The contract for passes: rewire inputs and outputs of nodes freely, add and remove nodes; to change a node's operator or
attributes, replace the node. A new gs.Constant among a node's inputs becomes an initializer (in a function, a
Constant node); its name must be new to the model (`ModelView.unique_name`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.logger import G_LOGGER

from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.nodes import iterate_nodes, subgraphs


@dataclass(frozen=True, eq=False)
class Scope:
    """One list of nodes: the main graph, a subgraph of a control-flow node, or the body of a model-local function.

    Attributes:
        path: where it is, for people: empty for the main graph, else like ``if_1/then_branch`` or
            ``function:domain::name``.
        proto: the original.
        graph: graphsurgeon's form of it.
        parent: the scope around a subgraph, None for the main graph and functions.
        function: the function that this scope belongs to, None in the main graph and its subgraphs.
        position: indices of nodes and names of attributes that lead here; unlike ``path`` it is unique.
        owner: the node of the parent that a subgraph belongs to.
    """

    path: str
    proto: GraphProto | FunctionProto
    graph: gs.Graph | gs.Function
    parent: Scope | None = None
    function: FunctionProto | None = None
    position: tuple[int | str, ...] = ()
    owner: gs.Node | None = None

    @property
    def initializer_inputs(self) -> frozenset[str]:
        """Initializers that a caller of the model may override, by name."""
        if not isinstance(self.proto, GraphProto):
            return frozenset()
        return frozenset(i.name for i in self.proto.input) & initializer_names(self.proto)


class ModelView:
    """graphsurgeon graphs over a ModelProto, with the way back.

    Args:
        proto: the model, all its data loaded. `write_back` changes it.

    Raises:
        ModelError: graphsurgeon cannot read the model.
    """

    def __init__(self, proto: ModelProto) -> None:
        self.proto = proto
        # The node is kept beside its proto: if it were freed, a new node could get its id.
        self._origin: dict[int, tuple[gs.Node, NodeProto]] = {}
        try:
            with _quiet(), _without_binary_strings(proto):
                root = gs.import_onnx(proto)
        except Exception as error:
            raise ModelError(f"graphsurgeon cannot read the model: {error}") from error
        self.scopes: list[Scope] = []
        self._collect(Scope("", proto.graph, root))
        for index, (function_proto, function) in enumerate(zip(proto.functions, root.functions, strict=True)):
            path = f"function:{function_proto.domain}::{function_proto.name}"
            position = ("function", index)
            self._collect(Scope(path, function_proto, function, function=function_proto, position=position))
        self._used_before = [_used_names(scope.proto) for scope in self.scopes]
        self._imported = {
            name
            for scope in self.scopes
            if isinstance(scope.proto, GraphProto)
            for name in initializer_names(scope.proto)
        }
        self._names = {name for scope in self.scopes for name in _all_names(scope.proto)}

    def unique_name(self, wanted: str) -> str:
        """``wanted``, or it with a number if the model has a tensor of that name; the name is taken from then on."""
        name, count = wanted, 1
        while not name or name in self._names:
            name = f"{wanted}_{count}"
            count += 1
        self._names.add(name)
        return name

    def pinned_names(self) -> frozenset[str]:
        """Tensors that a pass must not do away with: outputs of any graph, and what training information names."""
        outputs = {t.name for scope in self.scopes for t in scope.graph.outputs}
        return frozenset(outputs | _names_in_training(self.proto))

    def origin(self, node: gs.Node) -> NodeProto | None:
        """The proto that ``node`` was imported from, None for a node that a pass made."""
        _, proto = self._origin.get(id(node), (node, None))
        return proto

    def write_back(self) -> set[str]:
        """Apply what passes did to the graphs to the original proto.

        Returns:
            Names of the tensors that were removed because only replaced nodes had used them.
        """
        removed: set[str] = set()
        kept = _names_in_training(self.proto)
        # Inner scopes come after outer ones; a node is copied when its list is rebuilt, so inner ones go first.
        for scope, used_before in reversed(list(zip(self.scopes, self._used_before, strict=True))):
            self._write_nodes(scope)
            removed |= _remove_orphans(scope.proto, used_before - kept)
        return removed

    def _collect(self, scope: Scope) -> None:
        self.scopes.append(scope)
        for index, (node, node_proto) in enumerate(zip(scope.graph.nodes, scope.proto.node, strict=True)):
            self._origin[id(node)] = (node, node_proto)
            for attribute in node_proto.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH and not attribute.ref_attr_name:
                    label = node_proto.name or (node_proto.output[0] if node_proto.output else node_proto.op_type)
                    path = f"{scope.path}/{label}/{attribute.name}".lstrip("/")
                    graph = node.attrs[attribute.name]
                    position = (*scope.position, index, attribute.name)
                    inner = Scope(path, attribute.g, graph, scope, scope.function, position, node)
                    self._collect(inner)

    def _write_nodes(self, scope: Scope) -> None:
        originals = list(scope.proto.node)
        # Whose documentation a new node keeps: the node of its name, else the one that made its output.
        replaced = {name: proto for proto in originals for name in proto.output if name}
        replaced |= {f"node {proto.name}": proto for proto in originals if proto.name}
        wanted = [self._to_proto(node, replaced) for node in scope.graph.nodes]
        constants = self._new_constants(scope)
        if isinstance(scope.proto, GraphProto):
            scope.proto.initializer.extend(constants)
        else:
            wanted = [helper.make_node("Constant", [], [c.name], value=c) for c in constants] + wanted
        if len(wanted) == len(originals) and all(a is b for a, b in zip(wanted, originals, strict=True)):
            return
        del scope.proto.node[:]
        scope.proto.node.extend(wanted)

    def _new_constants(self, scope: Scope) -> list[TensorProto]:
        """Constants that passes connected to nodes of the scope and that no scope holds yet."""
        new: dict[str, TensorProto] = {}
        for tensor in (t for node in scope.graph.nodes for t in node.inputs):
            if isinstance(tensor, gs.Constant) and tensor.name not in self._imported:
                new[tensor.name] = OnnxExporter.export_tensor_proto(tensor)
        self._imported |= new.keys()
        return list(new.values())

    def _to_proto(self, node: gs.Node, originals: Mapping[str, NodeProto]) -> NodeProto:
        """The proto of a node; ``originals`` are nodes by ``node NAME`` and by their outputs."""
        inputs, outputs = [t.name for t in node.inputs], [t.name for t in node.outputs]
        known = self.origin(node)
        if known is not None:
            if list(known.input) != inputs or list(known.output) != outputs:
                known.input[:] = inputs
                known.output[:] = outputs
            return known
        proto: NodeProto = OnnxExporter.export_node(node)
        replaced = next((originals[key] for key in (f"node {node.name}", *outputs) if key in originals), None)
        if replaced is not None:
            # Merged rather than assigned: documentation need not be UTF-8.
            kept = NodeProto.FromString(replaced.SerializeToString())
            for field in ("input", "output", "name", "op_type", "domain", "overload", "attribute"):
                if field in kept.DESCRIPTOR.fields_by_name:
                    kept.ClearField(field)
            proto.MergeFrom(kept)
        return proto


def _used_names(proto: GraphProto | FunctionProto) -> set[str]:
    """Names that nodes of the scope and of its subgraphs read, and the scope's outputs."""
    outputs = proto.output
    names = set(outputs) if isinstance(proto, FunctionProto) else {o.name for o in outputs}
    for node in proto.node:
        names.update(node.input)
        for graph in subgraphs(node):
            names |= _used_names(graph)
    return names


def _names_in_training(proto: ModelProto) -> set[str]:
    """Names of the model's tensors that its training information may refer to."""
    names: set[str] = set()
    for training in proto.training_info:
        names |= _used_names(training.initialization) | _used_names(training.algorithm)
        for binding in (*training.initialization_binding, *training.update_binding):
            names |= {binding.key, binding.value}
    return names


def _all_names(proto: GraphProto | FunctionProto) -> set[str]:
    """Names of all tensors that the scope itself reads or defines."""
    names = {name for node in proto.node for name in (*node.input, *node.output)}
    if isinstance(proto, FunctionProto):
        return names | {*proto.input, *proto.output}
    return names | {i.name for i in (*proto.input, *proto.output)} | initializer_names(proto)


def initializer_names(graph: GraphProto) -> frozenset[str]:
    """Names of the initializers of a graph, dense and sparse."""
    return frozenset(t.name for t in graph.initializer) | {t.values.name for t in graph.sparse_initializer}


def _remove_orphans(proto: GraphProto | FunctionProto, used_before: set[str]) -> set[str]:
    """Remove nodes and initializers of the scope whose results were used before and are used no more."""
    removed: set[str] = set()
    while True:
        unused = used_before - _used_names(proto)
        dead = [i for i, n in enumerate(proto.node) if any(n.output) and unused.issuperset(filter(None, n.output))]
        if not dead:
            break
        for index in reversed(dead):
            removed.update(filter(None, proto.node[index].output))
            del proto.node[index]
    if isinstance(proto, FunctionProto):
        return removed
    for field, name_of in (
        (proto.initializer, lambda t: t.name),
        (proto.sparse_initializer, lambda t: t.values.name),
    ):
        removed |= _drop(field, name_of, unused)
    # An overridable initializer that went must not stay behind as an input that callers have to give.
    _drop(proto.input, lambda i: i.name, removed)
    gone = unused - _all_names(proto)
    _drop(proto.value_info, lambda i: i.name, gone)
    _drop(proto.quantization_annotation, lambda a: a.tensor_name, gone)
    return removed


def _drop(field, name_of, names: set[str]) -> set[str]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Delete the items of a repeated field whose name is in ``names``; return the names found."""
    dropped = set()
    for index in reversed(range(len(field))):
        name = name_of(field[index])
        if name in names:
            dropped.add(name)
            del field[index]
    return dropped


@contextmanager
def _quiet() -> Iterator[None]:
    """Graphsurgeon prints warnings to stdout, where the command line's JSON goes."""
    before = G_LOGGER.severity
    G_LOGGER.severity = G_LOGGER.CRITICAL
    try:
        yield
    finally:
        G_LOGGER.severity = before


@contextmanager
def _without_binary_strings(proto: ModelProto) -> Iterator[None]:
    """Blank STRING attributes that are not UTF-8 (some custom ops keep binary data there) while graphsurgeon reads."""
    nodes = [*iterate_nodes(proto.graph.node), *(n for f in proto.functions for n in iterate_nodes(f.node))]
    binary = [a for n in nodes for a in n.attribute if not all(map(_is_utf8, (a.s, *a.strings)))]
    originals = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in binary]
    for attribute in binary:
        attribute.s = b""
        attribute.strings[:] = [b""] * len(attribute.strings)
    try:
        yield
    finally:
        for attribute, original in zip(binary, originals, strict=True):
            attribute.CopyFrom(original)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
