"""The check at the end: the converted model as a whole against the dense one.

Where it contradicts the sum of the layers, the layers that gain least are left dense, a few steps long, and what is
fastest is taken: the dense model, where nothing is faster.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onnx_sparseconv.runtime.timing import Samples, Speedup, speedup
from onnx_sparseconv.tuner.measure import Bench, WholeModel
from onnx_sparseconv.tuner.network import Layouts
from onnx_sparseconv.tuner.options import Case

# The sum of the layers is contradicted where the whole takes longer than foretold by more than this share.
TOLERANCE = 0.10
# Less than this share of the dense model's time is no gain but noise.
MIN_GAIN = 0.01
# A step keeps so much of the weighted gain of the layers before it.
_KEPT_GAIN = 0.85


class Convert(Protocol):
    """Makes the model in which certain layers are sparse."""

    def __call__(self, sparse: AbstractSet[int], path: Path) -> None:
        """Write it to a file."""


@dataclass(frozen=True)
class CaseResult:
    """The whole model at one set of shapes, in microseconds, each in the layout in which it is fastest.

    Attributes:
        dense_us: the dense model, measured.
        predicted_us: the converted model, by its layers.
        measured_us: the converted model, measured; as `dense_us` where all stays dense.
        speedup: of the converted model; None where all stays dense.
        layout: of the converted model's dense layers: ``default``, or ``nhwc`` for CUDA's ``prefer_nhwc``.
    """

    dense_us: float
    predicted_us: float
    measured_us: float
    speedup: Speedup | None
    layout: str = "default"


@dataclass(frozen=True)
class Trial:
    """One choice of layers that was tried as a whole.

    Attributes:
        num_sparse: layers that were sparse.
        predicted_us, measured_us: at each case.
    """

    num_sparse: int
    predicted_us: tuple[float, ...]
    measured_us: tuple[float, ...]


@dataclass(frozen=True)
class WholeResult:
    """What the check gave.

    Attributes:
        gain: whether the converted model is faster at every case.
        cases: times of what was chosen.
        trials: all that was tried; more than one where layouts differ, or the first contradicted the layers.
        text: the outcome in words.
    """

    gain: bool
    cases: tuple[CaseResult, ...]
    trials: tuple[Trial, ...]
    text: str


@dataclass(frozen=True)
class _Timed:
    sparse: frozenset[int]
    cases: tuple[CaseResult, ...]

    @property
    def trial(self) -> Trial:
        predicted = tuple(case.predicted_us for case in self.cases)
        return Trial(len(self.sparse), predicted, tuple(case.measured_us for case in self.cases))

    @property
    def is_faster(self) -> bool:
        return all(case.measured_us < case.dense_us * (1 - MIN_GAIN) for case in self.cases)

    @property
    def share(self) -> float:
        """Time over that of the dense model, mean over the cases."""
        return sum(case.measured_us / case.dense_us for case in self.cases) / len(self.cases)

    @property
    def is_as_foretold(self) -> bool:
        return all(case.measured_us <= case.predicted_us * (1 + TOLERANCE) for case in self.cases)


@dataclass(frozen=True)
class WholeCheck:
    """What is checked, and with what.

    Attributes:
        dense: the model as it is.
        convert: makes the others.
        bench: the stopwatch.
        cases: shapes.
        layouts: what layers take.
    """

    dense: WholeModel
    convert: Convert
    bench: Bench
    cases: Sequence[Case]
    layouts: Layouts

    def run(self, choices: Sequence[frozenset[int]], max_steps: int) -> tuple[frozenset[int], WholeResult]:
        """Time the model as a whole, and leave layers dense where that makes it faster.

        Args:
            choices: layers that are to be sparse, at least one; the first is what is foretold to be fastest.
            max_steps: how often to leave layers dense.

        Returns:
            The layers that are sparse in the end, none where nothing is faster than dense, and the figures.

        Raises:
            SparseConvError: a model cannot be run.
        """
        with tempfile.TemporaryDirectory() as directory:
            timed = self._time(choices, Path(directory))
            first = _best(timed)
            if not (first.is_faster and first.is_as_foretold) and max_steps:
                fewer = _fewer(self.layouts, first.sparse, max_steps)
                # All of them, in turn: times of other minutes do not compare.
                timed = self._time(list(dict.fromkeys([*choices, *fewer])), Path(directory))
        best = _best(timed)
        trials = tuple(one.trial for one in timed)
        if best.is_faster:
            return best.sparse, WholeResult(True, best.cases, trials, _text(choices, best))
        as_dense = tuple(CaseResult(case.dense_us, case.dense_us, case.dense_us, None) for case in best.cases)
        return frozenset(), WholeResult(False, as_dense, trials, _no_gain(timed, best))

    def _time(self, choices: Sequence[frozenset[int]], directory: Path) -> list[_Timed]:
        models = [self.dense]
        for number, sparse in enumerate(choices):
            path = directory / f"{number}.onnx"
            self.convert(sparse, path)
            models.append(WholeModel(path, True))
        results: list[list[CaseResult]] = [[] for _ in choices]
        for index, case in enumerate(self.cases):
            reference, *others = self.bench.whole(models, case)
            dense_us = _medians(reference)
            fastest = min(dense_us, key=dense_us.__getitem__)
            for sparse, samples, found in zip(choices, others, results, strict=True):
                predicted, times_us = self.layouts.foretell(sparse, index, dense_us), _medians(samples)
                layout = min(times_us, key=times_us.__getitem__)
                gain = speedup(reference[fastest], samples[layout])
                found.append(CaseResult(dense_us[fastest], predicted, times_us[layout], gain, layout))
        return [_Timed(sparse, tuple(found)) for sparse, found in zip(choices, results, strict=True)]


def _medians(samples: Mapping[str, Samples]) -> dict[str, float]:
    return {layout: found.stats().median_us for layout, found in samples.items()}


def _best(timed: Sequence[_Timed]) -> _Timed:
    return min(timed, key=lambda one: (not one.is_faster, one.share))


def _fewer(layouts: Layouts, chosen: frozenset[int], max_steps: int) -> list[frozenset[int]]:
    """Ever fewer layers: each step leaves out those that gain least, at least one, and half at most."""
    steps: list[frozenset[int]] = []
    current = chosen
    while len(steps) < max_steps and len(current) > 1:
        gains = sorted(((layouts.gain(key, current), key) for key in current), reverse=True)
        wanted = _KEPT_GAIN * sum(max(gain, 0.0) for gain, _ in gains)
        kept: list[int] = []
        total = 0.0
        for gain, key in gains:
            if len(kept) >= max(1, len(current) // 2) and (total >= wanted or len(kept) == len(current) - 1):
                break
            kept.append(key)
            total += max(gain, 0.0)
        current = frozenset(kept)
        steps.append(current)
    return steps


def _text(choices: Sequence[frozenset[int]], best: _Timed) -> str:
    text = "; ".join(
        f"{case.dense_us / case.measured_us:.2f}x faster as a whole ({case.dense_us:.0f} us dense, "
        f"{case.measured_us:.0f} us converted{_with_layout(case)}, {case.predicted_us:.0f} us predicted)"
        for case in best.cases
    )
    if best.sparse not in choices:
        text += f", with {len(best.sparse)} instead of {len(choices[0])} sparse layers: times of layers misled"
    return text


def _with_layout(case: CaseResult) -> str:
    return " with prefer_nhwc" if case.layout == "nhwc" else ""


def _no_gain(timed: Sequence[_Timed], best: _Timed) -> str:
    worst = max(best.cases, key=lambda case: case.measured_us / case.dense_us)
    tried = f"the best of {len(timed)} choices" if len(timed) > 1 else "the converted model"
    return (
        f"no gain as a whole: {tried} takes {worst.measured_us:.0f} us, the dense model {worst.dense_us:.0f} us, "
        f"though {worst.predicted_us:.0f} us were predicted from its layers; all layers stay dense"
    )
