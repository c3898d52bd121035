"""The gemm kernels, for 1x1 in float16, through ONNX Runtime against the float64 oracle."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.gemm_plan import plan_gemm
from onnx_sparseconv.kernels.gpu_times import fastest_work, gemm_work
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

HALF = np.dtype(np.float16)
PLAIN, STRIDED = geometry_2d(1, pad=0), geometry_2d(1, 2, 0)
CASE = SparseConvCase(random_weight((136, 72, 1, 1), 0.2, dtype=HALF), PLAIN, Activation.RELU, dtype=HALF)

# Output and input channels, batch and size of the input, geometry, and which kernels run.
BOXES, PLANES, READY = ("boxes",), ("planes",), ("pack", "ready_planes")
COLUMN_BOXES = ("gather_columns", "boxes")
LAYERS = [
    ((128, 64), (2, 28, 28), PLAIN, BOXES),
    ((130, 70), (3, 20, 22), PLAIN, BOXES),
    ((8, 3), (1, 64, 64), PLAIN, BOXES),
    ((300, 150), (1, 40, 48), PLAIN, BOXES),
    ((64, 64), (5, 14, 14), PLAIN, PLANES),
    ((200, 136), (3, 14, 14), PLAIN, PLANES),
    ((136, 72), (9, 10, 10), PLAIN, PLANES),
    ((128, 200), (7, 6, 6), PLAIN, PLANES),
    ((64, 66), (2, 14, 14), PLAIN, PLANES),
    ((64, 65), (2, 14, 14), PLAIN, READY),
    ((136, 72), (9, 7, 7), PLAIN, READY),
    ((72, 30), (2, 13, 13), PLAIN, READY),
    ((72, 30), (4, 5, 5), PLAIN, READY),
    ((136, 72), (2, 56, 56), STRIDED, COLUMN_BOXES),
    ((72, 130), (3, 28, 28), STRIDED, READY),
    ((200, 65), (5, 14, 14), STRIDED, READY),
    ((72, 64), (9, 14, 14), STRIDED, READY),
    ((72, 70), (3, 10, 24), STRIDED, READY),
    ((72, 64), (2, 24, 24), STRIDED, COLUMN_BOXES),
    ((72, 64), (2, 13, 27), STRIDED, READY),
    ((72, 64), (3, 200), ConvGeometry((1,), (1,), (0, 0), (1,)), None),
    ((72, 64), (2, 4, 6, 10), ConvGeometry((1, 1, 1), (1, 1, 1), (0,) * 6, (1, 1, 1)), None),
    ((72, 64), (11, 1, 1), PLAIN, None),
    ((72, 64), (3, 2, 2), PLAIN, None),
    ((72, 64), (3, 4, 4), PLAIN, None),
    ((72, 64), (2, 8, 8), PLAIN, None),
    ((72, 64), (2, 16, 16), PLAIN, None),
]


def kernels_of(launches):
    """Names without what is the same in all."""
    return tuple(re.sub(r"^sparseconv_(gemm_)?|_s\d+$", "", name) for name in launches)


@pytest.fixture(autouse=True)
def a_few_multiprocessors(driver):
    """So that blocks compute several tiles."""
    driver.set_device(num_multiprocessors=4)


def run_layer(make_session, driver, layer, density, dtype):
    """Run one of LAYERS and compare; returns the kernels that ran."""
    channels, (batch, *size), geometry, _ = layer
    weight = random_weight((*channels, *geometry.kernel_shape), density, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="gemm")
    x_shape = (batch, channels[1], *size)
    launches = run_and_check(session, driver, case, x_shape, has_rounded_factors=dtype != HALF)
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.gemm"
    return kernels_of(launches)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_layers(make_session, driver, layer, density):
    launches, expected = run_layer(make_session, driver, layer, density, HALF), layer[-1]
    if expected is None:
        assert launches in {BOXES, PLANES, READY}
    else:
        assert launches == expected


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("size", [(24, 20), (14, 14), (7, 7)], ids=str)
def test_activations_and_a_residual(make_session, driver, activation, size):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(CASE, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    session = make_session(make_model(case), cuda_kernel="gemm")
    launches = kernels_of(run_and_check(session, driver, case, (5, 72, *size)))
    assert launches[-1] in {"boxes", "planes", "ready_planes"}


@pytest.mark.parametrize("has_bias", [False, True])
def test_without_a_bias(make_session, driver, has_bias):
    case = dataclasses.replace(CASE, has_bias=has_bias)
    session = make_session(make_model(case), cuda_kernel="gemm")
    assert kernels_of(run_and_check(session, driver, case, (5, 72, 14, 14))) == PLANES


@pytest.mark.parametrize("which", ["X", "Z", "Y"])
@pytest.mark.parametrize("size", [(28, 28), (14, 14), (7, 7)], ids=str)
@pytest.mark.parametrize("kernel", ["gemm", "auto"])
def test_tensors_that_begin_anywhere(make_session, driver, which, size, kernel):
    case = dataclasses.replace(CASE, has_residual=True)
    inputs = random_inputs(case, (8, 72, *size))
    session = make_session(make_model(case), cuda_kernel=kernel)
    y, first_kernel = run_misaligned(session, driver, inputs, np.zeros((8, case.out_channels, *size), HALF), which)
    if which == "X":
        is_made_ready = kernel == "gemm" and size != (28, 28)
        assert first_kernel == ("sparseconv_pack" if is_made_ready else "sparseconv_gather_whole")
    elif kernel == "gemm":
        assert first_kernel.startswith("sparseconv_csr")
    else:
        assert not first_kernel.startswith("sparseconv_gemm")
    assert_within(y, *oracle(case, inputs, stored_sums=1))


def test_numbers_that_are_none_stay_where_they_are(make_session):
    """What a tile before left in shared memory is no channel of this one."""
    case = dataclasses.replace(CASE, weight=random_weight((64, 72, 1, 1), 1.0, dtype=HALF), activation=Activation.NONE)
    session = make_session(make_model(case), cuda_kernel="gemm")
    for size in ((14, 14), (24, 20)):
        inputs = random_inputs(case, (20, 72, *size))
        inputs["X"][3, 8] = np.nan
        inputs["X"][7, 70] = np.inf
        (y,) = session.run(None, inputs)
        finite = np.isfinite(y).all(axis=(1, 2, 3))
        assert finite.tolist() == [image not in {3, 7} for image in range(20)]


def test_which_nodes(make_session):
    """Windows, groups, and strides but those by two are for other kernels."""
    floats = dataclasses.replace(CASE, weight=CASE.weight.astype(np.float32), dtype=np.dtype(np.float32))
    for case in (
        dataclasses.replace(floats, geometry=geometry_2d(1, 3, 0)),
        dataclasses.replace(floats, geometry=ConvGeometry((1, 1), (2, 1), (0, 0, 0, 0), (1, 1))),
        SparseConvCase(random_weight((64, 64, 3, 3), 0.1, dtype=HALF), geometry_2d(), Activation.NONE, dtype=HALF),
        SparseConvCase(random_weight((64, 32, 1, 1), 0.1, dtype=HALF), dataclasses.replace(PLAIN, group=2), dtype=HALF),
        dataclasses.replace(CASE, geometry=geometry_2d(1, 3, 0)),
    ):
        with pytest.raises(Exception, match="asks for the gemm kernel, which runs 1x1 of one group, without padding"):
            make_session(make_model(case), cuda_kernel="gemm")


def test_a_size_that_no_tile_has(make_session, driver):
    case = dataclasses.replace(CASE, weight=random_weight((63, 72, 1, 1), 0.2, dtype=HALF))
    session = make_session(make_model(case), cuda_kernel="gemm")
    for size in ((9, 9), (19, 19)):
        with pytest.raises(Exception, match="the gemm kernel cannot run this call"):
            session.run(None, random_inputs(case, (3, 72, *size)))
    assert kernels_of(run_and_check(session, driver, case, (3, 72, 24, 20))) == BOXES


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((128, 64), (28, 28)), 3),
        (((130, 70), (20, 22)), 1),
        (((300, 150), (16, 16)), 7),
        (((64, 64), (14, 14)), 9),
        (((200, 136), (10, 10)), 31),
        (((136, 72), (7, 7)), 40),
        (((72, 30), (4, 5)), 64),
        (((72, 64), (1, 1)), 300),
        (((72, 65), (14, 14)), 2),
        (((520, 64), (12, 12)), 5),
        (((128, 64), (56, 56), STRIDED), 2),
        (((130, 70), (28, 28), STRIDED), 3),
        (((304, 150), (14, 14), STRIDED), 9),
    ],
    ids=str,
)
def test_what_foretells_times_has_the_librarys_plan(make_session, driver, layer, batch):
    driver.set_device(num_multiprocessors=24)
    channels, size, geometry = (*layer, PLAIN)[:3]
    case = SparseConvCase(random_weight((*channels, 1, 1), 0.2, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    make_session(make_model(case), cuda_kernel="gemm").run(None, random_inputs(case, (batch, channels[1], *size)))
    *gathers, (name, grid, *_) = driver.take_launches()
    plan = plan_gemm(layer_of(case, size), batch, 24)
    way = "ready_" * plan.is_ready + ("boxes" if plan.has_boxes else "planes")
    assert name == f"sparseconv_gemm_{way}_s{plan.segments}"
    assert (len(gathers), grid[0]) == (plan.is_gathered or plan.is_ready, min(plan.tiles, 24))


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((256, 64), 14), 16),
        (((64, 256), 14), 16),
        (((128, 64), 28), 4),
        (((64, 192), 7), 2),
        (((64, 512), 14), 1),
        (((512, 64), 14), 2),
        (((128, 512), 7), 16),
    ],
    ids=str,
)
def test_what_foretells_times_foretells_the_kernel(make_session, driver, layer, batch):
    driver.set_device(num_multiprocessors=16)
    channels, size = layer
    case = SparseConvCase(random_weight((*channels, 1, 1), 0.1, dtype=HALF), PLAIN, Activation.NONE, dtype=HALF)
    make_session(make_model(case)).run(None, random_inputs(case, (batch, channels[1], size, size)))
    is_gemm = any(name.startswith("sparseconv_gemm") for name, *_ in driver.take_launches())
    call = layer_of(case, (size, size)), 90, batch, 16
    assert (fastest_work(*call) == gemm_work(*call)) == is_gemm


def test_without_memory_for_the_zeros_other_kernels_run(make_session, driver):
    """The weight with its zeros is what is uploaded second."""
    case = dataclasses.replace(CASE, weight=random_weight((512, 128, 1, 1), 0.1, dtype=HALF))
    driver.fail("cuMemAlloc_v2", 2)
    launches = kernels_of(run_and_check(make_session(make_model(case)), driver, case, (16, 128, 14, 14)))
    assert launches[-1] == "pointwise"
    driver.fail("cuMemAlloc_v2", 2)
    with pytest.raises(Exception, match="CUDA_ERROR_OUT_OF_MEMORY"):
        make_session(make_model(case), cuda_kernel="gemm")


def test_what_waits_for_memory_runs_as_a_product(make_session, driver):
    """Many images of many channels."""
    driver.set_device(num_multiprocessors=132)
    case = dataclasses.replace(CASE, weight=random_weight((512, 128, 1, 1), 0.1, dtype=HALF))
    session = make_session(make_model(case))
    (name,) = run_and_check(session, driver, case, (16, 128, 14, 14))
    assert name.startswith("sparseconv_gemm_planes")
