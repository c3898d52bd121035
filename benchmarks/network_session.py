"""Whole networks on a GPU, dense against converted for each batch size: made first, then timed one by one.

Dense are NETWORK.onnx and, in float16, NETWORK.half.onnx; NETWORK.half.32.onnx is converted for 32 images.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
from networks import NETWORKS, with_open_batch

from onnx_sparseconv.converter.conversion import ConvertOptions, convert
from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.files import write_text
from onnx_sparseconv.runtime.bench import CudaBench, bench
from onnx_sparseconv.runtime.environment import git_commit, read_environment
from onnx_sparseconv.runtime.plain import to_json_text, to_plain
from onnx_sparseconv.runtime.timing import TimingPlan

_PRECISIONS: dict[str, Literal["keep", "fp16"]] = {"float32": "keep", "float16": "fp16"}
# What is kept of a session that another one resumed.
_OF_A_SESSION = ("command", "started", "environment")


@dataclass(frozen=True)
class NetworkFiles:
    """The two files of a comparison, and how they are timed.

    Attributes:
        network: of `NETWORKS`, or the path of a pruned model, whose batch size may be fixed.
        dtype: float32 or float16.
        batch: images.
        cuda_graph: whether both sides run as a CUDA graph.
    """

    network: str
    dtype: str
    batch: int
    cuda_graph: bool = False

    @property
    def dense(self) -> str:
        """Name of the dense file."""
        return f"{self._name}.onnx"

    @property
    def converted(self) -> str:
        """Name of the converted file."""
        return f"{self._name}.{self.batch}.onnx"

    @property
    def _name(self) -> str:
        return Path(self.network).stem + (".half" if self.dtype == "float16" else "")


def run_networks(options: argparse.Namespace, head: dict[str, Any]) -> int:
    """Make the files of networks, or time them and write ``options.output`` as it comes.

    Returns:
        The exit code: 1 when something failed.
    """
    cells = [NetworkFiles(*cell) for cell in itertools.product(options.networks, options.dtype, options.batch or [1])]
    if options.prepare is not None:
        return int(prepare(options.prepare, cells, options.target, options.jobs) > 0)
    graphs = [NetworkFiles(cell.network, cell.dtype, cell.batch, cuda_graph=True) for cell in cells]
    return int(_measure(options, head, [*graphs, *cells]) > 0)


def prepare(folder: Path, cells: Sequence[NetworkFiles], targets: Sequence[str], jobs: int) -> int:
    """Write dense and converted files; needs no GPU. Returns how many could not be made."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = {folder / cell.dense: cell for cell in cells}
    converted = {folder / cell.converted: cell for cell in cells}
    with ProcessPoolExecutor(jobs) as pool:
        asked = {
            **{path: pool.submit(_make_dense, path, cell) for path, cell in dense.items()},
            **{path: pool.submit(_make_converted, path, cell, tuple(targets)) for path, cell in converted.items()},
        }
        problems = {path: future.result() for path, future in asked.items()}
    for path, problem in problems.items():
        print(f"{path.name}: {problem or 'written'}", file=sys.stderr)
    return sum(bool(problem) for problem in problems.values())


def _source(network: str) -> onnx.ModelProto:
    return with_open_batch(NETWORKS[network]()) if network in NETWORKS else onnx.load(network)


def _make_dense(path: Path, cell: NetworkFiles) -> str:
    """Returns why not, or nothing."""
    model = _source(cell.network)
    if cell.dtype == "float16":
        # No layer has nothing but zeros.
        model, _ = convert(model, None, ConvertOptions(precision="fp16", min_sparsity=1.0))
    onnx.save(model, str(path))
    return ""


def _make_converted(path: Path, cell: NetworkFiles, targets: Sequence[str]) -> str:
    """Returns why not, or nothing."""
    options = ConvertOptions(precision=_PRECISIONS[cell.dtype], targets=targets, batches=(cell.batch,), jobs=1)
    try:
        model, _ = convert(_source(cell.network), path, options)
    except SparseConvError as error:
        return str(error)
    return "" if model is not None else "no layer qualifies"


def _measure(options: argparse.Namespace, head: dict[str, Any], cells: Sequence[NetworkFiles]) -> int:
    """All that the output file has not yet. When the time is over, nothing further begins. Returns how many failed."""
    earlier = json.loads(options.output.read_text()) if options.resume and options.output.is_file() else {}
    results = {
        **head,
        "environment": read_environment(),
        "models": [record for record in earlier.get("models", ()) if "problem" not in record],
        "earlier_sessions": [
            *earlier.get("earlier_sessions", ()),
            *([{key: earlier[key] for key in _OF_A_SESSION}] if earlier else []),
        ],
    }
    done = {(record["original"]["path"], record["batch"], record["cuda_graph"]) for record in results["models"]}
    missing = [cell for cell in cells if (cell.dense, cell.batch, cell.cuda_graph) not in done]
    deadline, failed = time.monotonic() + 60 * options.minutes, 0
    for count, cell in enumerate(missing):
        if time.monotonic() >= deadline:
            print(f"{len(missing) - count} are left", file=sys.stderr)
            break
        record = _time(options.prepared, cell, TimingPlan(seconds=options.seconds))
        failed += "problem" in record
        results["models"].append({**record, "commit": git_commit()})
        write_text(options.output, to_json_text(results))
    return failed


def _time(folder: Path, cell: NetworkFiles, plan: TimingPlan) -> dict[str, Any]:
    """A comparison's record; where it cannot be made, why."""
    name = f"{cell.dense}, {cell.batch} images{', CUDA graph' if cell.cuda_graph else ''}"
    files = folder / cell.dense, folder / cell.converted
    cuda = CudaBench(cuda_graph=cell.cuda_graph)
    try:
        report = bench(*files, provider="cuda", threads=1, batch=cell.batch, cuda=cuda, plan=plan)
    except SparseConvError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return {
            "original": {"path": cell.dense},
            "batch": cell.batch,
            "cuda_graph": cell.cuda_graph,
            "problem": str(error),
        }
    print(f"{name}: {report.speedup.of_medians:.2f}x", file=sys.stderr, flush=True)
    record: dict[str, Any] = to_plain(report)
    del record["environment"]
    record["original"]["path"], record["converted"]["path"] = cell.dense, cell.converted
    return {**record, "cuda_graph": cell.cuda_graph}
