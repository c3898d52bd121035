"""Whole networks: what is left of their nodes, in the file and in ONNX Runtime's optimised graph, and their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.custom_ops.library import register
from onnx_sparseconv.custom_ops.schema import OP_TYPES, concat_op
from tests.support import architectures
from tests.support.pass_models import assert_close, checked, ops, run
from tests.support.plain_ort import inputs_for

EXTENDED = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
ALL = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
# What ONNX Runtime's layout of dense Conv and pooling on the CPU puts before and behind them.
REORDERS = ("ReorderInput", "ReorderOutput")
CONVS = ("Conv", "FusedConv", *OP_TYPES)


@dataclass(frozen=True)
class Network:
    """A network, its nodes, and what becomes of them in the file.

    Attributes:
        make: makes it.
        nodes: how many it has.
        left: nodes after conversion, by operator.
    """

    make: Callable[[], ModelProto]
    nodes: int
    left: dict[str, int]


TAIL = {"GlobalAveragePool": 1, "Flatten": 1}
SMALL = {
    "vgg": Network(architectures.vgg, 17, {"SparseConv": 6, "MaxPool": 3, **TAIL}),
    "resnet": Network(architectures.resnet, 50, {"SparseConv": 11, "SparseConvAdd": 4, "MaxPool": 1, **TAIL}),
    "densenet": Network(
        architectures.densenet,
        53,
        {
            **{"SparseConv": 14 + 2, concat_op(2): 2, concat_op(3): 2, concat_op(4): 1},
            **{"BatchNormalization": 1, "Relu": 1, "Concat": 1, "AveragePool": 1, **TAIL},
        },
    ),
    # The depthwise Conv stay dense, with the BatchNormalization and Clip that ONNX Runtime takes into them.
    "mobilenet_v2": Network(
        architectures.mobilenet_v2,
        31,
        {"SparseConv": 5, "SparseConvAdd": 2, "Conv": 3, "BatchNormalization": 3, "Clip": 3, **TAIL},
    ),
}
LIGHT = {
    "resnet50": Network(
        lambda: architectures.light_model("resnet50"),
        175,
        {
            "SparseConv": 36,
            "SparseConvAdd": 16,
            **dict.fromkeys(("Conv", "BatchNormalization", "Relu"), 1),
            **dict.fromkeys(("MaxPool", "AveragePool", "Reshape", "Gemm"), 1),
        },
    ),
    # A BatchNormalization of this network is followed by Mul and Add. Half of them are before a Conv, behind a Concat.
    "densenet121": Network(
        lambda: architectures.light_model("densenet121"),
        910,
        {
            "SparseConv": 121 + 9,
            **{concat_op(n): count for n, count in zip(range(2, 9), (8, 8, 8, 8, 7, 7, 6), strict=True)},
            **dict.fromkeys(("BatchNormalization", "Mul", "Add", "Relu"), 1),
            **{"Unsqueeze": 2, "Concat": 6, "AveragePool": 3, "MaxPool": 1, "GlobalAveragePool": 1},
        },
    ),
    "resnet50_v2": Network(
        architectures.resnet50_v2,
        171,
        {
            "SparseConv": 53,
            "SparseConvAdd": 16,
            **dict.fromkeys(("MaxPool", "BatchNormalization", "Relu", "GlobalAveragePool", "Flatten", "Gemm"), 1),
        },
    ),
    "inception_v2": Network(
        lambda: architectures.light_model("inception_v2"),
        508,
        {
            "SparseConv": 67,
            **dict.fromkeys(("Conv", "BatchNormalization", "Mul", "Add", "Relu"), 2),
            **{"Unsqueeze": 4, "Concat": 10, "AveragePool": 8, "MaxPool": 5, "Reshape": 1, "Gemm": 1},
        },
    ),
}
# A threshold that is asked for also goes for layers beside depthwise ones.
DECIDED = ConvertOptions(min_sparsity=0.75)


def optimised(proto: ModelProto, path: Path, level: ort.GraphOptimizationLevel) -> Counter[str]:
    """Nodes that ONNX Runtime computes, by operator."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    register(options)
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(n.op_type for n in onnx.load(str(path)).graph.node)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("make", [lambda proto: proto, architectures.half], ids=["float", "float16"])
def test_small_networks(name: str, make: Callable[[ModelProto], ModelProto]) -> None:
    network = SMALL[name]
    converted, report = checked(make(network.make()), DECIDED)
    assert (report.nodes_before, report.nodes_after) == (network.nodes, sum(network.left.values()))
    assert Counter(ops(converted)) == network.left


