"""Operators whose result's size onnx and ONNX Runtime do not always agree on.

Where they round, versions of both differ, so what onnx infers of these, and of all behind them, is certain only where
nothing is rounded. `hide_unsure_sizes` puts symbols in the place of the other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from onnx_sparseconv.converter.sizes import NamedShape
from onnx_sparseconv.nodes import iterate_nodes

# Of operators of which inference knows nothing.
_HIDDEN = "onnx_sparseconv.hidden"
_POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})
_SCALED = frozenset({"Resize", "Upsample"})
_SAME = (b"SAME_UPPER", b"SAME_LOWER")

_Types = Mapping[str, TypeProto]
_Constants = Mapping[str, TensorProto]


def hide_unsure_sizes(model: ModelProto, inferred: ModelProto) -> bool:
    """Let inference know nothing of what makes a size that is not certain, but its rank, batch and channels.

    Args:
        model: what inference is given; it is changed.
        inferred: what it made of that.

    Returns:
        Whether there was something new. Inference then has to be run again: what it says of the rest may change.
    """
    hidden = _hide_in_graph(model.graph, inferred.graph, {}, {})
    # Of what a function's body reads, nothing is known.
    inside = [node for function in model.functions for node in iterate_nodes(function.node)]
    for node in inside:
        if _is_unsure(node, {}, {}):
            node.domain = _HIDDEN
            hidden += 1
    if hidden and not any(one.domain == _HIDDEN for one in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_HIDDEN, 1))
        for function in model.functions:
            function.opset_import.append(helper.make_opsetid(_HIDDEN, 1))
    return hidden > 0


def _hide_in_graph(graph: GraphProto, inferred: GraphProto, types: _Types, constants: _Constants) -> int:
    infos = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {**types, **{info.name: info.type for info in infos}}
    given = {info.name for info in graph.input}
    stored = [(t.name, t) for t in graph.initializer if t.HasField("raw_data") or t.float_data]
    made = [(n.output[0], a.t) for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"]
    constants = {**{name: t for name, t in constants.items() if name not in given}, **dict((*stored, *made))}
    hidden = 0
    for node, same in zip(graph.node, inferred.node, strict=True):
        for attribute, inferred_one in zip(node.attribute, same.attribute, strict=True):
            if attribute.type == AttributeProto.GRAPH:
                hidden += _hide_in_graph(attribute.g, inferred_one.g, types, constants)
        if _is_unsure(node, types, constants):
            _hide(graph, node, types)
            hidden += 1
    return hidden


def _hide(graph: GraphProto, node: NodeProto, types: _Types) -> None:
    name = node.output[0]
    given, made = _sizes_of(node.input[0], types), _sizes_of(name, types)
    # Of some results onnx infers too few axes; all have those of what is read.
    if given is not None and made is not None:
        is_known = [
            axis < len(made[:2]) and (node.op_type == "ConvTranspose" or made[axis] == size)
            for axis, size in enumerate(given)
        ]
        names = [made[axis] if known else f"axis {axis} of {name}" for axis, known in enumerate(is_known)]
        info = helper.make_tensor_value_info(name, types[name].tensor_type.elem_type, names)
        results = {output.name: output for output in graph.output}
        (results[name] if name in results else graph.value_info.add()).CopyFrom(info)
    node.domain = _HIDDEN


def _sizes_of(name: str, types: _Types) -> NamedShape | None:
    if name not in types or not types[name].tensor_type.HasField("shape"):
        return None
    return tuple(dim.dim_value or dim.dim_param or None for dim in types[name].tensor_type.shape.dim)


def _is_unsure(node: NodeProto, types: _Types, constants: _Constants) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in _POOLS | _SCALED | {"ConvTranspose"}:
        return False
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return True
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "ConvTranspose":
        return attributes.get("auto_pad") in _SAME or bool(attributes.get("output_shape"))
    if node.op_type in _SCALED:
        return not _scales_exactly(node, attributes, constants)
    return not _pools_exactly(attributes, _sizes_of(node.input[0], types))


def _pools_exactly(attributes: Mapping[str, Any], given: NamedShape | None) -> bool:
    """Whether a pool rounds down, as all do alike, or rounds up to a window that begins within the map."""
    kernel = attributes.get("kernel_shape") or []
    axes = len(kernel)
    dilations = attributes.get("dilations") or [1] * axes
    if not attributes.get("ceil_mode"):
        return attributes.get("auto_pad") not in _SAME or set(dilations) <= {1}
    if attributes.get("auto_pad") in _SAME or given is None or len(given) != axes + 2:
        return False
    strides, pads = attributes.get("strides") or [1] * axes, attributes.get("pads") or [0] * (2 * axes)
    if len(dilations) != axes or len(strides) != axes or len(pads) != 2 * axes:
        return False
    for axis, size in enumerate(given[2:]):
        if not isinstance(size, int):
            return False
        begin, stride = pads[axis], max(strides[axis], 1)
        rest = size + begin + pads[axis + axes] - (dilations[axis] * (kernel[axis] - 1) + 1)
        if rest < 0 or math.ceil(rest / stride) * stride >= size + begin:
            return False
    return True


def _scales_exactly(node: NodeProto, attributes: Mapping[str, Any], constants: _Constants) -> bool:
    """Whether sizes are given, or scaled by whole numbers and by powers of two."""
    if attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        return False
    if len(node.input) > 3 and node.input[3]:
        return attributes.get("keep_aspect_ratio_policy") in (None, b"stretch")
    scales: Sequence[float] = attributes.get("scales") or ()
    place = 2 if len(node.input) > 2 else 1
    if len(node.input) > place and node.input[place] in constants:
        scales = numpy_helper.to_array(constants[node.input[place]]).reshape(-1).tolist()
    return bool(scales) and all(scale > 0 and (scale % 1 == 0 or math.frexp(scale)[0] == 0.5) for scale in scales)
