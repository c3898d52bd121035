"""FoldScaleBefore: what scales an input goes into the weight; what shifts it, only where nothing is padded."""

import numpy as np
import pytest
from onnx import helper

from onnx_sparseconv.converter import ConvertOptions
from tests.support.odd_models import branch, value
from tests.support.pass_models import (
    CHANNELS,
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

PASS = "FoldScaleBefore"
C = numbers(1, (CHANNELS, 1, 1))
BN = {"gamma": numbers(2), "beta": numbers(3), "mean": numbers(4, low=-1), "var": numbers(5)}
UNPADDED = {"pads": [0] * 4}


def before(op, *inputs, constants=None, bias=False, **named):
    """``op``, then conv on its result ``a``; the source of ``op`` is X through an operator that nothing folds."""
    geometry = named.pop("geometry", {})
    arrays = {"c": C, "bias": numbers(6), **BN, **(constants or {})}
    nodes = [
        node("Neg", ["X"], "x"),
        node(op, inputs, "a", **named.pop("attributes", {})),
        conv("a", "Y", bias="bias" if bias else "", **geometry),
    ]
    return build(nodes, arrays, **named)


FOLDED = {
    "Mul, padded": lambda: before("Mul", "x", "c"),
    "Mul, constant first": lambda: before("Mul", "c", "x", bias=True),
    "Mul by a number": lambda: before("Mul", "x", "c", constants={"c": np.float32(3)}),
    "Div, padded": lambda: before("Div", "x", "c", bias=True),
    "Add": lambda: before("Add", "x", "c", geometry=UNPADDED),
    "Add with bias": lambda: before("Add", "c", "x", geometry=UNPADDED, bias=True),
    "Sub": lambda: before("Sub", "x", "c", geometry=UNPADDED),
    "Sub from a constant": lambda: before("Sub", "c", "x", geometry=UNPADDED, bias=True),
    "BatchNormalization": lambda: before("BatchNormalization", "x", *BN, geometry=UNPADDED),
    "BatchNormalization that shifts nothing, padded": lambda: before(
        "BatchNormalization", "x", *BN, constants={"beta": np.zeros(8, np.float32), "mean": np.zeros(8, np.float32)}
    ),
    "VALID": lambda: before("Add", "x", "c", geometry={"auto_pad": "VALID", "pads": None}),
    "SAME of one tap": lambda: before(
        "Add", "x", "c", constants={"W": WEIGHT[:, :, :1, :1]}, geometry={"auto_pad": "SAME_UPPER", "pads": None}
    ),
    "a scale of zero": lambda: before("Mul", "x", "c", constants={"c": np.float32([0, 2] * 4).reshape(8, 1, 1)}),
    "an input of unknown sizes": lambda: before("Mul", "x", "c", shape=("n", CHANNELS, None, None)),
    "a number, and nothing known of the input": lambda: _unknown(np.float32(2)),
}
REFUSED = {
    "Add, padded": (lambda: before("Add", "x", "c"), "pads its input with zeros"),
    "BatchNormalization, padded": (lambda: before("BatchNormalization", "x", *BN), "pads its input with zeros"),
    "padded at run time": (
        lambda: before(
            "Add",
            "x",
            "c",
            shape=("n", CHANNELS, None, None),
            geometry={"auto_pad": "SAME_LOWER", "pads": None, "strides": [2, 2]},
        ),
        "pads its input with zeros",
    ),
    "per element": (
        lambda: before("Mul", "x", "c", constants={"c": numbers(1, (8, 6, 6))}),
        "not one number for each channel",
    ),
    "another reader": (
        lambda: build([node("Mul", ["X", "c"], "a"), conv("a", "b"), node("Add", ["a", "b"], "Y")], {"c": C}),
        "other nodes read",
    ),
    "shared by two Conv": (
        lambda: build(
            [
                node("BatchNormalization", ["X", *BN], "a"),
                conv("a", "b", **UNPADDED),
                conv("a", "d", **UNPADDED),
                node("Mul", ["b", "d"], "Y"),
            ],
            BN,
        ),
        "other nodes read",
    ),
    "an output of the graph": (
        lambda: build([node("Mul", ["X", "c"], "a"), conv("a", "Y")], {"c": C}, outputs=["Y", "a"]),
        "is an output of a graph",
    ),
    "a broadcast to more channels": (
        lambda: build([node("Mul", ["X", "c"], "a"), conv("a", "Y")], {"c": C}, shape=(2, 1, 6, 6)),
        "may broadcast",
    ),
    "a broadcast to more channels, constant first": (
        lambda: build([node("Sub", ["c", "X"], "a"), conv("a", "Y")], {"c": C}, shape=(2, 1, 6, 6)),
        "may broadcast",
    ),
    "a broadcast to more axes": (
        lambda: build(
            [node("Mul", ["X", "c"], "a"), conv("a", "Y")],
            {"c": np.full((1, 1, 1, 1), 2, np.float32)},
            shape=(8, 6, 6),
        ),
        "may broadcast",
    ),
    "nothing known of the input": (lambda: _unknown(C), "may broadcast"),
    "a bias that is only known at run time": (
        lambda: build([node("Add", ["X", "c"], "a"), conv("a", "Y", bias="B", **UNPADDED)], {"c": C}, more={"B": [8]}),
        "bias is only known at run time",
    ),
    "training form": (
        lambda: build(
            [node("BatchNormalization", ["X", *BN], ["a", "m", "v"], training_mode=1), conv("a", "Y", **UNPADDED)], BN
        ),
        "training form",
    ),
    "parameters at run time": (
        lambda: build(
            [node("BatchNormalization", ["X", *BN], "a"), conv("a", "Y", **UNPADDED)],
            {k: v for k, v in BN.items() if k != "var"},
            more={"var": [8]},
        ),
        "only known at run time",
    ),
}


def _unknown(factor):
    """The source of the Mul is a reshape to a shape that is only known at run time."""
    nodes = [node("Reshape", ["X", "shape"], "x"), node("Mul", ["x", "c"], "a"), conv("a", "Y")]
    proto = build(nodes, {"c": factor})
    proto.graph.input.append(value("shape", ["rank"], 7))
    return proto


def feed(proto):
    rng = np.random.default_rng(0)
    shape = [d.dim_value or 6 for d in proto.graph.input[0].type.tensor_type.shape.dim]
    arrays = {"X": rng.standard_normal(shape).astype(np.float32), "shape": np.array(INPUT)}
    return arrays | {"B": numbers(9), "var": BN["var"]}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name):
    proto = FOLDED[name]()
    op = proto.graph.node[1].op_type
    converted, report = checked(proto, inputs=feed(proto))
    assert ops(converted) == [proto.graph.node[0].op_type, "SparseConv"]
    assert [e.split(": ")[1].split()[0] for e in edits(report, PASS)] == [op]
    assert f"1 {op} folded into the convolutions after them" in report.notes


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, why = REFUSED[name]
    proto = make()
    _, report = checked(proto, inputs=feed(proto))
    texts = refusals(report, PASS)
    assert texts
    assert all(why in text for text in texts)
    assert not edits(report, PASS)
    assert report.nodes_after == report.nodes_before - len(edits(report, "FuseResidual"))


