"""NVRTC, NVIDIA's run-time compiler of CUDA C++, through ctypes.

It needs neither a GPU nor a driver nor a CUDA toolkit: the library comes from a pip wheel. Libraries of several
versions may be used in one process. Nothing is loaded when this module is imported, and it imports nothing but the
standard library, so worker processes start fast; a loaded library stays usable after a fork.

The functions are those of the NVRTC documentation, chapter "API": nvrtcCreateProgram and its like.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels.nvidia_wheels import NvidiaLibrary, c_strings, wheel_files

# pip wheels by CUDA's major version.
WHEELS: Mapping[int, str] = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
# What the compiler of an older version makes runs on older drivers too.
PREFERRED = (12, 13)
_LOADER_NAME = "libnvrtc.so.{}"
_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_INTEGERS = ctypes.POINTER(ctypes.c_int)
_STRINGS = ctypes.POINTER(ctypes.c_char_p)
# What nvrtcGet.. gives of a compiled program.
_RESULTS = ("ProgramLog", "PTX", "CUBIN")


@dataclass(frozen=True)
class Program:
    """What NVRTC compiles: one translation unit and all that it includes.

    Attributes:
        source: CUDA C++.
        name: stands in messages for the source's file name.
        headers: text of every file that ``#include`` may name; no file is read from disk.
        options: of the command line, one an element, for example ``("--gpu-architecture=sm_80", "--std=c++17")``.
    """

    source: str
    name: str = "kernel.cu"
    headers: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made.

    Attributes:
        ptx: PTX text, without a final NUL.
        cubin: code for one architecture; empty where the options named a virtual one (``compute_75``).
        log: warnings and remarks, also those of ptxas where the options asked for them.
    """

    ptx: bytes
    cubin: bytes
    log: str


class Nvrtc(NvidiaLibrary):
    """A loaded NVRTC library. `find` makes one."""

    _NAME = "NVRTC"
    _PREFIX = "nvrtc"
    _ARGUMENTS: ClassVar = {
        "GetNumSupportedArchs": [_INTEGERS],
        "GetSupportedArchs": [_INTEGERS],
        "CreateProgram": [_HANDLE, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, _STRINGS, _STRINGS],
        "DestroyProgram": [_HANDLE],
        "CompileProgram": [ctypes.c_void_p, ctypes.c_int, _STRINGS],
        **{f"Get{what}Size": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)] for what in _RESULTS},
        **{f"Get{what}": [ctypes.c_void_p, ctypes.c_char_p] for what in _RESULTS},
    }

    def supported_architectures(self) -> tuple[int, ...]:
        """Architectures that this version compiles for, rising: ``(50, .., 90)``; 90 is compute_90 and sm_90."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", numbers)
        return tuple(sorted(numbers))

    def compile(self, program: Program) -> Compiled:
        """Compile. Other threads run meanwhile, although NVRTC itself may let them wait for each other.

        Raises:
            CompileError: the program or an option is wrong; carries NVRTC's log.
        """
        names = [name.encode() for name in program.headers]
        texts = [text.encode() for text in program.headers.values()]
        handle = ctypes.c_void_p()
        source = (program.source.encode(), program.name.encode())
        headers = (len(names), c_strings(texts), c_strings(names))
        self._call("CreateProgram", ctypes.byref(handle), *source, *headers, purpose=f" for {program.name}")
        try:
            with _kept_locale():
                return self._compile(handle, program)
        finally:
            self._function("DestroyProgram")(ctypes.byref(handle))

    def _compile(self, handle: ctypes.c_void_p, program: Program) -> Compiled:
        options = [option.encode() for option in program.options]
        status = self._function("CompileProgram")(handle, len(options), c_strings(options))
        log = self._text(handle, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status:
            first = next((line for line in log.splitlines() if "error" in line), log.partition("\n")[0])
            raise CompileError(f"{self.name} cannot compile {program.name}: {first or self._meaning(status)}", log)
        # PTX is text with a NUL behind it; NVRTC 12 says that there is one byte of it where there is none.
        return Compiled(self._text(handle, "PTX").rstrip(b"\0"), self._text(handle, "CUBIN"), log)

    def _text(self, handle: ctypes.c_void_p, what: str) -> bytes:
        """What ``nvrtcGet<what>`` gives."""
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        if size.value:
            self._call(f"Get{what}", handle, buffer)
        return buffer.raw[: size.value]


def find(major: int | None = None, *, path: str | Path | None = None, preferred: Sequence[int] = PREFERRED) -> Nvrtc:
    """Load NVRTC from ``path``, or else from a pip wheel, or else from where the loader looks.

    Args:
        major: CUDA's major version, 12 or 13; None takes the first of ``preferred`` that is there.
        path: a library file, for example ``/usr/local/cuda/lib64/libnvrtc.so.12``.
        preferred: major versions in the order that they are tried.

    Raises:
        CompileError: none is there, or the one of ``path`` does not work or has another major version than ``major``.
    """
    if path is not None:
        nvrtc = Nvrtc(path)
        if major not in (None, nvrtc.version[0]):
            raise CompileError(f"{path} is {nvrtc.name}, but version {major} was asked for")
        return nvrtc
    majors = preferred if major is None else (major,)
    for wanted in majors:
        # A wheel's file that does not load is an error; that the loader finds none is not.
        for file in _wheel_files(wanted):
            nvrtc = Nvrtc(file)
            if nvrtc.version[0] == wanted:
                return nvrtc
        try:
            return Nvrtc(_LOADER_NAME.format(wanted))
        except CompileError:
            continue
    wheels = " or ".join(f"`pip install {WHEELS[m]}`" for m in majors if m in WHEELS)
    versions = " or ".join(map(str, majors))
    raise CompileError(f"NVRTC {versions}, which compiles GPU kernels, is not installed{wheels and f': {wheels}'}")


def installed() -> tuple[Nvrtc, ...]:
    """Every major version that `find` finds, in the order of `PREFERRED`."""
    found = []
    for major in PREFERRED:
        try:
            found.append(find(major))
        except CompileError:
            continue
    return tuple(found)


def _wheel_files(major: int) -> Iterator[Path]:
    """``libnvrtc.so.<major>`` of the installed wheel."""
    if major in WHEELS:
        yield from wheel_files(WHEELS[major], _LOADER_NAME.format(major))


@contextlib.contextmanager
def _kept_locale() -> Iterator[None]:
    """NVRTC 12.1 leaves the calling thread in the C locale, in which Python reads and writes files in ASCII."""
    use_locale = getattr(ctypes.CDLL(None), "uselocale", None) if os.name == "posix" else None
    if use_locale is None:
        yield
        return
    use_locale.restype, use_locale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = use_locale(None)
    try:
        yield
    finally:
        use_locale(before)
