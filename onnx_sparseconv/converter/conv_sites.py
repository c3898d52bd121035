"""Every convolution of a model, with what is known of it before anything is decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs
from onnx import NodeProto, helper

from onnx_sparseconv.converter.branches import FixedBranches
from onnx_sparseconv.converter.constants import ConstantResolver, ConstantTensor
from onnx_sparseconv.converter.model_view import ModelView, Scope
from onnx_sparseconv.converter.shapes import Shape, ShapeMap
from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES, ConvGeometry, x_positions
from onnx_sparseconv.passes.base import free_name

ONNX_DOMAINS = ("", "ai.onnx")
# Convolutions that are listed, so that nobody wonders where they are, but that cannot become SparseConv.
QUANTISED_CONVS = ("QLinearConv", "ConvInteger")
FUSED_CONVS = (("com.microsoft", "FusedConv"), ("com.microsoft.nchwc", "Conv"), ("com.microsoft", "NhwcConv"))


class InvalidConvError(ValueError):
    """A Conv whose attributes, weight and input cannot belong together."""


@dataclass(frozen=True, eq=False)
class ConvSite:
    """One convolution.

    Attributes:
        name: the node's name, or one made from its output.
        scope: where the node lives.
        node: the node.
        proto: the node as it was read.
        weight: its weight, None when it is only known at run time.
        weight_name: tensor that feeds the weight.
        input_shape: ``[N, C, D1..Dn]`` with None for unknown sizes, or None; of several inputs, that of their
            concatenation.
        geometry: None when `problem` says why there is none.
        problem: what is wrong with the node; empty when nothing is.
        fixed_branch: the If in a branch of which the node lives though its condition may be resolved without running
            the model; empty where there is none.
    """

    name: str
    scope: Scope
    node: gs.Node
    proto: NodeProto
    weight: ConstantTensor | None
    weight_name: str
    input_shape: Shape | None
    geometry: ConvGeometry | None
    problem: str = ""
    fixed_branch: str = ""

    @property
    def is_conv(self) -> bool:
        """Whether it is an ONNX Conv, not a quantised, fused or already sparse one."""
        return self.node.op == "Conv" and (self.node.domain or "") in ONNX_DOMAINS

    def is_named_in(self, names: Collection[str]) -> bool:
        """Whether names of nodes, or of operators, have its own or its operator's among them."""
        return self.name in names or self.node.op in names

    @property
    def is_sparse(self) -> bool:
        """Whether it is one of our own ops."""
        return self.node.domain == DOMAIN and self.node.op in OP_TYPES


def find_conv_sites(view: ModelView, shapes: ShapeMap) -> list[ConvSite]:
    """All convolutions of the model, in the order of its nodes; our own function bodies are left out.

    Raises:
        ModelError: the data of a weight are broken.
    """
    resolver, fixed = ConstantResolver(view), FixedBranches(view.scopes)
    return [
        _make_site(name, node, scope, (view, resolver, shapes), branch)
        for scope in view.scopes
        if scope.function is None or scope.function.domain != DOMAIN
        for branch in [fixed.around(scope)]
        for name, node in _named(scope)
    ]


def _named(scope: Scope) -> Iterator[tuple[str, gs.Node]]:
    """The convolutions of a scope, each with its name; one without is named after its output, apart from all others."""
    taken = {node.name for node in scope.graph.nodes if node.name}
    for node in _convolutions(scope):
        name = node.name
        if not name:
            name = free_name(f"{node.op}_{node.outputs[0].name}", taken)
            taken.add(name)
        yield name, node


def attributes_of(proto: NodeProto) -> dict[str, Any]:
    """A node's attributes as Python values; references to a function's attributes are left out."""
    return {a.name: helper.get_attribute_value(a) for a in proto.attribute if not a.ref_attr_name}


