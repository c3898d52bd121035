"""Fits the rule for GPU targets to the layers that were measured, and says how good it is.

    python benchmarks/fit_gpu_rule.py            # write the constants and the table of docs/gpu-rule.md anew
    python benchmarks/fit_gpu_rule.py --check    # fail if they are not what the results say

The results: layers by code of their own (gpu-layers.json), and by the library's kernels (gpu-layers-tensor.json,
gpu-layers-resnet50.json; of one to eight images, gpu-layers-few-images.json and, by clusters, gpu-layers-clusters.json;
of floats, gpu-layers-float.json; with few zeros, gpu-layers-few-zeros.json), and inside networks
(gpu-network-kernels.json, and of float16 and of the library's kernels gpu-network-kernels-h100.json).

Run it whenever layers were measured again, or plans are made differently. The constants are those of a `TimeModel`:
they make the mean square of the logarithms of foretold over measured times least, with a weak pull to where the search
begins, so that a figure that no row tells stays plausible; those of a `NetworkModel` likewise. Needs numpy and the
package, and no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from network_rows import (
    LibraryTimes,
    NetworkRows,
    fit_network,
    network_errors,
    read_library_times,
    read_network_rows,
)

from onnx_sparseconv.converter.gpu_rule import MIN_SAVED_US
from onnx_sparseconv.files import write_text
from onnx_sparseconv.kernels import gpu_time_constants
from onnx_sparseconv.kernels.gpu_network_times import NetworkModel
from onnx_sparseconv.kernels.gpu_times import (
    FLAT,
    GEMM,
    DenseWork,
    LibraryWork,
    SparseWork,
    TimeModel,
    as_arrays,
    cluster_work,
    dense_work,
    fastest_work,
    flat_work,
    library_work,
    pointwise_work,
    segment_work,
    sparse_work,
    tensor_work,
    warpgroup_work,
)
from onnx_sparseconv.kernels.layer import SparseLayer, make_layer
from onnx_sparseconv.kernels.plan import GeneratedPlan, choose_plan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu-layers.json"
LIBRARY_RESULTS = RESULTS.with_name("gpu-layers-tensor.json")
RESNET_RESULTS = RESULTS.with_name("gpu-layers-resnet50.json")
FEW_RESULTS = RESULTS.with_name("gpu-layers-few-images.json")
CLUSTER_RESULTS = RESULTS.with_name("gpu-layers-clusters.json")
# Of all kinds, of ResNets with few to many images, and the first ones of networks.
ALL_KINDS_RESULTS = [RESULTS.with_name(f"gpu-layers-{name}.json") for name in ("any", "batches", "first")]
FEW_ZEROS_RESULTS = RESULTS.with_name("gpu-layers-few-zeros.json")
FLOAT_RESULTS = RESULTS.with_name("gpu-layers-float.json")
TENSOR_RESULTS = RESULTS.with_name("gpu-layers-sm80.json")
SEGMENT_RESULTS = RESULTS.with_name("gpu-layers-planes.json")
NETWORK_RESULTS = RESULTS.with_name("gpu-network-kernels.json")
HALF_NETWORK_RESULTS = RESULTS.with_name("gpu-network-kernels-h100.json")
CONSTANTS = ROOT / "onnx_sparseconv" / "kernels" / "gpu_time_constants.py"
DOCUMENT = ROOT / "docs" / "gpu-rule.md"
ARCHITECTURE = 90
# Without warpgroups, and with as much shared memory as the GPUs that were measured.
TENSOR_ARCHITECTURE = 100
# Clock under load of the GPU that is measured, and its multiprocessors.
CLOCK_MHZ = 1755.0
MULTIPROCESSORS = 132.0
# What an empty model takes of the GPU where runs follow each other, at most: the rest of its time is the host's, which
# begins the next run while a layer is computed. With this, the layers of ResNet-50 with one image take together what
# the network takes.
GPU_FLOOR_US = 3.0
# What a node of a model costs the GPU at least. The empty model, whose time is taken off, has one.
NODE_US = 2.0
# Where the search begins: what is plausible for an H200.
START = TimeModel(
    clock_mhz=CLOCK_MHZ,
    multiprocessors=MULTIPROCESSORS,
    float_tflops=450.0,
    half_tflops=750.0,
    half_depth=1500.0,
    half_moutputs=0.3,
    least_depth=0.0,
    least_moutputs=0.0,
    bandwidth_tb=3.0,
    layout_us=4.0,
    row_us=5.0,
    dense_launch_us=2.0,
    sparse_launch_us=2.0,
    sparse_slowdown=1.0,
    library_launch_us=2.0,
    library_mhz=CLOCK_MHZ,
)
DENSE = (
    "float_tflops",
    "half_tflops",
    "half_depth",
    "half_moutputs",
    "bandwidth_tb",
    "layout_us",
    "dense_launch_us",
)
SPARSE = ("sparse_launch_us", "sparse_slowdown")
LIBRARY = ("library_launch_us", "library_mhz")
# Weight of the pull to the start, against one row.
PULL = 0.3
# With fewer images, the pointwise kernel is done before the host of this run has begun the next one.
LEAST_POINTWISE_BATCH = 4
# What a layer may lose where the rule is wrong: below this share of dense, none of the measured ones is rewritten.
MAX_LOSS = 0.9
# Not less: a layer that is foretold to gain a little may lose, for speed-ups are foretold within about a quarter.
MARGINS = tuple(round(1.2 + 0.05 * step, 2) for step in range(6))
# Constants as written may differ so much from those of another fit: they are rounded, and machines differ.
CHECK_TOLERANCE = 0.02


# Either kind of constants.
_Model = TypeVar("_Model", TimeModel, NetworkModel)


@dataclass(frozen=True)
class Rows:
    """Measured layers, one an element.

    Attributes:
        layers: names.
        dtypes, batches: of each.
        dense, sparse, warpgroup: what they have to do; infinitely much where the library's kernel does not run.
        dense_us, sparse_us, warpgroup_us: what they took, back to back, less an empty run, plus `NODE_US`; infinity
            where the library's kernel does not run.
    """

    layers: tuple[str, ...]
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    dense: DenseWork
    sparse: SparseWork
    warpgroup: LibraryWork
    dense_us: np.ndarray
    sparse_us: np.ndarray
    warpgroup_us: np.ndarray

    def select(self, wanted: np.ndarray) -> Rows:
        """Some of them."""
        index = np.flatnonzero(wanted)
        names = [tuple(values[i] for i in index) for values in (self.layers, self.dtypes, self.batches)]
        works = [
            type(work)(**{name: values[index] for name, values in vars(work).items()})
            for work in (self.dense, self.sparse, self.warpgroup)
        ]
        return Rows(*names, *works, self.dense_us[index], self.sparse_us[index], self.warpgroup_us[index])


NO_WARPGROUPS = LibraryWork(math.inf)


def read_warpgroups(path: Path) -> dict[tuple[object, ...], float]:
    """What layers took on the library's warpgroup kernel, by name, sparsity, type and batch size."""
    results = json.loads(path.read_text())
    found = {}
    for record in results["layers"]:
        setting, best = record["setting"], record["comparisons"].get(record.get("best"), {})
        if best.get("sparse_kernel") == "cuda.wgmma":
            key = (record["layer"]["name"], setting["sparsity"], setting["dtype"], setting["batch"])
            found[key] = _layer_us(results, record, "sparse")
    return found


