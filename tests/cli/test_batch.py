from __future__ import annotations

import pytest

from onnx_sparseconv.cli.batch import run_all
from tests.cli import tasks


@pytest.mark.parametrize("jobs", [1, 3])
def test_outcomes_come_in_the_order_of_the_items(jobs):
    assert [outcome.result for outcome in run_all(tasks.double, [1, 2, 3, 4], jobs)] == [2, 4, 6, 8]


@pytest.mark.parametrize("jobs", [1, 2])
def test_one_bad_item_does_not_stop_the_others(jobs, capfd):
    items = ["mendable", "bug", "memory", "fine"] + (["crash", "fine"] if jobs > 1 else [])
    outcomes = list(run_all(tasks.misbehave, items, jobs))
    mendable, bug, memory, fine = outcomes[:4]
    assert (mendable.error, mendable.traceback, mendable.code) == ("bad file", "", 1)
    assert bug.error == "ZeroDivisionError: oops"
    assert "Traceback" in bug.traceback
    assert "memory" in memory.error
    assert fine.result == "fine"
    if jobs > 1:
        assert "its process died (exit code 9)" in outcomes[4].error
        assert outcomes[5].result == "fine"
    assert capfd.readouterr().out == ""
