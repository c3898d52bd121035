"""What a layer takes on a GPU that is not at hand, and which kernel had best run it with how many images.

Layers with four images and more, amid other convolutions, are foretold as they run inside networks
(`gpu_network_times`), all others by themselves (`gpu_times`).

A node with code of its own runs it from so many images on as it is foretold to be the fastest then; with fewer, one of
the library's kernels runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.converter.network_place import Place, find_place, reads_concat
from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.kernels.gpu_network_times import NetworkModel
from onnx_sparseconv.kernels.gpu_time_constants import HALF_NETWORK, MIN_GAIN, MODEL, NETWORK
from onnx_sparseconv.kernels.gpu_times import can_read_apart, dense_work
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice, choice_of
from onnx_sparseconv.kernels.layer import Refusal, SparseLayer, make_layer
from onnx_sparseconv.kernels.plan import GeneratedPlan, can_read_sources, choose_plan

# What has to gain where the model leaves the batch size open and nobody named one: a layer alone, and a full GPU.
DEFAULT_BATCHES = (1, 64)
# The same for sizes of maps, for each axis that is open: a large map, and a small one.
DEFAULT_SIZES = (56, 14)
# And of sequences: a long one, and a sentence.
DEFAULT_LENGTHS = (256, 56)

# With fewer images, few layers are sparse, and stand between dense ones. Where ONNX Runtime runs these channels last, a
# SparseConv has the layout of its input and output changed, and the dense layer, which was timed by itself, has not.
FEW_IMAGES = 4
# Networks of floats were measured with 64 images. With fewer than so many, kernels are short, and a dense layer is
# taken for as long as by itself, at least, but for changes of layout.
NETWORK_IMAGES = 16
# With few images, a layer's own code is read once a run, and has left the caches that are near when it runs again: in a
# network it takes about so many times what it takes by itself, again and again, as it was measured.
COLD_CODE = 1.7
# Numbers of images that generated code may begin to run at.
_FIRST_BATCHES = (1, 2, 3, 4, 8, 16, 32, 64, 128)

# Of an input, N, C and the spatial sizes; None where one is open.
Shape = Sequence[int | None]


@dataclass(frozen=True)
class GpuRule:
    """What to decide for.

    Attributes:
        architectures: 90 for sm_90; at least one.
        batches: batch sizes, for models that leave theirs open; empty: `DEFAULT_BATCHES`.
        to_half: whether layers will compute in float16, whatever they do now.
        with_images: whether code is generated for layers; else only the library's own kernels run them.
        min_gain: how many times faster than dense a layer has to be.
        takes_concats: whether a 1x1 layer takes in the Concat before it.
    """

    architectures: tuple[int, ...]
    batches: tuple[int, ...] = ()
    to_half: bool = False
    with_images: bool = True
    min_gain: float = MIN_GAIN
    takes_concats: bool = True

    def __post_init__(self) -> None:
        if not self.architectures:
            raise UsageError("the rule for GPUs needs an architecture")
        if any(batch < 1 for batch in self.batches):
            raise UsageError(f"batch sizes must be at least 1, got {min(self.batches)}")


@dataclass(frozen=True)
class Prediction:
    """A layer on one architecture, at one batch size and map size; times in microseconds, without what a call costs.

    Attributes:
        architecture: 90 for sm_90.
        batch: images.
        size: spatial sizes of its input.
        dense_us: ONNX Runtime's Conv, with the best of its options.
        sparse_us: the sparse kernel.
        runs_on: what the library's kernel runs on; empty for the layer's own.
        layout_us: what of dense_us a layer by itself is charged for changes of layout.
        is_in_network: whether both times are those inside a network.
    """

    architecture: int
    batch: int
    size: tuple[int, ...]
    dense_us: float
    sparse_us: float
    runs_on: str = ""
    layout_us: float = 0.0
    is_in_network: bool = False

    @property
    def gain(self) -> float:
        """How many times faster than dense."""
        return self.dense_us / self.sparse_us

    @property
    def saved_us(self) -> float:
        """Microseconds less than dense."""
        return self.dense_us - self.sparse_us

    def __str__(self) -> str:
        size = "x".join(map(str, self.size))
        return (
            f"{self.gain:.2f}x on sm_{self.architecture} at batch {self.batch} and {size} "
            f"({self.dense_us:.0f} us dense, {self.sparse_us:.0f} us sparse"
            f"{', on ' if self.runs_on else ''}{self.runs_on})"
        )


def predict(site: ConvSite, rule: GpuRule, *, by_itself: bool = False) -> list[Prediction] | Refusal:
    """Times of a layer at everything that the rule asks for, of the kernels that are foretold to be the fastest on each
    architecture; or why there is none.

    Args:
        site: a convolution with a known weight and geometry.
        rule: what to decide for.
        by_itself: whether it is foretold as if it stood in no network.
    """
    assert site.weight is not None
    assert site.geometry is not None
    weight, geometry = site.weight.values, site.geometry
    layer = make_layer(
        weight,
        strides=geometry.strides,
        dilations=geometry.dilations,
        pads=geometry.pads,
        group=geometry.group,
        element_type=np.dtype(np.float16) if rule.to_half else weight.dtype,
        activation=0,
    )
    if isinstance(layer, Refusal):
        return Refusal(f"sm_{rule.architectures[0]}: {layer.reason}")
    asked = _Asked.of(site.input_shape if site.input_shape is not None else unknown_shape(geometry), rule)
    if not by_itself:
        asked = replace(asked, place=find_place(site), is_joined=rule.takes_concats and reads_concat(site))
    found: list[Prediction] = []
    for architecture in rule.architectures:
        way = _best_way(layer, asked, architecture, rule)
        if isinstance(way, Refusal):
            return Refusal(f"sm_{architecture}: {way.reason}")
        found += way.predictions
    return found


def choose_kernels(
    layer: SparseLayer, shape: Shape, rule: GpuRule, *, is_joined: bool = False
) -> dict[int, KernelChoice]:
    """By architecture, 90 for sm_90, how a layer that is sparse anyway had best run; nothing where no way is known.

    Args:
        layer: as it will run.
        shape: of its input; None where a size is open.
        rule: what to decide for.
        is_joined: whether its input comes as several, which are to be concatenated.
    """
    asked = replace(_Asked.of(shape, rule), is_joined=is_joined)
    ways = {architecture: _best_way(layer, asked, architecture, rule) for architecture in rule.architectures}
    return {architecture: way.choice for architecture, way in ways.items() if not isinstance(way, Refusal)}


def unknown_shape(geometry: ConvGeometry) -> Shape:
    """Of an input of which nothing is known but its rank."""
    return (None,) * (len(geometry.kernel_shape) + 2)


def default_sizes(num_axes: int) -> tuple[int, ...]:
    """What open spatial sizes are taken as, one after the other, by the number of these axes."""
    return DEFAULT_LENGTHS if num_axes == 1 else DEFAULT_SIZES


# What generated code takes was measured of layers with as many zeros. The first layer of SqueezeNet, with 1% of them,
# took four times what was foretold of it (on an H200, from a run of which no file is kept). So those with fewer run the
# library's kernels where these are known.
LEAST_ZEROS_OF_CODE = 0.5
# By so much generated code has to be faster than what the library has: it takes bytes, its launches wait for those in
# front, and what is foretold of both is some percent off.
CODE_LEAD = 1.02
# Where no code is generated.
NO_IMAGE = Refusal("no code is generated, and no kernel of the library's own is known to be fast")


@dataclass(frozen=True)
class _Asked:
    """The calls of a layer that matter: all these batch sizes, with all these spatial sizes."""

    batches: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    is_batch_open: bool  # whether the model leaves its batch size open
    is_size_open: bool  # and a spatial size
    place: Place | None = None  # of the layer in its network, where that is known
    is_joined: bool = False  # whether its input comes as several

    @staticmethod
    def of(shape: Shape, rule: GpuRule) -> _Asked:
        is_size_open = any(size is None for size in shape[2:])
        defaults = default_sizes(len(shape) - 2)
        sizes = tuple(
            tuple(size if size is not None else default for size in shape[2:])
            for default in (defaults if is_size_open else defaults[:1])
        )
        batches = (rule.batches or DEFAULT_BATCHES) if shape[0] is None else (shape[0],)
        return _Asked(batches, sizes, shape[0] is None, is_size_open)


@dataclass(frozen=True)
class _Way:
    """One way to run a layer on one architecture: what is to run it, and times of all calls that were asked for."""

    choice: KernelChoice
    predictions: list[Prediction]

    def rank(self, min_gain: float) -> tuple[bool, float]:
        """The greatest is the best: whether it gains enough everywhere, and what it gains in the mean."""
        gains = [one.gain for one in self.predictions]
        lead = 1.0 if self.choice == CSR else CODE_LEAD ** len(gains)
        return min(gains) >= min_gain, math.prod(gains) / lead


def _best_way(layer: SparseLayer, asked: _Asked, architecture: int, rule: GpuRule) -> _Way | Refusal:
    """Code of the layer's own, from so many images on as it is the faster, or the library's kernels alone."""
    ways = []
    # Of an open size the plan knows nothing.
    knows_planes = rule.with_images and not asked.is_size_open
    calls = [
        _Call(_sized(layer, size), architecture, batch, size, asked.place, asked.is_joined, knows_planes)
        for size, batch in itertools.product(asked.sizes, asked.batches)
    ]
    by_library = [_predict_library(call) for call in calls]
    known = [one for one in by_library if one is not None]
    if len(known) == len(calls):
        ways.append(_Way(CSR, known))
    with_code = rule.with_images and not (ways and _has_few_zeros(layer))
    generated = _generated_way(layer, asked, calls, by_library) if with_code else NO_IMAGE
    if not isinstance(generated, Refusal):
        ways.insert(0, generated)
    elif not ways:
        return generated
    return max(ways, key=lambda way: way.rank(rule.min_gain))


def _has_few_zeros(layer: SparseLayer) -> bool:
    """Whether it has fewer than code had that was measured; depthwise layers were measured without any."""
    weight = layer.weight
    return bool(weight.shape[1] > 1 and np.count_nonzero(weight) > (1 - LEAST_ZEROS_OF_CODE) * weight.size)


@dataclass(frozen=True)
class _Call:
    """One call of a layer that has the size of its input."""

    layer: SparseLayer
    architecture: int
    batch: int
    size: tuple[int, ...]
    place: Place | None
    is_joined: bool
    knows_planes: bool  # there may be code of its own, made for inputs of that size

    @property
    def is_read_by_code(self) -> bool:
        """Whether code of its own reads each of its inputs where it is."""
        return self.knows_planes and can_read_sources(self.layer)

    @property
    def counts_joining(self) -> bool:
        """Whether there are several inputs, and some kernel reads them where they are, as those for 1x1 do.

        Where all kernels copy them together, it is no reason to choose one.
        """
        return self.is_joined and (self.is_read_by_code or can_read_apart(self.layer, self.architecture))

    @property
    def joining_us(self) -> float:
        """What a dense layer takes longer for the Concat before it, and code that reads one input."""
        return MODEL.joining_us(self.layer, self.batch) if self.counts_joining else 0.0

    @property
    def is_in_network(self) -> bool:
        """Whether it is known what it takes inside a network."""
        return self.place is not None and self.batch >= FEW_IMAGES

    @property
    def network(self) -> NetworkModel:
        """What layers of the type take in networks."""
        return HALF_NETWORK if self.layer.element_type == np.float16 else NETWORK

    def predict(self, sparse_us: float, runs_on: str = "") -> Prediction:
        """The prediction with such a sparse time."""
        dense_us, layout_us = self._dense_us()
        times = (dense_us + self.joining_us, sparse_us, runs_on, layout_us, self.is_in_network)
        return Prediction(self.architecture, self.batch, self.size, *times)

    def _dense_us(self) -> tuple[float, float]:
        """Microseconds dense, and those of them that are for changes of layout."""
        work = dense_work(self.layer, self.batch)
        by_itself, layout = float(MODEL.dense_us(work)), MODEL.layout_us * float(work.is_window)
        if self.place is None or not self.is_in_network:
            return by_itself, layout
        us = self.network.dense_layer_us(self.layer, self.batch, **vars(self.place))
        is_short = self.layer.element_type == np.float32 and self.batch < NETWORK_IMAGES
        return max(us, by_itself - layout) if is_short else us, 0.0


def _generated_way(
    layer: SparseLayer, asked: _Asked, calls: Sequence[_Call], by_library: Sequence[Prediction | None]
) -> _Way | Refusal:
    # Of an open size the plan knows nothing, as when it is made for good.
    planned = replace(layer, in_size=None) if asked.is_size_open else calls[0].layer
    plan = choose_plan(planned, calls[0].architecture)
    if isinstance(plan, Refusal):
        return plan
    choice = choice_of(plan, planned)
    if asked.is_batch_open:
        of_sizes = [call for call in calls if call.batch == asked.batches[0]]
        least = max(_least_batch(call, plan, asked.batches) for call in of_sizes)
        # With fewer images, the library's kernel is known to be faster at one size of the map, but not at another.
        is_unknown = any(one is None and call.batch < least for call, one in zip(calls, by_library, strict=True))
        choice = replace(choice, min_batch=0 if is_unknown else least)
    return _Way(
        choice,
        [
            library if library is not None and call.batch < choice.min_batch else _predict_generated(call, plan)
            for call, library in zip(calls, by_library, strict=True)
        ],
    )


def _least_batch(call: _Call, plan: GeneratedPlan, batches: Sequence[int]) -> int:
    """Images from which on generated code is not slower than what the library has, up to the most that is asked for.

    0 where code should run with any number, or with none: `_best_way` compares it with the library's kernels alone.
    """
    most = max(batches)
    least = 0
    for batch in sorted({*batches, *(first for first in _FIRST_BATCHES if first < most)}, reverse=True):
        with_so_many = replace(call, batch=batch)
        library = _predict_library(with_so_many)
        if library is not None and library.sparse_us < CODE_LEAD * _predict_generated(with_so_many, plan).sparse_us:
            return least
        least = batch
    return 0


def _sized(layer: SparseLayer, size: tuple[int, ...]) -> SparseLayer:
    """A layer with that input; as `make_layer` sees sizes of one and of three axes."""
    return replace(layer, in_size=size if len(size) == 2 else (1, math.prod(size)))


def _predict_generated(call: _Call, plan: GeneratedPlan) -> Prediction:
    """By generated code."""
    joining_us = 0.0 if call.is_read_by_code else call.joining_us
    if call.is_in_network:
        return call.predict(call.network.code_layer_us(call.layer, plan, call.batch, MODEL.clock_mhz) + joining_us)
    _, sparse_us = MODEL.layer_us(call.layer, plan, call.batch)
    return call.predict(sparse_us * (COLD_CODE if call.batch < FEW_IMAGES else 1.0) + joining_us)


def _predict_library(call: _Call) -> Prediction | None:
    """By the library's kernel that takes the layer; None where nothing is foretold of it."""
    library = MODEL.library_us(call.layer, call.architecture, call.batch, is_joined=call.counts_joining)
    return None if library is None else call.predict(*library)
