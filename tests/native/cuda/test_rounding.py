"""Kernels for float that multiply halves, through ONNX Runtime: what halves hold is exact, and where they cannot hold
X, outputs that read it are computed once more."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.native.cuda.test_tensor import LAYERS
from tests.native.cuda.test_wgmma_float import POINTS
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    convolve,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)
from tests.support.warpgroup_layers import WINDOWS

LINEAR = SparseConvCase(random_weight((70, 40, 3, 3), 0.1), geometry_2d(pad=1))
LINEAR_POINTWISE = SparseConvCase(random_weight((70, 40, 1, 1), 0.1), geometry_2d(1, 1, 0))
STRIDED_POINTWISE = SparseConvCase(random_weight((72, 40, 1, 1), 0.1), geometry_2d(1, 2, 0))
STRIDED = SparseConvCase(random_weight((24, 12, 5, 5), 0.2), geometry_2d(5, 2, 2))
WIDE = SparseConvCase(random_weight((64, 160, 3, 3), 0.1), geometry_2d(pad=1), Activation.NONE)
FLAT = SparseConvCase(random_weight((64, 160, 3, 3), 0.03), geometry_2d(pad=1), Activation.NONE)
GROUPED = SparseConvCase(
    random_weight((48, 12, 3, 3), 0.3), dataclasses.replace(geometry_2d(pad=1), group=2), Activation.NONE
)
WORDS = SparseConvCase(random_weight((70, 140, 1, 3), 0.1), ConvGeometry((1, 3), (1, 1), (0, 0, 0, 0), (1, 1)))
LONG_POINTWISE = SparseConvCase(random_weight((64, 1024, 1, 1), 0.1), geometry_2d(1, 1, 0), Activation.NONE)
# Filters that were pruned as a whole, blocks of rows of them.
PRUNED, WIDE_PRUNED, PRUNED_POINTWISE = (
    SparseConvCase(
        random_weight((256, *shape), 0.1) * (np.arange(256) < 128).astype(np.float32)[:, None, None, None],
        geometry_2d(shape[1], 1, shape[1] // 2),
        Activation.NONE,
    )
    for shape in ((40, 3, 3), (320, 3, 3), (40, 1, 1))
)
# By the gemm kernels: boxes, planes, and boxes with strides.
PRODUCTS = [
    ((200, 96, 1, 1), (9, 32), geometry_2d(1, 1, 0)),
    ((64, 32, 1, 1), (7, 7), geometry_2d(1, 1, 0)),
    ((200, 96, 1, 1), (28, 28), geometry_2d(1, 2, 0)),
]


@pytest.mark.parametrize(
    ("kernel", "layer"),
    [
        *(("wgmma", layer) for layer in WINDOWS + POINTS),
        *(("tensor", layer) for layer in LAYERS),
        *(("gemm", layer) for layer in PRODUCTS),
    ],
    ids=str,
)
def test_values_that_are_halves_are_not_rounded(make_session, kernel, layer):
    """Rows of the weight may be of any magnitude: powers of two times halves."""
    weight_shape, size, geometry = layer
    rng = np.random.default_rng(0)
    weight = random_weight(weight_shape, 0.1, dtype=np.float16).astype(np.float32)
    weight *= np.exp2(rng.integers(-60, 60, weight_shape[0])).astype(np.float32)[:, None, None, None]
    case = SparseConvCase(weight, geometry, Activation.NONE)
    inputs = random_inputs(case, (3, weight_shape[1] * geometry.group, *size))
    inputs["X"] = inputs["X"].astype(np.float16).astype(np.float32)
    (y,) = make_session(make_model(case), cuda_kernel=kernel).run(None, inputs)
    assert_within(y, *oracle(case, inputs))


# What rounds X, what multiplies, and what adds up, on a GPU of so many multiprocessors.
ROUNDED = [
    ("wgmma", 4, LINEAR, (9, 40, 11, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 132, LINEAR, (1, 40, 19, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 132, WIDE, (2, 160, 14, 14), ["interleave_f32", "wgmma_f32", "reduce_rounded"]),
    ("wgmma", 4, GROUPED, (9, 24, 11, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 4, LINEAR, (9, 40, 11, 16), ["octets_f32"]),
    ("wgmma", 4, WORDS, (3, 140, 1, 56), ["words_f32"]),
    ("wgmma", 4, LINEAR_POINTWISE, (9, 40, 11, 13), ["gather_whole_f32", "pointwise_f32"]),
    ("wgmma", 4, LINEAR_POINTWISE, (9, 40, 11, 16), ["pointwise_f32"]),
    ("wgmma", 132, LONG_POINTWISE, (2, 1024, 14, 14), ["pointwise_f32", "reduce_rounded"]),
    ("wgmma", 132, LONG_POINTWISE, (3, 1024, 7, 7), ["gather_whole_f32", "pointwise_f32", "reduce_rounded"]),
    ("wgmma", 4, PRUNED, (9, 40, 11, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 132, WIDE_PRUNED, (1, 320, 7, 7), ["interleave_f32", "wgmma_f32", "reduce_rounded"]),
    ("wgmma", 4, PRUNED_POINTWISE, (9, 40, 11, 13), ["gather_whole_f32", "pointwise_f32"]),
    ("gemm", 4, LINEAR_POINTWISE, (9, 40, 11, 16), ["gemm_boxes_f32"]),
    ("gemm", 4, PRUNED_POINTWISE, (9, 40, 7, 7), ["gemm_planes_f32"]),
    ("wgmma", 4, STRIDED_POINTWISE, (5, 40, 28, 28), ["gather_columns_f32", "pointwise_f32"]),
    ("wgmma", 4, STRIDED_POINTWISE, (5, 40, 28, 27), ["gather_f32", "pointwise_f32"]),
    ("gemm", 4, STRIDED_POINTWISE, (5, 40, 28, 28), ["gemm_boxes_f32"]),
    ("gemm", 132, LONG_POINTWISE, (3, 1024, 7, 7), ["gemm_planes_f32"]),
    ("flat", 132, FLAT, (2, 160, 14, 14), ["flatten_rows_f32", "flat_f32"]),
    ("flat", 1, FLAT, (7, 160, 14, 14), ["flatten_rows_f32", "flat_f32"]),
    ("flat", 4, FLAT, (9, 160, 7, 7), ["flatten_f32", "flat_f32"]),
    ("cluster", 132, WIDE, (2, 160, 14, 14), ["cluster_f32"]),
    ("cluster", 8, WIDE, (5, 160, 4, 7), ["cluster_f32"]),
    ("cluster", 132, GROUPED, (2, 24, 11, 13), ["cluster_f32"]),
    ("cluster", 132, LINEAR_POINTWISE, (2, 40, 11, 13), ["cluster_f32"]),
    ("tensor", 4, LINEAR, (9, 40, 11, 13), ["tensor_f32_r4"]),
    ("tensor", 4, WIDE, (2, 160, 14, 14), ["tensor_f32_r4"]),
    ("tensor", 4, GROUPED, (9, 24, 11, 13), ["tensor_f32_r2"]),
    ("tensor", 4, STRIDED, (5, 12, 15, 18), ["tensor_f32_r2"]),
    ("tensor", 4, WORDS, (3, 140, 1, 56), ["tensor_f32_r4"]),
    ("tensor", 4, LINEAR_POINTWISE, (9, 40, 12, 16), ["tensor_f32_r4"]),
    ("tensor", 4, PRUNED, (9, 40, 11, 13), ["tensor_f32_r4"]),
    ("tensor", 132, LINEAR, (1, 40, 19, 13), ["tensor_f32_r4"]),
    ("tensor", 132, WIDE_PRUNED, (1, 320, 7, 7), ["tensor_f32_r4", "reduce_rounded"]),
]


def run_rounded(make_session, driver, layer, inputs, **options):
    """Run one of ROUNDED; returns Y and the session."""
    kernel, num_multiprocessors, case, _, expected = layer
    driver.set_device(num_multiprocessors=num_multiprocessors)
    session = make_session(make_model(case), cuda_kernel=kernel, **options)
    driver.take_launches()
    (y,) = session.run(None, inputs)
    names = [name for name, *_ in driver.take_launches()]
    assert [re.sub(r"sparseconv_|_[nps]\d+$", "", name) for name in names] == expected
    return y, session


@pytest.mark.parametrize("layer", ROUNDED, ids=lambda layer: f"{layer[3]} by {layer[4]}")
@pytest.mark.parametrize(
    "factor",  # and whether the call is computed once more
    [(0, False), (2**-9, False), (2**-13, True)],
)
def test_calls_that_halves_cannot_hold(make_session, driver, capfd, layer, factor):
    """It is computed once more, as exactly as by the CSR kernel; who runs it is told, once, by a later call."""
    (case, x_shape), (scale, is_computed_again) = layer[2:4], factor
    inputs = random_inputs(case, x_shape)
    inputs["X"] *= np.float32(scale)
    y, session = run_rounded(make_session, driver, layer, inputs, severity=2)
    assert_within(y, *oracle(case, inputs, has_rounded_factors=not is_computed_again))
    for _ in range(1 + is_computed_again):
        session.run(None, inputs)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "computed once more" in line]
    assert len(warnings) == is_computed_again
    assert all("use_tf32=0" in line for line in warnings)


@pytest.mark.parametrize("layer", ROUNDED, ids=lambda layer: f"{layer[3]} by {layer[4]}")
@pytest.mark.parametrize(
    ("value", "is_held"),
    [(65519, True), (65520, False), (np.nan, False)],
)
def test_what_reads_a_value_that_halves_cannot_hold_is_computed_once_more(make_session, driver, layer, value, is_held):
    """Wherever the value is, and outputs elsewhere are what they were."""
    case, x_shape = layer[2:4]
    rng = np.random.default_rng(0)
    inputs = random_inputs(case, x_shape)
    before, bound_before = oracle(case, inputs, has_rounded_factors=True)
    read = np.flatnonzero(np.abs(case.weight).sum((0, *range(2, case.weight.ndim))))  # channels of a group
    mask = np.zeros(x_shape)
    for place in [(0, 0), (-1, -1), tuple(rng.integers(0, x_shape[2:]))]:
        mask[(rng.integers(0, x_shape[0]), rng.choice(read), *place)] = 1
    inputs["X"][mask > 0] = value
    reads = convolve(case, np.abs(case.weight), mask) > 0
    y, _ = run_rounded(make_session, driver, layer, inputs)
    assert_within(y[~reads], before[~reads], bound_before[~reads])
    if np.isfinite(value):
        exact, bound = oracle(case, inputs, has_rounded_factors=is_held)
        assert_within(y[reads], exact[reads], bound[reads])
    else:
        assert not np.isfinite(y[reads]).any()
