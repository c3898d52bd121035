"""What every graph pass returns, and what several of them need.

A pass is a class in a file of its own. Its docstring numbers its rules; ``apply`` only iterates, the work is done
for one node at a time, by a method that returns early where a rule is not met: without a word where nobody would
expect anything, with a `RefusedError` where the report should say why. A pass edits onnx-graphsurgeon graphs under the
contract of `converter.model_view`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES, SPARSE_CONV_MAX_POOL, Activation
from onnx_sparseconv.kernels.unified_csr import Array

# Of a weight: output channels and, of each group, input channels.
_FEWEST_WEIGHT_AXES = 2

# The value of a tensor, None where it is only known at run time; raises RefusedError where callers of the model may
# set it.
ConstantLookup = Callable[[gs.Tensor], Array | None]


class RefusedError(Exception):
    """A rule that a node does not meet; the message reaches the report."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One thing that a pass did.

    Attributes:
        node: the convolution that took something in.
        what: what it took in, for people, like ``BatchNormalization``.
        name: name of the node that went; empty where it had none.
    """

    node: gs.Node
    what: str
    name: str = ""


@dataclass(frozen=True, eq=False)
class Refusal:
    """One node that a pass left, and why.

    Attributes:
        node: what was left as it is.
        text: the rule that it does not meet.
    """

    node: gs.Node
    text: str


class Pass(Protocol):
    """What the converter runs.

    Attributes:
        title: what becomes of the nodes that the pass takes away, for people.
    """

    title: str

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Do what can be done in ``graph`` itself; subgraphs are graphs of their own."""
        ...


@dataclass(frozen=True)
class PassResult:
    """Outcome of a pass on one graph.

    Attributes:
        graph: the graph, edited in place.
        changed: how many nodes the pass replaced, added or removed.
        edits: what was done, where the report should say so.
        refusals: what was left, where someone would expect otherwise.
    """

    graph: gs.Graph | gs.Function
    changed: int
    edits: tuple[Edit, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def is_standard(node: gs.Node, *ops: str) -> bool:
    """Whether a node is one of these operators of ONNX itself."""
    return node.op in ops and node.domain in (None, "", "ai.onnx")


def is_sparse(node: gs.Node) -> bool:
    """Whether a node is one of our ops, with an input and an output."""
    return node.domain == DOMAIN and node.op in OP_TYPES and bool(node.inputs) and bool(node.outputs)


def has_no_activation(node: gs.Node) -> bool:
    """Whether a node is one of our ops, and applies neither an activation yet nor what comes behind it, a pool."""
    activation = node.attrs.get("activation")
    if not is_sparse(node) or node.op == SPARSE_CONV_MAX_POOL or not isinstance(activation, gs.Constant):
        return False
    return bool(np.array_equal(activation.values, np.asarray(int(Activation.NONE))))


def free_name(wanted: str, taken: AbstractSet[str]) -> str:
    """``wanted``, or it with a number where a node has that name: ONNX Runtime refuses two nodes of one name."""
    tries = (wanted if i == 0 else f"{wanted}_{i}" for i in itertools.count())
    return next(name for name in tries if name not in taken)


def weight_channels(node: gs.Node) -> int | None:
    """Input channels of a group of one of our nodes; None where it does not say so, in a function or a broken node."""
    shape = node.attrs.get("weight_shape")
    values = shape.values if isinstance(shape, gs.Constant) else None
    if values is None or values.ndim != 1 or values.dtype != np.int64 or values.size < _FEWEST_WEIGHT_AXES:
        return None
    return int(values[1])


def scales_channels(node: gs.Node) -> bool:
    """Whether a node is one of our ops, depthwise and with one tap at each place, as `FuseScale` makes them."""
    group = node.attrs.get("group")
    is_depthwise = group != 1 and group == node.attrs.get("out_channels") and weight_channels(node) == 1
    has_one_tap = all(are_all(node.attrs.get(name), 1) for name in ("kernel_shape", "strides"))
    return is_sparse(node) and is_depthwise and has_one_tap and are_all(node.attrs.get("pads"), 0)


def are_all(values: object, wanted: int) -> bool:
    """Whether an attribute is a list of this number alone; in a function it may be an argument."""
    return isinstance(values, list) and bool(values) and all(value == wanted for value in values)


# Of tensors that passes must not do away with.
PINNED = "has to stay: it is an output of a graph, named by training information, or beside a node that stays float"


def sole_producer(tensor: gs.Tensor, pinned: AbstractSet[str]) -> gs.Node | None:
    """The node that makes a tensor which only one node reads, once, and which may go; else None.

    Args:
        tensor: what is read.
        pinned: names of tensors that have to stay.
    """
    if len(tensor.inputs) != 1 or len(tensor.outputs) != 1 or tensor.name in pinned:
        return None
    return tensor.inputs[0]


def require_sole_reader(tensor: gs.Tensor, pinned: AbstractSet[str]) -> None:
    """Check that a tensor may go when the one node that reads it does.

    Raises:
        RefusedError: it may not.
    """
    if tensor.name in pinned:
        raise RefusedError(f"the tensor between them {PINNED}")
    if len(tensor.outputs) != 1:
        raise RefusedError("other nodes read the tensor between them, too")


def number_attribute(node: gs.Node, name: str, default: float) -> float:
    """An attribute that is a number.

    Raises:
        RefusedError: it is an argument of a function, or no number.
    """
    value = node.attrs.get(name, default)
    if isinstance(value, gs.Node.AttributeRef):
        raise RefusedError("its attributes are arguments of a function")
    if not isinstance(value, (int, float)):
        raise RefusedError(f"its attribute {name} is no number")
    return float(value)


def has_no_further_output(node: gs.Node) -> bool:
    """Whether only the first output of a node is named."""
    return bool(node.outputs) and all(output.is_empty() for output in node.outputs[1:])


def members(graph: gs.Graph | gs.Function) -> set[int]:
    """The ``id`` of each node of a graph; nodes are compared by it, because gs.Node compares by content."""
    return {id(node) for node in graph.nodes}


def remove(graph: gs.Graph | gs.Function, nodes: Iterable[gs.Node]) -> None:
    """Disconnect nodes and take them out of their graph."""
    gone = list(nodes)
    detach(*gone)
    ids = {id(node) for node in gone}
    graph.nodes[:] = [node for node in graph.nodes if id(node) not in ids]


def detach(*nodes: gs.Node) -> None:
    """Disconnect nodes that are being replaced."""
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()


def take_output(node: gs.Node, after: gs.Node) -> None:
    """Let ``node`` make the first output of ``after``, which is left without outputs."""
    output = after.outputs[0]
    after.outputs.clear()
    node.outputs.clear()
    node.outputs.append(output)
