"""Timing in real ONNX Runtime sessions: single layers, and whole models."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnx_sparseconv.custom_ops.function_body import MIN_OPSET
from onnx_sparseconv.errors import ModelError, ProviderError, SparseConvError
from onnx_sparseconv.runtime.binding import BoundRuns, TensorSpec, specs_of
from onnx_sparseconv.runtime.cuda_mode import CudaMode
from onnx_sparseconv.runtime.depth import load_structure, numerical_depth, rounded_to_tf32
from onnx_sparseconv.runtime.inputs import Array, make_random_inputs, model_inputs, resolve_shapes
from onnx_sparseconv.runtime.kernels import kernels_of, require_sparse_kernels_on, sparse_nodes
from onnx_sparseconv.runtime.layer_times import NodeTime, times_by_layer
from onnx_sparseconv.runtime.metrics import compare_outputs, derive_tolerance
from onnx_sparseconv.runtime.profiling import ProfileJob, profile, profile_in_turn
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import Provider, make_session, measuring_options
from onnx_sparseconv.runtime.timing import Clock, Samples, measure
from onnx_sparseconv.tuner.candidates import Candidate, Prepared
from onnx_sparseconv.tuner.database import LayerTimes
from onnx_sparseconv.tuner.in_place import ModelProfile
from onnx_sparseconv.tuner.layouts import layout_changes, layouts_of
from onnx_sparseconv.tuner.options import Case, Preset
from onnx_sparseconv.tuner.pieces import Shape, run_for_shapes

if TYPE_CHECKING:
    import onnxruntime as ort

# Of the time of a call, a layer's own is at least this share.
_LEAST_SHARE = 0.02
_PROFILED_ROUNDS = 20
# Of larger outputs about so many elements are looked at.
_COMPARED = 1 << 22
# No GPU's cache holds more.
CACHE_BYTES = 128 << 20
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True)
class WholeModel:
    """A whole model to time: its file, and whether the native library takes part."""

    path: Path
    use_library: bool


class Bench(Protocol):
    """What tuning asks of a stopwatch; tests have one that needs no time."""

    @property
    def sees_places(self) -> bool:
        """Whether it can time layers within a whole model."""

    def layer(self, piece: ModelProto, candidates: Sequence[Candidate], *, is_cold: bool = False) -> LayerTimes:
        """Time one layer in every way, in turn; ``is_cold``: nothing of it is left in a GPU's cache from run to run."""

    def shapes(
        self, proto: ModelProto, tensors: Sequence[str], case: Case, name: str
    ) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Shapes of a model's inputs and of some of its tensors, as in `run_for_shapes`."""

    def whole(self, models: Sequence[WholeModel], case: Case) -> tuple[Mapping[str, Samples], ...]:
        """Time whole models, in turn, each by the name of its layout; the first is the dense one."""

    def in_place(self, dense: WholeModel, sparse: WholeModel, case: Case) -> tuple[ModelProfile, ModelProfile]:
        """Time the layers of whole models, in turn."""


