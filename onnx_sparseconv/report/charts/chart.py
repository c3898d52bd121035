"""What all charts share: their form, axes and marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx_sparseconv.report.data import Layer
from onnx_sparseconv.report.scales import Scale
from onnx_sparseconv.report.svg import element, label, line, picture, text

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


@dataclass(frozen=True)
class Axis:
    """An axis of a plot: its scale, what it shows, and the values that are written at it, in words."""

    scale: Scale
    name: str
    values: Sequence[float]
    words: Callable[[float], str]


def plot(name: str, title: str, description: str, x: Axis, y: Axis, *children: str) -> str:
    """A picture with two axes.

    Args:
        name: unique on the page.
        title: what it is.
        description: what it shows.
        x: the axis along the bottom.
        y: the axis on the left.
        children: markup, on top of the grid.
    """
    return picture(name, title, description, (WIDTH, HEIGHT), _grid(x, y), *children, _axis_names(x.name, y.name))


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for value in y.values:
        at = y.scale(value)
        parts += [line(LEFT, at, RIGHT, at, "grid"), label(LEFT - 8, at + 4, y.words(value), "end", "tick")]
    for value in x.values:
        at = x.scale(value)
        parts += [line(at, BOTTOM, at, BOTTOM + 5, "axis"), label(at, BOTTOM + 19, x.words(value), "middle", "tick")]
    return "".join([*parts, line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")])


def _axis_names(x_name: str, y_name: str) -> str:
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


def level(at: float, words: str, *, on_the_right: bool = False) -> str:
    """A dashed line across the plot, with what it stands for."""
    anchor = (RIGHT - 4, at - 6, words, "end") if on_the_right else (LEFT + 6, at - 6, words, "start")
    return line(LEFT, at, RIGHT, at, "even") + label(*anchor, "note")


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


MARK_LEGEND = (("mark-sparse", "runs sparse"), ("mark-dense", "stays dense"))
