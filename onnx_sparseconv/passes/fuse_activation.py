"""Take the activation behind a SparseConv into it, as ONNX Runtime takes some into a dense Conv."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import DOMAIN, ELEMENT_TYPES
from onnx_sparseconv.passes.activations import SINGLE_OPS, FloatType, Match, closed_match
from onnx_sparseconv.passes.base import (
    ConstantLookup,
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    detach,
    has_no_activation,
    is_standard,
    members,
    remove,
)


class FuseActivation:
    """Replace SparseConv (or SparseConvAdd) and the activation that reads it by one node.

    1. The activation is Relu, Clip, LeakyRelu, HardSigmoid, HardSwish, Sigmoid or Swish, or one of the two spelled
       out: ``x * Sigmoid(x)``, also with ``1 * x`` inside; ``x * HardSigmoid(x)`` with alpha 1/6 and beta 0.5;
       ``x * Clip(x + 3, 0, 6) / 6`` with the division, or a multiplication by 1/6, at either place. A Clip behind a
       Relu goes with it.
    2. Its parameters are numbers that the op can hold: constants that callers cannot set, not NaN; the bounds of Clip
       in order (an absent one is the end of the type); the alpha of Swish 1.
    3. Only the nodes of the activation read the convolution's output and what lies between, in this graph and in its
       subgraphs; none of these tensors is pinned: an output of a graph, or named by training information.
    4. The node has no activation yet.
    5. The new node keeps the convolution's name and place and makes the activation's output.

    Args:
        pinned: names of tensors that have to stay.
        constant: finds values.
    """

    title = "fused into the sparse convolutions before them"

    def __init__(self, pinned: AbstractSet[str], constant: ConstantLookup) -> None:
        self._pinned = pinned
        self._constant = constant

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        gone: list[gs.Node] = []
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        own = members(graph)
        for index, convolution in enumerate(list(graph.nodes)):
            if not has_no_activation(convolution):
                continue
            try:
                result, dtype = convolution.outputs[0], float_type(convolution)
                match = closed_match(result, dtype, self._constant, own, self._pinned)
            except RefusedError as refused:
                readers = [n for n in convolution.outputs[0].outputs if id(n) in own and is_standard(n, *SINGLE_OPS)]
                refusals += [Refusal(reader, str(refused)) for reader in readers]
                continue
            if match is None:
                continue
            edits.append(Edit(convolution, match.label, match.nodes[-1].name))
            graph.nodes[index] = _activated(convolution, match)
            gone += match.nodes
        remove(graph, gone)
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))


def float_type(convolution: gs.Node) -> FloatType:
    """What one of our nodes computes in."""
    is_half = convolution.attrs.get("element_type") == ELEMENT_TYPES[np.dtype(np.float16)]
    return np.dtype(np.float16 if is_half else np.float32)


def _activated(convolution: gs.Node, match: Match) -> gs.Node:
    inputs, outputs = list(convolution.inputs), list(match.nodes[-1].outputs)
    detach(convolution, *match.nodes)
    attributes = dict(convolution.attrs)
    attributes["activation"] = gs.Constant("activation", np.asarray(int(match.activation), np.int64))
    attributes["alpha"], attributes["beta"] = match.alpha, match.beta
    return gs.Node(convolution.op, convolution.name, attributes, inputs, outputs, domain=DOMAIN)
