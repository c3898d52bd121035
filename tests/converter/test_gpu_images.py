"""GPU images in converted models: that they are there, told, dropped when stale, and change nothing on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_sparseconv
from onnx_sparseconv.converter import ConvertOptions, convert, gpu_images, gpu_predictions, gpu_rule, inspect, restore
from onnx_sparseconv.converter.decisions import Cause, Choice, Decisions, LayerDecision
from onnx_sparseconv.converter.gpu_images import drop_stale, makers
from onnx_sparseconv.converter.report import Reason
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.errors import CompileError, UsageError
from onnx_sparseconv.kernels import fatbin, nvjitlink
from onnx_sparseconv.kernels.image_container import pack, parse
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice
from tests.kernels.compile_tasks import TinyGenerator
from tests.support import plain_ort
from tests.support.gpu_images import cubin_bytes, make_image, needs_nvfatbin, needs_nvrtc
from tests.support.gpu_rule import let_code_pay
from tests.support.odd_models import (
    FEEDS,
    branch,
    conv,
    dense_branch,
    if_node,
    model,
    pruned,
    tensor,
    value,
    x_and_condition,
)

pytestmark = needs_nvrtc
FASHION_MNIST = Path(onnx_sparseconv.__file__).parents[1] / "examples" / "fashion_mnist"


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch):
    let_code_pay(monkeypatch)


@pytest.fixture
def tiny(monkeypatch):
    """Images of one line of code, compiled by the real NVRTC."""
    monkeypatch.setattr("onnx_sparseconv.kernels.compile.StraightLineCode", TinyGenerator)


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "cache"))
    return ConvertOptions(targets=("sm_90",), jobs=1)


def two_layers(**attributes):
    nodes = [conv(out="h", name="first"), conv("V", "Y", "h", name="second", **attributes)]
    return model(nodes, [tensor(pruned(), "W"), tensor(pruned((16, 8, 3, 3)), "V")])


def sparse_nodes(proto):
    return [n for n in plain_ort.all_nodes(proto) if n.domain == "ai.sparseconv"]


def images_in(node):
    return parse(attributes_from_proto(node).cuda_images.tobytes())


def architectures(proto):
    return [[image.architecture for image in images_in(node)] for node in sparse_nodes(proto)]


def test_a_real_model_carries_images_and_still_runs_everywhere(options, tmp_path):
    source, path = FASHION_MNIST / "fashion_mnist.onnx", tmp_path / "fast.onnx"
    steps = []
    options = dataclasses.replace(options, jobs=2)
    proto, report = convert(source, path, options, compile_progress=lambda *step: steps.append(step))
    onnx.checker.check_model(str(path), full_check=True)
    assert architectures(onnx.load(path)) == [[90]] * 5
    assert [done for done, _, _ in steps] == [0, 1, 2, 3, 4, 5]
    inputs = plain_ort.inputs_for(proto)
    (wanted,) = plain_ort.run(source, inputs)
    np.testing.assert_allclose(plain_ort.run(path, inputs)[0], wanted, rtol=1e-4, atol=1e-4)
    (found,) = onnx_sparseconv.make_session(path).run(None, inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)

    rewritten = [layer for layer in report.model.layers if layer.verdict.rewrite]
    assert report.targets == ("sm_90",)
    for layer, node in zip(rewritten, sparse_nodes(proto), strict=True):
        (image,), (carried,) = layer.images, images_in(node)
        assert cubin_bytes(carried.code) > layer.nonzeros * 16
        assert (image.architecture, image.size_bytes) == ("sm_90", len(carried.code))
        assert (image.refusal, image.cached, image.plan) == ("", False, str(carried.plan))
        assert image.compiler.startswith("NVRTC ")
        assert image.time_us > 0
    stored = sum(attributes_from_proto(node).cuda_images.nbytes for node in sparse_nodes(proto))
    assert report.imaged_bytes_after == stored + sum(layer.sparse_bytes for layer in rewritten)
    assert report.imaged_bytes_before == sum(layer.dense_bytes for layer in rewritten)

    again, second = convert(source, None, options)
    assert all(image.cached for layer in second.model.layers for image in layer.images)
    assert again == proto

    for before, after in zip(report.model.layers, inspect(path).layers, strict=True):
        assert [dataclasses.replace(i, time_us=None) for i in before.images] == list(after.images)
    without, _ = convert(source, options=ConvertOptions(fuse_pools=True, force=True))
    restore(proto)
    restore(without)
    assert proto == without


@pytest.mark.usefixtures("tiny")
def test_images_are_made_for_every_target_once(options):
    proto, report = convert(two_layers(), options=dataclasses.replace(options, targets=("sm_90", "sm_80", "sm_90")))
    assert architectures(proto) == [[90, 80], [90, 80]]
    assert report.targets == ("sm_90", "sm_80")
    assert [[i.architecture for i in layer.images] for layer in report.model.layers] == [["sm_90", "sm_80"]] * 2


@pytest.mark.usefixtures("tiny")
def test_a_converted_model_can_be_given_images_later(options):
    converted, _ = convert(two_layers())
    assert architectures(converted) == [[], []]
    added, report = convert(converted, options=options)
    assert architectures(added) == [[90], [90]]
    assert (report.converted, report.already_converted, report.changed) == (False, True, True)
    assert report.imaged_bytes_after > 0
    replaced, _ = convert(added, options=dataclasses.replace(options, targets=("sm_75",)))
    assert architectures(replaced) == [[75], [75]]
    unasked, report = convert(added)
    assert unasked is None
    assert [len(layer.images) for layer in report.model.layers] == [1, 1]


@pytest.mark.usefixtures("tiny")
def test_an_image_says_from_how_many_images_on_it_runs(options, monkeypatch):
    """As the rule has it, where the library's kernel is foretold to be faster with fewer."""
    with_few = gpu_predictions.Prediction(90, 1, (8, 8), 100.0, 0.001, "the CSR kernel")
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda call: with_few if call.batch < 3 else None)
    proto = two_layers()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "N"
    converted, report = convert(proto, options=options)
    assert [[image.min_batch for image in images_in(node)] for node in sparse_nodes(converted)] == [[3], [3]]
    assert all(layer.images[0].plan.endswith(", from 3 images on") for layer in report.model.layers)