def output_sizes(geometry: ConvGeometry, sizes: Shape) -> Shape:
    """Spatial sizes of the output as ONNX Conv defines them; None where the input's is unknown."""
    n = len(geometry.kernel_shape)
    result: list[int | None] = []
    for axis, size in enumerate(sizes):
        stride = geometry.strides[axis]
        if size is None:
            result.append(None)
        elif geometry.auto_pad != "NOTSET":
            result.append(-(-size // stride))
        else:
            padded = size + geometry.pads[axis] + geometry.pads[axis + n]
            extent = geometry.dilations[axis] * (geometry.kernel_shape[axis] - 1) + 1
            result.append((padded - extent) // stride + 1)
    return tuple(result)


def output_positions(geometry: ConvGeometry, input_shape: Shape | None) -> int | None:
    """Places of the output for one image, 0 where the kernel does not fit; None where sizes are unknown.

    Args:
        geometry: of the convolution.
        input_shape: ``[N, C, D1..Dn]`` with None for unknown sizes, or None.
    """
    if input_shape is None or len(input_shape) != len(geometry.kernel_shape) + 2:
        return None
    sizes = [size for size in output_sizes(geometry, input_shape[2:]) if size is not None]
    return math.prod(max(size, 0) for size in sizes) if len(sizes) == len(geometry.kernel_shape) else None


def _convolutions(scope: Scope) -> Iterator[gs.Node]:
    for node in scope.graph.nodes:
        domain = node.domain or ""
        standard = domain in ONNX_DOMAINS and node.op in ("Conv", *QUANTISED_CONVS)
        if standard or (domain, node.op) in FUSED_CONVS or (domain == DOMAIN and node.op in OP_TYPES):
            yield node


def _make_site(
    name: str,
    node: gs.Node,
    scope: Scope,
    known: tuple[ModelView, ConstantResolver, ShapeMap],
    fixed_branch: str,
) -> ConvSite:
    view, resolver, shapes = known
    proto = view.origin(node)
    assert proto is not None
    weight_index = 3 if node.op == "QLinearConv" else 1
    is_sparse = node.domain == DOMAIN
    tensor = None if is_sparse or len(node.inputs) <= weight_index else node.inputs[weight_index]
    weight = resolver.resolve(tensor, scope) if tensor is not None else None
    parts = x_positions(node.op) if is_sparse else (0,)
    input_shape = _joined_shape([shapes.get(node.inputs[i].name, scope) for i in parts if i < len(node.inputs)])
    geometry, problem = None, ""
    if not is_sparse:
        try:
            geometry = _geometry(proto, weight, input_shape, lambda: shapes.certain.get(node.inputs[0].name, scope))
            if node.op == "Conv" and weight is not None and len(node.inputs) > 2:
                _check_bias(resolver.resolve(node.inputs[2], scope), weight)
        except InvalidConvError as error:
            geometry, problem = None, str(error)
    return ConvSite(
        name=name,
        scope=scope,
        node=node,
        proto=proto,
        weight=weight,
        weight_name=tensor.name if tensor is not None else "",
        input_shape=input_shape,
        geometry=geometry,
        problem=problem,
        fixed_branch=fixed_branch,
    )


def _joined_shape(parts: Sequence[Shape | None]) -> Shape | None:
    """Shape of tensors that are joined along axis 1; each says what it knows of the other sizes."""
    known = [shape for shape in parts if shape is not None]
    if len(parts) == 1 or not known:
        return known[0] if known else None
    if any(len(shape) != len(known[0]) for shape in known):
        return None
    sizes = [next((size for size in of_axis if size is not None), None) for of_axis in zip(*known, strict=True)]
    channels = [size for shape in known for size in shape[1:2] if size is not None]
    sizes[1:2] = [sum(channels) if len(channels) == len(parts) else None]
    return tuple(sizes)


def _geometry(
    proto: NodeProto,
    weight: ConstantTensor | None,
    input_shape: Shape | None,
    certain_shape: Callable[[], Shape | None],
) -> ConvGeometry:
    """Resolve a Conv's attributes and defaults.

    Args:
        proto: the node.
        weight: its weight, None when it is only known at run time.
        input_shape: of its input, as far as the model states it or it can be inferred.
        certain_shape: gives what of it follows from the model's inputs. SAME padding is made of that alone: what a
            model states may be of a time when its inputs had other sizes.

    Raises:
        InvalidConvError: they contradict each other, the weight or the input.
    """
    attributes = attributes_of(proto)
    if any(a.ref_attr_name for a in proto.attribute):
        raise InvalidConvError("its attributes are arguments of a function")
    kernel = _kernel_shape(attributes, weight)
    n = len(kernel)
    strides = _per_axis(attributes, "strides", n)
    dilations = _per_axis(attributes, "dilations", n)
    group = int(attributes.get("group", 1))
    if input_shape is not None and len(input_shape) != n + 2:
        raise InvalidConvError(f"its input has rank {len(input_shape)}, its kernel {n} spatial axes")
    if weight is not None:
        _check_weight(weight, kernel, group, input_shape)
    sizes: Shape = input_shape[2:] if input_shape is not None else (None,) * n
    auto_pad = attributes.get("auto_pad", b"NOTSET").decode(errors="replace") or "NOTSET"
    pads: tuple[int, ...] | None
    if auto_pad == "NOTSET":
        pads = _integers(attributes, "pads", 2 * n, default=0)
    elif auto_pad == "VALID":
        pads = (0,) * (2 * n)
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        certain = certain_shape() if any(s != 1 for s in strides) else None
        known = certain[2:] if certain is not None and len(certain) == n + 2 else (None,) * n
        pads = _same_pads(auto_pad, kernel, strides, dilations, known)
    else:
        raise InvalidConvError(f"auto_pad is {auto_pad!r}")
    if pads is None:
        return ConvGeometry(kernel, strides, (), dilations, group, auto_pad)
    geometry = ConvGeometry(kernel, strides, pads, dilations, group)
    if any(e is not None and e < 1 for e in output_sizes(geometry, sizes)):
        raise InvalidConvError(f"its input of {sizes} is smaller than its kernel")
    return geometry


def _kernel_shape(attributes: dict[str, Any], weight: ConstantTensor | None) -> tuple[int, ...]:
    kernel = tuple(int(k) for k in attributes.get("kernel_shape", ()))
    if not kernel and weight is not None:
        kernel = tuple(weight.values.shape[2:])
    if not kernel and weight is None:
        raise InvalidConvError("kernel_shape is missing and the weight is only known at run time")
    if not kernel or min(kernel) < 1:
        raise InvalidConvError(f"kernel_shape is {list(kernel)}")
    return kernel


def _check_weight(weight: ConstantTensor, kernel: tuple[int, ...], group: int, input_shape: Shape | None) -> None:
    shape = weight.values.shape
    if shape[2:] != kernel or len(shape) < 3 or 0 in shape:
        raise InvalidConvError(f"its weight has shape {list(shape)}, its kernel_shape is {list(kernel)}")
    if group < 1 or shape[0] % group:
        raise InvalidConvError(f"{shape[0]} output channels cannot be split into {group} groups")
    channels = input_shape[1] if input_shape is not None else None
    if channels is not None and channels != shape[1] * group:
        raise InvalidConvError(f"its input has {channels} channels, its weight {shape[1]} in each of {group} groups")


def _check_bias(bias: ConstantTensor | None, weight: ConstantTensor) -> None:
    if bias is not None and bias.values.shape != weight.values.shape[:1]:
        shape, channels = list(bias.values.shape), weight.values.shape[0]
        raise InvalidConvError(f"its bias has shape {shape}, its weight {channels} output channels")


def _integers(attributes: dict[str, Any], name: str, count: int, default: int) -> tuple[int, ...]:
    values = tuple(int(v) for v in attributes.get(name, ())) or (default,) * count
    if len(values) != count:
        raise InvalidConvError(f"{name} has {len(values)} entries, {count} are needed")
    return values


def _per_axis(attributes: dict[str, Any], name: str, n: int) -> tuple[int, ...]:
    values = _integers(attributes, name, n, default=1)
    if min(values) < 1:
        raise InvalidConvError(f"{name} is {list(values)}")
    return values


def _same_pads(
    auto_pad: str, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...], sizes: Shape
) -> tuple[int, ...] | None:
    """Pads of a SAME convolution, or None where they depend on a size that is only known at run time.

    Where the stride is larger than the kernel, ONNX's formula gives fewer than no pads; runtimes do not agree on what
    that means, so such pads are returned negative. (One too few is no matter: no tap reaches what is cut off.)
    """
    begins, ends = [], []
    resolved = True
    for extent, stride, size in zip(
        (d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)), strides, sizes, strict=True
    ):
        if stride == 1:
            total = extent - 1
        elif size is None:
            total = extent - stride  # the least it can be
            resolved = False
        else:
            total = (-(-size // stride) - 1) * stride + extent - size
        total = 0 if total == -1 else total
        smaller, larger = total // 2, total - total // 2
        begins.append(smaller if auto_pad == "SAME_UPPER" else larger)
        ends.append(larger if auto_pad == "SAME_UPPER" else smaller)
    return (*begins, *ends) if resolved or min(begins) < 0 else None
