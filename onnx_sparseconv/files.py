"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from onnx_sparseconv.errors import SparseConvError


class OutputError(SparseConvError):
    """A file cannot be written."""


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give the name of a temporary file beside ``path`` that takes its place when the block ends well.

    When the block raises, the temporary file is removed and ``path`` is what it was. A symbolic link keeps being one:
    its target is replaced.

    Raises:
        OutputError: the file cannot be written there.
    """
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb"):
            pass
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def same_file(first: str | Path, second: str | Path) -> bool:
    """Whether two paths name one file, also through links, ``..`` and upper directories that are links."""
    a, b = Path(first), Path(second)
    if os.path.realpath(a) == os.path.realpath(b):
        return True
    return a.exists() and b.exists() and a.samefile(b)
