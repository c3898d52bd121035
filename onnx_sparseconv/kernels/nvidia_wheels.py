"""Libraries that NVIDIA's pip wheels bring, for ctypes. Imports nothing but the standard library."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path


def wheel_files(wheel: str, library: str) -> Iterator[Path]:
    """Files called ``library`` of an installed wheel; none where it is not installed."""
    try:
        distribution = importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return
    for file in distribution.files or ():
        if file.name == library:
            yield Path(str(distribution.locate_file(file)))


def find_library(wheel: str | None, name: str) -> str | Path | None:
    """What `ctypes.CDLL` loads a library by: the file of an installed wheel, or its name, where the loader finds it.

    Returns:
        None where it is nowhere. The wheel's file may not load.
    """
    file = next(wheel_files(wheel, name), None) if wheel else None
    if file is not None:
        return file
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name


def c_strings(texts: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p] | None:
    """An array of C strings; a null pointer for none."""
    return (ctypes.c_char_p * len(texts))(*texts) if texts else None
