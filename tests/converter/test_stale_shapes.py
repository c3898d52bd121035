"""What a model states of shapes may be of a time when its inputs had other sizes: what it computes must not hang on it.

ONNX Runtime checks the inputs of a model, and nothing else that it states.
"""

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect
from onnx_sparseconv.passes.fuse_residual import FuseResidual
from tests.support.odd_models import ANY_SHAPE, call, constant, conv, function, model, pruned, tensor, value
from tests.support.plain_ort import all_nodes, run

FORCE = ConvertOptions(force=True)
HALF = ConvertOptions(precision="fp16")
CHANNELS = 8
WEIGHT = tensor(pruned((CHANNELS, CHANNELS, 3, 3), 0.5), "W")
OPEN = (1, CHANNELS, "h", "w")
STALE = (1, CHANNELS, 27, 27)
FLAG, NUMBER = value("on", [], TensorProto.BOOL), value("i", [], TensorProto.INT64)


def same(source="r", out="Y", **attributes):
    return conv(source=source, out=out, auto_pad="SAME_UPPER", strides=[2, 2], pads=None, **attributes)


def relu(source="X", out="r"):
    return helper.make_node("Relu", [source], [out])


def built(nodes, *, constants=(), inputs=(), outputs=(), stated=(), **named):
    results = [value("Y", ANY_SHAPE), *outputs]
    proto = model(nodes, [WEIGHT, *constants], [value("X", OPEN), *inputs], results, **named)
    proto.graph.value_info.extend(stated)
    return proto


def in_loop(state="state", shape=STALE):
    nodes = [same(state, "next"), helper.make_node("Identity", ["on"], ["still"])]
    results = [value("still", [], TensorProto.BOOL), value("next", ANY_SHAPE)]
    body = helper.make_graph(nodes, "body", [NUMBER, FLAG, value(state, shape)], results)
    loop = helper.make_node("Loop", ["trips", "", "X"], ["Y"], body=body)
    return built([loop], constants=[tensor(np.array(2), "trips")])


def in_loop_under_the_name_of_a_tensor_around():
    """Of another size, which is known; it has no other reader."""
    proto = in_loop("other", OPEN)
    proto.graph.input.append(value("other", STALE))
    return proto


def in_scan():
    body = helper.make_graph([same("frame", "out")], "body", [value("frame", STALE)], [value("out", ANY_SHAPE)])
    nodes = [
        helper.make_node("Unsqueeze", ["X", "axis"], ["frames"]),
        helper.make_node("Scan", ["frames"], ["scanned"], body=body, num_scan_inputs=1),
        helper.make_node("Squeeze", ["scanned", "axis"], ["Y"]),
    ]
    return built(nodes, constants=[tensor(np.array([0]), "axis")])


def branches(source, out):
    """An If whose branches state the shapes of their outputs."""
    then, other = [
        helper.make_graph([relu(source, name)], name, [], [value(name, STALE)]) for name in ("then", "other")
    ]
    return helper.make_node("If", ["on"], [out], then_branch=then, else_branch=other)


def behind_a_function():
    """ONNX Runtime inlines the function. (Without it, it insists on what a branch states.)"""
    nodes = [constant("on", [1], bool), branches("x", "y")]
    return built([call("chosen", ["X"], "r"), same()], functions=[function("chosen", ["x"], nodes)])


def by_a_shape_that_callers_may_set():
    reshape = helper.make_node("Reshape", ["X", "shape"], ["r"])
    return built(
        [reshape, same()], constants=[tensor(np.array(STALE), "shape")], inputs=[value("shape", [4], TensorProto.INT64)]
    )


SAME = {
    "stated of what lies between": lambda: built([relu(), same()], stated=[value("r", STALE)]),
    "stated of an output": lambda: built([relu(), same()], outputs=[value("r", STALE)]),
    "stated of what a Loop carries": in_loop,
    "known of what has the name of what a Loop carries": in_loop_under_the_name_of_a_tensor_around,
    "stated of what a Scan reads": in_scan,
    "stated of what a branch in a function makes": behind_a_function,
    "a shape that callers may set": by_a_shape_that_callers_may_set,
}


