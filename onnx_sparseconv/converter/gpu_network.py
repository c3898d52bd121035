"""Which layers of a network had best be sparse on a GPU together.

Around a layer that stays dense among sparse ones, ONNX Runtime changes the layout of tensors, which a network that is
dense throughout runs channels last. So a layer that loses a little may gain by being sparse, and with few images, where
layers take some microseconds, nearly all of them have to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.converter.conv_sites import ConvSite, output_positions
from onnx_sparseconv.converter.gpu_predictions import FEW_IMAGES, GpuRule, Prediction, default_sizes, unknown_shape
from onnx_sparseconv.kernels.gpu_time_constants import MODEL
from onnx_sparseconv.text import count

# With few images, layers that are decided together are rewritten where they are foretold to gain by this factor, as a
# CUDA graph. Sums of many layers are foretold within some percent, and without a graph they gain far more, for the host
# has less to launch. With more images, as many as `MANY_LAYERS` need not gain by as much as a few, of whose sum less is
# known.
MIN_GAIN_TOGETHER = 1.02
MIN_GAIN_OF_MANY, MANY_LAYERS = 1.1, 10
# What a dense layer, timed by itself, is charged for changes of its layout; among others it has about half of it left:
# residuals and what else a SparseConv does in passing.
LAYOUT_AMONG_OTHERS = 0.5

# An architecture, 90 for sm_90, and a number of images.
Call = tuple[int, int]


@dataclass(frozen=True)
class NetworkGain:
    """What the sparse layers of a network take at one call, with what is changed around those that stay dense.

    Attributes:
        architecture, batch: the call.
        dense_us: of all layers that could be sparse, dense; microseconds.
        sparse_us: of the same, as they were chosen, microseconds.
    """

    architecture: int
    batch: int
    dense_us: float
    sparse_us: float

    @property
    def gain(self) -> float:
        """How many times faster than dense."""
        return self.dense_us / self.sparse_us

    def __str__(self) -> str:
        return (
            f"{self.gain:.2f}x on sm_{self.architecture} at batch {self.batch} "
            f"({self.dense_us:.0f} us dense, {self.sparse_us:.0f} us sparse)"
        )


@dataclass(frozen=True)
class Together:
    """The layers that had best be sparse together.

    Attributes:
        sparse: their numbers.
        gains: what that gives at each call.
    """

    sparse: frozenset[int]
    gains: tuple[NetworkGain, ...]

    def is_enough(self, rule: GpuRule) -> bool:
        """Whether it pays at every call."""
        wanted = min(rule.min_gain, MIN_GAIN_OF_MANY) if len(self.sparse) >= MANY_LAYERS else rule.min_gain
        return bool(self.sparse) and all(
            one.gain >= (MIN_GAIN_TOGETHER if one.batch < FEW_IMAGES else wanted) for one in self.gains
        )

    def __str__(self) -> str:
        together = " together" if len(self.sparse) > 1 else ""
        return f"{count(len(self.sparse), 'layer')}{together} predicted {', '.join(map(str, self.gains))}"


def choose_together(sites: Sequence[ConvSite], found: Mapping[int, Sequence[Prediction]], rule: GpuRule) -> Together:
    """The layers that had best be sparse together: those with which the network gains most, in the geometric mean of
    all calls.

    Args:
        sites: the convolutions of a model.
        found: what was foretold of those that may be sparse, by their number.
        rule: what to decide for.
    """
    by_layer = {index: _least_by_call(ones) for index, ones in found.items()}
    calls = sorted({call for ones in by_layer.values() for call in ones})
    costs = np.array([[_costs(sites[i], ones.get(call), rule) for call in calls] for i, ones in by_layer.items()])
    if not costs.size:
        return Together(frozenset(), ())
    dense, sparse, changes = np.moveaxis(costs, -1, 0)
    others = [site for index, site in enumerate(sites) if site.is_conv and index not in found]
    rest = np.array([sum(changes_us(site, images, to_half=rule.to_half) for site in others) for _, images in calls])
    is_sparse = _greatest_gain(dense + changes, sparse, rest)
    total = np.where(is_sparse[:, None], sparse, dense + changes).sum(axis=0) + rest
    gains = (NetworkGain(*call, *times) for call, *times in zip(calls, dense.sum(axis=0), total, strict=True))
    return Together(frozenset(np.array([*by_layer])[is_sparse].tolist()), tuple(gains))


def changes_us(site: ConvSite, batch: int, size: Sequence[int] | None = None, *, to_half: bool) -> float:
    """Microseconds of changing the layout of a convolution's input and output.

    Args:
        site: the convolution.
        batch: images.
        size: spatial sizes of its input; None: its own, and where these are open, large ones.
        to_half: whether the model will be float16.
    """
    if site.weight is None or site.geometry is None:
        return 2 * MODEL.dense_launch_us
    weight, spatial = site.weight.values, (site.input_shape or unknown_shape(site.geometry))[2:]
    size = size if size is not None else [length or default_sizes(len(spatial))[0] for length in spatial]
    shape = (batch, weight.shape[1] * site.geometry.group, *size)
    out_shape = (batch, weight.shape[0], output_positions(site.geometry, shape) or 0)
    # An input of the model has its layout changed for dense layers, too.
    changed = [out_shape] if not site.node.inputs[0].inputs else [shape, out_shape]
    itemsize = 2 if to_half else weight.dtype.itemsize
    return sum(MODEL.dense_launch_us + MODEL.transpose_us(dims, itemsize) for dims in changed)


def _least_by_call(found: Sequence[Prediction]) -> dict[Call, Prediction]:
    """By architecture and batch size, of several sizes of maps the one at which a layer saves least."""
    return {(one.architecture, one.batch): one for one in sorted(found, key=lambda one: -one.saved_us)}


def _costs(site: ConvSite, one: Prediction | None, rule: GpuRule) -> tuple[float, float, float]:
    """A layer's microseconds among others, dense and sparse, and those of changes of layout if it alone is dense.

    One that was timed by itself was charged with these. With many images, they take as long as the tensors are large;
    with few, the library's kernels begin before those in front of them are done.
    """
    if one is None:
        return 0.0, 0.0, 0.0
    dense_us = one.dense_us - (1 - LAYOUT_AMONG_OTHERS) * one.layout_us
    if one.batch >= FEW_IMAGES and not one.is_in_network:
        return dense_us, one.sparse_us, 0.0
    early_us = MODEL.early_us(one.runs_on) if one.batch < FEW_IMAGES else 0.0
    return dense_us, one.sparse_us - early_us, changes_us(site, one.batch, one.size, to_half=rule.to_half)


def _greatest_gain(
    dense: NDArray[np.float64], sparse: NDArray[np.float64], rest: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which layers to run sparse such that the product of the calls' times is least, by changing one after the other.

    Times are those of layers at calls, shape ``(layers, calls)``; ``rest`` is what else each call takes, ``(calls,)``.
    """
    is_sparse = np.ones(len(dense), np.bool_)
    total = sparse.sum(axis=0) + rest
    while True:
        changed = total + np.where(is_sparse[:, None], dense - sparse, sparse - dense)
        best = int(np.argmin(np.log(changed).sum(axis=1)))
        if not np.log(changed[best]).sum() < np.log(total).sum() - 1e-9:
            return is_sparse
        is_sparse[best] = not is_sparse[best]
        total = changed[best]