@pytest.mark.usefixtures("tiny")
def test_a_second_conversion_makes_images_of_all_layers(options, monkeypatch):
    monkeypatch.setattr(gpu_rule, "MOST_WEIGHTS_TAKEN_ALONG", 0)
    weights = [tensor(pruned(), "W"), tensor(pruned((16, 8, 3, 3), 0.4), "V")]
    nodes = [conv(out="h", name="first"), conv("V", "Y", "h", name="second")]
    once, _ = convert(model(nodes, weights), options=options)
    assert architectures(once) == [[90]]
    twice, report = convert(once, options=dataclasses.replace(options, min_sparsity=0.3, targets=("sm_80",)))
    assert architectures(twice) == [[80], [80]]
    assert [layer.verdict.reason for layer in report.model.layers] == [Reason.ALREADY_SPARSE, Reason.REWRITE]


@pytest.mark.usefixtures("tiny")
def test_a_dry_run_compiles_nothing_but_knows_its_targets(options, tmp_path):
    proto, report = convert(two_layers(), options=dataclasses.replace(options, dry_run=True))
    assert proto is None
    assert report.targets == ("sm_90",)
    assert any("dry run compiles no" in note for note in report.notes)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UsageError, match="sm_91"):
        convert(two_layers(), options=dataclasses.replace(options, dry_run=True, targets=("sm_91",)))


def test_what_cannot_have_an_image_says_why(options):
    dynamic = [onnx.helper.make_tensor_value_info("X", 1, ["n", 16, "h", "w"])]
    same = helper.make_node("Conv", ["X", "W"], ["Y"], name="conv", auto_pad="SAME_UPPER", strides=[2, 2])
    forced = dataclasses.replace(options, min_sparsity=0.5)  # else it would stay dense for this
    proto, report = convert(model([same], [tensor(pruned(), "W")], dynamic), options=forced)
    assert architectures(proto) == [[]]
    (image,) = report.model.layers[0].images
    assert (image.architecture, image.size_bytes) == ("sm_90", 0)
    assert "padding is only known at run time" in image.refusal
    assert (report.imaged_bytes_before, report.imaged_bytes_after) == (0, 0)
    # Of a model that is converted already nothing would then change.
    again, report = convert(proto, options=options)
    assert again is None
    assert not report.changed


