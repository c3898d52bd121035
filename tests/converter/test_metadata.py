"""What a converted model says about itself."""

import json

import pytest

from onnx_sparseconv import version
from onnx_sparseconv.converter import ConvertOptions, convert, inspect, restore
from onnx_sparseconv.converter.metadata import DECISIONS_KEY, VERSION_KEY, decisions_of, version_of
from tests.support.odd_models import FEEDS, branch, conv, dense_branch, if_node, model, pruned, tensor, x_and_condition


def two_layers():
    nodes = [conv(out="h", name="first"), conv("V", "Y", "h", name="second")]
    return model(nodes, [tensor(pruned(), "W"), tensor(pruned((16, 8, 3, 3), 0.5), "V")])


def test_version_and_decisions_are_recorded():
    proto, report = convert(two_layers())
    assert version_of(proto) == version.__version__ == inspect(proto).converted_by
    first, second = decisions_of(proto)
    assert first == {
        "name": "first",
        "graph": "",
        "weight": "W",
        "rewritten": True,
        "reason": "rewrite",
        "text": report.model.layers[0].verdict.text,
        "sparsity": report.model.layers[0].sparsity,
    }
    assert (second["name"], second["rewritten"], second["reason"]) == ("second", False, "too-dense")
    (entry,) = (p.value for p in proto.metadata_props if p.key == DECISIONS_KEY)
    assert json.loads(entry)["schema_version"] == 1


def test_a_second_conversion_keeps_what_the_first_decided():
    once, _ = convert(two_layers())
    twice, _ = convert(once, options=ConvertOptions(min_sparsity=0.3))
    first, second = decisions_of(twice)
    assert first == decisions_of(once)[0]
    assert (second["name"], second["weight"], second["rewritten"]) == ("second", "V", True)


def test_nodes_of_one_name_in_different_graphs_are_told_apart():
    then = branch([conv(out="t", name="same")], "t")
    nodes = [if_node(then, dense_branch(), "i"), conv("V", "Y", "i", name="same", pads=[1, 1, 1, 1])]
    source = model(nodes, [tensor(pruned(), "W"), tensor(pruned((16, 8, 3, 3), 0.5), "V")], x_and_condition())
    once, report = convert(source)
    assert report.model.num_rewritten == 1
    twice, _ = convert(once, options=ConvertOptions(min_sparsity=0.3))
    recorded = {(d["graph"], d["weight"]): d["rewritten"] for d in decisions_of(twice)}
    assert recorded == {("", "V"): True, ("if/then_branch", "W"): True}
    restore(twice)
    assert [t.name for t in twice.graph.initializer] == ["V"]
    assert [t.name for t in twice.graph.node[0].attribute[0].g.initializer] in (["W"], [])


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"layers": 3}', '{"layers": [1, "x", null]}', '{"layers": {"a": 1}}', "\x00"),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_decisions_that_cannot_be_read_are_none(text):
    proto, _ = convert(FEEDS["initializer"].build())
    next(p for p in proto.metadata_props if p.key == DECISIONS_KEY).value = text
    assert decisions_of(proto) == []
    restore(proto)
    assert len(proto.graph.initializer) == 1


def test_hostile_decisions_do_no_harm():
    proto, _ = convert(FEEDS["initializer"].build())
    hostile = {"layers": [{"name": "conv", "graph": "", "weight": value} for value in (["x"], {}, 3, "", "X")]}
    next(p for p in proto.metadata_props if p.key == DECISIONS_KEY).value = json.dumps(hostile)
    restore(proto)
    (weight,) = proto.graph.initializer
    assert weight.name != "X"


@pytest.mark.parametrize("decision", [{"name": ["conv"]}, {"graph": {}}, {"weight": 3}, {"weight": "\ud800"}])
def test_decisions_of_another_form_are_left_out(decision):
    proto, _ = convert(FEEDS["initializer"].build())
    text = json.dumps({"layers": [{"name": "conv", "graph": "", "weight": "W", **decision}]})
    next(p for p in proto.metadata_props if p.key == DECISIONS_KEY).value = text
    assert decisions_of(proto) == []
    restore(proto)


def test_other_metadata_stay():
    source = FEEDS["initializer"].build()
    source.metadata_props.add(key="author", value="somebody")
    proto, _ = convert(source)
    assert {p.key for p in proto.metadata_props} == {"author", VERSION_KEY, DECISIONS_KEY}
    restore(proto)
    assert [p.key for p in proto.metadata_props] == ["author"]
    assert version_of(proto) is None


def test_progress_is_reported_layer_by_layer():
    seen = []
    convert(FEEDS["shared-convs"].build(), progress=lambda *step: seen.append(step))
    assert seen == [(0, 2, "c1"), (1, 2, "c2"), (2, 2, "")]


def test_notes_say_what_happened_to_weights():
    _, kept = convert(FEEDS["shared-other-op"].build())
    assert any("'W' stays" in note for note in kept.notes)
    _, shared = convert(FEEDS["shared-convs"].build())
    assert any("'W' is shared" in note for note in shared.notes)
    _, fixed = convert(FEEDS["input-ir8"].build(), options=ConvertOptions(force=True))
    assert any("'W' is no longer an input" in note for note in fixed.notes)
