"""What holds for all tests."""

from __future__ import annotations


def pytest_collection_modifyitems(items):
    """What takes minutes begins first: at the end, the other workers would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
