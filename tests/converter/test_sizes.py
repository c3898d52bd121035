"""Sizes that are found to be the same without being known are the same at whatever size a model runs."""

import itertools

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.shapes import ShapeMap
from tests.support.odd_models import model, tensor, value
from tests.support.plain_ort import session

SIZES = [(9, 9), (12, 10), (13, 15), (16, 9)]


@st.composite
def windows(draw):
    """A convolution or pool, as attributes beside the kernel."""
    kernel = draw(st.sampled_from([1, 2, 3]))
    attributes = {"kernel_shape": [kernel] * 2, "strides": [draw(st.sampled_from([1, 1, 2, 3])), 1]}
    form = draw(st.sampled_from(["pads", "pads", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    op = draw(st.sampled_from(["Conv", "Conv", "MaxPool", "AveragePool"]))
    if form == "pads":
        attributes["pads"] = draw(st.lists(st.integers(0, kernel - 1), min_size=4, max_size=4))
        if op != "AveragePool":  # its dilations are younger than the opset
            attributes["dilations"] = [draw(st.sampled_from([1, 1, 2])), 1]
    else:
        attributes["auto_pad"] = form
    if op != "Conv" and draw(st.booleans()):
        attributes["ceil_mode"] = 1
    return op, kernel, attributes


@st.composite
def networks(draw):
    """Windows one after the other, or beside each other, and sums of what may be added."""
    weights = [tensor(np.ones((1, 1, size, size), np.float32), f"w{size}") for size in (1, 2, 3)]
    nodes, names = [], ["X"]
    for index in range(draw(st.integers(2, 6))):
        source, name = draw(st.sampled_from(names)), f"t{index}"
        if draw(st.integers(0, 4)) == 0:
            nodes.append(helper.make_node("Sub", [source, source if draw(st.booleans()) else "one"], [name]))
        else:
            op, kernel, attributes = draw(windows())
            inputs = [source, f"w{kernel}"] if op == "Conv" else [source]
            nodes.append(helper.make_node(op, inputs, [name], **attributes))
        names.append(name)
    one = tensor(np.ones((1, 1, 1), np.float32), "one")
    outputs = [value(name, [None] * 4) for name in names[1:]]
    return model(nodes, [*weights, one], [value("X", ["n", 1, "h", "w"])], outputs)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(proto=networks())
def test_what_is_the_same_is_the_same_at_any_size(proto):
    shapes, scope = ShapeMap(proto).certain, ModelView(proto).scopes[0]
    names = ["X", *(output.name for output in proto.graph.output)]
    same = [(a, b) for a, b in itertools.combinations(names, 2) if shapes.are_same(a, b, scope)]
    opened = session(proto)
    for size in SIZES:
        x = np.ones((2, 1, *size), np.float32)
        try:
            found = {"X": x.shape} | dict(zip(names[1:], (y.shape for y in opened.run(None, {"X": x})), strict=True))
        except Exception:  # a window that does not fit any more
            continue
        assert all(found[a] == found[b] for a, b in same), [(a, b) for a, b in same if found[a] != found[b]]


def test_much_is_found_to_be_the_same():
    """What the other test looks at is not nothing."""
    nodes = [
        helper.make_node("MaxPool", ["X"], ["a"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        helper.make_node("AveragePool", ["X"], ["b"], kernel_shape=[1, 1], strides=[2, 2]),
        helper.make_node("MaxPool", ["X"], ["c"], kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
        helper.make_node("Add", ["a", "b"], ["Y"]),
    ]
    proto = model(nodes, [], [value("X", ["n", 1, "h", "w"])], [value("Y", [None] * 4)])
    shapes, scope = ShapeMap(proto).certain, ModelView(proto).scopes[0]
    assert all(shapes.are_same(x, y, scope) for x, y in itertools.combinations("abcY", 2))
    assert not shapes.are_same("X", "a", scope)
