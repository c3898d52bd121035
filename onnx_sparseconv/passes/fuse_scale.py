"""Make one depthwise convolution of what scales and shifts the channels of a SparseConv's input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import CONCAT_OPS, ConvGeometry, SparseConvAttributes
from onnx_sparseconv.kernels.unified_csr import Array, encode
from onnx_sparseconv.passes.activations import FloatType, Match, closed_match
from onnx_sparseconv.passes.base import (
    ConstantLookup,
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    detach,
    free_name,
    is_sparse,
    is_standard,
    members,
    remove,
    require_sole_reader,
    sole_producer,
    weight_channels,
)
from onnx_sparseconv.passes.channel_affine import AFFINE_OPS, read_affine
from onnx_sparseconv.passes.conv_layer import ConvLayer
from onnx_sparseconv.passes.fold import producer
from onnx_sparseconv.passes.fold_scale_before import ShapeLookup, require_shape
from onnx_sparseconv.passes.fuse_activation import float_type
from onnx_sparseconv.passes.sparsify_conv import sparse_node

# Spatial axes that all kernels for depthwise convolutions take.
_MOST_SPATIAL_AXES = 2
# Of fewer nodes, nothing would be gained.
_FEWEST_NODES = 2
# Of the largest scale of a layer: normalisation leaves channels that training gave up with hardly any.
_NEXT_TO_NOTHING = 1e-3


@dataclass(frozen=True, eq=False)
class _Found:
    """Nodes that one convolution can stand for.

    Attributes:
        scales: the nodes that scale and shift, in their order.
        activation: what is applied to their result.
        data: what the first of them reads.
        layer: the convolution, in float64.
        dtype: what it computes in now.
        will_be: what it will compute in.
    """

    scales: list[gs.Node]
    activation: Match | None
    data: gs.Tensor
    layer: ConvLayer
    dtype: FloatType
    will_be: FloatType

    @property
    def nodes(self) -> list[gs.Node]:
        """All of them."""
        return [*self.scales, *(self.activation.nodes if self.activation is not None else ())]


class FuseScale:
    """Replace what scales and shifts channels in front of a SparseConv, and the activation behind that, by a depthwise
    SparseConv of 1x1.

    Each of these operators passes over all of memory once more. A network whose normalisation and activation come
    before its convolutions (DenseNet, ResNet-v2) has them in front of each one, and `FoldScaleBefore` leaves what an
    activation or padding parts from the convolution.

    1. The last of the nodes makes the input X of a SparseConv in 1-D or 2-D, in the same graph. Others may read it.
    2. They are BatchNormalization, Mul, Add, Sub and Div as `FoldScaleBefore` takes them, one or more, and behind them
       an activation as `FuseActivation` takes it, or none: two nodes at least.
    3. Only they read what lies between them, none of which is pinned.
    4. The channels are those of the SparseConv's input, and what the first of them reads certainly has these.
    5. Scale and shift of all together are finite, and keep the precision of the SparseConv's type. Each is rounded
       once. Where they cancel each other, that is as if X had been rounded once more; in float16 not even that, for the
       scale is stored as float32 and makes up for how the shift was rounded.
    6. What stands behind a dense Conv that alone feeds it is left: that takes it in at session creation.
    7. Maps that are known to be smaller than ``fewest_positions`` are left, without a word.
    8. A SparseConv that reads several inputs is left alone.
    9. The new node has the place and the name of the first of them, and makes what the last one made.

    Args:
        pinned: names of tensors that have to stay.
        constant: finds values.
        shape_of: as of `FoldScaleBefore`.
        unique_name: makes a tensor name that the model does not have.
        fewest_positions: of a map, for which it is worth it.
        to_half: what is float now will become float16, so it has to fit into that.
    """

    title = "fused into depthwise convolutions before the sparse ones"

    def __init__(
        self,
        pinned: AbstractSet[str],
        constant: ConstantLookup,
        shape_of: ShapeLookup,
        unique_name: Callable[[str], str],
        *,
        fewest_positions: int = 0,
        to_half: bool = False,
    ) -> None:
        self._pinned = pinned
        self._constant = constant
        self._shape_of = shape_of
        self._unique_name = unique_name
        self._fewest_positions = fewest_positions
        self._to_half = to_half

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        own = members(graph)
        position = {id(node): index for index, node in enumerate(graph.nodes)}
        names = {node.name for node in graph.nodes}
        gone: list[gs.Node] = []
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        for convolution in [node for node in graph.nodes if is_sparse(node)]:
            last = producer(convolution.inputs[0])
            if last is None or id(last) not in own:
                continue
            found = self._fusible(convolution, own)
            if isinstance(found, Refusal):
                refusals.append(found)
            if not isinstance(found, _Found):
                continue
            first, *others = found.nodes
            node = self._convolution(found, free_name(first.name or last.outputs[0].name, names - {first.name}))
            names.add(node.name)
            edits += [Edit(node, each.op, each.name) for each in found.scales]
            if found.activation is not None:
                edits.append(Edit(node, found.activation.label, found.activation.nodes[-1].name))
            graph.nodes[position[id(first)]] = node
            gone += others
        remove(graph, gone)
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _fusible(self, convolution: gs.Node, own: AbstractSet[int]) -> _Found | Refusal | None:
        identity = _identity(convolution)
        if identity is None or self._is_small(convolution.inputs[0]):
            return None
        dtype, data = float_type(convolution), convolution.inputs[0]
        activation, data = self._activation(data, dtype, own) or (None, data)
        scales: list[gs.Node] = []
        layer = identity
        refusal: Refusal | None = None
        while (node := producer(data)) is not None and id(node) in own and is_standard(node, *AFFINE_OPS):
            try:
                if scales:
                    require_sole_reader(data, self._pinned)
                affine = read_affine(node, layer.rank, self._constant)
                if affine is None:
                    break
                if affine.may_broadcast:
                    require_shape(affine, layer, self._shape_of)
                layer = layer.with_scaled_input(affine.scale, affine.shift)
            except RefusedError as error:
                refusal = Refusal(node, str(error))
                break
            scales.insert(0, node)
            data = affine.data
        source = sole_producer(data, self._pinned)
        if source is not None and is_standard(source, "Conv"):
            return None
        if not scales or len(scales) + (activation is not None) < _FEWEST_NODES:
            # Without an activation, `FoldScaleBefore` has said why.
            return refusal if activation is not None else None
        will_be = np.dtype(np.float16) if self._to_half else dtype
        if not _is_precise(layer, will_be):
            return Refusal(scales[-1], f"what it scales and shifts by would not fit into {will_be}")
        return _Found(scales, activation, data, layer, dtype, will_be)

    def _is_small(self, tensor: gs.Tensor) -> bool:
        sizes = (self._shape_of(tensor.name) or ())[2:]
        known = [size for size in sizes if size is not None]
        return len(known) == len(sizes) > 0 and math.prod(known) < self._fewest_positions

    def _activation(self, result: gs.Tensor, dtype: FloatType, own: AbstractSet[int]) -> tuple[Match, gs.Tensor] | None:
        """The activation that makes a tensor, and what it is applied to."""
        last = producer(result)
        for tensor in _before(result):
            try:
                match = closed_match(tensor, dtype, self._constant, own, self._pinned)
            except RefusedError:
                continue
            if match is not None and match.nodes[-1] is last:
                return match, tensor
        return None

    def _convolution(self, found: _Found, name: str) -> gs.Node:
        output, geometry = found.nodes[-1].outputs[0], found.layer.geometry
        scale, shift = _rounded(found.layer, found.will_be)
        attributes = SparseConvAttributes(geometry, encode(scale, geometry.group), found.dtype)
        if (match := found.activation) is not None:
            attributes = replace(attributes, activation=match.activation, alpha=match.alpha, beta=match.beta)
        bias = gs.Variable.empty()
        if shift is not None:
            bias = gs.Constant(self._unique_name(f"{name}_bias"), shift.astype(found.dtype))
        detach(*found.nodes)
        return sparse_node(name, attributes, [found.data, bias], [output])


def _identity(convolution: gs.Node) -> ConvLayer | None:
    """The depthwise convolution that changes nothing of a convolution's X, in float64; None where there is none."""
    if convolution.op in CONCAT_OPS:
        return None  # it reads X in parts
    kernel_shape, group = convolution.attrs.get("kernel_shape"), convolution.attrs.get("group")
    per_group = weight_channels(convolution)
    if not isinstance(kernel_shape, list) or not isinstance(group, int) or per_group is None:
        return None
    if len(kernel_shape) > _MOST_SPATIAL_AXES:
        return None
    channels, ones = group * per_group, (1,) * len(kernel_shape)
    geometry = ConvGeometry(ones, ones, (0,) * (2 * len(ones)), ones, channels)
    return ConvLayer(geometry, np.ones((channels, 1, *ones)), np.dtype(np.float64))


