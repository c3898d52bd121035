"""The command line, ``sparseconv``. A command parses its arguments, calls one function of the library, and prints."""

from __future__ import annotations

import sys

from onnx_sparseconv.cli import interrupts
from onnx_sparseconv.cli.exit_codes import INTERRUPTED


def main() -> None:
    """Entry point of the ``sparseconv`` script."""
    interrupts.raise_on_interrupt()
    try:
        # Here, because it takes a while, in which Ctrl-C shall not show a traceback either.
        from onnx_sparseconv.cli.app import run_command_line  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    run_command_line()
