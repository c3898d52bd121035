"""Ctrl-C that does not get lost, and SIGTERM, which is answered in the same way.

Python raises KeyboardInterrupt wherever the program happens to be. Two of those places lose it:

* a weak reference's callback or a ``__del__``: the exception is printed and dropped, and the program goes on;
* importlib, between the taking of an import lock and its release: every other thread then waits for ever to import.
  And extension modules that are being imported may not expect any exception.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_told = False
_is_put_off = False
# Long enough to leave the place where the interrupt would be lost, too short to be felt.
_AGAIN_S = 0.01


def tell() -> None:
    """Say on stderr that the command was interrupted."""
    global _told  # noqa: PLW0603 - of the process, as stderr is
    _told = True
    sys.stderr.write("error: interrupted\n")


def was_told() -> bool:
    """Whether `tell` was called in this process."""
    return _told


def raise_on_interrupt() -> None:
    """Raise KeyboardInterrupt in the main thread on Ctrl-C, and on SIGTERM; again where that was dropped."""
    # Whoever starts a program may have it ignore either: a shell does so with Ctrl-C for jobs in the background.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is usual:
            signal.signal(number, _interrupt)
            _raise_again_where_dropped()


def raise_what_was_put_off() -> None:
    """Raise KeyboardInterrupt now where one waits to be raised again: what follows may be over before it is."""
    if _is_put_off:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _raise()


def raise_on_termination() -> None:
    """Raise KeyboardInterrupt on the first SIGTERM, and write nothing on stderr any more: nobody waits for it.

    The same in a process of multiprocessing whose parent is gone.
    """
    signal.signal(signal.SIGTERM, _terminate)
    _raise_again_where_dropped()
    import multiprocessing  # noqa: PLC0415 - it takes a while, and most commands have no use of it

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    from multiprocessing.connection import wait  # noqa: PLC0415

    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _raise_again_where_dropped() -> None:
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _interrupt)
        sys.unraisablehook = _not_dropped
        # At the very end nobody would answer the alarm.
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


def _interrupt(_signum: int, frame: FrameType | None) -> None:
    if _is_importing(frame) and hasattr(signal, "setitimer"):
        _again()
    else:
        _raise()


def _raise() -> NoReturn:
    global _is_put_off  # noqa: PLW0603 - of the process, as signals are
    _is_put_off = False
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


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
    global _is_put_off  # noqa: PLW0603
    _is_put_off = True
    # Not a thread: starting one takes locks that the interrupted code may hold.
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
