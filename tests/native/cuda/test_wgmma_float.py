"""The warpgroup kernels for float through ONNX Runtime, against the float64 oracle: what they multiply is rounded to
halves. What that costs, and what happens where these cannot hold X, test_rounding.py says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.native.cuda.test_ring import run_misaligned
from tests.support.random_cases import ACTIVATION_PARAMETERS
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)
from tests.support.warpgroup_layers import WINDOWS

CASE = SparseConvCase(random_weight((70, 40, 3, 3), 0.1), geometry_2d(pad=1), Activation.RELU)
POINTWISE = SparseConvCase(random_weight((70, 40, 1, 1), 0.1), geometry_2d(1, 1, 0), Activation.RELU)
POINTS = [
    ((64, 64, 1, 1), (14, 14), geometry_2d(1, 1, 0)),
    ((130, 40, 1, 1), (7, 7), geometry_2d(1, 1, 0)),
    ((200, 96, 1, 1), (9, 30), geometry_2d(1, 1, 0)),
    ((64, 33, 1, 1), (15, 14), geometry_2d(1, 2, 0)),
    ((64, 33, 1, 1), (5, 6), geometry_2d(1, 1, 1)),
    ((96, 24, 1, 1), (4, 16), ConvGeometry((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), group=2)),
]
# What rounds X of these before; nothing where planes begin at multiples of 16 bytes.
BEFORE_POINTS = ["", "gather_whole", "gather_whole", "gather_columns", "gather", ""]


def run_and_check(session, driver, case, inputs):
    """Run a case and compare; returns the names of what was launched."""
    driver.take_launches()
    (y,) = session.run(None, inputs)
    assert_within(y, *oracle(case, inputs, has_rounded_factors=True))
    return [name for name, *_ in driver.take_launches()]


@pytest.mark.parametrize("layer", WINDOWS + POINTS, ids=str)
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_layers(make_session, driver, layer, density):
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density), geometry, Activation.NONE)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    x_shape = (9, weight_shape[1] * geometry.group, *size)
    names = run_and_check(session, driver, case, random_inputs(case, x_shape))
    is_point = layer in POINTS
    before, product = (BEFORE_POINTS[POINTS.index(layer)], "pointwise") if is_point else ("interleave", "wgmma")
    if before:
        assert names.pop(0) == f"sparseconv_{before}_f32"
    assert names[0].startswith(f"sparseconv_{product}_f32_")
    assert names[1:] in ([], ["sparseconv_reduce_rounded"])
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.wgmma"


@pytest.mark.parametrize("rows", [64, 150])
@pytest.mark.parametrize("size", [(4, 16), (14, 14), (23, 24)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_blocks_stage_tile_after_tile(make_session, driver, rows, size, has_residual):
    """With up to 64 rows a tile has two runs, with more of them one, and two chunks are ahead."""
    driver.set_device(num_multiprocessors=2)
    case = SparseConvCase(random_weight((rows, 70, 1, 1), 0.1), geometry_2d(1, 1, 0), has_residual=has_residual)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    names = run_and_check(session, driver, case, random_inputs(case, (3, 70, *size)))
    assert names[0].startswith("sparseconv_pointwise_f32_")


@pytest.mark.parametrize(
    ("case", "first"),
    [
        (CASE, dict.fromkeys("XYZ", "interleave")),
        (POINTWISE, {"X": "gather_whole", "Y": "pointwise", "Z": "pointwise"}),
    ],
    ids=["window", "1x1"],
)
@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_may_begin_anywhere(make_session, driver, case, first, which):
    """What would read or store vectors that are not aligned does not run."""
    case = dataclasses.replace(case, has_residual=True)
    inputs = random_inputs(case, (3, 40, 4, 24))
    session = make_session(make_model(case), cuda_kernel="wgmma")
    y, first_kernel = run_misaligned(
        session, driver, inputs, np.zeros((3, case.out_channels, 4, 24), np.float32), which
    )
    assert first_kernel.startswith(f"sparseconv_{first[which]}_f32")
    assert_within(y, *oracle(case, inputs, has_rounded_factors=True))


@pytest.mark.parametrize("size", [(5, 6), (5, 7), (2, 28), (2, 32)], ids=str)
@pytest.mark.parametrize("case", [CASE, POINTWISE], ids=["window", "1x1"])
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_and_a_residual(make_session, driver, case, activation, size):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(case, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    run_and_check(session, driver, case, random_inputs(case, (4, 40, *size)))


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((70, 40, 3, 3), (16, 15), geometry_2d(pad=1)), 1),
        (((64, 160, 3, 3), (14, 14), geometry_2d(pad=1)), 1),
        (((64, 96, 3, 3), (13, 9), geometry_2d(pad=1)), 2),
        (((64, 96, 3, 3), (35, 29), geometry_2d(3, 2, 1)), 1),
        (((64, 1024, 1, 1), (14, 14), geometry_2d(1, 1, 0)), 1),
        (((64, 2048, 1, 1), (7, 7), geometry_2d(1, 1, 0)), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_few_images_share_tiles(make_session, driver, layer, batch, has_residual):
    """Parts of sums are floats, so nothing is rounded once more."""
    driver.set_device(num_multiprocessors=132)
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, 0.1), geometry, Activation.SILU, has_residual=has_residual)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    names = run_and_check(session, driver, case, random_inputs(case, (batch, weight_shape[1], *size)))
    assert ("sparseconv_reduce_rounded" in names) == (weight_shape[1] > 40)


def test_without_leave_to_round_floats_are_not_rounded(make_session, driver):
    """Only the CUDA provider gives it, by its option use_tf32."""
    session = make_session(make_model(CASE))
    inputs = random_inputs(CASE, (9, 40, 14, 14))
    driver.take_launches()
    (y,) = session.run(None, inputs)
    assert_within(y, *oracle(CASE, inputs))
    assert [name for name, *_ in driver.take_launches()] == ["sparseconv_csr_f32_b4"]


def test_weights_that_are_no_numbers_stay_with_the_other_kernel(make_session):
    weight = CASE.weight.copy()
    weight[0, 0, 0, 0] = np.inf
    case = dataclasses.replace(CASE, weight=weight)
    make_session(make_model(case))
    with pytest.raises(Exception, match=r"asks for the warpgroup kernel, which runs .* or finite floats"):
        make_session(make_model(case), cuda_kernel="wgmma")


def test_a_run_only_launches(assert_only_launches, make_session):
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    assert_only_launches(session, random_inputs(CASE, (8, 40, 5, 7)), 2)
