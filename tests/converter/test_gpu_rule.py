"""The rule for GPUs that are not at hand: layers that are foretold to lose stay dense, and the text says why."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert, gpu_network, gpu_predictions, gpu_rule
from onnx_sparseconv.converter.analyse import make_plan
from onnx_sparseconv.converter.decide import DecisionOptions
from onnx_sparseconv.converter.decisions import Cause, Choice, Decisions, LayerDecision
from onnx_sparseconv.converter.gpu_predictions import (
    DEFAULT_BATCHES,
    GpuRule,
    Prediction,
    choose_kernels,
    predict,
)
from onnx_sparseconv.converter.model_io import load
from onnx_sparseconv.converter.report import Reason
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.kernels.gpu_time_constants import MODEL
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice
from onnx_sparseconv.kernels.layer import Refusal, make_layer
from tests.support.gpu_images import needs_nvrtc
from tests.support.odd_models import conv, model, pruned, tensor, value
from tests.support.sparse_layers import sparse_layer

# Gains at any batch size, as measured on an H200 (3.8x and more); loses at any; gains at batch 1, loses at batch 64.
NARROW = (64, 64, 3, 56, 0.95)
WIDE = (512, 512, 3, 28, 0.70)
SMALL_MAP = (256, 256, 3, 14, 0.90)


@pytest.fixture
def foretold(monkeypatch):
    """Times that stay the same whatever kernels become, by the number of channels; float16 halves the gain."""
    gains = {64: lambda _: 3.0, 512: lambda _: 0.5, 256: lambda batch: 2.0 if batch < 16 else 0.6}

    def predict_one(call, plan):
        assert plan.in_channels == call.layer.in_channels
        gain = gains[call.layer.in_channels](call.batch) / (2 if call.layer.element_type == np.float16 else 1)
        return Prediction(call.architecture, call.batch, call.size, 100.0 * gain, 100.0)

    monkeypatch.setattr(gpu_predictions, "_predict_generated", predict_one)
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda _: None)


def network(*layers, batch="n", sizes=None, dtype=np.float32, **attributes):
    """Layers side by side, each with an input of its own."""
    nodes, weights, inputs, outputs = [], [], [], []
    for i, (channels, out_channels, kernel, size, sparsity) in enumerate(layers):
        rng = np.random.default_rng(i)
        shape = (out_channels, channels // attributes.get("group", 1), kernel, kernel)
        weight = (rng.standard_normal(shape) * (rng.random(shape) > sparsity)).astype(dtype)
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        more = attributes or {"pads": [kernel // 2] * 4}
        nodes.append(helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"y{i}"], f"conv{i}", **more))
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        inputs.append(helper.make_tensor_value_info(f"x{i}", element, [batch, channels, *(sizes or (size, size))]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", element, [None] * 4))
    graph = helper.make_graph(nodes, "network", inputs, outputs, weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def verdicts(model, rule, **options):
    return [layer.verdict for layer in make_plan(load(model), DecisionOptions(**options), rule).report.layers]


def notes_of(model, rule):
    return make_plan(load(model), DecisionOptions(), rule).report.notes


def reasons(model, *, rule=None, **options):
    return [verdict.reason for verdict in verdicts(model, rule or GpuRule((90,)), **options)]


def predictions(model, rule):
    (site,) = make_plan(load(model), DecisionOptions(), rule).sites
    return predict(site, rule)


def test_layers_that_are_foretold_to_lose_stay_dense():
    found = verdicts(network(NARROW, WIDE), GpuRule((80,), batches=(64,)))
    assert [verdict.reason for verdict in found] == [Reason.REWRITE, Reason.NO_PREDICTED_GAIN]
    assert "% of its weights are zero; predicted " in found[0].text
    assert found[1].text.startswith("predicted 0.")
    assert "on sm_80 at batch " in found[1].text
    assert "us dense, " in found[1].text


@pytest.mark.parametrize("architecture", [80, 86, 120])
def test_layers_without_code_are_foretold_on_sparse_tensor_cores(architecture):
    """In both types, where a GPU has no warpgroups; on older ones there is nothing that is known to be fast."""
    for to_half in (False, True):
        rule = GpuRule((architecture,), batches=(64,), to_half=to_half, with_images=False)
        (verdict,) = verdicts(network(NARROW), rule)
        assert verdict.reason is Reason.REWRITE
        assert "on sparse tensor cores)" in verdict.text
        assert not verdicts(network(NARROW), dataclasses.replace(rule, architectures=(75,)))[0].rewrite


def test_a_layer_has_to_save_what_a_network_pays_for_it(monkeypatch):
    """However many times faster it is: a change of layout takes microseconds, not a share."""
    monkeypatch.setattr(gpu_rule, "MOST_WEIGHTS_TAKEN_ALONG", 0)

    def predict_one(call, _):
        return Prediction(call.architecture, call.batch, call.size, 12.0 * call.batch, 4.0 * call.batch)

    monkeypatch.setattr(gpu_predictions, "_predict_generated", predict_one)
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda _: None)
    dense = (*NARROW[:4], 0.2)
    found, *_ = verdicts(network(NARROW, dense, dense, dense), GpuRule((90,), batches=(1, 2)))
    assert found.reason == Reason.NO_PREDICTED_GAIN
    assert found.text == (
        "predicted 3.00x on sm_90 at batch 1 and 56x56 (12 us dense, 4 us sparse), less than 10 us saved; "
        "3.00x at batch 2"
    )
    assert reasons(network(NARROW), rule=GpuRule((90,), batches=(2,))) == [Reason.REWRITE]


def test_what_sparsity_says_against_goes_first():
    dense = (*NARROW[:4], 0.2)
    depthwise = network((64, 64, 3, 56, 0.9), group=64)
    assert reasons(network(dense)) == [Reason.TOO_DENSE]
    assert reasons(depthwise) == [Reason.DEPTHWISE]


@pytest.mark.usefixtures("foretold")
@pytest.mark.parametrize(
    ("batch", "asked", "expected"),
    [
        (1, (), Reason.REWRITE),
        (64, (), Reason.NO_PREDICTED_GAIN),
        ("n", (), Reason.NO_PREDICTED_GAIN),
        ("n", (1,), Reason.REWRITE),
        ("n", (64,), Reason.NO_PREDICTED_GAIN),
        ("n", (1, 64), Reason.NO_PREDICTED_GAIN),
        (1, (64,), Reason.REWRITE),  # the model's own goes before
    ],
)
def test_it_has_to_gain_at_every_batch_size(batch, asked, expected):
    assert reasons(network(SMALL_MAP, batch=batch), rule=GpuRule((90,), asked)) == [expected]


@pytest.mark.usefixtures("foretold")
def test_what_would_gain_elsewhere_is_said():
    (verdict,) = verdicts(network(SMALL_MAP), GpuRule((90,)))
    assert verdict.text == (
        "predicted 0.60x on sm_90 at batch 64 and 14x14 (60 us dense, 100 us sparse), less than the "
        f"{GpuRule((90,)).min_gain:.2f}x asked for; 2.00x at batch 1"
    )
    (verdict,) = verdicts(network(WIDE), GpuRule((90,)))
    assert verdict.text.endswith("asked for")


def test_batches_and_sizes_that_are_open_are_taken_small_and_large():
    found = predictions(network(NARROW, sizes=("h", 20)), GpuRule((90, 80)))
    assert {one.batch for one in found} == set(DEFAULT_BATCHES)
    assert {one.size for one in found} == {(56, 20), (14, 20)}
    assert {one.architecture for one in found} == {80, 90}
    assert len(found) == 8
    (known,) = predictions(network(NARROW, batch=3), GpuRule((90,)))
    assert (known.batch, known.size) == (3, (56, 56))
    assert known.gain == known.dense_us / known.sparse_us


def test_float16_is_foretold_as_float16():
    rule = GpuRule((90,), (64,))
    (single,), (half,) = predictions(network(NARROW), rule), predictions(network(NARROW, dtype=np.float16), rule)
    (will_be,) = predictions(network(NARROW), GpuRule((90,), (64,), to_half=True))
    assert will_be == half
    assert half.dense_us < single.dense_us


def test_the_kernel_that_is_foretold_to_be_faster_is_chosen():
    """On Hopper, the library's warpgroup kernel for what is wide; not for few channels in rows of an odd size."""
    wide, narrow = (512, 512, 3, 28, 0.9), (64, 64, 3, 57, 0.95)
    model = network(wide, narrow)
    for to_half in (False, True):
        found = verdicts(model, GpuRule((90,), (64,), to_half=to_half))
        assert [verdict.rewrite for verdict in found] == [True, True]
        assert ["us sparse, on warpgroups)" in verdict.text for verdict in found] == [True, False]
        others = verdicts(model, GpuRule((80,), (64,), to_half=to_half))
        assert not any("warpgroups" in verdict.text for verdict in others)


