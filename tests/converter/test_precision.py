"""Conversion to float16: every rule, on models in memory, run with the library, without it, and restored."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert, restore
from onnx_sparseconv.converter.report import Reason
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import DOMAIN
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.kernels.unified_csr import decode
from tests.support import architectures
from tests.support.half_models import assert_close, checked, graph_nodes, half_options, kept, ops, run
from tests.support.odd_models import FEEDS, call, function, ornate, pruned, tensor, value, with_overloads
from tests.support.pass_models import INPUT, WEIGHT, build, conv, node, numbers
from tests.support.plain_ort import inputs_for, newest_opset

HALF = TensorProto.FLOAT16
DENSE = numbers(5, (8, 8, 3, 3), -0.3, 0.3)
VECTOR = numbers(1)


def types_of(proto):
    """Element types of the initializers, by name."""
    return {t.name: t.data_type for t in proto.graph.initializer}


def sparse_nodes(proto):
    return [attributes_from_proto(n) for n in graph_nodes(proto) if n.domain == DOMAIN]


def dense(**more):
    """Options that leave every Conv dense."""
    return {"force": False, "min_sparsity": 1.0} | more


def test_a_sparse_layer_computes_in_float16_between_two_casts():
    proto = build([conv(bias="B", out="a"), node("Relu", ["a"], "Y")], {"B": VECTOR})
    converted, report = checked(proto)
    assert ops(converted) == ["Cast", "SparseConv", "Cast"]
    (attributes,) = sparse_nodes(converted)
    assert (attributes.element_type, attributes.weight.values.dtype) == (np.float16, np.float16)
    np.testing.assert_array_equal(decode(attributes.weight), WEIGHT.astype(np.float16))
    assert types_of(converted)["B"] == HALF
    assert (report.precision.half_nodes, report.precision.casts, report.precision.kept) == (1, 2, ())
    assert report.conv_bytes_after == report.model.layers[0].sparse_bytes == attributes.weight.size_bytes


def test_a_dense_layer_does_as_well():
    converted, report = checked(build([conv(bias="B", out="Y")], {"B": VECTOR, "W": DENSE}), **dense())
    assert ops(converted) == ["Cast", "Conv", "Cast"]
    assert set(types_of(converted).values()) == {HALF}
    assert not report.converted
    assert report.changed
    assert report.bytes_after < report.bytes_before


def test_inputs_and_outputs_become_float16_when_asked():
    converted, report = checked(build([conv(out="Y")]), fp16_io=True)
    assert ops(converted) == ["SparseConv"]
    assert (report.precision.casts, report.precision.half_io) == (0, True)


def test_an_output_in_the_middle_keeps_its_name_and_type():
    nodes = [conv(out="a"), node("Relu", ["a"], "b"), conv("b", "Y")]
    for half_io in (False, True):
        converted, _ = checked(build(nodes, outputs=("Y", "a", "b")), fp16_io=half_io, **dense())
        assert ops(converted).count("Cast") == (0 if half_io else 4)


def test_a_float_node_reads_an_output_that_was_cast_for_the_graph():
    nodes = [conv(out="a"), node("Abs", ["a"], "Y")]
    keep = {"keep_float": ("Abs",), **dense()}
    converted, _ = checked(build(nodes, outputs=("a", "Y")), **keep)
    assert ops(converted) == ["Cast", "Conv", "Cast", "Abs"]
    converted, _ = checked(build(nodes, outputs=("a", "Y")), fp16_io=True, **keep)
    assert ops(converted) == ["Conv", "Cast", "Abs", "Cast"]


def test_one_cast_serves_all_readers():
    nodes = [conv(out=f"a{i}", weight="W") for i in range(3)] + [node("Sum", ["a0", "a1", "a2"], "Y")]
    converted, _ = checked(build(nodes), **dense())
    assert ops(converted) == ["Cast", "Conv", "Conv", "Conv", "Sum", "Cast"]


@pytest.mark.parametrize("op", ["Exp", "Reciprocal", "Cos"])
def test_what_leaves_the_range_stays_float(op):
    converted, report = checked(build([conv(out="a"), node(op, ["a"], "b"), node("Tanh", ["b"], "Y")]), **dense())
    assert ops(converted) == ["Cast", "Conv", "Cast", op, "Tanh"]
    assert "range" in kept(report)[f"{op}_b"]
    assert "gain nothing" in kept(report)["Tanh_Y"]


def test_a_square_stays_float_and_so_does_the_variance_made_of_it():
    axes = tensor([1], "axes", np.int64)
    nodes = [
        conv(out="a"),
        node("Mul", ["a", "a"], "b"),
        node("ReduceMean", ["b"], "c", axes=[1]),
        node("Add", ["c", "E"], "d"),
        node("Sqrt", ["d"], "e"),
        node("Div", ["a", "e"], "Y"),
    ]
    del axes
    converted, report = checked(build(nodes, {"E": np.float32(1e-9)}), **dense())
    assert set(kept(report)) == {"Mul_b", "ReduceMean_c", "Add_d", "Sqrt_e"}
    assert ops(converted)[-3:] == ["Cast", "Div", "Cast"]


def test_a_constant_beyond_the_range_keeps_its_node_float():
    nodes = [conv(out="x"), node("Relu", ["x"], "a"), node("Mul", ["a", "K"], "b"), node("Mul", ["b", "L"], "c")]
    nodes.append(conv("c", "Y"))
    converted, report = checked(build(nodes, {"K": np.float32(1e5), "L": np.float32(1e-5)}), **dense())
    assert kept(report) == {
        "Mul_b": "Mul: its constant 'K' holds 1e+05, float16 ends at 65504",
        "Mul_c": "Mul: it would gain nothing: what is around it is float",
    }
    assert ops(converted) == ["Cast", "Conv", "Relu", "Cast", "Mul", "Mul", "Cast", "Conv", "Cast"]


def test_what_does_not_fit_into_float16_is_not_folded():
    nodes = [conv(out="a"), node("Mul", ["a", "K"], "b"), node("Add", ["b", "b"], "Y")]
    for options in (dense(), {}):
        _, report = convert(build(nodes, {"K": np.float32(1e5)}), options=half_options(**options))
        assert "Mul_b" in kept(report)
        assert "conv_a" not in kept(report)
        assert any("the folded weights would not fit into float16" in note for note in report.notes)


def test_a_divisor_that_would_be_zero_keeps_its_node_float():
    divisor = numbers(1, (8, 1, 1))
    divisor[3] = 1e-8
    inputs = {"X": np.zeros(INPUT, np.float32)}
    nodes = [conv(out="x"), node("Relu", ["x"], "a"), node("Div", ["a", "K"], "b"), node("Add", ["b", "a"], "Y")]
    _, report = checked(build(nodes, {"K": divisor}), inputs, **dense())
    assert "zero in float16" in kept(report)["Div_b"]


def test_small_numbers_among_others_are_rounded_and_counted():
    addend = numbers(1, (8, 1, 1))
    addend[3] = 1e-9
    nodes = [conv(out="x"), node("Relu", ["x"], "a"), node("Add", ["a", "K"], "b"), conv("b", "Y")]
    _, report = checked(build(nodes, {"K": addend}), **dense())
    assert report.precision.kept == ()
    assert "1 weights that are not zero are zero in float16" in report.precision.notes[0]
    assert "'K': 1 of 8" in report.precision.notes[0]


def test_a_bound_beyond_the_range_becomes_its_end():
    limits = {"low": np.float32(0), "high": np.finfo(np.float32).max}
    converted, report = checked(build([conv(out="a"), node("Clip", ["a", "low", "high"], "Y")], limits), **dense())
    assert report.precision.kept == ()
    stored = {t.name: numpy_helper.to_array(t) for t in converted.graph.initializer}
    assert stored["high"] == np.float16(65504)


def test_weights_that_overflow_keep_their_layer_float():
    for weight in (np.where(WEIGHT.max() == WEIGHT, np.float32(1e5), WEIGHT), DENSE * np.float32(1e6)):
        proto = build(
            [conv(out="a"), node("Softmax", ["a"], "b"), conv("b", "Y", weight="V")], {"W": weight, "V": WEIGHT}
        )
        converted, report = convert(proto, options=half_options(min_sparsity=0.5, force=False))
        assert "float16 ends at 65504" in kept(report)["conv_a"]
        first = converted.graph.node[0]
        if first.domain == DOMAIN:
            (big, small) = sparse_nodes(converted)
            assert (big.element_type, big.weight.values.dtype) == (np.float32, np.float32)
            assert small.element_type == np.float16
        inputs = inputs_for(proto)
        for library in (True, False):
            assert_close(proto, converted, run(converted, inputs, library=library), run(proto, inputs))


def test_a_bias_that_overflows_keeps_its_layer_float():
    nodes = [conv(out="a", bias="B"), conv("a", "Y")]
    _, report = convert(build(nodes, {"B": VECTOR * np.float32(1e5)}), options=half_options())
    assert "'B' holds" in kept(report)["conv_a"]


def test_weights_that_vanish_leave_the_format_and_are_counted():
    weight = np.where(np.arange(WEIGHT.size).reshape(WEIGHT.shape) % 5 == 0, WEIGHT * np.float32(1e-9), WEIGHT)
    vanished = np.count_nonzero(weight) - np.count_nonzero(weight.astype(np.float16))
    assert vanished > 10
    converted, report = checked(build([conv(out="Y")], {"W": weight}))
    (attributes,) = sparse_nodes(converted)
    assert attributes.weight.negative_zeros.size == 0
    np.testing.assert_array_equal(decode(attributes.weight), weight.astype(np.float16))
    assert f"{vanished} weights that are not zero are zero" in report.precision.notes[0]
    assert f"{vanished} of {np.count_nonzero(weight)}" in report.precision.notes[0]


def test_negative_zeros_of_the_source_stay_negative():
    weight = WEIGHT.copy()
    weight[weight == 0] = -0.0
    converted, _ = checked(build([conv(out="Y")], {"W": weight}))
    restored = onnx.ModelProto()
    restored.CopyFrom(converted)
    restore(restored)
    stored = next(numpy_helper.to_array(t) for t in restored.graph.initializer if t.name == "W")
    assert stored.tobytes() == weight.astype(np.float16).tobytes()


def test_folding_rounds_once():
    """The scale is such that rounding to float first would often end at the other of two float16 neighbours."""
    weight, scale = pruned((8, 8, 3, 3), 0.7, seed=3), numbers(9, low=0.1, high=3)
    zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
    batch_norm = node("BatchNormalization", ["a", "s", "b", "m", "v"], "Y", epsilon=0.0)
    constants = {"W": weight, "s": scale, "b": VECTOR, "m": zeros, "v": ones}
    converted, report = checked(build([conv(out="a"), batch_norm], constants))
    assert any("BatchNormalization folded" in note for note in report.notes)
    (attributes,) = sparse_nodes(converted)
    exact = weight.astype(np.float64) * scale.astype(np.float64).reshape(8, 1, 1, 1)
    np.testing.assert_array_equal(decode(attributes.weight), exact.astype(np.float16))


def test_batch_normalization_is_folded_into_dense_layers_in_float64():
    """Its variances would be zero in float16, in which ONNX Runtime would fold it."""
    scale, shift, mean = numbers(9, low=0.1, high=3), numbers(8, low=-1, high=1), numbers(7)
    variance = numbers(6, low=1e-8, high=2e-8)
    weight = DENSE * np.float32(1e-4)
    nodes = [
        node("Pad", ["X", "pads"], "p"),
        conv("p", "a", bias="B", pads=[0] * 4),
        node("BatchNormalization", ["a", "s", "b", "m", "v"], "c", epsilon=1e-9),
        node("Relu", ["c"], "Y"),
    ]
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    constants = {"W": weight, "B": VECTOR, "s": scale, "b": shift, "m": mean, "v": variance, "pads": pads}
    constants |= {"B": mean + numbers(4, low=-1e-4, high=1e-4)}
    converted, report = checked(build(nodes, constants), **dense())
    assert ops(converted) == ["Cast", "Conv", "Relu", "Cast"]
    assert "1 Pad, 1 BatchNormalization folded into convolutions that stay dense" in report.notes
    stored = next(numpy_helper.to_array(t) for t in converted.graph.initializer if t.name == "W_folded")
    factor = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + float(np.float32(1e-9)))
    np.testing.assert_array_equal(stored, (weight.astype(np.float64) * factor.reshape(8, 1, 1, 1)).astype(np.float16))
    assert not {"s", "b", "m", "v", "W", "pads"} & types_of(converted).keys()


@pytest.mark.parametrize(("width", "amounts", "stride"), [(9, (2, 1), 3), (11, (1, 0), 4), (10, (1, 1), 4)])
def test_a_pad_stays_before_a_dense_layer_whose_same_padding_is_negative(width, amounts, stride):
    """Such padding crops the input; ONNX Runtime opens no Conv with it spelled out."""
    nodes = [
        node("Pad", ["X", "p"], "a"),
        conv("a", "Y", weight="V", auto_pad="SAME_UPPER", pads=None, strides=[1, stride]),
    ]
    constants = {"V": DENSE[:, :, :1, :1], "p": np.array([0, 0, 0, amounts[0], 0, 0, 0, amounts[1]], np.int64)}
    proto = build(nodes, constants, shape=(1, 8, 8, width))
    converted, report = convert(proto, options=half_options(**dense()))
    assert ops(converted) == ["Cast", "Pad", "Conv", "Cast"]
    assert not any("Pad folded" in note for note in report.notes)
    feed = inputs_for(proto)
    (found,), (wanted,) = run(converted, feed), run(proto, feed)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=2e-2)


def test_a_variance_that_float16_cannot_hold_keeps_its_node_float():
    constants = {"s": VECTOR, "b": VECTOR, "m": VECTOR, "v": numbers(6, low=1e-8, high=2e-8)}
    batch_norm = node("BatchNormalization", ["a", "s", "b", "m", "v"], "c", epsilon=1e-9)
    nodes = [conv(out="x"), node("Relu", ["x"], "a"), batch_norm, node("Softmax", ["c"], "Y")]
    _, report = convert(build(nodes, constants), options=half_options(**dense()))
    assert "variances 'v' are too small" in kept(report)["BatchNormalization_c"]
    constants["v"] = numbers(6)
    _, report = convert(build(nodes, constants), options=half_options(**dense()))
    assert report.precision.kept == ()


def test_folded_weights_that_vanish_are_counted_too():
    scale = VECTOR.copy()
    scale[2] = 1e-9
    constants = {"s": scale.reshape(8, 1, 1)}
    converted, report = checked(build([conv(out="a"), node("Mul", ["a", "s"], "Y")], constants))
    assert ops(converted) == ["Cast", "SparseConv", "Cast"]
    assert "are zero in float16" in report.precision.notes[0]


def test_a_constant_read_in_both_types_is_stored_in_both():
    nodes = [conv(out="x"), node("Relu", ["x"], "a"), node("Mul", ["a", "K"], "b"), node("Exp", ["K"], "c")]
    nodes.append(node("Mul", ["b", "c"], "Y"))
    converted, _ = checked(build(nodes, {"K": numbers(1, (8, 1, 1))}), **dense())
    assert types_of(converted)["K"] == TensorProto.FLOAT
    assert types_of(converted)["K_fp16"] == HALF


def test_a_weight_in_another_form_is_stored_in_float16():
    """As some exporters write a Gemm's weight, or a filter that comes from another layout."""
    turned = np.ascontiguousarray(DENSE.transpose(2, 3, 1, 0))
    nodes = [
        node("Transpose", ["T"], "t", perm=[3, 2, 0, 1]),
        node("Identity", ["t"], "W2"),
        conv(out="Y", weight="W2"),
    ]
    converted, report = checked(build(nodes, {"T": turned}), **dense())
    assert types_of(converted)["T"] == HALF
    assert report.precision.casts == 2


