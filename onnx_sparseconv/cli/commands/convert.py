"""``sparseconv convert``: rewrite the Conv layers that qualify."""

from __future__ import annotations

import contextlib
import enum
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.batch import Outcome, attempt, print_outcome_error, run_all
from onnx_sparseconv.cli.console import (
    Advance,
    Column,
    Table,
    count,
    format_bytes,
    format_change,
    progress_bar,
    say,
    say_command,
    say_table,
)
from onnx_sparseconv.cli.exit_codes import ExitCode, worst
from onnx_sparseconv.cli.json_output import document, emit
from onnx_sparseconv.cli.layers import (
    converted_table,
    images_table,
    kept_float_lines,
    reason_lines,
    refused_image_lines,
)
from onnx_sparseconv.cli.options import ProviderChoice, ProviderOption, ThreadsOption
from onnx_sparseconv.cli.paths import require_distinct, require_not_an_input
from onnx_sparseconv.cli.tuning import (
    BatchesOption,
    BudgetOption,
    DatabaseOption,
    PresetChoice,
    PresetOption,
    RequireGainOption,
    ShapesOption,
    TuneArguments,
    has_gain,
    say_whole,
)
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.runtime.plain import to_plain

if TYPE_CHECKING:
    from onnx_sparseconv.converter.conversion import Precision
    from onnx_sparseconv.converter.decisions import Decisions
    from onnx_sparseconv.converter.report import ConversionReport, PrecisionReport
    from onnx_sparseconv.kernels.targets import NvrtcChoice
    from onnx_sparseconv.tuner import TuneOptions

NAME = "convert"


class PrecisionOption(enum.StrEnum):
    """Type that the model computes in."""

    KEEP = "keep"
    FP16 = "fp16"


class NvrtcOption(enum.StrEnum):
    """Major version of NVRTC."""

    AUTO = "auto"
    CUDA_12 = "12"
    CUDA_13 = "13"


@dataclass(frozen=True)
class Job:
    """One model to convert; ``output`` None on a dry run without a name, ``compile_jobs`` None for all cores."""

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


_Outcome = Outcome[Job, "ConversionReport"]


