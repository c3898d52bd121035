"""Ctrl-C at the moments in which Python would lose it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.exit_codes import INTERRUPTED
from tests.support.processes import environment, heed_interrupts, interrupt_when, wait_for

START = """
import os, signal, sys, time
from onnx_sparseconv.cli import interrupts
def wait():
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.01)
    print("went on")
"""
IN_A_FINALIZER = """
class Object:
    def __del__(self):
        signal.raise_signal(signal.{name})
        sum(range(10))
Object()
"""
# In the file that holds importlib's locks; `done` tells that it was not left before their release.
IN_IMPORTLIB = """
done = []
code = "signal.raise_signal(signal.{name}); sum(range(10)); done.append(1)"
exec(compile(code, "<frozen importlib._bootstrap>", "exec"))
"""


def _run(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=heed_interrupts,
    )


@pytest.mark.parametrize("place", [IN_A_FINALIZER, IN_IMPORTLIB])
def test_an_interrupt_is_never_lost(place):
    code = f"""
interrupts.raise_on_interrupt()
try:
    exec({place.format(name="SIGINT")!r})
    wait()
except KeyboardInterrupt:
    print("ended", globals().get("done"))
"""
    done = _run(START + code)
    assert done.stdout == f"ended {[1] if place is IN_IMPORTLIB else None}\n"
    assert done.stderr == ""


@pytest.mark.parametrize("place", [IN_A_FINALIZER, IN_IMPORTLIB])
def test_a_process_that_is_told_to_end_does_so_without_a_word(place):
    done = _run(START + "interrupts.raise_on_termination()\n" + place.format(name="SIGTERM") + "wait()")
    assert done.returncode in (1, 130, -signal.SIGINT)
    assert "went on" not in done.stdout
    assert done.stderr == ""


def test_being_told_to_end_is_an_interrupt():
    """As ``timeout`` and ``docker stop`` do; unless the caller has it ignored."""
    code = "interrupts.raise_on_interrupt()\ntry:\n    signal.raise_signal(signal.SIGTERM)\n    wait()\n"
    code += "except KeyboardInterrupt:\n    print('ended')\n"
    assert _run(START + code).stdout == "ended\n"
    ignored = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ninterrupts.raise_on_interrupt()\n"
    assert _run(START + ignored + "signal.raise_signal(signal.SIGTERM)\nprint('went on')").stdout == "went on\n"


def test_other_errors_of_finalizers_are_still_told():
    code = "interrupts.raise_on_interrupt()\nclass Object:\n    def __del__(self):\n        1 / 0\nObject()\n"
    assert "ZeroDivisionError" in _run(START + code).stderr


def test_an_interrupt_that_the_caller_ignores_stays_ignored():
    code = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\ninterrupts.raise_on_interrupt()\n"
        "signal.raise_signal(signal.SIGINT)\nprint('went on')"
    )
    assert _run(START + code).stdout == "went on\n"


def test_ctrl_c_never_reaches_the_children_of_a_batch(tmp_path):
    """The first of them neither, with which multiprocessing starts a helper of its own: so in a process of its own."""
    script = tmp_path / "main.py"
    script.write_text(
        "import signal\n"
        "from onnx_sparseconv.cli.batch import run_all\n"
        "from tests.cli import tasks\n"
        "if __name__ == '__main__':\n"
        "    print([outcome.result for outcome in run_all(tasks.blocks_interrupts, [0, 1, 2], jobs=2)])\n"
        "    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[True, True, True]\nFalse\n"


@pytest.fixture
def marking_script(tmp_path):
    """A program whose children each leave a mark in its folder while they work."""
    script = tmp_path / "main.py"
    script.write_text(
        "from onnx_sparseconv.cli.batch import run_all\n"
        "from tests.cli import tasks\n"
        "if __name__ == '__main__':\n"
        f"    list(run_all(tasks.leave_a_mark, [{str(tmp_path)!r}] * 3, jobs=2))\n"
    )
    return script


def test_an_interrupt_ends_the_children_and_lets_them_tidy_up(tmp_path, marking_script):
    done = interrupt_when(lambda: len(list(tmp_path.glob("*.tmp"))) == 2, marking_script)
    assert "KeyboardInterrupt" in done.stderr
    assert list(tmp_path.glob("*.tmp")) == []


def test_children_whose_parent_was_killed_tidy_up_and_end(tmp_path, marking_script):
    with subprocess.Popen([sys.executable, marking_script], env=environment()) as process:
        wait_for(lambda: len(list(tmp_path.glob("*.tmp"))) == 2)
        process.kill()
    wait_for(lambda: not list(tmp_path.glob("*.tmp")))


def test_an_interrupt_that_typer_answers_itself_is_told():
    """It ends without a word where Ctrl-C comes before the command has begun, or behind it."""
    code = """
from onnx_sparseconv.cli import app, main
def interrupted(*_arguments, **_options):
    raise {}
app.app = interrupted
main()
"""
    for error in ("KeyboardInterrupt", "SystemExit(130)"):
        done = _run(START + code.format(error))
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
    done = _run(START + code.format("SystemExit(5)"))
    assert (done.returncode, done.stderr) == (5, "")


def test_while_the_commands_are_imported_an_interrupt_is_one_line():
    code = """
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
interrupts._AGAIN_S = 60  # the command is over before
from onnx_sparseconv.cli import main
main()
"""
    done = _run(START + code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_what_an_interrupt_breaks_is_one_too(capsys):
    """A lock that is waited for is released once more where the wait was interrupted: that is another error."""

    def function():
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    with pytest.raises(typer.Exit) as end:
        failures.command(function)()
    assert end.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"


def test_other_errors_of_locks_show_their_traceback():
    with pytest.raises(RuntimeError):
        failures.command(lambda: threading.Lock().release())()
