"""What the results files of the papers' suites hold: of a layer in a setting, the fastest of each baseline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal

from memory_floor import memory_bandwidth, tensor_bytes
from suite_rows import Layer, canonical, read_rows
from tables import break_even

Record = dict[str, Any]
Time = Literal["median_us", "burst_us"]
RESULTS = Path(__file__).resolve().parent / "results"
PATTERN = "papers*.json"
# Images that a thread of the CSR kernel can compute; the baseline csr-2 has 2.
SUB_BATCHES = (1, 2, 4, 8)
# The suites whose layers the targets speak of.
TARGET_SUITES = ("dong2020", "pietron-vgg16", "pietron-other")
# Ours is what a tuner would take: the fastest of the kernels.
OURS = ("sparse", "library", "csr")


@dataclass(frozen=True)
class Cell:
    """A layer at a batch size in a type and a sparsity.

    Attributes:
        layer: canonical name.
        batch, dtype, sparsity: the setting.
        best: the fastest measurement of every baseline that ran and was right, by baseline.
    """

    layer: str
    batch: int
    dtype: str
    sparsity: float
    best: Mapping[str, Record]

    def ours(self) -> Record | None:
        """The fastest of our kernels; None where none ran."""
        found = [self.best[name] for name in OURS if name in self.best]
        return min(found, key=lambda record: float(record["median_us"]), default=None)

    def gain(self, baseline: str, time: Time = "median_us") -> float | None:
        """How many times faster ours is than a baseline; None where one of them is missing.

        Args:
            baseline: as in `papers`.
            time: ``median_us`` of single runs, or ``burst_us`` of runs back to back, in which what calls them counts
                less: for baselines that ONNX Runtime does not run.
        """
        ours, theirs = self.ours(), self.best.get(baseline)
        return theirs[time] / ours[time] if ours and theirs else None


class PaperResults:
    """All cells of some results files; where several have the same cell, the last one counts."""

    def __init__(self, files: Iterable[Record]) -> None:
        """Of the contents of results files, each newer than the ones before."""
        self.files = list(files)
        self._cells: dict[tuple[str, int, str, float], Cell] = {}
        self._sources: dict[tuple[str, int, str, float], Record] = {}
        for content in self.files:
            for record in content["layers"]:
                for cell in cells_of(record):
                    key = cell.layer, cell.batch, cell.dtype, cell.sparsity
                    self._cells[key], self._sources[key] = cell, content

    @staticmethod
    def load(folder: Path | None = None) -> PaperResults | None:
        """The files of a folder, those of the repository by default; None where there are none."""
        paths = sorted((folder or RESULTS).glob(PATTERN))
        files = sorted((json.loads(path.read_text()) for path in paths), key=lambda content: str(content["started"]))
        return PaperResults(files) if files else None

    def cell(self, layer: Layer, batch: int, dtype: str, sparsity: float) -> Cell | None:
        """That of a layer of a suite; None where it was not measured."""
        return self._cells.get((canonical(layer).name, batch, dtype, sparsity))

    def floor_us(self, layer: Layer, cell: Cell) -> float | None:
        """The least time of a run among many back to back on the GPU that a cell was measured on.

        That of its memory for input and output, by the data sheet, or that of a launch that does nothing, whichever is
        longer: the shortest of the file's sessions, whose hosts differ. None where the memory's bandwidth is not known.
        """
        content = self._sources[cell.layer, cell.batch, cell.dtype, cell.sparsity]
        bandwidth, _ = memory_bandwidth(None, content["gpu_before"].get("name", ""))
        if not bandwidth:
            return None
        memory_us = tensor_bytes(layer, cell.batch, cell.dtype) / bandwidth * 1e6
        launches = [
            session["floor"]["graph"]["burst_us"] for session in (content, *content.get("earlier_sessions", ()))
        ]
        return max(memory_us, float(min(launches)))

    def cells(self) -> list[Cell]:
        """All of them, in the order they were measured."""
        return list(self._cells.values())

    def gains(self, layer: Layer, batch: int, dtype: str) -> dict[float, float]:
        """Times faster than dense ONNX Runtime, by sparsity."""
        name = canonical(layer).name
        found = {
            c.sparsity: c.gain("dense") for c in self.cells() if (c.layer, c.batch, c.dtype) == (name, batch, dtype)
        }
        return {sparsity: gain for sparsity, gain in sorted(found.items()) if gain is not None}

    def break_even_bound(self, layer: Layer, batch: int, dtype: str) -> float | None:
        """The sparsity from which on sparse is faster, or one that is no lower: the lowest measured one where that
        is faster already, 1 where none is; None where nothing was measured.
        """
        gains = self.gains(layer, batch, dtype)
        if not gains:
            return None
        crossing = break_even(gains)
        return min(gains) if crossing is None else crossing


def cells_of(record: Record) -> list[Cell]:
    """The cells of a record of a results file, one for each sparsity."""
    counted = [m for m in record.get("measurements", ()) if not m["problem"] and m["median_us"] is not None]
    sparsities = sorted({m["sparsity"] for m in counted if m["sparsity"] is not None})
    setting = record["setting"]
    cells = []
    for sparsity in sparsities:
        best: dict[str, Record] = {}
        for measured in counted:
            if measured["sparsity"] in (None, sparsity):
                name = measured["baseline"]
                best[name] = min(best.get(name, measured), measured, key=lambda m: float(m["median_us"]))
        cells.append(Cell(record["layer"]["name"], setting["batch"], setting["dtype"], sparsity, best))
    return cells


def target_layers() -> dict[str, Layer]:
    """The layers that the targets speak of, each once, by canonical name."""
    rows = [row for suite in TARGET_SUITES for row in read_rows(suite)]
    return {canonical(row.layer).name: row.layer for row in rows}


def mean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    found = list(values)
    return geometric_mean(found) if found else None
