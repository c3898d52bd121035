from __future__ import annotations

import json

import pytest

from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.runtime.bench import bench, model_size_bytes
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
