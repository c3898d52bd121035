"""What can run a layer on the GPU of this machine: also generated code, with the plans that may be fastest.

Plans are ranked by the cost model that the converter chooses with; how many of them are timed is the preset's affair.
All are compiled before anything is timed, in parallel and through the cache of images, so that no compiler disturbs a
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from onnx import ModelProto

from onnx_sparseconv.converter.decisions import Choice
from onnx_sparseconv.converter.gpu_images import SparseNode, compile_choices, put_image, sparse_nodes
from onnx_sparseconv.errors import CompileError, ModelError, ProviderError, UsageError
from onnx_sparseconv.kernels.compile import CompileOptions, Outcome
from onnx_sparseconv.kernels.cuda_driver import read_cuda_driver
from onnx_sparseconv.kernels.gpu_time_constants import MEASURED_ARCHITECTURE, MODEL
from onnx_sparseconv.kernels.gpu_times import AS_PRODUCTS, ON_PLANES, ON_TENSOR_CORES, ON_WARPGROUPS
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice, choice_of, from_batch, ranked_plans
from onnx_sparseconv.kernels.layer import Refusal, SparseLayer
from onnx_sparseconv.kernels.plan import choose_plan, cost
from onnx_sparseconv.kernels.targets import NvrtcChoice, Target, resolve_targets
from onnx_sparseconv.tuner.candidates import Candidate, Prepared, Progress, candidates_for, sparse_model
from onnx_sparseconv.tuner.database import LayerTimes

# Plans that are foretold to take so many times longer than the best, or than the library's own kernel, are not timed.
MAX_PLAN_COST = 2.0
# A layer that is foretold to run at this share of dense, or below, is not timed. What is foretold of speed-ups is
# seldom off by this factor where the model of times was fitted (docs/gpu-rule.md); elsewhere it may be.
HOPELESS_GAIN = 0.4
HOPELESS_GAIN_ELSEWHERE = 0.2


@dataclass(frozen=True, eq=False)
class GeneratedCandidate:
    """A layer with an image of one plan.

    Attributes:
        name, choice, kernels, counts: as of every `Candidate`.
        layer: what the image computes.
        kernel: its plan.
        outcome: the image, or why there is none; None before it was compiled.
    """

    name: str
    target: str
    layer: SparseLayer
    kernel: KernelChoice
    outcome: Outcome | None = None
    choice: Choice = Choice.SPARSE
    counts: bool = True
    problem: str = ""
    kernels: dict[str, KernelChoice] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", {self.target: self.kernel})

    def prepare(self, piece: ModelProto) -> Prepared:
        """The model after conversion, with the image.

        Raises:
            CompileError: there is no image.
            ModelError: the layer cannot be rewritten.
        """
        if self.outcome is None or self.outcome.image is None:
            raise CompileError(self.problem or "it was not compiled")
        model = sparse_model(piece, fuse_pools=True)
        put_image(_only_node(model), self.outcome.image)
        # Not `auto`, which would time another kernel where the image does not fit.
        return Prepared(model, True, {}, {"sparseconv.cuda_kernel": "generated"})


@dataclass(frozen=True)
class _Foretold:
    """Times of a layer, in microseconds; infinite for a library that has no kernel that is known to be fast."""

    dense_us: float
    generated_us: float
    library_us: float

    @property
    def gain(self) -> float:
        """Times faster than dense."""
        return self.dense_us / min(self.generated_us, self.library_us)


@dataclass(frozen=True)
class GpuSearch:
    """Dense, the general kernel, and the plans of generated code.

    Attributes:
        target: what images are made for.
        compile_options: processes and cache.
        max_plans: how many plans of a layer are timed; None: all that are not foretold to be far slower than the best.
        skip_hopeless: whether layers are left out that are foretold to be far slower than dense.
        sub_batches: whether the general kernel is timed with every sub-batch.
    """

    target: Target
    compile_options: CompileOptions
    max_plans: int | None
    skip_hopeless: bool = True
    sub_batches: bool = False

    def candidates(self, pieces: Sequence[ModelProto]) -> tuple[Candidate, ...]:
        """As `Search.candidates`; a node has one image for all shapes, so plans are made for a size if there is one."""
        general = candidates_for("cuda", self.target.name, sub_batches=self.sub_batches)
        calls = [_call_of(piece) for piece in pieces]
        layer, *others = (layer for layer, _ in calls)
        if isinstance(layer, Refusal):
            return general
        if any(isinstance(other, Refusal) or other.in_size != layer.in_size for other in others):
            layer = replace(layer, in_size=None)
        found = [self._foretold(*call) for call in calls]
        # Of wide layers, code takes longest to compile, and is not expected to win.
        if all(one is not None and one.generated_us > MAX_PLAN_COST * one.library_us for one in found):
            return general
        generated = [
            GeneratedCandidate(f"sparse, {choice} ({self.target.name})", self.target.name, layer, choice)
            for choice in self._choices(layer)
        ]
        return (*general, *generated)

    def why_hopeless(self, pieces: Sequence[ModelProto]) -> str:
        """As `Search.why_hopeless`: most of all, code of layers that are hardly sparse would take long to compile."""
        if not self.skip_hopeless:
            return ""
        is_measured = self.target.architecture == MEASURED_ARCHITECTURE
        least = HOPELESS_GAIN if is_measured else HOPELESS_GAIN_ELSEWHERE
        found = [self._foretold(*_call_of(piece)) for piece in pieces]
        gains = [one.gain if one is not None else math.inf for one in found]
        best = max(gains)
        if best > least:
            return ""
        far = f"{1 / least:.2g}"
        return f"not timed: {best:.2f}x the speed of dense is predicted, and that is seldom off by a factor of {far}"

    def compile(
        self, layers: Sequence[tuple[str, Sequence[Candidate]]], progress: Progress
    ) -> list[tuple[Candidate, ...]]:
        """As `Search.compile`. A plan that does not compile keeps the reason, and cannot run."""
        wanted = [(name, c) for name, candidates in layers for c in candidates if isinstance(c, GeneratedCandidate)]
        outcomes = {id(c): outcome for (_, c), outcome in zip(wanted, self._compile(wanted, progress), strict=True)}
        return [
            tuple(_compiled(c, outcomes[id(c)]) if isinstance(c, GeneratedCandidate) else c for c in candidates)
            for _, candidates in layers
        ]

    def _choices(self, layer: SparseLayer) -> list[KernelChoice]:
        # The first of them is what the converter takes by itself.
        plans = ranked_plans(layer, self.target.architecture)
        if not plans:
            return []
        most = MAX_PLAN_COST * cost(layer, plans[0])
        return [choice_of(plan, layer) for plan in plans[: self.max_plans] if cost(layer, plan) <= most]

    def _foretold(self, layer: SparseLayer | Refusal, batch: int) -> _Foretold | None:
        """Of generated code, that of the plan that the converter would take; None where nothing is foretold."""
        if isinstance(layer, Refusal) or layer.in_size is None:
            return None
        plan = choose_plan(layer, self.target.architecture)
        if isinstance(plan, Refusal):
            return None
        # The general kernel is a candidate anyway, and no reason to leave others out.
        library_us, runs_on = MODEL.library_us(layer, self.target.architecture, batch) or (math.inf, "")
        on_tensor_cores_us = (
            library_us if runs_on in (ON_WARPGROUPS, AS_PRODUCTS, ON_TENSOR_CORES, ON_PLANES) else math.inf
        )
        return _Foretold(*MODEL.layer_us(layer, plan, batch), on_tensor_cores_us)

    def _compile(self, wanted: Sequence[tuple[str, GeneratedCandidate]], progress: Progress) -> list[Outcome]:
        try:
            return self._compile_all(wanted, progress)
        except CompileError:
            # One of them: the others are in the cache by now, or are made in the turn of each.
            return [self._compile_one(one) for one in wanted]

    def _compile_one(self, wanted: tuple[str, GeneratedCandidate]) -> Outcome:
        try:
            (outcome,) = self._compile_all([wanted], lambda *_: None)
        except CompileError as error:
            return Outcome(None, str(error), 0.0)
        return outcome

    def _compile_all(self, wanted: Sequence[tuple[str, GeneratedCandidate]], progress: Progress) -> list[Outcome]:
        layers = [(name, candidate.layer) for name, candidate in wanted]
        choices = [candidate.kernel for _, candidate in wanted]
        return compile_choices(layers, choices, self.target, self.compile_options, progress) if wanted else []


def with_fewer_images(
    times: Sequence[LayerTimes], candidates: Sequence[Candidate], batches: Sequence[int]
) -> tuple[tuple[LayerTimes, ...], tuple[Candidate, ...]]:
    """Adds each generated kernel as it runs from so many images on, and the general one with fewer.

    Of these nothing has to be timed: each case's time is that of the kernel which runs then.

    Args:
        times: of a layer, at each case.
        candidates: that were timed.
        batches: images of each case.

    Returns:
        Times and candidates, the further ones last.
    """
    general = next((c for c in candidates if c.counts and CSR in c.kernels.values()), None)
    generated = [c for c in candidates if isinstance(c, GeneratedCandidate)]
    if general is None:
        return tuple(times), tuple(candidates)
    # The general kernel runs as many as it was timed with, and no more.
    firsts = [batch + 1 for batch in sorted(set(batches))[:-1]]
    split = [(one, _from(one, first)) for one in generated for first in firsts]
    added = [
        {
            later.name: at_case.times_us[(general if batch < later.kernel.min_batch else one).name]
            for one, later in split
        }
        for at_case, batch in zip(times, batches, strict=True)
    ]
    more = (replace(one, times_us={**one.times_us, **us}) for one, us in zip(times, added, strict=True))
    return tuple(more), (*candidates, *(later for _, later in split))


def _from(candidate: GeneratedCandidate, first: int) -> GeneratedCandidate:
    kernel = replace(candidate.kernel, min_batch=first)
    return replace(candidate, name=f"{candidate.name}{from_batch(first)}", kernel=kernel)


def batch_of(piece: ModelProto) -> int:
    """Images that a layer's model is timed with."""
    return int(piece.graph.input[0].type.tensor_type.shape.dim[0].dim_value)


