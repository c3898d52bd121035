"""Which layers pay on a GPU that is not at hand.

Of every layer that its sparsity speaks for, the times of the generated kernel, of the library's kernels and of ONNX
Runtime's dense Conv are foretold (`kernels.gpu_times`), at each batch size that matters. What does not gain by a margin
at all of them, and on all architectures asked for, stays dense; with few images, where no layer gains much by itself,
all that gain otherwise are decided together. Where the library's kernel is foretold to be faster than the generated
one, no code is generated. How often that is right: docs/gpu-rule.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnx_sparseconv.converter.conv_sites import ConvSite, output_positions
from onnx_sparseconv.converter.report import Reason, Verdict
from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.kernels.gpu_time_constants import MEASURED_ARCHITECTURE, MEASURED_ON, MIN_GAIN, MODEL
from onnx_sparseconv.kernels.gpu_times import dense_work
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice
from onnx_sparseconv.kernels.layer import Refusal, SparseLayer, make_layer
from onnx_sparseconv.kernels.plan import GeneratedPlan, choose_plan

# What has to gain where the model leaves the batch size open and nobody named one: a layer alone, and a full GPU.
DEFAULT_BATCHES = (1, 64)
# The same for sizes of maps, for each axis that is open: a large map, and a small one.
DEFAULT_SIZES = (56, 14)

# Microseconds that a layer has to save.
MIN_SAVED_US = 10.0
# With fewer images, few layers are sparse, and stand between dense ones. Where ONNX Runtime runs these channels last, a
# SparseConv has the layout of its input and output changed, and the dense layer, which was timed by itself, has not.
FEW_IMAGES = 4
# With few images, layers that are decided together are rewritten where they are foretold to gain by this factor, as a
# CUDA graph. Sums of many layers are foretold within some percent, and without a graph they gain far more, for the host
# has less to launch.
MIN_GAIN_TOGETHER = 1.02
# What a dense layer, timed by itself, is charged for changes of its layout; among others it has about half of it left:
# residuals and what else a SparseConv does in passing.
LAYOUT_AMONG_OTHERS = 0.5
# With few images, a layer's own code is read once a run, and has left the caches that are near when it runs again: in a
# network it takes about so many times what it takes by itself, again and again, as it was measured.
COLD_CODE = 1.7


@dataclass(frozen=True)
class GpuRule:
    """What to decide for.

    Attributes:
        architectures: 90 for sm_90; at least one.
        batches: batch sizes, for models that leave theirs open; empty: `DEFAULT_BATCHES`.
        to_half: whether layers will compute in float16, whatever they do now.
        with_images: whether code is generated for layers; else only the library's own kernels run them.
        min_gain: how many times faster than dense a layer has to be.
    """

    architectures: tuple[int, ...]
    batches: tuple[int, ...] = ()
    to_half: bool = False
    with_images: bool = True
    min_gain: float = MIN_GAIN

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
        is_window: whether dense it is more than a matrix product.
    """

    architecture: int
    batch: int
    size: tuple[int, ...]
    dense_us: float
    sparse_us: float
    runs_on: str = ""
    is_window: bool = False

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


def decide_for_gpu(sites: Sequence[ConvSite], verdicts: Sequence[Verdict], rule: GpuRule) -> list[Verdict]:
    """Reconsider what sparsity decided.

    Args:
        sites: the convolutions of a model.
        verdicts: what was decided of each; layers that stay dense do.
        rule: what to decide for.
    """
    found = [
        predict(site, rule) if verdict.rewrite and site.weight is not None else None
        for site, verdict in zip(sites, verdicts, strict=True)
    ]
    layers = list(zip(sites, verdicts, found, strict=True))
    alone = [verdict if one is None else _verdict(site, verdict, one, rule) for site, verdict, one in layers]
    together = _decide_together(layers, alone, rule)
    if together is None or sum(verdict.rewrite for verdict in together) <= sum(verdict.rewrite for verdict in alone):
        return alone
    return together


