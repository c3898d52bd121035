from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.runtime.depth import depth_of_comparison, load_structure, numerical_depth, rounded_to_tf32
from tests.runtime import networks


def _model(nodes, initializers=(), element=TensorProto.FLOAT, functions=(), output="y"):
    return helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", element, None)],
            [helper.make_tensor_value_info(output, element, None)],
            [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in initializers],
        ),
        functions=functions,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("f", 1)],
    )


@pytest.mark.parametrize(
    ("calls", "named"), [({"G": "F", "F": "F"}, "F"), ({"F": "G", "G": "F"}, "[FG]"), ({"F": "G", "G": "Relu"}, "")]
)
def test_functions_that_call_themselves_are_refused(tmp_path, calls, named):
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = [
        helper.make_function("f", name, ["a"], ["b"], [helper.make_node(called, ["a"], ["b"], domain=domain)], opsets)
        for name, called in calls.items()
        for domain in ["" if called == "Relu" else "f"]
    ]
    nodes = [helper.make_node(next(iter(calls)), ["x"], ["y"], domain="f")]
    onnx.save(_model(nodes, functions=functions), tmp_path / "model.onnx")
    if not named:
        assert numerical_depth(load_structure(tmp_path / "model.onnx")).depth == 0
        return
    with pytest.raises(ModelError, match=f"its function {named} calls itself"):
        load_structure(tmp_path / "model.onnx")


@pytest.mark.parametrize("perm", [(0, 1, 2, 9), (0, 1), (0, 0, 2, 3)])
def test_axes_that_a_weight_does_not_have_say_nothing_of_its_shape(perm):
    nodes = [
        helper.make_node("Transpose", ["t"], ["w"], perm=perm),
        helper.make_node("Constant", [], [], value=numpy_helper.from_array(np.zeros(3, np.float32))),
        helper.make_node("Conv", ["x", "w"], ["y"]),
    ]
    assert numerical_depth(_model(nodes, [("t", (8, 4, 3, 3))])).dot_length == 1


def test_a_chain_counts_every_layer_and_the_longest_dot_product():
    result = numerical_depth(networks.dense(networks.weights(layers=3)))
    assert (result.depth, result.dot_length, result.storage) == (3, 72, "float32")


def test_a_converted_model_counts_like_its_original():
    result = numerical_depth(networks.sparse(networks.weights(layers=3)))
    assert (result.depth, result.dot_length) == (3, 72)


def test_a_comparison_goes_by_the_coarser_model():
    single, half = (networks.dense(networks.weights(dtype, layers=3)) for dtype in (np.float32, np.float16))
    result = depth_of_comparison(single, half)
    assert (result.depth, result.dot_length, result.storage) == (4, 72, "float16")
    for pair in ((half, single), (half, half), (single, single)):
        assert depth_of_comparison(*pair) == numerical_depth(pair[0])


def test_tf32_is_for_float32_alone():
    models = (networks.dense(networks.weights(dtype, layers=3)) for dtype in (np.float32, np.float16, np.float64))
    single, half, double = map(numerical_depth, models)
    result = rounded_to_tf32(single)
    assert (result.depth, result.dot_length, result.storage) == (4, 72, "tf32")
    for other in (half, double):
        assert rounded_to_tf32(other) == other


def test_parallel_branches_count_once():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Conv", ["x", "w"], ["b"]),
        helper.make_node("Conv", ["b", "w"], ["c"]),
        helper.make_node("Add", ["a", "c"], ["y"]),
    ]
    assert numerical_depth(_model(nodes, [("w", (4, 4, 3, 3))])).depth == 2


@pytest.mark.parametrize(
    ("op_type", "shape", "attributes", "expected"),
    [
        ("Gemm", (30, 5), {}, 30),
        ("Gemm", (30, 5), {"transB": 1}, 5),
        ("MatMul", (2, 30, 5), {}, 30),
        ("Conv", (16, 3, 5, 5), {}, 75),
        ("ConvTranspose", (16, 3, 5, 5), {}, 400),
    ],
)
def test_the_dot_length_of_each_operator(op_type, shape, attributes, expected):
    node = helper.make_node(op_type, ["x", "w"], ["y"], **attributes)
    assert numerical_depth(_model([node], [("w", shape)])).dot_length == expected


def test_a_weight_is_seen_through_casts_and_transposes():
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("Identity", ["wt"], ["wi"]),
        helper.make_node("MatMul", ["x", "wi"], ["y"]),
    ]
    assert numerical_depth(_model(nodes, [("w", (7, 50))])).dot_length == 50


