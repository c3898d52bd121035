"""Whatever a model holds beside its Conv is in the result as it was."""

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, prune, restore
from onnx_sparseconv.converter.analyse import inspect
from onnx_sparseconv.converter.metadata import DECISIONS_KEY, VERSION_KEY
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.custom_ops.schema import DOMAIN
from tests.support.odd_models import (
    FEEDS,
    branch,
    call,
    constant,
    conv,
    dense_branch,
    function,
    if_node,
    model,
    ornate,
    pruned,
    tensor,
    value,
    with_overloads,
    with_training,
    x_and_condition,
)
from tests.support.plain_ort import all_nodes, assert_close, inputs_for, run

FORCE = ConvertOptions(force=True)


def everything() -> dict[str, ModelProto]:
    models = {name: feed.build() for name, feed in FEEDS.items()}
    return models | {"ornate": ornate(), "overloads": with_overloads(), "training": with_training()}


def raw(proto):
    return proto.SerializeToString(deterministic=True)


def copy_of(proto):
    other = ModelProto()
    other.CopyFrom(proto)
    return other


def without_additions(proto):
    """A converted model less what a conversion adds."""
    plain = copy_of(proto)
    for field, is_ours in (
        (plain.functions, lambda f: f.domain == DOMAIN),
        (plain.opset_import, lambda o: o.domain == DOMAIN),
        (plain.metadata_props, lambda p: p.key in (VERSION_KEY, DECISIONS_KEY)),
    ):
        kept = [item for item in field if not is_ours(item)]
        del field[:]
        field.extend(kept)
    return plain


@pytest.mark.parametrize("name", everything())
def test_a_view_that_nobody_edits_writes_back_the_same_bytes(name):
    proto = everything()[name]
    before = raw(proto)
    assert ModelView(proto).write_back() == set()
    assert raw(proto) == before


@pytest.mark.parametrize("name", everything())
def test_inspecting_changes_nothing(name):
    proto = everything()[name]
    before = raw(proto)
    inspect(proto)
    assert raw(proto) == before


@pytest.mark.parametrize("build", [ornate, with_overloads], ids=["ornate", "overloads"])
def test_a_conversion_changes_only_the_conv_and_its_weight(build):
    source = build()
    before = raw(source)
    proto, report = convert(source)
    assert report.model.num_rewritten == 1
    assert raw(source) == before
    expected = copy_of(source)
    index = next(i for i, n in enumerate(expected.graph.node) if n.op_type == "Conv")
    node = proto.graph.node[index]
    assert (node.domain, node.op_type, list(node.input), node.name) == (DOMAIN, "SparseConv", ["X", ""], "conv")
    assert node.doc_string == expected.graph.node[index].doc_string
    assert getattr(node, "metadata_props", []) == getattr(expected.graph.node[index], "metadata_props", [])
    expected.graph.node[index].CopyFrom(node)
    weights = [i for i, t in enumerate(expected.graph.initializer) if t.name == "W"]
    del expected.graph.initializer[weights[0]]
    assert raw(without_additions(proto)) == raw(expected)
    assert [o for o in proto.opset_import if o.domain == DOMAIN] == [helper.make_opsetid(DOMAIN, 1)]


@pytest.mark.parametrize("build", [ornate, with_overloads], ids=["ornate", "overloads"])
def test_restore_gives_back_the_source(build):
    source = build()
    proto, _ = convert(source)
    restore(proto)
    # The weight comes last among the initializers, without its documentation, and defaults are written out.
    by_name = {t.name: t for t in proto.graph.initializer}
    original = {t.name: t for t in source.graph.initializer}
    assert by_name.keys() == original.keys()
    np.testing.assert_array_equal(*(onnx.numpy_helper.to_array(d["W"]) for d in (by_name, original)))
    for one in (proto, source):
        kept = [t for t in one.graph.initializer if t.name != "W"]
        del one.graph.initializer[:]
        one.graph.initializer.extend(kept)
        for node in one.graph.node:
            if node.op_type == "Conv":
                del node.attribute[:]
    assert raw(proto) == raw(source)


