"""FuseResidual: an Add is taken in where both operands certainly have one shape, and nowhere else."""

import gc

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_sparseconv.converter import ConvertOptions, convert, restore
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import Activation
from onnx_sparseconv.passes.fuse_activation import FuseActivation
from tests.support.odd_models import ANY_SHAPE, conv, model, pruned, tensor, value
from tests.support.plain_ort import inputs_for, run

FORCE = ConvertOptions(force=True)
CHANNELS = 8
WEIGHT = tensor(pruned((CHANNELS, CHANNELS, 3, 3), 0.5), "W")
STATIC = (2, CHANNELS, 6, 6)
SYMBOLIC = ("n", CHANNELS, 6, 6)
OPEN = ("n", CHANNELS, "h", "w")


def add(first, second, target="Y"):
    return helper.make_node("Add", [first, second], [target], name=f"add_{target}")


def block(shape, nodes, **named):
    inputs = [value("X", shape), *(value(n, s) for n, s in named.pop("more", {}).items())]
    return model(nodes, [WEIGHT], inputs, [value(n, ANY_SHAPE) for n in named.pop("out", ["Y"])])


def shortcut(pool):
    """A convolution with strides of 2, and a pool beside it."""
    return block(OPEN, [conv(out="a", strides=[2, 2]), pool, add("a", "p")])


