"""The model that is tuned: as it is, or as conversion to float16 will make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import ModelProto

from onnx_sparseconv.converter import ConvertOptions, Decisions, convert
from onnx_sparseconv.converter.analyse import make_plan
from onnx_sparseconv.converter.decide import DecisionOptions
from onnx_sparseconv.converter.decisions import Cause, Choice, LayerDecision, fingerprint
from onnx_sparseconv.converter.gpu_images import NodeKey, node_keys
from onnx_sparseconv.converter.model_io import load, save
from onnx_sparseconv.converter.precision import inline_functions
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.files import is_special


@dataclass(frozen=True)
class Source:
    """Files of the model that is tuned.

    Attributes:
        name: for people.
        original: what decisions are for.
        dense: what is timed as dense; the original, unless it changes its precision.
        fingerprints: of the original's layers, where those of the dense model are others.
    """

    name: str
    original: Path
    dense: Path
    fingerprints: Mapping[NodeKey, str] = field(default_factory=dict)


def open_source(model: str | Path | ModelProto, options: ConvertOptions, directory: Path) -> Source:
    """Put a model where it can be tuned.

    Args:
        model: a file, or a model in memory.
        options: how it will be converted; only its precision counts.
        directory: for files of ours.

    Raises:
        ModelError: the model cannot be read; or its precision cannot be changed, or not so that its layers can be told
            apart afterwards.
    """
    loaded = load(model)
    path = loaded.path
    if path is None or is_special(path):  # a pipe is read once
        path = directory / "dense.onnx"
        save(loaded.proto, path)
    if options.precision == "keep":
        return Source(path.name, path, path)
    # As conversion sees it.
    inlined, _ = inline_functions(loaded.proto)
    plan = make_plan(replace(loaded, proto=inlined), DecisionOptions())
    fingerprints = dict(zip(node_keys(plan.sites), map(fingerprint, plan.sites), strict=True))
    all_dense = tuple(
        LayerDecision(node, graph, number, Choice.DENSE, Choice.DENSE, Cause.NOT_MEASURED, "not timed yet")
        for graph, node, number in fingerprints
    )
    dense = directory / "half.onnx"
    made, report = convert(path, dense, replace(options, decisions=Decisions("", {}, (), all_dense), targets=()))
    if made is None or not report.is_half:
        raise ModelError(f"{path.name}: nothing of it becomes float16, so tune it as it is")
    now = set(node_keys(make_plan(load(dense), DecisionOptions()).sites))
    if now != set(fingerprints):
        lost = next(iter(set(fingerprints) ^ now))[1]
        raise ModelError(
            f"{path.name}: its layer {lost!r} cannot be followed through the conversion to float16: convert it with "
            "--precision fp16 first, then tune what comes out"
        )
    return Source(path.name, path, dense, fingerprints)
