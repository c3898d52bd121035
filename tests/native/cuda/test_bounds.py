"""Clip as two bounds on what is stored, which halves may not hold as they are, on the kernels that do it so."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation
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
BOUNDS = [(-0.1, 0.3), (1.0, -1.0), (-np.inf, 0.3), (0.1, np.inf), (1e-9, 7e4), (0.25, 0.25)]
# Kernel, shape of the weight, and its type: windows, windows of few channels, 1x1, a part of the channels each.
CASES = [
    *(("wgmma", (64, 96, 3, 3), dtype) for dtype in (HALF, FLOAT)),
    *(("wgmma", (64, 16, 3, 3), dtype) for dtype in (HALF, FLOAT)),
    *(("wgmma", (64, 40, 1, 1), dtype) for dtype in (HALF, FLOAT)),
    *(("cluster", (64, 160, 3, 3), dtype) for dtype in (HALF, FLOAT)),
    ("tensor", (64, 40, 3, 3), HALF),
    *(("csr", (8, 6, 3, 3), dtype) for dtype in (HALF, FLOAT)),
]


@pytest.mark.parametrize("has_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize(("alpha", "beta"), BOUNDS)
@pytest.mark.parametrize("kernel_and_case", CASES, ids=str)
def test_clip(make_session, kernel_and_case, alpha, beta, has_residual):
    kernel, shape, dtype = kernel_and_case
    geometry = geometry_2d(shape[2], pad=shape[2] // 2)
    weight = random_weight(shape, 0.1, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.CLIP, alpha, beta, dtype, has_residual=has_residual)
    inputs = random_inputs(case, (2, shape[1], 4, 8))
    session = make_session(make_model(case), cuda_kernel=kernel)
    (actual,) = session.run(None, inputs)
    rounded = {"has_rounded_factors": dtype == FLOAT and kernel != "csr"}
    assert_within(actual, *oracle(case, inputs, **rounded))
    assert library.describe_kernels()[-1].kernel == f"cuda.{kernel}"
    if has_residual:
        place = (1, 5, 2, 3)
        inputs["Z"][place] = np.nan
        (with_nan,) = session.run(None, inputs)
        assert np.isnan(with_nan[place])
        with_nan[place] = actual[place]
        np.testing.assert_array_equal(with_nan, actual)
