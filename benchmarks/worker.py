"""A process that does one piece of work after the other and may die of it."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class WorkFailedError(Exception):
    """A piece of work failed, took too long, or took its process with it; the text says which."""


class Worker:
    """Calls ``function`` in a process of its own, made when it is first needed and anew after every failure.

    Anew, because an error on a GPU may leave all later work of the same process failing.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        """Nothing is started yet; ``function`` has to be importable in another process."""
        self._function = function
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def ask(self, work: Any, timeout_s: float) -> Any:  # noqa: ANN401
        """What ``function(work)`` returns.

        Raises:
            WorkFailedError: it raised, its process ended, or it took longer than ``timeout_s``.
        """
        connection = self._connected()
        try:
            connection.send(work)
            if not connection.poll(timeout_s):
                raise WorkFailedError(f"gave no answer within {timeout_s:.0f} s")
            kind, answer = connection.recv()
        except (EOFError, OSError) as error:
            code = self._end()
            raise WorkFailedError(f"its process ended with code {code}") from error
        except BaseException:
            self._end()
            raise
        if kind == "failed":
            self._end()
            raise WorkFailedError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        self._end()

    def _connected(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._function), daemon=True)
            self._process.start()
            theirs.close()
        return self._connection

    def _end(self) -> int | None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.join(timeout=1)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            work = connection.recv()
        except EOFError:
            return
        try:
            answer = ("done", function(work))
        except Exception as error:  # whatever it is, it belongs into the results
            last = traceback.extract_tb(error.__traceback__)[-1]
            answer = ("failed", f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})")
        connection.send(answer)
