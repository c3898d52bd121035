"""One layer of the papers on a GPU: SparseConv at several sparsities, and everything that the papers compare with.

All of it runs in one process, on the same inputs and outputs in the memory of the GPU, and is timed in turn:

================  ========================================================================================
``sparse``        SparseConv as converted for the GPU: with generated code where that is foretold to be fastest (ours)
``library``       SparseConv without generated code: float16 runs on tensor cores where they take the layer (ours)
``csr``           SparseConv's CSR kernel, which runs ragged rows as Escoin does (ours)
``csr-1`` ..      the same with 1, 2, 4 and 8 images a thread, instead of what it chooses
``csr-unified``   the same with all rows as long as the longest, as Pietron & Zurek store them
``dense``         ONNX Runtime's Conv, channels first and last; floats may be rounded to TF32
``dense-fp32``    the same without TF32
``half-in``       ONNX Runtime's Conv of the layer with half the input channels (structured pruning)
``half-out``      .. with half the filters
``half-both``     .. with both
``cublas``        cuBLAS on the lowered matrix, lowering included; floats may be rounded to TF32
``cublas-fp32``   the same without TF32
``cusparse``      cuSPARSE on the lowered matrix, lowering included
================  ========================================================================================

Everything computes bias and Relu as well, and is compared with float64 at sampled places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from csr_forms import with_unified_rows
from device_memory import POISON, Memory, open_memory
from gpu import ROTATE_FROM_BATCH, WARM_UP_S, checksum, describe_times, measure_floor
from layers import Setting, make_model, make_weights
from lowered_runs import LoweredLayer, LoweringDevice, Runs, fastest
from lowering import Lowering, LoweringPlan
from paper_results import SUB_BATCHES
from placed_runs import Place, PlacedRuns
from suite_rows import Layer

from onnx_sparseconv.custom_ops.library import describe_kernels
from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.runtime.binding import copies_beyond_cache
from onnx_sparseconv.runtime.cuda_libraries import read_cuda_libraries
from onnx_sparseconv.runtime.cuda_mode import CudaMode
from onnx_sparseconv.runtime.kernels import kernels_of, require_sparse_kernels_on, sparse_nodes
from onnx_sparseconv.runtime.layer_error import LayerError, exact_values, layer_error, sample_places
from onnx_sparseconv.runtime.plain import to_plain
from onnx_sparseconv.runtime.session import import_onnxruntime, make_session, measuring_options
from onnx_sparseconv.runtime.timing import Samples, TimingPlan, measure

Array = np.ndarray[Any, Any]
Weights = Mapping[str, Array]

# What can be left out; SparseConv and ONNX Runtime's Conv are always measured.
BASELINES = ("true-fp32", "structured", "cublas", "cusparse", "csr", "sub-batch", "unified")
LOWERED = ("cublas", "cusparse")
# Baselines that do not depend on sparsity get the weights of this one, and ablations are made at it.
MAIN_SPARSITY = 0.9
# Errors over this, relative to the root mean square of the outputs, are no rounding.
LARGEST_ERROR = 1e-2
# TF32 has errors of about 3e-4; float32 less than 1e-6, and some more with Winograd's transforms.
LARGEST_FLOAT32_ERROR = 5e-5
# Candidates this many times slower than dense are timed by themselves, and less often.
SLOW = 4.0
BURST_US = 4000.0
SHORTEST_BURST, LONGEST_BURST = 3, 20
# Inputs repeat a block of random values; a prime, so that no two images are alike.
_BLOCK = 3_999_971


@dataclass(frozen=True)
class PaperJob:
    """A layer at a batch size in a type, at several sparsities.

    Attributes:
        layer, batch, dtype: the layer; float32 or float16.
        sparsities: at least one.
        converted: file of the prepared converted model by sparsity; what is missing is converted without images.
        weights: checksum that the weights must have, by sparsity, where it is known.
        baselines: of `BASELINES`.
        is_thorough: whether the CSR kernel is measured, in all its forms, at every sparsity; else at the main one.
        seconds: for timing single runs of all that is compared; bursts take half as long.
        cache_bytes: of the GPU's cache, which inputs have to get past.
    """

    layer: Layer
    batch: int
    dtype: str
    sparsities: tuple[float, ...]
    converted: Mapping[float, str] = field(default_factory=dict)
    weights: Mapping[float, str] = field(default_factory=dict)
    baselines: tuple[str, ...] = BASELINES
    is_thorough: bool = False
    seconds: float = 0.25
    cache_bytes: int = 60 << 20

    @property
    def main_sparsity(self) -> float:
        """The one of `sparsities` that is nearest to `MAIN_SPARSITY`."""
        return min(self.sparsities, key=lambda sparsity: abs(sparsity - MAIN_SPARSITY))

    def describe(self) -> dict[str, Any]:
        """The job as its record has it."""
        return {"layer": asdict(self.layer), "setting": {"batch": self.batch, "dtype": self.dtype}}


@dataclass
class Candidate:
    """Something that computes the layer, and what was found out about it.

    Attributes:
        baseline: see the module.
        variant: how it ran: a mode of ONNX Runtime, or a plan and ``graph`` or ``stream``.
        sparsity: of the weight, where time depends on it.
        kernel: of SparseConv.
        runs: None where it does not run.
        times, burst_us: microseconds; of single runs, and of one run of several back to back.
        error: against float64.
        problem: why it does not count; empty if it does.
        details: what else is worth knowing: of SparseConv, entries; of a product, what probing its plans found, in
            microseconds, or why they did not run.
    """

    baseline: str
    variant: str
    sparsity: float | None = None
    kernel: str = ""
    runs: Runs | None = None
    times: Samples | None = None
    burst_us: float = math.nan
    error: LayerError | None = None
    problem: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """As its record has it."""
        return {
            "baseline": self.baseline,
            "variant": self.variant,
            "sparsity": self.sparsity,
            "kernel": self.kernel,
            **describe_times(self.times, self.burst_us),
            "error": asdict(self.error) if self.error else None,
            "problem": self.problem,
            "details": dict(self.details),
        }


class TiledInput:
    """Normally distributed values: a block of random ones again and again, which the GPU itself repeats.

    The largest inputs have gigabytes, which would take seconds to draw, and to upload.
    """

    def __init__(self, dtype: np.dtype[Any], seed: int = 1) -> None:
        """Draw the block."""
        self._block = np.random.default_rng(seed).standard_normal(_BLOCK, np.float32).astype(dtype)

    def write(self, memory: Memory, address: int, num_values: int) -> None:
        """Fill memory of the device."""
        first = self._block[:num_values]
        memory.write(address, first)
        size = self._block.itemsize
        for begin in range(first.size, num_values, first.size):
            memory.copy(address + begin * size, address, min(first.size, num_values - begin) * size)

    def images(self, numbers: Sequence[int], shape: tuple[int, ...]) -> Array:
        """Some images, ``[len(numbers), *shape]``, of an input whose images have this shape."""
        begins = (number * math.prod(shape) % self._block.size for number in numbers)
        return np.stack([np.resize(np.roll(self._block, -begin), shape) for begin in begins])


def halved(layer: Layer, which: str) -> Layer | None:
    """The layer with half its channels, rounded down: ``in``, ``out`` or ``both``; None where there is but one."""
    in_channels = layer.in_channels // 2 if which in ("in", "both") else layer.in_channels
    out_channels = layer.out_channels // 2 if which in ("out", "both") else layer.out_channels
    if not in_channels or not out_channels:
        return None
    return dataclasses.replace(layer, in_channels=in_channels, out_channels=out_channels)


def measure_paper_job(
    job: PaperJob, make_device: Callable[[Memory, Lowering, np.dtype[Any]], LoweringDevice] | None = None
) -> dict[str, Any]:
    """Time and errors of a job; `run.py` calls it in a process of its own.

    Args:
        job: what to measure.
        make_device: what lowered layers run on; None stands for CuPy.

    Returns:
        The record of the results file.

    Raises:
        ValueError: a prepared model holds other weights than this numpy makes.
    """
    started = time.perf_counter()
    memory = open_memory()
    try:
        bench = _Bench(job, memory)
        bench.add_sessions()
        versions = bench.add_lowered(make_device or _cupy_device)
        time_candidates(bench.candidates, job.seconds)
        candidates = [candidate.describe() for candidate in bench.candidates]
        bench.close()
        del bench
    finally:
        # Sessions hold gigabytes of a GPU's memory.
        gc.collect()
        memory.close()
    return {
        **job.describe(),
        "measurements": candidates,
        "seconds": time.perf_counter() - started,
        "libraries": {**to_plain(read_cuda_libraries(import_onnxruntime())), **versions},
    }


def _cupy_device(memory: Memory, lowering: Lowering, dtype: np.dtype[Any]) -> LoweringDevice:
    from cupy_device import CupyDevice  # noqa: PLC0415

    return CupyDevice(memory, lowering, dtype)


class _Reference:
    """Float64 values of a layer at sampled places of a few images."""

    def __init__(self, layer: Layer, batch: int, x: TiledInput, weights: Weights) -> None:
        self._images = sorted({0, batch // 2, batch - 1})
        rank = len(layer.spatial)
        self._places = sample_places((len(self._images), layer.out_channels, *layer.out_sizes))
        geometry = ConvGeometry(
            (layer.kernel,) * rank, (layer.stride,) * rank, (layer.pad,) * 2 * rank, (1,) * rank, layer.group
        )
        self._exact = exact_values(
            x.images(self._images, (layer.in_channels, *layer.spatial)),
            weights["w"],
            weights["b"],
            geometry=geometry,
            places=self._places,
            activation=lambda values: np.maximum(values, 0),
        )

    def error(self, memory: Memory, y: Place) -> LayerError:
        """Of an output in the memory of the device."""
        shape = y.shape[1:]
        image_bytes = math.prod(shape) * y.dtype.itemsize
        images = [memory.read(y.address + image * image_bytes, shape, y.dtype) for image in self._images]
        return layer_error(np.stack(images), self._exact, self._places)


class _Bench:
    """Makes the candidates of a job: each has run, and is compared with float64, when it is added."""

    def __init__(self, job: PaperJob, memory: Memory) -> None:
        self._job, self._memory = job, memory
        self._dtype = np.dtype(job.dtype)
        self.candidates: list[Candidate] = []
        self._x = TiledInput(self._dtype)
        self._weights = {sparsity: self._make_weights(sparsity) for sparsity in job.sparsities}
        self._references = {
            sparsity: _Reference(job.layer, job.batch, self._x, weights) for sparsity, weights in self._weights.items()
        }
        num_inputs = job.batch * job.layer.in_channels * math.prod(job.layer.spatial)
        x_bytes = num_inputs * self._dtype.itemsize
        y_bytes = job.batch * job.layer.out_channels * math.prod(job.layer.out_sizes) * self._dtype.itemsize
        rotates = job.batch >= ROTATE_FROM_BATCH
        copies = copies_beyond_cache(x_bytes + y_bytes, job.cache_bytes) if rotates else 1
        self._addresses = [(memory.allocate(x_bytes), memory.allocate(y_bytes)) for _ in range(copies)]
        for x, _ in self._addresses:
            self._x.write(memory, x, num_inputs)
        self._graph = True
        self._device: LoweringDevice | None = None

    def close(self) -> None:
        """Nothing runs any more."""
        for candidate in self.candidates:
            candidate.runs = None
        if self._device is not None:
            self._device.close()

    def add_sessions(self) -> None:
        """Everything that ONNX Runtime runs."""
        job, main = self._job, self._job.main_sparsity
        dense = make_model(job.layer, Setting(main, job.batch, 1, job.dtype), relu=True, batch="N").SerializeToString()
        if not self._add_dense("dense", job.layer, dense, self._references[main]):
            # Without CUDA graphs nothing else gets them either.
            self._graph = False
            self._add_dense("dense", job.layer, dense, self._references[main])
        if job.dtype == "float32" and "true-fp32" in job.baselines:
            self._add_dense("dense-fp32", job.layer, dense, self._references[main], tf32=False)
        if "structured" in job.baselines:
            self._add_structured()
        for sparsity in job.sparsities:
            self._add_sparse(sparsity)

    def add_lowered(self, make_device: Callable[[Memory, Lowering, np.dtype[Any]], LoweringDevice]) -> dict[str, str]:
        """Everything that multiplies matrices; returns versions of its libraries."""
        wanted = [name for name in LOWERED if name in self._job.baselines]
        if not wanted:
            return {}
        try:
            lowering = Lowering.of(self._job.layer)
            device = self._device = make_device(self._memory, lowering, self._dtype)
        except Exception as error:  # whatever CuPy raises where it, or a library, does not work
            self.candidates += [Candidate(name, "", problem=_one_line(error)) for name in wanted]
            return {}
        try:
            scratch: dict[str, int] = {}
            layers = {
                sparsity: LoweredLayer(
                    device, lowering, weights, self._job.batch, places=self._addresses, scratch=scratch
                )
                for sparsity, weights in self._weights.items()
            }
            if "cublas" in wanted:
                self._add_dense_products(layers[self._job.main_sparsity])
            if "cusparse" in wanted:
                self._add_sparse_products(layers, device.sparse_algorithms)
            return device.versions
        except Exception as error:  # the sessions' figures stand
            self.candidates.append(Candidate("lowered", "", problem=_one_line(error)))
            return {}

    def _make_weights(self, sparsity: float) -> Weights:
        weights = make_weights(self._job.layer, sparsity, self._job.dtype)
        wanted = self._job.weights.get(sparsity)
        if wanted and checksum(weights) != wanted:
            raise ValueError(
                "this numpy makes other weights than the prepared model holds: prepare it with the same numpy"
            )
        return weights

    def _places(self, layer: Layer) -> list[tuple[Place, Place]]:
        """Where a layer of at most as many channels reads and writes: at the begin of the same memory."""
        x_shape = (self._job.batch, layer.in_channels, *layer.spatial)
        y_shape = (self._job.batch, layer.out_channels, *layer.out_sizes)
        return [(Place(x, x_shape, self._dtype), Place(y, y_shape, self._dtype)) for x, y in self._addresses]

    def _add_dense(
        self, baseline: str, layer: Layer, model: bytes, reference: _Reference, *, tf32: bool = True
    ) -> bool:
        """ONNX Runtime's Conv with the channels first and last; returns whether any of them ran."""
        added = [
            self._add_session(
                Candidate(baseline, mode.name),
                model,
                mode,
                layer,
                reference,
                largest_error=_largest_error(tf32),
            )
            for mode in (CudaMode(nhwc, self._graph, tf32) for nhwc in (False, True))
        ]
        return any(candidate.runs is not None for candidate in added)

    def _add_structured(self) -> None:
        job = self._job
        for which in ("in", "out", "both"):
            layer = halved(job.layer, which)
            if layer is None:
                self.candidates.append(Candidate(f"half-{which}", "", problem="the layer has one channel"))
                continue
            model = make_model(layer, Setting(0.0, job.batch, 1, job.dtype), relu=True, batch="N")
            reference = _Reference(layer, job.batch, self._x, make_weights(layer, 0.0, job.dtype))
            self._add_dense(f"half-{which}", layer, model.SerializeToString(), reference)

    def _add_sparse(self, sparsity: float) -> None:
        job, reference = self._job, self._references[sparsity]
        mode = CudaMode(cuda_graph=self._graph)
        model = self._converted(sparsity)

        def add(baseline: str, content: bytes, config: Mapping[str, str], **details: Any) -> None:  # noqa: ANN401
            candidate = Candidate(baseline, mode.name, sparsity, details=details)
            self._add_session(candidate, content, mode, job.layer, reference, config=config)

        nonzeros = int(np.count_nonzero(self._weights[sparsity]["w"]))
        csr = {"sparseconv.cuda_kernel": "csr"}
        add("sparse", model, {}, nonzeros=nonzeros)
        if job.dtype == "float16" and "generated" in self.candidates[-1].kernel:
            add("library", self._without_code(sparsity), {}, nonzeros=nonzeros)
        if sparsity != job.main_sparsity and not job.is_thorough:
            return
        if "csr" in job.baselines:
            add("csr", model, csr)
        if "sub-batch" in job.baselines and job.batch > 1:
            for images in SUB_BATCHES:
                add(f"csr-{images}", model, {**csr, "sparseconv.cuda_sub_batch": str(images)})
        if "unified" in job.baselines:
            unified = with_unified_rows(model)
            add("csr-unified", unified.model, csr, nonzeros=unified.nonzeros, stored=unified.stored)

    def _converted(self, sparsity: float) -> bytes:
        if sparsity in self._job.converted:
            return Path(self._job.converted[sparsity]).read_bytes()
        return self._without_code(sparsity)

    def _without_code(self, sparsity: float) -> bytes:
        import onnx_sparseconv as sc  # noqa: PLC0415

        job = self._job
        dense = make_model(job.layer, Setting(sparsity, job.batch, 1, job.dtype), relu=True, batch="N")
        converted, _ = sc.convert(dense, options=sc.ConvertOptions(force=True))
        assert converted is not None
        content: bytes = converted.SerializeToString()
        return content

    def _add_session(
        self,
        candidate: Candidate,
        model: bytes,
        mode: CudaMode,
        layer: Layer,
        reference: _Reference,
        *,
        config: Mapping[str, str] | None = None,
        largest_error: float = LARGEST_ERROR,
    ) -> Candidate:
        """Load a model, run it and compare; what fails is the candidate's problem."""
        is_sparse = config is not None
        name = f"{candidate.baseline} {candidate.variant}"
        places = self._places(layer)
        try:
            session = make_session(
                model,
                provider="cuda",
                use_library=is_sparse,
                session_options=measuring_options(config),
                provider_options=mode.provider_options(),
            )
            runs = PlacedRuns(session, name, places, cuda_graph=mode.cuda_graph)
            for _ in places:
                runs()
            if is_sparse:
                nodes = sparse_nodes(onnx.load_model_from_string(model))
                require_sparse_kernels_on("cuda", kernels_of(nodes, use_library=True))
                candidate.kernel = [info.kernel for info in describe_kernels() if info.node == nodes[0][0]][-1]
            self._check(candidate, runs, reference, places, largest_error)
        except SparseConvError as error:
            candidate.problem = _one_line(error)
        self.candidates.append(candidate)
        return candidate

    def _add_dense_products(self, layer: LoweredLayer) -> None:
        reference = self._references[self._job.main_sparsity]
        precisions = {"cublas": True, **({"cublas-fp32": False} if self._job.dtype == "float32" else {})}
        for baseline, tf32 in precisions.items():
            make = functools.partial(layer.dense_runs, tf32=tf32)
            candidate = Candidate(baseline, "")
            with self._product(candidate):
                problem_of = functools.partial(self._problem_of, reference, largest_error=_largest_error(tf32))
                plan, candidate.details = fastest(layer.dense_plans(), functools.partial(make, copies=1), problem_of)
                self._run_product(candidate, plan, make, reference, tf32=tf32)

    def _add_sparse_products(self, layers: Mapping[float, LoweredLayer], algorithms: tuple[int, ...]) -> None:
        """The plan is chosen at the main sparsity and kept at the others."""
        main = self._job.main_sparsity
        plan: LoweringPlan | None = None
        for sparsity in (main, *(sparsity for sparsity in self._job.sparsities if sparsity != main)):
            candidate = Candidate("cusparse", "", sparsity)
            with self._product(candidate):
                if plan is None:
                    problem_of = functools.partial(self._problem_of, self._references[sparsity])
                    plan, candidate.details = _choose_sparse_plan(layers[sparsity], algorithms, problem_of)
                self._run_product(candidate, plan, layers[sparsity].sparse_runs, self._references[sparsity])

    @contextlib.contextmanager
    def _product(self, candidate: Candidate) -> Iterator[None]:
        """Adds a candidate; whatever a library raises is its problem."""
        self.candidates.append(candidate)
        try:
            yield
        except Exception as error:  # CuPy, cuBLAS and cuSPARSE each have their own
            candidate.problem, candidate.runs = _one_line(error), None

    def _run_product(
        self,
        candidate: Candidate,
        plan: LoweringPlan,
        make: Callable[[LoweringPlan], Runs],
        reference: _Reference,
        *,
        tf32: bool = True,
    ) -> None:
        runs = make(plan)
        candidate.variant = ", ".join(word for word in (plan.name, getattr(runs, "mode", "")) if word)
        self._check(candidate, runs, reference, self._places(self._job.layer), _largest_error(tf32))

    def _check(
        self,
        candidate: Candidate,
        runs: Runs,
        reference: _Reference,
        places: Sequence[tuple[Place, Place]],
        largest_error: float,
    ) -> None:
        """Run on every copy and compare the first one's output, in which every bit was set before."""
        self._poison(places)
        for _ in places:
            runs()
        candidate.error = reference.error(self._memory, places[0][1])
        candidate.problem = _problem(candidate.error, largest_error)
        if not candidate.problem:
            candidate.runs = runs

    def _problem_of(self, reference: _Reference, runs: Runs, largest_error: float = LARGEST_ERROR) -> str:
        """The same with one run on the first copy; returns the problem."""
        places = self._places(self._job.layer)
        self._poison(places)
        runs()
        return _problem(reference.error(self._memory, places[0][1]), largest_error)

    def _poison(self, places: Sequence[tuple[Place, Place]]) -> None:
        y = places[0][1]
        self._memory.fill(y.address, math.prod(y.shape) * y.dtype.itemsize, POISON)