class OrtBench:
    """The real stopwatch.

    Single layers run on CUDA as a CUDA graph where they can: a layer's own time is what counts in a chain of many, and
    launching it takes longer than that, often. Whole models run as a graph only where that is asked for.

    Args:
        provider, threads: as in `make_session`.
        preset: how often to run.
        clock: nanoseconds.
        cuda_graph: whether whole models run as a CUDA graph.
    """

    def __init__(
        self,
        provider: Provider,
        threads: int | None,
        preset: Preset,
        clock: Clock = time.perf_counter_ns,
        *,
        cuda_graph: bool = False,
    ) -> None:
        self._provider: Provider = provider
        self._threads = threads
        self._preset = preset
        self._clock = clock
        self._cuda_graph = cuda_graph
        self._empty_runs: dict[bool, BoundRuns] = {}
        self._cache_runs: BoundRuns | None = None

    def layer(self, piece: ModelProto, candidates: Sequence[Candidate], *, is_cold: bool = False) -> LayerTimes:
        """Median times of all candidates, measured in turn in this process, without what an empty run costs.

        A candidate that cannot run, or whose output is not that of the first, gets an infinite time and the reason.

        Args:
            piece: the layer, dense.
            candidates: ways to run it; the first is dense.
            is_cold: on CUDA, the GPU's cache is filled with something else before each run that counts.

        Raises:
            ProviderError: the provider is not used.
        """
        graph = self._provider == "cuda"
        opened = self._open_all(piece, candidates, graph=graph)
        if graph and isinstance(opened[candidates[0].name], str):
            opened, graph = self._open_all(piece, candidates, graph=False), False
        runs = {name: found.runs for name, found in opened.items() if isinstance(found, _Opened)}
        problems = {name: found for name, found in opened.items() if isinstance(found, str)}
        times = {candidate.name: math.inf for candidate in candidates}
        if runs:
            reference = next(found for found in opened.values() if isinstance(found, _Opened))
            try:
                changes = self._layout_changes(reference, graph=graph)
            except SparseConvError as error:
                # What it would cost beside sparse layers is not known, so that it is no choice.
                for layout in layouts_of(self._provider):
                    if layout.is_reordered and runs.pop(layout.dense, None) is not None:
                        problems[layout.dense] = str(error)
                changes = []
            every = [self._empty(graph=graph), *changes, *runs.values()]
            before = self._emptied_cache if is_cold and self._provider == "cuda" else lambda: None
            samples = measure(every, self._preset.layer, clock=self._clock, before=before)
            empty, *timed = (found.stats().median_us for found in samples)
            own_us = [_without_floor(time_us, empty) for time_us in timed]
            reorders_us, runs_us = own_us[: len(changes)], own_us[len(changes) :]
            times |= dict(zip(runs, runs_us, strict=True))
            if self._provider == "cpu":
                reorders_us = list(self._profiled_reorders(piece, reference))
            return LayerTimes(times, problems, *reorders_us)
        return LayerTimes(times, problems)

    def shapes(
        self, proto: ModelProto, tensors: Sequence[str], case: Case, name: str
    ) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """As `run_for_shapes`, with the provider that is tuned for: on the CPU a large batch may take minutes."""
        return run_for_shapes(proto, tensors, case, name, self._provider)

    def whole(self, models: Sequence[WholeModel], case: Case) -> tuple[Mapping[str, Samples], ...]:
        """Times of whole models on the same inputs, in every layout in which each runs, measured in turn.

        Raises:
            ProviderError: the provider is not used.
            SparseConvError: a model cannot be loaded or run.
        """
        plain = [self._session(model, CudaMode()) for model in models]
        wanted = model_inputs(plain[0])
        inputs = make_random_inputs(wanted, resolve_shapes(wanted, case.shapes, case.batch))
        runs = [self._whole_runs(*pair, inputs) for pair in zip(models, plain, strict=True)]
        samples = iter(measure([run for ways in runs for run in ways.values()], self._preset.whole, clock=self._clock))
        return tuple({layout: next(samples) for layout in ways} for ways in runs)

    @property
    def sees_places(self) -> bool:
        """Not on CUDA: the profiler sees kernels only where each is waited for, which is not how a model runs."""
        return self._provider == "cpu"

    def in_place(self, dense: WholeModel, sparse: WholeModel, case: Case) -> tuple[ModelProfile, ModelProfile]:
        """Times of the nodes of whole models on the same inputs, in turn.

        Raises:
            SparseConvError: a model cannot be loaded or run, or its profile cannot be read.
        """
        wanted = model_inputs(self._session(dense, CudaMode()))
        inputs = make_random_inputs(wanted, resolve_shapes(wanted, case.shapes, case.batch))
        first, second = (load_structure(model.path) for model in (dense, sparse))
        jobs = [
            ProfileJob(str(model.path), self._provider, self._threads, model.use_library, {}, {})
            for model in (dense, sparse)
        ]
        # Profiles grow by every run, and ONNX Runtime ends them at a million events.
        plan = replace(self._preset.whole, max_rounds=_PROFILED_ROUNDS)
        before, after = profile_in_turn(jobs, (first, second), inputs, plan, self._clock)
        return _model_profile(first, before), _model_profile(second, after)

    def _session(self, model: WholeModel, mode: CudaMode) -> ort.InferenceSession:
        return make_session(
            model.path,
            provider=self._provider,
            threads=self._threads,
            use_library=model.use_library,
            session_options=measuring_options(),
            provider_options=mode.provider_options(),
        )

    def _whole_runs(
        self,
        model: WholeModel,
        plain: ort.InferenceSession,
        inputs: Mapping[str, Array],
    ) -> dict[str, Callable[[], object]]:
        """A whole model in every layout in which it runs; ``plain`` is its session with nothing set.

        Raises:
            SparseConvError: there is none; of the first.
        """
        # Runs on bound memory have to know what will be there.
        outputs = run_session(plain, inputs, str(model.path))
        if self._provider == "cpu":
            # As callers run it; memory need not be bound where it is the host's anyway.
            feed = {key: value.astype(object) if value.dtype.kind == "U" else value for key, value in inputs.items()}
            return {layout.name: lambda: plain.run(None, feed) for layout in layouts_of("cpu")}
        runs: dict[str, Callable[[], object]] = {}
        problems = []
        for layout in layouts_of(self._provider):
            mode = replace(layout.mode, cuda_graph=self._cuda_graph)
            try:
                session = plain if mode == CudaMode() else self._session(model, mode)
                bound = self._bind(session, str(model.path), inputs, specs_of(outputs), graph=mode.cuda_graph)
                bound()
            except SparseConvError as error:
                problems.append(error)
            else:
                runs[layout.name] = bound
        if not runs:
            raise problems[0]
        return runs

    def _empty(self, *, graph: bool) -> BoundRuns:
        """Runs of a model that does nothing to speak of: what a call of ONNX Runtime costs by itself."""
        if graph not in self._empty_runs:
            self._empty_runs[graph] = self._relu(1, graph=graph)
        return self._empty_runs[graph]

    def _emptied_cache(self) -> None:
        """Has what lay in the GPU's cache replaced by something else."""
        if self._cache_runs is None:
            self._cache_runs = self._relu(CACHE_BYTES // np.dtype(np.float32).itemsize, graph=False)
        self._cache_runs()

    def _relu(self, elements: int, *, graph: bool) -> BoundRuns:
        """Runs of a model that reads and writes so many floats."""
        tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [elements]) for name in ("x0", "y")]
        nodes = helper.make_graph([helper.make_node("Relu", ["x0"], ["y"])], "empty", tensors[:1], tensors[1:])
        model = helper.make_model(nodes, opset_imports=[helper.make_opsetid("", MIN_OPSET)], ir_version=4)
        zeros = {"x0": np.zeros(elements, np.float32)}
        return self._warm_runs(Prepared(model, False), zeros, specs_of({"y": zeros["x0"]}), graph=graph)

    def _open_all(self, piece: ModelProto, candidates: Sequence[Candidate], *, graph: bool) -> dict[str, _Opened | str]:
        """Every candidate, ready to be timed, or why it cannot run.

        Raises:
            ProviderError: nothing at all would run where it was asked for.
        """
        found: dict[str, _Opened | str] = {}
        dense: _Opened | None = None
        for candidate in candidates:
            try:
                opened = self._open(candidate.prepare(piece), dense, piece, graph=graph)
            except SparseConvError as error:
                if dense is None and isinstance(error, ProviderError):
                    raise
                found[candidate.name] = str(error)
                if graph and dense is None:
                    break  # what is dense cannot be captured, so nothing is
            else:
                found[candidate.name] = opened
                dense = dense or opened
        return found

    def _open(self, prepared: Prepared, dense: _Opened | None, piece: ModelProto, *, graph: bool) -> _Opened:
        """A session that is ready to be timed and right.

        Raises:
            SparseConvError: it cannot run, or gives other results than the dense one.
        """
        if dense is not None:
            inputs, outputs = dense.inputs, dense.outputs
        else:
            plain = self._layer_session(prepared, graph=False)
            inputs = _inputs_of(plain)
            outputs = run_session(plain, inputs, "the layer")
        runs = self._warm_runs(prepared, inputs, specs_of(outputs), graph=graph)
        if prepared.use_library:
            kernels = kernels_of(sparse_nodes(prepared.model), use_library=True)
            require_sparse_kernels_on(self._provider, kernels)
        self._require_equal(piece, outputs, runs.outputs())
        return _Opened(runs, inputs, outputs)

    def _warm_runs(
        self, prepared: Prepared, inputs: Mapping[str, Array], outputs: Mapping[str, TensorSpec], *, graph: bool
    ) -> BoundRuns:
        runs = self._bind(self._layer_session(prepared, graph=graph), "the layer", inputs, outputs, graph=graph)
        runs()  # of a graph, captures
        if graph:
            runs()  # replays
        return runs

    def _require_equal(self, piece: ModelProto, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        """Refuse what is fast and wrong."""
        depth = numerical_depth(piece)
        if self._provider == "cuda":
            # Float layers on tensor cores, dense and sparse ones, round their inputs.
            depth = rounded_to_tf32(depth)
        tolerance = derive_tolerance(depth, None, None)
        for name, array in expected.items():
            found = compare_outputs(name, _some(array), _some(actual[name]), tolerance)
            if not found.passed:
                raise ModelError(f"its output differs from that of the dense layer: {found.reason}")

    def _layer_session(self, prepared: Prepared, *, graph: bool) -> ort.InferenceSession:
        mode = CudaMode(cuda_graph=graph)
        return make_session(
            prepared.model,
            provider=self._provider,
            threads=self._threads,
            use_library=prepared.use_library,
            session_options=measuring_options(prepared.config),
            provider_options={**prepared.provider_options, **mode.provider_options()},
        )

    def _bind(
        self,
        session: ort.InferenceSession,
        name: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, TensorSpec],
        *,
        graph: bool,
    ) -> BoundRuns:
        return BoundRuns(session, name, inputs, outputs, self._provider, cuda_graph=graph)

    def _layout_changes(self, dense: _Opened, *, graph: bool) -> list[BoundRuns]:
        """What changes memory layouts before and behind a dense layer; nothing where the profiler tells."""
        if self._provider == "cpu":
            return []
        return [
            self._warm_runs(Prepared(change.model, False), change.inputs, change.outputs, graph=graph)
            for change in layout_changes(dense.inputs, dense.outputs)
        ]

    def _profiled_reorders(self, piece: ModelProto, dense: _Opened) -> tuple[float, float]:
        """Time that the dense layer spends on changing memory layouts, before and behind, in microseconds."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "layer.onnx"
            path.write_bytes(piece.SerializeToString())
            job = ProfileJob(str(path), self._provider, self._threads, False, {}, {}, self._preset.profiled_runs)
            nodes = profile(job, piece, dense.inputs)
        before = sum(node.time_us for node in nodes if node.op_type == "ReorderInput")
        return before, sum(node.time_us for node in nodes if node.op_type == "ReorderOutput")


@dataclass(frozen=True, eq=False)
class _Opened:
    runs: BoundRuns
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def _model_profile(structure: ModelProto, nodes: Sequence[NodeTime]) -> ModelProfile:
    # The time of a node with graphs in it holds those of the nodes in them, which are told as well.
    total_us = sum(node.time_us for node in nodes if node.op_type not in _CONTROL_FLOW)
    return ModelProfile(times_by_layer(structure, nodes), total_us)


def _without_floor(time_us: float, floor_us: float) -> float:
    """A layer's own time: never nothing, however the clock may stutter."""
    return max(time_us - floor_us, _LEAST_SHARE * time_us)


def _some(array: Array) -> Array:
    """An array, or elements of it all over it: one in so many, by a step that meets all rows and columns."""
    step = max(1, -(-array.size // _COMPARED))
    while any(math.gcd(step, size) > 1 for size in array.shape):
        step += 1
    return array.reshape(-1)[::step] if step > 1 else array


def _inputs_of(session: ort.InferenceSession) -> dict[str, Array]:
    wanted = model_inputs(session)
    return make_random_inputs(wanted, resolve_shapes(wanted))
