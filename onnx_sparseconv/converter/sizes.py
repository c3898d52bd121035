"""Which sizes that are only known at run time are certainly the same.

Shape inference gives the output of a window over an open size a name of its own, and so the sum of two such outputs.
Here these names are brought together where the operators say that the sizes are equal: what a 3x3 convolution with
padding 1 makes is as large as what it reads, and two ways through the same strides end at the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import NodeProto, helper

# A shape with the names of sizes that have one.
NamedShape = tuple[int | str | None, ...]
_ShapeOf = Callable[[str], NamedShape | None]

_POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})
_BROADCASTING = frozenset({"Add", "Sub", "Mul", "Div", "Sum", "Max", "Min"})


class EqualSizes:
    """Names of sizes, brought together node by node, in the order in which the nodes run."""

    def __init__(self) -> None:
        self._same: dict[str, str] = {}
        self._made: dict[tuple[str, int, int], str] = {}

    def canonical(self, shape: NamedShape) -> NamedShape:
        """The shape, with one name for sizes that are the same."""
        return tuple(self._name(size) if isinstance(size, str) else size for size in shape)

    def read(self, node: NodeProto, shape_of: _ShapeOf) -> None:
        """Learn from a node what its output's sizes are.

        Args:
            node: of the default domain, or another, which says nothing.
            shape_of: shape of a tensor that it reads or makes, by name.
        """
        if node.domain not in {"", "ai.onnx"} or not node.output:
            return
        made = shape_of(node.output[0])
        if made is None:
            return
        if node.op_type == "Conv" or node.op_type in _POOLS:
            self._read_window(node, made, shape_of)
        elif node.op_type in _BROADCASTING and not node.attribute:
            self._read_broadcast([shape_of(name) for name in node.input], made)

    def _read_window(self, node: NodeProto, made: NamedShape, shape_of: _ShapeOf) -> None:
        given = shape_of(node.input[0])
        weight = shape_of(node.input[1]) if node.op_type == "Conv" and len(node.input) > 1 else None
        rules = _window_rules(node, weight)
        if rules is None or given is None or len(given) != len(rules) + 2 or len(made) != len(given):
            return
        for before, after, (less, stride) in zip(given[2:], made[2:], rules, strict=True):
            if not isinstance(before, str) or not isinstance(after, str):
                continue
            source = self._name(before)
            if (less, stride) == (1, 1):
                self._unite(after, source)
            else:
                self._unite(after, self._made.setdefault((source, less, stride), self._name(after)))

    def _read_broadcast(self, given: Sequence[NamedShape | None], made: NamedShape) -> None:
        if any(shape is None or len(shape) > len(made) for shape in given):
            return
        for axis, after in enumerate(reversed(made)):
            along = {shape[-1 - axis] for shape in given if shape is not None and axis < len(shape)} - {1}
            names = {self._name(size) if isinstance(size, str) else size for size in along}
            size = names.pop() if len(names) == 1 else None
            if isinstance(after, str) and isinstance(size, str):
                self._unite(after, size)

    def _name(self, size: str) -> str:
        while size in self._same:
            size = self._same[size]
        return size

    def _unite(self, first: str, second: str) -> None:
        first, second = self._name(first), self._name(second)
        if first != second:
            self._same[first] = second


def _window_rules(node: NodeProto, weight: NamedShape | None) -> list[tuple[int, int]] | None:
    """``(less, stride)`` for each axis: the output has ``floor((size - less) / stride) + 1`` places.

    None where that is not the rule, or not known.
    """
    if any(a.ref_attr_name for a in node.attribute):
        return None
    attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    kernel = attributes.get("kernel_shape") or (weight[2:] if weight is not None else ())
    n = len(kernel)
    strides, dilations = attributes.get("strides") or [1] * n, attributes.get("dilations") or [1] * n
    pads = attributes.get("pads") or [0] * (2 * n)
    is_usual = len(strides) == len(dilations) == n and len(pads) == 2 * n and not attributes.get("ceil_mode")
    if not n or not is_usual or not all(isinstance(size, int) for size in kernel):
        return None
    auto_pad = attributes.get("auto_pad") or b"NOTSET"
    if auto_pad in {b"SAME_UPPER", b"SAME_LOWER"}:
        # As many places as strides begin within the size, and that is this rule.
        return [(1, stride) for stride in strides] if set(dilations) == {1} else None
    if auto_pad == b"VALID":
        pads = [0] * (2 * n)
    elif auto_pad != b"NOTSET":
        return None
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    return [(extents[i] - pads[i] - pads[i + n], strides[i]) for i in range(n)]
