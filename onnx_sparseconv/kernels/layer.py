"""A sparse convolution layer as the CUDA code generator sees it: two spatial axes, dense weights, no ONNX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.kernels.unified_csr import Array

SPATIAL_AXES = 2
# Larger strides, dilations and pads are no convolution's; sums of products of them fit into the kernel's 32 bits.
MAX_STEP = 1 << 20


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan for a layer; one line for the report."""

    reason: str


@dataclass(frozen=True)
class SparseLayer:
    """The convolution of one of our nodes. 1-D convolutions have a leading axis of size 1.

    Attributes:
        weight: ``[K, C / group, R, S]``, float32 or float16, host.
        strides, dilations: ``(vertical, horizontal)``.
        pads: ``(top, left, bottom, right)``, in elements.
        group: convolution groups.
        element_type: float32 or float16, of X, B, Z and Y.
        activation: code of the op's ``activation`` attribute.
        in_size: ``(height, width)`` of X where the model tells; the plan is then made for it, and runs others too
            unless it is packed.
        source_channels: of each of the inputs that X is concatenated of, where the node takes several; else empty.
    """

    weight: Array
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    group: int
    element_type: np.dtype[Any]
    activation: int
    in_size: tuple[int, int] | None = None
    source_channels: tuple[int, ...] = ()

    @property
    def out_channels(self) -> int:
        """Number of output channels, K."""
        return int(self.weight.shape[0])

    @property
    def in_channels(self) -> int:
        """Number of input channels, C."""
        return int(self.weight.shape[1]) * self.group

    @property
    def kernel_shape(self) -> tuple[int, int]:
        """``(R, S)``."""
        return int(self.weight.shape[2]), int(self.weight.shape[3])

    @property
    def is_pointwise(self) -> bool:
        """Whether planes may be seen as single rows: 1x1, stride 1, no padding."""
        return self.kernel_shape == (1, 1) and self.strides == (1, 1) and not any(self.pads)

    @property
    def scales_channels(self) -> bool:
        """Whether every output is one input, scaled and shifted."""
        return self.is_pointwise and self.group == self.in_channels == self.out_channels

    @property
    def row_size(self) -> tuple[int, int] | None:
        """`in_size` as the kernel sees it: a plane of a pointwise layer is one row."""
        if self.in_size is None or not self.is_pointwise:
            return self.in_size
        return 1, self.in_size[0] * self.in_size[1]

    @property
    def is_depthwise(self) -> bool:
        """Whether every output channel reads one input channel of several."""
        return self.group_in_channels == 1 < self.group

    @property
    def group_in_channels(self) -> int:
        """Input channels of a group."""
        return int(self.weight.shape[1])

    @property
    def group_out_channels(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.group

    def out_size(self) -> tuple[int, int] | None:
        """``(height, width)`` of Y for `row_size`; None where that is unknown."""
        return self._out_size

    @cached_property
    def _out_size(self) -> tuple[int, int] | None:
        """Kept, since every tile that a plan may have asks for it."""
        if self.row_size is None:
            return None
        top, left, bottom, right = self.pads
        sizes = []
        for axis, (begin, end) in enumerate(((top, bottom), (left, right))):
            reach = (self.kernel_shape[axis] - 1) * self.dilations[axis] + 1
            sizes.append((self.row_size[axis] + begin + end - reach) // self.strides[axis] + 1)
        return sizes[0], sizes[1]

    @cached_property
    def used_weights(self) -> NDArray[np.float32]:
        """The weight as the kernel multiplies with it: float32, rounded to the element type first. Shape of `weight`.

        A weight whose rounded value is zero is no non-zero for the kernel.
        """
        return np.asarray(self.weight.astype(self.element_type), np.float32)


def make_layer(
    weight: Array,
    *,
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
    group: int,
    element_type: np.dtype[Any],
    activation: int,
    in_size: tuple[int, ...] | None = None,
    source_channels: tuple[int, ...] = (),
) -> SparseLayer | Refusal:
    """Make a layer of a node's dense weight and geometry.

    Args:
        weight: ``[K, C / group, D1..Dn]``, n = 1 to 3.
        strides: n numbers.
        dilations: n numbers.
        pads: 2n numbers as in ONNX; empty where they are only known at run time.
        group: convolution groups.
        element_type: float32 or float16, of X, B, Z and Y.
        activation: code of the op's ``activation`` attribute.
        in_size: the n spatial sizes of X, if all are known.
        source_channels: of each of the inputs that X is concatenated of, if there are several.

    Returns:
        The layer, or why generated code cannot compute it.
    """
    rank = weight.ndim - 2
    if not pads:
        return Refusal("its padding is only known at run time (auto_pad SAME with a stride)")
    largest = max(*strides, *dilations, *pads)
    if largest > MAX_STEP:
        return Refusal(f"one of its strides, dilations and pads is {largest}, more than {MAX_STEP}")
    begins, ends = pads[:rank], pads[rank:]
    if rank > SPATIAL_AXES:
        if any(n > 1 for n in (*weight.shape[2:], *strides)) or any(pads):
            return Refusal("it is a 3-D convolution")
        # Pointwise: only the number of positions matters.
        size = None if in_size is None else (1, int(np.prod(in_size)))
        return SparseLayer(
            weight=weight.reshape(*weight.shape[:2], 1, 1),
            strides=(1, 1),
            dilations=(1, 1),
            pads=(0, 0, 0, 0),
            group=group,
            element_type=element_type,
            activation=activation,
            in_size=size,
            source_channels=source_channels,
        )
    lead = (1,) * (SPATIAL_AXES - rank)
    no_pad = (0,) * (SPATIAL_AXES - rank)
    sizes = None if in_size is None else (*lead, *in_size)
    return SparseLayer(
        weight=weight.reshape(*weight.shape[:2], *lead, *weight.shape[2:]),
        strides=_pair((*lead, *strides)),
        dilations=_pair((*lead, *dilations)),
        pads=(*_pair((*no_pad, *begins)), *_pair((*no_pad, *ends))),
        group=group,
        element_type=np.dtype(element_type),
        activation=int(activation),
        in_size=None if sizes is None else _pair(sizes),
        source_channels=source_channels,
    )


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)
