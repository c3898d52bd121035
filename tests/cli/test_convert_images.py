"""``sparseconv convert --target`` and what ``inspect`` and ``doctor`` say of images and compilers."""

from __future__ import annotations

import json

import onnx
import pytest

from onnx_sparseconv.kernels import targets
from onnx_sparseconv.kernels.cuda_driver import CudaDriver
from tests.kernels.compile_tasks import TinyGenerator
from tests.runtime import networks
from tests.support.gpu_images import needs_nvjitlink, needs_nvrtc
from tests.support.gpu_rule import let_code_lose, let_code_pay

pytestmark = needs_nvrtc


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch):
    let_code_pay(monkeypatch)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("onnx_sparseconv.kernels.compile.StraightLineCode", TinyGenerator)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(targets, "read_cuda_driver", lambda: CudaDriver("", "", (), "nobody home"))


@pytest.fixture
def converted(sparseconv, model, tmp_path):
    path = tmp_path / "converted.onnx"
    assert sparseconv("convert", model, "-o", path, "--target", "sm_90", "--target", "sm_80", "-j", 1).exit_code == 0
    return path


@pytest.mark.usefixtures("tiny")
def test_convert_tells_every_image_and_what_they_take(sparseconv, model, tmp_path):
    report, out = tmp_path / "report.json", tmp_path / "out.onnx"
    result = sparseconv("convert", model, "-o", out, "--target", "sm_90", "--jobs", 1, "--report", report)
    assert result.exit_code == 0, result.stderr
    assert "GPU images" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("conv") and "sm_90" in line]
    assert [row[0] for row in rows] == ["conv0", "conv1"]
    assert "with images" in result.stdout
    onnx.checker.check_model(str(out))
    document = json.loads(report.read_text())
    assert document["targets"] == ["sm_90"]
    assert document["imaged_bytes_after"] > 0
    for layer in document["model"]["layers"]:
        (image,) = layer["images"]
        assert image["architecture"] == "sm_90"
        assert image["size_bytes"] > 0
        assert image["time_us"] > 0
        assert image["plan"]
    again = sparseconv("convert", model, "-o", out, "--target", "sm_90", "--jobs", 1).stdout
    assert again.count(" cached ") == 2


@pytest.mark.usefixtures("tiny")
def test_images_are_added_to_a_converted_model(sparseconv, model, tmp_path):
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    sparseconv("convert", model, "-o", first)
    result = sparseconv("convert", first, "-o", second, "--target", "sm_90", "-j", 1)
    assert result.exit_code == 0
    assert "already converted; GPU images were added" in result.stdout
    assert "Left dense" not in result.stdout
    assert second.stat().st_size > first.stat().st_size
    result = sparseconv("convert", second, "-o", tmp_path / "third.onnx")
    assert result.exit_code == 4


@pytest.mark.usefixtures("tiny")
def test_inspect_shows_the_images_and_restore_drops_them(sparseconv, model, converted, tmp_path):
    result = sparseconv("inspect", converted)
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("conv") and "NVRTC" in line]
    assert len(lines) == 4
    assert all("from CUDA" in line for line in lines)
    (document,) = json.loads(sparseconv("inspect", converted, "--json").stdout)["models"]
    assert [[i["architecture"] for i in layer["images"]] for layer in document["layers"]] == [["sm_90", "sm_80"]] * 2
    assert "GPU images" not in sparseconv("inspect", model).stdout
    restored = tmp_path / "restored.onnx"
    assert sparseconv("restore", converted, "-o", restored).exit_code == 0
    assert restored.stat().st_size < 1.1 * model.stat().st_size


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("jobs", [1, 2])
def test_several_models_get_images(sparseconv, model, tmp_path, jobs):
    other = networks.save(networks.dense(networks.weights(channels=16, sparsity=0.95, layers=1)), tmp_path / "b.onnx")
    out = tmp_path / "out"
    result = sparseconv(
        "convert", model, other, "--out-dir", out, "--jobs", jobs, "--target", "sm_90", "--min-sparsity", 0.5
    )
    assert result.exit_code == 0, result.stderr
    for path in out.iterdir():
        assert "sm_90" in sparseconv("inspect", path).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--target sm_91", 2, "sm_75, sm_80"),
        ("--target volta", 2, "unknown target 'volta'"),
        ("--target sm_90 --nvrtc 11", 2, "11"),
        ("--target native", 1, "native: nobody home; name an architecture"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_target_that_cannot_be_is_one_line(sparseconv, tmp_path, arguments, code, message):
    # Of two models: said once, before either is read.
    models = [tmp_path / "missing.onnx", tmp_path / "neither.onnx"]
    result = sparseconv("convert", *models, "--out-dir", tmp_path / "out", *arguments.split())
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stderr.count("error: ") <= 1
    assert list(tmp_path.iterdir()) == []


def test_doctor_tells_compilers_and_cache(sparseconv):
    result = sparseconv("doctor")
    assert "compiler           NVRTC 1" in result.stdout
    assert "sm_90" in result.stdout
    assert "0 images, 0 B" in result.stdout
    document = json.loads(sparseconv("doctor", "--json").stdout)
    assert "sm_90" in document["compilers"][0]["targets"]
    assert document["image_cache"]["images"] == 0


@needs_nvjitlink
def test_doctor_tells_whether_there_is_a_linker(sparseconv, monkeypatch):
    assert "linked by nvJitLink 1" in " ".join(sparseconv("doctor").stdout.split())
    monkeypatch.setattr("onnx_sparseconv.kernels.nvjitlink.find", lambda _version: None)
    assert "no nvJitLink to link long ones" in " ".join(sparseconv("doctor").stdout.split())
    assert json.loads(sparseconv("doctor", "--json").stdout)["compilers"][0]["linker"] == ""


def test_doctor_without_a_compiler_says_what_it_is_for(sparseconv, monkeypatch):
    monkeypatch.setattr("onnx_sparseconv.kernels.nvrtc.installed", lambda: ())
    result = sparseconv("doctor")
    assert result.exit_code == 0
    assert "NVRTC not found: only needed for convert --target" in result.stdout


def test_a_layer_that_is_foretold_to_lose_stays_dense_unless_told_otherwise(sparseconv, model, tmp_path, monkeypatch):
    let_code_lose(monkeypatch)
    asked = ["convert", model, "-o", tmp_path / "out.onnx", "--target", "sm_90", "--dry-run"]
    result = sparseconv(*asked)
    assert result.exit_code == 4
    assert "no predicted gain, " in result.stdout
    assert "at batch 1 and " in result.stdout
    assert sparseconv(*asked, "--force").exit_code == 0
    assert sparseconv(*asked, "--min-sparsity", 0.2).exit_code == 0
    assert "on sm_90 at batch 7 and" in sparseconv(*asked, "--batch", 7).stdout


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "--batch needs --tune, or --target"),
        (("--target", "sm_90", "--force"), "--batch has nothing to decide: --force decides for all batch sizes"),
        (("--target", "sm_90", "--min-sparsity", "0.5"), "nothing to decide: --min-sparsity decides for all"),
    ],
)
def test_a_batch_size_needs_something_to_decide(sparseconv, model, tmp_path, more, said):
    result = sparseconv("convert", model, "-o", tmp_path / "out.onnx", "--batch", 2, *more)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "out.onnx").exists()
