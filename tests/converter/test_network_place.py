"""Where a convolution stands: what says whether a dense network runs it with its channels last, and what behind it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv.converter.conv_sites import find_conv_sites
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.network_place import Place, find_place, reads_concat
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES


def places(*nodes, output="y", look=find_place):
    """Of the convolutions of a model that reads X; all have the weight W of 4 channels and 1x1."""
    weight = numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "W")
    vectors = [numpy_helper.from_array(np.ones(4, np.float32), name) for name in ("scale", "shift", "mean", "var", "B")]
    inputs = [helper.make_tensor_value_info("X", 1, [1, 4, 8, 8])]
    outputs = [helper.make_tensor_value_info(output, 1, None)]
    graph = helper.make_graph(list(nodes), "g", inputs, outputs, [weight, *vectors])
    proto = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    return [look(site) for site in find_conv_sites(ModelView(proto), ShapeMap(proto)) if site.is_conv]


def node(kind, inputs, out, **attributes):
    return helper.make_node(kind, inputs.split(), [out], out, **attributes)


def conv(inputs, out):
    return node("Conv", inputs, out)


def test_first_middle_and_last():
    found = places(
        conv("X W", "a"), node("Relu", "a", "b"), conv("b W B", "c"), conv("c W", "d"), node("Flatten", "d", "y")
    )
    assert found == [Place(False, True), Place(True, False), Place(False, False)]


def test_the_last_one_of_a_model_is_not_amid_others():
    assert places(conv("X W", "a"), conv("a W", "y")) == [Place(False, False), None]


def test_what_is_a_result_of_the_model_too_is_not_amid_others():
    assert places(conv("X W", "y"), conv("y W", "b"), node("Flatten", "b", "z"))[0] is None


def test_a_bias_that_is_left_out_is_none():
    left_out = helper.make_node("Conv", ["X", "W", ""], ["a"], "a")
    assert places(left_out, conv("a W", "b"), node("Flatten", "b", "y"))[0] == Place(False, False)


@pytest.mark.parametrize("kind", ["Relu", "MaxPool", "GlobalAveragePool", "Identity", "Sigmoid"])
def test_what_keeps_the_layout_may_stand_between(kind):
    more = {"kernel_shape": [2, 2]} if kind == "MaxPool" else {}
    first, _ = places(conv("X W", "a"), node(kind, "a", "b", **more), conv("b W", "y"))
    assert first is not None


@pytest.mark.parametrize("kind", OP_TYPES)
def test_sparse_convolutions_are_convolutions(kind):
    first, _ = places(conv("X W", "a"), helper.make_node(kind, ["a", "", "a"], ["b"], domain=DOMAIN), conv("b W", "y"))
    assert first is not None


@pytest.mark.parametrize("kind", ["Transpose", "Resize"])
def test_what_changes_it_may_not(kind):
    first, second, third = places(
        conv("X W", "a"), node(kind, "a", "b"), conv("b W", "c"), conv("c W", "d"), node("Flatten", "d", "y")
    )
    assert (first, second) == (None, None)
    assert third is not None


def test_residuals_lead_to_both_makers():
    nodes = [conv("X W", "a"), conv("a W", "b"), node("Add", "a b", "c"), node("Relu", "c", "d"), conv("d W", "e")]
    assert [place is not None for place in places(*nodes, node("Flatten", "e", "y"))] == [True, True, True]
    nodes[1] = node("Transpose", "a", "b", perm=[0, 1, 3, 2])
    # The transposed tensor is one of what the last one reads.
    assert [place is not None for place in places(*nodes, node("Flatten", "e", "y"))] == [False, False]


def test_normalisation_that_is_folded_is_a_bias():
    norm = node("BatchNormalization", "a scale shift mean var", "b")
    first, second = places(conv("X W", "a"), norm, node("Clip", "b", "c"), conv("c W", "d"), node("Flatten", "d", "y"))
    assert first == Place(True, True, is_slow=True)
    assert second == Place(False, False)


def test_channels_are_split_and_joined_in_any_layout():
    split, join = helper.make_node("Split", ["a"], ["b", "c"], axis=1), node("Concat", "b c d", "e", axis=1)
    nodes = [conv("X W", "a"), split, conv("c W", "d"), join, conv("e W", "f"), node("Flatten", "f", "y")]
    assert places(*nodes) == [Place(False, False)] * 3


def test_silu_is_one_slow_activation():
    gate = node("Sigmoid", "a", "b")
    last = [conv("c W", "d"), node("Flatten", "d", "y")]
    first, _ = places(conv("X W", "a"), gate, node("Mul", "a b", "c"), *last)
    assert first == Place(False, True, is_slow=True)
    # A gate of something else is none.
    first, _, _ = places(conv("X W", "a"), gate, conv("a W", "e"), node("Mul", "e b", "c"), *last)
    assert first == Place(False, True)


def test_normalisation_before_a_convolution_is_not_folded():
    norm = node("BatchNormalization", "r scale shift mean var", "b")
    nodes = [conv("X W", "a"), node("Relu", "a", "r"), norm, conv("b W", "d"), node("Flatten", "d", "y")]
    assert places(*nodes) == [None, None]


@pytest.mark.parametrize(
    ("axis", "more", "expected"),
    [
        (1, {}, True),
        (-3, {}, True),
        (2, {}, False),
        (1, {"strides": [2, 2]}, False),
        (1, {"pads": [0, 1, 0, 0]}, False),
        (1, {"group": 2}, False),
    ],
)
def test_who_reads_a_concat(axis, more, expected):
    first, second = node("Identity", "X", "a"), node("Concat", "a X", "b", axis=axis)
    weight = numpy_helper.from_array(np.ones((4, 8 if "group" not in more else 4, 1, 1), np.float32), "V")
    reader = [helper.make_node("Constant", [], ["V"], value=weight), node("Conv", "b V", "y", **more)]
    assert places(first, second, *reader, look=reads_concat) == [expected]
    # Not where a residual or a pool becomes part of the convolution first, or the Concat is an output.
    pooled = helper.make_node("MaxPool", ["r"], ["z"], kernel_shape=[1, 1])
    for behind in ([node("Add", "y y", "z")], [node("Relu", "y", "r"), pooled]):
        assert places(first, second, *reader, *behind, output="z", look=reads_concat) == [False]
    assert places(first, second, *reader, output="b", look=reads_concat) == [False]
    # Not with others, which need it all the same.
    assert places(first, second, *reader, node("Neg", "b", "z"), look=reads_concat) == [False]