@pytest.mark.parametrize("batches", [(), (1,), (4,), (64,), (1, 256)])
def test_small_maps_and_few_images_run_on_warpgroups_too(batches):
    layer, shape = sparse_layer((512, 512, 3, 3), dtype=np.float16), (None, 512, 14, 14)
    assert choose_kernels(layer, shape, GpuRule((90,), batches)) == {90: CSR}


def test_a_kernel_that_gains_enough_everywhere_goes_before_one_that_gains_more(monkeypatch):
    def of(call, gains, runs_on):
        return Prediction(90, call.batch, call.size, 130, 130 / gains[call.batch], runs_on)

    monkeypatch.setattr(gpu_predictions, "_predict_generated", lambda call, _: of(call, {8: 1.3, 64: 1.3}, ""))
    rule = GpuRule((90,), (8, 64))
    monkeypatch.setattr(gpu_predictions, "_FIRST_BATCHES", ())
    for gains, runs_on in (({8: 1.1, 64: 4.0}, ""), ({8: 1.2, 64: 1.5}, "warpgroups")):
        monkeypatch.setattr(gpu_predictions, "_predict_library", lambda call, g=gains: of(call, g, "warpgroups"))
        found = predictions(network(NARROW), rule)
        assert [one.runs_on for one in found] == [runs_on] * 2