@pytest.mark.usefixtures("tiny")
def test_nodes_of_one_name_and_nodes_in_subgraphs_get_their_own_images(options):
    then = branch([conv(out="t", name="same")], "t")
    nodes = [
        if_node(then, dense_branch(), "i"),
        conv("V", "j", "i", name="same", pads=[1, 1, 1, 1]),
        conv("U", "Y", "j", name="same"),
    ]
    weights = [tensor(pruned(), "W"), tensor(pruned((16, 8, 3, 3), 0.5), "V"), tensor(pruned(sparsity=0.55), "U")]
    source = model(nodes, weights, x_and_condition())
    proto, report = convert(source, options=dataclasses.replace(options, force=True))
    codes = {attributes_from_proto(n).weight.nnz_stored: images_in(n)[0].code for n in sparse_nodes(proto)}
    assert len(codes) == 3
    # The tiny kernel has a byte for each non-zero.
    sizes = [cubin_bytes(code) for _, code in sorted(codes.items())]
    assert sizes == sorted(set(sizes))
    layers = sorted(report.model.layers, key=lambda layer: layer.nonzeros)
    assert [layer.images[0].size_bytes for layer in layers] == [len(code) for _, code in sorted(codes.items())]


@pytest.mark.usefixtures("tiny")
def test_images_fit_the_node_as_it_is_after_fusing(options):
    relu = helper.make_node("Relu", ["h"], ["Y"], name="relu")
    proto, _ = convert(model([conv(out="h"), relu], [tensor(pruned(), "W")]), options=options)
    (node,) = sparse_nodes(proto)
    assert attributes_from_proto(node).activation == 1
    assert makers(proto) == makers(proto)
    assert len(makers(proto)) == 1


def _with_attribute(node, name, value):
    (attribute,) = (a for a in node.attribute if a.name == name)
    attribute.CopyFrom(helper.make_attribute(name, value))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("name", "value", "stale"),
    [
        ("activation", numpy_helper.from_array(np.asarray(3, np.int64), "activation"), True),
        ("strides", [2, 2], True),
        ("group", 2, True),
        ("element_type", 10, True),
        ("weight_values", None, True),
        ("alpha", 0.5, False),
    ],
)
def test_images_of_a_node_that_changes_are_dropped(options, name, value, stale):
    proto, _ = convert(two_layers(), options=options)
    before = makers(proto)
    assert drop_stale(proto, before) == ()
    first, _second = sparse_nodes(proto)
    if value is None:
        values = attributes_from_proto(first).weight.values
        value = numpy_helper.from_array(2 * values, name)
    _with_attribute(first, name, value)
    notes = drop_stale(proto, before)
    assert architectures(proto) == ([[], [90]] if stale else [[90], [90]])
    assert [("first" in note) for note in notes] == [True] * stale


@pytest.mark.usefixtures("tiny")
def test_images_that_read_other_inputs_are_dropped(options):
    nodes = [helper.make_node("Concat", ["X", "X"], ["c"], axis=1), conv(source="c", pads=[0] * 4)]
    proto = model(nodes, [tensor(pruned((8, 32, 1, 1)), "W")])
    proto, _ = convert(proto, options=dataclasses.replace(options, force=True))
    (node,), before = sparse_nodes(proto), makers(proto)
    assert [image.plan.source_begins for image in images_in(node)] == [(0, 16, 32)]
    assert drop_stale(proto, before) == ()
    _with_attribute(node, "input_channels", [8, 24])
    (note,) = drop_stale(proto, before)
    assert "dropped" in note
    assert architectures(proto) == [[]]


@pytest.mark.usefixtures("tiny")
def test_an_image_stays_where_a_node_takes_in_a_concat(options):
    """Several inputs are copied together before it runs."""
    nodes = [helper.make_node("Concat", ["X", "X"], ["c"], axis=1), conv(source="c", pads=[0] * 4)]
    nodes.append(conv("V", "Z", name="other"))
    initializers = [tensor(pruned((8, 32, 1, 1)), "W"), tensor(pruned((8, 16, 3, 3)), "V")]
    proto = model(nodes, initializers, outputs=[value("Y", [None] * 4), value("Z", [None] * 4)])
    chosen = {"conv": Choice.SPARSE, "other": Choice.DENSE}
    layers = (LayerDecision(name, "", 0, choice, choice, Cause.MEASURED, "timed") for name, choice in chosen.items())
    decisions = Decisions("m", {}, (), tuple(layers))
    options = dataclasses.replace(options, decisions=decisions, fuse_concats=False)
    before, _ = convert(proto, options=options)
    assert ([n.op_type for n in sparse_nodes(before)], architectures(before)) == (["SparseConv"], [[90]])
    after, report = convert(before, options=ConvertOptions(force=True, fuse_concats=True))
    assert [n.op_type for n in sparse_nodes(after)] == ["SparseConvConcat2", "SparseConv"]
    assert architectures(after) == [[90], []]
    assert not any("dropped" in note for note in report.notes)


