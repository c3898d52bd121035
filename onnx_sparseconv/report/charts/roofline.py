"""A roofline: what the machine can do at most, by how often a layer uses what it loads, and where each layer lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnx_sparseconv.report import words
from onnx_sparseconv.report.charts.chart import BOTTOM, LEFT, MARK_LEGEND, RIGHT, TOP, Axis, Chart, marks, plot
from onnx_sparseconv.report.data import Case, Layer, Peaks
from onnx_sparseconv.report.scales import log_ticks, logarithmic
from onnx_sparseconv.report.svg import element, label
from onnx_sparseconv.text import count

# The peak is of this type; layers of another one would be held against the wrong line.
_DTYPE = "float32"
_ITEM_BYTES = 4


@dataclass(frozen=True)
class Place:
    """Where a layer lies.

    Attributes:
        intensity: operations for each byte that has to be moved at least.
        flops_per_s: operations that were done a second; of a sparse layer only those with weights that are not zero.
    """

    intensity: float
    flops_per_s: float


def place_of(layer: Layer, case: int, batch: int | None) -> Place | None:
    """Where a layer lies as it runs in the end; None where its time, its shapes or its type do not tell.

    What has to be moved at least is the input, the output, and the weights as they are stored.
    """
    time = layer.time(case)
    time_us = time.sparse_us if layer.is_sparse else time.dense_us
    positions = _sizes(layer, batch)
    if time_us is None or positions is None or not layer.flops or layer.dtype != _DTYPE:
        return None
    images, moved = positions
    weights = layer.sparse_bytes if layer.is_sparse else layer.dense_bytes
    if weights is None:
        return None
    flops = float(layer.flops * images)
    if layer.is_sparse:
        if layer.nonzeros is None or not layer.num_weights:
            return None
        flops *= layer.nonzeros / layer.num_weights
    return Place(flops / (moved + weights), flops / (time_us / 1e6)) if flops else None


def _sizes(layer: Layer, batch: int | None) -> tuple[int, int] | None:
    """Images of a run, and the bytes of input and output."""
    if not layer.input_shape or not layer.output_shape:
        return None
    images = layer.input_shape[0] or batch
    inputs, outputs = layer.input_shape[1:], layer.output_shape[1:]
    if not images or None in inputs or None in outputs:
        return None
    elements = math.prod(size or 0 for size in inputs) + math.prod(size or 0 for size in outputs)
    return images, _ITEM_BYTES * images * elements


def roofline_chart(layers: Sequence[Layer], case: int, whole: Case, peaks: Peaks | None, name: str) -> Chart:
    """A mark for each layer whose time and shapes are known.

    Args:
        layers: of the model.
        case: which of the shapes.
        whole: the model at that case.
        peaks: of the machine that measured.
        name: unique on the page.
    """
    title = "Roofline"
    if peaks is None:
        return Chart(
            title,
            missing="What the machine can do at most was not recorded with these times: 'convert --tune' does that.",
        )
    timed = [layer for layer in layers if layer.time(case).dense_us is not None]
    places = [(layer, place) for layer in timed if (place := place_of(layer, case, whole.batch)) is not None]
    if not places:
        return Chart(
            title,
            missing="The work of no timed layer is known: that takes a report of 'sparseconv convert', and "
            "layers in float32 whose shapes are known.",
        )
    ridge = peaks.flops_per_s / peaks.bytes_per_s
    x = logarithmic([ridge, *(place.intensity for _, place in places)], LEFT, RIGHT, margin=1.6)
    start = min(peaks.flops_per_s, peaks.bytes_per_s * x.low)
    y = logarithmic([peaks.flops_per_s, start, *(place.flops_per_s for _, place in places)], BOTTOM, TOP, margin=1.5)
    top, corner = y(peaks.flops_per_s), x(ridge)
    roof = f"M{LEFT:.1f} {y(start):.1f}L{corner:.1f} {top:.1f}L{RIGHT:.1f} {top:.1f}"
    placed = [
        (
            layer,
            x(place.intensity),
            y(place.flops_per_s),
            f"{words.rate(place.flops_per_s, 'FLOP')}, {place.intensity:.3g} FLOP/byte",
        )
        for layer, place in places
    ]
    svg = plot(
        name,
        title,
        f"Peak {words.rate(peaks.flops_per_s, 'FLOP')}, memory {words.rate(peaks.bytes_per_s, 'B')}; "
        f"{count(len(places), 'layer')}.",
        Axis(x, "operations for each byte moved", log_ticks(x), lambda value: f"{value:.3g}"),
        Axis(y, "FLOP/s", log_ticks(y), lambda value: words.trimmed(words.amount(value))),
        element("path", d=roof, class_="roof"),
        label(RIGHT - 4, top - 6, f"FMA peak {words.rate(peaks.flops_per_s, 'FLOP')}", "end", "note"),
        label(LEFT + 8, y(start) + 18, f"memory floor {words.rate(peaks.bytes_per_s, 'B')}", class_="note"),
        marks(placed),
    )
    above = sum(place.flops_per_s > peaks.flops_per_s for _, place in places)
    left = len(timed) - len(places)
    caption = (
        f"How near each layer, as it runs in the end, comes to what the machine can do ({peaks.text}). Of sparse "
        "layers only operations with weights that are not zero count; bytes are those of input, output and stored "
        "weights. Layers whose data stay in the caches may lie above the slope."
    )
    if above:
        caption += (
            f" {count(above, 'layer lies', 'layers lie')} above the peak: the machine was busy when that "
            "was measured, or they use units that it does not count."
        )
    if left:
        caption += f" {count(left, 'timed layer')} whose shapes are not known, or that are not float32, are left out."
    return Chart(title, caption, svg, legend=MARK_LEGEND)