def test_a_constant_that_is_divided_stays():
    nodes = [node("Exp", ["X"], "x"), node("Div", ["c", "x"], "a"), conv("a", "b", pads=[0] * 4)]
    proto = build([*nodes, node("Exp", ["b"], "e"), node("Div", ["c", "e"], "Y")], {"c": C})
    _, report = checked(proto)
    assert not edits(report, PASS)
    proto = build([conv("X", "a", bias="bias"), node("Div", ["c", "a"], "Y")], {"c": C, "bias": numbers(7) * 100})
    _, report = checked(proto)
    assert not edits(report, "FoldScaleAfter")


@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups(group):
    weight = WEIGHT[:, : CHANNELS // group]
    nodes = [
        node("BatchNormalization", ["X", *BN], "a"),
        conv("a", "Y", weight="V", group=group, bias="bias", strides=[2, 1], **UNPADDED),
    ]
    converted, _ = checked(build(nodes, {"V": weight, "bias": numbers(8), **BN}))
    assert ops(converted) == ["SparseConv"]


def test_a_chain_on_both_sides():
    nodes = [
        node("Div", ["X", "c"], "x1"),
        node("Sub", ["x1", "c"], "x2"),
        conv("x2", "a", **UNPADDED),
        node("BatchNormalization", ["a", *BN], "b"),
        node("Add", ["b", "c"], "Y"),
    ]
    converted, _ = checked(build(nodes, {"c": C, **BN}))
    assert ops(converted) == ["SparseConv"]


def test_what_a_dense_convolution_before_takes_in_is_left_to_it():
    dense = np.random.default_rng(0).standard_normal(WEIGHT.shape).astype(np.float32)
    nodes = [conv("X", "d", weight="dense"), node("BatchNormalization", ["d", *BN], "a"), conv("a", "Y", **UNPADDED)]
    proto = build(nodes, {"dense": dense, **BN})
    converted, report = checked(proto, ConvertOptions(min_sparsity=0.6))
    assert ops(converted) == ["Conv", "BatchNormalization", "SparseConv"]
    assert not refusals(report, PASS)
    assert list(converted.graph.node)[:2] == list(proto.graph.node)[:2]


@pytest.mark.parametrize("residual", [False, True])
def test_the_end_of_an_activation_is_left_to_the_convolution_before(residual):
    nodes = [
        *([conv(out="r"), node("Add", ["X", "r"], "a")] if residual else [conv()]),
        node("Add", ["a", "three"], "b"),
        node("Clip", ["b", "zero", "six"], "g"),
        node("Mul", ["a", "g"], "m"),
        node("Div", ["m", "six"], "h"),
        conv("h", "Y"),
    ]
    constants = {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6)}
    converted, report = checked(build(nodes, constants))
    assert ops(converted) == ["SparseConvAdd" if residual else "SparseConv", "SparseConv"]
    name = "conv_r" if residual else "conv_a"
    assert edits(report, "FuseActivation") == [f"{name}: x * Clip(x + 3, 0, 6) / 6 'Div_h'"]
    assert not edits(report, PASS)


