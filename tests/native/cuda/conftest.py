"""The tests here run the library's CUDA side on the CPU; nothing in them needs a GPU."""

from __future__ import annotations

import gc
import platform
import sys

import onnxruntime as ort
import pytest

from onnx_sparseconv.custom_ops import library
from tests.support import cuda_emulation

if sys.platform != "linux" or platform.machine() != "x86_64":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """The stand-in for the CUDA driver; sessions use the library that was built for it. Every test gives all back."""
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(cuda_emulation.build_emulated_library()))
    driver = cuda_emulation.fake_driver()
    driver.reset()
    if driver.live() != 0:
        gc.collect()
    before = driver.live()
    yield driver
    driver.reset()
    if driver.live() != before:
        gc.collect()  # a caught error's traceback may hold a session
    assert driver.live() == before


@pytest.fixture
def make_session():
    """A session of a model, on the emulated GPU."""

    def make(model, threads=1, severity=4, **settings):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = severity
        for name, value in settings.items():
            options.add_session_config_entry(f"sparseconv.{name}", str(value))
        library.register(options)
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    return make


@pytest.fixture
def assert_only_launches(driver):
    """No allocation, no copy and no synchronisation by itself: CUDA graphs are captured."""

    def check(session, inputs, count):
        session.run(None, inputs)
        before, launches = driver.calls(), driver.calls("cuLaunchKernelEx")
        session.run(None, inputs)
        assert driver.calls("cuLaunchKernelEx") - launches == count
        assert driver.calls() - before <= count + 3

    return check


@pytest.fixture
def assert_one_launch(driver):
    """The same of kernels that do not begin early."""

    def check(session, inputs):
        session.run(None, inputs)
        before, launches = driver.calls(), driver.calls("cuLaunchKernel")
        session.run(None, inputs)
        assert driver.calls("cuLaunchKernel") - launches == 1
        assert driver.calls() - before == 4

    return check
