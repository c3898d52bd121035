"""Decisions on single layers, as tuning made them and as a person may have edited them, in a JSON file.

A decision overrules what the sparsity says (`decide`), not what the operator can express: a layer that cannot be
rewritten is an error where a file says that it shall be.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.converter.gpu_images import NodeKey, node_keys
from onnx_sparseconv.converter.report import NOT_FORCIBLE, Reason, Verdict
from onnx_sparseconv.errors import DecisionsError
from onnx_sparseconv.files import write_text
from onnx_sparseconv.kernels.image_container import MAX_BATCH
from onnx_sparseconv.kernels.kernel_choice import KERNEL_NAMES, KernelChoice

SCHEMA_VERSION = 1
KIND = "onnx-sparseconv decisions"
HELP = "Edit 'choice' of a layer: sparse or dense. A layer that is taken out is decided by its sparsity."
_MAX_NAMES = 4
_TARGET = "sm_"
_TARGET_PATTERN = re.compile(r"sm_[1-9]\d{1,2}")


class Choice(enum.StrEnum):
    """How a layer is to run."""

    DENSE = "dense"
    SPARSE = "sparse"


class Cause(enum.StrEnum):
    """What a decision rests on."""

    MEASURED = "measured"
    WHOLE_MODEL = "whole-model"
    HOPELESS = "hopeless"
    BUDGET = "budget"
    NOT_MEASURED = "not-measured"
    REFUSED = "refused"


@dataclass(frozen=True)
class CandidateTime:
    """One way to run a layer.

    Attributes:
        name: such as ``dense`` or ``sparse``.
        choice: which of the two it is.
        times_us: median time of the layer alone at each of the tuned shapes, microseconds, without the cost of a
            call; infinite where it cannot run.
        problem: why it cannot run; empty where it can.
        counts: whether it could be chosen; else it was timed to be looked at.
    """

    name: str
    choice: Choice
    times_us: tuple[float, ...]
    problem: str = ""
    counts: bool = True


@dataclass(frozen=True)
class LayerDecision:
    """What was decided on one convolution.

    Attributes:
        node, graph, number: its name, the graph that it lives in (empty for the main graph), and how many of that
            name came before it there.
        choice: how it is to run. This is what a person edits.
        advice: what tuning chose.
        cause: what that rests on.
        text: the same in words, with the figures.
        sparsity: share of zeros, 0 to 1; None where the weight is not known.
        layer: hash of weight and geometry, so that decisions on another layer are recognised; empty where there is no
            weight.
        measured_as: name of the layer that was timed in its place because it is alike; empty where it was itself.
        candidates: what was timed.
        kernels: by architecture, ``sm_90`` and its like, the kernel that is to run it where it is sparse.
    """

    node: str
    graph: str
    number: int
    choice: Choice
    advice: Choice
    cause: Cause
    text: str
    sparsity: float | None = None
    layer: str = ""
    measured_as: str = ""
    candidates: tuple[CandidateTime, ...] = ()
    kernels: Mapping[str, KernelChoice] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> NodeKey:
        """As `node_keys` gives it."""
        return self.graph, self.node, self.number


@dataclass(frozen=True)
class Decisions:
    """The decisions on one model.

    Attributes:
        model: the model's file, for people.
        setting: where and how it was measured, such as ``processor`` and ``threads``.
        input_shapes: shape of every input, for each of the tuned shapes.
        layers: every convolution.
        whole_model: what the check of the whole model gave, as plain data; empty without one.
        notes: what else is worth knowing.
        targets: GPU architectures that images are to be made for, where nobody names others.
        source: the file that they were read from; empty where they come from memory.
    """

    model: str
    setting: Mapping[str, Any]
    input_shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    layers: tuple[LayerDecision, ...]
    whole_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    source: str = ""

    @property
    def num_sparse(self) -> int:
        """Layers that are to run sparse."""
        return sum(layer.choice is Choice.SPARSE for layer in self.layers)

    @property
    def kernels(self) -> dict[NodeKey, dict[int, KernelChoice]]:
        """The kernels that were chosen, by layer and architecture (90 for sm_90)."""
        return {
            layer.key: {int(name.removeprefix(_TARGET)): choice for name, choice in layer.kernels.items()}
            for layer in self.layers
            if layer.kernels
        }

    @property
    def name(self) -> str:
        """The file, or what stands for it in messages."""
        return self.source or "the decisions"

    @property
    def measured_on(self) -> str:
        """Where they were measured, in words."""
        setting = self.setting
        device = setting.get("gpu") or setting.get("processor") or "an unknown machine"
        threads = setting.get("threads")
        parts = [str(device), f"onnxruntime {setting.get('onnxruntime', '?')}"]
        parts.append("as many threads as onnxruntime takes" if threads is None else f"threads: {threads}")
        parts += [
            f"{name} {'x'.join(map(str, shape))}" for shapes in self.input_shapes for name, shape in shapes.items()
        ]
        return ", ".join(parts)


def write_decisions(decisions: Decisions, path: str | Path) -> None:
    """Write a decisions file, whole or not at all.

    Raises:
        OutputError: it cannot be written there.
    """
    write_text(path, decisions_text(decisions))


def decisions_text(decisions: Decisions) -> str:
    """The text of a decisions file."""
    content = dataclasses.asdict(decisions)
    del content["source"]
    document = {"schema_version": SCHEMA_VERSION, "kind": KIND, "help": HELP, **content}
    return json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_decisions(path: str | Path) -> Decisions:
    """Read a decisions file, and check that it is one.

    Raises:
        DecisionsError: it cannot be read, or says something that it may not; the text says where.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DecisionsError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecisionsError(f"{path}: is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise DecisionsError(f"{path}: is not a decisions file of 'sparseconv tune' (its 'kind' is not {KIND!r})")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise DecisionsError(
            f"{path}: has schema_version {document.get('schema_version')!r}, this version reads {SCHEMA_VERSION}: "
            "tune again"
        )
    return _parse(document, str(path))


