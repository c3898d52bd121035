"""Compiled GPU images on disk, under the hash of everything that made them.

A cache that cannot be read or written costs time, never a result: then images are compiled as if there were none, and
whoever asked gets one line that says so. Several processes may use one cache at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.files import atomic_write

# Set to a folder to keep the cache there.
CACHE_VARIABLE = "ONNX_SPARSECONV_CACHE"
# Counts changes to what an entry means.
SCHEMA_VERSION = 1
MAX_BYTES = 2_000_000_000
_MAGIC = b"SCIMAGE1"
_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".image"
# A process that was killed leaves its temporary file behind.
_STALE_S = 3600.0


@dataclass(frozen=True)
class CacheSize:
    """How many images a cache holds, and their bytes."""

    entries: int
    size_bytes: int


def cache_folder(wanted: str | Path | None = None) -> Path:
    """Where the cache is: ``wanted``, else ``$ONNX_SPARSECONV_CACHE``, else in the user's cache folder."""
    named = wanted or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    # A relative path in this variable is to be ignored, says the XDG specification.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # there is no home
        base = Path("/var/cache")
    return base / "onnx-sparseconv" / "images"


def cache_key(
    sources: Sequence[str], headers: Mapping[str, str], options: Sequence[str], architecture: int, tools: str
) -> str:
    """The name of an image, 64 hexadecimal digits.

    Args:
        sources: texts of the programs that are linked, or of the only one.
        headers: text of what they include, by name.
        options: of the compiler.
        architecture: that they are compiled for.
        tools: what makes the image, names and versions.
    """
    parts = [str(SCHEMA_VERSION), tools, str(architecture), str(len(options)), *options, str(len(sources)), *sources]
    parts += [part for name in sorted(headers) for part in (name, headers[name])]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        # With its length, so that no two lists of parts are the same bytes.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class ImageCache:
    """Images in the files of one folder, which is made when the first is stored.

    Attributes:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> bytes | None:
        """The image, or None. One that is damaged is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        code = data[len(_MAGIC) + _DIGEST_BYTES :]
        if data != _entry(code):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last, removed last
        return code

    def put(self, key: str, code: bytes) -> str:
        """Store an image.

        Returns:
            Why it could not be stored; empty when it was.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_write(self._path(key)) as temporary:
                temporary.write_bytes(_entry(code))
        except (OSError, SparseConvError) as error:
            reason = getattr(error, "strerror", None) or getattr(error.__cause__, "strerror", None) or error
            return (
                f"the cache of GPU images {self.folder} cannot be written ({reason}): they will be compiled anew the "
                f"next time; --cache-dir or {CACHE_VARIABLE} names another folder"
            )
        return ""

    def trim(self, max_bytes: int = MAX_BYTES) -> CacheSize:
        """Remove what was used longest ago, until the rest takes at most ``max_bytes``; say what was removed."""
        for path in self._files(".tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
        entries = sorted(self._stats(), key=lambda entry: entry[1].st_mtime_ns)
        excess = sum(stat.st_size for _, stat in entries) - max_bytes
        removed = freed = 0
        for path, stat in entries:
            if freed >= excess:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
            freed += stat.st_size
        return CacheSize(removed, max(freed, 0))

    def size(self) -> CacheSize:
        """What it holds."""
        sizes = [stat.st_size for _, stat in self._stats()]
        return CacheSize(len(sizes), sum(sizes))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _stats(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._files(_SUFFIX):
            with contextlib.suppress(OSError):  # another process removed it
                yield path, path.stat()

    def _files(self, suffix: str) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from [path for path in self.folder.iterdir() if path.name.endswith(suffix)]


def _entry(code: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(code).digest() + code
