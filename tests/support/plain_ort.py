"""Running models in an ONNX Runtime without the custom-op library, and inputs for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, helper

Arrays = dict[str, np.ndarray[Any, Any]]


def session(model: ModelProto | str | Path, *, optimise: bool = True, optimised_path: Path | None = None) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_aot_function_inlining", "1")
    if optimised_path is not None:
        options.optimized_model_filepath = str(optimised_path)
    source = model.SerializeToString() if isinstance(model, ModelProto) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: ModelProto | str | Path, inputs: Mapping[str, Any], *, optimise: bool = True) -> list[Any]:
    """The outputs; inputs that the model does not have are left out."""
    return _run(session(model, optimise=optimise), inputs)


def _run(opened: Any, inputs: Mapping[str, Any]) -> list[Any]:
    names = {i.name for i in opened.get_inputs()} | {i.name for i in opened.get_overridable_initializers()}
    return list(opened.run(None, {k: v for k, v in inputs.items() if k in names}))


def inputs_for(model: ModelProto, seed: int = 0, **sizes: int) -> Arrays:
    """Random values for the inputs that have no initializer; symbolic sizes are taken from ``sizes``, else 2."""
    rng = np.random.default_rng(seed)
    initializers = {t.name for t in model.graph.initializer}
    result: Arrays = {}
    for info in model.graph.input:
        if info.name in initializers:
            continue
        tensor = info.type.tensor_type
        shape = [d.dim_value or sizes.get(d.dim_param, 2) for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        result[info.name] = np.asarray(rng.standard_normal(shape)).astype(dtype)
        if dtype == np.bool_:
            result[info.name] = np.ones(shape, bool)
    return result


def optimised_ops(model: ModelProto, folder: Path) -> list[str]:
    """Operators that are left after ONNX Runtime's optimisations, subgraphs included."""
    return _optimised(model, folder)[1]


def run_optimised(model: ModelProto, inputs: Mapping[str, Any], folder: Path) -> tuple[list[Any], list[str]]:
    """The outputs, and the operators that were left in the session which computed them."""
    opened, left = _optimised(model, folder)
    return _run(opened, inputs), left


def _optimised(model: ModelProto, folder: Path) -> tuple[Any, list[str]]:
    path = folder / "optimised.onnx"
    return session(model, optimised_path=path), [n.op_type for n in all_nodes(onnx.load(path))]


def all_nodes(model: ModelProto) -> list[onnx.NodeProto]:
    """Nodes of the graph, its subgraphs and the functions."""
    found: list[onnx.NodeProto] = []

    def visit(nodes: Any) -> None:
        for node in nodes:
            found.append(node)
            for attribute in node.attribute:
                for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    visit(graph.node)

    visit(model.graph.node)
    for function in model.functions:
        visit(function.node)
    return found


def assert_close(actual: Any, expected: Any, row_length: int, magnitude: float) -> None:
    """Compare two sums of ``row_length`` products that were added in another order.

    Args:
        actual, expected: arrays of one type, float32 or float16.
        row_length: products of a sum.
        magnitude: bound on the sum of the products' absolute values.
    """
    assert actual.dtype == expected.dtype
    unit = np.finfo(np.float32).eps
    bound = 2 * row_length * unit * magnitude
    if actual.dtype == np.float16:
        bound = bound + 2 * np.finfo(np.float16).eps * np.abs(expected.astype(np.float64))
    error = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    assert actual.shape == expected.shape
    assert (error <= bound).all(), f"off by {error.max()}, allowed {np.max(bound)}"


@functools.cache
def newest_opset() -> int:
    """The newest opset that both the installed onnx and the installed ONNX Runtime take."""
    io = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "XY"]
    graph = helper.make_graph([helper.make_node("Relu", ["X"], ["Y"])], "g", io[:1], io[1:])
    for opset in range(onnx.defs.onnx_opset_version(), 9, -1):
        try:
            session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))
        except Exception:
            continue
        return opset
    raise AssertionError("no opset works")
