from __future__ import annotations

import pytest

from onnx_sparseconv.runtime import cuda_libraries
from onnx_sparseconv.runtime.cuda_libraries import find_library, load_cuda_libraries, read_cuda_libraries


class _Runtime:
    def __init__(self, version):
        self.cuda_version = version


@pytest.mark.parametrize(
    ("version", "directory", "file"),
    [("13.0", "cu13", "libcublas.so.13"), ("12.9", "cublas", "libcublas.so.12"), ("13.0", "cudnn", "libcudnn.so.9")],
)
def test_libraries_of_the_packages_are_found_and_loaded(tmp_path, monkeypatch, version, directory, file):
    place = tmp_path / directory / "lib"
    place.mkdir(parents=True)
    (place / file).write_bytes(b"")
    opened = []
    monkeypatch.setattr(cuda_libraries, "nvidia_directories", lambda: (tmp_path,))
    monkeypatch.setattr(cuda_libraries, "_loaded", lambda _: None)
    monkeypatch.setattr("ctypes.CDLL", lambda path, **_: opened.append(path))
    assert load_cuda_libraries(_Runtime(version)) == (str(place / file),) == tuple(opened)
    other = "12.9" if version == "13.0" else "13.0"
    assert (load_cuda_libraries(_Runtime(other)) == ()) == (directory != "cudnn")


def test_a_library_that_cannot_be_loaded_or_is_loaded_already_is_left_out(tmp_path, monkeypatch):
    place = tmp_path / "cudnn" / "lib"
    place.mkdir(parents=True)
    (place / "libcudnn.so.9").write_bytes(b"not a library")
    monkeypatch.setattr(cuda_libraries, "nvidia_directories", lambda: (tmp_path,))
    assert load_cuda_libraries(_Runtime("13.0")) == ()
    monkeypatch.setattr(cuda_libraries, "_loaded", lambda _: object())
    assert load_cuda_libraries(_Runtime("13.0")) == ()
    assert find_library("libcudnn.so.8", (tmp_path,)) is None


def test_an_onnxruntime_without_cuda_has_nothing_to_load():
    assert load_cuda_libraries(_Runtime("")) == ()
    assert read_cuda_libraries(_Runtime(None)).built_for == ""
