"""Whole networks timed with the CPU in the place of the GPU: all but the figures is real."""

from __future__ import annotations

import json
import sys

import onnx
import pytest

from onnx_sparseconv.runtime import bench as bench_module
from tests.runtime import networks

pytest.importorskip("onnxruntime")


@pytest.fixture
def run_program(monkeypatch):
    import run

    def run_with(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", "--provider", "cuda", *map(str, arguments)])
        return run.main()

    return run_with


@pytest.fixture
def pruned(tmp_path):
    return networks.save(networks.dense(networks.weights(channels=64), size=28), tmp_path / "net.onnx")


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_network_is_made_and_timed_and_what_failed_is_tried_again(run_program, pruned, tmp_path, monkeypatch):
    folder, output = tmp_path / "made", tmp_path / "out.json"
    what = ["--networks", pruned, "--batch", 1, 2, "--dtype", "float32", "float16"]
    assert run_program(*what, "--prepare", folder) == 0
    names = [f"net{dtype}{batch}.onnx" for dtype in ("", ".half") for batch in ("", ".1", ".2")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    elements = {onnx.load(folder / f"net{dtype}.onnx").graph.initializer[0].data_type for dtype in ("", ".half")}
    assert elements == {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}

    load = bench_module._load

    def refuse(side, mode, clock):
        if side.path.name == "net.half.2.onnx":
            raise bench_module.ModelError("no such luck")
        return load(side, mode, clock)

    timed = [*what, "--prepared", folder, "--seconds", 0, "-o", output]
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "_load", refuse)
        assert run_program(*timed) == 1
    first = json.loads(output.read_text())["models"]
    assert [record.get("problem") for record in first] == [None, None, None, "no such luck"] * 2
    assert [record["cuda_graph"] for record in first] == [True] * 4 + [False] * 4

    assert run_program(*timed, "--resume") == 0
    results = json.loads(output.read_text())
    assert len(results["earlier_sessions"]) == 1
    found = {(r["original"]["path"], r["converted"]["path"], r["batch"], r["cuda_graph"]) for r in results["models"]}
    assert len(found) == len(results["models"]) == 8
    assert ("net.half.onnx", "net.half.2.onnx", 2, True) in found
    assert all(record["kernels"] and record["commit"] for record in results["models"])


@pytest.mark.usefixtures("cuda_on_cpu")
def test_a_network_without_a_layer_that_qualifies_and_time_that_is_over(run_program, tmp_path, capsys):
    dense = networks.save(networks.dense(networks.weights(sparsity=0.0)), tmp_path / "net.onnx")
    what = ["--networks", dense, "--dtype", "float32"]
    assert run_program(*what, "--prepare", tmp_path) == 1
    assert "net.1.onnx: no layer qualifies" in capsys.readouterr().err
    assert run_program(*what, "--prepared", tmp_path, "--minutes", 0, "-o", tmp_path / "out.json") == 0
    assert "2 are left" in capsys.readouterr().err


def test_networks_are_for_cuda_and_made_before(run_program, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run_program("--networks", "resnet18", "-o", tmp_path / "out.json")
    assert "with --prepare or --prepared" in capsys.readouterr().err