def test_kernels_are_chosen_for_each_architecture():
    wide, shape = sparse_layer((512, 512, 3, 3), dtype=np.float16), (None, 512, 28, 28)
    by_architecture = choose_kernels(wide, shape, GpuRule((75, 80, 90), (64,)))
    assert (by_architecture[75].kernel, by_architecture[80], by_architecture[90]) == ("generated", CSR, CSR)
    assert choose_kernels(wide, (64, *shape[1:]), GpuRule((90,), (1,))) == {90: CSR}  # the model's own batch size
    assert choose_kernels(wide, (None, 512, None, 28), GpuRule((90,), (64,))) == {90: CSR}
    assert choose_kernels(wide, shape, GpuRule((90,), (64, 4))) == {90: CSR}
    narrow = sparse_layer((64, 64, 3, 3), size=(57, 57), density=0.05, dtype=np.float16)
    chosen = choose_kernels(narrow, (64, 64, 57, 57), GpuRule((90,)))[90]
    assert (chosen.kernel, chosen.min_batch) == ("generated", 0)
    single = dataclasses.replace(wide, element_type=np.dtype(np.float32))
    assert choose_kernels(single, shape, GpuRule((90,), (64,))) == {90: CSR}
    no_code = sparse_layer((512, 512, 8, 8), density=0.9)
    assert choose_kernels(no_code, shape, GpuRule((90,), (64,), with_images=False)) == {}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_code_has_to_make_up_for_joining_what_hoppers_kernel_reads_apart(dtype):
    """Where its planes begin anywhere; code reads others apart, too."""
    rule = GpuRule((80, 90))
    read_apart, shape = sparse_layer((64, 64, 1, 1), size=(56, 56), dtype=dtype), (64, 64, 56, 56)
    assert choose_kernels(read_apart, shape, rule, is_joined=True) == choose_kernels(read_apart, shape, rule)
    layer, shape = sparse_layer((128, 128, 1, 1), size=(54, 57), dtype=dtype), (64, 128, 54, 57)
    alone, joined = choose_kernels(layer, shape, rule), choose_kernels(layer, shape, rule, is_joined=True)
    assert (alone[90].kernel, joined[90]) == ("generated", CSR)
    assert alone[80] == joined[80]
    # The input is read and written once.
    moved_us = 2e-6 * math.prod(shape) * layer.element_type.itemsize / MODEL.bandwidth_tb
    assert MODEL.joining_us(layer, 64) == pytest.approx(2.0 + moved_us)


def test_where_every_kernel_has_to_join_it_is_no_reason_to_choose_one():
    """Windows, and few images, which the CSR kernel runs."""
    for layer, shape in (
        (sparse_layer((64, 64, 3, 3), size=(56, 56), density=0.05, dtype=np.float16), (64, 64, 56, 56)),
        (sparse_layer((64, 64, 1, 1), size=(14, 14), density=0.005), (1, 64, 14, 14)),
    ):
        rule = GpuRule((90,))
        assert choose_kernels(layer, shape, rule) == choose_kernels(layer, shape, rule, is_joined=True)


@needs_nvrtc
def test_a_node_that_reads_several_inputs_gets_no_image_where_it_would_have_to_join_them():
    weight = tensor(pruned((64, 64, 1, 1)), "W")
    nodes = [helper.make_node("Concat", ["X", "X"], ["c"], axis=1), conv(source="c", pads=[0] * 4)]
    proto = model(nodes, [weight], [value("X", (64, 32, 54, 57))], [value("Y", [None] * 4)])
    converted, report = convert(proto, options=ConvertOptions(targets=("sm_90",), force=True))
    assert [n.op_type for n in converted.graph.node] == ["SparseConvConcat2"]
    assert "the library's own kernels were chosen" in report.model.layers[0].images[0].refusal


def test_a_layer_without_a_generated_kernel_may_run_on_warpgroups(monkeypatch):
    monkeypatch.setattr(gpu_predictions, "choose_plan", lambda *_: Refusal("too long"))
    found = predictions(network((512, 512, 3, 28, 0.9)), GpuRule((90,), (64,), to_half=True))
    assert [one.runs_on for one in found] == ["warpgroups"]
    assert isinstance(predictions(network((512, 512, 8, 28, 0.9)), GpuRule((90,), (64,))), Refusal)


WIDE_HALF = (256, 64, 3, 56, 0.9)


@needs_nvrtc
@pytest.mark.parametrize("asked", [{}, {"force": True}, {"min_sparsity": 0.5}])
def test_no_image_is_made_where_the_library_has_the_faster_kernel(asked):
    options = ConvertOptions(targets=("sm_90",), precision="fp16", **asked)
    converted, report = convert(network(WIDE_HALF, batch=64), options=options)
    (layer,) = report.model.layers
    assert layer.verdict.rewrite
    assert "the library's own kernels were chosen" in layer.images[0].refusal
    # Nor where it is converted again.
    _, report = convert(converted, options=ConvertOptions(targets=("sm_90",)))
    assert "the library's own kernels were chosen" in report.model.layers[0].images[0].refusal


@needs_nvrtc
def test_a_kernel_that_was_chosen_for_one_architecture_leaves_the_others_to_the_rule():
    kernels = {"sm_80": KernelChoice("csr")}
    decision = LayerDecision("conv0", "", 0, Choice.SPARSE, Choice.SPARSE, Cause.MEASURED, "timed", kernels=kernels)
    decisions = Decisions("model", {}, (), (decision,))
    model = network(WIDE_HALF, batch=64, dtype=np.float16)
    options = ConvertOptions(targets=("sm_90", "sm_80"), decisions=decisions)
    _, report = convert(model, options=options)
    assert [image.size_bytes for image in report.model.layers[0].images] == [0, 0]


@needs_nvrtc
def test_a_layer_that_stays_float_gets_its_image():
    """The rule took it for float16, in which the library has the faster kernel."""
    layer = (64, 64, 3, 7, 0.9)
    model = network(layer, layer, batch=64)
    options = ConvertOptions(targets=("sm_90",), precision="fp16", keep_float=("conv0",))
    _, report = convert(model, options=options)
    assert [layer.images[0].size_bytes > 0 for layer in report.model.layers] == [True, False]


@pytest.mark.usefixtures("foretold")
def test_every_architecture_has_to_gain(monkeypatch):
    model = network(NARROW)
    assert reasons(model, rule=GpuRule((90, 80))) == [Reason.REWRITE]
    real = gpu_predictions.choose_plan
    monkeypatch.setattr(gpu_predictions, "choose_plan", lambda la, a: Refusal("too old") if a == 80 else real(la, a))
    (verdict,) = verdicts(model, GpuRule((90, 80)))
    assert verdict.reason is Reason.NO_PREDICTED_GAIN
    assert "no GPU kernel can be made for sm_80: too old" in verdict.text


