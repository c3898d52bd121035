"""CUDA sources compiled for the CPU by g++, and launched through ctypes with numpy arrays.

What is emulated, and which errors of a kernel are caught, is said in ``cuda_on_host/cuda_on_host.h``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import mmap
import os
import re
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx_sparseconv.kernels.device_sources import LIBRARY_KERNELS, read_device_sources
from tests.support.native_build import ROOT, find_tool

SHIM = Path(__file__).parent / "cuda_on_host"
CACHE = ROOT / "build/cuda_on_host"
_OPTIONS = (
    *("-std=c++17", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    *("-I", str(ROOT / "onnx_sparseconv/custom_ops/native")),  # for half.h
)
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^{;]*?\)\s+)?(\w+)\s*\(')
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s[^;\[]*?(\w+)\s*\[\s*\]\s*;")
# As the preprocessor makes them: kernels that a macro defines are not seen by `_KERNEL`.
_LIBRARY_NAMES = (
    *(f"sparseconv_csr_{t}_b{b}" for t in ("f32", "f16") for b in (1, 2, 4, 8)),
    *(f"sparseconv_reduce_{t}" for t in ("f32", "f16")),
)


class KernelError(Exception):
    """What the emulation found wrong with a kernel."""


def build_host_image(
    source: str, headers: Mapping[str, str] | None = None, kernels: Sequence[str] | None = None
) -> Path:
    """Compile a CUDA source for the CPU.

    Args:
        source: CUDA C++ with ``extern "C" __global__`` kernels; without inline PTX.
        headers: files that it may include beside those of ``kernels/cuda``, or in their stead. The wrappers of PTX in
            ``intrinsics.cuh`` are always those of the emulation.
        kernels: names of its kernels; found in the text when None.

    Returns:
        A shared object as ``cuda_on_host.h`` describes it. Equal sources give the same file.
    """
    files = {name: text for name, text in read_device_sources().items() if not name.endswith(".cu")}
    files |= headers or {}
    files |= {path.name: path.read_text(encoding="utf-8") for path in SHIM.iterdir() if path.suffix in {".h", ".cuh"}}
    files["image.cc"] = _translation_unit(source, _KERNEL.findall(source) if kernels is None else kernels)
    compiler = find_tool(os.environ.get("CXX", "g++"), "g++")
    key = hashlib.sha256(repr((sorted(files.items()), _OPTIONS, _compiler_version(compiler))).encode()).hexdigest()
    image = CACHE / f"{key[:32]}.so"
    if not image.is_file():
        _compile(compiler, files, image)
    return image


@functools.cache
def library_image() -> Path:
    """The kernels that the native library carries."""
    return build_host_image(read_device_sources()[LIBRARY_KERNELS], kernels=_LIBRARY_NAMES)


def launch(
    image: Path,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    params: Sequence[Any],
    *,
    shared_bytes: int = 0,
) -> None:
    """Run a kernel to its end.

    Args:
        image: what `build_host_image` returned.
        kernel: its name.
        grid: blocks; missing axes are 1.
        block: threads of a block; missing axes are 1.
        params: the kernel's arguments in order, ctypes values or structures; see `address`.
        shared_bytes: dynamic shared memory.

    Raises:
        KernelError: there is no such kernel, or it did what a GPU forbids.
    """
    library = _load(image)
    three = ctypes.c_uint * 3
    pointers = (ctypes.c_void_p * max(len(params), 1))(*(ctypes.addressof(p) for p in params))
    sizes = [three(*[*axes, 1, 1][:3]) for axes in (grid, block)]
    status = library.cuda_on_host_launch(kernel.encode(), *sizes, shared_bytes, pointers)
    if status:
        reason = library.cuda_on_host_error().decode() if status == 2 else f"{image} has no kernel {kernel}"
        raise KernelError(reason)


def address(array: np.ndarray[Any, Any] | None) -> int:
    """Of an array's first element, for a pointer in a parameter; 0 for None."""
    assert array is None or array.flags.c_contiguous
    return 0 if array is None else int(array.ctypes.data)


