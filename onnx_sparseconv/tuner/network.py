"""From the times of single layers to a choice for all of them.

A layer's own times are not all: ONNX Runtime may keep activations between dense layers in another layout than the
model's, which a sparse layer neither reads nor writes: with blocked channels on the CPU, with the channels last on CUDA
where it is asked to. Alone, a dense layer pays for changing the layout before and behind; among dense layers it does
not, and beside a sparse one it does again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnx_sparseconv.converter.decisions import Choice
from onnx_sparseconv.tuner.candidates import Candidate
from onnx_sparseconv.tuner.database import LayerTimes
from onnx_sparseconv.tuner.layouts import Layout
from onnx_sparseconv.tuner.regions import Region

# A sparse layer has to be better than dense by this share of the dense layer's time: less is noise.
MARGIN = 0.02
_MAX_SWEEPS = 8
# Through these a blocked layout passes.
_LAYOUT_PASSES = frozenset(
    {
        "MaxPool",
        "AveragePool",
        "GlobalMaxPool",
        "GlobalAveragePool",
        "Concat",
        "Add",
        "Sum",
        "Mul",
        "Relu",
        "Sigmoid",
        "Tanh",
        "LeakyRelu",
        "Clip",
        "HardSigmoid",
        "BatchNormalization",
        "Identity",
        "Dropout",
    }
)
# With `prefer_nhwc`, these run with the channels last even among sparse layers.
_CHANNELS_LAST = frozenset(
    {
        "Conv",  # one that is no layer, as where its weight is only known at run time
        "ConvTranspose",
        "MaxPool",
        "AveragePool",
        "GlobalMaxPool",
        "GlobalAveragePool",
        "BatchNormalization",
        "LRN",
        "GridSample",
        "DepthToSpace",
        "SpaceToDepth",
    }
)


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer at one shape, in microseconds.

    Attributes:
        dense_us: dense, among dense layers; never less than a little.
        sparse_us: sparse; infinite where it cannot run, or was not timed.
        reorder_in_us, reorder_out_us: what dense costs besides where its input comes from, or its output goes to,
            something that is not dense.
    """

    dense_us: float
    sparse_us: float
    reorder_in_us: float = 0.0
    reorder_out_us: float = 0.0

    @property
    def alone_us(self) -> float:
        """Dense, by itself."""
        return self.dense_us + self.reorder_in_us + self.reorder_out_us


def best_sparse(
    times: Sequence[LayerTimes], candidates: Sequence[Candidate], weights: Sequence[float]
) -> Candidate | None:
    """The sparse candidate that is fastest over all cases: a node is written once for all of them.

    Args:
        times: of the layer, at each case.
        candidates: that were timed.
        weights: of the cases.

    Returns:
        None where no sparse candidate runs at every case.
    """
    totals = {
        candidate.name: sum(
            weight * at_case.times_us.get(candidate.name, math.inf)
            for weight, at_case in zip(weights, times, strict=True)
        )
        for candidate in candidates
        if candidate.choice is Choice.SPARSE and candidate.counts
    }
    fastest = min(totals, key=lambda name: totals[name], default="")
    return next((c for c in candidates if c.name == fastest and math.isfinite(totals[fastest])), None)


def layer_cost(
    times: LayerTimes, candidates: Sequence[Candidate], sparse: Candidate | None, layout: Layout
) -> LayerCost:
    """Of the dense candidate of a layout, and of the sparse one that would be taken (None: none can)."""
    alone = times.times_us.get(layout.dense, math.inf)
    if math.isinf(alone):
        # Where it does not run in that layout, it costs at least what it takes in another.
        alone = min((times.times_us[c.name] for c in candidates if c.choice is Choice.DENSE), default=math.inf)
    sparse_us = math.inf if sparse is None else times.times_us[sparse.name]
    if not layout.is_reordered:
        return LayerCost(alone, sparse_us)
    return split_cost(alone, sparse_us, times.reorder_in_us, times.reorder_out_us)


def split_cost(alone_us: float, sparse_us: float, reorder_in_us: float, reorder_out_us: float) -> LayerCost:
    """Of a layer that takes so long dense, by itself, changes of layout before and behind it among that."""
    reorders = reorder_in_us + reorder_out_us
    # Taken from different runs, the parts need not add up: dense work is at least half of the whole.
    share = min(1.0, alone_us / 2 / reorders) if reorders > 0 and math.isfinite(alone_us) else 0.0
    before, behind = share * reorder_in_us, share * reorder_out_us
    return LayerCost(alone_us - before - behind, sparse_us, before, behind)


@dataclass(frozen=True)
class Links:
    """How layers lie beside each other.

    Attributes:
        before: by layer, the layers that its input comes from.
        behind: by layer, the layers that read its output.
        open_before, open_behind: layers of which some input comes from, or some reader is, neither a layer nor a bound
            node.
        bound_before, bound_behind: layers of which some input comes from, or some reader is, a node that has the layout
            of dense layers whatever stands around it.
    """

    before: Mapping[int, frozenset[int]]
    behind: Mapping[int, frozenset[int]]
    open_before: frozenset[int]
    open_behind: frozenset[int]
    bound_before: frozenset[int] = frozenset()
    bound_behind: frozenset[int] = frozenset()


