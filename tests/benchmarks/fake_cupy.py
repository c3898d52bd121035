"""CuPy, cuBLAS and cuSPARSE in host memory, as far as benchmarks/cupy_device.py calls them.

Functions do what the manuals say with what they are given, so that a wrong argument gives a wrong result. While a
stream is captured, work is noted instead of done; calls that CuPy itself refuses then are refused.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np

from tests.support.cuda_host_build import build_host_image, launch

_TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16)}
_HANDLES = {"cublas": 11, "cusparse": 22}


def _view(address, shape, dtype, strides):
    """An array at an address; strides in elements."""
    assert address
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    buffer = (ctypes.c_byte * (last * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(buffer, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * dtype.itemsize for stride in strides])


def _plain(argument):
    return argument.value if isinstance(argument, (ctypes.c_void_p, ctypes.c_longlong)) else argument


class FakeCuda:
    """One GPU. Attributes change what it does.

    ``can_capture``: whether streams can be captured. ``status``: what the libraries' functions answer.
    """

    def __init__(self):
        self.can_capture, self.status = True, 0
        self.streams, self.current, self.capturing = {}, None, None
        self.descriptors, self.library_streams, self.computed_with = {}, {}, []
        self.has_workspace = False

    def modules(self):
        """What to put into ``sys.modules``."""
        device = SimpleNamespace(
            get_cublas_handle=lambda: _HANDLES["cublas"], get_cusparse_handle=lambda: _HANDLES["cusparse"]
        )
        cuda = SimpleNamespace(Stream=lambda **_: _Stream(self), device=device)
        cupy = SimpleNamespace(cuda=cuda, RawModule=lambda code, options: _Module(self, code, options), __version__="0")
        cusparse = SimpleNamespace(
            getVersion=lambda _: 2,
            createCsr=lambda *a: self._describe("csr", a),
            createDnMat=lambda *a: self._describe("dense", a),
            destroySpMat=self.descriptors.pop,
            destroyDnMat=self.descriptors.pop,
            spMM_bufferSize=self._buffer_size,
        )
        libraries = SimpleNamespace(cublas=SimpleNamespace(getVersion=lambda _: 1), cusparse=cusparse)
        return {"cupy": cupy, "cupy_backends.cuda.libs": libraries}

    def library(self, name):
        """What `loaded_library` finds."""
        return SimpleNamespace(
            **{
                f"{name}{word}": getattr(self, f"_{name}{word}")
                for word in ("GemmStridedBatchedEx", "SetStream_v2", "SetWorkspace_v2")
            }
            if name == "cublas"
            else {f"{name}{word}": getattr(self, f"_{name}{word}") for word in ("SpMM", "SetStream")}
        )

    def do(self, stream, work):
        """Do some work in a stream, or note it where the stream is captured."""
        assert stream is not None, "no stream"
        if stream is self.capturing:
            stream.noted.append(work)
        else:
            work()

    def _describe(self, kind, arguments):
        number = len(self.descriptors) + 100
        self.descriptors[number] = (kind, *arguments)
        return number

    def _buffer_size(self, handle, *arguments):
        assert self.capturing is None, "CuPy refuses"
        assert handle == _HANDLES["cusparse"]
        assert len(arguments) == 9
        return 64

    def _cublasSetStream_v2(self, handle, stream):  # noqa: N802
        assert _plain(handle) == _HANDLES["cublas"]
        self.library_streams["cublas"] = self.streams[_plain(stream)]
        self.has_workspace = False
        return 0

    def _cublasSetWorkspace_v2(self, handle, address, size):  # noqa: N802
        assert _plain(handle) == _HANDLES["cublas"]
        assert _plain(address) % 256 == 0
        self.has_workspace = size.value >= 32 << 20
        return 0

    def _cusparseSetStream(self, handle, stream):  # noqa: N802
        assert _plain(handle) == _HANDLES["cusparse"]
        self.library_streams["cusparse"] = self.streams[_plain(stream)]
        return 0

    def _cublasGemmStridedBatchedEx(self, *arguments):  # noqa: N802
        handle, op_a, op_b, m, n, k, alpha, *rest = (_plain(argument) for argument in arguments)
        a, a_type, lda, a_stride, b, b_type, ldb, b_stride, beta, c, c_type, ldc, c_stride, count, compute, _ = rest
        assert (handle, op_a, op_b) == (_HANDLES["cublas"], 0, 0)
        assert self.has_workspace
        self.computed_with.append(compute)

        def work():
            left = _view(a, (count, m, k), _TYPES[a_type], (a_stride, 1, lda)).astype(np.float32)
            right = _view(b, (count, k, n), _TYPES[b_type], (b_stride, 1, ldb)).astype(np.float32)
            result = _view(c, (count, m, n), _TYPES[c_type], (c_stride, 1, ldc))
            scales = [_view(scale, (1,), np.dtype(np.float32), (1,))[0] for scale in (alpha, beta)]
            result[...] = (scales[0] * np.matmul(left, right) + (scales[1] * result if scales[1] else 0)).astype(
                result.dtype
            )

        self.do(self.library_streams.get("cublas"), work)
        return self.status

    def _cusparseSpMM(self, *arguments):  # noqa: N802
        handle, op_a, op_b, alpha, a, b, beta, c, compute, algorithm, buffer = (_plain(x) for x in arguments)
        assert (handle, op_a, op_b, compute) == (_HANDLES["cusparse"], 0, 0, 0)
        assert algorithm in (4, 6, 12)
        assert buffer

        def work():
            kind, rows, columns, nnz, pointers, indices, values, *types, value_type = self.descriptors[a]
            assert (kind, types) == ("csr", [2, 2, 0])
            matrix = np.zeros((rows, columns), np.float32)
            counts = np.diff(_view(pointers, (rows + 1,), np.dtype(np.int32), (1,)))
            matrix[np.repeat(np.arange(rows), counts), _view(indices, (nnz,), np.dtype(np.int32), (1,))] = _view(
                values, (nnz,), _TYPES[value_type], (1,)
            )
            right, result = (self._matrix(descriptor) for descriptor in (b, c))
            assert [_view(scale, (1,), np.dtype(np.float32), (1,))[0] for scale in (alpha, beta)] == [1, 0]
            result[...] = (matrix @ right.astype(np.float32)).astype(result.dtype)

        self.do(self.library_streams.get("cusparse"), work)
        return self.status

    def _matrix(self, descriptor):
        kind, rows, columns, leading, address, value_type, order = self.descriptors[descriptor]
        assert (kind, order) == ("dense", 2)
        return _view(address, (rows, columns), _TYPES[value_type], (leading, 1))


class _Stream:
    def __init__(self, cuda):
        self.cuda, self.ptr, self.noted, self.before = cuda, len(cuda.streams) + 1, [], []
        self.is_broken = False
        cuda.streams[self.ptr] = self

    def __enter__(self):
        self.before.append(self.cuda.current)
        self.cuda.current = self

    def __exit__(self, *_):
        self.cuda.current = self.before.pop()

    def begin_capture(self):
        if not self.cuda.can_capture:
            self.is_broken = True
            raise RuntimeError("cannot be captured")
        self.cuda.capturing, self.noted = self, []

    def end_capture(self):
        assert self.cuda.capturing is self
        self.cuda.capturing = None
        work = list(self.noted)
        # Into a stream whose capture failed, nothing is launched, and nobody is told.
        return SimpleNamespace(upload=lambda _: None, launch=lambda to: to.is_broken or [one() for one in work])

    def synchronize(self):
        assert self.cuda.capturing is None


class _Module:
    def __init__(self, cuda, code, options):
        assert any(option.startswith("-I") for option in options)
        self.cuda, self.image = cuda, build_host_image(code)

    def get_function(self, name):
        def call(grid, block, arguments):
            assert all(argument.dtype == np.int64 for argument in arguments)
            words = [ctypes.c_longlong(int(argument)) for argument in arguments]
            self.cuda.do(self.cuda.current, lambda: launch(self.image, name, grid, block, words))

        return call
