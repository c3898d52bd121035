"""Take the MaxPool behind a SparseConv into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import (
    DOMAIN,
    SPARSE_CONV,
    SPARSE_CONV_ADD,
    SPARSE_CONV_MAX_POOL,
    PoolGeometry,
    check_pool,
    pool_attributes,
)
from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.passes.base import (
    Edit,
    PassResult,
    Refusal,
    RefusedError,
    detach,
    has_no_further_output,
    is_sparse,
    is_standard,
    remove,
    require_sole_reader,
    sole_producer,
)
from onnx_sparseconv.passes.fold_scale_before import ShapeLookup


class FusePool:
    """Replace SparseConv and the MaxPool that reads it by SparseConvMaxPool, for models that are made for GPUs.

    There, ONNX Runtime's MaxPool is far from the memory's speed in float16, and with ``prefer_nhwc`` it has the layout
    of its input and output changed. On the CPU its MaxPool is the faster one.

    1. The MaxPool is the only reader of the convolution's output, which is not pinned, and has no second output.
    2. The convolution has no residual.
    3. The windows are not dilated, ``ceil_mode`` is 0, or is no matter since strides divide the known sizes,
       ``storage_order`` is 0, ``auto_pad`` is NOTSET or VALID, and each padding is less than the window.
    4. The new node stands where the convolution stood, keeps its name, and makes the MaxPool's output.
    5. A MaxPool that alone reads a Concat of channels goes into all convolutions before that, where each meets the
       rules: what is pooled channel by channel may be joined before or behind.

    Args:
        pinned: names of tensors that have to stay.
        shape_of: shape of a tensor by its name before anything was rewritten, as it follows from the model's inputs;
            None where not even the rank is known.
        unique_name: makes a tensor name that the model does not have.
    """

    title = "fused into the sparse convolutions before them"

    def __init__(self, pinned: AbstractSet[str], shape_of: ShapeLookup, unique_name: Callable[[str], str]) -> None:
        self._pinned = pinned
        self._shape_of = shape_of
        self._unique_name = unique_name

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Fuse what can be fused in ``graph`` itself."""
        position = {id(node): index for index, node in enumerate(graph.nodes)}
        gone: list[gs.Node] = []
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        for pool in list(graph.nodes):
            try:
                found = self._fusible(pool, position.keys())
            except RefusedError as refused:
                refusals.append(Refusal(pool, str(refused)))
                continue
            if found is None:
                continue
            convolutions, concat, geometry = found
            what = pool.op if concat is None else f"{pool.op} behind a Concat"
            edits.append(Edit(convolutions[0], what, pool.name))
            for convolution, pooled in zip(convolutions, self._pooled(convolutions, concat, pool), strict=True):
                graph.nodes[position[id(convolution)]] = _with_pool(convolution, pooled, geometry)
            gone.append(pool)
        remove(graph, gone)
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _fusible(
        self, pool: gs.Node, own: AbstractSet[int]
    ) -> tuple[list[gs.Node], gs.Node | None, PoolGeometry] | None:
        """The convolutions, the Concat between, if there is one, and the windows."""
        if not is_standard(pool, "MaxPool") or len(pool.inputs) != 1 or not pool.outputs:
            return None
        result = pool.inputs[0]
        maker = result.inputs[0] if len(result.inputs) == 1 else None
        if maker is None or id(maker) not in own:
            return None
        concat = maker if is_standard(maker, "Concat") else None
        convolutions = [maker] if concat is None else self._joined(concat, own)
        if not convolutions or not is_sparse(convolutions[0]):
            return None
        if convolutions[0].op == SPARSE_CONV_ADD:
            raise RefusedError("the convolution before it adds a residual")
        kernel_shape = convolutions[0].attrs.get("kernel_shape")
        if convolutions[0].op != SPARSE_CONV or not isinstance(kernel_shape, list):
            return None
        if concat is not None and concat.attrs.get("axis") not in (1, -1 - len(kernel_shape)):
            return None
        require_sole_reader(result, self._pinned)
        if not has_no_further_output(pool):
            raise RefusedError("it has a second output")
        return convolutions, concat, read_pool(pool, len(kernel_shape), self._shape_of(result.name))

    def _joined(self, concat: gs.Node, own: AbstractSet[int]) -> list[gs.Node]:
        """The convolutions whose results a Concat joins; none where one of them cannot take a pool."""
        makers = [sole_producer(tensor, self._pinned) for tensor in concat.inputs]
        found = [m for m in makers if m is not None and id(m) in own and is_sparse(m) and m.op == SPARSE_CONV]
        return found if len(found) == len(makers) else []

    def _pooled(self, convolutions: Sequence[gs.Node], concat: gs.Node | None, pool: gs.Node) -> list[gs.Tensor]:
        """What the convolutions are to make: the pool's output, or parts of it, which the Concat joins."""
        output = pool.outputs[0]
        detach(pool)
        if concat is None:
            return [output]
        parts = [gs.Variable(self._unique_name(f"{c.outputs[0].name}_pooled")) for c in convolutions]
        concat.inputs, concat.outputs = list(parts), [output]
        return list(parts)


