"""Pieces of work for the tests of the worker process."""

from __future__ import annotations

import os
import time


def do(work):
    kind, content = work
    if kind == "raise":
        raise ValueError(content)
    if kind == "die":
        os._exit(content)
    if kind == "sleep":
        time.sleep(content)
    return (os.getpid(), content)
