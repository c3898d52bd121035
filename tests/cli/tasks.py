"""Functions that the tests send to other processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from onnx_sparseconv.errors import ModelError


def double(item):
    """Take longer for small numbers, so that the outcomes arrive out of order."""
    time.sleep(0.2 if item == 1 else 0)
    return 2 * item


def misbehave(item):
    """One kind of failure for each item."""
    if item == "mendable":
        raise ModelError("bad file")
    if item == "bug":
        raise ZeroDivisionError("oops")
    if item == "memory":
        raise MemoryError
    if item == "crash":
        os._exit(9)
    print("noise on stdout")  # noqa: T201
    return item


def blocks_interrupts(_item):
    """Whether Ctrl-C would pass this process by."""
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def leave_a_mark(directory):
    """Work for long; tidy up when interrupted."""
    mark = Path(directory) / f"{os.getpid()}.tmp"
    try:
        mark.write_text("half")
        time.sleep(60)
    finally:
        mark.unlink()
