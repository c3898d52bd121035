"""Take Identity and Dropout away from around convolutions, where they would hide what can be folded or fused."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.passes.base import (
    ConstantLookup,
    Edit,
    PassResult,
    RefusedError,
    has_no_further_output,
    is_standard,
    members,
    remove,
    sole_producer,
    take_output,
)


class SkipIdentity:
    """Remove the Identity and Dropout nodes directly before and after chosen convolutions.

    1. A Dropout counts only in its form for inference, and where nobody reads its mask.
    2. After a convolution: the node is the only reader of its result, which is not pinned. The convolution takes the
       node's output.
    3. Before a convolution: it is the only reader of the node's output, which is not pinned.
    4. ONNX Runtime removes these nodes itself; so what stands elsewhere in the model is left to it.

    Args:
        is_chosen: whether a node is such a convolution.
        pinned: names of tensors that have to stay.
        constant: finds values.
    """

    title = "removed next to sparse convolutions"

    def __init__(
        self, is_chosen: Callable[[gs.Node], bool], pinned: AbstractSet[str], constant: ConstantLookup
    ) -> None:
        self._is_chosen = is_chosen
        self._pinned = pinned
        self._constant = constant

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Remove what can be removed in ``graph`` itself."""
        edits: list[Edit] = []
        own = members(graph)
        for convolution in [node for node in graph.nodes if self._is_chosen(node)]:
            while (node := self._after(convolution, own)) is not None:
                edits.append(Edit(convolution, node.op, node.name))
                take_output(convolution, node)
                own.discard(id(node))
                remove(graph, [node])
            while (node := self._before(convolution, own)) is not None:
                edits.append(Edit(convolution, node.op, node.name))
                convolution.inputs[0] = node.inputs[0]
                own.discard(id(node))
                remove(graph, [node])
        return PassResult(graph, len(edits), tuple(edits))

    def _after(self, convolution: gs.Node, own: AbstractSet[int]) -> gs.Node | None:
        output = convolution.outputs[0]
        if sole_producer(output, self._pinned) is None:
            return None
        reader = output.outputs[0]
        return reader if id(reader) in own and self._does_nothing(reader) else None

    def _before(self, convolution: gs.Node, own: AbstractSet[int]) -> gs.Node | None:
        producer = sole_producer(convolution.inputs[0], self._pinned)
        if producer is None or id(producer) not in own or not self._does_nothing(producer):
            return None
        return producer

    def _does_nothing(self, node: gs.Node) -> bool:
        if is_standard(node, "Identity"):
            return len(node.inputs) == 1 and len(node.outputs) == 1
        if not is_standard(node, "Dropout") or not has_no_further_output(node):
            return False
        if len(node.inputs) < 3 or node.inputs[2].is_empty():
            return True
        try:
            training = self._constant(node.inputs[2])
        except RefusedError:
            return False
        return training is not None and not training.any()
