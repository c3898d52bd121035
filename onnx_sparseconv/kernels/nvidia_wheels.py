"""Libraries that NVIDIA's pip wheels bring, through ctypes. Imports nothing but the standard library."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from onnx_sparseconv.errors import CompileError


class MissingFunctionError(CompileError):
    """A library lacks functions: it is one of its first versions, or another library."""


class NvidiaLibrary:
    """A loaded library; its functions return a status, 0 for success. A subclass says which ones it calls.

    Attributes:
        path: the file, or the name by which the loader found it.
        version: major and minor, for example ``(12, 9)``.
    """

    # What messages call the library, and what its functions' names begin with.
    _NAME: ClassVar[str]
    _PREFIX: ClassVar[str]
    # Argument types of the functions, by name without prefix; ctypes would pass pointers as 32-bit numbers.
    _ARGUMENTS: ClassVar[Mapping[str, Sequence[Any]]]

    def __init__(self, path: str | Path) -> None:
        """Load the library.

        Raises:
            MissingFunctionError: it lacks a function.
            CompileError: it cannot be loaded.
        """
        self.path = str(path)
        try:
            self._library = ctypes.CDLL(self.path)
            integers = ctypes.POINTER(ctypes.c_int)
            for name, types in {"Version": (integers, integers), **self._ARGUMENTS}.items():
                function = self._function(name)
                function.argtypes, function.restype = types, ctypes.c_int
        except OSError as error:
            raise CompileError(f"{path} does not work as {self._NAME}: {error}") from error
        except AttributeError as error:
            raise MissingFunctionError(f"{path} does not work as {self._NAME}: {error}") from error
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def __repr__(self) -> str:
        """For messages of tests and debuggers."""
        return f"{type(self).__name__}({self.path!r}, version={self.version})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """Another process loads the same file."""
        return type(self), (self.path,)

    @property
    def name(self) -> str:
        """``NVRTC 12.9``."""
        return f"{self._NAME} {'.'.join(map(str, self.version))}"

    def _function(self, name: str) -> Any:  # noqa: ANN401 - a ctypes function, whose type has no public name
        return getattr(self._library, self._PREFIX + name)

    def _call(self, name: str, *arguments: Any, purpose: str = "", log: Callable[[], str] = str) -> None:  # noqa: ANN401
        """Call a function.

        Args:
            name: without the prefix.
            arguments: as ctypes takes them.
            purpose: is told with the function's name.
            log: gives what the library has to say of a failure.

        Raises:
            CompileError: it fails.
        """
        status = self._function(name)(*arguments)
        if status:
            text = log()
            reason = text.partition("\n")[0] or self._meaning(status)
            raise CompileError(f"{self._PREFIX}{name}{purpose} of {self.path} failed: {reason}", text)

    def _meaning(self, status: int) -> str:
        """What a status means, where the library has a function that tells it."""
        try:
            function = self._function("GetErrorString")
        except AttributeError:
            return f"error {status}"
        function.argtypes, function.restype = [ctypes.c_int], ctypes.c_char_p
        return (function(status) or b"unknown error").decode()


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
