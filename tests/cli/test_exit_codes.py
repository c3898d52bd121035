from __future__ import annotations

import itertools

import pytest

from onnx_sparseconv.cli.exit_codes import ExitCode, worst
from onnx_sparseconv.cli.failures import exit_code_of
from onnx_sparseconv.errors import ModelError, ProviderError, SparseConvError, UsageError


def test_the_codes_are_the_published_ones():
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "ERROR": 1,
        "USAGE": 2,
        "OUTPUTS_DIFFER": 3,
        "NOTHING_QUALIFIED": 4,
        "PROVIDER_NOT_USED": 5,
        "CONFLICTING_INSTALLATION": 6,
        "NO_GAIN": 7,
    }


def test_the_worst_counts_in_the_published_order():
    order = [1, 6, 5, 3, 7, 4, 0]
    for a, b in itertools.combinations(range(len(order)), 2):
        assert worst([ExitCode(order[b]), ExitCode(order[a])]) == order[a]
    assert worst([]) == 0


@pytest.mark.parametrize(
    ("error", "code"), [(ModelError(), 1), (SparseConvError(), 1), (UsageError(), 2), (ProviderError(), 5)]
)
def test_errors_have_their_codes(error, code):
    assert exit_code_of(error) == code
