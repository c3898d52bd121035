"""Take a Relu into the SparseConv before it, as ONNX Runtime takes it into a dense Conv."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import DOMAIN, Activation
from onnx_sparseconv.passes.base import PassResult, detach, has_no_activation, sole_producer


class FuseRelu:
    """Replace SparseConv (or SparseConvAdd) and the Relu that reads it by one node.

    1. The Relu is the only reader of the convolution's output, in this graph and in its subgraphs.
    2. That output is not pinned: it is no output of a graph, nor named by training information.
    3. The node has no activation yet.
    4. The new node keeps the convolution's name and the Relu's output.

    Args:
        pinned: names of tensors that have to stay.
    """

    def __init__(self, pinned: AbstractSet[str]) -> None:
        self._pinned = pinned

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        relus = [node for node in graph.nodes if node.op == "Relu" and node.domain in (None, "", "ai.onnx")]
        position = {id(node): index for index, node in enumerate(graph.nodes)}
        fused: set[int] = set()
        for relu in relus:
            convolution = self._fusible_producer(relu)
            if convolution is None or id(convolution) not in position:
                continue
            graph.nodes[position[id(convolution)]] = _with_relu(convolution, relu)
            fused.add(id(relu))
        if fused:
            graph.nodes[:] = [node for node in graph.nodes if id(node) not in fused]
        notes = (f"{len(fused)} Relu fused into the sparse convolutions before them",) if fused else ()
        return PassResult(graph, len(fused), notes)

    def _fusible_producer(self, relu: gs.Node) -> gs.Node | None:
        if not relu.outputs or len(relu.inputs) != 1:
            return None
        producer = sole_producer(relu.inputs[0], self._pinned)
        return producer if producer is not None and has_no_activation(producer) else None


def _with_relu(convolution: gs.Node, relu: gs.Node) -> gs.Node:
    inputs, outputs = list(convolution.inputs), list(relu.outputs)
    detach(convolution, relu)
    attributes = dict(convolution.attrs)
    attributes["activation"] = gs.Constant("activation", np.asarray(int(Activation.RELU), np.int64))
    return gs.Node(convolution.op, convolution.name, attributes, inputs, outputs, domain=DOMAIN)
