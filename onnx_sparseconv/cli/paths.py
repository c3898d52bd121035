"""Checks of the files that a command is to write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.files import same_file


def require_not_an_input(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write over a file that is read.

    Raises:
        UsageError: ``output`` is one of ``inputs``, by whatever path, or a directory.
    """
    if output.is_dir():
        raise UsageError(f"{output} is a directory: give the name of a file")
    for path in inputs:
        if same_file(output, path):
            raise UsageError(f"the output {output} is the input {path}: give it another name")


def require_distinct(outputs: Sequence[Path]) -> None:
    """Refuse to write two things to one file.

    Raises:
        UsageError: two of ``outputs`` are one file.
    """
    for position, first in enumerate(outputs):
        for second in outputs[:position]:
            if same_file(first, second):
                raise UsageError(f"two outputs have one name: {first}")


def suggested_output(path: Path, word: str) -> Path:
    """``model.onnx`` -> ``model.<word>.onnx``, in the current directory."""
    return Path(f"{path.stem}.{word}.onnx")
