"""The portable form of the ops: model-local functions that rebuild the dense weight and call Conv.

A converted model carries these functions. Where the native library is not registered, ONNX Runtime inlines them,
folds the weight arithmetic at session creation and chooses the branches of the activation, so a plain Conv is left.
They also make the model valid for ``onnx.checker``, shape inference and the reference evaluator.

Rules that the bodies keep (each learnt by running ONNX Runtime 1.20 and 1.31):

1. They import the model's own opset, because ONNX Runtime inlines with it; they are valid from opset 9 on.
2. Arrays arrive as TENSOR attributes, read by ``Constant(value)``: ``value_ints`` and its like need opset 12.
3. The outputs of If branches are untyped: a typed branch would fix the element type and break float16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import FunctionProto, NodeProto, helper

from onnx_sparseconv.custom_ops.schema import (
    CONCAT_OPS,
    DOMAIN,
    OP_TYPES,
    SPARSE_CONV_ADD,
    SPARSE_CONV_MAX_POOL,
    Activation,
)

MIN_OPSET = 9
MIN_IR_VERSION = 8

_CONV_ATTRIBUTES = {
    "auto_pad": onnx.AttributeProto.STRING,
    "dilations": onnx.AttributeProto.INTS,
    "group": onnx.AttributeProto.INT,
    "kernel_shape": onnx.AttributeProto.INTS,
    "pads": onnx.AttributeProto.INTS,
    "strides": onnx.AttributeProto.INTS,
}
# Of SparseConvMaxPool: MaxPool's name of each, and the op's.
_POOL_ATTRIBUTES = {
    "kernel_shape": "pool_kernel_shape",
    "pads": "pool_pads",
    "strides": "pool_strides",
}
_TENSOR_ATTRIBUTES = (
    "weight_shape",
    "weight_values",
    "weight_columns",
    "weight_nnz_per_row",
    "weight_row_order",
    "weight_slice_height",
    "activation",
)
_OTHER_ATTRIBUTES = ("out_channels", "element_type", "alpha", "beta", "weight_negative_zeros", "cuda_images")


def make_function(op_type: str, opset: int) -> FunctionProto:
    """The portable body of one op.

    Args:
        op_type: one of `OP_TYPES`.
        opset: the default-domain opset of the model that will carry it, at least `MIN_OPSET`.
    """
    with_residual, with_pool = op_type == SPARSE_CONV_ADD, op_type == SPARSE_CONV_MAX_POOL
    more_inputs = [f"X{n}" for n in range(2, CONCAT_OPS.get(op_type, 1) + 1)]
    nodes = [
        *(_constant_from_attribute(name) for name in _TENSOR_ATTRIBUTES),
        *_dense_weight_nodes(opset),
    ]
    if more_inputs:
        nodes.append(helper.make_node("Concat", ["X", *more_inputs], ["joined"], axis=1))
    source = "joined" if more_inputs else "X"
    nodes.append(_with_references(helper.make_node("Conv", [source, "weight", "B"], ["convolved"]), _CONV_ATTRIBUTES))
    if with_residual:
        nodes.append(helper.make_node("Add", ["convolved", "Z"], ["preactivation"]))
    else:
        nodes.append(helper.make_node("Identity", ["convolved"], ["preactivation"]))
    nodes.extend(_activation_nodes(opset))
    if with_pool:
        pool = helper.make_node("MaxPool", ["activated"], ["Y"])
        for name, of_function in _POOL_ATTRIBUTES.items():
            _refer(pool, name, of_function, onnx.AttributeProto.INTS)
        nodes.append(pool)
    else:
        nodes.append(helper.make_node("Identity", ["activated"], ["Y"]))
    return helper.make_function(
        DOMAIN,
        op_type,
        inputs=["X", "B", *(["Z"] if with_residual else more_inputs)],
        outputs=["Y"],
        nodes=nodes,
        opset_imports=[helper.make_opsetid("", opset)],
        attributes=[
            *_CONV_ATTRIBUTES,
            *_TENSOR_ATTRIBUTES,
            *_OTHER_ATTRIBUTES,
            *(_POOL_ATTRIBUTES.values() if with_pool else ()),
            *(["input_channels"] if more_inputs else ()),
        ],
        doc_string="Sparse convolution (onnx-sparseconv): rebuilds the dense weight from unified CSR, calls Conv.",
    )


def make_functions(op_types: Sequence[str], opset: int) -> list[FunctionProto]:
    """Bodies of the ops that a model uses, in a fixed order."""
    return [make_function(name, opset) for name in OP_TYPES if name in op_types]


def is_portable_body(function: FunctionProto) -> bool:
    """Whether a function with the name of one of the ops is its body, of this version or another, and nobody else's."""
    ours = make_function(function.name, MIN_OPSET)
    same_ends = list(function.input) == list(ours.input) and list(function.output) == list(ours.output)
    return same_ends and set(_TENSOR_ATTRIBUTES) <= set(function.attribute)


