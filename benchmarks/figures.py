"""Makes the tables and pictures of the documents from the files in results/.

    python benchmarks/figures.py            # rewrite the tables between their markers; pictures too, with matplotlib
    python benchmarks/figures.py --check    # fail if a table is not what the results say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. The page of the papers' suites is made from its
text in pages/, once there are results of these suites.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import paper_tables
from network_parts import parts_of
from paper_results import PaperResults
from suite_rows import read_suite
from tables import NOT_MEASURED, break_even, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("cpu-kernel.md", "gpu-measurements.md", "passes.md")),
)
PAPERS_TEXT = ROOT / "benchmarks" / "pages" / "papers.md"
PAPERS_PAGE = ROOT / "docs" / "papers.md"
# The batch size of the summary of GPU layers.
LARGE_BATCH = 64
# Whole networks on a GPU, converted for each batch size.
NETWORKS = "gpu-networks"
Record = dict[str, Any]


def load(name: str) -> Record:
    """A results file."""
    record: Record = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def by_setting(records: Iterable[Record]) -> dict[str, dict[tuple[float, int, int], Record]]:
    """Layers by name, then by (sparsity, batch, threads)."""
    found: dict[str, dict[tuple[float, int, int], Record]] = {}
    for record in records:
        setting = record["setting"]
        key = (setting["sparsity"], setting["batch"], setting["threads"])
        found.setdefault(record["layer"]["name"], {})[key] = record
    return found


def layers_table(*results: str) -> str:
    """Speed-up of every layer of the suite cpu, by sparsity, threads and batch."""
    layers = by_setting([record for name in results for record in load(name)["layers"]])
    settings = sorted(next(iter(layers.values())), key=lambda s: (s[1], s[2], s[0]))
    head = ["layer", *(f"{s:.0%}, batch {b}, {t} thread{'s'[: t - 1]}" for s, b, t in settings)]
    rows = [[name, *(f"{found[s]['speedup']:.2f}x" for s in settings)] for name, found in layers.items()]
    for kind, label in ((3, "geometric mean, 3x3"), (1, "geometric mean, 1x1")):
        group = [f for f in layers.values() if next(iter(f.values()))["layer"]["kernel"] == kind]
        rows.append([label, *(f"{geometric_mean([f[s]['speedup'] for f in group]):.2f}x" for s in settings)])
    return table(head, rows)


def models_table(results: str) -> str:
    """Whole models: times, speed-up, size."""
    rows = []
    models = load(results)["models"]
    order = [model["original"]["path"] for model in models]
    for model in sorted(models, key=lambda m: (order.index(m["original"]["path"]), m["threads"])):
        before, after = model["original"], model["converted"]
        rewritten = sum(k["kernel"].startswith("cpu.") for k in model["kernels"])
        rows.append(
            [
                before["path"].removesuffix(".onnx"),
                str(model["batch"]),
                str(model["threads"]),
                str(rewritten),
                f"{before['time']['median_us'] / 1000:.2f} ms",
                f"{after['time']['median_us'] / 1000:.2f} ms",
                f"{model['speedup']['of_medians']:.2f}x",
                f"{model['speedup']['low']:.2f} to {model['speedup']['high']:.2f}x",
                f"{before['size_bytes'] / 1e6:.2f} to {after['size_bytes'] / 1e6:.2f} MB",
            ]
        )
    return table(
        ["model", "batch", "threads", "sparse nodes", "dense", "converted", "speed-up", "8 of 10 rounds", "file"],
        rows,
    )


def threads_table(results: str) -> str:
    """Whole models by the number of threads: dense and converted, and the speed-up."""
    models: dict[str, dict[int, Record]] = {}
    for model in load(results)["models"]:
        models.setdefault(model["original"]["path"], {})[model["threads"]] = model
    threads = sorted(next(iter(models.values())))
    rows = []
    for path, found in models.items():
        times = (
            f"{found[t]['original']['time']['median_us'] / 1000:.1f} and "
            f"{found[t]['converted']['time']['median_us'] / 1000:.1f} ms, {found[t]['speedup']['of_medians']:.2f}x"
            for t in threads
        )
        rows.append([path.removesuffix(".onnx"), *times])
    return table(["model", *(f"{t} thread{'s'[: t - 1]}" for t in threads)], rows)


def expected_table() -> str:
    """What to expect of whole networks: the range of each of README's tables, by how much of them was pruned."""
    models = load("cpu-models")["models"]
    pruned = [m for m in models if not _is_lightly_pruned(m)]
    lightly = [m for m in models if _is_lightly_pruned(m)]
    sizes = [model["converted"]["size_bytes"] / model["original"]["size_bytes"] for model in pruned]
    graphs = [record for record in load(NETWORKS)["models"] if record["cuda_graph"]]
    gpu = load(NETWORKS)["environment"]["cuda"]["gpus"][0]["name"].split()[1]
    depthwise = [m for m in load("cpu-architectures")["models"] if m["original"]["path"] in OF_DEPTHWISE_LAYERS]
    many_threads = [m for m in load("cpu-threads")["models"] if m["threads"] >= MANY_THREADS]
    rows = [
        ["CPU, one or two threads", "90% and more", f"{_range_of(pruned)} as fast as dense"],
        ["CPU, networks of depthwise layers", "90%", f"{_range_of(depthwise)} as fast"],
        ["CPU, one or two threads", "66%", f"{_range_of(lightly)} as fast"],
        ["CPU, four to 16 threads", "90%", f"{_range_of(many_threads)} as fast"],
        [f"GPU ({gpu}), one to 32 images", "66% to 90%", f"{_range_of(graphs)} as fast"],
        ["model file, without GPU kernels", "90% and more", f"{min(sizes):.0%} to {max(sizes):.0%} of its size"],
    ]
    return table(["whole networks", "zeros", "measured"], rows)


