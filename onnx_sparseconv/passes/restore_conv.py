"""Replace SparseConv nodes by the Conv (and Concat, Add, activation and MaxPool) that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.custom_ops.schema import SPARSE_CONV_ADD, Activation, SparseConvAttributes, x_positions
from onnx_sparseconv.kernels.unified_csr import Array, decode
from onnx_sparseconv.passes.base import PassResult, free_name

Namer = Callable[[str], str]
# Operators that take the place of an activation code: name, and which of alpha and beta are its attributes.
_PLAIN = {
    Activation.RELU: ("Relu", ()),
    Activation.LEAKY_RELU: ("LeakyRelu", ("alpha",)),
    Activation.HARD_SIGMOID: ("HardSigmoid", ("alpha", "beta")),
    Activation.SIGMOID: ("Sigmoid", ()),
}
_GATES = {
    Activation.HARD_SWISH: ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    Activation.SILU: ("Sigmoid", {}),
}


class RestoreConv:
    """Replace the nodes of our ops by plain ONNX operators.

    1. The weight is decoded bit for bit; one stored in another type than the node's element type is cast.
    2. The Conv keeps the node's name; a residual becomes an Add, an activation its operator (HardSwish and SiLU,
       which not every opset has, a gate and a Mul), a pool a MaxPool, and several inputs a Concat in front of it.

    Args:
        attributes: of the nodes to replace, by ``id`` of the gs.Node.
        weights: the constant to feed each Conv, by the same key.
        opset: of the model; it decides how Clip takes its bounds.
        unique_name: makes a tensor name that the model does not have.
    """

    def __init__(
        self,
        attributes: Mapping[int, SparseConvAttributes],
        weights: Mapping[int, gs.Constant],
        opset: int,
        unique_name: Namer,
    ) -> None:
        self._attributes = attributes
        self._weights = weights
        self._opset = opset
        self._unique_name = unique_name
        self._node_names: set[str] = set()  # of the graph

    def apply(self, graph: gs.Graph | gs.Function) -> PassResult:
        """Replace the nodes that live in ``graph`` itself."""
        nodes: list[gs.Node] = []
        self._node_names = {node.name for node in graph.nodes}
        changed = 0
        for node in list(graph.nodes):
            attributes = self._attributes.get(id(node))
            if attributes is None:
                nodes.append(node)
                continue
            nodes.extend(self._replacement(node, attributes))
            changed += 1
        if changed:
            graph.nodes[:] = nodes
        return PassResult(graph, changed)

    def _replacement(self, node: gs.Node, attributes: SparseConvAttributes) -> list[gs.Node]:
        bias = node.inputs[1] if len(node.inputs) > 1 and not node.inputs[1].is_empty() else None
        residual = node.inputs[2] if node.op == SPARSE_CONV_ADD else None
        parts = [node.inputs[index] for index in x_positions(node.op)]
        outputs = list(node.outputs)
        node.inputs.clear()
        node.outputs.clear()
        new = [gs.Node("Concat", self._name(f"{node.name}_concat"), {"axis": 1}, parts, [])] if len(parts) > 1 else []
        x = self._connect(new[0]) if new else parts[0]
        inputs = [x, self._weights[id(node)], *([bias] if bias is not None else [])]
        new.append(gs.Node("Conv", node.name, _conv_attributes(attributes), inputs, []))
        if residual is not None:
            new.append(gs.Node("Add", self._name(f"{node.name}_residual"), {}, [self._connect(new[-1]), residual], []))
        new.extend(self._activation(node.name, attributes, new[-1]))
        if attributes.pool is not None:
            pool = {key: list(values) for key, values in asdict(attributes.pool).items()}
            new.append(gs.Node("MaxPool", self._name(f"{node.name}_pool"), pool, [self._connect(new[-1])], []))
        new[-1].outputs = outputs
        return new

    def _name(self, wanted: str) -> str:
        """A name that no other node of the graph has; ONNX Runtime refuses two of one name."""
        name = free_name(wanted, self._node_names)
        self._node_names.add(name)
        return name

    def _connect(self, node: gs.Node) -> gs.Variable:
        """Give a node an output of its own."""
        output = gs.Variable(self._unique_name(f"{node.name}_output"))
        node.outputs = [output]
        return output

    def _activation(self, name: str, attributes: SparseConvAttributes, before: gs.Node) -> list[gs.Node]:
        code = attributes.activation
        if code is Activation.NONE:
            return []
        source = self._connect(before)
        if code in _GATES:
            op, parameters = _GATES[code]
            gate = gs.Node(op, self._name(f"{name}_gate"), dict(parameters), [source], [])
            return [gate, gs.Node("Mul", self._name(f"{name}_activation"), {}, [source, self._connect(gate)], [])]
        if code is Activation.CLIP:
            return [self._clip(self._name(f"{name}_activation"), attributes, source)]
        op, parameter_names = _PLAIN[code]
        parameters = {p: getattr(attributes, p) for p in parameter_names}
        return [gs.Node(op, self._name(f"{name}_activation"), parameters, [source], [])]

    def _clip(self, name: str, attributes: SparseConvAttributes, source: gs.Variable) -> gs.Node:
        bounds = {"min": attributes.alpha, "max": attributes.beta}
        if self._opset < 11:
            return gs.Node("Clip", name, bounds, [source], [])
        constants = [
            gs.Constant(self._unique_name(f"{name}_{key}"), _rounded(value, attributes.element_type))
            for key, value in bounds.items()
        ]
        return gs.Node("Clip", name, {}, [source, *constants], [])


def _rounded(value: float, element_type: np.dtype[Any]) -> Array:
    """A bound in another type; one beyond its range, as of a Clip that is open at one end, is infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(value, element_type)


def dense_weight(attributes: SparseConvAttributes) -> Array:
    """The dense weight of a node in its element type."""
    return decode(attributes.weight).astype(attributes.element_type, copy=False)


def _conv_attributes(attributes: SparseConvAttributes) -> dict[str, object]:
    geometry = attributes.geometry
    result: dict[str, object] = {
        "dilations": list(geometry.dilations),
        "group": geometry.group,
        "kernel_shape": list(geometry.kernel_shape),
        "strides": list(geometry.strides),
    }
    if geometry.auto_pad == "NOTSET":
        result["pads"] = list(geometry.pads)
    else:
        result["auto_pad"] = geometry.auto_pad
    return result
