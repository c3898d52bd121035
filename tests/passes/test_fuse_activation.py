"""FuseActivation: a Relu is taken in where nobody else sees what it reads, and nowhere else."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, restore
from onnx_sparseconv.converter.metadata import decisions_of
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import Activation
from tests.support.odd_models import (
    ANY_SHAPE,
    INPUT_SHAPE,
    branch,
    call,
    constant,
    conv,
    function,
    model,
    pruned,
    tensor,
    value,
)
from tests.support.plain_ort import run

FORCE = ConvertOptions(force=True)


def relu(source, target, **named):
    return helper.make_node("Relu", [source], [target], **named)


def choice(then_nodes, then_output, else_nodes, else_output):
    return helper.make_node(
        "If", ["c"], ["Y"], then_branch=branch(then_nodes, then_output), else_branch=branch(else_nodes, else_output)
    )


WEIGHT = tensor(pruned(), "W")
CONDITION = value("c", (), TensorProto.BOOL)
X = value("X", INPUT_SHAPE)

FUSED = {
    "plain": lambda: model([conv(out="a"), relu("a", "Y")], [WEIGHT]),
    "domain spelled out": lambda: model([conv(out="a"), relu("a", "Y", domain="ai.onnx")], [WEIGHT]),
    "chain": lambda: model([conv(out="a"), relu("a", "b"), relu("b", "Y")], [WEIGHT]),
    "not the last": lambda: model([conv(out="a"), relu("a", "b"), helper.make_node("Neg", ["b"], ["Y"])], [WEIGHT]),
    "both in a branch": lambda: model(
        [
            choice(
                [conv(out="a"), relu("a", "t")],
                "t",
                [helper.make_node("Abs", ["X"], ["e0"]), conv(source="e0", out="e", name="other")],
                "e",
            )
        ],
        [WEIGHT],
        [X, CONDITION],
    ),
}
REFUSED = {
    "output of the graph": lambda: model(
        [conv(out="a"), relu("a", "Y")], [WEIGHT], outputs=[value("Y", ANY_SHAPE), value("a", ANY_SHAPE)]
    ),
    "two readers": lambda: model([conv(out="a"), relu("a", "b"), helper.make_node("Add", ["a", "b"], ["Y"])], [WEIGHT]),
    "read twice": lambda: model(
        [conv(out="a"), relu("a", "b"), relu("a", "c2"), helper.make_node("Add", ["b", "c2"], ["Y"])], [WEIGHT]
    ),
    "also read in a branch": lambda: model(
        [
            conv(out="a"),
            relu("a", "b"),
            choice([helper.make_node("Neg", ["a"], ["t"])], "t", [helper.make_node("Neg", ["b"], ["e"])], "e"),
        ],
        [WEIGHT],
        [X, CONDITION],
    ),
    "Relu in a branch": lambda: model(
        [
            conv(out="a"),
            choice(
                [relu("a", "t")],
                "t",
                [helper.make_node("Neg", ["X"], ["e0"]), conv(source="e0", out="e", name="other")],
                "e",
            ),
        ],
        [WEIGHT],
        [X, CONDITION],
    ),
    "nothing that the op knows": lambda: model([conv(out="a"), helper.make_node("Abs", ["a"], ["Y"])], [WEIGHT]),
}


def sparse_nodes(proto):
    found = []
    for node in proto.graph.node:
        graphs = [a.g for a in node.attribute if a.HasField("g")]
        for inner in (node, *(n for g in graphs for n in g.node)):
            if inner.op_type == "SparseConv":
                found.append(inner)
    return found


def outputs(proto):
    rng = np.random.default_rng(3)
    results = []
    for flag in (True, False):
        feed = {"X": rng.standard_normal(INPUT_SHAPE).astype(np.float32), "c": np.array(flag)}
        results += run(proto, feed)
    return results


def assert_same_outputs(first, second):
    for a, b in zip(outputs(first), outputs(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUSED)
def test_a_relu_is_taken_in(name):
    proto = FUSED[name]()
    converted, report = convert(proto, options=FORCE)
    codes = [attributes_from_proto(n).activation for n in sparse_nodes(converted)]
    assert codes.count(Activation.RELU) == 1
    assert report.nodes_after == report.nodes_before - 1
    assert any("1 Relu fused" in note for note in report.notes)
    onnx.checker.check_model(converted, full_check=True)
    assert_same_outputs(proto, converted)


@pytest.mark.parametrize("name", REFUSED)
def test_a_relu_stays_where_others_see_its_input(name):
    proto = REFUSED[name]()
    converted, report = convert(proto, options=FORCE)
    assert {attributes_from_proto(n).activation for n in sparse_nodes(converted)} == {Activation.NONE}
    assert report.nodes_after == report.nodes_before
    assert_same_outputs(proto, converted)


def test_in_a_function():
    inside = function("block", ["x"], [constant("w", pruned()), conv("w", out="a", source="x"), relu("a", "y")])
    proto = model([call("block", ["X"])], functions=[inside])
    converted, _ = convert(proto, options=FORCE)
    (kept,) = [f for f in converted.functions if f.domain == inside.domain]
    assert [n.op_type for n in kept.node] == ["SparseConv"]
    assert_same_outputs(proto, converted)


def test_names_and_documentation_are_those_of_the_convolution():
    proto = model([conv(out="a", name="conv1"), relu("a", "Y", name="act")], [WEIGHT])
    proto.graph.node[0].doc_string = "of the Conv"
    proto.graph.node[1].doc_string = "of the Relu"
    proto.graph.value_info.append(value("a", ANY_SHAPE))
    converted, _ = convert(proto, options=FORCE)
    (node,) = converted.graph.node
    assert (node.name, node.doc_string, list(node.output)) == ("conv1", "of the Conv", ["Y"])
    assert not converted.graph.value_info
    assert decisions_of(converted)[0]["name"] == "conv1"


def test_restore_gives_the_relu_back():
    proto = FUSED["plain"]()
    converted, _ = convert(proto, options=FORCE)
    restore(converted)
    assert [n.op_type for n in converted.graph.node] == ["Conv", "Relu"]
    for a, b in zip(outputs(proto), outputs(converted), strict=True):
        assert a.tobytes() == b.tobytes()


def test_an_earlier_conversion_is_left_alone():
    """Only what this conversion rewrites is fused: a second one finds nothing to do."""
    converted, _ = convert(FUSED["plain"](), options=FORCE)
    again, report = convert(converted, options=FORCE)
    assert again is None
    assert report.already_converted
