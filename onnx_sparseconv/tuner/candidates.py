"""What can run a layer. Dense is always among it, and is what stays when nothing else wins.

A candidate makes of a layer's dense model one to be timed, and says how its session is to be set up. What is tried on a
layer is found by a search: on the CPU the same for all layers, on CUDA also the plans of generated code
(`gpu_candidates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from onnx import ModelProto

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.converter.decisions import Choice
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice
from onnx_sparseconv.runtime.session import Provider
from onnx_sparseconv.tuner.layouts import layouts_of

Progress = Callable[[int, int, str], None]
# Images that a thread of the CSR kernel may compute.
SUB_BATCHES = (1, 2, 4, 8)


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

    @property
    def kernels(self) -> Mapping[str, KernelChoice]:
        """What it has to put into the node, by architecture; empty where nothing depends on that."""

    @property
    def counts(self) -> bool:
        """Whether it may be chosen; else it is timed to be looked at, for a model cannot say it of a single node."""

    @property
    def problem(self) -> str:
        """Why it is known not to run before it is prepared; empty where it may."""

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
    kernels: Mapping[str, KernelChoice] = field(default_factory=dict)
    counts: bool = True
    problem: str = ""

    def prepare(self, piece: ModelProto) -> Prepared:
        """The model as it is."""
        return Prepared(piece, False, self.provider_options)


@dataclass(frozen=True)
class SparseCandidate:
    """The layer as the converter rewrites it, whatever its sparsity, with one of the native library's kernels."""

    name: str = "sparse"
    config: Mapping[str, str] = field(default_factory=dict)
    choice: Choice = Choice.SPARSE
    kernels: Mapping[str, KernelChoice] = field(default_factory=dict)
    counts: bool = True
    problem: str = ""
    fuse_pools: bool = False

    def prepare(self, piece: ModelProto) -> Prepared:
        """The model after conversion.

        Raises:
            ModelError: the layer cannot be rewritten.
        """
        return Prepared(sparse_model(piece, fuse_pools=self.fuse_pools), True, {}, self.config)


class Search(Protocol):
    """Finds what to try on single layers."""

    def candidates(self, pieces: Sequence[ModelProto]) -> tuple[Candidate, ...]:
        """What to try on a layer, dense first.

        Args:
            pieces: the layer's dense model at each of the shapes to tune for.

        Raises:
            ModelError: the layer cannot be rewritten.
        """

    def why_hopeless(self, pieces: Sequence[ModelProto]) -> str:
        """Why a layer need not be timed, by what is foretold; empty where it may win."""

    def compile(
        self, layers: Sequence[tuple[str, Sequence[Candidate]]], progress: Progress
    ) -> list[tuple[Candidate, ...]]:
        """Make the candidates of many layers, each with a name for messages, ready to be prepared."""


@dataclass(frozen=True)
class FixedSearch:
    """The same candidates for every layer, and nothing to compile.

    Attributes:
        found: they.
    """

    found: tuple[Candidate, ...]

    def candidates(self, pieces: Sequence[ModelProto]) -> tuple[Candidate, ...]:  # noqa: ARG002
        """As `Search.candidates`."""
        return self.found

    def why_hopeless(self, pieces: Sequence[ModelProto]) -> str:  # noqa: ARG002
        """Nothing is foretold."""
        return ""

    def compile(
        self,
        layers: Sequence[tuple[str, Sequence[Candidate]]],
        progress: Progress,  # noqa: ARG002
    ) -> list[tuple[Candidate, ...]]:
        """As `Search.compile`."""
        return [tuple(candidates) for _, candidates in layers]


def sparse_model(piece: ModelProto, *, fuse_pools: bool) -> ModelProto:
    """A layer's model after conversion, whatever its sparsity, without GPU images, its pool fused or not.

    Raises:
        ModelError: the layer cannot be rewritten.
    """
    model, report = convert(piece, options=ConvertOptions(force=True, fuse_pools=fuse_pools))
    if model is None:
        raise ModelError(report.model.layers[0].verdict.text)
    return model


def candidates_for(provider: Provider, target: str = "", *, sub_batches: bool = False) -> tuple[Candidate, ...]:
    """What is tried on every layer, dense first.

    Args:
        provider: where.
        target: on CUDA, the architecture that images are made for; the general kernels are then chosen by having none.
        sub_batches: whether the CSR kernel is timed with every sub-batch, too. A session has one for all its
            nodes, so these do not count.
    """
    if provider == "cpu":
        return (DenseCandidate(), SparseCandidate())
    dense = [DenseCandidate(layout.dense, layout.mode.provider_options()) for layout in layouts_of(provider)]
    # Which of the library's own kernels runs a node without an image, the library decides, as it will later.
    general = SparseCandidate("sparse, general", kernels={target: CSR} if target else {}, fuse_pools=True)
    csr = {"sparseconv.cuda_kernel": "csr"}
    others = [
        replace(general, name=f"sparse, csr, sub-batch {n}", config={**csr, "sparseconv.cuda_sub_batch": str(n)})
        for n in (SUB_BATCHES if sub_batches else ())
    ]
    return (*dense, general, *(replace(other, counts=False) for other in others))
