"""A measuring session on a GPU: job by job, each record written at once, a failed job a record like the others."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu import (
    GpuJob,
    grid,
    key_of,
    prepare,
    prepared_name,
    read_gpu_state,
    read_prepared,
    work,
)
from memory_floor import memory_bandwidth
from suite_rows import SuiteRow, read_rows
from worker import Worker, WorkFailedError

from onnx_sparseconv.files import write_text
from onnx_sparseconv.runtime.environment import git_commit, read_environment
from onnx_sparseconv.runtime.plain import to_json_text

FLOOR_SECONDS = 0.5
# What is kept of a session that another one resumed.
_OF_A_SESSION = ("command", "started", "environment", "gpu_before", "gpu_after", "floor", "libraries")


def run_gpu(options: argparse.Namespace, head: dict[str, Any]) -> int:
    """Prepare, or measure what was asked for and write it to ``options.output`` as it comes.

    Returns:
        The exit code: 1 when something failed.
    """
    rows = selected_rows(options)
    cells = grid(rows, options.dtype, options.sparsity, options.batch)
    if options.prepare is not None:
        return int(prepare(options.prepare, cells, options.target, options.jobs, _say) > 0)
    environment = read_environment()
    gpu_name = environment.cuda.gpus[0].name if environment.cuda.gpus else ""
    bandwidth, source = memory_bandwidth(options.bandwidth, gpu_name)
    jobs = make_jobs(options, cells, bandwidth)
    earlier = earlier_results(options)
    results = {
        **head,
        "environment": environment,
        "gpu_before": read_gpu_state(),
        "memory_bandwidth": {"bytes_per_s": bandwidth, "source": source},
        "floor": None,
        "libraries": None,
        "layers": [record for record in earlier.get("layers", ()) if not record.get("problem")],
        "earlier_sessions": [
            *earlier.get("earlier_sessions", ()),
            *([{key: earlier.get(key) for key in _OF_A_SESSION}] if earlier else []),
        ],
    }
    worker = Worker(work)
    try:
        return int(measure_all(jobs, results, worker, options) > 0)
    finally:
        worker.close()


def selected_rows(options: argparse.Namespace) -> list[SuiteRow]:
    """The rows of the suites, but for layers that were not asked for."""
    rows = [row for name in options.suite for row in read_rows(name)]
    return [row for row in rows if not options.layers or row.layer.name in options.layers]


def make_jobs(options: argparse.Namespace, cells: list[Any], bandwidth: float) -> list[GpuJob]:
    """The jobs of a session. Layers that could not be prepared are measured all the same, without images."""
    prepared = read_prepared(options.prepared) if options.prepared is not None else {}
    jobs = []
    for layer, batch, dtype, sparsity in cells:
        name = prepared_name(layer, sparsity, dtype)
        entry = prepared.get(name, {"problem": "not prepared"})
        has_file = not entry["problem"]
        jobs.append(
            GpuJob(
                layer=layer,
                sparsity=sparsity,
                batch=batch,
                dtype=dtype,
                converted=str(options.prepared / name) if has_file else None,
                weights=entry["weights"] if has_file else "",
                kernels=() if options.dense_only else tuple(options.kernel),
                config=dict(word.split("=", 1) for word in options.config),
                seconds=options.seconds,
                bandwidth=bandwidth,
                cache_bytes=options.cache_mb << 20,
            )
        )
    return jobs


def earlier_results(options: argparse.Namespace) -> dict[str, Any]:
    """With ``--resume``, what the output file holds; else nothing."""
    if not options.resume or not options.output.is_file():
        return {}
    results: dict[str, Any] = json.loads(options.output.read_text())
    return results


def measure_all(jobs: list[GpuJob], results: dict[str, Any], worker: Worker, options: argparse.Namespace) -> int:
    """Measure every job that is not among the results yet; returns how many failed.

    When the time is over, no further job starts; the results say how many are missing. Where not even the launch floor
    can be measured, nothing can.
    """
    deadline = time.monotonic() + options.minutes * 60
    done = {key_of(record) for record in results["layers"]}
    missing = [job for job in jobs if job.key not in done]
    results["num_missing"] = len(missing)
    try:
        results["floor"] = worker.ask(("floor", FLOOR_SECONDS), options.timeout)
    except WorkFailedError as error:
        _say(f"error: nothing can be measured: {error}")
        return len(missing) or 1
    failed, commit = 0, git_commit()
    for job in missing:
        if time.monotonic() >= deadline:
            break
        try:
            record = worker.ask(("job", job), options.timeout)
        except WorkFailedError as error:
            record = {**job.describe(), "problem": str(error)}
        results["libraries"] = record.pop("libraries", results.get("libraries"))
        results["layers"].append({**record, "commit": commit})
        results["num_missing"] -= 1
        failed += not record.get("best")
        _say(describe(record))
        _write(results, options.output)
    results["gpu_after"] = read_gpu_state()
    _write(results, options.output)
    return failed


def describe(record: dict[str, Any]) -> str:
    """A record on one line."""
    setting = record["setting"]
    name = f"{record['layer']['name']:18} {setting['sparsity']:6.1%} batch {setting['batch']:3} {setting['dtype']}:"
    if record.get("problem"):
        return f"{name} {record['problem']}"
    if record["best"] is None:
        problems = {c["problem"] for c in record["candidates"] if c["problem"]}
        return f"{name} nothing ran: {'; '.join(sorted(problems))}"
    best = record["comparisons"][record["best"]]
    dense = f"dense {best['dense_us']:9.1f} us ({best['dense_mode']})"
    if "sparse_us" not in best:
        problems = {c["problem"] for c in record["candidates"] if c["problem"]}
        return " ".join([name, dense, *sorted(problems)])
    return f"{name} {dense}, sparse {best['sparse_us']:9.1f} us ({best['sparse_kernel']}), {best['speedup']:.2f}x"


def _write(results: dict[str, Any], path: Path) -> None:
    write_text(path, to_json_text(results))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
