from __future__ import annotations

import subprocess

from onnx_sparseconv.runtime.environment import cpu_model, git_commit, read_environment


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
