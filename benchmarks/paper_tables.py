"""Tables and pictures of the papers' suites, from results files, beside what the papers report of their machine."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paper_results import SUB_BATCHES, Cell, PaperResults, Record, target_layers
from paper_targets import BATCH, DTYPES, LOWERED_GAINS, LOWERED_NAMES, SPARSITY, targets_table
from suite_rows import Layer, canonical, read_rows, read_suite
from tables import NOT_MEASURED, break_even, table

REPORTED = Path(__file__).with_name("reported.csv")
PAPER_BATCH = 128


def read_reported() -> list[dict[str, str]]:
    """The rows of what the paper reports."""
    with REPORTED.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def machine_text(results: PaperResults) -> str:
    """What was measured with what, a line for each results file."""
    lines = []
    for content in results.files:
        environment, state, libraries = content["environment"], content["gpu_before"], content["libraries"] or {}
        commits = sorted({_short(record["commit"]) for record in content["layers"] if record.get("commit")})
        versions = [
            f"onnxruntime-gpu {environment['versions'].get('onnxruntime-gpu') or 'unknown'}",
            *(f"{name} {version}" for name, version in libraries.items() if version and name != "built_for"),
        ]
        machine = f"{state.get('name', 'unknown GPU')}, driver {state.get('driver_version', 'unknown')}"
        measured = f"{content['started'][:10]}, commit {', '.join(commits) or 'unknown'}."
        lines.append(f"{_settings_of(content)}: {machine}, {', '.join(versions)}; {measured}")
    return "\n\n".join(lines)


def _settings_of(content: Mapping[str, Any]) -> str:
    """What a results file has: types, and batch sizes."""
    settings = [record["setting"] for record in content["layers"]]
    types = sorted({setting["dtype"] for setting in settings})
    batches = sorted({setting["batch"] for setting in settings})
    return f"{' and '.join(types)}, {' and '.join(map(str, batches))} image{'s' * (batches != [1])}"


def _short(commit: str) -> str:
    """The first digits of a commit, and what is said of changes to it."""
    digits, dash, remark = commit.partition("-")
    return digits[:12] + dash + remark


def dong_table(results: PaperResults, batch: int) -> str:
    """Dong's layers at 90%: every baseline, and how many times faster ours is."""
    return _against_all(results, read_suite("dong2020"), batch)


def pietron_table(results: PaperResults, suite: str) -> str:
    """A suite of Pietron & Zurek at 90%: every baseline, and how many times faster ours is, at batch 64."""
    return _against_all(results, read_suite(suite), BATCH)


_COMPARED = {
    "dense": "dense",
    "dense-fp32": "dense, no TF32",
    "cublas": "cuBLAS",
    "cublas-fp32": "cuBLAS, no TF32",
    "cusparse": "cuSPARSE",
    "csr": "CSR",
}


def _against_all(results: PaperResults, layers: Iterable[Layer], batch: int) -> str:
    head = ["layer", "type", *_COMPARED.values(), "SparseConv", "kernel"]
    head += ["over dense", "over cuBLAS", "over cuSPARSE", "over CSR", "breaks even"]
    rows = []
    for layer, dtype, cell in _cells(results, layers, batch, SPARSITY):
        ours = cell.ours()
        assert ours is not None
        rows.append(
            [
                layer.name,
                dtype,
                *(_time(cell.best.get(name)) for name in _COMPARED),
                _time(ours),
                ours["kernel"],
                _times(cell.gain("dense")),
                _times(cell.gain("cublas", "burst_us")),
                _times(cell.gain("cusparse", "burst_us")),
                _times(cell.gain("csr")),
                break_even_text(results, layer, batch, dtype),
            ]
        )
    return table(head, rows) if rows else NOT_MEASURED


