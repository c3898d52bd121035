"""FuseConcat: a 1x1 convolution reads what the Concat before it joins, where the op can, and nothing else changes."""

import dataclasses
import itertools

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect
from onnx_sparseconv.converter.decisions import Cause, Choice, Decisions, LayerDecision
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import MAX_CONCAT_INPUTS, Activation, concat_op
from onnx_sparseconv.passes.fuse_concat import FuseConcat
from tests.support.newer_architectures import yolov8n
from tests.support.odd_models import pruned, tensor, value
from tests.support.pass_models import assert_close, build, checked, conv, edits, node, numbers, ops, refusals
from tests.support.plain_ort import inputs_for, newest_opset, run

FORCE = ConvertOptions(force=True, fuse_concats=True)
# Of X; it is split and joined in many ways.
CHANNELS = 8
W = {"W": pruned((6, CHANNELS, 1, 1), 0.5)}


def pointwise(source="c", out="Y", **attributes):
    return conv(source, out, **{"pads": [0] * 4} | attributes)


def concat(*parts, out="c", axis=1, **attributes):
    return node("Concat", parts, out, axis=axis, **attributes)


def model_of(*nodes, weight=None, parts=(), constants=None, outputs=("Y",), **named):
    """A model of X, of 8 channels, and of further inputs of so many channels each, called p0, p1, ...; all of 5x4."""
    more = {f"p{i}": ("n", count, 5, 4) for i, count in enumerate(parts)}
    arrays = (W if weight is None else {"W": pruned(weight, 0.5)}) | (constants or {})
    return build(nodes, arrays, shape=("n", CHANNELS, 5, 4), more=more, outputs=outputs, **named)


def fused(proto, options=FORCE, **sizes):
    """Convert, and compare with the original: with the library, without, and restored."""
    return checked(proto, options, inputs=inputs_for(proto, **sizes))


def sparse_of(proto):
    (found,) = (n for n in proto.graph.node if n.op_type.startswith("SparseConv"))
    return found


def split(source, *outputs, sizes=None, opset=17, **attributes):
    """A Split of the channels; sizes as an attribute up to opset 12, then as the input ``sizes``."""
    attributes = {"axis": 1} | attributes
    if sizes is not None and opset < 13:
        return node("Split", [source], outputs, split=list(sizes), **attributes)
    return node("Split", [source, "sizes"] if sizes is not None else [source], outputs, **attributes)


# --- what is fused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(2, 9))
def test_every_number_of_inputs(count):
    channels = [1 + i % 3 for i in range(count)]
    parts = [f"p{i}" for i in range(count)]
    # X, which nothing reads, is left out of the sum.
    proto = model_of(concat(*parts), pointwise(), weight=(6, sum(channels), 1, 1), parts=channels)
    converted, report = fused(proto)
    sparse = sparse_of(converted)
    assert ops(converted) == [concat_op(count)]
    assert (sparse.name, list(sparse.input)) == ("conv_Y", [parts[0], "", *parts[1:]])
    assert attributes_from_proto(sparse).input_channels == tuple(channels)
    assert edits(report, "FuseConcat") == ["conv_Y: Concat 'Concat_c'"]
    assert "1 Concat fused into the sparse convolutions behind them" in report.notes
    assert [f.name for f in converted.functions] == [concat_op(count)]


def test_bias_and_activation_stay():
    bias = {"B": numbers(3, (6,))}
    proto = model_of(
        concat("X", "p0"),
        pointwise(out="a", bias="B"),
        node("LeakyRelu", ["a"], "Y", alpha=0.25),
        weight=(6, 11, 1, 1),
        parts=[3],
        constants=bias,
    )
    converted, _ = fused(proto)
    sparse = sparse_of(converted)
    assert list(sparse.input) == ["X", "B", "p0"]
    assert (attributes_from_proto(sparse).activation, len(converted.graph.node)) == (Activation.LEAKY_RELU, 1)


def test_what_is_joined_more_than_once():
    converted, _ = fused(model_of(concat("X", "X", "p0", "X"), pointwise(), weight=(6, 25, 1, 1), parts=[1]))
    assert list(sparse_of(converted).input) == ["X", "", "X", "p0", "X"]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("is_negative", [False, True])
