"""``convert DIR --out-dir OUT``: mixed models, resumed runs, the summary."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_sparseconv.cli.conversion import folder as folder_module
from onnx_sparseconv.cli.conversion.folder_plan import FolderOptions, find_models, plan_tasks
from onnx_sparseconv.cli.conversion.job import Job
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.tuner import tuning
from tests.report.test_page import _Page, _require_safe
from tests.runtime import networks
from tests.tuner.fakes import FakeBench
from tests.tuner.plans import FAST


@pytest.fixture
def models(tmp_path, model, dense_model):
    """Two models to convert, one of them below, one that has nothing to gain."""
    folder = tmp_path / "models"
    (folder / "vision" / "deep").mkdir(parents=True)
    shutil.copy(model, folder / "vision" / "deep" / "sparse.onnx")
    shutil.copy(model, folder / "a b#?.ONNX")
    shutil.move(dense_model, folder / "dense.onnx")
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def stopwatch(monkeypatch, tmp_path):
    """Sparse layers win."""
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    monkeypatch.setattr("onnx_sparseconv.runtime.peaks.find_peaks", lambda *_: None)
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "cache"))
    bench = FakeBench(whole_us=lambda sparse: 300 - 50 * len(sparse))
    monkeypatch.setattr(tuning, "OrtBench", lambda *_, **__: bench)
    return bench


def _files(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def _summary(out):
    return {one["name"]: one for one in json.loads((out / "index.json").read_text())["models"]}


def _lines(result):
    """What became of each model, as it was said when it was done."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    return dict(line.split("] ", 1)[1].split(": ", 1) for line in lines)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_folder_keeps_its_form_and_gets_a_summary(sparseconv, models, out, jobs):
    result = sparseconv("convert", models, "--out-dir", out, "--jobs", jobs)
    assert (result.exit_code, result.stderr) == (0, "")
    assert _files(out) == [
        "a b#?.ONNX",
        "index.html",
        "index.json",
        "reports/a b#?.ONNX.html",
        "reports/a b#?.ONNX.json",
        "reports/dense.onnx.html",
        "reports/dense.onnx.json",
        "reports/vision/deep/sparse.onnx.html",
        "reports/vision/deep/sparse.onnx.json",
        "vision/deep/sparse.onnx",
    ]
    onnx.checker.check_model(str(out / "vision" / "deep" / "sparse.onnx"))
    assert _lines(result) == {
        "a b#?.ONNX": "converted, 2 of 2 layers sparse",
        "dense.onnx": "nothing qualifies",
        "vision/deep/sparse.onnx": "converted, 2 of 2 layers sparse",
    }
    assert result.stdout.splitlines()[-1] == f"Wrote {out / 'index.html'} and {out / 'index.json'}"
    summary = _summary(out)
    assert [(one["result"], one["exit_code"]) for one in summary.values()] == [
        ("converted", 0),
        ("nothing qualifies", 4),
        ("converted", 0),
    ]
    assert summary["dense.onnx"]["output"] is None
    assert summary["a b#?.ONNX"]["report"] == "reports/a b#?.ONNX.json"
    page = _Page((out / "index.html").read_text(encoding="utf-8"))
    _require_safe(page)
    assert "2 of 3 models converted." in page.text
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links[0] == "reports/a%20b%23%3F.ONNX.html"
    _require_safe(_Page((out / "reports" / "dense.onnx.html").read_text(encoding="utf-8")))


def test_one_bad_model_does_not_stop_the_others_and_is_tried_again(sparseconv, models, out):
    (models / "bad.onnx").write_text("garbage")
    for _ in range(2):
        result = sparseconv("convert", models, "--out-dir", out)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert "bad.onnx" in result.stderr
        assert _summary(out)["bad.onnx"]["result"] == "error"
        assert _summary(out)["vision/deep/sparse.onnx"]["exit_code"] == 0
    assert "bad.onnx: is not an ONNX model" in _Page((out / "index.html").read_text()).text


