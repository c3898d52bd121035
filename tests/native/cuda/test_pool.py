"""The pool behind a convolution, through ONNX Runtime: which kernel runs, and what it computes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import ConvGeometry, PoolGeometry
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
    run_and_check,
)

PAIRS = PoolGeometry((2, 2), (2, 2), (0,) * 4)
CASE = SparseConvCase(random_weight((8, 6, 3, 3), 0.4), geometry_2d(), pool=PAIRS)
HALF = np.dtype(np.float16)


def pools(driver):
    return [name for name, *_ in driver.take_launches() if "pool" in name]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "row",
    [
        (np.float32, 8, "_v16"),
        (np.float32, 6, "_v8"),
        (np.float32, 7, ""),
        (np.float16, 16, "_v16"),
        (np.float16, 12, "_v8"),
        (np.float16, 14, "_v4"),
        (np.float16, 7, ""),
    ],
)
def test_usual_windows_are_read_by_the_widest_vectors_that_fit(driver, make_session, row, size):
    dtype, width, vector = row
    pad = size - 2
    case = dataclasses.replace(CASE, dtype=np.dtype(dtype), pool=PoolGeometry((size,) * 2, (2, 2), (pad,) * 4))
    kernel = f"max_pool_{size}x{size}_{'f16' if dtype == np.float16 else 'f32'}{vector}"
    session = make_session(make_model(case))
    for height in (6, 7):
        run_and_check(session, case, (3, 6, height, width))
        assert pools(driver) == [f"sparseconv_{kernel}"]


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("size", [(3, 3), (8, 9), (13, 70), (14, 65)], ids=str)
@pytest.mark.parametrize(
    "pool",
    [
        PoolGeometry((3, 3), (2, 2), (0,) * 4),
        PoolGeometry((3, 3), (2, 2), (2, 0, 1, 2)),
        PoolGeometry((2, 2), (2, 2), (0, 1, 0, 1)),
        PoolGeometry((2, 2), (2, 2), (1, 0, 0, 0)),
    ],
    ids=str,
)
def test_usual_windows_with_rows_of_any_length(driver, make_session, pool, size, dtype):
    case = dataclasses.replace(CASE, pool=pool, dtype=np.dtype(dtype))
    run_and_check(make_session(make_model(case)), case, (2, 6, *size))
    window = "x".join(map(str, pool.kernel_shape))
    (kernel,) = pools(driver)
    assert kernel.startswith(f"sparseconv_max_pool_{window}_")


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize(
    "pool",
    [
        PoolGeometry((3, 3), (1, 1), (1,) * 4),
        PoolGeometry((2, 2), (1, 2), (0,) * 4),
        PoolGeometry((1, 1), (3, 2), (0,) * 4),
        PoolGeometry((8, 9), (1, 1), (7, 8, 7, 8)),
    ],
    ids=str,
)
def test_any_other_window(driver, make_session, pool, dtype):
    case = dataclasses.replace(CASE, pool=pool, dtype=np.dtype(dtype))
    run_and_check(make_session(make_model(case)), case, (2, 6, 8, 8))
    assert [name.rsplit("_", 1)[0] for name in pools(driver)] == ["sparseconv_max_pool"]


@pytest.mark.parametrize("axes", [1, 3])
def test_other_numbers_of_axes(driver, make_session, axes):
    geometry = ConvGeometry((3,) * axes, (1,) * axes, (1,) * (2 * axes), (1,) * axes)
    pool = PoolGeometry((2,) * axes, (2,) * axes, (0,) * (2 * axes))
    case = SparseConvCase(random_weight((4, 3, *[3] * axes), 0.4), geometry, pool=pool)
    run_and_check(make_session(make_model(case)), case, (2, 3, *[8] * axes))
    assert pools(driver) == ["sparseconv_max_pool_f32"]


@pytest.mark.parametrize("width", [1, 8])
def test_maps_smaller_than_the_window(make_session, width):
    """As ONNX Runtime's MaxPool: of one row, the only window has nothing else."""
    inputs = random_inputs(CASE, (2, 6, 1, width))
    exact, bound = oracle(dataclasses.replace(CASE, pool=None), inputs)
    exact, bound = (x.reshape(2, 8, 1, -1, min(width, 2)).max(axis=-1) for x in (exact, bound))
    (actual,) = make_session(make_model(CASE)).run(None, inputs)
    assert_within(actual, exact, bound)


def test_memory_for_what_is_pooled_comes_from_the_session(make_session):
    """It is given back after the call: the second one finds as much as the first."""
    session = make_session(make_model(CASE))
    for _ in range(2):
        run_and_check(session, CASE, (2, 6, 8, 8))
