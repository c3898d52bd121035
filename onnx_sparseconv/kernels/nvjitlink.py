"""nvJitLink, NVIDIA's linker of GPU code, through ctypes: programs that were compiled apart become one image.

It needs neither a GPU nor a driver; a pip wheel brings it. Nothing is loaded when this module is imported, and it
imports nothing but the standard library.

The functions are those of nvJitLink's documentation: nvJitLinkCreate and its like.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from onnx_sparseconv.kernels.nvidia_wheels import MissingFunctionError, NvidiaLibrary, c_strings, find_library

# pip wheels by CUDA's major version.
WHEELS: Mapping[int, str] = {12: "nvidia-nvjitlink-cu12", 13: "nvidia-nvjitlink"}
# Known to have all functions that are called here; the first ones lack some.
KNOWN_VERSIONS: Mapping[int, tuple[int, int]] = {12: (12, 9), 13: (13, 0)}
_LOADER_NAME = "libnvJitLink.so.{}"
_CUBIN = 1  # of the enumeration nvJitLinkInputType
_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_SIZE = ctypes.POINTER(ctypes.c_size_t)


class NvJitLink(NvidiaLibrary):
    """A loaded nvJitLink library. `find` makes one."""

    _NAME = "nvJitLink"
    _PREFIX = "nvJitLink"
    _ARGUMENTS: ClassVar = {
        "Create": [_HANDLE, ctypes.c_uint32, ctypes.POINTER(ctypes.c_char_p)],
        "AddData": [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p],
        "Complete": [ctypes.c_void_p],
        "GetLinkedCubinSize": [ctypes.c_void_p, _SIZE],
        "GetLinkedCubin": [ctypes.c_void_p, ctypes.c_void_p],
        "GetErrorLogSize": [ctypes.c_void_p, _SIZE],
        "GetErrorLog": [ctypes.c_void_p, ctypes.c_void_p],
        "Destroy": [_HANDLE],
    }

    def link(self, cubins: Sequence[bytes], architecture: int) -> bytes:
        """One cubin of several relocatable ones.

        Args:
            cubins: GPU code, compiled with ``--relocatable-device-code=true``.
            architecture: that all of them were compiled for, 90 for sm_90.

        Raises:
            CompileError: they do not fit together, or a newer compiler made them; carries nvJitLink's log.
        """
        handle = ctypes.c_void_p()
        # Even where nvJitLinkCreate fails there is a handle, which has the log.
        call = functools.partial(self._call, log=lambda: self._log(handle))
        options = [f"-arch=sm_{architecture}".encode()]
        purpose = f" for sm_{architecture}"
        try:
            call("Create", ctypes.byref(handle), len(options), c_strings(options), purpose=purpose)
            for index, cubin in enumerate(cubins):
                name = f"part {index}"
                arguments = (handle, _CUBIN, cubin, len(cubin), name.encode())
                call("AddData", *arguments, purpose=f" of {name}{purpose}")
            call("Complete", handle)
            size = ctypes.c_size_t()
            call("GetLinkedCubinSize", handle, ctypes.byref(size))
            buffer = ctypes.create_string_buffer(size.value)
            call("GetLinkedCubin", handle, buffer)
            return buffer.raw
        finally:
            if handle:
                self._function("Destroy")(ctypes.byref(handle))

    def _log(self, handle: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        if not handle or self._function("GetErrorLogSize")(handle, ctypes.byref(size)) or not size.value:
            return ""
        buffer = ctypes.create_string_buffer(size.value)
        return "" if self._function("GetErrorLog")(handle, buffer) else buffer.value.decode(errors="replace")


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
    except MissingFunctionError:
        return None
    return linker if linker.version >= compiler else None


def how_to_install(compiler: tuple[int, int]) -> str:
    """The command that brings what `find` looks for."""
    major = compiler[0]
    return "pip install '{}>={}.{}'".format(WHEELS[major], *max(compiler, KNOWN_VERSIONS[major]))
