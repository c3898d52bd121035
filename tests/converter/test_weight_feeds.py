"""Every way to feed a Conv its weight: the verdict, the converted model, and the way back."""

import numpy as np
import onnx
import onnx.inliner
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect, restore
from onnx_sparseconv.converter.constants import ConstantResolver
from onnx_sparseconv.converter.conv_sites import find_conv_sites
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.report import NOT_FORCIBLE, Reason
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.schema import DOMAIN
from tests.support.odd_models import FEEDS, pruned
from tests.support.plain_ort import all_nodes, assert_close, inputs_for, run

FORCE = ConvertOptions(force=True)
feeds = pytest.mark.parametrize("feed", FEEDS.values(), ids=FEEDS.keys())
forcible = pytest.mark.parametrize(
    "feed", [f for f in FEEDS.values() if f.forced], ids=[n for n, f in FEEDS.items() if f.forced]
)


def weights_of(proto):
    """Shape and bits of the weight of every Conv, in the order of the nodes, functions inlined."""
    proto = onnx.inliner.inline_local_functions(proto) if proto.functions else proto
    sites = find_conv_sites(ModelView(proto), ShapeMap(proto))
    return [(s.weight.values.shape, s.weight.values.tobytes()) for s in sites if s.is_conv and s.weight is not None]


def sparse_nodes(proto):
    return [n for n in all_nodes(proto) if n.domain == DOMAIN]


def assert_same_outputs(first, second, proto):
    for condition in (True, False):
        inputs = inputs_for(proto) | {"C": np.asarray(condition)}
        for a, b in zip(run(first, inputs), run(second, inputs), strict=True):
            # rows of at most 144 weights of about 1, a tenth of them not zero; inputs of about 1
            assert_close(a, b, row_length=144, magnitude=100)


@feeds
def test_the_models_are_valid(feed):
    onnx.checker.check_model(feed.build())


@feeds
def test_inspect_gives_the_reason_and_the_source(feed):
    report = inspect(feed.build())
    assert {layer.verdict.reason for layer in report.layers} == {feed.reason}
    assert {layer.weight_source for layer in report.layers} == {feed.source}
    assert all(layer.verdict.text for layer in report.layers)
    assert report.num_rewritten == (len(report.layers) if feed.reason is Reason.REWRITE else 0)


@feeds
def test_force_rewrites_what_can_be_rewritten(feed):
    proto, report = convert(feed.build(), options=FORCE)
    assert report.model.num_rewritten == feed.forced
    assert (proto is None) == (feed.forced == 0)
    if proto is None:
        assert feed.reason in NOT_FORCIBLE
    elif feed.reason is not Reason.REWRITE:
        assert {layer.verdict.reason for layer in report.model.layers} == {Reason.FORCED}


@forcible
def test_the_converted_model_gives_the_same_outputs_in_a_plain_onnx_runtime(feed):
    source = feed.build()
    before = source.SerializeToString(deterministic=True)
    proto, _ = convert(source, options=FORCE)
    assert source.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(proto, full_check=True)
    assert len(sparse_nodes(proto)) == feed.forced
    assert_same_outputs(source, proto, source)


@forcible
def test_what_only_the_old_weight_needed_is_gone(feed):
    proto, _ = convert(feed.build(), options=FORCE)
    tensors = {t.name for t in proto.graph.initializer} | {t.values.name for t in proto.graph.sparse_initializer}
    nodes = [n for n in all_nodes(proto) if "Conv" not in n.op_type]
    read = {name for n in all_nodes(proto) for name in n.input} | {o.name for o in proto.graph.output}
    assert tensors <= read
    assert set(feed.kept) <= tensors | {o for n in nodes for o in n.output}
    assert not ({"W", "stored", "mask"} - set(feed.kept)) & tensors
    assert "W" in feed.kept or "W" not in {i.name for i in proto.graph.input}


@forcible
def test_restore_gives_the_weights_bit_for_bit_and_the_same_outputs(feed):
    source = feed.build()
    proto, _ = convert(source, options=FORCE)
    report = restore(proto)
    assert len(report.layers) == feed.forced
    onnx.checker.check_model(proto, full_check=True)
    assert not sparse_nodes(proto)
    assert not [f for f in proto.functions if f.domain == DOMAIN]
    assert all(o.domain != DOMAIN for owner in (proto, *proto.functions) for o in owner.opset_import)
    assert not [p for p in proto.metadata_props if p.key.startswith("onnx_sparseconv")]
    assert weights_of(proto) == weights_of(source)
    assert_same_outputs(source, proto, source)


@forcible
def test_converting_again_with_force_says_that_there_is_nothing_left(feed):
    proto, _ = convert(feed.build(), options=FORCE)
    again, report = convert(proto, options=FORCE)
    assert again is None
    assert report.already_converted
    assert {layer.verdict.reason for layer in report.model.layers} == {Reason.ALREADY_SPARSE}


@pytest.mark.parametrize(("opset", "axes"), [(11, [3, 2]), (11, [-1, -2]), (11, [2, -1]), (17, [3, -2])])
def test_unsqueeze_counts_axes_in_its_result(opset, axes):
    weight = pruned((8, 16, 3)).reshape(128, 3)[:, :2]
    given = {"inputs": ["w"], "axes": axes} if opset < 13 else {"inputs": ["w", "axes"]}
    unsqueeze = helper.make_node("Unsqueeze", outputs=["W"], **given)
    graph = helper.make_graph(
        [unsqueeze, helper.make_node("Conv", ["X", "W"], ["Y"], name="conv")],
        "g",
        [helper.make_tensor_value_info("X", 1, [1, 2, 5, 5])],
        [helper.make_tensor_value_info("Y", 1, None)],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array(axes), "axes")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (site,) = find_conv_sites(ModelView(proto), ShapeMap(proto))
    assert site.weight.values.shape == (128, 2, 1, 1)
    converted, _ = convert(proto, options=FORCE)
    x = {"X": np.random.default_rng(0).standard_normal((1, 2, 5, 5)).astype(np.float32)}
    for a, b in zip(run(proto, x), run(converted, x), strict=True):
        assert_close(a, b, row_length=2, magnitude=100)


def test_unsqueeze_with_axes_that_are_none_is_no_constant():
    for axes in ([0, 0], [7], [2**40], [2, 0]):
        nodes = [helper.make_node("Unsqueeze", ["w"], ["W"], axes=axes)]
        resolved = _resolve(nodes, numpy_helper.from_array(pruned((8, 16, 3)), "w"))
        assert resolved is None if axes != [2, 0] else resolved.values.shape == (1, 8, 1, 16, 3)


def _resolve(nodes, stored):
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("W", 1, None)], [stored])
    view = ModelView(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8))
    return ConstantResolver(view).resolve(view.scopes[0].graph.outputs[0], view.scopes[0])
