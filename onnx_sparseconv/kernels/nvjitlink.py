"""nvJitLink, NVIDIA's linker of GPU code, through ctypes: programs that were compiled apart become one image.

It needs neither a GPU nor a driver; a pip wheel brings it. Nothing is loaded when this module is imported, and it
imports nothing but the standard library.

The functions are those of nvJitLink's documentation: nvJitLinkCreate and its like.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels.nvidia_wheels import c_strings, find_library

# pip wheels by CUDA's major version.
WHEELS: Mapping[int, str] = {12: "nvidia-nvjitlink-cu12", 13: "nvidia-nvjitlink"}
# Known to have all functions that are called here; the first ones lack some.
KNOWN_VERSIONS: Mapping[int, tuple[int, int]] = {12: (12, 9), 13: (13, 0)}
_LOADER_NAME = "libnvJitLink.so.{}"
_CUBIN = 1  # of the enumeration nvJitLinkInputType


class TooOldError(CompileError):
    """A library lacks functions of nvJitLink, as its first versions do."""


class NvJitLink:
    """A loaded nvJitLink library. `find` makes one.

    Attributes:
        path: the file, or the name by which the loader found it.
        version: major and minor, for example ``(12, 9)``.
    """

    def __init__(self, path: str | Path) -> None:
        """Load the library.

        Raises:
            CompileError: it cannot be loaded or is not nvJitLink.
        """
        self.path = str(path)
        try:
            self._library = _declare(ctypes.CDLL(self.path))
        except OSError as error:
            raise CompileError(f"{path} does not work as nvJitLink: {error}") from error
        except AttributeError as error:
            raise TooOldError(f"{path} does not work as nvJitLink: {error}") from error
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        self._check(self._library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor)), "nvJitLinkVersion")
        self.version = (major.value, minor.value)

    def __repr__(self) -> str:
        """For messages of tests and debuggers."""
        return f"NvJitLink({self.path!r}, version={self.version})"

    def __reduce__(self) -> tuple[type[NvJitLink], tuple[str]]:
        """Another process loads the same file."""
        return NvJitLink, (self.path,)

    @property
    def name(self) -> str:
        """``nvJitLink 12.9``."""
        return "nvJitLink {}.{}".format(*self.version)

    def link(self, cubins: Sequence[bytes], architecture: int) -> bytes:
        """One cubin of several relocatable ones.

        Args:
            cubins: GPU code, compiled with ``--relocatable-device-code=true``.
            architecture: that all of them were compiled for, 90 for sm_90.

        Raises:
            CompileError: they do not fit together, or a newer compiler made them; carries nvJitLink's log.
        """
        handle = ctypes.c_void_p()
        options = [f"-arch=sm_{architecture}".encode()]
        try:
            # Even where it fails there is a handle, which has the log.
            status = self._library.nvJitLinkCreate(ctypes.byref(handle), len(options), c_strings(options))
            self._check(status, f"nvJitLinkCreate for sm_{architecture}", handle)
            for index, cubin in enumerate(cubins):
                name = f"part {index}".encode()
                status = self._library.nvJitLinkAddData(handle, _CUBIN, cubin, len(cubin), name)
                self._check(status, f"nvJitLinkAddData of {name.decode()} for sm_{architecture}", handle)
            self._check(self._library.nvJitLinkComplete(handle), "nvJitLinkComplete", handle)
            size = ctypes.c_size_t()
            self._check(
                self._library.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(size)), "nvJitLinkGetLinkedCubinSize"
            )
            buffer = ctypes.create_string_buffer(size.value)
            self._check(self._library.nvJitLinkGetLinkedCubin(handle, buffer), "nvJitLinkGetLinkedCubin")
            return buffer.raw
        finally:
            if handle:
                self._library.nvJitLinkDestroy(ctypes.byref(handle))

    def _check(self, status: int, call: str, handle: ctypes.c_void_p | None = None) -> None:
        if status:
            log = self._log(handle) if handle else ""
            reason = log.partition("\n")[0] or f"error {status}"
            raise CompileError(f"{call} of {self.path} failed: {reason}", log)

    def _log(self, handle: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        if self._library.nvJitLinkGetErrorLogSize(handle, ctypes.byref(size)) or not size.value:
            return ""
        buffer = ctypes.create_string_buffer(size.value)
        return "" if self._library.nvJitLinkGetErrorLog(handle, buffer) else buffer.value.decode(errors="replace")


def find(compiler: tuple[int, int]) -> NvJitLink | None:
    """Load the nvJitLink that links what a compiler makes: from a pip wheel, or else from where the loader looks.

    Args:
        compiler: version of NVRTC, major and minor.

    Returns:
        None where there is none, or only one that is older than the compiler.

    Raises:
        CompileError: the wheel's library does not work.
    """
    major = compiler[0]
    found = find_library(WHEELS.get(major), _LOADER_NAME.format(major))
    if found is None:
        return None
    try:
        linker = NvJitLink(found)
    except TooOldError:
        return None
    return linker if linker.version >= compiler else None


def how_to_install(compiler: tuple[int, int]) -> str:
    """The command that brings what `find` looks for."""
    major = compiler[0]
    return "pip install '{}>={}.{}'".format(WHEELS[major], *max(compiler, KNOWN_VERSIONS[major]))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function that is used its argument types; ctypes would pass pointers as 32-bit numbers.

    Raises:
        AttributeError: a function is missing.
    """
    pointer, string, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    handle, number = ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_uint)
    arguments = {
        "nvJitLinkVersion": [number, number],
        "nvJitLinkCreate": [handle, ctypes.c_uint32, ctypes.POINTER(string)],
        "nvJitLinkAddData": [pointer, ctypes.c_int, string, size, string],
        "nvJitLinkComplete": [pointer],
        "nvJitLinkGetLinkedCubinSize": [pointer, ctypes.POINTER(size)],
        "nvJitLinkGetLinkedCubin": [pointer, pointer],
        "nvJitLinkGetErrorLogSize": [pointer, ctypes.POINTER(size)],
        "nvJitLinkGetErrorLog": [pointer, pointer],
        "nvJitLinkDestroy": [handle],
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return library
