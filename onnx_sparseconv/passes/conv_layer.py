"""A convolution on its way to SparseConv, and the arithmetic of folding other operators into it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.kernels.unified_csr import Array
from onnx_sparseconv.passes.base import RefusedError

# Rounding may lose so much of a whole row beyond the type's precision: what float32 cannot resolve near zero.
_NEGLIGIBLE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, eq=False)
class ConvLayer:
    """Parameters of a convolution that will be rewritten. Folding computes in float64; `rounded` rounds once.

    Attributes:
        geometry: where the taps fall; ``pads`` grow when a Pad is folded.
        weight: ``(K, C / group, D1..Dn)``; as stored, or float64 once it was scaled.
        dtype: type that the weight and the bias are rounded to, float32 or float16.
        bias: ``[K]``, as stored or float64; None where there is none, or where it is only known at run time.
        runtime_bias: whether there is a bias that is only known at run time, or that callers may set.
        new_bias: whether ``bias`` is another one than the node's.
    """

    geometry: ConvGeometry
    weight: Array
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    bias: Array | None = None
    runtime_bias: bool = False
    new_bias: bool = False

    @property
    def out_channels(self) -> int:
        """K."""
        return int(self.weight.shape[0])

    @property
    def in_channels(self) -> int:
        """C, over all groups."""
        return int(self.weight.shape[1]) * self.geometry.group

    @property
    def rank(self) -> int:
        """Axes of the input and of the output."""
        return int(self.weight.ndim)

    def with_scaled_output(self, scale: Array, shift: Array) -> ConvLayer:
        """The layer that computes ``scale * y + shift`` where this one computes y.

        Args:
            scale: float64, ``[K]`` or ``[1]``.
            shift: likewise.

        Raises:
            RefusedError: it would not be this layer's precision any more.
        """
        _require_channels(scale, shift, self.out_channels, "gives")
        if self.runtime_bias:
            raise RefusedError("the convolution's bias is only known at run time")
        weight = self.weight
        if (scale != 1).any():
            with np.errstate(invalid="ignore", over="ignore"):
                weight = weight.astype(np.float64) * _along(scale, 0, self.rank)
        bias = self.bias
        if bias is not None or shift.any():
            with np.errstate(invalid="ignore", over="ignore"):
                before = np.float64(0) if bias is None else bias.astype(np.float64)
                bias = np.broadcast_to(before * scale + shift, (self.out_channels,))
        return _checked(replace(self, weight=weight, bias=bias, new_bias=bias is not None))

    def with_scaled_input(self, scale: Array, shift: Array) -> ConvLayer:
        """The layer that computes from x what this one computes from ``scale * x + shift``.

        Args:
            scale: float64, ``[C]`` or ``[1]``.
            shift: likewise.

        Raises:
            RefusedError: it would not be this layer's precision any more, or the layer pads what was shifted.
        """
        _require_channels(scale, shift, self.in_channels, "takes")
        geometry = self.geometry
        if shift.any() and (geometry.auto_pad != "NOTSET" or any(geometry.pads)):
            raise RefusedError("the convolution pads its input with zeros, which would not be shifted")
        if shift.any() and self.runtime_bias:
            raise RefusedError("the convolution's bias is only known at run time")
        exact = self.weight.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            weight = exact * self._by_row(scale) if (scale != 1).any() else self.weight
            if not shift.any():
                return _checked(replace(self, weight=weight))
            added = (exact * self._by_row(shift)).reshape(self.out_channels, -1).sum(axis=1)
            bias = added if self.bias is None else self.bias.astype(np.float64) + added
        return _checked(replace(self, weight=weight, bias=bias, new_bias=True))

    def with_pads(self, pads: tuple[int, ...]) -> ConvLayer:
        """The layer that pads by so much more; ``pads`` as in ONNX Conv.

        Raises:
            RefusedError: its own padding is not known, or negative: of that, runtimes make different things.
        """
        geometry = self.geometry
        if geometry.auto_pad != "NOTSET":
            raise RefusedError("the convolution's own padding depends on sizes that are only known at run time")
        if any(pad < 0 for pad in geometry.pads):
            raise RefusedError("the convolution's own padding is negative")
        both = tuple(a + b for a, b in zip(geometry.pads, pads, strict=True))
        return replace(self, geometry=replace(geometry, pads=both))

    def rounded(self) -> ConvLayer:
        """The layer with weight and bias in its type. Zeros of a weight that was scaled are all +0."""
        weight, bias = self.weight, self.bias
        if weight.dtype != self.dtype:
            weight = weight.astype(self.dtype) + self.dtype.type(0)
        if bias is not None and bias.dtype != self.dtype:
            bias = bias.astype(self.dtype)
        return replace(self, weight=weight, bias=bias)

    def _by_row(self, values: Array) -> Array:
        """Numbers of the input channels, as they meet the weight: ``[K, C / group, 1..]``."""
        group, (out_channels, per_group) = self.geometry.group, self.weight.shape[:2]
        by_group = np.broadcast_to(values, (self.in_channels,)).reshape(group, per_group)
        by_row = np.repeat(by_group, out_channels // group, axis=0)
        return by_row.reshape(out_channels, per_group, *(1,) * (self.rank - 2))


def _along(values: Array, axis: int, rank: int) -> Array:
    return values.reshape(tuple(-1 if i == axis else 1 for i in range(rank)))


def _require_channels(scale: Array, shift: Array, channels: int, verb: str) -> None:
    if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
        raise RefusedError("its scale or shift is not finite")
    for values in (scale, shift):
        if values.size not in (1, channels):
            raise RefusedError(f"it has numbers for {values.size} channels, the convolution {verb} {channels}")


def _checked(layer: ConvLayer) -> ConvLayer:
    """The layer, if its type can hold it.

    The weights of an output channel, rounded, may together be off by no more than the type's precision of their sum:
    more would mean that some overflow or come too close to zero.
    """
    if layer.bias is not None and layer.bias.dtype != layer.dtype and not _fits(layer.bias, layer.dtype):
        raise RefusedError(f"the folded bias would not fit into {layer.dtype}")
    if layer.weight.dtype == layer.dtype:
        return layer
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        rows = layer.weight.reshape(layer.out_channels, -1)
        error = np.abs(rows.astype(layer.dtype).astype(np.float64) - rows).sum(axis=1)
        info = np.finfo(layer.dtype)
        negligible = max(_NEGLIGIBLE, float(info.smallest_subnormal))
        fits = error <= float(info.eps) * np.abs(rows).sum(axis=1) + negligible
    if not fits.all():
        raise RefusedError(f"the folded weights would not fit into {layer.dtype}")
    return layer


def _fits(values: Array, dtype: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return bool(np.isfinite(values.astype(dtype)).all())