def test_a_layer_without_a_generated_kernel_stays_dense():
    same = network(NARROW, sizes=("h", "w"), auto_pad="SAME_UPPER", strides=[2, 2])
    (verdict,) = verdicts(same, GpuRule((90,)))
    assert verdict.reason is Reason.NO_PREDICTED_GAIN
    assert "padding is only known at run time" in verdict.text


def test_one_and_three_dimensions_are_foretold_too():
    for rank, size in ((1, 400), (3, 8)):
        weight = np.random.default_rng(0).standard_normal((64, 64, *(1,) * rank)).astype(np.float32)
        weight[np.random.default_rng(1).random(weight.shape) < 0.9] = 0
        inputs = [helper.make_tensor_value_info("x", 1, [4, 64, *(size,) * rank])]
        outputs = [helper.make_tensor_value_info("y", 1, [None] * (rank + 2))]
        node = helper.make_node("Conv", ["x", "w"], ["y"], "conv")
        graph = helper.make_graph([node], "g", inputs, outputs, [numpy_helper.from_array(weight, "w")])
        model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
        (found,) = predictions(model, GpuRule((90,)))
        assert found.size == (size,) * rank
        assert found.dense_us > 0 < found.sparse_us


@pytest.mark.usefixtures("foretold")
@pytest.mark.parametrize("options", [{"force": True}, {"min_sparsity": 0.5}])
def test_threshold_and_force_overrule_it(options):
    assert reasons(network(WIDE), **options) == [Reason.REWRITE]
    notes = make_plan(load(network(WIDE)), DecisionOptions(**options), GpuRule((90,))).report.notes
    assert not any("predicted" in note for note in notes)


@pytest.mark.usefixtures("foretold")
def test_decisions_overrule_it_for_the_layers_that_they_name():
    decision = LayerDecision("conv0", "", 0, Choice.SPARSE, Choice.SPARSE, Cause.MEASURED, "timed")
    decisions = Decisions("model", {}, (), (decision,))
    found = reasons(network(WIDE, WIDE), decisions=decisions)
    assert found == [Reason.DECIDED_SPARSE, Reason.NO_PREDICTED_GAIN]


@pytest.mark.usefixtures("foretold")
def test_the_notes_say_what_was_assumed():
    def notes(model, rule):
        return [
            n
            for n in make_plan(load(model), DecisionOptions(), rule).report.notes
            if "predicted times" in n or "are predicted" in n
        ]

    (note,) = notes(network(NARROW), GpuRule((90,)))
    assert "at batch 1 and 64" in note
    assert "--batch" in note
    (note,) = notes(network(NARROW), GpuRule((90,), (8,)))
    assert "at batch 8, not measured;" in note
    (note,) = notes(network(NARROW, batch=4), GpuRule((90,)))
    assert "batch" not in note
    _, note = notes(network(NARROW), GpuRule((90, 80, 75)))
    assert "no layer was measured on sm_80, sm_75" in note
    assert not notes(network((*NARROW[:4], 0.1)), GpuRule((90,)))


def test_bad_input_is_a_usage_error():
    with pytest.raises(UsageError, match="at least 1, got 0"):
        GpuRule((90,), (0,))
    with pytest.raises(UsageError, match="architecture"):
        GpuRule(())
    with pytest.raises(UsageError, match="need a target"):
        ConvertOptions(batches=(1,))


@needs_nvrtc
@pytest.mark.usefixtures("foretold")
def test_convert_asks_it_where_there_is_a_target():
    model = network(WIDE)
    _, report = convert(model, options=ConvertOptions(dry_run=True))
    assert report.model.layers[0].verdict.reason is Reason.REWRITE
    _, report = convert(model, options=ConvertOptions(dry_run=True, targets=("sm_90",)))
    assert report.model.layers[0].verdict.reason is Reason.NO_PREDICTED_GAIN
    small_map = network(SMALL_MAP)
    for batches, expected in (((1,), Reason.REWRITE), ((64,), Reason.NO_PREDICTED_GAIN)):
        options = ConvertOptions(dry_run=True, targets=("sm_90",), batches=batches)
        assert convert(small_map, options=options)[1].model.layers[0].verdict.reason is expected


@needs_nvrtc
@pytest.mark.usefixtures("foretold")
def test_convert_asks_it_for_the_precision_that_it_makes():
    fast_in_float_only = network(SMALL_MAP, batch=1)
    options = ConvertOptions(dry_run=True, targets=("sm_90",))
    assert convert(fast_in_float_only, options=options)[1].model.layers[0].verdict.rewrite
    half = ConvertOptions(dry_run=True, targets=("sm_90",), precision="fp16")
    assert not convert(fast_in_float_only, options=half)[1].model.layers[0].verdict.rewrite


