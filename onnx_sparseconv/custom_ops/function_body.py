"""The portable form of the ops: model-local functions that rebuild the dense weight and call Conv.

A converted model carries these functions. Where the native library is not registered, ONNX Runtime inlines them, folds the
weight arithmetic at session creation and chooses the branches of the activation, so a plain Conv is left. They also make
the model valid for ``onnx.checker``, shape inference and the reference evaluator.

Rules that the bodies keep (each learnt by running ONNX Runtime 1.20 and 1.31):

1. They import the model's own opset, because ONNX Runtime inlines with it; they are valid from opset 9 on.
2. Arrays arrive as TENSOR attributes, read by ``Constant(value)``: ``value_ints`` and its like need opset 12.
3. The outputs of If branches are untyped: a typed branch would fix the element type and break float16.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import FunctionProto, NodeProto, helper

from onnx_sparseconv.custom_ops.schema import DOMAIN, SPARSE_CONV, SPARSE_CONV_ADD, Activation

MIN_OPSET = 9
# Below this opset (CumSum) a body can only rebuild a weight of one slice.
MIN_OPSET_SLICED = 11
MIN_IR_VERSION = 8

_CONV_ATTRIBUTES = {
    "auto_pad": onnx.AttributeProto.STRING,
    "dilations": onnx.AttributeProto.INTS,
    "group": onnx.AttributeProto.INT,
    "kernel_shape": onnx.AttributeProto.INTS,
    "pads": onnx.AttributeProto.INTS,
    "strides": onnx.AttributeProto.INTS,
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
_OTHER_ATTRIBUTES = ("out_channels", "element_type", "alpha", "beta", "cuda_images")


def make_function(op_type: str, opset: int) -> FunctionProto:
    """The portable body of one op.

    Args:
        op_type: ``SparseConv`` or ``SparseConvAdd``.
        opset: the default-domain opset of the model that will carry it, at least `MIN_OPSET`.
    """
    with_residual = op_type == SPARSE_CONV_ADD
    nodes = [
        *(_constant_from_attribute(name) for name in _TENSOR_ATTRIBUTES),
        *_dense_weight_nodes(opset),
        _with_references(helper.make_node("Conv", ["X", "weight", "B"], ["convolved"]), _CONV_ATTRIBUTES),
    ]
    if with_residual:
        nodes.append(helper.make_node("Add", ["convolved", "Z"], ["preactivation"]))
    else:
        nodes.append(helper.make_node("Identity", ["convolved"], ["preactivation"]))
    nodes.extend(_activation_nodes(opset))
    return helper.make_function(
        DOMAIN,
        op_type,
        inputs=["X", "B", "Z"] if with_residual else ["X", "B"],
        outputs=["Y"],
        nodes=nodes,
        opset_imports=[helper.make_opsetid("", opset)],
        attributes=[*_CONV_ATTRIBUTES, *_TENSOR_ATTRIBUTES, *_OTHER_ATTRIBUTES],
        doc_string="Sparse convolution: rebuilds the dense weight from unified CSR and calls Conv. See onnx-sparseconv.",
    )


def make_functions(op_types: Sequence[str], opset: int) -> list[FunctionProto]:
    """Bodies of the ops that a model uses, in a fixed order."""
    return [make_function(name, opset) for name in (SPARSE_CONV, SPARSE_CONV_ADD) if name in op_types]


def _with_references(node: NodeProto, attributes: dict[str, int]) -> NodeProto:
    """Give ``node`` attributes that refer to the function's attributes of the same name."""
    for name, attribute_type in attributes.items():
        _refer(node, name, name, attribute_type)
    return node


def _refer(node: NodeProto, name: str, function_attribute: str, attribute_type: int) -> NodeProto:
    node.attribute.append(onnx.AttributeProto(name=name, type=attribute_type, ref_attr_name=function_attribute))  # type: ignore[arg-type]
    return node


def _constant_from_attribute(name: str) -> NodeProto:
    return _refer(helper.make_node("Constant", [], [name]), "value", name, onnx.AttributeProto.TENSOR)


def _constant(name: str, value: int | float | list[int], data_type: int = onnx.TensorProto.INT64) -> NodeProto:
    dims, values = ([len(value)], value) if isinstance(value, list) else ([], [value])
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, data_type, dims, values))


def _int64(source: str, target: str) -> NodeProto:
    return helper.make_node("Cast", [source], [target], to=onnx.TensorProto.INT64)


