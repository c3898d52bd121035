from __future__ import annotations

import json
import subprocess

import pytest

from onnx_sparseconv.runtime import doctor, provider_check
from onnx_sparseconv.runtime.doctor import (
    LibraryCheck,
    cupy_problems,
    diagnose,
    graphsurgeon_problems,
    library_problems,
    provider_problems,
    runtime_problems,
    version_tuple,
)
from onnx_sparseconv.runtime.provider_check import ProviderCheck, read_answer


def test_this_installation_is_healthy():
    report = diagnose()
    assert [p.text for p in report.problems] == []
    assert report.healthy
    (cpu,) = (p for p in report.providers if p.name == "cpu")
    assert cpu.works
    assert cpu.kernel.startswith("cpu.")
    assert report.library.version
    assert list(report.onnxruntime_distributions) == ["onnxruntime"]


def test_two_onnxruntimes_conflict():
    (problem,) = runtime_problems({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"})
    assert problem.conflict
    assert "pip uninstall onnxruntime onnxruntime-gpu" in problem.remedy


def test_none_is_a_problem_but_no_conflict_and_an_old_one_is_one():
    assert [p.conflict for p in runtime_problems({})] == [False]
    assert [p.conflict for p in runtime_problems({"onnxruntime": "1.19.2"})] == [True]
    assert runtime_problems({"onnxruntime": "1.20.0"}) == []


@pytest.mark.parametrize(
    ("runtime", "cupys", "conflicts"),
    [
        ("1.26.0", ["cupy-cuda12x"], 0),
        ("1.26.0", ["cupy-cuda13x"], 1),
        ("1.27.0", ["cupy-cuda13x"], 0),
        ("1.31.1", ["cupy-cuda12x"], 1),
        ("1.31.1", ["cupy-cuda12x", "cupy-cuda13x"], 2),
        ("1.31.1", [], 0),
        ("1.31.1", ["cupy"], 0),
    ],
)
def test_cupy_and_onnxruntime_need_the_same_cuda(runtime, cupys, conflicts):
    problems = cupy_problems({"onnxruntime-gpu": runtime}, dict.fromkeys(cupys, "13.0"))
    assert len(problems) == conflicts
    assert all(p.conflict for p in problems)


def test_cupy_beside_the_cpu_onnxruntime_is_fine():
    assert cupy_problems({"onnxruntime": "1.31.1"}, {"cupy-cuda12x": "13.0"}) == []


@pytest.mark.parametrize(
    ("onnx", "graphsurgeon", "conflict"),
    [("1.20.0", "0.5.8", True), ("1.19.1", "0.5.8", False), ("1.23.2", "0.6.1", False)],
)
def test_an_old_graphsurgeon_breaks_with_a_new_onnx(onnx, graphsurgeon, conflict):
    assert [p.conflict for p in graphsurgeon_problems(onnx, graphsurgeon)] == [True] * conflict


def test_what_is_missing_is_named():
    assert "onnx-graphsurgeon is not installed" in graphsurgeon_problems("1.20.0", None)[0].text
    assert "onnx is not installed" in graphsurgeon_problems(None, "0.6.1")[0].text


def test_a_library_of_another_version_is_a_conflict():
    library = LibraryCheck("x.so", "0.1.0", "")
    assert library_problems(library, "0.1.0") == []
    assert library_problems(library, "0+unknown") == []
    assert [p.conflict for p in library_problems(library, "0.2.0")] == [True]
    assert [p.conflict for p in library_problems(LibraryCheck(None, None, "missing"), "0.2.0")] == [False]


def test_a_library_that_cannot_be_loaded_is_a_problem(tmp_path, monkeypatch):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("ONNX_SPARSECONV_LIBRARY", str(broken))
    report = diagnose()
    assert not report.healthy
    assert not report.has_conflict
    # Said once, not once more for every provider.
    assert len(report.problems) == 1
    assert str(broken) in report.library.path


def test_only_providers_that_are_built_in_have_to_work():
    checks = [ProviderCheck("cpu", True, True, "fine"), ProviderCheck("cuda", False, False, "not in this onnxruntime")]
    assert provider_problems(checks) == []
    assert "no driver" in provider_problems([ProviderCheck("cuda", True, False, "no driver")])[0].text


def test_a_crash_of_a_provider_is_a_finding():
    assert read_answer("cuda", -11, "", "").text == "the process crashed (SIGSEGV)"
    assert read_answer("cuda", 1, "", "Traceback\nValueError: x\n").text == "ValueError: x"
    answer = json.dumps({"name": "cpu", "built_in": True, "works": True, "text": "t", "kernel": "k"})
    assert read_answer("cpu", 0, f"noise\n{answer}\n", "") == ProviderCheck("cpu", True, True, "t", "k")


def test_a_provider_that_hangs_is_a_finding(monkeypatch):
    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(provider_check.subprocess, "run", hang)
    assert "no answer" in provider_check.check_provider("cpu").text


def test_conflicts_come_first(monkeypatch):
    monkeypatch.setattr(
        doctor, "distributions_of", lambda _module: {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    )
    monkeypatch.setattr(doctor, "check_library", lambda: LibraryCheck(None, None, "missing"))
    monkeypatch.setattr(doctor, "check_provider", lambda name: ProviderCheck(name, True, False, "broken"))
    report = diagnose()
    assert [p.conflict for p in report.problems] == sorted((p.conflict for p in report.problems), reverse=True)
    assert report.has_conflict


def test_versions_are_compared_as_numbers():
    assert version_tuple("1.27.0rc1") == (1, 27, 0)
    assert version_tuple("1.9") < version_tuple("1.20.1")
    assert version_tuple("x") == ()
