"""Every command on real files, through the real converter and ONNX Runtime."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnx_sparseconv.cli.commands import bench as bench_command
from onnx_sparseconv.errors import ProviderError
from onnx_sparseconv.runtime.doctor import CacheCheck, DoctorReport, LibraryCheck, Problem
from onnx_sparseconv.runtime.environment import read_environment
from onnx_sparseconv.runtime.timing import Speedup
from tests.converter.test_network import CHANNELS, network
from tests.runtime import networks


def _names(directory: Path):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def converted(sparseconv, model, tmp_path):
    path = tmp_path / "converted.onnx"
    assert sparseconv("convert", model, "-o", path).exit_code == 0
    return path


def test_inspect_says_what_would_happen_and_what_to_do_next(sparseconv, model, dense_model):
    result = sparseconv("inspect", model)
    assert result.exit_code == 0
    assert "2 would become sparse, 0 stay dense" in result.stdout
    assert f"sparseconv convert {model} -o model.sparse.onnx" in result.stdout
    result = sparseconv("inspect", dense_model)
    assert result.exit_code == 0
    assert "too dense" in result.stdout
    assert f"sparseconv prune {dense_model}" in result.stdout


def test_inspect_json_is_all_that_is_on_stdout(sparseconv, model, tmp_path):
    (tmp_path / "bad.onnx").write_text("garbage")
    result = sparseconv("inspect", model, tmp_path / "bad.onnx", "--json", "-o", tmp_path / "report.json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    good, bad = document["models"]
    assert (good["num_rewritten"], len(good["layers"])) == (2, 2)
    assert "bad.onnx" in bad["error"]
    assert json.loads((tmp_path / "report.json").read_text()) == document
    assert "bad.onnx" in result.stderr


def test_inspect_ends_with_a_summary_of_several_models(sparseconv, model, dense_model):
    lines = sparseconv("inspect", model, dense_model).stdout.splitlines()
    assert lines[-2].split()[-3:] == ["2", "of", "2"]
    assert lines[-1].split()[-3:] == ["0", "of", "2"]


def test_inspect_does_not_write_over_a_model(sparseconv, model):
    before = model.read_bytes()
    assert sparseconv("inspect", model, "-o", model).exit_code == 2
    assert model.read_bytes() == before


def test_convert_says_what_it_did_and_what_comes_next(sparseconv, model, tmp_path):
    out = tmp_path / "out.onnx"
    result = sparseconv("convert", model, "-o", out)
    assert result.exit_code == 0
    assert "2 of 2 Conv layers became sparse convolutions" in result.stdout
    assert "conv0" in result.stdout
    for step in ("verify", "bench"):
        assert f"sparseconv {step} {model} {out}" in result.stdout
    onnx.checker.check_model(str(out))
    assert {node.op_type for node in onnx.load(str(out)).graph.node} == {"SparseConv"}
    assert _names(tmp_path) == ["model.onnx", "out.onnx"]


def test_convert_writes_nothing_when_nothing_qualifies(sparseconv, dense_model, tmp_path):
    result = sparseconv("convert", dense_model, "-o", tmp_path / "out.onnx")
    assert result.exit_code == 4
    assert "nothing was written" in result.stdout
    assert "too dense" in result.stdout
    result = sparseconv("convert", dense_model, "--out-dir", tmp_path / "out")
    assert result.exit_code == 4
    assert _names(tmp_path) == ["dense.onnx"]


def test_convert_dry_run_writes_nothing(sparseconv, model, dense_model, tmp_path):
    result = sparseconv("convert", model, "--dry-run")
    assert (result.exit_code, "would become" in result.stdout) == (0, True)
    assert sparseconv("convert", model, dense_model, "--dry-run", "--out-dir", tmp_path / "out").exit_code == 4
    assert _names(tmp_path) == ["dense.onnx", "model.onnx"]


def test_convert_options_reach_the_converter(sparseconv, dense_model, model, tmp_path):
    assert sparseconv("convert", dense_model, "-o", tmp_path / "a.onnx", "--force").exit_code == 0
    assert sparseconv("convert", model, "-o", tmp_path / "b.onnx", "--min-sparsity", "0.99").exit_code == 4
    assert sparseconv("convert", dense_model, "-o", tmp_path / "c.onnx", "--min-sparsity", "0").exit_code == 0


def test_convert_says_that_a_model_is_converted_already(sparseconv, converted, tmp_path):
    result = sparseconv("convert", converted, "-o", tmp_path / "again.onnx")
    assert result.exit_code == 4
    assert "already converted" in result.stdout
    assert not (tmp_path / "again.onnx").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_convert_of_several_models_goes_on_after_a_bad_one(sparseconv, model, dense_model, tmp_path, jobs):
    bad = tmp_path / "bad.onnx"
    bad.write_text("garbage")
    out, report = tmp_path / "out", tmp_path / "report.json"
    result = sparseconv("convert", bad, dense_model, model, "--out-dir", out, "--jobs", jobs, "--report", report)
    assert result.exit_code == 1
    assert _names(out) == ["model.onnx"]
    assert "bad.onnx" in result.stderr
    summary = [line.split() for line in result.stdout.splitlines()[-3:]]
    assert [line[0] for line in summary] == [str(bad), str(dense_model), str(model)]
    assert [line[1] for line in summary] == ["error", "nothing", "converted"]
    reports = json.loads(report.read_text())
    assert [r["exit_code"] for r in reports] == [1, 4, 0]
    assert all(r["schema_version"] == 1 for r in reports)
    assert reports[2]["converted"] is True


def test_the_report_of_one_model_is_not_a_list(sparseconv, model, tmp_path):
    sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--report", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["schema_version"], report["converted"], len(report["model"]["layers"])) == (1, True, 2)


def test_outputs_that_would_do_harm_are_usage_errors(sparseconv, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.onnx").symlink_to(model)
    os.link(model, tmp_path / "hard.onnx")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.onnx").write_bytes(model.read_bytes())
    before = model.read_bytes()
    for arguments in (
        [model],
        [model, "-o", model],
        [model, "-o", "model.onnx"],
        [model, "-o", "./other/../model.onnx"],
        [model, "-o", "link.onnx"],
        [model, "-o", "hard.onnx"],
        ["link.onnx", "-o", model],
        [model, "-o", tmp_path],
        [model, "--out-dir", tmp_path],
        [model, "--out-dir", model],
        [model, "link.onnx", "-o", "out.onnx"],
        [model, "-o", "out.onnx", "--out-dir", "out"],
        [model, "other/model.onnx", "--out-dir", "out"],
        [model, "-o", "out.onnx", "--report", "out.onnx"],
        [model, "-o", "out.onnx", "--report", "link.onnx"],
    ):
        result = sparseconv("convert", *arguments)
        assert result.exit_code == 2, arguments
        assert result.stdout == ""
    for command in (["prune", model, "--sparsity", "0.5", "-o", "link.onnx"], ["restore", model, "-o", "hard.onnx"]):
        assert sparseconv(*command).exit_code == 2
    assert model.read_bytes() == before
    assert _names(tmp_path) == ["hard.onnx", "link.onnx", "model.onnx", "other"]


def test_an_output_that_cannot_be_written_is_an_error(sparseconv, model, tmp_path):
    result = sparseconv("convert", model, "-o", tmp_path / "absent" / "out.onnx")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert _names(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize("sparsity", ["0", "-0.1", "1.01", "nan"])
def test_prune_wants_a_share(sparseconv, dense_model, tmp_path, sparsity):
    result = sparseconv("prune", dense_model, "-o", tmp_path / "p.onnx", "--sparsity", sparsity)
    assert result.exit_code == 2


@pytest.mark.parametrize("scope", ["layer", "global", "channel"])
def test_prune_says_what_it_costs(sparseconv, dense_model, tmp_path, scope):
    out = tmp_path / "p.onnx"
    result = sparseconv("prune", dense_model, "-o", out, "--sparsity", "0.9", "--scope", scope)
    assert result.exit_code == 0
    assert "retrain" in result.stdout
    assert re.search(r"-> (89\.9|90\.0)% zeros", result.stdout)
    assert f"sparseconv convert {out}" in result.stdout
    weights = [onnx.numpy_helper.to_array(t) for t in onnx.load(str(out)).graph.initializer]
    assert np.mean([(w == 0).mean() for w in weights]) == pytest.approx(0.9, abs=0.01)


def test_restore_gives_the_bits_back(sparseconv, model, converted, tmp_path):
    result = sparseconv("restore", converted, "-o", tmp_path / "restored.onnx")
    assert result.exit_code == 0
    assert "2 layers are dense Conv again" in result.stdout
    original, restored = (onnx.load(str(p)) for p in (model, tmp_path / "restored.onnx"))
    first, second = (
        sorted(onnx.numpy_helper.to_array(t).tobytes() for t in m.graph.initializer if len(t.dims) == 4)
        for m in (original, restored)
    )
    assert first == second


@pytest.mark.parametrize("options", [[], ["--no-library"], ["--batch", "3", "--threads", "1", "--seed", "7"]])
def test_verify_passes_and_states_its_tolerance(sparseconv, model, converted, options):
    result = sparseconv("verify", model, converted, *options)
    assert result.exit_code == 0
    assert "depth 2, longest dot product 288, float32 storage" in result.stdout
    assert "OK: 1 output within the tolerance" in result.stdout
    assert ("dense Conv (no library)" if options == ["--no-library"] else "cpu.") in result.stdout


def test_verify_finds_a_difference(sparseconv, converted, tmp_path):
    changed = networks.save(networks.dense(networks.weights(channels=32, sparsity=0.9)), tmp_path / "other.onnx")
    result = sparseconv("verify", changed, converted)
    assert result.exit_code == 3
    assert "DIFFERENT: 1 of 1 output" in result.stdout
    assert sparseconv("verify", changed, converted, "--atol", "1e9").exit_code == 0
    document = json.loads(sparseconv("verify", changed, converted, "--json").stdout)
    assert (document["schema_version"], document["passed"]) == (1, False)
    assert document["outputs"][0]["num_outside"] > 0


def test_verify_with_real_inputs(sparseconv, model, converted, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.ones((2, 32, 12, 12), np.float32))
    assert sparseconv("verify", model, converted, "--inputs", tmp_path / "in.npz").exit_code == 0
    result = sparseconv("verify", model, converted, "--inputs", tmp_path / "in.npz", "--batch", "2")
    assert result.exit_code == 2
    np.savez(tmp_path / "bad.npz", z=np.ones(3))
    result = sparseconv("verify", model, converted, "--inputs", tmp_path / "bad.npz")
    assert (result.exit_code, "no array for input x" in result.stderr) == (1, True)


def test_verify_with_shapes(sparseconv, model, converted):
    assert sparseconv("verify", model, converted, "--shape", "x:2x32x12x12").exit_code == 0
    for shape in ("x", "x:2x3", "z:1x32x12x12"):
        assert sparseconv("verify", model, converted, "--shape", shape).exit_code == 2


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_provider_that_would_not_be_used_ends_with_5(sparseconv, model, converted, command, monkeypatch):
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    result = sparseconv(command, model, converted, "--provider", "cuda")
    assert result.exit_code == 5
    assert "CUDAExecutionProvider" in result.stderr

    def refuse(*_, **__):
        raise ProviderError("not used")

    monkeypatch.setattr(f"onnx_sparseconv.runtime.{command}.{command}", refuse)
    assert sparseconv(command, model, converted).exit_code == 5


def test_run_writes_the_outputs(sparseconv, model, converted, tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 32, 12, 12)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    outputs = []
    for path, options in ((model, []), (converted, []), (converted, ["--no-library"])):
        result = sparseconv("run", path, "--inputs", tmp_path / "in.npz", "-o", tmp_path / "out.npz", *options)
        assert result.exit_code == 0
        assert "y: float32 2x32x12x12" in result.stdout
        with np.load(tmp_path / "out.npz") as file:
            outputs.append(file["y"])
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-4)
    np.testing.assert_allclose(outputs[2], outputs[0], atol=1e-4)
    assert sparseconv("run", model, "--inputs", tmp_path / "in.npz", "-o", tmp_path / "in.npz").exit_code == 2
    assert sparseconv("run", model, "--inputs", tmp_path / "absent.npz", "-o", tmp_path / "o.npz").exit_code == 1
    assert not (tmp_path / "o.npz").exists()


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.1, 1.4, "faster"), (0.6, 0.9, "SLOWER than the original"), (0.9, 1.4, "no clear difference")],
)
def test_bench_only_claims_what_the_rounds_agree_on(low, high, word):
    text = bench_command._speedup_text(SimpleNamespace(speedup=Speedup(1.2, low, high)))
    assert text == f"1.20x of medians ({low:.2f}x to {high:.2f}x in 8 of 10 rounds): {word}"


def test_inspect_advises_to_measure_where_the_network_decides(sparseconv, tmp_path):
    pointwise, depthwise = ((32, 32, 1, 1), 0.05, 1), ((32, 1, 9, 9), 1.0, 32)
    onnx.save(network(pointwise, depthwise, pointwise), tmp_path / "mobile.onnx")
    result = sparseconv("inspect", tmp_path / "mobile.onnx")
    assert "2 layers would pay by themselves" in result.stdout
    assert f"sparseconv tune {tmp_path / 'mobile.onnx'} -o mobile.decisions.json" in result.stdout
    assert "prune" not in result.stdout


def test_bench_prints_tables_or_json(sparseconv, model, converted, tmp_path):
    result = sparseconv("bench", model, converted, "--seconds", "0", "--batch", "2", "--threads", "1")
    assert result.exit_code == 0
    for word in ("median", "p99", "conv0", "speed-up", "cpu.", "file", "1 thread"):
        assert word in result.stdout
    result = sparseconv("bench", model, converted, "--seconds", "0", "--json", "-o", tmp_path / "b.json")
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "b.json").read_text())
    assert document["schema_version"] == 1
    assert [layer["name"] for layer in document["layers"]] == ["conv0", "conv1"]
    assert all(layer["speedup"] for layer in document["layers"])
    assert document["environment"]["versions"]["onnxruntime"] == ort.__version__


def test_doctor_is_content_with_this_installation(sparseconv):
    result = sparseconv("doctor")
    assert result.exit_code == 0, result.stdout
    assert "provider cpu       works" in result.stdout
    document = json.loads(sparseconv("doctor", "--json").stdout)
    assert (document["healthy"], document["has_conflict"], document["schema_version"]) == (True, False, 1)


@pytest.mark.parametrize(("conflict", "code"), [(True, 6), (False, 1)])
def test_doctor_tells_conflicts_from_other_problems(sparseconv, monkeypatch, conflict, code):
    problem = Problem(conflict, "two of them", "remove one")
    report = DoctorReport(
        onnxruntime_distributions={"a": "1", "b": "2"},
        cupy_distributions={},
        library=LibraryCheck(None, None, "missing"),
        providers=(),
        problems=(problem,),
        environment=read_environment(),
        compilers=(),
        image_cache=CacheCheck("/nowhere", 0, 0),
    )
    monkeypatch.setattr("onnx_sparseconv.runtime.doctor.diagnose", lambda: report)
    result = sparseconv("doctor")
    assert result.exit_code == code
    assert ("CONFLICT: two of them" if conflict else "PROBLEM: two of them") in result.stdout
    assert "remove one" in result.stdout


def test_inspect_decides_for_gpus_as_convert_does(sparseconv, tmp_path):
    """Without a GPU and without a compiler."""
    path = tmp_path / "model.onnx"
    onnx.save(network(((128, CHANNELS, 3, 3), 0.05, 1), ((128, 128, 3, 3), 0.05, 1), size=56), path)
    result = sparseconv("inspect", path)
    assert f"sparseconv inspect {path} --target sm_90" in result.stdout
    result = sparseconv("inspect", path, "--target", "sm_90", "--precision", "fp16", "--batch", "32")
    assert result.exit_code == 0
    assert "predicted" in result.stdout
    assert "on sm_90 at batch 32" in result.stdout
    assert "-o model.sparse.onnx --target sm_90 --precision fp16 --batch 32" in result.stdout
    assert "sparseconv inspect" not in result.stdout


def test_inspect_refuses_what_it_cannot_decide_for(sparseconv, model):
    for words, said in (
        (("--target", "sm90"), "unknown target 'sm90'"),
        (("--batch", "8"), "--batch needs --target"),
    ):
        result = sparseconv("inspect", model, *words)
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_model_for_gpus_is_checked_and_timed_on_one(sparseconv, model, tmp_path):
    converted = tmp_path / "half.onnx"
    result = sparseconv("convert", model, "-o", converted, "--precision", "fp16")
    for step in ("verify", "bench"):
        assert f"sparseconv {step} {model} {converted} --provider cuda" in result.stdout


def test_where_nothing_is_pruned_convert_asks_for_the_masks(sparseconv, dense_model, tmp_path):
    result = sparseconv("convert", dense_model, "-o", tmp_path / "out.onnx")
    assert result.exit_code == 4
    assert "0.0% of its Conv weights are zero" in result.stdout
    assert "prune.remove" in result.stdout


def test_verify_takes_no_kernel_on_the_cpu(sparseconv, model, converted):
    result = sparseconv("verify", model, converted, "--kernel", "generated")
    assert result.exit_code == 2
    assert "--kernel needs --provider cuda" in result.stderr
