"""``sparseconv tune``, ``convert --tune`` and ``convert --decisions``."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import onnx
import pytest

from onnx_sparseconv.cli.tuning import decisions_table
from onnx_sparseconv.converter import read_decisions
from onnx_sparseconv.converter.decisions import Choice
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.kernels.cuda_driver import CudaDriver
from onnx_sparseconv.kernels.kernel_choice import KernelChoice
from onnx_sparseconv.runtime.verify import verify
from onnx_sparseconv.tuner import gpu_candidates, tuning
from tests.runtime import networks
from tests.support.processes import interrupt_when
from tests.tuner.fakes import FakeBench
from tests.tuner.plans import FAST


@pytest.fixture(autouse=True)
def _no_time_and_a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def stopwatch(monkeypatch):
    """Sparse layers win, single and as a whole, unless a test changes that."""
    bench = FakeBench(whole_us=lambda sparse: 300 - 50 * len(sparse))
    monkeypatch.setattr(tuning, "OrtBench", lambda *_, **__: bench)
    return bench


@pytest.mark.usefixtures("stopwatch")
def test_tune_writes_decisions_and_convert_follows_them(sparseconv, model, tmp_path):
    file, out = tmp_path / "d.json", tmp_path / "out.onnx"
    result = sparseconv("tune", model, "-o", file, "--threads", 1, "--batch", 2)
    assert result.exit_code == 0
    assert "2 timed now" in result.stdout
    assert "1.50x faster as a whole (300 us dense" in result.stdout
    assert f"sparseconv convert {model} -o model.sparse.onnx --decisions {file}" in result.stdout
    text = file.read_text()
    assert json.loads(text)["input_shapes"] == [{"x": [2, 32, 12, 12]}]
    file.write_text(text.replace('"choice": "sparse"', '"choice": "dense"', 1))
    result = sparseconv("convert", model, "-o", out, "--decisions", file, "--report", tmp_path / "r.json")
    assert result.exit_code == 0
    assert "decided dense, 1 layer: chosen by hand, though tuning chose sparse" in result.stdout
    ops = [n.op_type for n in onnx.load(str(out)).graph.node if "Conv" in n.op_type]
    assert ops == ["Conv", "SparseConv"]
    report = json.loads((tmp_path / "r.json").read_text())
    assert [la["verdict"]["reason"] for la in report["model"]["layers"]] == ["decided-dense", "decided-sparse"]
    assert report["decisions"]["whole_model"]["gain"] is True
    assert "2 known from before" in sparseconv("tune", model, "-o", file, "--threads", 1, "--batch", 2).stdout


def test_tune_for_real(sparseconv, model, tmp_path):
    out = tmp_path / "out.onnx"
    result = sparseconv("convert", model, "-o", out, "--tune", "--preset", "quick", "--threads", 1)
    assert result.exit_code in (0, 4)
    assert result.stderr == ""
    assert "whole model" in result.stdout
    assert out.exists() == (result.exit_code == 0)
    if out.exists():
        assert verify(model, out).passed


@pytest.mark.usefixtures("stopwatch")
def test_json_is_all_that_is_on_stdout(sparseconv, model, tmp_path):
    result = sparseconv("tune", model, "-o", tmp_path / "d.json", "--json")
    document = json.loads(result.stdout)
    assert (document["command"], document["gain"], document["num_measured"]) == ("tune", True, 2)
    assert document["whole"]["cases"][0]["dense_us"] == 300
    assert document["decisions"]["layers"][0]["candidates"][0]["times_us"] == [100.0]


def test_no_gain_is_exit_code_7_where_a_gain_is_required(sparseconv, stopwatch, model, tmp_path):
    stopwatch.whole_us = lambda sparse: 300 + len(sparse)
    out = tmp_path / "out.onnx"
    for arguments, code in (
        (["tune", model, "-o", tmp_path / "d.json"], 0),
        (["tune", model, "-o", tmp_path / "d.json", "--require-gain"], 7),
        (["convert", model, "-o", out, "--tune"], 4),
        (["convert", model, "-o", out, "--tune", "--require-gain"], 7),
    ):
        result = sparseconv(*arguments)
        assert result.exit_code == code, arguments
        assert "no gain as a whole" in result.stdout
    assert not out.exists()
    assert (tmp_path / "d.json").exists()


@pytest.mark.usefixtures("stopwatch")
def test_several_models_are_tuned_one_by_one(sparseconv, model, dense_model, tmp_path):
    result = sparseconv("convert", model, dense_model, "--out-dir", tmp_path / "out", "--tune", "--require-gain")
    assert result.exit_code == 7
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.onnx"]
    assert [line.split()[1] for line in result.stdout.splitlines()[-2:]] == ["converted", "nothing"]


@pytest.mark.usefixtures("stopwatch")
def test_decisions_that_do_not_fit_are_one_line(sparseconv, model, dense_model, tmp_path):
    file = tmp_path / "d.json"
    sparseconv("tune", model, "-o", file)
    result = sparseconv("convert", dense_model, "-o", tmp_path / "o.onnx", "--decisions", file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'conv0' has other weights" in result.stderr
    assert result.stderr.count("\n") == 1
    file.write_text("{")
    assert sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--decisions", file).exit_code == 1
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.usefixtures("stopwatch")
def test_decisions_of_another_machine_are_pointed_out(sparseconv, model, tmp_path):
    file = tmp_path / "d.json"
    sparseconv("tune", model, "-o", file)
    document = json.loads(file.read_text())
    document["setting"]["processor"] = "an abacus"
    file.write_text(json.dumps(document))
    result = sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--decisions", file)
    assert result.exit_code == 0
    assert "was measured elsewhere: processor an abacus, now" in result.stdout


def test_usage_errors(sparseconv, model, dense_model, tmp_path):
    out = ["-o", tmp_path / "o.onnx"]
    before = model.read_bytes()
    for arguments in (
        ["tune", model],
        ["tune", model, "-o", model],
        ["tune", model, "-o", tmp_path / "d.json", "--database", model],
        ["tune", model, "-o", tmp_path / "d.json", "--database", tmp_path / "d.json"],
        ["tune", model, "-o", tmp_path / "d.json", "--preset", "slow"],
        ["tune", model, "-o", tmp_path / "d.json", "--shape", "x"],
        ["tune", model, "-o", tmp_path / "d.json", "--shape", "y:1x2"],
        ["tune", model, "-o", tmp_path / "d.json", "--batch", "0"],
        ["tune", model, "-o", tmp_path / "d.json", "--budget", "-1"],
        ["tune", model, "-o", tmp_path / "absent" / "d.json"],
        ["convert", model, *out, "--tune", "--database", model],
        ["convert", model, *out, "--tune", "--database", tmp_path / "o.onnx"],
        ["convert", model, *out, "--tune", "--force"],
        ["convert", model, *out, "--tune", "--decisions", "d.json"],
        ["convert", model, *out, "--decisions", "d.json", "--min-sparsity", "0.5"],
        ["convert", model, *out, "--preset", "quick"],
        ["convert", model, *out, "--batch", "2"],
        ["convert", model, *out, "--require-gain"],
        ["convert", model, *out, "--cuda-graph"],
        ["convert", model, *out, "--tune", "--cuda-graph"],
        ["convert", model, *out, "--tune", "--fp16-io"],
        ["convert", model, dense_model, "--out-dir", tmp_path / "out", "--decisions", "d.json"],
    ):
        result = sparseconv(*arguments)
        assert result.exit_code == 2, (arguments, result.stdout, result.stderr)
    assert model.read_bytes() == before
    assert not (tmp_path / "o.onnx").exists()


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    layer_weights = networks.weights(channels=64, layers=24, sparsity=0.5)
    for number, weight in enumerate(layer_weights):
        weight[number] = 0  # no two alike
    path = networks.save(networks.dense(layer_weights, size=28), tmp_path / "m.onnx")
    database, out = tmp_path / "db.jsonl", tmp_path / "d.json"
    done = interrupt_when(
        lambda: database.exists() and database.stat().st_size,
        *("-m", "onnx_sparseconv", "tune", path, "-o", out, "--database", database),
    )
    assert done.stderr == "error: interrupted\n", f"exit code {done.returncode}"
    assert done.returncode in (130, -signal.SIGINT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["db.jsonl", "m.onnx"]
    lines = [json.loads(line) for line in database.read_text().splitlines()]
    assert 0 < len(lines) < 24


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--target sm_90", (2, "a target to time needs the provider cuda")),
        ("--cuda-graph", (2, "a CUDA graph to time needs the provider cuda")),
        ("--provider cuda --target native", (5, "target native: there is no GPU to time it on: nobody home")),
        ("--provider cuda --target sm_90", (5, "target sm_90: there is no GPU to time it on: nobody home")),
    ],
)
def test_what_cannot_be_timed_is_one_line(sparseconv, model, monkeypatch, options, expected):
    code, told = expected
    file = model.with_suffix(".json")
    monkeypatch.setattr(gpu_candidates, "read_cuda_driver", lambda: CudaDriver("", "", (), "nobody home"))
    result = sparseconv("tune", model, "-o", file, *options.split())
    assert result.exit_code == code
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert not file.exists()


def test_a_model_can_be_tuned_for_float16(sparseconv, model, tmp_path):
    file, out = tmp_path / "d.json", tmp_path / "out.onnx"
    result = sparseconv("tune", model, "-o", file, "--preset", "quick", "--threads", 1, "--precision", "fp16")
    assert result.exit_code == 0, result.stderr
    document = json.loads(file.read_text())
    assert document["setting"]["precision"] == "fp16"
    if any(layer["choice"] == "sparse" for layer in document["layers"]):
        assert "--precision fp16" in result.stdout
    result = sparseconv("convert", model, "-o", out, "--decisions", file, "--precision", "fp16")
    assert result.exit_code == 0, result.stderr
    assert verify(model, out).passed


def test_convert_tunes_the_model_that_it_makes(sparseconv, model, tmp_path, monkeypatch):
    asked = []

    def note(_, options, **__):
        asked.append(options)
        raise UsageError("enough")

    monkeypatch.setattr("onnx_sparseconv.tuner.tune", note)
    monkeypatch.setattr("onnx_sparseconv.cli.commands.convert._resolve", lambda names, _: tuple(names))
    common = ["convert", model, "-o", tmp_path / "o.onnx", "--tune", "--target", "sm_90", "--precision", "fp16"]
    more = ["--provider", "cuda", "--cuda-graph", "--fp16-io", "--keep-float", "Softmax", "--jobs", 3, "--nvrtc", "12"]
    assert sparseconv(*common, *more).exit_code == 2
    assert sparseconv(*common).exit_code == 2
    on_gpu, on_cpu = asked
    assert (on_gpu.targets, on_gpu.cuda_graph, on_gpu.jobs, on_gpu.nvrtc) == (("sm_90",), True, 3, "12")
    assert (on_gpu.precision, on_gpu.fp16_io, on_gpu.keep_float) == ("fp16", True, ("Softmax",))
    assert (on_cpu.provider, on_cpu.targets, on_cpu.precision) == ("cpu", (), "fp16")


@pytest.mark.usefixtures("stopwatch")
def test_the_table_shows_the_kernels_that_were_chosen(sparseconv, model, tmp_path):
    file = tmp_path / "d.json"
    sparseconv("tune", model, "-o", file)
    decisions = read_decisions(file)
    kernel = {"sm_90": KernelChoice("generated", 32, 24, 864)}
    first, second = decisions.layers
    layers = (
        replace(first, choice=Choice.SPARSE, kernels=kernel),
        replace(second, choice=Choice.DENSE, kernels=kernel),
    )
    rows = decisions_table(replace(decisions, layers=layers)).rows
    assert [row[4] for row in rows] == ["sparse, generated 32x24x864", "dense"]
