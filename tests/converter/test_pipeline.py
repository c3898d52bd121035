"""The passes in the report: what each did and refused, node by node and in words."""

import json

import numpy as np

import onnx_sparseconv as sc
from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.runtime.plain import to_json_text
from tests.support import architectures
from tests.support.odd_models import tensor
from tests.support.pass_models import FORCE, build, checked, conv, edits, node, numbers, refusals

ORDER = ["SkipIdentity", "FoldPad", "FoldScaleAfter", "FoldScaleBefore"]
ORDER += ["FuseResidual", "FuseActivation", "FusePool", "FuseScale", "FuseScaleConcat", "FuseConcat"]
C = numbers(1, (8, 1, 1))


def test_every_pass_is_in_the_report_in_its_order():
    _, report = convert(architectures.resnet())
    assert [p.name for p in report.passes] == ORDER
    assert {p.name: p.changed for p in report.passes if p.changed} == {
        "FoldScaleAfter": 15,
        "FuseResidual": 4,
        "FuseActivation": 13,
    }
    assert list(report.notes) == [
        "15 BatchNormalization folded into the convolutions before them",
        "4 Add of a residual fused into the sparse convolutions before them",
        "13 Relu fused into the sparse convolutions before them",
    ]


def test_the_report_is_plain_data():
    proto = build([conv(), node("Mul", ["a", "c"], "b"), node("Sub", ["a", "b"], "Y")], {"c": C})
    _, report = convert(proto, options=FORCE)
    passes = {p["name"]: p for p in json.loads(to_json_text(report))["passes"]}
    assert passes["FoldScaleAfter"] == {
        "name": "FoldScaleAfter",
        "changed": 0,
        "done": [],
        "refused": [{"node": "Mul_b", "graph": "", "text": "Mul: other nodes read the tensor between them, too"}],
    }


def test_a_dry_run_tells_the_same():
    proto = architectures.vgg()
    _, report = convert(proto)
    _, dry = convert(proto, options=ConvertOptions(dry_run=True))
    assert dry.passes == report.passes
    assert dry.notes == report.notes
    assert (dry.nodes_after, dry.bytes_after) == (report.nodes_after, report.bytes_after)


def test_without_a_conversion_there_is_nothing_to_tell():
    _, report = convert(architectures.vgg(), options=ConvertOptions(min_sparsity=1.0))
    assert report.passes == ()
    assert report.notes == ()


def test_what_a_later_pass_takes_is_not_listed_as_refused():
    """The constant has a number for each element, but it has the shape of a residual."""
    constant = node("Constant", [], "c", value=tensor(numbers(1, (2, 8, 6, 6)), "c"))
    _, report = checked(build([constant, conv(), node("Add", ["a", "c"], "Y")]))
    assert not refusals(report, "FoldScaleAfter")
    assert edits(report, "FuseResidual") == ["conv_a: Add of a residual 'Add_Y'"]


def test_a_refusal_counts_once_though_passes_run_several_times():
    nodes = [node("Mul", ["X", "c"], "x"), conv("x", "a"), node("Relu", ["a"], "b"), node("Mul", ["a", "c"], "d")]
    _, report = checked(build([*nodes, node("Sub", ["b", "d"], "Y")], {"c": C}))
    assert len(edits(report, "FoldScaleBefore")) == 1
    assert refusals(report, "FoldScaleAfter") == ["Mul: other nodes read the tensor between them, too"]
    assert refusals(report, "FuseActivation") == ["Relu: other nodes read a tensor between them, too"]


def test_a_note_names_three_nodes():
    nodes = [conv(out=f"a{i}") for i in range(5)]
    nodes += [node("Relu", [f"a{i}"], f"b{i}") for i in range(5)]
    everything = [f"{letter}{i}" for letter in "ab" for i in range(5)]
    _, report = convert(build([*nodes, node("Max", everything, "Y")]), options=FORCE)
    text = "not fused: 5 Relu (Relu_b0, Relu_b1, Relu_b2 and 2 more): other nodes read a tensor between them, too"
    assert text in report.notes


def test_sizes_in_the_report_are_those_of_the_file(tmp_path):
    """Folding may store less than the source's weight would have: here half of the channels are scaled by 0."""
    parameters = {"g": np.float32([0, 1] * 4), "b": numbers(2), "m": numbers(3), "v": numbers(4)}
    proto = build([conv(), node("BatchNormalization", ["a", *parameters], "Y")], parameters)
    _, report = sc.convert(proto, tmp_path / "out.onnx", FORCE)
    (layer,) = report.model.layers
    (found,) = sc.inspect(tmp_path / "out.onnx").layers
    assert layer.sparse_bytes == found.sparse_bytes == report.conv_bytes_after
    assert report.bytes_after == (tmp_path / "out.onnx").stat().st_size
    assert layer.nonzeros > found.nonzeros