def test_a_weight_that_training_reads_stays():
    proto, report = convert(with_training())
    assert report.converted
    assert [t.name for t in proto.graph.initializer] == ["W"]
    onnx.checker.check_model(proto)


def test_an_output_of_a_subgraph_states_its_rank():
    """ONNX Runtime 1.20 cannot run a Scan whose body ends in a custom op without one."""
    proto, _ = convert(FEEDS["outer-scan"].build())
    scan = next(n for n in proto.graph.node if n.op_type == "Scan")
    (output,) = next(a.g for a in scan.attribute if a.name == "body").output
    assert len(output.type.tensor_type.shape.dim) == 4


def test_symbolic_dimensions_stay():
    source = model(
        [conv()], [tensor(pruned(), "W")], [value("X", ["batch", 16, "h", None])], [value("Y", ["batch", 8, "h", "w"])]
    )
    proto, _ = convert(source)
    assert proto.graph.input == source.graph.input
    assert proto.graph.output == source.graph.output


@pytest.mark.parametrize("on", [("import",), ("node",), ("import", "node")], ids="+".join)
def test_the_default_domain_spelled_out(on):
    """ONNX Runtime takes either spelling anywhere; onnx's checker does not."""
    source = model([conv(), helper.make_node("Identity", ["X"], ["Z"])], [tensor(pruned(), "W")])
    source.graph.output.append(value("Z", (2, 16, 6, 6)))
    if "import" in on:
        source.opset_import[0].domain = "ai.onnx"
    if "node" in on:
        for node in source.graph.node:
            node.domain = "ai.onnx"
    proto, report = convert(source)
    assert report.converted
    assert report.model.opset == source.opset_import[0].version
    onnx.checker.check_model(proto, full_check=True)
    inputs = inputs_for(source)
    assert_close(run(proto, inputs)[0], run(source, inputs)[0], 144, 100)


def test_nodes_with_one_name_or_none():
    """ONNX Runtime refuses two nodes of one name, but onnx does not."""
    nodes = [conv(out="a", name="same"), conv("V", out="b", name="same"), conv("U", out="c", name="")]
    source = model(
        [*nodes, helper.make_node("Sum", ["a", "b", "c"], ["Y"])],
        [tensor(pruned(seed=i), name) for i, name in enumerate("WVU")],
    )
    proto, report = convert(source)
    assert [layer.name for layer in report.model.layers] == ["same", "same", "Conv_c"]
    assert all(n.name for n in proto.graph.node if n.domain == DOMAIN)
    restore(proto)
    weights = [i.name for i in proto.graph.initializer]
    assert len(weights) == 3
    restored = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for node, seed in zip(proto.graph.node, range(3), strict=False):
        np.testing.assert_array_equal(restored[node.input[1]], pruned(seed=seed))


def test_ifs_of_one_path_do_not_share_their_shapes():
    """The tensors in their branches have one name but different sizes, and SAME padding depends on the size."""

    def in_branch(size, name, output):
        limits = {"b": [0, 0], "e": [size, size], "a": [2, 3]}
        cut = helper.make_node("Slice", ["X", "b", "e", "a"], ["cut"])
        node = helper.make_node("Conv", ["cut", "W"], ["then"], auto_pad="SAME_UPPER", strides=[2, 2])
        then = branch([*(constant(k, v, np.int64) for k, v in limits.items()), cut, node], "then")
        return if_node(then, branch([helper.make_node("Neg", ["X"], ["else"])], "else"), output, name)

    source = model(
        [in_branch(5, "if", "Y1"), in_branch(6, "/if", "Y2")],
        [tensor(pruned(), "W")],
        x_and_condition(),
        [value(f"Y{i}", ["a", "b", "c", "d"]) for i in (1, 2)],
    )
    proto, report = convert(source)
    assert report.model.num_rewritten == 2
    inputs = inputs_for(source)
    for a, b in zip(run(proto, inputs), run(source, inputs), strict=True):
        assert_close(a, b, 144, 100)


