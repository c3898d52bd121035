"""The portable body: the same results in every plain runtime, and nothing of it left after optimisation."""

import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from onnx_sparseconv.custom_ops.function_body import MIN_OPSET, make_function, make_functions
from onnx_sparseconv.custom_ops.schema import (
    CONCAT_OPS,
    OP_TYPES,
    SPARSE_CONV,
    SPARSE_CONV_ADD,
    SPARSE_CONV_MAX_POOL,
    Activation,
    concat_op,
)
from tests.support.odd_models import pruned
from tests.support.plain_ort import newest_opset, optimised_ops, run, run_optimised
from tests.support.sparse_nodes import activate, attributes_for, convolve, pooled, sparse_model, sparse_node, split_x

OPSETS = range(MIN_OPSET, newest_opset() + 1)
# The others differ from these by their number of inputs only.
OPS = (SPARSE_CONV, SPARSE_CONV_ADD, SPARSE_CONV_MAX_POOL, concat_op(2), concat_op(8))
DTYPES = (np.float32, np.float16)
# What may be left of a SparseConv: the Conv, fused or not, the residual, layout and type changes, the activation, and
# what ONNX Runtime itself makes of activations that it has no float16 kernel for.
PLAIN = {"Conv", "FusedConv", "Add", "Mul", "Sum", "Cast", "ReorderInput", "ReorderOutput"}
PLAIN |= {"Relu", "Clip", "LeakyRelu", "HardSigmoid", "Sigmoid", "HardSwish", "QuickGelu"}
PLAIN |= {"Concat", "MaxPool", "Max", "Min", "Less", "Where", "Div", "Sub", "Neg", "Exp"}
# onnx's reference implementation of unary operators takes no attribute that refers to a function's.
NOT_IN_REFERENCE = {Activation.LEAKY_RELU, Activation.HARD_SIGMOID}
# onnx 1.17 computes HardSigmoid of float16 in float32 and refuses its own result.
NOT_IN_REFERENCE |= {Activation.HARD_SWISH} if onnx.__version__.startswith("1.17") else set()


def case(op_type, activation, dtype, *, shape=(12, 8, 3, 3), bias=True, spatial=(5, 7), **geometry):
    """A model's attributes, bias and inputs, and the float64 result with the bound on its error."""
    rng = np.random.default_rng(5)
    weight = pruned(shape, 0.8, dtype)
    weight[1] = 0
    attributes = attributes_for(weight, activation=activation, **geometry)
    x = rng.standard_normal((2, shape[1] * attributes.geometry.group, *spatial)).astype(dtype)
    b = rng.standard_normal(shape[0]).astype(dtype) if bias else None
    g = attributes.geometry
    form = {"strides": g.strides, "pads": g.pads, "dilations": g.dilations, "group": g.group}
    expected = convolve(x, weight, **form)
    magnitude = convolve(np.abs(x), np.abs(weight), **form)
    if bias:
        expected += b.astype(np.float64).reshape(-1, *[1] * len(spatial))
    inputs = split_x(op_type, x)
    if op_type == SPARSE_CONV_ADD:
        inputs["Z"] = rng.standard_normal(expected.shape).astype(dtype)
        expected = expected + inputs["Z"]
    # Products and the two additions in float; each intermediate result is rounded to the type; no activation here
    # has a slope above 1.5.
    row_length = int(np.prod(shape[1:])) + 2
    bound = 1.5 * (row_length * np.finfo(np.float32).eps * (magnitude + 4))
    bound += 8 * np.finfo(dtype).eps * (np.abs(expected) + 1)
    return attributes, b, inputs, *pooled(op_type, activate(expected, attributes), bound)


def assert_within(actual, expected, bound):
    error = np.abs(actual.astype(np.float64) - expected)
    assert actual.shape == expected.shape
    assert (error <= bound).all(), f"off by {error.max()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("op_type", OPS)
def test_every_activation_folds_to_plain_operators(op_type, opset, dtype, tmp_path):
    for activation in Activation:
        attributes, bias, inputs, expected, bound = case(op_type, activation, dtype)
        model = sparse_model(attributes, op_type, opset=opset, bias=bias)
        onnx.checker.check_model(model, full_check=True)
        (actual,), left = run_optimised(model, inputs, tmp_path)
        assert actual.dtype == dtype
        assert_within(actual, expected, bound)
        assert set(left) <= PLAIN, (activation, left)
        assert len([op for op in left if "Conv" in op]) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("opset", [9, 10, 11, 13, newest_opset()])
@pytest.mark.parametrize("op_type", OPS)
def test_it_gives_the_same_where_nothing_is_optimised(op_type, opset, dtype):
    for activation in Activation:
        attributes, bias, inputs, expected, bound = case(op_type, activation, dtype)
        (actual,) = run(sparse_model(attributes, op_type, opset=opset, bias=bias), inputs, optimise=False)
        assert_within(actual, expected, bound)


