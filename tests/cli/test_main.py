from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from onnx_sparseconv import __version__
from onnx_sparseconv.cli import failures
from onnx_sparseconv.converter.model_io import load
from onnx_sparseconv.errors import ModelError
from tests.runtime import networks
from tests.support.processes import environment, interrupt_when

COMMANDS = ("inspect", "prune", "tune", "convert", "report", "verify", "run", "bench", "restore", "doctor")


def _process(*arguments, **options):
    command = [sys.executable, "-W", "error", "-m", "onnx_sparseconv", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, **options)


def _on_a_terminal(columns, *arguments):
    """Run with stdout and stderr on a pseudo-terminal; gives exit code and text."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "onnx_sparseconv", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=environment(COLUMNS=str(columns), TERM="xterm")
    ) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break
            if not piece:
                break
            text += piece
        os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    script = (
        "import sys\n"
        "from onnx_sparseconv.cli import main\n"
        f"sys.argv = ['sparseconv', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'onnx', 'onnxruntime', 'cupy', 'onnx_graphsurgeon', 'numpy'} & sys.modules.keys()\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_names_every_command_and_the_exit_codes(sparseconv):
    result = sparseconv("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", result.stdout)
    assert "nothing qualified" in result.stdout


def test_the_version(sparseconv):
    assert sparseconv("--version").stdout == f"sparseconv {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["inspect"],
        ["convert", "m.onnx", "-o", "o.onnx", "--jobs", "0"],
        ["convert", "m.onnx", "-o", "o.onnx", "--min-sparsity", "1.5"],
        ["convert", "m.onnx", "-o", "o.onnx", "--min-sparsity", "nan"],
        ["prune", "m.onnx", "-o", "o.onnx"],
        ["prune", "m.onnx", "-o", "o.onnx", "--sparsity", "0.5", "--scope", "everything"],
        ["verify", "a.onnx", "b.onnx", "--provider", "tpu"],
        ["run", "m.onnx"],
        ["bench", "a.onnx", "b.onnx", "--threads", "0"],
    ],
)
def test_usage_errors_end_with_2(sparseconv, arguments):
    result = sparseconv(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["tune", "m.onnx", "-o", "d.json"],
        ["convert", "m.onnx", "-o", "o.onnx", "--tune"],
        ["verify", "m.onnx", "m.onnx"],
        ["run", "m.onnx", "--inputs", "x.npz", "-o", "y.npz"],
        ["bench", "m.onnx", "m.onnx"],
    ],
)
def test_too_many_threads_are_one_line(sparseconv, command):
    result = sparseconv(*command, "--threads", 20000)
    assert result.exit_code == 2
    assert re.fullmatch(r"error: threads must be at most \d+ on this machine, got 20000\n", result.stderr)


def test_a_file_that_is_missing_is_one_line_without_a_traceback():
    for arguments in (
        ["inspect", "absent.onnx"],
        ["verify", "absent.onnx", "absent.onnx"],
        ["restore", "a.onnx", "-o", "b"],
    ):
        done = _process(*arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert re.fullmatch(r"error: .*\n", done.stderr), done.stderr


def _app_of(function):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(failures.command(function))
    return app


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ModelError("a\nb"), 1, "error: a b\n"),
        (MemoryError(), 1, "error: not enough memory for this model\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_errors_that_are_no_bugs_are_one_line(error, code, line):
    from typer.testing import CliRunner

    def fail():
        raise error

    result = CliRunner().invoke(_app_of(fail), [])
    assert (result.exit_code, result.stderr) == (code, line)


def test_ctrl_c_within_a_cleanup_is_no_broken_file():
    from typer.testing import CliRunner

    def fail():
        try:
            try:
                raise KeyboardInterrupt
            finally:
                raise OSError("Bad file descriptor")
        except OSError as error:
            raise ModelError("out.onnx: cannot be written: Bad file descriptor") from error

    result = CliRunner().invoke(_app_of(fail), [])
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


def test_a_bug_shows_its_traceback(model, monkeypatch, sparseconv):
    def fail(_path):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("onnx_sparseconv.converter.restore", lambda *_: fail(0))
    with pytest.raises(ZeroDivisionError):
        sparseconv("restore", model, "-o", "x.onnx")
    # Among several models it must not stop the others, so there it is printed.
    monkeypatch.setattr("onnx_sparseconv.converter.inspect", fail)
    result = sparseconv("inspect", model, model)
    assert result.exit_code == 1
    assert result.stderr.count("Traceback") == 2


def test_a_reader_that_goes_away_is_no_error(model):
    command = f"{sys.executable} -m onnx_sparseconv inspect {' '.join([str(model)] * 20)} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_streams_that_are_closed_are_no_error(model, tmp_path):
    """As some service managers start programs; and no file that is written takes their place."""
    command = [
        sys.executable,
        "-m",
        "onnx_sparseconv",
        "convert",
        str(model),
        "-o",
        str(tmp_path / "out.onnx"),
        "--force",
    ]
    closed = f"exec {' '.join(map(shlex.quote, command))} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", closed], env=environment(), check=False)
    assert done.returncode == 0
    assert load(tmp_path / "out.onnx").proto.functions


def test_a_name_that_is_no_text_is_one_line(model):
    """Neither onnx nor ONNX Runtime can open such a file."""
    odd = model.with_name(os.fsdecode(b"odd\xff.onnx"))
    odd.write_bytes(model.read_bytes())
    for arguments in (("inspect", odd), ("convert", model, "-o", odd), ("bench", odd, odd)):
        done = _process(*arguments)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "its name is not UTF-8" in done.stderr


@pytest.mark.parametrize("arguments", [("--version",), ("doctor",), ("inspect",), ("inspect", "--json")])
def test_a_full_disk_behind_stdout_is_one_line(model, arguments):
    command = [sys.executable, "-m", "onnx_sparseconv", *arguments]
    command += [str(model)] * (arguments[0] == "inspect")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_leaves_nothing_behind(tmp_path, jobs):
    layer_weights = networks.weights(channels=512, layers=4, sparsity=0.95)
    models = [networks.save(networks.dense(layer_weights), tmp_path / f"m{i}.onnx") for i in range(4)]
    out = tmp_path / "out"
    done = interrupt_when(out.exists, "-m", "onnx_sparseconv", "convert", *models, "--out-dir", out, "--jobs", jobs)
    assert done.stderr == "error: interrupted\n"
    # Python ends itself with SIGINT, which a shell calls 130 as well, when the signal came within a nested exec().
    assert done.returncode in (130, -signal.SIGINT)
    assert not out.exists() or all(path.suffix == ".onnx" for path in out.iterdir())


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_fit_a_terminal(tmp_path, columns):
    model = networks.dense(networks.weights(channels=32, sparsity=0.95))
    for node in model.graph.node:
        node.name = f"a_module_with_a_long_name/block_{node.name}/" + "inner_module/" * 5 + node.op_type
    path = networks.save(model, tmp_path / "m.onnx")
    out = tmp_path / "s.onnx"
    for arguments in (
        ["inspect", path],
        ["convert", path, "-o", out],
        ["verify", path, out],
        ["bench", path, out, "--seconds", "0"],
        ["doctor"],
    ):
        code, text = _on_a_terminal(columns, *arguments)
        assert code == 0, text
        lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").splitlines()]
        # Command lines and paths are not broken, so that they can be copied.
        too_long = [
            line for line in lines if len(line) > columns and "sparseconv" not in line and str(tmp_path) not in line
        ]
        assert not too_long, too_long
        assert arguments[0] != "verify" or "ok " in text


def test_a_pipe_gets_whole_names(tmp_path):
    model = networks.dense(networks.weights(channels=32, sparsity=0.95))
    name = "a_module_with_a_long_name/" * 10 + "conv"
    model.graph.node[0].name = name
    path = networks.save(model, tmp_path / "m.onnx")
    for arguments in (
        ["inspect", path],
        ["convert", path, "-o", tmp_path / "s.onnx"],
        ["bench", path, path, "--seconds", "0"],
    ):
        done = _process(*arguments)
        assert done.returncode == 0
        assert name in done.stdout
        assert "\x1b" not in done.stdout
        assert done.stderr == ""