def _is_precise(layer: ConvLayer, dtype: FloatType) -> bool:
    """Whether a type can hold the scales and shifts of a depthwise layer.

    A scale may lose digits, close to zero, where it is next to nothing beside that of other channels.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scale = layer.weight.reshape(-1)
        error = np.abs(scale.astype(dtype).astype(np.float64) - scale)
        shift = np.zeros(1) if layer.bias is None else layer.bias.astype(dtype)
    size = np.abs(scale)
    allowed = float(np.finfo(dtype).eps) * np.maximum(size, _NEXT_TO_NOTHING * size.max(initial=0))
    return bool((error <= allowed).all() and np.isfinite(shift).all())


def _rounded(layer: ConvLayer, dtype: FloatType) -> tuple[Array, Array | None]:
    """Scale, float32, and shift, of a depthwise layer of float64, as a type holds them.

    Where the type is float16, the shift is rounded to it, and the scale changed by as much: both cancel each other at
    the same x as before.
    """
    scale, shift = layer.weight, layer.bias
    if shift is not None and dtype == np.float16:
        exact, shift = shift, shift.astype(dtype).astype(np.float64)
        change = np.divide(shift, exact, out=np.ones(exact.shape), where=exact != 0)
        # A shift that is next to nothing may lose all of its digits.
        change[np.abs(change - 1) > np.finfo(dtype).eps] = 1
        scale = scale * change.reshape(scale.shape[:1] + (1,) * (scale.ndim - 1))
    return scale.astype(np.float32) + np.float32(0), shift


def _before(result: gs.Tensor) -> Iterator[gs.Tensor]:
    """What an activation that makes a tensor may be applied to: it has two nodes in a row at most, the gate beside."""
    last = producer(result)
    if last is None:
        return
    for tensor in last.inputs:
        if (node := producer(tensor)) is not None:
            yield from node.inputs
    yield from last.inputs
