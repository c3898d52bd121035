"""Time of every convolution layer, from ONNX Runtime's profiler, matched between a model and its converted form.

ONNX Runtime rewrites a graph before it runs it: a Conv is fused with what follows and may get another name.
`GraphIndex.layer_of_event` undoes what is known of this:

1. a node that keeps its name is found by it, also behind the prefix ``fused``;
2. on the CPU, ``<tensor>_nchwc`` is the Conv from which the model's tensor ``<tensor>`` comes through activations and
   the like;
3. what normalises before a convolution is found by its name, or on the CPU by ``<tensor>_bn_nchwc`` and its like, of
   the tensor that it makes; the activation behind that may have become part of it.

A node without a name loses itself, so a model is profiled `with_names`.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto

from onnx_sparseconv.custom_ops.schema import CONCAT_OPS, DOMAIN, OP_TYPES
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.nodes import iterate_nodes

_NCHWC = "_nchwc"
_FUSED = "fused "
_KERNEL_TIME = "_kernel_time"
_FOLLOWS_CONV = frozenset(
    {
        "Relu",
        "Clip",
        "LeakyRelu",
        "Sigmoid",
        "HardSigmoid",
        "Tanh",
        "HardSwish",
        "BatchNormalization",
        "Add",
        "Sum",
        "Mul",
        "Identity",
    }
)
_MAX_STEPS = 8
# In a row; from what scales channels to its result there are far fewer.
_MAX_NODES_BETWEEN = 32
# What ONNX Runtime's layout on the CPU makes of scales and activations is called after the tensor, and so.
_SCALES_NCHWC = ("_bn_nchwc", "_mul_nchwc", "_nchwc")
_ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Swish"})


@dataclass(frozen=True)
class NodeTime:
    """One node of the profile.

    Attributes:
        name: ONNX Runtime's name of it.
        op_type: its operator.
        provider: where it ran.
        time_us: median over the runs; a node inside a loop counts with all its rounds.
    """

    name: str
    op_type: str
    provider: str
    time_us: float


@dataclass(frozen=True)
class LayerTime:
    """One convolution in both models; None where it could not be found in a profile.

    Attributes:
        name: of the node, or of its output where it has no name.
        original_us, converted_us: median time in microseconds.
        converted_op: operator in the converted model.
        speedup: original over converted.
        stands_for: operators of the original that a depthwise convolution took the place of, in their order; empty for
            what is a convolution there, too.
    """

    name: str
    original_us: float | None
    converted_us: float | None
    converted_op: str
    speedup: float | None
    stands_for: tuple[str, ...] = ()


def read_profile(path: str | Path, runs: int) -> tuple[NodeTime, ...]:
    """Times of the nodes in a profile of ``runs`` equal runs, in the order in which they first ran.

    Raises:
        ModelError: it is no JSON: ONNX Runtime does not escape what names may have in them.
    """
    return summarise_events(read_events(path), runs)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a profile; raises as `read_profile`."""
    try:
        return list(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelError(f"ONNX Runtime's profile cannot be read (quotes in names of nodes?): {error}") from error


def node_events(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Those of nodes that were computed, each with the node's name."""
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL_TIME):
            yield name.removesuffix(_KERNEL_TIME), event


def summarise_events(events: Iterable[Mapping[str, Any]], runs: int) -> tuple[NodeTime, ...]:
    """`read_profile` on the events themselves."""
    durations: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for name, event in node_events(events):
        arguments = event.get("args", {})
        key = name, str(arguments.get("op_name", "")), str(arguments.get("provider", ""))
        durations[key].append(float(event["dur"]))
    return tuple(NodeTime(*key, _time_per_run(times, runs)) for key, times in durations.items())


def _time_per_run(times: Sequence[float], runs: int) -> float:
    return statistics.median(times) if len(times) == runs else sum(times) / runs


def layer_name(node: NodeProto) -> str:
    """What a layer is called: the node's name, or that of its output."""
    return node.name or next((name for name in node.output if name), "")


def is_convolution(node: NodeProto) -> bool:
    """Whether a node is a Conv or one of this package's operators."""
    return (node.op_type == "Conv" and node.domain in ("", "ai.onnx")) or (
        node.domain == DOMAIN and node.op_type in OP_TYPES
    )


def with_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in which every convolution of the main graph has a name, its `layer_name`."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for node in named.graph.node:
        if is_convolution(node):
            node.name = layer_name(node)
    return named


class GraphIndex:
    """Finds the convolution of a model that a node of its profile stands for."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.convolutions: list[NodeProto] = [node for node in model.graph.node if is_convolution(node)]
        self._by_name = {layer_name(node): node for node in self.convolutions}
        self._producer: dict[str, NodeProto] = {name: node for node in model.graph.node for name in node.output if name}

    def layer_of_event(self, name: str) -> NodeProto | None:
        """The convolution behind the profile's node ``name``; None when there is none, or it cannot be told."""
        plain = name.removeprefix(_FUSED).strip()
        if plain in self._by_name:
            return self._by_name[plain]
        tensor, nchwc, _ = plain.rpartition(_NCHWC)
        return self._convolution_behind(tensor) if nchwc else None

    def between(self, first: Iterable[str], last: str) -> list[NodeProto]:
        """The nodes that make tensor ``last`` of tensors ``first``, in their order; empty where it cannot be told.

        Those that make what else these read, constants, are not among them. What a Concat joins to one of ``first``
        counts as one of them.
        """
        found: list[NodeProto] = []
        comes: dict[str, bool] = {}
        left = list(first)
        while left:
            comes[name := left.pop()] = True
            producer = self._producer.get(name)
            if producer is not None and producer.op_type == "Concat":
                left += [part for part in producer.input if part not in comes]
        if not self._collect(last, comes, found, _MAX_NODES_BETWEEN):
            return []
        return [] if any(is_convolution(node) for node in found) else found

    def _collect(self, tensor: str, comes: dict[str, bool], found: list[NodeProto], steps: int) -> bool:
        """Note whether ``tensor`` comes of the first one, and the nodes between; False where it is too far."""
        if tensor in comes:
            return True
        node = self._producer.get(tensor)
        if node is None:
            comes[tensor] = False
            return True
        if steps == 0 or not all(self._collect(name, comes, found, steps - 1) for name in node.input):
            return False
        comes[tensor] = any(comes[name] for name in node.input)
        if comes[tensor] and node not in found:
            found.append(node)
        return True

    def _convolution_behind(self, tensor: str) -> NodeProto | None:
        """The convolution from which ``tensor`` comes through nodes that ONNX Runtime fuses into it."""
        frontier = [tensor]
        for _ in range(_MAX_STEPS):
            producers = [self._producer[name] for name in frontier if name in self._producer]
            found = [node for node in producers if is_convolution(node)]
            if found:
                return found[0] if len(found) == 1 else None
            frontier = [name for node in producers if node.op_type in _FOLLOWS_CONV for name in node.input]
        return None


def times_by_layer(model: onnx.ModelProto, profile: Sequence[NodeTime]) -> dict[str, float]:
    """Time of every convolution that was found in the profile, in microseconds by `layer_name`.

    What cannot be told apart is left out: nodes of the profile that lead to one convolution, and convolutions of one
    name, be it in another graph of the model.
    """
    index = GraphIndex(model)
    names = Counter(layer_name(node) for node in iterate_nodes(model.graph.node) if is_convolution(node))
    found: dict[str, list[float]] = defaultdict(list)
    for node_time in profile:
        node = index.layer_of_event(node_time.name)
        if node is not None and "Conv" in node_time.op_type and names[layer_name(node)] == 1:
            found[layer_name(node)].append(node_time.time_us)
    return {name: times[0] for name, times in found.items() if len(times) == 1}


def match_layers(
    original: onnx.ModelProto,
    original_profile: Sequence[NodeTime],
    converted: onnx.ModelProto,
    converted_profile: Sequence[NodeTime],
) -> tuple[LayerTime, ...]:
    """Every convolution of the converted model beside the original's of the same name, else of the same output.

    One that took the place of other operators stands beside all of these together.
    """
    before, after = times_by_layer(original, original_profile), times_by_layer(converted, converted_profile)
    index = GraphIndex(original)
    by_output = {name: layer_name(node) for node in index.convolutions for name in node.output if name}
    times = _times_by_name(original, original_profile)
    layers = []
    # Results of Concats that no layer stands for: they are still there, or another one does.
    counted = {name for node in iterate_nodes(converted.graph.node) if node.op_type == "Concat" for name in node.output}
    for node in GraphIndex(converted).convolutions:
        name = layer_name(node)
        source = name if name in before else by_output.get(node.output[0], name)
        first, second = before.get(source), after.get(name)
        replaced = []
        if first is None:
            # X, and what else is concatenated to it.
            sources = [node.input[0], *(node.input[2:] if node.op_type in CONCAT_OPS else ())]
            between = index.between(sources, node.output[0])
            replaced = [each for each in between if each.op_type != "Concat" or each.output[0] not in counted]
            counted |= {each.output[0] for each in replaced}
        first = _time_together(replaced, times) if replaced else first
        gain = first / second if first is not None and second else None
        layers.append(LayerTime(name, first, second, node.op_type, gain, tuple(each.op_type for each in replaced)))
    return tuple(layers)


def _time_together(nodes: Sequence[NodeProto], times: Mapping[str, float]) -> float | None:
    """Of all these nodes; an activation that is missing is part of what stands before it."""
    total = 0.0
    for node in nodes:
        names = (node.name, *(name + suffix for name in node.output for suffix in _SCALES_NCHWC))
        found = next((times[name] for name in names if name and name in times), None)
        if found is None and node.op_type not in _ACTIVATIONS:
            return None
        total += found or 0.0
    return total


def _times_by_name(model: onnx.ModelProto, profile: Sequence[NodeTime]) -> dict[str, float]:
    """Time of the profile's nodes, in microseconds by their names, but where several of the model share one."""
    counts = Counter(node.name for node in iterate_nodes(model.graph.node))
    return {each.name: each.time_us for each in profile if counts[each.name] <= 1}
