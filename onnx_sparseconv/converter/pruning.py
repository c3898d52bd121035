"""One-shot magnitude pruning, for trying things out. It costs accuracy; a real model is pruned with retraining."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs
from onnx import ModelProto, TensorProto, numpy_helper

from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites
from onnx_sparseconv.converter.decide import is_depthwise, type_name
from onnx_sparseconv.converter.model_io import load, save
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.report import PrunedLayer, PruneReport
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.kernels.unified_csr import Array

Scope = Literal["layer", "global", "channel"]
SCOPES: tuple[Scope, ...] = ("layer", "global", "channel")
PRUNABLE_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
RETRAINING = "one-shot magnitude pruning costs accuracy: retrain a model that is to be used, with its zeros held fixed"


def prune(
    model: str | Path | ModelProto, output: str | Path | None, *, sparsity: float, scope: Scope = "layer"
) -> PruneReport:
    """Set the smallest weights of every Conv to zero.

    Depthwise Conv, quantised weights and weights that are only known at run time are left alone. A weight that
    several Conv share is pruned once.

    Args:
        model: a file, or a model in memory, which is changed only when ``output`` is None.
        output: file to write, whole or not at all; None for a model in memory.
        sparsity: share of zeros to reach, above 0 and up to 1.
        scope: ``layer`` reaches it in every weight, ``global`` over all weights together (layers with small weights
            lose more), ``channel`` in every output channel, so that all rows of a layer store equally many weights
            and unified CSR needs no filling.

    Raises:
        UsageError: an argument is out of range.
        ModelError: the model cannot be read or written, or has no Conv weight to prune.
    """
    if not 0 < sparsity <= 1:
        raise UsageError(f"sparsity must be above 0 and at most 1, got {sparsity}")
    if scope not in SCOPES:
        raise UsageError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    if output is None and not isinstance(model, ModelProto):
        raise UsageError("prune needs an output file, unless the model is one in memory")
    loaded = load(model)
    view = ModelView(loaded.proto)
    sites = [s for s in find_conv_sites(view, ShapeMap(loaded.proto)) if not s.is_sparse]
    targets = _by_weight([s for s in sites if not _why_not(s)])
    if not targets:
        raise ModelError(f"{loaded.path or 'the model'}: has no Conv weight that can be pruned")
    dense = [_values(group[0]) for group in targets]
    pruned = prune_weights(dense, sparsity, scope)
    for group, values in zip(targets, pruned, strict=True):
        _store(view, group, values)
    view.write_back()
    if output is not None:
        save(loaded.proto, output, external=loaded.external)
    elif isinstance(model, ModelProto):
        model.CopyFrom(loaded.proto)
    after = {id(s): v for group, v in zip(targets, pruned, strict=True) for s in group}
    return PruneReport(
        source=loaded.path,
        output=Path(output) if output is not None else None,
        scope=scope,
        target=sparsity,
        sparsity_before=_zeros(dense),
        sparsity_after=_zeros(pruned),
        layers=tuple(_report(s, after.get(id(s))) for s in sites),
        notes=(RETRAINING,),
    )


def prune_weights(weights: Sequence[Array], sparsity: float, scope: Scope) -> list[Array]:
    """The weights with their smallest elements set to +0.

    Args:
        weights: float arrays ``[K, ...]``; they are not changed. NaN counts as largest.
        sparsity: share of zeros to reach, 0 to 1.
        scope: see `prune`.
    """
    if scope == "global":
        magnitudes = np.concatenate([np.abs(w).ravel() for w in weights])
        zero = np.zeros(magnitudes.size, bool)
        zero[np.argsort(magnitudes, kind="stable")[: round(sparsity * magnitudes.size)]] = True
        parts = np.split(zero, np.cumsum([w.size for w in weights])[:-1])
        return [np.where(part.reshape(w.shape), w.dtype.type(0), w) for part, w in zip(parts, weights, strict=True)]
    return [_prune_rows(w, sparsity, rows=w.shape[0] if scope == "channel" else 1) for w in weights]


def _prune_rows(weight: Array, sparsity: float, rows: int) -> Array:
    flat = weight.reshape(rows, -1).copy()
    smallest = np.argsort(np.abs(flat), axis=1, kind="stable")[:, : round(sparsity * flat.shape[1])]
    np.put_along_axis(flat, smallest, flat.dtype.type(0), axis=1)
    return flat.reshape(weight.shape)


def _why_not(site: ConvSite) -> str:
    """Why a Conv's weight is left alone; empty when it is pruned."""
    if not site.is_conv:
        return f"{site.node.op} is not pruned"
    if site.weight is None:
        return "its weight is only known at run time"
    if site.geometry is None:
        return site.problem
    if site.weight.quantised:
        return "its weight is quantised"
    if site.weight.element_type not in PRUNABLE_TYPES:
        return f"its weight is {type_name(site.weight.element_type)}"
    return "it is depthwise" if is_depthwise(site) else ""


def _values(site: ConvSite) -> Array:
    assert site.weight is not None
    return site.weight.values


def _by_weight(sites: Sequence[ConvSite]) -> list[list[ConvSite]]:
    """Sites grouped by the weight that they share."""
    groups: dict[int, list[ConvSite]] = {}
    for site in sites:
        groups.setdefault(id(site.weight), []).append(site)
    return list(groups.values())


def _store(view: ModelView, sites: Sequence[ConvSite], values: Array) -> None:
    """Write a weight back where it is stored, or, where it is computed, as a new constant."""
    weight = sites[0].weight
    assert weight is not None
    if weight.stored is not None:
        for field in ("float_data", "int32_data", "double_data"):
            weight.stored.ClearField(field)
        weight.stored.raw_data = numpy_helper.from_array(values).raw_data
        return
    constant = gs.Constant(view.unique_name(f"{weight.name}_pruned"), values)
    for site in sites:
        site.node.inputs[1] = constant


def _zeros(weights: Sequence[Array]) -> float:
    total = sum(w.size for w in weights)
    return (total - sum(int(np.count_nonzero(w)) for w in weights)) / total


def _report(site: ConvSite, pruned: Array | None) -> PrunedLayer:
    before = site.weight.values if site.weight is not None else None
    return PrunedLayer(
        name=site.name,
        weight_name=site.weight_name,
        weight_shape=tuple(before.shape) if before is not None else None,
        sparsity_before=_zeros([before]) if before is not None and before.size else None,
        sparsity_after=_zeros([pruned]) if pruned is not None else None,
        skipped=_why_not(site),
    )
