"""The tensor-core kernel through ONNX Runtime, in every form of convolution it runs, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.device_sources import TENSOR_FLOAT_KERNELS, TENSOR_KERNELS
from onnx_sparseconv.kernels.library_code import code_path
from onnx_sparseconv.kernels.tensor_plan import plan_tensor
from tests.native.cuda.test_csr import run_and_check
from tests.support.gpu_code import with_ordered_metadata
from tests.support.random_cases import ACTIVATION_PARAMETERS, cases
from tests.support.sparse_layers import layer_of
from tests.support.sparse_models import SparseConvCase, geometry_2d, make_model, random_inputs, random_weight

HALF = np.dtype(np.float16)
PROPERTY = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CASE = SparseConvCase(random_weight((70, 12, 3, 3), 0.2, dtype=HALF), geometry_2d(pad=1), Activation.RELU, dtype=HALF)
POINTWISE = SparseConvCase(random_weight((64, 256, 1, 1), 0.1, dtype=HALF), geometry_2d(1, pad=0), dtype=HALF)

LAYERS = [
    ((64, 16, 3, 3), (14, 14), geometry_2d(pad=1)),
    ((130, 40, 3, 3), (7, 7), geometry_2d(pad=1)),
    ((32, 70, 1, 1), (9, 28), geometry_2d(1, pad=0)),
    ((24, 8, 5, 5), (15, 15), geometry_2d(5, 2, 2)),
    ((16, 3, 7, 7), (30, 31), geometry_2d(7, 2, 3)),
    ((20, 6, 3, 3), (16, 17), ConvGeometry((3, 3), (2, 1), (2, 1, 2, 1), (2, 1))),
    ((48, 8, 3, 3), (9, 16), ConvGeometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), group=4)),
    ((100, 300, 1, 3), (1, 56), ConvGeometry((1, 3), (1, 1), (0, 1, 0, 1), (1, 1))),
]


@pytest.fixture(autouse=True)
def _gpu_without_another_kernel(driver):
    """Where `test_wgmma`'s kernel runs as well, it goes before."""
    driver.set_device(architecture=89)


@PROPERTY
@given(drawn=cases(ranks=(1, 2), longest={1: 60, 2: 14}), batch=st.sampled_from([1, 4, 8, 11]))
def test_any_convolution(make_session, drawn, batch):
    case, x_shape = drawn
    case = dataclasses.replace(case, weight=case.weight.astype(HALF), dtype=HALF)
    run_and_check(make_session(make_model(case), cuda_kernel="tensor"), case, (batch, *x_shape[1:]))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("density", [0.05, 0.4, 1.0])
def test_layers(make_session, driver, layer, density):
    """Of all densities: two non-zeros in four are not enough for the dense one."""
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="tensor")
    run_and_check(session, case, (9, weight_shape[1] * geometry.group, *size))
    ((kernel, _, _, _),) = driver.take_launches()
    assert kernel.startswith("sparseconv_tensor_r")
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.tensor"


