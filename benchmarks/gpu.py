"""Single layers on a GPU: prepared where there need be none, measured dense and sparse side by side in ONNX Runtime.

Both sides are models of one Conv, a bias and a Relu. The dense side runs in every mode of ONNX Runtime (its defaults
with TF32, channels last, each with and without a CUDA graph), the sparse side with and without a CUDA graph. The
fastest dense mode counts, against the fastest sparse one with a CUDA graph too, or without one too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from layers import Setting, make_model, make_weights
from memory_floor import tensor_bytes
from onnx import helper
from suite_rows import Layer, SuiteRow

from onnx_sparseconv.custom_ops.library import describe_kernels
from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.errors import ModelError, SparseConvError
from onnx_sparseconv.files import write_text
from onnx_sparseconv.runtime.binding import BoundRuns, TensorSpec, copies_beyond_cache
from onnx_sparseconv.runtime.cuda_libraries import read_cuda_libraries
from onnx_sparseconv.runtime.cuda_mode import CudaMode
from onnx_sparseconv.runtime.environment import git_commit
from onnx_sparseconv.runtime.kernels import kernels_of, require_sparse_kernels_on, sparse_nodes
from onnx_sparseconv.runtime.layer_error import LayerError, error_ratio, exact_values, layer_error, sample_places
from onnx_sparseconv.runtime.plain import to_json_text, to_plain
from onnx_sparseconv.runtime.session import import_onnxruntime, make_session, measuring_options
from onnx_sparseconv.runtime.timing import Samples, TimingPlan, measure, speedup

MANIFEST = "manifest.json"
DENSE_MODES = tuple(CudaMode(nhwc, graph) for graph in (False, True) for nhwc in (False, True))
SPARSE_MODES = (CudaMode(), CudaMode(cuda_graph=True))
# From this batch size on inputs and outputs rotate through more memory than the GPU caches.
ROTATE_FROM_BATCH = 8
BURST = 20
WARM_UP_S = 0.3


@dataclass(frozen=True)
class GpuJob:
    """One layer in one setting.

    Attributes:
        layer, sparsity, batch, dtype: the layer; float32 or float16.
        converted: file of the prepared converted model; None converts it now, without images.
        weights: checksum that the weights must have; empty where it is not known.
        kernels: values of the session configuration entry ``sparseconv.cuda_kernel``; none: the dense side alone.
        config: further session configuration entries of the sparse side.
        seconds: time for one comparison.
        bandwidth: of the GPU's memory, bytes a second; 0 where it is not known.
        cache_bytes: of the GPU's cache.
    """

    layer: Layer
    sparsity: float
    batch: int
    dtype: str
    converted: str | None = None
    weights: str = ""
    kernels: tuple[str, ...] = ("auto",)
    config: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 1.0
    bandwidth: float = 0.0
    cache_bytes: int = 60 << 20

    @property
    def key(self) -> tuple[str, float, int, str]:
        """What tells it from the other jobs of a session."""
        return (self.layer.name, self.sparsity, self.batch, self.dtype)

    def describe(self) -> dict[str, Any]:
        """The job as its record has it."""
        return {
            "layer": asdict(self.layer),
            "setting": {"sparsity": self.sparsity, "batch": self.batch, "dtype": self.dtype},
        }


def key_of(record: Mapping[str, Any]) -> tuple[str, float, int, str]:
    """`GpuJob.key` of a record."""
    setting = record["setting"]
    return (record["layer"]["name"], setting["sparsity"], setting["batch"], setting["dtype"])


def grid(
    rows: Iterable[SuiteRow], dtypes: Sequence[str], sparsities: Sequence[float], batches: Sequence[int]
) -> list[tuple[Layer, int, str, float]]:
    """Layers with batch, type and sparsity, as each row or, where they are given, the caller wants them.

    Ordered so that jobs with the same input follow each other.
    """
    return [
        (row.layer, batch, dtype, sparsity)
        for row in rows
        for batch in batches or row.batches or (1,)
        for dtype in dtypes
        for sparsity in sparsities or row.sparsities or (0.9,)
    ]


def checksum(weights: Mapping[str, np.ndarray]) -> str:
    """Of the weights of a layer: that a prepared model and the dense one beside it hold the same."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].tobytes())
    return digest.hexdigest()


