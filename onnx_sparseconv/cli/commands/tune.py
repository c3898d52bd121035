"""``sparseconv tune``: decide by measurement which layers run sparse."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import progress_bar, say, say_command, say_field, say_table, shorten
from onnx_sparseconv.cli.conversion.work import with_peaks
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.json_output import document, emit
from onnx_sparseconv.cli.options import JsonOption, PrecisionChoice, ProviderChoice, ProviderOption, ThreadsOption
from onnx_sparseconv.cli.paths import require_distinct, require_inputs_spared, suggested_output
from onnx_sparseconv.cli.tuning import (
    BatchesOption,
    BudgetOption,
    CudaGraphOption,
    DatabaseOption,
    PresetChoice,
    PresetOption,
    RequireGainOption,
    ShapesOption,
    TimedTargetsOption,
    TuneArguments,
    decisions_table,
    say_whole,
)
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.tuner import TuneReport

NAME = "tune"


@failures.command
def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX model.", show_default=False)],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE.json", help="The decisions, to be read and edited.", show_default=False
        ),
    ],
    provider: ProviderOption = ProviderChoice.CPU,
    threads: ThreadsOption = None,
    batch: BatchesOption = None,
    shape: ShapesOption = None,
    preset: PresetOption = PresetChoice.DEFAULT,
    budget: BudgetOption = None,
    database: DatabaseOption = None,
    target: TimedTargetsOption = None,
    cuda_graph: CudaGraphOption = False,
    precision: Annotated[
        PrecisionChoice,
        typer.Option("--precision", help="fp16: tune the model that conversion with --precision fp16 makes of it."),
    ] = PrecisionChoice.KEEP,
    require_gain: RequireGainOption = False,
    json: JsonOption = False,
) -> ExitCode:
    """Time every Conv layer dense and sparse on this machine, and decide which are to be sparse.

    The choice is then checked on the model as a whole. What is measured is kept, so that a tune that was interrupted
    resumes. 'sparseconv convert --decisions FILE' makes the model. Exit code 7, with --require-gain: it is not faster.
    """
    from onnx_sparseconv.converter.decisions import write_decisions  # noqa: PLC0415
    from onnx_sparseconv.tuner import tune  # noqa: PLC0415

    asked = TuneArguments(
        provider, threads, preset, budget, database, tuple(batch or ()), tuple(shape or ()), cuda_graph
    )
    options = asked.options(targets=target or (), precision=precision.value)
    require_inputs_spared(output, [model])
    if database is not None:
        require_inputs_spared(database, [model])
        require_distinct([output, database])
    if not output.resolve().parent.is_dir():
        raise UsageError(f"-o {output}: there is no directory {output.resolve().parent}")
    with failures.stdout_kept_clean(), progress_bar("timing") as advance:
        report = tune(model, options, progress=lambda done, total, what: advance(done, total, shorten(what)))
        report = replace(report, decisions=with_peaks(report.decisions, options))
    write_decisions(report.decisions, output)
    if not json:
        print_report(model, output, report, precision)
    emit(document(NAME, {**vars(report), "gain": report.gain}), to_stdout=json, file=None)
    return ExitCode.NO_GAIN if require_gain and not report.gain else ExitCode.DONE


def print_report(model: Path, output: Path, report: TuneReport, precision: PrecisionChoice) -> None:
    """Print what was measured and decided, and how to make the model."""
    decisions = report.decisions
    say_field("measured", decisions.measured_on)
    parts = (
        (report.num_measured, "timed now"),
        (report.num_found, "known from before"),
        (report.num_alike, "alike another"),
    )
    say_field("layers", ", ".join(f"{number} {what}" for number, what in parts if number) or "none timed")
    say()
    if decisions.layers:
        say_table(decisions_table(decisions))
        say()
    say_whole(decisions)
    for note in decisions.notes:
        say(f"note: {note}", hang=2)
    sparse = decisions.num_sparse
    say(f"Wrote {output}: {sparse} of {count(len(decisions.layers), 'Conv layer')} sparse.")
    if sparse:
        say("Next:")
        converted = suggested_output(model, "sparse")
        words = ["sparseconv", "convert", str(model), "-o", str(converted), "--decisions", str(output)]
        half = ["--precision", "fp16"] if precision is PrecisionChoice.FP16 else []
        say_command(shlex.join([*words, *half]))
