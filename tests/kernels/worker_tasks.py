"""Functions that the tests send to worker processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from onnx_sparseconv.errors import CompileError


def double(item):
    """Print noise, and take longer for small numbers, so that the results arrive out of order."""
    print("noise on stdout")  # noqa: T201
    os.write(1, b"noise on its descriptor\n")
    time.sleep(0.3 if item == 1 else 0)
    return 2 * item


def process_id(_item):
    return os.getpid()


def misbehave(item):
    """One kind of failure for each item."""
    if item == "mendable":
        raise CompileError("no such kernel", "the log")
    if item == "bug":
        raise ZeroDivisionError("oops")
    if item == "stubborn":

        class LocalError(Exception):
            pass

        raise LocalError("cannot be pickled")
    if item == "crash":
        os._exit(9)
    if item == "killed":
        os.kill(os.getpid(), 9)
    if item == "exit":
        raise SystemExit(3)
    return item


def sleep_long(directory):
    """Leave a mark with the process' number; work for long."""
    (Path(directory) / f"{os.getpid()}.alive").write_text("")
    time.sleep(60)


def sleep_long_or_fail(directory):
    if directory is None:
        raise CompileError("failed")
    sleep_long(directory)
