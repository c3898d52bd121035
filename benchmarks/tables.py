"""Markdown tables, and the sparsity at which a layer breaks even."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

# What stands where a table will be once it has been measured.
NOT_MEASURED = "Not measured yet: no results file."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def break_even(speedups: Mapping[float, float]) -> float | None:
    """Sparsity from which on a layer is at least as fast as dense, interpolated on a logarithmic scale.

    Args:
        speedups: by sparsity, at least one.

    Returns:
        None when no sparsity is slower than dense; 1 when the highest one is. Where the speed-up crosses 1 several
        times, the last crossing.
    """
    points = sorted(speedups.items())
    if points[-1][1] < 1:
        return 1.0
    for (low, slow), (high, fast) in reversed(list(zip(points, points[1:]))):
        if slow < 1:
            return low + (high - low) * math.log(1 / slow) / math.log(fast / slow)
    return None
