"""Figures that nothing has are refused, so that what is made of them stays finite."""

from __future__ import annotations

import pytest

from onnx_sparseconv.errors import ReportError
from onnx_sparseconv.report.fields import Fields


@pytest.mark.parametrize("value", [1e299, -1.0, float("nan"), float("inf"), 10**299, "1", True])
def test_absurd_numbers_are_told(value):
    with pytest.raises(ReportError, match=r"here: 'rate' must be a number, not below zero"):
        Fields({"rate": value}, "here").positive("rate")


@pytest.mark.parametrize("value", [0, 1e-320, None])
def test_next_to_nothing_is_nothing(value):
    assert Fields({"rate": value}, "here").positive("rate") is None
    assert Fields({"rate": 2.5}, "here").positive("rate") == 2.5


def test_absurd_sizes_are_told():
    with pytest.raises(ReportError, match="'shape' must be a list of sizes"):
        Fields({"shape": [10**299] * 4}, "here").shape("shape")
    assert Fields({"shape": [2, None]}, "here").shape("shape") == (2, None)
