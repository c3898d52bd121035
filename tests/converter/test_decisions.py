"""Decisions files: what is written is read, what is edited counts, what cannot be is said; models stay right."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_sparseconv.converter import ConvertOptions, convert, inspect, read_decisions, write_decisions
from onnx_sparseconv.converter.conv_sites import find_conv_sites
from onnx_sparseconv.converter.decisions import (
    CandidateTime,
    Cause,
    Choice,
    Decisions,
    LayerDecision,
    decisions_text,
    fingerprint,
)
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.report import Reason
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.errors import DecisionsError, SparseConvError
from onnx_sparseconv.kernels.kernel_choice import KernelChoice
from onnx_sparseconv.runtime.session import make_session
from tests.runtime import networks
from tests.support.gpu_images import needs_nvrtc
from tests.support.odd_models import FEEDS

SETTING = {"processor": "an abacus", "onnxruntime": "1.0", "threads": 2}


KERNELS = {"sm_90": KernelChoice("generated", 32, 24, 864, (7, 9), 4), "sm_86": KernelChoice("csr")}


def layer(node, choice="sparse", **more):
    values = {"advice": Choice(choice), "cause": Cause.MEASURED, "text": "2.00x faster"} | more
    return LayerDecision(node, "", 0, Choice(choice), **values)


def decisions(*layers):
    return Decisions("m.onnx", SETTING, ({"x": (1, 8, 12, 12)},), layers)


def model(count=2, sparsity=0.9):
    return networks.dense(networks.weights(layers=count, sparsity=sparsity))


def reasons(proto, made):
    return [v.verdict.reason for v in inspect(proto, ConvertOptions(decisions=made)).layers]


def test_what_is_written_is_read(tmp_path):
    candidates = (
        CandidateTime("dense", Choice.DENSE, (10.5, 20.0)),
        CandidateTime("sparse", Choice.SPARSE, (math.inf, math.inf), "no such kernel"),
        CandidateTime("sparse, looked at", Choice.SPARSE, (1.0, 2.0), counts=False),
    )
    made = replace(
        decisions(
            layer("conv0", "dense", sparsity=0.5, layer="00ff", measured_as="conv7", candidates=candidates),
            layer('a "b" é\n', "sparse", cause=Cause.BUDGET, kernels=KERNELS),
        ),
        whole_model={"speedup": [1.5]},
        notes=("a note",),
        targets=("sm_90", "sm_86"),
    )
    write_decisions(made, tmp_path / "d.json")
    read = read_decisions(tmp_path / "d.json")
    assert read == replace(made, source=str(tmp_path / "d.json"))
    assert "Infinity" not in (tmp_path / "d.json").read_text()
    assert read.measured_on == "an abacus, onnxruntime 1.0, threads: 2, x 1x8x12x12"


def test_the_choice_counts_whatever_the_sparsity():
    made = decisions(layer("conv0", "dense"), layer("conv1"))
    assert reasons(model(), made) == [Reason.DECIDED_DENSE, Reason.DECIDED_SPARSE]
    converted, report = convert(model(sparsity=0.0), options=ConvertOptions(decisions=made))
    assert [n.op_type for n in converted.graph.node if "Conv" in n.op_type] == ["Conv", "SparseConv"]
    assert any("an abacus" in note for note in report.notes)
    assert report.model.layers[0].verdict.text == "2.00x faster"


def test_a_layer_that_was_taken_out_is_decided_by_its_sparsity():
    assert reasons(model(), decisions(layer("conv1", "dense"))) == [Reason.REWRITE, Reason.DECIDED_DENSE]


def test_a_rule_that_explains_more_is_kept():
    made = decisions(layer("conv0", "dense", cause=Cause.HOPELESS), layer("conv1", "dense", cause=Cause.BUDGET))
    assert reasons(model(sparsity=0.0), made) == [Reason.TOO_DENSE, Reason.TOO_DENSE]


def test_an_edited_choice_says_that_it_was_edited(tmp_path):
    path = tmp_path / "d.json"
    write_decisions(decisions(layer("conv0"), layer("conv1")), path)
    path.write_text(path.read_text().replace('"choice": "sparse"', '"choice": "dense"', 1))
    first, second = inspect(model(), ConvertOptions(decisions=read_decisions(path))).layers
    assert (first.verdict.rewrite, second.verdict.rewrite) == (False, True)
    assert first.verdict.text == "chosen by hand, though tuning chose sparse: 2.00x faster"


def test_a_file_written_by_hand_needs_little(tmp_path):
    path = tmp_path / "d.json"
    document = {
        "schema_version": 1,
        "kind": "onnx-sparseconv decisions",
        "model": "m",
        "setting": {},
        "input_shapes": [],
        "layers": [{"node": "conv0", "choice": "sparse"}],
    }
    path.write_text(json.dumps(document))
    assert reasons(model(1), read_decisions(path)) == [Reason.DECIDED_SPARSE]


def weights_changed(proto):
    (site,) = find_conv_sites(ModelView(proto), ShapeMap(proto))
    return fingerprint(site)


def test_the_fingerprint_is_of_weights_and_geometry():
    first, again, other = model(1), model(1), networks.dense(networks.weights(layers=1, seed=2))
    strided = model(1)
    strided.graph.node[0].attribute.add(name="strides", type=7, ints=[2, 2])
    prints = [weights_changed(m) for m in (first, again, other, strided)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    made = decisions(layer("conv0", layer=prints[0]))
    assert reasons(first, made) == [Reason.DECIDED_SPARSE]
    with pytest.raises(DecisionsError, match="'conv0' has other weights"):
        reasons(other, made)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (decisions(layer("nonsense"), layer("conv0")), r"no convolution 'nonsense'; it has conv0, conv1"),
        (decisions(layer("nonsense")), r"is for another model \(m\.onnx\)"),
        (decisions(layer("conv0"), layer("conv0")), "two decisions on 'conv0'"),
        (decisions(replace(layer("conv0"), number=1), layer("conv0")), "number 2 of that name"),
    ],
)
def test_what_does_not_fit_the_model_is_an_error(made, message):
    with pytest.raises(DecisionsError, match=message):
        convert(model(), options=ConvertOptions(decisions=made))


def test_what_cannot_be_sparse_is_an_error():
    proto = FEEDS["double"].build()
    (name,) = [found.name for found in inspect(proto).layers]
    with pytest.raises(DecisionsError, match="cannot: its weight is float64"):
        convert(proto, options=ConvertOptions(decisions=decisions(layer(name))))
    assert reasons(proto, decisions(layer(name, "dense"))) == [Reason.DECIDED_DENSE]


CASE = {"dense_us": 2.0, "predicted_us": 1.0, "measured_us": 1.0}
TIMED = {"name": "sparse", "choice": "sparse", "times_us": [-1.0]}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda _: "not json", "is not JSON"),
        (lambda _: "[]", "is not a decisions file"),
        (lambda d: d | {"kind": "else"}, "is not a decisions file"),
        (lambda d: d | {"schema_version": 99}, "schema_version 99"),
        (lambda d: d | {"layers": {}}, "'layers' is missing or has the wrong type"),
        (lambda d: d | {"layers": [1]}, "layer 1: is not an object"),
        (lambda d: d | {"layers": [{"node": "a"}]}, "layer 'a': 'choice' is missing"),
        (lambda d: d | {"layers": [{"node": "a", "choice": "fast"}]}, "'fast'; it must be one of dense, sparse"),
        (lambda d: d | {"layers": [{"node": "a", "choice": "dense", "number": True}]}, "'number' is missing or has"),
        (lambda d: d | {"input_shapes": [{"x": "1x2"}]}, "'input_shapes' must hold"),
        (lambda d: d | {"whole_model": {"cases": 3}}, "'cases' of 'whole_model' must have times"),
        (lambda d: d | {"whole_model": {"cases": [CASE | {"predicted_us": -5e300}]}}, "must have times: dense_us, "),
        (lambda d: d | {"whole_model": {"cases": [CASE | {"measured_us": math.nan}]}}, "'whole_model' must have times"),
        (lambda d: d | {"layers": [d["layers"][0] | {"candidates": [TIMED]}]}, "'times_us' must hold times, or null"),
        (lambda d: d | {"layers": [d["layers"][0] | {"candidates": [TIMED | {"times_us": [10**400]}]}]}, "hold times"),
    ],
)
def test_a_broken_file_says_where(tmp_path, edit, message):
    path = tmp_path / "d.json"
    edited = edit(json.loads(decisions_text(decisions(layer("conv0")))))
    path.write_text(edited if isinstance(edited, str) else json.dumps(edited))
    with pytest.raises(DecisionsError, match=message) as error:
        read_decisions(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "binary", "."):
        with pytest.raises(DecisionsError, match="cannot be read"):
            read_decisions(tmp_path / name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
FIELDS = ["node", "choice", "advice", "cause", "number", "text", "sparsity", "layer", "candidates", "graph"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FIELDS), JSON)
def test_any_edit_is_read_or_refused(tmp_path, field, value):
    document = json.loads(decisions_text(decisions(layer("conv0"))))
    document["layers"][0][field] = value
    path = tmp_path / "d.json"
    path.write_text(json.dumps(document))
    try:
        inspect(model(1), ConvertOptions(decisions=read_decisions(path)))
    except SparseConvError as error:
        assert str(path) in str(error)  # noqa: PT017


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([*Choice, None]), min_size=4, max_size=4))
def test_a_converted_model_is_right_whatever_was_decided(choices):
    proto = networks.dense(networks.weights(layers=4, sparsity=0.6), batch=2)
    named = [layer(f"conv{i}", choice) for i, choice in enumerate(choices) if choice is not None]
    converted, report = convert(proto, options=ConvertOptions(decisions=decisions(*named), min_sparsity=0.5))
    sparse = {i for i, choice in enumerate(choices) if choice is not Choice.DENSE}
    assert {found.name for found in report.model.layers if found.verdict.rewrite} == {f"conv{i}" for i in sparse}
    if converted is None:
        assert not sparse
        return
    x = np.random.default_rng(0).standard_normal((2, 8, 12, 12)).astype(np.float32)
    (wanted,), (got,) = (
        make_session(m, use_library=library).run(None, {"x": x}) for m, library in ((proto, False), (converted, True))
    )
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_kernels_by_layer_and_architecture():
    made = decisions(layer("conv0", kernels=KERNELS), layer("conv1"))
    assert made.kernels == {("", "conv0", 0): {90: KERNELS["sm_90"], 86: KERNELS["sm_86"]}}


@pytest.mark.parametrize(
    ("kernels", "told"),
    [
        ({"volta": {"kernel": "csr"}}, "'volta' is no architecture such as sm_90"),
        ({"sm_90": {}}, "its kernel for sm_90: 'kernel' is missing"),
        ({"sm_90": []}, "its kernel for sm_90: is not an object"),
        ({"sm_90": {"kernel": "magic"}}, "must be one of generated, csr"),
        ({"sm_90": {"kernel": "generated"}}, "needs 'tile_channels'"),
        ({"sm_90": {"kernel": "generated", "tile_channels": -1}}, "no number may be negative"),
        ({"sm_90": {"kernel": "generated", "tile_channels": 8, "threads": "many"}}, "'threads' is missing or has the"),
        ({"sm_90": {"kernel": "generated", "tile_channels": 8, "in_size": [1]}}, "'in_size' must be two sizes"),
        ({"sm_90": {"kernel": "generated", "tile_channels": 8, "in_size": [0, 7]}}, "'in_size' must be two sizes"),
        ({"sm_90": {"kernel": "generated", "tile_channels": 8, "min_batch": -1}}, "no number may be negative"),
        ({"sm_90": {"kernel": "generated", "tile_channels": 8, "min_batch": 2**31}}, "'min_batch' is 2147483648; it"),
    ],
)
def test_a_kernel_that_is_none_is_told_with_its_place(tmp_path, kernels, told):
    document = json.loads(decisions_text(decisions(layer("conv0"))))
    document["layers"][0]["kernels"] = kernels
    path = tmp_path / "d.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DecisionsError, match=re.escape(told)) as error:
        read_decisions(path)
    assert str(error.value).startswith(f"{path}: layer 'conv0'")


def test_targets_are_architectures(tmp_path):
    document = json.loads(decisions_text(decisions(layer("conv0"))))
    (tmp_path / "d.json").write_text(json.dumps(document | {"targets": ["native"]}))
    with pytest.raises(DecisionsError, match="'native' is no architecture"):
        read_decisions(tmp_path / "d.json")


@needs_nvrtc
def test_a_kernel_of_another_version_is_replaced_with_a_note(tmp_path):
    gone = {"sm_90": KernelChoice("generated", 7, 8, 9)}
    made = replace(decisions(layer("conv0", kernels=gone)), targets=("sm_90",))
    converted, report = convert(model(1), options=ConvertOptions(decisions=made, jobs=1, cache_dir=tmp_path))
    assert any("was to run on sm_90 with 7 channels in a tile" in note for note in report.notes)
    assert converted is not None


@needs_nvrtc
def test_other_targets_may_be_asked_for(tmp_path):
    made = replace(decisions(layer("conv0", kernels=KERNELS)), targets=("sm_90", "sm_86"))
    options = ConvertOptions(decisions=made, jobs=1, cache_dir=tmp_path, targets=("sm_86",))
    _, report = convert(model(1), options=options)
    assert report.targets == ("sm_86",)
    (image,) = report.model.layers[0].images
    assert "the library's own kernels were chosen" in image.refusal