def architecture_here() -> int | None:
    """Of this machine's first GPU, 90 for sm_90; None without one."""
    gpus = read_cuda_driver().gpus
    return int(gpus[0].compute_capability.replace(".", "")) if gpus else None


def find_target(names: Sequence[str], nvrtc: NvrtcChoice = "auto") -> Target:
    """Of some targets the one that this machine's first GPU would run: what can be timed here.

    Args:
        names: ``sm_90`` and its like, or ``native``.
        nvrtc: as in `resolve_targets`.

    Raises:
        ProviderError: there is no GPU.
        UsageError: a name is no architecture, or the GPU runs none of them.
        CompileError: there is no compiler.
    """
    here = architecture_here()
    if here is None:
        problem = read_cuda_driver().problem
        raise ProviderError(f"target {', '.join(names)}: there is no GPU to time it on: {problem}")
    targets = resolve_targets(names, nvrtc)
    fitting = [t for t in targets if t.architecture // 10 == here // 10 and t.architecture <= here]
    if not fitting:
        raise UsageError(
            f"target {', '.join(names)}: this machine's GPU is an sm_{here} and cannot run it, so it cannot be timed "
            f"here; name sm_{here}, or native"
        )
    return max(fitting, key=lambda target: target.architecture)


def _compiled(candidate: GeneratedCandidate, outcome: Outcome) -> GeneratedCandidate:
    return replace(candidate, outcome=outcome, problem=outcome.refusal)


def _call_of(piece: ModelProto) -> tuple[SparseLayer | Refusal, int]:
    """The layer, and with how many images it is called."""
    node = _only_node(sparse_model(piece, fuse_pools=True))
    return node.layer, batch_of(piece)


def _only_node(model: ModelProto) -> SparseNode:
    nodes = sparse_nodes(model)
    if len(nodes) != 1:
        raise ModelError(f"it has become {len(nodes)} sparse convolutions")
    (node,) = nodes.values()
    return node
