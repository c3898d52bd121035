"""The cache of compiled images: keys, damage, folders that cannot be written, and its bound."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onnx_sparseconv.kernels import image_cache
from onnx_sparseconv.kernels.image_cache import CacheSize, ImageCache, cache_folder, cache_key

KEY = cache_key(["source"], {"a.h": "text"}, ("-O3",), 90, "NVRTC 12.9")


@pytest.fixture
def cache(tmp_path):
    return ImageCache(tmp_path / "cache")


def test_what_was_stored_is_found(cache):
    assert cache.get(KEY) is None
    assert cache.size() == CacheSize(0, 0)
    assert cache.put(KEY, b"code") == ""
    assert cache.get(KEY) == b"code"
    assert ImageCache(cache.folder).get(KEY) == b"code"
    assert [p.suffix for p in cache.folder.iterdir()] == [".image"]


def test_everything_that_makes_an_image_is_in_its_key(monkeypatch):
    def key(source="s", headers=(("h", "t"),), options=("-a",), architecture=90, compiler="c"):
        return cache_key([source], dict(headers), options, architecture, compiler)

    others = [
        key(source="s2"),
        key(headers=(("h", "t2"),)),
        key(headers=(("h2", "t"),)),
        key(headers=()),
        key(options=("-a", "-b")),
        key(options=("-a-b",)),
        key(architecture=80),
        key(compiler="c2"),
        # The same characters, cut elsewhere.
        key(source="sh", headers=(("", "t"),)),
    ]
    assert len({key(), *others}) == len(others) + 1
    assert key() == key()
    before = key()
    monkeypatch.setattr(image_cache, "SCHEMA_VERSION", 99)
    assert key() != before


@pytest.mark.parametrize("damage", [lambda d: d[:0], lambda d: d[:-1], lambda d: d + b"x", lambda d: b"?" + d[1:]])
def test_a_damaged_image_is_not_found_and_removed(cache, damage):
    cache.put(KEY, b"code")
    (path,) = cache.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(KEY) is None
    assert list(cache.folder.iterdir()) == []
    cache.put(KEY, b"code")
    assert cache.get(KEY) == b"code"


def test_a_folder_that_cannot_be_written_costs_a_line_and_no_more(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = ImageCache(tmp_path / "file" / "cache")
    problem = cache.put(KEY, b"code")
    assert str(cache.folder) in problem
    assert "\n" not in problem
    assert cache.get(KEY) is None
    assert cache.size() == cache.trim() == CacheSize(0, 0)


def test_what_was_used_longest_ago_goes_first(cache):
    for number in range(4):
        cache.put(str(number), bytes(1000))
        os.utime(cache.folder / f"{number}.image", (number, number))
    assert cache.get("0") is not None  # now it is the newest
    entry_bytes = cache.size().size_bytes // 4
    assert cache.trim(2 * entry_bytes) == CacheSize(2, 2 * entry_bytes)
    assert [cache.get(str(n)) is not None for n in range(4)] == [True, False, False, True]
    assert cache.trim(2 * entry_bytes) == CacheSize(0, 0)
    assert cache.trim(0) == CacheSize(2, 2 * entry_bytes)


def test_temporary_files_of_killed_processes_go(cache):
    cache.put(KEY, b"code")
    old, new = cache.folder / ".old.tmp", cache.folder / ".new.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.trim()
    assert (old.exists(), new.exists()) == (False, True)


def test_several_writers_and_a_cleaner_do_not_disturb_each_other(cache):
    def work(number):
        for _ in range(20):
            assert cache.put(KEY, b"code") == ""
            assert cache.get(KEY) in (b"code", None)
            cache.trim(0 if number == 0 else image_cache.MAX_BYTES)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("ONNX_SPARSECONV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "onnx-sparseconv" / "images"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/.cache/onnx-sparseconv/images")
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert cache_folder(tmp_path / "option") == tmp_path / "option"


def test_importing_makes_no_folder(tmp_path):
    environment = {**os.environ, "ONNX_SPARSECONV_CACHE": str(tmp_path / "cache")}
    code = "import onnx_sparseconv.kernels.image_cache as c; c.ImageCache(c.cache_folder()).get('x')"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
