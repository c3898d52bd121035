"""Measurements on disk, one JSON object a line, under everything that they hold for.

A line is appended as soon as a layer is measured, with one write, so that an interrupted tune loses nothing, several
processes may share a file, and a line that was torn by a crash costs that line. A file that cannot be read or written
costs time, never a result: whoever asked gets a note that says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_sparseconv.files import is_there
from onnx_sparseconv.kernels.image_cache import CACHE_VARIABLE, cache_folder
from onnx_sparseconv.tuner.options import PRESET_NAMES, PresetName
from onnx_sparseconv.tuner.setting import Setting, differences

# Counts changes to what a line means, and to how layers are timed.
SCHEMA_VERSION = 2
FILE_NAME = "tuning.jsonl"


@dataclass(frozen=True)
class LayerTimes:
    """Median times of one layer at one shape.

    Attributes:
        times_us: microseconds by name of the candidate, without the cost of a call; infinite where it cannot run.
        problems: why, by the same names.
        reorder_in_us, reorder_out_us: what the dense layer's time holds, in a layout that is another than the
            model's, of changing its inputs and its output, which neighbours that are dense too save it.
    """

    times_us: Mapping[str, float]
    problems: Mapping[str, str]
    reorder_in_us: float = 0.0
    reorder_out_us: float = 0.0


@dataclass(frozen=True)
class _Entry:
    facts: Mapping[str, Any]
    preset: PresetName
    times: LayerTimes


def default_database() -> Path:
    """In the user's cache folder, or the one that ``ONNX_SPARSECONV_CACHE`` names."""
    return (cache_folder() if os.environ.get(CACHE_VARIABLE) else cache_folder().parent) / FILE_NAME


class Database:
    """Measurements of one setting; those of others are known, but not used.

    Args:
        path: the file; it need not exist.
        setting: what the measurements must hold for.
        preset: how thorough they must be, at least.
    """

    def __init__(self, path: Path, setting: Setting, preset: PresetName) -> None:
        self._path = path
        self._setting = dict(setting)
        self._preset: PresetName = preset
        self._entries: dict[str, list[_Entry]] = {}
        self._notes: list[str] = []
        self._others: dict[str, int] = {}
        self.num_found = 0
        self._read()

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong with the file, and why measurements in it were not used."""
        others = [f"{number} measured before with {what}: measured again" for what, number in self._others.items()]
        return (*self._notes, *others)

    def find(self, layer: str, names: tuple[str, ...]) -> LayerTimes | None:
        """The newest measurement of a layer that holds here and has all candidates; None where there is none."""
        entries = self._entries.get(layer, [])
        for entry in reversed(entries):
            if not differences(entry.facts, self._setting) and self._is_enough(entry, names):
                self.num_found += 1
                return entry.times
        if entries:
            other = differences(entries[-1].facts, self._setting)
            what = "; ".join(other) or f"preset {entries[-1].preset}, now {self._preset}, or other candidates"
            self._others[what] = self._others.get(what, 0) + 1
        return None

    def add(self, layer: str, times: LayerTimes) -> None:
        """Keep a measurement, at once."""
        entry = _Entry(self._setting, self._preset, times)
        self._entries.setdefault(layer, []).append(entry)
        line = {
            "schema_version": SCHEMA_VERSION,
            "layer": layer,
            "preset": self._preset,
            "setting": self._setting,
            "times_us": {name: time if math.isfinite(time) else None for name, time in times.times_us.items()},
            "problems": dict(times.problems),
            "reorder_us": [times.reorder_in_us, times.reorder_out_us],
        }
        try:
            self._append(json.dumps(line, allow_nan=False))
        except OSError as error:
            self._note_once(f"{self._path}: measurements cannot be kept: {error.strerror or error}")

    def _is_enough(self, entry: _Entry, names: tuple[str, ...]) -> bool:
        rank = PRESET_NAMES.index
        times = entry.times.times_us
        # What could not run may be able to by now (memory was short, say), and failing again takes no time.
        return rank(entry.preset) >= rank(self._preset) and all(math.isfinite(times.get(n, math.inf)) for n in names)

    def _append(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = is_there(self._path) and not _ends_with_newline(self._path)
        # One write at the end of the file: other processes write before it or behind it.
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, ("\n" * torn + line + "\n").encode())
        finally:
            os.close(handle)

    def _read(self) -> None:
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            self._note_once(f"{self._path}: cannot be read, so all is measured: {error.strerror or error}")
            return
        broken = 0
        for line in filter(bytes.strip, lines):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                broken += 1
        if broken:
            self._note_once(f"{self._path}: {broken} of {len(lines)} lines cannot be read and do not count")

    def _take(self, line: Any) -> None:  # noqa: ANN401
        if line["schema_version"] != SCHEMA_VERSION:
            return
        before, behind = map(float, line["reorder_us"])
        times = LayerTimes(
            {str(name): math.inf if time is None else _positive(time) for name, time in line["times_us"].items()},
            {str(name): str(problem) for name, problem in line["problems"].items()},
            before,
            behind,
        )
        preset = line["preset"]
        if preset not in PRESET_NAMES:
            raise ValueError(preset)
        entry = _Entry(dict(line["setting"]), preset, times)
        self._entries.setdefault(str(line["layer"]), []).append(entry)

    def _note_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)


def _positive(time: Any) -> float:  # noqa: ANN401
    if not (isinstance(time, (int, float)) and 0 < time < math.inf):
        raise ValueError(time)
    return float(time)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if not size:
            return True
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"
