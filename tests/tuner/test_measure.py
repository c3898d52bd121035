"""Timing in real sessions: that it runs, what it refuses, and that nothing is left behind. No figure is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_sparseconv.converter.decisions import Choice
from onnx_sparseconv.errors import ModelError, ProviderError, UsageError
from onnx_sparseconv.runtime.binding import specs_of
from onnx_sparseconv.runtime.layer_times import NodeTime
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import make_session
from onnx_sparseconv.runtime.timing import Samples
from onnx_sparseconv.runtime.verify import verify
from onnx_sparseconv.tuner import Case, TuneOptions, candidates, machine_notes, make_cases, measure, tune
from onnx_sparseconv.tuner.candidates import DenseCandidate, Prepared, SparseCandidate, candidates_for
from onnx_sparseconv.tuner.layouts import layout_changes
from onnx_sparseconv.tuner.measure import OrtBench, WholeModel, _model_profile, _without_floor
from onnx_sparseconv.tuner.setting import read_setting
from tests.runtime import networks
from tests.support.odd_models import conv, model, pruned, tensor, value
from tests.support.real_models import find_model
from tests.tuner.plans import FAST
from tests.tuner.test_pieces import Cutter


@pytest.fixture
def bench():
    return OrtBench("cpu", 1, FAST["quick"])


def piece(dtype=np.float32):
    cutter = Cutter(networks.dense(networks.weights(layers=1, dtype=dtype)))
    return cutter.piece(cutter.regions[0]).model


@dataclass(frozen=True)
class Wrong:
    """A layer with another weight."""

    name: str = "wrong"
    choice: Choice = Choice.SPARSE
    factor: float = 2.0

    def prepare(self, piece):
        other = type(piece)()
        other.CopyFrom(piece)
        for initializer in other.graph.initializer:
            values = numpy_helper.to_array(initializer)
            initializer.CopyFrom(numpy_helper.from_array(np.float32(self.factor) * values, initializer.name))
        return Prepared(other, False)


@dataclass(frozen=True)
class Unloadable:
    """A model that ONNX Runtime refuses."""

    name: str = "unloadable"
    choice: Choice = Choice.SPARSE
    config: dict = field(default_factory=dict)

    def prepare(self, piece):
        other = type(piece)()
        other.CopyFrom(piece)
        other.graph.node[0].op_type = "Nonsense"
        return Prepared(other, False)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_all_candidates_are_timed(bench, dtype):
    times = bench.layer(piece(dtype), candidates_for("cpu"))
    assert all(0 < time < math.inf for time in times.times_us.values())
    assert list(times.times_us) == ["dense", "sparse"]
    assert times.problems == {}


def test_a_candidate_that_is_wrong_or_does_not_run_is_infinitely_slow(bench):
    times = bench.layer(piece(), (DenseCandidate(), SparseCandidate(), Wrong(), Unloadable()))
    assert [math.isinf(time) for time in times.times_us.values()] == [False, False, True, True]
    assert "differs from that of the dense layer" in times.problems["wrong"]
    assert "cannot load" in times.problems["unloadable"]


@pytest.mark.usefixtures("cuda_on_cpu")
def test_tf32_is_no_error_on_cuda_and_one_on_the_cpu():
    """A dense layer in TF32 differs from a sparse one in float by about 2^-11."""
    candidates = (DenseCandidate(), Wrong("rounded", factor=1 + 2**-11), Wrong("wrong", factor=1.1))
    on_cuda = OrtBench("cuda", 1, FAST["quick"]).layer(piece(), candidates)
    assert list(on_cuda.problems) == ["wrong"]
    on_cpu = OrtBench("cpu", 1, FAST["quick"]).layer(piece(), candidates)
    assert list(on_cpu.problems) == ["rounded", "wrong"]


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_layers_are_graphs_on_cuda_and_whole_models_where_asked_for(cuda_on_cpu, tmp_path, cuda_graph):
    bench = OrtBench("cuda", 1, FAST["quick"], cuda_graph=cuda_graph)
    bench.layer(piece(), (DenseCandidate(), DenseCandidate("nhwc", {"prefer_nhwc": "1"})))
    assert {"enable_cuda_graph": "1"} in cuda_on_cpu
    assert {"prefer_nhwc": "1", "enable_cuda_graph": "1"} in cuda_on_cpu
    cuda_on_cpu.clear()
    path = networks.save(networks.dense(networks.weights()), tmp_path / "d.onnx")
    (samples,) = bench.whole([WholeModel(path, False)], Case(batch=3))
    assert {layout: len(found.all_us) for layout, found in samples.items()} == {"default": 1, "nhwc": 1}
    graph = {"enable_cuda_graph": "1"} if cuda_graph else {}
    assert cuda_on_cpu[-1] == {"prefer_nhwc": "1"} | graph
    assert any("enable_cuda_graph" in options for options in cuda_on_cpu) == cuda_graph


@pytest.mark.usefixtures("cuda_on_cpu")
def test_where_dense_is_no_graph_nothing_is(monkeypatch):
    bench = OrtBench("cuda", 1, FAST["quick"])
    bind, graphs = bench._bind, []

    def refuse(*arguments, graph):
        if graph:
            raise ModelError("cannot be captured")
        graphs.append(graph)
        return bind(*arguments, graph=graph)

    monkeypatch.setattr(bench, "_bind", refuse)
    times = bench.layer(piece(), (DenseCandidate(), DenseCandidate("nhwc", {"prefer_nhwc": "1"})))
    assert all(math.isfinite(time) for time in times.times_us.values())
    assert times.problems == {}
    assert len(graphs) == 5  # the empty model, and what changes layouts, too


@pytest.mark.usefixtures("cuda_on_cpu")
def test_a_whole_model_runs_in_every_layout_and_needs_one(tmp_path, monkeypatch):
    path = networks.save(networks.dense(networks.weights()), tmp_path / "d.onnx")
    bench = OrtBench("cuda", 1, FAST["quick"])
    monkeypatch.setattr(measure, "measure", lambda runs, *_, **__: [Samples(((t,),)) for t in (7.0, 5.0)[: len(runs)]])
    (samples,) = bench.whole([WholeModel(path, False)], Case())
    assert {layout: found.stats().median_us for layout, found in samples.items()} == {"default": 7.0, "nhwc": 5.0}
    monkeypatch.setattr(bench, "_bind", _no_room)
    with pytest.raises(ModelError, match="no room"):
        bench.whole([WholeModel(path, False)], Case())


def _no_room(*_, **__):
    raise ModelError("no room")


def test_layouts_are_seen_where_onnxruntime_changes_them(bench):
    weight = tensor(pruned((32, 32, 1, 1), 0.5), "W")
    cutter = Cutter(model([conv(pads=[0] * 4)], [weight], [value("X", (1, 32, 28, 28))]))
    times = bench.layer(cutter.piece(cutter.regions[0]).model, candidates_for("cpu"))
    assert times.reorder_out_us > 0 or times.reorder_in_us > 0 or not _has_blocked_layout()


def _has_blocked_layout():
    """Whether ONNX Runtime has a blocked layout for this processor; it has for every x86-64 with AVX."""
    from pathlib import Path

    return "avx" in Path("/proc/cpuinfo").read_text()


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_changing_layouts_takes_is_timed_on_cuda(dtype):
    times = OrtBench("cuda", 1, FAST["quick"]).layer(piece(dtype), candidates_for("cuda"))
    assert times.reorder_in_us > 0
    assert times.reorder_out_us > 0
    assert list(times.times_us) == ["dense, default", "dense, nhwc", "sparse, general"]


@dataclass
class _Counted:
    """Runs, and how many there were."""

    runs: Callable[[], object]
    calls: int = 0

    def __call__(self):
        self.calls += 1
        self.runs()


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize("is_cold", [True, False])
def test_the_cache_is_emptied_where_it_would_be(is_cold, monkeypatch):
    monkeypatch.setattr(measure, "CACHE_BYTES", 4096)
    bench, sizes = OrtBench("cuda", 1, FAST["quick"]), []
    relu = bench._relu
    monkeypatch.setattr(bench, "_relu", lambda size, **how: sizes.append(size) or _Counted(relu(size, **how)))
    times = bench.layer(piece(), candidates_for("cuda"), is_cold=is_cold)
    assert math.isfinite(times.times_us["dense, default"])
    assert sorted(sizes) == ([1, 1024] if is_cold else [1])
    plan = FAST["quick"].layer
    timed = 1 + 2 + sum(map(math.isfinite, times.times_us.values()))  # an empty run and two changes of layout, too
    emptied = bench._cache_runs.calls if is_cold else 0
    assert emptied >= (timed * plan.min_rounds * plan.runs_per_round if is_cold else 0)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 7), (1, 2, 3, 4, 5)])
def test_layouts_are_changed_to_channels_last_and_back(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    before, behind = layout_changes({"x": x, "residual": -x}, {"y": x})
    last = np.moveaxis(x, 1, -1)
    changed = run_session(make_session(before.model), before.inputs, "it")
    np.testing.assert_array_equal(changed["x_changed"], last)
    np.testing.assert_array_equal(changed["residual_changed"], -last)
    assert specs_of(changed) == before.outputs
    back = run_session(make_session(behind.model), {"y": np.ascontiguousarray(last)}, "it")
    np.testing.assert_array_equal(back["y_changed"], x)
    assert specs_of(back) == behind.outputs
    assert behind.inputs["y"].shape == last.shape


@pytest.mark.parametrize("shape", [(), (1,), (12,), (16, 12, 12)])
def test_what_has_no_channels_keeps_its_layout(shape):
    x = np.zeros((2, 16, 12, 12), np.float32)
    before, behind = layout_changes({"x": x, "added": np.zeros(shape, np.float32)}, {"y": x})
    assert (list(before.inputs), list(behind.inputs)) == (["x"], ["y"])


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_layout_that_cannot_be_changed_is_no_choice(monkeypatch):
    bench = OrtBench("cuda", 1, FAST["quick"])
    monkeypatch.setattr(bench, "_layout_changes", _no_room)
    times = bench.layer(piece(), candidates_for("cuda"))
    assert [math.isinf(time) for time in times.times_us.values()] == [False, True, False]
    assert times.problems == {"dense, nhwc": "no room"}
    assert (times.reorder_in_us, times.reorder_out_us) == (0, 0)


@pytest.mark.usefixtures("cuda_on_cpu")
def test_where_nothing_may_become_sparse_the_model_need_not_run_on_the_gpu(tmp_path):
    text = [value(name, ("N", 4), TensorProto.STRING) for name in ("X", "Y")]
    proto = model([helper.make_node("Identity", ["X"], ["Y"])], [], text[:1], text[1:])
    options = TuneOptions(provider="cuda", preset="quick", database=tmp_path / "db.jsonl")
    report = tune(proto, options, bench=OrtBench("cuda", 1, FAST["quick"]), setting=read_setting("cpu", 1))
    assert (report.decisions.layers, report.whole) == ((), None)


def test_of_large_outputs_all_rows_and_columns_are_looked_at(monkeypatch):
    monkeypatch.setattr(measure, "_COMPARED", 1000)
    y = np.arange(8 * 21 * 30 * 49).reshape(8, 21, 30, 49)
    seen = np.unravel_index(measure._some(y), y.shape)
    assert 200 < seen[0].size <= 1000
    assert [len(set(axis)) for axis in seen] == [8, 21, 30, 49]
    small = y[:1, :20, :1]
    assert measure._some(small) is small


def test_a_layers_time_is_without_the_call_but_never_nothing():
    assert _without_floor(100.0, 30.0) == 70
    assert 0 < _without_floor(30.0, 30.0) < _without_floor(31.0, 10.0)
    assert _without_floor(20.0, 30.0) > 0


def test_whole_models_run_on_the_same_inputs(bench, tmp_path):
    weights = networks.weights()
    dense = networks.save(networks.dense(weights), tmp_path / "d.onnx")
    sparse = networks.save(networks.sparse(weights), tmp_path / "s.onnx")
    samples = bench.whole([WholeModel(dense, False), WholeModel(sparse, True)], Case(batch=3))
    assert [{layout: len(found.all_us) for layout, found in one.items()} for one in samples] == [{"default": 1}] * 2


def test_layers_are_timed_in_their_places(bench, tmp_path):
    weights = networks.weights()
    dense = WholeModel(networks.save(networks.dense(weights), tmp_path / "d.onnx"), False)
    sparse = WholeModel(networks.save(networks.sparse(weights), tmp_path / "s.onnx"), True)
    for found in bench.in_place(dense, sparse, Case(batch=3)):
        assert set(found.layers_us) == {"conv0", "conv1"}
        assert found.total_us >= sum(found.layers_us.values()) > 0


def test_nodes_with_graphs_in_them_count_once():
    nodes = [NodeTime("if", "If", "", 100.0), NodeTime("conv0", "Conv", "", 60.0), NodeTime("relu", "Relu", "", 30.0)]
    found = _model_profile(networks.dense(networks.weights()), nodes)
    assert (found.layers_us, found.total_us) == ({"conv0": 60.0}, 90.0)


def test_places_are_seen_on_the_cpu_alone():
    assert OrtBench("cpu", 1, FAST["default"]).sees_places
    assert not OrtBench("cuda", 1, FAST["default"]).sees_places


def test_cuda_has_its_candidates():
    found = candidates_for("cuda")
    assert [c.choice for c in found] == [Choice.DENSE, Choice.DENSE, Choice.SPARSE]
    assert len({c.name for c in found}) == 3
    assert found[2].config == {}


def test_a_provider_that_is_not_there_is_an_error(tmp_path):
    path = networks.save(networks.dense(networks.weights()), tmp_path / "m.onnx")
    with pytest.raises(ProviderError):
        tune(path, TuneOptions(provider="cuda", database=tmp_path / "db"))


def test_this_machine():
    setting = read_setting("cpu", 3)
    assert setting["processor"]
    assert (setting["gpu"], setting["driver"], setting["provider"], setting["threads"]) == (None, None, "cpu", 3)
    assert setting == read_setting("cpu", 3)


def test_candidates_prepare_without_touching_the_piece():
    made = piece()
    before = made.SerializeToString()
    for candidate in candidates_for("cpu"):
        candidate.prepare(made)
    assert made.SerializeToString() == before
    assert candidates.SparseCandidate().prepare(made).model.graph.node[0].op_type == "SparseConv"


def test_a_real_tune_of_a_small_network(tmp_path, monkeypatch):
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    path = networks.save(networks.dense(networks.weights(channels=32, sparsity=0.95)), tmp_path / "m.onnx")
    options = TuneOptions(threads=1, cases=make_cases([1, 2]), database=tmp_path / "db.jsonl")
    seen = []
    report = tune(path, options, progress=lambda *step: seen.append(step))
    assert [layer.node for layer in report.decisions.layers] == ["conv0", "conv1"]
    assert seen[-1][:2] == (2, 2)
    assert machine_notes(report.decisions) == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["db.jsonl", "m.onnx"]
    with pytest.raises(UsageError, match="has no input z"):
        tune(path, TuneOptions(cases=make_cases([], ["z:1"]), database=tmp_path / "db.jsonl"))


@pytest.mark.parametrize("name", ["lenet5_dns_sparse", "squeezenet_deep_compression"])
def test_a_real_model_is_tuned_and_right(name, tmp_path):
    """The quick preset, as a user would run it."""
    from onnx_sparseconv.converter import ConvertOptions, convert

    path = find_model(name)
    report = tune(path, TuneOptions(preset="quick", threads=1, database=tmp_path / "db.jsonl"))
    assert report.num_measured + report.num_alike > 1
    made, converted = convert(path, tmp_path / "fast.onnx", ConvertOptions(decisions=report.decisions))
    assert converted.model.num_rewritten == report.decisions.num_sparse
    assert report.gain == (report.decisions.num_sparse > 0)
    if made is not None:
        assert verify(path, tmp_path / "fast.onnx").passed


@pytest.mark.usefixtures("sparse_kernels_say_cuda")
def test_another_provider_goes_the_same_way(tmp_path, monkeypatch, cuda_on_cpu):
    """CUDA plugs in by its candidates alone; here the CPU stands in for it."""
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    path = networks.save(networks.dense(networks.weights(channels=32, sparsity=0.95)), tmp_path / "m.onnx")
    report = tune(path, TuneOptions(provider="cuda", database=tmp_path / "db.jsonl"))
    assert [c.name for c in report.decisions.layers[0].candidates] == [
        "dense, default",
        "dense, nhwc",
        "sparse, general",
    ]
    assert all(0 < time < math.inf for c in report.decisions.layers[0].candidates for time in c.times_us)
    assert {"prefer_nhwc": "1"} in cuda_on_cpu


@pytest.mark.usefixtures("cuda_on_cpu")
def test_a_sparse_layer_that_runs_elsewhere_is_no_candidate(tmp_path, monkeypatch):
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    path = networks.save(networks.dense(networks.weights(channels=32, sparsity=0.95)), tmp_path / "m.onnx")
    report = tune(path, TuneOptions(provider="cuda", database=tmp_path / "db.jsonl"))
    assert report.decisions.num_sparse == 0
    assert "runs 1 of 1 SparseConv nodes on cpu" in report.decisions.layers[0].text
