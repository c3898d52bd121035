from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from onnx_sparseconv.cli.batch import run_all
from tests.cli import tasks
from tests.support.processes import heed_interrupts


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


def test_an_interrupt_ends_the_children_and_lets_them_tidy_up(tmp_path):
    script = (
        "from onnx_sparseconv.cli.batch import run_all\n"
        "from tests.cli import tasks\n"
        "if __name__ == '__main__':\n"
        f"    list(run_all(tasks.leave_a_mark, [{str(tmp_path)!r}] * 3, jobs=2))\n"
    )
    path = tmp_path / "main.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(path)],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("*.tmp"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(list(tmp_path.glob("*.tmp"))) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert b"KeyboardInterrupt" in stderr
    assert list(tmp_path.glob("*.tmp")) == []
