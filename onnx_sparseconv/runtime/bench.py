"""Timing a converted model against its original."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.runtime.depth import load_structure
from onnx_sparseconv.runtime.environment import Environment, read_environment
from onnx_sparseconv.runtime.inputs import Array, Shape, load_inputs, make_random_inputs, model_inputs, resolve_shapes
from onnx_sparseconv.runtime.kernels import KernelUse, kernels_of, sparse_nodes
from onnx_sparseconv.runtime.layer_times import (
    LayerTime,
    NodeTime,
    is_convolution,
    match_layers,
    read_profile,
    with_names,
)
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import LOG_FATAL_ONLY, Provider, import_onnxruntime, make_session
from onnx_sparseconv.runtime.timing import Clock, Speedup, TimeStats, TimingPlan, measure, speedup

if TYPE_CHECKING:
    import onnxruntime as ort

PROFILED_RUNS = 20
_PROFILE_WARMUP = 2


@dataclass(frozen=True)
class BenchModel:
    """One of the two models.

    Attributes:
        path: the file.
        size_bytes: with its external data.
        time: of whole runs.
        load_us: time to make the session, microseconds.
        nodes_us: time of all nodes of a profiled run together, by operator, microseconds.
    """

    path: Path
    size_bytes: int
    time: TimeStats
    load_us: float
    nodes_us: Mapping[str, float]


@dataclass(frozen=True)
class BenchReport:
    """Result of a benchmark.

    Attributes:
        original, converted: the two models.
        speedup: how many times faster the converted one is.
        provider, threads, batch: as they ran; ``threads`` None: ONNX Runtime's choice.
        inputs: where the inputs came from.
        input_shapes: shape of every input.
        plan: how it was timed.
        layers: convolutions of the converted model beside the original's.
        unmatched: layers that could not be found in both profiles.
        kernels: which kernel ran each SparseConv node.
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
    plan: TimingPlan
    layers: tuple[LayerTime, ...]
    unmatched: tuple[str, ...]
    kernels: tuple[KernelUse, ...]
    environment: Environment


@dataclass(frozen=True)
class _Loaded:
    path: Path
    structure: onnx.ModelProto
    session: ort.InferenceSession
    use_library: bool
    load_us: float


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
    plan: TimingPlan | None = None,
    clock: Clock = time.perf_counter_ns,
    on_round: Callable[[int], None] = lambda _: None,
) -> BenchReport:
    """Time two models side by side in this process, with the same inputs and the same number of threads.

    The original runs in plain ONNX Runtime, the converted one with the native library. Both keep their threads from
    spinning after a run, because the idle threads of one would slow the other down.

    Args:
        original: the model before conversion.
        converted: the model after it.
        provider: ``cpu`` or ``cuda``.
        threads: threads of a run; None leaves it to ONNX Runtime.
        batch: batch size where the model leaves it open; None: 1.
        shapes: shapes of inputs where the model leaves them open.
        inputs: an ``.npz`` file; None makes random inputs.
        seed: of the random inputs.
        plan: how often to run; None: the default plan.
        clock: nanoseconds.
        on_round: called after each timed round with the number of rounds done.

    Raises:
        SparseConvError: a model cannot be loaded or run, or the provider is not used (see `make_session`).
    """
    plan = plan or TimingPlan()
    first = _load(original, provider, threads, clock, use_library=False)
    second = _load(converted, provider, threads, clock, use_library=True)
    wanted = model_inputs(first.session)
    source = f"random, seed {seed}" if inputs is None else str(inputs)
    shapes = resolve_shapes(wanted, shapes, batch) if inputs is None else {}
    arrays = load_inputs(inputs, wanted) if inputs is not None else make_random_inputs(wanted, shapes, seed)
    run_session(first.session, arrays, str(original))
    run_session(second.session, arrays, str(converted))
    samples = measure([_runner(m.session, arrays) for m in (first, second)], plan, clock=clock, on_round=on_round)
    profiles = [_profile(m, arrays, provider, threads) for m in (first, second)]
    layers = match_layers(first.structure, profiles[0], second.structure, profiles[1])
    return BenchReport(
        original=_bench_model(first, samples[0].stats(), profiles[0]),
        converted=_bench_model(second, samples[1].stats(), profiles[1]),
        speedup=speedup(*samples),
        provider=provider,
        threads=threads,
        batch=batch,
        inputs=source,
        input_shapes={name: tuple(array.shape) for name, array in arrays.items()},
        plan=plan,
        layers=layers,
        unmatched=tuple(layer.name for layer in layers if layer.speedup is None),
        kernels=kernels_of(sparse_nodes(second.structure), use_library=True),
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


def _load(path: str | Path, provider: Provider, threads: int | None, clock: Clock, *, use_library: bool) -> _Loaded:
    structure = load_structure(path)
    options = _options()
    started = clock()
    session = make_session(path, provider=provider, threads=threads, use_library=use_library, session_options=options)
    return _Loaded(Path(path), structure, session, use_library, (clock() - started) / 1000)


def _options() -> ort.SessionOptions:
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = LOG_FATAL_ONLY
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _runner(session: ort.InferenceSession, arrays: Mapping[str, Array]) -> Callable[[], object]:
    feed = {name: value.astype(object) if value.dtype.kind == "U" else value for name, value in arrays.items()}
    return lambda: session.run(None, feed)


def _profiled_model(model: _Loaded) -> Path | bytes:
    """The model with a name for every layer; the file as it is where it has them all, or is too large for memory."""
    if all(node.name for node in model.structure.graph.node if is_convolution(node)):
        return model.path
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.structure.graph.initializer):
        return model.path
    return bytes(with_names(model.structure).SerializeToString())


def _profile(
    model: _Loaded, arrays: Mapping[str, Array], provider: Provider, threads: int | None
) -> tuple[NodeTime, ...]:
    """Times of single nodes, from a session of its own: profiling slows a run down."""
    with tempfile.TemporaryDirectory() as directory:
        session = make_session(
            _profiled_model(model),
            provider=provider,
            threads=threads,
            use_library=model.use_library,
            session_options=_options(),
            profile=Path(directory) / "profile",
        )
        runner = _runner(session, arrays)
        for _ in range(_PROFILE_WARMUP + PROFILED_RUNS):
            runner()
        path = Path(session.end_profiling())
        if not path.is_file():
            raise ModelError(f"{model.path}: ONNX Runtime wrote no profile")
        return read_profile(path, _PROFILE_WARMUP + PROFILED_RUNS)


def _bench_model(model: _Loaded, stats: TimeStats, profile: tuple[NodeTime, ...]) -> BenchModel:
    by_op: dict[str, float] = {}
    for node in profile:
        by_op[node.op_type] = by_op.get(node.op_type, 0.0) + node.time_us
    ordered = dict(sorted(by_op.items(), key=lambda item: -item[1]))
    return BenchModel(model.path, model_size_bytes(model.path, model.structure), stats, model.load_us, ordered)