@dataclass(frozen=True)
class KernelRows:
    """Layers measured on one of the library's kernels, one an element; the layers' names, their work and times."""

    layers: tuple[str, ...]
    work: LibraryWork
    took_us: np.ndarray


@dataclass(frozen=True)
class LibraryRows:
    """Layers measured on the library's kernels that `Rows` does not tell of.

    Attributes:
        few_images: one to eight images, but by clusters.
        clusters: one to four images, by clusters; not fitted to.
        pointwise: on the warpgroup kernel for 1x1.
        floats: of floats, where TF32 is allowed; not fitted to.
        flat: from flat X, with many zeros; not fitted to.
        few_zeros: by the kernel that ran them; not fitted to.
        tensor, segments: on the kernels for sm_80 and later, windows and 1x1; not fitted to.
        all_kinds: layers of all kinds, by the kernel that ran them, of a library without the flat one; not fitted to.
    """

    few_images: KernelRows
    clusters: KernelRows
    pointwise: KernelRows
    floats: KernelRows
    flat: KernelRows
    few_zeros: KernelRows
    tensor: KernelRows
    segments: KernelRows
    all_kinds: KernelRows


# With fewer, another kernel runs than ran when few images were measured.
LEAST_CHANNELS = 8


def read_library_rows() -> LibraryRows:
    """The rows of layers for which the kernel's time is foretold."""
    return LibraryRows(
        _read_kernel_rows([FEW_RESULTS], library_work, least_channels=LEAST_CHANNELS),
        _read_kernel_rows([CLUSTER_RESULTS], cluster_work, kernels=("cuda.cluster",)),
        _read_kernel_rows([LIBRARY_RESULTS, RESNET_RESULTS], pointwise_work, least_batch=LEAST_POINTWISE_BATCH),
        _read_kernel_rows([FLOAT_RESULTS], library_work),
        _read_kernel_rows([LIBRARY_RESULTS, FLOAT_RESULTS], flat_work, kernels=("cuda.flat",)),
        _read_kernel_rows([FEW_ZEROS_RESULTS], fastest_work, kernels=("cuda.flat", "cuda.wgmma"), by_kernel=True),
        _read_kernel_rows([TENSOR_RESULTS], tensor_work, kernels=("cuda.tensor",), architecture=TENSOR_ARCHITECTURE),
        _read_kernel_rows(
            [SEGMENT_RESULTS], segment_work, kernels=("cuda.segments",), architecture=TENSOR_ARCHITECTURE
        ),
        _read_kernel_rows(
            ALL_KINDS_RESULTS,
            functools.partial(fastest_work, without=(FLAT, GEMM)),
            kernels=("cuda.cluster", "cuda.wgmma", "cuda.csr"),
            by_kernel=True,
        ),
    )


