"""The tensor-core kernel for float through ONNX Runtime, against the float64 oracle: what it multiplies is rounded to
halves. What that costs, and what happens where these cannot hold X, test_rounding.py says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation
from tests.native.cuda.test_ring import run_misaligned
from tests.native.cuda.test_tensor import LAYERS, PROPERTY
from tests.native.cuda.test_wgmma_float import run_and_check
from tests.support.random_cases import ACTIVATION_PARAMETERS, cases
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)

CASE = SparseConvCase(random_weight((70, 12, 3, 3), 0.2), geometry_2d(pad=1), Activation.RELU)


@pytest.fixture(autouse=True)
def _gpu_without_warpgroups(driver):
    driver.set_device(architecture=86)


@PROPERTY
@given(drawn=cases(ranks=(1, 2), longest={1: 60, 2: 14}), batch=st.sampled_from([1, 4, 8, 11]))
def test_any_convolution(make_session, driver, drawn, batch):
    case, x_shape = drawn
    case = dataclasses.replace(case, dtype=np.dtype(np.float32))
    session = make_session(make_model(case), cuda_kernel="tensor")
    run_and_check(session, driver, case, random_inputs(case, (batch, *x_shape[1:])))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_layers(make_session, driver, layer, density):
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density), geometry, Activation.NONE)
    session = make_session(make_model(case), cuda_kernel="tensor")
    (name,) = run_and_check(session, driver, case, random_inputs(case, (9, weight_shape[1] * geometry.group, *size)))
    assert name.startswith("sparseconv_tensor_f32_r")
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.tensor"


@pytest.mark.parametrize("size", [(5, 6), (5, 7)], ids=str)
@pytest.mark.parametrize("activation", list(Activation))
def test_every_activation_with_a_residual(make_session, driver, activation, size):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(CASE, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    session = make_session(make_model(case), cuda_kernel="tensor")
    run_and_check(session, driver, case, random_inputs(case, (4, 12, *size)))


@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_may_begin_anywhere(make_session, driver, which):
    case = dataclasses.replace(CASE, has_residual=True)
    inputs = random_inputs(case, (3, 12, 4, 24))
    session = make_session(make_model(case), cuda_kernel="tensor")
    y, name = run_misaligned(session, driver, inputs, np.zeros((3, case.out_channels, 4, 24), np.float32), which)
    assert name.startswith("sparseconv_tensor_f32_r")
    assert_within(y, *oracle(case, inputs, has_rounded_factors=True))


def test_without_leave_to_round_floats_are_not_rounded(make_session, driver):
    """Only the CUDA provider gives it, by its option use_tf32."""
    session = make_session(make_model(CASE))
    driver.take_launches()
    inputs = random_inputs(CASE, (40, 12, 28, 28))
    (y,) = session.run(None, inputs)
    assert_within(y, *oracle(CASE, inputs))
    ((name, *_),) = driver.take_launches()
    assert name.startswith("sparseconv_csr_f32")


def test_weights_that_are_no_numbers_stay_with_the_other_kernel(make_session):
    weight = CASE.weight.copy()
    weight[0, 0, 0, 0] = np.nan
    case = dataclasses.replace(CASE, weight=weight)
    make_session(make_model(case))
    with pytest.raises(Exception, match=r"asks for the tensor-core kernel, which runs .* or finite floats"):
        make_session(make_model(case), cuda_kernel="tensor")


def test_a_run_only_launches(make_session, assert_one_launch):
    assert_one_launch(make_session(make_model(CASE), cuda_kernel="tensor"), random_inputs(CASE, (8, 12, 5, 7)))