@pytest.mark.parametrize("opset", [13, 17, onnx.defs.onnx_opset_version()])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("op_type", OPS)
def test_the_reference_evaluator_gives_the_same(op_type, dtype, opset):
    for activation in [a for a in Activation if a not in NOT_IN_REFERENCE]:
        attributes, bias, inputs, expected, bound = case(op_type, activation, dtype, shape=(4, 8, 3, 3))
        model = sparse_model(attributes, op_type, opset=opset, bias=bias)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (actual,) = ReferenceEvaluator(model).run(None, inputs)
        # It adds in the type itself, so in float16 every product may be off.
        assert_within(actual, expected, bound if dtype == np.float32 else bound + 0.05)


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("op_type", CONCAT_OPS)
def test_every_number_of_concatenated_inputs(op_type, opset, tmp_path):
    attributes, bias, inputs, expected, bound = case(op_type, Activation.RELU, np.float32)
    model = sparse_model(attributes, op_type, opset=opset, bias=bias)
    onnx.checker.check_model(model, full_check=True)
    assert_within(run(model, inputs)[0], expected, bound)
    assert sorted(optimised_ops(model, tmp_path)).count("Concat") == 1


@pytest.mark.parametrize("opset", OPSETS)
def test_shape_inference_sees_through_the_body(opset):
    attributes, bias, *_ = case(SPARSE_CONV, Activation.RELU, np.float32)
    model = sparse_model(attributes, SPARSE_CONV, opset=opset, bias=bias)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    tensor = inferred.graph.output[0].type.tensor_type
    assert tensor.elem_type == TensorProto.FLOAT
    if tensor.HasField("shape"):
        assert len(tensor.shape.dim) == 4


@pytest.mark.parametrize("height", [1, 2, 3, 5, 7, 11, 12])
@pytest.mark.parametrize("opset", [9, 13])
def test_every_slice_height(height, opset, tmp_path):
    attributes, bias, inputs, expected, bound = case(SPARSE_CONV, Activation.NONE, np.float32, slice_height=height)
    model = sparse_model(attributes, SPARSE_CONV, opset=opset, bias=bias)
    for optimise in (True, False):
        assert_within(run(model, inputs, optimise=optimise)[0], expected, bound)
    assert set(optimised_ops(model, tmp_path)) <= PLAIN


