"""What a converted model says about itself, in ``ModelProto.metadata_props``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from onnx import ModelProto

from onnx_sparseconv.converter.report import LayerReport, Reason

VERSION_KEY = "onnx_sparseconv.version"
DECISIONS_KEY = "onnx_sparseconv.decisions"
SCHEMA_VERSION = 1


def version_of(proto: ModelProto) -> str | None:
    """The version of onnx-sparseconv that converted a model, or None."""
    return next((p.value for p in proto.metadata_props if p.key == VERSION_KEY), None)


def decisions_of(proto: ModelProto) -> list[dict[str, Any]]:
    """The recorded decisions, one dict a layer; empty where there are none or they cannot be read."""
    text = next((p.value for p in proto.metadata_props if p.key == DECISIONS_KEY), "")
    try:
        layers = json.loads(text)["layers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [layer for layer in layers if _is_decision(layer)] if isinstance(layers, list) else []


def _is_decision(layer: Any) -> bool:  # noqa: ANN401
    named = ("name", "graph", "weight")
    return isinstance(layer, dict) and all(_is_text(layer.get(key, "")) for key in named)


def _is_text(value: Any) -> bool:  # noqa: ANN401
    """Whether it is a text that ONNX can hold: JSON can spell half a character."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def record(proto: ModelProto, version: str, layers: Sequence[LayerReport]) -> None:
    """Write version and decisions into a model; what an earlier conversion recorded of nodes that are sparse is
    kept.
    """
    now = [_decision(layer) for layer in layers]
    sparse_before = {(layer.graph, layer.name) for layer in layers if layer.verdict.reason is Reason.ALREADY_SPARSE}
    earlier = [d for d in decisions_of(proto) if d.get("rewritten") and _key(d) in sparse_before]
    kept = {_key(d) for d in earlier}
    decisions = {"schema_version": SCHEMA_VERSION, "layers": earlier + [d for d in now if _key(d) not in kept]}
    clear(proto)
    proto.metadata_props.add(key=VERSION_KEY, value=version)
    proto.metadata_props.add(key=DECISIONS_KEY, value=json.dumps(decisions))


def clear(proto: ModelProto) -> None:
    """Remove both entries."""
    kept = [p for p in proto.metadata_props if p.key not in (VERSION_KEY, DECISIONS_KEY)]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)


def _key(decision: dict[str, Any]) -> tuple[Any, Any]:
    return decision.get("graph"), decision.get("name")


def _decision(layer: LayerReport) -> dict[str, Any]:
    return {
        "name": layer.name,
        "graph": layer.graph,
        "weight": layer.weight_name,
        "rewritten": layer.verdict.rewrite,
        "reason": str(layer.verdict.reason),
        "text": layer.verdict.text,
        "sparsity": layer.sparsity,
    }
