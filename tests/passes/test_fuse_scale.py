"""FuseScale: normalisation and activation in front of a convolution are one depthwise convolution."""

import dataclasses
import functools

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.converter.decisions import Decisions
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import Activation
from onnx_sparseconv.kernels.unified_csr import decode
from onnx_sparseconv.passes.fuse_scale import FuseScale
from tests.support import pass_models
from tests.support.odd_models import branch, pruned, value
from tests.support.pass_models import CHANNELS, WEIGHT, checked, conv, edits, node, numbers, ops, refusals

PASS = "FuseScale"
FUSE = ConvertOptions(force=True)
SIZE = (2, CHANNELS, 7, 8)
build = functools.partial(pass_models.build, shape=SIZE)
C = numbers(1, (CHANNELS, 1, 1))
BN = {"gamma": numbers(2), "beta": numbers(3), "mean": numbers(4, low=-1), "var": numbers(5)}
CONSTANTS = {"c": C, "c2": numbers(6, (1, CHANNELS, 1, 1)), "one": np.float32(1), "two": np.float32(2), **BN}
CONSTANTS |= {"zero": np.float32(0), "six": np.float32(6), "sixth": np.float32(1 / 6), "three": np.float32(3)}


def norm(source="x", out="a"):
    return node("BatchNormalization", [source, *BN], out)


def before(*nodes, out="b", constants=None, **named):
    """``nodes``, which read x, then conv on their result; x is made by an operator that nothing folds.

    ``constants`` that are None are none.
    """
    return build(
        [node("Neg", ["X"], "x"), *nodes, conv(out, "Y", **named.pop("geometry", {}))],
        {name: array for name, array in (CONSTANTS | (constants or {})).items() if array is not None},
        **named,
    )


