"""How far a computed convolution layer is from the exact one: float64 at sampled places of its output.

A whole reference in float64 of a large layer at batch 64 takes minutes on a CPU. All output channels at some hundred
places take milliseconds, and a kernel that goes wrong only somewhere, at a border or in the last image, say, is looked
for by tests; here it is rounding that is measured, which is alike everywhere. Corners are always among the places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.runtime.inputs import Array, Shape

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class LayerError:
    """Errors against float64 over the sampled values.

    Attributes:
        max_abs: largest error.
        rms: root of the mean square error.
        rms_relative: the same over the root mean square of the exact values; None where they are all zero.
        num_values: sampled values.
        num_nonfinite: NaN and Inf among the computed ones, which are exact nowhere; the errors leave them out.
    """

    max_abs: float
    rms: float
    rms_relative: float | None
    num_values: int
    num_nonfinite: int


def sample_places(out_shape: Shape, count: int = 256, seed: int = 0) -> NDArray[np.int64]:
    """Places of an output ``[N, K, E1..En]``: the corners of the first and the last image, and random ones.

    Args:
        out_shape: shape of the output.
        count: random places.
        seed: of the generator.

    Returns:
        ``[places, 1 + n]``: image, then spatial coordinates.
    """
    sizes = (out_shape[0], *out_shape[2:])
    corners = list(itertools.product(*({0, size - 1} for size in sizes)))
    rng = np.random.default_rng(seed)
    random = np.stack([rng.integers(0, size, count) for size in sizes], axis=1)
    return np.unique(np.concatenate([np.asarray(corners, np.int64), random]), axis=0)


def exact_values(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    geometry: ConvGeometry,
    places: NDArray[np.int64],
    activation: Callable[[Float64], Float64] = lambda values: values,
) -> Float64:
    """The layer in float64 at some places.

    Args:
        x: input ``[N, C, D1..Dn]`` as the computed layer got it, float or float16.
        weight: dense weight ``[K, C / group, k1..kn]``, as the computed layer got it.
        bias: ``[K]``, or None.
        geometry: where the taps fall, with explicit padding.
        places: ``[places, 1 + n]`` as `sample_places` gives them.
        activation: in float64.

    Returns:
        ``[places, K]``.
    """
    rank = len(geometry.kernel_shape)
    taps = np.indices(geometry.kernel_shape).reshape(rank, -1)
    # [places, n, taps]: where each tap reads; outside the input it reads a zero.
    begin = places[:, 1:] * np.asarray(geometry.strides) - np.asarray(geometry.pads[:rank])
    read = begin[:, :, None] + taps[None] * np.asarray(geometry.dilations)[None, :, None]
    limits = np.asarray(x.shape[2:])[None, :, None]
    inside = ((read >= 0) & (read < limits)).all(axis=1)
    index = tuple(np.where(inside, read[:, i], 0) for i in range(rank))
    group_channels, group_rows = weight.shape[1], weight.shape[0] // geometry.group
    rows = []
    for group in range(geometry.group):
        channels = np.arange(group * group_channels, (group + 1) * group_channels)
        # Advanced indices on axis 0, 1 and all spatial axes: [places, channels, taps].
        patches = x[(places[:, 0, None, None], channels[None, :, None], *(axis[:, None, :] for axis in index))].astype(
            np.float64
        )
        patches *= inside[:, None, :]
        own = weight[group * group_rows : (group + 1) * group_rows].astype(np.float64)
        rows.append(patches.reshape(len(places), -1) @ own.reshape(group_rows, -1).T)
    sums: Float64 = np.concatenate(rows, axis=1)
    return activation(sums + (0.0 if bias is None else bias.astype(np.float64)))


def layer_error(y: Array, exact: Float64, places: NDArray[np.int64]) -> LayerError:
    """Error of a computed output ``[N, K, E1..En]`` at the places of ``exact`` ``[places, K]``.

    Raises:
        ValueError: the shapes contradict each other.
    """
    if y.ndim != places.shape[1] + 1 or exact.shape != (len(places), y.shape[1]):
        raise ValueError(f"an output of shape {y.shape} at {len(places)} places does not match {exact.shape}")
    computed = y[(places[:, 0], slice(None), *places[:, 1:].T)].astype(np.float64)
    finite = np.isfinite(computed)
    error, known = (computed - exact)[finite], exact[finite]
    rms = math.sqrt(float(np.mean(error**2))) if error.size else 0.0
    scale = math.sqrt(float(np.mean(known**2))) if known.size else 0.0
    return LayerError(
        max_abs=float(np.abs(error).max()) if error.size else 0.0,
        rms=rms,
        rms_relative=rms / scale if scale > 0 else None,
        num_values=computed.size,
        num_nonfinite=int(computed.size - finite.sum()),
    )


def error_ratio(ours: LayerError, theirs: LayerError) -> float | None:
    """How many times larger our error is than theirs, by root mean square; None where theirs is zero."""
    return ours.rms / theirs.rms if theirs.rms > 0 else None
