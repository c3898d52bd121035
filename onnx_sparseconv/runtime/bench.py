"""Timing a converted model against its original."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from onnx_sparseconv.errors import ModelError, SparseConvError, UsageError
from onnx_sparseconv.runtime.binding import BoundRuns, TensorSpec, specs_of
from onnx_sparseconv.runtime.cuda_mode import CudaMode, DenseOptions, modes_for
from onnx_sparseconv.runtime.depth import load_structure
from onnx_sparseconv.runtime.environment import Environment, read_environment
from onnx_sparseconv.runtime.inputs import (
    Array,
    Shape,
    check_seed,
    in_types_of,
    load_inputs,
    make_random_inputs,
    model_inputs,
    require_elements,
    resolve_shapes,
)
from onnx_sparseconv.runtime.kernels import (
    NO_SPARSE_NODE,
    KernelUse,
    kernels_of,
    require_sparse_kernels_on,
    sparse_nodes,
)
from onnx_sparseconv.runtime.layer_times import LayerTime, NodeTime, match_layers
from onnx_sparseconv.runtime.profiling import NodePlace, ProfileJob, nodes_elsewhere, profile
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import Provider, check_threads, make_session, measuring_options
from onnx_sparseconv.runtime.timing import Clock, Samples, Speedup, TimeStats, TimingPlan, measure, speedup

if TYPE_CHECKING:
    import onnxruntime as ort

ON_HOST = "arrays in host memory, as session.run takes and gives them"
BOUND = "inputs and outputs bound to device memory{copies}; a run ends when the device is done, nothing is copied"


@dataclass(frozen=True)
class BenchModel:
    """One of the two models.

    Attributes:
        path: the file.
        size_bytes: with its external data.
        time: of whole runs, in the fastest of the modes that were tried.
        load_us: time to make the session, microseconds.
        nodes_us: time of all nodes of a profiled run together, by operator, microseconds.
        mode: the fastest of the modes that were tried, such as ``nhwc+graph``; ``default`` where there is but one.
        nodes_elsewhere: nodes that ONNX Runtime ran on the CPU although another provider was asked for.
    """

    path: Path
    size_bytes: int
    time: TimeStats
    load_us: float
    nodes_us: Mapping[str, float]
    mode: str = "default"
    nodes_elsewhere: tuple[NodePlace, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One model in one mode.

    Attributes:
        model: ``original`` or ``converted``.
        mode: name of a `CudaMode`, or ``default``.
        time: of whole runs; None where it could not run.
        problem: why it could not; empty where it could.
    """

    model: str
    mode: str
    time: TimeStats | None
    problem: str


@dataclass(frozen=True)
class BenchReport:
    """Result of a benchmark.

    Attributes:
        original, converted: the two models.
        speedup: how many times faster the converted one is, each in its fastest mode.
        provider, threads, batch: as they ran; ``threads`` None: ONNX Runtime's choice.
        inputs: where the inputs came from.
        input_shapes: shape of every input.
        memory: where inputs and outputs lie during a timed run.
        candidates: every mode of both models that was tried.
        plan: how it was timed.
        layers: convolutions of the converted model beside the original's.
        unmatched: layers that could not be found in both profiles.
        kernels: which kernel ran each SparseConv node.
        notes: what has to be known to read the times.
        environment: hardware, versions, commit.
    """

    original: BenchModel
    converted: BenchModel
    speedup: Speedup
    provider: str
    threads: int | None
    batch: int | None
    inputs: str
    input_shapes: Mapping[str, Shape]
    memory: str
    candidates: tuple[Candidate, ...]
    plan: TimingPlan
    layers: tuple[LayerTime, ...]
    unmatched: tuple[str, ...]
    kernels: tuple[KernelUse, ...]
    notes: tuple[str, ...]
    environment: Environment


@dataclass(frozen=True)
class CudaBench:
    """What a benchmark on CUDA does besides.

    Attributes:
        dense_options: the layouts to try, see `modes_for`; the fastest counts, for each of the models.
        cuda_graph: both models run as a CUDA graph; else neither does.
        copies: copies of inputs and outputs, used in turn.
        config: session configuration entries for the converted model, such as ``{"sparseconv.cuda_kernel": "csr"}``.
    """

    dense_options: DenseOptions = "best"
    cuda_graph: bool = False
    copies: int = 1
    config: Mapping[str, str] | None = None


@dataclass(frozen=True)
class _Side:
    """One of the two models before it is loaded."""

    role: str
    path: Path
    structure: onnx.ModelProto
    provider: Provider
    threads: int | None
    config: Mapping[str, str]

    @property
    def use_library(self) -> bool:
        return self.role == "converted"


@dataclass(frozen=True)
class _Loaded:
    """A session of a model; ``mode`` None on the CPU."""

    side: _Side
    mode: CudaMode | None
    session: ort.InferenceSession
    load_us: float


@dataclass(frozen=True)
class _Ready:
    """A model in one mode, ready to be timed."""

    loaded: _Loaded
    run: Callable[[], object]


@dataclass(frozen=True)
class _Refused:
    """A model in a mode in which it does not run."""

    side: _Side
    mode: CudaMode
    problem: str


