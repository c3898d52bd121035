"""The native custom-op library: where it is, how a session gets it, and which kernels it runs.

onnxruntime is imported lazily: locating the library or converting a model does not need it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onnx_sparseconv.errors import NativeLibraryError

if TYPE_CHECKING:
    import onnxruntime

CpuIsa = Literal["auto", "portable", "avx2", "avx512"]

# Set to the path of a library to use it instead of the one in the package.
LIBRARY_VARIABLE = "ONNX_SPARSECONV_LIBRARY"
CPU_ISA_KEY = "sparseconv.cpu_isa"
CPU_THREADS_KEY = "sparseconv.cpu_threads"
_MOST_CPU_THREADS = 65536
_REGISTERED_KEY = "sparseconv.registered"
_FILE_NAME = "libonnx_sparseconv" + (".dll" if sys.platform == "win32" else ".so")


@dataclass(frozen=True)
class KernelInfo:
    """One node of a live session, as the library runs it.

    Attributes:
        node: name of the node.
        op: which of our ops.
        provider: short name of the execution provider, ``cpu``.
        kernel: what runs, for example ``cpu.avx512``.
        runs: calls since the session was created.
    """

    node: str
    op: str
    provider: str
    kernel: str
    runs: int


def library_path() -> Path:
    """Path of the native library: ``$ONNX_SPARSECONV_LIBRARY`` if it is set, else the one that pip installed.

    Raises:
        NativeLibraryError: there is no such file.
    """
    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        named = Path(override)
        if not named.is_file():
            raise NativeLibraryError(f"{LIBRARY_VARIABLE} names {named}, which is not a file; correct or unset it")
        return named.resolve()
    beside = Path(str(resources.files("onnx_sparseconv.custom_ops") / _FILE_NAME))
    for path in (beside, _installed_file()):
        if path is not None and path.is_file():
            return path
    raise NativeLibraryError(
        f"the native library is missing: no {beside}; reinstall onnx-sparseconv (pip builds the library), "
        f"or set {LIBRARY_VARIABLE} to the path of one that you built"
    )


def _installed_file() -> Path | None:
    """Where pip put the library: elsewhere than this file when Python runs from a source tree."""
    try:
        distribution = importlib.metadata.distribution("onnx-sparseconv")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(f"onnx_sparseconv/custom_ops/{_FILE_NAME}")))


def register(session_options: onnxruntime.SessionOptions, *, cpu_isa: CpuIsa = "auto") -> None:
    """Register the ops on ``session_options``, so that its sessions run them with the native kernels.

    The CPU kernels cut their work for as many threads as the options say by now (``intra_op_num_threads``), else for as
    many as there are processors. A second call on the same options does nothing, unless these ask for another number of
    threads by then, or it for another instruction set.

    Args:
        session_options: the options, changed in place.
        cpu_isa: instruction set of the CPU kernels: ``auto`` for the best that the machine has, else ``portable``,
            ``avx2`` or ``avx512``.

    Raises:
        NativeLibraryError: the library is missing, cannot be loaded, or refuses (an instruction set that the machine
            does not have, an ONNX Runtime that is too old); or it is registered on the options for something else.
    """
    threads = _threads_of(session_options)
    asked = {"cpu_isa": cpu_isa, "intra_op_num_threads": threads}
    registered = _config_entry(session_options, _REGISTERED_KEY)
    if registered is not None:
        for what, before in json.loads(registered).items():
            if before != asked[what]:
                raise NativeLibraryError(
                    f"the ops are already registered on these session options with {what}={before!r}, "
                    f"not {asked[what]!r}; make new session options"
                )
        return
    path = library_path()
    session_options.add_session_config_entry(CPU_ISA_KEY, cpu_isa)
    if threads > 0 and _config_entry(session_options, CPU_THREADS_KEY) is None:
        session_options.add_session_config_entry(CPU_THREADS_KEY, str(threads))
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime raises its own types, and RuntimeError where dlopen fails
        raise NativeLibraryError(f"the native library {path} could not be registered: {error}") from error
    session_options.add_session_config_entry(_REGISTERED_KEY, json.dumps(asked))


def _threads_of(session_options: onnxruntime.SessionOptions) -> int:
    """Threads of a session's runs; 0 where ONNX Runtime chooses, or all sessions share a pool."""
    if not getattr(session_options, "use_per_session_threads", True):  # 1.20 has no such property
        return 0
    return min(int(session_options.intra_op_num_threads), _MOST_CPU_THREADS)


def describe_kernels() -> list[KernelInfo]:
    """The kernels of all live sessions of this process, in the order of their creation.

    Raises:
        NativeLibraryError: the library is missing or cannot be loaded.
    """
    path = library_path()
    try:
        describe = ctypes.CDLL(str(path)).SparseConvDescribeKernels
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"the native library {path} could not be loaded: {error}") from error
    describe.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    describe.restype = ctypes.c_size_t
    capacity = 0
    # Kernels may come and go between two calls, so the size that was asked for may no longer be enough.
    while (needed := describe(buffer := ctypes.create_string_buffer(capacity + 1), capacity)) > capacity:
        capacity = needed
    if needed == 0:
        raise NativeLibraryError("the native library could not describe its kernels: out of memory")
    return [KernelInfo(**record) for record in json.loads(buffer.value)]


def _config_entry(session_options: onnxruntime.SessionOptions, key: str) -> str | None:
    try:
        return str(session_options.get_session_config_entry(key))
    except RuntimeError:  # that is how onnxruntime says that there is no such entry
        return None
