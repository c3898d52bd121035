"""Model-local functions whose Conv takes its weight, or its attributes, from the call.

Such a Conv has another weight at every call, so it can only be rewritten where it is called: the function is
inlined. Functions whose Conv has its weight inside are left as they are and rewritten in place.
"""

from __future__ import annotations

import onnx.inliner
from onnx import FunctionProto, ModelProto

from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites
from onnx_sparseconv.converter.model_io import one_line
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.schema import DOMAIN
from onnx_sparseconv.nodes import iterate_nodes


def inline_functions_that_take_weights(proto: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """Inline the functions whose Conv depends on the call; the rest of the model stays as it is.

    Returns:
        The model (the same object when there is nothing to inline) and a note for each function.
    """
    notes: list[str] = []
    # A function that calls one that was inlined may now hold such a Conv itself.
    for _ in range(len(proto.functions)):
        functions = _functions_that_take_weights(proto)
        if not functions:
            break
        names = list(dict.fromkeys((f.domain, f.name) for f in functions))
        write_defaults_at_calls(proto, functions)
        try:
            inlined = onnx.inliner.inline_selected_functions(proto, names)
        except Exception as error:  # the inliner is C++ and raises what pybind makes of it
            return proto, (*notes, f"functions {names} could not be inlined: {one_line(error)}")
        if len(inlined.functions) == len(proto.functions):
            break
        proto = inlined
        notes += [
            f"function {d}::{n} was inlined: its Conv takes its weight or attributes from the call" for d, n in names
        ]
    return proto, tuple(notes)


def _functions_that_take_weights(proto: ModelProto) -> list[FunctionProto]:
    if all(f.domain == DOMAIN for f in proto.functions):
        return []
    sites = find_conv_sites(ModelView(proto), ShapeMap(proto))
    functions = {id(s.scope.function): s.scope.function for s in sites if _depends_on_call(s)}
    return [f for f in functions.values() if f is not None]


def write_defaults_at_calls(proto: ModelProto, functions: list[FunctionProto]) -> None:
    """Write the defaults of the functions' attributes at calls that leave them out; onnx's inliner forgets them."""
    defaults = {(f.domain, f.name, getattr(f, "overload", "")): f.attribute_proto for f in functions}
    for owner in (proto.graph, *proto.functions):
        for node in iterate_nodes(owner.node):
            given = {a.name for a in node.attribute}
            key = (node.domain, node.op_type, getattr(node, "overload", ""))
            node.attribute.extend(a for a in defaults.get(key, ()) if a.name not in given)


def _depends_on_call(site: ConvSite) -> bool:
    return site.scope.function is not None and site.is_conv and (site.weight is None or site.geometry is None)
