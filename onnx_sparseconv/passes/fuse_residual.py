"""Take the Add of a residual into the SparseConv before it, as in ResNet."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import DOMAIN, SPARSE_CONV, SPARSE_CONV_ADD
from onnx_sparseconv.passes.base import PassResult, detach, has_no_activation, sole_producer


class FuseResidual:
    """Replace SparseConv and the Add that reads it by SparseConvAdd.

    1. The Add is the only reader of the convolution's output, which is not pinned.
    2. The convolution has neither a residual nor an activation yet.
    3. Both operands certainly have one shape, because the op does not broadcast. Sizes that are only known at run time
       have to be the same symbol.
    4. The new node stands where the Add stood, where the other operand is known, and keeps the convolution's name and
       the Add's output. Where both operands are convolutions, the second takes the first as its residual.

    Args:
        pinned: names of tensors that have to stay.
        are_same: whether two tensors, by name, certainly have one shape.
    """

    def __init__(self, pinned: AbstractSet[str], are_same: Callable[[str, str], bool]) -> None:
        self._pinned = pinned
        self._are_same = are_same

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        position = {id(node): index for index, node in enumerate(graph.nodes)}
        gone: set[int] = set()
        for add in list(graph.nodes):
            found = self._fusible(add)
            if found is None or id(found[0]) not in position:
                continue
            convolution, residual = found
            graph.nodes[position[id(add)]] = _with_residual(convolution, residual, add)
            gone.add(id(convolution))
        if gone:
            graph.nodes[:] = [node for node in graph.nodes if id(node) not in gone]
        notes = (f"{len(gone)} Add of a residual fused into the sparse convolutions before them",) if gone else ()
        return PassResult(graph, len(gone), notes)

    def _fusible(self, add: gs.Node) -> tuple[gs.Node, gs.Tensor] | None:
        if add.op != "Add" or add.domain not in (None, "", "ai.onnx") or len(add.inputs) != 2:
            return None
        for index in (1, 0):
            own, residual = add.inputs[index], add.inputs[1 - index]
            producer = sole_producer(own, self._pinned)
            if producer is None or producer.op != SPARSE_CONV or not has_no_activation(producer):
                continue
            if self._are_same(own.name, residual.name):
                return producer, residual
        return None


def _with_residual(convolution: gs.Node, residual: gs.Tensor, add: gs.Node) -> gs.Node:
    x = convolution.inputs[0]
    bias = convolution.inputs[1] if len(convolution.inputs) > 1 else gs.Variable.empty()
    outputs = list(add.outputs)
    detach(convolution, add)
    return gs.Node(
        SPARSE_CONV_ADD, convolution.name, dict(convolution.attrs), [x, bias, residual], outputs, domain=DOMAIN
    )
