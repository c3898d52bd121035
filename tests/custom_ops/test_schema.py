"""SparseConv attributes: there and back, and every contradiction refused as a FormatError."""

import contextlib
import dataclasses
import re

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import CONCAT_OPS, OP_TYPES, SPARSE_CONV, Activation, concat_op, x_positions
from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.kernels.unified_csr import decode
from tests.support.odd_models import pruned
from tests.support.sparse_nodes import attributes_for, sparse_node


def concat_node(**changes):
    return sparse_node(attributes_for(pruned((8, 4, 3, 3)), **changes), concat_op(2), ["X", "", "X2"])


def node(**changes):
    return sparse_node(attributes_for(pruned((8, 4, 3, 3)), group=2, **changes), SPARSE_CONV, ["X", ""])


def replace(proto, name, value):
    """The node with another value of one attribute; an AttributeProto is taken as it is."""
    kept = [a for a in proto.attribute if a.name != name]
    del proto.attribute[:]
    proto.attribute.extend(kept)
    if value is not None:
        value = numpy_helper.from_array(value, name) if isinstance(value, np.ndarray) else value
        proto.attribute.append(value if isinstance(value, AttributeProto) else helper.make_attribute(name, value))
    return proto


def assert_equal(first, second):
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if dataclasses.is_dataclass(a):
            assert_equal(a, b)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b
            assert type(a) is type(b)


