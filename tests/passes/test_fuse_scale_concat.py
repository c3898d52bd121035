"""FuseScaleConcat: what scales channels reads what a Concat joins, and Concats of ever more go."""

from collections import Counter

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import MAX_CONCAT_INPUTS
from onnx_sparseconv.passes.fuse_scale_concat import FuseScaleConcat
from onnx_sparseconv.runtime.bench import bench
from onnx_sparseconv.runtime.timing import TimingPlan
from tests.support.odd_models import branch, pruned
from tests.support.pass_models import (
    CHANNELS,
    assert_close,
    build,
    checked,
    conv,
    edits,
    node,
    numbers,
    ops,
    refusals,
    run,
)
from tests.support.plain_ort import inputs_for

PASS = "FuseScaleConcat"
SIZE = (2, CHANNELS, 7, 8)
GROWTH = 4


def layer(source, channels, out):
    """A BatchNormalization, a Relu and a convolution to `GROWTH` channels; its nodes and constants."""
    names = [f"{out}_{name}" for name in ("gamma", "beta", "mean", "var")]
    constants = dict(zip(names, (numbers(i, (channels,)) for i in range(4)), strict=True))
    constants[f"{out}_W"] = pruned((GROWTH, channels, 3, 3), 0.8, seed=channels)
    nodes = [
        node("BatchNormalization", [source, *names], f"{out}_n"),
        node("Relu", [f"{out}_n"], f"{out}_r"),
        conv(f"{out}_r", out, weight=f"{out}_W"),
    ]
    return nodes, constants


def dense_net(count, *, nested=False, behind=(), constants=None, size=SIZE, **named):
    """So many layers, each of which reads all before it: of lists, or of one Concat behind the other.

    The last Concat is behind them all, and makes Y.
    """
    nodes, arrays, parts = [node("Neg", ["X"], "f0")], dict(constants or {}), ["f0"]
    for i in range(1, count + 1):
        source = parts[0] if i == 1 else f"c{i - 1}"
        more, weights = layer(source, CHANNELS + GROWTH * (i - 1), f"f{i}")
        nodes += more
        arrays |= weights
        parts.append(f"f{i}")
        joined = [source, parts[-1]] if nested else parts
        nodes.append(node("Concat", joined, f"c{i}" if i < count else "Y", axis=1))
    return build([*nodes, *behind], arrays, shape=size, **named)


def fused(proto, **options):
    return checked(proto, ConvertOptions(force=True, **options), inputs=inputs_for(proto))


def joined_by(proto):
    """What each Concat and each op of several inputs reads, by what it makes."""
    return {
        n.output[0]: [n.input[0], *n.input[(1 if n.op_type == "Concat" else 2) :]]
        for n in proto.graph.node
        if "Concat" in n.op_type
    }


@pytest.mark.parametrize("nested", [False, True])
def test_each_layer_reads_what_those_before_made(nested):
    converted, report = fused(dense_net(5, nested=nested))
    parts = [f"f{i}" for i in range(6)]
    # The first normalises a single tensor.
    wanted = {f"f{i}_r": parts[:i] for i in range(2, 6)}
    assert joined_by(converted) == wanted | {"Y": parts}
    assert edits(report, PASS) == [f"BatchNormalization_f{i}_n: Concat 'Concat_c{i - 1}'" for i in range(2, 6)]
    assert "4 Concat read through by what scales their channels" in report.notes
    (last,) = [n for n in converted.graph.node if n.output[0] == "f5_r"]
    assert attributes_from_proto(last).input_channels == (CHANNELS, *[GROWTH] * 4)