@failures.command
def command(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="ONNX models.", show_default=False)],
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
            help="Directory for converted models, under their own names.",
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
        Path | None,
        typer.Option(
            "--report", metavar="FILE.json", help="Write what was done, and why, as JSON.", show_default=False
        ),
    ] = None,
    precision: Annotated[
        PrecisionOption,
        typer.Option(
            "--precision",
            help="fp16: turn the model into float16, for GPUs; what must stay float stays so. keep: leave types alone.",
        ),
    ] = PrecisionOption.KEEP,
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
            "repeated. Needs no GPU but NVRTC; without it, converted models run on GPUs with a general kernel.",
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
            "compilers as cores.",
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
    require_gain: RequireGainOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done and write no model.", show_default=False)
    ] = False,
) -> ExitCode:
    """Rewrite the Conv layers whose sparsity pays into sparse convolutions.

    The converted model needs this package's native library to be faster; without it, it still runs anywhere and gives
    the same results. Exit code 4: no layer qualified, nothing was written.
    """
    at_a_time = min(jobs or 1, len(models))
    asked = TuneArguments(provider, threads, preset, budget, database, tuple(batch or ()), tuple(shape or ()))
    # The rule for GPUs asks for batch sizes, too.
    by_rule = bool(targets) and not (force or decisions is not None or min_sparsity is not None)
    given = asked.given(but=("--batch",) if by_rule else ()) or ("--require-gain" if require_gain else "")
    if not tune and given:
        raise UsageError(f"{given} needs --tune" + (", or --target and its rule" if given == "--batch" else ""))
    settings = Job(
        model=Path(),
        output=None,
        min_sparsity=min_sparsity,
        force=force,
        dry_run=dry_run,
        targets=_resolve(targets or (), nvrtc),
        batches=() if tune else asked.batches,
        nvrtc=nvrtc.value,
        compile_jobs=None if jobs is None else max(1, jobs // at_a_time),
        cache_dir=cache_dir,
        decisions=decisions,
        tune=asked.options() if tune else None,
        require_gain=require_gain,
        precision=precision.value,
        fp16_io=fp16_io,
        keep_float=tuple(keep_float or ()),
    )
    _check_deciding(settings, len(models), at_a_time)
    if database is not None:
        require_not_an_input(database, [*models, *(path for path in (output, report) if path is not None)])
    work = plan_jobs(models, output, out_dir, settings)
    _check_report_path(report, work, out_dir)
    outcomes: list[_Outcome] = []
    with _directory(None if dry_run else out_dir):
        for outcome in _run(work, at_a_time):
            outcomes.append(outcome)
            _print_outcome(outcome)
    if len(outcomes) > 1:
        _print_summary(outcomes)
    if report is not None:
        plain = [_plain(outcome) for outcome in outcomes]
        emit(plain[0] if len(plain) == 1 else plain, to_stdout=False, file=report)
    return worst(exit_code(outcome) for outcome in outcomes)


def plan_jobs(models: Sequence[Path], output: Path | None, out_dir: Path | None, settings: Job) -> list[Job]:
    """Decide the output of every model.

    Raises:
        UsageError: no output, two ways of naming it, several models for one output, or an output that is an input.
    """
    if output is not None and out_dir is not None:
        raise UsageError("give either -o or --out-dir")
    if output is not None and len(models) > 1:
        raise UsageError(f"-o names one output for {len(models)} models: use --out-dir")
    if output is None and out_dir is None and not settings.dry_run:
        raise UsageError("give the output: -o OUT, or --out-dir DIR (or --dry-run to write nothing)")
    if settings.min_sparsity is not None and math.isnan(settings.min_sparsity):
        raise UsageError("--min-sparsity must be 0 to 1 (0.8 is 80%), got nan")
    if settings.precision == "keep" and (settings.fp16_io or settings.keep_float):
        raise UsageError("--fp16-io and --keep-float need --precision fp16")
    if out_dir is not None and out_dir.exists() and not out_dir.is_dir():
        raise UsageError(f"--out-dir {out_dir} is not a directory")
    outputs = [out_dir / model.name if out_dir is not None else output for model in models]
    named = [path for path in outputs if path is not None]
    for path in named:
        require_not_an_input(path, models)
    require_distinct(named)
    return [replace(settings, model=model, output=path) for model, path in zip(models, outputs, strict=True)]


def _check_deciding(settings: Job, num_models: int, at_a_time: int) -> None:
    """Refuse several ways to decide at once, and measurements that would disturb each other.

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
    if settings.tune is not None and at_a_time > 1:
        raise UsageError("--tune times one model at a time: leave --jobs out")
    if settings.tune is not None and settings.precision != "keep":
        raise UsageError("--tune times the model in its own precision: convert with --precision first, then tune")


def _resolve(names: Sequence[str], nvrtc: NvrtcOption) -> tuple[str, ...]:
    """The architectures that are meant, so that a wrong one is told once, before any work."""
    if not names:
        return ()
    from onnx_sparseconv.kernels.targets import resolve_targets  # noqa: PLC0415

    return tuple(target.name for target in resolve_targets(names, nvrtc.value))


def convert_model(job: Job, advance: Advance | None = None) -> ConversionReport:
    """Convert one model."""
    from onnx_sparseconv.converter import ConvertOptions, convert  # noqa: PLC0415

    decisions, notes = _decide(job, advance)
    options = ConvertOptions(
        min_sparsity=job.min_sparsity,
        force=job.force,
        decisions=decisions,
        dry_run=job.dry_run,
        targets=job.targets,
        batches=job.batches,
        nvrtc=job.nvrtc,
        jobs=job.compile_jobs,
        cache_dir=job.cache_dir,
        precision=job.precision,
        fp16_io=job.fp16_io,
        keep_float=job.keep_float,
    )
    steps = [_named(advance, verb) if advance is not None else None for verb in ("converting", "compiling")]
    _, report = convert(job.model, job.output, options, progress=steps[0], compile_progress=steps[1])
    return replace(report, notes=(*report.notes, *notes))


def _decide(job: Job, advance: Advance | None) -> tuple[Decisions | None, tuple[str, ...]]:
    """The decisions that were asked for, out of a file or measured now, and what has to be known of them."""
    if job.decisions is not None:
        from onnx_sparseconv.converter import read_decisions  # noqa: PLC0415
        from onnx_sparseconv.tuner import machine_notes  # noqa: PLC0415

        decisions = read_decisions(job.decisions)
        return decisions, machine_notes(decisions)
    if job.tune is None:
        return None, ()
    from onnx_sparseconv.tuner import tune  # noqa: PLC0415

    decisions = tune(job.model, job.tune, progress=_named(advance, "timing") if advance else None).decisions
    return decisions, decisions.notes


def _named(advance: Advance, verb: str) -> Advance:
    """A progress bar's function that says what is being done."""
    return lambda done, total, what: advance(done, total, f"{verb} {what}")


def exit_code(outcome: _Outcome) -> ExitCode:
    """The exit code of one model."""
    if outcome.result is None:
        return outcome.code
    decisions = outcome.result.decisions
    if outcome.item.require_gain and (decisions is None or not has_gain(decisions)):
        return ExitCode.NO_GAIN
    return ExitCode.DONE if outcome.result.changed else ExitCode.NOTHING_QUALIFIED


def _check_report_path(report: Path | None, work: Sequence[Job], out_dir: Path | None) -> None:
    """Refuse a report that could not be written, before the work is done."""
    if report is not None:
        parent = report.resolve().parent
        if not parent.is_dir() and (out_dir is None or parent != out_dir.resolve()):
            raise UsageError(f"--report {report}: there is no directory {parent}")
        require_not_an_input(report, [job.model for job in work])
        require_distinct([report, *(job.output for job in work if job.output is not None)])


@contextlib.contextmanager
def _directory(path: Path | None) -> Iterator[None]:
    """Make the output directory, and take it away again when nothing was put there."""
    made = path is not None and not path.exists()
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"cannot make the directory {path}: {error.strerror}") from error
    try:
        yield
    finally:
        if made and path is not None and not any(path.iterdir()):
            path.rmdir()


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