def choose_kernels(layer: SparseLayer, shape: Shape, rule: GpuRule) -> dict[int, KernelChoice]:
    """By architecture, 90 for sm_90, the kernel of a layer that is sparse anyway; nothing where it is the generated
    one.

    Args:
        layer: as it will run.
        shape: of its input; None where a size is open.
        rule: what to decide for.
    """
    asked = _Asked.of(shape, rule)
    chosen = {}
    for architecture in rule.architectures:
        library = _predict_library(layer, asked, architecture)
        # A plan of generated code takes longer.
        if library and _faster(_predict_generated(layer, asked, architecture), library, rule.min_gain) is library:
            chosen[architecture] = CSR
    return chosen


def rule_notes(rule: GpuRule, sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """What has to be known of decisions by the rule; nothing where it decided none."""
    judged = [
        site
        for site, verdict in zip(sites, verdicts, strict=True)
        if verdict.reason in (Reason.REWRITE, Reason.NO_PREDICTED_GAIN)
    ]
    if not judged:
        return ()
    is_open = any(site.input_shape is None or site.input_shape[0] is None for site in judged)
    batches = rule.batches or DEFAULT_BATCHES
    at = f" at batch {' and '.join(map(str, batches))}" if is_open else ""
    how = "; --batch names other sizes" if is_open and not rule.batches else ""
    notes = [
        f"layers were decided by times foretold{at}, not measured{how}; 'tune --provider cuda' measures, "
        "--min-sparsity and --force overrule"
    ]
    others = [f"sm_{a}" for a in rule.architectures if a != MEASURED_ARCHITECTURE]
    if others:
        notes.append(
            f"no layer was measured on {', '.join(others)}: times are foretold as for an {MEASURED_ON} "
            f"(sm_{MEASURED_ARCHITECTURE}) that runs these architectures' plans"
        )
    return tuple(notes)


def predict(site: ConvSite, rule: GpuRule) -> list[Prediction] | Refusal:
    """Times of a layer at everything that the rule asks for, of the kernel that is foretold to be the faster one on
    each architecture; or why there is none.

    Args:
        site: a convolution with a known weight and geometry.
        rule: what to decide for.
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
    shape = site.input_shape if site.input_shape is not None else _unknown(geometry)
    asked = _Asked.of(shape, rule)
    found: list[Prediction] = []
    for architecture in rule.architectures:
        generated = _predict_generated(layer, asked, architecture) if rule.with_images else _NO_IMAGE
        faster = _faster(generated, _predict_library(layer, asked, architecture), rule.min_gain)
        if isinstance(faster, Refusal):
            return Refusal(f"sm_{architecture}: {faster.reason}")
        found += faster
    return found


def _unknown(geometry: ConvGeometry) -> Shape:
    return (None,) * (len(geometry.kernel_shape) + 2)


# Where no code is generated.
_NO_IMAGE = Refusal("no code is generated, and no kernel of the library's own is known to be fast")
# Of an input, N, C and the spatial sizes; None where one is open.
Shape = Sequence[int | None]


@dataclass(frozen=True)
class _Asked:
    """The calls of a layer that matter: all these batch sizes, with all these spatial sizes."""

    batches: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    is_open: bool  # whether the model leaves a spatial size open

    @staticmethod
    def of(shape: Shape, rule: GpuRule) -> _Asked:
        is_open = any(size is None for size in shape[2:])
        sizes = tuple(
            tuple(size if size is not None else default for size in shape[2:])
            for default in (DEFAULT_SIZES if is_open else DEFAULT_SIZES[:1])
        )
        batches = (rule.batches or DEFAULT_BATCHES) if shape[0] is None else (shape[0],)
        return _Asked(batches, sizes, is_open)


def _sized(layer: SparseLayer, size: tuple[int, ...]) -> SparseLayer:
    """A layer with that input; as `make_layer` sees sizes of one and of three axes."""
    return replace(layer, in_size=size if len(size) == 2 else (1, math.prod(size)))


def _faster(
    generated: list[Prediction] | Refusal, library: list[Prediction], min_gain: float
) -> list[Prediction] | Refusal:
    """Those by the kernel that gains enough everywhere, or more in the mean; ``library`` may be empty."""
    if isinstance(generated, Refusal) or not library:
        return library or generated

    def gains(found: list[Prediction]) -> tuple[bool, float]:
        return min(one.gain for one in found) >= min_gain, math.prod(one.gain for one in found)

    return max((generated, library), key=gains)


def _predict_generated(layer: SparseLayer, asked: _Asked, architecture: int) -> list[Prediction] | Refusal:
    found = []
    for size in asked.sizes:
        sized = _sized(layer, size)
        # Of an open size the plan knows nothing, as when it is made for good.
        plan = choose_plan(replace(layer, in_size=None) if asked.is_open else sized, architecture)
        if isinstance(plan, Refusal):
            return plan
        found += [_predict(sized, plan, architecture, batch, size) for batch in asked.batches]
    return found


def _predict(
    layer: SparseLayer, plan: GeneratedPlan, architecture: int, batch: int, size: tuple[int, ...]
) -> Prediction:
    dense_us, sparse_us = MODEL.layer_us(layer, plan, batch)
    if batch < FEW_IMAGES:
        sparse_us *= COLD_CODE
    is_window = bool(dense_work(layer, batch).is_window)
    return Prediction(architecture, batch, size, dense_us, sparse_us, is_window=is_window)


def _predict_library(layer: SparseLayer, asked: _Asked, architecture: int) -> list[Prediction]:
    """By the library's kernel that takes the layer; nothing unless one does at everything that is asked for."""
    found = []
    for size, batch in itertools.product(asked.sizes, asked.batches):
        sized = _sized(layer, size)
        library = MODEL.library_us(sized, architecture, batch)
        if library is None:
            return []
        work = dense_work(sized, batch)
        dense_us, is_window = float(MODEL.dense_us(work)), bool(work.is_window)
        found.append(Prediction(architecture, batch, size, dense_us, *library, is_window=is_window))
    return found


# A convolution, what its sparsity says of it, and its times; None where that keeps it dense.
_Layer = tuple[ConvSite, Verdict, list[Prediction] | Refusal | None]


def _decide_together(layers: Sequence[_Layer], alone: Sequence[Verdict], rule: GpuRule) -> list[Verdict] | None:
    """Verdicts where, with few images, a network is sparse but for what slows it down; None where that does not pay.

    With few images a layer takes some microseconds, and so does each change of layout. Where nearly all layers are
    sparse, there is none, but around those that stay dense, while a dense network runs channels last throughout.
    """
    chosen = {id(site): found for site, _, found in layers if isinstance(found, list) and _may_join(site, found, rule)}
    calls: dict[tuple[int, int], list[Prediction]] = {}
    for predictions in chosen.values():
        for call, one in _least_by_call(predictions).items():
            calls.setdefault(call, []).append(one)
    totals = [_Total.of(ones) for (_, batch), ones in calls.items() if batch < FEW_IMAGES]
    if not totals:
        return None
    dense = [site for site, _, _ in layers if site.is_conv and id(site) not in chosen]
    for total in totals:
        changes_us = sum(_changes_us(site, total, to_half=rule.to_half) for site in dense)
        if total.dense_us <= MIN_GAIN_TOGETHER * (total.sparse_us + changes_us):
            return None
    worst = min(totals, key=lambda total: total.dense_us / total.sparse_us)
    return [
        replace(verdict, text=f"{verdict.text}; {worst}") if id(site) in chosen else by_itself
        for (site, verdict, _), by_itself in zip(layers, alone, strict=True)
    ]


def _may_join(site: ConvSite, found: Sequence[Prediction], rule: GpuRule) -> bool:
    """Whether a layer may be sparse among others: with many images it has to gain by itself."""
    return all(
        one.saved_us > -_changes_us(site, one, to_half=rule.to_half)
        if one.batch < FEW_IMAGES
        else one.gain >= rule.min_gain and one.saved_us >= MIN_SAVED_US
        for one in found
    )


def _least_by_call(found: Sequence[Prediction]) -> dict[tuple[int, int], Prediction]:
    """By architecture and batch size, of several sizes of maps the one at which a layer saves least."""
    return {(one.architecture, one.batch): one for one in sorted(found, key=lambda one: -one.saved_us)}


@dataclass(frozen=True)
class _Total:
    """What the layers of a network that become sparse take together; as of `Prediction`."""

    architecture: int
    batch: int
    layers: int
    dense_us: float
    sparse_us: float

    @staticmethod
    def of(layers: Sequence[Prediction]) -> _Total:
        saved_us = (1 - LAYOUT_AMONG_OTHERS) * MODEL.layout_us
        dense_us = sum(one.dense_us - (saved_us if one.is_window else 0.0) for one in layers)
        first = layers[0]
        sparse_us = sum(one.sparse_us for one in layers)
        return _Total(first.architecture, first.batch, len(layers), dense_us, sparse_us)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers together predicted {self.dense_us / self.sparse_us:.2f}x on sm_{self.architecture} "
            f"at batch {self.batch} ({self.dense_us:.0f} us dense, {self.sparse_us:.0f} us sparse)"
        )


