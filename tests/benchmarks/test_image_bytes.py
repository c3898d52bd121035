"""The program that measures bytes of GPU images: on layers that compile at once."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from tests.support.gpu_images import needs_nvrtc

pytestmark = needs_nvrtc


@pytest.fixture
def program():
    return importlib.import_module("image_bytes")


@pytest.fixture
def target():
    from onnx_sparseconv.kernels.targets import resolve_targets

    return resolve_targets(["sm_80"])[0]


def small_layer(name="small", **changes):
    from suite_rows import Layer

    sizes = {
        "in_channels": 8,
        "out_channels": 8,
        "height": 8,
        "width": 8,
        "kernel": 3,
        "stride": 1,
        "pad": 1,
        "group": 1,
    }
    return Layer(name, **{**sizes, **changes})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_counted(program, target, dtype):
    record = program.measure_layer(small_layer(), 0.5, dtype, target)
    size = {"float32": 4, "float16": 2}[dtype]
    assert record["dense_bytes"] == 8 * 8 * 9 * size
    assert record["nonzeros"] * size < record["csr_bytes"] < record["dense_bytes"] * 1.5
    assert record["cubin_bytes"] > 16 * record["nonzeros"]
    assert 0 < record["image_bytes"] <= record["cubin_bytes"]
    assert 0 < record["container_bytes"] - record["image_bytes"] < 300
    assert 16 < record["registers"] < 256
    assert record["spill_bytes"] == 0
    assert record["nvrtc_cpu_s"] > 0
    assert record["setting"] == {"sparsity": 0.5, "dtype": dtype, "architecture": "sm_80"}


def test_a_layer_without_weights_is_told(program, target):
    record = program.measure_layer(small_layer(), 1.0, "float32", target)
    assert record["refusal"]
    assert "image_bytes" not in record


def test_the_file(program, monkeypatch, tmp_path):
    layers = [small_layer("first"), small_layer("second", height=1)]
    monkeypatch.setattr(program, "choose_layers", lambda: layers)
    path = tmp_path / "bytes.json"
    monkeypatch.setattr(sys, "argv", ["image_bytes.py", "--sparsity", "0.5", "--layers", "second", "-o", str(path)])
    assert program.main() == 0
    text = path.read_text()
    results = json.loads(text)
    assert [record["layer"]["name"] for record in results["layers"]] == ["second"] * 2
    assert results["tools"].startswith("NVRTC ")
    assert {"commit", "versions", "cpu"} <= set(results["environment"])
    assert str(tmp_path) not in text


def test_the_layers_of_the_suite(program):
    names = [layer.name for layer in program.choose_layers()]
    assert "3x3_256-256@56" in names
    assert "3x3_64-64@56" in names
    assert not any("512@" in name for name in names)