def test_what_has_not_changed_is_left_alone(sparseconv, models, out, monkeypatch):
    sparseconv("convert", models, "--out-dir", out)
    before = {name: (out / name).stat().st_mtime_ns for name in _files(out)}
    monkeypatch.setattr(folder_module, "convert_model", None)  # would end in a traceback
    result = sparseconv("convert", models, "--out-dir", out, "--jobs", 1)
    assert (result.exit_code, result.stderr) == (0, "")
    assert set(_lines(result).values()) == {"up to date, 2 of 2 layers sparse", "up to date"}
    after = {name: (out / name).stat().st_mtime_ns for name in _files(out)}
    assert {name for name in after if before[name] != after[name]} == {"index.html", "index.json"}
    assert all(one["up_to_date"] for one in _summary(out).values())
    assert "3 of all were done by an earlier run" in _Page((out / "index.html").read_text()).text


def _other_content(models, _out):
    layer_weights = networks.weights(channels=32, sparsity=0.95, seed=7)
    networks.save(networks.dense(layer_weights), models / "a b#?.ONNX")


def _edit(name, value):
    """Put something else into the report of a model."""

    def edit(_models, out):
        record = out / "reports" / "a b#?.ONNX.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {name: value}))

    return edit


def _other_version(_models, out):
    record = out / "reports" / "a b#?.ONNX.json"
    content = json.loads(record.read_text())
    content["made_from"]["versions"]["onnx"] = "0.0"
    record.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_other_content, "(the model has changed)"),
        (_other_version, "(the versions have changed)"),
        (lambda _, out: (out / "a b#?.ONNX").unlink(), "no longer there, or was changed"),
        (lambda _, out: (out / "a b#?.ONNX").write_text("x"), "no longer there, or was changed"),
        (lambda _, out: (out / "reports" / "a b#?.ONNX.json").write_text("{"), "sparse"),
        (_edit("exit_code", 99), "sparse"),
        (_edit("exit_code", []), "sparse"),
        (_edit("source", None), "sparse"),
        (_edit("model", {"layers": 3}), "sparse"),
        (_edit("schema_version", 0), "sparse"),
        (lambda _, out: (out / "reports" / "a b#?.ONNX.json").unlink(), "sparse"),
    ],
)
def test_what_has_changed_is_converted_again(sparseconv, models, out, change, says):
    sparseconv("convert", models, "--out-dir", out)
    change(models, out)
    result = sparseconv("convert", models, "--out-dir", out)
    assert result.exit_code == 0
    lines = _lines(result)
    changed = lines.pop("a b#?.ONNX")
    assert changed.startswith("converted")
    assert says in changed
    assert all(what.startswith("up to date") for what in lines.values())
    onnx.checker.check_model(str(out / "a b#?.ONNX"))
    assert "up to date" in _lines(sparseconv("convert", models, "--out-dir", out))["a b#?.ONNX"]


def test_other_options_and_a_wish_convert_all_again(sparseconv, models, out):
    sparseconv("convert", models, "--out-dir", out)
    lines = _lines(sparseconv("convert", models, "--out-dir", out, "--min-sparsity", "0.9"))
    assert all(what.endswith("(the options have changed)") for what in lines.values())
    lines = _lines(sparseconv("convert", models, "--out-dir", out, "--min-sparsity", "0.9"))
    assert all(what.startswith("up to date") for what in lines.values())
    lines = _lines(sparseconv("convert", models, "--out-dir", out, "--min-sparsity", "0.9", "--redo"))
    assert {what.split(",")[0] for what in lines.values()} == {"converted", "nothing qualifies"}


def test_how_it_was_made_is_no_reason_to_make_it_again(sparseconv, models, out, tmp_path):
    sparseconv("convert", models, "--out-dir", out, "--jobs", 1)
    arguments = ["--jobs", 2, "--cache-dir", tmp_path / "c", "--report", tmp_path / "r.html"]
    result = sparseconv("convert", models, "--out-dir", out, *arguments)
    assert all(what.startswith("up to date") for what in _lines(result).values())
    assert (tmp_path / "r.html").exists()


