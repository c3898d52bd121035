from __future__ import annotations

import json

import pytest

from onnx_sparseconv.errors import ModelError, ProviderError, UsageError
from onnx_sparseconv.runtime import bench as bench_module
from onnx_sparseconv.runtime.bench import CudaBench, bench, model_size_bytes
from onnx_sparseconv.runtime.cuda_mode import CudaMode, modes_for
from onnx_sparseconv.runtime.depth import load_structure
from onnx_sparseconv.runtime.plain import to_json_text
from onnx_sparseconv.runtime.timing import TimingPlan
from tests.runtime import networks

QUICK = TimingPlan(warmup=1, min_rounds=2, max_rounds=2, runs_per_round=2, seconds=0)


@pytest.mark.parametrize("names", [True, False])
def test_both_models_are_timed_as_a_whole_and_by_layer(tmp_path, names):
    layer_weights = networks.weights(channels=16)
    dense = networks.save(networks.dense(layer_weights, names=names), tmp_path / "d.onnx")
    sparse = networks.save(networks.sparse(layer_weights, names=names), tmp_path / "s.onnx")
    rounds = []
    report = bench(dense, sparse, batch=2, threads=1, plan=QUICK, on_round=rounds.append)
    assert rounds == [1, 2]
    assert report.original.time.num_runs == report.converted.time.num_runs == 4
    assert report.speedup.of_medians == pytest.approx(
        report.original.time.median_us / report.converted.time.median_us, rel=1e-9
    )
    assert [layer.name for layer in report.layers] == (["conv0", "conv1"] if names else ["c0", "c1"])
    assert report.unmatched == ()
    assert all(layer.speedup > 0 for layer in report.layers)
    assert report.converted.nodes_us["SparseConv"] > 0
    assert report.input_shapes == {"x": (2, 16, 12, 12)}
    assert report.original.size_bytes == dense.stat().st_size
    plain = json.loads(to_json_text(report))
    assert plain["environment"]["versions"]["onnx"]
    assert plain["environment"]["cpu"]


def test_a_seed_out_of_its_range_is_refused(pair):
    with pytest.raises(UsageError, match="the seed must be at least 0"):
        bench(*pair, seed=-1)


def test_the_kernels_are_named(pair):
    report = bench(*pair, plan=QUICK)
    assert [use.node for use in report.kernels] == ["conv0", "conv1"]
    assert all(use.kernel.startswith("cpu.") for use in report.kernels)