def find_links(regions: Mapping[int, Region], *, channels_last: bool = False) -> Links:
    """Which regions feed which, through nodes that leave the layout alone.

    Args:
        regions: by layer.
        channels_last: whether the layout of dense layers is that of ``prefer_nhwc``, which other nodes have as well.
    """
    owner = {id(node): key for key, region in regions.items() for node in region.nodes}
    before = {
        key: _walk(region.inputs, owner, upwards=True, channels_last=channels_last) for key, region in regions.items()
    }
    behind = {
        key: _walk([region.output], owner, upwards=False, channels_last=channels_last)
        for key, region in regions.items()
    }
    return Links(
        {key: found.layers for key, found in before.items()},
        {key: found.layers for key, found in behind.items()},
        frozenset(key for key, found in before.items() if found.is_open),
        frozenset(key for key, found in behind.items() if found.is_open),
        frozenset(key for key, found in before.items() if found.is_bound),
        frozenset(key for key, found in behind.items() if found.is_bound),
    )


@dataclass(frozen=True)
class _Neighbours:
    """What one comes to from a layer: other layers, a node that has their layout, or anything else."""

    layers: frozenset[int]
    is_bound: bool
    is_open: bool


def _walk(start: Sequence[gs.Tensor], owner: Mapping[int, int], *, upwards: bool, channels_last: bool) -> _Neighbours:
    found: set[int] = set()
    is_open = is_bound = False
    seen: set[int] = set()
    queue = list(start)
    while queue:
        tensor = queue.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        nodes = tensor.inputs if upwards else tensor.outputs
        is_open = is_open or not nodes
        for node in nodes:
            if id(node) in owner:
                found.add(owner[id(node)])
            elif channels_last and _has_channels_last(node, upwards=upwards):
                is_bound = True
            elif node.op in _LAYOUT_PASSES and not node.domain:
                further = node.inputs if upwards else node.outputs
                queue += [t for t in further if not t.is_empty() and not isinstance(t, gs.Constant)]
            else:
                is_open = True
    return _Neighbours(frozenset(found), is_bound, is_open)


def _has_channels_last(node: gs.Node, *, upwards: bool) -> bool:
    """Whether the far side of a node has the channels last among dense layers, at no cost to them."""
    if node.domain:
        return False
    if node.op != "Transpose":
        return node.op in _CHANNELS_LAST
    # One that the model has itself: behind a dense layer, or before it, it undoes ONNX Runtime's own.
    order = list(node.attrs.get("perm", ()))
    last = len(order) - 1
    return len(order) > 2 and order == ([0, last, *range(1, last)] if upwards else [0, *range(2, last + 1), 1])