def test_a_page_that_is_missing_is_made_from_the_report(sparseconv, models, out):
    sparseconv("convert", models, "--out-dir", out)
    page = out / "reports" / "dense.onnx.html"
    before = page.read_text()
    page.unlink()
    result = sparseconv("convert", models, "--out-dir", out)
    assert _lines(result)["dense.onnx"] == "up to date"
    assert page.read_text() == before


def test_external_data_are_content(sparseconv, tmp_path, out):
    models = tmp_path / "models"
    models.mkdir()
    # What stays dense is external in what is written, too.
    layer_weights = networks.weights(channels=32, sparsity=0.95) + networks.weights(channels=32, layers=1, sparsity=0)
    proto = networks.dense(layer_weights)
    path = models / "m.onnx"
    onnx.save_model(proto, str(path), save_as_external_data=True, location="m.bin", size_threshold=0)
    assert sparseconv("convert", models, "--out-dir", out).exit_code == 0
    assert {"m.onnx", "m.onnx.data"} <= set(_files(out))
    assert "up to date" in _lines(sparseconv("convert", models, "--out-dir", out))["m.onnx"]
    data = models / "m.bin"
    values = np.frombuffer(data.read_bytes(), np.float32).copy()
    values[values != 0] *= 2
    data.write_bytes(values.tobytes())
    assert "the model has changed" in _lines(sparseconv("convert", models, "--out-dir", out))["m.onnx"]
    (out / "m.onnx.data").unlink()
    assert "no longer there" in _lines(sparseconv("convert", models, "--out-dir", out))["m.onnx"]
    assert (out / "m.onnx.data").exists()


def test_a_model_that_would_not_be_written_now_does_not_stay(sparseconv, models, out):
    sparseconv("convert", models, "--out-dir", out)
    (out / "vision" / "deep" / "sparse.onnx").write_text("someone else's")
    result = sparseconv("convert", models, "--out-dir", out, "--min-sparsity", "0.99")
    assert result.exit_code == 4
    assert "what an earlier run had written was removed" in _lines(result)["a b#?.ONNX"]
    assert not (out / "a b#?.ONNX").exists()
    assert (out / "vision" / "deep" / "sparse.onnx").read_text() == "someone else's"


@pytest.mark.parametrize("names", [{"../../model.onnx": "x"}, {"/etc/passwd": "x"}, {"a b#?.ONNX": 3}, []])
def test_a_report_that_was_tampered_with_removes_nothing(sparseconv, models, out, model, names):
    sparseconv("convert", models, "--out-dir", out)
    record = out / "reports" / "a b#?.ONNX.json"
    content = json.loads(record.read_text())
    content["written"] = names
    record.write_text(json.dumps(content))
    result = sparseconv("convert", models, "--out-dir", out, "--min-sparsity", "0.99")
    assert (result.exit_code, result.stderr) == (4, "")
    assert model.exists()


def test_converted_models_are_left_alone_and_not_decided_again(sparseconv, models, out, stopwatch):
    sparseconv("convert", models, "--out-dir", out)
    shutil.copy(out / "a b#?.ONNX", models / "before.onnx")
    result = sparseconv("convert", models, "--out-dir", out, "--tune")
    assert result.exit_code == 0
    assert _lines(result)["before.onnx"] == "already converted, 2 of 2 layers sparse"
    assert not (out / "before.onnx").exists()
    assert stopwatch.pieces
    assert not [piece for piece in stopwatch.pieces if piece.functions]
    assert "before.onnx: already converted" in sparseconv("convert", models, "--out-dir", out, "--redo").stdout


