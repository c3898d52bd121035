"""``convert --precision fp16`` on files: what it prints, writes and refuses."""

import json

import numpy as np
import onnx
import pytest

from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.kernels.image_container import parse
from tests.runtime import networks
from tests.support.gpu_images import needs_nvrtc
from tests.support.gpu_rule import let_code_pay


def test_the_report_in_words_and_as_json(sparseconv, model, tmp_path):
    result = sparseconv(
        "convert", model, "-o", tmp_path / "h.onnx", "--precision", "fp16", "--report", tmp_path / "r.json"
    )
    assert result.exit_code == 0
    assert "precision     float16: 2 nodes; 2 Casts added" in result.stdout
    assert "file    " in result.stdout
    document = json.loads((tmp_path / "r.json").read_text())
    precision = document["precision"]
    assert (precision["precision"], precision["changed"], precision["casts"]) == ("fp16", True, 2)
    assert precision["kept"] == []
    assert document["bytes_after"] < document["bytes_before"]
    assert sparseconv("verify", model, tmp_path / "h.onnx").exit_code == 0
    assert sparseconv("verify", model, tmp_path / "h.onnx", "--no-library").exit_code == 0
    assert sparseconv("restore", tmp_path / "h.onnx", "-o", tmp_path / "d.onnx").exit_code == 0
    assert sparseconv("verify", model, tmp_path / "d.onnx").exit_code == 0


def test_inputs_and_outputs_in_float16(sparseconv, model, tmp_path):
    result = sparseconv("convert", model, "-o", tmp_path / "h.onnx", "--precision", "fp16", "--fp16-io")
    assert "inputs and outputs, too; 0 Casts added" in result.stdout
    assert sparseconv("verify", model, tmp_path / "h.onnx").exit_code == 0
    assert sparseconv("bench", model, tmp_path / "h.onnx", "--seconds", "0.1").exit_code == 0


def test_what_stays_float_is_told(sparseconv, model, tmp_path):
    result = sparseconv(
        "convert", model, "-o", tmp_path / "h.onnx", "--precision", "fp16", "--keep-float", "conv1", "--min-sparsity", 1
    )
    assert result.exit_code == 0
    assert "became float16; no Conv layer qualifies" in result.stdout
    assert "  1 Conv (conv1): as asked" in result.stdout


def test_nothing_to_do(sparseconv, tmp_path):
    half = networks.save(networks.dense(networks.weights(np.float16)), tmp_path / "m.onnx")
    result = sparseconv("convert", half, "-o", tmp_path / "h.onnx", "--precision", "fp16", "--min-sparsity", 1)
    assert result.exit_code == 4
    assert "nothing became float16" in result.stdout
    assert "4 nodes compute in float16 already" in result.stdout
    assert not (tmp_path / "h.onnx").exists()


def test_several_models_and_a_dry_run(sparseconv, model, dense_model, tmp_path):
    result = sparseconv("convert", model, dense_model, "--out-dir", tmp_path / "out", "--precision", "fp16", "-j", 2)
    assert result.exit_code == 0
    assert "now float16" in result.stdout.splitlines()[-1]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["dense.onnx", "model.onnx"]
    result = sparseconv("convert", dense_model, "--dry-run", "--precision", "fp16")
    assert result.exit_code == 0
    assert "would become float16" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fp16-io"], "--fp16-io and --keep-float need --precision fp16"),
        (["--keep-float", "conv0"], "--fp16-io and --keep-float need --precision fp16"),
        (["--precision", "fp16", "--keep-float", "nothing"], "no node or operator of that name"),
    ],
)
def test_what_does_not_fit_together_is_one_line(sparseconv, model, tmp_path, options, message):
    result = sparseconv("convert", model, "-o", tmp_path / "h.onnx", *options)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "h.onnx").exists()


def test_an_unknown_precision_is_refused(sparseconv, model, tmp_path):
    assert sparseconv("convert", model, "-o", tmp_path / "h.onnx", "--precision", "int8").exit_code == 2


@needs_nvrtc
def test_gpu_images_are_those_of_float16_layers(sparseconv, model, tmp_path, monkeypatch):
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "cache"))
    let_code_pay(monkeypatch)
    out = tmp_path / "h.onnx"
    for source in (model, out):  # the second time it is float16 already, and its images are replaced
        result = sparseconv("convert", source, "-o", tmp_path / "new.onnx", "--precision", "fp16", "--target", "sm_80")
        assert result.exit_code == 0, result.stderr
        (tmp_path / "new.onnx").replace(out)
        sparse = [attributes_from_proto(n) for n in onnx.load(str(out)).graph.node if n.op_type == "SparseConv"]
        assert [s.element_type for s in sparse] == [np.float16] * 2
        for attributes in sparse:
            (image,) = parse(attributes.cuda_images.tobytes())
            assert image.plan.element_type == 10
    assert sparseconv("verify", model, out).exit_code == 0


def test_metadata_stays(sparseconv, model, tmp_path):
    sparseconv("convert", model, "-o", tmp_path / "h.onnx", "--precision", "fp16")
    keys = {p.key for p in onnx.load(str(tmp_path / "h.onnx")).metadata_props}
    assert "onnx_sparseconv.version" in keys