MANY_THREADS = 4
OF_DEPTHWISE_LAYERS = (
    "mobilenet_v2-90.onnx",
    "mobilenet_v3_large-90.onnx",
    "efficientnet_b0-90.onnx",
    "mediapipe-90.onnx",
)


def _is_lightly_pruned(model: Record) -> bool:
    return bool(model["original"]["path"].endswith("-66.onnx"))


def _range_of(models: Iterable[Record]) -> str:
    gains = [model["speedup"]["of_medians"] for model in models]
    low, high = f"{min(gains):.1f}", f"{max(gains):.1f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def tuning_table(results: str) -> str:
    """Whole models that were tuned: what the single layers foretold, and what was measured."""
    rows = [
        [model["model"].removesuffix(".onnx"), str(model["batch"]), str(model["threads"]), *_tuned(model)]
        for model in load(results)["models"]
    ]
    return table(["model", "batch", "threads", *_TUNED_HEAD], rows)


def gpu_tuning_table(*results: str) -> str:
    """The same on a GPU."""
    rows = [
        [
            model["model"].removesuffix(".onnx"),
            "float16" if model["precision"] == "fp16" else "float32",
            str(model["batch"]),
            "generated, too" if "--target" in tuning["command"] else "the library's",
            f"{model['seconds']:.0f} s",
            *_tuned(model),
        ]
        for tuning in map(load, results)
        for model in tuning["models"]
    ]
    return table(["model", "type", "batch", "kernels", "tuned in", *_TUNED_HEAD], rows)


_TUNED_HEAD = ["Conv sparse", "dense", "predicted", "measured", "off by", "speed-up"]


def _tuned(model: Record) -> list[str]:
    """How many layers became sparse; and the times of that choice, or of the best one that was tried for nothing."""
    sparse = f"{model['num_sparse']} of {model['num_convs']}"
    (case,) = model["whole"]["cases"] if model["whole"] else [None]
    if case is None:
        return [sparse, *[""] * 4, "stays dense"]
    predicted, measured = case["predicted_us"], case["measured_us"]
    if not case["speedup"]:
        best = min(model["whole"]["trials"], key=lambda trial: trial["measured_us"])
        (predicted,), (measured,) = best["predicted_us"], best["measured_us"]
    times = [f"{time_us / 1000:.2f} ms" for time_us in (case["dense_us"], predicted, measured)]
    gain = f"{case['speedup']['of_medians']:.2f}x" if case["speedup"] else "stays dense"
    return [sparse, *times, f"{measured / predicted - 1:+.0%}", gain]


def _break_even_text(found: dict[tuple[float, int, int], Record], threads: int) -> str:
    """From which share of zeros on a layer gains."""
    speedups = {s: record["speedup"] for (s, _, t), record in found.items() if t == threads}
    crossing = break_even(speedups)
    return f"below {min(speedups):.0%}" if crossing is None else f"{crossing:.0%}"