@pytest.mark.parametrize("form", ["value", "value_float", "value_floats"])
def test_constant_nodes(form):
    values = {"value": tensor(VECTOR[:1], ""), "value_float": 1.5, "value_floats": [1.5]}
    nodes = [node("Constant", [], "K", **{form: values[form]}), conv(out="x"), node("Relu", ["x"], "a")]
    converted, _ = checked(build([*nodes, node("Mul", ["a", "K"], "Y")]), **dense())
    if form == "value":
        assert converted.graph.node[0].attribute[0].t.data_type == HALF
        assert ops(converted).count("Cast") == 2


def test_resize_reads_its_scales_in_float():
    scales = np.array([1, 1, 2, 2], np.float32)
    resize = node("Resize", ["a", "", "scales"], "b", mode="nearest")
    converted, report = checked(build([conv(out="a"), resize, conv("b", "Y")], {"scales": scales}), **dense())
    assert report.precision.kept == ()
    assert types_of(converted)["scales"] == TensorProto.FLOAT
    assert ops(converted) == ["Cast", "Conv", "Resize", "Conv", "Cast"]


def test_sizes_are_computed_in_float():
    """The size of the input, doubled in float, as exporters spell an upsampling: float16 has no 2049."""
    nodes = [
        conv(out="a"),
        node("Shape", ["a"], "s"),
        node("Cast", ["s"], "f", to=TensorProto.FLOAT),
        node("Mul", ["f", "two"], "g"),
        node("Floor", ["g"], "h"),
        node("Cast", ["h"], "i", to=TensorProto.INT64),
        node("Resize", ["a", "", "", "i"], "b", mode="nearest"),
        conv("b", "Y"),
    ]
    two = np.array([1, 1, 2, 2], np.float32)
    proto = build(nodes, {"two": two}, shape=["n", 8, "h", "w"])
    _, report = checked(proto, {"X": numbers(1, (1, 8, 1, 2049))}, **dense())
    assert set(kept(report)) == {"Mul_g", "Floor_h"}


