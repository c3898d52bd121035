from __future__ import annotations

import os

import pytest

from tests.benchmarks.work import do


@pytest.fixture
def worker():
    from worker import Worker

    made = Worker(do)
    yield made
    made.close()


def test_one_process_does_one_piece_of_work_after_the_other(worker):
    (first, a), (second, b) = worker.ask(("echo", "a"), 60), worker.ask(("echo", "b"), 60)
    assert first == second != os.getpid()
    assert (a, b) == ("a", "b")


def test_after_a_failure_of_any_kind_a_new_process_goes_on(worker):
    from worker import WorkFailedError

    process, _ = worker.ask(("echo", 0), 60)
    for work, timeout, words in (
        (("raise", "no luck"), 60, r"ValueError: no luck \(do, line \d+\)"),
        (("die", 7), 60, "its process ended with code 7"),
        (("sleep", 600), 0.2, "no answer within 0 s"),
    ):
        with pytest.raises(WorkFailedError, match=words):
            worker.ask(work, timeout)
        after, _ = worker.ask(("echo", 0), 60)
        assert after != process
        process = after
