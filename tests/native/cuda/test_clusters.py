"""The cluster kernel, for few images, through ONNX Runtime, in every form of convolution it runs, against the float64
oracle."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels import warpgroup_plan
from onnx_sparseconv.kernels.gpu_time_constants import MODEL
from onnx_sparseconv.kernels.gpu_times import BY_CSR
from tests.native.cuda.test_ring import run_misaligned
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
from tests.support.warpgroup_layers import WINDOWS

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
CASE = SparseConvCase(random_weight((70, 96, 3, 3), 0.1, dtype=HALF), geometry_2d(pad=1), Activation.RELU, dtype=HALF)
LAYERS = [
    *WINDOWS,
    ((64, 256, 3, 3), (7, 7), geometry_2d(pad=1)),
    ((64, 160, 3, 3), (14, 14), geometry_2d(pad=1)),
    ((48, 64, 3, 3), (4, 300), geometry_2d(pad=1)),
    ((64, 48, 2, 2), (9, 11), ConvGeometry((2, 2), (3, 3), (1, 0, 2, 1), (2, 1))),
    ((130, 200, 1, 1), (7, 7), geometry_2d(1, 1, 0)),
    ((64, 200, 1, 1), (14, 14), geometry_2d(1, 1, 0)),
    ((64, 96, 1, 1), (15, 17), geometry_2d(1, 2, 0)),
    ((64, 32, 1, 1), (2, 3), geometry_2d(1, 1, 1)),
    ((150, 24, 1, 1), (4, 16), geometry_2d(1, 1, 0, group=2)),
]


@pytest.fixture(autouse=True)
def _gpu(driver):
    driver.set_device(num_multiprocessors=132)


@pytest.fixture
def clusters_of_the_driver(monkeypatch):
    """It runs as many clusters as it has multiprocessors for; a GPU, fewer."""
    monkeypatch.setattr(warpgroup_plan, "_MAX_CLUSTERS", [132 // parts for parts in range(1, 9)])


def run_and_check(session, driver, case, x_shape):
    """Run a case and compare; returns what was launched: names, grids, threads, bytes of shared memory."""
    inputs = random_inputs(case, x_shape)
    driver.take_launches()
    (y,) = session.run(None, inputs)
    launches = driver.take_launches()
    assert_within(y, *oracle(case, inputs, has_rounded_factors=case.dtype == FLOAT))
    return launches


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("density", [0.05, 0.4])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_layers(make_session, driver, layer, density, dtype):
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density, dtype=dtype), geometry, Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="cluster")
    launches = run_and_check(session, driver, case, (1, weight_shape[1] * geometry.group, *size))
    ((name, *_),) = launches
    assert name.startswith("sparseconv_cluster_n" if dtype == HALF else "sparseconv_cluster_f32_n")
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.cluster"


@pytest.mark.parametrize(("density", "wanted"), [(0.05, (2, 4, 8)), (0.4, (4, 4, 4))])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_clusters_of_several_sizes(make_session, driver, density, wanted, dtype):
    """Many tiles of rows and of columns: what 132 multiprocessors run for maps twice as high."""
    driver.set_device(num_multiprocessors=66)
    weight = random_weight((256, 256, 3, 3), density, dtype=dtype)
    case = SparseConvCase(weight, geometry_2d(pad=1), Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="cluster")
    ((name, grid, *_),) = run_and_check(session, driver, case, (1, 256, 28, 56))
    assert name.startswith("sparseconv_cluster_n" if dtype == HALF else "sparseconv_cluster_f32_n")
    assert grid == wanted


@pytest.mark.parametrize(
    ("activation", "size"),
    [*((activation, (5, 6)) for activation in Activation), *((Activation.SILU, size) for size in [(5, 7), (2, 28)])],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_activations_and_a_residual(make_session, driver, activation, size, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(
        CASE, weight=CASE.weight.astype(dtype), activation=activation, alpha=alpha, beta=beta, has_residual=True
    )
    case = dataclasses.replace(case, dtype=dtype)
    run_and_check(make_session(make_model(case), cuda_kernel="cluster"), driver, case, (2, 96, *size))


@pytest.mark.parametrize("batch", [1, 4, 9])
@pytest.mark.parametrize("multiprocessors", [1, 3, 8, 132])
def test_every_batch_on_any_gpu(make_session, driver, batch, multiprocessors):
    """Where no cluster of several blocks can run, one block has all channels."""
    driver.set_device(num_multiprocessors=multiprocessors)
    session = make_session(make_model(CASE), cuda_kernel="cluster")
    ((_, grid, *_),) = run_and_check(session, driver, CASE, (batch, 96, 6, 9))
    assert grid[0] <= min(8, multiprocessors)


@pytest.mark.parametrize(
    "layer",
    [
        ((64, 256, 3, 3), (7, 7), geometry_2d(pad=1)),
        ((70, 96, 3, 3), (3, 6), geometry_2d(pad=1)),
        ((64, 256, 3, 3), (14, 13), geometry_2d(3, 2, 1)),
        ((64, 96, 3, 3), (9, 8), geometry_2d(3, 3, 2, 2)),
        ((150, 256, 1, 1), (7, 7), geometry_2d(1, 1, 0)),
        ((64, 64, 1, 1), (2, 3), geometry_2d(1, 1, 0, group=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_images_of_small_maps_share_a_tile(make_session, driver, layer, dtype):
    weight_shape, size, geometry = layer
    weight = random_weight(weight_shape, 0.1, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.SILU, has_residual=True, dtype=dtype)
    driver.set_device(num_multiprocessors=8)
    session = make_session(make_model(case), cuda_kernel="cluster")
    ((_, launched, *_),) = run_and_check(session, driver, case, (5, weight_shape[1] * geometry.group, *size))
    assert launched[2] < 5


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 64), slice(64, 128)], ids=["all", "the first", "others"])
def test_rows_without_entries(make_session, driver, rows):
    weight = np.zeros((130, 96, 3, 3), HALF)
    weight[rows] = random_weight(weight.shape, 0.1, dtype=HALF)[rows]
    case = dataclasses.replace(CASE, weight=weight)
    run_and_check(make_session(make_model(case), cuda_kernel="cluster"), driver, case, (1, 96, 4, 14))


@pytest.mark.parametrize("which", "XYZ")
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_misaligned_tensors(make_session, driver, which, dtype):
    """Then fewer columns are loaded, or stored, together."""
    case = dataclasses.replace(CASE, weight=CASE.weight.astype(dtype), has_residual=True, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="cluster")
    inputs = random_inputs(case, (1, 96, 8, 16))
    y, name = run_misaligned(session, driver, inputs, np.empty((1, 70, 8, 16), dtype), which)
    assert_within(y, *oracle(case, inputs, has_rounded_factors=dtype == FLOAT))
    assert name.startswith("sparseconv_cluster_")


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((64, 64, 3, 3), (56, 56), geometry_2d(pad=1)), 1),
        (((128, 160, 3, 3), (14, 14), geometry_2d(pad=1)), 1),
        (((128, 96, 3, 3), (7, 9), geometry_2d(pad=1)), 3),
        (((64, 256, 3, 3), (7, 7), geometry_2d(pad=1)), 1),
        (((64, 256, 3, 3), (7, 7), geometry_2d(pad=1)), 16),
        (((192, 96, 3, 3), (14, 14), geometry_2d(3, 2, 1)), 11),
        (((64, 96, 3, 3), (35, 29), geometry_2d(3, 2, 1)), 1),
        (((64, 96, 3, 3), (21, 17), geometry_2d(3, 1, 2, 2)), 5),
        (((128, 64, 3, 3), (28, 28), geometry_2d(group=2)), 4),
        (((64, 32, 3, 3), (30, 301), geometry_2d(pad=1)), 1),
        (((256, 512, 1, 1), (14, 14), geometry_2d(1, 1, 0)), 2),
        (((64, 512, 1, 1), (7, 7), geometry_2d(1, 1, 0)), 1),
        (((256, 512, 1, 1), (7, 7), geometry_2d(1, 1, 0)), 20),
        (((64, 96, 1, 1), (28, 28), geometry_2d(1, 2, 0)), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.usefixtures("clusters_of_the_driver")
def test_what_foretells_times_makes_the_same_plan(make_session, driver, layer, batch, dtype):
    weight_shape, size, geometry = layer
    weight = random_weight(weight_shape, 0.004, dtype=dtype)  # no channel comes twice
    weight[:, :, 0, 0] = np.where(np.arange(weight_shape[0])[:, None] % 64 == np.arange(weight_shape[1]) % 64, 1, 0)
    case = SparseConvCase(weight, geometry, Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="cluster")
    session.run(None, random_inputs(case, (batch, weight_shape[1] * geometry.group, *size)))
    (_, grid, *_), *_ = driver.take_launches()
    foretold = warpgroup_plan.plan_clusters(layer_of(case, size), batch, -(-weight_shape[1] // 32), 132)
    assert (foretold.parts, foretold.tiles) == (grid[0], math.prod(grid[1:]))


def test_a_run_only_launches(assert_only_launches, make_session):
    session = make_session(make_model(CASE), cuda_kernel="cluster")
    assert_only_launches(session, random_inputs(CASE, (1, 96, 5, 7)), 1)


@pytest.mark.parametrize(
    ("changes", "call", "kernel"),
    [
        ({"weight": random_weight((128, 160, 3, 3), 0.1, dtype=HALF)}, (132, 1, (14, 14)), "cluster"),
        ({"weight": random_weight((128, 160, 3, 3), 0.1, dtype=HALF)}, (132, 2, (14, 14)), "cluster"),
        ({"weight": random_weight((128, 160, 3, 3), 0.1, dtype=HALF)}, (66, 12, (28, 26)), "flatten"),
    ],
    ids=["one image", "two", "many"],
)
def test_it_runs_by_itself_where_it_pays(driver, make_session, changes, call, kernel):
    multiprocessors, batch, size = call
    driver.set_device(num_multiprocessors=multiprocessors)
    case = dataclasses.replace(CASE, **changes)
    x_shape = (batch, case.weight.shape[1], *size)
    (name, *_), *_ = run_and_check(make_session(make_model(case)), driver, case, x_shape)
    assert name.startswith(f"sparseconv_{kernel}")


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        ((512, 512, 7), 1),
        ((256, 512, 7), 1),
        ((64, 256, 28), 1),
        ((256, 64, 14), 3),
        ((512, 512, 1), 1),
        ((512, 512, 1), 3),
    ],
    ids=str,
)
def test_what_foretells_times_foretells_the_kernel_of_1x1(make_session, driver, layer, batch):
    rows, channels, size = layer
    driver.set_device(num_multiprocessors=132)
    case = SparseConvCase(random_weight((rows, channels, 1, 1), 0.1, dtype=HALF), geometry_2d(1, pad=0), dtype=HALF)
    (name, *_), *_ = run_and_check(make_session(make_model(case)), driver, case, (batch, channels, size, size))
    _, runs_on = MODEL.library_us(layer_of(case, (size, size)), 90, batch)
    is_by_csr = any(kernel in name for kernel in ("csr", "pixel"))
    assert (runs_on == BY_CSR) == is_by_csr


def test_other_gpus_do_not_run_it(driver, make_session):
    driver.set_device(architecture=89)
    ((name, *_),) = run_and_check(make_session(make_model(CASE)), driver, CASE, (1, 96, 6, 9))
    assert not name.startswith("sparseconv_cluster")
    with pytest.raises(Exception, match=r"node 'conv1': .*asks for the cluster kernel, which runs 1-D and 2-D"):
        make_session(make_model(CASE), cuda_kernel="cluster")


def test_a_tile_that_does_not_fit_is_said(driver, make_session):
    driver.set_device(max_shared_bytes=32 << 10)
    session = make_session(make_model(CASE), cuda_kernel="cluster")
    with pytest.raises(Exception, match="the cluster kernel cannot run this call: no tile of it fits with its part"):
        session.run(None, random_inputs(CASE, (1, 96, 28, 28)))


def test_the_weight_of_a_block_does_not_fit(driver, make_session):
    """More channels than the largest cluster has room for: other kernels run, and it cannot be forced."""
    weight = np.zeros((64, 1200, 5, 5), HALF)
    weight[:, :, ::2, ::2] = random_weight((64, 1200, 3, 3), 0.1, dtype=HALF)
    weight[0] = 1
    case = SparseConvCase(weight, geometry_2d(5, 1, 2), Activation.NONE, dtype=HALF)
    names = [name for name, *_ in run_and_check(make_session(make_model(case)), driver, case, (1, 1200, 3, 5))]
    assert not any(name.startswith("sparseconv_cluster") for name in names)
    session = make_session(make_model(case), cuda_kernel="cluster")
    with pytest.raises(Exception, match="the cluster kernel cannot run this call"):
        session.run(None, random_inputs(case, (1, 1200, 3, 5)))
