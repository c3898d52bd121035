"""Where measurements are made: all that they must have in common to be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_sparseconv.converter.decisions import Decisions
from onnx_sparseconv.custom_ops.library import library_path
from onnx_sparseconv.errors import NativeLibraryError
from onnx_sparseconv.kernels.cuda_driver import read_cuda_driver
from onnx_sparseconv.kernels.worker import usable_cores
from onnx_sparseconv.runtime.environment import cpu_model
from onnx_sparseconv.runtime.session import PROVIDERS, Provider, import_onnxruntime
from onnx_sparseconv.version import __version__

Setting = Mapping[str, str | int | None]


def read_setting(provider: Provider, threads: int | None) -> Setting:
    """The facts that a measurement holds for.

    Raises:
        NativeLibraryError: onnxruntime or the native library is missing.
    """
    driver = read_cuda_driver() if provider == "cuda" else None
    gpu = driver.gpus[0] if driver is not None and driver.gpus else None
    return {
        "processor": cpu_model(),
        "cores": usable_cores(),
        "gpu": gpu.name if gpu is not None else None,
        "driver": driver.version if driver is not None else None,
        "onnxruntime": str(import_onnxruntime().__version__),
        "library": f"{__version__} {_digest(library_path())}",
        "provider": provider,
        "threads": threads,
    }


def differences(before: Mapping[str, Any], now: Setting) -> list[str]:
    """What is another than it was, in words; what is not recorded counts as equal."""
    return [
        f"{name} {_shown(before[name])}, now {_shown(value)}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def machine_notes(decisions: Decisions) -> tuple[str, ...]:
    """What speaks against using decisions on this machine; nothing where it is the one that they were measured on.

    A model may well be converted elsewhere than where it will run, so this is no error.
    """
    provider = decisions.setting.get("provider")
    if provider not in PROVIDERS:
        return ()
    try:
        here = read_setting(provider, decisions.setting.get("threads"))
    except NativeLibraryError:
        return ()  # nothing runs here: they must be for another machine
    other = differences(decisions.setting, here)
    if not other:
        return ()
    return (f"{decisions.name} was measured elsewhere: {'; '.join(other)}. Tune again where the model is to run",)


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)


def _digest(path: Path) -> str:
    """The library's content: two builds of one version need not be equally fast."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