def test_positions_made_of_layers_stay_float():
    """What the network itself rounds to whole numbers is not rounded to float16 before."""
    nodes = [conv(out="x"), node("Relu", ["x"], "a"), node("Mul", ["a", "K"], "b")]
    nodes.append(node("Cast", ["b"], "Y", to=TensorProto.INT32))
    proto = build(nodes, {"K": np.float32(3000)})
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT32
    converted, report = convert(proto, options=half_options(**dense()))
    assert "positions or sizes" in kept(report)["Mul_b"]
    got, wanted = (run(p, inputs_for(proto))[0] for p in (converted, proto))
    assert np.abs(got - wanted).max() <= 2.0**-9 * np.abs(wanted).max()


def test_quantised_parts_stay_float():
    scale = {"s": np.float32(0.05), "z": np.int8(0)}
    nodes = [
        node("QuantizeLinear", ["X", "s", "z"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], "d"),
        conv("d", "a"),
        node("Relu", ["a"], "b"),
        conv("b", "Y", weight="V"),
    ]
    converted, report = checked(build(nodes, {"V": WEIGHT, **scale}), **dense())
    assert "quantisation" in kept(report)["conv_a"]
    assert types_of(converted)["V"] == HALF
    assert types_of(converted)["W"] == TensorProto.FLOAT


