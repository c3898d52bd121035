from __future__ import annotations

import sys

import pytest

from tests.support.cuda_on_cpu import cuda_on_cpu, sparse_kernels_say_cuda
from tests.support.native_build import ROOT

__all__ = ["cuda_on_cpu", "sparse_kernels_say_cuda"]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The programs of benchmarks/ import each other by their plain names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]