def _largest_error(tf32: bool) -> float:
    return LARGEST_ERROR if tf32 else LARGEST_FLOAT32_ERROR


def _problem(error: LayerError, largest_error: float) -> str:
    """What speaks against outputs with this error; empty if nothing does."""
    if not error.num_nonfinite and (error.rms_relative or 0.0) <= largest_error:
        return ""
    return (
        f"wrong: an error of {error.rms_relative or math.nan:.1e}, over {largest_error:.0e}, "
        f"{error.num_nonfinite} values not finite"
    )


def _choose_sparse_plan(
    layer: LoweredLayer, algorithms: tuple[int, ...], problem_of: Callable[[Runs], str]
) -> tuple[LoweringPlan, dict[str, Any]]:
    """First the algorithm, for the largest chunk, then the chunk: all pairs would take long."""
    plans = layer.sparse_plans(algorithms)
    largest = [plan for plan in plans if (plan.layout, plan.chunk) == (plans[-1].layout, plans[-1].chunk)]
    make = functools.partial(layer.sparse_runs, copies=1)
    try:
        best, found = fastest(largest, make, problem_of)
    except RuntimeError:  # too large for all of them
        return fastest([plan for plan in plans if plan not in largest], make, problem_of)
    others = [plan for plan in plans if plan.algorithm == best.algorithm and plan != best]
    if others:
        best, more = fastest([best, *others], make, problem_of)
        found |= more
    return best, found


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def time_candidates(
    candidates: Sequence[Candidate], seconds: float, clock: Callable[[], int] = time.perf_counter_ns
) -> None:
    """Time all that run, in turn: single runs, and bursts. What is many times slower than dense, apart and less often.

    Args:
        candidates: their ``times`` and ``burst_us`` are set.
        seconds: for single runs; half as long for bursts. Slow candidates come on top.
        clock: nanoseconds, rising.
    """
    runnable = [(candidate, candidate.runs) for candidate in candidates if candidate.runs is not None]
    end = clock() + int(min(WARM_UP_S, seconds) * 1e9)
    while runnable and clock() < end:
        for _, runs in runnable:
            runs()
    once = {}
    for candidate, runs in runnable:
        begin = clock()
        runs()
        once[id(candidate)] = (clock() - begin) / 1000
    dense = [once[id(candidate)] for candidate, _ in runnable if candidate.baseline == "dense"]
    limit = SLOW * min(dense, default=math.inf)
    fast = [pair for pair in runnable if once[id(pair[0])] <= limit]
    slow = [pair for pair in runnable if once[id(pair[0])] > limit]
    for group, rounds, runs_per_round in ((fast, 4, 3), (slow, 2, 2)):
        if not group:
            continue
        time_s = seconds if group is fast else 0.0
        plan = TimingPlan(1, rounds, 40, runs_per_round, time_s)
        samples = measure([runs for _, runs in group], plan, clock=clock)
        lengths = [_burst_length(once[id(candidate)]) for candidate, _ in group]
        bursts = measure(
            [functools.partial(runs.burst, length) for (_, runs), length in zip(group, lengths)],
            TimingPlan(0, rounds - 1, 20, 1, time_s / 2),
            clock=clock,
        )
        for (candidate, _), times, burst, length in zip(group, samples, bursts, lengths):
            candidate.times, candidate.burst_us = times, burst.stats().median_us / length


def _burst_length(once_us: float) -> int:
    return max(SHORTEST_BURST, min(LONGEST_BURST, round(BURST_US / max(once_us, 1e-3))))


def paper_work(task: tuple[str, Any]) -> Any:  # noqa: ANN401
    """What the worker process does: a job, or the launch floor."""
    kind, content = task
    return measure_floor(content) if kind == "floor" else measure_paper_job(content)
