"""From a converted model back to dense Conv nodes, with the bits of the weights that were converted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
from onnx import FunctionProto, ModelProto

from onnx_sparseconv.converter import metadata
from onnx_sparseconv.converter.analyse import default_opset
from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites
from onnx_sparseconv.converter.model_io import MAX_INLINE_BYTES, load, save
from onnx_sparseconv.converter.model_view import ModelView, Scope
from onnx_sparseconv.converter.report import RestoreReport
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES, SPARSE_CONV_ADD, SparseConvAttributes, x_positions
from onnx_sparseconv.errors import FormatError, ModelError, UsageError
from onnx_sparseconv.kernels.unified_csr import Array
from onnx_sparseconv.nodes import iterate_nodes
from onnx_sparseconv.passes.restore_conv import RestoreConv, dense_weight

# What one tensor can have; a broken node may ask for more.
MAX_WEIGHT_BYTES = MAX_INLINE_BYTES


def restore(model: str | Path | ModelProto, output: str | Path | None = None) -> RestoreReport:
    """Turn every SparseConv of a model back into Conv. The opset and IR version stay as they are.

    Args:
        model: a file, or a model in memory, which is changed only when ``output`` is None.
        output: file to write, whole or not at all; None for a model in memory.

    Raises:
        ModelError: the model cannot be read or written, carries no SparseConv, or one that is broken.
    """
    if output is None and not isinstance(model, ModelProto):
        raise UsageError("restore needs an output file, unless the model is one in memory")
    loaded = load(model)
    proto = loaded.proto
    view = ModelView(proto)
    sites = [s for s in find_conv_sites(view, ShapeMap(proto)) if s.is_sparse]
    if not sites:
        raise ModelError(f"{loaded.path or 'the model'}: carries no SparseConv node, so there is nothing to restore")
    attributes = {id(s.node): _read(s) for s in sites}
    weights = _weight_constants(view, sites, attributes)
    dense_again = RestoreConv(attributes, weights, default_opset(proto), view.unique_name)
    for scope in view.scopes:
        dense_again.apply(scope.graph)
    view.write_back()
    _forget_domain(proto)
    if output is not None:
        save(proto, output, external=loaded.external)
    elif isinstance(model, ModelProto):
        model.CopyFrom(proto)
    return RestoreReport(
        source=loaded.path,
        output=Path(output) if output is not None else None,
        layers=tuple(s.name for s in sites),
        notes=(),
    )


def _read(site: ConvSite) -> SparseConvAttributes:
    inputs = site.node.inputs
    needed = (0, 2) if site.node.op == SPARSE_CONV_ADD else x_positions(site.node.op)
    if any(index >= len(inputs) or inputs[index].is_empty() for index in needed):
        raise ModelError(f"node {site.name!r}: {site.node.op} needs an input that the node does not have")
    try:
        return attributes_from_proto(site.proto)
    except FormatError as error:
        raise ModelError(f"node {site.name!r}: {error}") from error


def _weight_constants(
    view: ModelView, sites: list[ConvSite], attributes: dict[int, SparseConvAttributes]
) -> dict[int, gs.Constant]:
    """A constant for every node, under the name that its weight had; nodes that shared a weight share it again."""
    names = {(d.get("graph"), d.get("name")): d.get("weight") for d in metadata.decisions_of(view.proto)}
    made: dict[tuple[str, str], tuple[gs.Constant, Array]] = {}
    constants: dict[int, gs.Constant] = {}
    for site in sites:
        shape = attributes[id(site.node)].weight.weight_shape
        if 4 * math.prod(shape) > MAX_WEIGHT_BYTES:
            raise ModelError(f"node {site.name!r}: a dense weight of shape {shape} is larger than ONNX can hold")
        try:
            values = dense_weight(attributes[id(site.node)])
        except FormatError as error:
            raise ModelError(f"node {site.name!r}: {error}") from error
        recorded = names.get((site.scope.path, site.name))
        name = recorded or f"{site.name}_weight"
        # Only within one scope: a constant of an inner scope is not visible to its neighbours.
        shared = made.get((site.scope.path, name)) or _still_there(site, name)
        if shared is None or not _same_bits(shared[1], values):
            shared = (gs.Constant(view.unique_name(name), values), values)
        made[site.scope.path, name] = shared
        constants[id(site.node)] = shared[0]
    return constants


def _still_there(site: ConvSite, name: str) -> tuple[gs.Constant, Array] | None:
    """The initializer of that name which the site sees: the weight, if others use it too."""
    scope: Scope | None = site.scope
    while scope is not None:
        tensor = scope.graph.tensors().get(name)
        if isinstance(tensor, gs.Constant) and tensor.name not in scope.initializer_inputs:
            return tensor, np.asarray(tensor.values)
        scope = scope.parent
    return None


def _same_bits(first: Array, second: Array) -> bool:
    same_form = first.dtype == second.dtype and first.shape == second.shape
    return same_form and first.tobytes() == second.tobytes()


def _forget_domain(proto: ModelProto) -> None:
    """Remove the portable bodies, the opset imports and the metadata."""
    functions = [f for f in proto.functions if f.domain != DOMAIN or f.name not in OP_TYPES]
    del proto.functions[:]
    proto.functions.extend(functions)
    for owner in (proto, *proto.functions):
        nodes = proto.graph.node if owner is proto else owner.node
        if all(n.domain != DOMAIN for n in iterate_nodes(nodes)):
            _drop_import(owner)
    metadata.clear(proto)


def _drop_import(owner: ModelProto | FunctionProto) -> None:
    imports = [o for o in owner.opset_import if o.domain != DOMAIN]
    del owner.opset_import[:]
    owner.opset_import.extend(imports)