def _with_references(node: NodeProto, attributes: Mapping[str, int]) -> NodeProto:
    """Give ``node`` attributes that refer to the function's attributes of the same name."""
    for name, attribute_type in attributes.items():
        _refer(node, name, name, attribute_type)
    return node


def _refer(node: NodeProto, name: str, function_attribute: str, attribute_type: int) -> NodeProto:
    node.attribute.add(name=name, type=attribute_type, ref_attr_name=function_attribute)
    return node


def _constant_from_attribute(name: str) -> NodeProto:
    return _refer(helper.make_node("Constant", [], [name]), "value", name, onnx.AttributeProto.TENSOR)


def _constant(name: str, value: float | list[int] | list[float], data_type: int = onnx.TensorProto.INT64) -> NodeProto:
    dims, values = ([len(value)], value) if isinstance(value, list) else ([], [value])
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, data_type, dims, values))


def _cast(source: str, target: str, data_type: int = onnx.TensorProto.INT64) -> NodeProto:
    return helper.make_node("Cast", [source], [target], to=data_type)


def _cast_to_element_type(source: str, target: str) -> NodeProto:
    return _refer(helper.make_node("Cast", [source], [target]), "to", "element_type", onnx.AttributeProto.INT)


def _dense_weight_nodes(opset: int) -> list[NodeProto]:
    """Nodes that scatter the stored entries into the dense weight.

    All rows are read at the length of the longest; a shorter row starts again at its first entry, so some entries are
    written more than once, with the same value. The same holds for rows beyond the last: `_count` may count too far.
    Only operators are used that are in opset 9 and that ONNX Runtime folds at session creation (NonZero and Range, say,
    it does not fold).
    """
    scatter = "ScatterElements" if opset >= 11 else "Scatter"
    return [
        _cast("weight_nnz_per_row", "nnz"),
        _cast("weight_row_order", "row_order"),
        _cast("weight_columns", "columns"),
        _constant("flat", [-1]),
        _constant("as_column", [-1, 1]),
        _constant("as_row", [1, -1]),
        helper.make_node("Shape", ["row_order"], ["num_rows"]),
        helper.make_node("ReduceMax", ["nnz"], ["longest"], keepdims=1),
        helper.make_node("ReduceProd", ["weight_shape"], ["size"], keepdims=1),
        helper.make_node("Div", ["size", "num_rows"], ["row_length"]),
        *_count("num_rows", "counted_rows"),
        *_count("longest", "position"),
        *_slice_start_nodes(opset),
        # where each row starts
        *_modulo("counted_rows", "num_rows", "row"),
        helper.make_node("Div", ["row", "weight_slice_height"], ["slice"]),
        helper.make_node("Mul", ["slice", "weight_slice_height"], ["slice_first_row"]),
        helper.make_node("Sub", ["row", "slice_first_row"], ["row_in_slice"]),
        helper.make_node("Gather", ["nnz", "slice"], ["row_nnz"]),
        helper.make_node("Mul", ["row_in_slice", "row_nnz"], ["row_offset"]),
        helper.make_node("Gather", ["slice_start", "slice"], ["row_slice_start"]),
        helper.make_node("Add", ["row_slice_start", "row_offset"], ["row_start"]),
        # which entry stands at each position of each row: [rows, positions]
        helper.make_node("Reshape", ["row_nnz", "as_column"], ["row_nnz_2d"]),
        helper.make_node("Reshape", ["row_start", "as_column"], ["row_start_2d"]),
        *_modulo("position", "row_nnz_2d", "position_in_row"),
        helper.make_node("Add", ["row_start_2d", "position_in_row"], ["entry"]),
        # where each entry belongs in the flat dense weight
        helper.make_node("Gather", ["row_order", "row"], ["out_channel"]),
        helper.make_node("Mul", ["out_channel", "row_length"], ["dense_row_start"]),
        helper.make_node("Reshape", ["dense_row_start", "as_column"], ["dense_row_start_2d"]),
        helper.make_node("Gather", ["columns", "entry"], ["column_2d"]),
        helper.make_node("Add", ["dense_row_start_2d", "column_2d"], ["index_2d"]),
        helper.make_node("Reshape", ["index_2d", "flat"], ["index"]),
        _cast_to_element_type("weight_values", "stored_values"),
        helper.make_node("Gather", ["stored_values", "entry"], ["values_2d"]),
        helper.make_node("Reshape", ["values_2d", "flat"], ["values"]),
        helper.make_node("ConstantOfShape", ["size"], ["zeros_float"]),
        _cast_to_element_type("zeros_float", "zeros"),
        helper.make_node(scatter, ["zeros", "index", "values"], ["flat_weight"], axis=0),
        helper.make_node("Reshape", ["flat_weight", "weight_shape"], ["weight"]),
    ]


