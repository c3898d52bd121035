"""Every form of Conv: the converted model gives the original's outputs, on sizes known before and only at run time."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect, restore
from onnx_sparseconv.converter.conv_sites import find_conv_sites
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.report import Reason
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.schema import concat_op
from tests.support.odd_models import conv, model, pruned, tensor, value
from tests.support.plain_ort import assert_close, inputs_for, newest_opset, run
from tests.support.sparse_nodes import attributes_for, convolve, sparse_model

FORCE = ConvertOptions(force=True)


def conv_model(weight, spatial, *, dynamic=False, bias=None, opset=17, ir_version=8, dtype=np.float32, **attributes):
    """One Conv; ``bias`` is None, "empty", "initializer" or "runtime"."""
    rank, group = weight.ndim, attributes.get("group", 1)
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    channels = weight.shape[1] * group
    shape = [None] * rank if dynamic == "rank" else ["n", channels, *(f"s{i}" for i in range(rank - 2))]
    inputs = [value("X", shape if dynamic else [2, channels, *spatial], element_type)]
    initializers = [tensor(weight, "W")]
    names = ["X", "W"]
    if bias:
        names.append("" if bias == "empty" else "B")
    values = np.random.default_rng(3).standard_normal(weight.shape[0]).astype(dtype)
    if bias == "initializer":
        initializers.append(tensor(values, "B"))
    nodes = [helper.make_node("Conv", names, ["Y"], name="conv", **attributes)]
    if bias == "runtime":
        nodes.insert(0, helper.make_node("Neg", ["B0"], ["B"]))
        inputs.append(value("B0", [weight.shape[0]], element_type))
    outputs = [value("Y", [None] * rank, element_type)]
    return model(nodes, initializers, inputs, outputs, opset=opset, ir_version=ir_version)


def check(source, weight, spatial, *, geometry=None, dtype=np.float32):
    """Convert with force, compare outputs before, after and restored; return the report of the layer."""
    group = geometry.get("group", 1) if geometry else 1
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, weight.shape[1] * group, *spatial)).astype(dtype)
    inputs = {"X": x, "B0": rng.standard_normal(weight.shape[0]).astype(dtype)}
    inputs = {k: v for k, v in inputs.items() if k in {i.name for i in source.graph.input}}
    converted, report = convert(source, options=FORCE)
    assert converted is not None, report.model.layers[0].verdict.text
    onnx.checker.check_model(converted, full_check=True)
    expected = run(source, inputs)[0]
    magnitude = 6 * np.abs(weight.astype(np.float64)).reshape(weight.shape[0], -1).sum(axis=1).max() + 6
    row_length = weight[0].size + 1
    assert_close(run(converted, inputs)[0], expected, row_length, magnitude)
    restore(converted)
    assert_close(run(converted, inputs)[0], expected, row_length, magnitude)
    return report.model.layers[0]


FORMS = {
    "1-D": ((8, 4, 5), (11,), {"pads": [2, 1], "strides": [2]}),
    "1-D dilated": ((8, 4, 3), (11,), {"dilations": [3]}),
    "2-D": ((8, 4, 3, 3), (7, 9), {"pads": [1, 1, 1, 1]}),
    "3-D": ((6, 2, 2, 3, 3), (4, 5, 6), {"pads": [0, 1, 1, 1, 1, 0], "strides": [1, 2, 1]}),
    "no attributes": ((8, 4, 3, 2), (7, 9), {}),
    "kernel_shape spelled out": ((8, 4, 3, 2), (7, 9), {"kernel_shape": [3, 2]}),
    "1x1": ((8, 16, 1, 1), (5, 5), {}),
    "kernel as large as the input": ((8, 2, 5, 4), (5, 4), {}),
    "strides": ((8, 4, 3, 3), (9, 10), {"strides": [2, 3]}),
    "dilations": ((8, 4, 3, 3), (9, 10), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "groups": ((8, 4, 3, 3), (5, 5), {"group": 2}),
    "depthwise": ((8, 1, 3, 3), (5, 5), {"group": 8}),
    "depthwise with a multiplier": ((16, 1, 3, 3), (5, 5), {"group": 8}),
    "asymmetric pads": ((8, 4, 3, 3), (5, 5), {"pads": [0, 2, 1, 3]}),
    "pads larger than the kernel": ((8, 4, 2, 2), (3, 3), {"pads": [4, 4, 4, 4]}),
    "one channel": ((8, 1, 3, 3), (5, 5), {}),
    "one filter": ((1, 8, 3, 3), (5, 5), {}),
    "VALID": ((8, 4, 3, 3), (7, 8), {"auto_pad": "VALID", "strides": [2, 2]}),
    "NOTSET": ((8, 4, 3, 3), (7, 8), {"auto_pad": "NOTSET", "pads": [1, 0, 0, 1]}),
}
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True, "rank"], ids=["static", "dynamic", "unknown rank"])


@pytest.mark.parametrize(("shape", "spatial", "attributes"), FORMS.values(), ids=FORMS.keys())
@DYNAMIC
def test_forms(shape, spatial, attributes, dynamic):
    weight = pruned(shape, 0.7)
    source = conv_model(weight, spatial, dynamic=dynamic, **attributes)
    layer = check(source, weight, spatial, geometry=attributes)
    assert layer.group == attributes.get("group", 1)
    assert layer.kernel_shape == shape[2:]


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@DYNAMIC
def test_same_padding(auto_pad, stride, kernel, dynamic):
    weight = pruned((4, 8, kernel, kernel + 1), 0.7)
    for spatial in ((5, 6), (7, 9), (10, 15)):
        attributes = {"auto_pad": auto_pad, "strides": [stride, 1]}
        source = conv_model(weight, spatial, dynamic=dynamic, **attributes)
        total = kernel - stride if dynamic else (-(-spatial[0] // stride) - 1) * stride + kernel - spatial[0]
        if total < -1 and stride > 1:
            # The formula crops the input; runtimes disagree, so nothing is rewritten.
            assert inspect(source, FORCE).layers[0].verdict.reason is Reason.UNSUPPORTED_FORM
            continue
        check(source, weight, spatial)
        (node,) = convert(source, options=FORCE)[0].graph.node
        resolved = stride == 1 or not dynamic
        assert ("pads" in {a.name for a in node.attribute}) == resolved


def test_same_padding_where_one_size_is_known():
    """Where the unknown size has stride 1, its pads do not depend on it."""
    weight = pruned((4, 8, 3, 3), 0.7)
    source = conv_model(weight, (7, 9), dynamic=True, auto_pad="SAME_UPPER", strides=[1, 2])
    source.graph.input[0].type.tensor_type.shape.dim[3].dim_value = 9
    check(source, weight, (7, 9))
    (node,) = convert(source, options=FORCE)[0].graph.node
    assert "pads" in {a.name for a in node.attribute}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_counts_dilated_kernels_in_full(dynamic, auto_pad):
    """The definition of ONNX; ONNX Runtime itself may refuse such a node, so the oracle is our own."""
    weight = pruned((4, 8, 3, 3), 0.7)
    source = conv_model(weight, (8, 8), dynamic=dynamic, auto_pad=auto_pad, dilations=[2, 2])
    converted, _ = convert(source, options=FORCE)
    x = np.random.default_rng(0).standard_normal((2, 8, 8, 8)).astype(np.float32)
    expected = convolve(x, weight, pads=(2, 2, 2, 2), dilations=(2, 2)).astype(np.float32)
    assert_close(run(converted, {"X": x})[0], expected, 72, 200)


def test_same_padding_of_a_dilated_kernel_over_an_unknown_size_stays_dense():
    weight = pruned((4, 8, 3, 3), 0.7)
    attributes = {"auto_pad": "SAME_UPPER", "dilations": [2, 2], "strides": [2, 2]}
    verdict = inspect(conv_model(weight, (8, 8), dynamic=True, **attributes), FORCE).layers[0].verdict
    assert verdict.reason is Reason.UNSUPPORTED_FORM
    assert inspect(conv_model(weight, (8, 8), **attributes), FORCE).layers[0].verdict.rewrite


@pytest.mark.parametrize("bias", [None, "empty", "initializer", "runtime"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_biases(bias, dtype):
    weight = pruned((8, 4, 3, 3), 0.7, dtype)
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    source = conv_model(weight, (5, 5), bias=bias, dtype=dtype)
    assert source.graph.input[0].type.tensor_type.elem_type == element_type
    check(source, weight, (5, 5), dtype=dtype)
    node = convert(source, options=FORCE)[0].graph.node[-1]
    assert list(node.input) == ["X", "B" if bias in ("initializer", "runtime") else ""]


@pytest.mark.parametrize("opset", range(7, newest_opset() + 1))
@pytest.mark.parametrize("dynamic", [False, True])
def test_opsets(opset, dynamic):
    weight = pruned((8, 4, 3, 3), 0.7)
    source = conv_model(weight, (6, 6), opset=opset, dynamic=dynamic, bias="initializer", pads=[1, 1, 1, 1])
    check(source, weight, (6, 6))
    converted, report = convert(source, options=FORCE)
    imports = {o.domain: o.version for o in converted.opset_import}
    assert imports[""] == max(opset, 9)
    assert report.model.opset == opset


@pytest.mark.parametrize("opset", [1, 5, 6])
def test_opsets_before_the_supported_ones_do_not_break(opset):
    """Raised where onnx.version_converter can, else left dense with the reason."""
    weight = pruned((8, 4, 3, 3), 0.7)
    source = conv_model(weight, (6, 6), opset=opset, ir_version=3)
    source.graph.input.append(value("W", weight.shape))
    converted, report = convert(source, options=FORCE)
    assert (converted is None) == (report.model.layers[0].verdict.reason is Reason.UNSUPPORTED_OPSET)
    if converted is not None:
        onnx.checker.check_model(converted, full_check=True)


def test_four_spatial_axes_stay_dense():
    weight = pruned((8, 4, 2, 2, 2, 2), 0.9)
    source = conv_model(weight, (3, 3, 3, 3))
    converted, report = convert(source, options=FORCE)
    assert converted is None
    assert report.model.layers[0].verdict.reason is Reason.UNSUPPORTED_FORM
    assert "4 spatial axes" in report.model.layers[0].verdict.text


def test_depthwise_stays_dense_unless_forced():
    weight = pruned((128, 1, 3, 3), 0.9)
    source = conv_model(weight, (5, 5), group=128)
    assert inspect(source).layers[0].verdict.reason is Reason.DEPTHWISE
    assert convert(source)[0] is None
    check(source, weight, (5, 5), geometry={"group": 128})


INVALID = {
    "kernel_shape contradicts the weight": {"kernel_shape": [5, 5]},
    "groups do not divide": {"group": 3},
    "channels do not match": {"group": 2},
    "strides too short": {"strides": [1]},
    "strides of zero": {"strides": [0, 1]},
    "dilations of zero": {"dilations": [1, 0]},
    "pads too short": {"pads": [1, 1]},
    "kernel larger than the input": {"dilations": [9, 9]},
    "unknown auto_pad": {"auto_pad": "SAME"},
}


@pytest.mark.parametrize("attributes", INVALID.values(), ids=INVALID.keys())
def test_nodes_that_contradict_themselves_stay_as_they_are(attributes):
    source = conv_model(pruned((8, 4, 3, 3), 0.9), (7, 7), **attributes)
    source.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
    converted, report = convert(source, options=FORCE)
    assert converted is None
    assert report.model.layers[0].verdict.reason is Reason.INVALID
    assert report.model.layers[0].verdict.text


def test_negative_pads_stay_dense():
    source = conv_model(pruned((8, 4, 3, 3), 0.9), (7, 7), pads=[-1, 0, 0, 0])
    verdict = inspect(source, FORCE).layers[0].verdict
    assert verdict.reason is Reason.UNSUPPORTED_FORM
    assert "-1" in verdict.text


@pytest.mark.parametrize("attributes", [{"strides": [2**31, 1]}, {"dilations": [1, 2**40]}, {"pads": [0, 2**31, 0, 0]}])
def test_numbers_that_the_library_cannot_count_stay_dense(attributes):
    source = conv_model(pruned((8, 4, 1, 1), 0.9), (7, 7), **attributes)
    verdict = inspect(source, FORCE).layers[0].verdict
    assert verdict.reason is Reason.UNSUPPORTED_FORM
    assert "more than 2147483647" in verdict.text


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_convolution(data):
    n = data.draw(st.integers(1, 3), label="rank")
    group = data.draw(st.integers(1, 3), label="group")

    def per_axis(low, high):
        return data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    kernel, strides, dilations = per_axis(1, 3), per_axis(1, 3), per_axis(1, 2)
    pads = [*per_axis(0, 2), *per_axis(0, 2)]
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    spatial = [e + extra for e, extra in zip(extents, per_axis(0, 4), strict=True)]
    shape = (group * data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)), *kernel)
    weight = pruned(shape, data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))
    attributes = {"strides": strides, "dilations": dilations, "group": group}
    form = data.draw(st.sampled_from(["pads", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if form == "pads":
        attributes["pads"] = pads
    elif form.startswith("SAME"):
        attributes |= {"auto_pad": form, "dilations": [1] * n}
        attributes["strides"] = [min(s, k + 1) for s, k in zip(strides, kernel, strict=True)]
    else:
        attributes["auto_pad"] = form
    dynamic = data.draw(st.booleans())
    bias = data.draw(st.sampled_from([None, "initializer"]))
    source = conv_model(weight, tuple(spatial), dynamic=dynamic, bias=bias, **attributes)
    check(source, weight, tuple(spatial), geometry=attributes)


# --- FLOPs -----------------------------------------------------------------------------------------------------------

FLOPS = {
    # 2 * K * C/group * kernel * output positions
    "plain": ((8, 4, 3, 3), (10, 12), {}, 2 * 8 * 4 * 9 * 8 * 10),
    "padded": ((8, 4, 3, 3), (10, 12), {"pads": [1] * 4}, 2 * 8 * 4 * 9 * 10 * 12),
    "strided": ((8, 4, 3, 3), (11, 12), {"pads": [1] * 4, "strides": [2, 2]}, 2 * 8 * 4 * 9 * 6 * 6),
    "groups": ((8, 4, 3, 3), (10, 12), {"group": 2}, 2 * 8 * 4 * 9 * 8 * 10),
    "dilated": ((8, 4, 3, 3), (10, 12), {"dilations": [2, 3]}, 2 * 8 * 4 * 9 * 6 * 6),
    "SAME": ((8, 4, 3, 3), (11, 12), {"auto_pad": "SAME_LOWER", "strides": [2, 5]}, 2 * 8 * 4 * 9 * 6 * 3),
    "VALID": ((8, 4, 3, 3), (11, 12), {"auto_pad": "VALID"}, 2 * 8 * 4 * 9 * 9 * 10),
    "1-D": ((8, 4, 5), (20,), {}, 2 * 8 * 4 * 5 * 16),
    "3-D": ((8, 4, 2, 2, 2), (4, 5, 6), {}, 2 * 8 * 4 * 8 * 3 * 4 * 5),
}


@pytest.mark.parametrize(("shape", "spatial", "attributes", "flops"), FLOPS.values(), ids=FLOPS.keys())
def test_flops_are_those_of_one_image(shape, spatial, attributes, flops):
    source = conv_model(pruned(shape), spatial, **attributes)
    assert inspect(source).layers[0].flops == flops
    converted, _ = convert(source, options=FORCE)
    assert inspect(converted).layers[0].flops == flops


def test_flops_are_unknown_where_sizes_are():
    assert inspect(conv_model(pruned((8, 4, 3, 3)), (5, 5), dynamic=True)).layers[0].flops is None
    assert inspect(conv_model(pruned((8, 4, 3, 3)), (5, 5), dynamic="rank")).layers[0].flops is None


PARTS = {
    "all known": ([(2, 1, 5, 4), (2, 3, 5, 4)], (2, 4, 5, 4)),
    "each knows something": ([("n", 1, 5, "w"), (2, 3, "h", 4)], (2, 4, 5, 4)),
    "channels that are open": ([(2, "c", 5, 4), (2, 3, 5, 4)], (2, None, 5, 4)),
    "one of which nothing is known": ([None, (2, 3, 5, 4)], (2, None, 5, 4)),
    "nothing known": ([None, None], None),
    "other axes": ([(2, 1, 5, 4), (2, 3, 20)], None),
}


@pytest.mark.parametrize(("parts", "joined"), PARTS.values(), ids=PARTS.keys())
def test_the_input_of_a_sparse_convolution_that_reads_several_is_what_they_make(parts, joined):
    source = sparse_model(attributes_for(pruned((8, 4, 1, 1)), pads=(0,) * 4), concat_op(2))
    del source.functions[:]
    inputs = [value(name, shape) for name, shape in zip(("X", "X2"), parts, strict=True)]
    del source.graph.input[:]
    source.graph.input.extend(inputs)
    (site,) = find_conv_sites(ModelView(source), ShapeMap(source))
    assert site.input_shape == joined


def test_flops_through_a_chain_of_layers():
    """The second layer's input is only known by shape inference."""
    nodes = [
        helper.make_node("Conv", ["X", "W"], ["h"], strides=[2, 2]),
        helper.make_node("Conv", ["h", "V"], ["Y"], pads=[1] * 4),
    ]
    source = model(nodes, [tensor(pruned((8, 16, 3, 3)), "W"), tensor(pruned((4, 8, 3, 3)), "V")])
    assert [layer.flops for layer in inspect(source).layers] == [2 * 8 * 16 * 9 * 4, 2 * 4 * 8 * 9 * 4]


@pytest.mark.parametrize("taken", ["Conv_Y", ""])
def test_a_node_without_a_name_gets_one_that_no_other_has(taken):
    """ONNX Runtime refuses two nodes of one name."""
    nodes = [conv(name="", out="Y"), helper.make_node("Relu", ["Y"], ["relu"], taken)]
    proto = model(nodes, [tensor(pruned(), "W")], outputs=[value("relu", [None] * 4)])
    converted, report = convert(proto, options=ConvertOptions(force=True))
    assert report.model.layers[0].name == ("Conv_Y_1" if taken else "Conv_Y")
    run(converted, inputs_for(proto))