def _plain(outcome: _Outcome) -> dict[str, Any]:
    if outcome.result is None:
        return document(
            NAME, {"source": str(outcome.item.model), "error": outcome.error, "exit_code": int(outcome.code)}
        )
    return document(NAME, {**to_plain(outcome.result), "exit_code": int(exit_code(outcome))})


def _print_outcome(outcome: _Outcome) -> None:
    if outcome.result is None:
        print_outcome_error(outcome)
    else:
        print_conversion(outcome.item, outcome.result)


def print_conversion(job: Job, report: ConversionReport) -> None:
    """Print what was done with one model, why, and what comes next."""
    layers = report.model.layers
    rewritten = [layer for layer in layers if layer.verdict.rewrite]
    if not report.changed:
        _print_nothing(job, report)
        return
    verb = "would become" if job.dry_run else "became"
    if report.converted:
        what = "a sparse convolution" if len(rewritten) == 1 else "sparse convolutions"
        say(f"{job.model}: {len(rewritten)} of {count(len(layers), 'Conv layer')} {verb} {what}")
        say()
        say_table(converted_table(layers))
    elif report.is_half:
        say(f"{job.model}: {'would become' if job.dry_run else 'became'} float16; {_why_no_layer(report)}")
    else:
        say(f"{job.model}: already converted; GPU images were added")
    if report.converted and (lines := reason_lines(layers)):
        say()
        say("Left dense")
        for line in lines:
            say(line)
    say()
    if report.precision is not None:
        _print_precision(report.precision)
    if report.targets and not job.dry_run:
        _print_images(report)
    if report.converted:
        change = format_change(report.conv_bytes_before, report.conv_bytes_after)
        say(f"Conv weights  {change}, of the rewritten layers")
    if report.imaged_bytes_after:
        change = format_change(report.imaged_bytes_before, report.imaged_bytes_after)
        say(f"with images   {change}, of the layers that carry GPU images")
    say(f"file          {format_change(report.bytes_before, report.bytes_after)}")
    if job.tune is not None and report.decisions is not None:
        say_whole(report.decisions)
    for note in report.notes:
        say(f"note: {note}")
    _print_next_steps(job, report)


