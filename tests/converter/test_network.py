"""Layers that would pay by themselves stay dense where the network around them would lose more."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_sparseconv import ConvertOptions, convert, inspect
from onnx_sparseconv.converter.report import Reason

CHANNELS = 32


def weight(shape, density, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * (rng.random(shape) < density)).astype(np.float32)


POINTWISE = ((CHANNELS, CHANNELS, 1, 1), 0.05, 1)
DEPTHWISE = ((CHANNELS, 1, 3, 3), 1.0, CHANNELS)
# The CPU kernel has no loops of its own for it.
LARGE_DEPTHWISE = ((CHANNELS, 1, 9, 9), 1.0, CHANNELS)
SMALL = ((CHANNELS, 4, 1, 1), 1.0, CHANNELS // 4)
DENSE = ((CHANNELS, CHANNELS, 3, 3), 1.0, 1)


def network(*steps, size=16):
    """A chain: shapes and densities of weights with their groups, or names of operators with one input."""
    nodes, initializers, tensor = [], [], "x"
    for i, step in enumerate(steps):
        if isinstance(step, str):
            nodes.append(helper.make_node(step, [tensor], [f"t{i}"]))
        else:
            shape, density, group = step
            initializers.append(numpy_helper.from_array(weight(shape, density, i), f"w{i}"))
            pads = [shape[2] // 2] * 4
            nodes.append(helper.make_node("Conv", [tensor, f"w{i}"], [f"t{i}"], f"conv{i}", group=group, pads=pads))
        tensor = f"t{i}"
    shape = ["n", CHANNELS, size, size]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(tensor, 1, ["n", CHANNELS, None, None])],
        initializers,
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def reasons(model, **options):
    return [layer.verdict.reason for layer in inspect(model, ConvertOptions(**options)).layers]


@pytest.mark.parametrize("between", [(), ("Relu",), ("Relu", "Identity", "Sigmoid")])
def test_layers_beside_a_depthwise_one_stay_dense(between):
    model = network(POINTWISE, *between, LARGE_DEPTHWISE, *between, POINTWISE)
    assert reasons(model) == [Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE, Reason.BESIDE_DEPTHWISE]
    assert convert(model)[0] is None


@pytest.mark.parametrize("between", [(), ("Relu",), ("Relu", "Identity", "Sigmoid")])
def test_depthwise_layers_are_taken_along(between):
    model = network(POINTWISE, *between, DEPTHWISE, *between, POINTWISE, "Softmax", DEPTHWISE)
    assert reasons(model) == [Reason.REWRITE] * 3 + [Reason.DEPTHWISE]
    texts = [layer.verdict.text for layer in inspect(model).layers]
    assert [text.startswith("taken along: it is depthwise: ") for text in texts] == [False, True, False, False]
    # Layers in float16 have no loops of their own.
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for info in (model.graph.input[0], model.graph.output[0]):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert Reason.REWRITE not in reasons(model)


def test_one_sparse_side_is_enough_for_depthwise_and_small_layers():
    assert reasons(network(DEPTHWISE, SMALL, DEPTHWISE, POINTWISE, SMALL)) == [Reason.REWRITE] * 5
    found = reasons(network(POINTWISE, POINTWISE, DEPTHWISE, SMALL, DENSE))
    assert found == [Reason.REWRITE] * 4 + [Reason.TOO_DENSE]


def test_beside_depthwise_layers_it_takes_more_zeros():
    seventy = ((CHANNELS, CHANNELS, 1, 1), 0.3, 1)
    model = network(seventy, DEPTHWISE, seventy)
    assert reasons(model) == [Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE, Reason.BESIDE_DEPTHWISE]
    text = inspect(model).layers[0].verdict.text
    assert "below the 75.0% from which layers beside depthwise ones pay on a CPU" in text
    # Amid sparse layers it would be reordered for twice.
    for size in (8, 16):
        assert reasons(network(POINTWISE, DEPTHWISE, seventy, DEPTHWISE, POINTWISE, size=size)) == [Reason.REWRITE] * 5


def test_a_scale_that_is_a_convolution_is_a_depthwise_layer():
    scale = ((CHANNELS, 1, 1, 1), 1.0, CHANNELS)
    assert reasons(network(POINTWISE, scale, POINTWISE)) == [Reason.REWRITE] * 3


def test_small_maps_need_no_margin_amid_sparse_layers():
    seventy = ((CHANNELS, CHANNELS, 1, 1), 0.3, 1)
    assert reasons(network(POINTWISE, seventy, POINTWISE, size=8)) == [Reason.REWRITE] * 3
    assert reasons(network(POINTWISE, seventy, size=8)) == [Reason.REWRITE, Reason.TOO_DENSE]
    half = ((CHANNELS, CHANNELS, 1, 1), 0.5, 1)
    assert reasons(network(POINTWISE, half, POINTWISE, size=8)) == [Reason.REWRITE, Reason.TOO_DENSE, Reason.REWRITE]


def test_nothing_is_taken_along_with_layers_that_stay_dense():
    model = network(DEPTHWISE, POINTWISE, LARGE_DEPTHWISE)
    assert reasons(model) == [Reason.DEPTHWISE, Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE]
    model = network(DENSE, DENSE, DEPTHWISE, POINTWISE)
    assert reasons(model) == [Reason.TOO_DENSE] * 2 + [Reason.DEPTHWISE, Reason.LITTLE_WORK]


def test_what_lies_beyond_another_layer_is_no_neighbour():
    model = network(POINTWISE, "Relu", POINTWISE, "Relu", LARGE_DEPTHWISE)
    assert reasons(model) == [Reason.REWRITE, Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE]


@pytest.mark.parametrize("operator", ["Softmax", "GlobalAveragePool"])
def test_what_lies_beyond_other_work_is_no_neighbour(operator):
    for depthwise in (DEPTHWISE, LARGE_DEPTHWISE):
        assert reasons(network(POINTWISE, operator, depthwise)) == [Reason.REWRITE, Reason.DEPTHWISE]


def test_a_residual_connection_leads_to_a_neighbour():
    model = network(POINTWISE, POINTWISE, LARGE_DEPTHWISE)
    graph = model.graph
    graph.node.insert(2, helper.make_node("Add", ["t0", "t1"], ["sum"]))
    graph.node[3].input[0] = "sum"
    assert reasons(model) == [Reason.BESIDE_DEPTHWISE, Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE]


@pytest.mark.parametrize("options", [{"min_sparsity": 0.5}, {"force": True}, {"precision": "fp16"}])
def test_asking_for_it_overrules(options):
    model = network(POINTWISE, LARGE_DEPTHWISE, POINTWISE)
    first, _, last = reasons(model, **options)
    assert first is last is Reason.REWRITE


def test_gpus_have_a_rule_of_their_own():
    """It does not know of neighbours in another layout, which slow CPUs down."""
    found = reasons(network(POINTWISE, DEPTHWISE, POINTWISE), targets=("sm_90",))
    assert found == [Reason.REWRITE] * 3


def test_a_little_of_the_work_is_not_worth_it():
    # One pointwise layer among 3x3 ones: a ninth, then a nineteenth of the work.
    assert reasons(network(DENSE, POINTWISE)) == [Reason.TOO_DENSE, Reason.REWRITE]
    assert reasons(network(DENSE, POINTWISE, DENSE)) == [Reason.TOO_DENSE, Reason.LITTLE_WORK, Reason.TOO_DENSE]
    assert reasons(network(DENSE, POINTWISE, DENSE), force=True)[1] is Reason.REWRITE


def test_work_of_unknown_sizes_is_not_guessed():
    model = network(DENSE, POINTWISE, DENSE)
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = "size"
    rewritten = [layer.verdict.rewrite for layer in inspect(model).layers]
    assert rewritten == [False, True, False]
