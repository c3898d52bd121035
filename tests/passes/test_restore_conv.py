"""RestoreConv: plain operators that compute what the sparse node computed."""

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect, restore
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.custom_ops.schema import (
    CONCAT_OPS,
    DOMAIN,
    SPARSE_CONV,
    SPARSE_CONV_ADD,
    SPARSE_CONV_MAX_POOL,
    Activation,
    concat_op,
)
from onnx_sparseconv.passes.restore_conv import RestoreConv, dense_weight
from tests.support.odd_models import model, pruned, tensor
from tests.support.plain_ort import newest_opset, run
from tests.support.sparse_nodes import POOL, activate, attributes_for, convolve, pooled, sparse_model, split_x

OPERATORS = {
    Activation.NONE: [],
    Activation.RELU: ["Relu"],
    Activation.CLIP: ["Clip"],
    Activation.LEAKY_RELU: ["LeakyRelu"],
    Activation.HARD_SWISH: ["HardSigmoid", "Mul"],
    Activation.HARD_SIGMOID: ["HardSigmoid"],
    Activation.SIGMOID: ["Sigmoid"],
    Activation.SILU: ["Sigmoid", "Mul"],
}


@pytest.mark.parametrize("opset", [10, 13])
def test_a_clip_that_is_open_at_one_end_stays_so(opset):
    """In float16, whose range its bound is beyond; without a warning."""
    weight = pruned((8, 4, 3, 3), 0.8, np.float16)
    attributes = attributes_for(weight, activation=Activation.CLIP)
    model = sparse_model(
        dataclasses.replace(attributes, alpha=0.0, beta=float(np.finfo(np.float32).max)), SPARSE_CONV, opset=opset
    )
    restore(model)
    x = np.linspace(-9, 9, 2 * 4 * 5 * 6, dtype=np.float16).reshape(2, 4, 5, 6)
    expected = np.maximum(convolve(x, weight, pads=(1,) * 4), 0)
    np.testing.assert_allclose(run(model, {"X": x})[0], expected, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("opset", [9, 10, 11, 13, newest_opset()])
@pytest.mark.parametrize("op_type", [SPARSE_CONV, SPARSE_CONV_ADD, SPARSE_CONV_MAX_POOL, concat_op(3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("activation", Activation)
def test_every_activation_residual_pool_and_concat(op_type, activation, opset, dtype):
    rng = np.random.default_rng(0)
    weight, bias = pruned((8, 4, 3, 3), 0.8, dtype), rng.standard_normal(8).astype(dtype)
    attributes = attributes_for(weight, activation=activation)
    model = sparse_model(attributes, op_type, opset=opset, bias=bias)
    report = restore(model)
    assert report.layers == ("sparse",)
    expected_ops = [*(["Concat"] if op_type in CONCAT_OPS else []), "Conv"]
    expected_ops += [*(["Add"] if op_type == SPARSE_CONV_ADD else []), *OPERATORS[activation]]
    expected_ops += ["MaxPool"] if op_type == SPARSE_CONV_MAX_POOL else []
    assert [n.op_type for n in model.graph.node] == expected_ops
    assert next(n.name for n in model.graph.node if n.op_type == "Conv") == "sparse"
    assert len({n.name for n in model.graph.node}) == len(expected_ops)
    onnx.checker.check_model(model, full_check=True)

    x = rng.standard_normal((2, 4, 5, 6)).astype(dtype)
    inputs = split_x(op_type, x)
    expected = convolve(x, weight, pads=(1,) * 4) + bias.astype(np.float64).reshape(-1, 1, 1)
    if op_type == SPARSE_CONV_ADD:
        inputs["Z"] = rng.standard_normal(expected.shape).astype(dtype)
        expected = expected + inputs["Z"]
    (actual,) = run(model, inputs)
    assert actual.dtype == dtype
    bound = 1e-5 + 8 * np.finfo(dtype).eps * (np.abs(expected) + 1)
    expected, bound = pooled(op_type, activate(expected, attributes), bound)
    assert (np.abs(actual - expected) <= bound).all()


def test_a_pool_comes_back_with_its_windows():
    model = sparse_model(attributes_for(pruned((8, 4, 3, 3))), SPARSE_CONV_MAX_POOL)
    restore(model)
    pool = model.graph.node[-1]
    found = {a.name: tuple(onnx.helper.get_attribute_value(a)) for a in pool.attribute}
    assert (pool.op_type, found) == ("MaxPool", dataclasses.asdict(POOL))


def test_several_inputs_are_concatenated_again():
    model = sparse_model(attributes_for(pruned((8, 4, 1, 1)), pads=(0,) * 4), concat_op(3), bias=np.ones(8, np.float32))
    restore(model)
    concat, conv = model.graph.node
    assert (concat.name, list(concat.input)) == ("sparse_concat", ["X", "X2", "X3"])
    assert [onnx.helper.get_attribute_value(a) for a in concat.attribute] == [1]
    assert list(conv.input) == [concat.output[0], "sparse_weight", "B"]


def test_geometry_comes_back():
    attributes = attributes_for(pruned((8, 2, 3, 2)), group=2, strides=(2, 1), dilations=(1, 3), pads=(0, 1, 2, 3))
    model = sparse_model(attributes, SPARSE_CONV)
    restore(model)
    (node,) = model.graph.node
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert found == {"group": 2, "kernel_shape": [3, 2], "strides": [2, 1], "dilations": [1, 3], "pads": [0, 1, 2, 3]}
    assert list(node.input) == ["X", "sparse_weight"]


def test_same_padding_comes_back_without_pads():
    model = sparse_model(
        attributes_for(pruned((8, 2, 3, 3)), auto_pad="SAME_LOWER", pads=(), strides=(2, 2)), SPARSE_CONV
    )
    restore(model)
    found = {a.name: onnx.helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
    assert found["auto_pad"] == b"SAME_LOWER"
    assert "pads" not in found


@pytest.mark.parametrize(("stored", "element"), [(np.float16, np.float32), (np.float32, np.float16)])
def test_weights_take_the_type_of_the_node(stored, element):
    weight = pruned((8, 4, 3, 3), dtype=np.float16).astype(stored)
    attributes = attributes_for(weight, element_type=element)
    np.testing.assert_array_equal(dense_weight(attributes), weight.astype(element))
    model = sparse_model(attributes, SPARSE_CONV)
    restore(model)
    assert onnx.numpy_helper.to_array(model.graph.initializer[0]).dtype == element
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_special_weights_keep_their_bits(dtype):
    weight = np.zeros((2, 3, 2, 2), dtype)
    weight.reshape(-1)[:8] = [np.nan, -np.nan, np.inf, -np.inf, -0.0, np.finfo(dtype).smallest_subnormal, 1, 0]
    model = sparse_model(attributes_for(weight), SPARSE_CONV)
    restore(model)
    assert onnx.numpy_helper.to_array(model.graph.initializer[0]).tobytes() == weight.tobytes()


def test_a_pass_without_anything_to_do_says_so():
    model = sparse_model(attributes_for(pruned()), SPARSE_CONV)
    view = ModelView(model)
    before = model.SerializeToString(deterministic=True)
    result = RestoreConv({}, {}, 17, view.unique_name).apply(view.scopes[0].graph)
    assert (result.changed, result.edits, result.refusals) == (0, (), ())
    view.write_back()
    assert model.SerializeToString(deterministic=True) == before


def test_a_model_without_sparse_nodes_cannot_be_restored():
    model = sparse_model(attributes_for(pruned()), SPARSE_CONV)
    restore(model)
    assert all(o.domain != DOMAIN for o in model.opset_import)
    assert inspect(model).converted_by is None
    with pytest.raises(Exception, match="nothing to restore"):
        restore(model)


def test_names_that_other_nodes_have_are_not_taken():
    """ONNX Runtime refuses two nodes of one name."""
    nodes = [
        helper.make_node("Concat", ["X", "X"], ["c"], axis=1),
        helper.make_node("Conv", ["c", "W"], ["a"], "conv"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Neg", ["b"], ["d"], "conv_concat"),
        helper.make_node("Neg", ["d"], ["Y"], "conv_activation"),
    ]
    proto = model(nodes, [tensor(pruned((6, 32, 1, 1)), "W")])
    converted, _ = convert(proto, options=ConvertOptions(force=True, fuse_concats=True))
    restore(converted)
    names = [node.name for node in converted.graph.node]
    assert sorted(names) == ["conv", "conv_activation", "conv_activation_1", "conv_concat", "conv_concat_1"]
