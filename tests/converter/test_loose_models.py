"""Models that ONNX Runtime opens although they break a rule of ONNX."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect
from onnx_sparseconv.converter.loose_models import name_apart, sort_nodes
from onnx_sparseconv.errors import ModelError
from tests.support.odd_models import FEEDS, conv, model, pruned, tensor, value
from tests.support.plain_ort import assert_close, inputs_for, run

ROW_LENGTH, MAGNITUDE = 144, 144 * 4.0 * 4.0

FORCE = ConvertOptions(force=True)


def assert_same(converted, proto):
    inputs = inputs_for(proto)
    (actual,), (expected,) = run(converted, inputs), run(proto, inputs)
    assert_close(actual, expected, ROW_LENGTH, MAGNITUDE)


def chain():
    """Conv, Relu, Neg."""
    nodes = [conv(), helper.make_node("Relu", ["Y"], ["relu"]), helper.make_node("Neg", ["relu"], ["out"])]
    return model(nodes, [tensor(pruned(), "W")], outputs=[value("out", ["a", "b", "c", "d"])])


def in_disorder(proto):
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


@pytest.mark.parametrize("in_a_file", [False, True])
def test_nodes_in_disorder_are_sorted(tmp_path, in_a_file):
    proto = in_disorder(chain())
    with pytest.raises(onnx.checker.ValidationError, match="topologically sorted"):
        onnx.checker.check_model(proto)
    source = proto
    if in_a_file:
        source = tmp_path / "model.onnx"
        source.write_bytes(proto.SerializeToString())
    converted, report = convert(source, options=FORCE)
    assert report.converted
    assert_same(converted, chain())


def test_nodes_in_order_are_left_alone():
    proto = chain()
    before = proto.SerializeToString()
    assert not sort_nodes(proto.graph)
    assert proto.SerializeToString() == before


def branch(name):
    """An If whose branches give the negative of what is outside, by way of a tensor that is their own."""
    nodes = [helper.make_node("Neg", [name], ["mine"]), helper.make_node("Identity", ["mine"], ["given"])]
    given = helper.make_tensor_value_info("given", TensorProto.FLOAT, None)
    return helper.make_graph(nodes[::-1], "branch", [], [given])


def test_what_subgraphs_read_counts_and_their_own_names_do_not():
    """A node behind the If makes a tensor of the name that one inside has, of what the If gives."""
    nodes = [
        helper.make_node("Neg", ["chosen"], ["mine"]),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=branch("relu"), else_branch=branch("relu")),
        helper.make_node("Relu", ["X"], ["relu"]),
    ]
    graph = helper.make_graph(nodes, "g", [value("X", [2]), value("yes", [1])], [value("mine", [2])])
    assert sort_nodes(graph)
    assert [node.op_type for node in graph.node] == ["Relu", "If", "Neg"]
    (inner, _) = (attribute.g for attribute in graph.node[1].attribute)
    assert [node.op_type for node in inner.node] == ["Neg", "Identity"]


def test_a_circle_is_refused_as_ever():
    nodes = [helper.make_node("Add", ["X", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    with pytest.raises(ModelError, match=r"not valid ONNX: .*topologically sorted"):
        inspect(model(nodes, []))


def test_long_chains_are_sorted():
    nodes = [helper.make_node("Neg", [f"t{i}"], [f"t{i + 1}"]) for i in range(5000)]
    graph = helper.make_graph(nodes[::-1], "g", [value("t0", [2])], [value("t5000", [2])])
    assert sort_nodes(graph)
    assert [node.input[0] for node in graph.node] == [f"t{i}" for i in range(5000)]


def without_shape(name):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def test_an_output_without_a_shape_gets_that_which_is_inferred():
    proto = chain()
    proto.graph.output[0].CopyFrom(without_shape("out"))
    converted, report = convert(proto, options=FORCE)
    assert report.converted
    assert_same(converted, proto)


def test_shapes_that_are_not_known_are_asked_for(tmp_path):
    proto = chain()
    proto.graph.input.append(value("shape", ["n"]))
    proto.graph.input[-1].type.tensor_type.elem_type = TensorProto.INT64
    proto.graph.node.append(helper.make_node("Reshape", ["out", "shape"], ["shaped"]))
    proto.graph.output.append(without_shape("shaped"))
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=r"model.onnx: the model's output 'shaped' has a type but no shape.*state its"):
        inspect(path)
    proto = FEEDS["initializer"].build()
    proto.graph.input[0].CopyFrom(without_shape(proto.graph.input[0].name))
    with pytest.raises(ModelError, match=r"^the model's input 'X' has a type but no shape"):
        inspect(proto)


def test_casts_at_the_end_are_sorted():
    """As ONNX Runtime's own tool writes float16."""
    proto = chain()
    half = proto.graph.initializer[0]
    half.CopyFrom(tensor(pruned().astype(np.float16), "W"))
    cast = helper.make_node("Cast", ["X"], ["X16"], to=TensorProto.FLOAT16)
    proto.graph.node[0].input[0] = "X16"
    proto.graph.node.append(cast)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    converted, report = convert(proto, options=FORCE)
    assert report.converted
    assert_same(converted, proto)


