"""Let what scales channels read the inputs of the Concat in front of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import MAX_CONCAT_INPUTS, SPARSE_CONV
from onnx_sparseconv.passes.base import (
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    is_standard,
    members,
    remove,
    scales_channels,
)
from onnx_sparseconv.passes.fold_scale_before import ShapeLookup
from onnx_sparseconv.passes.fuse_concat import is_channel_axis, joined, require_channels

# What Concats of Concats join in the end; of more, which no network has, the Concat's own inputs are taken.
_MOST_PARTS = 1024


class FuseScaleConcat:
    """Let a depthwise SparseConv of 1x1, as `FuseScale` makes them, become a SparseConvConcat2 to 8.

    In a DenseNet each layer normalises what all layers before it made: a Concat of more and more, which copies all of
    it for each layer, in lists or one behind the other. What scales channels reads them where they are, on every GPU
    and on CPUs.

    1. The Concat in front of it joins channels, axis 1. The convolution has neither a residual nor a pool.
    2. It reads what the Concat joins, and where some of that is the result of another Concat, what that joins.
    3. A Concat stays where this would be more than 8 tensors, where others read its result, and where that is pinned.
       It then joins as few tensors as it can, and what is behind it reads its result in place of what it joins.
    4. The channels of all that is read are known, and their sum is the convolution's.
    5. A Concat that nothing reads any more is removed.

    Args:
        pinned: names of tensors that have to stay.
        shape_of: as of `FuseConcat`.
    """

    title = "read through by what scales their channels"

    def __init__(self, pinned: AbstractSet[str], shape_of: ShapeLookup) -> None:
        self._pinned = pinned
        self._shape_of = shape_of

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        concats = {id(node): node for node in graph.nodes if self._joins_channels(node) and not self._is_unread(node)}
        own = members(graph)
        position = {id(node): index for index, node in enumerate(graph.nodes)}
        parts: dict[int, list[gs.Tensor]] = {}
        bases: list[gs.Tensor] = []
        read_through: set[int] = set()
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        for concat in concats.values():
            result = concat.outputs[0]
            parts[id(result)] = _parts(concat, parts)
            scales = [node for node in result.outputs if id(node) in own and _is_scale_of(node, result)]
            looked_through = concats.keys() | {id(scale) for scale in scales}
            is_needed = result.name in self._pinned or any(id(node) not in looked_through for node in result.outputs)
            if not scales and not any(id(tensor) in read_through for tensor in concat.inputs):
                if is_needed:
                    bases.append(result)
                continue
            read_through.add(id(result))
            read = _fewest(parts[id(result)], bases, parts)
            if is_needed or len(read) > MAX_CONCAT_INPUTS:
                bases.append(result)
                concat.inputs.clear()
                concat.inputs.extend(read)
                continue
            for scale in scales:
                try:
                    channels = require_channels(read, self._shape_of, scale.attrs["group"], "what scales them")
                except RefusedError as refused:
                    refusals.append(Refusal(concat, str(refused)))
                    continue
                at = position[id(scale)]
                graph.nodes[at] = joined(scale, read, channels)
                position[id(graph.nodes[at])] = at
                edits.append(Edit(graph.nodes[at], concat.op, concat.name))
        self._remove_unread(graph, list(concats.values()))
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _joins_channels(self, node: gs.Node) -> bool:
        if not is_standard(node, "Concat") or len(node.outputs) != 1 or not node.inputs:
            return False
        shape = self._shape_of(node.outputs[0].name)
        return is_channel_axis(node, len(shape) if shape is not None else 0)

    def _is_unread(self, node: gs.Node) -> bool:
        return not node.outputs[0].outputs and node.outputs[0].name not in self._pinned

    def _remove_unread(self, graph: gs.Graph | gs.Function, concats: Sequence[gs.Node]) -> None:
        """Take out Concats whose results nothing reads, the last first: others may have been read by them alone."""
        unread = []
        for concat in reversed(concats):
            if self._is_unread(concat):
                unread.append(concat)
                concat.inputs.clear()
        remove(graph, unread)


def _is_scale_of(node: gs.Node, tensor: gs.Tensor) -> bool:
    """Whether a node scales the channels of a tensor, and nothing else."""
    return node.op == SPARSE_CONV and scales_channels(node) and node.inputs[0] is tensor


def _parts(concat: gs.Node, parts: Mapping[int, list[gs.Tensor]]) -> list[gs.Tensor]:
    """What a Concat joins in the end: nothing that another one made, if these are not too many."""
    found = [part for tensor in concat.inputs for part in parts.get(id(tensor), [tensor])]
    return found if len(found) <= _MOST_PARTS else list(concat.inputs)


def _fewest(
    wanted: Sequence[gs.Tensor], bases: Sequence[gs.Tensor], parts: Mapping[int, list[gs.Tensor]]
) -> list[gs.Tensor]:
    """Few tensors that joined are those wanted: what stays joined, the longest first, and the rest."""
    names = [id(tensor) for tensor in wanted]
    known = sorted(((base, [id(part) for part in parts[id(base)]]) for base in bases), key=lambda each: -len(each[1]))
    found: list[gs.Tensor] = []
    at = 0
    while at < len(names):
        base, its = next(((b, its) for b, its in known if names[at : at + len(its)] == its), (wanted[at], [names[at]]))
        found.append(base)
        at += len(its)
    return found