FUSED = {
    "BatchNormalization and Relu": ([norm(), node("Relu", ["a"], "b")], Activation.RELU),
    "Mul, Add": ([node("Mul", ["x", "c"], "a"), node("Add", ["c2", "a"], "b")], Activation.NONE),
    "Div, Sub": ([node("Div", ["x", "c"], "a"), node("Sub", ["a", "c2"], "b")], Activation.NONE),
    "Sub from a constant": ([node("Sub", ["c", "x"], "a"), node("Relu", ["a"], "b")], Activation.RELU),
    "all in a row": (
        [norm(), node("Mul", ["a", "c"], "e"), node("Add", ["e", "c"], "f"), node("Relu", ["f"], "b")],
        Activation.RELU,
    ),
    "numbers": (
        [node("Mul", ["x", "two"], "a"), node("Add", ["a", "one"], "e"), node("LeakyRelu", ["e"], "b")],
        Activation.LEAKY_RELU,
    ),
    "Clip": ([norm(), node("Clip", ["a", "zero", "one"], "b")], Activation.CLIP),
    "Relu and Clip": ([norm(), node("Relu", ["a"], "e"), node("Clip", ["e", "zero", "one"], "b")], Activation.CLIP),
    "SiLU": ([norm(), node("Sigmoid", ["a"], "e"), node("Mul", ["a", "e"], "b")], Activation.SILU),
    "SiLU with its beta": (
        [norm(), node("Mul", ["one", "a"], "f"), node("Sigmoid", ["f"], "e"), node("Mul", ["e", "a"], "b")],
        Activation.SILU,
    ),
    "HardSwish, its sixth inside": (
        [
            norm(),
            node("Add", ["a", "three"], "e"),
            node("Clip", ["e", "zero", "six"], "f"),
            node("Mul", ["f", "sixth"], "g"),
            node("Mul", ["a", "g"], "b"),
        ],
        Activation.HARD_SWISH,
    ),
}
REFUSED = {
    "parameters at run time": (
        lambda: before(norm(), node("Relu", ["a"], "b"), constants={"var": None}, more={"var": [CHANNELS]}),
        "only known at run time",
    ),
    "training form": (
        lambda: before(
            node("BatchNormalization", ["x", *BN], ["a", "m", "v"], training_mode=1), node("Relu", ["a"], "b")
        ),
        "training form",
    ),
    "per element": (
        lambda: before(
            node("Mul", ["x", "e"], "a"), node("Relu", ["a"], "b"), constants={"e": numbers(1, (CHANNELS, *SIZE[2:]))}
        ),
        "not one number for each channel",
    ),
    "a broadcast to more channels": (
        lambda: before(node("Mul", ["x", "c"], "a"), node("Relu", ["a"], "b"), shape=(2, 1, *SIZE[2:])),
        "may broadcast",
    ),
    "not finite": (
        lambda: before(
            node("Mul", ["x", "e"], "a"),
            node("Clip", ["a", "zero", "one"], "b"),
            constants={"e": np.full((CHANNELS, 1, 1), np.inf, np.float32)},
        ),
        "not finite",
    ),
}
LEFT = {
    "one node": [norm(out="b")],
    "an activation alone": [node("Relu", ["x"], "b")],
    "something between": [norm(), node("Abs", ["a"], "e"), node("Relu", ["e"], "b")],
    "behind the activation": [node("Relu", ["x"], "a"), norm("a", "b")],
    "two tensors": [node("Mul", ["x", "X"], "a"), node("Relu", ["a"], "b")],
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    nodes, activation = FUSED[name]
    proto = before(*nodes)
    converted, report = checked(proto, FUSE)
    assert ops(converted) == ["Neg", "SparseConv", "SparseConv"]
    _, scale, convolution = converted.graph.node
    attributes = attributes_from_proto(scale)
    assert attributes.activation is activation
    assert attributes.weight.weight_shape == (CHANNELS, 1, 1, 1)
    assert attributes.geometry.group == CHANNELS
    assert (scale.name, scale.output[0]) == (nodes[0].name, "b")
    assert convolution.name == "conv_Y"
    assert all(e.startswith(f"{nodes[0].name}: ") for e in edits(report, PASS))
    assert any("fused into depthwise convolutions before the sparse ones" in note for note in report.notes)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, why = REFUSED[name]
    proto = make()
    converted, report = convert(proto, options=FUSE)
    assert ops(converted).count("SparseConv") == 1
    (text,) = refusals(report, PASS)
    assert why in text


@pytest.mark.parametrize("name", LEFT)
def test_left_without_a_word(name):
    converted, report = checked(before(*LEFT[name]), FUSE)
    assert ops(converted) == ["Neg", *(n.op_type for n in LEFT[name]), "SparseConv"]
    assert not edits(report, PASS)
    assert not refusals(report, PASS)


@pytest.mark.parametrize("out", ["a", "e"])
@pytest.mark.parametrize("is_output", [True, False])
def test_what_others_read_between_stays(out, is_output):
    """And so do the nodes before it; what stands behind it is taken."""
    nodes = [norm(), node("Mul", ["a", "c"], "e"), node("Add", ["e", "c"], "f"), node("Relu", ["f"], "b")]
    others = [] if is_output else [node("Abs", [out], "Z")]
    proto = build([*nodes, conv("b", "Y"), *others], CONSTANTS, outputs=("Y", out if is_output else "Z"))
    proto = _with_source(proto)
    converted, _ = checked(proto, FUSE)
    left = ["BatchNormalization"] if out == "a" else ["BatchNormalization", "Mul"]
    assert [op for op in ops(converted) if op != "Abs"] == [*left, "SparseConv", "SparseConv"]


def _with_source(proto):
    """The first node reads X itself."""
    proto.graph.node[0].input[0] = "X"
    return proto


def test_several_convolutions_and_others_read_the_result():
    nodes = [node("Neg", ["X"], "x"), norm(), node("Relu", ["a"], "b"), conv("b", "e"), conv("b", "f")]
    proto = build([*nodes, node("Sum", ["e", "f", "b"], "Y")], CONSTANTS)
    converted, report = checked(proto, FUSE)
    assert ops(converted) == ["Neg", "SparseConv", "SparseConv", "SparseConv", "Sum"]
    assert len(edits(report, PASS)) == 2


def test_what_no_sparse_convolution_reads_stays():
    dense = np.random.default_rng(0).standard_normal(WEIGHT.shape).astype(np.float32)
    nodes = [conv("X", "x"), norm("x", "a"), node("Relu", ["a"], "b"), conv("b", "e", weight="dense")]
    proto = build([*nodes, norm("e", "f"), node("Relu", ["f"], "Y")], {"dense": dense, **CONSTANTS})
    converted, report = checked(proto, dataclasses.replace(FUSE, force=False, min_sparsity=0.6))
    assert ops(converted) == ["SparseConv", "Conv", "BatchNormalization", "Relu"]
    assert not edits(report, PASS)


def test_what_a_dense_convolution_before_takes_in_is_left_to_it():
    dense = np.random.default_rng(0).standard_normal(WEIGHT.shape).astype(np.float32)
    nodes = [conv("X", "d", weight="dense"), norm("d", "a"), node("Relu", ["a"], "b"), conv("b", "Y")]
    converted, report = checked(
        build(nodes, {"dense": dense, **CONSTANTS}), dataclasses.replace(FUSE, force=False, min_sparsity=0.6)
    )
    assert ops(converted) == ["Conv", "BatchNormalization", "Relu", "SparseConv"]
    assert not refusals(report, PASS)


def test_behind_a_residual_that_others_read():
    """As in ResNet-v2."""
    nodes = [conv("X", "r"), node("Add", ["r", "X"], "x"), norm(), node("Relu", ["a"], "b"), conv("b", "e")]
    proto = build([*nodes, node("Add", ["e", "x"], "Y")], CONSTANTS)
    converted, _ = checked(proto, FUSE)
    assert ops(converted) == ["SparseConvAdd", "SparseConv", "SparseConvAdd"]


def test_one_dimension_but_not_three():
    for rank, count in ((1, 2), (3, 1)):
        weight = pruned((4, CHANNELS, *(3,) * rank), 0.5)
        nodes = [norm("X", "a"), node("Relu", ["a"], "b"), conv("b", "Y", weight="V", pads=[1] * (2 * rank))]
        proto = build(
            nodes, {"V": weight, **BN}, shape=(2, CHANNELS, *(50 if rank == 1 else 5,) * rank), out_rank=rank + 2
        )
        converted, _ = checked(proto, FUSE)
        assert ops(converted).count("SparseConv") == count


def test_groups_of_the_convolution_behind():
    weight = pruned((CHANNELS, 2, 3, 3), 0.5)
    nodes = [norm("X", "a"), node("Relu", ["a"], "b"), conv("b", "Y", weight="V", group=4)]
    converted, _ = checked(build(nodes, {"V": weight, **BN}), FUSE)
    scale, _ = converted.graph.node
    assert attributes_from_proto(scale).geometry.group == CHANNELS


def test_channels_that_become_zero():
    """They are not stored, and give what shifts them."""
    gamma = BN["gamma"] * np.float32(np.arange(CHANNELS) % 2)
    proto = before(norm(), node("Relu", ["a"], "b"), constants={"gamma": gamma})
    converted, _ = checked(proto, FUSE)
    weight = decode(attributes_from_proto(converted.graph.node[1]).weight)
    assert np.count_nonzero(weight) == CHANNELS // 2


def test_numbers_that_fit_only_together():
    """Scales that float16 cannot hold one by one."""
    constants = {"c": np.full((CHANNELS, 1, 1), 1e-6, np.float32), "c2": np.full((1, CHANNELS, 1, 1), 2e6, np.float32)}
    nodes = [node("Mul", ["x", "c"], "a"), node("Mul", ["a", "c2"], "e"), node("Relu", ["e"], "b")]
    proto = before(*nodes, constants=constants)
    converted, _ = convert(proto, options=dataclasses.replace(FUSE, precision="fp16"))
    scale = next(n for n in converted.graph.node if n.output[0] == "b")
    weight = attributes_from_proto(scale).weight
    np.testing.assert_allclose(decode(weight).reshape(-1), np.full(CHANNELS, 2), rtol=1e-6)
    # And those that do not fit together either.
    proto = before(*nodes, constants=constants | {"c": np.full((CHANNELS, 1, 1), 1, np.float32)})
    _, report = convert(proto, options=dataclasses.replace(FUSE, precision="fp16"))
    assert refusals(report, PASS) == ["Mul: what it scales and shifts by would not fit into float16"]


def test_float16():
    proto = before(norm(), node("Relu", ["a"], "b"), element_type=TensorProto.FLOAT16)
    converted, _ = checked(proto, FUSE)
    _, scale, _ = converted.graph.node
    assert attributes_from_proto(scale).element_type == np.float16


def test_to_float16():
    proto = before(norm(), node("Relu", ["a"], "b"))
    converted, _ = checked(proto, ConvertOptions(force=True, precision="fp16"), tolerance=2e-2)
    onnx.checker.check_model(converted, full_check=True)
    assert ops(converted).count("SparseConv") == 2


@pytest.mark.parametrize("kept", ["BatchNormalization_a", "Mul_e", "Relu_b", "BatchNormalization"])
def test_nodes_that_are_to_stay_float_stay(kept):
    nodes = [norm(), node("Mul", ["a", "c"], "e"), node("Relu", ["e"], "b")]
    options = ConvertOptions(force=True, precision="fp16", keep_float=(kept,))
    converted, _ = checked(before(*nodes), options, tolerance=2e-2)
    assert kept in [n.name for n in converted.graph.node] + ops(converted)


def test_in_a_branch_and_across_its_edge():
    inner = branch([norm("x", "u"), node("Relu", ["u"], "b"), conv("b", "t")], "t")
    across = branch([node("Relu", ["y"], "d"), conv("d", "e")], "e")
    choice = helper.make_node("If", ["cond"], ["Y"], then_branch=inner, else_branch=across)
    nodes = [node("Neg", ["X"], "x"), norm("x", "y"), choice]
    proto = build(nodes, {"W": WEIGHT, **BN}, more={"cond": []})
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.BOOL
    for flag in (True, False):
        inputs = {"X": np.random.default_rng(0).standard_normal(SIZE).astype(np.float32), "cond": np.array(flag)}
        converted, report = checked(proto, FUSE, inputs=inputs)
    assert ops(converted) == ["Neg", "BatchNormalization", "If"]
    assert len(edits(report, PASS)) == 2


@pytest.mark.parametrize(
    ("options", "size", "is_fused"),
    [
        (ConvertOptions(force=True), (7, 7), True),
        (ConvertOptions(force=True), (6, 8), False),
        (ConvertOptions(force=True), ("h", 1), True),
        (ConvertOptions(force=True, fuse_scales=False), (7, 7), False),
        (ConvertOptions(force=True, precision="fp16"), (1, 1), True),
        (ConvertOptions(force=True, precision="fp16", fuse_scales=False), (7, 7), False),
    ],
)
def test_small_maps_are_left_in_models_for_cpus(options, size, is_fused):
    converted, report = convert(before(norm(), node("Relu", ["a"], "b"), shape=(1, CHANNELS, *size)), options=options)
    assert ("BatchNormalization" not in ops(converted)) == is_fused
    assert not refusals(report, PASS)


def test_a_target_or_decisions_that_were_measured_on_a_gpu_make_a_model_for_gpus():
    assert ConvertOptions(targets=("sm_90",)).fewest_scaled_positions == 0
    assert ConvertOptions(decisions=Decisions("m.onnx", {"gpu": "NVIDIA H200"}, (), ())).fewest_scaled_positions == 0
    assert ConvertOptions(decisions=Decisions("m.onnx", {"processor": "EPYC"}, (), ())).fewest_scaled_positions == 49


def test_nodes_without_names():
    nodes = [norm(), node("Relu", ["a"], "b")]
    for each in nodes:
        each.name = ""
    converted, _ = checked(before(*nodes), FUSE)
    assert [n.name for n in converted.graph.node] == ["Neg_x", "b", "conv_Y"]


@pytest.mark.parametrize("attribute", ["kernel_shape", "group", "weight_shape"])
@pytest.mark.parametrize("is_reference", [False, True])
def test_a_sparse_convolution_of_before_that_lacks_an_attribute(attribute, is_reference):
    """In a function, attributes may be its arguments; a broken node may lack them."""
    options = ConvertOptions(force=True, fuse_scales=False)
    converted, _ = convert(before(norm(), node("Relu", ["a"], "b")), options=options)
    graph = ModelView(converted).scopes[0].graph
    (sparse,) = (n for n in graph.nodes if n.op == "SparseConv")
    del sparse.attrs[attribute]
    if is_reference:
        sparse.attrs[attribute] = gs.Node.AttributeRef("k", list)
    found = FuseScale(frozenset(), lambda _: None, lambda _: None, str).apply(graph)
    assert (found.changed, found.refusals) == (0, ())


def test_unnamed_value_shapes_are_not_needed():
    """The channels of a BatchNormalization are its parameters', whatever is known of its input."""
    nodes = [node("Reshape", ["X", "shape"], "x"), norm(), node("Relu", ["a"], "b"), conv("b", "Y")]
    proto = build(nodes, CONSTANTS)
    proto.graph.input.append(value("shape", ["rank"], TensorProto.INT64))
    inputs = {"X": np.random.default_rng(0).standard_normal(SIZE).astype(np.float32), "shape": np.array(SIZE)}
    converted, _ = checked(proto, FUSE, inputs=inputs)
    assert ops(converted) == ["Reshape", "SparseConv", "SparseConv"]


@pytest.mark.parametrize(("factor", "is_fused"), [(3e-4, False), (1e-4, False), (1e-2, True)])
@pytest.mark.parametrize("to_half", [True, False])
def test_scales_that_float16_holds_with_few_digits_are_left(factor, is_fused, to_half):
    constants = {"c": np.full((CHANNELS, 1, 1), factor, np.float32)}
    nodes = [node("Mul", ["x", "c"], "a"), node("Mul", ["a", "c"], "e"), node("Relu", ["e"], "b")]
    proto = before(*nodes, constants=constants, element_type=TensorProto.FLOAT if to_half else TensorProto.FLOAT16)
    converted, report = convert(proto, options=ConvertOptions(force=True, precision="fp16" if to_half else "keep"))
    assert ops(converted).count("SparseConv") == 1 + is_fused
    assert refusals(report, PASS) == (
        [] if is_fused else ["Mul: what it scales and shifts by would not fit into float16"]
    )


def test_channels_that_training_gave_up_may_lose_digits():
    """Next to what other channels scale by, it is nothing."""
    gamma = np.where(np.arange(CHANNELS) == 3, 1e-6, BN["gamma"]).astype(np.float32)
    proto = before(norm(), node("Relu", ["a"], "b"), constants={"gamma": gamma}, element_type=TensorProto.FLOAT16)
    converted, _ = checked(proto, FUSE)
    assert ops(converted).count("SparseConv") == 2


def test_a_convolution_of_several_inputs_is_left():
    """It reads X in parts, whose channels are not its weight's."""
    nodes = [node("Mul", ["X", "two"], "a"), node("Add", ["a", "one"], "e"), node("Relu", ["e"], "b")]
    nodes += [node("Neg", ["X"], "n"), node("Concat", ["b", "n"], "cat", axis=1)]
    nodes.append(conv("cat", "f", weight="V", pads=[0] * 4))
    nodes.append(conv("f", "Y", weight="V2", pads=[0] * 4))
    weights = {"V": pruned((CHANNELS, 2 * CHANNELS, 1, 1), 0.5), "V2": pruned((CHANNELS, CHANNELS, 1, 1), 0.5)}
    proto = build(nodes, CONSTANTS | weights)
    options = ConvertOptions(force=True, fuse_scales=False, fuse_concats=True)
    first, _ = convert(proto, options=dataclasses.replace(options, force=True))
    assert "SparseConvConcat2" in ops(first)
    first.graph.node.append(conv("Y", "Z"))
    first.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "W"))
    first.graph.output.append(value("Z", [None] * 4))
    second, report = checked_again(first)
    assert ops(second).count("Mul") == 1
    assert not refusals(report, PASS)