def _read_kernel_rows(
    paths: Sequence[Path],
    work_of: Callable[[SparseLayer, int, int, float], LibraryWork | None],
    *,
    kernels: Sequence[str] = ("cuda.wgmma", "cuda.csr"),
    least_batch: int = 1,
    least_channels: int = 1,
    by_kernel: bool = False,
    architecture: int = ARCHITECTURE,
) -> KernelRows:
    names, works, times = [], [], []
    layers: dict[tuple[object, ...], SparseLayer] = {}
    for results in (json.loads(path.read_text()) for path in paths):
        for record in results["layers"]:
            layer, setting = record["layer"], record["setting"]
            kernel = record["comparisons"].get(record.get("best"), {}).get("sparse_kernel")
            if kernel not in kernels or setting["batch"] < least_batch or layer["in_channels"] < least_channels:
                continue
            key = (*layer.values(), setting["sparsity"], setting["dtype"])
            if key not in layers:  # it was measured with several numbers of images
                layers[key] = make_measured_layer(layer, setting, record["nonzeros"])
            work = work_of(layers[key], architecture, setting["batch"], MULTIPROCESSORS)
            if work is not None:
                names.append(kernel if by_kernel else layer["name"])
                works.append(work)
                times.append(_layer_us(results, record, "sparse"))
    if not names:
        raise ValueError(f"{', '.join(path.name for path in paths)}: no layer ran on a kernel of the library's own")
    return KernelRows(tuple(names), LibraryWork(**as_arrays(works)), np.array(times))


def _layer_us(results: dict[str, Any], record: dict[str, Any], side: str) -> float:
    floor = min(results["floor"][record["best"]]["burst_us"], GPU_FLOOR_US)
    return float(max(record["comparisons"][record["best"]][f"{side}_burst_us"] - floor, 0.0) + NODE_US)