def break_even_table() -> str:
    """Speed-up by sparsity of every layer of the suite classes, and where each breaks even."""
    layers = by_setting(load("cpu-break-even")["layers"])
    sparsities = sorted({s for found in layers.values() for s, _, _ in found})
    rows = []
    for name, found in layers.items():
        for threads in sorted({t for _, _, t in found}):
            speedups = {s: r["speedup"] for (s, _, t), r in found.items() if t == threads}
            gains = (f"{speedups[s]:.2f}x" for s in sparsities)
            rows.append([name, str(threads), *gains, _break_even_text(found, threads)])
    return table(["layer", "threads", *(f"{s:.0%}" for s in sparsities), "breaks even"], rows)


def break_even_points_table(results: str) -> str:
    """Where each layer of the suite classes breaks even, by threads."""
    layers = by_setting(load(results)["layers"])
    threads = sorted({t for found in layers.values() for _, _, t in found})
    rows = [[name, *(_break_even_text(found, t) for t in threads)] for name, found in layers.items()]
    return table(["breaks even", *(f"{t} thread{'s'[: t - 1]}" for t in threads)], rows)


def history_table(machine: str) -> str:
    """What each idea gave: geometric means over the 3x3 and the 1x1 layers of the suite cpu, one thread."""
    rows = []
    for path in sorted(RESULTS.glob(f"cpu-history-{machine}-*.json")):
        results = load(path.stem)
        layers = by_setting(results["layers"])
        row = [results["label"]]
        for kind in (3, 1):
            group = [f for f in layers.values() if next(iter(f.values()))["layer"]["kernel"] == kind]
            row.append(f"{geometric_mean([next(iter(f.values()))['speedup'] for f in group]):.2f}x")
        rows.append(row)
    return table(["kernel", "3x3", "1x1"], rows)


def gpu_layer_records(results: str) -> list[Record]:
    """Layers on a GPU in the order of their suite, others behind: several sessions may have measured them."""
    order = {layer.name: index for index, layer in enumerate(read_suite("gpu"))}
    records: list[Record] = load(results)["layers"]
    return sorted(records, key=lambda record: order.get(record["layer"]["name"], len(order)))


def gpu_layers_table(results: str, sparsities: Sequence[float] = ()) -> str:
    """Layers on a GPU: the fastest dense mode against SparseConv, by layer, type, sparsity, batch.

    Of some sparsities, else of all.
    """
    if not (RESULTS / f"{results}.json").is_file():
        return NOT_MEASURED
    head = ["layer", "type", "zeros", "batch", "dense", "as", "SparseConv", "kernel", "speed-up", "8 of 10 rounds"]
    head += ["back to back", "speed-up", "TFLOP/s", "of the memory floor", "error, to dense"]
    records = [r for r in gpu_layer_records(results) if not sparsities or r["setting"]["sparsity"] in sparsities]
    return table(head, [_gpu_row(record) for record in records])


def before_and_after_table(before: str, after: str) -> str:
    """Layers of two results files: the fastest dense mode of the second, and SparseConv in each."""
    if not all((RESULTS / f"{results}.json").is_file() for results in (before, after)):
        return NOT_MEASURED
    rows = []
    for old, new in zip(gpu_layer_records(before), gpu_layer_records(after), strict=True):
        assert (old["layer"], old["setting"]) == (new["layer"], new["setting"])
        name, dtype, zeros, batch, dense, mode, sparse, _, speedup, *_ = _gpu_row(new)
        rows.append([name, dtype, zeros, batch, dense, mode, _gpu_row(old)[6], sparse, speedup])
    head = ["layer", "type", "zeros", "batch", "dense", "as", "SparseConv, before", "SparseConv", "speed-up"]
    return table(head, rows)


def _best_comparison(record: Record) -> Record:
    """With a CUDA graph or without, whichever lets the dense side run fastest; empty where nothing ran."""
    best: Record = record["comparisons"][record["best"]] if record.get("best") else {}
    return best


