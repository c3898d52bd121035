"""Tensors whose value is known at conversion, however the model spells them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.ir.tensor import SparseValues

from onnx_sparseconv.converter.model_view import ModelView, Scope
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.kernels.unified_csr import Array

# Ops that give the same bits wherever they run, so that a weight computed by them may be computed at conversion.
EXACT_OPS = frozenset(
    {
        "Identity",
        "Cast",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "DequantizeLinear",
        "Concat",
        "Slice",
    }
    | {"Expand", "Tile", "Gather", "Pad", "ConstantOfShape", "Shape", "Mul", "Add", "Sub", "Div", "Neg"}
)
# The types that numpy has itself. The others it is given by libraries, or (in onnx 1.17) reads as float32, so a
# value may only be moved in them, read from them or dequantised, not rounded to them.
_NATIVE_TYPES = frozenset(range(TensorProto.FLOAT, TensorProto.UINT64 + 1)) - {TensorProto.STRING}
_ARITHMETIC = frozenset({"Mul", "Add", "Sub", "Div", "Neg"})
# A chain longer than this is not how anyone feeds a weight.
MAX_DEPTH = 32


@dataclass(frozen=True, eq=False)
class ConstantTensor:
    """A tensor whose value is known.

    Attributes:
        name: name of the tensor where it is read.
        values: the value. Read `element_type` for its type: some versions of onnx read bfloat16 as float32.
        element_type: ``onnx.TensorProto.DataType``.
        source: how it is fed, for people: ``initializer``, ``Constant``, ``Cast(initializer)``, ...
        overridable: a caller of the model may pass another value for (a part of) it.
        quantised: it comes out of a DequantizeLinear.
        stored: the proto that holds the data, when the tensor is exactly that; None when it is computed.
    """

    name: str
    values: Array
    element_type: int
    source: str
    overridable: bool = False
    quantised: bool = False
    stored: TensorProto | None = None


class ConstantResolver:
    """Finds the values of tensors in a view. Results are kept, so that shared tensors are one object.

    Args:
        view: the model. Initializers that are also inputs count as overridable from IR version 4 on; before, every
            initializer had to be listed as an input.
    """

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._overridable = view.proto.ir_version >= 4
        # The tensor is kept beside its value: if it were freed, another could get its id.
        self._known: dict[int, tuple[gs.Tensor, ConstantTensor | None]] = {}
        self._inputs = view.scopes[0].initializer_inputs

    def resolve(self, tensor: gs.Tensor, scope: Scope) -> ConstantTensor | None:
        """The tensor's value, or None when it is only known at run time.

        Raises:
            ModelError: the data of the tensor are broken.
        """
        return self._resolve(tensor, scope, MAX_DEPTH)

    def _resolve(self, tensor: gs.Tensor, scope: Scope, depth: int) -> ConstantTensor | None:
        if id(tensor) not in self._known:
            try:
                self._known[id(tensor)] = tensor, self._evaluate(tensor, scope, depth)
            except (ValueError, TypeError) as error:
                raise ModelError(f"tensor {tensor.name!r}: its data cannot be read: {error}") from error
        return self._known[id(tensor)][1]

    def _evaluate(self, tensor: gs.Tensor, scope: Scope, depth: int) -> ConstantTensor | None:
        if isinstance(tensor, gs.Constant):
            return self._initializer(tensor)
        if len(tensor.inputs) != 1 or depth == 0:
            return None
        node = tensor.inputs[0]
        if node.domain not in (None, "", "ai.onnx"):
            return None
        proto = self._view.origin(node)
        if proto is None:
            return None
        if node.op == "Constant":
            return _constant_node(tensor.name, proto)
        if node.op not in EXACT_OPS or len(node.outputs) != 1:
            return None
        inputs = [None if i.is_empty() else self._resolve(i, scope, depth - 1) for i in node.inputs]
        present = [i for i in inputs if i is not None]
        if len(present) != sum(not i.is_empty() for i in node.inputs) or any(a.ref_attr_name for a in proto.attribute):
            return None
        if _rounds_to_foreign_type(proto, present):
            return None
        values = _run_node(proto, [i.values for i in present], self._opset(scope))
        if values is None:
            return None
        return ConstantTensor(
            name=tensor.name,
            values=values,
            element_type=_result_type(proto, present, values),
            source=f"{node.op}({present[0].source if present else ''})",
            overridable=any(i.overridable for i in present),
            quantised=node.op == "DequantizeLinear" or any(i.quantised for i in present),
        )

    def _initializer(self, tensor: gs.Constant) -> ConstantTensor:
        overridable = self._overridable and tensor.name in self._inputs
        if isinstance(tensor._values, SparseValues):
            values = dense_from_sparse(tensor._values.tensor)
            element_type = tensor._values.tensor.values.data_type
            return ConstantTensor(tensor.name, values, element_type, "sparse_initializer", overridable)
        stored = tensor._values.tensor
        values = _values_of(stored)
        return ConstantTensor(tensor.name, values, stored.data_type, "initializer", overridable, stored=stored)

    def _opset(self, scope: Scope) -> int:
        imports = (scope.function or self._view.proto).opset_import
        return next((o.version for o in imports if o.domain in ("", "ai.onnx")), 1)


def _values_of(tensor: TensorProto) -> Array:
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, IndexError) as error:  # older versions of onnx do not check the size of every type
        raise ModelError(f"tensor {tensor.name!r}: its data is not that of its type and shape: {error}") from error


def dense_from_sparse(sparse: SparseTensorProto) -> Array:
    """The dense form of a sparse tensor, whose indices are flat ``[nnz]`` or coordinates ``[nnz, rank]``.

    Raises:
        ModelError: an index lies outside the tensor.
    """
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(math.prod(sparse.dims), values.dtype)
    try:
        flat = np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims)) if indices.ndim == 2 else indices
        dense[flat] = values
    except (ValueError, IndexError) as error:
        raise ModelError(f"sparse tensor {sparse.values.name!r}: bad indices: {error}") from error
    return dense.reshape(tuple(sparse.dims))


def _constant_node(name: str, node: NodeProto) -> ConstantTensor | None:
    """The value of a Constant node; None when it has none, or refers to a function's attribute."""
    if len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    if attribute.ref_attr_name:
        return None
    if attribute.name == "value":
        stored = attribute.t
        return ConstantTensor(name, _values_of(stored), stored.data_type, "Constant", stored=stored)
    if attribute.name == "sparse_value":
        sparse = attribute.sparse_tensor
        return ConstantTensor(name, dense_from_sparse(sparse), sparse.values.data_type, "Constant")
    plain = {"f": TensorProto.FLOAT, "i": TensorProto.INT64}.get(attribute.name.removeprefix("value_")[:1])
    if plain is None:
        return None
    values = np.asarray(helper.get_attribute_value(attribute), helper.tensor_dtype_to_np_dtype(plain))
    return ConstantTensor(name, values, plain, "Constant")