def test_an_output_that_is_also_read():
    nodes = [conv(out="Y"), helper.make_node("Relu", ["Y"], ["Z"])]
    source = model(nodes, [tensor(pruned(), "W")], outputs=[value("Y", list("abcd")), value("Z", list("abcd"))])
    proto, _ = convert(source)
    inputs = inputs_for(source)
    for a, b in zip(run(proto, inputs), run(source, inputs), strict=True):
        assert_close(a, b, 144, 100)


def test_a_node_whose_outputs_are_all_unnamed_stays():
    odd = helper.make_node("Effect", ["X"], [""], domain="custom.domain")
    source = model([odd, conv()], [tensor(pruned(), "W")])
    source.opset_import.append(helper.make_opsetid("custom.domain", 1))
    before = raw(source)
    ModelView(source).write_back()
    assert raw(source) == before


def test_functions_that_are_not_involved_stay_as_they_are():
    other = function("other", ["x", "w"], [conv("w", "y", "x", "dynamic")])
    inner = function("inner", ["x"], [constant("w", pruned()), conv("w", "y", "x", "fixed")])
    source = model(
        [call("other", ["X", "V"], "a"), call("inner", ["X"], "b"), helper.make_node("Add", ["a", "b"], ["Y"])],
        inputs=[value("X", (2, 16, 6, 6)), value("V", (8, 16, 3, 3))],
        functions=[other, inner],
    )
    proto, _ = convert(source)
    names = {f.name for f in proto.functions}
    assert "inner" in names
    inputs = inputs_for(source)
    assert_close(run(proto, inputs)[0], run(source, inputs)[0], 288, 500)


# --- several conversions ----------------------------------------------------------------------------------------------


def two_layers(**names):
    nodes = [
        conv(out="h", name=names.get("first", "first")),
        conv("V", "Y", "h", name=names.get("second", "second")),
    ]
    return model(nodes, [tensor(pruned(sparsity=0.9), "W"), tensor(pruned((16, 8, 3, 3), 0.5), "V")])


def test_a_lower_threshold_converts_the_rest():
    source = two_layers()
    once, first = convert(source)
    assert [layer.verdict.rewrite for layer in first.model.layers] == [True, False]
    twice, second = convert(once, options=ConvertOptions(min_sparsity=0.4))
    assert second.already_converted
    assert [layer.verdict.rewrite for layer in second.model.layers] == [False, True]
    assert len([f for f in twice.functions if f.domain == DOMAIN]) == 1
    assert len([o for o in twice.opset_import if o.domain == DOMAIN]) == 1
    assert len([p for p in twice.metadata_props if p.key == VERSION_KEY]) == 1
    onnx.checker.check_model(twice, full_check=True)
    inputs = inputs_for(source)
    assert_close(run(twice, inputs)[0], run(source, inputs)[0], 144 * 72, 3000)
    report = restore(twice)
    assert report.layers == ("first", "second")
    assert {t.name for t in twice.graph.initializer} == {"W", "V"}


def test_a_restored_model_converts_to_the_same_nodes():
    once, _ = convert(two_layers(), options=FORCE)
    again = copy_of(once)
    restore(again)
    again, _ = convert(again, options=FORCE)
    for a, b in zip(once.graph.node, again.graph.node, strict=True):
        assert raw(a) == raw(b)


def test_restore_of_a_half_broken_model_changes_nothing_and_names_the_node():
    proto, _ = convert(two_layers(), options=FORCE)
    node = proto.graph.node[1]
    next(a for a in node.attribute if a.name == "weight_columns").t.raw_data = b"\xff" * 4
    before = raw(proto)
    with pytest.raises(Exception, match="second") as caught:
        restore(proto)
    assert caught.type.__name__ == "ModelError"
    assert raw(proto) == before


def test_restore_reuses_a_weight_that_stayed():
    source = FEEDS["shared-other-op"].build()
    proto, _ = convert(source)
    restore(proto)
    assert len(proto.graph.initializer) == 1


