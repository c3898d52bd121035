"""Times per layer, dense against sparse, as bars."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_sparseconv.report import words
from onnx_sparseconv.report.charts.chart import WIDTH, Chart
from onnx_sparseconv.report.data import Layer, LayerTime
from onnx_sparseconv.report.scales import Scale
from onnx_sparseconv.report.svg import element, label, picture, text

# More bars than this nobody reads; the table has all layers.
MAX_LAYERS = 20
_ROW, _NAME, _BAR, _GAP = 56.0, 12.0, 13.0, 3.0
# Room for the figure behind the longest bar.
_FIGURE = 70.0
_LONGEST_NAME = 64


def layer_times_chart(layers: Sequence[Layer], case: int, name: str, *, alone: bool = True) -> Chart:
    """Two bars a layer, those with the longest dense times first.

    Args:
        layers: of the model.
        case: which of the shapes.
        name: unique on the page.
        alone: whether the layers were timed alone.
    """
    title = "Time per layer"
    timed = [(layer, layer.time(case)) for layer in layers if layer.time(case) != LayerTime()]
    if not timed:
        return Chart(title, missing="No layer was timed at these shapes.")
    timed.sort(key=lambda one: -(one[1].dense_us or _longest(one[1])))
    shown = timed[:MAX_LAYERS]
    x = Scale(0, max(_longest(time) for _, time in shown), 0, WIDTH - _FIGURE)
    rows = [_row(layer, time, x, index * _ROW) for index, (layer, time) in enumerate(shown)]
    where = "alone" if alone else "within the model, by ONNX Runtime's profiler"
    caption = f"Each layer {where}, with what runs as one with it (bias, activation, sum)."
    if len(shown) < len(timed):
        caption += f" The {len(shown)} of {len(timed)} timed layers that take longest; the table has them all."
    description = "; ".join(
        f"{words.shorten(layer.label)}: {words.time(time.dense_us)} dense, {words.time(time.sparse_us)} sparse"
        for layer, time in shown
    )
    legend = (("bar-dense", "dense"), ("bar-sparse", "sparse"), ("bar-sparse left", "pale: not what was chosen"))
    svg = picture(name, title, description, (WIDTH, len(shown) * _ROW - _BAR + 2), *rows)
    return Chart(title, caption, svg, legend=legend, num_rows=len(shown))


def _longest(time: LayerTime) -> float:
    return max(time.dense_us or 0.0, time.sparse_us or 0.0)


def _row(layer: Layer, time: LayerTime, x: Scale, y: float) -> str:
    parts = [label(0, y + _NAME, words.shorten(layer.label, _LONGEST_NAME), class_="layer")]
    bars = (("bar-dense", time.dense_us, layer.is_sparse), ("bar-sparse", time.sparse_us, not layer.is_sparse))
    for number, (kind, time_us, is_left) in enumerate(bars):
        top = y + _NAME + 4 + number * (_BAR + _GAP)
        if time_us is None:
            continue
        class_ = f"{kind} left" if is_left else kind
        width = max(x(time_us), 1.0)
        parts += [
            element("rect", x=0, y=top, width=width, height=_BAR, class_=class_),
            label(width + 5, top + _BAR - 3, words.time(time_us), class_="figure"),
        ]
    title = f"{layer.label}: {words.time(time.dense_us)} dense, {words.time(time.sparse_us)} sparse"
    return element("g", element("title", text(title)), *parts)
