"""Let a 1x1 SparseConv read the inputs of the Concat in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import (
    DOMAIN,
    MAX_CONCAT_INPUTS,
    SPARSE_CONV,
    SPARSE_CONV_ADD,
    SPARSE_CONV_MAX_POOL,
    concat_op,
)
from onnx_sparseconv.passes.base import (
    ConstantLookup,
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    are_all,
    detach,
    is_sparse,
    is_standard,
    remove,
    require_sole_reader,
    scales_channels,
    weight_channels,
)
from onnx_sparseconv.passes.fold_scale_before import ShapeLookup

# From this opset on, Slice takes its bounds as inputs.
_SLICE_INPUTS_OPSET = 10
_CHANNEL_AXIS = 1


@dataclass(frozen=True, eq=False)
class _Found:
    """A Concat that can go.

    Attributes:
        convolution: what reads it.
        inputs: what the convolution will read instead.
        channels: of each of them.
        splits: whose outputs it read, all of them, and whose own input it will read.
    """

    convolution: gs.Node
    inputs: list[gs.Tensor]
    channels: list[int]
    splits: list[gs.Node]


class FuseConcat:
    """Replace a Concat and the SparseConv that reads it by SparseConvConcat2 to 8.

    Hopper's kernel for 1x1 reads the inputs where they are, and the CPU kernel packs them from there, which several
    threads do together, while ONNX Runtime's Concat has one. All other kernels of GPUs copy them together, in the time
    that the Concat took.

    1. The Concat joins channels, axis 1. Its result is not pinned, and is read once: by a SparseConv of the same graph,
       as its input X.
    2. The convolution has neither a residual nor a pool, a kernel of 1 along every axis, strides of 1, no padding and
       one group. Larger kernels are left without a word.
    3. Consecutive inputs that are all outputs of one Split of the channels, in order, are read as the Split's own
       input.
    4. Then there are 2 to 8 inputs, the channels of each are known, and their sum is the weight's. Of one input alone,
       nothing is to be joined: the convolution reads it and stays what it is.
    5. A Split none of whose outputs is read any more, nor pinned, is removed. Where one of them is, and the channels
       are known, a Slice takes its place and its name: a Split writes all of its outputs.
    6. The new node stands where the convolution stood, and keeps its name, its attributes and its output.

    Args:
        pinned: names of tensors that have to stay.
        constant: finds values.
        shape_of: shape of a tensor by its name before anything was rewritten, as it follows from the model's inputs;
            None where not even the rank is known.
        unique_name: makes a tensor name that the model does not have.
        opset: of the model or function that the graph belongs to.
    """

    title = "fused into the sparse convolutions behind them"

    def __init__(
        self,
        pinned: AbstractSet[str],
        constant: ConstantLookup,
        shape_of: ShapeLookup,
        unique_name: Callable[[str], str],
        opset: int,
    ) -> None:
        self._pinned = pinned
        self._constant = constant
        self._shape_of = shape_of
        self._unique_name = unique_name
        self._opset = opset

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        position = {id(node): index for index, node in enumerate(graph.nodes)}
        gone: list[gs.Node] = []
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        read_around: dict[int, tuple[gs.Node, gs.Node]] = {}
        for concat in list(graph.nodes):
            try:
                found = self._fusible(concat, position.keys())
            except RefusedError as refused:
                refusals.append(Refusal(concat, str(refused)))
                continue
            if found is None:
                continue
            edits.append(Edit(found.convolution, concat.op, concat.name))
            read_around |= {id(split): (split, found.convolution) for split in found.splits}
            convolution = found.convolution
            at = position[id(convolution)]
            graph.nodes[at] = joined(convolution, found.inputs, found.channels)
            position[id(graph.nodes[at])] = at
            detach(concat)
            gone.append(concat)
        remove(graph, gone)
        lessened = (self._lessen(graph, split, convolution) for split, convolution in read_around.values())
        edits += [edit for edit in lessened if edit is not None]
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _fusible(self, concat: gs.Node, own: AbstractSet[int]) -> _Found | None:
        if not is_standard(concat, "Concat") or len(concat.outputs) != 1 or not concat.inputs:
            return None
        result = concat.outputs[0]
        convolution = next((node for node in result.outputs if id(node) in own and _is_pointwise(node)), None)
        if convolution is None:
            return None
        rank = len(convolution.attrs["kernel_shape"]) + 2
        if not is_channel_axis(concat, rank):
            return None
        require_sole_reader(result, self._pinned)
        if convolution.inputs[0] is not result:
            return None
        _require_plain(convolution)
        inputs, splits = _around_splits(concat.inputs, own, rank, self._pinned)
        if len(inputs) == 1:
            return _Found(convolution, inputs, [], splits)
        if len(inputs) > MAX_CONCAT_INPUTS:
            raise RefusedError(f"it has {len(inputs)} inputs, and the op takes at most {MAX_CONCAT_INPUTS}")
        channels = require_channels(inputs, self._shape_of, weight_channels(convolution), "the weight")
        return _Found(convolution, inputs, channels, splits)

    def _lessen(self, graph: gs.Graph | gs.Function, split: gs.Node, convolution: gs.Node) -> Edit | None:
        """Write less of what a Split makes where next to nothing of it is read; None where it stays."""
        outputs = list(split.outputs)
        wanted = [i for i, tensor in enumerate(outputs) if tensor.outputs or tensor.name in self._pinned]
        if not wanted:
            remove(graph, [split])
            return Edit(convolution, "Split", split.name)
        sizes = self._sizes(split)
        if len(wanted) > 1 or sizes is None:
            return None
        (index,), source, name = wanted, split.inputs[0], split.name
        begin = sum(sizes[:index])
        at = next(i for i, node in enumerate(graph.nodes) if node is split)
        detach(split)
        graph.nodes[at] = self._slice(name, source, outputs[index], (begin, begin + sizes[index]))
        return Edit(convolution, "Split in part", split.name)

    def _sizes(self, split: gs.Node) -> list[int] | None:
        """Channels of each output of a Split; None where they are not known."""
        given = split.attrs.get("split")
        if len(split.inputs) > 1 and not split.inputs[1].is_empty():
            try:
                constant = self._constant(split.inputs[1])
            except RefusedError:
                return None
            given = constant.tolist() if constant is not None else None
        if given is None:
            given = [channels_of(output, self._shape_of) for output in split.outputs]
        if not isinstance(given, list) or len(given) != len(split.outputs):
            return None
        return given if all(isinstance(size, int) and size > 0 for size in given) else None

    def _slice(self, name: str, source: gs.Tensor, output: gs.Tensor, ends: tuple[int, int]) -> gs.Node:
        values = {"starts": [ends[0]], "ends": [ends[1]], "axes": [_CHANNEL_AXIS]}
        if self._opset < _SLICE_INPUTS_OPSET:
            return gs.Node("Slice", name, values, [source], [output])
        constants = [
            gs.Constant(self._unique_name(f"{output.name}_{key}"), np.asarray(value, np.int64))
            for key, value in values.items()
        ]
        return gs.Node("Slice", name, {}, [source, *constants], [output])


def _is_pointwise(node: gs.Node) -> bool:
    """Whether a node is one of our ops with a kernel of 1 along every axis; but none that scales channels: these have a
    pass of their own, `FuseScaleConcat`.
    """
    return is_sparse(node) and are_all(node.attrs.get("kernel_shape"), 1) and not scales_channels(node)


def is_channel_axis(node: gs.Node, rank: int) -> bool:
    """Whether a Concat or Split works on the channels of tensors of so many axes."""
    axis = node.attrs.get("axis", 0)
    return isinstance(axis, int) and axis in (_CHANNEL_AXIS, _CHANNEL_AXIS - rank)


def _require_plain(convolution: gs.Node) -> None:
    """Check that a 1x1 convolution may read several inputs.

    Raises:
        RefusedError: it may not.
    """
    others = {SPARSE_CONV_ADD: "adds a residual", SPARSE_CONV_MAX_POOL: "takes in a pool"}
    if convolution.op != SPARSE_CONV:
        raise RefusedError(f"the convolution behind it {others.get(convolution.op, 'reads several inputs already')}")
    attributes = convolution.attrs
    if attributes.get("auto_pad") != "NOTSET" or not are_all(attributes.get("pads"), 0):
        raise RefusedError("the convolution behind it pads")
    if not are_all(attributes.get("strides"), 1):
        raise RefusedError("the convolution behind it has strides")
    if attributes.get("group") != 1:
        raise RefusedError("the convolution behind it has groups")


def _around_splits(
    tensors: Sequence[gs.Tensor], own: AbstractSet[int], rank: int, pinned: AbstractSet[str]
) -> tuple[list[gs.Tensor], list[gs.Node]]:
    """Tensors to be joined, with the input of a Split in place of all of its outputs; and these Splits.

    Not of one all of whose outputs are pinned: it stays in any case.
    """
    found: list[gs.Tensor] = []
    splits: list[gs.Node] = []
    left = list(tensors)
    while left:
        split = left[0].inputs[0] if len(left[0].inputs) == 1 else None
        if (
            split is None
            or id(split) not in own
            or not is_standard(split, "Split")
            or not is_channel_axis(split, rank)
            or all(tensor.name in pinned for tensor in split.outputs)
        ):
            found.append(left.pop(0))
            continue
        count = len(split.outputs)
        if [id(tensor) for tensor in left[:count]] != [id(tensor) for tensor in split.outputs]:
            found.append(left.pop(0))
            continue
        found.append(split.inputs[0])
        splits.append(split)
        del left[:count]
    return found, splits


def joined(convolution: gs.Node, inputs: Sequence[gs.Tensor], channels: Sequence[int]) -> gs.Node:
    """The convolution with several inputs of so many channels in place of X, taking over what it makes; with one
    input, the convolution itself.
    """
    if len(inputs) == 1:
        convolution.inputs[0] = inputs[0]
        return convolution
    bias = convolution.inputs[1] if len(convolution.inputs) > 1 else gs.Variable.empty()
    first, *others = inputs
    attributes = dict(convolution.attrs) | {"input_channels": list(channels)}
    outputs = list(convolution.outputs)
    detach(convolution)
    op = concat_op(len(inputs))
    return gs.Node(op, convolution.name, attributes, [first, bias, *others], outputs, domain=DOMAIN)


def require_channels(tensors: Sequence[gs.Tensor], shape_of: ShapeLookup, wanted: int | None, reader: str) -> list[int]:
    """The channels of each tensor that is joined.

    Raises:
        RefusedError: some are not known, or all together not those of what reads them.
    """
    known = [count for tensor in tensors if (count := channels_of(tensor, shape_of)) is not None]
    if len(known) != len(tensors):
        raise RefusedError("the channels of its inputs are not known")
    if sum(known) != wanted:
        raise RefusedError(f"its inputs have {sum(known)} channels together, {reader} {wanted}")
    return known


def channels_of(tensor: gs.Tensor, shape_of: ShapeLookup) -> int | None:
    """Channels of a tensor, by the SparseConv that makes it or by its shape; None where they are not known."""
    maker = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    if maker is not None and is_sparse(maker):
        count = maker.attrs.get("out_channels")
    else:
        shape = tensor.shape if isinstance(tensor, gs.Constant) else shape_of(tensor.name)
        count = shape[_CHANNEL_AXIS] if shape is not None and len(shape) > _CHANNEL_AXIS else None
    return count if isinstance(count, int) and count > 0 else None
