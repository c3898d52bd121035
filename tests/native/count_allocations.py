"""Prints the library's heap allocations at session creation, in the first run and in later runs, for several layers.

Run by test_concurrency.py with the counter as ``LD_PRELOAD``: ``count_allocations.py COUNTER LIBRARY``.
"""

from __future__ import annotations

import ctypes
import itertools
import sys

from tests.native.test_concurrency import LAYERS
from tests.support.sparse_models import make_model, make_session, random_inputs


def main(counter_path, library):
    counter = ctypes.CDLL(counter_path)
    counter.allocations.restype = ctypes.c_ulong
    ctypes.CDLL(library)
    if not counter.watch_library(library.encode()):
        raise SystemExit("the library is not among the loaded ones")
    for case, x_shape in LAYERS.values():
        for threads in (1, 2):
            inputs = random_inputs(case, x_shape)
            counts = [counter.allocations()]
            session = make_session(make_model(case), threads=threads)
            counts.append(counter.allocations())
            session.run(None, inputs)
            counts.append(counter.allocations())
            for _ in range(10):
                session.run(None, inputs)
            counts.append(counter.allocations())
            print(*(after - before for before, after in itertools.pairwise(counts)))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