def test_every_number_of_axes(axes, is_negative):
    shape, weight = ("n", CHANNELS, *[4] * axes), pruned((6, 2 * CHANNELS, *[1] * axes), 0.5)
    axis = -1 - axes if is_negative else 1
    nodes = [concat("X", "X", axis=axis), pointwise(pads=[0] * (2 * axes))]
    converted, _ = fused(build(nodes, {"W": weight}, shape=shape, out_rank=axes + 2))
    assert ops(converted) == ["SparseConvConcat2"]


def test_a_constant_among_the_inputs():
    constants = {"k": numbers(4, (2, 3, 5, 4))}
    converted, _ = fused(model_of(concat("X", "k"), pointwise(), weight=(6, 11, 1, 1), constants=constants))
    assert attributes_from_proto(sparse_of(converted)).input_channels == (8, 3)


def test_two_that_read_each_other():
    """As in DenseNet and YOLO: what one makes is joined for the next."""
    proto = model_of(
        concat("X", "p0", out="c0"),
        pointwise("c0", "a"),
        node("Relu", ["a"], "b"),
        concat("b", "X", out="c1"),
        pointwise("c1", weight="V"),
        weight=(6, 11, 1, 1),
        parts=[3],
        constants={"V": pruned((6, 14, 1, 1), 0.5, seed=2)},
    )
    converted, report = fused(proto)
    assert ops(converted) == ["SparseConvConcat2"] * 2
    assert report.passes[-1].changed == 2


def test_channels_that_only_a_sparse_convolution_tells():
    """Nothing is inferred behind an operator that nobody knows; a convolution knows its channels."""
    unknown = helper.make_node("Own", ["X"], ["u"], name="own", domain="own.ops")
    proto = model_of(
        unknown, pointwise("u", "a", weight="V"), concat("a", "X"), pointwise(),
        weight=(6, 13, 1, 1), constants={"V": pruned((5, CHANNELS, 1, 1), 0.5)},
    )  # fmt: skip
    proto.opset_import.append(helper.make_opsetid("own.ops", 1))
    converted, _ = convert(proto, options=FORCE)
    assert ops(converted) == ["Own", "SparseConv", "SparseConvConcat2"]
    assert attributes_from_proto(converted.graph.node[-1]).input_channels == (5, 8)


# --- what is refused, and what nobody would expect ----------------------------------------------------------------

REFUSED = {
    "other nodes read": lambda: model_of(concat("X", "X"), pointwise(), node("Relu", ["c"], "Z"),
                                         weight=(6, 16, 1, 1), outputs=("Y", "Z")),
    "output of a graph": lambda: model_of(concat("X", "X"), pointwise(), weight=(6, 16, 1, 1), outputs=("Y", "c")),
    "it has 9 inputs, and the op takes at most 8": lambda: model_of(
        concat(*["X"] * 9), pointwise(), weight=(6, 72, 1, 1)),
    "behind it has strides": lambda: model_of(concat("X", "X"), pointwise(strides=[2, 1]), weight=(6, 16, 1, 1)),
    "behind it pads": lambda: model_of(concat("X", "X"), pointwise(pads=[0, 1, 0, 0]), weight=(6, 16, 1, 1)),
    "behind it has groups": lambda: model_of(concat("X", "X"), pointwise(group=2), weight=(6, 8, 1, 1)),
    "behind it adds a residual": lambda: model_of(
        concat("X", "X"), pointwise(out="a"), node("Add", ["a", "X"], "Y"), weight=(8, 16, 1, 1)),
    "behind it takes in a pool": lambda: model_of(
        concat("X", "X"), pointwise(out="a"), node("MaxPool", ["a"], "Y", kernel_shape=[2, 2]), weight=(6, 16, 1, 1)),
    "channels of its inputs are not known": lambda: model_of(
        concat("X", "p0"), pointwise(), weight=(6, 11, 1, 1), parts=["channels"]),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason):
    converted, report = fused(REFUSED[reason](), dataclasses.replace(FORCE, fuse_pools=True), channels=3)
    assert "Concat" in ops(converted)
    assert not any(name.startswith("SparseConvConcat") for name in ops(converted))
    assert len(refusals(report, "FuseConcat")) == 1
    assert reason in refusals(report, "FuseConcat")[0]


