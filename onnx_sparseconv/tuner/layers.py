"""What tuning knows of the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.converter.decisions import Cause
from onnx_sparseconv.converter.gpu_images import NodeKey
from onnx_sparseconv.converter.report import Verdict
from onnx_sparseconv.kernels.kernel_choice import KernelChoice
from onnx_sparseconv.tuner.candidates import Candidate
from onnx_sparseconv.tuner.database import LayerTimes
from onnx_sparseconv.tuner.regions import Region


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution on its way to a decision.

    Attributes:
        key: graph, node and number, by which decisions name it.
        site: where it lies.
        verdict: what the rule says of it, by which it is decided where it is not timed.
        sparsity: share of zeros; None where its weight is not known.
        left: why it is not timed; None where it is.
        region: what is timed with it; None outside of the main graph.
    """

    key: NodeKey
    site: ConvSite
    verdict: Verdict
    sparsity: float | None
    left: tuple[Cause, str] | None
    region: Region | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """Times of a layer.

    Attributes:
        times: at every case.
        candidates: that were timed.
        sparse: the one that would be taken; None where no sparse one runs at every case.
        measured_as: name of the layer that is alike and was timed in its stead; empty where it was timed itself.
    """

    times: tuple[LayerTimes, ...]
    candidates: tuple[Candidate, ...]
    sparse: Candidate | None
    measured_as: str = ""

    @property
    def kernels(self) -> Mapping[str, KernelChoice]:
        """What the fastest sparse candidate has in its node."""
        return self.sparse.kernels if self.sparse is not None else {}