def test_unknown_operators_get_what_they_know():
    gelu = node("FastGelu", ["a"], "b", domain="com.microsoft")
    proto = build([conv(out="a"), gelu, node("Relu", ["b"], "c"), node("Add", ["c", "a"], "Y")])
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    converted, report = checked(proto, **dense())
    assert "com.microsoft::FastGelu is not known" in kept(report)["FastGelu_b"]
    assert "type of an input is not known" in kept(report)["Add_Y"]
    assert ops(converted) == ["Cast", "Conv", "Cast", "FastGelu", "Relu", "Add"]


def test_what_the_caller_names_stays_float():
    nodes = [conv(out="a"), node("Softmax", ["a"], "b"), conv("b", "Y")]
    for name in ("Softmax", "Softmax_b", "conv_a"):
        _, report = checked(build(nodes), keep_float=(name,))
        assert "as asked" in [text.split(": ")[1] for text in kept(report).values()]
    with pytest.raises(UsageError, match="no node or operator of that name"):
        convert(build(nodes), options=half_options(keep_float=("nothing",)))


def test_what_the_caller_names_is_not_taken_into_a_sparse_layer():
    """Names are those of the model that was given."""
    nodes = [conv(out="a"), node("Relu", ["a"], "b"), conv("b", "c"), node("Relu", ["c"], "Y")]
    converted, report = checked(build(nodes), keep_float=("Relu_b",))
    assert ops(converted).count("Relu") == 1
    assert kept(report) == {"Relu_b": "Relu: as asked"}
    converted, report = convert(build(nodes), options=half_options(keep_float=("Conv",)))
    assert [attributes.element_type for attributes in sparse_nodes(converted)] == [np.float32] * 2
    assert list(kept(report)) == ["conv_a", "conv_c"]
    assert not report.precision.changed
    _, report = checked(build(nodes), keep_float=("conv_a",))
    assert list(kept(report)) == ["conv_a"]


