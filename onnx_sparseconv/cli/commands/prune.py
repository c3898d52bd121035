"""``sparseconv prune``: make zeros, to try things out."""

from __future__ import annotations

import enum
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import (
    Column,
    Table,
    format_percent,
    format_shape,
    say,
    say_command,
    say_table,
    shown_name,
)
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.paths import require_models_spared, suggested_output
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.converter.report import PruneReport

NAME = "prune"


class Scope(enum.StrEnum):
    """Within what the smallest weights are sought."""

    LAYER = "layer"
    GLOBAL = "global"
    CHANNEL = "channel"


@failures.command
def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX model.", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The pruned model.", show_default=False)
    ],
    sparsity: Annotated[
        float,
        typer.Option("--sparsity", help="Share of the weights to set to zero, above 0, up to 1.", show_default=False),
    ],
    scope: Annotated[
        Scope,
        typer.Option(
            "--scope",
            help="layer: this share of every layer. global: of the whole model, so that some layers lose more than "
            "others. channel: of every output channel, which stores best and runs most evenly.",
        ),
    ] = Scope.LAYER,
) -> ExitCode:
    """Set the smallest Conv weights to zero, once, without retraining: for trying things out.

    The accuracy suffers, and only retraining brings it back. A model for use is pruned while it is trained.
    """
    from onnx_sparseconv.converter import prune  # noqa: PLC0415

    if not 0 < sparsity <= 1:
        raise UsageError(f"--sparsity must be above 0 and at most 1, got {sparsity:g} (0.9 is 90%)")
    require_models_spared([output], [model])
    with failures.stdout_kept_clean():
        report = prune(model, output, sparsity=sparsity, scope=scope.value)
    print_report(model, report)
    return ExitCode.DONE


def print_report(model: Path, report: PruneReport) -> None:
    """Print what was pruned."""
    pruned = [layer for layer in report.layers if not layer.skipped]
    columns = (
        Column("layer", fold=True),
        Column("weight", fold=True),
        Column("zeros before", right=True),
        Column("after", right=True),
    )
    rows = tuple(
        (
            shown_name(layer.name),
            format_shape(layer.weight_shape),
            format_percent(layer.sparsity_before),
            format_percent(layer.sparsity_after),
        )
        for layer in pruned
    )
    if rows:
        say_table(Table(columns, rows))
        say()
    skipped: dict[str, list[str]] = {}
    for layer in report.layers:
        if layer.skipped:
            skipped.setdefault(layer.skipped, []).append(layer.name)
    for reason, names in skipped.items():
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        say(f"left alone, {count(len(names), 'layer')} ({shown}): {reason}")
    before, after = format_percent(report.sparsity_before), format_percent(report.sparsity_after)
    say(f"Pruned {count(len(pruned), 'Conv weight')} of {model} (scope: {report.scope}): {before} -> {after} zeros.")
    # Among the notes is that this costs accuracy and needs retraining.
    for note in report.notes:
        say(f"note: {note}")
    if report.output is not None:
        say(f"Wrote {report.output}. Next:")
        converted = suggested_output(report.output, "sparse")
        say_command(shlex.join(["sparseconv", "convert", str(report.output), "-o", str(converted)]))