def test_no_profile_is_left_behind(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench(*pair, plan=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_external_data_counts(tmp_path):
    import onnx

    model = networks.dense(networks.weights(channels=32))
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="m.data", size_threshold=0)
    size = model_size_bytes(path, load_structure(path))
    assert size == path.stat().st_size + (tmp_path / "m.data").stat().st_size


def test_open_dimensions_have_to_be_given(tmp_path):
    model = networks.dense(networks.weights())
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"
    path = tmp_path / "m.onnx"
    networks.save(model, path)
    with pytest.raises(UsageError, match="--shape x:1x8x224x12"):
        bench(path, path, plan=QUICK)
    with pytest.raises(UsageError, match=r"input x is empty \(1x8x0x12\), so there is nothing to time"):
        bench(path, path, plan=QUICK, shapes={"x": (1, 8, 0, 12)})


def test_the_modes_of_the_cuda_provider():
    assert [mode.name for mode in modes_for("best")] == ["default", "nhwc"]
    assert [mode.name for mode in modes_for("best", cuda_graph=True)] == ["graph", "nhwc+graph"]
    assert [mode.name for mode in modes_for("nhwc")] == ["nhwc"]
    assert CudaMode().provider_options() == {}
    every = CudaMode(prefer_nhwc=True, cuda_graph=True, tf32=False)
    assert every.provider_options() == {"prefer_nhwc": "1", "enable_cuda_graph": "1", "use_tf32": "0"}
    assert (every.name, every.without_graph().name) == ("nhwc+graph+no-tf32", "nhwc+no-tf32")
    with pytest.raises(UsageError, match="best, default, nhwc"):
        modes_for("fastest")


@pytest.mark.usefixtures("sparse_kernels_say_cuda")
@pytest.mark.parametrize(("graph", "modes"), [(False, ["default", "nhwc"]), (True, ["graph", "nhwc+graph"])])
def test_on_cuda_every_mode_of_both_models_is_timed_and_the_fastest_counts(pair, cuda_on_cpu, graph, modes):
    cuda = CudaBench("best", cuda_graph=graph, copies=2, config={"sparseconv.cuda_kernel": "csr"})
    report = bench(*pair, provider="cuda", cuda=cuda, plan=QUICK)
    assert [(c.model, c.mode) for c in report.candidates] == [
        (model, mode) for model in ("original", "converted") for mode in modes
    ]
    for model, name in ((report.original, "original"), (report.converted, "converted")):
        times = {c.mode: c.time for c in report.candidates if c.model == name}
        assert model.time == min(times.values(), key=lambda time: time.median_us)
        assert times[model.mode] == model.time
    assert report.speedup.of_medians == report.original.time.median_us / report.converted.time.median_us
    options = {"enable_cuda_graph": "1"} if graph else {}
    assert options in cuda_on_cpu
    assert options | {"prefer_nhwc": "1"} in cuda_on_cpu
    assert [use.kernel.partition(".")[0] for use in report.kernels] == ["cuda", "cuda"]
    assert [layer.name for layer in report.layers] == ["conv0", "conv1"]
    assert "2 copies of them in turn" in report.memory
    assert any(("both models" if graph else "neither model") in note for note in report.notes)


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_mode_that_fails_is_told_and_the_others_stand(pair, monkeypatch):
    load = bench_module._load

    def refuse(side, mode, clock):
        if mode is not None and mode.prefer_nhwc:
            raise ModelError("no NHWC here")
        return load(side, mode, clock)

    monkeypatch.setattr(bench_module, "_load", refuse)
    report = bench(*pair, provider="cuda", plan=QUICK)
    assert [(c.mode, c.problem, c.time is None) for c in report.candidates] == [
        ("default", "", False),
        ("nhwc", "no NHWC here", True),
    ] * 2
    with pytest.raises(ModelError, match="no NHWC here"):
        bench(*pair, provider="cuda", cuda=CudaBench("nhwc"), plan=QUICK)


@pytest.mark.usefixtures("cuda_on_cpu")
def test_sparse_nodes_that_fell_back_to_the_cpu_are_an_error(pair):
    with pytest.raises(ProviderError, match=r"runs 2 of 2 SparseConv nodes on cpu: conv0, conv1\."):
        bench(*pair, provider="cuda", plan=QUICK)


def test_a_second_model_without_sparse_layers_is_told(pair):
    assert any("no SparseConv node" in note for note in bench(*reversed(pair), plan=QUICK).notes)
    assert bench(*pair, plan=QUICK).notes == ()


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_failing_profile_leaves_the_times_of_whole_runs(pair, monkeypatch):
    def fail(*_):
        raise ModelError("no profiler")

    monkeypatch.setattr(bench_module, "profile", fail)
    report = bench(*pair, provider="cuda", plan=QUICK)
    assert report.layers[0].speedup is None
    assert any("no profiler" in note for note in report.notes)


def test_so_does_one_on_the_cpu(pair, monkeypatch):
    def fail(*_):
        raise ModelError("no profiler")

    monkeypatch.setattr(bench_module, "profile", fail)
    assert bench(*pair, plan=QUICK).notes == ("no times of single layers: no profiler",)


def test_what_is_only_for_cuda_is_refused_elsewhere(pair):
    with pytest.raises(UsageError, match="need --provider cuda"):
        bench(*pair, cuda=CudaBench(cuda_graph=True), plan=QUICK)
