"""Branches of If that ONNX Runtime may resolve when it opens a model: what stands in them stays dense."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect
from onnx_sparseconv.converter.report import Reason
from tests.support.odd_models import branch, call, constant, function, model, tensor, value
from tests.support.pass_models import CHANNELS, INPUT, WEIGHT, conv, node, ops

FORCE = ConvertOptions(force=True)
CONDITIONS = {
    "an initializer": ([], {"c": np.array(True)}),
    "a constant": ([constant("c", np.array(True))], {}),
    "a size": (
        [node("Shape", ["X"], "s"), node("Gather", ["s", "zero"], "n"), node("Equal", ["n", "one"], "c")],
        {"zero": np.array(0), "one": np.array(INPUT[0])},
    ),
    "an input": ([node("Identity", ["flag"], "c")], {}),
    "an input and a constant": ([node("And", ["flag", "yes"], "c")], {"yes": np.array(True)}),
}


def choose(condition="c"):
    """An If of which one branch reads a convolution by another one and by an operator that stays."""
    then = [conv("X", "t", weight="V"), conv("t", "u", weight="V"), node("Max", ["t", "u"], "o")]
    other = [node("Neg", ["X"], "e")]
    return helper.make_node(
        "If", [condition], ["Y"], name="choice", then_branch=branch(then, "o"), else_branch=branch(other, "e")
    )


def build(nodes, constants, functions=()):
    inputs = [value("X", INPUT), value("flag", [], TensorProto.BOOL)]
    weights = {"V": WEIGHT, **constants}
    return model(
        nodes, [tensor(v, n) for n, v in weights.items()], inputs, [value("Y", [None] * 4)], functions=functions
    )


@pytest.mark.parametrize("name", CONDITIONS)
def test_convolutions_stay_dense_where_the_branch_may_be_chosen_before_the_model_runs(name):
    nodes, constants = CONDITIONS[name]
    proto = build([*nodes, choose()], constants)
    onnx.checker.check_model(proto, full_check=True)
    is_fixed = "input" not in name
    verdicts = [layer.verdict for layer in inspect(proto, options=FORCE).layers]
    assert {v.reason for v in verdicts} == {Reason.UNSUPPORTED_FORM if is_fixed else Reason.FORCED}
    converted, _ = convert(proto, options=FORCE)
    if is_fixed:
        assert converted is None
        assert "a branch of the If 'choice'" in verdicts[0].text
        assert "(onnxsim)" in verdicts[0].text
        return
    # As a plain ONNX Runtime opens it.
    session = ort.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"X": np.ones(INPUT, np.float32), "flag": np.array(True)}
    assert session.run(None, feed)[0].shape == (INPUT[0], CHANNELS, *INPUT[2:])


@pytest.mark.parametrize(("given", "is_rewritten"), [("yes", False), ("flag", True)])
def test_in_a_function_its_callers_decide(given, is_rewritten):
    block = function("block", ["X", "c"], [constant("V", WEIGHT), choose(), node("Identity", ["Y"], "y")])
    proto = build([call("block", ["X", given], "Y")], {"yes": np.array(True)}, [block])
    converted, _ = convert(proto, options=FORCE)
    assert (converted is not None) == is_rewritten


def test_a_nested_branch_is_found():
    inner = branch([conv("X", "t", weight="V")], "t")
    nested = helper.make_node("If", ["flag"], ["i"], name="inner", then_branch=inner, else_branch=inner)
    outer = helper.make_node(
        "If", ["c"], ["Y"], name="outer", then_branch=branch([nested], "i"), else_branch=branch([nested], "i")
    )
    layers = inspect(build([outer], {"c": np.array(True)}), options=FORCE).layers
    assert layers
    assert all("the If 'outer'" in layer.verdict.text for layer in layers)


@pytest.mark.parametrize("shape", [(CHANNELS + 1,), (1,), (0,), (CHANNELS, 1), ()])
def test_a_bias_of_another_shape_is_found(shape):
    proto = build(
        [helper.make_node("Conv", ["X", "V", "b"], ["Y"], name="conv", pads=[1] * 4)],
        {"b": np.zeros(shape, np.float32)},
    )
    (layer,) = inspect(proto, options=FORCE).layers
    assert layer.verdict.reason is Reason.INVALID
    assert layer.verdict.text == f"its bias has shape {list(shape)}, its weight {CHANNELS} output channels"
    assert convert(proto, options=FORCE)[0] is None
    assert ops(proto) == ["Conv"]
