"""Take the Add of a residual into the SparseConv before it, as in ResNet."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import DOMAIN, SPARSE_CONV, SPARSE_CONV_ADD
from onnx_sparseconv.passes.base import (
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    detach,
    has_no_activation,
    is_standard,
    remove,
    require_sole_reader,
)


class FuseResidual:
    """Replace SparseConv and the Add (or Sum of two) that reads it by SparseConvAdd.

    1. The Add is the only reader of the convolution's output, which is not pinned.
    2. The convolution has neither a residual nor an activation yet.
    3. Both operands certainly have one shape, because the op does not broadcast. Sizes that are only known at run time
       have to be the same symbol, or made of it in the same way.
    4. The new node stands where the Add stood, where the other operand is known, and keeps the convolution's name and
       the Add's output. Where both operands are convolutions, the second takes the first as its residual.

    Args:
        pinned: names of tensors that have to stay.
        are_same: whether two tensors, by name, certainly have one shape.
    """

    title = "fused into the sparse convolutions before them"

    def __init__(self, pinned: AbstractSet[str], are_same: Callable[[str, str], bool]) -> None:
        self._pinned = pinned
        self._are_same = are_same

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        position = {id(node): index for index, node in enumerate(graph.nodes)}
        gone: list[gs.Node] = []
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        for add in list(graph.nodes):
            try:
                found = self._fusible(add, position.keys())
            except RefusedError as refused:
                refusals.append(Refusal(add, str(refused)))
                continue
            if found is None:
                continue
            convolution, residual = found
            edits.append(Edit(convolution, f"{add.op} of a residual", add.name))
            graph.nodes[position[id(add)]] = _with_residual(convolution, residual, add)
            gone.append(convolution)
        remove(graph, gone)
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _fusible(self, add: gs.Node, own: AbstractSet[int]) -> tuple[gs.Node, gs.Tensor] | None:
        if not is_standard(add, "Add", "Sum") or len(add.inputs) != 2:
            return None
        refused: RefusedError | None = None
        for index in (1, 0):
            result, residual = add.inputs[index], add.inputs[1 - index]
            producer = result.inputs[0] if len(result.inputs) == 1 else None
            if producer is None or id(producer) not in own:
                continue
            if producer.op != SPARSE_CONV or not has_no_activation(producer):
                continue
            try:
                self._require_fusible(result, residual)
            except RefusedError as error:
                refused = error
                continue
            return producer, residual
        if refused is not None:
            raise refused
        return None

    def _require_fusible(self, result: gs.Tensor, residual: gs.Tensor) -> None:
        require_sole_reader(result, self._pinned)
        if not self._are_same(result.name, residual.name):
            raise RefusedError("its operands are not known to have one shape, and may broadcast")


def _with_residual(convolution: gs.Node, residual: gs.Tensor, add: gs.Node) -> gs.Node:
    x = convolution.inputs[0]
    bias = convolution.inputs[1] if len(convolution.inputs) > 1 else gs.Variable.empty()
    outputs = list(add.outputs)
    detach(convolution, add)
    return gs.Node(
        SPARSE_CONV_ADD, convolution.name, dict(convolution.attrs), [x, bias, residual], outputs, domain=DOMAIN
    )