# What a prepared layer is made of: the layer, its sparsity and type, and the batch size that its kernel is chosen for.
Prepared = tuple[Layer, float, str, int | None]


def prepared_name(layer: Layer, sparsity: float, dtype: str, batch: int | None = None) -> str:
    """File name of a layer that was prepared, for one batch size or for those that conversion assumes."""
    suffix = "" if batch is None else f"-batch-{batch}"
    return f"{layer.name.replace('@', '_at_')}-{sparsity:g}-{dtype}{suffix}.onnx"


def prepare(
    directory: Path,
    cells: Iterable[tuple[Layer, int, str, float]],
    targets: Sequence[str],
    jobs: int,
    say: Callable[[str], None],
    *,
    by_batch: bool = False,
) -> int:
    """Convert every layer, with images for the targets; needs no GPU. What fails stands in the manifest.

    Images are cached by content, so a second call only compiles what has changed.

    Args:
        directory: where to.
        cells: as `grid` gives them.
        targets: architectures, such as ``sm_90``; none: no images.
        jobs: layers at a time.
        say: called with a line for every layer.
        by_batch: whether the kernel is chosen for the cell's batch size, of each a file of its own; else the batch size
            makes no difference.

    Returns:
        The number of layers that failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    asked = [(layer, sparsity, dtype, batch if by_batch else None) for layer, batch, dtype, sparsity in cells]
    wanted = {prepared_name(*one): one for one in asked}
    entries: dict[str, dict[str, Any]] = {}
    # What takes longest begins first. Threads are enough: the compilers are processes of their own.
    longest_first = sorted(wanted, key=lambda name: _code_length(wanted[name]), reverse=True)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(_prepare_one, directory / name, wanted[name], targets): name for name in longest_first}
        for future in as_completed(waiting):
            name = waiting[future]
            entries[name] = entry = future.result()
            manifest = {"commit": git_commit(), "targets": list(targets), "models": entries}
            write_text(directory / MANIFEST, to_json_text(manifest))
            result = entry["problem"] or f"{entry['bytes'] / 1e6:.2f} MB"
            say(f"{name}: {result} ({entry['seconds']:.1f} s)")
    return sum(bool(entry["problem"]) for entry in entries.values())


def _code_length(wanted: Prepared) -> float:
    """Something that grows with the time to compile a layer: halves take longer for as many weights."""
    layer, sparsity, dtype, _ = wanted
    weights = layer.in_channels // layer.group * layer.out_channels * layer.kernel ** len(layer.spatial)
    return weights * (1 - sparsity) * (2 if dtype == "float16" else 1)


def _prepare_one(path: Path, wanted: Prepared, targets: Sequence[str]) -> dict[str, Any]:
    import onnx_sparseconv as sc  # noqa: PLC0415

    layer, sparsity, dtype, batch = wanted
    started = time.perf_counter()
    weights = make_weights(layer, sparsity, dtype)
    entry: dict[str, Any] = {
        "layer": layer.name,
        "sparsity": sparsity,
        "dtype": dtype,
        "problem": "",
        "weights": checksum(weights),
        "dense_weight_bytes": weights["w"].nbytes,
    }
    model = make_model(layer, Setting(sparsity, 1, 1, dtype), relu=True, batch="N")
    batches = (batch,) if targets and batch is not None else ()
    options = sc.ConvertOptions(force=True, targets=tuple(targets), jobs=1, batches=batches)
    try:
        _, report = sc.convert(model, path, options)
    except SparseConvError as error:
        return {**entry, "problem": str(error), "seconds": time.perf_counter() - started}
    return {
        **entry,
        "bytes": path.stat().st_size,
        "images": [to_plain(image) for converted in report.model.layers for image in converted.images],
        "seconds": time.perf_counter() - started,
    }


def read_prepared(directory: Path) -> dict[str, dict[str, Any]]:
    """The models of a prepared directory by file name, as `prepare` noted them."""
    models: dict[str, dict[str, Any]] = json.loads((directory / MANIFEST).read_text())["models"]
    return models


@functools.lru_cache(maxsize=1)
def make_input(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random values, normally distributed."""
    return np.random.default_rng(1).standard_normal(shape, np.float32).astype(dtype)


