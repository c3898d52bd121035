"""Ctrl-C that does not get lost.

Python raises KeyboardInterrupt wherever the program happens to be. Two of those places lose it:

* a weak reference's callback or a ``__del__``: the exception is printed and dropped, and the program goes on;
* importlib, between the taking of an import lock and its release: every other thread then waits for ever to import.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

# Long enough to leave the place where the interrupt would be lost, too short to be felt.
_AGAIN_S = 0.01


def raise_on_interrupt() -> None:
    """Raise KeyboardInterrupt in the main thread on Ctrl-C; again where that was dropped."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell lets background jobs ignore it
        signal.signal(signal.SIGINT, _interrupt)
        _raise_again_where_dropped()


def raise_on_termination() -> None:
    """Raise KeyboardInterrupt on the first SIGTERM, and write nothing on stderr any more: nobody waits for it."""
    signal.signal(signal.SIGTERM, _terminate)
    _raise_again_where_dropped()


def _raise_again_where_dropped() -> None:
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _interrupt)
        sys.unraisablehook = _not_dropped
        # At the very end nobody would answer the alarm.
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


def _interrupt(_signum: int, frame: FrameType | None) -> None:
    in_importlib = frame is not None and frame.f_code.co_filename.startswith("<frozen importlib")
    if in_importlib and hasattr(signal, "setitimer"):
        _again()
    else:
        raise KeyboardInterrupt


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _interrupt(signum, frame)


def _not_dropped(unraisable: sys.UnraisableHookArgs) -> None:
    if unraisable.exc_type is KeyboardInterrupt:
        _again()
    else:
        sys.__unraisablehook__(unraisable)


def _again() -> None:
    # Not a thread: starting one takes locks that the interrupted code may hold.
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