def read_pool(pool: gs.Node, num_axes: int, shape: tuple[int | None, ...] | None) -> PoolGeometry:
    """The windows of a MaxPool over so many axes.

    Args:
        pool: the node.
        num_axes: spatial axes of what it reads.
        shape: of that, with None for unknown sizes, or None.

    Raises:
        RefusedError: the op cannot hold them.
    """
    auto_pad = pool.attrs.get("auto_pad", "NOTSET")
    if auto_pad not in ("NOTSET", "VALID"):
        raise RefusedError(f"its auto_pad is {auto_pad}")
    if pool.attrs.get("storage_order", 0) != 0:
        raise RefusedError("its storage_order is not 0")
    if any(dilation != 1 for dilation in _integers(pool, "dilations", [1] * num_axes)):
        raise RefusedError("its windows are dilated")
    found = PoolGeometry(
        kernel_shape=_integers(pool, "kernel_shape", []),
        strides=_integers(pool, "strides", [1] * num_axes),
        pads=(0,) * (2 * num_axes) if auto_pad == "VALID" else _integers(pool, "pads", [0] * (2 * num_axes)),
    )
    try:
        check_pool(found, num_axes)
    except FormatError as error:
        raise RefusedError(f"its windows do not fit: {error}") from error
    if pool.attrs.get("ceil_mode", 0) != 0 and not _is_divided(found, shape):
        raise RefusedError("its ceil_mode is not 0")
    return found


def _is_divided(pool: PoolGeometry, shape: tuple[int | None, ...] | None) -> bool:
    """Whether strides lead from the first window to the end of the map exactly, so that nothing is rounded."""
    axes = len(pool.kernel_shape)
    sizes = [size for size in (shape or ())[2:] if isinstance(size, int)]
    if shape is None or len(shape) != axes + 2 or len(sizes) != axes:
        return False
    lengths = (size + pool.pads[i] + pool.pads[axes + i] - pool.kernel_shape[i] for i, size in enumerate(sizes))
    return all(length >= 0 and length % stride == 0 for length, stride in zip(lengths, pool.strides, strict=True))


def _integers(pool: gs.Node, name: str, default: list[int]) -> tuple[int, ...]:
    value: Any = pool.attrs.get(name, default)
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        raise RefusedError(f"its attribute {name} is no list of integers")
    return tuple(value)


def _with_pool(convolution: gs.Node, output: gs.Tensor, geometry: PoolGeometry) -> gs.Node:
    inputs, attributes = list(convolution.inputs), dict(convolution.attrs) | pool_attributes(geometry)
    detach(convolution)
    return gs.Node(SPARSE_CONV_MAX_POOL, convolution.name, attributes, inputs, [output], domain=DOMAIN)
