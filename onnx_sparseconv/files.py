"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnx_sparseconv.errors import SparseConvError


class OutputError(SparseConvError):
    """A file cannot be written."""


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give the name of a temporary file beside ``path`` that takes its place when the block ends well.

    When the block raises, the temporary file is removed and ``path`` is what it was. A symbolic link keeps being one:
    its target is replaced. What is no file, a device or a pipe, keeps being that: all bytes go there in the end.

    Raises:
        OutputError: the file cannot be written there.
    """
    temporary = None
    try:
        if is_special(path):  # by its own name: what a link of /dev leads to may have none
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder) / "output"
                pass_on(Path(folder) / "output", Path(path))
            return
        target = resolved(path)
        temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
        with temporary.open("xb"):
            pass
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def resolved(path: str | Path) -> Path:
    """A path without symbolic links.

    Raises:
        OSError: they lead in a circle.
    """
    circle = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        target = Path(path).resolve()
    except RuntimeError as error:  # what pathlib raises before Python 3.13
        raise circle from error
    if target.is_symlink():
        raise circle
    return target


def require_text_name(path: str | Path) -> None:
    """Refuse the name of a model's file that is not UTF-8: neither onnx nor ONNX Runtime takes it.

    Raises:
        SparseConvError: it is not.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise SparseConvError(
            f"{path}: its name is not UTF-8, and ONNX Runtime cannot open it: rename the file"
        ) from error


def is_special(path: str | Path) -> bool:
    """Whether something that is neither a file nor a directory has this name: a device or a pipe, say."""
    return is_there(path) and not Path(path).is_file() and not is_directory(path)


def read_special(path: Path, most: int) -> bytes:
    """What comes out of something special, up to so many bytes: a device may never end."""
    data = bytearray()
    with path.open("rb") as reader:
        while len(data) < most and (piece := reader.read(min(1 << 20, most - len(data)))):
            data += piece
    return bytes(data)


def pass_on(source: Path, target: Path) -> None:
    """Write all bytes of a file to what is special."""
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer)


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


def is_link(path: str | Path) -> bool:
    """Whether it is a symbolic link. A name that no file can have is none."""
    try:
        return Path(path).is_symlink()
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
        return frozenset({_real_path(path)})
    return frozenset({_real_path(path), (found.st_dev, found.st_ino)})


def _real_path(path: str | Path) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # the current directory is gone
        return os.fspath(path)


def same_file(first: str | Path, second: str | Path) -> bool:
    """Whether two paths name one file, also through links, ``..`` and upper directories that are links."""
    return bool(identities(first) & identities(second))
