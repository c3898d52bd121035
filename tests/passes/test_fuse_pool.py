"""FusePool: a MaxPool is taken in where the op can hold its windows, and nowhere else."""

import dataclasses

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, restore
from onnx_sparseconv.converter.decisions import Decisions
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import Activation, PoolGeometry
from onnx_sparseconv.passes.fuse_pool import FusePool
from tests.support.odd_models import ANY_SHAPE, conv, model, pruned, tensor, value
from tests.support.pass_models import checked, ops, refusals
from tests.support.plain_ort import inputs_for, run

FORCE = ConvertOptions(force=True, fuse_pools=True)
CHANNELS = 8
WEIGHT = tensor(pruned((CHANNELS, CHANNELS, 3, 3), 0.5), "W")


def pool(source="a", target="Y", outputs=(), **attributes):
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]} | attributes
    return helper.make_node("MaxPool", [source], [target, *outputs], name="pool", **attributes)


def block(*nodes, out=("Y",), shape=("n", CHANNELS, 7, 9)):
    types = {"indices": TensorProto.INT64}
    outputs = [value(name, ANY_SHAPE, types.get(name, TensorProto.FLOAT)) for name in out]
    return model([conv(out="a"), *nodes], [WEIGHT], [value("X", shape)], outputs)


# Behind a Relu, which makes b.
FUSED = {
    "pairs": (pool("b"), PoolGeometry((2, 2), (2, 2), (0,) * 4)),
    "padding": (pool("b", kernel_shape=[3, 3], pads=[1, 1, 1, 1]), PoolGeometry((3, 3), (2, 2), (1,) * 4)),
    "no strides": (
        helper.make_node("MaxPool", ["b"], ["Y"], name="pool", kernel_shape=[3, 2]),
        PoolGeometry((3, 2), (1, 1), (0,) * 4),
    ),
    "valid": (pool("b", auto_pad="VALID", dilations=[1, 1]), PoolGeometry((2, 2), (2, 2), (0,) * 4)),
    "nothing to round": (pool("b", kernel_shape=[3, 3], ceil_mode=1), PoolGeometry((3, 3), (2, 2), (0,) * 4)),
    "defaults spelled out": (pool("b", ceil_mode=0, storage_order=0), PoolGeometry((2, 2), (2, 2), (0,) * 4)),
}
REFUSED = {
    "ceil_mode is not 0": lambda: block(pool(ceil_mode=1)),
    "its ceil_mode is not 0": lambda: block(pool(ceil_mode=1, kernel_shape=[3, 3]), shape=("n", CHANNELS, "h", 9)),
    "auto_pad is SAME_UPPER": lambda: block(pool(auto_pad="SAME_UPPER")),
    "windows are dilated": lambda: block(pool(dilations=[2, 1])),
    "it has a second output": lambda: block(pool(outputs=["indices"]), out=("Y", "indices")),
    "other nodes read": lambda: block(pool(target="b"), helper.make_node("Neg", ["a"], ["Y"]), out=("Y", "b")),
    "output of a graph": lambda: block(pool(), out=("Y", "a")),
    "adds a residual": lambda: block(helper.make_node("Add", ["a", "X"], ["b"]), pool("b")),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    node, expected = FUSED[name]
    proto = block(helper.make_node("Relu", ["a"], ["b"], name="relu"), node)
    converted, report = checked(proto, FORCE)
    (sparse,) = converted.graph.node
    attributes = attributes_from_proto(sparse)
    assert (sparse.op_type, sparse.name) == ("SparseConvMaxPool", "conv")
    assert (attributes.activation, attributes.pool) == (Activation.RELU, expected)
    assert "1 MaxPool fused into the sparse convolutions before them" in report.notes


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    converted, report = checked(REFUSED[name](), FORCE)
    assert "SparseConvMaxPool" not in ops(converted)
    assert "MaxPool" in ops(converted)
    assert any(name in text for text in refusals(report, "FusePool"))


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        (ConvertOptions(force=True), False),  # ONNX Runtime's own pool is the faster one on the CPU
        (ConvertOptions(force=True, precision="fp16"), True),
        (ConvertOptions(force=True, precision="fp16", fuse_pools=False), False),
    ],
)
def test_pools_are_fused_in_models_for_gpus(options, fused):
    converted, _ = convert(block(pool()), options=options)
    assert ("SparseConvMaxPool" in ops(converted)) == fused


def test_a_target_or_decisions_that_were_measured_on_a_gpu_make_a_model_for_gpus():
    decided = Decisions("m.onnx", {"gpu": "NVIDIA H200"}, (), ())
    assert ConvertOptions(targets=("sm_90",)).takes_pools
    assert ConvertOptions(decisions=decided).takes_pools
    assert not ConvertOptions(decisions=dataclasses.replace(decided, setting={"processor": "EPYC"})).takes_pools


@pytest.mark.parametrize("is_reference", [False, True])
def test_a_sparse_convolution_of_before_without_a_kernel_shape_of_its_own(is_reference):
    """In a function, attributes may be its arguments; a broken node may lack them."""
    converted, _ = convert(block(pool()), options=ConvertOptions(force=True))
    graph = ModelView(converted).scopes[0].graph
    (sparse,) = (n for n in graph.nodes if n.op == "SparseConv")
    del sparse.attrs["kernel_shape"]
    if is_reference:
        sparse.attrs["kernel_shape"] = gs.Node.AttributeRef("k", list)
    assert FusePool(frozenset(), lambda _: None, str).apply(graph).changed == 0


