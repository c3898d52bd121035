"""All commands under one roof."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from onnx_sparseconv.cli.commands import bench, convert, doctor, inspect, prune, report, restore, run, tune, verify
from onnx_sparseconv.cli.failures import close_stdout_quietly, full_disk_told
from onnx_sparseconv.version import __version__

_EPILOG = (
    "Exit codes: 0 done, 1 error, 2 usage, 3 outputs differ, 4 nothing qualified, "
    "5 the provider asked for was not used, 6 conflicting installation, 7 no gain."
)

app = typer.Typer(
    name="sparseconv",
    help="Makes a pruned ONNX CNN faster: Conv layers whose weights are mostly zero become sparse convolutions.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    # A traceback is for the developers: it has to be complete and plain.
    pretty_exceptions_enable=False,
)
for _module in (inspect, tune, convert, report, verify, bench, run, prune, restore, doctor):
    app.command(_module.NAME)(_module.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"sparseconv {__version__}\n")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True, show_default=False
        ),
    ] = False,
) -> None:
    pass


def run_command_line() -> None:
    """Run the command that the command line names, and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of files need not be text.
            stream.reconfigure(errors="backslashreplace")
    try:
        with full_disk_told():
            app(prog_name="sparseconv")
    finally:
        close_stdout_quietly()
