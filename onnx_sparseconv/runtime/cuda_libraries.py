"""The CUDA libraries of ONNX Runtime's CUDA provider: loading those that pip installed, and asking their versions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# In the order of their dependencies: a library is found by its name once one of that name is loaded. The file names of
# CUDA 13's and of CUDA 12's; cuFFT and cuRAND count their versions apart from CUDA's.
_NAMES = {
    "13": (
        *("libcudart.so.13", "libnvrtc.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10"),
        *("libnvJitLink.so.13", "libcufft.so.12", "libcudnn.so.9"),
    ),
    "12": (
        *("libcudart.so.12", "libnvrtc.so.12", "libcublasLt.so.12", "libcublas.so.12", "libcurand.so.10"),
        *("libnvJitLink.so.12", "libcufft.so.11", "libcudnn.so.9"),
    ),
}


@dataclass(frozen=True)
class CudaLibraries:
    """Versions of the libraries that this process has loaded; empty where one is not loaded.

    Attributes:
        runtime: of the CUDA runtime, such as ``13.0``.
        cudnn: of cuDNN, such as ``9.19.0``.
        built_for: the CUDA that this onnxruntime was built for.
    """

    runtime: str
    cudnn: str
    built_for: str


@functools.cache
def load_cuda_libraries(runtime: ModuleType) -> tuple[str, ...]:
    """Load the CUDA and cuDNN libraries of NVIDIA's Python packages, so that ONNX Runtime's CUDA provider finds them.

    Whatever is not there is left out: the libraries may also be installed in the system, or loaded already, by PyTorch,
    say. Whether all is there shows when the provider is used.

    Args:
        runtime: the onnxruntime module.

    Returns:
        The files that were loaded.
    """
    major = built_for_cuda(runtime).partition(".")[0]
    loaded = []
    for name in _NAMES.get(major, ()):
        path = find_library(name, nvidia_directories())
        if path is None or _loaded(name) is not None:
            continue
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            loaded.append(str(path))
    return tuple(loaded)


def nvidia_directories() -> tuple[Path, ...]:
    """Where NVIDIA's Python packages lie: ``site-packages/nvidia``, in every place that Python imports from."""
    spec = importlib.util.find_spec("nvidia")
    return tuple(Path(place) for place in (spec.submodule_search_locations or ())) if spec is not None else ()


def find_library(name: str, directories: Sequence[Path]) -> Path | None:
    """A library of one of NVIDIA's packages, ``<package>/lib/<name>``; None when none has it."""
    for directory in directories:
        for path in sorted(directory.glob(f"*/lib/{name}")):
            return path
    return None


def built_for_cuda(runtime: ModuleType) -> str:
    """The CUDA version that an onnxruntime was built for, such as ``13.0``; empty for one without CUDA."""
    return str(getattr(runtime, "cuda_version", None) or "")


def read_cuda_libraries(runtime: ModuleType) -> CudaLibraries:
    """Ask the libraries that this process has loaded by now: after a session on CUDA was made, those that it uses."""
    major = built_for_cuda(runtime).partition(".")[0]
    return CudaLibraries(_runtime_version(major), _cudnn_version(), built_for_cuda(runtime))


def _runtime_version(major: str) -> str:
    library = _loaded(f"libcudart.so.{major}") if major else None
    number = ctypes.c_int()
    if library is None or library.cudaRuntimeGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _cudnn_version() -> str:
    library = _loaded("libcudnn.so.9")
    if library is None:
        return ""
    library.cudnnGetVersion.restype = ctypes.c_size_t
    number = int(library.cudnnGetVersion())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _loaded(name: str) -> ctypes.CDLL | None:
    """A library that is loaded already; never loads one."""
    if sys.platform == "win32":
        return None
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
