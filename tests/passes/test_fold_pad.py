"""FoldPad: zeros around the planes become padding of the convolution; every other Pad stays."""

import numpy as np
import pytest
from onnx import helper

from onnx_sparseconv.converter import convert
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from tests.support.pass_models import CHANNELS, FORCE, build, checked, conv, edits, node, numbers, ops, refusals
from tests.support.plain_ort import newest_opset

PASS = "FoldPad"
AMOUNTS = [0, 0, 1, 2, 0, 0, 3, 0]


def padded(amounts=AMOUNTS, *, constants=None, inputs=("X", "p"), geometry=None, opset=17, more=(), **named):
    """Pad, then conv. ``more`` are attributes of the Pad."""
    arrays = {"p": np.array(amounts), "zero": np.float32(0), **(constants or {})}
    nodes = [node("Pad", inputs, "a", **dict(more)), conv("a", "Y", **(geometry or {}))]
    return build(nodes, arrays, opset=opset, **named)


def with_attributes(opset, **attributes):
    return padded(inputs=["X"], opset=opset, more={"pads": AMOUNTS, **attributes})


def at_run_time():
    proto = build([node("Pad", ["X", "p"], "a"), conv("a", "Y")])
    proto.graph.input.append(helper.make_tensor_value_info("p", 7, [8]))
    return proto


FOLDED = {
    "attributes": lambda: with_attributes(9),
    "attributes with value": lambda: with_attributes(10, mode="constant", value=0.0),
    "inputs": lambda: padded(opset=11),
    "inputs with value": lambda: padded(inputs=["X", "p", "zero"]),
    "inputs with an absent value": lambda: padded(inputs=["X", "p", ""]),
    "axes": lambda: padded(
        [2, 1, 3, 0], inputs=["X", "p", "zero", "axes"], constants={"axes": np.array([-1, 2])}, opset=18
    ),
    "absent axes": lambda: padded(inputs=["X", "p", "", ""], opset=18),
    "newest opset": lambda: padded(inputs=["X", "p", "zero"], opset=newest_opset()),
    "unpadded convolution": lambda: padded(geometry={"pads": [0] * 4}),
    "strides and dilations": lambda: padded(geometry={"strides": [2, 1], "dilations": [1, 2]}),
    "SAME of known sizes": lambda: padded(geometry={"auto_pad": "SAME_UPPER", "pads": None, "strides": [2, 2]}),
    "SAME with a stride of 1": lambda: padded(
        geometry={"auto_pad": "SAME_LOWER", "pads": None}, shape=("n", CHANNELS, None, None)
    ),
    "VALID": lambda: padded(geometry={"auto_pad": "VALID", "pads": None}),
    "no amounts at all": lambda: padded([0] * 8),
    "a negative amount that another makes up for is none": lambda: padded(
        [1, 1, 1, 1], inputs=["X", "p", "", "axes"], constants={"axes": np.array([2, 3])}, opset=18
    ),
}
REFUSED = {
    "amounts at run time": (at_run_time, "only known at run time"),
    "reflect": (lambda: padded(more={"mode": "reflect"}), "mode is reflect"),
    "edge": (lambda: with_attributes(9, mode="edge"), "mode is edge"),
    "another value": (
        lambda: padded(inputs=["X", "p", "v"], constants={"v": np.float32(1)}),
        "something else than zero",
    ),
    "another value as attribute": (lambda: with_attributes(9, value=0.5), "something else than zero"),
    "batch": (lambda: padded([1, 0, 0, 0, 0, 0, 0, 0]), "the batch or the channels"),
    "channels": (
        lambda: padded([0, 0, 1, 1, 0, 1, 1, 1], shape=(2, CHANNELS - 1, 6, 6)),
        "the batch or the channels",
    ),
    "negative": (lambda: padded([0, 0, -1, 0, 0, 0, 1, 1]), "it crops"),
    "negative as attributes": (
        lambda: padded(inputs=["X"], opset=9, more={"pads": [0, 0, 0, 0, 0, 0, 0, -2]}),
        "it crops",
    ),
    "SAME at run time": (
        lambda: padded(
            geometry={"auto_pad": "SAME_UPPER", "pads": None, "strides": [2, 2]}, shape=("n", CHANNELS, None, None)
        ),
        "depends on sizes",
    ),
    "another reader": (
        lambda: build(
            [node("Pad", ["X", "p"], "a"), conv("a", "b"), node("Neg", ["a"], "n"), node("Mul", ["b", "n"], "Y")],
            {"p": np.array(AMOUNTS)},
        ),
        "other nodes read",
    ),
    "an output of the graph": (lambda: padded(outputs=["Y", "a"]), "is an output of a graph"),
    "an amount without bound": (
        lambda: padded([0, 0, 0, 0, 0, 0, 0, 2**21], geometry={"strides": [1, 4096]}),
        "no padding",
    ),
}