def _gpu_row(record: Record) -> list[str]:
    setting = record["setting"]
    name = [record["layer"]["name"], setting["dtype"], f"{setting['sparsity']:.3g}", str(setting["batch"])]
    best = _best_comparison(record)
    dense = [f"{best['dense_us']:.0f} us", best["dense_mode"]] if best else ["failed", "-"]
    if "sparse_us" not in best:
        return [*name, *dense, *["-"] * 9]
    share, ratio = best["share_of_floor"], best["error_ratio"]
    return [
        *name,
        *dense,
        f"{best['sparse_us']:.0f} us",
        best["sparse_kernel"],
        f"{best['speedup']:.2f}x",
        f"{best['speedup_low']:.2f} to {best['speedup_high']:.2f}x",
        f"{best['dense_burst_us']:.0f} and {best['sparse_burst_us']:.0f} us",
        f"{best['speedup_burst']:.2f}x",
        f"{best['sparse_tflops']:.0f}",
        "-" if share is None else f"{share:.0%}",
        "-" if ratio is None else f"{ratio:.1f}x",
    ]


def gpu_summary_table(*results: str) -> str:
    """Times faster than dense on a GPU, of 3x3 and 1x1 layers at the suite's large batch, by type and sparsity.

    Of a layer that several files have, the kernel that gains most.
    """
    cells: dict[str, dict[tuple[str, float], float]] = {}
    for record in (record for name in results for record in gpu_layer_records(name)):
        setting = record["setting"]
        best = _best_comparison(record)
        if setting["batch"] == LARGE_BATCH and "speedup" in best:
            row = cells.setdefault(record["layer"]["name"], {})
            key = setting["dtype"], setting["sparsity"]
            row[key] = max(row.get(key, 0.0), best["speedup"])
    columns = [(dtype, s) for dtype in ("float32", "float16") for s in (0.8, 0.9, 0.95, 0.98)]
    rows = [[name, *(f"{row[c]:.2f}x" if c in row else "-" for c in columns)] for name, row in cells.items()]
    return table(["layer", *(f"{dtype} {s:.0%}" for dtype, s in columns)], rows)


def gpu_models_table(*results: str) -> str:
    """Whole networks on a GPU, each side in its fastest mode, with CUDA graphs and without."""
    head = ["network", "batch", "CUDA graph", "dense", "as", "converted", "as", "sparse layers", "speed-up"]
    return table(head, [_gpu_model_row(record) for name in results for record in load(name)["models"]])


def gpu_networks_table(results: str) -> str:
    """Whole networks on a GPU by type and batch size, as CUDA graphs and without."""
    columns = ["dense", "converted", "speed-up"]
    head = ["network", "batch", "sparse nodes", *columns, *(f"{column}, no graph" for column in columns)]
    rows: dict[tuple[str, int], dict[bool, Record]] = {}
    for record in load(results)["models"]:
        rows.setdefault((_network_name(record), record["batch"]), {})[record["cuda_graph"]] = record
    return table(
        head,
        [
            [name, str(batch), str(len(of[True]["kernels"])), *_times_and_gain(of[True]), *_times_and_gain(of[False])]
            for (name, batch), of in sorted(rows.items())
        ],
    )


def _times_and_gain(record: Record) -> list[str]:
    times = [record[side]["time"]["median_us"] for side in ("original", "converted")]
    return [*map(_ms, times), f"{record['speedup']['of_medians']:.2f}x"]


def _network_name(record: Record) -> str:
    path = record["original"]["path"].removesuffix(".onnx")
    return f"{path.removesuffix('.half')}, {'float16' if path.endswith('.half') else 'float32'}"


def gpu_batches_table(results: str) -> str:
    """Times faster than dense of networks that were converted for each of some batch sizes, as CUDA graphs."""
    gains: dict[tuple[str, ...], dict[int, str]] = {}
    for record in load(results)["models"]:
        if record["cuda_graph"]:
            gain = f"{record['speedup']['of_medians']:.2f}x"
            gains.setdefault((_network_name(record),), {})[record["batch"]] = gain
    return _by_batch(["network"], dict(sorted(gains.items())))


def gpu_layer_batches_table(results: str) -> str:
    """Times faster than dense of layers, in single calls and back to back, by the number of images."""
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for record in gpu_layer_records(results):
        setting, best = record["setting"], _best_comparison(record)
        kernel = best["sparse_kernel"].removeprefix("cuda.")
        gain = f"{best['speedup']:.2f}, {best['speedup_burst']:.2f}x {kernel}"
        cells.setdefault((record["layer"]["name"], setting["dtype"]), {})[setting["batch"]] = gain
    return _by_batch(["layer", "type"], dict(sorted(cells.items())))


