from __future__ import annotations

import subprocess

import pytest

from onnx_sparseconv.runtime.environment import cpu_model, git_commit, read_cuda_driver, read_environment


def test_the_processor_is_read(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_model(path) == "Some CPU @ 3 GHz"
    assert cpu_model(tmp_path / "absent")


def test_the_commit_of_a_checkout_and_its_changes(tmp_path):
    assert git_commit(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    commit = git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_the_environment_is_complete():
    environment = read_environment()
    assert environment.cpu_cores >= environment.cpu_cores_usable >= 1
    assert environment.versions["onnx"]
    assert bool(environment.cuda.gpus) != bool(environment.cuda.problem)


def test_no_driver_is_told_apart(monkeypatch):
    def refuse(_name):
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert "no NVIDIA driver" in read_cuda_driver().problem


@pytest.mark.parametrize("line", ["NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Fri", ""])
def test_the_driver_release_is_the_first_version(tmp_path, line):
    from onnx_sparseconv.runtime.environment import _driver_release

    path = tmp_path / "version"
    path.write_text(line)
    assert _driver_release(path) == ("580.65.06" if line else "")
