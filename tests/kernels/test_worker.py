from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels.worker import WorkerDiedError, run_in_workers
from tests.kernels import worker_tasks
from tests.support.processes import heed_interrupts


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


def _wait_for_marks(directory: Path, number: int):
    deadline = time.monotonic() + 20
    while len(list(directory.glob("*.alive"))) < number and time.monotonic() < deadline:
        time.sleep(0.02)
    ids = [int(path.stem) for path in directory.glob("*.alive")]
    assert len(ids) == number
    return ids


def test_a_script_without_guard_can_use_workers_and_ctrl_c_ends_them(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from onnx_sparseconv.kernels.worker import run_in_workers\n"
        "from tests.kernels import worker_tasks\n"
        f"list(run_in_workers(worker_tasks.sleep_long, [{str(tmp_path)!r}] * 3, jobs=2))\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    ids = _wait_for_marks(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert b"KeyboardInterrupt" in stderr
    assert not any(map(_is_alive, ids))
    assert len(list(tmp_path.glob("*.alive"))) == 2  # the third call never began


def test_a_failure_ends_the_work_of_the_others(tmp_path):
    started = time.monotonic()
    with (
        closing(run_in_workers(worker_tasks.sleep_long_or_fail, [str(tmp_path), None], jobs=2)) as results,
        pytest.raises(CompileError),
    ):
        next(results)
    assert time.monotonic() - started < 20