def _slice_start_nodes(opset: int) -> list[NodeProto]:
    """``slice_start``: index of the first entry of each slice, the exclusive sum of the slices' sizes.

    CumSum needs opset 11; before, a matrix of which slice comes before which does it, in the square of the memory.
    """
    if opset >= 11:
        return [
            helper.make_node("Mul", ["nnz", "weight_slice_height"], ["slice_size"]),
            _constant("first_axis", 0),
            helper.make_node("CumSum", ["slice_size", "first_axis"], ["slice_start"], exclusive=1),
        ]
    return [
        helper.make_node("Shape", ["nnz"], ["num_slices"]),
        *_identity_matrix("num_slices", "slice_eye"),
        helper.make_node("ArgMax", ["slice_eye"], ["slice_index"], axis=0, keepdims=0),
        helper.make_node("Reshape", ["slice_index", "as_column"], ["slice_index_column"]),
        helper.make_node("Less", ["slice_index", "slice_index_column"], ["is_before"]),
        _cast("is_before", "is_before_int"),
        helper.make_node("Mul", ["nnz", "weight_slice_height"], ["slice_size"]),
        helper.make_node("Mul", ["is_before_int", "slice_size"], ["sizes_before"]),
        _cast("sizes_before", "sizes_before_double", onnx.TensorProto.DOUBLE),
        _constant("ones_double", [1.0], onnx.TensorProto.DOUBLE),
        helper.make_node("Expand", ["ones_double", "num_slices"], ["all_slices"]),
        helper.make_node("MatMul", ["sizes_before_double", "all_slices"], ["slice_start_double"]),
        _cast("slice_start_double", "slice_start"),
    ]


def _count(limit: str, target: str) -> list[NodeProto]:
    """``target`` = 0, 1, 2, ... as ``[m * m]``, m the smallest integer with m * m >= ``limit`` (an int64 ``[1]``).

    Counts the columns of an identity matrix of m rows, so that its size stays that of the limit. Float is exact
    enough up to 8 million.
    """
    name = f"{target}_"
    return [
        _cast(limit, name + "limit", onnx.TensorProto.FLOAT),
        helper.make_node("Sqrt", [name + "limit"], [name + "root"]),
        helper.make_node("Ceil", [name + "root"], [name + "digits_float"]),
        _cast(name + "digits_float", name + "digits"),
        *_identity_matrix(name + "digits", name + "eye"),
        helper.make_node("ArgMax", [name + "eye"], [name + "low"], axis=0, keepdims=0),
        helper.make_node("Mul", [name + "low", name + "digits"], [name + "high"]),
        helper.make_node("Reshape", [name + "high", "as_column"], [name + "high_column"]),
        helper.make_node("Add", [name + "high_column", name + "low"], [name + "square"]),
        helper.make_node("Reshape", [name + "square", "flat"], [target]),
    ]


def _identity_matrix(size: str, target: str) -> list[NodeProto]:
    return [
        helper.make_node("Concat", [size, size], [target + "_shape"], axis=0),
        helper.make_node("ConstantOfShape", [target + "_shape"], [target + "_zeros"]),
        helper.make_node("EyeLike", [target + "_zeros"], [target]),
    ]