@pytest.mark.parametrize(
    ("batch", "in_network", "saved", "rewritten"),
    [
        (4, False, lambda _: 10.5, [True, True]),  # 10 microseconds are enough where there are several images
        (4, False, lambda _: 9.5, [False, False]),
        # With one, changes count twice, and the second layer has its input changed as well.
        (1, False, lambda change: 4 * change - 0.5, [True, False]),
        (1, False, lambda change: 4 * change + 0.5, [True, True]),
        # So it has where the dense layer was not charged with it.
        (8, True, lambda change: 2 * change - 0.5, [True, False]),
        (8, True, lambda change: 2 * change + 0.5, [True, True]),
    ],
)
def test_changes_of_layout_have_to_be_paid_for(monkeypatch, batch, in_network, saved, rewritten):
    change = MODEL.dense_launch_us + MODEL.transpose_us((batch, 64, 56, 56), 4)  # of an input or output
    saved_us = saved(change)
    assert saved_us > 10.0 or not any(rewritten)

    def predict_one(call, _):
        times = (10 * saved_us / 9, saved_us / 9)
        return Prediction(call.architecture, call.batch, call.size, *times, is_in_network=in_network)

    monkeypatch.setattr(gpu_predictions, "_predict_generated", predict_one)
    monkeypatch.setattr(gpu_network.Together, "is_enough", lambda *_: False)
    proto = network(NARROW, batch=batch)
    second = helper.make_node("Conv", ["y0", "w0"], ["z"], "second", pads=[1] * 4)
    proto.graph.node.append(second)
    proto.graph.output[0].name = "z"
    plan = make_plan(load(proto), DecisionOptions(), GpuRule((90,)))
    verdicts = [layer.verdict for layer in plan.report.layers]
    assert [v.rewrite for v in verdicts] == rewritten
    if batch == 1 and not all(rewritten):
        assert f"less than {4 * change:.0f} us saved" in verdicts[1].text


def chain(*layers, batch=1):
    """Layers of as many channels, one behind the other."""
    proto = network(*layers, batch=batch)
    for before, node in zip(proto.graph.node, proto.graph.node[1:], strict=False):
        node.input[0] = before.output[0]
    del proto.graph.input[1:]
    del proto.graph.output[:-1]
    return proto


@pytest.fixture
def times(monkeypatch):
    """Sets what layers take dense and sparse, by their zeros and the batch size, by the library's kernel alone."""
    found = {}

    def predict(call):
        zeros = round(1 - np.count_nonzero(call.layer.used_weights) / call.layer.weight.size, 1)
        times = found[zeros][call.batch]
        is_known = call.is_in_network
        runs_on = found.get("runs on", "the CSR kernel")
        return Prediction(call.architecture, call.batch, call.size, *times, runs_on, is_in_network=is_known)

    monkeypatch.setattr(gpu_predictions, "choose_plan", lambda *_: Refusal("too long"))
    monkeypatch.setattr(gpu_predictions, "_predict_library", predict)
    return found


THIN = (64, 64, 3, 14)


def test_with_few_images_layers_are_decided_together(times):
    times[0.9] = {1: (12.0, 9.0)}
    times[0.8] = {1: (12.0, 13.0)}
    found = verdicts(chain((*THIN, 0.9), (*THIN, 0.9), (*THIN, 0.8)), GpuRule((90,)))
    # The last one would have to have layouts changed if it stayed dense.
    assert [verdict.rewrite for verdict in found] == [True, True, True]
    assert "; predicted 0.92x on sm_90 at batch 1 and 14x14 (12 us dense, 13 us sparse, on the" in found[2].text
    assert found[2].text.endswith(", and to gain with the others")
    assert "3 layers together predicted 1.16x on sm_90 at batch 1 (36 us dense, 31 us sparse)" in notes_of(
        chain((*THIN, 0.9), (*THIN, 0.9), (*THIN, 0.8)), GpuRule((90,))
    )
    times[0.8] = {1: (12.0, 40.0)}
    found = verdicts(chain((*THIN, 0.9), (*THIN, 0.9), (*THIN, 0.8)), GpuRule((90,)))
    assert [verdict.rewrite for verdict in found] == [False, False, False]
    times[0.9] = {1: (22.0, 9.0)}
    found = verdicts(chain(*[(*THIN, 0.9)] * 3, (*THIN, 0.8)), GpuRule((90,)))
    assert [verdict.rewrite for verdict in found] == [True, True, True, False]
    assert found[3].reason is Reason.NO_PREDICTED_GAIN
    assert found[3].text.startswith("predicted 0.30x on sm_90 at batch 1")


@pytest.mark.parametrize(("batch", "sparse_us"), [(1, 30 - 3 * 1600 / MODEL.library_mhz), (8, 30)])
def test_with_few_images_launches_on_warpgroups_begin_early_behind_each_other(times, batch, sparse_us):
    times |= {0.9: {batch: (20.0, 10.0)}, "runs on": "warpgroups"}
    together = f"(60 us dense, {sparse_us:.0f} us sparse)"
    assert any(together in note for note in notes_of(chain(*[(*THIN, 0.9)] * 3, batch=batch), GpuRule((90,))))


@pytest.mark.parametrize("count", [9, 10])
def test_many_layers_together_need_not_gain_by_as_much_as_a_few(times, count):
    times[0.9] = {8: (23.0, 20.0)}
    found = verdicts(chain(*[(*THIN, 0.9)] * count, batch=8), GpuRule((90,)))
    assert {verdict.rewrite for verdict in found} == {count == 10}
    times[0.9] = {8: (21.8, 20.0)}
    assert not any(v.rewrite for v in verdicts(chain(*[(*THIN, 0.9)] * count, batch=8), GpuRule((90,))))
    # Who asks for less gets it.
    lenient = GpuRule((90,), min_gain=1.05)
    assert all(v.rewrite for v in verdicts(chain(*[(*THIN, 0.9)] * count, batch=8), lenient))


def test_what_is_decided_together_has_to_gain_with_many_images_too(times):
    times[0.9] = {1: (12.0, 9.0), 64: (100.0, 50.0)}
    times[0.8] = {1: (12.0, 9.0), 64: (100.0, 300.0)}
    layers = [(*THIN, 0.9)] * 6
    assert all(verdict.rewrite for verdict in verdicts(chain(*layers, batch="n"), GpuRule((90,))))
    # One that loses much more with many images than a change of layout costs with one.
    found = verdicts(chain(*layers, (*THIN, 0.8), batch="n"), GpuRule((90,)))
    assert [verdict.rewrite for verdict in found] == [True] * 6 + [False]
    times[0.8][64] = (100.0, 105.0)
    found = verdicts(chain(*layers, (*THIN, 0.8), batch="n"), GpuRule((90,)))
    assert all(verdict.rewrite for verdict in found)