@pytest.mark.parametrize("nested", [False, True])
def test_a_concat_of_too_many_stays_for_those_behind_it(nested):
    converted, report = fused(dense_net(20, nested=nested))
    joined, parts = joined_by(converted), [f"f{i}" for i in range(21)]
    assert [name for name in joined if name[0] == "c"] == ["c8", "c16"]
    assert (joined["c8"], joined["c16"]) == (parts[:9], ["c8", *parts[9:17]])
    # What joins nothing that is read through is left alone.
    assert joined["Y"] == (["c16", *parts[17:]] if nested else parts)
    assert joined["f16_r"] == ["c8", *parts[9:16]]
    assert max(len(names) for out, names in joined.items() if out[0] == "f") == MAX_CONCAT_INPUTS
    # The layers behind c8 and c16 normalise one tensor.
    assert {f"f{i}_r" for i in range(2, 21)} - joined.keys() == {"f9_r", "f17_r"}
    assert len(edits(report, PASS)) == 17


def test_a_concat_that_others_read_stays():
    extra = [node("Relu", ["c2"], "Z")]
    converted, _ = fused(dense_net(4, behind=extra, outputs=("Y", "Z")))
    assert joined_by(converted) == {
        "f2_r": ["f0", "f1"],
        "c2": ["f0", "f1", "f2"],
        "f4_r": ["c2", "f3"],
        "Y": ["f0", "f1", "f2", "f3", "f4"],
    }
    converted, _ = fused(dense_net(4, outputs=("Y", "c2")))
    assert joined_by(converted)["f4_r"] == ["c2", "f3"]


def test_what_stays_is_read_wherever_it_is_joined():
    """Whoever reads it; at any place, more than once."""
    many = [f"x{i}" for i in range(8)]
    nodes = [node("Neg", ["X"], name) for name in many]
    nodes += [node("Concat", many, "a", axis=1), node("Relu", ["a"], "Z"), node("Concat", ["X", "a", "a"], "c", axis=1)]
    more, constants = layer("c", 17 * CHANNELS, "Y")
    converted, _ = fused(build([*nodes, *more], constants, shape=SIZE, outputs=("Y", "Z")))
    assert joined_by(converted) == {"a": many, "Y_r": ["X", "a", "a"]}


def test_what_a_subgraph_reads_stays():
    inner = branch([node("Relu", ["c2"], "r")], "r")
    other = branch([node("Neg", ["c2"], "s")], "s")
    choice = node("If", ["yes"], "Z", then_branch=inner, else_branch=other)
    converted, _ = fused(dense_net(3, behind=[choice], constants={"yes": np.asarray(True)}, outputs=("Y", "Z")))
    assert joined_by(converted)["c2"] == ["f0", "f1", "f2"]


def test_one_tensor_more_than_once():
    nodes, constants = layer("c", 3 * CHANNELS, "Y")
    proto = build(
        [node("Neg", ["X"], "x"), node("Concat", ["x", "X", "x"], "c", axis=-3), *nodes], constants, shape=SIZE
    )
    converted, _ = fused(proto)
    assert joined_by(converted) == {"Y_r": ["x", "X", "x"]}


