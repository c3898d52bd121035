"""The papers' suites on a GPU: layers that several suites share are prepared and measured once.

A record is a layer at a batch size in a type with all its sparsities, see `papers`; the file is written after each.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gpu import prepare, prepared_name, read_gpu_state, read_prepared
from gpu_session import FLOOR_SECONDS, earlier_results
from paper_results import PaperResults
from paper_targets import summary
from papers import BASELINES, LOWERED, PaperJob, paper_work
from suite_rows import Layer, SuiteRow, canonical, read_rows
from worker import Worker, WorkFailedError

from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.files import write_text
from onnx_sparseconv.runtime.environment import git_commit, read_environment
from onnx_sparseconv.runtime.plain import to_json_text, to_plain

PAPER_SUITES = ("dong2020", "pietron-vgg16", "pietron-vgg16-pruned", "pietron-other", "sweep")
# Structured pruning is what Dong et al. compare with.
STRUCTURED_SUITES = ("dong2020",)
# Batches in this order: what targets speak of comes first.
BATCH_ORDER = (64, 1, 128)
# After so many jobs that only ran without the lowered matrices, these are left out.
MOST_LOWERED_FAILURES = 2
_OF_A_SESSION = ("command", "started", "environment", "gpu_before", "gpu_after", "floor", "libraries")
Key = tuple[str, int, str, float]


@dataclasses.dataclass(frozen=True)
class Work:
    """A layer at a batch size in a type, and what is asked of it."""

    layer: Layer
    batch: int
    dtype: str
    sparsities: tuple[float, ...]
    structured: bool

    @property
    def keys(self) -> list[Key]:
        """What tells its results from others, one for each sparsity."""
        return [(self.layer.name, self.batch, self.dtype, sparsity) for sparsity in self.sparsities]


def plan_work(
    rows: Iterable[tuple[str, SuiteRow]], dtypes: Sequence[str], sparsities: Sequence[float], batches: Sequence[int]
) -> list[Work]:
    """What there is to measure, each layer once.

    Args:
        rows: suites with their rows.
        dtypes: types of all of them.
        sparsities: instead of those of the rows, where given.
        batches: likewise.

    Returns:
        Batch by batch, in the order of `BATCH_ORDER`; within it as the suites have them.
    """
    found: dict[tuple[Layer, int], tuple[set[float], bool]] = {}
    for suite, row in rows:
        layer = canonical(row.layer)
        for batch in batches or row.batches or (1,):
            known, structured = found.get((layer, batch), (set(), False))
            own = set(sparsities or row.sparsities or (0.9,))
            found[layer, batch] = (known | own, structured or suite in STRUCTURED_SUITES)
    order = {batch: index for index, batch in enumerate(BATCH_ORDER)}
    ordered = sorted(found.items(), key=lambda item: order.get(item[0][1], len(order)))
    return [
        Work(layer, batch, dtype, tuple(sorted(known)), structured)
        for (layer, batch), (known, structured) in ordered
        for dtype in dtypes
    ]


def selected_rows(suites: Sequence[str], layers: Sequence[str] | None) -> list[tuple[str, SuiteRow]]:
    """Rows of suites, by the layers' names, there or canonical; None stands for all.

    Raises:
        UsageError: no row has one of the names.
    """
    rows = [(suite, row) for suite in suites for row in read_rows(suite)]
    if not layers:
        return rows
    names = {name for _, row in rows for name in (row.layer.name, canonical(row.layer).name)}
    if unknown := [name for name in layers if name not in names]:
        raise UsageError(
            f"no layer of {', '.join(suites)} is called {', '.join(unknown)}; there are {', '.join(sorted(names))}"
        )
    return [(suite, row) for suite, row in rows if {row.layer.name, canonical(row.layer).name} & set(layers)]


def run_papers(options: argparse.Namespace, head: dict[str, Any]) -> int:
    """Prepare, or measure what was asked for and write it to ``options.output`` as it comes.

    Returns:
        The exit code: 1 when something failed.

    Raises:
        UsageError: a layer that was asked for is in no suite.
    """
    work = plan_work(selected_rows(options.suite, options.layers), options.dtype, options.sparsity, options.batch)
    if options.prepare is not None:
        cells = [(item.layer, item.batch, item.dtype, sparsity) for item in work for sparsity in item.sparsities]
        return int(prepare(options.prepare, cells, options.target, options.jobs, _say, by_batch=True) > 0)
    earlier = earlier_results(options)
    results = {
        **head,
        "environment": read_environment(),
        "gpu_before": read_gpu_state(),
        "floor": None,
        "libraries": None,
        "layers": [record for record in earlier.get("layers", ()) if not record.get("problem")],
        "earlier_sessions": [
            *earlier.get("earlier_sessions", ()),
            *([{key: earlier.get(key) for key in _OF_A_SESSION}] if earlier else []),
        ],
    }
    jobs = make_jobs(missing_work(work, results["layers"]), options)
    worker = Worker(paper_work)
    try:
        failed = measure_all(jobs, results, worker, options)
    finally:
        worker.close()
    if results["layers"]:
        _say(summary(PaperResults([to_plain(results)])))
    return int(failed > 0)


def measured_keys(records: Iterable[dict[str, Any]]) -> set[Key]:
    """Keys of what the records of a results file hold."""
    return {
        (record["layer"]["name"], record["setting"]["batch"], record["setting"]["dtype"], measured["sparsity"])
        for record in records
        for measured in record.get("measurements", ())
        if measured["baseline"] == "sparse"
    }


def missing_work(work: Iterable[Work], records: Iterable[dict[str, Any]]) -> list[Work]:
    """The work without the sparsities that the records hold; what is complete is left out."""
    done = measured_keys(records)
    left = [
        dataclasses.replace(item, sparsities=tuple(key[-1] for key in item.keys if key not in done)) for item in work
    ]
    return [item for item in left if item.sparsities]


def make_jobs(work: Sequence[Work], options: argparse.Namespace) -> list[PaperJob]:
    """The jobs of a session. What could not be prepared is measured all the same, without images."""
    prepared = read_prepared(options.prepared) if options.prepared is not None else {}
    wanted = {prepared_name(item.layer, s, item.dtype, item.batch) for item in work for s in item.sparsities}
    if lacking := sorted(name for name in wanted if prepared.get(name, {"problem": "not prepared"})["problem"]):
        _say(f"{len(lacking)} of {len(wanted)} layers have no prepared model, and no generated kernel: {lacking[0]} ..")
    chosen = tuple(options.baselines) if options.baselines is not None else BASELINES
    jobs = []
    for item in work:
        names = {sparsity: prepared_name(item.layer, sparsity, item.dtype, item.batch) for sparsity in item.sparsities}
        there = {s: name for s, name in names.items() if not prepared.get(name, {"problem": "not prepared"})["problem"]}
        # Where nobody chose, structured pruning is for the suites that have it.
        without = () if item.structured or options.baselines is not None else ("structured",)
        jobs.append(
            PaperJob(
                layer=item.layer,
                batch=item.batch,
                dtype=item.dtype,
                sparsities=item.sparsities,
                converted={s: str(options.prepared / name) for s, name in there.items()},
                weights={s: prepared[name]["weights"] for s, name in there.items()},
                baselines=tuple(name for name in chosen if name not in without),
                is_thorough=options.thorough,
                seconds=options.seconds,
                cache_bytes=options.cache_mb << 20,
            )
        )
    return jobs


def measure_all(jobs: Sequence[PaperJob], results: dict[str, Any], worker: Worker, options: argparse.Namespace) -> int:
    """Measure the jobs; returns how many failed.

    When the time is over, no further job starts; the results say how many are missing. A job whose process dies is
    tried once more without the lowered matrices, whose libraries run in the same process.
    """
    deadline = time.monotonic() + options.minutes * 60
    results["num_missing"] = len(jobs)
    try:
        results["floor"] = worker.ask(("floor", FLOOR_SECONDS), options.timeout)
    except WorkFailedError as error:
        _say(f"error: nothing can be measured: {error}")
        return len(jobs) or 1
    failed, lowered_failures, commit = 0, 0, git_commit()
    for planned in jobs:
        if time.monotonic() >= deadline:
            break
        job = without_lowered(planned) if lowered_failures >= MOST_LOWERED_FAILURES else planned
        try:
            record = worker.ask(("job", job), options.timeout)
        except WorkFailedError as error:
            record = _try_without_lowered(worker, job, str(error), options.timeout)
            lowered_failures += not record.get("problem")
        results["libraries"] = record.pop("libraries", None) or results["libraries"]
        results["layers"].append({**record, "commit": commit})
        results["num_missing"] -= 1
        failed += bool(record.get("problem"))
        _say(describe(record))
        write_text(options.output, to_json_text(results))
    results["gpu_after"] = read_gpu_state()
    write_text(options.output, to_json_text(results))
    return failed


def without_lowered(job: PaperJob) -> PaperJob:
    """The job without cuBLAS and cuSPARSE."""
    return dataclasses.replace(job, baselines=tuple(name for name in job.baselines if name not in LOWERED))


def _try_without_lowered(worker: Worker, job: PaperJob, problem: str, timeout_s: float) -> dict[str, Any]:
    if not set(LOWERED) & set(job.baselines):
        return {**job.describe(), "problem": problem}
    try:
        record: dict[str, Any] = worker.ask(("job", without_lowered(job)), timeout_s)
    except WorkFailedError as error:
        return {**job.describe(), "problem": str(error)}
    return {**record, "lowered_problem": problem}


def describe(record: dict[str, Any]) -> str:
    """A record on one line: times of single runs, microseconds."""
    setting = record["setting"]
    name = f"{record['layer']['name']:18} batch {setting['batch']:3} {setting['dtype']}:"
    if record.get("problem"):
        return f"{name} {record['problem']}"
    best: dict[str, float] = {}
    problems = []
    for measured in record["measurements"]:
        sparsity = measured["sparsity"]
        label = measured["baseline"] + ("" if sparsity is None else f" {sparsity:.3g}")
        if measured["problem"]:
            problems.append(f"{label}: {measured['problem']}")
        elif measured["baseline"] in ("dense", "cublas", "cusparse", "sparse"):
            best[label] = min(best.get(label, measured["median_us"]), measured["median_us"])
    times = ", ".join(f"{label} {time_us:.0f}" for label, time_us in best.items())
    return "; ".join([f"{name} {times or 'nothing ran'} ({record['seconds']:.1f} s)", *problems])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
