"""The kernels of the library's PTX, compiled for the CPU, against the float64 oracle."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.kernels.cuda.csr_launch import CsrParams, Epilogue, ReduceParams, run_csr, run_reduce
from tests.support.cuda_emulation import Divisor, GeneratedParams
from tests.support.cuda_host_build import address, build_host_image, huge_array, launch
from tests.support.sparse_models import (
    SparseConvCase,
    activate,
    assert_within,
    geometry_2d,
    oracle,
    random_inputs,
    random_weight,
)

SUB_BATCHES = (1, 2, 4, 8)
PARAMETERS = {
    Activation.CLIP: (-0.5, 1.25),
    Activation.LEAKY_RELU: (0.1, 0.0),
    Activation.HARD_SIGMOID: (0.2, 0.5),
}
DTYPES = (np.dtype(np.float32), np.dtype(np.float16))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(case, x_shape, sub_batch=2, **options):
    inputs = random_inputs(case, x_shape)
    assert_within(run_csr(case, inputs, sub_batch, **options), *oracle(case, inputs))


def pointwise(activation=Activation.NONE, **options):
    """One channel, of weight 1."""
    return SparseConvCase(np.ones((1, 1, 1, 1), np.float32), geometry_2d(1, pad=0), activation, **options)


@st.composite
def cases(draw):
    """A case and a shape of X that fits it."""
    rank = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    group_channels, group_rows = draw(st.sampled_from([(1, 1), (1, 2), (3, 2), (5, 3)]))
    per_axis = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    kernel = tuple(draw(st.lists(st.integers(1, 4 if rank < 3 else 3), min_size=rank, max_size=rank)))
    strides, dilations = tuple(draw(per_axis)), tuple(draw(per_axis))
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER"]))
    pads = tuple(draw(st.lists(st.integers(0, 3), min_size=2 * rank, max_size=2 * rank)))
    if auto_pad == "NOTSET":
        geometry = ConvGeometry(kernel, strides, pads, dilations, group)
    else:
        geometry = ConvGeometry(kernel, strides, (), (1,) * rank, group, auto_pad)
    activation = draw(st.sampled_from(list(Activation)))
    alpha, beta = PARAMETERS.get(activation, (0.0, 0.0))
    weight = random_weight((group * group_rows, group_channels, *kernel), draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])))
    case = SparseConvCase(
        weight,
        geometry,
        activation,
        alpha,
        beta,
        draw(st.sampled_from(DTYPES)),
        has_bias=draw(st.booleans()),
        has_residual=draw(st.booleans()),
        slice_height=draw(st.sampled_from([None, 1, 2])),
    )
    longest = {1: 200, 2: 18, 3: 6}[rank]
    sizes = []
    for i in range(rank):
        extent = (kernel[i] - 1) * geometry.dilations[i] + 1
        padding = 0 if geometry.auto_pad != "NOTSET" else pads[i] + pads[rank + i]
        smallest = 1 if geometry.auto_pad != "NOTSET" else max(1, extent - padding)
        sizes.append(draw(st.integers(smallest, smallest + longest)))
    return case, (draw(st.integers(1, 5)), case.in_channels, *sizes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    drawn=cases(),
    sub_batch=st.sampled_from(SUB_BATCHES),
    threads=st.sampled_from([32, 64, 256]),
    block_rows=st.integers(1, 5),
)
def test_any_convolution(drawn, sub_batch, threads, block_rows):
    case, x_shape = drawn
    check(case, x_shape, sub_batch, threads=threads, block_rows=block_rows)


@pytest.mark.parametrize("block_rows", [1, 3, 4, 7, 9])
@pytest.mark.parametrize("max_grid", [1, 65535])
def test_rows_of_a_block_end_anywhere_in_a_piece(block_rows, max_grid):
    weight = random_weight((7, 40, 3, 3), 0.1)  # of 360 columns; a piece has 256
    weight[[1, 2, 3, 6]] = 0
    weight[3].flat[: 256 - np.count_nonzero(weight[0])] = 1.0
    case = SparseConvCase(weight, geometry_2d(), has_residual=True)
    check(case, (3, 40, 5, 9), block_rows=block_rows, max_grid=max_grid)


@dtypes
@pytest.mark.parametrize("sub_batch", SUB_BATCHES)
@pytest.mark.parametrize("batch", [1, 2, 7, 8, 9])
def test_every_remainder_of_a_sub_batch(batch, sub_batch, dtype):
    case = SparseConvCase(random_weight((3, 4, 3, 3), 0.4), geometry_2d(), dtype=dtype, has_residual=True)
    check(case, (batch, 4, 5, 9), sub_batch, threads=32)


@dtypes
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.name)
def test_activations(activation, dtype):
    alpha, beta = PARAMETERS.get(activation, (0.0, 0.0))
    case = SparseConvCase(
        random_weight((5, 8, 3, 3), 0.5), geometry_2d(), activation, alpha, beta, dtype, has_residual=True
    )
    inputs = random_inputs(case, (2, 8, 9, 9))
    inputs["Z"] *= 4  # so that every branch is taken
    assert_within(run_csr(case, inputs, 2), *oracle(case, inputs))


def test_activations_known_at_compile_time_are_those_known_at_run_time():
    source = "\n".join(
        [
            '#include "epilogue.cuh"',
            "using namespace sparseconv::cuda;",
            'extern "C" __global__ void both(const float* x, float* y, float alpha, float beta) {',
            *(f"  *y++ = Activate<{int(a)}, float>(x[threadIdx.x], alpha, beta);" for a in Activation),
            *(f"  *y++ = Activate<float>({int(a)}, x[threadIdx.x], alpha, beta);" for a in Activation),
            "}",
        ]
    )
    image = build_host_image(source)
    for x in (-np.inf, -7.5, -1.0, -0.25, 0.0, 0.5, 1.0, 7.5, np.inf, np.nan):
        y = np.zeros((2, len(Activation)), np.float32)
        arguments = [ctypes.c_void_p(address(np.float32([x]))), ctypes.c_void_p(address(y))]
        launch(image, "both", (1,), (1,), [*arguments, ctypes.c_float(0.3), ctypes.c_float(0.6)])
        np.testing.assert_array_equal(y[0], y[1])


@pytest.mark.parametrize("activation", [Activation.SIGMOID, Activation.SILU], ids=lambda a: a.name)
def test_sigmoid_is_accurate_relative_to_itself(activation):
    x = np.linspace(-86, 20, 4096, dtype=np.float32).reshape(1, 1, 1, -1)
    case = pointwise(activation, has_bias=False)
    exact = activate(case, x.astype(np.float64))[0]
    np.testing.assert_allclose(run_csr(case, {"X": x}, 1), exact, rtol=6 * np.finfo(np.float32).eps, atol=0)


@dtypes
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.name)
def test_nan_stays_nan(activation, dtype):
    alpha, beta = PARAMETERS.get(activation, (0.0, 0.0))
    case = SparseConvCase(
        np.ones((1, 1, 1, 1), dtype), geometry_2d(1, pad=0), activation, alpha, beta, dtype, has_bias=False
    )
    x = np.array([1, np.nan, -1], dtype).reshape(1, 1, 1, 3)
    assert np.isnan(run_csr(case, {"X": x}, 1)).reshape(-1).tolist() == [False, True, False]


@dtypes
def test_a_row_longer_than_a_piece_and_one_that_is_empty(dtype):
    weight = random_weight((4, 70, 3, 3), 0.9)
    weight[1] = 0
    weight[2, :, 1:] = 0
    case = SparseConvCase(weight, geometry_2d(), dtype=dtype, slice_height=1)
    check(case, (3, 70, 6, 7), 4, threads=64)


@pytest.mark.parametrize(
    ("kernel", "pads", "dilations", "sizes"),
    [
        ((40,), (20, 19), (1,), (90,)),
        ((33, 2), (5, 0, 9, 1), (2, 1), (70, 5)),
        ((2, 30, 3), (1, 15, 1, 1, 14, 1), (1, 1, 3), (3, 21, 8)),
        ((32,), (31, 31), (3,), (64,)),
        ((30,), (4, 31), (1,), (64,)),
    ],
    ids=str,
)
def test_kernels_too_long_for_a_bit_each(kernel, pads, dilations, sizes):
    case = SparseConvCase(
        random_weight((2, 3, *kernel), 0.5), ConvGeometry(kernel, (1,) * len(kernel), pads, dilations)
    )
    check(case, (2, 3, *sizes), 2)


@dtypes
def test_grids_smaller_than_the_work(dtype):
    case = SparseConvCase(random_weight((7, 3, 3, 3), 0.4), geometry_2d(), dtype=dtype)
    check(case, (9, 3, 5, 5), 2, threads=32, max_grid=2)


def test_padding_far_larger_than_the_input():
    case = SparseConvCase(random_weight((2, 2, 5, 5), 0.8), ConvGeometry((5, 5), (3, 2), (9, 8, 10, 7), (2, 3)))
    check(case, (2, 2, 1, 2), 2)


@dtypes
def test_images_of_more_elements_than_31_bits_count(dtype):
    """Nearly 2^32 in an image; the taps and positions that are computed lie far apart."""
    geometry = ConvGeometry((2, 3), (1 << 13, 1 << 14), (0, 1 << 12, 0, 1 << 12), (1 << 13, 1 << 12), group=2)
    case = SparseConvCase(random_weight((2, 1, 2, 3), 1.0), geometry, dtype=dtype, has_bias=False)
    x = huge_array((3, 2, (1 << 15) - 1, 1 << 16), dtype)
    # What is read, as a small input of a small convolution: every 2^12th column from -2^12 on, every 2^13th row.
    small = np.random.default_rng(0).uniform(-1, 1, (3, 2, 4, 16)).astype(dtype)
    x[:, :, :: 1 << 13, :: 1 << 12] = small
    small_geometry = ConvGeometry((2, 3), (1, 4), (0, 1, 0, 1), (1, 1), group=2)
    exact = oracle(dataclasses.replace(case, geometry=small_geometry), {"X": small})
    assert_within(run_csr(case, {"X": x}, 2), *exact)


def test_weights_that_are_not_finite():
    """A NaN weight makes NaNs of all outputs of its row, also where its tap reads a padding zero, as in dense Conv."""
    weight = random_weight((3, 2, 3, 3), 0.5)
    weight[1, 0, 0, 0] = np.nan
    case = SparseConvCase(weight, geometry_2d(), has_bias=False)
    y = run_csr(case, random_inputs(case, (2, 2, 12, 12)), 2)
    assert np.isnan(y[:, 1]).all()
    assert np.isfinite(y[:, ::2]).all()


def test_inf_in_the_input_reaches_only_the_outputs_that_read_it():
    case = SparseConvCase(np.ones((1, 1, 3, 3), np.float32), geometry_2d(), has_bias=False)
    inputs = random_inputs(case, (2, 1, 8, 8))
    inputs["X"][1, 0, 0, 0] = np.inf
    y = run_csr(case, inputs, 2)
    assert np.isfinite(y[0]).all()
    assert np.argwhere(np.isinf(y[1, 0])).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


@dtypes
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_reduce(splits, dtype):
    case = pointwise(Activation.SILU, dtype=dtype)
    rng = np.random.default_rng(splits)
    partial = rng.uniform(-1, 1, (splits, 2, 3, 7, 11)).astype(dtype)
    bias, residual = rng.uniform(-1, 1, 3).astype(dtype), rng.uniform(-1, 1, (2, 3, 7, 11)).astype(dtype)
    for arguments, blocks in [((bias, residual), None), ((None, None), 2)]:
        terms = [partial.astype(np.float64)]
        if arguments[0] is not None:
            terms += [np.broadcast_to(bias.reshape(3, 1, 1), (1, 2, 3, 7, 11)), residual[None]]
        everything = np.concatenate(terms, dtype=np.float64)
        exact, lipschitz = activate(case, everything.sum(axis=0))
        eps = np.finfo(np.float32).eps
        bound = lipschitz * len(everything) * eps * np.abs(everything).sum(axis=0) + 8 * eps * (np.abs(exact) + 1)
        if dtype == np.float16:
            bound = bound + 2.0**-11 * np.abs(exact) + 2.0**-25
        assert_within(run_reduce(case, partial, *arguments, blocks=blocks), exact, bound)


def test_reduce_adds_in_order():
    case = pointwise()
    partial = np.array([1e8, 1, -1e8, 1], np.float32).reshape(4, 1, 1, 1, 1)
    assert run_reduce(case, partial, None, None).item() == 1


def test_reduce_adds_halves_in_float():
    """Neither is the sum rounded on the way, nor does it overflow."""
    case = pointwise(dtype=np.float16)
    partial = np.array([2048, 0.5, 0.5, -1024], np.float16).reshape(4, 1, 1, 1, 1)
    assert run_reduce(case, partial, None, None).item() == 1025
    partial = np.array([60000, 60000, -60000], np.float16).reshape(3, 1, 1, 1, 1)
    assert run_reduce(case, partial, None, None).item() == 60000


def test_reduce_finds_the_place_of_any_output():
    source = """
        #include "reduce.cuh"
        using namespace sparseconv::cuda;
        extern "C" __global__ void place(ReduceParams p, long long index, int* out) {
          const OutputPlace place = PlaceOf(p, index);
          out[0] = place.channel;
          out[1] = place.position;
        }
    """
    image = build_host_image(source)
    for count, index in [(1 << 31, (1 << 31) - 1), ((1 << 32) - 1, (1 << 32) - 2), (1 << 34, 12345678901)]:
        params = ReduceParams(out_channels=12, plane=1000, num_values=count)
        out = np.zeros(2, np.int32)
        launch(image, "place", (1,), (1,), [params, ctypes.c_longlong(index), ctypes.c_void_p(address(out))])
        assert out.tolist() == [index // 1000 % 12, index % 1000]


def test_parameters_have_the_layout_of_the_device():
    types = (Epilogue, CsrParams, ReduceParams, Divisor, GeneratedParams)
    fields = [(t, name) for t in types for name, _ in t._fields_]
    asked = [f"__builtin_offsetof({t.__name__}, {name})" for t, name in fields] + [
        f"sizeof({t.__name__})" for t in types
    ]
    source = f"""
        #include "params.h"
        using namespace sparseconv::cuda;
        extern "C" __global__ void layout(unsigned long* out) {{
          const unsigned long values[] = {{{", ".join(asked)}}};
          for (unsigned long value : values) *out++ = value;
        }}
    """
    out = np.zeros(len(asked), np.uint64)
    launch(build_host_image(source), "layout", (1,), (1,), [ctypes.c_void_p(address(out))])
    assert out.tolist() == [getattr(t, name).offset for t, name in fields] + [ctypes.sizeof(t) for t in types]
