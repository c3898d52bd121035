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
    """Sparsity at which the speed-up crosses 1, interpolated on a logarithmic scale.

    Args:
        speedups: by sparsity, at least one.

    Returns:
        None when even the lowest sparsity is not slower than dense; 1 when no sparsity is as fast as dense.
    """
    points = sorted(speedups.items())
    if points[0][1] >= 1:
        return None
    for (low, slow), (high, fast) in zip(points, points[1:]):
        if slow < 1 <= fast:
            return low + (high - low) * math.log(1 / slow) / math.log(fast / slow)
    return 1.0