@pytest.mark.parametrize(("is_joined", "has_image"), [(False, True), (True, False)])
@pytest.mark.usefixtures("tiny")
def test_what_was_measured_of_one_input_says_nothing_of_several(options, monkeypatch, is_joined, has_image):
    """A layer was timed without its Concat, which code of its own would have to be copied for."""
    nodes = [helper.make_node("Concat", ["X", "X"], ["c"], axis=1), conv(source="c", pads=[0] * 4)]
    proto = model(nodes, [tensor(pruned((64, 32, 1, 1)), "W")], outputs=[value("Y", [None] * 4)])
    code = KernelChoice("generated", 64, 16, 64)
    monkeypatch.setattr(gpu_images, "choose_kernels", lambda *_, **__: {90: CSR})
    layer = LayerDecision("conv", "", 0, Choice.SPARSE, Choice.SPARSE, Cause.MEASURED, "", kernels={"sm_90": code})
    options = dataclasses.replace(options, decisions=Decisions("m", {}, (), (layer,)), fuse_concats=is_joined)
    converted, _ = convert(proto, options=options)
    assert architectures(converted) == [[90] if has_image else []]


@pytest.mark.parametrize("has_shape", [True, False])
@pytest.mark.usefixtures("tiny")
def test_what_scales_channels_gets_no_image(options, has_shape):
    """The library's kernel takes what memory takes."""
    constants = [
        tensor(np.random.default_rng(i).uniform(0.5, 1.5, 16).astype(np.float32), n) for i, n in enumerate("gbmv")
    ]
    nodes = [helper.make_node("BatchNormalization", ["X", *"gbmv"], ["n"]), helper.make_node("Relu", ["n"], ["r"])]
    proto = model([*nodes, conv(source="r")], [*constants, tensor(pruned(), "W")])
    if not has_shape:
        proto.graph.node.insert(0, helper.make_node("Reshape", ["X", "sizes"], ["x"]))
        proto.graph.node[1].input[0] = "x"
        proto.graph.input.append(value("sizes", ["rank"], TensorProto.INT64))
    converted, _ = convert(proto, options=dataclasses.replace(options, force=True))
    assert architectures(converted) == [[], [90]]
    # Nor when it is converted again.
    again, _ = convert(converted, options=options)
    assert architectures(again) == [[], [90]]


@pytest.mark.usefixtures("tiny")
def test_the_same_attributes_in_another_spelling_are_the_same_node(options):
    proto, _ = convert(two_layers(), options=options)
    before = makers(proto)
    for node in sparse_nodes(proto):
        attributes = list(node.attribute)[::-1]
        del node.attribute[:]
        for attribute in attributes:
            if attribute.HasField("t"):
                values = numpy_helper.to_array(attribute.t)
                attribute.t.CopyFrom(
                    helper.make_tensor("other", attribute.t.data_type, values.shape, values.reshape(-1).tolist())
                )
            node.attribute.append(attribute)
    assert drop_stale(proto, before) == ()
    assert architectures(proto) == [[90], [90]]


@pytest.mark.usefixtures("tiny")
def test_a_broken_container_is_told_and_can_be_replaced(options):
    proto, _ = convert(two_layers(), options=options)
    first, _ = sparse_nodes(proto)
    container = bytearray(pack([make_image(90)]))
    container[-1] ^= 1
    _with_attribute(first, "cuda_images", numpy_helper.from_array(np.frombuffer(bytes(container), np.uint8), "c"))
    (image,) = inspect(proto).layers[0].images
    assert "cannot be read" in image.refusal
    assert "checksum" in image.refusal
    proto, _ = convert(proto, options=options)
    assert architectures(proto) == [[90], [90]]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("feed", ["float16", "outer-if", "outer-scan"])
