"""The model that is tuned, as it will be: in float16 where it will be that, with the layers of the original."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.converter.analyse import make_plan
from onnx_sparseconv.converter.decide import DecisionOptions
from onnx_sparseconv.converter.decisions import fingerprint
from onnx_sparseconv.converter.gpu_images import node_keys
from onnx_sparseconv.converter.model_io import load
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.runtime.verify import verify
from onnx_sparseconv.tuner import TuneOptions, tune
from onnx_sparseconv.tuner import source as source_module
from onnx_sparseconv.tuner.source import open_source
from tests.runtime import networks
from tests.support.odd_models import FEEDS
from tests.support.real_models import find_model
from tests.tuner.plans import FAST

HALF = ConvertOptions(precision="fp16")


def sites(path):
    return make_plan(load(path), DecisionOptions()).sites


def test_a_model_is_tuned_as_it_is(tmp_path):
    path = networks.save(networks.dense(networks.weights()), tmp_path / "m.onnx")
    found = open_source(path, ConvertOptions(), tmp_path)
    assert (found.name, found.original, found.dense, found.fingerprints) == ("m.onnx", path, path, {})
    found = open_source(networks.dense(networks.weights()), ConvertOptions(), tmp_path)
    assert found.original == found.dense
    assert found.original.parent == tmp_path


def test_a_model_that_becomes_float16_is_tuned_in_float16(tmp_path):
    path = networks.save(networks.dense(networks.weights()), tmp_path / "m.onnx")
    found = open_source(path, HALF, tmp_path)
    assert found.original == path
    assert all(site.weight.values.dtype == np.float16 for site in sites(found.dense))
    assert not any(site.is_sparse for site in sites(found.dense))
    keys = node_keys(sites(path))
    assert dict(found.fingerprints) == dict(zip(keys, map(fingerprint, sites(path)), strict=True))
    assert node_keys(sites(found.dense)) == keys


def test_a_model_of_which_nothing_becomes_float16_is_told(tmp_path):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", inputs, outputs)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(ModelError, match="nothing of it becomes float16, so tune it as it is"):
        open_source(model, HALF, tmp_path)


def test_layers_that_cannot_be_followed_are_told(tmp_path, monkeypatch):
    path = networks.save(networks.dense(networks.weights()), tmp_path / "m.onnx")
    real = source_module.convert

    def renaming(model, output, options):
        made, report = real(model, None, options)
        made.graph.node[[n.op_type for n in made.graph.node].index("Conv")].name = "another"
        networks.save(made, output)
        return made, report

    monkeypatch.setattr(source_module, "convert", renaming)
    with pytest.raises(ModelError, match="cannot be followed through the conversion to float16: convert it with"):
        open_source(path, HALF, tmp_path)


@pytest.mark.parametrize("name", sorted(FEEDS))
def test_odd_models_keep_their_layers_or_say_so(tmp_path, name):
    try:
        found = open_source(FEEDS[name].build(), HALF, tmp_path)
    except ModelError as error:
        assert "nothing of it becomes float16" in str(error)  # noqa: PT017
        return
    assert set(found.fingerprints) == set(node_keys(sites(found.dense)))


@pytest.mark.parametrize("name", ["lenet5_dns_sparse"])
def test_a_real_model_is_tuned_in_float16_and_right(name, tmp_path, monkeypatch):
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    path = find_model(name)
    options = TuneOptions(preset="quick", threads=1, precision="fp16", database=tmp_path / "db.jsonl")
    report = tune(path, options)
    _, converted = convert(path, tmp_path / "fast.onnx", ConvertOptions(decisions=report.decisions, precision="fp16"))
    assert converted.model.num_rewritten == report.decisions.num_sparse
    assert converted.is_half
    assert verify(path, tmp_path / "fast.onnx").passed