def read_rows(path: Path, library_path: Path) -> Rows:
    """The rows of a results file that a plan of today would run, with those of the library's kernels beside them.

    Raises:
        ValueError: the weights of a row cannot be made again as they were.
    """
    results, warpgroups = json.loads(path.read_text()), read_warpgroups(library_path)
    plans: dict[tuple[object, ...], tuple[SparseLayer, GeneratedPlan | None]] = {}
    found = []
    for record in results["layers"]:
        layer, setting, best = record["layer"], record["setting"], record["comparisons"].get(record.get("best"), {})
        if not str(best.get("sparse_kernel", "")).startswith("cuda.generated"):
            continue
        key = (layer["name"], setting["sparsity"], setting["dtype"])
        if key not in plans:
            made = make_measured_layer(layer, setting, record["nonzeros"])
            plan = choose_plan(made, ARCHITECTURE)
            plans[key] = made, plan if isinstance(plan, GeneratedPlan) else None
        made, plan = plans[key]
        if plan is not None:
            times = [_layer_us(results, record, side) for side in ("dense", "sparse")]
            batch = setting["batch"]
            on_warpgroups = None
            if (*key, batch) in warpgroups:
                on_warpgroups = warpgroup_work(made, ARCHITECTURE, batch, MULTIPROCESSORS)
            works = (
                dense_work(made, batch),
                sparse_work(made, plan, batch, CLOCK_MHZ),
                on_warpgroups or NO_WARPGROUPS,
            )
            times.append(warpgroups[*key, batch] if on_warpgroups else math.inf)
            found.append((layer["name"], setting["dtype"], batch, *works, *times))
    names, dtypes, batches, dense, sparse, warpgroup, *times = zip(*found, strict=True)
    works = [
        kind(**as_arrays(list(of_kind)))
        for kind, of_kind in ((DenseWork, dense), (SparseWork, sparse), (LibraryWork, warpgroup))
    ]
    return Rows(names, dtypes, batches, *works, *map(np.array, times))