def device_array(values: np.ndarray[Any, Any], *, misalignment: int | None = 0, writable: bool = False) -> Any:
    """A copy of ``values`` among NaNs (zeros for integers), between pages that a kernel may neither read nor write.

    Args:
        values: any array.
        misalignment: where it begins, in elements behind a multiple of 256 bytes; None lets it end where the page does,
            so that not even one element behind it can be read.
        writable: whether a kernel may write it; see `check_surroundings`.
    """
    pages = -(-(values.nbytes + 512) // mmap.PAGESIZE)
    size = pages * mmap.PAGESIZE
    start = _map_pages(size + 2 * mmap.PAGESIZE) + mmap.PAGESIZE
    buffer = (ctypes.c_byte * size).from_address(start)
    weakref.finalize(buffer, _LIBC.munmap, start - mmap.PAGESIZE, size + 2 * mmap.PAGESIZE).atexit = False
    whole = np.frombuffer(buffer, values.dtype)
    if values.dtype.kind == "f":
        whole[...] = np.nan
    slack = size - values.nbytes
    offset = slack if misalignment is None else slack // 256 * 256 + misalignment * values.itemsize
    first = (offset if offset <= slack else offset - 256) // values.itemsize
    copy = whole[first : first + values.size].reshape(values.shape)
    copy[...] = values
    if not writable:
        assert _LIBC.mprotect(start, size, mmap.PROT_READ) == 0
    for guard in (start - mmap.PAGESIZE, start + size):
        assert _LIBC.mprotect(guard, mmap.PAGESIZE, 0) == 0
    return copy


def huge_array(shape: Sequence[int], dtype: Any) -> Any:
    """Zeros, writable, that take no room where nobody writes them; more than the machine's memory is fine."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    start = _map_pages(size)
    buffer = (ctypes.c_byte * size).from_address(start)
    weakref.finalize(buffer, _LIBC.munmap, start, size).atexit = False
    return np.frombuffer(buffer, dtype).reshape(shape)


def check_surroundings(array: np.ndarray[Any, Any]) -> None:
    """Assert that nothing was written around an array that `device_array` made."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    first = (array.ctypes.data - whole.ctypes.data) // array.itemsize
    assert np.isnan(whole[:first]).all(), "written before the begin"
    assert np.isnan(whole[first + array.size :]).all(), "written behind the end"


def _map_pages(size: int) -> int:
    """Address of new memory that takes no room before it is used."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    start = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert start not in (None, 2**64 - 1), f"no {size} bytes of address space"
    return int(start)


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_LIBC = _load_libc()


def _translation_unit(source: str, kernels: Sequence[str]) -> str:
    assert kernels, "no kernel found"
    names = set(_DYNAMIC_SHARED.findall(source)) or {"cuda_on_host_dynamic_shared"}
    assert len(names) == 1, f"dynamic shared memory has several names: {names}"
    listed = ", ".join(f"CUDA_ON_HOST_KERNEL({name})" for name in kernels)
    return "\n".join(
        [
            '#include "cuda_on_host.h"',
            f"CUDA_ON_HOST_DYNAMIC_SHARED({names.pop()})",
            '#line 1 "source.cu"',
            source,
            f"CUDA_ON_HOST_KERNELS({listed})",
            "",
        ]
    )


def _compile(compiler: str, files: Mapping[str, str], image: Path) -> None:
    work = image.with_suffix(f".{os.getpid()}")
    work.mkdir(parents=True)
    for name, text in files.items():
        (work / name).write_text(text, encoding="utf-8")
    made = work / "image.so"
    command = [compiler, *_OPTIONS, "image.cc", "-o", made.name]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{' '.join(command)} in {work}:\n{run.stderr}"
    made.replace(image)
    for path in work.iterdir():
        path.unlink()
    work.rmdir()


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _load(image: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(image))
    library.cuda_on_host_launch.argtypes = [ctypes.c_char_p] + [ctypes.c_void_p] * 2 + [ctypes.c_uint, ctypes.c_void_p]
    library.cuda_on_host_error.restype = ctypes.c_char_p
    return library
