"""Typed values out of JSON objects; a wrong one is an error that says where it stands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from onnx_sparseconv.errors import ReportError

# Beyond this a figure is no size, time or count of anything.
_LARGEST = 1e18
# And below this, it is none either.
_LEAST = 1e-18


class Fields:
    """One JSON object.

    Args:
        content: what should be an object.
        where: where it stands, for messages.

    Raises:
        ReportError: it is something else.
    """

    def __init__(self, content: Any, where: str) -> None:  # noqa: ANN401
        if not isinstance(content, Mapping):
            raise ReportError(f"{where}: is not an object")
        self._content = content
        self._where = where

    def has(self, name: str) -> bool:
        """Whether there is a value, and not null."""
        return self._content.get(name) is not None

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        value = self._content.get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def number(self, name: str) -> float | None:
        """A finite number, not below zero; None where there is none."""
        value = self._content.get(name)
        if value is None:
            return None
        if not _is_number(value):
            raise self._wrong(name, "a number, not below zero")
        return float(value)

    def signed(self, name: str) -> float | None:
        """A finite number; None where there is none."""
        value = self._content.get(name)
        if value is None:
            return None
        if not _is_finite(value):
            raise self._wrong(name, "a number")
        return float(value)

    def positive(self, name: str) -> float | None:
        """A number above zero; None where there is none, or next to zero."""
        value = self.number(name)
        return value if value is not None and value > _LEAST else None

    def integer(self, name: str) -> int | None:
        """A whole number; None where there is none."""
        value = self.number(name)
        if value is None:
            return None
        if value != int(value):
            raise self._wrong(name, "a whole number")
        return int(value)

    def share(self, name: str) -> float | None:
        """A number from 0 to 1; None where there is none."""
        value = self.number(name)
        if value is not None and value > 1:
            raise self._wrong(name, "a number from 0 to 1")
        return value

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """Sizes, unknown ones None; None where there is no shape."""
        value = self._content.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(size is None or _is_whole(size) for size in value):
            raise self._wrong(name, "a list of sizes")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float | None, ...]:
        """Positive numbers, and None for null or zero."""
        value = self._content.get(name)
        if not isinstance(value, list) or not all(item is None or _is_number(item) for item in value):
            raise self._wrong(name, "a list of numbers, none below zero")
        return tuple(float(item) if item else None for item in value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Strings; none where they are missing."""
        value = self._content.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts")
        return tuple(value)

    def child(self, name: str) -> Fields:
        """An object."""
        return Fields(self._content.get(name), f"{self._where}: {name!r}")

    def children(self, name: str) -> list[Fields]:
        """A list of objects; none where it is missing."""
        value = self._content.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return [Fields(item, f"{self._where}: {name!r} {index + 1}") for index, item in enumerate(value)]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Names and values that are plain, in words."""
        for name, value in self._content.items():
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                yield str(name), str(value)

    def names(self) -> tuple[str, ...]:
        """Names of all values."""
        return tuple(map(str, self._content))

    def _wrong(self, name: str, wanted: str) -> ReportError:
        return ReportError(f"{self._where}: {name!r} must be {wanted}")


def _is_finite(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return _is_finite(value) and value >= 0 and not math.isnan(value)


def _is_whole(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
