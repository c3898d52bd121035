"""Prints the library's heap allocations at session creation, in a first run and in ten later ones, for several layers.

Run by test_concurrency.py with the counter as ``LD_PRELOAD``: ``count_allocations.py COUNTER LIBRARY``.
"""

from __future__ import annotations

import ctypes
import itertools
import sys

from tests.native.test_concurrency import LAYERS
from tests.support.sparse_models import make_model, make_session, random_inputs

MOST_ATTEMPTS = 20


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
            # A thread allocates in the first task that it gets, which may be late.
            for _ in range(MOST_ATTEMPTS):
                before = counter.allocations()
                for _ in range(10):
                    session.run(None, inputs)
                later_runs = counter.allocations() - before
                if later_runs == 0:
                    break
            print(*(after - before for before, after in itertools.pairwise(counts)), later_runs)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
