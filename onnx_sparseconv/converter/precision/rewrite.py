"""Carrying out a `HalfPlan`: nodes read and make float16 tensors, with as few casts as that needs.

Every float tensor of the source may be there in two types. Each is made where it is first needed: a constant is stored
in float16, anything else is cast, once for all that see it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_sparseconv.converter.precision.graph import GraphScope, Node, Tensor
from onnx_sparseconv.converter.precision.ops import FLOAT, HALF, is_indifferent
from onnx_sparseconv.converter.precision.plan import HalfPlan, half_inputs, half_outputs
from onnx_sparseconv.converter.precision.weights import (
    Lost,
    constant_loss,
    half_tensor,
    sparse_to_half,
    write_sparse,
)
from onnx_sparseconv.custom_ops.schema import DOMAIN

_SUFFIX = {FLOAT: "fp32", HALF: "fp16"}


@dataclass(frozen=True)
class Rewritten:
    """What `rewrite` did.

    Attributes:
        casts: Cast nodes that were added.
        lost: weights that vanished, by tensor or node.
    """

    casts: int
    lost: tuple[Lost, ...]


def rewrite(proto: ModelProto, scope: GraphScope, plan: HalfPlan, *, half_io: bool = False) -> Rewritten:
    """Change a model as planned.

    Args:
        proto: the model; it is changed.
        scope: its main graph, as it was read.
        plan: what becomes of its nodes.
        half_io: make the model's float inputs and outputs float16, too.
    """
    writer = _Writer(plan, _names(proto.graph), keep_constants=bool(proto.training_info))
    writer.write_graph(scope, half_io=half_io)
    return Rewritten(writer.casts, tuple(writer.lost))


@dataclass(eq=False)
class _Writer:
    """State of one rewriting.

    Attributes:
        versions: for a scope and a tensor of the source (by ``id``): under which name it is there in which type.
        boundaries: for a scope, the type of its float inputs and outputs.
        casts, lost: see `Rewritten`.
    """

    plan: HalfPlan
    names: set[str]
    keep_constants: bool
    versions: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)
    boundaries: dict[int, int] = field(default_factory=dict)
    casts: int = 0
    lost: list[Lost] = field(default_factory=list)

    def write_graph(self, scope: GraphScope, *, half_io: bool = False) -> None:
        """Rewrite the nodes of a graph and of the graphs in it."""
        graph = scope.proto
        boundary = self.boundaries[id(scope)] = HALF if half_io else FLOAT
        initializers = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        for info in graph.input:
            tensor = scope.tensors[info.name]
            if tensor.is_float and info.name not in initializers:  # a default value that callers may set stays float
                info.type.tensor_type.elem_type = boundary
                self._define(scope, tensor, boundary, info.name)
        for tensor in list(scope.tensors.values()):
            if tensor.is_float and tensor.producer is None and (id(scope), id(tensor)) not in self.versions:
                self._define(scope, tensor, FLOAT, tensor.name)
            if tensor.is_float and tensor.stored is not None:
                self._write_constant(scope, tensor, graph)
        nodes: list[NodeProto] = []
        for node in scope.nodes:
            self._write_node(node, nodes)
        for info in graph.output:
            output = scope.find(info.name)
            if output is not None and output.is_float:
                info.name, element_type = self._output(scope, output, boundary, nodes)
                if info.type.tensor_type.elem_type:
                    info.type.tensor_type.elem_type = element_type
        del graph.node[:]
        graph.node.extend(nodes)
        self._restate_types(scope, graph)

    def _write_node(self, node: Node, nodes: list[NodeProto]) -> None:
        is_half = id(node) in self.plan.half
        scope, proto = node.scope, node.proto
        for index, tensor in enumerate(node.inputs):
            if tensor is not None and tensor.is_float:
                proto.input[index] = self._get(scope, tensor, self._wanted(node, index), nodes)
        for body in node.bodies:
            self.write_graph(body)
        out_half = set(half_outputs(node)) if is_half else set()
        for index, tensor in enumerate(node.outputs):
            if tensor is None or not tensor.is_float or (tensor.stored is not None and node.op == "Constant"):
                continue
            element_type = HALF if index in out_half else FLOAT
            name = tensor.name
            if tensor.is_output and element_type != self.boundaries[id(scope)]:
                # The name of an output of the graph goes to what has the output's type.
                name = proto.output[index] = self._unique(f"{name}_{_SUFFIX[element_type]}")
            self._define(scope, tensor, element_type, name)
        self._use_cast(node)
        if is_half and proto.domain == DOMAIN:
            attributes, lost = sparse_to_half(proto)
            write_sparse(proto, attributes)
            self.lost += [lost] if lost is not None else []
        nodes.append(proto)

    def _use_cast(self, node: Node) -> None:
        """Take what a Cast of the source makes as the other version of what it reads, if there is none yet."""
        if node.op != "Cast" or not is_indifferent(node.proto):
            return
        source, target = node.inputs[0], node.outputs[0]
        if source is None or not source.is_float or target is None or target.element_type not in _SUFFIX:
            return
        if target.element_type not in self._known(node.scope, source):
            self._define(node.scope, source, target.element_type, node.proto.output[0])

    def _write_constant(self, scope: GraphScope, tensor: Tensor, graph: GraphProto) -> None:
        """Store a constant in float16, if a node wants it so; beside the float one, if another wants that."""
        assert tensor.stored is not None
        wanted = [self._wanted(node, index) for node, index in tensor.readers]
        self._define(scope, tensor, FLOAT, tensor.name)
        if HALF not in wanted:
            return
        lost = constant_loss(tensor.stored, tensor.name)
        self.lost += [lost] if lost is not None else []
        if all(w == HALF for w in wanted) and not tensor.is_output and not self.keep_constants:
            tensor.stored.CopyFrom(half_tensor(tensor.stored, tensor.stored.name))
            self.versions[id(scope), id(tensor)] = {HALF: tensor.name}
            return
        name = self._unique(f"{tensor.name}_fp16")
        graph.initializer.append(half_tensor(tensor.stored, name))
        self._define(scope, tensor, HALF, name)

    def _wanted(self, node: Node, index: int) -> int | None:
        """The type in which a node wants an input; None where it does not matter."""
        if is_indifferent(node.proto):
            return None
        return HALF if id(node) in self.plan.half and index in half_inputs(node) else FLOAT

    def _get(self, scope: GraphScope, tensor: Tensor, wanted: int | None, nodes: list[NodeProto]) -> str:
        """The name of a tensor in the type wanted, cast if need be."""
        known = self._known(scope, tensor)
        if wanted is None:
            return known[FLOAT] if FLOAT in known else known[HALF]
        if wanted in known:
            return known[wanted]
        source = _half_source(tensor) if wanted == HALF else None
        if source is not None:
            name = source.name
        else:
            # An output of the graph is named at once, if this is where it gets its type.
            at_once = tensor.is_output and tensor.scope is scope and self.boundaries[id(scope)] == wanted
            free = at_once and tensor.name not in known.values()
            name = tensor.name if free else self._unique(f"{tensor.name}_{_SUFFIX[wanted]}")
            nodes.append(self._cast(next(iter(known.values())), name, wanted))
        self._define(scope, tensor, wanted, name)
        return name

    def _output(self, scope: GraphScope, tensor: Tensor, wanted: int, nodes: list[NodeProto]) -> tuple[str, int]:
        """Make a tensor an output of its graph in the type wanted; give the output's name and its type."""
        known = self._known(scope, tensor)
        if known.get(wanted) == tensor.name:
            return tensor.name, wanted
        if tensor.scope is not scope:  # an output of a subgraph that stands for a tensor around it
            return self._get(scope, tensor, wanted, nodes), wanted
        if tensor.producer is None:  # an initializer
            return tensor.name, FLOAT
        if tensor.name in known.values():  # it is there under the output's name, but in another type
            inner = self._unique(f"{tensor.name}_{_SUFFIX[FLOAT if wanted == HALF else HALF]}")
            _rename(nodes, tensor.name, inner)
            known = {t: inner if n == tensor.name else n for t, n in known.items()}
        source = known.get(wanted)
        if source is None:
            nodes.append(self._cast(next(iter(known.values())), tensor.name, wanted))
        else:
            nodes.append(helper.make_node("Identity", [source], [tensor.name], name=self._unique(f"{tensor.name}_is")))
        self.versions[id(scope), id(tensor)] = {**known, wanted: tensor.name}
        return tensor.name, wanted

    def _cast(self, source: str, target: str, element_type: int) -> NodeProto:
        self.casts += 1
        return helper.make_node("Cast", [source], [target], name=self._unique(f"Cast_{target}"), to=element_type)

    def _known(self, scope: GraphScope, tensor: Tensor) -> dict[int, str]:
        """The versions of a tensor that a scope sees."""
        found: dict[int, str] = {}
        inner: GraphScope | None = scope
        while inner is not None:
            found = {**self.versions.get((id(inner), id(tensor)), {}), **found}
            inner = inner.parent
        return found

    def _define(self, scope: GraphScope, tensor: Tensor, element_type: int, name: str) -> None:
        self.versions.setdefault((id(scope), id(tensor)), {})[element_type] = name

    def _restate_types(self, scope: GraphScope, graph: GraphProto) -> None:
        """Correct the types that the graph states of its tensors."""
        for info in graph.value_info:
            tensor = scope.tensors.get(info.name)
            versions = self.versions.get((id(scope), id(tensor)), {}) if tensor is not None else {}
            for element_type, name in versions.items():
                if name == info.name:
                    info.type.tensor_type.elem_type = element_type

    def _unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.names:
            name = f"{wanted}_{count}"
            count += 1
        self.names.add(name)
        return name


def _half_source(tensor: Tensor) -> Tensor | None:
    """The float16 tensor that a float one was cast from."""
    maker = tensor.producer
    if maker is None or maker.op != "Cast" or maker.proto.domain not in ("", "ai.onnx"):
        return None
    source = maker.inputs[0]
    return source if source is not None and source.element_type == TensorProto.FLOAT16 else None


def _rename(nodes: list[NodeProto], old: str, new: str) -> None:
    """Rename a tensor in nodes and in the graphs in them."""
    for node in nodes:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                inner = list(graph.node)
                _rename(inner, old, new)


def _names(graph: GraphProto) -> set[str]:
    """All names of tensors and nodes in a graph and in the graphs in it."""
    names = {i.name for i in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    names |= {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        names |= {node.name, *node.input, *node.output}
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                names |= _names(inner)
    return names