def _why_no_layer(report: ConversionReport) -> str:
    if report.already_converted:
        return "its sparse layers were converted before"
    return "no Conv layer qualifies to become sparse" if report.model.layers else "it has no Conv layer"


def _print_precision(report: PrecisionReport) -> None:
    if report.changed:
        ends = ", inputs and outputs, too" if report.half_io else ""
        casts = f"{count(report.casts, 'Cast')} added"
        say(f"precision     float16: {count(report.half_nodes, 'node')}{ends}; {casts}")
    else:
        say("precision     nothing became float16: the model has no Conv, Gemm or MatMul in float that could")
    if report.kept:
        say("Left float")
        for line in kept_float_lines(report.kept):
            say(line, hang=2)
    for note in report.notes:
        say(f"note: {note}")
    say()


def _print_images(report: ConversionReport) -> None:
    layers = report.model.layers
    say("GPU images")
    if (table := images_table(layers)).rows:
        say_table(table)
    for line in refused_image_lines(layers):
        say(line)
    say("note: generated GPU kernels have not run on a GPU yet; verify the model on yours before you trust it")
    say()


def _print_nothing(job: Job, report: ConversionReport) -> None:
    if report.already_converted:
        say(f"{job.model}: already converted, and nothing new to rewrite; nothing was written")
    else:
        say(f"{job.model}: no Conv layer qualifies; nothing was written")
    for line in reason_lines(report.model.layers):
        say(line)
    if report.precision is not None:
        _print_precision(report.precision)
    if job.tune is not None and report.decisions is not None:
        say_whole(report.decisions)
    for note in report.notes:
        say(f"note: {note}")
    if report.decisions is None and report.model.layers and not report.already_converted and not job.force:
        say("--force rewrites whatever can be rewritten; --min-sparsity lowers the bar.")


def _print_next_steps(job: Job, report: ConversionReport) -> None:
    say()
    if report.output is None:
        say("Dry run: nothing was written.")
        return
    say(f"Wrote {report.output}. Next, check that the outputs agree, and time it:")
    for step in ("verify", "bench"):
        say_command(shlex.join(["sparseconv", step, str(job.model), str(report.output)]))


def _print_summary(outcomes: Sequence[_Outcome]) -> None:
    columns = (Column("model", fold=True), Column("result"), Column("sparse", right=True), Column("file", right=True))
    rows = []
    for outcome in outcomes:
        report = outcome.result
        if report is None:
            rows.append((str(outcome.item.model), "error", "", ""))
            continue
        sparse = f"{report.model.num_rewritten} of {len(report.model.layers)}"
        sizes = f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}" if report.changed else ""
        rows.append(
            (str(outcome.item.model), _result_word(outcome.item, report), sparse if report.converted else "0", sizes)
        )
    say()
    say_table(Table(columns, tuple(rows)))


def _result_word(job: Job, report: ConversionReport) -> str:
    if report.converted:
        return "would convert" if job.dry_run else "converted"
    if report.is_half:
        return "would be float16" if job.dry_run else "now float16"
    if report.changed:
        return "images added"
    return "already converted" if report.already_converted else "nothing qualifies"
