"""CUDA sources compiled for the CPU by g++, and launched through ctypes with numpy arrays.

What is emulated, and which errors of a kernel are caught, is said in ``cuda_on_host/cuda_on_host.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import math
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx_sparseconv.kernels.device_sources import read_device_sources
from tests.support.native_build import ROOT, find_tool
from tests.support.ptx_on_host import translate_inline_ptx

SHIM = Path(__file__).parent / "cuda_on_host"
CACHE = ROOT / "build/cuda_on_host"
_OPTIONS = (
    *("-std=c++17", "-O1", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-parameter"),
    *("-I", str(ROOT / "onnx_sparseconv/custom_ops/native")),  # for half.h
)
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^{;]*?\)\s+)?(\w+)\s*\(')
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\w+\)\s+)?([\w\s]+?)\s+(\w+)\s*\[\s*\]\s*;")


class KernelError(Exception):
    """What the emulation found wrong with a kernel."""


def build_host_image(source: str, headers: Mapping[str, str] | None = None) -> Path:
    """Compile a CUDA source for the CPU.

    Args:
        source: CUDA C++ with ``extern "C" __global__`` kernels; inline PTX only as `ptx_on_host` knows it.
        headers: files that it may include beside those of ``kernels/cuda``, or in their stead. The wrappers of PTX in
            ``intrinsics.cuh`` are always those of the emulation.

    Returns:
        A shared object as ``cuda_on_host.h`` describes it. Equal sources give the same file.
    """
    compiler, files, image = _find_image(source, headers or {})
    if not image.is_file():
        with _one_at_a_time(image.stem[:2]):
            if not image.is_file():
                _compile(compiler, files, image)
    return image


def compile_kernels(sources: Sequence[str]) -> None:
    """Compile what several processes need at once, `kernel_image` of these sources: each one a part of it."""
    texts = read_device_sources()
    for source in sources:
        compiler, files, image = _find_image(texts[source], {})
        if not image.is_file():
            with _one_at_a_time(image.stem[:2], waits=False) as is_mine:
                if is_mine and not image.is_file():
                    _compile(compiler, files, image)


def _find_image(source: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str], Path]:
    """The compiler, the files that it takes, and the place of what it makes."""
    files = {name: text for name, text in read_device_sources().items() if not name.endswith(".cu")}
    files |= {**headers, "source.cu": translate_inline_ptx(source)}
    files |= {path.name: path.read_text(encoding="utf-8") for path in SHIM.iterdir() if path.suffix in {".h", ".cuh"}}
    runtime = (SHIM / "cuda_on_host.cc").read_text(encoding="utf-8")
    compiler = find_tool(os.environ.get("CXX", "g++"), "g++")
    key = hashlib.sha256(
        repr((sorted(files.items()), runtime, _OPTIONS, _compiler_version(compiler))).encode()
    ).hexdigest()
    return compiler, files, CACHE / f"{key[:32]}.so"


@contextlib.contextmanager
def _one_at_a_time(name: str, *, waits: bool = True) -> Iterator[bool]:
    """No other process is within it under this name; yields whether that is so, which it may not be without waiting."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


@functools.cache
def kernel_image(source: str) -> Path:
    """The kernels of one of the sources that the native library carries, ``library_kernels.cu`` say."""
    return build_host_image(read_device_sources()[source])


def launch(
    image: Path,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    params: Sequence[Any],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> None:
    """Run a kernel to its end.

    Args:
        image: what `build_host_image` returned.
        kernel: its name.
        grid: blocks; missing axes are 1.
        block: threads of a block; missing axes are 1.
        params: the kernel's arguments in order, ctypes values or structures; see `address`.
        shared_bytes: dynamic shared memory.
        cluster: blocks of a cluster, along the grid's first axis.

    Raises:
        KernelError: there is no such kernel, or it did what a GPU forbids.
    """
    library = _load(image)
    three = ctypes.c_uint * 3
    pointers = (ctypes.c_void_p * max(len(params), 1))(*(ctypes.addressof(p) for p in params))
    sizes = [three(*[*axes, 1, 1][:3]) for axes in (grid, block)]
    status = library.cuda_on_host_launch_clusters(kernel.encode(), *sizes, cluster, shared_bytes, pointers)
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


def _compile(compiler: str, files: Mapping[str, str], image: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=CACHE))
    for name, text in files.items():
        (work / name).write_text(text, encoding="utf-8")
    (work / "image.cc").write_text(_translation_unit(_preprocess(compiler, work)), encoding="utf-8")
    _run([compiler, *_OPTIONS, "image.cc", str(_runtime(compiler)), "-o", "image.so"], work)
    (work / "image.so").replace(image)
    shutil.rmtree(work)


@functools.cache
def _runtime(compiler: str) -> Path:
    """The part of the emulation that is the same in all images, as an object file."""
    names = ("cuda_on_host.cc", "cuda_on_host.h", "tensor_core.h")
    texts = [(SHIM / name).read_text(encoding="utf-8") for name in names]
    key = hashlib.sha256(repr((texts, _OPTIONS, _compiler_version(compiler))).encode()).hexdigest()
    file = CACHE / f"{key[:32]}.o"
    with _one_at_a_time("runtime"):
        if not file.is_file():
            made = file.with_suffix(f".{os.getpid()}")
            options = [option for option in _OPTIONS if option != "-shared"]
            _run([compiler, *options, "-c", "-x", "c++", str(SHIM / "cuda_on_host.cc"), "-o", str(made)], SHIM)
            made.replace(file)
    return file


def _preprocess(compiler: str, work: Path) -> str:
    """The source with its own macros expanded, but not those that stand for CUDA."""
    headers = work / "without_intrinsics"
    headers.mkdir()
    for file in work.glob("*.*"):
        text = "" if file.name in {"intrinsics.cuh", "cuda_on_host.h", "ptx.h"} else file.read_text(encoding="utf-8")
        (headers / file.name).write_text(text, encoding="utf-8")
    return _run([compiler, "-E", "-P", "-x", "c++", "source.cu"], headers)


def _translation_unit(preprocessed: str) -> str:
    kernels = ", ".join(f"CUDA_ON_HOST_KERNEL({name})" for name in _KERNEL.findall(preprocessed))
    assert kernels, "no kernel found"
    shared = set(_DYNAMIC_SHARED.findall(preprocessed)) or {("char", "cuda_on_host_dynamic_shared")}
    assert len(shared) == 1, f"dynamic shared memory has several names: {shared}"
    lines = [
        '#include "cuda_on_host.h"',
        "CUDA_ON_HOST_DYNAMIC_SHARED({}, {})".format(*shared.pop()),
        '#include "source.cu"',
        f"CUDA_ON_HOST_KERNELS({kernels})",
    ]
    return "\n".join(lines) + "\n"


def _run(command: Sequence[str], work: Path) -> str:
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{' '.join(command)} in {work}:\n{run.stderr}"
    return run.stdout


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _load(image: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(image))
    library.cuda_on_host_launch_clusters.argtypes = [
        *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
    ]
    library.cuda_on_host_error.restype = ctypes.c_char_p
    return library
