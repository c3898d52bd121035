"""JSON documents of the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from onnx_sparseconv.files import write_text
from onnx_sparseconv.runtime.plain import to_json_text, to_plain

# Counts changes to the form of what this package's commands print as JSON.
SCHEMA_VERSION = 1


def document(command: str, content: Any) -> dict[str, Any]:  # noqa: ANN401
    """A report (a dataclass or a dict) as a JSON document of one command."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **to_plain(content)}


def emit(content: Any, *, to_stdout: bool, file: Path | None) -> None:  # noqa: ANN401
    """Print JSON on stdout, write it to a file, or both, or neither."""
    text = to_json_text(content)
    if file is not None:
        write_text(file, text)
    if to_stdout:
        sys.stdout.write(text)
