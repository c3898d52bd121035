from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_sparseconv.runtime.metrics import (
    NumericalDepth,
    argmax_agreement,
    compare_outputs,
    cosine_similarity,
    derive_tolerance,
    error_metrics,
    snr_db,
)

ONE_LAYER = NumericalDepth(depth=1, dot_length=100, storage="float32")


def test_the_tolerance_follows_its_formula():
    tolerance = derive_tolerance(NumericalDepth(depth=16, dot_length=2304, storage="float16"))
    assert tolerance.rtol == pytest.approx(8 * 4 * (2**-11 + 48 * 2**-24))
    assert tolerance.atol is None
    assert "depth 16" in tolerance.text
    assert "2304" in tolerance.text
    assert "float16" in tolerance.text


def test_deeper_longer_and_coarser_models_get_more():
    base = derive_tolerance(ONE_LAYER).rtol
    assert derive_tolerance(NumericalDepth(4, 100, "float32")).rtol == pytest.approx(2 * base)
    assert derive_tolerance(NumericalDepth(1, 1000, "float32")).rtol > base
    assert derive_tolerance(NumericalDepth(1, 100, "float16")).rtol > 100 * base
    assert derive_tolerance(NumericalDepth(1, 100, "float64", "float64")).rtol < 1e-6 * base


def test_given_tolerances_replace_the_derived_ones_one_by_one():
    reference = np.asarray([1.0, 10.0], np.float32)
    off = reference + np.asarray([0.0, 0.5], np.float32)
    assert not compare_outputs("y", reference, off, derive_tolerance(ONE_LAYER)).passed
    assert compare_outputs("y", reference, off, derive_tolerance(ONE_LAYER, rtol=0.06)).passed
    assert compare_outputs("y", reference, off, derive_tolerance(ONE_LAYER, atol=0.6)).passed
    assert not compare_outputs("y", reference, off, derive_tolerance(ONE_LAYER, rtol=0.04, atol=0.0)).passed


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(8, 600), st.integers(0, 2**31))
def test_rounding_of_a_real_computation_passes(depth, width, seed):
    generator = np.random.default_rng(seed)
    exact = generator.standard_normal((4, width))
    rounded = exact.astype(np.float32)
    exact = rounded.astype(np.float64)
    for _ in range(depth):
        weight = (generator.standard_normal((width, width)) / math.sqrt(width)).astype(np.float32)
        exact, rounded = np.maximum(exact @ weight, 0), np.maximum(rounded @ weight, 0)
    tolerance = derive_tolerance(NumericalDepth(depth, width, "float32"))
    assert compare_outputs("y", rounded, exact.astype(np.float32), tolerance).passed


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 600), st.integers(0, 2**31))
def test_a_lost_weight_does_not_pass(width, seed):
    generator = np.random.default_rng(seed)
    x, weight = (generator.standard_normal((8, width)).astype(np.float32) for _ in range(2))
    damaged = weight.copy()
    damaged[3, 0] = 0
    expected, actual = x @ weight.T, x @ damaged.T
    result = compare_outputs("y", expected, actual, derive_tolerance(NumericalDepth(1, width, "float32")))
    largest = np.abs(expected - actual).max() / np.abs(expected).max()
    if largest > 1e-3:
        assert not result.passed


def test_the_metrics_of_a_known_error():
    original = np.asarray([1.0, -2.0, 3.0, 0.0])
    metrics = error_metrics(original, original + np.asarray([0.0, 0.1, -0.3, 0.2]))
    assert metrics.max_abs == pytest.approx(0.3)
    assert metrics.mean_abs == pytest.approx(0.15)
    assert metrics.rms == pytest.approx(math.sqrt(0.14 / 4))
    assert metrics.max_relative == pytest.approx(0.1)
    assert metrics.max_of_range == pytest.approx(0.3 / 5)
    assert metrics.snr_db == pytest.approx(20.0)


def test_cosine_and_snr_have_no_value_without_a_signal():
    zero, one = np.zeros(3), np.ones(3)
    assert cosine_similarity(zero, one) is None
    assert cosine_similarity(one, -one) == pytest.approx(-1)
    assert snr_db(one, zero) is None
    assert snr_db(zero, one) is None


def test_equal_outputs_are_identical():
    y = np.asarray([[1.5, np.nan, np.inf, -np.inf]], np.float32)
    result = compare_outputs("y", y, y.copy(), derive_tolerance(ONE_LAYER))
    assert (result.passed, result.identical, result.num_nonfinite, result.num_nonfinite_mismatches) == (
        True,
        True,
        3,
        0,
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_or_inf_in_one_model_alone_fails_whatever_the_tolerance(value):
    y = np.asarray([1.0, 2.0, 3.0], np.float32)
    broken = np.asarray([1.0, value, 3.0], np.float32)
    for first, second in ((y, broken), (broken, y)):
        result = compare_outputs("y", first, second, derive_tolerance(ONE_LAYER, rtol=1e9, atol=1e9))
        assert not result.passed
        assert result.num_nonfinite_mismatches == 1
        assert "NaN or Inf" in result.reason
        assert result.errors.max_abs == 0


def test_opposite_infinities_differ():
    result = compare_outputs(
        "y", np.asarray([np.inf], np.float32), np.asarray([-np.inf], np.float32), derive_tolerance(ONE_LAYER)
    )
    assert not result.passed


def test_other_shapes_and_types_fail():
    y = np.zeros((2, 3), np.float32)
    assert compare_outputs("y", y, y.T, derive_tolerance(ONE_LAYER)).reason == "another shape"
    assert compare_outputs("y", y, y.astype(np.float64), derive_tolerance(ONE_LAYER)).reason == "another type"


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.str_])
def test_what_is_not_floating_point_has_to_be_equal(dtype):
    y = np.asarray([0, 1, 1, 0]).astype(dtype)
    other = y.copy()
    other[1] = y[0]
    assert compare_outputs("y", y, y, derive_tolerance(ONE_LAYER, rtol=9, atol=9)).passed
    result = compare_outputs("y", y, other, derive_tolerance(ONE_LAYER, rtol=9, atol=9))
    assert (result.passed, result.num_outside, result.reason) == (False, 1, "1 of 4 elements differ")


def test_empty_and_scalar_outputs_compare():
    empty = np.zeros((0, 5), np.float32)
    assert compare_outputs("y", empty, empty, derive_tolerance(ONE_LAYER)).passed
    assert compare_outputs("y", np.float32(2), np.float32(2), derive_tolerance(ONE_LAYER)).passed


def test_float16_errors_are_measured_in_float64():
    y = np.full(3, 60000, np.float16)
    assert compare_outputs("y", y, -y, derive_tolerance(ONE_LAYER)).errors.max_abs == 120000


def test_argmax_is_compared_for_class_scores_only():
    scores = np.asarray([[0.1, 0.9], [0.8, 0.2]])
    assert argmax_agreement(scores, scores[::-1]) == 0
    assert argmax_agreement(scores, scores * 2) == 1
    assert argmax_agreement(scores.reshape(2, 2, 1, 1), scores.reshape(2, 2, 1, 1)) == 1
    assert argmax_agreement(np.zeros((2, 2, 4, 4)), np.zeros((2, 2, 4, 4))) is None
    assert argmax_agreement(np.zeros((2, 1)), np.zeros((2, 1))) is None
    assert argmax_agreement(np.asarray([[np.nan, 1.0]]), np.asarray([[np.nan, 1.0]])) is None
