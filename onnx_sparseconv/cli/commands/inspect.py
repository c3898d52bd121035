"""``sparseconv inspect``: what is sparse in a model, and what conversion would do with it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.batch import Outcome, print_outcome_error, run_all
from onnx_sparseconv.cli.console import (
    Column,
    Table,
    format_bytes,
    format_percent,
    is_wide,
    say,
    say_command,
    say_table,
)
from onnx_sparseconv.cli.exit_codes import ExitCode, worst
from onnx_sparseconv.cli.json_output import document, emit
from onnx_sparseconv.cli.layers import images_table, inspect_table, reason_lines, refused_image_lines
from onnx_sparseconv.cli.options import JsonOption, PrecisionChoice, ReportFileOption
from onnx_sparseconv.cli.paths import require_inputs_spared, suggested_output
from onnx_sparseconv.cli.tuning import BatchesOption
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.runtime.plain import to_plain
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.converter.conversion import Precision
    from onnx_sparseconv.converter.report import ModelReport

NAME = "inspect"
# Reasons that lie in the network and not in the layer (`converter.network`).
_HELD_BACK = ("beside-depthwise", "little-work")
# With this share of zeros, a model was pruned.
_MANY_ZEROS = 0.5


@failures.command
def command(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="ONNX models.", show_default=False)],
    *,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="sm_NN|native",
            help="Decide for GPUs of this architecture, as 'convert --target' does; native: for this machine's GPUs. "
            "May be repeated. Needs no GPU and no compiler. Default: decide for CPUs.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        PrecisionChoice,
        typer.Option("--precision", help="fp16: decide as 'convert --precision fp16' does, which is for GPUs."),
    ] = PrecisionChoice.KEEP,
    batch: BatchesOption = None,
    json: JsonOption = False,
    output: ReportFileOption = None,
) -> ExitCode:
    """Show every Conv layer of a model: how sparse it is, and whether it would become a sparse convolution, or why not.

    Without --target, that is decided for CPUs; on GPUs other layers gain.

    Nothing is changed. "zeros" is the share of zero weights, "by channel" its spread over the output channels, "0-ch"
    counts output/input channels that are zero as a whole, MFLOP is the dense work for one image.
    """
    if output is not None:
        require_inputs_spared(output, models)
    if batch and not targets:
        raise UsageError("--batch needs --target")
    asked = Asked(_resolve(targets or ()), precision.value, tuple(batch or ()))
    outcomes = []
    for outcome in run_all(asked.inspect, models):
        outcomes.append(outcome)
        if outcome.error:
            print_outcome_error(outcome)
        elif not json and outcome.result is not None:
            _print_model(outcome.item, outcome.result, asked)
    if len(outcomes) > 1 and not json:
        _print_summary(outcomes)
    emit(document(NAME, {"models": [_plain(o) for o in outcomes]}), to_stdout=json, file=output)
    return worst(outcome.code for outcome in outcomes)


def _resolve(names: Sequence[str]) -> tuple[str, ...]:
    """The architectures that are meant, so that a wrong one is told once, before any work."""
    from onnx_sparseconv.kernels.targets import parse_architectures  # noqa: PLC0415

    return tuple(f"sm_{architecture}" for architecture in parse_architectures(names))


@dataclass(frozen=True)
class Asked:
    """What to decide for."""

    targets: tuple[str, ...] = ()
    precision: Precision = "keep"
    batches: tuple[int, ...] = ()

    @property
    def is_for_cpus(self) -> bool:
        """Whether no GPU is asked for."""
        return not self.targets and self.precision == "keep"

    def inspect(self, path: Path) -> ModelReport:
        """Read one model."""
        from onnx_sparseconv.converter import ConvertOptions, inspect  # noqa: PLC0415

        return inspect(path, ConvertOptions(targets=self.targets, precision=self.precision, batches=self.batches))

    def words(self) -> list[str]:
        """The options, as `convert` takes them, too."""
        half = ["--precision", self.precision] if self.precision != "keep" else []
        targets = [word for target in self.targets for word in ("--target", target)]
        return [*targets, *half, *(word for batch in self.batches for word in ("--batch", str(batch)))]


def _plain(outcome: Outcome[Path, ModelReport]) -> dict[str, Any]:
    report = outcome.result
    if report is None:
        return {"path": str(outcome.item), "error": outcome.error}
    return {**to_plain(report), "sparsity": report.sparsity, "num_rewritten": report.num_rewritten}


def _print_model(path: Path, report: ModelReport, asked: Asked) -> None:
    say(f"{path}: {format_bytes(report.size_bytes)}, opset {report.opset}, IR version {report.ir_version}")
    say(f"written by {report.producer or 'an unnamed tool'}")
    if report.converted_by:
        say(f"already converted, by onnx-sparseconv {report.converted_by}")
    say()
    if report.layers:
        wide = is_wide()
        say_table(inspect_table(report.layers, wide=wide))
        if not wide and (lines := reason_lines(report.layers)):
            say()
            say("Why layers stay dense")
            for line in lines:
                say(line)
    if any(layer.images for layer in report.layers):
        say()
        say("GPU images")
        if (table := images_table(report.layers, made_now=False)).rows:
            say_table(table)
        for line in refused_image_lines(report.layers):
            say(line)
    for note in report.notes:
        say(f"note: {note}")
    say()
    say(total_line(report))
    _print_next_step(path, report, asked)
    if asked.is_for_cpus and report.layers and not report.converted_by:
        say("This is for CPUs. For a GPU, an H100 say:")
        say_command(shlex.join(["sparseconv", "inspect", str(path), "--target", "sm_90"]))
    say()


def total_line(report: ModelReport) -> str:
    """The model in one sentence."""
    if not report.layers:
        return "No Conv layer: there is nothing that this tool could make sparse."
    already = sum(layer.verdict.reason.value == "already-sparse" for layer in report.layers)
    dense = len(report.layers) - already - report.num_rewritten
    parts = [f"{report.num_rewritten} would become sparse", f"{dense} {'stays' if dense == 1 else 'stay'} dense"]
    if already:
        parts.insert(0, f"{already} {'is' if already == 1 else 'are'} sparse already")
    flops = [layer.flops for layer in report.layers]
    rewritten = sum(layer.flops or 0 for layer in report.layers if layer.verdict.rewrite)
    total = sum(f for f in flops if f is not None)
    work = (
        f" The layers to rewrite do {format_percent(rewritten / total)} of the Conv work."
        if rewritten and None not in flops
        else ""
    )
    return (
        f"{count(len(report.layers), 'Conv layer')}: {', '.join(parts)}. "
        f"{format_percent(report.sparsity)} of the Conv weights are zero.{work}"
    )


def _print_next_step(path: Path, report: ModelReport, asked: Asked) -> None:
    if report.num_rewritten:
        say("Next:")
        words = ["sparseconv", "convert", str(path), "-o", str(suggested_output(path, "sparse")), *asked.words()]
        say_command(shlex.join(words))
        return
    if not report.layers or report.converted_by:
        return
    held_back = sum(layer.verdict.reason.value in _HELD_BACK for layer in report.layers)
    if held_back or (report.sparsity or 0.0) >= _MANY_ZEROS:
        many = count(held_back, "layer")
        why = f"{many} would pay by themselves, but perhaps not in this network" if held_back else "the table says why"
        say(f"Nothing qualifies: {why}. To measure it:")
        words = ["sparseconv", "tune", str(path), "-o", f"{path.stem}.decisions.json"]
        on_gpu = [] if asked.is_for_cpus else ["--provider", "cuda", *asked.words()]
        say_command(shlex.join([*words, *on_gpu]))
    else:
        say("Nothing qualifies. A model gets faster here only when most of its Conv weights are zero. To try it out:")
        say_command(
            shlex.join(
                ["sparseconv", "prune", str(path), "-o", str(suggested_output(path, "pruned")), "--sparsity", "0.9"]
            )
        )


def _print_summary(outcomes: list[Outcome[Path, ModelReport]]) -> None:
    columns = (
        Column("model", fold=True),
        Column("size", right=True),
        Column("zeros", right=True),
        Column("sparse", right=True),
    )
    rows = []
    for outcome in outcomes:
        report = outcome.result
        if report is None:
            rows.append((str(outcome.item), "error", "", ""))
        else:
            layers = f"{report.num_rewritten} of {len(report.layers)}"
            rows.append((str(outcome.item), format_bytes(report.size_bytes), format_percent(report.sparsity), layers))
    say_table(Table(columns, tuple(rows)))
    sys.stdout.flush()
