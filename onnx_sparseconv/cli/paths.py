"""Checks of the files that a command is to write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.files import identities, is_directory, is_there, resolved, same_file


def require_not_an_input(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write over a file that is read.

    Raises:
        UsageError: ``output`` is one of ``inputs``, by whatever path, a directory, or a link that leads in a circle.
    """
    if is_directory(output):
        raise UsageError(f"{output} is a directory: give the name of a file")
    try:
        resolved(output)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
    for path in inputs:
        if same_file(output, path):
            raise UsageError(f"the output {output} is the input {path}: give it another name")


def require_inputs_spared(output: Path, inputs: Sequence[Path]) -> None:
    """Refuse to write over a file that is read, or over one that holds the external data of a model that is read.

    Raises:
        UsageError: ``output`` is one of these files, by whatever path, or a directory.
    """
    require_not_an_input(output, inputs)
    require_models_spared([], inputs, [output])


def require_no_inputs(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """The same for many files, in one look at each.

    Raises:
        UsageError: one of ``outputs`` is one of ``inputs``, by whatever path, or a directory.
    """
    by_identity = {identity: path for path in inputs for identity in identities(path)}
    for output in outputs:
        found = [by_identity[identity] for identity in identities(output) if identity in by_identity]
        require_not_an_input(output, found)


def require_models_spared(outputs: Sequence[Path], models: Sequence[Path], others: Sequence[Path] = ()) -> None:
    """Refuse models to be written, with their external data, over models that are read, with theirs.

    Args:
        outputs: models to be written.
        models: models that are read.
        others: further files to be written, such as reports.

    Raises:
        UsageError: one of the files to be written is one of those that are read, by whatever path, or a directory.
    """
    from onnx_sparseconv.converter.model_io import data_files, data_name  # noqa: PLC0415

    require_no_inputs(outputs, models)
    written = [*others, *outputs, *(output.with_name(data_name(output)) for output in outputs)]
    # Nothing can be lost where nothing is; reading models takes its time.
    if any(is_there(path) for path in written):
        require_no_inputs(written, [path for model in models for path in (model, *data_files(model))])


def require_distinct(outputs: Sequence[Path]) -> None:
    """Refuse to write two things to one file.

    Raises:
        UsageError: two of ``outputs`` are one file.
    """
    seen: set[str | tuple[int, int]] = set()
    for output in outputs:
        found = identities(output)
        if seen & found:
            raise UsageError(f"two outputs have one name: {output}")
        seen |= found


def suggested_output(path: Path, word: str) -> Path:
    """``model.onnx`` -> ``model.<word>.onnx``, in the current directory."""
    return Path(f"{path.stem}.{word}.onnx")


@contextlib.contextmanager
def directories(wanted: Iterable[Path]) -> Iterator[None]:
    """Make directories, with those above them, and take away again the ones that are made here and stay empty.

    Raises:
        ModelError: one cannot be made.
    """
    made: list[Path] = []
    try:
        for directory in sorted(set(wanted)):
            missing = [path for path in (directory, *directory.parents) if not is_there(path)]
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ModelError(f"cannot make the directory {directory}: {error.strerror}") from error
            made += missing
        yield
    finally:
        for directory in sorted(made, key=lambda path: -len(path.parts)):
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()
