"""Which operators may run in float16, and which of their inputs and outputs take part.

The list is of operators that ONNX Runtime's CUDA provider has float16 kernels for (its docs/OperatorKernels.md) and
whose results stay within float16's range when their inputs do. What is not listed stays float: an unknown operator is
never asked to take a type that it may not know.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import NodeProto, TensorProto

from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES

FLOAT, HALF = int(TensorProto.FLOAT), int(TensorProto.FLOAT16)

# What gains from float16 by itself. The rest follows the tensors that these read and write.
HEAVY = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", *OP_TYPES})
# Light operators, with the opset from which on the CUDA provider has them in float16.
_LIGHT = {
    **dict.fromkeys(("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "ThresholdedRelu", "Sigmoid", "Tanh"), 6),
    **dict.fromkeys(("HardSigmoid", "Softplus", "Softsign", "Erf", "Abs", "Neg", "Ceil", "Floor", "Sqrt"), 6),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Where", "Greater", "Less"), 6),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LRN"), 6),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization", "Softmax", "LogSoftmax", "Dropout"), 6),
    **dict.fromkeys(("Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split"), 6),
    **dict.fromkeys(("Concat", "Expand", "Tile", "Gather", "Pad", "DepthToSpace", "SpaceToDepth", "Upsample"), 6),
    **dict.fromkeys(("Compress", "ReduceMax", "ReduceMin", "ReduceMean", "ArgMax", "ArgMin", "TopK"), 6),
    **dict.fromkeys(("Resize", "ReverseSequence"), 10),
    **dict.fromkeys(("Equal", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Round"), 11),
    **dict.fromkeys(("Clip", "GreaterOrEqual", "LessOrEqual"), 12),
    **dict.fromkeys(("HardSwish", "Trilu"), 14),
    **dict.fromkeys(("LayerNormalization",), 17),
    **dict.fromkeys(("Gelu",), 20),
}
# Light operators that move numbers and change none: what they make of a constant may be float16 as the constant.
_MOVING = frozenset({"Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze"})
# Operators that read a tensor whatever its type is.
_INDIFFERENT = frozenset({"Shape", "Size", "Cast"})
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})

_RANGE = "its results can leave float16's range, or vanish in it"
_KERNEL = "ONNX Runtime's CUDA provider has no float16 kernel for it"
_SCATTERED = "ONNX Runtime's CPU provider does not add up float16 there"
_RECURRENT = "errors would add up from step to step"
_QUANTISED = "it belongs to quantisation"
_SOURCE = "what it makes is cast where float16 is wanted"
_INTERFACE = "what goes into a subgraph and comes out of it stays float"
_WHY = {
    **dict.fromkeys(("Exp", "Log", "Pow", "Reciprocal", "ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2"), _RANGE),
    **dict.fromkeys(("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "CumSum", "Sin", "Cos", "Tan"), _RANGE),
    **dict.fromkeys(("Range", "RoiAlign", "GridSample", "EyeLike", "NonMaxSuppression", "DeformConv"), _KERNEL),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _RECURRENT),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"), _QUANTISED),
    **dict.fromkeys(("ConstantOfShape", "RandomNormal", "RandomUniform"), _SOURCE),
    **dict.fromkeys(CONTROL_FLOW, _INTERFACE),
}
# Inputs that hold positions or sizes, in which half a thousandth counts.
_POSITIONS = {"GridSample": (1,), "RoiAlign": (1,), "NonMaxSuppression": (0,), "Range": (0, 1, 2)}
# Inputs that stay float though the operator's schema would allow float16: ONNX Runtime reads a roi as float.
_FLOAT_INPUTS = {"Resize": (1, 2)}
_ELEMENT_TYPES = {
    f"tensor({name})": int(TensorProto.DataType.Value(proto_name))
    for name, proto_name in {
        **{"float": "FLOAT", "float16": "FLOAT16", "double": "DOUBLE", "bfloat16": "BFLOAT16", "bool": "BOOL"},
        **{n: n.upper() for n in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "string")},
    }.items()
}
_INTEGERS = frozenset(range(TensorProto.UINT8, TensorProto.INT64 + 1)) | {TensorProto.UINT32, TensorProto.UINT64}


@dataclass(frozen=True)
class Signature:
    """How the types of a node's inputs and outputs belong together.

    Attributes:
        inputs, outputs: for each the name of a type variable, or a type such as ``tensor(float)``; empty where nothing
            is known.
        takes_half: type variables that may be float16.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    takes_half: frozenset[str]


def signature(node: NodeProto, opset: int) -> Signature:
    """The signature of a node in a model of an opset."""
    num_inputs, num_outputs = len(node.input), len(node.output)
    if node.domain == DOMAIN and node.op_type in OP_TYPES:
        return Signature(("T",) * num_inputs, ("T",) * num_outputs, frozenset("T"))
    schema = _schema(node.op_type, opset) if node.domain in ("", "ai.onnx") else None
    if schema is None:
        return Signature(("",) * num_inputs, ("",) * num_outputs, frozenset())
    takes_half = frozenset(
        c.type_param_str for c in schema.type_constraints if "tensor(float16)" in c.allowed_type_strs
    )
    return Signature(_formal(schema.inputs, num_inputs), _formal(schema.outputs, num_outputs), takes_half)


def element_type(type_name: str) -> int | None:
    """``onnx.TensorProto.DataType`` of a type such as ``tensor(float)``; None for a type variable."""
    return _ELEMENT_TYPES.get(type_name)


def is_heavy(node: NodeProto) -> bool:
    """Whether a node gains from float16 by itself."""
    return node.op_type in HEAVY and node.domain in (("", "ai.onnx") if node.op_type not in OP_TYPES else (DOMAIN,))


def is_indifferent(node: NodeProto) -> bool:
    """Whether a node reads a tensor whatever its type is."""
    return node.op_type in _INDIFFERENT and node.domain in ("", "ai.onnx")


def is_moving(node: NodeProto) -> bool:
    """Whether a node only moves the numbers of a tensor."""
    return node.op_type in _MOVING and node.domain in ("", "ai.onnx")


def refusal(node: NodeProto, opset: int) -> str:
    """Why a node stays float whatever is around it; empty when it need not."""
    if is_heavy(node):
        return ""
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}::{node.op_type} is not known to run in float16"
    if node.op_type == "Mul" and len(node.input) == 2 and node.input[0] == node.input[1]:
        return _RANGE  # a square
    if any(a.name == "reduction" and a.s not in (b"", b"none") for a in node.attribute):
        return _SCATTERED
    if node.op_type in _LIGHT:
        return "" if opset >= _LIGHT[node.op_type] else _KERNEL
    return _WHY.get(node.op_type, f"{node.op_type} is not known to run in float16 on CUDA")


def float_inputs(node: NodeProto) -> tuple[int, ...]:
    """Inputs that stay float in a float16 node, though its schema has them in a type that may be float16."""
    return _FLOAT_INPUTS.get(node.op_type, ())


def position_inputs(node: NodeProto) -> tuple[int, ...]:
    """Inputs of a node that hold positions or sizes."""
    if node.op_type == "Cast":
        return (0,) if any(a.name == "to" and a.i in _INTEGERS for a in node.attribute) else ()
    return _POSITIONS.get(node.op_type, ())


def _formal(parameters: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> tuple[str, ...]:
    """The type of each of ``count`` actual parameters; the last formal one may stand for several."""
    return tuple(parameters[min(i, len(parameters) - 1)].type_str if parameters else "" for i in range(count))


@functools.cache
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