def test_what_stayed_dense_in_a_converted_model_stays_so(sparseconv, models, out, tmp_path):
    once = tmp_path / "once.onnx"
    layer_weights = [*networks.weights(layers=1, channels=32, sparsity=0.99), *networks.weights(layers=1, channels=32)]
    path = networks.save(networks.dense(layer_weights), tmp_path / "mixed.onnx")
    assert sparseconv("convert", path, "-o", once, "--min-sparsity", "0.95").exit_code == 0
    shutil.copy(once, models / "once.onnx")
    result = sparseconv("convert", models, "--out-dir", out)
    assert _lines(result)["once.onnx"] == "already converted, 1 of 2 layers sparse"
    assert not (out / "once.onnx").exists()
    # By itself it would become sparse.
    assert sparseconv("convert", once, "-o", tmp_path / "twice.onnx").exit_code == 0


@pytest.mark.usefixtures("stopwatch")
def test_tuning_takes_turns_and_is_resumed_on_the_same_machine_only(sparseconv, models, out, monkeypatch):
    arguments = ["convert", models, "--out-dir", out, "--tune", "--jobs", 4]
    result = sparseconv(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert _lines(result)["a b#?.ONNX"] == "converted, 2 of 2 layers sparse, 1.50x faster"
    assert _summary(out)["a b#?.ONNX"]["speedup"] == pytest.approx(1.5)
    assert "1.50\u00d7" in _Page((out / "index.html").read_text()).text
    assert "up to date" in _lines(sparseconv(*arguments))["a b#?.ONNX"]
    setting = {"processor": "another abacus", "provider": "cpu", "threads": None}
    monkeypatch.setattr("onnx_sparseconv.tuner.setting.read_setting", lambda *_: setting)
    assert "(the machine has changed)" in _lines(sparseconv(*arguments))["a b#?.ONNX"]
    assert "the options" in _lines(sparseconv(*arguments, "--preset", "quick"))["a b#?.ONNX"]


def test_no_gain_is_exit_code_7_where_one_is_required(sparseconv, models, out, stopwatch):
    stopwatch.whole_us = lambda sparse: 300 + len(sparse)
    result = sparseconv("convert", models, "--out-dir", out, "--tune", "--require-gain")
    assert result.exit_code == 7
    assert "not faster as a whole" in _lines(result)["a b#?.ONNX"]


def test_an_interrupted_run_says_so_and_goes_on_where_it_was(sparseconv, models, out, monkeypatch):
    convert_model = folder_module.convert_model

    def stop(job, advance=None):
        if job.model.name == "sparse.onnx":
            raise KeyboardInterrupt
        return convert_model(job, advance)

    monkeypatch.setattr(folder_module, "convert_model", stop)
    result = sparseconv("convert", models, "--out-dir", out)
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted\n"
    assert json.loads((out / "index.json").read_text())["interrupted"] is True
    assert "The run was interrupted" in _Page((out / "index.html").read_text()).text
    assert not (out / "vision" / "deep" / "sparse.onnx").exists()
    monkeypatch.undo()
    result = sparseconv("convert", models, "--out-dir", out)
    assert {name: what.split(",")[0] for name, what in _lines(result).items()} == {
        "a b#?.ONNX": "up to date",
        "dense.onnx": "up to date",
        "vision/deep/sparse.onnx": "converted",
    }
    assert "interrupted" not in _Page((out / "index.html").read_text()).text


def test_a_dry_run_writes_nothing(sparseconv, models, out):
    for arguments in (["--dry-run"], ["--dry-run", "--out-dir", out]):
        result = sparseconv("convert", models, *arguments)
        assert result.exit_code == 0
        assert _lines(result)["a b#?.ONNX"].startswith("would convert")
    assert not out.exists()


def test_nothing_to_gain_anywhere_is_exit_code_4_and_leaves_the_reasons(sparseconv, tmp_path, dense_model, out):
    models = tmp_path / "models"
    models.mkdir()
    shutil.move(dense_model, models / "dense.onnx")
    assert sparseconv("convert", models, "--out-dir", out).exit_code == 4
    assert "too dense: 2 layers of 2" in _Page((out / "index.html").read_text()).text


def test_folders_and_models_beside_each_other(sparseconv, models, model, out, tmp_path):
    report = tmp_path / "r.json"
    result = sparseconv("convert", models / "vision", model, "--out-dir", out, "--report", report)
    assert result.exit_code == 0
    assert {"deep/sparse.onnx", "model.onnx"} <= set(_files(out))
    assert [one["converted"] for one in json.loads(report.read_text())] == [True, True]


def test_which_files_are_models(models):
    (models / ".hidden").mkdir()
    for name in (".hidden/x.onnx", ".x.onnx", "x.onnx.data", "x.bin", "vision/y.onnx"):
        (models / name).touch()
    (models / "folder.onnx").mkdir()
    (models / "link").symlink_to(models / "vision")
    (models / "linked.onnx").symlink_to(models / "vision" / "y.onnx")
    (models / "broken.onnx").symlink_to(models / "absent")
    (models / "out").mkdir()
    (models / "out" / "z.onnx").touch()
    found = [path.relative_to(models).as_posix() for path in find_models(models, models / "vision" / ".." / "out")]
    assert found == ["a b#?.ONNX", "dense.onnx", "linked.onnx", "vision/y.onnx", "vision/deep/sparse.onnx"]
    assert "out/z.onnx" in [path.relative_to(models).as_posix() for path in find_models(models, None)]


def test_a_folder_without_models_or_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"there is no \.onnx file"):
        find_models(tmp_path, None)

    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        find_models(tmp_path, None)


