"""Several models, one after the other or in parallel processes; what goes wrong with one leaves the others alone."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_tracker
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from onnx_sparseconv.cli import interrupts
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.failures import OUT_OF_MEMORY, exit_code_of, print_error, stdout_kept_clean
from onnx_sparseconv.errors import SparseConvError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome(Generic[Item, Result]):
    """What became of one item.

    Attributes:
        item: what was worked on.
        result: what the work gave; None when it failed.
        code: exit code of a failure.
        error: one line; empty when nothing went wrong.
        traceback: where a bug showed; empty for errors that a user can mend.
    """

    item: Item
    result: Result | None = None
    code: ExitCode = ExitCode.DONE
    error: str = ""
    traceback: str = ""


def print_outcome_error(outcome: Outcome[Any, Any]) -> None:
    """Write what went wrong with one of several models on stderr, and the traceback when it is a bug."""
    if outcome.traceback:
        sys.stderr.write(outcome.traceback)
    item = str(getattr(outcome.item, "model", outcome.item))
    print_error(outcome.error if item in outcome.error else f"{item}: {outcome.error}")


def run_all(task: Callable[[Item], Result], items: Sequence[Item], jobs: int = 1) -> Iterator[Outcome[Item, Result]]:
    """Run ``task`` on every item and give the outcomes in the order of the items.

    Args:
        task: with more than one job it runs in a process of its own for each item: it has to be a function of a module,
            and its item and result have to be picklable.
        items: what to work on.
        jobs: processes at a time; 1 works in this process.
    """
    if jobs <= 1 or len(items) <= 1:
        return (attempt(task, item) for item in items)
    return _run_in_processes(task, items, jobs)


def attempt(task: Callable[[Item], Result], item: Item) -> Outcome[Item, Result]:
    """Run ``task`` on an item; an exception becomes part of the outcome."""
    try:
        with stdout_kept_clean():
            return Outcome(item, task(item))
    except SparseConvError as error:
        return Outcome(item, None, exit_code_of(error), str(error))
    except MemoryError:
        return Outcome(item, None, ExitCode.ERROR, OUT_OF_MEMORY)
    except Exception as error:
        return Outcome(item, None, ExitCode.ERROR, f"{type(error).__name__}: {error}", traceback.format_exc())


def _run_in_processes(
    task: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[Outcome[Item, Result]]:
    """One process an item, so that one that dies (out of memory, say) takes nothing with it."""
    processes = _Processes()
    with ThreadPoolExecutor(max_workers=jobs, initializer=_leave_interrupts_to_the_main_thread) as pool:
        try:
            for future in [pool.submit(processes.run, task, item) for item in items]:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise


class _Processes:
    """Child processes that are at work."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        if hasattr(signal, "pthread_sigmask"):
            # multiprocessing's own helper process; the thread that starts it has its signals unblocked.
            multiprocessing.resource_tracker.ensure_running()
        self._alive: set[multiprocessing.process.BaseProcess] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, task: Callable[[Item], Result], item: Item) -> Outcome[Item, Result]:
        """Run one item in a process of its own and wait for it."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(sender, task, item), daemon=True)
        with self._lock:
            if self._stopped:
                return Outcome(item, None, ExitCode.ERROR, "interrupted")
            process.start()
            self._alive.add(process)
        sender.close()
        try:
            outcome: Outcome[Item, Result] = receiver.recv()
        except EOFError:
            process.join()
            outcome = Outcome(
                item, None, ExitCode.ERROR, f"its process died (exit code {process.exitcode}): out of memory?"
            )
        process.join()
        with self._lock:
            self._alive.discard(process)
        return outcome

    def stop(self) -> None:
        """Ask every child to clean up and end."""
        with self._lock:
            self._stopped = True
            for process in self._alive:
                process.terminate()


def _leave_interrupts_to_the_main_thread() -> None:
    """Block SIGINT in this thread and, from their first instruction on, in the processes that it starts.

    Ctrl-C reaches the whole group of processes; the parent alone answers it, and ends its children with SIGTERM.
    """
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _child(sender: Connection, task: Callable[[Item], Result], item: Item) -> None:
    """Body of a child process; SIGTERM makes it remove its temporary files and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where there are no masks of signals
    interrupts.raise_on_termination()
    try:
        sender.send(attempt(task, item))
    except KeyboardInterrupt:
        pass
    finally:
        sender.close()