@pytest.mark.parametrize("name", LIGHT)
def test_real_architectures(name: str, tmp_path: Path) -> None:
    network = LIGHT[name]
    proto = network.make()
    converted, report = convert(proto, options=DECIDED)
    assert (report.nodes_before, report.nodes_after) == (network.nodes, sum(network.left.values()))
    assert Counter(ops(converted)) == network.left
    feed = inputs_for(proto)
    assert_close(run(converted, feed, library=True), run(proto, feed))
    assert_nothing_is_added(proto, converted, tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_added_around_what_stays_dense(name: str, tmp_path: Path) -> None:
    proto = SMALL[name].make()
    converted, _ = convert(proto, options=DECIDED)
    assert_nothing_is_added(proto, converted, tmp_path)


def assert_nothing_is_added(proto: ModelProto, converted: ModelProto, folder: Path) -> None:
    """ONNX Runtime computes no node more than before: no Cast, no Transpose, no operator that it had fused."""
    before, after = (optimised(p, folder / "optimised.onnx", EXTENDED) for p in (proto, converted))
    # Depthwise ones stand for what normalises X and the activation behind that.
    scales = sum(is_sparse_depthwise(node) for node in converted.graph.node)
    assert sum(before[op] for op in CONVS) == sum(after[op] for op in CONVS) - scales
    assert {op: n for op, n in after.items() if op not in CONVS and n > before[op]} == {}
    assert after.total() <= before.total()
    # At the highest level dense Conv and pooling have a layout of their own: at most one change of it on each side.
    after = optimised(converted, folder / "optimised.onnx", ALL)
    reordered = sum(n for op, n in after.items() if op == "Conv" or op.endswith("Pool"))
    assert {op: n for op, n in after.items() if op not in (*CONVS, *REORDERS) and n > before[op]} == {}
    assert all(after[op] <= reordered for op in REORDERS)


def is_sparse_depthwise(node: onnx.NodeProto) -> bool:
    attributes = {a.name: a for a in node.attribute}
    return node.op_type in OP_TYPES and attributes["group"].i == attributes["out_channels"].i > 1


def test_depthwise_and_stem_are_bit_for_bit_what_they_were() -> None:
    proto = architectures.mobilenet_v2()
    converted, _ = convert(proto, options=DECIDED)
    originals = {n.name: n for n in proto.graph.node}
    kept = [n for n in converted.graph.node if n.domain == ""]
    assert [n.op_type for n in kept[:3]] == ["Conv", "BatchNormalization", "Clip"]
    assert all(n == originals[n.name] for n in kept)
    before = {t.name: t for t in proto.graph.initializer}
    after = {t.name: t for t in converted.graph.initializer}
    assert all(after[name] == before[name] for n in kept for name in n.input if name in before)


def test_dense_convolutions_next_to_sparse_ones_are_fused_as_before(tmp_path: Path) -> None:
    """All three depthwise Conv of this network are FusedConv, as in the original: their Clip went into them."""
    proto = architectures.mobilenet_v2()
    converted, _ = convert(proto, options=DECIDED)
    after = optimised(converted, tmp_path / "optimised.onnx", EXTENDED)
    assert after == {"SparseConv": 5, "SparseConvAdd": 2, "FusedConv": 3, **TAIL}
