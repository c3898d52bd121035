"""Where a convolution stands in its network, as far as that says what it takes on a GPU when it is dense.

Amid other convolutions, ONNX Runtime keeps the channels last, and nothing has its layout changed. Next to what is not
computed so, tensors change their layout before and behind a dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.custom_ops.schema import MAX_CONCAT_INPUTS, OP_TYPES
from onnx_sparseconv.passes.base import is_standard

# Operators that are applied to each element of what a convolution makes.
_ACTIVATIONS = frozenset(
    {"Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "HardSwish", "HardSigmoid", "Sigmoid", "Swish", "Tanh"}
)
# What is computed in any layout, or in that of the convolutions.
_BETWEEN = _ACTIVATIONS | {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Sum",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "Concat",
    "Split",
    "Identity",
    "Dropout",
}
# Behind the last convolution there is one small tensor.
_BEHIND_ALL = frozenset({"Flatten", "Reshape", "Gemm", "ReduceMean", "Squeeze", "Softmax", "MatMul"})


@dataclass(frozen=True)
class Place:
    """A convolution amid others.

    Attributes:
        has_bias: whether ONNX Runtime adds a bias to it, a BatchNormalization among them, which it folds.
        has_activation: whether an activation follows; behind the addition of a residual it is not counted, nor is that.
        is_slow: whether that is a Clip, or SiLU, `x * Sigmoid(x)`; both are slower than others.
    """

    has_bias: bool
    has_activation: bool
    is_slow: bool = False


def find_place(site: ConvSite) -> Place | None:
    """The place of a convolution; None where it does not stand amid others, or its result is the model's."""
    results = {id(tensor) for tensor in site.scope.graph.outputs}
    if any(id(tensor) in results for tensor in site.node.outputs):
        return None
    before, behind = _makers(site.node), _readers(site.node)
    if not behind or not all(_is_convolution(node) for node in before):
        return None
    if not all(_is_convolution(node) or node.op in _BEHIND_ALL for node in behind):
        return None
    last = _folded(site.node)
    behind_it = {reader.op for reader in _next(last)}
    has_bias = any(bool(tensor.name) for tensor in site.node.inputs[2:])
    is_slow = bool(behind_it & {"Clip", "Swish"}) or _is_silu(last)
    return Place(has_bias or last is not site.node, bool(behind_it & _ACTIVATIONS), is_slow)


def reads_concat(site: ConvSite) -> bool:
    """Whether a convolution alone reads a Concat of channels that a sparse one would take in, as far as can be seen
    before anything is rewritten; see `FuseConcat`.
    """
    geometry, x = site.geometry, site.node.inputs[0]
    if geometry is None or len(x.inputs) != 1 or len(x.outputs) != 1:
        return False
    rank, concat = len(geometry.kernel_shape) + 2, x.inputs[0]
    is_plain = {*geometry.kernel_shape, *geometry.strides, geometry.group} == {1} and not any(geometry.pads)
    is_joined = is_standard(concat, "Concat") and concat.attrs.get("axis") in (1, 1 - rank)
    is_pinned = any(x is tensor for tensor in site.scope.graph.outputs)
    has_few = 2 <= len(concat.inputs) <= MAX_CONCAT_INPUTS
    return is_plain and is_joined and has_few and not is_pinned and not _takes_in_more(_folded(site.node))


def _takes_in_more(node: gs.Node) -> bool:
    """Whether a residual or a pool follows a convolution, which become part of it first."""
    behind = _next(node)
    if any(reader.op in ("Add", "Sum") for reader in behind):
        return True
    while len(behind) == 1 and behind[0].op in _ACTIVATIONS:
        behind = _next(behind[0])
    return len(behind) == 1 and behind[0].op == "MaxPool"


def _is_convolution(node: gs.Node) -> bool:
    return node.op in ("Conv", *OP_TYPES)


def _next(node: gs.Node) -> list[gs.Node]:
    return [reader for tensor in node.outputs for reader in tensor.outputs]


def _is_silu(node: gs.Node) -> bool:
    """Whether what a node makes is multiplied by its Sigmoid, which ONNX Runtime does in one pass."""
    readers = _next(node)
    products = {id(reader) for reader in readers if reader.op == "Mul"}
    return any(id(onward) in products for reader in readers if reader.op == "Sigmoid" for onward in _next(reader))


def _folded(node: gs.Node) -> gs.Node:
    """A convolution, or the last BatchNormalization that is folded into it."""
    while len(readers := _next(node)) == 1 and readers[0].op == "BatchNormalization":
        node = readers[0]
    return node


def _makers(node: gs.Node) -> list[gs.Node]:
    """What makes the data that a node reads, but for what is computed in any layout."""
    found = _beyond(_before(node.inputs[:1]), lambda between: _before(between.inputs))
    return [maker for maker in found if maker.op not in ("Constant", "Cast")]


def _readers(node: gs.Node) -> list[gs.Node]:
    """What reads a convolution's result, but for what is computed in any layout."""
    return _beyond(_next(_folded(node)), _next)


def _before(tensors: Iterable[gs.Tensor]) -> list[gs.Node]:
    return [maker for tensor in tensors for maker in tensor.inputs]


def _beyond(nodes: Iterable[gs.Node], onward: Callable[[gs.Node], list[gs.Node]]) -> list[gs.Node]:
    """The first nodes on each way that are not computed in any layout."""
    found, seen, waiting = [], set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.op in _BETWEEN or (node.op == "BatchNormalization" and _is_folded(node)):
            waiting += onward(node)
        else:
            found.append(node)
    return found


def _is_folded(normalisation: gs.Node) -> bool:
    return [maker.op for maker in normalisation.inputs[0].inputs] == ["Conv"]
