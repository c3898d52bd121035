from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onnx_sparseconv.report.scales import Scale, linear, linear_ticks, log_ticks, logarithmic

SIZES = st.floats(1e-6, 1e15)


@given(st.lists(SIZES, max_size=20))
def test_a_linear_scale_holds_all_its_values_and_zero(values):
    scale = linear(values, 100, 0)
    assert scale.low <= 0
    for value in values:
        assert -1e-6 <= scale(value) <= 100 + 1e-6
    assert 2 <= len(linear_ticks(scale)) <= 8


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
@example([5e-324])
@example([-5e-324, 0.0])
def test_a_scale_may_reach_below_zero(values):
    scale = linear(values, 0, 100, zero=min(values) >= 0)
    for value in values:
        assert -1e-4 <= scale(value) <= 100 + 1e-4


@given(st.lists(SIZES, min_size=1, max_size=20))
def test_a_logarithmic_scale_holds_all_its_values(values):
    scale = logarithmic(values, 0, 100)
    for value in values:
        assert 0 < scale(value) < 100
    ticks = log_ticks(scale)
    assert len(ticks) <= 7
    assert all(-1e-6 <= scale(tick) <= 100 + 1e-6 for tick in ticks)


def test_ticks_are_round():
    assert linear_ticks(linear([930.0], 0, 1)) == [0, 200, 400, 600, 800, 1000]
    assert log_ticks(Scale(0.8, 60, 0, 1, log=True)) == pytest.approx([1, 2, 5, 10, 20, 50])
