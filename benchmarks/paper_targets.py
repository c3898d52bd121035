"""The project's targets on the papers' suites, computed from results files.

python benchmarks/paper_targets.py                    # of benchmarks/results/papers*.json
python benchmarks/paper_targets.py build/papers.json  # of other files
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paper_results import Cell, PaperResults, Time, mean, target_layers
from suite_rows import Layer, read_suite
from tables import table

BATCH = 64
SPARSITY = 0.9
DTYPES = ("float16", "float32")
BREAK_EVEN = 0.75
GAINS = {"float16": 2.5, "float32": 2.0}
# What Escoin reports over the lowerings, layer for layer.
LOWERED_GAINS = {"cublas": 2.63, "cusparse": 3.07}
LOWERED_NAMES = {"cublas": "cuBLAS", "cusparse": "cuSPARSE"}
HALF_WINS = 8


@dataclass(frozen=True)
class Outcome:
    """A target, and what was measured.

    Attributes:
        target: in words.
        wanted, got: the figures in words.
        num_layers: layers that the figure is made of.
        num_wanted: layers that it should be made of.
        reached: whether the figure is good enough.
    """

    target: str
    wanted: str
    got: str
    num_layers: int
    num_wanted: int
    reached: bool

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, or ``incomplete`` where layers are missing."""
        if self.num_layers < self.num_wanted:
            return "incomplete"
        return "met" if self.reached else "missed"


def outcomes(results: PaperResults) -> list[Outcome]:
    """Every target. All speak of batch 64; those of one sparsity, of 90%."""
    everything = list(target_layers().values())
    kernels_3x3 = [layer for layer in everything if layer.kernel == 3 and layer.height > 1]
    return [
        _break_even(results, kernels_3x3),
        *(_gain(results, kernels_3x3, dtype) for dtype in DTYPES),
        *(_lowered(results, everything, baseline, dtype) for baseline in LOWERED_GAINS for dtype in DTYPES),
        *(_half(results, dtype) for dtype in DTYPES),
    ]


def _break_even(results: PaperResults, layers: Sequence[Layer]) -> Outcome:
    bounds = [results.break_even_bound(layer, BATCH, "float16") for layer in layers]
    found = [bound for bound in bounds if bound is not None]
    value = mean(found)
    return Outcome(
        "break-even sparsity, float16, geometric mean of the 3x3 layers",
        f"at most {BREAK_EVEN:.0%}",
        "-" if value is None else f"{value:.1%}",
        len(found),
        len(layers),
        value is not None and value <= BREAK_EVEN,
    )


def _gain(results: PaperResults, layers: Sequence[Layer], dtype: str) -> Outcome:
    found = _gains(results, layers, dtype, "dense", "median_us")
    value, wanted = mean(found), GAINS[dtype]
    against = "dense" if dtype == "float16" else "dense with TF32"
    return Outcome(
        f"speed-up over {against} at {SPARSITY:.0%}, {dtype}, geometric mean of the 3x3 layers",
        f"at least {wanted:g}x",
        "-" if value is None else f"{value:.2f}x",
        len(found),
        len(layers),
        value is not None and value >= wanted,
    )


def _lowered(results: PaperResults, layers: Sequence[Layer], baseline: str, dtype: str) -> Outcome:
    found = _gains(results, layers, dtype, baseline, "burst_us")
    wanted = LOWERED_GAINS[baseline]
    above = sum(gain > wanted for gain in found)
    return Outcome(
        f"speed-up over {LOWERED_NAMES[baseline]} on the lowered matrix at {SPARSITY:.0%}, {dtype}, every layer",
        f"over {wanted:g}x",
        f"{min(found):.2f}x and more, {above} of {len(found)} over it" if found else "-",
        len(found),
        len(layers),
        bool(found) and above == len(found),
    )


def _half(results: PaperResults, dtype: str) -> Outcome:
    layers = read_suite("dong2020")
    # A layer of one channel has no half, and counts as one that is not beaten.
    halved = [layer for layer in layers if layer.in_channels > 1]
    found = _gains(results, halved, dtype, "half-in", "median_us")
    wins = sum(gain > 1 for gain in found)
    return Outcome(
        f"layers of Dong et al. faster at {SPARSITY:.0%} than dense with half the input channels, {dtype}",
        f"at least {HALF_WINS} of {len(layers)}",
        f"{wins} of {len(layers)}" if found else "-",
        len(found),
        len(halved),
        wins >= HALF_WINS,
    )


def _gains(results: PaperResults, layers: Iterable[Layer], dtype: str, baseline: str, time: Time) -> list[float]:
    cells: list[Cell | None] = [results.cell(layer, BATCH, dtype, SPARSITY) for layer in layers]
    gains = [cell.gain(baseline, time) for cell in cells if cell is not None]
    return [gain for gain in gains if gain is not None and math.isfinite(gain)]


def targets_table(results: PaperResults) -> str:
    """The targets as a Markdown table."""
    head = ["target, batch 64", "wanted", "measured", "layers", ""]
    rows = [[o.target, o.wanted, o.got, f"{o.num_layers} of {o.num_wanted}", o.verdict] for o in outcomes(results)]
    return table(head, rows)


def summary(results: PaperResults) -> str:
    """The targets, a line each."""
    return "\n".join(
        f"{o.verdict:10} {o.target}: wanted {o.wanted}, got {o.got} ({o.num_layers} of {o.num_wanted} layers)"
        for o in outcomes(results)
    )


def main() -> int:
    """Print the targets; 1 when one is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    options = parser.parse_args()
    if missing := [str(path) for path in options.results if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    files = [json.loads(path.read_text()) for path in options.results]
    results = PaperResults(files) if files else PaperResults.load()
    if results is None:
        sys.exit("error: there are no results of the papers' suites yet")
    print(summary(results))
    return int(any(outcome.verdict != "met" for outcome in outcomes(results)))


if __name__ == "__main__":
    sys.exit(main())
