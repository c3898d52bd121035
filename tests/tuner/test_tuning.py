"""The search: what is timed, what is chosen, and how the whole model overrules it. No real time in here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from onnx_sparseconv.converter import ConvertOptions, convert, prune
from onnx_sparseconv.converter.decisions import Cause, Choice, decisions_text, read_decisions, write_decisions
from onnx_sparseconv.errors import DecisionsError, ModelError, ProviderError, UsageError
from onnx_sparseconv.tuner import Case, TuneOptions, tune
from onnx_sparseconv.tuner.cost_model import speedup_bound
from onnx_sparseconv.tuner.in_place import ModelProfile
from tests.runtime import networks
from tests.support import architectures
from tests.support.odd_models import FEEDS, call, conv, function, model, pruned, tensor, value
from tests.tuner.fakes import SETTING, FakeBench, FakeClock


def network(*sparsities, channels=8, names=True):
    """A chain of layers of these sparsities, no two alike."""
    weights = [networks.weights(channels=channels, layers=1, sparsity=s, seed=i)[0] for i, s in enumerate(sparsities)]
    return networks.dense(weights, names=names)


def zeros(proto):
    """Sparsity by name, as the file has it."""
    _, report = convert(proto, options=ConvertOptions(force=True))
    return {layer.name: layer.sparsity for layer in report.model.layers}


@pytest.fixture
def tuned(tmp_path):
    """Tune with the fake stopwatch; a database of its own unless another is named."""

    def run(proto, bench=None, *, preset="quick", clock=None, setting=SETTING, **options):
        bench = bench or FakeBench()
        bench.sparsity = bench.sparsity or zeros(proto)
        options = TuneOptions(preset=preset, **({"database": tmp_path / "db.jsonl"} | options))
        return tune(proto, options, bench=bench, setting=setting, clock=clock or FakeClock())

    return run


def choices(report):
    return {layer.node: str(layer.choice) for layer in report.decisions.layers}


def causes(report):
    return {layer.node: layer.cause for layer in report.decisions.layers}


def test_each_layer_is_decided_by_its_times(tuned):
    bench = FakeBench()
    report = tuned(network(0.9, 0.4, 0.6), bench)
    assert choices(report) == {"conv0": "sparse", "conv1": "dense", "conv2": "sparse"}
    assert set(causes(report).values()) == {Cause.MEASURED}
    assert (report.num_measured, report.num_found, report.num_alike) == (3, 0, 0)
    first, second, _ = report.decisions.layers
    assert first.text.startswith("sparse is ")
    assert "x faster (100.0 us dense" in first.text
    assert "x slower (100.0 us dense" in second.text
    assert {c.name: c.choice for c in first.candidates} == {"dense": Choice.DENSE, "sparse": Choice.SPARSE}
    assert report.gain
    (case,) = report.whole.cases
    assert case.measured_us == pytest.approx(case.predicted_us)
    assert case.dense_us == 350


def test_layers_that_take_longer_one_by_one_foretell_shares(tuned):
    """Three layers of 100 us in a model of 150 us: with sparse layers of a fifth, 30 us are foretold, not -90."""
    report = tuned(network(0.9, 0.9, 0.9), FakeBench(whole_us=lambda sparse: 150 - 40 * len(sparse)))
    (case,) = report.whole.cases
    left = 1 - sum(zeros(network(0.9, 0.9, 0.9)).values()) / 3
    assert case.predicted_us == pytest.approx(150 * 2 * left)
    assert case.measured_us == 30


def test_layers_in_their_places_overrule_layers_alone(tuned):
    """By itself the second layer gains; in the model it loses, which the check of the whole need not find out."""

    def profiles(dense, sparse):
        layers = {"conv0": (100, 20), "conv1": (100, 110)}
        is_sparse = {node.name for node in sparse if node.op_type == "SparseConv"}
        assert is_sparse == set(layers)
        assert not any(node.op_type == "SparseConv" for node in dense)
        before, after = ({name: times[i] for name, times in layers.items()} for i in (0, 1))
        return ModelProfile(before, 250), ModelProfile(after, 180)

    bench = FakeBench(whole_us=lambda sparse: 250 - 80 * len(sparse), profiles=profiles)
    report = tuned(network(0.9, 0.6), bench)
    assert choices(report) == {"conv0": "sparse", "conv1": "dense"}
    assert causes(report)["conv1"] is Cause.MEASURED
    assert report.decisions.layers[1].text == "sparse is 1.10x slower (100.0 us dense, 110.0 us sparse)"
    assert report.whole.cases[0].predicted_us == pytest.approx(170)
    assert bench.wholes == [frozenset(), frozenset({"conv0"})]


def test_layers_without_names_and_alike_have_times_in_place(tuned):
    """The profile of the dense model has them by their outputs, that of the sparse one by the names they were given."""

    def profiles(dense, sparse):
        assert {node.name for node in dense if node.op_type == "Conv"} == {""}
        before = {node.output[0]: 100 for node in dense if node.op_type == "Conv"}
        after = {node.name: 30 + 10 * i for i, node in enumerate(n for n in sparse if n.op_type == "SparseConv")}
        return ModelProfile(before, 250), ModelProfile(after, 120)

    weights = networks.weights(channels=8, layers=1, sparsity=0.9) * 2
    bench = FakeBench(whole_us=lambda sparse: 250 - 65 * len(sparse), profiles=profiles)
    report = tuned(networks.dense(weights, names=False), bench)
    first, second = report.decisions.layers
    assert report.num_alike == 1
    assert first.text == "sparse is 3.33x faster (100.0 us dense, 30.0 us sparse)"
    assert second.text.startswith("sparse is 2.50x faster (100.0 us dense, 40.0 us sparse), timed alone on")


def test_layers_by_rule_are_sparse_in_the_profile_and_keep_their_gain(tuned):
    """The budget ends after the first layer; the other is sparse by its zeros."""
    clock = FakeClock()

    def profiles(_dense, sparse):
        assert sum(node.op_type == "SparseConv" for node in sparse) == 2
        return ModelProfile({"conv0": 100, "conv1": 100}, 250), ModelProfile({"conv0": 40, "conv1": 20}, 110)

    def tick():
        clock.now += 10**9

    bench = FakeBench(on_layer=tick, whole_us=lambda sparse: 250 - 70 * len(sparse), profiles=profiles)
    report = tuned(network(0.9, 0.85, channels=32), bench, clock=clock, budget_s=0.5)
    assert sorted(causes(report).values()) == [Cause.BUDGET, Cause.MEASURED]
    assert choices(report) == {"conv0": "sparse", "conv1": "sparse"}
    assert report.whole.cases[0].predicted_us == pytest.approx(110)


def test_where_places_cannot_be_seen_nothing_is_made_for_them(tuned, monkeypatch):
    monkeypatch.setattr(FakeBench, "in_place", lambda *_: pytest.fail("asked for all the same"))
    bench = FakeBench()
    assert tuned(network(0.9, 0.4), bench).decisions.notes == ()
    assert bench.wholes == [frozenset(), frozenset({"conv0"})]


def test_a_model_whose_layers_cannot_be_timed_in_place_is_tuned_by_layers_alone(tuned):
    def fail(_dense, _sparse):
        raise ModelError("no profile")

    report = tuned(network(0.9, 0.4), FakeBench(profiles=fail))
    assert choices(report) == {"conv0": "sparse", "conv1": "dense"}
    assert "layers were timed alone, not in their places: no profile" in report.decisions.notes

    def refuse(_dense, _sparse):
        raise ProviderError("gone")

    with pytest.raises(ProviderError, match="gone"):
        tuned(network(0.9, 0.4), FakeBench(profiles=refuse))


def test_how_often_the_rule_errs_is_told(tuned):
    report = tuned(network(0.9, 0.4, 0.6))
    assert (
        "by their sparsity alone, 1 of the 3 timed layers would have been decided otherwise" in report.decisions.notes
    )
    assert tuned(network(0.9)).decisions.notes == ()


def test_the_decisions_make_the_model_that_was_tuned(tuned, tmp_path):
    proto = network(0.9, 0.4, 0.6)
    write_decisions(tuned(proto).decisions, tmp_path / "d.json")
    converted, report = convert(proto, options=ConvertOptions(decisions=read_decisions(tmp_path / "d.json")))
    assert [n.name for n in converted.graph.node if n.op_type == "SparseConv"] == ["conv0", "conv2"]
    (dense,) = [layer for layer in report.model.layers if not layer.verdict.rewrite]
    assert "x slower" in dense.verdict.text


def test_a_second_tune_times_nothing(tuned):
    proto, bench = network(0.9, 0.4), FakeBench()
    first = tuned(proto)
    second = tuned(proto, bench)
    assert bench.pieces == []
    assert (second.num_measured, second.num_found) == (0, 2)
    assert choices(second) == choices(first)
    assert second.decisions.notes == ()


def test_another_machine_times_all_again_and_says_so(tuned):
    proto, bench = network(0.9, 0.4), FakeBench()
    tuned(proto)
    report = tuned(proto, bench, setting=SETTING | {"onnxruntime": "2.0"})
    assert len(bench.pieces) == 2
    assert "2 measured before with onnxruntime 1.0, now 2.0: measured again" in report.decisions.notes


def test_an_interrupted_tune_resumes(tuned, tmp_path):
    proto = network(0.9, 0.4, 0.6)
    bench = FakeBench()

    def interrupt():
        if len(bench.pieces) == 2:
            raise KeyboardInterrupt

    bench.on_layer = interrupt
    with pytest.raises(KeyboardInterrupt):
        tuned(proto, bench)
    assert [path.name for path in tmp_path.iterdir()] == ["db.jsonl"]
    rest = FakeBench()
    assert (tuned(proto, rest).num_found, len(rest.pieces)) == (2, 1)


def test_layers_that_are_alike_are_timed_once(tuned):
    weight = networks.weights(layers=1)[0]
    proto = networks.dense([weight, np.ascontiguousarray(weight[:, ::-1]), -weight])
    bench = FakeBench()
    report = tuned(proto, bench)
    assert (len(bench.pieces), report.num_measured, report.num_alike) == (1, 1, 2)
    assert [layer.measured_as for layer in report.decisions.layers] == ["", "conv0", "conv0"]
    assert "timed alone on 'conv0', which is alike" in report.decisions.layers[1].text
    assert any("timed once" in note for note in report.decisions.notes)


def test_hopeless_layers_are_left_out_and_said_so(tuned):
    bench = FakeBench()
    proto = network(0.05, 0.9)
    report = tuned(proto, bench)
    assert causes(report) == {"conv0": Cause.HOPELESS, "conv1": Cause.MEASURED}
    assert "of its weights are zero, and even the best layer known" in report.decisions.layers[0].text
    assert len(bench.pieces) == 1
    thorough = FakeBench()
    assert causes(tuned(proto, thorough, preset="thorough"))["conv0"] is Cause.MEASURED


def test_the_bound_of_the_cost_model():
    assert speedup_bound(0.0) < 1 < speedup_bound(0.2)
    assert speedup_bound(1.0) > 1000


def test_groups_are_never_hopeless(tuned):
    report = tuned(architectures.mobilenet_v2(), FakeBench(whole_us=lambda _: 100.0))
    assert Cause.HOPELESS not in causes(report).values()


def test_a_layer_that_cannot_run_is_dense_with_the_reason(tuned):
    bench = FakeBench(problems={"sparse": "no such kernel"})
    report = tuned(network(0.9), bench)
    (layer,) = report.decisions.layers
    assert (layer.choice, layer.cause) == (Choice.DENSE, Cause.MEASURED)
    assert layer.text == "sparse cannot run (no such kernel)"
    assert layer.candidates[1].problem == "no such kernel"
    assert '"times_us": [\n            null\n' in decisions_text(report.decisions)
    assert (report.whole, report.gain) == (None, False)


def test_a_layer_that_fails_altogether_is_decided_by_its_sparsity(tuned):
    def fail():
        raise ModelError("out of luck")

    report = tuned(network(0.9, 0.1), FakeBench(on_layer=fail, whole_us=lambda sparse: 100 - 10 * len(sparse)))
    assert choices(report) == {"conv0": "sparse", "conv1": "dense"}
    assert report.decisions.layers[0].cause is Cause.NOT_MEASURED
    assert "out of luck" in report.decisions.layers[0].text


def test_a_layer_without_a_dense_time_is_decided_by_its_sparsity(tuned):
    bench = FakeBench(problems={"dense": "no kernel"}, whole_us=lambda sparse: 100 - 10 * len(sparse))
    report = tuned(network(0.9, 0.4), bench)
    assert choices(report) == {"conv0": "sparse", "conv1": "dense"}
    assert set(causes(report).values()) == {Cause.NOT_MEASURED}
    assert report.decisions.layers[1].text == "it cannot be timed: no kernel"


def test_the_budget_ends_the_timing_but_not_the_decisions(tuned):
    clock = FakeClock()

    def tick():
        clock.now += 10**9

    bench = FakeBench(on_layer=tick)
    proto = network(0.9, 0.9, 0.4, 0.95)
    report = tuned(proto, bench, clock=clock, budget_s=2)
    assert len(bench.pieces) == 2
    assert sorted(causes(report).values()) == [Cause.BUDGET] * 2 + [Cause.MEASURED] * 2
    assert choices(report)["conv3"] == "sparse"
    assert choices(report)["conv2"] == "dense"
    assert "the budget was spent; by its sparsity" in report.decisions.layers[3].text
    again = FakeBench()
    assert set(causes(tuned(proto, again)).values()) == {Cause.MEASURED}
    assert len(again.pieces) == 2


def test_what_is_decided_by_sparsity_is_checked_beside_what_loses(tuned):
    """Nothing is known of what it gains, while the layer that was timed would lose by the layouts around it."""
    clock = FakeClock()

    def tick():
        clock.now += 10**9

    bench = FakeBench(on_layer=tick, whole_us=lambda sparse: 500 - 50 * len(sparse), reorder_us=30)
    report = tuned(network(0.9, 0.4, 0.9, channels=32), bench, clock=clock, budget_s=0.5)
    assert sorted(causes(report).values()) == [Cause.BUDGET] * 2 + [Cause.MEASURED]
    assert report.whole is not None
    assert all(layer.choice is Choice.SPARSE for layer in report.decisions.layers if layer.node != "conv1")


def test_no_budget_at_all_still_decides(tuned):
    bench = FakeBench()
    assert choices(tuned(network(0.9, 0.4), bench, budget_s=0)) == {"conv0": "sparse", "conv1": "dense"}
    assert bench.pieces == []


def test_the_whole_model_overrules_its_layers(tuned):
    """Single layers promise a gain for all; as a whole only the two sparsest pay."""

    def whole(sparse):
        return 500 - 40 * len(sparse & {"conv0", "conv1"}) + 60 * len(sparse & {"conv2", "conv3"})

    bench = FakeBench(whole_us=whole)
    report = tuned(network(0.97, 0.95, 0.55, 0.55), bench)
    assert choices(report) == {"conv0": "sparse", "conv1": "sparse", "conv2": "dense", "conv3": "dense"}
    assert report.gain
    assert causes(report)["conv3"] is Cause.WHOLE_MODEL
    assert report.decisions.layers[3].text.startswith("left dense for the model as a whole, though sparse is")
    assert len(report.whole.trials) == 2
    assert "2 instead of 4 sparse layers" in report.whole.text
    assert report.decisions.whole_model["trials"][0]["num_sparse"] == 4


def test_a_model_that_gains_nothing_stays_dense(tuned):
    report = tuned(network(0.95, 0.9), FakeBench(whole_us=lambda sparse: 300 + 10 * len(sparse)), preset="default")
    assert set(choices(report).values()) == {"dense"}
    assert not report.gain
    assert report.whole.text.startswith(
        "no gain as a whole: the best of 2 choices takes 310 us, the dense model 300 us"
    )
    (case,) = report.whole.cases
    assert (case.dense_us, case.measured_us, case.speedup) == (300, 300, None)
    assert set(causes(report).values()) == {Cause.WHOLE_MODEL}


def test_what_is_as_foretold_is_timed_once(tuned):
    bench = FakeBench()
    tuned(network(0.95, 0.9), bench)
    assert bench.wholes == [frozenset(), frozenset({"conv0", "conv1"})]


def test_several_shapes_are_one_decision(tuned):
    report = tuned(network(0.9, 0.4), cases=(Case(1), Case(4)))
    assert report.decisions.input_shapes == ({"x": (1, 8, 12, 12)}, {"x": (4, 8, 12, 12)})
    assert all(len(c.times_us) == 2 for layer in report.decisions.layers for c in layer.candidates)
    assert len(report.whole.cases) == 2
    assert choices(report) == {"conv0": "sparse", "conv1": "dense"}


def test_layers_without_names_have_others(tuned):
    report = tuned(network(0.9, 0.4, names=False), FakeBench(whole_us=lambda sparse: 100 - 10 * len(sparse)))
    assert choices(report) == {"Conv_c0": "sparse", "Conv_c1": "dense"}


# Models that ONNX Runtime itself does not run, so that nothing can be measured.
UNRUNNABLE = {"bfloat16", "double", "int32", "unsqueeze"}


@pytest.mark.parametrize("name", sorted(FEEDS.keys() - UNRUNNABLE))
def test_odd_models_get_decisions_that_fit_them(tuned, name):
    proto = FEEDS[name].build()
    report = tuned(proto, FakeBench(whole_us=lambda sparse: 100 - 10 * len(sparse)))
    _, converted = convert(proto, options=ConvertOptions(decisions=report.decisions))
    assert converted.model.num_rewritten == report.decisions.num_sparse


@pytest.mark.parametrize("name", sorted(UNRUNNABLE))
def test_what_cannot_be_run_cannot_be_tuned(tuned, name):
    with pytest.raises(ModelError, match=r"cannot (load|be run)"):
        tuned(FEEDS[name].build())


def test_what_cannot_be_loaded_or_run_is_told_with_the_models_name(tmp_path):
    twice = networks.dense(networks.weights())
    for node in twice.graph.node:
        node.name = "twice"
    path = networks.save(twice, tmp_path / "twice.onnx")
    with pytest.raises(ModelError, match=r"^[^/]* cannot load (/.*/)?twice\.onnx: ") as caught:
        tune(path, TuneOptions(database=tmp_path / "db.jsonl"))
    assert "probe" not in str(caught.value)


def test_layers_that_are_sparse_already_stay_so(tuned):
    proto = network(0.9, 0.6)
    converted, _ = convert(proto, options=ConvertOptions(min_sparsity=0.8))
    bench = FakeBench(sparsity=zeros(proto))
    report = tuned(converted, bench)
    assert choices(report) == {"conv0": "sparse", "conv1": "sparse"}
    assert causes(report) == {"conv0": Cause.REFUSED, "conv1": Cause.MEASURED}
    assert bench.wholes[0] == {"conv0"}
    _, again = convert(converted, options=ConvertOptions(decisions=report.decisions))
    assert again.model.num_rewritten == 1
    first, second = report.decisions.layers
    edited = replace(report.decisions, layers=(replace(first, choice=Choice.DENSE), second))
    with pytest.raises(DecisionsError, match="'conv0' is to be dense, but is sparse in the model"):
        convert(converted, options=ConvertOptions(decisions=edited))


def test_a_model_without_convolutions(tuned):
    proto = model([helper.make_node("Relu", ["X"], ["Y"])], [])
    report = tuned(proto)
    assert (report.decisions.layers, report.gain) == ((), False)
    assert convert(proto, options=ConvertOptions(decisions=report.decisions))[0] is None


def test_a_model_that_cannot_carry_sparse_layers_stays_dense(tuned):
    """Its opset is too old and cannot be raised, which only shows once a layer is to be rewritten."""
    body = function("f", ["x"], [helper.make_node("Relu", ["x"], ["y"])], opset=8)
    weight = tensor(pruned(sparsity=0.6), "W")
    proto = model([conv(out="c"), call("f", ["c"])], [weight], [value("X", (2, 16, 6, 6))], opset=8, functions=[body])
    report = tuned(proto, FakeBench(sparsity={"conv": 0.6}))
    assert choices(report) == {"conv": "dense"}
    assert report.whole is None
    assert any("cannot be raised" in note for note in report.decisions.notes)


def test_a_whole_network_from_a_file(tmp_path):
    prune(architectures.resnet(), tmp_path / "p.onnx", sparsity=0.8)
    bench = FakeBench(whole_us=lambda sparse: 1000 - 10 * len(sparse), reorder_us=5.0)
    report = tune(
        tmp_path / "p.onnx",
        TuneOptions(preset="quick", database=tmp_path / "db.jsonl"),
        bench=bench,
        setting=SETTING,
        clock=FakeClock(),
    )
    assert report.gain
    assert report.decisions.num_sparse > 5
    assert report.decisions.model == "p.onnx"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": "tpu"}, "unknown provider"),
        ({"preset": "slow"}, "unknown preset"),
        ({"budget_s": -1}, "must not be negative"),
        ({"threads": 20000}, "threads must be at most"),
        ({"budget_s": float("nan")}, "must not be negative"),
        ({"threads": 0}, "at least 1"),
        ({"cases": ()}, "no shapes"),
    ],
)
def test_wrong_options_are_usage_errors(options, message):
    with pytest.raises(UsageError, match=message):
        TuneOptions(**options)