def measure_job(job: GpuJob) -> dict[str, Any]:
    """Time and errors of one layer in one setting; `run.py` calls it in a process of its own."""
    weights = make_weights(job.layer, job.sparsity, job.dtype)
    if job.weights and checksum(weights) != job.weights:
        raise ValueError("this numpy makes other weights than the prepared model holds: prepare it with the same numpy")
    x = make_input((job.batch, job.layer.in_channels, *job.layer.spatial), job.dtype)
    candidates = _candidates(job, x)
    runnable = [c for c in candidates if c.runs is not None]
    _warm_up([c.runs for c in runnable if c.runs is not None])
    samples = measure([c.runs for c in runnable if c.runs], TimingPlan(seconds=job.seconds))
    bursts = measure(
        [functools.partial(c.runs.burst, BURST) for c in runnable if c.runs],
        TimingPlan(warmup=1, min_rounds=3, max_rounds=50, runs_per_round=2, seconds=job.seconds / 2),
    )
    for candidate, times, burst in zip(runnable, samples, bursts):
        candidate.times, candidate.burst_us = times, burst.stats().median_us / BURST
    errors = _errors(job, weights, x, runnable)
    record = {**job.describe(), **summarise(job, candidates, np.count_nonzero(weights["w"]), errors)}
    return {**record, "libraries": to_plain(read_cuda_libraries(import_onnxruntime()))}


@dataclass
class Timed:
    """One model in one mode."""

    model: str
    mode: CudaMode
    kernel_wanted: str = ""
    runs: BoundRuns | None = None
    problem: str = ""
    kernel: Mapping[str, Any] | None = None
    times: Samples | None = None
    burst_us: float = math.nan

    def describe(self) -> dict[str, Any]:
        """As its record has it."""
        return {
            "model": self.model,
            "mode": self.mode.name,
            "kernel_wanted": self.kernel_wanted,
            "kernel": self.kernel,
            **describe_times(self.times, self.burst_us),
            "problem": self.problem,
        }


def describe_times(times: Samples | None, burst_us: float) -> dict[str, Any]:
    """Times as records have them: of single runs, and back to back; nothing where there are none."""
    stats = times.stats() if times else None
    return {
        "median_us": stats.median_us if stats else None,
        "p90_us": stats.p90_us if stats else None,
        "min_us": stats.min_us if stats else None,
        "num_runs": stats.num_runs if stats else 0,
        "burst_us": burst_us if stats else None,
    }


def _candidates(job: GpuJob, x: np.ndarray) -> list[Timed]:
    dense = make_model(job.layer, Setting(job.sparsity, job.batch, 1, job.dtype), relu=True, batch="N")
    found = [_candidate(job, Timed("dense", mode), dense.SerializeToString(), {}, x) for mode in DENSE_MODES]
    if not job.kernels:
        return found
    sparse = _converted(job, dense)
    for kernel in job.kernels:
        config = {**job.config, **({"sparseconv.cuda_kernel": kernel} if kernel != "auto" else {})}
        found += [_candidate(job, Timed("sparse", mode, kernel), sparse, config, x) for mode in SPARSE_MODES]
    return found


def _converted(job: GpuJob, dense: onnx.ModelProto) -> bytes:
    if job.converted is not None:
        return Path(job.converted).read_bytes()
    import onnx_sparseconv as sc  # noqa: PLC0415

    converted, _ = sc.convert(dense, options=sc.ConvertOptions(force=True))
    assert converted is not None
    return converted.SerializeToString()