@pytest.mark.parametrize("size", [(5, 6), (5, 7)], ids=str)
@pytest.mark.parametrize("activation", list(Activation))
def test_every_activation_with_a_residual(make_session, activation, size):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(CASE, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    run_and_check(make_session(make_model(case), cuda_kernel="tensor"), case, (4, 12, *size))


@pytest.mark.parametrize("size", [(7, 7), (9, 13), (5, 14), (4, 28), (6, 16), (3, 56), (7, 22)], ids=str)
@pytest.mark.parametrize("rows", [24, 70])
@pytest.mark.parametrize("group", [1, 2])
def test_residuals_of_every_width(make_session, size, rows, group):
    """As many columns at a time as the width allows, rows that fill no tile, and images that are no eight."""
    weight = random_weight((rows * group, 12, 3, 3), 0.2, dtype=HALF)
    case = SparseConvCase(weight, geometry_2d(group=group), Activation.NONE, dtype=HALF, has_residual=True)
    run_and_check(make_session(make_model(case), cuda_kernel="tensor"), case, (13, 12 * group, *size))


@pytest.mark.parametrize("batch", [4, 5, 8, 16, 17])
def test_every_batch(make_session, batch):
    run_and_check(make_session(make_model(CASE)), CASE, (batch, 12, 6, 9))


@pytest.mark.parametrize(
    ("case", "x_shape", "kernel"),
    [(POINTWISE, (1, 256, 14, 14), "csr"), (CASE, (1, 12, 28, 28), "tensor"), (CASE, (40, 12, 28, 28), "tensor")],
    ids=["few entries", "an image", "many images"],
)
def test_what_takes_fewer_cycles_runs(driver, make_session, case, x_shape, kernel):
    driver.set_device(architecture=89, num_multiprocessors=132)
    run_and_check(make_session(make_model(case)), case, x_shape)
    ((name, _, _, _),) = driver.take_launches()
    assert name.startswith(f"sparseconv_{kernel}_")


@pytest.mark.parametrize(
    ("case", "x_shape"),
    [
        (dataclasses.replace(CASE, weight=random_weight((64, 64, 3, 3), 0.003, dtype=HALF)), (4, 64, 6, 9)),
        (
            SparseConvCase(random_weight((40, 2, 3, 3), 0.5, dtype=HALF), geometry_2d(group=20), dtype=HALF),
            (8, 40, 6, 9),
        ),
    ],
    ids=["next to no weights", "small groups"],
)
def test_what_is_mostly_zeros_on_tensor_cores_runs_in_csr(driver, make_session, case, x_shape):
    run_and_check(make_session(make_model(case)), case, x_shape)
    ((kernel, _, _, _),) = driver.take_launches()
    assert kernel.startswith("sparseconv_csr_f16")


@pytest.mark.parametrize("kernel_size", [32, 40])
def test_large_kernels(make_session, kernel_size):
    case = dataclasses.replace(
        CASE, weight=random_weight((3, 2, kernel_size, kernel_size), 0.1, dtype=HALF), geometry=geometry_2d(kernel_size)
    )
    run_and_check(make_session(make_model(case)), case, (4, 2, 45, 44))


def test_nothing_but_padding_gives_the_bias(make_session):
    case = dataclasses.replace(CASE, geometry=geometry_2d(pad=2))
    run_and_check(make_session(make_model(case)), case, (8, 12, 0, 9))


@pytest.mark.parametrize("max_shared_bytes", [48 << 10, 64 << 10, 99 << 10, 163 << 10])
def test_tiles_fit_what_shared_memory_there_is(driver, make_session, max_shared_bytes):
    driver.set_device(max_shared_bytes=max_shared_bytes)
    run_and_check(make_session(make_model(CASE)), CASE, (8, 12, 14, 14))
    assert driver.take_launches()


@pytest.mark.parametrize(
    "layer",
    [
        ((64, 64, 3, 3), (14, 14), geometry_2d(pad=1)),
        ((130, 32, 3, 3), (7, 7), geometry_2d(pad=1)),
        ((32, 64, 1, 1), (9, 28), geometry_2d(1, pad=0)),
        ((24, 11, 5, 5), (15, 15), geometry_2d(5, 2, 2)),
        ((100, 96, 1, 3), (1, 56), ConvGeometry((1, 3), (1, 1), (0, 1, 0, 1), (1, 1))),
    ],
    ids=str,
)
@pytest.mark.parametrize("gpu", [(80, 163 << 10), (86, 99 << 10)], ids=["sm_80", "sm_86"])
def test_what_foretells_times_makes_the_same_plan(make_session, driver, layer, gpu):
    """Of dense weights, whose steps are known: twice as many as columns fill, and chunks that are all full."""
    (architecture, max_shared_bytes), (weight_shape, size, geometry) = gpu, layer
    driver.set_device(architecture, num_multiprocessors=8, max_shared_bytes=max_shared_bytes)
    for dtype in (HALF, np.dtype(np.float32)):
        case = SparseConvCase(random_weight(weight_shape, 1.0, dtype=dtype), geometry, Activation.NONE, dtype=dtype)
        session = make_session(make_model(case), cuda_kernel="tensor")
        driver.take_launches()
        session.run(None, random_inputs(case, (11, weight_shape[1], *size)))
        ((_, (blocks, *_), _, _),) = driver.take_launches()
        assert plan_tensor(layer_of(case, size), architecture, 11, 8).blocks == blocks, (dtype, blocks)


def test_an_older_gpu_runs_csr(driver, make_session):
    driver.set_device(architecture=75)
    run_and_check(make_session(make_model(CASE)), CASE, (8, 12, 6, 9))
    ((kernel, _, _, _),) = driver.take_launches()
    assert kernel.startswith("sparseconv_csr_f16")
    with pytest.raises(Exception, match=r"node 'conv1': .*asks for the tensor-core kernel, which .* 8\.0 and later"):
        make_session(make_model(CASE), cuda_kernel="tensor")


def test_it_cannot_be_forced_on_weights_that_are_no_halves(driver, make_session):
    case = dataclasses.replace(CASE, weight=CASE.weight.astype(np.float32) * np.float32(1.0001))
    with pytest.raises(Exception, match=r"node 'conv1': .*asks for the tensor-core kernel, which runs .* are halves"):
        make_session(make_model(case), cuda_kernel="tensor")
    run_and_check(make_session(make_model(case)), case, (8, 12, 6, 9))
    ((kernel, _, _, _),) = driver.take_launches()
    assert kernel.startswith("sparseconv_csr")


def test_a_weight_without_entries(make_session):
    case = dataclasses.replace(CASE, weight=np.zeros_like(CASE.weight))
    run_and_check(make_session(make_model(case), cuda_kernel="tensor"), case, (8, 12, 4, 4))


def test_a_run_only_launches(make_session, assert_one_launch):
    assert_one_launch(make_session(make_model(CASE)), random_inputs(CASE, (8, 12, 5, 7)))


@pytest.mark.parametrize("architecture", [89, 100, 120])
@pytest.mark.parametrize("source", [TENSOR_KERNELS, TENSOR_FLOAT_KERNELS])
def test_newer_gpus_are_told_that_metadata_is_in_order(make_session, driver, architecture, source):
    driver.set_device(architecture=architecture)
    dtype = HALF if source == TENSOR_KERNELS else np.dtype(np.float32)
    case = dataclasses.replace(CASE, weight=CASE.weight.astype(dtype), dtype=dtype)
    make_session(make_model(case), cuda_kernel="tensor")
    committed = code_path(source).read_bytes()
    first_kernel = re.search(rb"\.entry (\w+)", committed)[1].decode()
    expected = committed if architecture < 100 else with_ordered_metadata(committed)
    assert driver.text(first_kernel) == expected


@pytest.mark.parametrize(
    ("architecture", "kernel", "dtype"),
    [
        (80, "auto", HALF),
        (80, "auto", np.float32),
        (80, "tensor", HALF),
        (90, "tensor", np.float32),
        (90, "wgmma", HALF),
    ],
)
@pytest.mark.parametrize(("stride", "size"), [(2**26, (4, 64)), (2**21, (4, 2**10))])
def test_rows_that_32_bits_cannot_count_by_pixels(make_session, driver, architecture, kernel, dtype, stride, size):  # noqa: PLR0917
    """Strips of an image lie further apart than it is high."""
    driver.set_device(architecture=architecture)
    weight = random_weight((64, 64, 3, 3), 0.3, dtype=np.dtype(dtype))
    geometry = ConvGeometry((3, 3), (stride, 1), (stride, 1, stride, 1), (1, 1))
    case = SparseConvCase(weight, geometry, dtype=np.dtype(dtype))
    inputs = random_inputs(case, (1, 64, *size))
    (expected,) = make_session(make_model(case), cuda_kernel="csr").run(None, inputs)
    (found,) = make_session(make_model(case), cuda_kernel=kernel).run(None, inputs)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2 * np.abs(expected).max())