def make_measured_layer(layer: dict[str, Any], setting: dict[str, Any], nonzeros: int) -> SparseLayer:
    """A layer with the weights that it was measured with, as ``layers.make_weights`` makes them.

    Raises:
        ValueError: their non-zeros are not as many as there were.
    """
    spatial = (layer["width"],) if layer["height"] == 1 else (layer["height"], layer["width"])
    rank = len(spatial)
    rng = np.random.default_rng(0)
    shape = (layer["out_channels"], layer["in_channels"] // layer["group"], *(layer["kernel"],) * rank)
    weight = rng.standard_normal(shape)
    weight[rng.random(shape) < setting["sparsity"]] = 0
    if np.count_nonzero(weight) != nonzeros:
        raise ValueError(f"{layer['name']} was measured with {nonzeros} non-zeros, and has {np.count_nonzero(weight)}")
    dtype = np.dtype(setting["dtype"])
    made = make_layer(
        weight.astype(dtype),
        strides=(layer["stride"],) * rank,
        dilations=(1,) * rank,
        pads=(layer["pad"],) * (2 * rank),
        group=layer["group"],
        element_type=dtype,
        activation=0,
        in_size=spatial,
    )
    assert isinstance(made, SparseLayer)
    return made


def fit(rows: Rows, library: LibraryRows | None = None) -> TimeModel:
    """The model that foretells the rows best."""
    least = replace(
        START,
        least_depth=float(np.min(rows.dense.depth)),
        least_moutputs=float(np.min(rows.dense.moutputs)),
        row_us=0.0,
    )
    model = _fit_some(least, DENSE, lambda m: np.log(m.dense_us(rows.dense) / rows.dense_us))
    # By itself: fitted with the others, it moves them, and networks that were measured to gain would stay dense.
    in_row = rows.dense.is_row > 0
    model = replace(model, row_us=START.row_us)
    model = _fit_some(model, ("row_us",), lambda m: np.log(m.dense_us(rows.dense) / rows.dense_us)[in_row])
    model = _fit_some(model, SPARSE, lambda m: np.log(m.sparse_us(rows.sparse) / rows.sparse_us))
    on = rows.select(np.isfinite(rows.warpgroup_us))
    works, times = [on.warpgroup], [on.warpgroup_us]
    for more in (library.few_images, library.pointwise) if library is not None else ():
        works.append(more.work)
        times.append(more.took_us)
    work, took_us = LibraryWork(np.concatenate([w.kcycles for w in works])), np.concatenate(times)
    return _fit_some(model, LIBRARY, lambda m: np.log(m.cycles_us(work) / took_us))


def fastest_us(rows: Rows, sparse_us: np.ndarray, warpgroup_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the sparse kernel that is foretold to be the faster one: what was foretold, and what it took."""
    on_warpgroups = warpgroup_us < sparse_us
    return np.minimum(sparse_us, warpgroup_us), np.where(on_warpgroups, rows.warpgroup_us, rows.sparse_us)


def _fit_some(start: _Model, names: Sequence[str], errors: Callable[[_Model], np.ndarray]) -> _Model:
    """Levenberg and Marquardt's method on the logarithms of some constants."""

    def model_at(steps: np.ndarray) -> _Model:
        return replace(start, **{n: getattr(start, n) * math.exp(s) for n, s in zip(names, steps, strict=True)})

    def residuals(steps: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(model_at(steps)), PULL * steps])

    steps, damping = np.zeros(len(names)), 1e-2
    now = residuals(steps)
    for _ in range(200):
        slopes = np.stack([(residuals(steps + d) - now) / 1e-5 for d in np.eye(len(names)) * 1e-5], axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ now
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        after = residuals(steps + step)
        if after @ after < now @ now:
            gained = now @ now - after @ after
            steps, now, damping = steps + step, after, damping / 5
            if gained < 1e-9 * (now @ now):
                break
        elif damping > 1e9:
            break
        else:
            damping *= 4
    return model_at(steps)


@dataclass(frozen=True)
class Quality:
    """How good a model is on some rows.

    Attributes:
        rows: how many.
        right: those that would be decided as by what was measured.
        losing: those that would be rewritten and lose.
        worst_loss: the least speed-up among them (1 where there is none).
        missed: those that gain, and save enough, and would stay dense.
        best_missed: the largest speed-up among them (1 where there is none).
        dense_error, sparse_error, gain_error: typical factor between foretold and measured: the exponential of the root
            mean square of the logarithms.
    """

    rows: int
    right: int
    losing: int
    worst_loss: float
    missed: int
    best_missed: float
    dense_error: float
    sparse_error: float
    gain_error: float


# Of dense convolutions, of generated kernels and of the warpgroup kernel, an array each.
Times = tuple[np.ndarray, np.ndarray, np.ndarray]


def decide(dense_us: np.ndarray, sparse_us: np.ndarray, margin: float) -> np.ndarray:
    """Which layers the rule rewrites, by such times."""
    return (dense_us / sparse_us >= margin) & (dense_us - sparse_us >= MIN_SAVED_US)


def rate(rows: Rows, times: Times, margin: float) -> Quality:
    """Compare foretold times with the measured ones."""
    dense_us, (sparse_us, took_us) = times[0], fastest_us(rows, *times[1:])
    gain, foretold = rows.dense_us / took_us, dense_us / sparse_us
    best_us = np.minimum(rows.sparse_us, rows.warpgroup_us)
    rewritten, worth_it = decide(dense_us, sparse_us, margin), decide(rows.dense_us, best_us, 1.0)
    losing, missed = rewritten & (gain < 1), ~rewritten & worth_it
    errors = [_typical(a / b) for a, b in ((dense_us, rows.dense_us), (sparse_us, took_us), (foretold, gain))]
    return Quality(
        len(gain),
        int(np.sum(rewritten == worth_it)),
        int(losing.sum()),
        float(np.min(gain[losing], initial=1.0)),
        int(missed.sum()),
        float(np.max((rows.dense_us / best_us)[missed], initial=1.0)),
        *errors,
    )


def _typical(ratios: np.ndarray) -> float:
    return math.exp(math.sqrt(float(np.mean(np.log(ratios) ** 2))))


def choose_margin(rows: Rows, model: TimeModel) -> float:
    """The least margin with which no measured layer would be rewritten that loses much, else that with the fewest."""
    dense_us, *others = foretell(rows, model)
    sparse_us, took_us = fastest_us(rows, *others)
    loses = rows.dense_us / took_us < MAX_LOSS
    return min(MARGINS, key=lambda margin: (int(np.sum(decide(dense_us, sparse_us, margin) & loses)), margin))


def foretell(rows: Rows, model: TimeModel) -> Times:
    """Times of each layer."""
    return model.dense_us(rows.dense), model.sparse_us(rows.sparse), model.cycles_us(rows.warpgroup)


def foretell_unseen(rows: Rows) -> Times:
    """Times of each layer by a model that was fitted without any row of that layer."""
    times = tuple(np.empty_like(rows.dense_us) for _ in range(3))
    names = np.array(rows.layers)
    for name in dict.fromkeys(rows.layers):
        left_out = rows.select(names == name)
        for all_times, some in zip(times, foretell(left_out, fit(rows.select(names != name))), strict=True):
            all_times[names == name] = some
    return times[0], times[1], times[2]


def rounded(model: _Model) -> _Model:
    """With as many digits as are written."""
    names = [field.name for field in fields(model)]
    return replace(model, **{name: float(f"{getattr(model, name):.4g}") for name in names})


@dataclass(frozen=True)
class Measured:
    """All that was measured: layers by themselves, on the library's kernels, and inside networks."""

    rows: Rows
    library: LibraryRows
    network: NetworkRows
    half_network: NetworkRows


@dataclass(frozen=True)
class Constants:
    """All that is fitted to it."""

    model: TimeModel
    network: NetworkModel
    half_network: NetworkModel
    margin: float


def constants_text(constants: Constants, device: str) -> str:
    """The module that holds the constants."""
    lines, network_lines, half_lines = (
        "\n".join(f"    {field.name}={getattr(one, field.name)!r}," for field in fields(one))
        for one in (constants.model, constants.network, constants.half_network)
    )
    return (
        '"""Figures of the models of times. Made by ``benchmarks/fit_gpu_rule.py``; do not edit."""\n\n'
        "from onnx_sparseconv.kernels.gpu_network_times import NetworkModel\n"
        "from onnx_sparseconv.kernels.gpu_times import TimeModel\n\n"
        "# What the layers were measured on, and its architecture.\n"
        f'MEASURED_ON = "{device}"\nMEASURED_ARCHITECTURE = {ARCHITECTURE}\n'
        f"MODEL = TimeModel(\n{lines}\n)\n"
        f"NETWORK = NetworkModel(\n{network_lines}\n)\n"
        f"# Of float16.\nHALF_NETWORK = NetworkModel(\n{half_lines}\n)\n"
        "# A layer is rewritten where it is foretold to gain by this factor, at least. The least one from 1.2 on with\n"
        "# which no measured layer would be rewritten that loses more than a tenth, else of those with the fewest.\n"
        f"MIN_GAIN = {constants.margin!r}\n"
    )


def quality_table(rows: Rows, model: TimeModel, margin: float) -> str:
    """Markdown: how good the rule is, by type and batch size, and on layers that were left out of the fit."""
    times = foretell(rows, model)
    head = ["layers", "measured", "right", "lose, rewritten", "worst", "gain, left dense", "best"]
    head += ["error of dense", "of sparse", "of speed-up"]
    lines = [_table_row("all", rate(rows, times, margin))]
    kinds = list(dict.fromkeys(zip(rows.dtypes, rows.batches, strict=True)))
    for dtype, batch in kinds:
        chosen = np.array([(d, b) == (dtype, batch) for d, b in zip(rows.dtypes, rows.batches, strict=True)])
        quality = rate(rows.select(chosen), (times[0][chosen], times[1][chosen], times[2][chosen]), margin)
        lines.append(_table_row(f"{dtype}, batch {batch}", quality))
    unseen = rate(rows, foretell_unseen(rows), margin)
    lines.append(_table_row("all, each layer left out of the fit", unseen))
    return _table(head, lines)


def _table_row(name: str, quality: Quality) -> list[str]:
    return [
        name,
        str(quality.rows),
        f"{quality.right / quality.rows:.0%}",
        str(quality.losing),
        f"{quality.worst_loss:.2f}x" if quality.losing else "-",
        str(quality.missed),
        f"{quality.best_missed:.2f}x" if quality.missed else "-",
        *(f"{100 * (error - 1):.0f}%" for error in (quality.dense_error, quality.sparse_error, quality.gain_error)),
    ]


def library_table(rows: KernelRows, foretold_us: np.ndarray, kind: str = "layer") -> str:
    """Markdown: how well the times of the library's kernels are foretold."""
    ratios, names = foretold_us / rows.took_us, np.array(rows.layers)
    lines = [
        [name, str(np.sum(names == name)), f"{100 * (_typical(ratios[names == name]) - 1):.0f}%"]
        for name in dict.fromkeys(rows.layers)
    ]
    lines.append(["all", str(names.size), f"{100 * (_typical(ratios) - 1):.0f}%"])
    return _table([kind, "measured", "error"], lines)


def network_table(rows: NetworkRows, model: NetworkModel) -> str:
    """Markdown: how well times inside networks are foretold."""
    dense, code = network_errors(rows, model)
    lines = [
        [kind, str(len(ratios)), f"{100 * (_typical(ratios) - 1):.0f}%"]
        for kind, ratios in (
            ("dense, with bias and activation", dense[~rows.is_depthwise]),
            ("the same, depthwise", dense[rows.is_depthwise]),
            ("generated code", code),
        )
    ]
    return _table(["kind of layer", "measured", "error"], lines)


def network_library_table(times: dict[str, LibraryTimes]) -> str:
    """Markdown: how well times of the library's kernels inside networks are foretold, by type."""
    lines = []
    for dtype, of_type in times.items():
        ratios, kernels = of_type.foretold_us / of_type.took_us, np.array(of_type.kernels)
        for kernel in sorted(set(of_type.kernels)):
            some = ratios[kernels == kernel]
            mean = math.exp(float(np.mean(np.log(some))))
            lines.append([f"{kernel}, {dtype}", str(some.size), f"{mean:.2f}", f"{100 * (_typical(some) - 1):.0f}%"])
    return _table(["kernel", "measured", "predicted of measured, in the mean", "error"], lines)


def constants_table(model: TimeModel, margin: float) -> str:
    """Markdown: the constants."""
    rows = [[field.name, f"{getattr(model, field.name):.4g}"] for field in fields(model)]
    return _table(["constant", "value"], [*rows, ["MIN_GAIN", f"{margin:.4g}"]])


def network_constants_table(network: NetworkModel, half: NetworkModel) -> str:
    """Markdown: the constants of networks, of both types."""
    names = [field.name for field in fields(network)]
    rows = [[name, *(f"{getattr(model, name):.4g}" for model in (network, half))] for name in names]
    return _table(["constant", "float32", "float16"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def read_measured() -> Measured:
    """What the results say."""
    network = read_network_rows(NETWORK_RESULTS, "float32", ARCHITECTURE, CLOCK_MHZ)
    half_network = read_network_rows(HALF_NETWORK_RESULTS, "float16", ARCHITECTURE, CLOCK_MHZ)
    return Measured(read_rows(RESULTS, LIBRARY_RESULTS), read_library_rows(), network, half_network)


def constants_in_use() -> Constants:
    """Those of the package."""
    found = gpu_time_constants
    return Constants(found.MODEL, found.NETWORK, found.HALF_NETWORK, found.MIN_GAIN)


def with_tables(text: str, measured: Measured, constants: Constants) -> str:
    """The document with its tables made anew, between ``<!-- table: NAME -->`` and ``<!-- end -->``."""
    library, model = measured.library, constants.model
    in_networks = {
        dtype: read_library_times(HALF_NETWORK_RESULTS, dtype, ARCHITECTURE, model) for dtype in ("float32", "float16")
    }
    tables = {
        "gpu-rule": quality_table(measured.rows, model, constants.margin),
        "gpu-rule-few-images": library_table(library.few_images, model.cycles_us(library.few_images.work)),
        "gpu-rule-clusters": library_table(library.clusters, model.cycles_us(library.clusters.work)),
        "gpu-rule-pointwise": library_table(library.pointwise, model.cycles_us(library.pointwise.work)),
        "gpu-rule-floats": library_table(library.floats, model.cycles_us(library.floats.work)),
        "gpu-rule-flat": library_table(library.flat, model.cycles_us(library.flat.work)),
        "gpu-rule-few-zeros": library_table(library.few_zeros, model.cycles_us(library.few_zeros.work), "ran on"),
        "gpu-rule-tensor": library_table(library.tensor, model.cycles_us(library.tensor.work)),
        "gpu-rule-segments": library_table(library.segments, model.cycles_us(library.segments.work)),
        "gpu-rule-all-kinds": library_table(library.all_kinds, model.cycles_us(library.all_kinds.work), "ran on"),
        "gpu-rule-network": network_table(measured.network, constants.network),
        "gpu-rule-half-network": network_table(measured.half_network, constants.half_network),
        "gpu-rule-network-library": network_library_table(in_networks),
        "gpu-rule-constants": constants_table(model, constants.margin),
        "gpu-rule-network-constants": network_constants_table(constants.network, constants.half_network),
    }

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def check(measured: Measured) -> list[str]:
    """What is not as the results have it; empty where all is."""
    have = constants_in_use()
    pairs: tuple[tuple[TimeModel | NetworkModel, TimeModel | NetworkModel], ...] = (
        (have.model, fit(measured.rows, measured.library)),
        (have.network, fit_network(measured.network, _fit_some)),
        (have.half_network, fit_network(measured.half_network, _fit_some)),
    )
    problems = []
    for now, wanted in pairs:
        for name, then in vars(wanted).items():
            if abs(getattr(now, name) - then) > CHECK_TOLERANCE * abs(then):
                problems.append(f"{CONSTANTS.name}: {name} is {getattr(now, name):.4g}, and fitted {then:.4g}")
    if not problems and choose_margin(measured.rows, have.model) != have.margin:
        problems.append(f"{CONSTANTS.name}: MIN_GAIN is {have.margin}, not {choose_margin(measured.rows, have.model)}")
    text = DOCUMENT.read_text()
    if with_tables(text, measured, have) != text:
        problems.append(f"{DOCUMENT.name}: a table is not what the results and the constants say")
    return problems


def main() -> int:
    """Run the program.

    Returns:
        The exit code: 1 when something is not as the results have it.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where something is out of date")
    options = parser.parse_args()
    measured = read_measured()
    if options.check:
        problems = check(measured)
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems:
            print("run: python benchmarks/fit_gpu_rule.py", file=sys.stderr)
        return int(bool(problems))
    model = rounded(fit(measured.rows, measured.library))
    network = rounded(fit_network(measured.network, _fit_some))
    half_network = rounded(fit_network(measured.half_network, _fit_some))
    constants = Constants(model, network, half_network, choose_margin(measured.rows, model))
    device = json.loads(RESULTS.read_text())["environment"]["cuda"]["gpus"][0]["name"]
    write_text(CONSTANTS, constants_text(constants, device))
    document = with_tables(DOCUMENT.read_text(), measured, constants)
    write_text(DOCUMENT, document)
    print("\n\n".join(re.findall(r"<!-- table: \S+ -->\n(.*?)\n<!-- end -->", document, flags=re.DOTALL)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
