"""The passes in Loop and Scan, nested branches and functions that are called twice."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import convert
from tests.support.odd_models import branch, call, constant, function, model, tensor, value
from tests.support.pass_models import (
    CHANNELS,
    FORCE,
    INPUT,
    WEIGHT,
    assert_close,
    build,
    checked,
    conv,
    node,
    numbers,
    ops,
    run,
)

BN = {"gamma": numbers(2), "beta": numbers(3), "mean": numbers(4, low=-1), "var": numbers(5)}
SMALL = WEIGHT * np.float32(0.3)


def inner_ops(proto):
    """Operators of each subgraph of the main graph, by the attribute's name."""
    return {a.name: [n.op_type for n in a.g.node] for n in proto.graph.node for a in n.attribute if a.HasField("g")}


def block(source, result, *, residual):
    return [
        conv(source, "a", weight="V"),
        node("BatchNormalization", ["a", *BN], "b"),
        node("Add", ["b", residual], "s"),
        node("Dropout", ["s"], "d"),
        node("Relu", ["d"], result),
    ]


@pytest.mark.parametrize("shape", [INPUT, None], ids=["shapes stated", "no shapes stated"])
def test_in_a_loop(shape):
    """The state of a loop is an output of its body, so that it is kept; its shape may change from turn to turn, also
    where the body states one.
    """
    body = helper.make_graph(
        [*block("state", "next", residual="state"), node("Identity", ["on"], "still")],
        "body",
        [value("i", [], TensorProto.INT64), value("on", [], TensorProto.BOOL), value("state", shape)],
        [value("still", [], TensorProto.BOOL), value("next", shape)],
    )
    loop = helper.make_node("Loop", ["trips", "", "X"], ["Y"], name="loop", body=body)
    proto = build([loop], {**BN, "V": SMALL, "trips": np.array(3)})
    converted, _ = checked(proto)
    assert inner_ops(converted) == {"body": ["SparseConv", "Add", "Dropout", "Relu", "Identity"]}


def test_in_a_scan_whose_outputs_state_no_shape():
    body = helper.make_graph(
        block("frame", "out", residual="frame"), "body", [value("frame", INPUT)], [value("out", None)]
    )
    scan = helper.make_node("Scan", ["frames"], ["Y"], name="scan", body=body, num_scan_inputs=1)
    frames = node("Unsqueeze", ["X", "axes"], "frames")
    proto = build([frames, scan], {**BN, "V": SMALL, "axes": np.array([0])}, out_rank=5)
    converted, _ = checked(proto)
    assert inner_ops(converted) == {"body": ["SparseConvAdd"]}


def test_constants_and_results_cross_branches():
    """The inner branch reads the result of the outer one, whose BatchNormalization therefore stays."""
    inner = helper.make_node(
        "If",
        ["cond"],
        ["i"],
        name="inner",
        then_branch=branch([node("Mul", ["a", "c"], "p"), conv("p", "t", weight="V")], "t"),
        else_branch=branch([conv("X", "q", weight="V"), node("Mul", ["q", "c"], "u")], "u"),
    )
    outer = helper.make_node(
        "If",
        ["cond"],
        ["Y"],
        name="outer",
        then_branch=branch(
            [
                conv("X", "a", weight="V"),
                node("BatchNormalization", ["a", *BN], "b"),
                inner,
                node("Add", ["b", "i"], "o"),
            ],
            "o",
        ),
        else_branch=branch([node("Neg", ["X"], "e")], "e"),
    )
    constants = {"V": SMALL, "c": numbers(1, (CHANNELS, 1, 1)), **BN}
    proto = model(
        [outer],
        [tensor(v, n) for n, v in constants.items()],
        [value("X", INPUT), value("cond", [], TensorProto.BOOL)],
        [value("Y", [None] * 4)],
    )
    for flag in (True, False):
        feed = {"X": np.random.default_rng(0).standard_normal(INPUT).astype(np.float32), "cond": np.array(flag)}
        converted, _ = checked(proto, inputs=feed)
    then = next(a.g for a in converted.graph.node[0].attribute if a.name == "then_branch")
    assert [n.op_type for n in then.node] == ["SparseConv", "BatchNormalization", "If", "Add"]
    assert [[n.op_type for n in a.g.node] for a in then.node[2].attribute] == [["SparseConv"], ["SparseConv"]]


def test_a_function_that_is_called_twice_is_folded_once():
    parameters = [constant(n, v) for n, v in BN.items()]
    inside = function("block", ["x"], [constant("V", SMALL), *parameters, *block("x", "y", residual="x")])
    proto = model([call("block", ["X"], "h"), call("block", ["h"], "Y")], [], [value("X", INPUT)], functions=[inside])
    converted, _ = checked(proto)
    (kept,) = [f for f in converted.functions if f.domain == inside.domain]
    # Shapes inside of a function are not known, so the residual stays an Add.
    assert [n.op_type for n in kept.node] == ["Constant", "SparseConv", "Add", "Dropout", "Relu"]


@pytest.mark.parametrize("opset", [7, 8])
def test_opsets_that_are_raised(opset):
    """BatchNormalization had an attribute ``spatial`` then, and Dropout none of its later inputs."""
    proto = build(
        [conv(), node("BatchNormalization", ["a", *BN], "b"), node("Dropout", ["b"], "d"), node("Relu", ["d"], "Y")],
        BN,
        opset=opset,
        ir_version=3,
    )
    proto.graph.input.extend(value(t.name, list(t.dims)) for t in proto.graph.initializer)
    converted, _ = checked(proto)
    assert ops(converted) == ["SparseConv"]


def test_external_data(tmp_path):
    """Large parameters may lie in another file."""
    proto = build([conv(), node("BatchNormalization", ["a", *BN], "b"), node("Relu", ["b"], "Y")], BN)
    before = onnx.ModelProto()
    before.CopyFrom(proto)
    onnx.save_model(proto, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=0)
    convert(tmp_path / "m.onnx", tmp_path / "out.onnx", FORCE)
    converted = onnx.load(str(tmp_path / "out.onnx"))
    assert ops(converted) == ["SparseConv"]
    feed = {"X": np.random.default_rng(0).standard_normal(INPUT).astype(np.float32)}
    assert_close(run(converted, feed, library=True), run(before, feed))
