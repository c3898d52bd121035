from __future__ import annotations

import pytest
from onnx import helper

from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.runtime.layer_times import (
    GraphIndex,
    match_layers,
    read_profile,
    summarise_events,
    times_by_layer,
    with_names,
)
from tests.runtime import networks


def _event(name, time_us, op="Conv", provider="CPUExecutionProvider", category="Node"):
    arguments = {"op_name": op, "provider": provider}
    return {"cat": category, "name": name, "dur": time_us, "args": arguments}


def test_events_are_summed_up_by_node():
    events = [
        _event("model_run", 99, category="Session"),
        _event("conv0_fence_before", 1),
        *(_event("conv0_kernel_time", t) for t in (10, 30, 20)),
        *(_event("body_kernel_time", 5, op="Add") for _ in range(6)),
    ]
    times = summarise_events(events, runs=3)
    assert [(t.name, t.op_type, t.time_us) for t in times] == [("conv0", "Conv", 20), ("body", "Add", 10)]


def _profile(*names_and_times):
    return summarise_events([_event(f"{name}_kernel_time", t) for name, t in names_and_times], runs=1)


def test_nodes_are_found_by_name_and_by_tensor():
    model = networks.dense(networks.weights(layers=3))
    assert times_by_layer(model, _profile(("conv0", 1), ("fused conv1", 2), ("y_nchwc", 3))) == {
        "conv0": 1,
        "conv1": 2,
        "conv2": 3,
    }
    assert times_by_layer(model, _profile(("r0_nchwc", 1), ("c1_nchwc", 2))) == {"conv0": 1, "conv1": 2}


def test_nodes_without_a_name_are_given_one():
    model = networks.dense(networks.weights(layers=2), names=False)
    named = with_names(model)
    assert [node.name for node in named.graph.node] == ["c0", "", "c1", ""]
    assert [node.name for node in model.graph.node] == [""] * 4
    assert times_by_layer(model, _profile(("c0", 1), ("fused c1", 2))) == {"c0": 1, "c1": 2}


def test_what_cannot_be_told_is_left_out():
    model = networks.dense(networks.weights(layers=2))
    assert times_by_layer(model, _profile(("Conv_0", 1), ("other", 1), ("z_nchwc", 1))) == {}
    assert times_by_layer(model, _profile(("conv0", 1), ("r0_nchwc", 2))) == {}


def test_layers_of_one_name_cannot_be_told_apart():
    model = networks.dense(networks.weights(layers=3))
    model.graph.node[4].name = "conv0"
    assert times_by_layer(model, _profile(("conv0", 1), ("conv1", 2), ("y_nchwc", 3))) == {"conv1": 2}


def test_nor_can_a_layer_and_one_in_a_subgraph():
    model = networks.dense(networks.weights(layers=2))
    inner = helper.make_graph([helper.make_node("Conv", ["a", "b"], ["c"], name="conv1")], "inner", [], [])
    model.graph.node.append(helper.make_node("If", ["condition"], ["d"], then_branch=inner, else_branch=inner))
    assert times_by_layer(model, _profile(("conv0", 1), ("conv1", 2))) == {"conv0": 1}


def test_a_profile_that_is_no_json_is_an_error(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('[{"name": "a "quoted" name"}]')
    with pytest.raises(ModelError, match="profile cannot be read"):
        read_profile(path, 1)


def test_a_sum_of_two_convolutions_is_neither():
    model = networks.dense(networks.weights(layers=1))
    model.graph.node.append(helper.make_node("Conv", ["x", "w0"], ["other"], name="other"))
    model.graph.node.append(helper.make_node("Add", ["c0", "other"], ["sum"]))
    index = GraphIndex(model)
    assert index.layer_of_event("sum_nchwc") is None
    assert index.layer_of_event("other_nchwc").name == "other"


@pytest.mark.parametrize("names", [True, False])
def test_layers_of_both_models_are_matched(names):
    layer_weights = networks.weights(layers=2)
    dense, sparse = networks.dense(layer_weights, names=names), networks.sparse(layer_weights, names=names)
    before = _profile(("r0_nchwc", 100))
    after = summarise_events([_event("conv0_kernel_time" if names else "c0_kernel_time", 25, op="SparseConv")], runs=1)
    first, second = match_layers(dense, before, sparse, after)
    assert (first.original_us, first.converted_us, first.converted_op, first.speedup) == (100, 25, "SparseConv", 4)
    assert (second.original_us, second.converted_us, second.speedup) == (None, None, None)


NORM = ["BatchNormalization", "Mul", "Relu"]


def _normalised(*, is_sparse):
    """x through Neg, what normalises, and a Conv; or through Neg and two sparse nodes. Not a model to run."""
    nodes = [helper.make_node("Neg", ["x"], ["a"], name="neg")]
    if is_sparse:
        nodes.append(helper.make_node("SparseConv", ["a", ""], ["d"], name="norm", domain="ai.sparseconv"))
        nodes.append(helper.make_node("SparseConv", ["d", ""], ["y"], name="conv", domain="ai.sparseconv"))
    else:
        nodes.append(helper.make_node("BatchNormalization", ["a", "s", "t", "m", "v"], ["b"], name="norm"))
        nodes.append(helper.make_node("Unsqueeze", ["w", "axes"], ["u"], name="constant"))
        nodes.append(helper.make_node("Mul", ["b", "u"], ["c"], name="mul"))
        nodes.append(helper.make_node("Relu", ["c"], ["d"], name="relu"))
        nodes.append(helper.make_node("Conv", ["d", "k"], ["y"], name="conv"))
    return helper.make_model(helper.make_graph(nodes, "g", [], []))


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ([("norm", 10), ("mul", 20), ("relu", 30)], 60),
        ([("b_bn_nchwc", 10), ("c_mul_nchwc", 20), ("relu", 30)], 60),
        ([("b_bn_nchwc", 10), ("mul", 20)], 30),
        ([("norm", 10), ("relu", 30)], None),
        ([], None),
    ],
)
def test_what_one_convolution_stands_for_is_timed_together(before, wanted):
    dense, sparse = _normalised(is_sparse=False), _normalised(is_sparse=True)
    events = [_event(f"{name}_kernel_time", 5, op="SparseConv") for name in ("norm", "conv")]
    scale, convolution = match_layers(dense, _profile(*before, ("conv", 7)), sparse, summarise_events(events, runs=1))
    assert (scale.name, scale.original_us, scale.converted_us) == ("norm", wanted, 5)
    assert list(scale.stands_for) == NORM
    assert (convolution.original_us, convolution.stands_for) == (7, ())


def test_what_is_too_far_apart_is_not_told():
    dense, sparse = _normalised(is_sparse=False), _normalised(is_sparse=True)
    relu = next(node for node in dense.graph.node if node.name == "relu")
    relu.input[0] = "far39"
    dense.graph.node.extend(
        helper.make_node("Abs", [f"far{i - 1}" if i else "c"], [f"far{i}"], name=f"abs{i}") for i in range(40)
    )
    scale, _ = match_layers(dense, _profile(("norm", 10), ("mul", 20), ("relu", 30)), sparse, ())
    assert (scale.stands_for, scale.original_us) == ((), None)


def test_nothing_stands_for_a_convolution_that_was_not_found():
    dense, sparse = _normalised(is_sparse=False), _normalised(is_sparse=True)
    scale, convolution = match_layers(dense, (), sparse, ())
    assert (list(scale.stands_for), scale.original_us) == (NORM, None)
    assert (convolution.stands_for, convolution.original_us) == ((), None)
