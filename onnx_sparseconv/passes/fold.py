"""What the passes that fold a node into a chosen Conv have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.passes.base import (
    ConstantLookup,
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    members,
    remove,
)
from onnx_sparseconv.passes.conv_layer import ConvLayer


class Fold:
    """A pass that folds nodes into chosen convolutions.

    Args:
        layers: of the chosen nodes, by ``id`` of the gs.Node; brought up to date.
        pinned: names of tensors that have to stay.
        constant: finds values.
    """

    def __init__(
        self, layers: MutableMapping[int, ConvLayer], pinned: AbstractSet[str], constant: ConstantLookup
    ) -> None:
        self._layers = layers
        self._pinned = pinned
        self._constant = constant


class FoldBefore(Fold, ABC):
    """Such a pass for what makes a convolution's input: one node after the other, until one cannot be folded."""

    title = "folded into the convolutions after them"

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fold what can be folded in ``graph`` itself."""
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        own = members(graph)
        for convolution in [node for node in graph.nodes if id(node) in self._layers]:
            while (node := producer(convolution.inputs[0])) is not None and id(node) in own:
                try:
                    found = self._folded(convolution, node)
                except RefusedError as refused:
                    refusals.append(Refusal(node, str(refused)))
                    break
                if found is None:
                    break
                self._layers[id(convolution)], data = found
                edits.append(Edit(convolution, node.op, node.name))
                convolution.inputs[0] = data
                own.discard(id(node))
                remove(graph, [node])
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    @abstractmethod
    def _folded(self, convolution: gs.Node, node: gs.Node) -> tuple[ConvLayer, gs.Tensor] | None:
        """The layer with ``node`` folded into it, and its new input; None for another kind of node.

        Raises:
            RefusedError: a rule is not met.
        """


def producer(tensor: gs.Tensor) -> gs.Node | None:
    """The node that makes a tensor, None for what no single node makes."""
    return tensor.inputs[0] if len(tensor.inputs) == 1 else None
