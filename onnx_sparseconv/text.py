"""Text for pages and terminals: what comes from models and files made harmless, and figures in words."""

from __future__ import annotations

# Characters that HTML cannot hold, that steer a terminal, or that would turn round the text after them.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)
_TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_UNSHOWABLE = dict.fromkeys((*_CONTROLS, *_TURNING), "\ufffd")
_LINE_ENDS = {9: " ", 10: " ", 13: " "}


def shown(text: str) -> str:
    """Any text, be it hostile, as one line that a page or a terminal can hold; for HTML it is still to be escaped."""
    return text.translate(_UNSHOWABLE | _LINE_ENDS)


def without_controls(text: str) -> str:
    """Any text without what would steer a terminal; ends of lines stay."""
    return text.translate({code: to for code, to in _UNSHOWABLE.items() if code != ord("\n")})


def count(number: int, singular: str, plural: str | None = None) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def percent(share: float) -> str:
    """``0.912`` as ``91.2%``; never rounded to 100% or 0% when it is not."""
    value = 100 * share
    if 0 < value < 0.05:
        return "<0.1%"
    if 99.95 <= value < 100:
        return ">99.9%"
    return f"{value:.1f}%"
