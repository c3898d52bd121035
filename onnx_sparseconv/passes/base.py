"""What every graph pass returns, and what several of them need.

A pass is a class in a file of its own. Its docstring numbers its rules; ``apply`` only iterates, the work is done
for one node at a time, and ``notes`` say what was done. A pass edits onnx-graphsurgeon graphs under the
contract of `converter.model_view`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES, Activation


def sole_producer(tensor: gs.Tensor, pinned: AbstractSet[str]) -> gs.Node | None:
    """The node that makes a tensor which only one node reads, once, and which may go; else None.

    Args:
        tensor: what is read.
        pinned: names of tensors that have to stay.
    """
    if len(tensor.inputs) != 1 or len(tensor.outputs) != 1 or tensor.name in pinned:
        return None
    return tensor.inputs[0]


def has_no_activation(node: gs.Node) -> bool:
    """Whether a node is one of our ops and applies no activation yet."""
    activation = node.attrs.get("activation")
    is_ours = node.domain == DOMAIN and node.op in OP_TYPES
    return is_ours and isinstance(activation, gs.Constant) and int(activation.values) == Activation.NONE


def detach(*nodes: gs.Node) -> None:
    """Disconnect nodes that are being replaced."""
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()


@dataclass(frozen=True)
class PassResult:
    """Outcome of a pass on one graph.

    Attributes:
        graph: the graph, edited in place.
        changed: how many nodes the pass replaced, added or removed.
        notes: what was done, one line each, for the report.
    """

    graph: gs.Graph | gs.Function
    changed: int
    notes: tuple[str, ...] = ()
