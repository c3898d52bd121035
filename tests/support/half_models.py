"""Checking a conversion to float16: the model is valid, runs everywhere, and is as right as float16 can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto

from onnx_sparseconv.converter import ConvertOptions, convert, restore
from onnx_sparseconv.converter.report import ConversionReport
from onnx_sparseconv.custom_ops.library import register
from onnx_sparseconv.runtime.depth import depth_of_comparison
from onnx_sparseconv.runtime.metrics import compare_outputs, derive_tolerance
from tests.support.plain_ort import all_nodes, inputs_for

Array = np.ndarray[Any, Any]


def half_options(**options: Any) -> ConvertOptions:
    return ConvertOptions(**{"precision": "fp16", "force": True} | options)


def run(proto: ModelProto | Path, inputs: Mapping[str, Array], *, library: bool = False) -> list[Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if library:
        register(options)
    source = proto.SerializeToString() if isinstance(proto, ModelProto) else str(proto)
    opened = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = {i.name: i.type for i in opened.get_inputs()}
    half = {n for n, t in names.items() if t == "tensor(float16)"}
    feed = {n: a.astype(np.float16) if n in half else a for n, a in inputs.items() if n in names}
    return [np.asarray(out) for out in opened.run(None, feed)]


def checked(
    proto: ModelProto, inputs: Mapping[str, Array] | None = None, **options: Any
) -> tuple[ModelProto, ConversionReport]:
    """Convert to float16; compare with the source, with the library and without, and after `restore`."""
    inputs = inputs_for(proto) if inputs is None else inputs
    before = proto.SerializeToString(deterministic=True)
    converted, report = convert(proto, options=half_options(**options))
    assert proto.SerializeToString(deterministic=True) == before
    assert report.precision is not None
    assert converted is not None, report.precision
    onnx.checker.check_model(converted, full_check=True)
    dense = ModelProto()
    dense.CopyFrom(converted)
    if report.converted or report.already_converted:
        restore(dense)
    assert_types_kept(proto, converted, half_io=options.get("fp16_io", False))
    wanted = run(proto, inputs)
    for other, library in ((converted, True), (converted, False), (dense, False)):
        assert_close(proto, converted, run(other, inputs, library=library), wanted)
    assert report.precision.casts == ops(converted).count("Cast") - _casts_of_source(proto, converted)
    return converted, report


def _casts_of_source(proto: ModelProto, converted: ModelProto) -> int:
    """Casts that the source has, those of its functions at every call; they are the ones without our names."""
    return sum(n.op_type == "Cast" and not n.name.startswith("Cast_") for n in graph_nodes(converted)) + sum(
        n.op_type == "Cast" and n.name.startswith("Cast_") for n in graph_nodes(proto)
    )


def graph_nodes(proto: ModelProto) -> list[onnx.NodeProto]:
    """Nodes of the graph and its subgraphs, without those of functions."""
    alone = ModelProto()
    alone.graph.CopyFrom(proto.graph)
    return all_nodes(alone)


def ops(proto: ModelProto) -> list[str]:
    return [n.op_type for n in graph_nodes(proto)]


def assert_types_kept(proto: ModelProto, converted: ModelProto, *, half_io: bool) -> None:
    for kind in ("input", "output"):
        initializers = {t.name for t in proto.graph.initializer}
        types = {i.name: i.type.tensor_type.elem_type for i in getattr(proto.graph, kind) if i.name not in initializers}
        now = {i.name: i.type.tensor_type.elem_type for i in getattr(converted.graph, kind)}
        expected = {n: 10 if half_io and t == TensorProto.FLOAT else t for n, t in types.items()}
        assert {n: t for n, t in now.items() if n in expected} == expected


def assert_close(first: ModelProto, second: ModelProto, got: list[Array], wanted: list[Array]) -> None:
    """Within what `verify` allows a float16 model."""
    tolerance = derive_tolerance(depth_of_comparison(first, second))
    assert tolerance.derived_from.storage in ("float16", "bfloat16", "int8")
    for a, b in zip(got, wanted, strict=True):
        comparison = compare_outputs("output", b, a.astype(b.dtype), tolerance)
        assert comparison.passed, (comparison.reason, comparison.errors, comparison.atol)


def kept(report: ConversionReport) -> dict[str, str]:
    """Why nodes stayed float, by name."""
    assert report.precision is not None
    return {note.node: note.text for note in report.precision.kept}
