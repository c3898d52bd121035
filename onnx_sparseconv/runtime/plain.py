"""Reports as plain data, for JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_plain(value: Any) -> Any:  # noqa: ANN401
    """``value`` as dicts, lists, strings, finite numbers, booleans and None.

    Dataclasses become dicts. JSON knows neither infinity nor NaN: both become None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, (Path, enum.StrEnum)):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def to_json_text(value: Any) -> str:  # noqa: ANN401
    """``value`` as indented JSON with a final newline.

    Names of files need not be text. What is none in them is written as JSON escapes it, so that it can be read back.
    """
    text = json.dumps(to_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
