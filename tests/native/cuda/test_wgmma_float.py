"""The warpgroup kernels for float through ONNX Runtime, against the float64 oracle: what they multiply is rounded to
halves, and where these cannot hold X, outputs that read it are computed once more."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.native.cuda.test_ring import run_misaligned
from tests.support.random_cases import ACTIVATION_PARAMETERS
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

CASE = SparseConvCase(random_weight((70, 40, 3, 3), 0.1), geometry_2d(pad=1), Activation.RELU)
POINTWISE = SparseConvCase(random_weight((70, 40, 1, 1), 0.1), geometry_2d(1, 1, 0), Activation.RELU)
LINEAR, LINEAR_POINTWISE = (dataclasses.replace(case, activation=Activation.NONE) for case in (CASE, POINTWISE))
WIDE = SparseConvCase(random_weight((64, 160, 3, 3), 0.1), geometry_2d(pad=1), Activation.NONE)
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
POINTS = [
    ((64, 64, 1, 1), (14, 14), geometry_2d(1, 1, 0)),
    ((130, 40, 1, 1), (7, 7), geometry_2d(1, 1, 0)),
    ((200, 96, 1, 1), (9, 30), geometry_2d(1, 1, 0)),
    ((64, 33, 1, 1), (15, 14), geometry_2d(1, 2, 0)),
    ((64, 33, 1, 1), (5, 6), geometry_2d(1, 1, 1)),
    ((96, 24, 1, 1), (4, 16), ConvGeometry((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), group=2)),
]
# Planes of these begin at multiples of 16 bytes, so no launch rounds X before.
ROUNDED_BY_THE_PRODUCT = [POINTS[0], POINTS[-1]]


def run_and_check(session, driver, case, inputs):
    """Run a case and compare; returns the names of what was launched."""
    driver.take_launches()
    (y,) = session.run(None, inputs)
    assert_within(y, *oracle(case, inputs, has_rounded_factors=True))
    return [name for name, *_ in driver.take_launches()]


@pytest.mark.parametrize("layer", WINDOWS + POINTS, ids=str)
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_layers(make_session, driver, layer, density):
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density), geometry, Activation.NONE)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    x_shape = (9, weight_shape[1] * geometry.group, *size)
    names = run_and_check(session, driver, case, random_inputs(case, x_shape))
    before, product = ("gather", "pointwise") if weight_shape[2:] == (1, 1) else ("interleave", "wgmma")
    if layer not in ROUNDED_BY_THE_PRODUCT:
        assert names.pop(0) == f"sparseconv_{before}_f32"
    assert names[0].startswith(f"sparseconv_{product}_f32_")
    assert names[1:] in ([], ["sparseconv_reduce_rounded"])
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.wgmma"


@pytest.mark.parametrize("rows", [64, 150])
@pytest.mark.parametrize("size", [(4, 16), (14, 14), (23, 24)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_blocks_stage_tile_after_tile(make_session, driver, rows, size, has_residual):
    """With up to 64 rows a tile has two runs, with more of them one, and two chunks are ahead."""
    driver.set_device(num_multiprocessors=2)
    case = SparseConvCase(random_weight((rows, 70, 1, 1), 0.1), geometry_2d(1, 1, 0), has_residual=has_residual)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    names = run_and_check(session, driver, case, random_inputs(case, (3, 70, *size)))
    assert names[0].startswith("sparseconv_pointwise_f32_")


@pytest.mark.parametrize(
    ("case", "first"),
    [(CASE, dict.fromkeys("XYZ", "interleave")), (POINTWISE, {"X": "gather", "Y": "pointwise", "Z": "pointwise"})],
    ids=["window", "1x1"],
)
@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_may_begin_anywhere(make_session, driver, case, first, which):
    """What would read or store vectors that are not aligned does not run."""
    case = dataclasses.replace(case, has_residual=True)
    inputs = random_inputs(case, (3, 40, 4, 24))
    session = make_session(make_model(case), cuda_kernel="wgmma")
    y, first_kernel = run_misaligned(
        session, driver, inputs, np.zeros((3, case.out_channels, 4, 24), np.float32), which
    )
    assert first_kernel.startswith(f"sparseconv_{first[which]}_f32")
    assert_within(y, *oracle(case, inputs, has_rounded_factors=True))


@pytest.mark.parametrize("layer", WINDOWS + POINTS, ids=str)
def test_values_that_are_halves_are_not_rounded(make_session, layer):
    """Rows of the weight may be of any magnitude: powers of two times halves."""
    weight_shape, size, geometry = layer
    rng = np.random.default_rng(0)
    weight = random_weight(weight_shape, 0.1, dtype=np.float16).astype(np.float32)
    weight *= np.exp2(rng.integers(-60, 60, weight_shape[0])).astype(np.float32)[:, None, None, None]
    case = SparseConvCase(weight, geometry, Activation.NONE)
    inputs = random_inputs(case, (3, weight_shape[1] * geometry.group, *size))
    inputs["X"] = inputs["X"].astype(np.float16).astype(np.float32)
    (y,) = make_session(make_model(case), cuda_kernel="wgmma").run(None, inputs)
    assert_within(y, *oracle(case, inputs))


@pytest.mark.parametrize("size", [(5, 6), (5, 7), (2, 28), (2, 32)], ids=str)
@pytest.mark.parametrize("case", [CASE, POINTWISE], ids=["window", "1x1"])
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_and_a_residual(make_session, driver, case, activation, size):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(case, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    run_and_check(session, driver, case, random_inputs(case, (4, 40, *size)))


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((70, 40, 3, 3), (16, 15), geometry_2d(pad=1)), 1),
        (((64, 160, 3, 3), (14, 14), geometry_2d(pad=1)), 1),
        (((64, 96, 3, 3), (13, 9), geometry_2d(pad=1)), 2),
        (((64, 96, 3, 3), (35, 29), geometry_2d(3, 2, 1)), 1),
        (((64, 1024, 1, 1), (14, 14), geometry_2d(1, 1, 0)), 1),
        (((64, 2048, 1, 1), (7, 7), geometry_2d(1, 1, 0)), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_few_images_share_tiles(make_session, driver, layer, batch, has_residual):
    """Parts of sums are floats, so nothing is rounded once more."""
    driver.set_device(num_multiprocessors=132)
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, 0.1), geometry, Activation.SILU, has_residual=has_residual)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    names = run_and_check(session, driver, case, random_inputs(case, (batch, weight_shape[1], *size)))
    assert ("sparseconv_reduce_rounded" in names) == (weight_shape[1] > 40)


# What rounds X, what multiplies, and what adds up, on a GPU of so many multiprocessors.
ROUNDED = [
    ("wgmma", 4, LINEAR, (9, 40, 11, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 132, LINEAR, (1, 40, 19, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 132, WIDE, (2, 160, 14, 14), ["interleave_f32", "wgmma_f32", "reduce_rounded"]),
    ("wgmma", 4, GROUPED, (9, 24, 11, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 4, LINEAR, (9, 40, 11, 16), ["octets_f32"]),
    ("wgmma", 4, WORDS, (3, 140, 1, 56), ["words_f32"]),
    ("wgmma", 4, LINEAR_POINTWISE, (9, 40, 11, 13), ["gather_f32", "pointwise_f32"]),
    ("wgmma", 4, LINEAR_POINTWISE, (9, 40, 11, 16), ["pointwise_f32"]),
    ("wgmma", 132, LONG_POINTWISE, (2, 1024, 14, 14), ["pointwise_f32", "reduce_rounded"]),
    ("wgmma", 132, LONG_POINTWISE, (3, 1024, 7, 7), ["gather_f32", "pointwise_f32", "reduce_rounded"]),
    ("wgmma", 4, PRUNED, (9, 40, 11, 13), ["interleave_f32", "wgmma_f32"]),
    ("wgmma", 132, WIDE_PRUNED, (1, 320, 7, 7), ["interleave_f32", "wgmma_f32", "reduce_rounded"]),
    ("wgmma", 4, PRUNED_POINTWISE, (9, 40, 11, 13), ["gather_f32", "pointwise_f32"]),
    ("cluster", 132, WIDE, (2, 160, 14, 14), ["cluster_f32"]),
    ("cluster", 8, WIDE, (5, 160, 4, 7), ["cluster_f32"]),
    ("cluster", 132, GROUPED, (2, 24, 11, 13), ["cluster_f32"]),
    ("cluster", 132, LINEAR_POINTWISE, (2, 40, 11, 13), ["cluster_f32"]),
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
    for _ in range(2):
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


def test_without_leave_to_round_floats_are_not_rounded(make_session, driver):
    """Only the CUDA provider gives it, by its option use_tf32."""
    session = make_session(make_model(CASE))
    inputs = random_inputs(CASE, (9, 40, 14, 14))
    driver.take_launches()
    (y,) = session.run(None, inputs)
    assert_within(y, *oracle(CASE, inputs))
    assert [name for name, *_ in driver.take_launches()] == ["sparseconv_csr_f32_b4"]


def test_weights_that_are_no_numbers_stay_with_the_other_kernel(make_session):
    weight = CASE.weight.copy()
    weight[0, 0, 0, 0] = np.inf
    case = dataclasses.replace(CASE, weight=weight)
    make_session(make_model(case))
    with pytest.raises(Exception, match=r"asks for the warpgroup kernel, which runs .* or finite floats"):
        make_session(make_model(case), cuda_kernel="wgmma")


def test_a_run_only_launches(assert_only_launches, make_session):
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    assert_only_launches(session, random_inputs(CASE, (8, 40, 5, 7)), 2)
