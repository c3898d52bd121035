"""The ring kernel, for windows of few channels, through ONNX Runtime against the float64 oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.warpgroup_plan import WindowSteps, plan_ring
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
# With a stride of five, which no copy makes up for with so many channels: else the octet kernel runs.
WINDOW = ConvGeometry((3, 3), (5, 1), (1, 2, 1, 0), (1, 1))
CASE = SparseConvCase(random_weight((70, 40, 3, 3), 0.1, dtype=HALF), WINDOW, Activation.RELU, dtype=HALF)


@pytest.fixture(autouse=True)
def many_multiprocessors(driver):
    """With a few of them, the other kernel for windows is foretold to be faster."""
    driver.set_device(num_multiprocessors=132)


def run_and_check(session, driver, case, x_shape, *, has_rounded_factors=False):
    """Run a case and compare; returns the names of the kernels that ran."""
    inputs = random_inputs(case, x_shape)
    driver.take_launches()
    (y,) = session.run(None, inputs)
    assert_within(y, *oracle(case, inputs, has_rounded_factors=has_rounded_factors))
    return [name for name, *_ in driver.take_launches()]


@pytest.mark.parametrize(
    "layer",
    [
        ((64, 64, 3, 3), (16, 16), WINDOW),
        ((130, 40, 3, 3), (7, 8), WINDOW),
        ((64, 40, 3, 3), (5, 40), WINDOW),
        ((48, 32, 2, 5), (9, 24), ConvGeometry((2, 5), (5, 1), (1, 2, 0, 2), (1, 1))),
        ((64, 32, 3, 3), (30, 32), geometry_2d(3, 2, 1)),
        ((64, 30, 3, 3), (12, 24), ConvGeometry((3, 3), (4, 1), (2, 2, 2, 2), (2, 2))),
        ((64, 32, 3, 3), (12, 48), ConvGeometry((3, 3), (2, 2), (0, 0, 0, 1), (1, 1))),
        ((40, 43, 3, 3), (16, 16), ConvGeometry((3, 3), (5, 1), (2, 1, 2, 1), (2, 1))),
        ((64, 32, 5, 5), (7, 24), ConvGeometry((5, 5), (5, 1), (2, 2, 2, 2), (1, 1))),
        ((100, 72, 3, 3), (6, 32), WINDOW),
        ((100, 90, 1, 3), (1, 56), ConvGeometry((1, 3), (5, 1), (0, 0, 0, 2), (1, 1))),
    ],
    ids=str,
)
@pytest.mark.parametrize("density", [0.02, 0.2])
def test_layers(make_session, driver, layer, density):
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    (name,) = run_and_check(session, driver, case, (9, weight_shape[1], *size))
    assert name.startswith("sparseconv_ring_p")
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.wgmma"


@pytest.mark.parametrize("batch", [1, 3, 8, 17])
@pytest.mark.parametrize("size", [(16, 16), (13, 40), (1, 8)], ids=str)
def test_every_batch(make_session, driver, batch, size):
    """A few images are cut into strips; the last eight, or the last strip, may be smaller than the others."""
    case = dataclasses.replace(CASE, has_residual=batch > 1)
    (name,) = run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (batch, 40, *size))
    assert name.startswith("sparseconv_ring_p")


@pytest.mark.parametrize("size", [(6, 9), (6, 12)], ids=str)
def test_other_widths_run_on_the_other_kernel(make_session, driver, size):
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    names = run_and_check(session, driver, CASE, (8, 40, *size))
    assert names[0] == "sparseconv_interleave"


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 64), slice(64, 70)], ids=["none", "the first", "the last"])
def test_rows_without_entries(make_session, driver, rows):
    weight = np.zeros_like(CASE.weight)
    weight[rows] = CASE.weight[rows]
    weight[rows, 0] = random_weight(weight.shape, 1.0, dtype=HALF)[rows, 0]  # some entry, whatever the density
    case = dataclasses.replace(CASE, weight=weight)
    run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (8, 40, 5, 16))


def test_any_weights_fit(make_session, driver):
    """Where more than two of four neighbours are entries, two dense steps have all."""
    for density in (0.5, 1.0):
        case = dataclasses.replace(CASE, weight=random_weight((70, 56, 3, 3), density, dtype=HALF))
        (name,) = run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (8, 56, 6, 16))
        assert name.startswith("sparseconv_ring_p")


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((64, 64, 3, 3), (56, 56), WINDOW), 1),
        (((64, 64, 3, 3), (32, 32), WINDOW), 16),
        (((128, 96, 3, 3), (12, 16), WINDOW), 3),
        (((130, 40, 3, 3), (9, 48), WINDOW), 9),
        (((64, 32, 3, 3), (30, 32), geometry_2d(3, 2, 1)), 5),
    ],
    ids=str,
)
def test_what_foretells_times_makes_the_same_plan(make_session, driver, layer, batch):
    weight_shape, size, geometry = layer
    weight = random_weight(weight_shape, 0.02, dtype=HALF)  # no step comes twice
    case = SparseConvCase(weight, geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    session.run(None, random_inputs(case, (batch, weight_shape[1], *size)))
    ((name, grid, _, _),) = driver.take_launches()
    assert name.startswith("sparseconv_ring_p")
    sized = layer_of(case, size)
    row_tiles = -(-weight_shape[0] // 64)
    foretold = plan_ring(sized, batch, WindowSteps(9 * -(-weight_shape[1] // 32)), 132)
    assert min(foretold.tiles, 132 // row_tiles * row_tiles) == grid[0]


@pytest.mark.parametrize("activation", list(Activation))
def test_activations_and_a_residual(make_session, driver, activation):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(CASE, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    (name,) = run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (4, 40, 5, 8))
    assert name.startswith("sparseconv_ring_p")


def test_it_runs_where_the_other_kernel_has_no_tile(make_session, driver):
    """Strides of 8 take that one more shared memory than there is; where Y begins anywhere, CSR is left."""
    geometry = ConvGeometry((3, 3), (3, 8), (0, 0, 0, 0), (1, 1))
    case = SparseConvCase(random_weight((88, 33, 3, 3), 0.1, dtype=HALF), geometry, Activation.RELU, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    (name,) = run_and_check(session, driver, case, (8, 33, 10, 768))
    assert name.startswith("sparseconv_ring_p")
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.wgmma"
    inputs = random_inputs(case, (8, 33, 10, 768))
    y = aligned(np.zeros_like(session.run(None, inputs)[0]), 2)
    binding = session.io_binding()
    binding.bind_cpu_input("X", inputs["X"])
    if "B" in inputs:
        binding.bind_cpu_input("B", inputs["B"])
    binding.bind_output("Y", "cpu", 0, HALF, y.shape, y.ctypes.data)
    driver.take_launches()
    session.run_with_iobinding(binding)
    assert driver.take_launches()[0][0].startswith("sparseconv_csr")
    assert_within(y, *oracle(case, inputs))
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.csr"


@pytest.mark.parametrize(
    ("weight_shape", "dilation"), [((64, 96, 7, 7), 1), ((64, 32, 3, 3), 8)], ids=["too many steps", "too many rows"]
)
def test_windows_that_fit_no_ring_run_on_the_other_kernel(make_session, driver, weight_shape, dilation):
    reach = (weight_shape[2] - 1) * dilation // 2
    geometry = ConvGeometry(weight_shape[2:], (1, 1), (reach,) * 4, (dilation, dilation))
    case = SparseConvCase(random_weight(weight_shape, 0.02, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case))
    assert not any(
        name.startswith("sparseconv_ring") for name in run_and_check(session, driver, case, (8, weight_shape[1], 9, 16))
    )


@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_that_begin_anywhere_run_on_the_other_kernel(make_session, driver, which):
    """Vectors of 16 bytes would not be aligned."""
    case = dataclasses.replace(CASE, has_residual=True)
    inputs = random_inputs(case, (8, 40, 6, 16))
    session = make_session(make_model(case), cuda_kernel="wgmma")
    y, first_kernel = run_misaligned(session, driver, inputs, np.zeros((8, case.out_channels, 2, 16), HALF), which)
    assert first_kernel == "sparseconv_interleave"
    assert_within(y, *oracle(case, inputs, stored_sums=1))


def run_misaligned(session, driver, inputs, y, which):
    """Run into `y`, where one of X, Z and Y begins an element behind a multiple of 16 bytes.

    Returns the outputs, and the name of the first kernel.
    """
    dtype = inputs["X"].dtype
    buffers = {name: aligned(values, (name == which) * dtype.itemsize) for name, values in {**inputs, "Y": y}.items()}
    binding = session.io_binding()
    for name, values in buffers.items():
        if name != "Y":
            binding.bind_input(name, "cpu", 0, dtype, values.shape, values.ctypes.data)
    binding.bind_output("Y", "cpu", 0, dtype, y.shape, buffers["Y"].ctypes.data)
    driver.take_launches()
    session.run_with_iobinding(binding)
    return buffers["Y"], driver.take_launches()[0][0]


def aligned(values, misalignment):
    """A copy that begins so many bytes behind a multiple of 64."""
    buffer = np.zeros(values.nbytes + 128, np.uint8)
    first = -buffer.ctypes.data % 64 + misalignment
    copy = buffer[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