def bench(
    original: str | Path,
    converted: str | Path,
    *,
    provider: Provider = "cpu",
    threads: int | None = None,
    batch: int | None = None,
    shapes: Mapping[str, Shape] | None = None,
    inputs: str | Path | None = None,
    seed: int = 0,
    cuda: CudaBench | None = None,
    plan: TimingPlan | None = None,
    clock: Clock = time.perf_counter_ns,
    on_round: Callable[[int], None] = lambda _: None,
) -> BenchReport:
    """Time two models side by side in this process, with the same inputs and the same number of threads.

    The original runs in plain ONNX Runtime, the converted one with the native library. Both keep their threads from
    spinning after a run, because the idle threads of one would slow the other down.

    On CUDA inputs and outputs stay in device memory, every mode that was asked for is timed for both models, and the
    fastest of each counts.

    Args:
        original: the model before conversion.
        converted: the model after it.
        provider: ``cpu`` or ``cuda``.
        threads: threads of a run; None leaves it to ONNX Runtime.
        batch: batch size where the model leaves it open; None: 1.
        shapes: shapes of inputs where the model leaves them open.
        inputs: an ``.npz`` file; None makes random inputs.
        seed: of the random inputs.
        cuda: what to do besides on CUDA; None: the defaults.
        plan: how often to run; None: the default plan.
        clock: nanoseconds.
        on_round: called after each timed round with the number of rounds done.

    Raises:
        UsageError: ``cuda`` is given for another provider, an input is empty, or threads are too many.
        ProviderError: the provider is not used (see `make_session`), or not for the SparseConv nodes.
        SparseConvError: a model cannot be loaded or run.
    """
    if cuda is not None and provider != "cuda":
        raise UsageError("CUDA graphs, dense options, rotated inputs and the choice of a kernel need --provider cuda")
    check_threads(threads)
    check_seed(seed)
    cuda, plan = cuda or CudaBench(), plan or TimingPlan()
    sides = tuple(
        _Side(role, Path(path), load_structure(path), provider, threads, config)
        for role, path, config in (("original", original, {}), ("converted", converted, dict(cuda.config or {})))
    )
    first, second = (_load(side, CudaMode() if provider == "cuda" else None, clock) for side in sides)
    wanted = model_inputs(first.session)
    source = f"random, seed {seed}" if inputs is None else str(inputs)
    shapes = resolve_shapes(wanted, shapes, batch) if inputs is None else {}
    arrays = load_inputs(inputs, wanted) if inputs is not None else make_random_inputs(wanted, shapes, seed)
    require_elements({name: array.shape for name, array in arrays.items()})
    outputs = {
        each.side.role: specs_of(run_session(each.session, in_types_of(each.session, arrays), str(each.side.path)))
        for each in (first, second)
    }
    nodes = sparse_nodes(sides[1].structure)
    require_sparse_kernels_on(provider, kernels_of(nodes, use_library=True))
    tried: Sequence[_Ready | _Refused]
    if provider == "cuda":
        tried = _try_bound((first, second), arrays, outputs, cuda, clock)
    else:
        tried = [_Ready(loaded, _runner(loaded.session, arrays)) for loaded in (first, second)]
    ready = _ready_of_both(tried)
    samples = measure([candidate.run for candidate in ready], plan, clock=clock, on_round=on_round)
    kernels = kernels_of(nodes, use_library=True)
    fastest = [_fastest(role, ready, samples) for role in ("original", "converted")]
    notes = list(_notes(provider, cuda, has_sparse_nodes=bool(nodes)))
    profiles = [_profile(candidate.loaded, arrays, notes) for candidate, _ in fastest]
    layers = match_layers(sides[0].structure, profiles[0], sides[1].structure, profiles[1])
    return BenchReport(
        original=_bench_model(*fastest[0], profiles[0]),
        converted=_bench_model(*fastest[1], profiles[1]),
        speedup=speedup(*(times for _, times in fastest)),
        provider=provider,
        threads=threads,
        batch=batch,
        inputs=source,
        input_shapes={name: tuple(array.shape) for name, array in arrays.items()},
        memory=_memory(provider, cuda.copies),
        candidates=_candidates(tried, ready, samples),
        plan=plan,
        layers=layers,
        unmatched=tuple(layer.name for layer in layers if layer.speedup is None),
        kernels=kernels,
        notes=tuple(notes),
        environment=read_environment(),
    )