FUSED = {
    "residual second": lambda: block(STATIC, [conv(out="a"), add("a", "X")]),
    "residual first": lambda: block(STATIC, [conv(out="a"), add("X", "a")]),
    "symbolic batch": lambda: block(SYMBOLIC, [conv(out="a"), add("a", "X")]),
    "a residual that is made after the convolution": lambda: block(
        STATIC, [conv(out="a"), helper.make_node("Neg", ["X"], ["z"]), add("a", "z")]
    ),
    "two convolutions": lambda: block(
        STATIC, [conv(out="a", name="first"), conv(out="b", name="second"), add("a", "b")]
    ),
    "open sizes": lambda: block(OPEN, [conv(out="a"), add("a", "X")]),
    "open sizes, SAME": lambda: block(OPEN, [conv(out="a", pads=None, auto_pad="SAME_UPPER"), add("a", "X")]),
    "open sizes, two convolutions": lambda: block(
        OPEN,
        [
            conv(out="a", name="first"),
            helper.make_node("Relu", ["a"], ["b"]),
            conv(out="c", source="b", name="c"),
            add("c", "X"),
        ],
    ),
    "open sizes, behind a sum": lambda: block(
        OPEN,
        [
            helper.make_node("AveragePool", ["X"], ["p"], kernel_shape=[3, 3], pads=[1] * 4),
            helper.make_node("Sub", ["X", "p"], ["s"]),
            conv(out="a", source="s"),
            add("a", "X"),
        ],
    ),
    "open sizes, through the same strides": lambda: shortcut(
        helper.make_node("MaxPool", ["X"], ["p"], kernel_shape=[1, 1], strides=[2, 2])
    ),
    "open sizes, through strides and windows that begin at the same places": lambda: shortcut(
        helper.make_node("MaxPool", ["X"], ["p"], kernel_shape=[5, 5], strides=[2, 2], pads=[2] * 4)
    ),
    "open sizes, VALID": lambda: shortcut(
        helper.make_node("MaxPool", ["X"], ["p"], kernel_shape=[1, 1], strides=[2, 2], auto_pad="VALID")
    ),
    "open sizes, SAME strides": lambda: shortcut(
        helper.make_node("MaxPool", ["X"], ["p"], kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_LOWER")
    ),
}
REFUSED = {
    "broadcast": lambda: block(STATIC, [conv(out="a"), add("a", "Z")], more={"Z": (1, CHANNELS, 1, 1)}),
    "another symbol": lambda: block(("n", *STATIC[1:]), [conv(out="a"), add("a", "Z")], more={"Z": ("m", *STATIC[1:])}),
    "unknown size": lambda: block((None, *STATIC[1:]), [conv(out="a"), add("a", "X")]),
    "output of the graph": lambda: block(STATIC, [conv(out="a"), add("a", "X")], out=["Y", "a"]),
    "another reader": lambda: block(STATIC, [conv(out="a"), add("a", "X", "b"), add("a", "b")]),
    "added to itself": lambda: block(STATIC, [conv(out="a"), add("a", "a")]),
    "activated before": lambda: block(STATIC, [conv(out="a"), helper.make_node("Relu", ["a"], ["b"]), add("b", "X")]),
}
OPEN_AND_REFUSED = {
    "open sizes, one less": lambda: block(OPEN, [conv(out="a", pads=[0, 0, 1, 1]), add("a", "X")]),
    "open sizes, another dilation": lambda: block(OPEN, [conv(out="a", dilations=[2, 2]), add("a", "X")]),
    "open sizes, other axes": lambda: block(
        ("n", CHANNELS, "h", "w"),
        [conv(out="a"), helper.make_node("Transpose", ["X"], ["t"], perm=[0, 1, 3, 2]), add("a", "t")],
    ),
    "open sizes, through a pool that reads less": lambda: shortcut(
        helper.make_node("MaxPool", ["X"], ["p"], kernel_shape=[2, 2], strides=[2, 2])
    ),
    "open sizes, through a pool that rounds up": lambda: shortcut(
        helper.make_node("MaxPool", ["X"], ["p"], kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1)
    ),
    "open sizes, through other strides": lambda: shortcut(
        helper.make_node("MaxPool", ["X"], ["p"], kernel_shape=[1, 1], strides=[2, 1])
    ),
    "open sizes, and a sum that broadcasts": lambda: block(
        OPEN, [add("X", "Z", "s"), conv(out="a"), add("a", "s")], more={"Z": ("n", CHANNELS, "k", "w")}
    ),
}


def outputs(proto):
    return run(proto, inputs_for(proto, seed=5, h=6, w=6, k=6))


def assert_same_outputs(first, second):
    for a, b in zip(outputs(first), outputs(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def ops(proto):
    return [n.op_type for n in proto.graph.node]


@pytest.mark.parametrize("name", FUSED)
def test_an_add_is_taken_in(name):
    proto = FUSED[name]()
    converted, report = convert(proto, options=FORCE)
    assert ops(converted).count("SparseConvAdd") == 1
    assert "Add" not in ops(converted)
    assert any("1 Add of a residual fused" in note for note in report.notes)
    onnx.checker.check_model(converted, full_check=True)
    assert_same_outputs(proto, converted)


@pytest.mark.parametrize("name", REFUSED)
def test_an_add_stays_where_it_may_broadcast_or_others_see_its_operand(name):
    proto = REFUSED[name]()
    converted, _ = convert(proto, options=FORCE)
    assert "SparseConvAdd" not in ops(converted)
    assert ops(converted).count("Add") == ops(proto).count("Add")
    assert_same_outputs(proto, converted)


@pytest.mark.parametrize("name", OPEN_AND_REFUSED)
def test_an_add_stays_where_open_sizes_are_made_in_different_ways(name):
    """At most sizes none of them runs, but one of 1 broadcasts."""
    converted, _ = convert(OPEN_AND_REFUSED[name](), options=FORCE)
    assert "SparseConvAdd" not in ops(converted)


def test_the_second_of_two_convolutions_takes_the_first():
    converted, _ = convert(FUSED["two convolutions"](), options=FORCE)
    first, second = converted.graph.node
    assert (first.name, first.op_type) == ("first", "SparseConv")
    assert (second.name, list(second.input)) == ("second", ["X", "", "a"])


def test_a_relu_after_the_add_comes_last():
    proto = block(STATIC, [conv(out="a"), add("a", "X", "s"), helper.make_node("Relu", ["s"], ["Y"])])
    converted, _ = convert(proto, options=FORCE)
    (node,) = converted.graph.node
    assert node.op_type == "SparseConvAdd"
    assert attributes_from_proto(node).activation is Activation.RELU
    assert_same_outputs(proto, converted)


def test_restore_gives_the_operators_back():
    proto = block(STATIC, [conv(out="a"), add("a", "X", "s"), helper.make_node("Relu", ["s"], ["Y"])])
    converted, _ = convert(proto, options=FORCE)
    restore(converted)
    assert ops(converted) == ["Conv", "Add", "Relu"]
    for a, b in zip(outputs(proto), outputs(converted), strict=True):
        assert a.tobytes() == b.tobytes()


def test_an_absent_bias_may_be_left_out():
    """A converted model of another hand: its SparseConv has one input, and one more Conv is to be rewritten."""
    proto, _ = convert(block(STATIC, [conv(out="a"), helper.make_node("Abs", ["a"], ["Y"])]), options=FORCE)
    (sparse, _) = proto.graph.node
    del sparse.input[1:]
    proto.graph.node[1].CopyFrom(add("a", "X", "s"))
    proto.graph.node.append(conv(out="Y", source="s", name="another"))
    proto.graph.initializer.append(WEIGHT)
    converted, _ = convert(proto, options=FORCE)
    assert ops(converted) == ["SparseConvAdd", "SparseConv"]
    assert_same_outputs(proto, converted)


def test_nodes_are_told_apart_when_freed_ones_leave_their_place_to_new_ones(monkeypatch):
    """Nodes that one pass drops must not lend their identity to those that the next one makes."""
    blocks = [
        node
        for i in range(30)
        for node in (
            conv(source=f"y{i}" if i else "X", out=f"c{i}", name=f"conv{i}"),
            add(f"c{i}", f"y{i}" if i else "X", f"s{i}"),
            helper.make_node("Relu", [f"s{i}"], [f"y{i + 1}" if i < 29 else "Y"], name=f"relu{i}"),
        )
    ]
    apply = FuseActivation.apply

    def collect_first(self, graph):
        gc.collect()
        return apply(self, graph)

    monkeypatch.setattr(FuseActivation, "apply", collect_first)
    for _ in range(5):
        converted, _ = convert(block(STATIC, blocks), options=FORCE)
        assert ops(converted) == ["SparseConvAdd"] * 30
