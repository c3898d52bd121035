"""The CUDA side of the native library on a machine without a GPU.

The library is built a second time, for a stand-in of libcuda that runs host-compiled kernels (cuda_on_host/), and
registers its CUDA kernels for the CPU provider of a plain ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnx_sparseconv.kernels.device_sources import EARLY_KERNELS
from onnx_sparseconv.kernels.library_code import ARCHITECTURES
from onnx_sparseconv.kernels.plan import MAX_SOURCES
from tests.support.cuda_host_build import compile_kernels, kernel_image
from tests.support.native_build import ROOT, build_library, find_tool

# A bare name: it is found because `FakeDriver` has loaded the file, and not where nobody has.
_DRIVER_NAME = "libfake_cuda.so"
_SOURCE = Path(__file__).parent / "cuda_on_host" / "fake_driver.cc"
_KERNELS_VARIABLE = "CUDA_ON_HOST_LIBRARY_KERNELS"
# As run_sanitized.sh sets it up.
_SANITIZE = "ASAN_OPTIONS" in os.environ
_COMPILE_ONCE = Path(__file__).with_name("compile_once.py")
# Shared by all processes that run tests: each thing is built once.
FOLDER = ROOT / "build" / ("emulated-cuda-sanitized" if _SANITIZE else "emulated-cuda")
_NATIVE = ROOT / "onnx_sparseconv/custom_ops/native"
_HEADERS = (ROOT / "onnx_sparseconv/kernels/cuda", _NATIVE, _NATIVE / "cuda")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def build_emulated_library() -> Path:
    """The native library with its CUDA kernels under the CPU provider's name."""
    with _one_at_a_time():
        return build_library(
            FOLDER,
            "-DCMAKE_BUILD_TYPE=Debug",
            "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -g1",
            "-DSPARSECONV_WARNINGS_AS_ERRORS=ON",
            f"-DSPARSECONV_EMULATED_CUDA={_DRIVER_NAME}",
            f"-DSPARSECONV_SANITIZE={'ON' if _SANITIZE else 'OFF'}",
            *([f"-DCMAKE_CXX_COMPILER_LAUNCHER={_COMPILE_ONCE}"] if _SANITIZE else []),
        )


def build_shared(name: str, sources: Sequence[Path], *flags: str) -> Path:
    """A small shared object of C++ files that may include the native library's headers; kept until one changes."""
    made = FOLDER / name
    with _one_at_a_time():
        used = [*sources, *(header for folder in _HEADERS for header in folder.glob("*.h"))]
        if not made.is_file() or made.stat().st_mtime < max(file.stat().st_mtime for file in used):
            options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
            includes = [f"-I{folder}" for folder in _HEADERS[:2]]
            new = made.with_suffix(".new")
            command = [find_tool("g++"), *options, *includes, *flags, *map(str, sources), "-o", str(new), "-ldl"]
            subprocess.run(command, check=True, capture_output=True)
            new.replace(made)
    return made


def build_driver() -> Path:
    """The stand-in for libcuda."""
    return build_shared(_DRIVER_NAME, [_SOURCE], "-O1", f"-Wl,-soname,{_DRIVER_NAME}")


class Epilogue(ctypes.Structure):
    """The struct of that name in params.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "residual")),
        ("activation", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("alpha", "beta")),
        ("bounds", 2 * ctypes.c_uint),
    )


class Divisor(ctypes.Structure):
    """The struct of that name in params.h."""

    _fields_ = (("multiplier", ctypes.c_uint), ("shift", ctypes.c_int))


class GeneratedParams(ctypes.Structure):
    """The struct of that name in params.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "bias", "addend")),
        ("split_stride", ctypes.c_longlong),
        *((name, ctypes.c_float) for name in ("alpha", "beta")),
        *((name, ctypes.c_int) for name in ("is_final", "is_paired")),
        *((name, ctypes.c_int) for name in ("chunk_begin", "chunk_end", "num_splits", "num_lanes")),
        *(
            (name, ctypes.c_int)
            for name in ("cluster_blocks", "staging", "in_h", "in_w", "out_h", "out_w", "num_groups")
        ),
        *((name, ctypes.c_int) for name in ("group_slots", "num_slots", "row_pitch", "image_pitch")),
        *((name, Divisor) for name in ("by_row_slots", "by_plane_slots")),
        ("more_x", ctypes.c_void_p * (MAX_SOURCES - 1)),
    )


