"""A stopwatch that needs no time, and a clock that only moves when it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from onnx_sparseconv.runtime.timing import Samples
from onnx_sparseconv.tuner.database import Database, LayerTimes
from onnx_sparseconv.tuner.in_place import ModelProfile
from onnx_sparseconv.tuner.pieces import Shape, run_for_shapes

SETTING = {
    "processor": "an abacus",
    "cores": 1,
    "gpu": None,
    "driver": None,
    "onnxruntime": "1.0",
    "library": "0",
    "provider": "cpu",
    "threads": 1,
}


def sparsity_of(piece: ModelProto) -> float:
    """Share of zeros of the one convolution's weight."""
    (weight,) = [numpy_helper.to_array(t) for t in piece.graph.initializer if t.name == "w"]
    return float((weight == 0).mean())


@dataclass
class FakeClock:
    """Nanoseconds."""

    now: int = 0

    def __call__(self) -> int:
        return self.now


@dataclass
class FakeBench:
    """Dense layers take 100 us; sparse ones twice the share of their weights that is left.

    Attributes:
        whole_us: time of a whole model, from the names of its sparse layers; None: 50 us and its layers.
        on_layer: called before each layer.
        reorder_us: what a dense layer pays alone on either side.
        profiles: of a dense and a sparse model, from their nodes; None: they cannot be had.
    """

    whole_us: Callable[[frozenset[str]], float] | None = None
    on_layer: Callable[[], object] = lambda: None
    reorder_us: float = 0.0
    dense_us: float = 100.0
    profiles: Callable[[Sequence[NodeProto], Sequence[NodeProto]], tuple[ModelProfile, ModelProfile]] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    pieces: list[ModelProto] = field(default_factory=list)
    cold: list[bool] = field(default_factory=list)
    wholes: list[frozenset[str]] = field(default_factory=list)
    sparsity: dict[str, float] = field(default_factory=dict)

    def layer(self, piece: ModelProto, candidates: Sequence[object], *, is_cold: bool = False) -> LayerTimes:
        self.on_layer()
        self.cold.append(is_cold)
        self.pieces.append(piece)
        left = 1 - sparsity_of(piece)
        times = {"dense": self.dense_us + 2 * self.reorder_us, "sparse": 2 * left * self.dense_us}
        times |= dict.fromkeys(self.problems, math.inf)
        assert [c.name for c in candidates] == list(times)
        return LayerTimes(times, self.problems, self.reorder_us, self.reorder_us)

    def shapes(self, *arguments: Any) -> tuple[dict[str, Shape], dict[str, Shape]]:
        return run_for_shapes(*arguments)

    def whole(self, models: Sequence[object], _case: object) -> tuple[dict[str, Samples], ...]:
        return tuple({"default": Samples(((self._whole(model.path),) * 3,))} for model in models)

    @property
    def sees_places(self) -> bool:
        return self.profiles is not None

    def in_place(self, dense: object, sparse: object, _case: object) -> tuple[ModelProfile, ModelProfile]:
        assert self.profiles is not None
        return self.profiles(*(onnx.load(str(model.path)).graph.node for model in (dense, sparse)))

    def _whole(self, path: object) -> float:
        nodes = onnx.load(str(path)).graph.node
        sparse = frozenset(n.name for n in nodes if n.op_type.startswith("SparseConv"))
        self.wholes.append(sparse)
        if self.whole_us is not None:
            return self.whole_us(sparse)
        convs = [n.name for n in nodes if "Conv" in n.op_type]
        return 50 + sum(2 * self.dense_us * (1 - self.sparsity[n]) if n in sparse else self.dense_us for n in convs)


def add_many(path: Path, name: str, count: int) -> None:
    """Fill a database; a function that other processes can run."""
    database = Database(path, SETTING, "quick")
    for number in range(count):
        database.add(f"{name}{number}", LayerTimes({"dense": 100.0, "sparse": 50.5}, {}, 1.5, 2.5))
