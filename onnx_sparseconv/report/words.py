"""Figures as a page shows them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from onnx_sparseconv import text as plain_text

UNKNOWN = "\u2013"
TIMES = "\u00d7"
MINUS = "\u2212"
# Keeps a figure and its unit on one line.
_SPACE = "\u00a0"
_MAX_NAME_LENGTH = 44


def shorten(text: str, longest: int = _MAX_NAME_LENGTH) -> str:
    """A long name without its middle; characters of East Asian scripts count as two."""
    text = plain_text.shown(text)
    if sum(map(_width, text)) <= longest:
        return text
    room = (longest - 1) // 2
    return f"{_beginning(text, room)}…{_beginning(text[::-1], room)[::-1]}"


def _beginning(text: str, room: int) -> str:
    taken = 0
    for index, character in enumerate(text):
        taken += _width(character)
        if taken > room:
            return text[:index]
    return text


def _width(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def time(time_us: float | None) -> str:
    """Microseconds, in the unit that reads best."""
    if time_us is None:
        return UNKNOWN
    for limit, divisor, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms"), (math.inf, 1e6, "s")):
        if time_us < 0.9995 * limit:
            return f"{_three_digits(time_us / divisor)}{_SPACE}{unit}"
    return UNKNOWN


def size(size_bytes: float | None) -> str:
    """Bytes in decimal units."""
    if size_bytes is None:
        return UNKNOWN
    return _with_prefix(size_bytes, "B")


def trimmed(figure: str) -> str:
    """A figure, with or without a unit, without zeros at the end of its fraction."""
    number, space, unit = figure.partition(_SPACE)
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit


def amount(value: float) -> str:
    """A large number such as ``82.1 G``."""
    return _with_prefix(value, "").rstrip(_SPACE)


def rate(per_second: float, unit: str) -> str:
    """A rate such as ``82.1 GFLOP/s``."""
    return _with_prefix(per_second, f"{unit}/s")


def times(factor: float | None) -> str:
    """A speed-up."""
    return UNKNOWN if factor is None else f"{factor:.{2 if factor < 99.95 else 0}f}{TIMES}"


def percent(share: float | None) -> str:
    """A share; never rounded to 0% or 100% when it is not."""
    return UNKNOWN if share is None else plain_text.percent(share)


def scientific(value: float | None) -> str:
    """A small figure such as an error."""
    if value is None:
        return UNKNOWN
    return "0" if value == 0 else f"{value:.2g}"


def shape(sizes: Sequence[int | None] | None) -> str:
    """Sizes with a multiplication sign between them."""
    return UNKNOWN if sizes is None else TIMES.join("?" if size is None else str(size) for size in sizes) or "scalar"


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f}"


def _with_prefix(value: float, unit: str) -> str:
    if value < 999.5:
        return f"{int(value) if value == int(value) else _three_digits(value)}{_SPACE}{unit}"
    for prefix in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.5 or prefix == "T":
            return f"{_three_digits(value)}{_SPACE}{prefix}{unit}"
    raise AssertionError
