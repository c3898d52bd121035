"""Speed-up of each layer against its sparsity, with the line below which sparse is slower."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_sparseconv.report import words
from onnx_sparseconv.report.charts.chart import BOTTOM, LEFT, MARK_LEGEND, RIGHT, TOP, Axis, Chart, level, marks, plot
from onnx_sparseconv.report.data import Layer
from onnx_sparseconv.report.scales import Scale, linear_ticks, log_ticks, logarithmic
from onnx_sparseconv.text import count

# Sparsities above this begin the axis at the next lower tenth, so that the points are not pressed into a corner.
_TENTH, _ROOM = 0.1, 0.02


def speedup_chart(layers: Sequence[Layer], case: int, name: str) -> Chart:
    """A mark for each layer that was timed both ways.

    Args:
        layers: of the model.
        case: which of the shapes.
        name: unique on the page.
    """
    title = "Speed-up against sparsity"
    found = [
        (layer, layer.sparsity, ratio)
        for layer in layers
        if (ratio := layer.time(case).speedup) is not None and layer.sparsity is not None
    ]
    if not found:
        return Chart(title, missing="No layer was timed both dense and sparse.")
    # A little room, so that no mark sits on the axis.
    lowest = max(0, min(int((sparsity - _ROOM) / _TENTH) for _, sparsity, _ in found)) * _TENTH
    x = Scale(min(lowest, 1 - _TENTH), 1.0, LEFT, RIGHT)
    y = logarithmic([1.0, *(ratio for *_, ratio in found)], BOTTOM, TOP)
    placed = [
        (layer, x(sparsity), y(ratio), f"{words.percent(sparsity)} zeros, {words.times(ratio)}")
        for layer, sparsity, ratio in found
    ]
    svg = plot(
        name,
        title,
        f"{count(len(found), 'layer')}; {sum(ratio > 1 for *_, ratio in found)} of them faster sparse.",
        Axis(x, "zero weights", linear_ticks(x), lambda value: f"{100 * value:.3g}%"),
        Axis(y, "times faster than dense", log_ticks(y), lambda value: f"{value:.3g}{words.TIMES}"),
        level(y(1.0), "break-even", on_the_right=True),
        marks(placed),
    )
    caption = "Above the line sparse is faster. The axis of speed-ups is logarithmic."
    return Chart(title, caption, svg, legend=MARK_LEGEND)
