"""The kernels against the float64 oracle, on every instruction set that the machine has."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.support.random_cases import ACTIVATION_PARAMETERS, cases, concat_cases, depthwise_cases
from tests.support.sparse_models import (
    ISAS,
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    make_session,
    oracle,
    random_inputs,
    random_weight,
    resolve,
    supported_isas,
)

# Under the sanitizers (run_sanitized.sh) each example takes ten times as long.
PROPERTY = settings(
    max_examples=20 if "ASAN_OPTIONS" in os.environ else 60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def check(case, x_shape, cpu_isa, *, threads=1, seed=0):
    session = make_session(make_model(case), cpu_isa=cpu_isa, threads=threads)
    inputs = random_inputs(case, x_shape, seed)
    (actual,) = session.run(None, inputs)
    assert actual.dtype == case.dtype
    assert_within(actual, *oracle(case, inputs))


@pytest.fixture(params=ISAS)
def cpu_isa(request):
    if request.param not in supported_isas():
        pytest.skip(f"this machine has no {request.param}")
    return request.param


@PROPERTY
@given(drawn=cases())
def test_any_convolution(cpu_isa, drawn):
    case, x_shape = drawn
    check(case, x_shape, cpu_isa, threads=2)


@PROPERTY
@given(drawn=depthwise_cases())
def test_any_depthwise_convolution(cpu_isa, drawn):
    case, x_shape = drawn
    check(case, x_shape, cpu_isa, threads=2)


@pytest.mark.parametrize("strides", [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("before", [0, 1])
def test_one_plane_of_three_axes(cpu_isa, strides, before):
    """Which may be padding."""
    geometry = ConvGeometry((1, 3, 3), strides, (before, 1, 1, 1, 1, 1), (1, 1, 1), 4)
    check(SparseConvCase(random_weight((4, 1, 3, 3, 3), 1.0)[:, :, :1], geometry), (2, 4, 1, 8, 9), cpu_isa)


@PROPERTY
@given(drawn=concat_cases())
def test_any_convolution_of_inputs_that_are_concatenated(cpu_isa, drawn):
    case, x_shape = drawn
    check(case, x_shape, cpu_isa, threads=2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 14, 15, 16, 17, 28, 33, 56])
@pytest.mark.parametrize("kernel", [1, 3])
def test_every_remainder_of_a_tile(cpu_isa, kernel, size, dtype):
    case = SparseConvCase(
        random_weight((9, 8, kernel, kernel), 0.3), geometry_2d(kernel, pad=kernel // 2), dtype=np.dtype(dtype)
    )
    check(case, (2, 8, size, size), cpu_isa)


@pytest.mark.parametrize("size", [1, 7, 14, 15, 16, 33, 66])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(1, 2, 0), (2, 2, 0), (3, 2, 1), (5, 2, 4), (3, 3, 1)])
def test_every_remainder_of_a_row_that_is_read_in_strides(cpu_isa, kernel, stride, pad, size):
    for dtype in (np.float32, np.float16):
        geometry = geometry_2d(kernel, stride, pad)
        case = SparseConvCase(random_weight((3, 2, kernel, kernel), 0.5), geometry, dtype=np.dtype(dtype))
        check(case, (2, 2, size + kernel, size + kernel), cpu_isa)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_fills_no_cache_is_fetched_ahead(cpu_isa, kernel, stride, dtype, threads):
    """Several chunks an image, and several images; more bytes than the kernel takes to stay in a cache."""
    geometry = geometry_2d(kernel, stride, kernel // 2)
    case = SparseConvCase(random_weight((3, 4, kernel, kernel), 0.5), geometry, dtype=np.dtype(dtype))
    x_shape = (5, 4, 331, 333)
    assert np.prod(x_shape) * case.dtype.itemsize > 4 << 20
    check(case, x_shape, cpu_isa, threads=threads)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_groups_that_end_within_a_panel_of_rows(cpu_isa, kernel, batch):
    """35 output channels a group, several blocks of input channels, and tasks that begin at any row."""
    weight = random_weight((105, 260, kernel, kernel), 0.5)
    case = SparseConvCase(weight, geometry_2d(kernel, 1, kernel // 2, 1, 3), Activation.RELU, has_residual=True)
    check(case, (batch, 780, 14, 13), cpu_isa, threads=2)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [5, 9, 16, 40])
def test_without_padding_the_input_is_read_in_place(cpu_isa, kernel, size):
    case = SparseConvCase(random_weight((5, 6, kernel, kernel), 0.4), geometry_2d(kernel, pad=0), Activation.RELU)
    check(case, (3, 6, size, size), cpu_isa)


@pytest.mark.parametrize(
    ("weight_shape", "x_shape", "geometry"),
    [
        ((64, 64, 3, 3), (1, 64, 56, 56), geometry_2d()),
        ((96, 160, 3, 3), (2, 160, 14, 14), geometry_2d()),
        ((200, 256, 3, 3), (1, 256, 7, 7), geometry_2d()),
        ((64, 3, 7, 7), (1, 3, 112, 112), geometry_2d(7, 2, 3)),
        ((48, 1, 3, 3), (16, 48, 28, 28), geometry_2d(group=48)),
        ((32, 300, 1, 1), (4, 300, 20, 20), geometry_2d(1, 1, 0)),
        ((16, 32, 3, 3), (1, 32, 33, 33), geometry_2d(3, 1, 12, 12)),
        ((24, 40, 9), (3, 40, 1000), ConvGeometry((9,), (1,), (4, 4), (1,))),
        ((16, 8, 3, 3, 3), (1, 8, 16, 20, 20), ConvGeometry((3,) * 3, (1,) * 3, (1,) * 6, (1,) * 3)),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("density", [0.1, 0.6])
def test_real_layers(cpu_isa, weight_shape, x_shape, geometry, density):
    case = SparseConvCase(random_weight(weight_shape, density), geometry, Activation.RELU, has_residual=True)
    check(case, x_shape, cpu_isa, threads=2)


def test_columns_beyond_16_bits(cpu_isa):
    weight = random_weight((3, 7400, 3, 3), 0.01)
    case = SparseConvCase(weight, geometry_2d())
    assert case.attributes()["weight_columns"].dtype == np.uint32
    check(case, (1, 7400, 4, 5), cpu_isa)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_over_their_whole_range(cpu_isa, activation, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    identity = np.ones((1, 1, 1), np.float32)
    geometry = ConvGeometry((1,), (1,), (0, 0), (1,))
    case = SparseConvCase(identity, geometry, activation, alpha, beta, np.dtype(dtype), has_bias=False)
    x = np.concatenate([np.linspace(-120, 120, 4001), np.logspace(-8, 4, 100), -np.logspace(-8, 4, 100)])
    inputs = {"X": x.astype(dtype).reshape(1, 1, -1)}
    (actual,) = make_session(make_model(case), cpu_isa=cpu_isa).run(None, inputs)
    with np.errstate(over="ignore"):
        assert_within(actual, *oracle(case, inputs))


def test_clip_takes_the_upper_bound_when_the_bounds_cross(cpu_isa):
    case = SparseConvCase(random_weight((2, 2, 3), 1.0), ConvGeometry((3,), (1,), (1, 1), (1,)), Activation.CLIP, 1, -1)
    (actual,) = make_session(make_model(case), cpu_isa=cpu_isa).run(None, random_inputs(case, (1, 2, 9)))
    assert (actual == -1).all()


@pytest.mark.parametrize("activation", [a for a in Activation if a != Activation.NONE])
def test_nan_stays_nan(cpu_isa, activation):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = SparseConvCase(
        np.ones((1, 1, 1), np.float32), ConvGeometry((1,), (1,), (0, 0), (1,)), activation, alpha, beta, has_bias=False
    )
    x = np.ones((1, 1, 40), np.float32)
    x[0, 0, ::3] = np.nan
    (actual,) = make_session(make_model(case), cpu_isa=cpu_isa).run(None, {"X": x})
    assert np.array_equal(np.isnan(actual), np.isnan(x))


def test_only_positive_zero_is_skipped(cpu_isa):
    """The encoder stores no -0.0; a writer that does gets it multiplied, as NaN is. X holds an Inf."""
    geometry = ConvGeometry((1,), (1,), (0, 0), (1,))
    case = SparseConvCase(np.zeros((3, 1, 1), np.float32), geometry, has_bias=False, slice_height=3)
    attributes = case.attributes()
    attributes["weight_values"] = np.array([0.0, -0.0, np.nan], np.float32)
    x = np.ones((1, 1, 20), np.float32)
    x[0, 0, 4] = np.inf
    (actual,) = make_session(make_model(case, attributes), cpu_isa=cpu_isa).run(None, {"X": x})
    finite = np.arange(20) != 4
    assert (actual[0, 0, finite] == 0).all()
    assert (actual[0, 1, finite] == 0).all()
    assert np.isnan(actual[0, 1, 4])
    assert np.isnan(actual[0, 2]).all()


def test_an_infinite_input_reaches_only_the_outputs_whose_weights_see_it(cpu_isa):
    weight = np.zeros((2, 2, 3, 3), np.float32)
    weight[0, 0, 1, 1] = 1  # row 1 does not look at channel 0 at all
    weight[1, 1, 0, 0] = 1
    case = SparseConvCase(weight, geometry_2d(), has_bias=False)
    x = np.ones((1, 2, 20, 20), np.float32)
    x[0, 0, 7, 9] = np.inf
    (actual,) = make_session(make_model(case), cpu_isa=cpu_isa).run(None, {"X": x})
    assert np.argwhere(np.isinf(actual)).tolist() == [[0, 0, 7, 9]]
    assert not np.isnan(actual).any()


def test_float16_is_rounded_once(cpu_isa):
    """2048 + 1 + 1 is 2050 when the sum is kept in float; float16 steps would stay at 2048."""
    case = SparseConvCase(
        np.ones((1, 3, 1), np.float16),
        ConvGeometry((1,), (1,), (0, 0), (1,)),
        dtype=np.dtype(np.float16),
        has_bias=False,
    )
    x = np.ones((1, 3, 21), np.float16)
    x[0, 0] = 2048
    (actual,) = make_session(make_model(case), cpu_isa=cpu_isa).run(None, {"X": x})
    assert (actual == 2050).all()


def test_float16_node_among_nodes_without_a_float16_kernel(cpu_isa):
    """ONNX Runtime then runs it in float, between Casts, with the float kernel."""
    case = SparseConvCase(random_weight((4, 3, 3, 3), 0.5), geometry_2d(), dtype=np.dtype(np.float16))
    model = make_model(case)
    (node,) = model.graph.node
    node.input[0], node.output[0] = "positive", "convolved"
    model.graph.node.insert(0, helper.make_node("Abs", ["X"], ["positive"]))
    model.graph.node.append(helper.make_node("Neg", ["convolved"], ["Y"]))
    inputs = random_inputs(case, (1, 3, 8, 9))
    (actual,) = make_session(model, cpu_isa=cpu_isa).run(None, inputs)
    assert actual.dtype == np.float16
    exact, bound = oracle(case, {**inputs, "X": np.abs(inputs["X"])})
    assert_within(-actual, exact, bound)


def test_float16_conversions_agree_with_numpy(cpu_isa):
    """Every float16 passes through unchanged, and sums that fall between two are rounded to even as numpy does."""
    case = SparseConvCase(
        np.ones((1, 1, 1), np.float32),
        ConvGeometry((1,), (1,), (0, 0), (1,)),
        dtype=np.dtype(np.float16),
        has_bias=False,
    )
    session = make_session(make_model(case), cpu_isa=cpu_isa)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(1, 1, -1)
    (actual,) = session.run(None, {"X": every})
    assert np.array_equal(actual, every, equal_nan=True)
    third = np.full((1, 1, 1), 1 / 3, np.float32)
    session = make_session(make_model(dataclasses.replace(case, weight=third)), cpu_isa=cpu_isa)
    (actual,) = session.run(None, {"X": every})
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (every.astype(np.float32) * third[0, 0, 0]).astype(np.float16)
    assert np.array_equal(actual, wanted, equal_nan=True)


@PROPERTY
@given(drawn=st.one_of(cases(), concat_cases()))
def test_portable_form_agrees(drawn):
    """The same node without the library: the function's body, run by ONNX Runtime itself."""
    case, x_shape = drawn
    model = make_model(case, with_function=True)
    inputs = random_inputs(case, x_shape)
    if len(model.graph.node[0].input) == 1:
        model.graph.node[0].input.append("")
    (actual,) = make_session(model, with_library=False).run(None, inputs)
    exact, bound = oracle(case, inputs)
    if case.dtype == np.float16:
        # ONNX Runtime rounds the weights, the convolution, the sum and the activation's steps, each to float16.
        magnitude = oracle(dataclasses.replace(case, activation=Activation.NONE), inputs)[1] / np.finfo(np.float32).eps
        bound = bound + 2.0**-9 * (np.abs(exact) + 1) + 2.0**-10 * magnitude
    assert_within(actual, exact, bound)


def test_dynamic_same_padding_is_that_of_conv():
    for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        geometry = ConvGeometry((3, 2), (2, 3), (), (1, 1), 1, auto_pad)
        case = SparseConvCase(random_weight((4, 3, 3, 2), 0.5), geometry)
        session = make_session(make_model(case))
        for size in range(1, 12):
            inputs = random_inputs(case, (1, 3, size, size + 1))
            (actual,) = session.run(None, inputs)
            assert actual.shape[2:] == tuple(out for _, _, out in resolve(geometry, (size, size + 1)))
            assert_within(actual, *oracle(case, inputs))
