"""Decisions: thresholds, force, and every reason."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, DecisionOptions, convert, inspect
from onnx_sparseconv.converter.decide import (
    MIN_SPARSITY,
    MIN_SPARSITY_SMALL_MAP,
    MIN_WEIGHTS,
    MIN_WEIGHTS_A_CHANNEL,
)
from onnx_sparseconv.converter.decisions import Cause, Choice, Decisions, LayerDecision
from onnx_sparseconv.converter.report import NOT_FORCIBLE, Reason
from onnx_sparseconv.errors import UsageError
from tests.support.odd_models import FEEDS, LOCAL, call, conv, function, model, pruned, tensor, value

FORCE = ConvertOptions(force=True)


def one_conv(weight, sizes=(6, 6), **attributes):
    channels = weight.shape[1] * attributes.get("group", 1)
    return model([conv(**attributes)], [tensor(weight, "W")], [value("X", (2, channels, *sizes))])


def reason(proto, **options):
    (layer,) = inspect(proto, DecisionOptions(**options)).layers
    return layer.verdict.reason


@pytest.mark.parametrize("percent", range(0, 101, 5))
def test_a_layer_of_exactly_the_threshold_is_rewritten(percent):
    """Whatever the rounding: 20% zeros are not below 20%."""
    weight = pruned((20, 50, 1, 1), percent / 100)
    assert np.count_nonzero(weight == 0) == 10 * percent
    assert reason(one_conv(weight), min_sparsity=percent / 100) is Reason.REWRITE
    if percent < 100:
        assert reason(one_conv(weight), min_sparsity=(percent + 0.1) / 100) is Reason.TOO_DENSE


@pytest.mark.parametrize(
    ("sizes", "threshold"),
    [
        ((6, 6), MIN_SPARSITY_SMALL_MAP),  # padded by 1 on all sides: 8 x 8 outputs
        ((6, 7), MIN_SPARSITY),
        ((56, 56), MIN_SPARSITY),
        (("h", 56), MIN_SPARSITY_SMALL_MAP),
    ],
)
def test_the_default_threshold_depends_on_the_output_map(sizes, threshold):
    below, at = (pruned((10, 100, 1, 1), threshold + d) for d in (-0.001, 0))
    assert reason(one_conv(below, sizes)) is Reason.TOO_DENSE
    assert reason(one_conv(at, sizes)) is Reason.REWRITE
    assert reason(one_conv(below, sizes), min_sparsity=0.0) is Reason.REWRITE


def test_the_text_holds_the_figures():
    (layer,) = inspect(one_conv(pruned((10, 100, 1, 1), 0.5))).layers
    assert "50.0%" in layer.verdict.text
    assert "75.0%" in layer.verdict.text


def test_small_layers():
    assert reason(one_conv(pruned((1, MIN_WEIGHTS - 1, 1, 1)))) is Reason.TOO_SMALL
    assert reason(one_conv(pruned((1, MIN_WEIGHTS, 1, 1)))) is Reason.REWRITE
    assert reason(one_conv(pruned((64, MIN_WEIGHTS_A_CHANNEL - 1, 1, 1)))) is Reason.TOO_SMALL
    assert reason(one_conv(pruned((64, MIN_WEIGHTS_A_CHANNEL, 1, 1)))) is Reason.REWRITE


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_threshold_out_of_range_is_a_usage_error(wrong):
    with pytest.raises(UsageError, match="between 0 and 1"):
        ConvertOptions(min_sparsity=wrong)


@pytest.mark.parametrize("name", FEEDS)
def test_force_overrules_what_can_be_overruled(name):
    feed = FEEDS[name]
    before = {layer.verdict.reason for layer in inspect(feed.build()).layers}
    after = {layer.verdict.reason for layer in inspect(feed.build(), FORCE).layers}
    expected = {r if r is Reason.REWRITE or r in NOT_FORCIBLE else Reason.FORCED for r in before}
    assert after == expected


def test_a_forced_verdict_says_what_spoke_against_it():
    (layer,) = inspect(one_conv(pruned(sparsity=0.5)), FORCE).layers
    assert layer.verdict.text.startswith("forced, though 50.0%")


def quantised(op):
    scalar = [tensor(0.1, "s", np.float32), tensor(0, "z", np.uint8)]
    weight = tensor(np.ones((8, 16, 3, 3)), "W", np.uint8)
    inputs = {"QLinearConv": ["X", "s", "z", "W", "s", "z", "s", "z"], "ConvInteger": ["X", "W"]}[op]
    out = {"QLinearConv": TensorProto.UINT8, "ConvInteger": TensorProto.INT32}[op]
    node = helper.make_node(op, inputs, ["Y"], name="q")
    io = [value("X", (1, 16, 6, 6), TensorProto.UINT8)], [value("Y", list("abcd"), out)]
    return model([node], [weight, *scalar], *io)


def fused():
    node = helper.make_node("FusedConv", ["X", "W"], ["Y"], name="fused", domain="com.microsoft", activation="Relu")
    proto = model([node], [tensor(pruned(), "W")])
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return proto


def old_with_functions():
    """Opset 8 cannot be raised here: onnx.version_converter would drop the function."""
    body = function("f", ["x"], [helper.make_node("Relu", ["x"], ["y"])], opset=8)
    return model([conv(out="c"), call("f", ["c"])], [tensor(pruned(), "W")], opset=8, functions=[body])


REASONS = {
    Reason.REWRITE: FEEDS["initializer"].build,
    Reason.TOO_DENSE: lambda: one_conv(pruned(sparsity=0.3)),
    Reason.DEPTHWISE: lambda: one_conv(pruned((128, 1, 3, 3)), group=128),
    Reason.TOO_SMALL: lambda: one_conv(pruned((2, 2, 3, 3))),
    Reason.RUNTIME_WEIGHT: FEEDS["runtime-input"].build,
    Reason.OVERRIDABLE_WEIGHT: FEEDS["input-ir8"].build,
    Reason.NOT_FINITE: lambda: one_conv(np.where(pruned() > 0, np.inf, pruned()).astype(np.float32)),
    Reason.QUANTISED: FEEDS["dequantised"].build,
    Reason.UNSUPPORTED_TYPE: FEEDS["double"].build,
    Reason.UNSUPPORTED_FORM: fused,
    Reason.UNSUPPORTED_OPSET: old_with_functions,
    Reason.INVALID: lambda: one_conv(pruned(), strides=[1]),
    Reason.ALREADY_SPARSE: lambda: convert(FEEDS["initializer"].build())[0],
    Reason.FORCED: FEEDS["input-ir8"].build,
    Reason.DECIDED_SPARSE: FEEDS["input-ir8"].build,
    Reason.DECIDED_DENSE: FEEDS["initializer"].build,
}
# Those that take a network, or a GPU to decide for: see test_network.py and test_gpu_rule.py.
ELSEWHERE = {Reason.BESIDE_DEPTHWISE, Reason.LITTLE_WORK, Reason.NO_PREDICTED_GAIN}
SPARSE_REASONS = (Reason.REWRITE, Reason.FORCED, Reason.DECIDED_SPARSE)


def decided(proto, choice):
    """Decisions that give every layer of a model the same choice."""
    layers = inspect(proto).layers
    return Decisions(
        model="",
        setting={},
        input_shapes=(),
        layers=tuple(LayerDecision(la.name, la.graph, 0, choice, choice, Cause.MEASURED, "measured") for la in layers),
    )


def options_for(reason, proto):
    """The options that lead to a reason."""
    choices = {Reason.DECIDED_SPARSE: Choice.SPARSE, Reason.DECIDED_DENSE: Choice.DENSE}
    decisions = decided(proto, choices[reason]) if reason in choices else None
    return ConvertOptions(force=reason is Reason.FORCED, decisions=decisions)


def test_every_reason_is_listed_here():
    assert set(REASONS) == set(Reason) - ELSEWHERE


@pytest.mark.parametrize("expected", REASONS)
def test_every_reason_can_be_reached_in_inspect_and_in_convert(expected):
    proto = REASONS[expected]()
    options = options_for(expected, proto)
    for report in (inspect(proto, options), convert(proto, options=options)[1].model):
        (verdict,) = {layer.verdict for layer in report.layers}
        assert verdict.reason is expected
        assert verdict.rewrite == (expected in SPARSE_REASONS)
        assert verdict.text
        assert "\n" not in verdict.text


@pytest.mark.parametrize("op", ["QLinearConv", "ConvInteger"])
def test_integer_convolutions_are_listed(op):
    (layer,) = inspect(quantised(op), FORCE).layers
    assert layer.op_type == op
    assert layer.verdict.reason is Reason.UNSUPPORTED_FORM
    assert op in layer.verdict.text
    assert layer.weight_shape == (8, 16, 3, 3)
    assert layer.dtype == "uint8"


def test_a_kernel_that_the_library_cannot_address_stays_dense():
    weight = np.zeros((2, 1, (1 << 16) + 1), np.float32)
    weight[:, :, ::100] = 1
    proto = one_conv(weight, sizes=(70000,), pads=[0, 0])
    (layer,) = inspect(proto, FORCE).layers
    assert layer.verdict.reason is Reason.UNSUPPORTED_FORM
    assert layer.verdict.text == "its kernel has 65537 positions; up to 65536 are supported"


def test_sparsity_is_measured_overall_and_by_channel():
    weight = np.ones((4, 8, 4, 4), np.float32)
    weight[0] = 0
    weight[:, 1] = 0
    weight[1, 0, 0] = 0
    weight[2, 2, 0, 0] = -0.0
    (layer,) = inspect(one_conv(weight)).layers
    assert layer.num_weights == 512
    assert layer.nonzeros == 512 - 128 - 3 * 16 - 4 - 1
    assert layer.sparsity == (512 - layer.nonzeros) / 512
    assert (layer.zero_out_channels, layer.zero_in_channels) == (1, 1)
    assert layer.row_sparsity.max == 1
    assert layer.row_sparsity.min == 16 / 128
    assert layer.row_sparsity.mean == pytest.approx(layer.sparsity)
    converted, _ = convert(one_conv(weight), options=FORCE)
    (after,) = inspect(converted).layers
    for field in ("num_weights", "nonzeros", "sparsity", "row_sparsity", "zero_out_channels", "zero_in_channels"):
        assert getattr(after, field) == getattr(layer, field)


def test_what_inspect_foretells_is_what_the_node_then_has():
    (foretold,) = inspect(one_conv(pruned((64, 64, 3, 3)))).layers
    converted, report = convert(one_conv(pruned((64, 64, 3, 3))))
    (found,) = inspect(converted).layers
    assert (foretold.sparse_bytes, foretold.padding) == (found.sparse_bytes, found.padding)
    assert foretold.dense_bytes == found.dense_bytes == report.conv_bytes_before == 64 * 64 * 9 * 4
    assert report.conv_bytes_after == found.sparse_bytes


def test_a_layer_pruned_to_90_percent_takes_at_most_a_quarter():
    (layer,) = inspect(one_conv(pruned((128, 64, 3, 3), 0.9))).layers
    assert layer.sparse_bytes <= 0.25 * layer.dense_bytes
    assert layer.padding < 1.3


def test_functions_are_named_in_the_report():
    (layer,) = inspect(FEEDS["function-inside"].build()).layers
    assert layer.graph == f"function:{LOCAL}::f"
    (layer,) = inspect(FEEDS["outer-if-twice"].build()).layers
    assert layer.graph == "if/then_branch/if2/then_branch"


def test_what_scales_channels_says_so():
    parameters = [tensor(np.ones(16, np.float32), name) for name in "gsmv"]
    nodes = [helper.make_node("BatchNormalization", ["X", *"gsmv"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    proto = model([*nodes, conv(source="b")], [*parameters, tensor(pruned(), "W")], [value("X", (2, 16, 9, 9))])
    converted, _ = convert(proto, options=FORCE)
    scale, convolution = inspect(converted).layers
    assert (scale.verdict.reason, convolution.verdict.reason) == (Reason.ALREADY_SPARSE,) * 2
    assert scale.verdict.text == "already a sparse convolution: a depthwise one of 1x1, which scales channels"
    assert convolution.verdict.text == "already a sparse convolution"