def _verdict(site: ConvSite, verdict: Verdict, found: list[Prediction] | Refusal, rule: GpuRule) -> Verdict:
    if isinstance(found, Refusal):
        why = f"no GPU kernel can be made for {found.reason}" if rule.with_images else _NO_IMAGE.reason
        text = f"{why}; the general one is seldom faster than dense"
        return Verdict(False, Reason.NO_PREDICTED_GAIN, text)
    wanted = {one: _least_saved_us(site, one, to_half=rule.to_half) for one in found}
    worst = min(found, key=lambda one: one.gain)
    least = min(found, key=lambda one: one.saved_us - wanted[one])
    if worst.gain >= rule.min_gain and least.saved_us >= wanted[least]:
        return replace(verdict, text=f"{verdict.text}; predicted {worst}")
    is_slow = worst.gain < rule.min_gain
    short = f"less than the {rule.min_gain:.2f}x asked for" if is_slow else f"less than {wanted[least]:.0f} us saved"
    shown = worst if is_slow else least
    others = [one for one in found if one.gain >= rule.min_gain and one.saved_us >= wanted[one]]
    best = max(others, key=lambda one: one.gain, default=None)
    contrast = f"; {best.gain:.2f}x at {_difference(shown, best)}" if best is not None else ""
    return Verdict(False, Reason.NO_PREDICTED_GAIN, f"predicted {shown}, {short}{contrast}")


