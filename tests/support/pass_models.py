"""Small models for the passes, and the check that every pass has to stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, restore
from onnx_sparseconv.converter.report import ConversionReport
from onnx_sparseconv.custom_ops.library import register
from tests.support.odd_models import model, pruned, tensor, value
from tests.support.plain_ort import inputs_for, session

FORCE = ConvertOptions(force=True)
CHANNELS = 8
INPUT = (2, CHANNELS, 6, 6)
WEIGHT_SHAPE = (CHANNELS, CHANNELS, 3, 3)
WEIGHT = pruned(WEIGHT_SHAPE, 0.7)

Array = np.ndarray[Any, Any]


def numbers(seed: int, shape: Sequence[int] = (CHANNELS,), low: float = 0.5, high: float = 1.5) -> Array:
    """Constants that no pass can mistake for 0 or 1."""
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def node(op: str, inputs: Sequence[str], output: str | Sequence[str], **attributes: Any) -> NodeProto:
    outputs = [output] if isinstance(output, str) else list(output)
    return helper.make_node(op, list(inputs), outputs, **{"name": f"{op}_{outputs[0]}"} | attributes)


def conv(source: str = "X", out: str = "a", *, weight: str = "W", bias: str = "", **attributes: Any) -> NodeProto:
    inputs = [source, weight, bias] if bias else [source, weight]
    return node("Conv", inputs, out, **{"name": f"conv_{out}", "pads": [1] * 4} | attributes)


def build(
    nodes: Sequence[NodeProto],
    constants: Mapping[str, Any] | None = None,
    *,
    shape: Sequence[Any] = INPUT,
    more: Mapping[str, Sequence[Any]] | None = None,
    outputs: Sequence[str] = ("Y",),
    element_type: int = TensorProto.FLOAT,
    out_rank: int = 4,
    **named: Any,
) -> ModelProto:
    """A model of ``X`` and ``Y``; constants (``W`` among them) are there where a node reads them.

    ``more`` are further inputs.
    """
    arrays = {"W": WEIGHT} | dict(constants or {})
    used = {name for n in nodes for name in n.input} | set(outputs)
    for n in nodes:
        for graph in (a.g for a in n.attribute if a.HasField("g")):
            used |= {name for inner in graph.node for name in inner.input}
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    initializers = []
    for name, array in arrays.items():
        if name in used:
            values = np.asarray(array)
            initializers.append(tensor(values.astype(dtype) if values.dtype == np.float32 else values, name))
    inputs = [value("X", shape, element_type), *(value(n, s, element_type) for n, s in (more or {}).items())]
    results = [value(n, [None] * out_rank, element_type) for n in outputs]
    return model(nodes, initializers, inputs, results, **named)


def ops(proto: ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def run(proto: ModelProto, inputs: Mapping[str, Any], *, library: bool = False) -> list[Array]:
    if not library:
        opened = session(proto)
    else:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        register(options)
        opened = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {i.name for i in opened.get_inputs()}
    return list(opened.run(None, {k: v for k, v in inputs.items() if k in names}))


def assert_close(actual: Sequence[Array], expected: Sequence[Array], tolerance: float | None = None) -> None:
    """Compare outputs of small networks: off by some roundings of the largest."""
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
            continue
        bound = tolerance or (4e-3 if a.dtype == np.float16 else 1e-5)
        scale = max(1.0, float(np.abs(b).max(initial=0)))
        error = np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0)
        assert error <= bound * scale, f"off by {error}, allowed {bound * scale}"


def checked(
    proto: ModelProto,
    options: ConvertOptions = FORCE,
    *,
    seed: int = 5,
    tolerance: float | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> tuple[ModelProto, ConversionReport]:
    """Convert, and compare outputs with the original's: with the library, without, and restored."""
    converted, report = convert(proto, options=options)
    assert converted is not None
    onnx.checker.check_model(converted, full_check=True)
    feed = inputs_for(proto, seed=seed) if inputs is None else inputs
    expected = run(proto, feed)
    assert all(np.isfinite(e).all() for e in expected if e.dtype.kind == "f")
    assert_close(run(converted, feed), expected, tolerance)
    assert_close(run(converted, feed, library=True), expected, tolerance)
    dense = ModelProto()
    dense.CopyFrom(converted)
    restore(dense)
    assert not any(n.startswith("SparseConv") for n in ops(dense))
    assert_close(run(dense, feed), expected, tolerance)
    return converted, report


def refusals(report: ConversionReport, name: str) -> list[str]:
    """Why a pass left nodes, one text each."""
    (found,) = [p for p in report.passes if p.name == name]
    return [note.text for note in found.refused]


def edits(report: ConversionReport, name: str) -> list[str]:
    """What a pass did, one text each."""
    (found,) = [p for p in report.passes if p.name == name]
    assert found.changed == len(found.done)
    return [f"{note.node}: {note.text}" for note in found.done]