def test_a_network_that_gains_with_many_images_alone_stays_dense_and_says_so(times):
    times[0.9] = {1: (12.0, 9.0), 64: (100.0, 50.0)}
    times[0.8] = {1: (12.0, 9.0), 64: (100.0, 300.0)}
    model = chain(*[(*THIN, 0.9)] * 6, *[(*THIN, 0.8)] * 3, batch="n")
    assert not any(verdict.rewrite for verdict in verdicts(model, GpuRule((90,))))
    (note,) = (note for note in notes_of(model, GpuRule((90,))) if "alone" in note)
    assert note.startswith("the network does not gain enough at every batch size: 6 layers together predicted 0.9")
    assert "; with --batch 1 alone, 9 layers together predicted 1.33x" in note
    assert "; with --batch 64 alone, 6 layers together predicted 1.4" in note
    found = verdicts(model, GpuRule((90,), (64,)))
    assert [verdict.rewrite for verdict in found] == [True] * 6 + [False] * 3


def test_layers_of_known_and_of_open_sizes_are_decided_together(times):
    times[0.9] = {1: (12.0, 9.0)}
    model = chain((*THIN, 0.9), (*THIN, 0.9))
    model.graph.input[0].type.tensor_type.shape.dim[3].ClearField("dim_value")
    shape = model.graph.node[1].input[0]
    model.graph.value_info.append(helper.make_tensor_value_info(shape, 1, [1, 64, 14, 14]))
    found = verdicts(model, GpuRule((90, 80)))
    assert all("gain with the others" in verdict.text for verdict in found)
    assert any("2 layers together predicted 1.33x on sm_" in note for note in notes_of(model, GpuRule((90, 80))))


def test_a_dense_layer_among_others_keeps_half_of_what_changes_of_layout_cost_it(times, monkeypatch):
    times[0.9] = {1: (12.0, 9.9)}
    model, rule = chain((*THIN, 0.9), (*THIN, 0.9)), GpuRule((90,))
    assert all(verdict.rewrite for verdict in verdicts(model, rule))
    other = gpu_predictions._predict_library
    layout_us = gpu_predictions.MODEL.layout_us
    monkeypatch.setattr(
        gpu_predictions, "_predict_library", lambda call: dataclasses.replace(other(call), layout_us=layout_us)
    )
    assert not any(verdict.rewrite for verdict in verdicts(model, rule))


def test_generated_code_runs_from_so_many_images_on(monkeypatch):
    """Where the library's kernel is foretold to be faster with few."""
    layer, shape = sparse_layer((64, 64, 3, 3), size=(56, 56), density=0.1), (None, 64, 56, 56)
    library_us = {1: 5.0, 2: 8.0, 3: 50.0, 4: 80.0}

    def by_library(call):
        us = library_us.get(call.batch)
        return None if us is None else Prediction(90, call.batch, call.size, 100.0, us, "the CSR kernel")

    monkeypatch.setattr(gpu_predictions, "_predict_library", by_library)
    monkeypatch.setattr(
        gpu_predictions, "_predict_generated", lambda c, _: Prediction(90, c.batch, c.size, 100.0, 20.0)
    )
    chosen = choose_kernels(layer, shape, GpuRule((90,)))[90]
    assert (chosen.kernel, chosen.min_batch) == ("generated", 3)
    # Nothing is asked with fewer images.
    assert choose_kernels(layer, (8, *shape[1:]), GpuRule((90,)))[90].min_batch == 0
    # The library's is always the faster one, or never.
    assert choose_kernels(layer, shape, GpuRule((90,), (1,))) == {90: CSR}
    library_us.update(dict.fromkeys(library_us, 90.0))
    assert choose_kernels(layer, shape, GpuRule((90,)))[90].min_batch == 0


def with_depthwise_amid(*, batch=64):
    """A depthwise convolution without zeros between two sparse ones."""
    proto = chain((*THIN, 0.9), (*THIN, 0.0), (*THIN, 0.9), batch=batch)
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((64, 1, 3, 3), np.float32), "w1"))
    proto.graph.node[1].attribute.append(helper.make_attribute("group", 64))
    proto.graph.node.append(helper.make_node("Flatten", [proto.graph.output[0].name], ["last"]))
    proto.graph.output[0].name = "last"
    return proto


def test_what_has_few_zeros_becomes_sparse_with_others(times):
    times[0.9] = times[0.0] = {64: (100.0, 50.0)}
    found = verdicts(with_depthwise_amid(), GpuRule((90,)))
    assert [verdict.rewrite for verdict in found] == [True, True, True]
    assert found[1].text.startswith("it is depthwise: ")
    found = verdicts(with_depthwise_amid(), GpuRule((90,), to_half=True))
    assert [verdict.rewrite for verdict in found] == [True, True, True]
    # The layers around it alone decide whether anything becomes sparse.
    times[0.9] = {64: (100.0, 400.0)}
    times[0.0] = {64: (1000.0, 1.0)}
    model = with_depthwise_amid()
    for index in (0, 2):
        dense = np.ones((64, 64, 3, 3), np.float32)
        model.graph.initializer[index].CopyFrom(numpy_helper.from_array(dense, f"w{index}"))
    found = verdicts(model, GpuRule((90,)))
    assert [verdict.reason for verdict in found] == [Reason.TOO_DENSE, Reason.DEPTHWISE, Reason.TOO_DENSE]