def _by_batch(head: Sequence[str], cells: dict[tuple[str, ...], dict[int, str]]) -> str:
    """A table with a column for each number of images."""
    batches = sorted({batch for row in cells.values() for batch in row})
    images = ["one image" if batch == 1 else f"{batch} images" for batch in batches]
    return table([*head, *images], [[*key, *(row.get(batch, "-") for batch in batches)] for key, row in cells.items()])


def gpu_kernels_table(results: str) -> str:
    """How many layers each kernel ran, and what they gain: in the geometric mean, the least and the most."""
    gains: dict[tuple[str, str], list[float]] = {}
    for record in gpu_layer_records(results):
        best = _best_comparison(record)
        gains.setdefault((record["setting"]["dtype"], best["sparse_kernel"]), []).append(best["speedup"])
    rows = [
        [
            *key,
            str(len(of)),
            f"{geometric_mean(of):.2f}x",
            str(sum(g < 1 for g in of)),
            f"{min(of):.2f} to {max(of):.2f}x",
        ]
        for key, of in sorted(gains.items())
    ]
    return table(["type", "kernel", "layers", "geometric mean", "slower than dense", "from"], rows)


def network_kernels_table() -> str:
    """What the kernels of all layers take in whole networks, by what they do."""
    head = ["network", "layers", "products", "biases", "activations", "dense, together", "sparse", "speed-up"]
    rows = []
    for network in load("gpu-network-kernels")["networks"]:
        dense, sparse = _parts_of_network(network)
        times = [_ms(us) for us in (*dense, sum(dense), sparse)]
        name = network["original"].removesuffix(".onnx")
        rows.append([name, str(len(network["layers"])), *times, f"{sum(dense) / sparse:.2f}x"])
    return table(head, rows)


def _parts_of_network(network: Record) -> tuple[list[float], float]:
    """Microseconds of all products, biases and activations, dense, and of all sparse layers."""
    *dense, sparse = (sum(parts) for parts in zip(*map(parts_of, network["layers"]), strict=True))
    return dense, sparse


def networks_by_kernels_table() -> str:
    """The same of both types and several batches, by code of the layers' own and by the library's kernels."""
    head = ["network", "batch", "products", "biases", "activations", "dense, together", "generated", "by the library"]
    rows: dict[tuple[str, int], list[str]] = {}
    for network in load("gpu-network-kernels-h100")["networks"]:
        dense, sparse = _parts_of_network(network)
        name = network["original"].removesuffix(".onnx") + (", float16" if network["precision"] == "fp16" else "")
        row = rows.setdefault((name, network["batch"]), [_ms(us) for us in (*dense, sum(dense))] + ["-", "-"])
        row[-2 if network["kernels"] == "generated" else -1] = f"{_ms(sparse)}, {sum(dense) / sparse:.2f}x"
    return table(head, [[name, str(batch), *row] for (name, batch), row in sorted(rows.items())])


def depthwise_table() -> str:
    """MobileNetV2's depthwise layers in the network, dense and by both kernels that do them."""
    head = ["layer", "type", "convolution", "bias", "Clip", "generated", "depthwise", "speed-up"]
    rows: dict[tuple[str, str], list[str]] = {}
    for network in load("gpu-network-kernels-h100")["networks"]:
        for layer in network["layers"]:
            of = layer["dense"]
            if network["batch"] != DEPTHWISE_BATCH or of["group"] == 1:
                continue
            *dense, sparse = parts_of(layer)
            stride = "/2" if of["stride"] == 2 else ""
            key = of["dtype"], f"{of['in_channels']}@{of['height']}{stride}"
            row = rows.setdefault(key, [*map(_us, dense), "-", "-", "-"])
            if network["kernels"] == "generated":
                row[-3] = _us(sparse)
            else:
                row[-2:] = [_us(sparse), f"{sum(dense) / sparse:.2f}x"]
    return table(head, [[name, dtype, *row] for (dtype, name), row in rows.items()])


DEPTHWISE_BATCH = 64


def _ms(us: float) -> str:
    return f"{us / 1000:.2f} ms"


def _us(us: float) -> str:
    return f"{us:.0f} us"


def rewrites_table(*results: str) -> str:
    """Nodes of whole models before and after, and how far outputs are from the original's, of their largest value."""
    head = ["model", "nodes", "converted", "sparse", "Conv left", "with the library", "without", "allowed"]
    return table(head, [_rewrites_row(record) for name in results for record in load(name)["models"]])