def _dense_weight_nodes(opset: int) -> list[NodeProto]:
    """Nodes that scatter the stored entries into the dense weight.

    They use only operators that ONNX Runtime folds at session creation (NonZero and Range, say, are not folded).
    """
    scatter = "ScatterElements" if opset >= 11 else "Scatter"
    int_attribute = onnx.AttributeProto.INT
    return [
        _int64("weight_row_order", "row_order"),
        _int64("weight_columns", "columns"),
        _constant("minus_one", [-1]),
        helper.make_node("Shape", ["row_order"], ["num_rows"]),
        helper.make_node("ReduceProd", ["weight_shape"], ["size"], keepdims=1),
        helper.make_node("Div", ["size", "num_rows"], ["row_length"]),
        *(_flat_index_nodes() if opset >= MIN_OPSET_SLICED else _flat_index_nodes_one_slice()),
        _refer(helper.make_node("Cast", ["weight_values"], ["values"]), "to", "element_type", int_attribute),
        helper.make_node("ConstantOfShape", ["size"], ["zeros_float"]),
        _refer(helper.make_node("Cast", ["zeros_float"], ["zeros"]), "to", "element_type", int_attribute),
        helper.make_node(scatter, ["zeros", "flat_index", "values"], ["flat_weight"], axis=0),
        helper.make_node("Reshape", ["flat_weight", "weight_shape"], ["weight"]),
    ]


def _flat_index_nodes() -> list[NodeProto]:
    """Position of every entry in the flat dense weight, for any number of slices.

    A row has at least one entry, so marking the first entry of every row and summing up gives each entry's row.
    """
    one = helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
    return [
        _int64("weight_nnz_per_row", "nnz"),
        _constant("axis", 0),
        helper.make_node("ConstantOfShape", ["num_rows"], ["ones"], value=one),
        helper.make_node("CumSum", ["ones", "axis"], ["row"], exclusive=1),
        helper.make_node("Div", ["row", "weight_slice_height"], ["slice"]),
        helper.make_node("Gather", ["nnz", "slice"], ["row_nnz"]),
        helper.make_node("CumSum", ["row_nnz", "axis"], ["first_entry"], exclusive=1),
        helper.make_node("Shape", ["columns"], ["num_entries"]),
        helper.make_node(
            "ConstantOfShape", ["num_entries"], ["no_marks"], value=helper.make_tensor("zero", onnx.TensorProto.INT64, [1], [0])
        ),
        helper.make_node("ScatterElements", ["no_marks", "first_entry", "ones"], ["marks"]),
        helper.make_node("CumSum", ["marks", "axis"], ["entry_row_plus_one"]),
        helper.make_node("Add", ["entry_row_plus_one", "minus_one"], ["entry_row"]),
        helper.make_node("Gather", ["row_order", "entry_row"], ["out_channel"]),
        helper.make_node("Mul", ["out_channel", "row_length"], ["row_start"]),
        helper.make_node("Add", ["row_start", "columns"], ["flat_index"]),
    ]


def _flat_index_nodes_one_slice() -> list[NodeProto]:
    """The same for one slice, below opset 11, which has no CumSum: the entries form a matrix ``[K, nnz_per_row]``."""
    return [
        helper.make_node("Concat", ["num_rows", "minus_one"], ["entries_by_row"], axis=0),
        helper.make_node("Reshape", ["columns", "entries_by_row"], ["columns_2d"]),
        helper.make_node("Mul", ["row_order", "row_length"], ["row_start"]),
        helper.make_node("Unsqueeze", ["row_start"], ["row_start_2d"], axes=[1]),
        helper.make_node("Add", ["row_start_2d", "columns_2d"], ["flat_index_2d"]),
        helper.make_node("Reshape", ["flat_index_2d", "minus_one"], ["flat_index"]),
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
    return [*otherwise, helper.make_node("Identity", [otherwise[-1].output[0]], ["Y"])]


def _branch(name: str, nodes: Sequence[NodeProto]) -> onnx.GraphProto:
    output = helper.make_empty_tensor_value_info(nodes[-1].output[0])
    return helper.make_graph(list(nodes), name, [], [output])


def _parametrised(op_type: str, output: str, parameters: Sequence[str]) -> NodeProto:
    node = helper.make_node(op_type, ["preactivation"], [output])
    for name in parameters:
        _refer(node, name, name, onnx.AttributeProto.FLOAT)
    return node


def _clip_nodes(opset: int) -> list[NodeProto]:
    """Clip took its bounds as attributes before opset 11 and takes them as inputs of the element type since."""
    bounds = {"min": "alpha", "max": "beta"}
    if opset < 11:
        clip = helper.make_node("Clip", ["preactivation"], ["act_clip"])
        for name, parameter in bounds.items():
            _refer(clip, name, parameter, onnx.AttributeProto.FLOAT)
        return [clip]
    nodes = [_constant("minus_one_float", -1.0, onnx.TensorProto.FLOAT)]
    for name, parameter in bounds.items():
        # LeakyRelu(-1, alpha=p) = -p: turns a FLOAT attribute into a tensor in every opset.
        negated = helper.make_node("LeakyRelu", ["minus_one_float"], [f"minus_{name}"])
        nodes += [
            _refer(negated, "alpha", parameter, onnx.AttributeProto.FLOAT),
            helper.make_node("Neg", [f"minus_{name}"], [f"{name}_float"]),
            _refer(helper.make_node("Cast", [f"{name}_float"], [name]), "to", "element_type", onnx.AttributeProto.INT),
        ]
    return [*nodes, helper.make_node("Clip", ["preactivation", "min", "max"], ["act_clip"])]