def structured_table(results: PaperResults) -> str:
    """Dong's layers at 90% against dense layers of which channels, filters or both were pruned away."""
    halves = {"half-in": "half the channels", "half-out": "half the filters", "half-both": "half of both"}
    head = ["layer", "type", "batch", "SparseConv", *(f"dense, {name}" for name in halves.values())]
    head += [f"over {name}" for name in halves.values()]
    rows = []
    for batch in (BATCH, 1):
        for layer, dtype, cell in _cells(results, read_suite("dong2020"), batch, SPARSITY):
            if set(halves) & set(cell.best):
                times = [_time(cell.best.get(name)) for name in halves]
                gains = [_times(cell.gain(name)) for name in halves]
                rows.append([layer.name, dtype, str(batch), _time(cell.ours()), *times, *gains])
    return table(head, rows) if rows else NOT_MEASURED


def beside_v100_table(results: PaperResults, suite: str) -> str:
    """Layers that the paper timed: its times and ours, at its sparsity and, where that was measured, its batch."""
    reported = {(r["layer"], r["dtype"], float(r["sparsity"])): r for r in read_reported() if r["suite"] == suite}
    # The pruned network's dense times are those of the same layers of the network as it was.
    dense = {(r["layer"], r["dtype"]): r for r in read_reported() if r["suite"] == "pietron-vgg16"}
    layers = {layer.name: layer for layer in read_suite(suite)}
    head = ["layer", "type", "zeros", "batch", "dense", "SparseConv", "speed-up"]
    head += ["V100, batch 128: cuDNN", "as", "sparse", "speed-up"]
    rows = []
    for (name, dtype, sparsity), row in reported.items():
        if name not in layers:
            continue
        cell = _at_paper_batch(results, layers[name], dtype, sparsity)
        if cell is None:
            continue
        theirs = row if row["dense_ms"] else dense.get((name, dtype), row)
        gain = float(theirs["dense_ms"]) / float(row["sparse_ms"]) if theirs["dense_ms"] else None
        rows.append(
            [
                name,
                dtype,
                f"{sparsity:.3g}",
                str(cell.batch),
                _time(cell.best.get("dense")),
                _time(cell.ours()),
                _times(cell.gain("dense")),
                f"{theirs['dense_ms'] or '-'} ms",
                theirs["dense_algorithm"] or "-",
                f"{row['sparse_ms']} ms",
                _times(gain),
            ]
        )
    return table(head, rows) if rows else NOT_MEASURED


def reported_pointwise_table() -> str:
    """The 1x1 layers of the paper, of which it gives no shapes, as it reports them."""
    names = {layer.name for layer in read_suite("pietron-other")}
    rows = [
        [
            row["layer"],
            row["dtype"],
            f"{float(row['sparsity']):.3g}",
            row["sub_batch"],
            f"{row['dense_ms']} ms",
            f"{row['sparse_ms']} ms",
            _times(float(row["dense_ms"]) / float(row["sparse_ms"])),
        ]
        for row in read_reported()
        if row["suite"] == "pietron-other" and row["layer"] not in names
    ]
    return table(["layer", "type", "zeros", "sub-batch", "V100: cuDNN", "sparse", "speed-up"], rows)


def csr_table(results: PaperResults) -> str:
    """The CSR kernel: images a thread, and rows of one length against ragged ones."""
    head = ["layer", "type", "zeros", *(f"{n} image{'s'[: n - 1]}" for n in SUB_BATCHES), "chosen"]
    head += ["tuned, over 1 image", "over 8 images", "entries, unified", "time, unified"]
    rows = []
    for cell in results.cells():
        by_images = {n: cell.best[f"csr-{n}"] for n in SUB_BATCHES if f"csr-{n}" in cell.best}
        if cell.batch != BATCH or len(by_images) < len(SUB_BATCHES):
            continue
        tuned = min(record["median_us"] for record in by_images.values())
        unified, ragged = cell.best.get("csr-unified"), cell.best.get("csr")
        details = unified["details"] if unified else {}
        rows.append(
            [
                cell.layer,
                cell.dtype,
                f"{cell.sparsity:.3g}",
                *(_time(record) for record in by_images.values()),
                _time(ragged),
                *(_times(by_images[n]["median_us"] / tuned) for n in (SUB_BATCHES[0], SUB_BATCHES[-1])),
                _times(details["stored"] / details["nonzeros"]) if details else "-",
                _times(unified["median_us"] / ragged["median_us"]) if unified and ragged else "-",
            ]
        )
    return table(head, rows) if rows else NOT_MEASURED