def _rewrites_row(record: Record) -> list[str]:
    after = record["nodes_after"]
    sparse = sum(count for op, count in after.items() if op.startswith("SparseConv"))
    apart = [max(map(_share_of_scale, check["outputs"])) for check in record["checks"]]
    outputs = record["checks"][0]["outputs"]
    allowed = max((output["atol"] / output["scale"] for output in outputs if output["scale"]), default=0.0)
    name = record["original"].removesuffix(".onnx") + (", float16" if ".half." in record["converted"] else "")
    counts = [sum(record["nodes_before"].values()), sum(after.values()), sparse, after.get("Conv", 0)]
    return [name, *map(str, counts), *(f"{share:.1e}" for share in apart), f"{allowed:.1e}"]


def _share_of_scale(output: Record) -> float:
    assert output["passed"], f"{output['name']} is not what the original gives"
    return output["errors"]["max_abs"] / output["scale"] if output["scale"] else 0.0


def _gpu_model_row(record: Record) -> list[str]:
    original, converted = record["original"], record["converted"]
    times = [f"{side['time']['median_us'] / 1000:.2f} ms" for side in (original, converted)]
    return [
        original["path"].removesuffix(".onnx").replace(".half", ", float16"),
        str(record["batch"]),
        "yes" if "graph" in converted["mode"] else "no",
        times[0],
        original["mode"],
        times[1],
        converted["mode"],
        str(len(record["kernels"])),
        f"{record['speedup']['of_medians']:.2f}x",
    ]


def gpu_bytes_table() -> str:
    """Bytes of GPU images beside dense and unified-CSR weights, and what the compiler says, by layer and type."""
    if not (RESULTS / "gpu-image-bytes.json").is_file():
        return NOT_MEASURED
    head = ["layer", "type", "zeros", "dense", "unified CSR", "machine code", "compressed", "CSR and image, of dense"]
    head += ["registers", "spilled", "NVRTC"]
    return table(head, [_bytes_row(record) for record in load("gpu-image-bytes")["layers"]])


def _bytes_row(record: Record) -> list[str]:
    setting = record["setting"]
    name = [record["layer"]["name"], setting["dtype"], f"{setting['sparsity']:.3g}"]
    sizes = [f"{record[key] / 1000:.0f} kB" for key in ("dense_bytes", "csr_bytes")]
    if "refusal" in record:
        return [*name, *sizes, *["-"] * 6]
    return [
        *name,
        *sizes,
        f"{record['cubin_bytes'] / 1000:.0f} kB",
        f"{record['image_bytes'] / 1000:.0f} kB",
        f"{(record['csr_bytes'] + record['container_bytes']) / record['dense_bytes']:.0%}",
        str(record["registers"]),
        f"{record['spill_bytes']} B",
        f"{record['nvrtc_cpu_s']:.1f} s",
    ]


