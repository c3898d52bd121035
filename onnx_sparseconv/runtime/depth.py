"""How deep a model is in the numerical sense: the figures that `metrics.derive_tolerance` needs.

Only the structure is read. Tensors in external files stay there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from onnx_sparseconv.custom_ops.schema import DOMAIN
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.nodes import iterate_nodes, recursive_function, subgraphs
from onnx_sparseconv.runtime.metrics import NumericalDepth

_CONVOLUTIONS = frozenset({"Conv", "ConvInteger", "QLinearConv", "DeformConv"})
_DOT_PRODUCTS = _CONVOLUTIONS | {
    *("ConvTranspose", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "Einsum", "LSTM", "GRU", "RNN", "Attention")
}
_PASS_THROUGH = frozenset({"Identity", "Cast", "CastLike", "QuantizeLinear", "DequantizeLinear"})
_ARITHMETIC = frozenset({"Mul", "Add", "Sub", "Div"})
_QUANTISING = frozenset(
    {"QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
)
# From the finest type to the coarsest; a model is as coarse as the coarsest that it uses.
_COARSENESS = ("float64", "float32", "float16", "bfloat16", "int8")
_STORAGE = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}
_MAX_NESTING = 32


def load_structure(path: str | Path) -> onnx.ModelProto:
    """Load a model without its external data.

    Raises:
        ModelError: the file cannot be read, is not an ONNX model, or holds a function that calls itself.
        UsageError: it is no path.
    """
    if isinstance(path, onnx.ModelProto):
        raise UsageError("a model in memory cannot be run beside another: write it to a file, and give its path")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # protobuf's own exception types differ between its versions
        raise ModelError(f"{path}: not an ONNX model ({error})") from error
    if not model.HasField("graph"):
        raise ModelError(f"{path}: not an ONNX model (it holds no graph)")
    if name := recursive_function(model.functions):
        raise ModelError(f"{path}: its function {name} calls itself, which ONNX does not allow")
    return model


def numerical_depth(model: onnx.ModelProto) -> NumericalDepth:
    """Longest path in Conv, Gemm, MatMul and their kin, their longest dot product, and the coarsest type of the values.

    The body of a Loop or Scan counts once, the number of its rounds being unknown.
    """
    depth, walk = _walk(model.graph, model.functions)
    if walk.has_unknown_weight:
        depth, walk = _walk(_graph_with_shapes(model), model.functions)
    storage = max(_storage_types(model), key=_COARSENESS.index, default="float32")
    accumulation = "float64" if storage == "float64" else "float32"
    return NumericalDepth(depth, walk.dot_length, storage, accumulation)


def _walk(graph: GraphProto, functions: Iterable[onnx.FunctionProto]) -> tuple[int, _Walk]:
    walk = _Walk({(f.domain, f.name): f for f in functions if f.domain != DOMAIN})
    outputs = [value.name for value in graph.output]
    return walk.depth_of(outputs, graph.node, _constants(graph, {}), {}, 0), walk


def depth_of_comparison(original: onnx.ModelProto, converted: onnx.ModelProto) -> NumericalDepth:
    """The depth of the original, with the coarser of the two models' types: a converted model may be float16.

    It then rounds its inputs, too, which counts as one more layer.
    """
    first, second = numerical_depth(original), numerical_depth(converted)
    if _COARSENESS.index(second.storage) <= _COARSENESS.index(first.storage):
        return first
    return replace(first, storage=second.storage, depth=first.depth + 1)


def rounded_to_tf32(depth: NumericalDepth) -> NumericalDepth:
    """The depth where float32 layers may round what they read to TF32; the model's inputs count as one more layer.

    Other types stay as they are: TF32 is for float32 alone, and as exact as float16.
    """
    return replace(depth, storage="tf32", depth=depth.depth + 1) if depth.storage == "float32" else depth


@dataclass
class _Walk:
    """State of one walk: the local functions, the longest dot product met so far, and whether one's was not known."""

    functions: Mapping[tuple[str, str], onnx.FunctionProto]
    dot_length: int = 1
    has_unknown_weight: bool = False
    producers: dict[str, NodeProto] = field(default_factory=dict)

    def depth_of(
        self,
        outputs: Iterable[str],
        nodes: Iterable[NodeProto],
        shapes: Mapping[str, tuple[int, ...]],
        outer: Mapping[str, int],
        nesting: int,
    ) -> int:
        """Largest depth of ``outputs``, which ``nodes`` make; ``outer`` holds the depths of the values around them."""
        depths = dict(outer)
        for node in nodes:
            before = max((depths.get(name, 0) for name in node.input), default=0)
            after = self.node_depth(node, before, shapes, depths, nesting)
            for name in node.output:
                depths[name] = after
                self.producers[name] = node
        return max((depths.get(name, 0) for name in outputs), default=0)

    def node_depth(
        self,
        node: NodeProto,
        before: int,
        shapes: Mapping[str, tuple[int, ...]],
        depths: Mapping[str, int],
        nesting: int,
    ) -> int:
        """Depth of a node's outputs, given that of its inputs."""
        if node.op_type in _DOT_PRODUCTS or node.domain == DOMAIN:
            dot_length = self._dot_length(node, shapes)
            self.dot_length = max(self.dot_length, dot_length or 1)
            self.has_unknown_weight |= dot_length is None
            return before + 1
        if nesting >= _MAX_NESTING:
            return before
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            start = dict.fromkeys(function.input, before)
            given = zip(function.input, node.input, strict=False)
            constants = {formal: shapes[actual] for formal, actual in given if actual in shapes}
            constants |= _constant_nodes(function.node)
            return max(before, self.depth_of(function.output, function.node, constants, start, nesting + 1))
        after = before
        for body in subgraphs(node):
            inner = {**shapes, **_constants(body, shapes)}
            start = {**depths, **{value.name: before for value in body.input}}
            outputs = [value.name for value in body.output]
            after = max(after, self.depth_of(outputs, body.node, inner, start, nesting + 1))
        return after

    def _dot_length(self, node: NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Terms of each dot product of a node, None when its weight's shape is not known."""
        if node.domain == DOMAIN:
            return next((_dot_length_of_sparse(a) for a in node.attribute if a.name == "weight_shape"), None)
        position = {"QLinearConv": 3, "QLinearMatMul": 3}.get(node.op_type, 1)
        shape = self._shape(node.input[position], shapes) if len(node.input) > position else None
        if not shape:
            return None
        if node.op_type in _CONVOLUTIONS:
            return math.prod(shape[1:])
        if node.op_type == "ConvTranspose":
            return math.prod(shape) // max(shape[1], 1) if len(shape) > 1 else None
        if node.op_type == "Gemm":
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            return shape[1 if transposed and len(shape) > 1 else 0]
        return (
            shape[-2] if node.op_type in {"MatMul", "MatMulInteger", "QLinearMatMul"} and len(shape) > 1 else max(shape)
        )

    def _shape(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
        """Shape of a constant, seen through casts and dequantisation."""
        for _ in range(_MAX_NESTING):
            if name in shapes:
                return shapes[name]
            producer = self.producers.get(name)
            if producer is None or not producer.input:
                return None
            if producer.op_type == "Transpose":
                shape = self._shape(producer.input[0], shapes)
                perm = next((tuple(a.ints) for a in producer.attribute if a.name == "perm"), None)
                return None if shape is None else _transposed(shape, perm)
            if producer.op_type in _ARITHMETIC and all(operand in shapes for operand in producer.input):
                return _broadcast([shapes[operand] for operand in producer.input])
            if producer.op_type not in _PASS_THROUGH:
                return None
            name = producer.input[0]
        return None


def _transposed(shape: tuple[int, ...], perm: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if not perm:
        return shape[::-1]
    return tuple(shape[i] for i in perm) if sorted(perm) == list(range(len(shape))) else None


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def _dot_length_of_sparse(weight_shape: AttributeProto) -> int | None:
    try:
        shape = onnx.numpy_helper.to_array(weight_shape.t).ravel().tolist()
    except (TypeError, ValueError):
        return None
    return math.prod(int(d) for d in shape[1:])


def _graph_with_shapes(model: onnx.ModelProto) -> GraphProto:
    """The graph with the shapes that can be inferred; as it is where onnx cannot infer any.

    Not through functions: one that calls itself ends the process with some versions of onnx.
    """
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    del alone.functions[:]
    try:
        return onnx.shape_inference.infer_shapes(alone).graph
    except Exception:  # InferenceError, and what protobuf raises, which differs between its versions
        return model.graph


def _constants(graph: GraphProto, outer: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of a graph's constants by name, and of what is computed from these and outer ones: of masked weights."""
    shapes = {t.name: tuple(t.dims) for t in graph.initializer}
    shapes |= {t.values.name: tuple(t.dims) for t in graph.sparse_initializer}
    shapes |= _constant_nodes(graph.node)
    inferred = {value.name: _static_shape(value) for value in graph.value_info}
    for node in graph.node:
        if node.input and all(name in shapes or name in outer for name in node.input if name):
            shapes |= {name: shape for name in node.output if (shape := inferred.get(name)) is not None}
    return shapes


def _static_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    shape = value.type.tensor_type.shape
    is_static = value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in shape.dim)
    return tuple(d.dim_value for d in shape.dim) if is_static else None


def _constant_nodes(nodes: Iterable[NodeProto]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                found |= {name: tuple(attribute.t.dims) for name in node.output}
    return found


def _storage_types(model: onnx.ModelProto) -> Iterator[str]:
    """Types in which a model keeps its values between layers, as far as its tensors and casts show them."""
    typed = [*model.graph.input, *model.graph.output]
    data_types = {value.type.tensor_type.elem_type for value in typed} | {t.data_type for t in model.graph.initializer}
    for node in iterate_nodes(model.graph.node):
        if node.op_type in _QUANTISING:
            yield "int8"
        if node.op_type == "Cast":
            data_types |= {a.i for a in node.attribute if a.name == "to"}
        if node.op_type == "Constant":
            # Single numbers do not carry the values of a layer.
            data_types |= {a.t.data_type for a in node.attribute if a.name == "value" and math.prod(a.t.dims) > 1}
    if TensorProto.DOUBLE in data_types and not data_types & _STORAGE.keys():
        yield "float64"
    yield from (name for code, name in _STORAGE.items() if code in data_types)
