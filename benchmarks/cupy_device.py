"""CuPy as the device of `lowered_runs`: cuBLAS and cuSPARSE, and the kernels that lower, in one stream.

What decides anything is in `lowering` and `lowered_runs`, which need no GPU; this file only calls. Nothing of CuPy is
imported before a device is made. CuPy refuses to call cuBLAS and cuSPARSE while a CUDA graph is recorded; both can be
recorded, so the products themselves are called in the libraries that CuPy has loaded, with its handles.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from device_memory import Memory, upload
from lowered_runs import Address, Csr, Product, Runs
from lowering import Lowering, kernel_source, launch_shape

import onnx_sparseconv.kernels

Array = np.ndarray[Any, Any]
INCLUDE = Path(onnx_sparseconv.kernels.__file__).parent / "cuda"
# Of cuBLAS: cublasOperation_t, cublasGemmAlgo_t, cublasComputeType_t.
_CUBLAS_OP_N = 0
_CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99
_CUBLAS_COMPUTE_32F = 68
_CUBLAS_COMPUTE_32F_FAST_TF32 = 77
# What cuBLAS's manual recommends for Hopper.
_CUBLAS_WORKSPACE_BYTES = 32 << 20
# Of cudaDataType_t.
_CUDA_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2}
_CUDA_R_32F = 0
# Of cuSPARSE: cusparseOperation_t, cusparseIndexType_t, cusparseIndexBase_t, cusparseOrder_t, cusparseSpMMAlg_t.
_CUSPARSE_NO_TRANSPOSE = 0
_CUSPARSE_INDEX_32I = 2
_CUSPARSE_BASE_ZERO = 0
_CUSPARSE_ORDER_ROW = 2
# CUSPARSE_SPMM_CSR_ALG1, ALG2 and ALG3; cuSPARSE's manual recommends the second one for matrices stored by rows.
SPARSE_ALGORITHMS = (6, 4, 12)


class CupyDevice:
    """The first GPU through CuPy.

    Attributes:
        sparse_algorithms: see `LoweringDevice`.
    """

    sparse_algorithms = SPARSE_ALGORITHMS

    def __init__(self, memory: Memory, lowering: Lowering, dtype: np.dtype[Any]) -> None:
        """Compile the kernels of a layer.

        Args:
            memory: where everything is allocated.
            lowering: of the layer.
            dtype: float32 or float16.

        Raises:
            ImportError: there is no CuPy, or not the libraries that it needs.
        """
        self._cupy: Any = importlib.import_module("cupy")
        # As attributes: then the package loads NVIDIA's libraries first, wherever pip has put them.
        libraries: Any = importlib.import_module("cupy_backends.cuda.libs")
        self._cublas, self._cusparse = libraries.cublas, libraries.cusparse
        self._memory, self._lowering, self._dtype = memory, lowering, dtype
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._module = self._cupy.RawModule(
            code=kernel_source(lowering, dtype), options=("--std=c++17", f"-I{INCLUDE}")
        )
        self._lower, self._finish = (self._module.get_function(name) for name in ("lower", "finish"))
        # Read by the host at every call.
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        device = self._cupy.cuda.device
        with self._stream:
            self._cublas_handle, self._cusparse_handle = device.get_cublas_handle(), device.get_cusparse_handle()
        self._blas, self._sparse = loaded_library("cublas"), loaded_library("cusparse")
        self._workspace = memory.allocate(_CUBLAS_WORKSPACE_BYTES)
        self._descriptors: list[Callable[[], None]] = []
        self._buffers: dict[int, Address] = {}

    @property
    def versions(self) -> dict[str, str]:
        """Of CuPy and of the libraries that it calls."""
        return {
            "cupy": str(self._cupy.__version__),
            "cublas": str(self._cublas.getVersion(self._cublas_handle)),
            "cusparse": str(self._cusparse.getVersion(self._cusparse_handle)),
        }

    def allocate(self, size_bytes: int) -> Address:
        """See `LoweringDevice`."""
        address = self._memory.allocate(size_bytes)
        self._memory.fill(address, size_bytes, 0)
        return address

    def upload(self, values: Array) -> Address:
        """See `LoweringDevice`."""
        return upload(self._memory, values)

    def lower(self, x: Address, lowered: Address, images: int, strides: tuple[int, int]) -> None:
        """See `LoweringDevice`."""
        grid, threads = launch_shape("lower", self._lowering, self._dtype.itemsize, images)
        self._lower(grid, (threads,), (*_words(x, lowered), *_words(*strides)))

    def finish(self, product: Address, y: Address, bias: Address, images: int, strides: tuple[int, int]) -> None:
        """See `LoweringDevice`."""
        grid, threads = launch_shape("finish", self._lowering, self._dtype.itemsize, images)
        self._finish(grid, (threads,), (*_words(product, y, bias), *_words(*strides)))

    def multiply(self, weight: Address, lowered: Address, product: Address, shape: Product) -> None:
        """See `LoweringDevice`.

        cuBLAS stores matrices by columns: what it computes is the product of the transposes.
        """
        kind = _CUDA_TYPES[self._dtype]
        fast = shape.tf32 and self._dtype == np.float32
        status = self._blas.cublasGemmStridedBatchedEx(
            _pointer(self._cublas_handle),
            *(_CUBLAS_OP_N, _CUBLAS_OP_N),
            *(shape.columns, shape.rows, shape.depth),
            _pointer(self._one.ctypes.data),
            *(_pointer(lowered), kind, shape.columns, ctypes.c_longlong(shape.depth * shape.columns)),
            *(_pointer(weight), kind, shape.depth, ctypes.c_longlong(0)),
            _pointer(self._zero.ctypes.data),
            *(_pointer(product), kind, shape.columns, ctypes.c_longlong(shape.rows * shape.columns)),
            shape.count,
            _CUBLAS_COMPUTE_32F_FAST_TF32 if fast else _CUBLAS_COMPUTE_32F,
            _CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
        _check(status, "cublasGemmStridedBatchedEx")

    def sparse_product(
        self, csr: Csr, lowered: Address, product: Address, columns: int, algorithm: int
    ) -> Callable[[], None]:
        """See `LoweringDevice`. Sums are floats in either type."""
        api, kind = self._cusparse, _CUDA_TYPES[self._dtype]
        weight = api.createCsr(
            *(csr.rows, csr.columns, csr.nonzeros, csr.pointers, csr.indices, csr.values),
            *(_CUSPARSE_INDEX_32I, _CUSPARSE_INDEX_32I, _CUSPARSE_BASE_ZERO, kind),
        )
        # Rows of a lowered matrix that are only there for cuBLAS stay outside.
        right = api.createDnMat(csr.columns, columns, columns, lowered, kind, _CUSPARSE_ORDER_ROW)
        result = api.createDnMat(csr.rows, columns, columns, product, kind, _CUSPARSE_ORDER_ROW)
        self._descriptors += [
            lambda: api.destroySpMat(weight),
            lambda: api.destroyDnMat(right),
            lambda: api.destroyDnMat(result),
        ]
        one, zero = self._one.ctypes.data, self._zero.ctypes.data
        transposes = (_CUSPARSE_NO_TRANSPOSE, _CUSPARSE_NO_TRANSPOSE)
        with self._stream:
            size = api.spMM_bufferSize(
                self._cusparse_handle, *transposes, one, weight, right, zero, result, _CUDA_R_32F, algorithm
            )
        if size not in self._buffers:
            # Products follow each other in the stream: those that want the same size can share it.
            self._buffers[size] = self._memory.allocate(size)
        buffer = self._buffers[size]

        def multiply() -> None:
            status = self._sparse.cusparseSpMM(
                *(_pointer(self._cusparse_handle), *transposes),
                *(_pointer(one), _pointer(weight), _pointer(right), _pointer(zero), _pointer(result)),
                *(_CUDA_R_32F, algorithm, _pointer(buffer)),
            )
            _check(status, "cusparseSpMM")

        return multiply

    def recorded(self, runs: Sequence[Callable[[], None]]) -> Runs:
        """See `LoweringDevice`. Each function runs once outside of a graph first: libraries allocate when they are
        first called.
        """
        self._hand_over(self._stream)
        with self._stream:
            for run in runs:
                run()
        self._stream.synchronize()
        # A failed capture may leave its stream unusable: what was recorded before must not be launched there.
        recording = self._cupy.cuda.Stream(non_blocking=True)
        self._hand_over(recording)
        try:
            return RecordedRuns(self._stream, [self._capture(run, recording) for run in runs], "graph")
        except Exception:  # whatever a library raises that cannot be captured
            return RecordedRuns(self._stream, [self._in_stream(run) for run in runs], "stream")
        finally:
            self._hand_over(self._stream)

    def close(self) -> None:
        """Give back what is not memory."""
        while self._descriptors:
            self._descriptors.pop()()

    def _hand_over(self, to: Any) -> None:  # noqa: ANN401
        """Let the libraries work in a stream: other devices, which have other streams, share CuPy's handles."""
        stream = _pointer(to.ptr)
        handle = _pointer(self._cublas_handle)
        _check(self._blas.cublasSetStream_v2(handle, stream), "cublasSetStream")
        # A new stream takes the workspace away. Without one, a recorded graph would allocate it at every replay.
        size = ctypes.c_size_t(_CUBLAS_WORKSPACE_BYTES)
        _check(self._blas.cublasSetWorkspace_v2(handle, _pointer(self._workspace), size), "cublasSetWorkspace")
        _check(self._sparse.cusparseSetStream(_pointer(self._cusparse_handle), stream), "cusparseSetStream")

    def _capture(self, run: Callable[[], None], recording: Any) -> Callable[[], None]:  # noqa: ANN401
        with recording:
            recording.begin_capture()
            try:
                run()
            finally:
                graph = recording.end_capture()
        graph.upload(self._stream)
        return lambda: graph.launch(self._stream)

    def _in_stream(self, run: Callable[[], None]) -> Callable[[], None]:
        def launch() -> None:
            with self._stream:
                run()

        return launch


