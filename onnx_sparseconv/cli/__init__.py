"""The command line, ``sparseconv``. A command parses its arguments, calls one function of the library, and prints."""

from __future__ import annotations

import os
import sys

from onnx_sparseconv.cli import interrupts
from onnx_sparseconv.cli.exit_codes import INTERRUPTED


def main() -> None:
    """Entry point of the ``sparseconv`` script."""
    _open_closed_streams()
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


def _open_closed_streams() -> None:
    """Give Python's streams that were closed when the program began, as some service managers do, to nobody.

    In the order of their numbers: each file that is opened takes the lowest one that is free.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            setattr(sys, name, os.fdopen(descriptor, "r" if number == 0 else "w"))
