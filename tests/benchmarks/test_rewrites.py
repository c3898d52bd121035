"""The program that counts nodes and compares outputs, on a real model."""

from __future__ import annotations

import importlib
import json
import sys

import onnx
import pytest

from onnx_sparseconv.converter import ConvertOptions, convert
from tests.support import architectures
from tests.support.native_build import ROOT

EXAMPLE = ROOT / "examples" / "fashion_mnist" / "fashion_mnist.onnx"


@pytest.fixture
def write(monkeypatch, tmp_path):
    program = importlib.import_module("rewrites")

    def write(converted):
        path = tmp_path / "rewrites.json"
        words = [f"{EXAMPLE}:{converted}", "--batch", "3", "-o", str(path)]
        monkeypatch.setattr(sys, "argv", ["benchmarks/rewrites.py", *words])
        code = program.main()
        (record,) = json.loads(path.read_text())["models"]
        return code, record

    return write


def test_nodes_and_outputs(write, tmp_path):
    _, report = convert(EXAMPLE, tmp_path / "sparse.onnx", ConvertOptions(force=True))
    code, record = write(tmp_path / "sparse.onnx")
    assert code == 0
    assert sum(record["nodes_before"].values()) == report.nodes_before
    assert sum(record["nodes_after"].values()) == report.nodes_after
    assert record["nodes_after"]["SparseConv"] == record["nodes_before"]["Conv"]
    assert [(check["use_library"], check["passed"]) for check in record["checks"]] == [(True, True), (False, True)]
    assert [output["shape"][0] for output in record["checks"][0]["outputs"]] == [3]


def test_another_network_is_told_in_the_file(write, tmp_path):
    onnx.save(architectures.vgg(), str(tmp_path / "other.onnx"))
    code, record = write(tmp_path / "other.onnx")
    assert code == 1
    assert "the two models have other inputs" in record["problem"]
    assert "checks" not in record