def test_a_split_that_stays_float_is_not_read_around():
    sizes = {"sizes": np.asarray([3, 5])}
    nodes = [
        node("Relu", ["X"], "x"),
        helper.make_node("Split", ["x", "sizes"], ["p", "q"], "split", axis=1),
        node("Concat", ["p", "q"], "joined", axis=1),
        conv("joined", "Y", weight="P", pads=[0] * 4),
    ]
    proto = build(nodes, {**sizes, "P": WEIGHT[:, :, :1, :1]})
    converted, report = checked(proto, keep_float=("split",))
    assert "Split" in ops(converted)
    assert kept(report)["split"] == "Split: as asked"
    assert "Split" not in ops(checked(proto)[0])


def test_a_scale_that_stays_float_is_not_folded():
    scale = {"S": VECTOR.reshape(1, 8, 1, 1)}
    nodes = [conv(out="a"), node("Mul", ["a", "S"], "Y")]
    for options in ({}, dense()):
        converted, report = checked(build(nodes, scale), keep_float=("Mul",), **options)
        assert "Mul" in ops(converted)
        assert kept(report)["Mul_Y"] == "Mul: as asked"


@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
def test_what_is_added_up_where_it_is_scattered_stays_float(op):
    (index, updates) = ((1, 1), (1, 8, 6, 6)) if op == "ScatterND" else ((1, 8, 3, 3),) * 2
    constants = {"I": np.zeros(index, np.int64), "U": np.ones(updates, np.float32)}
    for reduction in ("none", "add", "mul"):
        scatter = node(op, ["a", "I", "U"], "Y", reduction=reduction)
        _, report = checked(build([conv(out="a"), scatter], constants))
        assert bool(kept(report)) == (reduction != "none")


