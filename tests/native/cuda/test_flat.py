"""The flat kernels, for windows of many channels, through ONNX Runtime against the float64 oracle."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.flat_plan import FlatSteps, plan_flat
from onnx_sparseconv.kernels.gpu_times import fastest_work, flat_work
from tests.native.cuda.test_ring import run_and_check, run_misaligned
from tests.support.random_cases import ACTIVATION_PARAMETERS
from tests.support.sparse_layers import layer_of
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
CASE = SparseConvCase(random_weight((70, 160, 3, 3), 0.05, dtype=HALF), geometry_2d(pad=1), Activation.RELU, dtype=HALF)

# Shape of the weight, batch and size of the input, geometry.
LAYERS = [
    ((64, 160, 3, 3), (9, 14, 14), geometry_2d(pad=1)),
    ((130, 192, 3, 3), (3, 28, 28), geometry_2d(pad=1)),
    ((64, 160, 3, 3), (30, 7, 7), geometry_2d(pad=1)),
    ((100, 160, 3, 3), (20, 4, 5), geometry_2d(pad=1)),
    ((64, 160, 3, 3), (2, 13, 41), geometry_2d(pad=1)),
    ((64, 68, 3, 3), (2, 41, 52), geometry_2d(pad=1)),  # rows in several chunks, of floats, too
    ((64, 65, 3, 3), (3, 13, 12), geometry_2d(pad=1)),  # images of X begin anywhere
    ((64, 160, 3, 3), (3, 16, 17), geometry_2d()),
    ((64, 160, 3, 3), (9, 14, 14), geometry_2d(stride=2, pad=1)),
    ((64, 160, 3, 3), (5, 15, 29), geometry_2d(stride=2, pad=1)),
    ((64, 96, 5, 5), (3, 14, 14), geometry_2d(5, pad=2)),
    ((64, 96, 5, 3), (3, 17, 19), ConvGeometry((5, 3), (2, 3), (2, 0, 1, 2), (1, 1))),
    ((64, 160, 3, 3), (3, 18, 20), ConvGeometry((3, 3), (1, 1), (2, 3, 2, 3), (2, 3))),
    ((64, 160, 3, 3), (3, 18, 20), ConvGeometry((3, 3), (2, 2), (2, 2, 2, 2), (2, 2))),
    ((64, 160, 2, 2), (9, 14, 14), ConvGeometry((2, 2), (2, 2), (0, 0, 0, 0), (1, 1))),
    ((64, 160, 3, 3), (3, 9, 11), ConvGeometry((3, 3), (1, 1), (4, 5, 4, 5), (1, 1))),
    ((64, 160, 3, 3), (3, 12, 14), ConvGeometry((3, 3), (1, 1), (0, 1, 3, 0), (1, 1))),
    ((200, 80, 3, 3), (4, 14, 14), dataclasses.replace(geometry_2d(pad=1), group=2)),
    ((64, 160, 3), (6, 50), ConvGeometry((3,), (2,), (1, 1), (1,))),
]


def flatten_of(case, x_shape):
    """What makes X flat, where X begins at a multiple of 16 bytes: by rows, without strides and of no small planes."""
    plane = math.prod(x_shape[2:])
    by_rows = set(case.geometry.strides) == {1} and plane >= 128 and x_shape[1] * plane * case.dtype.itemsize % 16 == 0
    return f"sparseconv_flatten{'_rows' if by_rows else ''}{'_f32' if case.dtype == FLOAT else ''}"


def run_flat(session, driver, case, x_shape, kernel="flat"):
    """Run a case and compare; floats are rounded to halves."""
    is_float = case.dtype == FLOAT
    flatten, name = run_and_check(session, driver, case, x_shape, has_rounded_factors=is_float)
    assert flatten == flatten_of(case, x_shape)
    assert name.startswith(f"sparseconv_{kernel}_f32_n" if is_float else f"sparseconv_{kernel}_n")


@pytest.fixture(autouse=True)
def a_few_multiprocessors(driver):
    """So that blocks compute several tiles."""
    driver.set_device(num_multiprocessors=4)


@pytest.mark.parametrize(
    ("layer", "density", "dtype"),
    [(layer, density, HALF) for layer in LAYERS for density in (0.02, 0.08)]
    + [(layer, 0.05, FLOAT) for layer in LAYERS],
    ids=str,
)
def test_layers(make_session, driver, layer, density, dtype):
    weight_shape, (batch, *size), geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density, dtype=dtype), geometry, Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="flat")
    run_flat(session, driver, case, (batch, weight_shape[1] * case.geometry.group, *size))
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.flat"


@pytest.mark.parametrize(
    ("layer", "density", "dtype"),
    [(layer, 1.0, HALF) for layer in LAYERS]
    + [(layer, 0.3, HALF) for layer in LAYERS[1::3]]
    + [(layer, 0.5, FLOAT) for layer in LAYERS[::2]],
    ids=str,
)
def test_too_few_zeros_for_an_order(make_session, driver, layer, density, dtype):
    """Products are dense."""
    weight_shape, (batch, *size), geometry = layer
    weight = random_weight(weight_shape, density, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.RELU, has_residual=density == 1.0, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="flat")
    run_flat(session, driver, case, (batch, weight_shape[1] * case.geometry.group, *size), "flat_dense")


@pytest.mark.parametrize(
    ("weight_shape", "geometry", "density"),
    [
        ((384, 160, 3, 3), geometry_2d(pad=1), 0.1),
        ((130, 160, 3, 3), geometry_2d(stride=2, pad=1), 0.12),
        ((128, 96, 5, 5), geometry_2d(5, pad=2), 0.1),
        ((64, 96, 5, 3), ConvGeometry((5, 3), (2, 3), (2, 0, 1, 2), (1, 1)), 0.13),
        ((96, 64, 1, 7), ConvGeometry((1, 7), (1, 1), (0, 3, 0, 3), (1, 1)), 0.14),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_entries_that_are_the_third_of_their_neighbours(make_session, driver, weight_shape, geometry, density, dtype):  # noqa: PLR0917
    case = SparseConvCase(random_weight(weight_shape, density, dtype=dtype), geometry, Activation.RELU, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="flat")
    run_flat(session, driver, case, (2, weight_shape[1], 13, 14))


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_a_row_without_zeros(make_session, driver, dtype):
    """Chunks of its row tile have so many pairs that some of these are a chunk by themselves."""
    weight = random_weight((384, 160, 3, 3), 0.02, dtype=dtype)
    weight[7] = random_weight((1, 160, 3, 3), 1.0, dtype=dtype)
    case = SparseConvCase(weight, geometry_2d(pad=1), Activation.NONE, dtype=dtype)
    run_flat(make_session(make_model(case), cuda_kernel="flat"), driver, case, (5, 160, 14, 14))


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_some_of_x_is_left_to_the_kernel(make_session, driver, dtype, has_residual):
    """Where there are several turns of tiles; not of halves with a residual."""
    driver.set_device(num_multiprocessors=1)
    case = dataclasses.replace(CASE, weight=CASE.weight.astype(dtype), dtype=dtype, has_residual=has_residual)
    session = make_session(make_model(case), cuda_kernel="flat")
    session.run(None, random_inputs(case, (6, 160, 14, 14)))
    (flatten, (chunks, *_), *_), _ = driver.take_launches()
    assert flatten == flatten_of(case, (6, 160, 14, 14))
    all_chunks = 6 * math.ceil(8 * 15 * 14 * dtype.itemsize / 6144)
    assert (chunks < all_chunks) == (dtype == FLOAT or not has_residual)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_activations_and_a_residual(make_session, driver, activation, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(
        CASE,
        weight=CASE.weight.astype(dtype),
        activation=activation,
        alpha=alpha,
        beta=beta,
        has_residual=True,
        dtype=dtype,
    )
    run_flat(make_session(make_model(case), cuda_kernel="flat"), driver, case, (9, 160, 14, 14))


@pytest.mark.parametrize("which", ["X", "Z", "Y"])
@pytest.mark.parametrize("size", [(28, 28), (14, 14), (7, 7)], ids=str)
def test_tensors_that_begin_anywhere(make_session, driver, which, size):
    case = dataclasses.replace(CASE, has_residual=True)
    inputs = random_inputs(case, (3, 160, *size))
    session = make_session(make_model(case), cuda_kernel="flat")
    y, first_kernel = run_misaligned(session, driver, inputs, np.zeros((3, case.out_channels, *size), HALF), which)
    assert first_kernel == (flatten_of(case, (3, 160, *size)) if which != "X" else "sparseconv_flatten")
    assert_within(y, *oracle(case, inputs, stored_sums=1))


@pytest.mark.parametrize(
    ("layer", "batch", "density"),
    [
        # No step comes twice.
        (((64, 64, 3, 3), (14, 14), geometry_2d(pad=1)), 1, 0.02),
        (((130, 64, 3, 3), (13, 17), geometry_2d(pad=1)), 9, 0.02),
        (((64, 96, 3, 3), (7, 7), geometry_2d(pad=1)), 64, 0.02),
        (((128, 64, 3, 3), (21, 19), geometry_2d(stride=2, pad=1)), 16, 0.02),
        (((64, 96, 5, 5), (11, 14), geometry_2d(5, pad=2)), 5, 0.02),
        # Dense.
        (((130, 72, 3, 3), (13, 17), geometry_2d(pad=1)), 9, 0.3),
        (((128, 64, 3, 3), (21, 19), geometry_2d(stride=2, pad=1)), 16, 0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_what_foretells_times_makes_the_same_plan(make_session, driver, layer, batch, density, dtype):  # noqa: PLR0917
    """For more layers, without computing them: test_flat_plan.py."""
    driver.set_device(num_multiprocessors=24)
    weight_shape, size, geometry = layer
    weight = random_weight(weight_shape, density, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="flat")
    session.run(None, random_inputs(case, (batch, weight_shape[1], *size)))
    (flatten, *_), (name, grid, _, _) = driver.take_launches()
    assert flatten.startswith("sparseconv_flatten")
    is_dense = density > 0.1
    steps = math.ceil(weight_shape[1] / (16 if is_dense else 32)) * math.prod(weight_shape[2:])
    foretold = plan_flat(layer_of(case, size), batch, FlatSteps(steps, is_dense=is_dense), 24)
    assert (foretold.blocks, min(foretold.tiles, 24)) == (int(name.rpartition("_n")[2]), grid[0])


@pytest.mark.parametrize(
    ("layer", "kernel"),
    [
        (((64, 160, 3, 3), 14, 0.1, 9), "flatten"),
        (((64, 96, 5, 5), 13, 0.08, 9), "flatten"),
        (((128, 96, 3, 3), 26, 0.2, 8), "flatten"),  # with its zeros
        (((64, 128, 3, 3), 14, 0.3, 1), "cluster"),
        (((64, 64, 3, 3), 16, 0.1, 4), "octets"),
        (((64, 160, 3, 3), 14, 0.1, 1), "cluster"),
        (((64, 256, 3, 3), 7, 0.05, 9), "cluster"),
    ],
    ids=str,
)
def test_what_foretells_times_foretells_the_kernel(make_session, driver, layer, kernel):
    driver.set_device(num_multiprocessors=8)
    weight_shape, size, density, batch = layer
    geometry = geometry_2d(weight_shape[2], pad=weight_shape[2] // 2)
    case = SparseConvCase(random_weight(weight_shape, density, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case))
    session.run(None, random_inputs(case, (batch, weight_shape[1], size, size)))
    (name, *_), *_ = driver.take_launches()
    assert name.startswith(f"sparseconv_{kernel}")
    call = layer_of(case, (size, size)), 90, batch, 8
    assert (fastest_work(*call) == flat_work(*call)) == (kernel == "flatten")


@pytest.mark.parametrize(
    "shape", [(70, 40, 3, 3), (64, 160, 1, 1), (2080, 64, 3, 3)], ids=["few channels", "1x1", "many outputs"]
)
def test_what_the_kernel_does_not_run_is_refused_when_the_session_is_created(make_session, shape):
    weight = random_weight(shape, 0.05, dtype=HALF)
    case = SparseConvCase(weight, geometry_2d(shape[-1], pad=shape[-1] // 2), dtype=HALF)
    with pytest.raises(Exception, match=r"node 'conv1': .*asks for the flat kernel, which runs windows of 64 to 2048"):
        make_session(make_model(case), cuda_kernel="flat")
