"""The tests here need a GPU; without one they are skipped, but for those in ``test_on_cpu.py``.

``pytest -m gpu`` runs them on a machine with an NVIDIA driver and onnxruntime-gpu.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings

import onnxruntime as ort
import pytest

from onnx_sparseconv.kernels import cuda_driver, nvrtc
from tests.support.gpu_checks import Place

_ON_CPU = "test_on_cpu.py"
# The plugin that puts an emulated GPU in the place of a real one.
_EMULATION = "tests.support.emulated_gpu"


@functools.cache
def missing():
    """Why the tests cannot run here; empty where they can."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return f"this onnxruntime {ort.__version__} has no CUDA provider"
    problem = cuda_driver.read_cuda_driver().problem
    if not problem:
        # PyTorch brings the CUDA libraries on many machines and knows where they are.
        with warnings.catch_warnings(), contextlib.suppress(ImportError, OSError):
            warnings.simplefilter("ignore")
            importlib.import_module("torch")
    return problem


def pytest_collection_modifyitems(config, items):
    emulated = config.pluginmanager.has_plugin(_EMULATION)
    for item in items:
        if item.path.parent.name != "gpu" or item.path.name == _ON_CPU:
            continue
        item.add_marker(pytest.mark.gpu)
        if missing() and not emulated:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {missing()}"))


@pytest.fixture
def gpu():
    """The first GPU."""
    return Place("cuda")


@pytest.fixture
def gpus():
    """All GPUs; skips where there is one alone."""
    count = len(cuda_driver.read_cuda_driver().gpus)
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    return [Place("cuda", device) for device in range(count)]


@pytest.fixture(scope="session")
def target():
    """The architecture of the first GPU, for images; skips without a compiler."""
    if not nvrtc.installed():
        pytest.skip("NVRTC is not installed")
    return f"sm_{cuda_driver.read_cuda_driver().gpus[0].compute_capability.replace('.', '')}"
