"""The kernel for depthwise convolutions, through ONNX Runtime: which window runs, and what it computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry, PoolGeometry
from tests.native.cuda.test_ring import run_misaligned
from tests.support.random_cases import ACTIVATION_PARAMETERS
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    output_shape,
    random_inputs,
    random_weight,
    run_and_check,
)

PROPERTY = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HALF = np.dtype(np.float16)
# Kernel, stride, dilation and padding, and the window that runs them.
WINDOWS = [
    ((3, 1, 1, 1), "3x3"),
    ((3, 2, 1, 1), "3x3s2"),
    ((5, 1, 1, 2), "5x5"),
    ((5, 2, 1, 0), "5x5s2"),
    ((7, 1, 1, 3), "7x7"),
    ((3, 1, 1, 0), "3x3"),
    ((3, 1, 1, 2), "any"),
    ((7, 1, 1, 1), "7x7"),
    ((3, 1, 2, 2), "any"),
    ((3, 3, 1, 1), "any"),
    ((4, 2, 1, 1), "any"),
    ((1, 1, 1, 0), "1x1"),
    ((1, 2, 1, 0), "any"),
    ((1, 1, 1, 1), "any"),
]


def depthwise(channels, kernel=3, stride=1, dilation=1, pad=1, **changes):
    geometry = geometry_2d(kernel, stride, pad, dilation, channels)
    return SparseConvCase(random_weight((channels, 1, kernel, kernel), 0.8), geometry, **changes)


@pytest.fixture
def emulation(driver, make_session):
    return driver, make_session


def windows(driver):
    return [name.removeprefix("sparseconv_depthwise_") for name, *_ in driver.take_launches()]


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize(("form", "window"), WINDOWS)
def test_every_window(driver, make_session, form, window, dtype):
    kernel, stride, dilation, pad = form
    case = depthwise(5, kernel, stride, dilation, pad, dtype=np.dtype(dtype))
    session = make_session(make_model(case))
    for x_shape in ((1, 5, 14, 14), (3, 5, 7, 7), (2, 5, 19, 9), (1, 5, 8, 130)):
        run_and_check(session, case, x_shape)
        assert windows(driver) == [f"{window}_{'f16' if dtype == HALF else 'f32'}"]
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.depthwise"


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("kernel", [3, 1])
def test_every_activation(make_session, activation, dtype, has_residual, kernel):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    epilogue = {"activation": activation, "alpha": alpha, "beta": beta, "has_residual": has_residual}
    for has_bias in (False, True):
        case = depthwise(3, kernel, pad=kernel // 2, dtype=np.dtype(dtype), has_bias=has_bias, **epilogue)
        run_and_check(make_session(make_model(case)), case, (2, 3, 9, 11))


@pytest.mark.parametrize(
    ("num_multiprocessors", "window", "x_shape", "blocks"),
    [
        (1, (3, 1), (11, 6, 7, 7), (9, 1)),
        (3, (3, 1), (11, 6, 7, 7), (33, 1)),
        (132, (3, 1), (11, 6, 7, 7), (66, 1)),
        (1, (3, 2), (11, 6, 14, 14), (9, 1)),
        (1, (4, 1), (11, 6, 7, 7), (9, 1)),
        (1, (3, 1), (9, 6, 50, 49), (54, 1)),
        (1, (3, 1), (1, 6, 301, 300), (6, 22)),
        (132, (3, 1), (1, 6, 301, 300), (6, 43)),
        (1, (3, 2), (1, 6, 201, 120), (6, 3)),
        (1, (4, 1), (1, 6, 61, 60), (6, 9)),
    ],
)
def test_blocks_have_planes_or_bands(emulation, num_multiprocessors, window, x_shape, blocks):
    driver, make_session = emulation
    driver.set_device(num_multiprocessors=num_multiprocessors)
    case = depthwise(6, *window, dtype=HALF)
    run_and_check(make_session(make_model(case)), case, x_shape)
    assert [launch[1] for launch in driver.take_launches()] == [(*blocks, 1)]


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 1), (7, 1, 3), (4, 1, 1)])
@pytest.mark.parametrize("size", [(7, 7), (40, 61)])
def test_what_lies_beyond_a_window_is_not_read_into_it(emulation, dtype, window, size):
    """Neighbouring rows and planes follow each other in memory."""
    driver, make_session = emulation
    driver.set_device(num_multiprocessors=1)
    kernel, stride, pad = window
    weight = np.ones((4, 1, kernel, kernel), np.float32)
    case = SparseConvCase(weight, geometry_2d(kernel, stride, pad, 1, 4), dtype=np.dtype(dtype))
    session = make_session(make_model(case))
    inputs = random_inputs(case, (3, 4, *size))
    for place in ((0, 0), (0, -1), (-1, 0), (-1, -1), (3, -1), (5, 0)):
        x = inputs["X"].copy()
        x[1, 2][place] = np.nan
        (actual,) = session.run(None, inputs | {"X": x})
        # Outputs whose window has the place.
        reads = [
            (np.arange(n) * stride - pad <= i % m) & (i % m < np.arange(n) * stride - pad + kernel)
            for i, n, m in zip(place, actual.shape[2:], size, strict=True)
        ]
        wanted = np.zeros(actual.shape, bool)
        wanted[1, 2] = np.outer(*reads)
        np.testing.assert_array_equal(np.isnan(actual), wanted)


@st.composite
def depthwise_cases(draw):
    channels, rank = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    axes = st.tuples(*[st.integers(1, 7)] * rank)
    kernel, sizes = draw(axes), draw(st.tuples(*[st.integers(1, 40)] * rank))
    strides, dilations = draw(st.tuples(*[st.integers(1, 3)] * rank)), draw(st.tuples(*[st.integers(1, 2)] * rank))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    begins = [draw(st.integers(0, 4)) for _ in range(rank)]
    ends = [
        draw(st.integers(max(0, r - n - b), max(0, r - n - b) + 3))
        for r, n, b in zip(reach, sizes, begins, strict=True)
    ]
    geometry = ConvGeometry(kernel, strides, (*begins, *ends), dilations, channels)
    weight = random_weight((channels, 1, *kernel), draw(st.sampled_from([0.3, 1.0])), draw(st.integers(0, 99)))
    dtype = np.dtype(draw(st.sampled_from([np.float32, np.float16])))
    case = SparseConvCase(weight, geometry, draw(st.sampled_from([Activation.NONE, Activation.RELU])), dtype=dtype)
    return case, (draw(st.integers(1, 5)), channels, *sizes)


@PROPERTY
@given(drawn=depthwise_cases(), num_multiprocessors=st.sampled_from([1, 132]))
def test_any_depthwise_convolution(driver, make_session, drawn, num_multiprocessors):
    case, x_shape = drawn
    driver.set_device(num_multiprocessors=num_multiprocessors)
    run_and_check(make_session(make_model(case), cuda_kernel="depthwise"), case, x_shape)


# --- one tap ----------------------------------------------------------------------------------------------------------


@PROPERTY
@given(
    planes=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    dtype=st.sampled_from([np.float32, np.float16]),
    has_residual=st.booleans(),
)
def test_planes_of_any_size_are_scaled(emulation, planes, sizes, dtype, has_residual):
    """Vectors have elements of one plane, of two, or of more where planes are smaller than that."""
    driver, make_session = emulation
    batch, channels = planes
    ones = (1,) * len(sizes)
    geometry = ConvGeometry(ones, ones, (0,) * (2 * len(sizes)), ones, channels)
    weight = random_weight((channels, 1, *ones), 0.8)
    case = SparseConvCase(weight, geometry, Activation.RELU, dtype=np.dtype(dtype), has_residual=has_residual)
    run_and_check(make_session(make_model(case)), case, (batch, channels, *sizes))
    assert windows(driver) == [f"1x1_{'f16' if dtype == np.float16 else 'f32'}"]


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("size", [(7, 7), (2, 1), (8, 8)])
def test_what_is_in_one_plane_stays_there(make_session, dtype, size):
    case = depthwise(4, 1, pad=0, dtype=np.dtype(dtype))
    session = make_session(make_model(case))
    inputs = random_inputs(case, (3, 4, *size))
    for place in ((0, 0), (-1, -1)):
        x = inputs["X"].copy()
        x[1, 2][place] = np.nan
        (actual,) = session.run(None, inputs | {"X": x})
        wanted = np.zeros(actual.shape, bool)
        wanted[1, 2][place] = case.weight[2] != 0
        np.testing.assert_array_equal(np.isnan(actual), wanted)


@pytest.mark.parametrize(
    ("num_multiprocessors", "x_shape", "blocks"),
    [(132, (1, 64, 56, 56), 98), (132, (8, 64, 56, 56), 660), (132, (16, 64, 56, 56), 784), (1, (2, 6, 7, 7), 1)],
)
def test_threads_take_a_vector_until_there_are_enough(emulation, num_multiprocessors, x_shape, blocks):
    driver, make_session = emulation
    driver.set_device(num_multiprocessors=num_multiprocessors)
    case = depthwise(x_shape[1], 1, pad=0, dtype=HALF)
    run_and_check(make_session(make_model(case)), case, x_shape)
    assert driver.take_launches() == [("sparseconv_depthwise_1x1_f16", (blocks, 1, 1), 256, 0)]


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_that_begin_between_vectors(driver, make_session, dtype, which):
    case = depthwise(3, 1, pad=0, dtype=np.dtype(dtype), has_residual=True)
    inputs = random_inputs(case, (2, 3, 5, 5))
    y, name = run_misaligned(make_session(make_model(case)), driver, inputs, np.zeros((2, 3, 5, 5), dtype), which)
    assert name.startswith("sparseconv_depthwise_1x1_")
    assert_within(y, *oracle(case, inputs))


# ----------------------------------------------------------------------------------------------------------------------


def test_a_pool_follows(driver, make_session):
    case = depthwise(4, activation=Activation.RELU, pool=PoolGeometry((2, 2), (2, 2), (0,) * 4))
    run_and_check(make_session(make_model(case)), case, (2, 4, 8, 8))
    assert [name for name, *_ in driver.take_launches()] == [
        "sparseconv_depthwise_3x3_f32",
        "sparseconv_max_pool_2x2_f32_v16",
    ]


def test_rows_that_a_block_has_no_room_for_run_the_csr_kernel(driver, make_session):
    driver.set_device(max_shared_bytes=48 << 10)
    case = depthwise(2)
    session = make_session(make_model(case))
    for width, kernel in ((700, "depthwise_3x3_f32"), (900, "csr_f32_b2")):
        run_and_check(session, case, (2, 2, 9, width))
        ((name, *_),) = driver.take_launches()
        assert name == f"sparseconv_{kernel}"
    with pytest.raises(Exception, match="cannot run this call: a block has no room for its rows"):
        make_session(make_model(case), cuda_kernel="depthwise").run(None, random_inputs(case, (2, 2, 9, 900)))


@pytest.mark.parametrize("window", [(3, 2, 1), (8, 8, 0)])
def test_bands_are_such_as_shared_memory_has_room_for(driver, make_session, window):
    driver.set_device(max_shared_bytes=48 << 10, num_multiprocessors=1)
    kernel, stride, pad = window
    case = depthwise(3, kernel, stride, pad=pad)
    run_and_check(make_session(make_model(case), cuda_kernel="depthwise"), case, (2, 3, 112, 113))
    ((_, grid, _, shared_bytes),) = driver.take_launches()
    assert grid[0] == 6
    assert grid[1] > 1
    # Of one row, more would be needed than lets four blocks run beside each other.
    assert shared_bytes < 24 << 10


def test_who_asks_for_the_csr_kernel_gets_it(driver, make_session):
    case = depthwise(4)
    run_and_check(make_session(make_model(case), cuda_kernel="csr"), case, (1, 4, 8, 8))
    assert driver.take_launches()[0][0] == "sparseconv_csr_f32_b1"


@pytest.mark.parametrize(
    "case",
    [
        SparseConvCase(random_weight((8, 1, 3, 3), 0.5), geometry_2d(group=4)),
        SparseConvCase(random_weight((4, 2, 3, 3), 0.5), geometry_2d(group=2)),
        SparseConvCase(random_weight((4, 1, 3, 3, 3), 0.5), ConvGeometry((3,) * 3, (1,) * 3, (1,) * 6, (1,) * 3, 4)),
        SparseConvCase(random_weight((2, 1, 33, 33), 0.01), geometry_2d(33, pad=16, group=2)),
    ],
)
def test_others_are_refused(driver, make_session, case):
    with pytest.raises(Exception, match=r"'sparseconv.cuda_kernel' asks for the depthwise kernel, which runs 1-D and"):
        make_session(make_model(case), cuda_kernel="depthwise")
    x_shape = (1, case.in_channels, *(5,) * (case.weight.ndim - 2))
    run_and_check(make_session(make_model(case)), case, x_shape)
    assert driver.take_launches()[0][0].startswith("sparseconv_csr")


def test_launches_are_all_that_a_run_asks_of_the_driver(make_session, assert_only_launches):
    case = depthwise(4, dtype=HALF)
    assert_only_launches(make_session(make_model(case)), random_inputs(case, (2, 4, 8, 8)), 1)


def test_nothing_is_computed_of_an_empty_batch(driver, make_session):
    case = depthwise(4)
    (y,) = make_session(make_model(case)).run(None, random_inputs(case, (0, 4, 8, 8)))
    assert y.shape == output_shape(case, (0, 4, 8, 8))
    assert driver.take_launches() == []