def _candidate(job: GpuJob, timed: Timed, model: bytes, config: Mapping[str, str], x: np.ndarray) -> Timed:
    """Load a model in a mode and run it; what fails is the candidate's problem."""
    y = TensorSpec((job.batch, job.layer.out_channels, *job.layer.out_sizes), np.dtype(job.dtype))
    copies = copies_beyond_cache(x.nbytes + y.size_bytes, job.cache_bytes) if job.batch >= ROTATE_FROM_BATCH else 1
    try:
        session = make_session(
            model,
            provider="cuda",
            use_library=timed.model == "sparse",
            session_options=measuring_options(config),
            provider_options=timed.mode.provider_options(),
        )
        name = f"{timed.model} {timed.mode.name}"
        runs = BoundRuns(session, name, {"x": x}, {"y": y}, "cuda", copies=copies, cuda_graph=timed.mode.cuda_graph)
        for _ in range(copies):
            runs()
        if timed.model == "sparse":
            nodes = sparse_nodes(onnx.load_model_from_string(model))
            require_sparse_kernels_on("cuda", kernels_of(nodes, use_library=True))
            timed.kernel = [asdict(info) for info in describe_kernels() if info.node == nodes[0][0]][-1]
        timed.runs = runs
    except SparseConvError as error:
        timed.problem = str(error)
    return timed


def _warm_up(candidates: Sequence[Callable[[], object]]) -> None:
    """Run for a while: an idle GPU has lowered its clocks."""
    end = time.perf_counter() + WARM_UP_S
    while candidates and time.perf_counter() < end:
        for candidate in candidates:
            candidate()


def _errors(
    job: GpuJob, weights: Mapping[str, np.ndarray], x: np.ndarray, candidates: Sequence[Timed]
) -> dict[str, LayerError]:
    """Error against float64 of the first candidate of every model, mode apart from CUDA graphs, and kernel."""
    layer, rank = job.layer, len(job.layer.spatial)
    geometry = ConvGeometry(
        (layer.kernel,) * rank, (layer.stride,) * rank, (layer.pad,) * 2 * rank, (1,) * rank, layer.group
    )
    places = sample_places((job.batch, layer.out_channels, *layer.out_sizes))
    exact = exact_values(
        x, weights["w"], weights["b"], geometry=geometry, places=places, activation=lambda v: np.maximum(v, 0)
    )
    errors: dict[str, LayerError] = {}
    for timed in candidates:
        name = error_name(timed)
        if name not in errors and timed.runs is not None:
            errors[name] = layer_error(timed.runs.outputs()["y"], exact, places)
    return errors


def error_name(timed: Timed) -> str:
    """Under which name a candidate's error stands: CUDA graphs change no result."""
    return " ".join(word for word in (timed.model, timed.mode.without_graph().name, timed.kernel_wanted) if word)


def summarise(
    job: GpuJob, candidates: Sequence[Timed], num_nonzero: int, errors: Mapping[str, LayerError]
) -> dict[str, Any]:
    """The record of a job but for the job itself."""
    num_bytes = tensor_bytes(job.layer, job.batch, job.dtype) + int(num_nonzero) * np.dtype(job.dtype).itemsize
    floor_us = num_bytes / job.bandwidth * 1e6 if job.bandwidth else None
    record: dict[str, Any] = {
        "candidates": [candidate.describe() for candidate in candidates],
        "errors": {name: asdict(error) for name, error in errors.items()},
        "nonzeros": int(num_nonzero),
        "floor_us": floor_us,
        "comparisons": {},
        "best": None,
    }
    dense = [c for c in candidates if c.model == "dense" and c.times is not None]
    sparse = [c for c in candidates if c.model == "sparse" and c.times is not None]
    for name, graph in (("plain", False), ("graph", True)):
        own = [[c for c in side if c.mode.cuda_graph == graph] for side in (dense, sparse)]
        if own[0]:
            record["comparisons"][name] = _compare(job, own[0], own[1], floor_us, errors)
    if record["comparisons"]:
        # CUDA graph on both sides or on neither: whichever lets the dense side run fastest.
        record["best"] = min(record["comparisons"], key=lambda name: record["comparisons"][name]["dense_us"])
    return record


