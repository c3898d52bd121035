"""Scales of charts: where a value lies, and which values are written at the axis."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """From values to places; a logarithmic one takes positive values only.

    Attributes:
        low, high: the values at the ends; they differ.
        start, end: their places.
        log: whether it is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        turn: Callable[[float], float] = math.log if self.log else float
        low, high = turn(self.low), turn(self.high)
        return self.start + (turn(value) - low) / (high - low) * (self.end - self.start)


def linear(values: Iterable[float], start: float, end: float, *, zero: bool = True, steps: int = 5) -> Scale:
    """A scale with round ends around values; ``zero`` begins it at zero."""
    found = list(values)
    low = 0.0 if zero else min(found, default=0.0)
    high = max(found, default=1.0)
    if (high - low) / steps < sys.float_info.min:  # also where no step is left between them
        low, high = (0.0, 1.0) if zero else (low - 0.5, low + 0.5)
        high = max(high, found[0] if found else 1.0)
    step = _round_step((high - low) / steps)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end)


def linear_ticks(scale: Scale, steps: int = 5) -> list[float]:
    """Round values on a linear scale."""
    step = _round_step((scale.high - scale.low) / steps)
    first = math.ceil(scale.low / step - 1e-9)
    return [step * index for index in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def logarithmic(values: Iterable[float], start: float, end: float, *, margin: float = 1.25) -> Scale:
    """A logarithmic scale around positive values."""
    found = list(values)
    return Scale(min(found) / margin, max(found) * margin, start, end, log=True)


def log_ticks(scale: Scale, most: int = 7) -> list[float]:
    """Round values on a logarithmic scale: 1, 2 and 5 of each power of ten, or fewer where that is too many."""
    powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for factors in ((1, 1.2, 1.5, 2, 3, 4, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        found = [tick for tick in ticks if scale.low * (1 - 1e-9) <= tick <= scale.high * (1 + 1e-9)]
        if len(found) <= most:
            return found
    stride = -(-len(found) // most)
    return found[::stride]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in _STEPS if factor * power >= step * (1 - 1e-9))