@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 4, 3, 2), (6, 4, 3, 2, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("activation", Activation)
def test_a_node_holds_all_attributes(shape, dtype, activation):
    attributes = attributes_for(pruned(shape, dtype=dtype), activation=activation, group=2, element_type=np.float16)
    proto = sparse_node(attributes, SPARSE_CONV, ["X", ""])
    assert_equal(attributes_from_proto(onnx.NodeProto.FromString(proto.SerializeToString())), attributes)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_has_no_pads(auto_pad):
    attributes = attributes_for(pruned((6, 4, 3, 3)), auto_pad=auto_pad, pads=(), strides=(2, 2))
    proto = sparse_node(attributes, SPARSE_CONV, ["X", ""])
    assert "pads" not in {a.name for a in proto.attribute}
    assert_equal(attributes_from_proto(proto), attributes)


@pytest.mark.parametrize(("op_type", "count"), CONCAT_OPS.items())
def test_the_channels_of_several_inputs(op_type, count):
    channels = tuple(range(1, count + 1))
    attributes = attributes_for(pruned((6, sum(channels), 1, 1)), pads=(0,) * 4, activation=Activation.RELU)
    attributes = dataclasses.replace(attributes, input_channels=channels)
    proto = sparse_node(attributes, op_type, ["X", "", *(f"X{i}" for i in range(2, count + 1))])
    assert_equal(attributes_from_proto(onnx.NodeProto.FromString(proto.SerializeToString())), attributes)
    assert (op_type, x_positions(op_type)) == (concat_op(count), (0, *range(2, count + 1)))


def test_only_their_ops_have_them():
    assert "input_channels" not in {a.name for a in node().attribute}
    proto = replace(node(), "input_channels", [1, 3])
    assert attributes_from_proto(proto).input_channels == ()
    assert [x_positions(op_type) for op_type in OP_TYPES[:3]] == [(0,)] * 3


@pytest.mark.parametrize(
    ("channels", "text"),
    [
        ([4], "must be 2 numbers of at least 1, got (4,)"),
        ([1, 1, 2], "must be 2 numbers of at least 1, got (1, 1, 2)"),
        ([0, 4], "must be 2 numbers of at least 1, got (0, 4)"),
        ([-1, 5], "must be 2 numbers of at least 1, got (-1, 5)"),
        ([1, 2], "(1, 2) are 3 together, the weight has 4"),
        ([2**63 - 1, 5], f"are {2**63 + 4} together"),
        ([2.0, 2.0], "input_channels must be a list of integers"),
        (4, "input_channels must be a list of integers"),
        (None, "lacks the attribute 'input_channels'"),
    ],
)
def test_channels_that_are_refused(channels, text):
    with pytest.raises(FormatError, match=re.escape(text)):
        attributes_from_proto(replace(concat_node(), "input_channels", channels))


def test_several_inputs_have_one_group_or_one_for_each_channel():
    text = "group must be 1, or the channels of both X and Y, in SparseConvConcat2, got 2"
    with pytest.raises(FormatError, match=text):
        attributes_from_proto(replace(concat_node(), "group", 2))
    attributes = attributes_for(pruned((4, 1, 1, 1)), pads=(0,) * 4, group=2)
    attributes = dataclasses.replace(attributes, input_channels=(1, 1))
    with pytest.raises(FormatError, match=text):
        attributes_from_proto(sparse_node(attributes, concat_op(2), ["X", "", "X2"]))
    attributes = attributes_for(pruned((5, 1, 1, 1)), pads=(0,) * 4, group=5)
    attributes = dataclasses.replace(attributes, input_channels=(2, 3))
    proto = sparse_node(attributes, concat_op(2), ["X", "", "X2"])
    assert_equal(attributes_from_proto(proto), attributes)
    with pytest.raises(FormatError, match=re.escape("(2, 2) are 4 together, the weight has 5")):
        attributes_from_proto(replace(proto, "input_channels", [2, 2]))


def test_unknown_attributes_are_ignored():
    proto = node()
    proto.attribute.append(helper.make_attribute("from_the_future", 1))
    attributes_from_proto(proto)


def test_an_attribute_that_is_an_argument_of_a_function_is_named_alone():
    proto = node()
    next(a for a in proto.attribute if a.name == "weight_values").ref_attr_name = "w"
    with pytest.raises(FormatError, match=r"^attribute weight_values is an argument of a function$"):
        attributes_from_proto(proto)


def test_every_attribute_is_needed():
    for attribute in node().attribute:
        with pytest.raises(FormatError, match=attribute.name):
            attributes_from_proto(replace(node(), attribute.name, None))


BAD = {
    "kernel_shape": [[3], [3, 3, 3], [5, 5], [0, 3], [-3, -3], [], [3.0, 3.0], "33", 3],
    "strides": [[0, 1], [1], [1, 1, 1], [-1, 1], [], 1, "x"],
    "dilations": [[0, 1], [1], [-(2**63), 1], []],
    "pads": [[1, 1], [1, 1, 1, -1], [], [1] * 6, [0.5] * 4],
    "group": [0, -1, 3, 2**40, 1.0, [1]],
    "auto_pad": ["VALID", "SAME", "", 1, "SAME_UPPER\0"],
    "out_channels": [7, -1, 8.5, [8]],
    "element_type": [0, 11, 16, -1, 2**40, [1], "float"],
    "activation": [-1, np.asarray(8), np.asarray(-1), np.asarray([0]), np.asarray(0, np.int32), np.asarray(0.0), 0],
    "alpha": ["x", [1.0], np.zeros(2, np.float32)],
    "beta": ["x", [1.0]],
    "weight_slice_height": [np.asarray([4]), np.asarray(np.inf), np.asarray(np.nan), np.asarray(4, np.int32), 4],
    "weight_shape": [
        np.asarray([8, 2, 3]),
        np.asarray([8, 2, 3, 3], np.int32),
        np.asarray([8.0, 2, 3, 3]),
        np.asarray([[8, 2, 3, 3]]),
        np.asarray([], np.int64),
        np.asarray([-8, 2, 3, 3]),
        np.asarray(8),
        [8, 2, 3, 3],
    ],
    "weight_values": [np.zeros((2, 2), np.float32), np.asarray(1.0, np.float32), [1.0], "x"],
    "weight_columns": [np.zeros((2, 2), np.uint16), [1, 2]],
    "weight_nnz_per_row": [np.asarray(3, np.int32), 3],
    "weight_row_order": [np.zeros((8, 1), np.int32), "order"],
    "weight_negative_zeros": [np.zeros((1, 1), np.uint8), 0],
    "cuda_images": [np.zeros(3, np.int8), np.zeros((1, 1), np.uint8), "x"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values], ids=repr)
def test_a_bad_attribute_is_refused_by_name(name, value):
    if isinstance(value, list) and not value:
        value = AttributeProto(name=name, type=AttributeProto.INTS)
    with pytest.raises(FormatError) as caught:
        attributes_from_proto(replace(node(), name, value))
    assert "\n" not in str(caught.value)
    words = {"activation": "Activation", "group": "groups"}
    assert name in str(caught.value) or words.get(name, name) in str(caught.value)


def broken_tensors():
    good = numpy_helper.from_array(np.zeros(4, np.float32), "weight_values")
    for data_type in range(-1, 40):
        yield TensorProto(name=good.name, data_type=data_type, dims=[4], raw_data=good.raw_data)
    for dims in ([5], [-1], [2**62, 2**62], [2**31], [0]):
        yield TensorProto(name=good.name, data_type=1, dims=dims, raw_data=good.raw_data)
    yield TensorProto(name=good.name, data_type=1, dims=[4], raw_data=b"odd")
    yield TensorProto(name=good.name, data_type=1, dims=[4])
    outside = TensorProto(name=good.name, data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="../nowhere")
    yield outside


@pytest.mark.parametrize(
    "tensor", list(broken_tensors()), ids=lambda t: f"{t.data_type}-{list(t.dims)}-{len(t.raw_data)}"
)
@pytest.mark.parametrize("name", ["weight_values", "weight_columns", "weight_shape", "weight_slice_height"])
def test_tensors_that_cannot_be_read_are_a_format_error(name, tensor):
    attribute = helper.make_attribute(name, tensor)
    with pytest.raises(FormatError):
        decode(attributes_from_proto(replace(node(), name, attribute)).weight)


def test_a_reference_to_a_function_attribute_is_a_format_error():
    reference = AttributeProto(name="strides", type=AttributeProto.INTS, ref_attr_name="strides")
    with pytest.raises(FormatError, match="strides"):
        attributes_from_proto(replace(node(), "strides", reference))


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_flipped_bytes_give_a_format_error_or_a_weight(data):
    """Whatever a damaged node says, reading it either works or raises a FormatError."""
    raw = bytearray(node().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        proto = onnx.NodeProto.FromString(bytes(raw))
    except Exception:
        return
    with contextlib.suppress(FormatError):
        decode(attributes_from_proto(proto).weight)