FORMS = {
    "1-D": {"shape": (12, 4, 5), "spatial": (9,)},
    "3-D": {"shape": (6, 2, 3, 2, 3), "spatial": (5, 4, 6)},
    "1x1": {"shape": (12, 4, 1, 1), "pads": (0, 0, 0, 0)},
    "one channel": {"shape": (2, 1, 3, 3)},
    "one weight": {"shape": (2, 1, 1, 1), "pads": (0, 0, 0, 0)},
    "groups": {"shape": (12, 4, 3, 3), "group": 3},
    "depthwise": {"shape": (12, 1, 3, 3), "group": 12},
    "strides": {"strides": (2, 3)},
    "dilations": {"dilations": (1, 2)},
    "asymmetric pads": {"pads": (0, 2, 1, 0)},
    "no bias": {"bias": False},
    "long rows": {"shape": (3, 300, 3, 3)},
    "many rows": {"shape": (1500, 2, 1, 1), "pads": (0, 0, 0, 0)},
    "32-bit columns": {"shape": (2, 7300, 3, 3), "spatial": (3, 3)},
    "many slices": {"shape": (1200, 2, 1, 1), "pads": (0, 0, 0, 0), "slice_height": 1},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("opset", [9, 17])
def test_every_form_of_convolution(form, opset, tmp_path):
    attributes, bias, inputs, expected, bound = case(SPARSE_CONV, Activation.NONE, np.float32, **form)
    model = sparse_model(attributes, SPARSE_CONV, opset=opset, bias=bias)
    onnx.checker.check_model(model, full_check=True)
    assert_within(run(model, inputs)[0], expected, bound)
    assert set(optimised_ops(model, tmp_path)) <= PLAIN


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("size", [6, 7])
def test_same_padding_of_a_size_known_at_run_time(auto_pad, size):
    weight = pruned((8, 4, 4, 4), 0.8)
    attributes = attributes_for(weight, auto_pad=auto_pad, pads=(), strides=(2, 3))
    x = np.random.default_rng(0).standard_normal((1, 4, size, size)).astype(np.float32)
    totals = [(-(-size // s) - 1) * s + 4 - size for s in (2, 3)]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    pads = (*small, *large) if auto_pad == "SAME_UPPER" else (*large, *small)
    expected = convolve(x, weight, strides=(2, 3), pads=pads)
    (actual,) = run(sparse_model(attributes, SPARSE_CONV), {"X": x})
    assert_within(actual, expected, 1e-4)


@pytest.mark.parametrize(("stored", "element"), [(np.float16, np.float32), (np.float32, np.float16)])
def test_weights_may_be_stored_in_the_other_type(stored, element):
    weight = pruned((8, 4, 3, 3), 0.8, np.float16).astype(stored)
    attributes = attributes_for(weight, element_type=element)
    x = np.random.default_rng(0).standard_normal((1, 4, 5, 5)).astype(element)
    (actual,) = run(sparse_model(attributes, SPARSE_CONV), {"X": x})
    assert actual.dtype == element
    assert_within(actual, convolve(x, weight, pads=(1,) * 4), 1e-4 if element == np.float32 else 3e-2)


def test_special_weights_survive():
    """Infinity and denormals reach the Conv."""
    weight = pruned((8, 4, 1, 1), 0.5)
    weight[0, 0] = np.inf
    weight[1] = 0
    weight[1, 0] = np.float32(1e-40)
    attributes = attributes_for(weight, pads=(0, 0, 0, 0))
    (actual,) = run(sparse_model(attributes, SPARSE_CONV), {"X": np.ones((1, 4, 2, 2), np.float32)}, optimise=False)
    assert np.isinf(actual[0, 0]).all()


def wrapped(model, *, in_if=False, in_function=False, nested=False):
    """The model with its node moved into a branch, or into a function, or a function that another one calls."""
    node = model.graph.node[0]
    imports = list(model.opset_import)
    if in_if:
        then = helper.make_graph([node], "then", [], [helper.make_empty_tensor_value_info("Y")])
        other = helper.make_node("Neg", ["Y_other"], ["Y_neg"])
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        copy.output[0] = "Y_other"
        otherwise = helper.make_graph([copy, other], "else", [], [helper.make_empty_tensor_value_info("Y_neg")])
        choice = helper.make_node("If", ["C"], ["Y_if"], then_branch=then, else_branch=otherwise)
        del model.graph.node[:]
        model.graph.node.append(choice)
        model.graph.input.append(helper.make_tensor_value_info("C", TensorProto.BOOL, []))
        model.graph.output[0].name = "Y_if"
    if in_function:
        inputs = [name for name in node.input if name]
        imports.append(helper.make_opsetid("local", 1))
        model.functions.append(helper.make_function("local", "f", inputs, ["Y"], [node], imports))
        call = helper.make_node("f", inputs, ["Y"], domain="local")
        if nested:
            model.functions.append(helper.make_function("local", "g", inputs, ["Y"], [call], imports))
            call = helper.make_node("g", inputs, ["Y"], domain="local")
        del model.graph.node[:]
        model.graph.node.append(call)
        model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("op_type", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("opset", [11, 17, newest_opset()])
def test_in_the_branches_of_an_if(op_type, dtype, opset, tmp_path):
    attributes, bias, inputs, expected, bound = case(op_type, Activation.CLIP, dtype)
    model = wrapped(sparse_model(attributes, op_type, opset=opset, bias=bias), in_if=True)
    for condition in (True, False):
        (actual,) = run(model, inputs | {"C": np.asarray(condition)})
        assert_within(actual, expected if condition else -expected, bound)
    assert set(optimised_ops(model, tmp_path)) <= PLAIN | {"If", "Neg"}


@pytest.mark.parametrize("op_type", OPS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
def test_in_functions(op_type, nested, dtype, tmp_path):
    attributes, bias, inputs, expected, bound = case(op_type, Activation.SILU, dtype)
    model = wrapped(sparse_model(attributes, op_type, bias=bias), in_function=True, nested=nested)
    assert_within(run(model, inputs)[0], expected, bound)
    assert set(optimised_ops(model, tmp_path)) <= PLAIN


def test_both_names_in_one_model():
    first = attributes_for(pruned((8, 8, 3, 3), 0.8, seed=1), activation=Activation.RELU)
    second = attributes_for(pruned((8, 8, 3, 3), 0.8, seed=2), activation=Activation.SIGMOID)
    io = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 8, 5, 5]) for n in "XY"]
    graph = helper.make_graph(
        [
            sparse_node(first, SPARSE_CONV, ["X", ""], "h", "a"),
            sparse_node(second, SPARSE_CONV_ADD, ["h", "", "X"], "Y", "b"),
        ],
        "g",
        io[:1],
        io[1:],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.sparseconv", 1)],
        ir_version=8,
        functions=make_functions(OP_TYPES, 17),
    )
    x = np.random.default_rng(0).standard_normal((1, 8, 5, 5)).astype(np.float32)
    hidden = activate(convolve(x, pruned((8, 8, 3, 3), 0.8, seed=1), pads=(1,) * 4), first)
    expected = activate(convolve(hidden, pruned((8, 8, 3, 3), 0.8, seed=2), pads=(1,) * 4) + x, second)
    assert_within(run(model, {"X": x})[0], expected, 1e-4)


def test_functions_come_in_a_fixed_order_and_once():
    assert [f.name for f in make_functions([SPARSE_CONV_ADD, SPARSE_CONV, SPARSE_CONV_ADD], 17)] == list(OP_TYPES[:2])
    assert make_functions([], 17) == []
    assert make_function(SPARSE_CONV, 17) == make_function(SPARSE_CONV, 17)
