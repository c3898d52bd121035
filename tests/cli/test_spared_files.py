"""Files that are read are not written over, those of external data included; names do not steer terminals."""

from __future__ import annotations

import shutil

import onnx
import pytest
from onnx import external_data_helper

from tests.runtime import networks


@pytest.fixture
def models(tmp_path):
    """Two models that share ``model.onnx.data``."""
    folder = tmp_path / "models"
    folder.mkdir()
    proto = networks.dense(networks.weights(channels=16, sparsity=0.95, layers=1))
    external_data_helper.convert_model_to_external_data(proto, location="model.onnx.data", size_threshold=0)
    onnx.save(proto, str(folder / "model.onnx"))
    shutil.copy(folder / "model.onnx", folder / "backup.onnx")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        "convert backup.onnx -o model.onnx",
        "convert backup.onnx -o model.onnx.data",
        "convert backup.onnx -o other.onnx --report model.onnx.json",
        "prune backup.onnx -o model.onnx --sparsity 0.99",
        "restore backup.onnx -o model.onnx",
        "inspect backup.onnx -o model.onnx.data",
        "verify backup.onnx backup.onnx -o model.onnx.data",
        "bench backup.onnx backup.onnx -o model.onnx.data",
        "run backup.onnx --inputs absent.npz -o model.onnx.data",
        "tune backup.onnx -o model.onnx.data",
        "tune backup.onnx -o decided --database model.onnx.data",
    ],
)
def test_external_data_of_an_input_are_not_written_over(sparseconv, models, monkeypatch, arguments):
    monkeypatch.chdir(models)
    if "json" in arguments:
        proto = onnx.load("backup.onnx")
        external_data_helper.convert_model_to_external_data(proto, location="model.onnx.json", size_threshold=0)
        onnx.save(proto, "backup.onnx")
    before = {path.name: path.read_bytes() for path in models.iterdir()}
    result = sparseconv(*arguments.split())
    assert result.exit_code == 2
    assert "is the input" in result.stderr
    assert result.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in models.iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        "inspect model.onnx -o circle",
        "convert model.onnx -o circle",
        "convert model.onnx -o other.onnx --report circle.html",
        "prune model.onnx --sparsity 0.99 -o circle",
        "verify model.onnx model.onnx -o circle",
        "run model.onnx --inputs absent.npz -o circle",
        "tune model.onnx -o circle",
    ],
)
def test_links_that_lead_in_a_circle_are_one_line(sparseconv, models, monkeypatch, arguments):
    monkeypatch.chdir(models)
    for name in ("circle", "circle.html"):
        (models / name).symlink_to(name)
    result = sparseconv(*arguments.split())
    assert result.exit_code == 2
    assert "cannot be written: Too many levels of symbolic links" in result.stderr
    assert result.stderr.count("\n") == 1


def test_external_data_of_a_third_model_are_not_written_over(sparseconv, models, tmp_path):
    """Only a model that is replaced gives its data away."""
    (models / "model.onnx").unlink()
    shutil.copytree(models, tmp_path / "source")
    target, data = models / "model.onnx", models / "model.onnx.data"
    arguments = ("prune", tmp_path / "source" / "backup.onnx", "-o", target, "--sparsity", "0.99")
    before = data.read_bytes()
    result = sparseconv(*arguments)
    assert result.exit_code == 1
    assert f"{data} is there and may be another model's: remove it, or give {target} another name" in result.stderr
    assert data.read_bytes() == before
    assert not target.exists()
    data.unlink()
    for _ in range(2):  # the second replaces the first, with its data
        assert sparseconv(*arguments).exit_code == 0


def test_a_model_with_external_data_is_written_again_in_the_current_directory(sparseconv, models, monkeypatch):
    """There onnx's own function finds the file that is to be replaced, and refuses."""
    monkeypatch.chdir(models)
    for sparsity in ("0.96", "0.98"):
        assert sparseconv("prune", "backup.onnx", "-o", "out.onnx", "--sparsity", sparsity).exit_code == 0
    assert sorted(path.name for path in models.glob("out*")) == ["out.onnx", "out.onnx.data"]
    (weight,) = [t for t in onnx.load("out.onnx").graph.initializer if len(t.dims) == 4]
    assert (onnx.numpy_helper.to_array(weight) == 0).mean() >= 0.98


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        f"convert backup.onnx -o {LONG}.onnx",
        f"convert backup.onnx -o new.onnx --report {LONG}.html",
        f"convert backup.onnx --out-dir {LONG}",
        f"prune backup.onnx -o {'x' * 248}.onnx --sparsity 0.9",
        f"tune backup.onnx -o {LONG}.json --preset quick",
        f"verify backup.onnx backup.onnx --inputs {LONG}.npz",
        f"report backup.onnx -o {LONG}.html",
        f"inspect {LONG}.onnx",
    ],
)
def test_names_that_no_file_can_have_are_one_line(sparseconv, models, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(models)
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path))
    result = sparseconv(*arguments.split())
    assert result.exit_code in (1, 2)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in models.iterdir() if path.name != "new.onnx") == [
        "backup.onnx",
        "model.onnx",
        "model.onnx.data",
    ]


def test_decisions_are_not_written_over(sparseconv, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    decisions = tmp_path / "decisions.json"
    decisions.write_text("{}")
    for arguments in (["-o", decisions], ["-o", "new.onnx", "--report", decisions]):
        result = sparseconv("convert", "backup.onnx", "--decisions", decisions, *arguments)
        assert result.exit_code == 2
        assert "is the input" in result.stderr
    assert decisions.read_text() == "{}"


def test_a_folder_removes_only_what_it_wrote(sparseconv, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    networks.save(networks.dense(networks.weights(channels=16, sparsity=0.95, layers=1)), source / "ok.onnx")
    foreign = out / "ok.onnx.data"
    foreign.write_text("mine")
    assert sparseconv("convert", source, "--out-dir", out, "--force").exit_code == 0
    assert (out / "ok.onnx").is_file()
    sparseconv("convert", source, "--out-dir", out, "--min-sparsity", 1)
    assert not (out / "ok.onnx").exists()
    assert foreign.read_text() == "mine"


@pytest.mark.parametrize("location", ["/dev/zero", "../outside", "x" * 300])
def test_a_folder_reads_nothing_outside_of_it(sparseconv, models, tmp_path, location):
    (tmp_path / "outside").write_text("secret")
    proto = onnx.load(str(models / "model.onnx"), load_external_data=False)
    for stored in proto.graph.initializer:
        for entry in stored.external_data:
            if entry.key == "location":
                entry.value = location
    (models / "model.onnx").write_bytes(proto.SerializeToString())
    result = sparseconv("convert", models, "--out-dir", tmp_path / "out", "--force")
    assert result.exit_code in (1, 2, 3)
    assert "Traceback" not in result.stderr
    assert (tmp_path / "out" / "backup.onnx").is_file()


def test_names_do_not_steer_a_terminal(sparseconv, tmp_path):
    proto = networks.dense(networks.weights(channels=16, sparsity=0.95, layers=1))
    for node in proto.graph.node:
        if node.op_type == "Conv":
            node.name = "\x1b[31mred\x1b]0;title\x07\nline2\r\u202eover"
    path = networks.save(proto, tmp_path / "model.onnx")
    for arguments in (["inspect", path], ["convert", path, "-o", tmp_path / "out.onnx", "--force"]):
        result = sparseconv(*arguments)
        assert result.exit_code == 0, result.stderr
        assert not set("\x1b\x07\r\u202e") & set(result.stdout + result.stderr)
        assert "line2" in result.stdout
