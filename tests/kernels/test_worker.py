from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels.worker import WorkerDiedError, run_in_workers
from tests.kernels import worker_tasks
from tests.support.processes import interrupt_when


def test_results_come_as_they_are_done_and_noise_does_no_harm():
    done = list(run_in_workers(worker_tasks.double, [1, 2, 3], jobs=2))
    assert sorted(done) == [(0, 2), (1, 4), (2, 6)]
    assert done[-1] == (0, 2)


def test_processes_are_kept_from_one_call_to_the_next():
    ids = [result for _, result in run_in_workers(worker_tasks.process_id, range(5), jobs=1)]
    assert len(set(ids)) == 1
    assert ids[0] != os.getpid()
    assert list(run_in_workers(worker_tasks.process_id, [], jobs=4)) == []


def test_an_exception_comes_back():
    with pytest.raises(CompileError, match="no such kernel") as mendable:
        list(run_in_workers(worker_tasks.misbehave, ["mendable"], jobs=1))
    assert mendable.value.log == "the log"
    with pytest.raises(ZeroDivisionError, match="oops") as bug:
        list(run_in_workers(worker_tasks.misbehave, ["bug"], jobs=1))
    assert "in misbehave" in bug.value.__notes__[0]
    with pytest.raises(RuntimeError, match="LocalError: cannot be pickled"):
        list(run_in_workers(worker_tasks.misbehave, ["stubborn"], jobs=1))


@pytest.mark.parametrize(("item", "how"), [("crash", "exit code 9"), ("killed", "SIGKILL"), ("exit", "exit code 3")])
def test_a_process_that_dies_is_told_with_what_it_was_at(item, how):
    with pytest.raises(WorkerDiedError, match=how) as died:
        list(run_in_workers(worker_tasks.misbehave, ["fine", item], jobs=1))
    assert died.value.item == item


def _is_alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def _process_ids(directory: Path):
    return [int(path.stem) for path in directory.glob("*.alive")]


def test_a_script_without_guard_can_use_workers_and_ctrl_c_ends_them(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from onnx_sparseconv.kernels.worker import run_in_workers\n"
        "from tests.kernels import worker_tasks\n"
        f"list(run_in_workers(worker_tasks.sleep_long, [{str(tmp_path)!r}] * 3, jobs=2))\n"
    )
    done = interrupt_when(lambda: len(_process_ids(tmp_path)) == 2, script)
    assert "KeyboardInterrupt" in done.stderr
    assert len(_process_ids(tmp_path)) == 2  # the third call never began
    assert not any(map(_is_alive, _process_ids(tmp_path)))


def test_a_failure_ends_the_work_of_the_others(tmp_path):
    started = time.monotonic()
    with (
        closing(run_in_workers(worker_tasks.sleep_long_or_fail, [str(tmp_path), None], jobs=2)) as results,
        pytest.raises(CompileError),
    ):
        next(results)
    assert time.monotonic() - started < 20
