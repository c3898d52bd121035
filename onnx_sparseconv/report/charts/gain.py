"""What the sparse layers save together, the largest gain first."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_sparseconv.report import words
from onnx_sparseconv.report.charts.chart import BOTTOM, LEFT, RIGHT, TOP, Axis, Chart, level, plot
from onnx_sparseconv.report.data import Case, Layer
from onnx_sparseconv.report.scales import Scale, linear, linear_ticks
from onnx_sparseconv.report.svg import element, text
from onnx_sparseconv.text import count

# So few points are marked one by one.
_FEW = 60


def gain_chart(layers: Sequence[Layer], case: int, whole: Case, name: str, *, alone: bool = True) -> Chart:
    """The saved time, added up over the layers that run sparse; beside it what the whole model saved.

    Args:
        layers: of the model.
        case: which of the shapes.
        whole: the model at that case.
        name: unique on the page.
        alone: whether the layers were timed alone.
    """
    title = "Cumulative gain"
    gains = sorted(
        (
            (time.dense_us - time.sparse_us, layer)
            for layer in layers
            if layer.is_sparse and (time := layer.time(case)).dense_us is not None and time.sparse_us is not None
        ),
        key=lambda one: -one[0],
    )
    if not gains:
        return Chart(title, missing="No layer that was timed runs sparse, so there is no gain to add up.")
    sums = [0.0]
    for gain, _ in gains:
        sums.append(sums[-1] + gain)
    saved = (
        whole.dense_us - whole.converted_us if whole.dense_us is not None and whole.converted_us is not None else None
    )
    levels = [*sums, *([saved] if saved is not None else [])]
    x = Scale(0, len(gains), LEFT, RIGHT)
    y = linear(levels, BOTTOM, TOP, zero=min(levels) >= 0)
    path = "M" + "L".join(f"{x(index):.1f} {y(value):.1f}" for index, value in enumerate(sums))
    floor = y(max(0.0, y.low))
    area = f"{path}L{x(len(gains)):.1f} {floor:.1f}L{x(0):.1f} {floor:.1f}Z"
    points = [
        element(
            "circle",
            element("title", text(f"{layer.label}: saves {words.time(gain)}")),
            cx=x(index),
            cy=y(sums[index]),
            r=3.5,
            class_="mark-sparse",
        )
        for index, (gain, layer) in enumerate(gains, start=1)
    ]
    parts = [
        element("path", d=area, class_="area"),
        element("path", d=path, class_="curve"),
        *(points if len(points) <= _FEW else []),
    ]
    where = "each layer alone" if alone else "each layer within the model"
    caption = f"Dense less sparse time of {where}, added up, the largest gain first."
    if saved is not None:
        parts.append(level(y(saved), f"saved by the model as a whole: {_signed_time(saved)}"))
        caption += " The dashed line is what the whole model saved, measured: layers may gain more or less together."
    description = f"{count(len(gains), 'sparse layer')} save {_signed_time(sums[-1])} together."
    svg = plot(
        name,
        title,
        description,
        Axis(x, "sparse layers", _whole_ticks(len(gains)), lambda value: f"{value:.0f}"),
        Axis(y, "time saved", linear_ticks(y), lambda value: words.trimmed(_signed_time(value))),
        *parts,
    )
    return Chart(title, caption, svg)


def _signed_time(time_us: float) -> str:
    return f"{words.MINUS}{words.time(-time_us)}" if time_us < 0 else "0" if time_us == 0 else words.time(time_us)


def _whole_ticks(number: int) -> list[float]:
    """Whole numbers from 0 to the end."""
    if number <= 8:
        return [float(value) for value in range(number + 1)]
    return [tick for tick in linear_ticks(Scale(0, number, 0, 1)) if tick == int(tick)]
