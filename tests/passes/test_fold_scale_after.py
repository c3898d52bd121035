"""FoldScaleAfter: what scales a result by channels goes into weight and bias, and nothing else does."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.kernels.unified_csr import decode
from tests.support.odd_models import branch, call, constant, function, model, tensor, value
from tests.support.pass_models import (
    CHANNELS,
    FORCE,
    INPUT,
    WEIGHT,
    build,
    checked,
    conv,
    edits,
    node,
    numbers,
    ops,
    refusals,
)
from tests.support.plain_ort import newest_opset

PASS = "FoldScaleAfter"
PER_CHANNEL = numbers(1, (CHANNELS, 1, 1))
BN = {
    "gamma": numbers(2) * np.float32([1, -1] * 4),
    "beta": numbers(3),
    "mean": numbers(4, low=-1),
    "var": numbers(5),
}
BN_INPUTS = ["gamma", "beta", "mean", "var"]


def batch_norm(source="a", out="Y", **attributes):
    return node("BatchNormalization", [source, *BN_INPUTS], out, **attributes)


def after(op, *inputs, constants=None, bias=False, **named):
    """conv, then ``op`` on its result ``a``."""
    attributes = named.pop("attributes", {})
    arrays = {"c": PER_CHANNEL, "bias": numbers(6), **BN, **(constants or {})}
    return build([conv(bias="bias" if bias else ""), node(op, inputs, "Y", **attributes)], arrays, **named)


FOLDED = {
    "BatchNormalization": lambda: after("BatchNormalization", "a", *BN_INPUTS),
    "BatchNormalization with bias": lambda: after("BatchNormalization", "a", *BN_INPUTS, bias=True),
    "BatchNormalization with epsilon": lambda: after(
        "BatchNormalization", "a", *BN_INPUTS, attributes={"epsilon": 0.5, "momentum": 0.1}
    ),
    "a gamma of zero": lambda: after(
        "BatchNormalization", "a", *BN_INPUTS, constants={"gamma": np.float32([0, 1] * 4)}, bias=True
    ),
    "Mul": lambda: after("Mul", "a", "c", bias=True),
    "Mul, constant first": lambda: after("Mul", "c", "a", bias=True),
    "Mul by a number": lambda: after("Mul", "a", "c", constants={"c": np.float32(-0.5)}, bias=True),
    "Mul by a number in a box": lambda: after("Mul", "a", "c", constants={"c": np.full((1, 1, 1, 1), 2, np.float32)}),
    "Mul without bias": lambda: after("Mul", "a", "c"),
    "Add": lambda: after("Add", "a", "c", bias=True),
    "Add without bias": lambda: after("Add", "c", "a"),
    "Add of four axes": lambda: after("Add", "a", "c", constants={"c": PER_CHANNEL[None]}),
    "Sub": lambda: after("Sub", "a", "c", bias=True),
    "Sub from a constant": lambda: after("Sub", "c", "a", bias=True),
    "Div": lambda: after("Div", "a", "c", bias=True),
    "listed as inputs before IR version 4": lambda: _listed(3, 9),
}
REFUSED = {
    "training form": (
        lambda: build([conv(), node("BatchNormalization", ["a", *BN_INPUTS], ["Y", "m", "v"], training_mode=1)], BN),
        "training form",
    ),
    "training form before opset 14": (
        lambda: build(
            [conv(), node("BatchNormalization", ["a", *BN_INPUTS], ["Y", "m", "v", "sm", "sv"])], BN, opset=13
        ),
        "training form",
    ),
    "training form, its mean used": (
        lambda: build(
            [
                conv(),
                node("BatchNormalization", ["a", *BN_INPUTS], ["b", "m", "v"], training_mode=1),
                node("Reshape", ["m", "shape"], "m4"),
                node("Mul", ["b", "m4"], "Y"),
            ],
            {**BN, "shape": np.array([1, -1, 1, 1])},
        ),
        "training form",
    ),
    "two readers": (
        lambda: build([conv(), batch_norm("a", "b"), node("Neg", ["a"], "n"), node("Mul", ["b", "n"], "Y")], BN),
        "other nodes read",
    ),
    "the result is an output": (lambda: after("Mul", "a", "c", outputs=["Y", "a"]), "is an output of a graph"),
    "parameters at run time": (
        lambda: build([conv(), batch_norm()], {k: v for k, v in BN.items() if k != "mean"}, more={"mean": [CHANNELS]}),
        "only known at run time",
    ),
    "parameters that callers may set": (lambda: _listed(8, 17), "is also an input"),
    "one number for each element": (
        lambda: after("Add", "a", "c", constants={"c": numbers(1, (1, CHANNELS, 6, 6))}),
        "not one number for each channel",
    ),
    "one number for each column": (
        lambda: after("Mul", "a", "c", constants={"c": numbers(1, (6,))}),
        "not one number for each channel",
    ),
    "one number for each image": (
        lambda: after("Mul", "a", "c", constants={"c": numbers(1, (2, 1, 1, 1))}),
        "not one number for each channel",
    ),
    "more axes": (
        lambda: build(
            [conv(), node("Mul", ["a", "c"], "b"), node("Squeeze", ["b", "axis"], "Y")],
            {"c": np.full((1,) * 5, 2, np.float32), "axis": np.array([0])},
        ),
        "not one number for each channel",
    ),
    "more channels than one": (
        lambda: build([conv(weight="V"), node("Mul", ["a", "c"], "Y")], {"V": WEIGHT[:1], "c": PER_CHANNEL}),
        "numbers for 8 channels, the convolution gives 1",
    ),
    "a bias that is only known at run time": (
        lambda: build([conv(bias="B"), node("Mul", ["a", "c"], "Y")], {"c": PER_CHANNEL}, more={"B": [CHANNELS]}),
        "bias is only known at run time",
    ),
}


def _listed(ir_version, opset):
    proto = build([conv(), batch_norm()], BN, opset=opset, ir_version=ir_version)
    proto.graph.input.extend(value(t.name, list(t.dims)) for t in proto.graph.initializer)
    return proto


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name):
    proto = FOLDED[name]()
    converted, report = checked(proto)
    assert ops(converted) == ["SparseConv"]
    assert [e.split(": ")[1].split()[0] for e in edits(report, PASS)] == [proto.graph.node[1].op_type]
    assert any(f"1 {proto.graph.node[1].op_type} folded into" in note for note in report.notes)
    assert list(converted.graph.node[0].output) == ["Y"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, why = REFUSED[name]
    proto = make()
    feed = {"mean": BN["mean"], "B": numbers(9), "X": np.random.default_rng(0).standard_normal(INPUT, np.float32)}
    _, report = checked(proto, inputs=feed)
    texts = refusals(report, PASS)
    assert len(texts) == 1
    assert why in texts[0]
    folded = len(edits(report, PASS))
    assert report.nodes_after == report.nodes_before - folded
    assert any(note.startswith("not folded: 1 ") and why in note for note in report.notes)


@pytest.mark.parametrize("opset", [9, 13, 14, 15, newest_opset()])
def test_all_forms_of_batch_normalization(opset):
    converted, _ = checked(build([conv(), batch_norm()], BN, opset=opset))
    assert ops(converted) == ["SparseConv"]


def test_a_chain_is_rounded_once():
    """The product of 0.1 and 10, each rounded to float32, would not be exact; in float64, rounded once, it is."""
    proto = build(
        [conv(), node("Div", ["a", "c"], "b"), node("Mul", ["b", "c"], "d"), node("Sub", ["d", "s"], "Y")],
        {"c": np.float32(0.1) * PER_CHANNEL, "s": PER_CHANNEL},
    )
    converted, report = checked(proto)
    assert ops(converted) == ["SparseConv"]
    weight = decode(attributes_from_proto(converted.graph.node[0]).weight)
    np.testing.assert_array_equal(weight, WEIGHT)
    assert len(edits(report, PASS)) == 3


def test_weights_and_bias_are_those_of_float64_rounded_once():
    converted, _ = checked(after("BatchNormalization", "a", *BN_INPUTS, bias=True))
    gamma, beta, mean, var = (BN[n].astype(np.float64) for n in BN_INPUTS)
    scale = gamma / np.sqrt(var + float(np.float32(1e-5)))
    weight = decode(attributes_from_proto(converted.graph.node[0]).weight)
    np.testing.assert_array_equal(weight, (WEIGHT * scale.reshape(-1, 1, 1, 1)).astype(np.float32))
    (bias,) = (numpy_helper.to_array(t) for t in converted.graph.initializer)
    np.testing.assert_array_equal(bias, (numbers(6) * scale + (beta - mean * scale)).astype(np.float32))


def test_only_adding_leaves_the_bits_of_the_weight():
    weight = np.where(WEIGHT == 0, np.float32(-0.0), WEIGHT)
    converted, _ = checked(after("Add", "a", "c", constants={"W": weight}))
    stored = attributes_from_proto(converted.graph.node[0]).weight
    assert decode(stored).tobytes() == weight.tobytes()


def test_scaling_leaves_no_negative_zeros():
    converted, report = checked(after("Mul", "a", "c", constants={"c": -PER_CHANNEL}))
    stored = attributes_from_proto(converted.graph.node[0]).weight
    assert stored.negative_zeros.size == 0
    assert report.model.layers[0].sparse_bytes == report.conv_bytes_after == stored.size_bytes


def test_sparsity_is_that_of_the_original_and_sizes_are_those_of_the_result():
    proto = FOLDED["a gamma of zero"]()
    converted, report = checked(proto)
    (layer,) = report.model.layers
    assert layer.nonzeros == np.count_nonzero(WEIGHT)
    stored = attributes_from_proto(converted.graph.node[0]).weight
    assert np.count_nonzero(decode(stored)[::2]) == 0
    assert layer.sparse_bytes == stored.size_bytes


def test_a_scale_that_is_not_finite_is_refused():
    """The original gives Inf and NaN here, which are not compared."""
    for constants in ({"var": np.full(8, -1, np.float32)}, {"gamma": np.full(8, np.inf, np.float32)}):
        _, report = convert(after("BatchNormalization", "a", *BN_INPUTS, constants=constants), options=FORCE)
        (text,) = refusals(report, PASS)
        assert "not finite" in text
    _, report = convert(after("Div", "a", "c", constants={"c": np.zeros((8, 1, 1), np.float32)}), options=FORCE)
    assert "not finite" in refusals(report, PASS)[0]


def test_overflow_in_float32_is_refused_and_what_nobody_can_see_is_not():
    def scaled(weight, scale):
        return after("Mul", "a", "c", constants={"W": WEIGHT * np.float32(weight), "c": np.float32(scale)})

    _, report = convert(scaled(1e20, 1e20), options=FORCE)
    assert "would not fit into float32" in refusals(report, PASS)[0]
    converted, _ = checked(scaled(1e-20, 1e-20))
    assert ops(converted) == ["SparseConv"]


@pytest.mark.parametrize(
    ("scale", "shift", "fits"), [(2.0, 1.0, True), (5e4, 1.0, False), (1e-4, 1.0, False), (1.0, 6e4, False)]
)
def test_float16_overflow_and_underflow(scale, shift, fits):
    """Weights of 2 and a bias of 1e4: what would not fit into float16, or lose digits there, stays an operator."""
    constants = {"W": np.where(WEIGHT != 0, 2, 0).astype(np.float32), "bias": np.full(8, 1e4, np.float32)}
    constants |= {"c": np.full((8, 1, 1), scale, np.float32), "d": np.full((8, 1, 1), shift, np.float32)}
    if scale == 1e-4:
        constants["W"] = constants["W"] * np.float32(1e-3)
    nodes = [conv(bias="bias"), node("Mul", ["a", "c"], "b"), node("Add", ["b", "d"], "Y")]
    proto = build(nodes, constants, element_type=TensorProto.FLOAT16)
    converted, report = convert(proto, options=FORCE)
    assert (ops(converted) == ["SparseConv"]) == fits
    if not fits:
        assert "float16" in refusals(report, PASS)[0]


def test_float16_in_a_network():
    proto = build(
        [conv(bias="bias"), batch_norm()], {**BN, "bias": numbers(1)}, element_type=TensorProto.FLOAT16, opset=15
    )
    converted, _ = checked(proto)
    assert ops(converted) == ["SparseConv"]


def test_dense_convolutions_are_left_as_they_are():
    """ONNX Runtime folds those itself."""
    dense = np.random.default_rng(0).standard_normal(WEIGHT.shape).astype(np.float32)
    nodes = [conv(), batch_norm("a", "b"), conv("b", "d", weight="dense"), batch_norm("d", "e")]
    proto = build([*nodes, node("Relu", ["e"], "Y")], {**BN, "dense": dense})
    converted, report = checked(proto, ConvertOptions(min_sparsity=0.6))
    assert ops(converted) == ["SparseConv", "Conv", "BatchNormalization", "Relu"]
    assert list(converted.graph.node)[1:] == list(proto.graph.node)[2:]
    assert {t.name for t in converted.graph.initializer} >= {*BN_INPUTS, "dense"}
    assert not refusals(report, PASS)


def test_parameters_shared_by_two_layers():
    nodes = [conv(), batch_norm("a", "b"), conv("b", "d"), batch_norm("d", "Y")]
    converted, report = checked(build(nodes, {**BN, "gamma": BN["gamma"] * np.float32(0.3)}))
    assert ops(converted) == ["SparseConv", "SparseConv"]
    assert "weight 'W' is shared: it is now stored in 2 nodes" in report.notes
    assert len(converted.graph.initializer) == 2


def test_in_branches_of_an_if():
    """Both branches have a Conv of the same name and of the same tensors; a third reads the result from outside."""
    inner = [conv(), batch_norm("a", "t")]
    outer = [conv(out="o"), node("Mul", ["o", "c"], "p")]
    choice = helper.make_node(
        "If",
        ["cond"],
        ["r"],
        then_branch=branch(inner, "t"),
        else_branch=branch([conv(), node("Mul", ["o", "c"], "q"), node("Add", ["a", "q"], "e")], "e"),
    )
    constants = [tensor(v, n) for n, v in {"W": WEIGHT, "c": PER_CHANNEL, **BN}.items()]
    proto = model(
        [*outer, choice, node("Add", ["p", "r"], "Y")],
        constants,
        [value("X", INPUT), value("cond", [], TensorProto.BOOL)],
    )
    for flag in (True, False):
        feed = {"X": np.random.default_rng(1).standard_normal(INPUT).astype(np.float32), "cond": np.array(flag)}
        converted, report = checked(proto, inputs=feed)
    branches = {a.name: [n.op_type for n in a.g.node] for a in converted.graph.node[2].attribute}
    assert ops(converted) == ["SparseConv", "Mul", "If", "Add"]
    assert branches == {"then_branch": ["SparseConv"], "else_branch": ["Mul", "SparseConvAdd"]}
    assert "Mul: other nodes read the tensor between them, too" in refusals(report, PASS)


def test_in_a_function():
    inside = function(
        "block",
        ["x", "s"],
        [
            constant("w", WEIGHT),
            constant("c", PER_CHANNEL),
            conv("x", "a", weight="w"),
            node("Mul", ["a", "c"], "b"),
            node("Mul", ["b", "s"], "y"),
        ],
    )
    proto = model([call("block", ["X", "S"])], [tensor(np.float32(2), "S")], [value("X", INPUT)], functions=[inside])
    converted, _ = checked(proto)
    (kept,) = [f for f in converted.functions if f.domain == inside.domain]
    assert [n.op_type for n in kept.node] == ["SparseConv", "Mul"]


def test_a_function_that_takes_the_epsilon():
    normalise = batch_norm("a", "y")
    normalise.attribute.add(name="epsilon", type=1, ref_attr_name="eps")
    parameters = [constant(n, v) for n, v in BN.items()]
    inside = function(
        "block", ["x"], [constant("w", WEIGHT), *parameters, conv("x", "a", weight="w"), normalise], attributes=["eps"]
    )
    proto = model([call("block", ["X"], eps=0.25)], [], [value("X", INPUT)], functions=[inside])
    _, report = checked(proto)
    assert refusals(report, PASS) == ["BatchNormalization: its attributes are arguments of a function"]


def test_what_training_names_stays():
    proto = after("Mul", "a", "c")
    training = proto.training_info.add()
    training.algorithm.CopyFrom(helper.make_graph([node("Identity", ["a"], "n")], "step", [], [value("n", [None] * 4)]))
    _, report = convert(proto, options=FORCE)
    assert "named by training information" in refusals(report, PASS)[0]


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank):
    shape = (CHANNELS, 4, *(3,) * rank)
    x = (2, 8, *(5,) * rank)
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * (
        np.random.default_rng(1).random(shape) < 0.3
    )
    nodes = [
        conv(weight="V", pads=[1] * 2 * rank, group=2),
        node("Mul", ["a", "c"], "b"),
        batch_norm("b", "Y"),
    ]
    constants = {"V": weight.astype(np.float32), "c": PER_CHANNEL.reshape(CHANNELS, *(1,) * rank), **BN}
    converted, _ = checked(build(nodes, constants, shape=x, out_rank=rank + 2))
    assert ops(converted) == ["SparseConv"]
