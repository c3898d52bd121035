"""The gemm kernels for 1x1 in float, through ONNX Runtime against the float64 oracle: what they multiply is rounded to
halves. What happens where these cannot hold X, test_rounding.py says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.gemm_plan import plan_gemm
from tests.native.cuda.test_gemm import (
    PLAIN,
    a_few_multiprocessors,  # noqa: F401 (a fixture of all tests here, too)
    kernels_of,
    run_layer,
)
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

STRIDED = geometry_2d(1, 2, 0)
CASE = SparseConvCase(random_weight((136, 72, 1, 1), 0.2), PLAIN, Activation.RELU)

# Output and input channels, batch and size of the input, geometry, and which kernels run.
BOXES, PLANES = ("boxes_f32",), ("planes_f32",)
READY_BOXES, READY_PLANES = ("pack_f32", "ready_boxes_f32"), ("pack_f32", "ready_planes_f32")
LAYERS = [
    ((128, 64), (2, 28, 28), PLAIN, BOXES),
    ((130, 70), (3, 20, 22), PLAIN, BOXES),
    ((8, 3), (1, 64, 64), PLAIN, BOXES),
    ((300, 150), (1, 40, 48), PLAIN, BOXES),
    ((64, 64), (5, 14, 14), PLAIN, BOXES),
    ((200, 136), (3, 14, 14), PLAIN, BOXES),
    ((64, 65), (2, 14, 14), PLAIN, BOXES),
    ((72, 30), (3, 13, 12), PLAIN, BOXES),
    ((136, 72), (9, 7, 7), PLAIN, PLANES),
    ((128, 200), (7, 5, 5), PLAIN, PLANES),
    ((72, 28), (4, 9, 9), PLAIN, PLANES),
    ((72, 64), (11, 1, 1), PLAIN, PLANES),
    ((72, 64), (3, 200), ConvGeometry((1,), (1,), (0, 0), (1,)), BOXES),
    ((72, 64), (2, 4, 6, 10), ConvGeometry((1, 1, 1), (1, 1, 1), (0,) * 6, (1, 1, 1)), BOXES),
    ((136, 72), (2, 56, 56), STRIDED, READY_BOXES),
    ((72, 130), (3, 28, 28), STRIDED, BOXES),
    ((72, 64), (2, 2, 8), STRIDED, BOXES),
    ((64, 65), (2, 28, 36), STRIDED, BOXES),
    ((64, 64), (1, 16, 104), STRIDED, BOXES),
    ((72, 64), (3, 8, 8), STRIDED, BOXES),
    ((640, 72), (3, 28, 28), STRIDED, READY_BOXES),
    ((72, 65), (3, 27, 31), STRIDED, READY_BOXES),
    ((72, 130), (5, 14, 14), STRIDED, READY_PLANES),
    ((72, 64), (4, 13, 13), STRIDED, READY_PLANES),
    ((72, 64), (3, 2, 2), PLAIN, None),
    ((72, 64), (3, 6, 6), PLAIN, None),
]


def check(session, driver, case, x_shape):
    """Run a case and compare; returns the kernels that ran."""
    return kernels_of(run_and_check(session, driver, case, x_shape, has_rounded_factors=True))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_layers(make_session, driver, layer, density):
    launches, expected = run_layer(make_session, driver, layer, density, np.dtype(np.float32)), layer[-1]
    assert launches in ([BOXES, PLANES] if expected is None else [expected])


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(
    ("size", "geometry"),
    [((24, 20), PLAIN), ((14, 14), PLAIN), ((7, 7), PLAIN), ((28, 28), STRIDED)],
    ids=str,
)
def test_activations_and_a_residual(make_session, driver, activation, size, geometry):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(
        CASE, geometry=geometry, activation=activation, alpha=alpha, beta=beta, has_residual=True
    )
    check(make_session(make_model(case), cuda_kernel="gemm"), driver, case, (5, 72, *size))


@pytest.mark.parametrize("channels", [(136, 64), (200, 128), (264, 200)], ids=str)
@pytest.mark.parametrize("size", [(28, 28), (5, 7)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_tile_after_tile(make_session, driver, channels, size, has_residual):
    """Of one chunk, two and more; outputs of two tiles may have places of their own. Some warps have none at all."""
    driver.set_device(num_multiprocessors=2)
    case = SparseConvCase(random_weight((*channels, 1, 1), 0.2), PLAIN, Activation.RELU, has_residual=has_residual)
    check(make_session(make_model(case), cuda_kernel="gemm"), driver, case, (9, channels[1], *size))


def test_without_a_bias(make_session, driver):
    case = dataclasses.replace(CASE, has_bias=False)
    assert check(make_session(make_model(case), cuda_kernel="gemm"), driver, case, (5, 72, 14, 14)) == BOXES


@pytest.mark.parametrize("which", ["X", "Z", "Y"])
@pytest.mark.parametrize("size", [(28, 28), (7, 7)], ids=str)
def test_tensors_that_begin_anywhere(make_session, driver, which, size):
    case = dataclasses.replace(CASE, has_residual=True)
    inputs = random_inputs(case, (8, 72, *size))
    session = make_session(make_model(case), cuda_kernel="gemm")
    y, first_kernel = run_misaligned(session, driver, inputs, np.zeros((8, 136, *size), np.float32), which)
    assert first_kernel.startswith("sparseconv_csr")
    assert_within(y, *oracle(case, inputs))


def test_sizes_that_cannot_be_copied(make_session, driver):
    case = dataclasses.replace(CASE, weight=random_weight((136, 71, 1, 1), 0.2))
    session = make_session(make_model(case), cuda_kernel="gemm")
    with pytest.raises(Exception, match="the gemm kernel cannot run this call"):
        session.run(None, random_inputs(case, (3, 71, 7, 7)))
    assert check(session, driver, case, (3, 71, 6, 6)) == BOXES


@pytest.mark.parametrize("size", [(14, 14), (28, 27), (27, 28)], ids=str)
def test_rows_that_cannot_be_copied_are_made_ready(make_session, driver, size):
    case = dataclasses.replace(CASE, weight=random_weight((136, 71, 1, 1), 0.2), geometry=STRIDED)
    session = make_session(make_model(case), cuda_kernel="gemm")
    assert check(session, driver, case, (3, 71, *size)) in (READY_BOXES, READY_PLANES)


def test_a_run_only_launches(assert_only_launches, make_session):
    session = make_session(make_model(CASE), cuda_kernel="gemm")
    assert_only_launches(session, random_inputs(CASE, (8, 72, 7, 7)), 1)


@pytest.mark.parametrize(
    ("layer", "geometry", "batch"),
    [
        (((128, 64), (28, 28)), PLAIN, 3),
        (((300, 150), (16, 16)), PLAIN, 7),
        (((64, 64), (14, 14)), PLAIN, 9),
        (((136, 72), (7, 7)), PLAIN, 40),
        (((72, 30), (4, 5)), PLAIN, 64),
        (((72, 64), (1, 1)), PLAIN, 300),
        (((520, 64), (12, 12)), PLAIN, 5),
        (((128, 256), (56, 56)), STRIDED, 2),
        (((300, 64), (14, 16)), STRIDED, 9),
    ],
    ids=str,
)
def test_what_foretells_times_has_the_librarys_plan(make_session, driver, layer, geometry, batch):
    driver.set_device(num_multiprocessors=24)
    channels, size = layer
    case = SparseConvCase(random_weight((*channels, 1, 1), 0.2), geometry, Activation.NONE)
    make_session(make_model(case), cuda_kernel="gemm").run(None, random_inputs(case, (batch, channels[1], *size)))
    *packs, (name, grid, *_) = driver.take_launches()
    plan = plan_gemm(layer_of(case, size), batch, 24)
    way = "ready_" * plan.is_ready + ("boxes" if plan.has_boxes else "planes")
    assert name == f"sparseconv_gemm_{way}_f32_s{plan.segments}"
    assert (len(packs), grid[0]) == (plan.is_ready, min(plan.tiles, 24))


@pytest.mark.parametrize("kernel", ["gemm", "wgmma", "cluster", "tensor", "segments"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_weights_that_are_no_numbers_are_for_the_csr_kernel(make_session, kernel, value):
    """Halves though all others are."""
    weight = random_weight((64, 64, 1, 1), 0.2, dtype=np.float16).astype(np.float32)
    weight[3, 5] = value
    case = dataclasses.replace(CASE, weight=weight)
    make_session(make_model(case))
    with pytest.raises(Exception, match="or finite floats"):
        make_session(make_model(case), cuda_kernel=kernel)
