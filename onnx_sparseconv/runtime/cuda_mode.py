"""The options of ONNX Runtime's CUDA provider that decide how fast a model runs: the modes that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from onnx_sparseconv.errors import UsageError

DenseOptions = Literal["best", "default", "nhwc"]


@dataclass(frozen=True)
class CudaMode:
    """One way to run a model on CUDA.

    Attributes:
        prefer_nhwc: ONNX Runtime computes its own Conv with the channels last. Custom operators stay as they are, with
            a transpose on either side of each.
        cuda_graph: the whole model is recorded once as a CUDA graph and replayed. It needs fixed shapes, inputs and
            outputs at fixed places in device memory, and every node on CUDA.
        tf32: float operators may round their inputs to TF32; SparseConv's kernels on tensor cores, to as many bits.
    """

    prefer_nhwc: bool = False
    cuda_graph: bool = False
    tf32: bool = True

    @property
    def name(self) -> str:
        """Such as ``nhwc+graph``; ``default`` for ONNX Runtime's own defaults."""
        parts = (
            ("nhwc", self.prefer_nhwc),
            ("graph", self.cuda_graph),
            ("no-tf32", not self.tf32),
        )
        return "+".join(name for name, on in parts if on) or "default"

    def provider_options(self) -> dict[str, str]:
        """What the provider is given. Options at their default are left out: older versions do not know them all."""
        options = {}
        if self.prefer_nhwc:
            options["prefer_nhwc"] = "1"
        if self.cuda_graph:
            options["enable_cuda_graph"] = "1"
        if not self.tf32:
            options["use_tf32"] = "0"
        return options

    def without_graph(self) -> CudaMode:
        """The same, each node launched by itself: what can be profiled, and run on inputs in host memory."""
        return replace(self, cuda_graph=False)


def modes_for(dense_options: DenseOptions = "best", *, cuda_graph: bool = False) -> tuple[CudaMode, ...]:
    """The modes to time a model in. A fair comparison takes the fastest of them on either side.

    Args:
        dense_options: ``best`` tries every layout, ``default`` and ``nhwc`` one.
        cuda_graph: whether the model is replayed as a CUDA graph; the same for both models of a comparison.

    Raises:
        UsageError: there are no such options.
    """
    layouts: Mapping[str, tuple[bool, ...]] = {"best": (False, True), "default": (False,), "nhwc": (True,)}
    if dense_options not in layouts:
        raise UsageError(f"unknown dense options {dense_options!r}: use one of {', '.join(layouts)}")
    return tuple(CudaMode(prefer_nhwc, cuda_graph) for prefer_nhwc in layouts[dense_options])
