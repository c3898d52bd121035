"""Starting processes as a user does."""

import contextlib
import os
import signal
import subprocess
import sys
import time


def environment(**more):
    """The environment of a process that finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def heed_interrupts():
    """For ``preexec_fn``: a shell lets its background jobs ignore Ctrl-C, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(ready, timeout_s=60):
    """Wait until ``ready()`` holds."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"not ready after {timeout_s} s"
        time.sleep(0.02)


def interrupt_when(ready, *arguments, timeout_s=60):
    """Run Python, send Ctrl-C to its group of processes once ``ready()`` holds, and wait for its end.

    Nothing is left running where it does not end: later tests would suffer from it.
    """
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as process:
        try:
            wait_for(lambda: ready() or process.poll() is not None, timeout_s)
            with contextlib.suppress(ProcessLookupError):  # it was over already: the exit code tells
                os.killpg(process.pid, signal.SIGINT)
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