def test_light_nodes_without_a_layer_stay_float():
    nodes = [node("Relu", ["X"], "x"), node("Exp", ["x"], "b"), conv("b", "Y")]
    converted, report = checked(build(nodes), {"X": numbers(3, INPUT)}, **dense())
    assert ops(converted) == ["Relu", "Exp", "Cast", "Conv", "Cast"]
    assert "gain nothing" in kept(report)["Relu_x"]


def test_clip_before_opset_12_has_no_kernel():
    low = {"low": np.float32(0), "high": np.float32(6)}
    nodes = [conv(out="a"), node("Clip", ["a", "low", "high"], "b"), conv("b", "Y")]
    _, report = checked(build(nodes, low, opset=11), **dense())
    assert "no float16 kernel" in kept(report)["Clip_b"]
    _, report = checked(build(nodes, low, opset=12), **dense())
    assert report.precision.kept == ()


@pytest.mark.parametrize("name", [n for n, f in FEEDS.items() if f.reason is not Reason.INVALID])
def test_every_way_to_feed_a_weight(name):
    proto = FEEDS[name].build()
    inputs = inputs_for(proto)
    converted, report = convert(proto, options=half_options())
    if converted is None:
        assert not report.precision.changed
        return
    onnx.checker.check_model(converted, full_check=True)
    wanted = run(proto, inputs)
    for library in (True, False):
        got = run(converted, inputs, library=library)
        if report.precision.changed:
            assert_close(proto, converted, got, wanted)
        assert all(a.dtype == b.dtype for a, b in zip(got, wanted, strict=True))


def test_a_model_with_all_that_onnx_allows():
    proto = ornate()
    converted, report = convert(proto, options=half_options())
    assert report.precision.changed
    onnx.checker.check_model(converted, full_check=True)
    assert converted.graph.doc_string == proto.graph.doc_string


def test_overloaded_functions():
    converted, report = convert(with_overloads(), options=half_options())
    assert report.precision.changed
    onnx.checker.check_model(converted, full_check=True)


def test_functions_are_inlined():
    nodes = [conv(source="x", out="y")]
    body = function("f", ["x", "W"], nodes)
    proto = build([call("f", ["X", "W"], "a"), call("f", ["a", "W"], "Y")], functions=[body])
    converted, report = checked(proto)
    assert {f.domain for f in converted.functions} == {DOMAIN}
    assert any("inlined" in note for note in report.notes)
    assert [s.element_type for s in sparse_nodes(converted)] == [np.float16] * 2


def test_overridable_weights_stay_float_unless_forced():
    proto = build([conv(out="Y")], {"W": DENSE})
    proto.graph.input.append(value("W", DENSE.shape))
    converted, report = checked(proto, **dense())
    assert types_of(converted)["W"] == TensorProto.FLOAT
    assert "callers may set" in report.precision.notes[0]
    converted, report = checked(proto, min_sparsity=1.0)
    assert [i.name for i in converted.graph.input] == ["X"]
    assert types_of(converted).get("W", HALF) == HALF


def test_a_float16_model_is_left_alone():
    proto = build([conv(out="a"), node("Relu", ["a"], "Y")], element_type=HALF)
    converted, report = convert(proto, options=half_options(**dense()))
    assert converted is None
    assert not report.changed
    assert report.precision.notes == ("2 nodes compute in float16 already",)
    again, _ = checked(build([conv(out="Y")]))
    converted, report = convert(again, options=half_options())
    assert converted is None
    assert report.already_converted


def test_a_float16_model_is_still_made_sparse():
    converted, report = convert(build([conv(out="Y")], element_type=HALF), options=half_options())
    assert ops(converted) == ["SparseConv"]
    assert not report.precision.changed
    assert report.changed


def test_a_mixed_model_gets_no_cast_too_many():
    """Float16, float, float16: the float part becomes float16, and reads the float16 tensor itself."""
    nodes = [
        node("Cast", ["X"], "h", to=HALF),
        node("Relu", ["h"], "r"),
        node("Cast", ["r"], "f", to=TensorProto.FLOAT),
        conv("f", "Y"),
    ]
    converted, report = checked(build(nodes), **dense())
    final = next(n for n in converted.graph.node if n.op_type == "Conv")
    assert final.input[0] == "r"
    assert report.precision.casts == 1
    assert "1 nodes compute in float16 already" not in report.precision.notes[0]


