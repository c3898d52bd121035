"""What can run a layer. Dense is always among it, and is what stays when nothing else wins.

A candidate makes of a layer's dense model one to be timed, and says how its session is to be set up. A further kernel
(on CUDA: the general kernel with other settings, generated code with its plans) is one more object in the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from onnx import ModelProto

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.converter.decisions import Choice
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.runtime.cuda_mode import modes_for
from onnx_sparseconv.runtime.session import Provider


@dataclass(frozen=True)
class Prepared:
    """A model to time.

    Attributes:
        model: the one-layer model as it will run.
        use_library: whether the native library takes part.
        provider_options: of the provider.
        config: session configuration entries.
    """

    model: ModelProto
    use_library: bool
    provider_options: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)


class Candidate(Protocol):
    """One way to run a layer."""

    @property
    def name(self) -> str:
        """Unique among the candidates; a measurement is found again by it."""

    @property
    def choice(self) -> Choice:
        """What the converter has to do for it."""

    def prepare(self, piece: ModelProto) -> Prepared:
        """Make of a layer's dense model what is to be timed.

        Raises:
            SparseConvError: it cannot run; the text says why.
        """


@dataclass(frozen=True)
class DenseCandidate:
    """The layer as plain ONNX Runtime runs it, with options of the provider."""

    name: str = "dense"
    provider_options: Mapping[str, str] = field(default_factory=dict)
    choice: Choice = Choice.DENSE

    def prepare(self, piece: ModelProto) -> Prepared:
        """The model as it is."""
        return Prepared(piece, False, self.provider_options)


@dataclass(frozen=True)
class SparseCandidate:
    """The layer as the converter rewrites it, whatever its sparsity, with one of the native library's kernels."""

    name: str = "sparse"
    config: Mapping[str, str] = field(default_factory=dict)
    choice: Choice = Choice.SPARSE

    def prepare(self, piece: ModelProto) -> Prepared:
        """The model after conversion.

        Raises:
            ModelError: the layer cannot be rewritten.
        """
        model, report = convert(piece, options=ConvertOptions(force=True))
        if model is None:
            raise ModelError(report.model.layers[0].verdict.text)
        return Prepared(model, True, {}, self.config)


def candidates_for(provider: Provider) -> tuple[Candidate, ...]:
    """What is tried on a provider, dense first."""
    if provider == "cpu":
        return (DenseCandidate(), SparseCandidate())
    dense = [DenseCandidate(f"dense, {mode.name}", mode.provider_options()) for mode in modes_for("best")]
    return (*dense, SparseCandidate("sparse, csr", {"sparseconv.cuda_kernel": "csr"}))
