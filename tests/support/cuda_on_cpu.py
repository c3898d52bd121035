"""ONNX Runtime's CPU provider under the name of CUDA: for the logic around CUDA, on machines without a GPU.

The CPU provider takes the CUDA provider's options and the run options without a word, and its memory can be bound like
that of a device. What it computes is right; how long it takes says nothing.
"""

from __future__ import annotations

import dataclasses

import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.runtime import binding, profiling
from onnx_sparseconv.runtime import session as session_module

# For child processes, which know nothing of monkeypatch.
SITE = """
from onnx_sparseconv.runtime import binding, session
session.PROVIDER_NAMES["cuda"] = "CPUExecutionProvider"
binding.DEVICE_TYPES["cuda"] = "cpu"
"""


@pytest.fixture
def cuda_on_cpu(monkeypatch):
    """``provider="cuda"`` runs on the CPU; gives the list of the provider options of every session that is made."""
    made: list[dict[str, str]] = []
    create = session_module._create

    def note(runtime, source, options, provider, provider_options):
        made.append(dict(provider_options))
        return create(runtime, source, options, provider, provider_options)

    monkeypatch.setitem(session_module.PROVIDER_NAMES, "cuda", "CPUExecutionProvider")
    monkeypatch.setitem(binding.DEVICE_TYPES, "cuda", "cpu")
    monkeypatch.setattr(session_module, "_create", note)
    monkeypatch.setattr(profiling, "_CHILD", _child_on_cpu())
    return made


def _child_on_cpu():
    first, _, rest = profiling._CHILD.partition("; ")
    path, _, call = rest.partition("; ")
    setup = "; ".join(line for line in SITE.strip().splitlines())
    return "; ".join([first, path, setup, call])


@pytest.fixture
def sparse_kernels_say_cuda(monkeypatch):
    """The CPU kernels of SparseConv pass for CUDA kernels."""
    describe = library.describe_kernels

    def renamed():
        return [
            dataclasses.replace(record, provider="cuda", kernel=record.kernel.replace("cpu.", "cuda."))
            for record in describe()
        ]

    monkeypatch.setattr(library, "describe_kernels", renamed)
