"""``sparseconv restore``: back to dense Conv."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import say
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.options import ConvertedArgument
from onnx_sparseconv.cli.paths import require_models_spared
from onnx_sparseconv.text import count

NAME = "restore"


@failures.command
def command(
    converted: ConvertedArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The dense model.", show_default=False)],
) -> ExitCode:
    """Turn every sparse convolution back into a Conv with the very bits of the weights that it holds."""
    from onnx_sparseconv.converter import restore  # noqa: PLC0415

    require_models_spared([output], [converted])
    with failures.stdout_kept_clean():
        report = restore(converted, output)
    for name in report.layers:
        say(f"  {name}")
    for note in report.notes:
        say(f"note: {note}")
    say(f"Wrote {output}: {count(len(report.layers), 'layer is', 'layers are')} dense Conv again.")
    return ExitCode.DONE
