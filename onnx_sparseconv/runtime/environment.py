"""What this machine is: versions, processor, GPU, commit. Every report that holds a time carries it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from onnx_sparseconv.kernels.cuda_driver import CudaDriver, read_cuda_driver
from onnx_sparseconv.kernels.worker import usable_cores
from onnx_sparseconv.version import __version__

DISTRIBUTION = "onnx-sparseconv"
_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent


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