def feed(proto):
    shape = [d.dim_value or 6 for d in proto.graph.input[0].type.tensor_type.shape.dim]
    return {"X": np.random.default_rng(0).standard_normal(shape).astype(np.float32), "p": np.array(AMOUNTS)}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name):
    proto = FOLDED[name]()
    converted, report = checked(proto, inputs=feed(proto))
    assert ops(converted) == ["SparseConv"]
    assert edits(report, PASS) == ["conv_Y: Pad 'Pad_a'"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, why = REFUSED[name]
    proto = make()
    converted, report = checked(proto, inputs=feed(proto))
    (text,) = refusals(report, PASS)
    assert why in text
    assert ops(converted)[:2] == ["Pad", "SparseConv"]


@pytest.mark.parametrize("axes", [[2, 2], [2, -2], [2, 4], [-5, 3], [2]])
def test_axes_that_are_not_there_or_are_there_twice(axes):
    """No runtime takes such a model, so nothing is compared."""
    proto = padded([1, 1, 1, 1], inputs=["X", "p", "", "axes"], constants={"axes": np.array(axes)}, opset=18)
    _, report = convert(proto, options=FORCE)
    assert refusals(report, PASS) == ["Pad: its amounts and axes do not fit the convolution's input"]


def test_amounts_are_added_axis_by_axis():
    converted, _ = checked(padded(geometry={"pads": [0, 1, 2, 3]}))
    assert attributes_from_proto(converted.graph.node[0]).geometry.pads == (1, 3, 5, 3)


def test_two_in_a_row_and_a_scale_between():
    nodes = [
        node("Pad", ["X", "p"], "x1"),
        node("Mul", ["x1", "c"], "x2"),
        node("Pad", ["x2", "p"], "x3"),
        conv("x3", "Y", pads=[0] * 4),
    ]
    converted, _ = checked(build(nodes, {"p": np.array(AMOUNTS), "c": numbers(1, (CHANNELS, 1, 1))}))
    (sparse,) = converted.graph.node
    assert attributes_from_proto(sparse).geometry.pads == (2, 4, 6, 0)


def test_a_shift_before_the_zeros_stays_and_one_behind_them_does_not():
    """Pad(x + c) is padded with zeros, Pad(x) + c with c."""
    constants = {"p": np.array(AMOUNTS), "c": numbers(1, (CHANNELS, 1, 1))}
    unpadded = {"pads": [0] * 4}
    inside = build(
        [node("Add", ["X", "c"], "x1"), node("Pad", ["x1", "p"], "x2"), conv("x2", "Y", **unpadded)], constants
    )
    converted, _ = checked(inside)
    assert ops(converted) == ["Add", "SparseConv"]
    behind = build(
        [node("Pad", ["X", "p"], "x1"), node("Add", ["x1", "c"], "x2"), conv("x2", "Y", **unpadded)], constants
    )
    converted, _ = checked(behind)
    assert ops(converted) == ["SparseConv"]


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank):
    amounts = [0, 0, *range(1, rank + 1), 0, 0, *range(rank, 0, -1)]
    weight = np.ones((CHANNELS, CHANNELS, *(2,) * rank), np.float32)
    weight[:, ::2] = 0
    nodes = [node("Pad", ["X", "p"], "a"), conv("a", "Y", weight="V", pads=[1] * 2 * rank)]
    converted, _ = checked(
        build(nodes, {"p": np.array(amounts), "V": weight}, shape=(2, CHANNELS, *(4,) * rank), out_rank=rank + 2)
    )
    assert ops(converted) == ["SparseConv"]
