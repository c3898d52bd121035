"""nvFatbin, NVIDIA's library of fat binaries, through ctypes: compressed GPU code, which the driver unpacks itself.

It needs neither a GPU nor a driver; a pip wheel of about 1 MB brings it. Nothing is loaded when this module is
imported, and it imports nothing but the standard library.

The functions are those of nvFatbin's documentation: nvFatbinCreate and its like.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import ClassVar

from onnx_sparseconv.kernels.nvidia_wheels import NvidiaLibrary, c_strings, find_library

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
_HANDLE = ctypes.POINTER(ctypes.c_void_p)


class NvFatbin(NvidiaLibrary):
    """A loaded nvFatbin library. `find` makes one."""

    _NAME = "nvFatbin"
    _PREFIX = "nvFatbin"
    _ARGUMENTS: ClassVar = {
        "Create": [_HANDLE, ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t],
        "AddCubin": [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p],
        "Size": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)],
        "Get": [ctypes.c_void_p, ctypes.c_void_p],
        "Destroy": [_HANDLE],
    }

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
        self._call("Create", ctypes.byref(handle), c_strings(options), len(options))
        try:
            arguments = (handle, cubin, len(cubin), str(architecture).encode(), _IDENTIFIER)
            self._call("AddCubin", *arguments, purpose=f" for sm_{architecture}")
            size = ctypes.c_size_t()
            self._call("Size", handle, ctypes.byref(size))
            # Of the very size: a byte that nvFatbin left out would stay 0.
            buffer = ctypes.create_string_buffer(size.value)
            self._call("Get", handle, buffer)
            return buffer.raw
        finally:
            self._function("Destroy")(ctypes.byref(handle))


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
