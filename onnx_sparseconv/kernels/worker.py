"""Python processes that run functions for this one, several at a time.

Each is a fresh interpreter, as with multiprocessing's *spawn*, but without its three rules: the program's main module
is not run again, so a script needs no ``if __name__ == "__main__"``; a daemon may have workers; and a process that
dies ends only the call that it was at. What comes back is pickled: the pipes lead to no one else.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import IO, Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_GRACE_S = 5.0


class WorkerDiedError(Exception):
    """A process ended in the middle of a call."""

    def __init__(self, item: Any, status: int) -> None:  # noqa: ANN401
        died = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        super().__init__(f"its process died ({died})")
        self.item = item


def usable_cores() -> int:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_workers(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Generator[tuple[int, Result], None, None]:
    """Run ``function`` on every item and give index and result of each as it is done.

    When a call raises, or the caller stops (Ctrl-C, say), no further one begins and all processes are ended at once.

    Args:
        function: of a module; it, the items and the results have to be picklable.
        items: what to work on; they begin in this order.
        jobs: processes at a time.

    Raises:
        WorkerDiedError: a process died; it carries the item.
    """
    workers = _Workers()
    with ThreadPoolExecutor(max_workers=max(1, min(jobs, len(items)))) as threads:
        try:
            futures = {threads.submit(workers.call, function, item): index for index, item in enumerate(items)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            workers.stop()


class _Workers:
    """The processes; each thread that calls takes an idle one, or starts one."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._stopped = False

    def call(self, function: Callable[[Item], Result], item: Item) -> Result:
        with self._lock:
            if self._stopped:
                raise InterruptedError
            worker = self._idle.pop() if self._idle else _Worker()
            if worker not in self._all:
                self._all.append(worker)
        result: Result = worker.call(function, item)
        with self._lock:
            self._idle.append(worker)
        return result

    def stop(self) -> None:
        """End all of them, in the middle of their work if need be. Files that they write appear whole or not."""
        with self._lock:
            self._stopped = True
            workers = list(self._all)
        for worker in workers:
            worker.kill()


class _Worker:
    """One process."""

    def __init__(self) -> None:
        paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - also of "", the current directory
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "onnx_sparseconv.kernels.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            # Ctrl-C on a terminal reaches the whole group: the parent alone answers it.
            start_new_session=True,
        )

    def call(self, function: Callable[[Item], Result], item: Item) -> Result:
        """Run the function there.

        Raises:
            WorkerDiedError: the process died. Any exception of the function is raised here, with its traceback as a
                note.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = pickle.dumps((function, item))
        try:
            self._process.stdin.write(task)
            self._process.stdin.flush()
            done, value, trace = pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise WorkerDiedError(item, self._end()) from error
        if done:
            result: Result = value
            return result
        if trace:
            value.add_note(f"In a worker process:\n{trace}")
        raise value

    def _end(self) -> int:
        """Wait for a process that is no use any more; its exit status."""
        try:
            return self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()


def serve(tasks: IO[bytes], answers: IO[bytes]) -> None:
    """Body of a worker: read calls, make them, write what they gave, until there are no more."""
    while True:
        try:
            function, item = pickle.load(tasks)
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, function(item), ""))
        except Exception as error:
            answer = _pickled_error(error, traceback.format_exc())
        try:
            answers.write(answer)
            answers.flush()
        except BrokenPipeError:  # who asked is gone
            return


def _pickled_error(error: Exception, trace: str) -> bytes:
    try:
        data = pickle.dumps((False, error, trace))
        pickle.loads(data)
    except Exception:  # an exception can refuse either in any way
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return data


def main() -> None:
    """Entry point of the processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print goes to stderr; the real stdout carries the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
