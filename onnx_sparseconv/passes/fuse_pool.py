"""Take the MaxPool behind a SparseConv into it."""

from __future__ import annotations

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
)


class FusePool:
    """Replace SparseConv and the MaxPool that reads it by SparseConvMaxPool, for models that are made for GPUs.

    There, ONNX Runtime's MaxPool is far from the memory's speed in float16, and with ``prefer_nhwc`` it has the layout
    of its input and output changed. On the CPU its MaxPool is the faster one.

    1. The MaxPool is the only reader of the convolution's output, which is not pinned, and has no second output.
    2. The convolution has no residual.
    3. The windows are not dilated, ``ceil_mode`` and ``storage_order`` are 0, ``auto_pad`` is NOTSET or VALID, and each
       padding is less than the window.
    4. The new node stands where the convolution stood, keeps its name, and makes the MaxPool's output.

    Args:
        pinned: names of tensors that have to stay.
    """

    title = "fused into the sparse convolutions before them"

    def __init__(self, pinned: AbstractSet[str]) -> None:
        self._pinned = pinned

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
            convolution, geometry = found
            edits.append(Edit(convolution, pool.op, pool.name))
            graph.nodes[position[id(convolution)]] = _pooled(convolution, pool, geometry)
            gone.append(pool)
        remove(graph, gone)
        return PassResult(graph, len(edits), tuple(edits), tuple(refusals))

    def _fusible(self, pool: gs.Node, own: AbstractSet[int]) -> tuple[gs.Node, PoolGeometry] | None:
        if not is_standard(pool, "MaxPool") or len(pool.inputs) != 1 or not pool.outputs:
            return None
        result = pool.inputs[0]
        convolution = result.inputs[0] if len(result.inputs) == 1 else None
        if convolution is None or id(convolution) not in own or not is_sparse(convolution):
            return None
        if convolution.op == SPARSE_CONV_ADD:
            raise RefusedError("the convolution before it adds a residual")
        kernel_shape = convolution.attrs.get("kernel_shape")
        if convolution.op != SPARSE_CONV or not isinstance(kernel_shape, list):
            return None
        require_sole_reader(result, self._pinned)
        if not has_no_further_output(pool):
            raise RefusedError("it has a second output")
        return convolution, read_pool(pool, len(kernel_shape))


def read_pool(pool: gs.Node, num_axes: int) -> PoolGeometry:
    """The windows of a MaxPool over so many axes.

    Raises:
        RefusedError: the op cannot hold them.
    """
    auto_pad = pool.attrs.get("auto_pad", "NOTSET")
    if auto_pad not in ("NOTSET", "VALID"):
        raise RefusedError(f"its auto_pad is {auto_pad}")
    for name in ("ceil_mode", "storage_order"):
        if pool.attrs.get(name, 0) != 0:
            raise RefusedError(f"its {name} is not 0")
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
    return found


def _integers(pool: gs.Node, name: str, default: list[int]) -> tuple[int, ...]:
    value: Any = pool.attrs.get(name, default)
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        raise RefusedError(f"its attribute {name} is no list of integers")
    return tuple(value)


def _pooled(convolution: gs.Node, pool: gs.Node, geometry: PoolGeometry) -> gs.Node:
    inputs, outputs = list(convolution.inputs), [pool.outputs[0]]
    attributes = dict(convolution.attrs) | pool_attributes(geometry)
    detach(convolution, pool)
    return gs.Node(SPARSE_CONV_MAX_POOL, convolution.name, attributes, inputs, outputs, domain=DOMAIN)
