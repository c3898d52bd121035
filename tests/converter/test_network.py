"""Layers that would pay by themselves stay dense where the network around them would lose more."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv import ConvertOptions, convert, inspect
from onnx_sparseconv.converter.report import Reason

CHANNELS = 32


def weight(shape, density, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * (rng.random(shape) < density)).astype(np.float32)


POINTWISE = ((CHANNELS, CHANNELS, 1, 1), 0.05, 1)
DEPTHWISE = ((CHANNELS, 1, 3, 3), 1.0, CHANNELS)
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
    model = network(POINTWISE, *between, DEPTHWISE, *between, POINTWISE)
    assert reasons(model) == [Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE, Reason.BESIDE_DEPTHWISE]
    assert convert(model)[0] is None


def test_what_lies_beyond_another_layer_is_no_neighbour():
    model = network(POINTWISE, "Relu", POINTWISE, "Relu", DEPTHWISE)
    assert reasons(model) == [Reason.REWRITE, Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE]


@pytest.mark.parametrize("operator", ["Softmax", "GlobalAveragePool"])
def test_what_lies_beyond_other_work_is_no_neighbour(operator):
    model = network(POINTWISE, operator, DEPTHWISE)
    assert reasons(model) == [Reason.REWRITE, Reason.DEPTHWISE]


def test_a_residual_connection_leads_to_a_neighbour():
    model = network(POINTWISE, POINTWISE, DEPTHWISE)
    graph = model.graph
    graph.node.insert(2, helper.make_node("Add", ["t0", "t1"], ["sum"]))
    graph.node[3].input[0] = "sum"
    assert reasons(model) == [Reason.BESIDE_DEPTHWISE, Reason.BESIDE_DEPTHWISE, Reason.DEPTHWISE]


@pytest.mark.parametrize("options", [{"min_sparsity": 0.5}, {"force": True}, {"precision": "fp16"}])
def test_asking_for_it_overrules(options):
    model = network(POINTWISE, DEPTHWISE, POINTWISE)
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
