"""What ``convert`` is to do with each model, checked before any work is done."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_sparseconv.cli.paths import require_distinct, require_models_spared, require_no_inputs
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.files import is_directory, is_special, is_there, resolved, same_file

if TYPE_CHECKING:
    from onnx_sparseconv.converter.conversion import Precision
    from onnx_sparseconv.kernels.targets import NvrtcChoice
    from onnx_sparseconv.tuner import TuneOptions


@dataclass(frozen=True)
class Job:
    """One model to convert; ``output`` None on a dry run without a name, ``compile_jobs`` None for all cores.

    ``find_peaks`` also asks what the machine can do at most, for the roofline of a report.
    """

    model: Path
    output: Path | None
    min_sparsity: float | None
    force: bool
    dry_run: bool
    targets: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    nvrtc: NvrtcChoice = "auto"
    compile_jobs: int | None = None
    cache_dir: Path | None = None
    decisions: Path | None = None
    tune: TuneOptions | None = None
    require_gain: bool = False
    precision: Precision = "keep"
    fp16_io: bool = False
    keep_float: tuple[str, ...] = ()
    find_peaks: bool = False


def plan_jobs(models: Sequence[Path], output: Path | None, out_dir: Path | None, settings: Job) -> list[Job]:
    """Decide the output of every model.

    Raises:
        UsageError: no output, two ways of naming it, several models for one output, or an output that is an input.
    """
    check_settings(settings)
    if output is not None and out_dir is not None:
        raise UsageError("give either -o or --out-dir")
    if output is not None and len(models) > 1:
        raise UsageError(f"-o names one output for {len(models)} models: use --out-dir")
    if output is None and out_dir is None and not settings.dry_run:
        raise UsageError("give the output: -o OUT, or --out-dir DIR (or --dry-run to write nothing)")
    if output is not None and _is_stdout(output):
        raise UsageError(f"-o {output}: the report is printed there: name a file, or another pipe")
    if settings.tune is not None and (pipe := next(filter(is_special, models), None)) is not None:
        raise UsageError(f"{pipe} is no file, and --tune reads the model more than once: name a file")
    check_out_dir(out_dir)
    outputs = [out_dir / model.name if out_dir is not None else output for model in models]
    return place(models, outputs, settings)


def _is_stdout(path: Path) -> bool:
    return is_special(path) and same_file(path, "/dev/stdout") and not same_file(path, os.devnull)


def place(models: Sequence[Path], outputs: Sequence[Path | None], settings: Job) -> list[Job]:
    """A job for every model, with its output.

    Raises:
        UsageError: an output is an input, or that of another model.
    """
    named = [path for path in outputs if path is not None]
    require_models_spared(named, models)
    if settings.decisions is not None:
        require_no_inputs(named, [settings.decisions])
    require_distinct(named)
    return [replace(settings, model=model, output=path) for model, path in zip(models, outputs, strict=True)]


def check_settings(settings: Job) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: says which.
    """
    if settings.min_sparsity is not None and math.isnan(settings.min_sparsity):
        raise UsageError("--min-sparsity must be 0 to 1 (0.8 is 80%), got nan")
    if settings.precision == "keep" and (settings.fp16_io or settings.keep_float):
        raise UsageError("--fp16-io and --keep-float need --precision fp16")


def check_out_dir(out_dir: Path | None) -> None:
    """Refuse a file where a folder has to be.

    Raises:
        UsageError: it is one.
    """
    if out_dir is not None and is_there(out_dir) and not is_directory(out_dir):
        raise UsageError(f"--out-dir {out_dir} is not a directory")


def check_reports(reports: Sequence[Path], jobs: Sequence[Job], out_dir: Path | None) -> None:
    """Refuse reports that could not be written, before the work is done, or that would be written over what is read.

    Raises:
        UsageError: says which.
    """
    for report in reports:
        try:
            parent = resolved(report).parent
        except OSError as error:
            raise UsageError(f"--report {report}: cannot be written: {error.strerror}") from error
        if not is_directory(parent) and (out_dir is None or parent != out_dir.resolve()):
            raise UsageError(f"--report {report}: there is no directory {parent}")
    require_no_inputs(reports, [job.decisions for job in jobs if job.decisions is not None])
    require_models_spared([], [job.model for job in jobs], reports)


def check_deciding(settings: Job, num_models: int) -> None:
    """Refuse several ways to decide at once.

    Args:
        settings: what was asked for.
        num_models: how many models; a folder counts as several.

    Raises:
        UsageError: says which.
    """
    ways = {
        "--decisions": settings.decisions is not None,
        "--tune": settings.tune is not None,
        "--force": settings.force,
        "--min-sparsity": settings.min_sparsity is not None,
    }
    chosen = [name for name, is_chosen in ways.items() if is_chosen]
    if len(chosen) > 1 and ("--decisions" in chosen or "--tune" in chosen):
        raise UsageError(f"{chosen[0]} decides by itself: leave {' and '.join(chosen[1:])} out")
    if settings.decisions is not None and num_models > 1:
        raise UsageError("--decisions is for one model")
