"""Times of layers where they stand: from profiles of the model as a whole, once dense and once with sparse layers.

A layer that is timed by itself finds its weights and its input in the caches and its threads awake; in a model it does
not. And what lies between layers (pooling, concatenation, changes of the memory layout) takes longer or shorter beside
sparse ones, which no layer's own time shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from onnx_sparseconv.tuner.network import CostModel, LayerCost

# Layers that are slower than dense by more than this, by themselves, are not tried in place.
_MAX_SLOWDOWN = 1.25
# ONNX Runtime's profiler counts whole microseconds: shorter times than this say too little.
_MIN_US = 5.0
# Of its time in place, a sparse layer's own is at least this share, whatever is gained around it.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class ModelProfile:
    """Where the time of one run of a whole model goes, in microseconds.

    Attributes:
        layers_us: by the name of the convolution, those that could be found.
        total_us: of all nodes.
    """

    layers_us: Mapping[str, float]
    total_us: float


def worth_trying(alone: CostModel) -> frozenset[int]:
    """Layers that are to be sparse in the second profile: all that may gain there, by their times alone."""
    return frozenset(
        key
        for key, costs in alone.costs.items()
        if all(cost.alone_us > 0 and cost.sparse_us <= _MAX_SLOWDOWN * cost.alone_us for cost in costs)
    )


def refine(
    alone: CostModel,
    names: Mapping[int, str],
    sparse: AbstractSet[int],
    profiles: Sequence[tuple[ModelProfile, ModelProfile]],
) -> CostModel:
    """The cost model by profiles of the whole model.

    Args:
        alone: by the layers' times alone.
        names: of the layers in the profiles.
        sparse: layers that are sparse in the second profile of each pair; others keep the ratio of their times alone.
        profiles: of the dense model and of one with sparse layers, at each case.

    Returns:
        By it, the layers differ between the two profiles by as much as all nodes do: what no layer accounts for is
        shared among the sparse ones, by their dense times. The one given, where a model is too small to be profiled.
    """
    if any(before.total_us < _MIN_US for before, _ in profiles):
        return alone
    costs: dict[int, list[LayerCost]] = {key: [] for key in alone.costs}
    for case, (before, after) in enumerate(profiles):
        found = {
            key: _in_place(at_case[case], names[key], before, after if key in sparse else None)
            for key, at_case in alone.costs.items()
        }
        model = CostModel({key: [cost] for key, cost in found.items()}, alone.links, [1.0])
        told_us = model.layers_us(sparse, 0) - model.layers_us(frozenset(), 0)
        untold_us = after.total_us - before.total_us - told_us
        shared_us = sum(found[key].dense_us for key in sparse)
        for key, cost in found.items():
            more_us = untold_us * cost.dense_us / shared_us if key in sparse else 0.0
            costs[key].append(replace(cost, sparse_us=max(cost.sparse_us + more_us, _LEAST_SHARE * cost.sparse_us)))
    return CostModel(costs, alone.links, alone.weights, [before.total_us for before, _ in profiles])


def _in_place(cost: LayerCost, name: str, before: ModelProfile, after: ModelProfile | None) -> LayerCost:
    dense_us = before.layers_us.get(name, 0.0)
    if cost.alone_us == 0 or dense_us < _MIN_US:
        return cost
    if after is None:
        return replace(cost, dense_us=dense_us, sparse_us=cost.sparse_us * dense_us / cost.dense_us)
    sparse_us = after.layers_us.get(name, 0.0)
    return replace(cost, dense_us=dense_us, sparse_us=sparse_us) if sparse_us >= _MIN_US else cost
