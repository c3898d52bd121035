"""Sizes that ONNX Runtime may make otherwise than onnx infers are not certain."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_sparseconv as sc
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.shapes import ShapeMap

CHANNELS = 16


def model(nodes, size, initializers=(), *, output="y", functions=(), opset=17):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, CHANNELS, *size])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * (len(size) + 2))],
        [numpy_helper.from_array(values, name) for name, values in initializers],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    proto = helper.make_model(graph, opset_imports=opsets[: 1 + bool(functions)], ir_version=8, functions=functions)
    onnx.checker.check_model(proto)
    return proto


def certain_shape(proto, name="y"):
    return ShapeMap(proto).certain.get(name, ModelView(proto).scopes[0])


def random_input(proto):
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def run_plainly(proto):
    """What ONNX Runtime computes, without its optimisations."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, random_input(proto))[0]


def pool(**attributes):
    return [helper.make_node("MaxPool", ["x"], ["y"], **attributes)], ()


def resize(*scales, op="Resize", **attributes):
    values = np.array([1, 1, *scales], np.float32)
    inputs = ["x", "", "scales"] if op == "Resize" else ["x", "scales"]
    return [helper.make_node(op, inputs, ["y"], mode="nearest", **attributes)], [("scales", values)]


def transposed(**attributes):
    weight = np.ones((CHANNELS, 4, 3, 3), np.float32)
    return [helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)], [("w", weight)]


