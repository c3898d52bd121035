from __future__ import annotations

import contextlib
import sys

import pytest

from tests.support.cuda_on_cpu import cuda_on_cpu, sparse_kernels_say_cuda
from tests.support.native_build import ROOT

__all__ = ["cuda_on_cpu", "sparse_kernels_say_cuda"]


@contextlib.contextmanager
def importable_programs():
    """The programs of benchmarks/ import each other by their plain names."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def benchmarks():
    with importable_programs():
        yield
