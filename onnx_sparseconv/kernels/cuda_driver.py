"""What the CUDA driver of this machine says, through ctypes; nothing is loaded before it is asked for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

_CU_COMPUTE_CAPABILITY_MAJOR, _CU_COMPUTE_CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: as the driver calls it.
        compute_capability: such as ``9.0``.
        memory_bytes: its memory.
    """

    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True)
class CudaDriver:
    """What the CUDA driver says.

    Attributes:
        version: release of the kernel driver, empty when it cannot be read.
        cuda_version: newest CUDA that it supports, such as ``13.0``; empty without a driver.
        gpus: the devices that this process may use.
        problem: why there is no usable GPU; empty when there is one.
    """

    version: str
    cuda_version: str
    gpus: tuple[Gpu, ...]
    problem: str


def read_cuda_driver() -> CudaDriver:
    """Ask the CUDA driver for its devices; never raises."""
    release = _driver_release()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return CudaDriver(release, "", (), "no NVIDIA driver (libcuda.so.1 cannot be loaded)")
    if code := cuda.cuInit(0):
        return CudaDriver(release, "", (), f"the NVIDIA driver does not start (cuInit gives error {code})")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_read_gpu(cuda, index) for index in range(count.value))
    return CudaDriver(release, version, gpus, "" if gpus else "the NVIDIA driver sees no GPU")


def _read_gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    memory = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    parts = []
    for attribute in (_CU_COMPUTE_CAPABILITY_MAJOR, _CU_COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(str(value.value))
    return Gpu(name.value.decode(errors="replace"), ".".join(parts), memory.value)


def _driver_release(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Release of the NVIDIA kernel driver: the first word of the first line that looks like ``580.65.06``."""
    try:
        first_line = path.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first_line.split() if word[0].isdigit() and "." in word), "")
