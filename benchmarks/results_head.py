"""What the results of every program here begin with."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def results_head(schema_version: int) -> dict[str, Any]:
    """The schema's version, the command line without directories, and when it began, in UTC."""
    program, *arguments = sys.argv
    return {
        "schema_version": schema_version,
        "command": " ".join(["python", f"benchmarks/{Path(program).name}", *map(_without_directories, arguments)]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _without_directories(argument: str) -> str:
    """An argument as it may be published: files by their names."""
    return ":".join(Path(part).name for part in argument.split(":"))
