"""The command line, ``sparseconv``. A command parses its arguments, calls one function of the library, and prints."""

from __future__ import annotations

from onnx_sparseconv.cli import interrupts
from onnx_sparseconv.cli.exit_codes import INTERRUPTED


def main() -> None:
    """Entry point of the ``sparseconv`` script."""
    interrupts.raise_on_interrupt()
    try:
        # Here, because it takes a while, in which Ctrl-C shall not show a traceback either.
        from onnx_sparseconv.cli.app import run_command_line  # noqa: PLC0415

        interrupts.raise_what_was_put_off()
        run_command_line()
    except KeyboardInterrupt:
        pass
    except SystemExit as end:
        # Typer ends without a word where it is itself interrupted.
        if end.code != INTERRUPTED or interrupts.was_told():
            raise
    else:
        return
    interrupts.tell()
    raise SystemExit(INTERRUPTED)
