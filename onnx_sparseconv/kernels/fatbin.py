"""nvFatbin, NVIDIA's library of fat binaries, through ctypes: compressed GPU code, which the driver unpacks itself.

It needs neither a GPU nor a driver; a pip wheel of about 1 MB brings it. Nothing is loaded when this module is
imported, and it imports nothing but the standard library.

The functions are those of nvFatbin's documentation: nvFatbinCreate and its like.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels.nvidia_wheels import c_strings, find_library

# pip wheels by CUDA's major version.
WHEELS: Mapping[int, str] = {12: "nvidia-nvfatbin-cu12", 13: "nvidia-nvfatbin"}
# The first that knows the compression mode below.
OLDEST_VERSION = (12, 6)
# "size" is Zstandard at a high level; LZ4, the mode of older fat binaries, leaves clearly more bytes.
OPTIONS = ("-64", "-cuda", "-host=linux", "-compress-all", "-compress-mode=size")
# The first driver that unpacks Zstandard is 550.54.14, of CUDA 12.4; to older ones such an image is invalid.
MIN_DRIVER = 12040
_LOADER_NAME = "libnvfatbin.so.{}"
# Of the code within the fat binary; only tools that list it show it.
_IDENTIFIER = b"sparseconv"


class NvFatbin:
    """A loaded nvFatbin library. `find` makes one.

    Attributes:
        path: the file, or the name by which the loader found it.
        version: major and minor, for example ``(12, 9)``.
    """

    def __init__(self, path: str | Path) -> None:
        """Load the library.

        Raises:
            CompileError: it cannot be loaded or is not nvFatbin.
        """
        self.path = str(path)
        try:
            self._library = _declare(ctypes.CDLL(self.path))
        except (OSError, AttributeError) as error:
            raise CompileError(f"{path} does not work as nvFatbin: {error}") from error
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        self._check(self._library.nvFatbinVersion(ctypes.byref(major), ctypes.byref(minor)), "nvFatbinVersion")
        self.version = (major.value, minor.value)

    def __repr__(self) -> str:
        """For messages of tests and debuggers."""
        return f"NvFatbin({self.path!r}, version={self.version})"

    def __reduce__(self) -> tuple[type[NvFatbin], tuple[str]]:
        """Another process loads the same file."""
        return NvFatbin, (self.path,)

    @property
    def name(self) -> str:
        """``nvFatbin 12.9``."""
        return "nvFatbin {}.{}".format(*self.version)

    def compress(self, cubin: bytes, architecture: int) -> bytes:
        """A compressed fat binary with one cubin, for drivers from `MIN_DRIVER` on.

        Args:
            cubin: GPU code.
            architecture: that it was compiled for, 90 for sm_90.

        Raises:
            CompileError: it is no cubin for this architecture.
        """
        handle = ctypes.c_void_p()
        options = [option.encode() for option in OPTIONS]
        status = self._library.nvFatbinCreate(ctypes.byref(handle), c_strings(options), len(options))
        self._check(status, "nvFatbinCreate")
        try:
            name = str(architecture).encode()
            status = self._library.nvFatbinAddCubin(handle, cubin, len(cubin), name, _IDENTIFIER)
            self._check(status, f"nvFatbinAddCubin for sm_{architecture}")
            size = ctypes.c_size_t()
            self._check(self._library.nvFatbinSize(handle, ctypes.byref(size)), "nvFatbinSize")
            # Of the very size: a byte that nvFatbin left out would stay 0.
            buffer = ctypes.create_string_buffer(size.value)
            self._check(self._library.nvFatbinGet(handle, buffer), "nvFatbinGet")
            return buffer.raw
        finally:
            self._library.nvFatbinDestroy(ctypes.byref(handle))

    def _check(self, status: int, call: str) -> None:
        if status:
            reason = self._library.nvFatbinGetErrorString(status) or b"unknown error"
            raise CompileError(f"{call} of {self.path} failed: {reason.decode()}")


def find(major: int) -> NvFatbin | None:
    """Load nvFatbin of a major version of CUDA: from a pip wheel, or else from where the loader looks.

    Returns:
        None where there is none, or only one before `OLDEST_VERSION`.

    Raises:
        CompileError: the wheel's library does not work.
    """
    path = find_library(WHEELS.get(major), _LOADER_NAME.format(major))
    if path is None:
        return None
    found = NvFatbin(path)
    return found if found.version >= OLDEST_VERSION else None


def how_to_install(major: int) -> str:
    """The command that brings what `find` looks for."""
    return f"pip install '{WHEELS[major]}>={'.'.join(map(str, OLDEST_VERSION))}'"


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function that is used its argument types; ctypes would pass pointers as 32-bit numbers.

    Raises:
        AttributeError: a function is missing.
    """
    pointer, string, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    handle, number = ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_uint)
    arguments = {
        "nvFatbinVersion": [number, number],
        "nvFatbinCreate": [handle, ctypes.POINTER(string), size],
        "nvFatbinAddCubin": [pointer, string, size, string, string],
        "nvFatbinSize": [pointer, ctypes.POINTER(size)],
        "nvFatbinGet": [pointer, pointer],
        "nvFatbinDestroy": [handle],
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    library.nvFatbinGetErrorString.argtypes = [ctypes.c_int]
    library.nvFatbinGetErrorString.restype = string
    return library