def _least_saved_us(site: ConvSite, one: Prediction, *, to_half: bool) -> float:
    """What a layer has to save: with few images, all that changes of layout cost, too, as if nothing were pooled."""
    if one.batch >= FEW_IMAGES:
        return MIN_SAVED_US
    return max(MIN_SAVED_US, 2 * _changes_us(site, one, to_half=to_half))


def _changes_us(site: ConvSite, at: Prediction | _Total, *, to_half: bool) -> float:
    """What it takes to change the layout of a convolution's input and output."""
    if site.weight is None or site.geometry is None:
        return 2 * MODEL.dense_launch_us
    weight, spatial = site.weight.values, (site.input_shape or _unknown(site.geometry))[2:]
    size = at.size if isinstance(at, Prediction) else [length or DEFAULT_SIZES[0] for length in spatial]
    shape = (at.batch, weight.shape[1] * site.geometry.group, *size)
    out_shape = (at.batch, weight.shape[0], output_positions(site.geometry, shape) or 0)
    # An input of the model has its layout changed for dense layers, too.
    changed = [out_shape] if not site.node.inputs[0].inputs else [shape, out_shape]
    itemsize = 2 if to_half else weight.dtype.itemsize
    return sum(MODEL.dense_launch_us + MODEL.transpose_us(dims, itemsize) for dims in changed)


def _difference(worst: Prediction, best: Prediction) -> str:
    """What is another with the better of two predictions."""
    parts = {
        f"batch {best.batch}": best.batch != worst.batch,
        "x".join(map(str, best.size)): best.size != worst.size,
        f"sm_{best.architecture}": best.architecture != worst.architecture,
    }
    return ", ".join(itertools.compress(parts, parts.values()))