@pytest.mark.parametrize("to", [TensorProto.FLOAT, HALF])
def test_casts_of_the_source_are_used(to):
    """Two equal casts side by side are also what ONNX Runtime 1.31 once made a cycle of."""
    nodes = [conv(out="a"), node("Cast", ["a"], "b", to=to), node("Cast", ["b"], "c", to=TensorProto.FLOAT)]
    nodes += [node("Exp", ["a"], "d"), node("Exp", ["c"], "e"), node("Add", ["d", "e"], "Y")]
    converted, report = checked(build(nodes), {"X": numbers(1, INPUT, -0.1, 0.1)}, **dense())
    assert report.precision.casts == (1 if to == TensorProto.FLOAT else 2)
    assert ops(converted).count("Cast") == report.precision.casts + 2


@pytest.mark.parametrize("dtype", [TensorProto.DOUBLE, TensorProto.BFLOAT16])
def test_other_floating_point_types_are_left_alone_and_said(dtype):
    nodes = [
        conv(out="a"),
        node("Cast", ["a"], "d", to=dtype),
        node("Neg" if dtype == TensorProto.DOUBLE else "Identity", ["d"], "e"),
        node("Cast", ["e"], "Y", to=TensorProto.FLOAT),
    ]
    converted, report = checked(build(nodes))
    name = {TensorProto.DOUBLE: "float64", TensorProto.BFLOAT16: "bfloat16"}[dtype]
    assert report.precision.notes == (f"2 nodes compute in {name}; they were left alone",)
    assert ops(converted)[-3:] == ops(build(nodes))[-3:]


def test_a_sparse_float_model_becomes_float16():
    first, _ = convert(
        build([conv(out="a", bias="B"), node("Relu", ["a"], "Y")], {"B": VECTOR}), options=ConvertOptions(force=True)
    )
    converted, report = checked(first)
    assert report.already_converted
    assert not report.converted
    assert report.changed
    assert [s.element_type for s in sparse_nodes(converted)] == [np.float16]


def test_images_of_float_are_dropped():
    first, _ = convert(build([conv(out="Y")]), options=ConvertOptions(force=True))
    attribute = next(a for a in first.graph.node[0].attribute if a.name == "cuda_images")
    attribute.t.CopyFrom(tensor(np.arange(16), "cuda_images", np.uint8))
    converted, report = convert(first, options=half_options())
    assert any("GPU images" in note and "dropped" in note for note in report.notes)
    assert sparse_nodes(converted)[0].cuda_images.size == 0


def test_an_old_opset_is_raised_or_refused():
    proto = build([conv(out="Y")], {"W": DENSE}, opset=8, ir_version=3)
    proto.graph.input.append(value("W", DENSE.shape))
    converted, _ = checked(proto, **dense())
    assert converted.opset_import[0].version == 9
    proto = build([conv(out="Y")], {"W": DENSE}, opset=8)
    proto.training_info.add()
    with pytest.raises(ModelError, match="float16 needs opset 9, the model has 8, which cannot be raised"):
        convert(proto, options=half_options(**dense()))


def test_a_dry_run_tells_the_same():
    proto = architectures.vgg()
    _, report = convert(proto, options=half_options(force=False))
    none, dry = convert(proto, options=half_options(force=False, dry_run=True))
    assert none is None
    assert (dry.precision, dry.bytes_after) == (report.precision, report.bytes_after)


def test_broken_data_are_one_clear_error():
    proto = build(
        [conv(out="a"), node("Gemm", ["f", "G", "H"], "Y")], {"G": numbers(2, (288, 4)), "H": numbers(3, (4,))}
    )
    proto.graph.node.insert(1, node("Flatten", ["a"], "f"))
    broken = next(t for t in proto.graph.initializer if t.name == "G")
    broken.raw_data = broken.raw_data[:-6]
    with pytest.raises(ModelError, match="G"):
        convert(proto, options=half_options())


def test_options_that_need_float16():
    for options in ({"fp16_io": True}, {"keep_float": ("Softmax",)}):
        with pytest.raises(UsageError, match="need the precision fp16"):
            ConvertOptions(**options)
    with pytest.raises(UsageError, match="keep or fp16"):
        ConvertOptions(precision="fp8")


