"""From exceptions to exit codes and one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec

import typer

from onnx_sparseconv.cli import interrupts
from onnx_sparseconv.cli.exit_codes import INTERRUPTED, ExitCode
from onnx_sparseconv.errors import ProviderError, SparseConvError, UsageError
from onnx_sparseconv.text import without_controls

P = ParamSpec("P")

OUT_OF_MEMORY = "not enough memory for this model"


def exit_code_of(error: SparseConvError) -> ExitCode:
    """The exit code that stands for an error."""
    if isinstance(error, UsageError):
        return ExitCode.USAGE
    if isinstance(error, ProviderError):
        return ExitCode.PROVIDER_NOT_USED
    return ExitCode.ERROR


def print_error(message: str) -> None:
    """Write ``error: message`` on stderr, on one line."""
    sys.stderr.write(f"error: {without_controls(' '.join(message.split()))}\n")


def command(function: Callable[P, ExitCode]) -> Callable[P, None]:
    """Make a command of a function that returns its exit code.

    Errors that a user can mend become one line on stderr. All others pass, so that a bug shows its traceback.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code: int = function(*args, **kwargs)
        except SparseConvError as error:
            code = INTERRUPTED if _was_interrupted(error) else exit_code_of(error)
            if code != INTERRUPTED:
                print_error(str(error))
        except MemoryError:
            print_error(OUT_OF_MEMORY)
            code = ExitCode.ERROR
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:
            # A lock, say, that was not taken again before it was to be released.
            if not _was_interrupted(error):
                raise
            code = INTERRUPTED
        if code == INTERRUPTED:
            interrupts.tell()
        raise typer.Exit(code)

    return run


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: a library whose clean-up it breaks into raises what comes of that."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send to stderr what libraries print while they work: stdout is for the command's result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def close_stdout_quietly() -> None:
    """Flush stdout; a reader that has gone away (``sparseconv ... | head``) is no reason for a traceback."""
    with full_disk_told():
        try:
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                raise


@contextlib.contextmanager
def full_disk_told() -> Iterator[None]:
    """End with one line where a stream can take no more: what is written to files says so itself, with their names."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO} or error.filename is not None:
            raise
        print_error(f"standard output cannot be written: {error.strerror}")
        raise SystemExit(int(ExitCode.ERROR)) from None
