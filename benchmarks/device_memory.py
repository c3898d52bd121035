"""Memory of the GPU through the CUDA driver: what several frameworks read and write in turn, at addresses.

Sessions of ONNX Runtime and kernels that CuPy launches work on the same inputs and outputs here, uploaded once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from onnx_sparseconv.runtime import binding

Array = np.ndarray[Any, Any]
# All bits set is NaN in float and float16: what a run was to write and did not is found.
POISON = 0xFF


class DeviceMemoryError(Exception):
    """The driver refuses; the text says what."""


class Memory(Protocol):
    """Memory of a device. Addresses are multiples of 256."""

    def allocate(self, size_bytes: int) -> int:
        """Address of new memory, until `close`; its content is not defined."""

    def write(self, address: int, values: Array) -> None:
        """Copy an array there."""

    def copy(self, to: int, address: int, size_bytes: int) -> None:
        """Copy bytes from one address to another."""

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """Set every byte."""

    def read(self, address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Copy an array from there."""

    def close(self) -> None:
        """Give back all of it."""


def upload(memory: Memory, values: Array) -> int:
    """Address of a copy of an array."""
    address = memory.allocate(values.nbytes)
    memory.write(address, values)
    return address


def open_memory() -> Memory:
    """Memory of the first GPU; host memory where ONNX Runtime's CPU provider stands in for CUDA, as in tests."""
    return GpuMemory() if binding.DEVICE_TYPES["cuda"] == "cuda" else HostMemory()


class GpuMemory:
    """Memory of the first GPU, in the context that ONNX Runtime and CuPy use as well. All calls wait for the GPU."""

    def __init__(self) -> None:
        """Make the context current in this thread.

        Raises:
            DeviceMemoryError: there is no driver, or no GPU.
        """
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceMemoryError(f"no NVIDIA driver: {error}") from error
        self._allocated: list[int] = []
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size_bytes: int) -> int:
        """See `Memory`.

        Raises:
            DeviceMemoryError: there is not so much.
        """
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size_bytes, 1)))
        self._allocated.append(address.value)
        return address.value

    def write(self, address: int, values: Array) -> None:
        """See `Memory`."""
        values = np.ascontiguousarray(values)
        pointer, size = ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(values.nbytes)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), pointer, size)
        self._call("cuCtxSynchronize")

    def copy(self, to: int, address: int, size_bytes: int) -> None:
        """See `Memory`."""
        self._call("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
        self._call("cuCtxSynchronize")

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """See `Memory`."""
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size_bytes))
        self._call("cuCtxSynchronize")

    def read(self, address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """See `Memory`."""
        values = np.empty(shape, dtype)
        self._call("cuCtxSynchronize")
        pointer, size = ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(values.nbytes)
        self._call("cuMemcpyDtoH_v2", pointer, ctypes.c_uint64(address), size)
        return values

    def close(self) -> None:
        """See `Memory`. Whether the driver takes it back makes no difference: it does not after an error on the GPU,
        whose report must not be lost to one from here.
        """
        while self._allocated:
            self._cuda.cuMemFree_v2(ctypes.c_uint64(self._allocated.pop()))

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise DeviceMemoryError(f"{name} gives CUDA error {code}")


class HostMemory:
    """The same in host memory."""

    _ALIGNMENT = 256

    def __init__(self) -> None:
        """Nothing is allocated yet."""
        self._allocated: list[Array] = []

    def allocate(self, size_bytes: int) -> int:
        """See `Memory`."""
        room = np.empty(size_bytes + self._ALIGNMENT, np.uint8)
        self._allocated.append(room)
        return int(-(-room.ctypes.data // self._ALIGNMENT) * self._ALIGNMENT)

    def write(self, address: int, values: Array) -> None:
        """See `Memory`."""
        values = np.ascontiguousarray(values)
        ctypes.memmove(address, values.ctypes.data, values.nbytes)

    def copy(self, to: int, address: int, size_bytes: int) -> None:
        """See `Memory`."""
        ctypes.memmove(to, address, size_bytes)

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """See `Memory`."""
        ctypes.memset(address, byte, size_bytes)

    def read(self, address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """See `Memory`."""
        size = math.prod(shape) * dtype.itemsize
        return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)

    def close(self) -> None:
        """See `Memory`."""
        self._allocated.clear()
