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


def is_directory(path: str | Path) -> bool:
    """Whether it is a directory. A name that no file can have, too long say, is none."""
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def is_there(path: str | Path) -> bool:
    """Whether there is something of this name. There is nothing of a name that no file can have."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def identities(path: str | Path) -> frozenset[str | tuple[int, int]]:
    """By what a file can be recognised: two paths name one file exactly where these have something in common.

    That is where it really lies, links and ``..`` resolved, and, where it exists, its number on its device.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return frozenset({os.path.realpath(path)})
    return frozenset({os.path.realpath(path), (found.st_dev, found.st_ino)})


def same_file(first: str | Path, second: str | Path) -> bool:
    """Whether two paths name one file, also through links, ``..`` and upper directories that are links."""
    return bool(identities(first) & identities(second))