def test_a_masked_weight_is_seen_wherever_it_is_masked():
    """As PyTorch exports one that was pruned and not made permanent."""
    mask = helper.make_node("Mul", ["w", "m"], ["masked"])
    conv = helper.make_node("Conv", ["x", "masked"], ["y"])
    constants = [("w", (16, 3, 5, 5)), ("m", (16, 3, 5, 5))]
    assert numerical_depth(_model([mask, conv], constants)).dot_length == 75
    body = helper.make_graph([mask, conv], "body", [], [helper.make_tensor_value_info("y", 1, None)])
    branch = helper.make_node("If", ["condition"], ["y"], then_branch=body, else_branch=body)
    assert numerical_depth(_model([branch], constants)).dot_length == 75
    flat = helper.make_node("Reshape", ["masked", "shape"], ["rows"])
    shape = helper.make_node("Constant", [], ["shape"], value=numpy_helper.from_array(np.array([16, -1])))
    product = helper.make_node("Gemm", ["x", "rows"], ["y"], transB=1)
    assert numerical_depth(_model([mask, shape, flat, product], constants)).dot_length == 75


def test_bodies_of_if_and_functions_count():
    body = helper.make_graph(
        [helper.make_node("Conv", ["a", "w"], ["t"])], "then", [], [helper.make_tensor_value_info("t", 1, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["e"])], "else", [], [helper.make_tensor_value_info("e", 1, None)]
    )
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("If", ["condition"], ["b"], then_branch=body, else_branch=other),
        helper.make_node("Block", ["b"], ["y"], domain="f"),
    ]
    function = helper.make_function(
        "f",
        "Block",
        ["p"],
        ["q"],
        [helper.make_node("MatMul", ["p", "p"], ["s"]), helper.make_node("MatMul", ["s", "s"], ["q"])],
        [helper.make_opsetid("", 17)],
    )
    assert numerical_depth(_model(nodes, [("w", (4, 4, 3, 3))], functions=[function])).depth == 4


def test_weights_of_functions_are_seen():
    """Those that the call gives, and those inside, masked or not."""
    nodes = [helper.make_node("Mul", ["p", "m"], ["masked"]), helper.make_node("Conv", ["a", "masked"], ["b"])]
    function = helper.make_function("f", "Block", ["a", "p", "m"], ["b"], nodes, [helper.make_opsetid("", 17)])
    call = helper.make_node("Block", ["x", "w", "k"], ["y"], domain="f")
    constants = [("w", (16, 3, 5, 5)), ("k", (1, 3, 1, 1))]
    assert numerical_depth(_model([call], constants, functions=[function])).dot_length == 75


def test_a_function_that_calls_itself_ends():
    function = helper.make_function(
        "f", "Block", ["p"], ["q"], [helper.make_node("Block", ["p"], ["q"], domain="f")], [helper.make_opsetid("f", 1)]
    )
    call = helper.make_node("Block", ["x"], ["y"], domain="f")
    assert numerical_depth(_model([call], functions=[function])).depth == 0
    unknown = helper.make_node("Conv", ["y", "x"], ["z"])
    assert numerical_depth(_model([call, unknown], functions=[function], output="z")).depth == 1


def test_the_coarsest_type_counts():
    assert numerical_depth(networks.dense(networks.weights(np.float16))).storage == "float16"
    relu = helper.make_node("Relu", ["x"], ["y"])
    assert numerical_depth(_model([relu], element=TensorProto.DOUBLE)).storage == "float64"
    assert numerical_depth(_model([relu], element=TensorProto.DOUBLE)).accumulation == "float64"
    to_half = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)
    assert numerical_depth(_model([to_half])).storage == "float16"
    quantise = helper.make_node("QuantizeLinear", ["x", "s"], ["y"])
    assert numerical_depth(_model([quantise])).storage == "int8"


def test_files_that_are_no_models_are_refused(tmp_path):
    (tmp_path / "text.onnx").write_text("hello, this is not a model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "no_graph.onnx").write_bytes(onnx.ModelProto(ir_version=8).SerializeToString())
    for name in ("text.onnx", "empty.onnx", "no_graph.onnx", "absent.onnx", "."):
        with pytest.raises(ModelError):
            load_structure(tmp_path / name)


def test_a_model_in_memory_is_no_file():
    with pytest.raises(UsageError, match="give its path"):
        load_structure(networks.dense(networks.weights()))
