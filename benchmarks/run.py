r"""Time suites of layers, or whole models, dense against sparse, and write the results as JSON.

    python benchmarks/run.py --suite cpu --sparsity 0.8 0.9 0.95 --threads 1 2 -o benchmarks/results/cpu.json
    python benchmarks/run.py --models original.onnx:converted.onnx ... --threads 2 -o benchmarks/results/models.json
    python benchmarks/run.py --provider cuda --suite gpu --prepare build/gpu-layers --target sm_90
    python benchmarks/run.py --provider cuda --suite gpu --prepared build/gpu-layers -o build/gpu-layers.json
    python benchmarks/run.py --provider cuda --networks resnet50 yolov8n --batch 1 32 --prepare build/networks
    python benchmarks/run.py --provider cuda --networks resnet50 yolov8n --batch 1 32 --prepared build/networks \
        -o build/networks.json
    python benchmarks/run.py --provider cuda --suite dong2020 pietron-vgg16 --batch 64 --prepare build/papers
    python benchmarks/run.py --provider cuda --suite dong2020 pietron-vgg16 --batch 64 --prepared build/papers \
        -o build/papers.json

On CUDA the papers' suites and the suite sweep are measured beside everything that the papers compare with, several
sparsities at a time; see papers.py.

Every figure in the documents comes from a file that this program wrote.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_session import run_gpu
from layers import Setting, geometric_means, time_layer
from network_session import run_networks
from paper_session import PAPER_SUITES, run_papers
from papers import BASELINES
from results_head import results_head
from suite_rows import read_suite

from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.files import write_text
from onnx_sparseconv.runtime.bench import CudaBench, bench
from onnx_sparseconv.runtime.environment import read_environment
from onnx_sparseconv.runtime.plain import to_json_text, to_plain
from onnx_sparseconv.runtime.timing import TimingPlan

SCHEMA_VERSION = 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", default=[], help="names of files in suites/")
    parser.add_argument("--models", nargs="*", default=[], metavar="ORIGINAL:CONVERTED", help="pairs of models")
    parser.add_argument(
        "--networks",
        nargs="*",
        default=[],
        metavar="NAME|MODEL",
        help="on CUDA: of networks.py, or a pruned model's file",
    )
    parser.add_argument("--layers", nargs="*", help="only the layers of these names")
    parser.add_argument("--sparsity", nargs="*", type=float, default=[], help="default: the suite's, else 0.9")
    parser.add_argument("--batch", nargs="*", type=int, default=[], help="default: the suite's, else 1")
    parser.add_argument("--threads", nargs="*", type=int, default=[1], help="of the CPU")
    parser.add_argument("--dtype", nargs="*", default=[], choices=["float32", "float16"])
    parser.add_argument("--provider", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--label", default="", help="what is special about this run, for the results file")
    parser.add_argument("--seconds", type=float, help="time for one comparison; default: 1, of the papers' suites 0.25")
    parser.add_argument("-o", "--output", type=Path)
    cuda = parser.add_argument_group("with --provider cuda, for suites and networks")
    cuda.add_argument("--prepare", type=Path, metavar="DIR", help="only convert; needs no GPU")
    cuda.add_argument("--target", nargs="*", default=["sm_90"], help="architectures to prepare images for")
    cuda.add_argument("--jobs", type=int, default=1, help="how many to prepare at a time")
    cuda.add_argument("--prepared", type=Path, metavar="DIR", help="measure what --prepare made")
    cuda.add_argument(
        "--kernel",
        nargs="*",
        default=["auto"],
        choices=["auto", "csr", "tensor", "segments", "wgmma", "flat", "gemm", "cluster", "generated"],
    )
    cuda.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE", help="session configuration entries")
    cuda.add_argument(
        "--baselines",
        nargs="*",
        choices=BASELINES,
        help="of the papers' suites, beside SparseConv and dense; default: all, structured where the paper has it",
    )
    cuda.add_argument(
        "--thorough",
        action="store_true",
        help="of the papers' suites: the CSR kernel at every sparsity, not only at 90%%",
    )
    cuda.add_argument("--dense-only", action="store_true", help="time ONNX Runtime's own Conv alone")
    cuda.add_argument("--bandwidth", type=float, metavar="GB/S", help="of the GPU's memory; default: its data sheet's")
    cuda.add_argument("--cache-mb", type=int, default=60, help="cache of the GPU that inputs have to get past")
    cuda.add_argument("--minutes", type=float, default=math.inf, help="start nothing further after this time")
    cuda.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one layer")
    cuda.add_argument("--resume", action="store_true", help="keep the output file's results, add the others")
    options = parser.parse_args()
    if options.output is None and options.prepare is None:
        parser.error("the following arguments are required: -o/--output")
    options.is_papers = (
        options.provider == "cuda" and not options.models and bool(set(options.suite) & set(PAPER_SUITES))
    )
    if options.is_papers and not set(options.suite) <= set(PAPER_SUITES):
        parser.error(f"on CUDA, {', '.join(PAPER_SUITES)} are measured apart from other suites")
    if options.networks and (options.provider != "cuda" or (options.prepare is None and options.prepared is None)):
        parser.error("--networks are for --provider cuda, with --prepare or --prepared")
    if options.seconds is None:
        options.seconds = 0.25 if options.is_papers else 1.0
    if options.provider == "cuda":
        options.dtype = options.dtype or ["float32", "float16"]
    else:
        options.dtype = options.dtype or ["float32"]
    return options


def run_suites(options: argparse.Namespace, plan: TimingPlan) -> list[dict[str, Any]]:
    """Every layer of the suites in every setting, on the CPU."""
    layers = [layer for name in options.suite for layer in read_suite(name)]
    if options.layers:
        layers = [layer for layer in layers if layer.name in options.layers]
    records = []
    grid = itertools.product(options.threads, options.batch or [1], options.dtype, options.sparsity or [0.9])
    for (threads, batch, dtype, sparsity), layer in itertools.product(list(grid), layers):
        record = time_layer(layer, Setting(sparsity, batch, threads, dtype), plan)
        records.append(record)
        print(
            f"{layer.name:18} {sparsity:4.0%} batch {batch} threads {threads} {dtype}: "
            f"dense {record['dense_us']:9.1f} us, sparse {record['sparse_us']:9.1f} us, {record['speedup']:.2f}x",
            file=sys.stderr,
        )
    return records


def run_models(options: argparse.Namespace, plan: TimingPlan, keep: Callable[[dict[str, Any]], None]) -> None:
    """Every pair of models with every number of threads, on CUDA with a CUDA graph and without.

    Args:
        options: the command line.
        plan: how to time.
        keep: called with each record.
    """
    modes = [None] if options.provider == "cpu" else [CudaBench(), CudaBench(cuda_graph=True)]
    for pair, threads, batch in itertools.product(options.models, options.threads, options.batch or [1]):
        original, _, converted = pair.partition(":")
        for cuda in modes:
            try:
                report = bench(
                    original,
                    converted,
                    provider=options.provider,
                    threads=threads,
                    batch=batch,
                    cuda=cuda,
                    plan=plan,
                )
            except ModelError as error:
                if cuda is None:
                    raise
                # A model with nodes on the CPU does not run as a CUDA graph; its other record stands.
                keep({"original": {"path": Path(original).name}, "batch": batch, "problem": str(error)})
                print(f"{Path(original).name}: {error}", file=sys.stderr)
                continue
            record = to_plain(report)
            del record["environment"]
            record["original"]["path"], record["converted"]["path"] = Path(original).name, Path(converted).name
            keep(record)
            print(f"{Path(original).name} threads {threads}: {report.speedup.of_medians:.2f}x", file=sys.stderr)


def main() -> int:
    """Run what was asked for and write one file."""
    options = parse_arguments()
    plan = TimingPlan(seconds=options.seconds)
    head = {**results_head(SCHEMA_VERSION), "label": options.label}
    if options.is_papers:
        try:
            return run_papers(options, head)
        except UsageError as error:
            sys.exit(f"error: {error}")
    if options.networks:
        return run_networks(options, head)
    if options.provider == "cuda" and not options.models:
        return run_gpu(options, head)
    records = run_suites(options, plan) if options.provider == "cpu" else []
    results: dict[str, Any] = {
        **head,
        "environment": read_environment(),
        "layers": records,
        "geometric_means": list(geometric_means(records)),
        "models": [],
    }
    for mean in results["geometric_means"]:
        print(json.dumps(mean), file=sys.stderr)

    def keep(record: dict[str, Any]) -> None:
        results["models"].append(record)
        write_text(options.output, to_json_text(results))

    run_models(options, plan, keep)
    write_text(options.output, to_json_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
