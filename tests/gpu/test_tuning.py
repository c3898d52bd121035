"""Tuning on a GPU: every candidate runs, and what is chosen is what the converted model carries. No figure counts."""

from __future__ import annotations

import dataclasses
import math

import pytest

from onnx_sparseconv.converter import ConvertOptions, convert, read_decisions, write_decisions
from onnx_sparseconv.converter.decisions import Choice
from onnx_sparseconv.converter.gpu_images import sparse_nodes
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.kernels.image_container import parse
from onnx_sparseconv.runtime.verify import verify
from onnx_sparseconv.tuner import TuneOptions, make_cases, tune
from tests.runtime import networks
from tests.tuner.plans import FAST


@pytest.fixture(autouse=True)
def _no_time_and_a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path):
    weights = networks.weights(channels=32, layers=2, sparsity=0.9)
    return networks.save(networks.dense(weights), tmp_path / "m.onnx")


def images_of(model):
    nodes = sparse_nodes(model)
    return {key[1]: parse(attributes_from_proto(n.proto).cuda_images.tobytes()) for key, n in nodes.items()}


@pytest.fixture(params=["keep", "fp16"])
def options(request, target, tmp_path):
    return TuneOptions(
        provider="cuda",
        targets=(target,),
        cases=make_cases([1, 3]),
        preset="thorough" if request.param == "keep" else "quick",
        precision=request.param,
        database=tmp_path / "db.jsonl",
    )


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_every_candidate_runs_and_the_chosen_plans_are_built(path, tmp_path, target, options, cuda_graph):
    options = dataclasses.replace(options, cuda_graph=cuda_graph)
    report = tune(path, options)
    assert report.decisions.targets == (target,)
    for layer in report.decisions.layers:
        generated = [c for c in layer.candidates if "generated" in c.name]
        assert len(generated) >= 2
        for candidate in layer.candidates:
            assert all(0 < time < math.inf for time in candidate.times_us), candidate
        assert set(layer.kernels) == {target}
    assert tune(path, options).num_measured == 0

    # Whatever the stopwatch said: all sparse.
    layers = tuple(dataclasses.replace(layer, choice=Choice.SPARSE) for layer in report.decisions.layers)
    write_decisions(dataclasses.replace(report.decisions, layers=layers), tmp_path / "d.json")
    made = read_decisions(tmp_path / "d.json")
    fast = tmp_path / "fast.onnx"
    model, converted = convert(path, fast, ConvertOptions(decisions=made, precision=options.precision))
    assert converted.targets == (target,)
    found = images_of(model)
    assert len(found) == len(layers)
    for layer in layers:
        kernel, images = layer.kernels[target], found[layer.node]
        assert [image.plan.tile_channels for image in images] == [kernel.tile_channels] * (kernel.kernel == "generated")
    assert verify(path, fast, provider="cuda").passed