LEFT = {
    "another axis": lambda: model_of(concat("X", "X", axis=2), pointwise()),
    "a larger kernel": lambda: model_of(concat("X", "X"), pointwise(), weight=(6, 16, 1, 3)),
    "no convolution": lambda: model_of(
        concat("X", "X"), node("Relu", ["c"], "r"), pointwise("r"), weight=(6, 16, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_without_a_word(name):
    converted, report = fused(LEFT[name]())
    assert ops(converted)[-1] == "SparseConv"
    assert "Concat" in ops(converted)
    assert not refusals(report, "FuseConcat")


def two_convolutions(*behind, **named):
    """conv_Y behind a Concat, and conv_Z beside it."""
    first = [concat("X", "X"), pointwise(out=behind[0].input[0] if behind else "Y"), *behind]
    constants = {"V": pruned((6, CHANNELS, 1, 1), 0.5, seed=2)}
    nodes = [*first, pointwise("X", "Z", weight="V")]
    return model_of(*nodes, weight=(6, 16, 1, 1), constants=constants, **{"outputs": ("Y", "Z")} | named)


def only(name, **options):
    """Options that make one layer sparse."""
    layer = LayerDecision(name, "", 0, Choice.SPARSE, Choice.SPARSE, Cause.MEASURED, "timed")
    return ConvertOptions(decisions=Decisions("model", {}, (), (layer,)), **options)


def test_a_dense_convolution_keeps_its_concat():
    converted, report = convert(two_convolutions(), options=only("conv_Z", fuse_concats=True))
    assert ops(converted) == ["Concat", "Conv", "SparseConv"]
    assert not refusals(report, "FuseConcat")


def test_broken_channels_are_refused_not_written():
    """A model that contradicts itself, as none does that was converted from a valid one."""
    converted, _ = convert(
        model_of(concat("X", "X"), pointwise(), weight=(6, 16, 1, 1)),
        options=ConvertOptions(force=True, fuse_concats=False),
    )
    result = _applied(converted, lambda _: (2, 5, 5, 4))
    assert [r.text for r in result.refusals] == ["its inputs have 10 channels together, the weight 16"]


@pytest.mark.parametrize("name", ["weight_shape", "strides", "pads", "group", "auto_pad", "kernel_shape"])
@pytest.mark.parametrize("is_reference", [False, True])
def test_attributes_that_a_node_lacks_or_that_are_a_functions(name, is_reference):
    converted, _ = convert(
        model_of(concat("X", "X"), pointwise(), weight=(6, 16, 1, 1)), options=ConvertOptions(force=True)
    )

    def spoil(sparse):
        del sparse.attrs[name]
        if is_reference:
            sparse.attrs[name] = gs.Node.AttributeRef("k", list)

    assert _applied(converted, lambda _: (2, 8, 5, 4), spoil).changed == 0


def _applied(converted, shape_of, spoil=lambda _: None):
    view = ModelView(converted)
    graph = view.scopes[0].graph
    spoil(graph.nodes[-1])
    return FuseConcat(frozenset(), lambda _: None, shape_of, view.unique_name, 17).apply(graph)


# --- Split ------------------------------------------------------------------------------------------------------------

OPSETS = [9, 10, 11, 13, 17, newest_opset()]


@pytest.mark.parametrize("opset", OPSETS)
def test_all_outputs_of_a_split_are_its_input(opset):
    """And it goes, where nobody else reads them."""
    proto = model_of(
        split("X", "s0", "s1", "s2", sizes=[1, 5, 2], opset=opset),
        concat("p0", "s0", "s1", "s2"),
        pointwise(),
        weight=(6, 11, 1, 1),
        parts=[3],
        constants={"sizes": np.array([1, 5, 2])},
        opset=opset,
    )
    converted, report = fused(proto)
    assert ops(converted) == ["SparseConvConcat2"]
    assert list(sparse_of(converted).input) == ["p0", "", "X"]
    assert edits(report, "FuseConcat") == ["conv_Y: Concat 'Concat_c'", "conv_Y: Split 'Split_s0'"]
    assert "1 Concat, 1 Split fused into the sparse convolutions behind them" in report.notes


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("read", [0, 1, 2])
def test_a_slice_where_others_read_one_output(opset, read):
    proto = model_of(
        split("X", "s0", "s1", "s2", sizes=[1, 5, 2], opset=opset),
        concat("s0", "s1", "s2", "p0"),
        pointwise(),
        node("Neg", [f"s{read}"], "Z"),
        weight=(6, 11, 1, 1),
        parts=[3],
        constants={"sizes": np.array([1, 5, 2])},
        outputs=("Y", "Z"),
        opset=opset,
    )
    converted, report = fused(proto)
    assert ops(converted) == ["Slice", "SparseConvConcat2", "Neg"]
    assert converted.graph.node[0].output[0] == f"s{read}"
    assert edits(report, "FuseConcat")[1:] == ["conv_Y: Split in part 'Split_s0'"]
    assert "sizes" not in {t.name for t in converted.graph.initializer}


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_sizes_that_a_split_does_not_state(opset):
    attributes = {"num_outputs": 2} if opset >= 18 else {}
    proto = model_of(
        split("X", "s0", "s1", **attributes), concat("s0", "s1", "p0"), pointwise(), node("Neg", ["s1"], "Z"),
        weight=(6, 11, 1, 1), parts=[3], outputs=("Y", "Z"), opset=opset,
    )  # fmt: skip
    assert ops(fused(proto)[0]) == ["Slice", "SparseConvConcat2", "Neg"]


def test_an_output_that_is_the_graphs_counts_as_read():
    proto = model_of(split("X", "s0", "s1"), concat("s0", "s1", "p0"), pointwise(),
                     weight=(6, 11, 1, 1), parts=[3], outputs=("Y", "s1"))  # fmt: skip
    assert ops(fused(proto)[0]) == ["Slice", "SparseConvConcat2"]


def test_a_split_of_which_others_read_more_stays():
    proto = model_of(
        split("X", "s0", "s1", "s2", sizes=[1, 5, 2]), concat("s0", "s1", "s2", "p0"), pointwise(),
        node("Neg", ["s1"], "Z"), node("Neg", ["s0"], "Q"),
        weight=(6, 11, 1, 1), parts=[3], constants={"sizes": np.array([1, 5, 2])}, outputs=("Y", "Z", "Q"),
    )  # fmt: skip
    converted, _ = fused(proto)
    assert ops(converted) == ["Split", "SparseConvConcat2", "Neg", "Neg"]
    assert list(sparse_of(converted).input) == ["X", "", "p0"]


APART = {
    "in another order": (("s1", "s0"), 4),
    "not all": (("s0", "X"), 4),
    "with others between": (("s0", "X", "s1"), 8),
    "again": (("s0", "s1", "s0"), 4),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_not_all_of_a_split_in_order_is_read_as_it_is(name):
    parts, _ = APART[name]
    channels = sum({"s0": 4, "s1": 4, "X": 8}[part] for part in parts)
    converted, _ = fused(model_of(split("X", "s0", "s1"), concat(*parts), pointwise(), weight=(6, channels, 1, 1)))
    read = [tensor_name for tensor_name in sparse_of(converted).input if tensor_name]
    assert read == (["X", "s0"] if name == "again" else list(parts))
    assert ops(converted)[0] == ("Slice" if name == "again" else "Split")


def test_a_split_along_another_axis_is_not_the_channels():
    proto = model_of(node("Split", ["X"], ["s0", "s1"], axis=3), concat("s0", "s1"), pointwise(), weight=(6, 16, 1, 1))
    converted, _ = fused(proto)
    assert list(sparse_of(converted).input) == ["s0", "", "s1"]


def test_a_concat_that_undoes_a_split_goes_without_a_word_of_channels():
    """Also where nobody knows them: nothing is joined."""
    proto = model_of(split("p0", "s0", "s1", axis=-3), concat("s0", "s1"), pointwise(), parts=["channels"])
    converted, report = fused(proto, channels=8)
    assert ops(converted) == ["SparseConv"]
    assert list(sparse_of(converted).input) == ["p0", ""]
    assert report.passes[-1].changed == 2


def test_a_concat_of_one_goes():
    assert ops(fused(model_of(concat("X"), pointwise()))[0]) == ["SparseConv"]


def test_more_inputs_than_the_op_takes_but_for_a_split():
    names = [f"s{i}" for i in range(8)]
    converted, _ = fused(model_of(split("X", *names), concat("X", *names), pointwise(), weight=(6, 16, 1, 1)))
    assert list(sparse_of(converted).input) == ["X", "", "X"]


def test_two_that_read_one_split():
    """It goes when neither reads its outputs any more."""
    proto = model_of(
        split("X", "s0", "s1"), concat("s0", "s1", "X", out="c0"), concat("X", "s0", "s1", out="c1"),
        pointwise("c0", "Y"), pointwise("c1", "Z"), weight=(6, 16, 1, 1), outputs=("Y", "Z"),
    )  # fmt: skip
    converted, report = fused(proto)
    assert ops(converted) == ["SparseConvConcat2"] * 2
    assert report.passes[-1].changed == 3


def test_sizes_that_callers_may_set_are_no_reason_for_slices():
    proto = model_of(
        split("X", "s0", "s1", sizes=[3, 5]), concat("s0", "s1", "p0"), pointwise(), node("Neg", ["s1"], "Z"),
        weight=(6, 11, 1, 1), parts=[3], outputs=("Y", "Z"), constants={"sizes": np.array([3, 5])},
    )  # fmt: skip
    proto.graph.input.append(value("sizes", [2], TensorProto.INT64))
    assert ops(fused(proto)[0]) == ["Split", "SparseConvConcat2", "Neg"]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_splits_and_concats(data):
    """Whatever is split, joined and read elsewhere, the results stay."""
    opset = data.draw(st.sampled_from(OPSETS))
    sizes = {"sizes": data.draw(st.sampled_from([(1, 7), (4, 4), (3, 3, 2), (1, 1, 1, 5)]))}
    names = [f"s{i}" for i in range(len(sizes["sizes"]))]
    counts = dict(zip(names, sizes["sizes"], strict=True)) | {"X": CHANNELS, "p0": 3}
    runs = st.sampled_from([[name] for name in counts] + [names, names])
    joined = [list(itertools.chain(*data.draw(st.lists(runs, min_size=1, max_size=5)))) for _ in range(2)]
    others = data.draw(st.lists(st.sampled_from(names), unique=True))
    nodes = [split("X", *names, sizes=sizes["sizes"], opset=opset)]
    nodes += [concat(*parts, out=f"c{i}") for i, parts in enumerate(joined)]
    nodes += [pointwise(f"c{i}", f"Y{i}", weight=f"W{i}") for i in range(2)]
    nodes += [node("Neg", [name], f"n_{name}") for name in others]
    weights = {f"W{i}": pruned((6, sum(counts[n] for n in parts), 1, 1), 0.5) for i, parts in enumerate(joined)}
    outputs = ("Y0", "Y1", *(f"n_{name}" for name in others))
    constants = weights | {"sizes": np.array(sizes["sizes"])}
    converted, _ = fused(model_of(*nodes, parts=[3], constants=constants, outputs=outputs, opset=opset))
    assert sum(name.startswith("SparseConv") for name in ops(converted)) == 2
    few = sum(len(parts) <= MAX_CONCAT_INPUTS for parts in joined)
    assert ops(converted).count("Concat") <= 2 - few


# --- places -----------------------------------------------------------------------------------------------------------


def beside_if(branch, *nodes, outputs=("out",), **constants):
    """A model of nodes and an If with such a branch, in which are the weights I, of 16 channels, and J, of 4."""
    arrays = {"I": pruned((6, 16, 1, 1), 0.5), "J": pruned((6, 4, 1, 1), 0.5)}
    used = {name for n in branch for name in n.input}
    stored = [tensor(array, name) for name, array in arrays.items() if name in used]
    then = helper.make_graph(branch, "then", [], [value("Y", [None] * 4)], stored)
    other = helper.make_graph([node("Conv", ["X", "E"], "E_Y")], "else", [], [value("E_Y", [None] * 4)])
    choice = helper.make_node("If", ["q"], ["out"], name="if", then_branch=then, else_branch=other)
    constants |= {"E": pruned((6, CHANNELS, 1, 1), 0.5)}
    proto = build([*nodes, choice], constants, shape=("n", CHANNELS, 5, 4), outputs=outputs)
    proto.graph.input.append(value("q", [], TensorProto.BOOL))
    return proto


def branch_of(proto):
    (choice,) = (n for n in proto.graph.node if n.op_type == "If")
    return next(a.g for a in choice.attribute if a.name == "then_branch")


def test_in_the_branch_of_an_if():
    """What a Slice needs is stored where it stands."""
    branch = [split("X", "s0", "s1"), node("Neg", ["s1"], "m"), concat("s0", "s1", "m", "m"), pointwise(weight="I")]
    converted, _ = fused(beside_if(branch))
    found = branch_of(converted)
    assert [n.op_type for n in found.node] == ["Slice", "Neg", "SparseConvConcat3"]
    assert {t.name for t in found.initializer} == {"s1_starts", "s1_ends", "s1_axes"}


def test_a_branch_that_reads_a_split_counts():
    nodes = [split("X", "s0", "s1"), concat("s0", "s1", "X"), pointwise(out="Z", weight="U")]
    proto = beside_if([pointwise("s1", weight="J")], *nodes,
                      outputs=("Z", "out"), U=pruned((6, 16, 1, 1), 0.5))  # fmt: skip
    converted, _ = fused(proto)
    assert ops(converted) == ["Slice", "SparseConvConcat2", "If"]


def test_a_concat_of_another_graph_stays():
    converted, report = fused(beside_if([pointwise(weight="I")], concat("X", "X")))
    assert ops(converted) == ["Concat", "If"]
    assert not refusals(report, "FuseConcat")


def test_in_a_function_nothing_is_known_but_of_a_split_alone():
    """Shapes are not inferred in there; the weight is the function's own."""
    imports = [helper.make_opsetid("", 17)]
    weight = helper.make_node("Constant", [], ["W"], value=tensor(W["W"], "W"))
    body = [weight, split("x", "s0", "s1"), concat("s0", "s1"), pointwise(out="a"), concat("a", "x", out="d")]
    weight_2 = helper.make_node("Constant", [], ["V"], value=tensor(pruned((6, 14, 1, 1), 0.5), "V"))
    function = helper.make_function(
        "local", "f", ["x"], ["y"], [*body, weight_2, pointwise("d", "y", weight="V")], imports
    )
    proto = build([helper.make_node("f", ["X"], ["Y"], domain="local")], shape=("n", CHANNELS, 5, 4))
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    converted, report = convert(proto, options=FORCE)
    onnx.checker.check_model(converted, full_check=True)
    (found,) = (f for f in converted.functions if f.domain == "local")
    assert [n.op_type for n in found.node] == ["SparseConv", "Concat", "SparseConv"]
    assert refusals(report, "FuseConcat") == ["Concat: the channels of its inputs are not known"]
    feed = inputs_for(proto)
    assert_close(run(converted, feed), run(proto, feed))


# --- options, and what else knows the ops -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        (ConvertOptions(force=True), True),
        (ConvertOptions(force=True, precision="fp16"), True),
        (ConvertOptions(force=True, fuse_concats=False), False),
        (ConvertOptions(force=True, precision="fp16", fuse_concats=False), False),
    ],
)
def test_concats_are_fused_unless_they_shall_not_be(options, is_fused):
    converted, _ = convert(model_of(concat("X", "X"), pointwise(), weight=(6, 16, 1, 1)), options=options)
    assert ("SparseConvConcat2" in ops(converted)) == is_fused


def test_in_float16_all_inputs_are_cast_alike():
    proto = model_of(
        concat("X", "p0"), pointwise(bias="B"), weight=(6, 11, 1, 1), parts=[3], constants={"B": numbers(1, (6,))}
    )
    converted, _ = convert(proto, options=ConvertOptions(force=True, precision="fp16"))
    onnx.checker.check_model(converted, full_check=True)
    assert ops(converted) == ["Cast", "Cast", "SparseConvConcat2", "Cast"]
    sparse = sparse_of(converted)
    assert attributes_from_proto(sparse).element_type == np.float16
    assert set(sparse.input) == {"X_fp16", "B", "p0_fp16"}
    assert {t.name: t.data_type for t in converted.graph.initializer} == {"B": TensorProto.FLOAT16}
    feed = inputs_for(proto)
    assert_close(run(converted, feed), run(proto, feed), 4e-3)


def test_a_converted_model_is_fused_when_it_is_converted_again():
    """Only in graphs where something is rewritten."""
    first, _ = convert(two_convolutions(), options=only("conv_Y", fuse_concats=False))
    assert ops(first) == ["Concat", "SparseConv", "Conv"]
    converted, _ = fused(first)
    assert ops(converted) == ["SparseConvConcat2", "SparseConv"]
    again, report = convert(converted, options=FORCE)
    assert again is None
    assert report.already_converted


def test_an_activation_joins_a_fused_node_of_before():
    proto = two_convolutions(node("Relu", ["a"], "Y"), outputs=("Y", "Z", "a"))
    first, _ = convert(proto, options=only("conv_a", fuse_concats=True))
    assert ops(first)[0] == "SparseConvConcat2"
    del first.graph.output[2]
    converted, _ = fused(first)
    assert ops(converted) == ["SparseConvConcat2", "SparseConv"]
    assert attributes_from_proto(converted.graph.node[0]).activation is Activation.RELU


def test_inspect_sees_what_is_joined():
    proto = model_of(concat("X", "p0"), pointwise(), weight=(6, 11, 1, 1), parts=[3])
    before, _ = convert(proto, options=ConvertOptions(force=True))
    converted, _ = convert(proto, options=FORCE)
    (found,), (wanted,) = inspect(converted).layers, inspect(before).layers
    assert found.op_type == "SparseConvConcat2"
    assert dataclasses.replace(found, op_type=wanted.op_type) == wanted
    assert (found.input_shape, found.output_shape) == ((None, 11, 5, 4), (None, 6, 5, 4))


def test_a_slice_has_the_name_of_its_split():
    """ONNX Runtime refuses two nodes of one name."""
    proto = model_of(
        split("X", "s0", "s1"), concat("s0", "s1", "p0"), pointwise(), node("Neg", ["s1"], "s1_slice"),
        weight=(6, 11, 1, 1), parts=[3], outputs=("Y", "s1_slice"),
    )  # fmt: skip
    converted, _ = fused(proto)
    assert (converted.graph.node[0].op_type, converted.graph.node[0].name) == ("Slice", "Split_s0")


def test_channels_that_a_model_states_of_before_do_not_count():
    """What a Split makes follows from its input alone."""
    proto = model_of(split("X", "s0", "s1"), concat("s0", "s1", "p0"), pointwise(), node("Neg", ["s1"], "Z"),
                     weight=(6, 11, 1, 1), parts=[3], outputs=("Y", "Z"))  # fmt: skip
    stated = [value(name, ["N", channels, None, None]) for name, channels in (("s0", 3), ("s1", 5))]
    proto.graph.value_info.extend(stated)
    converted, _ = convert(proto, options=ConvertOptions(force=True, fuse_concats=True))
    starts = next(t for t in converted.graph.initializer if t.name.endswith("_starts"))
    assert list(numpy_helper.to_array(starts)) == [4]


# --- a real network ---------------------------------------------------------------------------------------------------


def test_yolov8n():
    """8 C2f, the pyramid pool and 4 joins of the neck; the 3 at the heads' ends are outputs."""
    proto = yolov8n(64)
    before, _ = convert(proto, options=ConvertOptions(force=True, precision="fp16", fuse_concats=False))
    converted, report = convert(proto, options=ConvertOptions(force=True, precision="fp16"))
    onnx.checker.check_model(converted, full_check=True)
    assert ops(before).count("Concat") == 13 + 3
    assert "13 Concat, 8 Split in part fused into the sparse convolutions behind them" in report.notes
    names = ops(converted)
    assert (names.count("Concat"), names.count("Split"), names.count("Slice")) == (3, 0, 8)
    assert [names.count(concat_op(n)) for n in range(2, 6)] == [10, 2, 1, 0]
    feed = inputs_for(proto, N=2)
    for found, wanted in zip(run(converted, feed, optimise=False), run(before, feed, optimise=False), strict=True):
        np.testing.assert_array_equal(found, wanted)
