"""Tunes whole models and writes, as JSON, what the single layers foretold and what the models as a whole then took.

    python benchmarks/tuning.py squeezenet.onnx resnet50-90.onnx --threads 1 2 -o benchmarks/results/cpu-tuning.json

Every layer is timed anew: measurements of before are not used.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from results_head import results_head

from onnx_sparseconv.converter.decisions import write_decisions
from onnx_sparseconv.files import write_text
from onnx_sparseconv.runtime.environment import read_environment
from onnx_sparseconv.runtime.plain import to_json_text, to_plain
from onnx_sparseconv.tuner import Case, TuneOptions, tune
from onnx_sparseconv.tuner.options import PRESET_NAMES

SCHEMA_VERSION = 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--provider", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1], help="of the CPU")
    parser.add_argument("--batch", nargs="*", type=int, default=[1])
    parser.add_argument("--target", nargs="*", default=[], help="architectures to time generated kernels for")
    parser.add_argument("--precision", default="keep", choices=["keep", "fp16"])
    parser.add_argument("--preset", default="default", choices=PRESET_NAMES)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of a model: no layer is begun after that")
    parser.add_argument("--decisions", type=Path, metavar="DIR", help="keep each model's decisions there")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def tune_one(model: Path, options: TuneOptions, keep: Path | None = None) -> dict[str, Any]:
    """One model at one setting; ``keep`` is the folder for its decisions."""
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        report = tune(model, replace(options, database=Path(directory) / "times.jsonl"))
        seconds = time.perf_counter() - started
    if keep is not None:
        write_decisions(report.decisions, keep / f"{model.stem}.json")
    return {
        "model": model.name,
        "provider": options.provider,
        "threads": options.threads,
        "batch": options.cases[0].batch,
        "precision": options.precision,
        "preset": options.preset,
        "budget_s": options.budget_s,
        "seconds": seconds,
        "num_convs": len(report.decisions.layers),
        "num_sparse": report.decisions.num_sparse,
        "num_measured": report.num_measured,
        "gain": report.gain,
        "whole": None if report.whole is None else to_plain(report.whole),
    }


def main() -> int:
    """Tune what was asked for and write one file, anew after every model."""
    asked = parse_arguments()
    results: dict[str, Any] = {
        **results_head(SCHEMA_VERSION),
        "environment": read_environment(),
        "models": [],
    }
    for model, threads, batch in itertools.product(asked.models, asked.threads, asked.batch):
        options = TuneOptions(
            provider=asked.provider,
            threads=threads,
            cases=(Case(batch=batch),),
            preset=asked.preset,
            targets=tuple(asked.target),
            precision=asked.precision,
            budget_s=asked.budget,
        )
        record = tune_one(model, options, asked.decisions)
        results["models"].append(record)
        write_text(asked.output, to_json_text(results))
        whole = record["whole"]
        print(f"{model.name} threads {threads}: {whole['text'] if whole else 'all stays dense'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
