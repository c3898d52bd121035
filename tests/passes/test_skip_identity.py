"""SkipIdentity: what does nothing goes where it stands next to a rewritten convolution, and only there."""

import numpy as np
import pytest
from onnx import helper

from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import Activation
from tests.support.odd_models import branch
from tests.support.pass_models import CHANNELS, INPUT, WEIGHT, build, checked, conv, edits, node, numbers, ops
from tests.support.plain_ort import newest_opset

PASS = "SkipIdentity"
CONSTANTS = {"ratio": np.float32(0.5), "off": np.array(False), "on": np.array(True), "c": numbers(1, (CHANNELS, 1, 1))}


def around(op, *inputs, outputs=("b",), opset=17, **attributes):
    """conv, then the node, then a Mul that can be folded and a Relu that can be fused."""
    nodes = [conv(), node(op, ["a", *inputs], outputs, **attributes)]
    return build([*nodes, node("Mul", ["b", "c"], "d"), node("Relu", ["d"], "Y")], CONSTANTS, opset=opset)


def training_at_run_time():
    proto = build([conv(), node("Dropout", ["a", "ratio", "t"], "Y")], {"ratio": np.float32(0)})
    proto.graph.input.append(helper.make_tensor_value_info("t", 9, []))
    return proto


SKIPPED = {
    "Identity": lambda: around("Identity"),
    "Dropout": lambda: around("Dropout"),
    "Dropout of opset 9": lambda: around("Dropout", ratio=0.5, opset=9),
    "Dropout with a mask that nobody reads": lambda: around("Dropout", outputs=["b", ""]),
    "Dropout with a ratio": lambda: around("Dropout", "ratio"),
    "Dropout, not training": lambda: around("Dropout", "ratio", "off"),
    "Dropout, absent inputs": lambda: around("Dropout", "", ""),
    "newest opset": lambda: around("Dropout", "ratio", "off", opset=newest_opset()),
    "before": lambda: build([node("Neg", ["X"], "x"), node("Identity", ["x"], "y"), conv("y", "Y")]),
    "two of each": lambda: build(
        [
            node("Identity", ["X"], "x"),
            node("Dropout", ["x"], "y"),
            conv("y", "a"),
            node("Identity", ["a"], "b"),
            node("Dropout", ["b"], "Y"),
        ]
    ),
}
LEFT = {
    "elsewhere": lambda: build(
        [conv(), node("Abs", ["a"], "b"), node("Identity", ["b"], "d"), node("Abs", ["d"], "Y")]
    ),
    "its mask is read": lambda: build(
        [
            conv(),
            node("Dropout", ["a"], ["b", "mask"]),
            node("Cast", ["mask"], "m", to=1),
            node("Mul", ["b", "m"], "Y"),
        ]
    ),
    "training at run time": training_at_run_time,
    "another reader": lambda: build([conv(), node("Identity", ["a"], "b"), node("Sub", ["a", "b"], "Y")]),
    "the result is an output": lambda: build([conv(), node("Identity", ["a"], "Y")], outputs=["Y", "a"]),
    "before, another reader": lambda: build(
        [node("Neg", ["X"], "n"), node("Identity", ["n"], "x"), conv("x", "a"), node("Sub", ["a", "x"], "Y")]
    ),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_skipped(name):
    proto = SKIPPED[name]()
    converted, report = checked(proto)
    assert [op for op in ops(converted) if op != "Neg"] == ["SparseConv"]
    assert len(edits(report, PASS)) == (4 if name == "two of each" else 1)


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    proto = LEFT[name]()
    converted, report = checked(proto)
    assert not edits(report, PASS)
    assert sorted(ops(converted)) == sorted(o.replace("Conv", "SparseConv") for o in ops(proto))


def test_in_a_branch_what_reads_a_convolution_outside_stays():
    choice = helper.make_node(
        "If",
        ["cond"],
        ["Y"],
        then_branch=branch([node("Identity", ["a"], "t")], "t"),
        else_branch=branch([node("Identity", ["X"], "e0"), conv("e0", "e1"), node("Identity", ["e1"], "e")], "e"),
    )
    proto = build([conv(), choice], {"W": WEIGHT}, more={"cond": []})
    proto.graph.input[1].type.tensor_type.elem_type = 9
    for flag in (True, False):
        inputs = {"X": np.random.default_rng(0).standard_normal(INPUT).astype(np.float32), "cond": np.array(flag)}
        converted, report = checked(proto, inputs=inputs)
    assert len(edits(report, PASS)) == 2
    branches = {a.name: [n.op_type for n in a.g.node] for a in converted.graph.node[1].attribute}
    assert branches == {"then_branch": ["Identity"], "else_branch": ["SparseConv"]}


def test_between_a_residual_and_its_activation():
    nodes = [conv(), node("Add", ["a", "X"], "s"), node("Dropout", ["s"], "d"), node("Relu", ["d"], "Y")]
    converted, _ = checked(build(nodes))
    assert ops(converted) == ["SparseConvAdd"]
    assert attributes_from_proto(converted.graph.node[0]).activation is Activation.RELU


def test_an_identity_that_makes_an_output_of_an_input_stays():
    """Its own output is the graph's: the convolution takes that name."""
    converted, _ = checked(build([conv(), node("Identity", ["a"], "Y")]))
    assert ops(converted) == ["SparseConv"]
    assert list(converted.graph.node[0].output) == ["Y"]