def sweep_table(results: PaperResults) -> str:
    """Times faster than dense by sparsity, of the suite sweep, at batch 64."""
    rows_of = read_rows("sweep")
    sparsities = sorted({sparsity for row in rows_of for sparsity in row.sparsities})
    rows = []
    for row in rows_of:
        for dtype in DTYPES:
            gains = results.gains(row.layer, BATCH, dtype)
            if set(sparsities) & set(gains):
                cells = [_times(gains.get(sparsity)) for sparsity in sparsities]
                rows.append([row.layer.name, dtype, *cells, break_even_text(results, row.layer, BATCH, dtype)])
    return table(["layer", "type", *(f"{s:.0%}" for s in sparsities), "breaks even"], rows) if rows else NOT_MEASURED


def lowered_short_table(results: PaperResults) -> str:
    """Every layer that is short of a target over a lowering at 90%, and what it would be at the floor, least first."""
    short = []
    for layer, dtype, cell in _cells(results, target_layers().values(), BATCH, SPARSITY):
        ours, floor = cell.ours(), results.floor_us(layer, cell)
        for baseline, wanted in LOWERED_GAINS.items():
            gain, theirs = cell.gain(baseline, "burst_us"), cell.best.get(baseline)
            if ours is None or theirs is None or gain is None or gain > wanted:
                continue
            least = theirs["burst_us"] / floor if floor else None
            row = [
                canonical(layer).name,
                dtype,
                LOWERED_NAMES[baseline],
                _us(theirs["burst_us"]),
                _us(ours["burst_us"]),
            ]
            short.append(
                (gain, [*row, _times(gain), f"{wanted:g}x", "-" if floor is None else _us(floor), _times(least)])
            )
    if not short:
        return "None."
    head = ["layer", "type", "over", "takes", "SparseConv", "speed-up", "wanted", "floor", "speed-up at the floor"]
    return table(head, [row for _, row in sorted(short, key=lambda item: item[0])])


def _us(time_us: float) -> str:
    return f"{time_us:.1f} us" if time_us < 100 else f"{time_us:.0f} us"


def dense_wins_table(results: PaperResults) -> str:
    """Every layer and setting in which dense is faster at 90%, slowest first."""
    lost = []
    for batch in (BATCH, PAPER_BATCH, 1):
        for layer, dtype, cell in _cells(results, target_layers().values(), batch, SPARSITY):
            gain = cell.gain("dense")
            if gain is not None and gain < 1:
                even = break_even_text(results, layer, batch, dtype)
                lost.append((gain, [canonical(layer).name, dtype, str(batch), _times(gain), even]))
    if not lost:
        return f"At {SPARSITY:.0%} zeros, nowhere, of what was measured."
    head = ["layer", "type", "batch", f"speed-up at {SPARSITY:.0%}", "breaks even"]
    return table(head, [row for _, row in sorted(lost, key=lambda item: item[0])])


def break_even_text(results: PaperResults, layer: Layer, batch: int, dtype: str) -> str:
    """Such as ``78%``, ``below 70%`` or ``above 98%``."""
    gains = results.gains(layer, batch, dtype)
    if not gains:
        return "-"
    crossing = break_even(gains)
    if crossing is None:
        return f"below {min(gains):.0%}"
    return f"above {max(gains):.0%}" if crossing >= 1 else f"{crossing:.0%}"