UNSURE = {
    "pool, window behind the map": (pool(kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1), (12, 12)),
    "pool, window in the padding": (pool(kernel_shape=[2, 2], strides=[2, 2], pads=[1] * 4, ceil_mode=1), (17, 17)),
    "pool, same and rounded": (pool(kernel_shape=[3, 3], auto_pad="SAME_UPPER", ceil_mode=1), (9, 9)),
    "pool, same and dilated": (pool(kernel_shape=[3, 3], auto_pad="SAME_UPPER", dilations=[2, 2]), (9, 9)),
    "resize by thirds": (resize(7 / 3, 7 / 3), (9, 9)),
    "resize by tenths": (resize(0.7, 0.7), (30, 30)),
    "resize to a region": (resize(2, 2, coordinate_transformation_mode="tf_crop_and_resize"), (9, 9)),
    "transposed, same": (transposed(auto_pad="SAME_UPPER", strides=[2, 2]), (9, 9)),
    "transposed to a size": (transposed(output_shape=[20, 20], strides=[2, 2]), (9, 9)),
}
CERTAIN = {
    "pool": (pool(kernel_shape=[3, 3], strides=[2, 2]), (12, 12), 5),
    "pool, same": (pool(kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER"), (11, 11), 6),
    "pool, rounded within the map": (pool(kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1), (112, 112), 56),
    "pool, nothing to round": (pool(kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1), (111, 111), 55),
    "resize by two": (resize(2, 2), (9, 9), 18),
    "resize by a half": (resize(0.5, 0.5), (9, 9), 4),
    "transposed": (transposed(strides=[2, 2], output_padding=[1, 1]), (9, 9), 20),
}


@pytest.mark.parametrize(("made", "size"), UNSURE.values(), ids=UNSURE)
def test_what_is_rounded_in_other_ways_has_no_certain_size(made, size):
    proto = model(made[0], size, made[1])
    before = proto.SerializeToString()
    channels = 4 if made[0][0].op_type == "ConvTranspose" else CHANNELS
    assert certain_shape(proto) == (1, channels, None, None)
    assert proto.SerializeToString() == before


@pytest.mark.parametrize(("made", "size", "expected"), CERTAIN.values(), ids=CERTAIN)
def test_what_is_not_rounded_has_one(made, size, expected):
    proto = model(made[0], size, made[1])
    shape = certain_shape(proto)
    assert shape[2:] == (expected, expected)
    assert shape == run_plainly(proto).shape


def test_sizes_given_by_the_model_are_certain_unless_the_aspect_ratio_changes_them():
    sizes = [("sizes", np.array([1, CHANNELS, 20, 21]))]
    given = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="nearest")
    assert certain_shape(model([given], (9, 9), sizes)) == (1, CHANNELS, 20, 21)
    kept = helper.make_node(
        "Resize", ["x", "", "", "sizes"], ["y"], axes=[2, 3], keep_aspect_ratio_policy="not_larger", mode="nearest"
    )
    proto = model([kept], (9, 9), [("sizes", np.array([20, 21]))], opset=18)
    assert certain_shape(proto) == (1, CHANNELS, None, None)


def test_random_pools_are_as_large_as_is_certain():
    generator = np.random.default_rng(3)
    num_certain = 0
    for _ in range(150):
        kernel, stride = (generator.integers(1, 5, 2).tolist() for _ in range(2))
        size = generator.integers(5, 14, 2).tolist()
        pads = [int(generator.integers(0, k)) for k in (*kernel, *kernel)]
        nodes, _ = pool(kernel_shape=kernel, strides=stride, pads=pads, ceil_mode=1)
        proto = model(nodes, size)
        shape = certain_shape(proto)
        if None not in shape:
            num_certain += 1
            assert shape == run_plainly(proto).shape
    assert num_certain > 50


def behind(made, initializers, **attributes):
    """What was made, and a sparse convolution behind it."""
    weight = np.random.default_rng(1).standard_normal((64, CHANNELS, 3, 3)).astype(np.float32)
    weight[np.random.default_rng(2).random(weight.shape) < 0.9] = 0
    convolution = helper.make_node("Conv", ["y", "weight"], ["z"], name="conv", **attributes)
    return [*made, convolution], [*initializers, ("weight", weight)]


@pytest.mark.parametrize("key", [key for key in UNSURE if not key.startswith(("transposed", "resize to"))])
def test_a_convolution_behind_it_pads_at_run_time(key):
    made, size = UNSURE[key]
    nodes, stored = behind(*made, auto_pad="SAME_UPPER", strides=[2, 2])
    proto = model(nodes, size, stored, output="z")
    converted, _ = sc.convert(proto, None, sc.ConvertOptions(force=True))
    assert {node.op_type for node in converted.graph.node} >= {"SparseConv"}
    found, expected = sc.make_session(converted).run(None, random_input(proto))[0], run_plainly(proto)
    assert found.shape == expected.shape
    # In some versions of ONNX Runtime, a window that reads nothing has no number.
    if np.isfinite(expected).all():
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_behind_what_is_certain_padding_is_resolved():
    made, size, _ = CERTAIN["pool, rounded within the map"]
    nodes, stored = behind(*made, auto_pad="SAME_UPPER", strides=[2, 2])
    converted, _ = sc.convert(model(nodes, size, stored, output="z"), None, sc.ConvertOptions(force=True))
    (sparse,) = (node for node in converted.graph.node if node.op_type == "SparseConv")
    assert list(next(a.ints for a in sparse.attribute if a.name == "pads")) == [0, 0, 1, 1]


def test_a_pool_behind_it_stays_where_its_size_would_be_rounded():
    nodes, stored = behind(*resize(7 / 3, 7 / 3), pads=[1] * 4)
    nodes.append(helper.make_node("MaxPool", ["z"], ["end"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1))
    options = sc.ConvertOptions(force=True, fuse_pools=True)
    converted, report = sc.convert(model(nodes, (9, 9), stored, output="end"), None, options)
    assert [node.op_type for node in converted.graph.node] == ["Resize", "SparseConv", "MaxPool"]
    assert any("its ceil_mode is not 0" in note for note in report.notes)


@pytest.mark.parametrize("num_open", [0, 1, 3])
def test_a_residual_of_an_unsure_size_is_added_in_passing(num_open):
    nodes, stored = behind(*UNSURE["pool, window behind the map"][0], pads=[1] * 4)
    stored[-1] = ("weight", stored[-1][1][:CHANNELS])
    nodes.append(helper.make_node("Add", ["z", "y"], ["sum"]))
    proto = model(nodes, (12, 12), stored, output="sum")
    for axis in (0, 2, 3)[:num_open]:
        proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"d{axis}"
    converted, _ = sc.convert(proto, None, sc.ConvertOptions(force=True))
    assert [node.op_type for node in converted.graph.node] == ["MaxPool", "SparseConvAdd"]


def test_in_a_body_and_in_a_function_it_is_unsure_too():
    (node,), _ = pool(kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1)
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    body = helper.make_graph([node], "body", [], result)
    choice = helper.make_node("If", ["condition"], ["chosen"], then_branch=body, else_branch=body)
    proto = model([choice], (12, 12), [("condition", np.array(True))], output="chosen")
    assert certain_shape(proto, "chosen") == (1, CHANNELS, None, None)
    function = helper.make_function("own", "Pool", ["x"], ["y"], [node], [helper.make_opsetid("", 17)])
    call = helper.make_node("Pool", ["x"], ["called"], domain="own")
    proto = model([call], (12, 12), output="called", functions=[function])
    assert certain_shape(proto, "called") is None
