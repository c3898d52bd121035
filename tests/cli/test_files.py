from __future__ import annotations

import os
import threading

import pytest

from onnx_sparseconv.converter import model_io
from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.files import atomic_write, same_file, write_text


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")

    def write_and_fail():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_an_error_that_names_it(tmp_path):
    with pytest.raises(SparseConvError, match=r"cannot write .*absent"):
        write_text(tmp_path / "absent" / "x", "text")
    (tmp_path / "directory").mkdir()
    with pytest.raises(SparseConvError, match="cannot write"):
        write_text(tmp_path / "directory", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["directory"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_one_file_is_recognised_by_any_path(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("")
    (tmp_path / "link").symlink_to("a")
    os.link(tmp_path / "a", tmp_path / "hard")
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path)
    for other in ("a", "./a", "d/../a", tmp_path / "a", "link", "hard"):
        assert same_file("a", other)
    assert not same_file("a", "b")
    assert same_file("new", tmp_path / "new")


def read_from_pipe(path):
    """A thread that reads all of a pipe, and what it has read."""
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    return reader, read


def test_a_pipe_stays_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader, read = read_from_pipe(tmp_path / "pipe")
    write_text(tmp_path / "pipe", "new")
    reader.join()
    assert read == [b"new"]
    assert (tmp_path / "pipe").is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_models_come_and_go_through_pipes(sparseconv, model, tmp_path):
    """By names in /dev, too, which lead to what has no name."""
    for descriptor in (False, True):
        read_end, write_end = os.pipe()
        writer = threading.Thread(target=lambda end=write_end: (os.write(end, model.read_bytes()), os.close(end)))
        if descriptor:
            os.mkfifo(tmp_path / "in")
            writer = threading.Thread(target=lambda: (tmp_path / "in").write_bytes(model.read_bytes()))
        writer.start()
        name = tmp_path / "in" if descriptor else f"/dev/fd/{read_end}"
        result = sparseconv("convert", name, "-o", tmp_path / "out.onnx")
        writer.join()
        os.close(read_end)
        assert result.exit_code == 0, result.stderr
    os.mkfifo(tmp_path / "out")
    reader, read = read_from_pipe(tmp_path / "out")
    assert sparseconv("convert", model, "-o", tmp_path / "out").exit_code == 0
    reader.join()
    assert read == [(tmp_path / "out.onnx").read_bytes()]


def test_what_reads_more_than_once_wants_files(sparseconv, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    result = sparseconv("convert", tmp_path / "pipe", "-o", tmp_path / "out.onnx", "--tune")
    assert result.exit_code == 2
    assert "is no file, and --tune reads the model more than once" in result.stderr
    result = sparseconv("report", tmp_path / "pipe", "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "is no file: name the report" in result.stderr


def test_a_file_without_an_end_is_no_model(sparseconv, monkeypatch):
    monkeypatch.setattr(model_io, "_MAX_FILE_BYTES", 1000)
    result = sparseconv("inspect", "/dev/zero")
    assert result.exit_code == 1
    assert "/dev/zero: is not an ONNX model: it has more bytes" in result.stderr


def test_a_current_directory_that_is_gone_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SparseConvError, match="cannot write out: No such file"):
        write_text("out", "text")
    assert not same_file("out", "other")