def test_a_function_of_somebody_else_in_our_domain_stays():
    other = helper.make_function(
        DOMAIN, "Other", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], [helper.make_opsetid("", 17)]
    )
    source = model([conv(out="c"), helper.make_node("Other", ["c"], ["Y"], domain=DOMAIN)], [tensor(pruned(), "W")])
    source.functions.append(other)
    source.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    proto, _ = convert(source)
    assert {f.name for f in proto.functions} == {"Other", "SparseConv"}
    restore(proto)
    assert [f.name for f in proto.functions] == ["Other"]
    inputs = inputs_for(source)
    assert_close(run(proto, inputs)[0], run(source, inputs)[0], 144, 100)


def test_pruning_keeps_the_documentation_of_a_tensor():
    source = ornate()
    source.graph.initializer[0].doc_string = "the weight"
    before = copy_of(source)
    prune(source, None, sparsity=0.95)
    values = onnx.numpy_helper.to_array(source.graph.initializer[0])
    assert np.count_nonzero(values) == round(0.05 * values.size)
    source.graph.initializer[0].CopyFrom(before.graph.initializer[0])
    assert raw(source) == raw(before)


@pytest.mark.parametrize("opset", [7, 8])
def test_raising_the_opset_keeps_what_the_model_says_of_itself(opset):
    source = model([conv(out="c"), helper.make_node("Abs", ["c"], ["Y"])], [tensor(pruned(), "W")], opset=opset)
    source.ir_version = 3
    source.graph.input.append(value("W", (8, 16, 3, 3)))
    source.graph.value_info.append(value("c", [2, 8, "h", 6]))
    source.graph.node[1].doc_string = "a node"
    source.graph.doc_string = "a graph"
    source.graph.quantization_annotation.add(tensor_name="c")
    source.metadata_props.add(key="author", value="somebody")
    for owner in (source.graph, source.graph.node[1]):
        if hasattr(owner, "metadata_props"):
            owner.metadata_props.add(key="of", value="x")
    proto, report = convert(source)
    assert any(f"raised from {opset}" in note for note in report.notes)
    assert proto.graph.node[1] == source.graph.node[1]
    assert list(proto.graph.value_info) == list(source.graph.value_info)
    assert list(proto.graph.quantization_annotation) == list(source.graph.quantization_annotation)
    assert getattr(proto.graph, "metadata_props", []) == getattr(source.graph, "metadata_props", [])
    assert proto.graph.doc_string == source.graph.doc_string
    assert [p.value for p in proto.metadata_props if p.key == "author"] == ["somebody"]
    assert [i.name for i in proto.graph.input] == ["X"]


def test_an_opset_that_cannot_be_raised_leaves_the_layer_dense():
    source = model([conv(out="c"), call("f", ["c"])], [tensor(pruned(), "W")], opset=8)
    body = helper.make_function(
        "local.functions", "f", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], [helper.make_opsetid("", 8)]
    )
    source.functions.append(body)
    source.opset_import.append(helper.make_opsetid("local.functions", 1))
    onnx.checker.check_model(source)
    proto, report = convert(source, options=FORCE)
    assert proto is None
    assert str(report.model.layers[0].verdict.reason) == "unsupported-opset"
    assert inspect(source).layers[0].verdict == convert(source)[1].model.layers[0].verdict


def test_everything_in_the_zoo_can_be_converted_and_stays_valid():
    for name, proto in everything().items():
        converted, _ = convert(proto, options=FORCE)
        if converted is not None:
            onnx.checker.check_model(converted)
            assert any(n.domain == DOMAIN for n in all_nodes(converted)), name


def test_graph_attributes_in_lists_are_not_forgotten_when_looking_for_users():
    """A weight that only a graph in a GRAPHS attribute reads besides the Conv stays."""
    inner = branch([helper.make_node("Identity", ["W"], ["copy"])], "copy")
    odd = helper.make_node("Odd", ["X"], ["z"], domain="custom.domain")
    odd.attribute.append(helper.make_attribute("graphs", [inner]))
    source = model([odd, conv()], [tensor(pruned(), "W")])
    source.opset_import.append(helper.make_opsetid("custom.domain", 1))
    proto, _ = convert(source)
    assert [t.name for t in proto.graph.initializer] == ["W"]


def test_types_and_condition_of_the_helpers():
    assert x_and_condition()[1].type.tensor_type.elem_type == TensorProto.BOOL
    assert dense_branch().output[0].name == "else_out"