def test_external_data(tmp_path):
    proto = build([conv(out="a"), conv("a", "Y", weight="V")], {"W": DENSE, "V": WEIGHT})
    inputs = inputs_for(proto)
    wanted = run(proto, inputs)
    onnx.save_model(proto, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=100)
    convert(tmp_path / "m.onnx", tmp_path / "h.onnx", half_options(force=False, min_sparsity=0.5))
    assert (tmp_path / "h.onnx.data").is_file()
    converted = onnx.load(str(tmp_path / "h.onnx"))
    assert_close(proto, converted, run(tmp_path / "h.onnx", inputs, library=True), wanted)


@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 15, 17, 18, 20, 21, 22, 23, 24, 25])
def test_every_opset(opset):
    if opset > newest_opset():
        pytest.skip("onnx or ONNX Runtime is older than this opset")
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    nodes = [
        conv(out="a", bias="B"),
        node("Relu", ["a"], "b"),
        conv("b", "c"),
        node("Add", ["a", "c"], "d"),
        node("BatchNormalization", ["d", "B", "B", "zeros", "ones"], "e"),
        node("MaxPool", ["e"], "f", kernel_shape=[2, 2], strides=[2, 2]),
        node("Concat", ["f", "f"], "g", axis=1),
        node("GlobalAveragePool", ["g"], "h"),
        node("Flatten", ["h"], "i"),
        node("Gemm", ["i", "G", "H"], "j"),
        node("Softmax", ["j"], "Y", axis=1),
    ]
    constants = {"B": VECTOR, "G": numbers(2, (16, 4), -1, 1), "H": numbers(3, (4,)), "ones": ones, "zeros": zeros}
    proto = build(nodes, constants, opset=opset, out_rank=2)
    converted, report = checked(proto)
    assert report.precision.kept == ()
    assert report.precision.casts == 2
    assert ops(converted).count("SparseConv") + ops(converted).count("SparseConvAdd") == 2


@pytest.mark.parametrize("name", ["vgg", "resnet", "mobilenet_v2", "densenet"])
def test_architectures(name):
    proto = getattr(architectures, name)()
    converted, report = checked(proto, force=False)
    assert report.precision.casts == 2
    assert report.precision.kept == ()
    assert report.bytes_after < 0.7 * report.bytes_before
    assert all(s.element_type == np.float16 for s in sparse_nodes(converted))


LIGHT = ["Relu", "Sigmoid", "Exp", "Abs", "Neg", "Tanh", "Log", "Softplus", "Identity", "MaxPool", "Cast"]
STEPS = st.lists(
    st.tuples(st.sampled_from([*LIGHT, "Conv", "Add", "Mul", "Div", "Concat"]), st.integers(0, 99)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.booleans(), st.integers(0, 3))
def test_random_graphs(choices, half_io, more_outputs):
    """Any graph of these is valid afterwards, runs, and gives the same types; finite outputs stay finite and close."""
    names, nodes = ["X"], []
    for index, (op, pick) in enumerate(choices):
        source, other = names[pick % len(names)], names[pick * 7 % len(names)]
        out = f"t{index}"
        if op == "Conv":
            nodes.append(conv(source, out, weight="W" if pick % 2 else "V"))
        elif op in ("Add", "Mul", "Div"):
            nodes.append(node(op, [source, other if op == "Mul" else "K" if pick % 3 else other], out))
        elif op == "Concat":
            nodes += [node(op, [source, other], f"{out}_both", axis=1), node("Conv", [f"{out}_both", "D"], out)]
        elif op == "MaxPool":
            nodes.append(node(op, [source], out, kernel_shape=[3, 3], pads=[1] * 4))
        elif op == "Cast":
            nodes.append(node(op, [source], out, to=TensorProto.FLOAT))
        else:
            nodes.append(node(op, [source], out))
        names.append(out)
    outputs = [names[-1], *names[1:-1][:more_outputs]]
    constants = {"V": DENSE, "D": numbers(3, (8, 16, 1, 1), -0.2, 0.2), "K": numbers(4, (8, 1, 1))}
    proto = build(nodes, constants, outputs=outputs)
    inputs = {"X": numbers(2, INPUT)}
    converted, report = convert(proto, options=half_options(force=False, min_sparsity=0.5, fp16_io=half_io))
    if converted is None:
        assert not any(op in ("Conv", "Concat") for op, _ in choices)
        return
    onnx.checker.check_model(converted, full_check=True)
    wanted = run(proto, inputs)
    got = run(converted, inputs, library=True)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == (np.float16 if half_io and report.precision.changed else np.float32)
        assert a.shape == b.shape
