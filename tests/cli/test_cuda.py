"""``--provider cuda`` on the command line; the CPU stands in for the GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.runtime import networks


@pytest.fixture
def converted(tmp_path):
    return networks.save(networks.sparse(networks.weights(channels=32, sparsity=0.95)), tmp_path / "converted.onnx")


def _cuda(sparseconv, *arguments):
    return sparseconv(*arguments, "--provider", "cuda")


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
@pytest.mark.parametrize(("options", "mode"), [([], "default"), (["--cuda-graph", "--rotate", "2"], "graph")])
def test_bench_on_cuda_says_what_it_tried(sparseconv, model, converted, options, mode):
    result = _cuda(sparseconv, "bench", model, converted, "--seconds", "0", "--kernel", "csr", *options)
    assert result.exit_code == 0, result.stderr
    assert "bound to device memory" in result.stdout
    assert "cuda." in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(("original ", "converted "))]
    tried = {row[1] for row in rows if row[1] in (mode, "nhwc", f"nhwc+{mode}")}
    assert tried == ({"default", "nhwc"} if mode == "default" else {"graph", "nhwc+graph"})
    assert sum("fastest" in row for row in rows) == 2
    assert "TF32" in result.stdout


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_verify_on_cuda_says_where_each_model_ran(sparseconv, model, converted):
    result = _cuda(sparseconv, "verify", model, converted)
    assert result.exit_code == 0, result.stderr
    assert "cuda, the original on cpu" in result.stdout
    assert "TF32 is switched off" in result.stdout
    assert f"sparseconv bench {model} {converted} --provider cuda" in result.stdout


@pytest.mark.usefixtures("sparse_kernels_say_cuda")
def test_verify_with_tf32_says_so(sparseconv, model, converted, cuda_on_cpu):
    result = _cuda(sparseconv, "verify", model, converted, "--tf32")
    assert result.exit_code == 0, result.stderr
    assert cuda_on_cpu == [{}, {}]
    assert "cuda, TF32 allowed, the original on cpu" in result.stdout
    assert "depth 3, longest dot product 288, tf32 storage" in result.stdout
    assert "2 SparseConv nodes" in result.stdout
    document = json.loads(_cuda(sparseconv, "verify", model, converted, "--tf32", "--json").stdout)
    assert (document["tf32"], document["tolerance"]["derived_from"]["storage"]) == (True, "tf32")
    assert [use["provider"] for use in document["kernels"]] == ["cuda", "cuda"]


def test_verify_with_tf32_needs_cuda(sparseconv, model, converted):
    result = sparseconv("verify", model, converted, "--tf32")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--tf32" in result.stderr
    assert "needs --provider cuda" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize("command", ["verify", "bench", "run"])
def test_sparse_nodes_that_fell_back_end_with_5(sparseconv, model, converted, command, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.ones((2, 32, 12, 12), np.float32))
    files = [converted, "--inputs", tmp_path / "in.npz", "-o", tmp_path / "out.npz"]
    result = _cuda(sparseconv, command, *(files if command == "run" else [model, converted]))
    assert result.exit_code == 5
    assert "SparseConv nodes on cpu" in result.stderr
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize("options", [["--cuda-graph"], ["--rotate", "2"], ["--dense-options", "nhwc"]])
def test_options_for_cuda_are_refused_elsewhere(sparseconv, model, converted, options):
    result = sparseconv("bench", model, converted, *options)
    assert (result.exit_code, "need --provider cuda" in result.stderr) == (2, True)