LEFT = {
    "another axis": (node("Concat", ["x", "x"], "c", axis=2), CHANNELS),
    "a sequence": (node("ConcatFromSequence", ["q"], "c", axis=1), 2 * CHANNELS),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_without_a_word(name):
    concat, channels = LEFT[name]
    nodes, constants = layer("c", channels, "Y")
    first = [node("Neg", ["X"], "x"), node("SequenceConstruct", ["x", "X"], "q")]
    converted, report = fused(build([*first, concat, *nodes], constants, shape=SIZE))
    assert concat.op_type in ops(converted)
    assert not refusals(report, PASS) + edits(report, PASS)


def test_unknown_channels():
    nodes, constants = layer("c", 2 * CHANNELS, "Y")
    proto = build(
        [node("Concat", ["X", "p"], "c", axis=1), *nodes], constants, shape=SIZE, more={"p": (2, "channels", 7, 8)}
    )
    converted, report = checked(proto, inputs=inputs_for(proto, channels=CHANNELS))
    assert Counter(ops(converted)) == {"Concat": 1, "SparseConv": 2}
    assert refusals(report, PASS) == ["Concat: the channels of its inputs are not known"]


def test_channels_that_do_not_add_up_are_left():
    """Shapes may be wrong where a graph is: what is written then is what was there."""
    converted, _ = convert(dense_net(3), options=ConvertOptions(force=True))
    graph = ModelView(converted).scopes[0].graph
    shapes = {"f0": (2, CHANNELS + 1, 7, 8)}
    (scale,) = [n for n in graph.nodes if n.outputs[0].name == "f2_r"]
    first, bias, second = scale.inputs
    at = next(i for i, n in enumerate(graph.nodes) if n is scale)
    result = gs.Variable("c1")
    concat = gs.Node("Concat", "c1", {"axis": 1}, [first, second], [result])
    attributes = {k: v for k, v in scale.attrs.items() if k != "input_channels"}
    outputs = list(scale.outputs)
    scale.outputs.clear()
    graph.nodes[at : at + 1] = [
        concat,
        gs.Node("SparseConv", "s", attributes, [result, bias], outputs, domain=scale.domain),
    ]
    found = FuseScaleConcat(frozenset(), shapes.get).apply(graph)
    assert (found.changed, [r.text for r in found.refusals]) == (
        0,
        [f"its inputs have {CHANNELS + 1 + GROWTH} channels together, what scales them {CHANNELS + GROWTH}"],
    )
    assert concat in graph.nodes


def test_concats_of_concats_do_not_explode():
    nodes, last = [node("Neg", ["X"], "d0")], "d0"
    for i in range(1, 7):
        nodes.append(node("Concat", [last, last, last, last], f"d{i}", axis=1))
        last = f"d{i}"
    nodes.append(
        node(
            "Slice",
            [last, "begin", "end", "axes"],
            "d",
        )
    )
    more, constants = layer("c", 2 * CHANNELS, "Y")
    nodes += [node("Concat", ["d", "X"], "c", axis=1), *more]
    constants |= {name: np.asarray([v], np.int64) for name, v in (("begin", 0), ("end", CHANNELS), ("axes", 1))}
    converted, _ = fused(build(nodes, constants, shape=(1, CHANNELS, 7, 8)))
    assert joined_by(converted)["Y_r"] == ["d", "X"]
    assert ops(converted).count("Concat") == 6


def test_it_can_be_left():
    converted, report = fused(dense_net(3), fuse_concats=False)
    assert [op for op in ops(converted) if "Concat" in op] == ["Concat"] * 3
    assert not edits(report, PASS)


def test_float16():
    converted, _ = convert(dense_net(4), options=ConvertOptions(force=True, precision="fp16"))
    assert {out: len(parts) for out, parts in joined_by(converted).items() if out[0] == "f"} == {
        "f2_r": 2,
        "f3_r": 3,
        "f4_r": 4,
    }
    feed = inputs_for(dense_net(4))
    assert_close(run(converted, feed, library=True), run(converted, feed), 4e-3)


@pytest.mark.parametrize(
    ("behind", "concats"), [([], 3), ([node("Softmax", ["c2"], "Z")], 2)], ids=["all go", "one stays"]
)
def test_bench_counts_each_concat_once(tmp_path, behind, concats):
    """A layer that scales stands beside the Concats that no other layer stands for, and that are gone."""
    original, converted = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(dense_net(4, nested=True, behind=behind, outputs=("Y", "Z") if behind else ("Y",)), original)
    convert(original, converted, ConvertOptions(force=True))
    found = bench(original, converted, plan=TimingPlan(seconds=0.01))
    scales = [each.stands_for for each in found.layers if each.stands_for]
    assert len(scales) == 4
    assert sorted(op for ops in scales for op in ops) == sorted(
        ["Concat"] * concats + ["BatchNormalization", "Relu"] * 4
    )