class RecordedRuns:
    """Launches on the copies in turn.

    Attributes:
        mode: ``graph`` or ``stream``.
    """

    def __init__(self, stream: Any, launches: Sequence[Callable[[], None]], mode: str) -> None:  # noqa: ANN401
        """Of a stream of CuPy and one function a copy."""
        self._stream, self._launches, self._next = stream, launches, 0
        self.mode = mode

    def __call__(self) -> None:
        """Run on the next copy and wait for the stream."""
        self._launch()
        self._stream.synchronize()

    def burst(self, runs: int) -> None:
        """Run several times and wait for the stream once."""
        for _ in range(runs):
            self._launch()
        self._stream.synchronize()

    def _launch(self) -> None:
        self._launches[self._next % len(self._launches)]()
        self._next += 1


class LibraryCallError(Exception):
    """A library refuses; the text says which function and its status."""


def loaded_library(name: str) -> ctypes.CDLL:
    """The library of CUDA that this process has loaded already, such as ``cublas``.

    Raises:
        LibraryCallError: there is none.
    """
    found = re.search(rf"/(lib{name}\.so\.\d+)[.\d]*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if found is None:
        raise LibraryCallError(f"lib{name} is not loaded")
    # By the name that CuPy's own modules ask for, not by its place: of two copies, this is the one they have.
    return ctypes.CDLL(found[1])


def _check(status: int, function: str) -> None:
    if status:
        raise LibraryCallError(f"{function} gives status {status}")


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _words(*values: int) -> tuple[np.int64, ...]:
    """Arguments of a kernel of 8 bytes each: addresses, or 64-bit numbers."""
    return tuple(np.int64(value) for value in values)
