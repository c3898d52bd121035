"""Times of layers where they stand: from profiles of the model as a whole, once dense and once with sparse layers.

A layer that is timed by itself finds its weights and its input in the caches and its threads awake; in a model it does
not. And what lies between layers (pooling, concatenation, changes of the memory layout) takes longer or shorter beside
sparse ones, which no layer's own time shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass, replace

from onnx_sparseconv.tuner.network import CostModel, LayerCost

# Layers that are slower than dense by more than this, by themselves, are not tried in place.
_MAX_SLOWDOWN = 1.25
# ONNX Runtime's profiler counts whole microseconds, and takes about one for every node: shorter layers stay as they are
# alone.
_RESOLUTION_US = 1.0
_MIN_US = 50.0
# Of its time in place, a sparse layer's own is at least this share, whatever is gained around it.
_LEAST_SHARE = 0.5


@dataclass(frozen=True)
class ModelProfile:
    """Where the time of one run of a whole model goes, in microseconds.

    Attributes:
        layers_us: by the name of the convolution, those that could be found.
        total_us: of all nodes.
    """

    layers_us: Mapping[str, float]
    total_us: float


@dataclass(frozen=True)
class LayerNames:
    """What a layer is called in profiles: a conversion names a node that has no name."""

    dense: str
    sparse: str


def worth_trying(alone: CostModel) -> frozenset[int]:
    """Layers that are to be sparse in the second profile: all that may gain there, by their times alone."""

    def total(times_us: Iterable[float]) -> float:
        return sum(weight * time_us for weight, time_us in zip(alone.weights, times_us, strict=True))

    timed = {key: costs for key, costs in alone.costs.items() if all(cost.alone_us > 0 for cost in costs)}
    return frozenset(
        key
        for key, costs in timed.items()
        if total(cost.sparse_us for cost in costs) <= _MAX_SLOWDOWN * total(cost.alone_us for cost in costs)
    )


def refine(
    alone: CostModel,
    names: Mapping[int, LayerNames],
    tried: AbstractSet[int],
    fixed: AbstractSet[int],
    profiles: Sequence[tuple[ModelProfile, ModelProfile]],
) -> CostModel | None:
    """The cost model by profiles of the whole model.

    Args:
        alone: by the layers' times alone.
        names: of all layers.
        tried: layers that were timed alone and are sparse in the second profile of each pair; others that were timed
            keep the ratio of their times alone.
        fixed: layers that are sparse there, too, and always will be; they were not timed alone.
        profiles: of the dense model and of one with sparse layers, at each case.

    Returns:
        By it, the layers differ between the two profiles by as much as all nodes do: what no layer accounts for is
        shared among those that were tried, by their dense times, but leaves each of them a share of its own time.
        None where the profiles show none of those that were tried, or not all that are fixed.
    """
    sparse = tried | fixed
    costs: dict[int, list[LayerCost]] = {key: [] for key in alone.costs}
    for case, (before, after) in enumerate(profiles):
        shown = {
            key: _in_place(at_case[case], names[key], before, after if key in sparse else None)
            for key, at_case in alone.costs.items()
        }
        # Where some layer that is sparse anyhow is not shown, in a subgraph say, its gain would seem to be the others'.
        if all(shown[key] is None for key in tried) or any(shown.get(key) is None for key in fixed):
            return None
        found = {key: cost or alone.costs[key][case] for key, cost in shown.items()}
        model = CostModel({key: [cost] for key, cost in found.items()}, alone.links, [1.0])
        told_us = model.layers_us(sparse, 0) - model.layers_us(frozenset(), 0)
        untold_us = after.total_us - before.total_us - told_us
        shared_us = sum(found[key].dense_us for key in tried)
        for key, cost in found.items():
            more_us = untold_us * cost.dense_us / shared_us if key in tried else 0.0
            costs[key].append(replace(cost, sparse_us=max(cost.sparse_us + more_us, _LEAST_SHARE * cost.sparse_us)))
    return CostModel(costs, alone.links, alone.weights, [before.total_us for before, _ in profiles])


def _in_place(
    alone: LayerCost, names: LayerNames, before: ModelProfile, after: ModelProfile | None
) -> LayerCost | None:
    """Costs of a layer at one case, None where it is not shown; ``after`` is None where it is dense in both models."""
    dense_us = before.layers_us.get(names.dense, 0.0)
    if dense_us < _MIN_US:
        return None
    if after is None:
        scale = dense_us / alone.dense_us if alone.alone_us > 0 else 0.0
        return LayerCost(*(scale * time_us for time_us in astuple(alone)))
    sparse_us = after.layers_us.get(names.sparse)
    return None if sparse_us is None else replace(alone, dense_us=dense_us, sparse_us=max(sparse_us, _RESOLUTION_US))