def _rounds_to_foreign_type(node: NodeProto, inputs: list[ConstantTensor]) -> bool:
    """Whether a result would be rounded to bfloat16, float8 and the like, which versions of onnx do differently."""
    if node.op_type == "Cast":
        return _result_type(node, inputs, np.empty(0)) not in _NATIVE_TYPES
    return node.op_type in _ARITHMETIC and any(i.element_type not in _NATIVE_TYPES for i in inputs)


def _result_type(node: NodeProto, inputs: list[ConstantTensor], values: Array) -> int:
    """Element type of the result of one of `EXACT_OPS`."""
    if node.op_type == "Cast":
        return int(next(a.i for a in node.attribute if a.name == "to"))
    if node.op_type == "DequantizeLinear":
        return inputs[1].element_type
    if node.op_type in ("Shape", "ConstantOfShape"):
        return int(helper.np_dtype_to_tensor_dtype(values.dtype))
    return inputs[0].element_type


def _run_node(node: NodeProto, inputs: list[Array], opset: int) -> Array | None:
    """Evaluate one node with the reference implementation that comes with onnx; None where that cannot do it."""
    if node.op_type == "Unsqueeze":
        return _unsqueeze(node, inputs)
    if node.op_type == "DequantizeLinear":
        # Older versions mean the same for the types they had, but onnx implements only these.
        opset = max(opset, 19)
    names = [name for name in node.input if name]
    graph = helper.make_graph(
        [node],
        "constant",
        [helper.make_value_info(name, onnx.TypeProto()) for name in dict.fromkeys(names)],
        [helper.make_value_info(node.output[0], onnx.TypeProto())],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        with np.errstate(all="ignore"):
            (result,) = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    except Exception:  # any type: it is plain numpy code, and there are types and versions that it does not know
        return None
    return np.asarray(result)


def _unsqueeze(node: NodeProto, inputs: list[Array]) -> Array | None:
    """Axes are those of the result, in any order; onnx takes those of an attribute one after the other."""
    axes = next((attribute.ints for attribute in node.attribute if attribute.name == "axes"), None)
    if axes is None and len(inputs) > 1:
        axes = inputs[1].reshape(-1)
    try:
        return None if axes is None else np.expand_dims(inputs[0], tuple(map(int, axes)))
    except (ValueError, OverflowError):  # no such axes
        return None
