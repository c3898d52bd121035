"""Timing several things fairly on a machine that is not quiet.

Rounds are interleaved, so that a slow minute of the machine hits every candidate alike, and the order turns from round
to round.
Within a round each candidate runs a few times in a row, its first run not counted: that one pays for caches that the
other filled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Clock = Callable[[], int]


@dataclass(frozen=True)
class TimingPlan:
    """How to time.

    Attributes:
        warmup: runs of each candidate before the first round.
        min_rounds, max_rounds: bounds of the number of rounds.
        runs_per_round: counted runs of each candidate in a round.
        seconds: no further round starts after this time, once there are ``min_rounds``.
    """

    warmup: int = 3
    min_rounds: int = 5
    max_rounds: int = 200
    runs_per_round: int = 5
    seconds: float = 10.0


@dataclass(frozen=True)
class TimeStats:
    """Times of single runs in microseconds."""

    mean_us: float
    median_us: float
    p90_us: float
    p99_us: float
    min_us: float
    max_us: float
    num_runs: int


@dataclass(frozen=True)
class Samples:
    """Times of one candidate, microseconds, one tuple a round."""

    rounds_us: tuple[tuple[float, ...], ...]

    @property
    def all_us(self) -> tuple[float, ...]:
        """Every counted run."""
        return tuple(t for times in self.rounds_us for t in times)

    def stats(self) -> TimeStats:
        """Summary of all counted runs."""
        return summarise(self.all_us)


def summarise(times_us: Sequence[float]) -> TimeStats:
    """Mean, median, percentiles (linear interpolation) and extremes of at least one time."""
    times = np.asarray(times_us, np.float64)
    median, p90, p99 = (float(p) for p in np.percentile(times, (50, 90, 99)))
    return TimeStats(float(times.mean()), median, p90, p99, float(times.min()), float(times.max()), times.size)


def measure(
    candidates: Sequence[Callable[[], object]],
    plan: TimingPlan,
    *,
    clock: Clock = time.perf_counter_ns,
    on_round: Callable[[int], None] = lambda _: None,
    before: Callable[[], object] = lambda: None,
) -> tuple[Samples, ...]:
    """Time every candidate.

    Args:
        candidates: what to call.
        plan: how often.
        clock: nanoseconds, rising.
        on_round: called after each round with the number of rounds done.
        before: called before each counted run and not timed: what brings the machine into the state to time it in.
    """
    for candidate in candidates:
        for _ in range(plan.warmup):
            candidate()
    rounds: list[list[tuple[float, ...]]] = [[] for _ in candidates]
    started = clock()
    for number in range(plan.max_rounds):
        if number >= plan.min_rounds and clock() - started >= plan.seconds * 1e9:
            break
        order = range(len(candidates)) if number % 2 == 0 else reversed(range(len(candidates)))
        for index in order:
            rounds[index].append(_time_runs(candidates[index], plan.runs_per_round, clock, before))
        on_round(number + 1)
    return tuple(Samples(tuple(times)) for times in rounds)


def _time_runs(
    candidate: Callable[[], object], runs: int, clock: Clock, before: Callable[[], object]
) -> tuple[float, ...]:
    candidate()
    times = []
    for _ in range(runs):
        before()
        started = clock()
        candidate()
        times.append((clock() - started) / 1000)
    return tuple(times)


@dataclass(frozen=True)
class Speedup:
    """How many times faster the second candidate is.

    Attributes:
        of_medians: median of the first over median of the second, over all runs.
        low, high: 10th and 90th percentile of the same ratio taken within each round: how sure the figure is.
    """

    of_medians: float
    low: float
    high: float


def speedup(first: Samples, second: Samples) -> Speedup:
    """Compare two candidates that were timed together."""
    ratios = [
        statistics.median(a) / max(statistics.median(b), 1e-9)
        for a, b in zip(first.rounds_us, second.rounds_us, strict=True)
    ]
    low, high = (float(p) for p in np.percentile(ratios, (10, 90)))
    return Speedup(first.stats().median_us / max(second.stats().median_us, 1e-9), low, high)
