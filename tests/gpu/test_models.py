"""Real models on the GPU: verified against the CPU, benchmarked, and through the command line."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import onnx
import pytest

from onnx_sparseconv.converter import ConvertOptions, convert, prune
from onnx_sparseconv.kernels.cuda_driver import read_cuda_driver
from onnx_sparseconv.runtime.bench import CudaBench, bench
from onnx_sparseconv.runtime.provider_check import check_provider
from onnx_sparseconv.runtime.timing import TimingPlan
from onnx_sparseconv.runtime.verify import verify
from tests.runtime import networks
from tests.support.real_models import REAL_MODELS, find_model

QUICK = TimingPlan(warmup=1, min_rounds=2, max_rounds=2, runs_per_round=2, seconds=0)


@pytest.fixture(params=REAL_MODELS.values(), ids=list(REAL_MODELS))
def real(request):
    return request.param


@pytest.mark.parametrize("kernel", ["csr", "auto"])
def test_a_real_model_gives_the_same_results(real, kernel, request, tmp_path):
    sparse, converted = tmp_path / "sparse.onnx", tmp_path / "converted.onnx"
    source = find_model(real.name)
    if real.really_pruned:
        shutil.copy(source, sparse)
    else:
        prune(source, sparse, sparsity=0.95)
    targets = (request.getfixturevalue("target"),) if kernel == "auto" else ()
    convert(sparse, converted, ConvertOptions(force=True, targets=targets))
    report = verify(sparse, converted, provider="cuda", inputs=real.feed(), config={"sparseconv.cuda_kernel": kernel})
    assert report.passed, [output.reason for output in report.outputs]
    assert all(use.provider == "cuda" for use in report.kernels)
    assert not any(place.op_type in ("Conv", "SparseConv") for place in report.nodes_elsewhere if real.really_pruned)


@pytest.mark.parametrize("name", ["squeezenet_deep_compression", "mediapipe_face_full_range_sparse"])
def test_a_network_computes_the_same_on_every_gpu(gpus, target, name, tmp_path):
    """All kernels that a network takes, in sessions that run beside each other."""
    convert(find_model(name), tmp_path / "converted.onnx", ConvertOptions(targets=(target,), batches=(1,)))
    sessions = [place.session(tmp_path / "converted.onnx") for place in gpus]

    def run(session):
        return [[output.tobytes() for output in session.run(None, REAL_MODELS[name].feed())] for _ in range(20)]

    with ThreadPoolExecutor(len(sessions)) as pool:
        first, *others = [results for group in pool.map(run, sessions) for results in group]
    assert all(results == first for results in others)


def test_with_tf32_float_is_verified_on_warpgroups(tmp_path):
    """As the CUDA provider's defaults run it; without, no kernel rounds."""
    if read_cuda_driver().gpus[0].compute_capability != "9.0":
        pytest.skip("floats run on warpgroups with compute capability 9.0 alone")
    layer_weights = networks.weights(channels=64)
    dense = networks.save(networks.dense(layer_weights, size=56), tmp_path / "dense.onnx")
    sparse = networks.save(networks.sparse(layer_weights, size=56), tmp_path / "sparse.onnx")
    exact, rounded = (verify(dense, sparse, provider="cuda", batch=64, tf32=tf32) for tf32 in (False, True))
    assert exact.passed, exact.outputs[0].reason
    assert rounded.passed, rounded.outputs[0].reason
    assert {use.kernel for use in exact.kernels} == {"cuda.csr"}
    assert {use.kernel for use in rounded.kernels} == {"cuda.wgmma"}
    # It would not have passed as float, and lies well within the tolerance of TF32.
    (output,) = rounded.outputs
    assert exact.outputs[0].atol < output.errors.max_abs < output.atol / 4


@pytest.fixture
def pair(tmp_path):
    layer_weights = networks.weights(channels=16)
    return (
        networks.save(networks.dense(layer_weights), tmp_path / "dense.onnx"),
        networks.save(networks.sparse(layer_weights), tmp_path / "sparse.onnx"),
    )


@pytest.mark.parametrize("graph", [False, True])
def test_a_benchmark_times_every_mode(pair, graph):
    report = bench(*pair, provider="cuda", batch=4, cuda=CudaBench(cuda_graph=graph, copies=2), plan=QUICK)
    assert [c.problem for c in report.candidates] == [""] * 4
    assert all(use.kernel.startswith("cuda.") for use in report.kernels)
    assert all(layer.converted_us for layer in report.layers)
    assert not report.converted.nodes_elsewhere


def test_the_command_line_uses_the_gpu(pair, capfd):
    from typer.testing import CliRunner

    from onnx_sparseconv.cli.app import app

    for command in ("verify", "bench"):
        options = ["--seconds", "0"] if command == "bench" else []
        result = CliRunner().invoke(app, [command, *map(str, pair), "--provider", "cuda", "--json", *options])
        assert result.exit_code == 0, result.stderr + capfd.readouterr().err
        assert all(use["provider"] == "cuda" for use in json.loads(result.stdout)["kernels"])


def test_doctor_runs_a_model_on_the_gpu():
    result = check_provider("cuda")
    assert result.works, result.text
    assert result.kernel.startswith("cuda.")


def test_a_converted_model_without_the_library_runs_dense_on_the_gpu(pair):
    assert verify(*pair, provider="cuda", use_library=False).passed
    assert onnx.load(str(pair[1])).functions
