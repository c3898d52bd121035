"""Which nodes of a model become float16 nodes, and why the others do not. Nothing is changed here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx_sparseconv.converter.precision.graph import GraphScope, Node, Tensor, all_nodes
from onnx_sparseconv.converter.precision.ops import (
    FLOAT,
    HALF,
    element_type,
    float_inputs,
    is_heavy,
    is_indifferent,
    is_moving,
    position_inputs,
    refusal,
)
from onnx_sparseconv.converter.precision.weights import constant_problem, sparse_to_half
from onnx_sparseconv.custom_ops.schema import DOMAIN
from onnx_sparseconv.errors import FormatError

AS_ASKED = "as asked"
AROUND = "it would gain nothing: what is around it is float"
POSITIONS = "positions or sizes are computed with it, or whole numbers"
QUANTISED = "it belongs to quantisation"
UNKNOWN_TYPE = "the type of an input is not known"


@dataclass(frozen=True, eq=False)
class HalfPlan:
    """What becomes of the nodes that handle float tensors; by ``id`` of the `Node`.

    Attributes:
        half: nodes that become float16 nodes.
        kept: why each of the others stays float.
    """

    half: Mapping[int, Node]
    kept: Mapping[int, tuple[Node, str]]


def plan_half(scope: GraphScope, opset: int, keep: Iterable[str] = ()) -> HalfPlan:
    """Decide for every node.

    1. Nodes stay float that have no float16 form on CUDA, whose results leave float16's range or whose constants do,
       that belong to quantisation, or that the caller names (a node's or an operator's name).
    2. So do light nodes that compute positions or sizes: what Cast to an integer, the scales of Resize, a grid or
       boxes are computed with.
    3. So do light nodes after nodes that stay float, up to where a float16 tensor joins in, and light nodes that are
       not connected to any heavy float16 node: their casts would bring nothing.
    """
    nodes = [n for n in all_nodes(scope) if _handles_float(n)]
    deciding = [n for n in nodes if not is_indifferent(n.proto)]
    wishes = frozenset(keep)
    kept = {id(n): (n, why) for n in deciding if (why := _obstacle(n, opset, wishes))}
    half = {id(n): n for n in deciding if id(n) not in kept}

    def leave(node: Node, why: str) -> None:
        del half[id(node)]
        kept[id(node)] = (node, why)

    for node in _compute_positions(nodes, half):
        leave(node, POSITIONS)
    while True:
        useless = [*_without_heavy_neighbour(half), *_after_float(half)]
        if not useless:
            break
        for node in {id(n): n for n in useless}.values():
            leave(node, AROUND)
    return HalfPlan(half, kept)


def half_inputs(node: Node) -> tuple[int, ...]:
    """Inputs that a float16 node takes in float16."""
    fixed = float_inputs(node.proto)
    return tuple(
        index
        for index, (tensor, type_name) in enumerate(zip(node.inputs, node.signature.inputs, strict=True))
        if tensor is not None and tensor.is_float and index not in fixed and element_type(type_name) is None
    )


def half_outputs(node: Node) -> tuple[int, ...]:
    """Outputs that a float16 node gives in float16."""
    variables = {node.signature.inputs[i] for i in half_inputs(node)}
    return tuple(
        index
        for index, (tensor, type_name) in enumerate(zip(node.outputs, node.signature.outputs, strict=True))
        if tensor is not None and tensor.is_float and type_name in variables
    )


def _handles_float(node: Node) -> bool:
    """Whether a node reads or makes float32 tensors; Constant nodes are treated as what they hold."""
    if node.op == "Constant" and node.proto.domain in ("", "ai.onnx"):
        return False
    return any(t is not None and t.is_float for t in (*node.inputs, *node.outputs))


def _obstacle(node: Node, opset: int, wishes: frozenset[str]) -> str:
    if node.proto.name in wishes or node.op in wishes:
        return AS_ASKED
    why = refusal(node.proto, opset)
    if why:
        return why
    indices = half_inputs(node)
    if not indices:
        return AROUND
    variables = {node.signature.inputs[i] for i in indices}
    if not variables <= node.signature.takes_half:
        return f"{node.op} of opset {opset} does not take float16"
    others = [t for t, v in zip(node.inputs, node.signature.inputs, strict=True) if t is not None and v in variables]
    if any(t.element_type != FLOAT for t in others):
        return UNKNOWN_TYPE
    if any(t.producer is not None and t.producer.op == "DequantizeLinear" for t in others):
        return QUANTISED
    return _constant_obstacle(node, indices)


def _constant_obstacle(node: Node, indices: Iterable[int]) -> str:
    heavy = is_heavy(node.proto)
    for index in indices:
        tensor = node.inputs[index]
        if tensor is not None and tensor.stored is not None:
            why = constant_problem(node.proto, index, tensor.stored, is_heavy=heavy)
            if why:
                return why
    if node.proto.domain == DOMAIN:
        try:
            sparse_to_half(node.proto)
        except (FormatError, OverflowError) as error:
            return str(error)
    return ""


def _compute_positions(nodes: Iterable[Node], half: Mapping[int, Node]) -> list[Node]:
    """Light nodes that positions or sizes are computed with, back to the heavy ones."""
    found: dict[int, Node] = {}
    waiting: deque[Tensor | None] = deque()
    for node in nodes:
        fixed = [i for i, name in enumerate(node.signature.inputs) if name == "tensor(float)"]
        for index in {*position_inputs(node.proto), *float_inputs(node.proto), *fixed}:
            if index < len(node.inputs):
                waiting.append(node.inputs[index])
    while waiting:
        tensor = waiting.popleft()
        node_before = tensor.producer if tensor is not None and tensor.is_float else None
        if node_before is None or id(node_before) in found:
            continue
        if id(node_before) in half and not is_heavy(node_before.proto):
            found[id(node_before)] = node_before
            waiting.extend(node_before.inputs)
    return list(found.values())


def _after_float(half: Mapping[int, Node]) -> list[Node]:
    """Light nodes all of whose float inputs that are no constants come out of float nodes, or that have none."""
    found: dict[int, Node] = {}
    for key, node in half.items():  # in the order of the graph, so that a chain is found in one go
        makers = [tensor.producer for tensor in _runtime_inputs(node)]
        if not makers and is_moving(node.proto):
            continue  # a weight in another form
        if not is_heavy(node.proto) and all(m is not None and _is_float(m, half, found) for m in makers):
            found[key] = node
    return list(found.values())


def _is_float(maker: Node, half: Mapping[int, Node], found: Mapping[int, Node]) -> bool:
    """Whether what a node makes is there in float only."""
    if maker.op == "Cast" and maker.inputs[0] is not None and maker.inputs[0].element_type == HALF:
        return False
    return id(maker) not in half or id(maker) in found


def _without_heavy_neighbour(half: Mapping[int, Node]) -> list[Node]:
    """Light nodes that no path of light float16 nodes connects to a heavy one."""
    waiting = deque(node for node in half.values() if is_heavy(node.proto))
    reached = {id(node) for node in waiting}
    while waiting:
        for neighbour in _neighbours(waiting.popleft()):
            if id(neighbour) in half and id(neighbour) not in reached:
                reached.add(id(neighbour))
                waiting.append(neighbour)
    return [node for node in half.values() if id(node) not in reached]


def _neighbours(node: Node) -> list[Node]:
    before = [t.producer for t in _runtime_inputs(node) if t.producer is not None]
    outputs = [t for t in node.outputs if t is not None and t.is_float]
    return [*before, *(reader for t in outputs for reader, _ in t.readers)]


def _runtime_inputs(node: Node) -> list[Tensor]:
    tensors = [node.inputs[i] for i in half_inputs(node)]
    return [t for t in tensors if t is not None and t.stored is None]
