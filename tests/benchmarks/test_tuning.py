"""The program that compares what tuning foretells with what is measured, on a real model."""

from __future__ import annotations

import importlib
import json
import sys

from tests.support.native_build import ROOT

EXAMPLE = ROOT / "examples" / "fashion_mnist" / "fashion_mnist.onnx"


def test_the_file(monkeypatch, tmp_path):
    program = importlib.import_module("tuning")
    path = tmp_path / "tuning.json"
    words = [str(EXAMPLE), "--threads", "1", "2", "--preset", "quick", "--budget", "60", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/tuning.py", *words])
    assert program.main() == 0
    text = path.read_text()
    results = json.loads(text)
    assert results["command"] == (
        "python benchmarks/tuning.py fashion_mnist.onnx --threads 1 2 --preset quick --budget 60 -o tuning.json"
    )
    assert str(tmp_path) not in text
    assert {"commit", "versions", "cpu"} <= set(results["environment"])
    assert [(record["model"], record["threads"]) for record in results["models"]] == [
        ("fashion_mnist.onnx", 1),
        ("fashion_mnist.onnx", 2),
    ]
    for record in results["models"]:
        assert 0 <= record["num_sparse"] <= record["num_convs"]
        assert record["budget_s"] == 60
        assert record["num_measured"] > 0  # nothing of earlier runs is used
        assert (record["whole"] is None) == (record["num_sparse"] == 0)
        assert record["gain"] > 0
        assert record["seconds"] > 0
