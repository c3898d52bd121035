"""Which layers pay on a GPU that is not at hand.

Of every layer that its sparsity speaks for, the times of the generated kernel, of the library's kernels on tensor cores
and of ONNX Runtime's dense Conv are foretold (`kernels.gpu_times`), at each batch size that matters. What does not gain
by a margin at all of them, and on all architectures asked for, stays dense. Where the library's kernel is foretold to
be faster than the generated one, no code is generated. How often that is right: docs/gpu-rule.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnx_sparseconv.converter.conv_sites import ConvSite, output_positions
from onnx_sparseconv.converter.report import Reason, Verdict
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
    """

    architecture: int
    batch: int
    size: tuple[int, ...]
    dense_us: float
    sparse_us: float
    runs_on: str = ""

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
    return [
        _verdict(site, verdict, rule) if verdict.rewrite and site.weight is not None else verdict
        for site, verdict in zip(sites, verdicts, strict=True)
    ]


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
        if library and _faster(_predict_generated(layer, asked, architecture), library) is library:
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
    shape = site.input_shape if site.input_shape is not None else (None,) * (len(geometry.kernel_shape) + 2)
    asked = _Asked.of(shape, rule)
    found: list[Prediction] = []
    for architecture in rule.architectures:
        generated = _predict_generated(layer, asked, architecture) if rule.with_images else _NO_IMAGE
        faster = _faster(generated, _predict_library(layer, asked, architecture))
        if isinstance(faster, Refusal):
            return Refusal(f"sm_{architecture}: {faster.reason}")
        found += faster
    return found


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


def _faster(generated: list[Prediction] | Refusal, library: list[Prediction]) -> list[Prediction] | Refusal:
    """Those by the kernel whose least gain is the greater one; ``library`` is empty where its kernel does not run."""
    if isinstance(generated, Refusal):
        return library or generated
    return max((generated, library), key=lambda all_: min((one.gain for one in all_), default=0.0))


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
    return Prediction(architecture, batch, size, *MODEL.layer_us(layer, plan, batch))


def _predict_library(layer: SparseLayer, asked: _Asked, architecture: int) -> list[Prediction]:
    """By the library's kernel that takes the layer; nothing unless one does at everything that is asked for."""
    found = []
    for size, batch in itertools.product(asked.sizes, asked.batches):
        sized = _sized(layer, size)
        library = MODEL.library_us(sized, architecture, batch)
        if library is None:
            return []
        dense_us = float(MODEL.dense_us(dense_work(sized, batch)))
        found.append(Prediction(architecture, batch, size, dense_us, *library))
    return found


def _verdict(site: ConvSite, verdict: Verdict, rule: GpuRule) -> Verdict:
    found = predict(site, rule)
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
    assert site.weight is not None
    assert site.geometry is not None
    weight = site.weight.values
    shape = (one.batch, weight.shape[1] * site.geometry.group, *one.size)
    out_shape = (one.batch, weight.shape[0], output_positions(site.geometry, shape) or 0)
    # An input of the model has its layout changed for dense layers, too.
    changed = [out_shape] if not site.node.inputs[0].inputs else [shape, out_shape]
    itemsize = 2 if to_half else weight.dtype.itemsize
    changes_us = sum(MODEL.dense_launch_us + MODEL.transpose_us(dims, itemsize) for dims in changed)
    return max(MIN_SAVED_US, 2 * changes_us)


def _difference(worst: Prediction, best: Prediction) -> str:
    """What is another with the better of two predictions."""
    parts = {
        f"batch {best.batch}": best.batch != worst.batch,
        "x".join(map(str, best.size)): best.size != worst.size,
        f"sm_{best.architecture}": best.architecture != worst.architecture,
    }
    return ", ".join(itertools.compress(parts, parts.values()))