TABLES: dict[str, Callable[[], str]] = {
    "cpu-layers": lambda: layers_table("cpu-layers"),
    "cpu-layers-xeon": lambda: layers_table("cpu-layers-xeon"),
    "cpu-layers-epyc": lambda: layers_table("cpu-layers-epyc"),
    "cpu-models": lambda: models_table("cpu-models"),
    "cpu-models-xeon": lambda: models_table("cpu-models-xeon"),
    "cpu-models-epyc": lambda: models_table("cpu-models-epyc"),
    "cpu-architectures": lambda: models_table("cpu-architectures"),
    "cpu-threads": lambda: threads_table("cpu-threads"),
    "cpu-break-even": break_even_table,
    "cpu-break-even-avx2": lambda: break_even_points_table("cpu-break-even-avx2"),
    "cpu-layers-avx2": lambda: layers_table("cpu-layers-avx2", "cpu-layers-avx2-batch-16"),
    "cpu-models-avx2": lambda: models_table("cpu-models-avx2"),
    "cpu-tuning": lambda: tuning_table("cpu-tuning"),
    "cpu-history-xeon": lambda: history_table("xeon"),
    "cpu-history-epyc": lambda: history_table("epyc"),
    "gpu-layers": lambda: gpu_layers_table("gpu-layers"),
    "gpu-layers-tensor": lambda: gpu_layers_table("gpu-layers-tensor"),
    "gpu-layers-resnet50": lambda: gpu_layers_table("gpu-layers-resnet50"),
    "gpu-summary": lambda: gpu_summary_table("gpu-layers", "gpu-layers-tensor", "gpu-layers-float", "gpu-layers-flat"),
    "gpu-layers-flat": lambda: gpu_layers_table("gpu-layers-flat"),
    "gpu-layers-gemm": lambda: gpu_layers_table("gpu-layers-gemm"),
    "gpu-layers-gemm-narrow": lambda: gpu_layers_table("gpu-layers-gemm-narrow"),
    "gpu-layers-gemm-float": lambda: gpu_layers_table("gpu-layers-gemm-float"),
    "gpu-layers-few-zeros": lambda: gpu_layers_table("gpu-layers-few-zeros"),
    "gpu-layers-strides": lambda: gpu_layers_table("gpu-layers-strides"),
    "gpu-layers-few-images": lambda: gpu_layers_table("gpu-layers-few-images"),
    "gpu-layers-clusters": lambda: gpu_layers_table("gpu-layers-clusters"),
    "gpu-layers-batches": lambda: gpu_layer_batches_table("gpu-layers-batches"),
    "gpu-layers-any": lambda: gpu_kernels_table("gpu-layers-any"),
    "gpu-layers-first": lambda: gpu_layers_table("gpu-layers-first"),
    "gpu-layers-words": lambda: gpu_layers_table("gpu-layers-words", sparsities=[0.875]),
    "gpu-layers-float": lambda: gpu_layers_table("gpu-layers-float"),
    "gpu-layers-sm80": lambda: gpu_layers_table("gpu-layers-sm80"),
    "gpu-layers-planes": lambda: gpu_layers_table("gpu-layers-planes"),
    "gpu-layers-sm80-few-images": lambda: gpu_layer_batches_table("gpu-layers-sm80-few-images"),
    "gpu-layers-sm86": lambda: before_and_after_table("gpu-layers-sm86-before", "gpu-layers-sm86"),
    "gpu-networks": lambda: gpu_networks_table(NETWORKS),
    "gpu-models-planes": lambda: gpu_models_table(*(f"gpu-models-planes-{batch}" for batch in (1, 8, 32))),
    "gpu-networks-batches": lambda: gpu_batches_table(NETWORKS),
    "expected": expected_table,
    "gpu-network-kernels": network_kernels_table,
    "gpu-network-kernels-h100": networks_by_kernels_table,
    "gpu-depthwise": depthwise_table,
    "rewrites-cpu": lambda: rewrites_table("rewrites-cpu"),
    "rewrites-cuda": lambda: rewrites_table("rewrites-cuda", "rewrites-cuda-real"),
    "gpu-tuning": lambda: gpu_tuning_table("gpu-tuning-fp16", "gpu-tuning-fp16-generated", "gpu-tuning-fp32"),
    "gpu-image-bytes": gpu_bytes_table,
    **paper_tables.TABLES,
}


def with_tables(text: str) -> str:
    """A document with its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def draw() -> None:
    """Speed-up against sparsity, one line a layer."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "onnx-sparseconv"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    layers = by_setting(load("cpu-layers")["layers"])
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, found in layers.items():
        points = sorted((s, r["speedup"]) for (s, batch, threads), r in found.items() if batch == 1 and threads == 1)
        style = "--" if name.startswith("1x1") else "-"
        axes.plot([100 * s for s, _ in points], [g for _, g in points], style, marker="o", markersize=3, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("zero weights, %")
    axes.set_ylabel("times faster than dense Conv")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left")
    figure.savefig(ROOT / "docs" / "cpu-layers.svg", metadata={"Date": None})
    if (results := PaperResults.load()) is not None:
        paper_tables.draw(results, plt, ROOT / "docs")


def pages() -> dict[Path, str]:
    """The documents as they should be, by file."""
    wanted = {path: with_tables(path.read_text()) for path in DOCUMENTS if path.is_file()}
    if PaperResults.load() is not None:
        wanted[PAPERS_PAGE] = with_tables(PAPERS_TEXT.read_text())
    return wanted


def main() -> int:
    """Rewrite the documents, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = []
    for path, wanted in pages().items():
        if not path.is_file() or wanted != path.read_text():
            stale.append(path.name)
            if not options.check:
                path.write_text(wanted)
    if options.check and stale:
        sys.exit(f"error: {', '.join(stale)}: tables differ from benchmarks/results; run benchmarks/figures.py")
    if not options.check:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