def test_the_end_of_an_activation_of_something_else_is_folded():
    nodes = [
        node("Neg", ["X"], "a"),
        node("Add", ["a", "three"], "b"),
        node("Clip", ["b", "zero", "six"], "g"),
        node("Mul", ["a", "g"], "m"),
        node("Div", ["m", "six"], "h"),
        conv("h", "Y"),
    ]
    constants = {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6)}
    converted, _ = checked(build(nodes, constants))
    assert ops(converted) == ["Neg", "Add", "Clip", "Mul", "SparseConv"]


def test_what_stands_outside_of_the_branch_is_left():
    choice = helper.make_node(
        "If",
        ["cond"],
        ["Y"],
        then_branch=branch([conv("x", "t")], "t"),
        else_branch=branch([node("Mul", ["X", "c"], "u"), conv("u", "e")], "e"),
    )
    proto = build([node("Mul", ["X", "c"], "x"), choice], {"c": C, "W": WEIGHT}, more={"cond": []})
    proto.graph.input[1].type.tensor_type.elem_type = 9
    for flag in (True, False):
        inputs = {"X": np.random.default_rng(0).standard_normal(INPUT).astype(np.float32), "cond": np.array(flag)}
        converted, report = checked(proto, inputs=inputs)
    assert ops(converted) == ["Mul", "If"]
    assert len(edits(report, PASS)) == 1
