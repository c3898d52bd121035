"""What all charts share: their form, axes and marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx_sparseconv.report.data import Layer
from onnx_sparseconv.report.scales import Scale
from onnx_sparseconv.report.svg import element, label, line, text

WIDTH = 520.0
HEIGHT = 330.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, WIDTH - 22, 14.0, HEIGHT - 46
_MARK = 4.5
# So many marks would hide each other at full size.
_MANY = 120


@dataclass(frozen=True)
class Chart:
    """A picture with what has to be said of it.

    Attributes:
        title: of the chart.
        caption: how to read it.
        svg: the picture; empty where there is none.
        missing: why there is none; empty where there is.
        legend: classes of marks and what they stand for.
        num_rows: how many rows it has; 0 where it is as high as others.
    """

    title: str
    caption: str = ""
    svg: str = ""
    missing: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    num_rows: int = 0


def axes(x: Scale, y: Scale, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> str:
    """Lines and figures of both axes; ticks are values and what is written there."""
    parts = []
    for value, words in y_ticks:
        at = y(value)
        parts += [line(LEFT, at, RIGHT, at, "grid"), label(LEFT - 8, at + 4, words, "end", "tick")]
    for value, words in x_ticks:
        at = x(value)
        parts += [line(at, BOTTOM, at, BOTTOM + 5, "axis"), label(at, BOTTOM + 19, words, "middle", "tick")]
    return "".join([*parts, line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")])


def axis_names(x_name: str, y_name: str) -> str:
    """What the axes show."""
    middle = (TOP + BOTTOM) / 2
    up = element(
        "text",
        text(y_name),
        x=12.0,
        y=middle,
        text_anchor="middle",
        transform=f"rotate(-90 12 {middle:.0f})",
        class_="name",
    )
    return label((LEFT + RIGHT) / 2, HEIGHT - 8, x_name, "middle", "name") + up


def marks(layers: Sequence[tuple[Layer, float, float, str]]) -> str:
    """One mark a layer at its place: a full circle where it runs sparse, a hollow square where it runs dense.

    Args:
        layers: a layer, its place, and what is said when a pointer rests on it.
    """
    size = _MARK if len(layers) <= _MANY else _MARK / 1.6
    # Sparse ones last, on top: they are what the report is about.
    return "".join(
        _mark(layer, x, y, words, size) for layer, x, y, words in sorted(layers, key=lambda one: one[0].is_sparse)
    )


def _mark(layer: Layer, x: float, y: float, words: str, size: float) -> str:
    title = element("title", text(f"{layer.label}: {words}"))
    if layer.is_sparse:
        return element("circle", title, cx=x, cy=y, r=size, class_="mark-sparse")
    return element(
        "rect", title, x=x - size + 0.5, y=y - size + 0.5, width=2 * size - 1, height=2 * size - 1, class_="mark-dense"
    )


def ticks(values: Sequence[float], words: Callable[[float], str]) -> list[tuple[float, str]]:
    """Values with what is written there."""
    return [(value, words(value)) for value in values]


MARK_LEGEND = (("mark-sparse", "runs sparse"), ("mark-dense", "stays dense"))
