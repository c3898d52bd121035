"""The warpgroup kernel for 1x1 convolutions through ONNX Runtime, against the float64 oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.warpgroup_plan import plan_pointwise
from tests.native.cuda.test_csr import run_and_check
from tests.support.random_cases import ACTIVATION_PARAMETERS
from tests.support.sparse_layers import sparse_layer
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
POINTWISE = geometry_2d(1, pad=0)
CASE = SparseConvCase(random_weight((70, 40, 1, 1), 0.1, dtype=HALF), POINTWISE, Activation.RELU, dtype=HALF)
# What planes may be gathered by.
ANY, WHOLE, COLUMNS = "sparseconv_gather", "sparseconv_gather_whole", "sparseconv_gather_columns"


def launched(driver):
    return [kernel for kernel, _, _, _ in driver.take_launches()]


@pytest.mark.parametrize(
    ("layer", "before"),
    [
        (((64, 64, 1, 1), (14, 16), POINTWISE), []),
        (((192, 70, 1, 1), (9, 28), POINTWISE), []),
        (((40, 300, 1, 1), (7, 7), POINTWISE), [WHOLE]),
        (((200, 64, 1, 1), (14, 14), POINTWISE), []),
        (((130, 33, 1, 1), (5, 11), POINTWISE), [WHOLE]),
        (((72, 24, 1, 1), (1, 1), POINTWISE), [WHOLE]),
        (((64, 40, 1, 1), (30, 28), geometry_2d(1, 2, 0)), [COLUMNS]),
        (((64, 40, 1, 1), (12, 16), geometry_2d(1, 2, 0)), [COLUMNS]),
        (((64, 40, 1, 1), (14, 14), geometry_2d(1, 2, 0)), [COLUMNS]),
        (((64, 40, 1, 1), (9, 13), ConvGeometry((1, 1), (2, 3), (1, 0, 2, 1), (1, 1))), [ANY]),
        (((64, 40, 1, 1), (4, 4), ConvGeometry((1, 1), (2, 2), (0, 0, 4, 4), (1, 1))), [ANY]),
        (((64, 40, 1), (8,), ConvGeometry((1,), (2,), (0, 8), (1,))), [ANY]),
        (((130, 40, 1, 1, 1), (3, 4, 6), ConvGeometry((1, 1, 1), (1, 1, 1), (0,) * 6, (1, 1, 1))), []),
        (((130, 40, 1, 1, 1), (3, 5, 7), ConvGeometry((1, 1, 1), (1, 1, 1), (0,) * 6, (1, 1, 1))), [WHOLE]),
        (((96, 24, 1, 1), (9, 16), dataclasses.replace(POINTWISE, group=2)), []),
        (((320, 24, 1, 1), (4, 7), dataclasses.replace(POINTWISE, group=2)), []),
        (((100, 48, 1), (304,), ConvGeometry((1,), (1,), (0, 0), (1,))), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("density", [0.05, 0.4, 1.0])
def test_layers(make_session, driver, layer, before, density):
    """Of all densities: two non-zeros in four are not enough for the dense one."""
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    run_and_check(session, case, (9, weight_shape[1] * geometry.group, *size))
    *gathered, product = launched(driver)
    assert gathered == before
    assert product.startswith("sparseconv_pointwise_s")
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.wgmma"


@pytest.mark.parametrize("rows", [40, 64, 130, 300])
@pytest.mark.parametrize("size", [(7, 7), (6, 6), (14, 14), (20, 40)], ids=str)
def test_residuals_take_the_way_of_channels(make_session, driver, rows, size):
    case = dataclasses.replace(CASE, weight=random_weight((rows, 40, 1, 1), 0.1, dtype=HALF), has_residual=True)
    run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), case, (5, 40, *size))
    *before, _ = launched(driver)
    assert before == [WHOLE, WHOLE] * (size == (7, 7))


@pytest.mark.parametrize("size", [(5, 6), (5, 7), (2, 28), (2, 32)], ids=str)
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_and_a_residual(make_session, activation, size):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(CASE, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), case, (4, 40, *size))


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 33])
@pytest.mark.parametrize("size", [(3, 3), (6, 6), (9, 56)], ids=str)
def test_every_batch(make_session, batch, size):
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    run_and_check(session, CASE, (batch, 40, *size))


@pytest.mark.parametrize(
    ("layer", "batch", "parts"),
    [
        (((256, 1000, 1, 1), (14, 14), POINTWISE), 1, 11),
        (((130, 800, 1, 1), (7, 7), POINTWISE), 1, 8),
        (((64, 1000, 1, 1), (3, 3), POINTWISE), 2, 16),
        (((64, 700, 1, 1), (5, 5), geometry_2d(1, 2, 0)), 3, 11),
        (((64, 40, 1, 1), (28, 28), POINTWISE), 1, 1),
        (((96, 600, 1, 1), (9, 16), dataclasses.replace(POINTWISE, group=2)), 1, 10),
    ],
    ids=str,
)
def test_few_images(make_session, driver, layer, batch, parts):
    """What has to be summed is shared among blocks."""
    driver.set_device(num_multiprocessors=132)
    weight_shape, size, geometry = layer
    weight = random_weight(weight_shape, 0.1, dtype=HALF)
    for has_residual in (False, True):
        case = SparseConvCase(weight, geometry, Activation.SILU, has_residual=has_residual, dtype=HALF)
        inputs = random_inputs(case, (batch, weight_shape[1] * geometry.group, *size))
        (y,) = make_session(make_model(case), cuda_kernel="wgmma").run(None, inputs)
        assert_within(y, *oracle(case, inputs, stored_sums=int(parts > 1)))
        launches = [(name, grid) for name, grid, _, _ in driver.take_launches() if ANY not in name]
        (_, product), *reduce = launches
        assert product[1] == parts
        assert [name for name, _ in reduce] == ["sparseconv_reduce_vectors"] * (parts > 1)


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((256, 1024), 14), 1),
        (((512, 160), 28), 2),
        (((64, 640), 7), 3),
        (((64, 64), 56), 1),
        (((200, 96), 12), 20),
        (((64, 512), 3), 64),
    ],
    ids=str,
)
def test_what_foretells_times_makes_the_same_plan(make_session, driver, layer, batch):
    driver.set_device(num_multiprocessors=132)
    shape, size = layer
    weight = random_weight((*shape, 1, 1), 0.1, dtype=HALF)  # each channel comes once
    case = SparseConvCase(weight, POINTWISE, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    session.run(None, random_inputs(case, (batch, shape[1], size, size)))
    ((blocks, parts, _),) = (grid for name, grid, _, _ in driver.take_launches() if "pointwise" in name)
    sized = sparse_layer(weight.shape, size=(size, size), dtype=HALF)
    plan = plan_pointwise(sized, batch, -(-shape[1] // 32), 132)
    assert (blocks, parts) == (plan.tiles, plan.parts)


@pytest.mark.parametrize(
    ("layer", "batch", "kernel"),
    [
        (((256, 512, 1, 1), (30, 30)), 1, "pointwise"),
        (((512, 2048, 1, 1), (7, 7)), 1, "csr"),
        (((512, 2048, 1, 1), (7, 7)), 8, "pointwise"),
        (((512, 512, 1, 1), (7, 7)), 3, "csr"),
        (((512, 512, 1, 1), (7, 7)), 8, "gemm"),
    ],
)
def test_a_few_images_run_on_what_takes_fewer_cycles(make_session, driver, layer, batch, kernel):
    """But for clusters, of which this GPU runs none."""
    driver.set_device(num_multiprocessors=132, blocks_a_multiprocessor=0)
    weight_shape, size = layer
    case = dataclasses.replace(CASE, weight=random_weight(weight_shape, 0.1, dtype=HALF))
    make_session(make_model(case)).run(None, random_inputs(case, (batch, weight_shape[1], *size)))
    assert any(name.startswith(f"sparseconv_{kernel}") for name in launched(driver))


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 128), slice(128, 256)], ids=["all", "the first", "others"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rows_without_entries(make_session, rows, has_residual):
    weight = np.zeros((256, 40, 1, 1), HALF)
    weight[rows] = random_weight(weight.shape, 0.1, dtype=HALF)[rows]
    case = dataclasses.replace(CASE, weight=weight, has_residual=has_residual)
    run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), case, (17, 40, 8, 14))


def test_a_residual_that_is_infinite_stays_where_it_is(make_session):
    case = dataclasses.replace(CASE, activation=Activation.NONE, has_residual=True)
    inputs = random_inputs(case, (4, 40, 8, 8))
    inputs["Z"][:, 3] = np.inf
    (found,) = make_session(make_model(case), cuda_kernel="wgmma").run(None, inputs)
    assert np.isposinf(found[:, 3]).all()
    assert np.isfinite(np.delete(found, 3, axis=1)).all()


def test_nothing_but_padding_gives_the_bias(make_session):
    case = dataclasses.replace(CASE, geometry=geometry_2d(1, pad=2))
    run_and_check(make_session(make_model(case)), case, (8, 40, 0, 9))


@pytest.mark.parametrize(("size", "launches"), [((6, 6), 1), ((5, 7), 2)])
def test_a_run_only_launches(assert_only_launches, make_session, size, launches):
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    assert_only_launches(session, random_inputs(CASE, (8, 40, *size)), launches)


@pytest.mark.parametrize(
    ("changes", "batch", "kernel"),
    [
        ({}, 8, "pointwise"),
        ({}, 1, "pointwise"),
        ({"weight": random_weight((70, 300, 1, 1), 0.1, dtype=HALF)}, 4, "pointwise"),
        ({"weight": random_weight((70, 300, 1, 1), 0.1, dtype=HALF)}, 3, "pointwise"),
        ({"weight": random_weight((70, 40, 1, 1), 0.0002, dtype=HALF)}, 2, "csr"),
        ({"weight": random_weight((70, 7, 1, 1), 0.1, dtype=HALF)}, 8, "pointwise"),
    ],
    ids=["it pays", "one image", "a long sum", "and few images", "next to no weights", "few channels"],
)
def test_it_runs_by_itself_where_it_pays(driver, make_session, changes, batch, kernel):
    """On planes that the gemm kernels cannot read."""
    if kernel == "csr":  # a launch counts for more than outputs where there are many multiprocessors
        driver.set_device(num_multiprocessors=132)
    case = dataclasses.replace(CASE, **changes)
    run_and_check(make_session(make_model(case)), case, (batch, case.weight.shape[1], 26, 26))
    assert launched(driver)[-1].startswith(f"sparseconv_{kernel}")


@pytest.mark.parametrize("architecture", [89, 100])
def test_other_gpus_do_not_run_it(driver, make_session, architecture):
    driver.set_device(architecture=architecture)
    run_and_check(make_session(make_model(CASE)), CASE, (64, 40, 28, 28))
    assert launched(driver)[0].startswith("sparseconv_segments_r")


def test_a_tile_that_does_not_fit_is_said(driver, make_session):
    driver.set_device(max_shared_bytes=28 << 10)
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    with pytest.raises(Exception, match="the warpgroup kernel cannot run this call: no tile of it fits"):
        session.run(None, random_inputs(CASE, (8, 40, 28, 28)))
