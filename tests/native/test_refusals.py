"""What contradicts docs/op-spec.md is refused with one line that names the node and the cause."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry, PoolGeometry
from tests.support.sparse_models import (
    NODE_NAME,
    SparseConvCase,
    geometry_2d,
    make_model,
    make_session,
    output_shape,
    random_inputs,
    random_weight,
)

CASE = SparseConvCase(random_weight((8, 6, 3, 3), 0.4), geometry_2d(), Activation.CLIP, -1.0, 1.0, slice_height=2)
GOOD = CASE.attributes()
POOLED = dataclasses.replace(CASE, pool=PoolGeometry((2, 3), (2, 1), (0, 1, 1, 2)))
CONCATENATED = dataclasses.replace(CASE, input_channels=(1, 2, 3))
COLUMNS = GOOD["weight_columns"]
HUGE = 1 << 62


def replaced(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


def ints(*values):
    return np.array(values, np.int64)


# attribute, its value (None: missing), what the message must say
HOSTILE = [
    *((name, None, name) for name in GOOD if name not in ("weight_negative_zeros", "cuda_images")),
    # Conv's own
    ("kernel_shape", [3, 2], "contradicts"),
    ("kernel_shape", [3], "must have 2 entries, found 1"),
    ("kernel_shape", [3, 0], "found 0"),
    ("kernel_shape", 3, "kernel_shape"),
    ("strides", [1, 1, 1], "must have 2 entries, found 3"),
    ("strides", [0, 1], "found 0"),
    ("strides", [-1, 1], "found -1"),
    ("strides", [HUGE, 1], "strides"),
    ("dilations", [1, 0], "found 0"),
    ("dilations", [HUGE, HUGE], "dilations"),
    ("pads", [1, 1], "must have 4 entries, found 2"),
    ("pads", [1, 1, 1, -1], "found -1"),
    ("pads", [HUGE] * 4, "pads"),
    ("auto_pad", "VALID", "found 'VALID'"),
    ("auto_pad", "SAME_UPPER", "'pads' must be absent"),
    ("auto_pad", 3, "auto_pad"),
    ("group", 0, "found 0"),
    ("group", -1, "found -1"),
    ("group", 3, "must divide the 8 output channels"),
    ("group", HUGE, "group"),
    ("out_channels", 9, "weight_shape[0] = 8, found 9"),
    ("out_channels", -8, "found -8"),
    ("element_type", 0, "must be 1 (float)"),
    ("element_type", 7, "found 7"),
    ("element_type", 1.0, "element_type"),
    # the weight
    ("weight_shape", ints(8, 6), "3 to 5 sizes"),
    ("weight_shape", ints(8, 6, 3, 3, 1, 1), "3 to 5 sizes"),
    ("weight_shape", ints(8, 6, 3, 3).reshape(2, 2), "3 to 5 sizes"),
    ("weight_shape", np.array([8, 6, 3, 3], np.int32), "must be a tensor of int64, found int32"),
    ("weight_shape", ints(8, 0, 3, 3), "found 0"),
    ("weight_shape", ints(8, -6, 3, 3), "found -6"),
    ("weight_shape", ints(HUGE, 6, 3, 3), "weight_shape"),
    ("weight_shape", ints(8, 1 << 30, 1 << 30, 1 << 30), "overflows"),
    ("weight_shape", ints(8, 1 << 30, 3, 3), "elements, more than 2147483647"),
    ("weight_shape", ints(1, 2**31 - 1, 1, 2), "asks for 4294967294 elements, more than 2147483647"),
    ("weight_shape", ints(9, 6, 3, 3), "out_channels"),
    ("weight_shape", ints(8, 1, 3, 3), "must lie in 1..9"),
    ("weight_values", GOOD["weight_values"][:-1], "weight_values"),
    ("weight_values", np.append(GOOD["weight_values"], 1).astype(np.float32), "weight_values"),
    ("weight_values", GOOD["weight_values"].astype(np.float64), "float or float16"),
    ("weight_values", np.empty(0, np.float32), "found 0"),
    ("weight_columns", COLUMNS[:-1], "weight_columns"),
    ("weight_columns", COLUMNS.astype(np.int32), "uint16 or uint32"),
    ("weight_columns", replaced(COLUMNS, 3, 54), "must be below 54, found 54"),
    ("weight_columns", replaced(COLUMNS.astype(np.uint32), 3, 2**32 - 1), "must be below 54"),
    ("weight_columns", replaced(COLUMNS, 1, COLUMNS[0]), "increase strictly"),
    ("weight_columns", COLUMNS[::-1].copy(), "increase strictly"),
    ("weight_nnz_per_row", GOOD["weight_nnz_per_row"][:-1], "weight_nnz_per_row"),
    ("weight_nnz_per_row", GOOD["weight_nnz_per_row"] + np.int32(1), "elements"),
    ("weight_nnz_per_row", replaced(GOOD["weight_nnz_per_row"], 0, 0), "found 0"),
    ("weight_nnz_per_row", replaced(GOOD["weight_nnz_per_row"], 0, -1), "found -1"),
    ("weight_nnz_per_row", replaced(GOOD["weight_nnz_per_row"], 0, 2**31 - 1), "must lie in 1..54"),
    ("weight_nnz_per_row", GOOD["weight_nnz_per_row"].astype(np.int64), "int32"),
    ("weight_row_order", GOOD["weight_row_order"][:-1], "weight_row_order"),
    ("weight_row_order", replaced(GOOD["weight_row_order"], 0, GOOD["weight_row_order"][1]), "permutation"),
    ("weight_row_order", replaced(GOOD["weight_row_order"], 0, 8), "permutation"),
    ("weight_row_order", replaced(GOOD["weight_row_order"], 0, -1), "permutation"),
    ("weight_slice_height", np.int64(0), "must lie in 1..8"),
    ("weight_slice_height", np.int64(9), "must lie in 1..8"),
    ("weight_slice_height", np.int64(-(2**63)), "must lie in 1..8"),
    ("weight_slice_height", ints(2, 2), "must have 1 elements"),
    # the activation
    ("activation", np.int64(-1), "found -1"),
    ("activation", np.int64(8), "found 8"),
    ("activation", np.int64(2**40), "0 to 7"),
    ("activation", np.int32(2), "int64"),
    ("activation", np.empty(0, np.int64), "found 0"),
    ("activation", np.float32(np.nan), "int64"),
    ("alpha", float("nan"), "found NaN"),
    ("beta", float("nan"), "found NaN"),
    ("alpha", "low", "alpha"),
]


def changed(attributes, name, value):
    """`attributes` with `value` for `name`, or without it where `value` is None."""
    others = {k: v for k, v in attributes.items() if k != name}
    return others if value is None else {**others, name: value}


@pytest.mark.parametrize(("name", "value", "cause"), HOSTILE, ids=[f"{n}-{c}" for n, _, c in HOSTILE])
def test_bad_attribute_is_refused_at_creation(name, value, cause):
    model = make_model(CASE, changed(GOOD, name, np.asarray(value) if isinstance(value, np.generic) else value))
    with pytest.raises(Exception, match="SparseConv node") as caught:
        make_session(model)
    message = str(caught.value)
    assert f"'{NODE_NAME}'" in message
    assert cause in message
    assert "\n" not in message.strip()


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        *((name, None, name) for name in ("pool_kernel_shape", "pool_strides", "pool_pads")),
        ("pool_kernel_shape", [2], "must have 2 entries, found 1"),
        ("pool_kernel_shape", [2, 0], "found 0"),
        ("pool_kernel_shape", [2, HUGE], "pool_kernel_shape"),
        ("pool_strides", [0, 1], "found 0"),
        ("pool_strides", [1, -1], "found -1"),
        ("pool_strides", 2, "pool_strides"),
        ("pool_pads", [0, 1], "must have 4 entries, found 2"),
        ("pool_pads", [-1, 0, 0, 0], "found -1"),
        ("pool_pads", [0, 0, 2, 0], "must be less than those of 'pool_kernel_shape', found 2 beside 2"),
        ("pool_pads", [0, 3, 0, 0], "found 3 beside 3"),
    ],
)
def test_a_bad_pool_is_refused_at_creation(name, value, cause):
    model = make_model(POOLED, changed(POOLED.attributes(), name, value))
    with pytest.raises(Exception, match=f"SparseConvMaxPool node '{NODE_NAME}'") as caught:
        make_session(model)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("input_channels", None, "input_channels"),
        ("input_channels", 6, "input_channels"),
        ("input_channels", [2, 4], "must have 3 entries, found 2"),
        ("input_channels", [2, 4, 0], "found 0"),
        ("input_channels", [4, 4, -2], "found -2"),
        ("input_channels", [1, 2, 4], "must add up to group * weight_shape[1] = 6, found 7"),
        ("input_channels", [HUGE, HUGE, HUGE], "input_channels"),
        (
            "group",
            2,
            "attribute 'group' must be 1, or the channels of both X and Y, where inputs are concatenated, found 2",
        ),
    ],
)
def test_bad_inputs_of_a_concatenation_are_refused_at_creation(name, value, cause):
    model = make_model(CONCATENATED, changed(CONCATENATED.attributes(), name, value))
    with pytest.raises(Exception, match=f"SparseConvConcat3 node '{NODE_NAME}'") as caught:
        make_session(model)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "cause"),
    [
        ("X", (2, 4, 5, 5), "input X must have 1 channels, found shape [2, 4, 5, 5]"),
        ("X", (2, 1, 5), "input X2 must have 2 channels and else the shape of X, [2, 1, 5], found [2, 2, 5, 5]"),
        ("X2", (2, 3, 5, 5), "input X2 must have 2 channels and else the shape of X, [2, 1, 5, 5], found [2, 3, 5, 5]"),
        ("X3", (2, 3, 5, 6), "input X3 must have 3 channels and else the shape of X, [2, 1, 5, 5], found [2, 3, 5, 6]"),
        ("X3", (1, 3, 5, 5), "input X3 must have 3 channels and else the shape of X, [2, 1, 5, 5], found [1, 3, 5, 5]"),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(name, shape, cause):
    model = make_model(CONCATENATED)
    for value in model.graph.input:  # of nothing but a type: else ONNX Runtime itself sees what is wrong
        value.type.tensor_type.ClearField("shape")
    inputs = random_inputs(CONCATENATED, (2, 6, 5, 5))
    inputs[name] = np.zeros(shape, np.float32)
    with pytest.raises(Exception, match=f"SparseConvConcat3 node '{NODE_NAME}'") as caught:
        make_session(model).run(None, inputs)
    assert cause in str(caught.value)


def test_attributes_of_a_pool_mean_nothing_to_a_node_that_does_not_pool():
    attributes = {**GOOD, "pool_kernel_shape": [0], "pool_strides": [0], "pool_pads": [0]}
    x_shape = (1, 6, 5, 5)
    (y,) = make_session(make_model(CASE, attributes)).run(None, random_inputs(CASE, x_shape))
    assert y.shape == output_shape(CASE, x_shape)


def test_maps_smaller_than_the_window_of_the_pool_are_refused():
    case = dataclasses.replace(CASE, pool=PoolGeometry((2, 4), (1, 1), (0, 1, 0, 1)))
    session = make_session(make_model(case))
    cause = "axis 3 of the convolution's output is too small: size 1 with 2 of padding is less than the pool's window"
    with pytest.raises(Exception, match=f"node 'conv1': {cause} of 4"):
        session.run(None, random_inputs(CASE, (1, 6, 2, 1)))
    assert session.run(None, random_inputs(CASE, (1, 6, 2, 2)))[0].shape == (1, 8, 1, 1)


@pytest.mark.parametrize("pool", [PoolGeometry((2, 2), (2, 2), (0,) * 4), PoolGeometry((3, 2), (3, 2), (0,) * 4)])
def test_maps_smaller_than_the_window_by_less_than_a_stride_are_pooled_as_by_newer_onnx_runtimes(pool):
    case = dataclasses.replace(CASE, pool=pool)
    model = make_model(case, with_function=True)
    inputs = random_inputs(case, (2, 6, 1, 1))
    (actual,) = make_session(model).run(None, inputs)
    assert actual.shape == (2, 8, 1, 1)
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 21):
        pytest.skip("this ONNX Runtime gives no output for such maps, or crashes")
    (expected,) = make_session(model, with_library=False).run(None, inputs)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_an_empty_batch_is_pooled_to_an_empty_batch():
    (y,) = make_session(make_model(POOLED)).run(None, random_inputs(POOLED, (0, 6, 5, 5)))
    assert y.shape == (0, 8, 3, 6)


def test_the_table_starts_from_a_good_node():
    assert make_session(make_model(CASE, GOOD)).run(None, random_inputs(CASE, (1, 6, 5, 5)))[0].shape == (1, 8, 5, 5)


def test_unknown_attributes_are_ignored():
    attributes = {**GOOD, "from_the_future": [1, 2, 3]}
    inputs = random_inputs(CASE, (1, 6, 5, 5))
    (wanted,) = make_session(make_model(CASE)).run(None, inputs)
    (actual,) = make_session(make_model(CASE, attributes)).run(None, inputs)
    assert np.array_equal(actual, wanted)


def test_float16_node_with_float_element_type_is_refused():
    case = dataclasses.replace(CASE, dtype=np.dtype(np.float16))
    with pytest.raises(Exception, match=r"node 'conv1': attribute 'element_type' must be 10 \(float16\), .* found 1"):
        make_session(make_model(case, {**case.attributes(), "element_type": 1}))


def test_same_padding_with_dilation_is_refused_as_conv_does():
    geometry = ConvGeometry((3, 3), (2, 2), (), (2, 2), 1, "SAME_UPPER")
    with pytest.raises(Exception, match=r"node 'conv1': attribute 'dilations' must be 1 beside a SAME auto_pad"):
        make_session(make_model(dataclasses.replace(CASE, geometry=geometry)))


def test_too_many_taps_are_refused():
    case = SparseConvCase(np.ones((1, 1, 70000), np.float32), ConvGeometry((70000,), (1,), (0, 0), (1,)))
    with pytest.raises(Exception, match=r"node 'conv1': a kernel of 70000 taps"):
        make_session(make_model(case))


def test_an_empty_residual_made_in_the_model_is_refused():
    """ONNX Runtime gives it no data."""
    case = dataclasses.replace(CASE, has_residual=True)
    model = make_model(case)
    next(info for info in model.graph.input if info.name == "Z").name = "whole"
    for name, value in (("begin", [0]), ("end", [0]), ("axis", [2])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    model.graph.node.insert(0, helper.make_node("Slice", ["whole", "begin", "end", "axis"], ["Z"]))
    inputs = random_inputs(case, (1, 6, 5, 5))
    inputs["whole"] = inputs.pop("Z")
    with pytest.raises(Exception, match=r"input Z must have the shape of Y, \[1, 8, 5, 5\], found \[1, 8, 0, 5\]"):
        make_session(model).run(None, inputs)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"X": np.zeros((1, 6, 5), np.float32)}, r"input X must have rank 4"),
        ({"X": np.zeros((1, 6, 5, 5, 5, 5), np.float32)}, r"input X must have rank 4"),
        ({"X": np.zeros((1, 5, 5, 5), np.float32)}, r"input X must have 6 channels, found shape \[1, 5, 5, 5\]"),
        ({"Z": np.zeros((1, 8, 5, 1), np.float32)}, r"input Z must have the shape of Y, \[1, 8, 5, 5\]"),
        ({"Z": np.zeros((), np.float32)}, r"input Z must have the shape of Y"),
        ({"B": np.zeros(7, np.float32)}, r"input B must have shape \[8\], found \[7\]"),
        ({"B": np.zeros((8, 1), np.float32)}, r"input B must have shape \[8\]"),
    ],
)
def test_bad_input_is_refused_at_run_time(changes, cause):
    case = dataclasses.replace(CASE, has_residual=True)
    model = make_model(case)
    for value in model.graph.input:  # let anything reach the kernel
        value.type.tensor_type.ClearField("shape")
    session = make_session(model)
    inputs = random_inputs(case, (1, 6, 5, 5))
    with pytest.raises(Exception, match=rf"SparseConvAdd node 'conv1': {cause}"):
        session.run(None, {**inputs, **changes})
    session.run(None, inputs)


@pytest.mark.parametrize("x_shape", [(1, 6, 2, 9), (2, 6, 9, 1), (1, 6, 0, 9), (0, 6, 2, 2)])
def test_input_smaller_than_the_kernel_is_refused(x_shape):
    session = make_session(make_model(dataclasses.replace(CASE, geometry=geometry_2d(pad=0))))
    with pytest.raises(Exception, match=r"node 'conv1': axis [23] of X is too small"):
        session.run(None, random_inputs(CASE, (1, 6, 5, 5)) | {"X": np.zeros(x_shape, np.float32)})


def test_output_too_large_to_count_is_refused():
    pads = (2**31 - 1,) * 4
    session = make_session(make_model(dataclasses.replace(CASE, geometry=ConvGeometry((3, 3), (1, 1), pads, (1, 1)))))
    with pytest.raises(Exception, match=r"node 'conv1': .*(overflows|address)"):
        session.run(None, random_inputs(CASE, (1, 6, 5, 5)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("x_shape", "geometry"),
    [
        ((0, 6, 9, 9), geometry_2d()),
        ((0, 6, 9, 9), geometry_2d(pad=0)),
        ((2, 6, 0, 9), geometry_2d(pad=2)),  # nothing but padding: the bias
    ],
)
def test_empty_inputs_are_as_for_conv(x_shape, geometry, dtype, threads):
    case = dataclasses.replace(CASE, geometry=geometry, dtype=np.dtype(dtype), activation=Activation.NONE)
    inputs = random_inputs(case, x_shape)
    (actual,) = make_session(make_model(case), threads=threads).run(None, inputs)
    assert actual.shape == output_shape(case, x_shape)
    assert np.array_equal(actual, np.broadcast_to(inputs["B"].reshape(1, -1, 1, 1), actual.shape))


@pytest.mark.parametrize("pool", [None, PoolGeometry((2, 2), (2, 2), (0,) * 4), PoolGeometry((3, 3), (1, 1), (1,) * 4)])
@pytest.mark.parametrize("x_shape", [(2, 6, 9, 8), ("N", 6, "H", 8), (None, 6, None, None)])
def test_shape_inference(x_shape, pool):
    geometry = geometry_2d(3, 2, 1)
    case = dataclasses.replace(CASE, geometry=geometry, pool=pool)
    expected = output_shape(case, (2, 6, 9, 8))
    session = make_session(make_model(case, x_shape=list(x_shape)))
    inferred = session.get_outputs()[0].shape
    if inferred:  # ONNX Runtime before 1.24 cannot be given the shape
        assert len(inferred) == 4
        assert inferred[1] == 8
        for axis, (size, wanted) in enumerate(zip(x_shape, expected, strict=True)):
            if isinstance(size, int):
                assert inferred[axis] == wanted
            else:
                assert isinstance(inferred[axis], str)
        assert x_shape[0] is None or inferred[0] == x_shape[0]
    assert session.run(None, random_inputs(case, (2, 6, 9, 8)))[0].shape == expected


def test_sizes_that_a_pool_keeps_keep_their_names():
    case = dataclasses.replace(CASE, pool=PoolGeometry((3, 2), (1, 2), (1, 0, 1, 0)))
    inferred = make_session(make_model(case, x_shape=["N", 6, "H", "W"])).get_outputs()[0].shape
    if inferred:
        assert inferred[:3] == ["N", 8, "H"]
        assert inferred[3] != "W"


def test_a_bad_attribute_of_another_type_is_refused_whatever_it_holds():
    for name in GOOD:
        for attribute in (
            helper.make_attribute(name, helper.make_graph([], "g", [], [])),
            helper.make_attribute(name, ["a", "b"]),
            helper.make_attribute(name, [1.5]),
        ):
            attributes = {**GOOD, name: attribute}
            if name in ("weight_negative_zeros", "cuda_images"):
                continue
            with pytest.raises(Exception, match=rf"'{name}'|graph"):
                make_session(make_model(CASE, attributes))