def test_a_run_into_a_folder_within_the_folder_does_not_convert_its_own_results(sparseconv, models):
    for _ in range(2):
        result = sparseconv("convert", models, "--out-dir", models / "out")
        assert result.exit_code == 0
        assert len(_lines(result)) == 3


def test_what_would_do_harm_is_a_usage_error(sparseconv, models, model, out, tmp_path):
    (tmp_path / "same").mkdir()
    shutil.copy(model, tmp_path / "same" / "dense.onnx")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    before = _files(tmp_path)
    for arguments in (
        [models],
        [models, "-o", tmp_path / "o.onnx"],
        [models, "--out-dir", models],
        [models, "--out-dir", models / "vision" / ".."],
        [models, "--out-dir", tmp_path / "file"],
        [models, tmp_path / "same", "--out-dir", out],
        [models, models, "--out-dir", out],
        [tmp_path / "empty", "--out-dir", out],
        [models, "--out-dir", out, "--decisions", "d.json"],
        [models, "--out-dir", out, "--report", tmp_path / "absent" / "r.html"],
        [models, "--out-dir", out, "--report", out / "index.html"],
        [models, "--out-dir", out, "--report", models / "dense.onnx"],
        [models, "--out-dir", out, "--tune", "--force"],
        [model, "-o", tmp_path / "o.onnx", "--redo"],
    ):
        result = sparseconv("convert", *arguments)
        assert result.exit_code == 2, (arguments, result.stdout, result.stderr)
        assert (result.stdout, result.stderr.count("\n")) == ("", 1) or "Usage" in result.stderr
    assert _files(tmp_path) == before


@pytest.mark.parametrize(("jobs", "share"), [(1, 8), (2, 4), (8, 2), (100, 2)])
def test_compilers_are_shared_by_the_models_at_work(models, out, jobs, share):
    settings = Job(Path(), None, None, False, False, compile_jobs=8)
    tasks = plan_tasks(
        [models / "vision", models / "dense.onnx", *models.glob("a*")], settings, FolderOptions(out, (), jobs, False)
    )
    assert {task.job.compile_jobs for task in tasks} == {share}


def test_hundreds_of_models_are_planned_at_once(sparseconv, tmp_path, out):
    models = tmp_path / "models"
    models.mkdir()
    for number in range(400):
        (models / f"{number}.onnx").touch()
    result = sparseconv("convert", models, "--out-dir", out)
    assert result.exit_code == 1
    assert len(_summary(out)) == 400
