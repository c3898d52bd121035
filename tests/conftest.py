"""What holds for all tests."""

from __future__ import annotations

import os

# Products of float64 matrices are what results are compared with. Several processes run tests, on all cores together:
# threads of one would only wait for those of the others. Read when numpy is imported, which nothing has done yet.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_modifyitems(items):
    """What takes minutes begins first: at the end, the other workers would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
