"""What this machine is: versions, processor, GPU, commit. Every report that holds a time carries it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from onnx_sparseconv.version import __version__

DISTRIBUTION = "onnx-sparseconv"
_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent
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


@dataclass(frozen=True)
class Environment:
    """Hardware and software under a measurement.

    Attributes:
        cpu: model of the processor.
        cpu_cores: logical processors of the machine.
        cpu_cores_usable: those that this process may use.
        cuda: driver and GPUs.
        platform: operating system and machine.
        versions: of the packages that matter; None where one is not installed.
        commit: git commit when the package is run from a checkout, with ``-dirty`` after local changes; else None.
    """

    cpu: str
    cpu_cores: int
    cpu_cores_usable: int
    cuda: CudaDriver
    platform: str
    versions: dict[str, str | None]
    commit: str | None


def read_environment() -> Environment:
    """Look at this machine and this process."""
    return Environment(
        cpu=cpu_model(),
        cpu_cores=os.cpu_count() or 1,
        cpu_cores_usable=usable_cores(),
        cuda=read_cuda_driver(),
        platform=platform.platform(),
        versions=package_versions(),
        commit=git_commit(),
    )


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, None when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of every package that takes part."""
    names = ("onnx", "onnx-graphsurgeon", "numpy", "onnxruntime", "onnxruntime-gpu")
    return {
        DISTRIBUTION: __version__,
        "python": platform.python_version(),
        **{name: distribution_version(name) for name in names},
    }


def usable_cores() -> int:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def git_commit(directory: Path = _PACKAGE_DIRECTORY.parent) -> str | None:
    """Commit of the checkout in ``directory``, or None when it is not the root of one."""
    if not (directory / ".git").exists():
        return None
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