def test_windows_that_lie_outside_of_the_map_are_refused():
    """The checker of onnx lets such a padding pass, ONNX Runtime does not."""
    proto = block(pool(pads=[2, 0, 0, 0]))
    converted, report = convert(proto, options=FORCE)
    assert ops(converted) == ["SparseConv", "MaxPool"]
    assert any("pool_pads must be less than the windows" in text for text in refusals(report, "FusePool"))


def test_an_activation_behind_the_pool_stays_there():
    """Some activations do not rise with what they are given, so they cannot change places with a maximum."""
    proto = block(pool(target="b"), helper.make_node("LeakyRelu", ["b"], ["Y"], alpha=-1.0))
    assert ops(checked(proto, FORCE)[0]) == ["SparseConvMaxPool", "LeakyRelu"]


def test_what_was_fused_comes_back():
    proto = block(pool(kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
    converted, _ = convert(proto, options=FORCE)
    restore(converted)
    assert [n.op_type for n in converted.graph.node] == ["Conv", "MaxPool"]
    feed = inputs_for(proto)
    for again, before in zip(run(converted, feed), run(proto, feed), strict=True):
        np.testing.assert_array_equal(again, before)


@pytest.mark.parametrize("axes", [1, 3])
def test_other_numbers_of_axes(axes):
    weight = tensor(pruned((CHANNELS, CHANNELS, *[3] * axes), 0.5), "W")
    shape = (2, CHANNELS, *[8] * axes)
    window = helper.make_node("MaxPool", ["a"], ["Y"], kernel_shape=[2] * axes, strides=[2] * axes)
    proto = model(
        [helper.make_node("Conv", ["X", "W"], ["a"], name="conv"), window],
        [weight],
        [value("X", shape)],
        [value("Y", [None] * len(shape))],
    )
    converted, _ = checked(proto, FORCE)
    assert ops(converted) == ["SparseConvMaxPool"]


def test_its_shape_is_inferred():
    converted, _ = convert(block(pool()), options=FORCE)
    converted.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(converted, strict_mode=True, data_prop=True)
    dims = inferred.graph.output[0].type.tensor_type.shape.dim
    (y,) = run(converted, inputs_for(converted))
    assert [d.dim_value for d in dims[1:]] == list(y.shape[1:])


# --- behind a Concat --------------------------------------------------------------------------------------------------


def joined(*nodes, axis=1, out=("Y",), **changes):
    """Two convolutions, whose results a Concat joins for a pool."""
    made = {
        "first": conv(out="a", name="first"),
        "second": helper.make_node("Conv", ["X", "V"], ["b"], name="second", pads=[1, 1, 1, 1]),
        "concat": helper.make_node("Concat", ["a", "b"], ["c"], name="concat", axis=axis),
        "pool": pool("c", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    } | changes
    weights = [WEIGHT, tensor(pruned((5, CHANNELS, 3, 3), 0.5), "V")]
    outputs = [value(name, ANY_SHAPE) for name in out]
    return model([*made.values(), *nodes], weights, [value("X", ("n", CHANNELS, 7, 9))], outputs)


@pytest.mark.parametrize("axis", [1, -3])
def test_a_pool_behind_a_concat_goes_before_it(axis):
    converted, report = checked(joined(axis=axis), FORCE)
    assert ops(converted) == ["SparseConvMaxPool", "SparseConvMaxPool", "Concat"]
    assert converted.graph.node[2].output[0] == "Y"
    assert "1 MaxPool behind a Concat fused into the sparse convolutions before them" in report.notes


def test_what_reads_the_concat_then_takes_it():
    reader = helper.make_node("Conv", ["d", "U"], ["Y"], name="reader")
    proto = joined(reader, pool=pool("c", "d", kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
    proto.graph.initializer.append(tensor(pruned((6, CHANNELS + 5, 1, 1), 0.5), "U"))
    converted, _ = checked(proto, ConvertOptions(force=True, fuse_pools=True, fuse_concats=True))
    assert ops(converted) == ["SparseConvMaxPool", "SparseConvMaxPool", "SparseConvConcat2"]


NOT_JOINED = {
    "another reader of one": lambda: joined(helper.make_node("Neg", ["a"], ["Z"]), out=("Y", "Z")),
    "one that is an output": lambda: joined(out=("Y", "b")),
    "one that comes twice": lambda: joined(concat=helper.make_node("Concat", ["a", "a", "b"], ["c"], axis=1)),
    "one that is no convolution": lambda: joined(concat=helper.make_node("Concat", ["X", "b"], ["c"], axis=1)),
    "another axis": lambda: joined(second=helper.make_node("Neg", ["X"], ["b"]), axis=3),
    "another reader of all": lambda: joined(helper.make_node("Neg", ["c"], ["Z"]), out=("Y", "Z")),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_pools_that_stay_behind_a_concat(name):
    converted, _ = checked(NOT_JOINED[name](), FORCE)
    assert "SparseConvMaxPool" not in ops(converted)
    assert "MaxPool" in ops(converted)


def test_sizes_that_a_model_states_of_before_do_not_count():
    """One that was exported at a fixed size, of which only the input was made dynamic then."""
    proto = block(pool(kernel_shape=[3, 3], ceil_mode=1), shape=(1, CHANNELS, 9, 9))
    proto = onnx.shape_inference.infer_shapes(proto)
    assert len(proto.graph.value_info) == 1
    for dim in proto.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = "size"
    for dim in proto.graph.output[0].type.tensor_type.shape.dim:
        dim.ClearField("value")
    converted, report = convert(proto, options=FORCE)
    assert "MaxPool" in ops(converted)
    assert any("ceil_mode is not 0" in text for text in refusals(report, "FusePool"))
