from __future__ import annotations

import pytest

from onnx_sparseconv.kernels.cuda_driver import _driver_release, read_cuda_driver


def test_no_driver_is_told_apart(monkeypatch):
    def refuse(_name):
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert "no NVIDIA driver" in read_cuda_driver().problem


@pytest.mark.parametrize("line", ["NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Fri", ""])
def test_the_driver_release_is_the_first_version(tmp_path, line):
    path = tmp_path / "version"
    path.write_text(line)
    assert _driver_release(path) == ("580.65.06" if line else "")