@pytest.mark.parametrize(("layers", "text"), [({4}, "1 layer predicted 2.00x"), ({4, 5}, "2 layers together ")])
def test_what_layers_gain_is_said_by_how_many_they_are(layers, text):
    gain = gpu_network.NetworkGain(90, 8, 20.0, 10.0)
    assert str(gpu_network.Together(frozenset(layers), (gain,))).startswith(text)


def test_what_can_be_taken_along_with_one_image_alone_is_advised_so(times):
    times[0.9] = times[0.0] = {1: (20.0, 15.0), 64: (100.0, 300.0)}
    model, rule = with_depthwise_amid(batch="n"), GpuRule((90,), to_half=True)
    (note,) = (note for note in notes_of(model, rule) if "alone" in note)
    assert "; with --batch 1 alone, 3 layers together predicted 1.33x" in note
    assert sum(verdict.rewrite for verdict in verdicts(model, GpuRule((90,), (1,), to_half=True))) == 3


def test_what_is_not_amid_convolutions_is_not_taken_along(times):
    times[0.9] = times[0.0] = {64: (100.0, 50.0)}
    proto = with_depthwise_amid()
    proto.graph.node.insert(1, helper.make_node("Transpose", ["y0"], ["turned"], perm=[0, 1, 2, 3]))
    proto.graph.node[2].input[0] = "turned"
    found = verdicts(proto, GpuRule((90,)))
    assert found[1].reason is Reason.DEPTHWISE


def test_a_network_without_a_sparse_layer_stays_as_it_is():
    assert reasons(chain(*[(64, 64, 3, 56, 0.1)] * 3)) == [Reason.TOO_DENSE] * 3


def amid_others(batch=64):
    """Three layers, with biases and activations, and what ends a network."""
    proto = chain((64, 64, 3, 28, 0.9), (64, 64, 3, 28, 0.9), (64, 64, 1, 28, 0.9), batch=batch)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(64, np.float32), "bias"))
    nodes = []
    for index, node in enumerate(proto.graph.node):
        nodes.append(node)
        if index != 1:
            node.input.append("bias")
            node.output[0] = f"before{index}"
            nodes.append(helper.make_node("Relu", [f"before{index}"], [f"y{index}"]))
    nodes.append(helper.make_node("Flatten", ["y2"], ["flat"]))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.output[0].name = "flat"
    return proto


def sites_of(proto):
    return make_plan(load(proto), DecisionOptions()).sites


@pytest.mark.parametrize("to_half", [False, True])
def test_layers_amid_others_are_foretold_as_inside_a_network(monkeypatch, to_half):
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda _: None)
    model = gpu_predictions.MODEL
    network_model = gpu_predictions.HALF_NETWORK if to_half else gpu_predictions.NETWORK
    sites = sites_of(amid_others())
    for index, (has_bias, has_activation) in enumerate([(True, True), (False, False), (True, True)]):
        (found,) = predict(sites[index], GpuRule((90,), to_half=to_half))
        layer = sparse_layer_of(sites[index], np.float16 if to_half else np.float32)
        assert found.is_in_network
        assert found.layout_us == 0
        assert found.dense_us == network_model.dense_layer_us(
            layer, 64, has_bias=has_bias, has_activation=has_activation
        )
        plan = gpu_predictions.choose_plan(layer, 90)
        assert found.sparse_us == network_model.code_layer_us(layer, plan, 64, model.clock_mhz)


@pytest.mark.parametrize("batch", [4, 8, gpu_predictions.NETWORK_IMAGES])
def test_short_dense_layers_inside_a_network_take_what_they_take_by_themselves(batch):
    site = sites_of(amid_others(batch=batch))[0]
    (found,), (alone,) = predict(site, GpuRule((90,))), predict(site, GpuRule((90,)), by_itself=True)
    in_network = gpu_predictions.NETWORK.dense_layer_us(
        sparse_layer_of(site), batch, has_bias=True, has_activation=True
    )
    assert in_network < alone.dense_us - alone.layout_us
    is_short = batch < gpu_predictions.NETWORK_IMAGES
    assert found.dense_us == (alone.dense_us - alone.layout_us if is_short else in_network)


@pytest.mark.parametrize("activation", ["Relu", "Clip"])
def test_dense_layers_of_halves_inside_a_network_take_what_halves_do(activation):
    proto = amid_others(batch=8)
    for node in proto.graph.node:
        if node.op_type == "Relu":
            node.op_type = activation
    site = sites_of(proto)[0]
    (found,) = predict(site, GpuRule((90,), to_half=True))
    passes = {"has_bias": True, "has_activation": True, "is_slow": activation == "Clip"}
    layer = sparse_layer_of(site, np.float16)
    assert found.dense_us == gpu_predictions.HALF_NETWORK.dense_layer_us(layer, 8, **passes)


def sparse_layer_of(site, dtype=np.float32):
    kernel = site.weight.values.shape[2]
    return make_layer(
        site.weight.values.astype(dtype),
        strides=(1, 1),
        dilations=(1, 1),
        pads=(kernel // 2,) * 4,
        group=1,
        element_type=np.dtype(dtype),
        activation=0,
        in_size=site.input_shape[2:],
    )


@pytest.mark.parametrize(("batch", "to_half", "by_itself"), [(1, False, False), (1, True, False), (64, False, True)])
def test_all_others_are_foretold_by_themselves(monkeypatch, batch, to_half, by_itself):
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda _: None)
    site = sites_of(amid_others(batch=batch))[0]
    (found,) = predict(site, GpuRule((90,), to_half=to_half), by_itself=by_itself)
    layer = sparse_layer_of(site, np.float16 if to_half else np.float32)
    dense_us, sparse_us = gpu_predictions.MODEL.layer_us(layer, gpu_predictions.choose_plan(layer, 90), batch)
    assert not found.is_in_network
    assert found.layout_us == gpu_predictions.MODEL.layout_us
    assert found.dense_us == dense_us
    # With few images, code has left the caches that are near.
    assert found.sparse_us == sparse_us * (gpu_predictions.COLD_CODE if batch == 1 else 1)