def shadowing(inner, *more):
    """A Conv, and an If whose branches have a weight of the same name, in which another branch may stand."""

    def branch(output, nodes=()):
        nodes = [*nodes, conv(name=f"conv_{output}", out=output)]
        return helper.make_graph(nodes, output, [], [value(output, [None] * 4)], [inner])

    nested = helper.make_node("If", ["condition"], ["c"], "if_c", then_branch=branch("d"), else_branch=branch("e"))
    other = branch("b", more and [nested])
    outer_if = helper.make_node("If", ["condition"], ["chosen"], "if", then_branch=branch("a"), else_branch=other)
    nodes = [conv(), outer_if, helper.make_node("Add", ["Y", "chosen"], ["sum"])]
    proto = model(nodes, [tensor(pruned(), "W")], outputs=[value("sum", [None] * 4)])
    proto.graph.input.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, []))
    return proto


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("condition", [False, True])
def test_the_weight_of_a_branch_is_its_own(is_nested, condition):
    """ONNX forbids names of tensors around it, its checker does not see it, and ONNX Runtime reads the inner one."""
    proto = shadowing(tensor(3 * pruned(), "W"), *[is_nested] * is_nested)
    onnx.checker.check_model(proto)
    converted, report = convert(proto, options=FORCE)
    assert report.model.num_rewritten == (5 if is_nested else 3)
    inputs = {**inputs_for(shadowing(tensor(pruned(), "W"))), "condition": np.asarray(condition)}
    (actual,), (expected,) = run(converted, inputs), run(proto, inputs)
    assert_close(actual, expected, ROW_LENGTH, 4 * MAGNITUDE)


def test_names_that_are_apart_are_left_alone():
    proto = shadowing(tensor(pruned(), "V"))
    before = proto.SerializeToString()
    assert not name_apart(proto)
    assert proto.SerializeToString() == before


def test_what_is_renamed_is_renamed_throughout():
    proto = shadowing(tensor(pruned(), "W"))
    branch = proto.graph.node[1].attribute[0].g
    annotation = branch.quantization_annotation.add(tensor_name="X")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="W")
    proto.graph.value_info.append(helper.make_tensor_value_info("W_1", TensorProto.INT64, None))  # of no tensor
    assert name_apart(proto)
    assert branch.initializer[0].name == annotation.quant_parameter_tensor_names[0].value == "W_2"


def test_a_graph_without_a_name_gets_one():
    proto = chain()
    proto.graph.name = ""
    converted, _ = convert(proto, options=FORCE)
    assert converted.graph.name == "graph"
    assert_same(converted, proto)