def fingerprint(site: ConvSite) -> str:
    """Hash of a layer's weight and geometry, 32 hexadecimal digits; empty without them."""
    if site.weight is None or site.geometry is None:
        return ""
    geometry, values = site.geometry, site.weight.values
    facts = (geometry.kernel_shape, geometry.strides, geometry.dilations, geometry.group)
    digest = hashlib.sha256(repr((facts, values.shape, str(values.dtype))).encode())
    digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:32]


def apply(decisions: Decisions, sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts as the decisions have them; layers that they do not name keep theirs.

    Args:
        decisions: what was decided.
        sites: every convolution of the model.
        verdicts: what their sparsity says.

    Raises:
        DecisionsError: the decisions are for another model, or ask for what cannot be.
    """
    keys = node_keys(sites)
    by_key = _by_key(decisions, keys)
    return [
        _verdict(decisions, by_key[key], site, verdict) if key in by_key else verdict
        for key, site, verdict in zip(keys, sites, verdicts, strict=True)
    ]


def _by_key(decisions: Decisions, keys: Sequence[NodeKey]) -> dict[NodeKey, LayerDecision]:
    by_key: dict[NodeKey, LayerDecision] = {}
    for layer in decisions.layers:
        if layer.key in by_key:
            raise DecisionsError(f"{decisions.name}: there are two decisions on {_label(layer)}")
        by_key[layer.key] = layer
    unknown = [layer for layer in decisions.layers if layer.key not in set(keys)]
    if unknown and len(unknown) == len(by_key):
        raise DecisionsError(
            f"{decisions.name}: is for another model ({decisions.model}): none of its layers is in this one"
        )
    if unknown:
        have = ", ".join(name for _, name, _ in keys[:_MAX_NAMES]) + (" ..." if len(keys) > _MAX_NAMES else "")
        raise DecisionsError(f"{decisions.name}: the model has no convolution {_label(unknown[0])}; it has {have}")
    return by_key


def _verdict(decisions: Decisions, layer: LayerDecision, site: ConvSite, verdict: Verdict) -> Verdict:
    if layer.layer and layer.layer != fingerprint(site):
        raise DecisionsError(
            f"{decisions.name}: {_label(layer)} has other weights, or another form, than when it was measured: tune "
            "again"
        )
    if verdict.reason is Reason.ALREADY_SPARSE and layer.choice is layer.advice:
        return verdict
    if verdict.reason is Reason.ALREADY_SPARSE and layer.choice is Choice.DENSE:
        raise DecisionsError(
            f"{decisions.name}: {_label(layer)} is to be dense, but is sparse in the model: 'sparseconv restore' the "
            "model, or decide on the one that it was made from"
        )
    if layer.choice is Choice.SPARSE and verdict.reason in NOT_FORCIBLE:
        raise DecisionsError(f"{decisions.name}: {_label(layer)} is to be sparse, but cannot: {verdict.text}")
    by_hand = layer.choice is not layer.advice
    text = f"chosen by hand, though tuning chose {layer.advice}: {layer.text}" if by_hand else layer.text
    if layer.choice is Choice.SPARSE:
        return Verdict(True, Reason.DECIDED_SPARSE, text)
    if not verdict.rewrite and not by_hand and layer.cause not in (Cause.MEASURED, Cause.WHOLE_MODEL):
        return verdict
    return Verdict(False, Reason.DECIDED_DENSE, text)


def _label(layer: LayerDecision) -> str:
    number = f" (number {layer.number + 1} of that name)" if layer.number else ""
    return f"{layer.node!r}{number}" + (f" in {layer.graph}" if layer.graph else "")


def _finite(value: Any) -> Any:  # noqa: ANN401
    """JSON has no infinity: null stands for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Reader:
    """Takes typed values out of a JSON object; a wrong one is an error that says where it stands."""

    def __init__(self, content: Any, where: str) -> None:  # noqa: ANN401
        if not isinstance(content, dict):
            raise DecisionsError(f"{where}: is not an object")
        self._content = content
        self.where = where

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:  # noqa: ANN401
        """A value of a type; the default, where there is one, when it is missing."""
        if name not in self._content and default is not None:
            return default
        value = self._content.get(name)
        is_bool = isinstance(value, bool) and kind is not bool
        if name not in self._content or is_bool or not isinstance(value, kind):
            raise DecisionsError(f"{self.where}: {name!r} is missing or has the wrong type")
        return value

    def take_word(self, name: str, words: type[enum.StrEnum]) -> Any:  # noqa: ANN401
        """A member of an enumeration."""
        value = self.take(name, str)
        if value not in [str(word) for word in words]:
            raise DecisionsError(f"{self.where}: {name!r} is {value!r}; it must be one of {', '.join(words)}")
        return words(value)


def _parse(document: Mapping[str, Any], source: str) -> Decisions:
    reader = _Reader(document, source)
    shapes = reader.take("input_shapes", list)
    layers = [_parse_layer(item, index, source) for index, item in enumerate(reader.take("layers", list))]
    decisions = Decisions(
        model=reader.take("model", str),
        setting=reader.take("setting", dict),
        input_shapes=tuple(_parse_shapes(item, source) for item in shapes),
        layers=tuple(layers),
        whole_model=_parse_whole(reader.take("whole_model", dict, {}), source),
        notes=tuple(str(note) for note in reader.take("notes", list, [])),
        targets=tuple(_target(name, source) for name in reader.take("targets", list, [])),
    )
    return replace(decisions, source=source)


def _parse_shapes(content: Any, source: str) -> dict[str, tuple[int, ...]]:  # noqa: ANN401
    if not isinstance(content, dict) or not all(
        isinstance(shape, list) and all(isinstance(size, int) for size in shape) for shape in content.values()
    ):
        raise DecisionsError(f"{source}: 'input_shapes' must hold objects of lists of numbers")
    return {name: tuple(shape) for name, shape in content.items()}


def _parse_layer(content: Any, index: int, source: str) -> LayerDecision:  # noqa: ANN401
    reader = _Reader(content, f"{source}: layer {index + 1}")
    node = reader.take("node", str)
    reader.where = f"{source}: layer {node!r}"
    choice = reader.take_word("choice", Choice)
    sparsity = content.get("sparsity")
    return LayerDecision(
        node=node,
        graph=reader.take("graph", str, ""),
        number=reader.take("number", int, 0),
        choice=choice,
        advice=reader.take_word("advice", Choice) if "advice" in content else choice,
        cause=reader.take_word("cause", Cause) if "cause" in content else Cause.NOT_MEASURED,
        text=" ".join(reader.take("text", str, "chosen in the decisions file").split()),
        sparsity=None if sparsity is None else float(reader.take("sparsity", (int, float))),
        layer=reader.take("layer", str, ""),
        measured_as=reader.take("measured_as", str, ""),
        candidates=tuple(_parse_candidate(item, reader.where) for item in reader.take("candidates", list, [])),
        kernels={
            _target(name, reader.where): _parse_kernel(item, f"{reader.where}: its kernel for {name}")
            for name, item in reader.take("kernels", dict, {}).items()
        },
    )


def _parse_whole(content: dict[str, Any], source: str) -> dict[str, Any]:
    cases = content.get("cases", [])
    names = ("dense_us", "predicted_us", "measured_us")
    if not isinstance(cases, list) or not all(
        isinstance(case, dict) and all(_is_time(case.get(name)) for name in names) for case in cases
    ):
        raise DecisionsError(f"{source}: the 'cases' of 'whole_model' must have times: {', '.join(names)}")
    return content


def _is_time(value: Any) -> bool:  # noqa: ANN401
    # An integer of JSON may be larger than any float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _target(name: Any, where: str) -> str:  # noqa: ANN401
    if not isinstance(name, str) or not _TARGET_PATTERN.fullmatch(name):
        raise DecisionsError(f"{where}: {name!r} is no architecture such as sm_90")
    return name


def _parse_kernel(content: Any, where: str) -> KernelChoice:  # noqa: ANN401
    reader = _Reader(content, where)
    kernel = reader.take("kernel", str)
    if kernel not in KERNEL_NAMES:
        raise DecisionsError(f"{where}: 'kernel' is {kernel!r}; it must be one of {', '.join(KERNEL_NAMES)}")
    names = ("tile_channels", "chunk_channels", "threads", "min_batch")
    numbers = {name: reader.take(name, int, 0) for name in names}
    if min(numbers.values()) < 0 or (kernel == "generated" and not numbers["tile_channels"]):
        raise DecisionsError(f"{where}: a generated kernel needs 'tile_channels', and no number may be negative")
    if numbers["min_batch"] > MAX_BATCH:
        raise DecisionsError(f"{where}: 'min_batch' is {numbers['min_batch']}; it must be at most {MAX_BATCH}")
    size = content.get("in_size")
    if size is None:
        return KernelChoice(kernel, **numbers)
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise DecisionsError(f"{where}: 'in_size' must be two sizes, or null")
    return KernelChoice(kernel, **numbers, in_size=(size[0], size[1]))


def _parse_candidate(content: Any, where: str) -> CandidateTime:  # noqa: ANN401
    reader = _Reader(content, f"{where}: a candidate")
    times = reader.take("times_us", list)
    if not all(time is None or _is_time(time) for time in times):
        raise DecisionsError(f"{where}: 'times_us' must hold times, or null where a candidate cannot run")
    return CandidateTime(
        name=reader.take("name", str),
        choice=reader.take_word("choice", Choice),
        times_us=tuple(math.inf if time is None else float(time) for time in times),
        problem=reader.take("problem", str, ""),
        counts=reader.take("counts", bool, True),
    )