class CostModel:
    """What a model's layers take together, by which of them are sparse.

    Attributes:
        costs: of each layer, at each case; all 0 for a layer that was not timed.
        links: how they lie beside each other.
        weights: of the cases, by which their times are added.

    Args:
        costs, links, weights: the attributes.
        profiled_us: what all nodes of the dense model took in the profiles that the costs are from, at each case;
            empty where the layers were timed by themselves.
    """

    def __init__(
        self,
        costs: Mapping[int, Sequence[LayerCost]],
        links: Links,
        weights: Sequence[float],
        profiled_us: Sequence[float] = (),
    ) -> None:
        self.costs = costs
        self.links = links
        self.weights = tuple(weights)
        self._profiled_us = tuple(profiled_us)
        self._untimed = frozenset(key for key, found in costs.items() if all(cost.alone_us == 0 for cost in found))

    def is_unknown(self, key: int) -> bool:
        """Whether nothing is known of what a layer takes."""
        return key not in self.costs or key in self._untimed

    def layers_us(self, sparse: AbstractSet[int], case: int) -> float:
        """Time of all layers at one case, microseconds."""
        return sum(self._layer_us(key, sparse, case) for key in self.costs)

    def foretell(self, sparse: AbstractSet[int], case: int, dense_us: float) -> float:
        """What the whole model takes, in microseconds, where it takes ``dense_us`` with all layers dense."""
        layers_us = self.layers_us(frozenset(), case)
        if self._profiled_us:
            scale = dense_us / self._profiled_us[case]
        else:
            # Layers may take longer one by one than together, which wake threads for each: then they tell shares.
            scale = min(1.0, dense_us / layers_us) if layers_us > 0 else 1.0
        return dense_us - scale * (layers_us - self.layers_us(sparse, case))

    def total(self, sparse: AbstractSet[int]) -> float:
        """Weighted sum over the cases."""
        return sum(weight * self.layers_us(sparse, case) for case, weight in enumerate(self.weights))

    def choose(self, fixed: AbstractSet[int] = frozenset()) -> frozenset[int]:
        """The layers that had best run sparse.

        Starts from no layer, and from every layer that wins alone; changes single layers as long as that helps; and
        takes the better of the two.

        Args:
            fixed: layers that are sparse anyhow.
        """
        alone = frozenset(key for key in self.costs if self._wins_alone(key))
        return min((self._improve(start | fixed, fixed) for start in (frozenset[int](), alone)), key=self.total)

    def gain(self, key: int, sparse: AbstractSet[int]) -> float:
        """What a sparse layer saves, weighted, the others being as they are."""
        return self.total(sparse - {key}) - self.total(sparse)

    def _wins_alone(self, key: int) -> bool:
        return (
            all(math.isfinite(cost.sparse_us) for cost in self.costs[key])
            and sum(
                weight * (cost.alone_us * (1 - MARGIN) - cost.sparse_us)
                for weight, cost in zip(self.weights, self.costs[key], strict=True)
            )
            > 0
        )

    def _improve(self, start: frozenset[int], fixed: AbstractSet[int]) -> frozenset[int]:
        chosen = start
        for _ in range(_MAX_SWEEPS):
            before = chosen
            for key in self.costs:
                if key in fixed | self._untimed or any(math.isinf(cost.sparse_us) for cost in self.costs[key]):
                    continue
                margin = MARGIN * sum(w * cost.dense_us for w, cost in zip(self.weights, self.costs[key], strict=True))
                with_it, without = chosen | {key}, chosen - {key}
                chosen = with_it if self._local(key, with_it) + margin < self._local(key, without) else without
            if chosen == before:
                break
        return chosen

    def _local(self, key: int, sparse: AbstractSet[int]) -> float:
        """The part of the total that depends on one layer's choice."""
        around = {key, *self.links.before[key], *self.links.behind[key]}
        return sum(
            weight * self._layer_us(other, sparse, case) for case, weight in enumerate(self.weights) for other in around
        )

    def _layer_us(self, key: int, sparse: AbstractSet[int], case: int) -> float:
        cost, links = self.costs[key][case], self.links
        if key in sparse:
            # A dense neighbour that was not timed changes the layout of the same tensor, so it takes as long.
            is_changed = key in links.bound_before or links.before[key] & self._untimed - sparse
            before = cost.reorder_in_us if is_changed else 0.0
            is_changed = key in links.bound_behind or links.behind[key] & self._untimed - sparse
            behind = cost.reorder_out_us if is_changed else 0.0
            return cost.sparse_us + before + behind
        time = cost.dense_us
        if key in links.open_before or links.before[key] & sparse:
            time += cost.reorder_in_us
        if key in links.open_behind or links.behind[key] & sparse:
            time += cost.reorder_out_us
        return time


@dataclass(frozen=True, eq=False)
class Layouts:
    """What a whole model takes in every layout that it may run in; the fastest counts.

    Attributes:
        models: what its layers take, by the name of the layout; at least one.
        dense_us: what it takes as a whole, all layers dense, by the same names, at each case; infinite where it does
            not run so. Each case runs in some layout. With one layout none is needed.
    """

    models: Mapping[str, CostModel]
    dense_us: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def fastest(self, sparse: AbstractSet[int], case: int = 0) -> str:
        """The layout in which the model is foretold to be fastest, at one case."""
        if len(self.models) == 1:
            return next(iter(self.models))
        times_us = self._times_us(sparse, case)
        return min(times_us, key=times_us.__getitem__)

    def foretell(self, sparse: AbstractSet[int], case: int, dense_us: Mapping[str, float]) -> float:
        """What the whole model takes, in microseconds, where it takes ``dense_us`` dense, by the layouts that run."""
        return min(self.models[name].foretell(sparse, case, time_us) for name, time_us in dense_us.items())

    def choose(self, fixed: AbstractSet[int] = frozenset()) -> list[frozenset[int]]:
        """The layers that had best run sparse, first by the best layout, then by the others that say otherwise."""
        # One that does not run at some case leaves that case to the others.
        running = [name for name, times_us in self.dense_us.items() if all(map(math.isfinite, times_us))]
        choices = {self.models[name].choose(fixed) for name in running or self.models}
        return sorted(choices, key=lambda sparse: (self.total(sparse), sorted(sparse)))

    def total(self, sparse: AbstractSet[int]) -> float:
        """Weighted sum over the cases, each in its fastest layout."""
        (model, *others) = self.models.values()
        if not others:
            return model.total(sparse)
        return sum(weight * min(self._times_us(sparse, case).values()) for case, weight in enumerate(model.weights))

    def gain(self, key: int, sparse: AbstractSet[int]) -> float:
        """What a sparse layer saves, weighted, the others being as they are."""
        return self.total(sparse - {key}) - self.total(sparse)

    def _times_us(self, sparse: AbstractSet[int], case: int) -> dict[str, float]:
        """What the whole model takes at one case, in each layout that runs there."""
        return {
            name: self.models[name].foretell(sparse, case, times_us[case])
            for name, times_us in self.dense_us.items()
            if math.isfinite(times_us[case])
        }