def _modulo(dividend: str, divisor: str, target: str) -> list[NodeProto]:
    """Remainder of non-negative integers; Mod needs opset 10."""
    return [
        helper.make_node("Div", [dividend, divisor], [target + "_quotient"]),
        helper.make_node("Mul", [target + "_quotient", divisor], [target + "_multiple"]),
        helper.make_node("Sub", [dividend, target + "_multiple"], [target]),
    ]


def _activation_nodes(opset: int) -> list[NodeProto]:
    """A chain of If on the activation's code; ONNX Runtime keeps the one branch that is taken."""
    branches = {
        Activation.RELU: [helper.make_node("Relu", ["preactivation"], ["act_relu"])],
        Activation.CLIP: _clip_nodes(opset),
        Activation.LEAKY_RELU: [_parametrised("LeakyRelu", "act_leaky_relu", ["alpha"])],
        Activation.HARD_SWISH: [
            helper.make_node("HardSigmoid", ["preactivation"], ["hard_gate"], alpha=1 / 6, beta=0.5),
            helper.make_node("Mul", ["preactivation", "hard_gate"], ["act_hard_swish"]),
        ],
        Activation.HARD_SIGMOID: [_parametrised("HardSigmoid", "act_hard_sigmoid", ["alpha", "beta"])],
        Activation.SIGMOID: [helper.make_node("Sigmoid", ["preactivation"], ["act_sigmoid"])],
        Activation.SILU: [
            helper.make_node("Sigmoid", ["preactivation"], ["gate"]),
            helper.make_node("Mul", ["preactivation", "gate"], ["act_silu"]),
        ],
    }
    otherwise = [helper.make_node("Identity", ["preactivation"], ["act_none"])]
    for code, nodes in reversed(branches.items()):
        name = code.name.lower()
        choice = helper.make_node(
            "If",
            [f"is_{name}"],
            [f"chosen_{name}"],
            then_branch=_branch(f"then_{name}", nodes),
            else_branch=_branch(f"else_{name}", otherwise),
        )
        otherwise = [
            _constant(f"code_{name}", int(code)),
            helper.make_node("Equal", ["activation", f"code_{name}"], [f"is_{name}"]),
            choice,
        ]
    return [*otherwise, helper.make_node("Identity", [otherwise[-1].output[0]], ["activated"])]


def _branch(name: str, nodes: Sequence[NodeProto]) -> onnx.GraphProto:
    output = helper.make_empty_tensor_value_info(nodes[-1].output[0])
    return helper.make_graph(list(nodes), name, [], [output])


def _parametrised(op_type: str, output: str, parameters: Sequence[str]) -> NodeProto:
    node = helper.make_node(op_type, ["preactivation"], [output])
    for name in parameters:
        _refer(node, name, name, onnx.AttributeProto.FLOAT)
    return node


def _clip_nodes(opset: int) -> list[NodeProto]:
    """Clip takes its bounds as inputs of the element type from opset 11 on.

    Before, as attributes; but ONNX Runtime checks their order when it makes the node, also where the branch is never
    taken and the parameters are another activation's, so Max and Min stand in for it.
    """
    nodes = []
    for name, parameter in {"min": "alpha", "max": "beta"}.items():
        nodes += _number_from_attribute(f"{name}_float", parameter, opset)
        nodes.append(_cast_to_element_type(f"{name}_float", name))
    if opset < 11:
        nodes.append(helper.make_node("Max", ["preactivation", "min"], ["at_least_min"]))
        return [*nodes, helper.make_node("Min", ["at_least_min", "max"], ["act_clip"])]
    return [*nodes, helper.make_node("Clip", ["preactivation", "min", "max"], ["act_clip"])]


def _number_from_attribute(target: str, parameter: str, opset: int) -> list[NodeProto]:
    """A FLOAT attribute of the function as a scalar tensor."""
    if opset >= 12:
        return [_refer(helper.make_node("Constant", [], [target]), "value_float", parameter, onnx.AttributeProto.FLOAT)]
    # LeakyRelu(-1, alpha=p) = -p
    negated = helper.make_node("LeakyRelu", [f"{target}_minus_one"], [f"{target}_negated"])
    return [
        _constant(f"{target}_minus_one", -1.0, onnx.TensorProto.FLOAT),
        _refer(negated, "alpha", parameter, onnx.AttributeProto.FLOAT),
        helper.make_node("Neg", [f"{target}_negated"], [target]),
    ]