def checked_again(proto):
    """Convert a converted model again and compare, by the library."""
    converted, report = convert(proto, options=FUSE)
    inputs = {"X": np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)}
    pass_models.assert_close(
        pass_models.run(converted, inputs, library=True), pass_models.run(proto, inputs, library=True)
    )
    return converted, report


def test_the_new_node_has_a_name_of_its_own():
    """ONNX Runtime refuses two nodes of one name."""
    nodes = [norm(), node("Relu", ["a"], "b"), conv("b", "Y", name="b")]
    for each in nodes[:2]:
        each.name = ""
    converted, _ = checked(build([node("Neg", ["X"], "x"), *nodes], CONSTANTS), FUSE)
    assert [n.name for n in converted.graph.node] == ["Neg_x", "b_1", "b"]


def test_refusals_name_the_node_that_stays():
    _, report = convert(REFUSED["training form"][0](), options=FUSE)
    (note,) = [note for p in report.passes if p.name == PASS for note in p.refused]
    assert (note.node, note.text) == ("BatchNormalization_a", "BatchNormalization: it is in training form")


@pytest.mark.parametrize("to_half", [True, False])
@pytest.mark.parametrize("name", ["Sub and Mul", "BatchNormalization"])
def test_scales_and_shifts_that_cancel_each_other_in_float16(name, to_half):
    """The mean is a thousand times the deviation; the result is as accurate as a product of two halves."""
    mean, gain = np.full(CHANNELS, 1000.7), np.linspace(1.1, 1.9, CHANNELS)
    constants = {"gamma": np.float32(gain), "beta": np.zeros(CHANNELS, np.float32), "mean": np.float32(mean)}
    constants |= {"var": np.ones(CHANNELS, np.float32), "m": np.float32(mean).reshape(-1, 1, 1)}
    constants |= {"g": np.float32(gain).reshape(-1, 1, 1)}
    nodes = [norm("X", "a")] if name != "Sub and Mul" else [node("Sub", ["X", "m"], "f"), node("Mul", ["f", "g"], "a")]
    nodes += [node("LeakyRelu", ["a"], "Z"), conv("Z", "Y")]
    element_type = TensorProto.FLOAT if to_half else TensorProto.FLOAT16
    proto = build(nodes, CONSTANTS | constants, outputs=("Y", "Z"), element_type=element_type)
    options = ConvertOptions(force=True, precision="fp16" if to_half else "keep", fp16_io=to_half)
    converted, _ = convert(proto, options=options)
    assert ops(converted) == ["SparseConv", "SparseConv"]
    x = np.float16(1000.7 + 20 * np.random.default_rng(0).standard_normal(SIZE))
    _, found = pass_models.run(converted, {"X": x}, library=True)
    # In a float16 model, the constants of the source are halves.
    mean, gain = (v if to_half else np.float16(v).astype(np.float64) for v in (np.float32(mean), np.float32(gain)))
    deviation = np.sqrt(1 + 1e-5) if name == "BatchNormalization" else 1
    exact = (x.astype(np.float64) - mean.reshape(-1, 1, 1)) * (gain / deviation).reshape(-1, 1, 1)
    exact = np.where(exact < 0, 0.01 * exact, exact)
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=3 * 2.0**-11, atol=1e-4)
