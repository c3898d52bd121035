"""FuseActivation: every activation of the op, however a model spells it, and what only looks like one."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import convert
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import Activation
from tests.support.odd_models import branch, call, constant, function, model, pruned, tensor, value
from tests.support.pass_models import (
    FORCE,
    INPUT,
    WEIGHT,
    build,
    checked,
    conv,
    edits,
    node,
    numbers,
    ops,
    refusals,
)
from tests.support.plain_ort import newest_opset

PASS = "FuseActivation"
LOWEST, HIGHEST = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)
PLAIN = {"lo": -0.5, "hi": 0.75, "zero": 0, "one": 1, "three": 3, "six": 6, "sixth": 1 / 6, "nan": np.nan}
CONSTANTS = {
    **{name: np.float32(number) for name, number in PLAIN.items()},
    "threes": np.full(6, 3, np.float32),
}
GATE = {"alpha": 1 / 6, "beta": 0.5}
SILU = [("Sigmoid", ["a"], "g", {}), ("Mul", ["a", "g"], "Y", {})]


def spelled(*nodes, constants=None, **named):
    """conv, then nodes from ``a`` to ``Y``."""
    made = [node(op, inputs, output, **attributes) for op, inputs, output, attributes in nodes]
    return build([conv(), *made], CONSTANTS | (constants or {}), **named)


def single(op, *inputs, opset=17, element_type=TensorProto.FLOAT, **attributes):
    return spelled((op, ["a", *inputs], "Y", attributes), opset=opset, element_type=element_type)


def hard_swish(*tail, first="a", second="g", shift=("a", "three"), clip=("zero", "six"), constants=None):
    """``x * Clip(x + 3, 0, 6)`` from nodes, with ``tail`` behind it."""
    return spelled(
        ("Add", shift, "b", {}),
        ("Clip", ["b", *clip], "g", {}),
        ("Mul", [first, second], "m" if tail else "Y", {}),
        *tail,
        constants=constants,
    )


def computed_bound():
    return spelled(
        ("Neg", ["half"], "low", {}), ("Clip", ["a", "low", "hi"], "Y", {}), constants={"half": np.float32(0.5)}
    )


def listed(name):
    proto = single("Clip", "lo", "hi")
    proto.graph.input.append(value(name, []))
    return proto


def large(proto):
    """Inputs that reach the bends of every activation."""
    (x,) = (i for i in proto.graph.input if i.name == "X")
    dtype = helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
    return {"X": (np.random.default_rng(0).standard_normal(INPUT) * 4).astype(dtype), "b": np.array(1, np.float32)}


KNOWN = {
    "Relu": (lambda: single("Relu"), Activation.RELU, (0, 0)),
    "Clip": (lambda: single("Clip", "lo", "hi"), Activation.CLIP, (-0.5, 0.75)),
    "Clip without max": (lambda: single("Clip", "lo"), Activation.CLIP, (-0.5, HIGHEST)),
    "Clip without min": (lambda: single("Clip", "", "hi"), Activation.CLIP, (LOWEST, 0.75)),
    "Clip without either": (lambda: single("Clip"), Activation.CLIP, (LOWEST, HIGHEST)),
    "Clip with attributes": (lambda: single("Clip", opset=9, min=-0.5, max=0.75), Activation.CLIP, (-0.5, 0.75)),
    "Clip with one attribute": (lambda: single("Clip", opset=10, max=6.0), Activation.CLIP, (LOWEST, 6)),
    "Clip of opset 11": (lambda: single("Clip", "zero", "six", opset=11), Activation.CLIP, (0, 6)),
    "Clip of computed bounds": (computed_bound, Activation.CLIP, (-0.5, 0.75)),
    "Clip to one value": (lambda: single("Clip", "one", "one"), Activation.CLIP, (1, 1)),
    "LeakyRelu": (lambda: single("LeakyRelu", alpha=0.25), Activation.LEAKY_RELU, (0.25, 0)),
    "LeakyRelu's default": (lambda: single("LeakyRelu"), Activation.LEAKY_RELU, (0.01, 0)),
    "LeakyRelu of opset 9": (lambda: single("LeakyRelu", opset=9, alpha=-2.0), Activation.LEAKY_RELU, (-2, 0)),
    "HardSigmoid": (lambda: single("HardSigmoid", alpha=0.3, beta=0.4), Activation.HARD_SIGMOID, (0.3, 0.4)),
    "HardSigmoid's defaults": (lambda: single("HardSigmoid", opset=9), Activation.HARD_SIGMOID, (0.2, 0.5)),
    "Sigmoid": (lambda: single("Sigmoid"), Activation.SIGMOID, (0, 0)),
    "Clip(Relu(x), 0, 6)": (
        lambda: spelled(("Relu", ["a"], "r", {}), ("Clip", ["r", "zero", "six"], "Y", {})),
        Activation.CLIP,
        (0, 6),
    ),
    "Clip(Relu(x), -0.5, 0.75)": (
        lambda: spelled(("Relu", ["a"], "r", {}), ("Clip", ["r"], "Y", {"min": -0.5, "max": 0.75}), opset=9),
        Activation.CLIP,
        (0, 0.75),
    ),
    "HardSwish": (lambda: single("HardSwish", opset=14), Activation.HARD_SWISH, (0, 0)),
    "x * Sigmoid(x)": (lambda: spelled(*SILU), Activation.SILU, (0, 0)),
    "Sigmoid(x) * x, opset 9": (
        lambda: spelled(SILU[0], ("Mul", ["g", "a"], "Y", {}), opset=9),
        Activation.SILU,
        (0, 0),
    ),
    "x * Sigmoid(1 * x)": (
        lambda: spelled(("Mul", ["one", "a"], "b", {}), ("Sigmoid", ["b"], "g", {}), ("Mul", ["a", "g"], "Y", {})),
        Activation.SILU,
        (0, 0),
    ),
    "x * HardSigmoid(x)": (
        lambda: spelled(("HardSigmoid", ["a"], "g", GATE), ("Mul", ["g", "a"], "Y", {}), opset=9),
        Activation.HARD_SWISH,
        (0, 0),
    ),
    "x * Clip(x + 3, 0, 6) / 6": (
        lambda: hard_swish(("Div", ["m", "six"], "Y", {})),
        Activation.HARD_SWISH,
        (0, 0),
    ),
    "Clip(3 + x, 0, 6) * x * (1 / 6)": (
        lambda: hard_swish(("Mul", ["sixth", "m"], "Y", {}), first="g", second="a", shift=("three", "a")),
        Activation.HARD_SWISH,
        (0, 0),
    ),
    "x * (Clip(x + 3, 0, 6) / 6)": (
        lambda: spelled(
            ("Add", ["a", "three"], "b", {}),
            ("Clip", ["b", "zero", "six"], "g", {}),
            ("Div", ["g", "six"], "h", {}),
            ("Mul", ["a", "h"], "Y", {}),
        ),
        Activation.HARD_SWISH,
        (0, 0),
    ),
    "x * Clip(x + 3, 0, 6) / 6, opset 9": (
        lambda: spelled(
            ("Add", ["a", "three"], "b", {}),
            ("Clip", ["b"], "g", {"min": 0.0, "max": 6.0}),
            ("Mul", ["g", "sixth"], "h", {}),
            ("Mul", ["h", "a"], "Y", {}),
            opset=9,
        ),
        Activation.HARD_SWISH,
        (0, 0),
    ),
}
UNKNOWN = {
    "bounds at run time": (
        lambda: spelled(("Clip", ["a", "b"], "Y", {}), more={"b": []}),
        "bounds are only known at run time",
    ),
    "bounds that callers may set": (lambda: listed("hi"), "is also an input, which callers may set"),
    "the gate is an output": (lambda: spelled(*SILU, outputs=["Y", "g"]), "is an output of a graph"),
    "the gate has another reader": (
        lambda: spelled(("Sigmoid", ["a"], "g", {}), ("Mul", ["a", "g"], "m", {}), ("Sub", ["m", "g"], "Y", {})),
        "other nodes read",
    ),
    "the convolution has another reader": (
        lambda: spelled(("Sigmoid", ["a"], "g", {}), ("Sub", ["a", "g"], "Y", {})),
        "other nodes read",
    ),
    "HardSigmoid of other parameters": (
        lambda: spelled(("HardSigmoid", ["a"], "g", {"alpha": 0.2}), ("Mul", ["g", "a"], "Y", {})),
        "other nodes read",
    ),
    "Sigmoid of another tensor": (lambda: spelled(("Sigmoid", ["X"], "g", {}), SILU[1]), None),
    "Sigmoid of twice the tensor": (
        lambda: spelled(("Mul", ["three", "a"], "b", {}), ("Sigmoid", ["b"], "g", {}), SILU[1]),
        None,
    ),
    "another shift": (lambda: hard_swish(("Div", ["m", "six"], "Y", {}), shift=("a", "one")), None),
    "another lower bound": (lambda: hard_swish(("Div", ["m", "six"], "Y", {}), clip=("lo", "six")), None),
    "another bound": (lambda: hard_swish(("Div", ["m", "six"], "Y", {}), clip=("zero", "three")), None),
    "another divisor": (lambda: hard_swish(("Div", ["m", "three"], "Y", {})), None),
    "divided the wrong way": (
        lambda: hard_swish(("Add", ["m", "three"], "n", {}), ("Div", ["six", "n"], "Y", {})),
        None,
    ),
    "not divided": (hard_swish, None),
    "a shift for each column": (lambda: hard_swish(("Div", ["m", "six"], "Y", {}), shift=("a", "threes")), None),
    "Softsign": (lambda: single("Softsign"), None),
    "PRelu": (lambda: single("PRelu", "hi"), None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_activation_is_taken_in(name):
    make, code, parameters = KNOWN[name]
    proto = make()
    converted, report = checked(proto, inputs=large(proto))
    (sparse,) = (n for n in converted.graph.node if n.op_type != "Neg")
    attributes = attributes_from_proto(sparse)
    assert attributes.activation is code
    assert (attributes.alpha, attributes.beta) == pytest.approx(parameters)
    assert list(sparse.output) == ["Y"]
    (done,) = edits(report, PASS)
    assert done.startswith("conv_a: ")
    assert not refusals(report, PASS)


@pytest.mark.parametrize("name", KNOWN)
def test_every_activation_comes_behind_bias_and_residual(name):
    make, code, _ = KNOWN[name]
    proto = make()
    nodes = list(proto.graph.node)
    index = next(i for i, n in enumerate(nodes) if n.op_type == "Conv")
    nodes[index].output[0] = "raw"
    nodes[index + 1 : index + 1] = [node("Add", ["raw", "offset"], "shifted"), node("Add", ["X", "shifted"], "a")]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(tensor(numbers(4, (8, 1, 1)), "offset"))
    converted, _ = checked(proto, inputs=large(proto))
    (sparse,) = (n for n in converted.graph.node if n.op_type != "Neg")
    assert (sparse.op_type, attributes_from_proto(sparse).activation) == ("SparseConvAdd", code)


@pytest.mark.parametrize("opset", [11, 14, newest_opset()])
@pytest.mark.parametrize("op", ["Clip", "LeakyRelu", "HardSigmoid", "Sigmoid", "Relu", "SiLU"])
def test_float16(op, opset):
    half = {"element_type": TensorProto.FLOAT16, "opset": opset}
    proto = spelled(*SILU, **half) if op == "SiLU" else single(op, *(["lo"] if op == "Clip" else []), **half)
    converted, _ = checked(proto, inputs=large(proto))
    (sparse,) = converted.graph.node
    if op == "Clip":
        assert attributes_from_proto(sparse).beta == np.finfo(np.float16).max


@pytest.mark.skipif(newest_opset() < 24, reason="Swish came with opset 24")
def test_swish_is_silu_where_its_alpha_is_1():
    converted, _ = convert(single("Swish", opset=24), options=FORCE)
    assert attributes_from_proto(converted.graph.node[0]).activation is Activation.SILU
    _, report = convert(single("Swish", opset=24, alpha=1.5), options=FORCE)
    assert refusals(report, PASS) == ["Swish: its alpha is 1.5; the op knows only 1"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_op_cannot_express_stays(name):
    make, why = UNKNOWN[name]
    proto = make()
    converted, report = checked(proto, inputs=large(proto))
    assert len(ops(converted)) == len(ops(proto))
    assert attributes_from_proto(converted.graph.node[0]).activation is Activation.NONE
    texts = refusals(report, PASS)
    assert (not texts) if why is None else (len(texts) == 1 and why in texts[0])


@pytest.mark.parametrize(
    ("second", "more"),
    [
        (("Clip", ["r", "lo", "minus"], "Y", {}), {}),
        (("Clip", ["r", "zero", "six"], "Y", {}), {"outputs": ["Y", "r"]}),
        (("Clip", ["r", "b"], "Y", {}), {"more": {"b": []}}),
        (("LeakyRelu", ["r"], "Y", {}), {}),
    ],
    ids=["bounds below zero", "Relu is an output", "bounds at run time", "no Clip"],
)
def test_relu_alone_is_taken_in_where_what_follows_cannot_be(second, more):
    proto = spelled(("Relu", ["a"], "r", {}), second, constants={"minus": np.float32(-0.25)}, **more)
    converted, _ = checked(proto, inputs=large(proto))
    assert ops(converted) == ["SparseConv", second[0]]
    assert attributes_from_proto(converted.graph.node[0]).activation is Activation.RELU


@pytest.mark.parametrize(("bounds", "why"), [(("hi", "lo"), "wrong order"), (("nan", "hi"), "not a number")])
def test_bounds_that_are_no_interval_stay(bounds, why):
    """Runtimes do not agree on what they mean."""
    converted, report = convert(single("Clip", *bounds), options=FORCE)
    assert ops(converted) == ["SparseConv", "Clip"]
    assert why in refusals(report, PASS)[0]


def test_an_activation_with_an_argument_of_a_function_stays():
    leaky = node("LeakyRelu", ["a"], "y")
    leaky.attribute.add(name="alpha", type=1, ref_attr_name="slope")
    inside = function("block", ["x"], [constant("w", WEIGHT), conv("x", weight="w"), leaky], attributes=["slope"])
    proto = model([call("block", ["X"], slope=0.5)], [], [value("X", INPUT)], functions=[inside])
    converted, report = checked(proto)
    (kept,) = [f for f in converted.functions if f.domain == inside.domain]
    assert [n.op_type for n in kept.node] == ["SparseConv", "LeakyRelu"]
    assert refusals(report, PASS) == ["LeakyRelu: its attributes are arguments of a function"]


def test_silu_in_a_branch():
    inner = [conv(), node("Sigmoid", ["a"], "g"), node("Mul", ["a", "g"], "t")]
    choice = helper.make_node(
        "If",
        ["cond"],
        ["Y"],
        then_branch=branch(inner, "t"),
        else_branch=branch([conv(out="e0"), node("Sigmoid", ["e0"], "g"), node("Sub", ["e0", "g"], "e")], "e"),
    )
    proto = build([choice], more={"cond": []})
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.BOOL
    for flag in (True, False):
        converted, report = checked(proto, inputs=large(proto) | {"cond": np.array(flag)})
    branches = {a.name: [n.op_type for n in a.g.node] for a in converted.graph.node[0].attribute}
    assert branches == {"then_branch": ["SparseConv"], "else_branch": ["SparseConv", "Sigmoid", "Sub"]}
    assert len(refusals(report, PASS)) == 1


def test_what_is_refused_reaches_the_report_and_the_notes():
    proto = build([conv(), node("Relu", ["a"], "b"), node("Sub", ["a", "b"], "Y")])
    _, report = checked(proto)
    assert refusals(report, PASS) == ["Relu: other nodes read a tensor between them, too"]
    assert "not fused: 1 Relu (Relu_b): other nodes read a tensor between them, too" in report.notes


def test_nodes_without_names_are_called_by_their_outputs():
    nodes = [conv(name=""), node("Relu", ["a"], "b", name=""), node("Sub", ["a", "b"], "c"), conv("c", "d", name="")]
    _, report = checked(build([*nodes, node("Relu", ["d"], "Y", name="")], {"W": pruned((8, 8, 3, 3), 0.9)}))
    assert "not fused: 1 Relu (b): other nodes read a tensor between them, too" in report.notes
    assert edits(report, PASS) == ["Conv_d: Relu"]