def model_size_bytes(path: str | Path, structure: onnx.ModelProto) -> int:
    """Bytes of a model's file and of the files that hold its external data."""
    path = Path(path)
    locations = {
        entry.value
        for tensor in structure.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    files = [path, *(path.parent / location for location in locations)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _load(side: _Side, mode: CudaMode | None, clock: Clock) -> _Loaded:
    options = measuring_options(side.config)
    started = clock()
    session = make_session(
        side.path,
        provider=side.provider,
        threads=side.threads,
        use_library=side.use_library,
        session_options=options,
        provider_options=mode.provider_options() if mode else {},
    )
    return _Loaded(side, mode, session, (clock() - started) / 1000)


def _runner(session: ort.InferenceSession, arrays: Mapping[str, Array]) -> Callable[[], object]:
    feed = {
        name: value.astype(object) if value.dtype.kind == "U" else value
        for name, value in in_types_of(session, arrays).items()
    }
    return lambda: session.run(None, feed)


def _try_bound(
    loaded: Sequence[_Loaded],
    arrays: Mapping[str, Array],
    outputs: Mapping[str, Mapping[str, TensorSpec]],
    cuda: CudaBench,
    clock: Clock,
) -> list[_Ready | _Refused]:
    """Both models in every mode; a mode in which one does not load or run is refused with the reason."""
    modes = modes_for(cuda.dense_options, cuda_graph=cuda.cuda_graph)
    tried: list[_Ready | _Refused] = []
    for plain in loaded:
        for mode in modes:
            side = plain.side
            try:
                made = plain if mode == plain.mode else _load(side, mode, clock)
                runs = BoundRuns(
                    made.session,
                    str(side.path),
                    in_types_of(made.session, arrays),
                    outputs[side.role],
                    side.provider,
                    copies=cuda.copies,
                    cuda_graph=mode.cuda_graph,
                )
                for _ in range(runs.num_copies):
                    runs()
            except SparseConvError as error:
                tried.append(_Refused(side, mode, str(error)))
            else:
                tried.append(_Ready(made, runs))
    return tried


def _ready_of_both(tried: Sequence[_Ready | _Refused]) -> list[_Ready]:
    """The candidates that run.

    Raises:
        ModelError: there is none of one of the models.
    """
    ready = [candidate for candidate in tried if isinstance(candidate, _Ready)]
    for refused in (candidate for candidate in tried if isinstance(candidate, _Refused)):
        if all(candidate.loaded.side is not refused.side for candidate in ready):
            raise ModelError(refused.problem)
    return ready


def _fastest(role: str, ready: Sequence[_Ready], samples: Sequence[Samples]) -> tuple[_Ready, Samples]:
    """The candidate of one model with the lowest median, and its times."""
    own = [pair for pair in zip(ready, samples, strict=True) if pair[0].loaded.side.role == role]
    return min(own, key=lambda pair: pair[1].stats().median_us)


def _candidates(
    tried: Sequence[_Ready | _Refused], ready: Sequence[_Ready], samples: Sequence[Samples]
) -> tuple[Candidate, ...]:
    stats = {id(candidate): times.stats() for candidate, times in zip(ready, samples, strict=True)}
    return tuple(
        Candidate(candidate.side.role, candidate.mode.name, None, candidate.problem)
        if isinstance(candidate, _Refused)
        else Candidate(candidate.loaded.side.role, _mode_name(candidate.loaded), stats[id(candidate)], "")
        for candidate in tried
    )


def _mode_name(loaded: _Loaded) -> str:
    return (loaded.mode or CudaMode()).name


def _memory(provider: Provider, copies: int) -> str:
    """Where inputs and outputs lie, in words."""
    if provider != "cuda":
        return ON_HOST
    return BOUND.format(copies=f", {copies} copies of them in turn" if copies > 1 else "")


def _notes(provider: Provider, cuda: CudaBench, *, has_sparse_nodes: bool) -> tuple[str, ...]:
    ordinary = () if has_sparse_nodes else (NO_SPARSE_NODE,)
    if provider != "cuda":
        return ordinary
    graph = "both models run as a CUDA graph" if cuda.cuda_graph else "neither model runs as a CUDA graph"
    return (
        *ordinary,
        f"{graph}; of the modes that were tried the fastest counts, for each model",
        "ONNX Runtime's own float operators may round inputs to TF32; SparseConv on tensor cores, to as many bits",
        "a layer's time is measured with the GPU waited for after every kernel, so it holds one launch or more",
    )


def _profile(loaded: _Loaded, arrays: Mapping[str, Array], notes: list[str]) -> tuple[NodeTime, ...]:
    """Times of single nodes in the mode that was fastest; a failure is a note, for the times stand without."""
    side = loaded.side
    options = loaded.mode.without_graph().provider_options() if loaded.mode else {}
    job = ProfileJob(str(side.path), side.provider, side.threads, side.use_library, options, side.config)
    try:
        return profile(job, side.structure, in_types_of(loaded.session, arrays))
    except ModelError as error:
        text = f"no times of single layers: {error}"
        if text not in notes:
            notes.append(text)
        return ()


def _bench_model(candidate: _Ready, samples: Samples, nodes: Sequence[NodeTime]) -> BenchModel:
    by_op: dict[str, float] = {}
    for node in nodes:
        by_op[node.op_type] = by_op.get(node.op_type, 0.0) + node.time_us
    loaded = candidate.loaded
    return BenchModel(
        path=loaded.side.path,
        size_bytes=model_size_bytes(loaded.side.path, loaded.side.structure),
        time=samples.stats(),
        load_us=loaded.load_us,
        nodes_us=dict(sorted(by_op.items(), key=lambda item: -item[1])),
        mode=_mode_name(loaded),
        nodes_elsewhere=nodes_elsewhere(nodes, loaded.side.provider),
    )