def test_what_is_foretold_below_the_first_batch_of_code_is_the_librarys(monkeypatch):
    """Of sizes that are open, code runs from the greater of both batches on."""

    def by_library(call):
        slower_from = {14: 4, 56: 2}[call.size[0]]
        return Prediction(90, call.batch, call.size, 100, 5 if call.batch < slower_from else 500, "the CSR kernel")

    monkeypatch.setattr(gpu_predictions, "_predict_library", by_library)
    monkeypatch.setattr(gpu_predictions, "_predict_generated", lambda c, _: Prediction(90, c.batch, c.size, 100, 20))
    layer = sparse_layer((64, 64, 3, 3), density=0.1)
    chosen = choose_kernels(layer, (None, 64, None, None), GpuRule((90,), (1, 2, 64)))[90]
    assert (chosen.kernel, chosen.min_batch) == ("generated", 4)
    found = predictions(network(NARROW, sizes=("h", "w")), GpuRule((90,), (1, 2, 64)))
    assert {(one.size[0], one.batch): one.sparse_us for one in found} == {
        (56, 1): 5.0,
        (56, 2): 500.0,  # slower than the code, which does not run yet
        (56, 64): 20.0,
        (14, 1): 5.0,
        (14, 2): 5.0,
        (14, 64): 20.0,
    }
    # Where nothing is known of the library's kernel at one of the sizes, code runs always.
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda c: by_library(c) if c.size[0] == 14 else None)
    assert choose_kernels(layer, (None, 64, None, None), GpuRule((90,), (1, 2, 64)))[90].min_batch == 0


def test_with_many_images_a_network_has_to_gain_as_much_as_is_asked_for(times):
    times[0.9] = {64: (13.0, 10.0)}  # too little to be saved by one
    model = chain((*THIN, 0.9), (*THIN, 0.9), batch=64)
    assert all(verdict.rewrite for verdict in verdicts(model, GpuRule((90,), min_gain=1.25)))
    assert not any(verdict.rewrite for verdict in verdicts(model, GpuRule((90,), min_gain=1.35)))


def test_dense_layers_alone_do_not_become_sparse(times):
    """Where the one that is sparse enough had better stay dense."""
    times[0.9] = {1: (20.0, 90.0)}
    times[0.4] = {1: (20.0, 5.0)}
    model = chain((*THIN, 0.4), (*THIN, 0.4), (*THIN, 0.9))
    assert not any(verdict.rewrite for verdict in verdicts(model, GpuRule((90,))))
    times[0.9] = {1: (20.0, 21.0)}
    found = verdicts(model, GpuRule((90,)))
    assert all(verdict.rewrite for verdict in found)
    assert "% of its weights are zero, below the " in found[0].text
    assert "; taken along: predicted 4.00x" in found[0].text
    # Also one without zeros among its weights, but for a large one.
    times[0.0] = {1: (20.0, 5.0)}
    assert all(verdict.rewrite for verdict in verdicts(chain((*THIN, 0.0), (*THIN, 0.9)), GpuRule((90,))))
    large = (512, 512, 3, 14, 0.0)
    assert verdicts(chain(large, (512, *THIN[1:], 0.9)), GpuRule((90,)))[0].reason is Reason.TOO_DENSE


def test_half_of_the_weights_zero_is_enough_where_it_gains(times):
    """On CPUs it takes 75% on so small maps."""
    model = chain((512, 512, 3, 14, 0.52))
    (on_cpu,) = make_plan(load(model), DecisionOptions()).report.layers
    assert on_cpu.verdict.reason is Reason.TOO_DENSE
    times[0.5] = {1: (20.0, 5.0)}
    (found,) = verdicts(model, GpuRule((90,)))
    assert found.reason is Reason.REWRITE
    assert found.text.startswith("52.0% of its weights are zero; predicted 4.00x")
    times[0.5] = {1: (20.0, 21.0)}
    assert reasons(model) == [Reason.NO_PREDICTED_GAIN]


def test_layers_with_few_zeros_get_no_code_where_a_kernel_of_the_library_is_known(monkeypatch):
    shape = (64, 64, 56, 56)
    monkeypatch.setattr(gpu_predictions, "_generated_way", lambda *_: gpu_predictions._Way("code", []))
    monkeypatch.setattr(gpu_predictions._Way, "rank", lambda self, _: self.choice == "code")
    for density, expected in ((0.45, "code"), (0.55, CSR)):
        layer = sparse_layer((64, 64, 3, 3), size=shape[2:], density=density)
        assert choose_kernels(layer, shape, GpuRule((90,))) == {90: expected}
        assert choose_kernels(layer, shape, GpuRule((80,))) == {80: expected}
        assert choose_kernels(layer, shape, GpuRule((75,))) == {75: "code"}


def test_no_batch_size_is_advised_where_the_model_has_its_own(times):
    times[0.9] = {1: (12.0, 9.0), 64: (100.0, 200.0)}
    model = chain(*[(*THIN, 0.9)] * 3, batch=1)
    model.graph.node.insert(2, helper.make_node("Expand", ["y1", "shape"], ["wide"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([64, 64, 14, 14]), "shape"))
    model.graph.node[3].input[0] = "wide"
    assert not any("alone" in note for note in notes_of(model, GpuRule((90,))))
