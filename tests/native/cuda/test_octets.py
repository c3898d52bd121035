"""The octet kernel, for windows of few channels, through ONNX Runtime against the float64 oracle."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.warpgroup_plan import WindowSteps, plan_octets
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
CASE = SparseConvCase(random_weight((70, 40, 3, 3), 0.1, dtype=HALF), geometry_2d(pad=1), Activation.RELU, dtype=HALF)


def words(width, pad=0):
    """Windows of words."""
    return ConvGeometry((1, width), (1, 1), (0, pad, 0, pad), (1, 1))


# Shape of the weight, batch and size of the input, geometry.
LAYERS = [
    ((64, 64, 3, 3), (1, 5, 16), geometry_2d(pad=1)),
    ((130, 40, 3, 3), (1, 5, 8), geometry_2d(pad=1)),
    ((64, 64, 3, 3), (2, 29, 56), geometry_2d(pad=1)),
    ((128, 128, 3, 3), (2, 28, 28), geometry_2d(pad=1)),
    ((64, 96, 3, 3), (3, 6, 112), geometry_2d(pad=1)),
    ((64, 128, 3, 3), (2, 5, 112), geometry_2d(pad=1)),
    ((48, 64, 3, 3), (2, 12, 224), geometry_2d(pad=1)),
    ((64, 33, 3, 3), (1, 4, 400), geometry_2d(pad=1)),
    ((64, 64, 5, 3), (3, 12, 24), ConvGeometry((5, 3), (1, 1), (2, 1, 2, 1), (1, 1))),
    ((64, 96, 3, 3), (3, 12, 40), ConvGeometry((3, 3), (1, 1), (0, 1, 3, 1), (2, 1))),
    ((64, 32, 3, 3), (2, 9, 24), ConvGeometry((3, 3), (1, 1), (2, 4, 2, 4), (2, 4))),
    ((40, 32, 5, 5), (3, 11, 32), geometry_2d(5, pad=2)),
    ((64, 32, 7, 3), (1, 9, 16), ConvGeometry((7, 3), (1, 1), (3, 1, 3, 1), (1, 1))),
    ((64, 40, 3, 3), (1, 9, 16), ConvGeometry((3, 3), (1, 1), (0, 0, 0, 2), (1, 1))),
    ((64, 40, 3, 3), (1, 12, 20), ConvGeometry((3, 3), (1, 1), (1, 3, 1, 5), (1, 1))),
    ((64, 40, 3, 3), (1, 6, 248), ConvGeometry((3, 3), (1, 1), (1, 9, 1, 1), (1, 1))),
    ((64, 40, 3, 5), (2, 8, 12), ConvGeometry((3, 5), (1, 1), (1, 0, 1, 0), (1, 1))),
    ((64, 70, 3, 3), (2, 8, 60), geometry_2d(pad=1)),
    ((64, 64, 3, 3), (5, 4, 12), geometry_2d(pad=1)),
    ((64, 96, 3, 3), (1, 1025, 8), geometry_2d(pad=1)),
    ((192, 128, 3, 3), (1, 20, 168), geometry_2d(pad=1)),
    ((100, 90, 1, 3), (2, 1, 64), ConvGeometry((1, 3), (1, 1), (0, 1, 0, 1), (1, 1))),
]
# The last two of floats run faster with X interleaved before.
FLOAT_LAYERS = LAYERS[:-2]
# Windows of one row: more channels than a warp's registers hold, or planes of Y that begin anywhere.
WORDS = [
    ((100, 300, 1, 2), (7, 1, 56), words(2)),
    ((100, 300, 1, 3), (7, 1, 56), words(3)),
    ((100, 300, 1, 5), (3, 1, 60), words(5)),
    ((70, 500, 1, 3), (3, 1, 52), words(3, 1)),
    ((64, 140, 1, 4), (2, 1, 32), words(4)),
    ((64, 160, 1, 3), (2, 5, 16), words(3, 1)),
    ((64, 130, 1, 7), (2, 7, 12), words(7, 3)),
    ((100, 260, 1, 2), (3, 1, 112), words(2, 1)),
    ((70, 140, 1, 4), (3, 1, 116), words(4, 1)),
    ((64, 150, 1, 3), (2, 1, 240), words(3, 1)),
    ((70, 150, 1, 3), (2, 1, 260), words(3)),
    ((70, 150, 1, 2), (2, 1, 140), words(2, 9)),
    ((64, 40, 1, 4), (2, 1, 252), words(4, 3)),
    ((64, 90, 1, 3), (4, 1, 56), words(3)),
    ((130, 40, 1, 3), (2, 5, 20), words(3, 1)),
    ((64, 64, 1, 3), (2, 3, 28), words(3, 1)),
    ((100, 300, 3), (3, 56), ConvGeometry((3,), (1,), (0, 0), (1,))),
]


# Windows that move by two rows or columns, whose planes of Y begin at multiples of 16 bytes.
STRIDED = [
    ((64, 64, 3, 3), (2, 16, 32), geometry_2d(3, 2, 1)),
    ((130, 40, 3, 3), (1, 10, 16), geometry_2d(3, 2, 1)),
    ((128, 64, 3, 3), (2, 56, 56), geometry_2d(3, 2, 1)),
    ((64, 96, 3, 3), (2, 15, 112), geometry_2d(3, 2, 1)),
    ((48, 64, 3, 3), (2, 12, 320), geometry_2d(3, 2, 1)),
    ((64, 24, 5, 5), (3, 24, 24), geometry_2d(5, 2, 2)),
    ((64, 32, 2, 2), (2, 16, 20), geometry_2d(2, 2, 0)),
    ((64, 40, 3, 3), (2, 9, 32), ConvGeometry((3, 3), (1, 2), (1, 1, 1, 1), (1, 1))),
    ((64, 40, 3, 3), (2, 16, 24), ConvGeometry((3, 3), (2, 1), (1, 1, 1, 1), (1, 1))),
    ((64, 32, 3, 3), (2, 17, 36), ConvGeometry((3, 3), (2, 2), (2, 0, 2, 0), (2, 2))),
    ((64, 32, 3, 3), (3, 29, 28), ConvGeometry((3, 3), (2, 2), (3, 9, 1, 8), (1, 1))),
    ((100, 90, 1, 3), (2, 3, 64), ConvGeometry((1, 3), (1, 2), (0, 1, 0, 1), (1, 1))),
    ((64, 48, 3), (5, 128), ConvGeometry((3,), (2,), (1, 1), (1,))),
]


def run_on_octets(session, driver, case, x_shape, kernel="octets"):
    """Run a case and compare; floats are rounded to halves."""
    is_float = case.dtype == FLOAT
    (name,) = run_and_check(session, driver, case, x_shape, has_rounded_factors=is_float)
    assert name.startswith(f"sparseconv_{kernel}_f32_n" if is_float else f"sparseconv_{kernel}_n")


@pytest.fixture(autouse=True)
def a_few_multiprocessors(driver):
    """So that blocks compute several tiles."""
    driver.set_device(num_multiprocessors=6)


@pytest.mark.parametrize(
    ("layer", "density", "dtype"),
    [(layer, density, HALF) for layer in LAYERS for density in (0.02, 0.2)]
    + [(layer, 0.2, FLOAT) for layer in FLOAT_LAYERS],
    ids=str,
)
def test_layers(make_session, driver, layer, density, dtype):
    weight_shape, (batch, *size), geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density, dtype=dtype), geometry, Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    run_on_octets(session, driver, case, (batch, weight_shape[1], *size))
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.wgmma"


@pytest.mark.parametrize(
    ("dtype", "density", "has_residual"), [(HALF, 0.1, False), (HALF, 0.3, True), (FLOAT, 0.2, True)], ids=str
)
@pytest.mark.parametrize("layer", STRIDED, ids=str)
def test_strides(make_session, driver, layer, dtype, density, has_residual):  # noqa: PLR0917
    weight_shape, (batch, *size), geometry = layer
    weight = random_weight(weight_shape, density, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.RELU, has_residual=has_residual, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    run_on_octets(session, driver, case, (batch, weight_shape[1], *size), "strided")


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("layer", WORDS, ids=str)
def test_words(make_session, driver, layer, dtype, has_residual):
    weight_shape, (batch, *size), geometry = layer
    weight = random_weight(weight_shape, 0.15, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.RELU, has_residual=has_residual, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    run_on_octets(session, driver, case, (batch, weight_shape[1], *size), "words")


@pytest.mark.parametrize(
    "layer",  # shape of the weight, size of the input, density
    [
        ((100, 64, 3, 3), (6, 28), 0.02),
        ((100, 64, 3, 3), (12, 16), 0.3),
        ((100, 64, 3, 3), (4, 400), 0.3),
        ((100, 64, 3, 3), (7, 112), 0.1),
        ((100, 128, 3, 3), (7, 112), 0.05),  # the warpgroups share a place for outputs
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_a_residual(make_session, driver, layer, dtype):
    weight_shape, size, density = layer
    weight = random_weight(weight_shape, density, dtype=dtype)
    case = dataclasses.replace(CASE, weight=weight, has_residual=True, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    run_on_octets(session, driver, case, (3, weight_shape[1], *size))


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_activations_and_a_residual(make_session, driver, activation, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    weight = CASE.weight.astype(dtype)
    case = dataclasses.replace(
        CASE, weight=weight, activation=activation, alpha=alpha, beta=beta, has_residual=True, dtype=dtype
    )
    run_on_octets(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (1, 40, 5, 48))


@pytest.mark.parametrize("columns", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), ()], ids=str)
def test_columns_without_entries(make_session, driver, columns):
    weight = np.zeros_like(CASE.weight)
    weight[..., columns] = CASE.weight[..., columns]
    weight[0, 0, 0, columns[0] if columns else 0] = 1.0
    case = dataclasses.replace(CASE, weight=weight)
    (name,) = run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (1, 40, 5, 24))
    assert name.startswith("sparseconv_octets_n")


# No row has a third non-zero, or nearly all have.
SPARSE, DENSE = 0.02, 0.6


@pytest.mark.parametrize(
    ("weight_shape", "size", "batch", "density"),
    [
        ((64, 64, 3, 3), (56, 56), 1, SPARSE),
        ((64, 64, 3, 3), (18, 56), 5, SPARSE),
        ((100, 96, 3, 3), (9, 112), 3, SPARSE),
        ((64, 40, 3, 3), (11, 224), 2, SPARSE),
        ((130, 128, 3, 3), (7, 32), 4, SPARSE),
        ((100, 300, 1, 3), (1, 56), 30, SPARSE),
        ((64, 200, 1, 4), (1, 112), 9, SPARSE),
        ((64, 140, 1, 4), (1, 300), 9, SPARSE),
        ((64, 96, 1, 3), (9, 20), 5, SPARSE),
        ((64, 64, 3, 3), (18, 56), 5, DENSE),
        ((100, 96, 3, 3), (9, 112), 3, DENSE),
        ((130, 128, 3, 3), (7, 32), 4, DENSE),
    ],
    ids=str,
)
def test_what_foretells_times_makes_the_same_plan(make_session, driver, weight_shape, size, batch, density):  # noqa: PLR0917
    driver.set_device(num_multiprocessors=24)
    weight = random_weight(weight_shape, density, dtype=HALF)
    pads = tuple(size // 2 for size in weight_shape[2:]) * 2
    geometry = ConvGeometry(weight_shape[2:], (1, 1), pads, (1, 1))
    case = SparseConvCase(weight, geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    session.run(None, random_inputs(case, (batch, weight_shape[1], *size)))
    ((name, grid, _, _),) = driver.take_launches()
    assert name.startswith(("sparseconv_octets_n", "sparseconv_words_n"))
    taps = math.prod(weight_shape[2:])
    groups = taps * -(-weight_shape[1] // 32)
    steps = WindowSteps(groups) if density == SPARSE else WindowSteps(0, 2 * groups)
    foretold = plan_octets(layer_of(case, size), batch, steps, 24)
    row_tiles = -(-weight_shape[0] // 64)
    assert min(foretold.tiles, 24 // row_tiles * row_tiles) == grid[0]


@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_that_begin_anywhere_run_on_the_other_kernel(make_session, driver, which):
    """Vectors of 16 bytes would not be aligned."""
    case = dataclasses.replace(CASE, has_residual=True)
    inputs = random_inputs(case, (1, 40, 5, 24))
    session = make_session(make_model(case), cuda_kernel="wgmma")
    y, first_kernel = run_misaligned(session, driver, inputs, np.zeros((1, case.out_channels, 5, 24), HALF), which)
    assert first_kernel == "sparseconv_interleave"
    assert_within(y, *oracle(case, inputs, stored_sums=1))