def test_images_whatever_the_weight_is_fed_by(options, feed):
    source = FEEDS[feed].build()
    proto, report = convert(source, options=options)
    assert architectures(proto) == [[90]] * report.model.num_rewritten
    inputs = plain_ort.inputs_for(source)
    for wanted, found in zip(plain_ort.run(source, inputs), plain_ort.run(proto, inputs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2)


def test_a_compiler_that_fails_stops_the_conversion_and_writes_nothing(options, tmp_path, monkeypatch):
    monkeypatch.setattr("onnx_sparseconv.kernels.compile.StraightLineCode", lambda: TinyGenerator("syntax"))
    with pytest.raises(CompileError, match=r"layer 'first' for sm_90"):
        convert(two_layers(), tmp_path / "out.onnx", options)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.usefixtures("tiny")
def test_a_cache_that_cannot_be_written_is_noted_once(options, tmp_path):
    (tmp_path / "file").write_text("")
    proto, report = convert(two_layers(), options=dataclasses.replace(options, cache_dir=tmp_path / "file" / "cache"))
    assert architectures(proto) == [[90], [90]]
    assert len([n for n in report.notes if "cannot be written" in n]) == 1


@needs_nvfatbin
@pytest.mark.usefixtures("tiny")
def test_images_that_are_not_compressed_are_noted_once(options, monkeypatch):
    proto, report = convert(two_layers(), options=options)
    assert not any("compressed" in note for note in report.notes)
    monkeypatch.setattr(fatbin, "find", lambda _major: None)
    larger, report = convert(two_layers(), options=dataclasses.replace(options, targets=("sm_90", "sm_80")))
    assert [len(images) for images in architectures(larger)] == [2, 2]
    (note,) = (note for note in report.notes if "not compressed" in note)
    assert "pip install 'nvidia-nvfatbin" in note
    for small, large in zip(sparse_nodes(proto), sparse_nodes(larger), strict=True):
        assert len(images_in(small)[0].code) < len(images_in(large)[0].code)
        assert cubin_bytes(images_in(small)[0].code) == len(images_in(large)[0].code)


@needs_nvrtc
@pytest.mark.usefixtures("tiny")
def test_long_code_that_is_not_linked_is_noted_once(options, monkeypatch):
    monkeypatch.setattr(nvjitlink, "find", lambda _version: None)
    _, report = convert(two_layers(), options=options)
    assert not any("nvJitLink" in note for note in report.notes)
    monkeypatch.setattr(gpu_images, "is_linked", lambda _plan: True)
    _, report = convert(two_layers(), options=options)
    (note,) = (note for note in report.notes if "nvJitLink" in note)
    assert "pip install 'nvidia-nvjitlink" in note


def test_a_missing_tool_is_noted_of_the_compiler_whose_images_need_it():
    from onnx_sparseconv.kernels.compile import Outcome
    from onnx_sparseconv.kernels.targets import Target

    old, new = (SimpleNamespace(name=f"NVRTC {major}", version=(major, 1)) for major in (12, 13))
    targets = [Target(90, old), Target(120, new)]
    plan = dataclasses.replace(make_image(90).plan, num_tiles=8, code_bytes=1 << 20)
    outcomes = [Outcome(dataclasses.replace(make_image(90), plan=plan), "", 1.0), Outcome(None, "no plan", 0.0)]
    notes = gpu_images.missing_tools(targets, outcomes)
    assert ["NVRTC 12" in note for note in notes] == [True, True]
    assert ["nvidia-nvjitlink-cu12>=12.9" in note for note in notes] == [False, True]
    assert gpu_images.missing_tools(targets, outcomes[1:]) == []


def test_where_no_image_is_made_there_is_none_to_compress(options, monkeypatch):
    monkeypatch.setattr(fatbin, "find", lambda _major: None)
    same = helper.make_node("Conv", ["X", "W"], ["Y"], name="conv", auto_pad="SAME_UPPER", strides=[2, 2])
    dynamic = [onnx.helper.make_tensor_value_info("X", 1, ["n", 16, "h", "w"])]
    _, report = convert(model([same], [tensor(pruned(), "W")], dynamic), options=options)
    assert not any("compressed" in note for note in report.notes)