def _compare(
    job: GpuJob,
    dense: Sequence[Timed],
    sparse: Sequence[Timed],
    floor_us: float | None,
    errors: Mapping[str, LayerError],
) -> dict[str, Any]:
    """The fastest of either side."""
    theirs = min(dense, key=_median)
    flops = job.layer.flops * job.batch
    result = {
        "dense_mode": theirs.mode.name,
        "dense_us": _median(theirs),
        "dense_burst_us": min(c.burst_us for c in dense),
        "dense_tflops": flops / _median(theirs) / 1e6,
    }
    if not sparse:
        return result
    ours = min(sparse, key=_median)
    assert theirs.times is not None
    assert ours.times is not None
    gain = speedup(theirs.times, ours.times)
    result |= {
        "sparse_kernel": ours.kernel["kernel"] if ours.kernel else "",
        "sparse_kernel_wanted": ours.kernel_wanted,
        "sparse_us": _median(ours),
        "sparse_burst_us": min(c.burst_us for c in sparse),
        "sparse_tflops": flops / _median(ours) / 1e6,
        "share_of_floor": floor_us / _median(ours) if floor_us else None,
        "speedup": gain.of_medians,
        "speedup_low": gain.low,
        "speedup_high": gain.high,
        "speedup_burst": result["dense_burst_us"] / min(c.burst_us for c in sparse),
    }
    own_error, their_error = errors.get(error_name(ours)), errors.get("dense default")
    ratio = error_ratio(own_error, their_error) if own_error and their_error else None
    return result | {"error_ratio": ratio}


def _median(timed: Timed) -> float:
    assert timed.times is not None
    return timed.times.stats().median_us


def measure_floor(seconds: float) -> dict[str, Any]:
    """What a run costs when there is next to nothing to compute: a Relu of 8 numbers, microseconds.

    Raises:
        ProviderError: CUDA does not work here.
    """
    node = helper.make_node("Relu", ["x"], ["y"], "relu")
    values = [helper.make_tensor_value_info(name, 1, [1, 8]) for name in ("x", "y")]
    graph = helper.make_graph([node], "floor", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    result: dict[str, Any] = {}
    for mode in SPARSE_MODES:
        name = "graph" if mode.cuda_graph else "plain"
        try:
            result[name] = _measure_floor(model, mode, seconds)
        except ModelError as error:
            result[name] = {"problem": str(error)}
    return result


def _measure_floor(model: bytes, mode: CudaMode, seconds: float) -> dict[str, float]:
    session = make_session(
        model,
        provider="cuda",
        use_library=False,
        session_options=measuring_options(),
        provider_options=mode.provider_options(),
    )
    y = TensorSpec((1, 8), np.dtype(np.float32))
    x = np.zeros(y.shape, y.dtype)
    runs = BoundRuns(session, "floor", {"x": x}, {"y": y}, "cuda", cuda_graph=mode.cuda_graph)
    _warm_up([runs])
    (times,) = measure([runs], TimingPlan(seconds=seconds))
    (burst,) = measure([functools.partial(runs.burst, BURST)], TimingPlan(max_rounds=20, seconds=seconds))
    return {"median_us": times.stats().median_us, "burst_us": burst.stats().median_us / BURST}


def read_gpu_state() -> dict[str, str]:
    """What nvidia-smi says of the first GPU: driver, clocks, power, temperature; empty where there is none."""
    fields = (
        *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit"),
        *("temperature.gpu", "memory.total"),
    )
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {}
    return dict(zip(fields, (word.strip() for word in lines[0].split(","))))


def work(task: tuple[str, Any]) -> Any:  # noqa: ANN401
    """What the worker process does: a job, or the launch floor."""
    kind, content = task
    return measure_floor(content) if kind == "floor" else measure_job(content)
