"""Replace chosen Conv nodes by SparseConv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import DOMAIN, SPARSE_CONV, SparseConvAttributes
from onnx_sparseconv.passes.base import PassResult


class SparsifyConv:
    """Replace Conv nodes by ``ai.sparseconv::SparseConv``.

    1. Only nodes that were chosen are touched; the choice and the encoding of the weight are the caller's.
    2. The new node keeps the name, X and the output of the old one, and its bias (or the absence of one) unless folding
    has made a new one.
    3. The weight tensor is only disconnected: it may have other consumers. Whoever writes the model drops what
    nobody reads.

    Args:
        chosen: attributes of the new node, by ``id`` of the gs.Node to replace.
        names: name of the new node, by the same key; ONNX Runtime's errors and profiles name nodes, so each gets one.
        biases: new bias of the nodes that get one, by the same key.
    """

    def __init__(
        self,
        chosen: Mapping[int, SparseConvAttributes],
        names: Mapping[int, str],
        biases: Mapping[int, gs.Constant] | None = None,
    ) -> None:
        self._chosen = chosen
        self._names = names
        self._biases = biases or {}

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Replace the chosen nodes that live in ``graph`` itself; subgraphs are graphs of their own."""
        changed = 0
        for index, node in enumerate(graph.nodes):
            attributes = self._chosen.get(id(node))
            if attributes is None:
                continue
            graph.nodes[index] = _replacement(node, attributes, self._names[id(node)], self._biases.get(id(node)))
            changed += 1
        return PassResult(graph, changed)


def _replacement(conv: gs.Node, attributes: SparseConvAttributes, name: str, new_bias: gs.Constant | None) -> gs.Node:
    bias: gs.Tensor = conv.inputs[2] if len(conv.inputs) > 2 else gs.Variable.empty()
    if new_bias is not None:
        bias = new_bias
    inputs, outputs = [conv.inputs[0], bias], list(conv.outputs)
    conv.inputs.clear()
    conv.outputs.clear()
    return sparse_node(name, attributes, inputs, outputs)


def sparse_node(
    name: str, attributes: SparseConvAttributes, inputs: list[gs.Tensor], outputs: list[gs.Tensor]
) -> gs.Node:
    """A SparseConv node: its inputs are X and the bias, which may be empty."""
    return gs.Node(
        op=SPARSE_CONV,
        name=name,
        attrs={k: _attribute(k, v) for k, v in attributes.to_node_attributes().items()},
        inputs=inputs,
        outputs=outputs,
        domain=DOMAIN,
    )


def _attribute(name: str, value: Any) -> Any:  # noqa: ANN401
    return gs.Constant(name, value) if isinstance(value, np.ndarray) else value