def _cells(
    results: PaperResults, layers: Iterable[Layer], batch: int, sparsity: float
) -> Iterator[tuple[Layer, str, Cell]]:
    """Layer, type and cell of what was measured and where ours ran."""
    for layer in layers:
        for dtype in DTYPES:
            cell = results.cell(layer, batch, dtype, sparsity)
            if cell is not None and cell.ours() is not None:
                yield layer, dtype, cell


def _at_paper_batch(results: PaperResults, layer: Layer, dtype: str, sparsity: float) -> Cell | None:
    found = [results.cell(layer, batch, dtype, sparsity) for batch in (PAPER_BATCH, BATCH)]
    return next((cell for cell in found if cell is not None and cell.ours() is not None), None)


def _time(record: Record | None) -> str:
    return f"{record['median_us']:.0f} us" if record else "-"


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}x"


def _of(make: Callable[[PaperResults], str]) -> Callable[[], str]:
    def text() -> str:
        results = PaperResults.load()
        return NOT_MEASURED if results is None else make(results)

    return text


TABLES: dict[str, Callable[[], str]] = {
    "papers-machine": _of(machine_text),
    "papers-targets": _of(targets_table),
    "papers-lowered-short": _of(lowered_short_table),
    "papers-dense-wins": _of(dense_wins_table),
    "papers-dong2020": _of(lambda results: dong_table(results, BATCH)),
    "papers-dong2020-batch-1": _of(lambda results: dong_table(results, 1)),
    "papers-structured": _of(structured_table),
    "papers-vgg16": _of(lambda results: pietron_table(results, "pietron-vgg16")),
    "papers-vgg16-v100": _of(lambda results: beside_v100_table(results, "pietron-vgg16")),
    "papers-pruned-v100": _of(lambda results: beside_v100_table(results, "pietron-vgg16-pruned")),
    "papers-other": _of(lambda results: pietron_table(results, "pietron-other")),
    "papers-other-v100": _of(lambda results: beside_v100_table(results, "pietron-other")),
    "papers-reported-1x1": reported_pointwise_table,
    "papers-csr": _of(csr_table),
    "papers-sweep": _of(sweep_table),
}


def draw(results: PaperResults, plt: Any, folder: Path) -> None:  # noqa: ANN401
    """Speed-up against sparsity, one line a layer, and where every layer breaks even.

    Args:
        results: to draw.
        plt: ``matplotlib.pyplot``.
        folder: of ``papers-sweep.svg`` and ``papers-break-even.svg``.
    """
    _draw_speedups(results, plt, folder / "papers-sweep.svg")
    _draw_break_even(results, plt, folder / "papers-break-even.svg")


def _draw_speedups(results: PaperResults, plt: Any, path: Path) -> None:  # noqa: ANN401
    figure, both = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    for axes, dtype in zip(both, DTYPES):
        for layer in read_suite("sweep"):
            gains = results.gains(layer, BATCH, dtype)
            style = "-" if layer.kernel == 3 and layer.height > 1 else "--"
            label = canonical(layer).name
            axes.plot([100 * s for s in gains], list(gains.values()), style, marker="o", markersize=3, label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"{dtype}, batch {BATCH}", fontsize=9)
        axes.set_xlabel("zero weights, %")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    both[0].set_ylabel("times faster than dense")
    both[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_break_even(results: PaperResults, plt: Any, path: Path) -> None:  # noqa: ANN401
    layers = list(target_layers().values())[::-1]
    figure, axes = plt.subplots(figsize=(7, 0.24 * len(layers) + 0.9), layout="constrained")
    for dtype, marker in zip(DTYPES, "os"):
        bounds = [results.break_even_bound(layer, BATCH, dtype) for layer in layers]
        points = [(100 * bound, row) for row, bound in enumerate(bounds) if bound is not None]
        axes.plot([x for x, _ in points], [row for _, row in points], marker, label=dtype)
    axes.set_yticks(range(len(layers)), [canonical(layer).name for layer in layers], fontsize=7)
    axes.set_xlabel(f"zero weights from which on sparse is faster, %, batch {BATCH}")
    axes.set_xlim(right=101)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