def feeds(size):
    x = np.random.default_rng(1).standard_normal((1, CHANNELS, size, size)).astype(np.float32)
    return {"X": x, "other": np.zeros(STALE, np.float32), "on": np.array(1, bool), "shape": np.array(x.shape)}


@pytest.mark.parametrize("name", SAME)
def test_same_padding_does_not_hang_on_what_is_stated(name):
    proto = SAME[name]()
    converted, _ = convert(proto, options=FORCE)
    assert any(n.op_type == "SparseConv" for n in all_nodes(converted))
    for size in (27, 28):
        for found, wanted in zip(run(converted, feeds(size)), run(proto, feeds(size)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_same_padding_of_a_convolution_that_stays_dense_neither():
    """Its own would be written down together with that of a Pad that is folded into it."""
    pad = helper.make_node("Pad", ["r", "amounts"], ["p"])
    dense = tensor(pruned((CHANNELS, CHANNELS, 3, 3), 0), "V")
    amounts = tensor(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "amounts")
    proto = built([relu(), pad, same("p", weight="V")], constants=[dense, amounts], stated=[value("p", STALE)])
    converted, _ = convert(proto, options=HALF)
    for size in (25, 26):
        (found,), (wanted,) = run(converted, feeds(size)), run(proto, feeds(size))
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=2e-2)


def test_same_padding_that_follows_from_the_inputs_is_resolved():
    proto = built([relu(), same()], stated=[value("r", OPEN)])
    proto.graph.input[0].CopyFrom(value("X", STALE))
    (node,) = [n for n in convert(proto, options=FORCE)[0].graph.node if n.op_type == "SparseConv"]
    assert [list(a.ints) for a in node.attribute if a.name == "pads"] == [[1, 1, 1, 1]]


def test_what_is_stated_counts_in_reports():
    proto = built([relu(), same()], stated=[value("r", STALE)])
    assert inspect(proto).layers[0].flops == 2 * CHANNELS * CHANNELS * 9 * 14 * 14


# --- residuals, and what stands before --------------------------------------------------------------------------------


def is_fused(report):
    (found,) = [p for p in report.passes if p.name == FuseResidual.__name__]
    return found.changed == 1


def test_an_add_that_is_stated_not_to_broadcast_stays():
    nodes = [relu("Z", "z"), conv(out="c"), helper.make_node("Add", ["c", "z"], ["Y"])]
    batch_of_one = [value(name, (1, CHANNELS, 5, 5)) for name in ("c", "z")]
    proto = model(
        nodes, [WEIGHT], [value("X", ("n", *OPEN[1:])), value("Z", ("k", *OPEN[1:]))], [value("Y", ANY_SHAPE)]
    )
    proto.graph.value_info.extend(batch_of_one)
    converted, report = convert(proto, options=FORCE)
    assert not is_fused(report)
    x = feeds(5)["X"]
    for z in (x, np.concatenate([x, x])):
        (found,), (wanted,) = run(converted, {"X": x, "Z": z}), run(proto, {"X": x, "Z": z})
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_scale_whose_operand_is_stated_to_have_all_channels_stays():
    """It broadcasts its operand, which has one channel."""
    shape = [value("shape", [4], TensorProto.INT64)]
    scale = tensor(np.arange(1, CHANNELS + 1, dtype=np.float32).reshape(CHANNELS, 1, 1), "scale")
    nodes = [
        helper.make_node("Reshape", ["X", "shape"], ["r"]),
        helper.make_node("Mul", ["r", "scale"], ["m"]),
        conv(source="m"),
    ]
    proto = built(nodes, constants=[scale], inputs=shape, stated=[value("r", ("n", CHANNELS, None, None))])
    converted, _ = convert(proto, options=FORCE)
    feed = feeds(6) | {"shape": np.array([1, 1, 36, CHANNELS])}
    (found,), (wanted,) = run(converted, feed), run(proto, feed)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