def build_kernels() -> list[Path]:
    """All kernels that the library carries, but for those that begin early: they are those for every GPU once more."""
    sources = [source for source in ARCHITECTURES if source != EARLY_KERNELS]
    compile_kernels(sources)
    return [kernel_image(source) for source in sources]


class FakeDriver:
    """The stand-in, loaded into this process; it stays loaded."""

    def __init__(self) -> None:
        os.environ[_KERNELS_VARIABLE] = ":".join(map(str, build_kernels()))
        self._library = ctypes.CDLL(str(build_driver()))
        self._library.fake_cuda_calls.restype = ctypes.c_long
        self._library.fake_cuda_all_calls.restype = ctypes.c_long
        self._library.fake_cuda_live.restype = ctypes.c_long
        self._library.fake_cuda_text.restype = ctypes.c_char_p
        self._library.fake_cuda_take_launches.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._launches: list[tuple[str, tuple[int, ...], int, int]] = []

    def reset(self) -> None:
        """An H200, but for its few multiprocessors; nothing fails."""
        self.set_device()
        self._library.fake_cuda_set_stream_device(0)
        self._library.fake_cuda_fail(None, 0, 0)
        self.take_launches()

    def set_device(
        self,
        architecture: int = 90,
        num_multiprocessors: int = 4,
        max_shared_bytes: int = 227 << 10,
        blocks_a_multiprocessor: int = 1,
    ) -> None:
        """What sessions that are created from now on find."""
        self._library.fake_cuda_set_device(architecture, num_multiprocessors, max_shared_bytes, blocks_a_multiprocessor)

    def set_stream_device(self, device: int) -> None:
        """To which device the streams of all calls belong; sessions are created on device 0."""
        self._library.fake_cuda_set_stream_device(device)

    def fail(self, function: str, nth: int = 1, code: int = 2) -> None:
        """The nth call of a driver function from now on fails, once; 2 is CUDA_ERROR_OUT_OF_MEMORY."""
        self._library.fake_cuda_fail(function.encode(), nth, code)

    @contextlib.contextmanager
    def current_context(self, device: int) -> Iterator[None]:
        """A device's primary context is current for this thread, as it is where ONNX Runtime's CUDA provider runs."""
        context = ctypes.c_void_p()
        assert self._library.cuInit(0) == 0
        assert self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self._library.cuCtxPushCurrent_v2(context) == 0
        try:
            yield
        finally:
            assert self._library.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
            assert self._library.cuDevicePrimaryCtxRelease_v2(device) == 0

    def calls(self, function: str | None = None) -> int:
        """How often a function of the driver was called; all of them for None."""
        if function is None:
            return int(self._library.fake_cuda_all_calls())
        return int(self._library.fake_cuda_calls(function.encode()))

    def live(self) -> int:
        """Memory blocks, libraries and contexts that have not been given back."""
        return int(self._library.fake_cuda_live())

    def text(self, first_kernel: str) -> bytes:
        """The PTX that was loaded last, of those that begin with a kernel; empty for none."""
        return bytes(self._library.fake_cuda_text(first_kernel.encode()))

    def last_generated(self) -> GeneratedParams:
        """Parameters of the last launch of a generated kernel; its pointers may be stale."""
        params = GeneratedParams()
        self._library.fake_cuda_last_generated(ctypes.byref(params))
        return params

    def take_launches(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Launches since the last call: kernel, grid, threads, bytes of dynamic shared memory."""
        launches = list(self.launches())
        self._launches.clear()
        return launches

    def launches(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """The same, without taking them."""
        buffer = ctypes.create_string_buffer(1 << 20)
        self._library.fake_cuda_take_launches(buffer, len(buffer))
        for line in buffer.value.decode().splitlines():
            name, grid, threads, shared_bytes = line.split()
            sizes = tuple(int(size) for size in grid.split("x"))
            self._launches.append((name, sizes, int(threads), int(shared_bytes)))
        return self._launches


@functools.cache
def fake_driver() -> FakeDriver:
    """The process's one."""
    return FakeDriver()
