"""``sparseconv convert``: rewrite the Conv layers that qualify."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.batch import Outcome, attempt, print_outcome_error, run_all
from onnx_sparseconv.cli.console import progress_bar, say
from onnx_sparseconv.cli.conversion.folder import convert_folders
from onnx_sparseconv.cli.conversion.folder_plan import FolderOptions
from onnx_sparseconv.cli.conversion.job import Job, check_deciding, check_reports, plan_jobs
from onnx_sparseconv.cli.conversion.reports import check_report_name, write_reports
from onnx_sparseconv.cli.conversion.text import print_conversion, print_summary
from onnx_sparseconv.cli.conversion.work import COMMAND, convert_model, exit_code, outcome_document
from onnx_sparseconv.cli.exit_codes import ExitCode, worst
from onnx_sparseconv.cli.options import PrecisionChoice, ProviderChoice, ProviderOption, ThreadsOption
from onnx_sparseconv.cli.paths import directories, require_distinct, require_inputs_spared
from onnx_sparseconv.cli.tuning import (
    BatchesOption,
    BudgetOption,
    CudaGraphOption,
    DatabaseOption,
    PresetChoice,
    PresetOption,
    RequireGainOption,
    ShapesOption,
    TuneArguments,
)
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.files import is_directory

if TYPE_CHECKING:
    from onnx_sparseconv.converter.report import ConversionReport
    from onnx_sparseconv.tuner import TuneOptions

NAME = COMMAND


class NvrtcOption(enum.StrEnum):
    """Major version of NVRTC."""

    AUTO = "auto"
    CUDA_12 = "12"
    CUDA_13 = "13"


_Outcome: TypeAlias = "Outcome[Job, ConversionReport]"


@failures.command
def command(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL|DIR", help="ONNX models, and folders: all .onnx files below them.", show_default=False
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="The converted model (one MODEL).", show_default=False),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out-dir",
            metavar="DIR",
            help="Directory for converted models, under their own names, or their paths in a folder.",
            show_default=False,
        ),
    ] = None,
    min_sparsity: Annotated[
        float | None,
        typer.Option(
            "--min-sparsity",
            min=0.0,
            max=1.0,
            help="Rewrite layers with at least this share of zeros. Default: decided for each kind of layer.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Rewrite whatever can be rewritten, even where it will be slower.", show_default=False
        ),
    ] = False,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            "--report",
            metavar="FILE.html|.json",
            help="Write what was done, why, and what it gained, as a page or as JSON. May be repeated.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        PrecisionChoice,
        typer.Option(
            "--precision",
            help="fp16: turn the model into float16, for GPUs; what must stay float stays so. keep: leave types alone.",
        ),
    ] = PrecisionChoice.KEEP,
    fp16_io: Annotated[
        bool,
        typer.Option("--fp16-io", help="With fp16: float inputs and outputs become float16, too.", show_default=False),
    ] = False,
    keep_float: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-float",
            metavar="NAME",
            help="With fp16: a node, or an operator such as Softmax, that stays float. May be repeated.",
            show_default=False,
        ),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="sm_NN|native",
            help="Compile GPU kernels of the layers for this architecture; native: for this machine's GPUs. May be "
            "repeated. Needs no GPU but NVRTC; without it, the library's own kernels run the model on GPUs.",
            show_default=False,
        ),
    ] = None,
    nvrtc: Annotated[
        NvrtcOption, typer.Option("--nvrtc", help="Major version of NVRTC; auto: the oldest that knows the target.")
    ] = NvrtcOption.AUTO,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir",
            metavar="DIR",
            help="Where compiled kernels are kept. Default: ONNX_SPARSECONV_CACHE, or the user's cache folder.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Processes at a time: of models that are converted, and of compilers. Default: one model, and as many "
            "compilers as cores. With --tune one model at a time, whatever is given.",
            show_default=False,
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            "--decisions",
            metavar="FILE.json",
            help="Rewrite the layers that this file of 'sparseconv tune' says (one MODEL).",
            show_default=False,
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Decide by measurement on this machine, as 'sparseconv tune' does; one model at a time.",
            show_default=False,
        ),
    ] = False,
    preset: PresetOption = PresetChoice.DEFAULT,
    provider: ProviderOption = ProviderChoice.CPU,
    threads: ThreadsOption = None,
    batch: BatchesOption = None,
    shape: ShapesOption = None,
    budget: BudgetOption = None,
    database: DatabaseOption = None,
    cuda_graph: CudaGraphOption = False,
    require_gain: RequireGainOption = False,
    redo: Annotated[
        bool,
        typer.Option(
            "--redo", help="With a folder: also convert again what has not changed since.", show_default=False
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done and write no model.", show_default=False)
    ] = False,
) -> ExitCode:
    """Rewrite the Conv layers whose sparsity pays into sparse convolutions.

    The converted model needs this package's native library to be faster; without it, it still runs anywhere and gives
    the same results. Exit code 4: no layer qualified, nothing was written.
    """
    reports = tuple(report or ())
    for path in reports:
        check_report_name(path)
    is_folder = any(is_directory(model) for model in models)
    if redo and not is_folder:
        raise UsageError("--redo is for folders: single models are always converted")
    # What else runs on a machine disturbs measurements on it.
    at_a_time = 1 if tune else jobs or 1
    if not is_folder:  # else nobody knows yet how many there are
        at_a_time = min(at_a_time, len(models))
    asked = TuneArguments(
        provider, threads, preset, budget, database, tuple(batch or ()), tuple(shape or ()), cuda_graph
    )
    # The rule for GPUs asks for batch sizes, too.
    decided = {"--force": force, "--decisions": decisions is not None, "--min-sparsity": min_sparsity is not None}
    overruled = next((name for name, is_given in decided.items() if is_given), "")
    by_rule = bool(targets) and not overruled
    given = asked.given(but=("--batch",) if by_rule else ()) or ("--require-gain" if require_gain else "")
    if not tune and given:
        if given == "--batch" and targets:
            raise UsageError(f"--batch has nothing to decide: {overruled} decides for all batch sizes; leave one out")
        raise UsageError(f"{given} needs --tune" + (", or --target" if given == "--batch" else ""))
    settings = Job(
        model=Path(),
        output=None,
        min_sparsity=min_sparsity,
        force=force,
        dry_run=dry_run,
        targets=_resolve(targets or (), nvrtc),
        batches=() if tune else asked.batches,
        nvrtc=nvrtc.value,
        compile_jobs=None if jobs is None else jobs if is_folder else max(1, jobs // at_a_time),
        cache_dir=cache_dir,
        decisions=decisions,
        require_gain=require_gain,
        precision=precision.value,
        fp16_io=fp16_io,
        keep_float=tuple(keep_float or ()),
        find_peaks=bool(reports) or is_folder,
    )
    if tune:
        settings = replace(settings, tune=_tune_options(asked, settings))
    check_deciding(settings, 2 if is_folder else len(models))
    if database is not None:
        require_inputs_spared(database, [*models, *(path for path in (output, *reports) if path is not None)])
    if is_folder:
        if output is not None:
            raise UsageError("-o names one output, and a folder holds many models: use --out-dir")
        return convert_folders(models, settings, FolderOptions(out_dir, reports, at_a_time, redo))
    work = plan_jobs(models, output, out_dir, settings)
    check_reports(reports, work, out_dir)
    require_distinct([*reports, *(job.output for job in work if job.output is not None)])
    outcomes: list[_Outcome] = []
    with directories([] if dry_run or out_dir is None else [out_dir]):
        for outcome in _run(work, at_a_time):
            outcomes.append(outcome)
            _print_outcome(outcome)
    if len(outcomes) > 1:
        print_summary(outcomes)
    write_reports(reports, [outcome_document(outcome) for outcome in outcomes], "models")
    return worst(exit_code(outcome) for outcome in outcomes)


def _tune_options(asked: TuneArguments, settings: Job) -> TuneOptions:
    """What to tune for: the model that these settings will make."""
    return asked.options(
        # What is timed on a CPU may be made for GPUs all the same.
        targets=settings.targets if asked.provider is ProviderChoice.CUDA else (),
        nvrtc=settings.nvrtc,
        jobs=settings.compile_jobs,
        cache_dir=settings.cache_dir,
        precision=settings.precision,
        fp16_io=settings.fp16_io,
        keep_float=settings.keep_float,
    )


def _resolve(names: Sequence[str], nvrtc: NvrtcOption) -> tuple[str, ...]:
    """The architectures that are meant, so that a wrong one is told once, before any work."""
    if not names:
        return ()
    from onnx_sparseconv.kernels.targets import resolve_targets  # noqa: PLC0415

    return tuple(target.name for target in resolve_targets(names, nvrtc.value))


def _run(work: Sequence[Job], jobs: int) -> Iterator[_Outcome]:
    """Convert, with a progress bar: over layers for one model, over models for several."""
    if len(work) == 1:
        with progress_bar() as advance:
            outcome = attempt(lambda job: convert_model(job, advance), work[0])
        yield outcome
        return
    for number, outcome in enumerate(_with_bar(work, jobs), start=1):
        if number > 1:
            say()
        yield outcome


def _with_bar(work: Sequence[Job], jobs: int) -> Iterator[_Outcome]:
    """The outcomes, each with the bar out of the way while it is printed."""
    outcomes = run_all(convert_model, work, jobs)
    for number, job in enumerate(work):
        with progress_bar("converting") as advance:
            advance(number, len(work), job.model.name)
            outcome = next(outcomes)
        yield outcome


def _print_outcome(outcome: _Outcome) -> None:
    if outcome.result is None:
        print_outcome_error(outcome)
    else:
        print_conversion(outcome.item, outcome.result)
