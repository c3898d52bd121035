"""The tensor-core kernel with few images through ONNX Runtime, in both types: strips of an image, warps that share
steps and blocks that share chunks, on a GPU that has multiprocessors for all of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.tensor_plan import plan_tensor
from tests.native.cuda.test_tensor import LAYERS
from tests.native.cuda.test_wgmma_float import run_and_check as run_floats
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
# Rows that no strips share evenly, strides, windows that reach far beyond a strip, and padding as high as one.
FEW = [
    *LAYERS,
    ((64, 64, 3, 3), (13, 20), geometry_2d(pad=1)),
    ((64, 40, 5, 5), (9, 11), ConvGeometry((5, 5), (1, 1), (4, 4, 4, 4), (2, 2))),
    ((70, 130, 3, 3), (19, 14), geometry_2d(3, 2, 1)),
    ((32, 16, 3, 3), (26, 30), geometry_2d(3, 2, 1)),
    ((200, 320, 1, 1), (7, 7), geometry_2d(1, pad=0)),
    ((40, 20, 7, 1), (5, 24), ConvGeometry((7, 1), (1, 1), (6, 0, 6, 0), (1, 1))),
]
LONG = (64, 600, 3, 3)  # sums for several blocks


@pytest.fixture(autouse=True)
def _gpu_without_warpgroups(driver):
    driver.set_device(architecture=86, num_multiprocessors=132)


def launched(session, driver, case, inputs):
    """Run a case and compare; returns the names of what was launched."""
    if case.dtype == FLOAT:
        return run_floats(session, driver, case, inputs)
    driver.take_launches()
    (y,) = session.run(None, inputs)
    launches = driver.take_launches()
    _, (_, parts, _), _, _ = launches[0]
    assert_within(y, *oracle(case, inputs, stored_sums=parts if parts > 1 else 0))
    return [name for name, *_ in launches]


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("layer", FEW, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_layers(make_session, driver, layer, batch, dtype):
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, 0.2, dtype=dtype), geometry, Activation.NONE, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="tensor")
    inputs = random_inputs(case, (batch, weight_shape[1] * geometry.group, *size))
    assert launched(session, driver, case, inputs)[0].startswith("sparseconv_tensor_")


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("in_channels", [12, 600], ids=["in one launch", "in parts"])
def test_every_activation_with_a_residual(make_session, driver, activation, in_channels, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    weight = random_weight((70, in_channels, 3, 3), 0.05, dtype=dtype)
    case = SparseConvCase(weight, geometry_2d(pad=1), activation, alpha, beta, dtype=dtype, has_residual=True)
    session = make_session(make_model(case), cuda_kernel="tensor")
    names = launched(session, driver, case, random_inputs(case, (1, in_channels, 11, 9)))
    assert len(names) == (1 if in_channels == 12 else 2)


@pytest.mark.parametrize(("dtype", "reduce"), [(HALF, "reduce_vectors"), (FLOAT, "reduce_rounded")], ids=str)
def test_parts_of_long_sums_are_added_up(make_session, driver, dtype, reduce):
    case = SparseConvCase(random_weight(LONG, 0.1, dtype=dtype), geometry_2d(pad=1), Activation.RELU, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="tensor")
    names = launched(session, driver, case, random_inputs(case, (1, LONG[1], 7, 7)))
    assert names[1:] == [f"sparseconv_{reduce}"]


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch(make_session, driver, batch):
    case = SparseConvCase(random_weight((70, 12, 3, 3), 0.2, dtype=HALF), geometry_2d(pad=1), dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="tensor")
    launched(session, driver, case, random_inputs(case, (batch, 12, 12, 10)))


@pytest.mark.parametrize("gpu", [(80, 163 << 10), (86, 99 << 10)], ids=["sm_80", "sm_86"])
@pytest.mark.parametrize("layer", [((64, 64, 3, 3), (56, 56)), (LONG, (14, 14)), ((128, 320, 1, 1), (20, 20))], ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_what_foretells_times_makes_the_same_plan(make_session, driver, layer, gpu, batch):
    """Of dense weights, as test_tensor.py does."""
    (architecture, max_shared_bytes), (weight_shape, size) = gpu, layer
    driver.set_device(architecture, num_multiprocessors=132, max_shared_bytes=max_shared_bytes)
    case = SparseConvCase(
        random_weight(weight_shape, 1.0, dtype=HALF), geometry_2d(weight_shape[2], pad=weight_shape[2] // 2), dtype=HALF
    )
    session = make_session(make_model(dataclasses.replace(case, activation=Activation.NONE)), cuda_kernel="tensor")
    driver.take_launches()
    session.run(None, random_inputs(case, (batch, weight_shape[1], *size)))
    _, (tiles, parts, _), _, _ = driver.take_launches()[0]
    assert plan_tensor(layer_of(case, size), architecture, batch, 132).blocks == tiles * parts


def test_a_run_in_parts_only_launches(driver, make_session):
    """No allocation, no copy and no synchronisation: CUDA graphs are captured."""
    case = SparseConvCase(random_weight(LONG, 0.1, dtype=HALF), geometry_2d(pad=1), Activation.RELU, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="tensor")
    inputs = random_inputs(case, (1, LONG[1], 7, 7))
    session.run(None, inputs)
    before, launches = driver.calls(), driver.calls("cuLaunchKernel")
    session.run(None, inputs)
    assert driver.calls("cuLaunchKernel") - launches == 2
    assert driver.calls() - before == 5
