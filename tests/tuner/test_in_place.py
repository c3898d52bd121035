"""From profiles of the whole model to the costs of its layers."""

from __future__ import annotations

import math

import pytest

from onnx_sparseconv.tuner.in_place import ModelProfile, refine, worth_trying
from onnx_sparseconv.tuner.network import CostModel, LayerCost, Links

NAMES = {0: "a", 1: "b", 2: "c"}


def alone(*costs, weights=(1.0,)):
    """Layers that do not touch each other."""
    keys = range(len(costs))
    nothing = {key: frozenset[int]() for key in keys}
    by_case = {key: cost if isinstance(cost, list) else [cost] for key, cost in zip(keys, costs, strict=True)}
    return CostModel(by_case, Links(nothing, nothing, frozenset(), frozenset()), weights)


def test_a_layer_costs_what_it_takes_in_place():
    model = refine(
        alone(LayerCost(100, 50), LayerCost(100, 90)),
        NAMES,
        {0, 1},
        [(ModelProfile({"a": 120, "b": 80}, 250), ModelProfile({"a": 40, "b": 100}, 190))],
    )
    assert [costs[0] for costs in model.costs.values()] == [LayerCost(120, 40), LayerCost(80, 100)]
    assert model.choose() == {0}
    # All nodes of the dense model take 250 us, of which the first layer saves 80.
    assert model.foretell({0}, 0, 500) == pytest.approx(500 * (250 - 80) / 250)


def test_what_no_layer_accounts_for_is_shared_by_dense_times():
    before, after = ModelProfile({"a": 150, "b": 50}, 250), ModelProfile({"a": 40, "b": 20}, 130)  # 20 us more between
    model = refine(alone(LayerCost(100, 50), LayerCost(100, 50)), NAMES, {0, 1}, [(before, after)])
    assert [costs[0].sparse_us for costs in model.costs.values()] == pytest.approx([55, 25])
    assert model.foretell({0, 1}, 0, 1000) == pytest.approx(1000 * 130 / 250)


def test_changes_of_layout_are_told_apart_from_the_rest():
    """Alone a layer pays 20 us on either side, and between layers that are no neighbours' it always does."""
    ends = Links({0: frozenset()}, {0: frozenset()}, frozenset({0}), frozenset({0}))
    model = refine(
        CostModel({0: [LayerCost(60, 50, 20, 20)]}, ends, [1.0]),
        NAMES,
        {0},
        [(ModelProfile({"a": 60}, 120), ModelProfile({"a": 50}, 70))],
    )
    assert model.costs[0] == [LayerCost(60, 50, 20, 20)]
    assert model.foretell({0}, 0, 120) == pytest.approx(70)


def test_layers_that_were_not_tried_keep_the_ratio_of_their_own_times():
    model = refine(
        alone(LayerCost(100, 50), LayerCost(100, 200), LayerCost(100, math.inf)),
        NAMES,
        {0},
        [(ModelProfile({"a": 100, "b": 50, "c": 10}, 200), ModelProfile({"a": 40, "b": 50, "c": 10}, 140))],
    )
    assert [costs[0].sparse_us for costs in model.costs.values()] == [40, 100, math.inf]


def test_layers_that_were_not_found_or_timed_stay_as_they_are():
    costs = (LayerCost(100, 50), LayerCost(0.0, 0.0))
    model = refine(alone(*costs), NAMES, {0}, [(ModelProfile({"b": 7}, 200), ModelProfile({}, 150))])
    assert [costs[0] for costs in model.costs.values()] == list(costs)


def test_times_that_the_profiler_cannot_tell_do_not_count():
    costs = (LayerCost(9, 4), LayerCost(100, 50))
    model = refine(
        alone(*costs), NAMES, {0}, [(ModelProfile({"a": 8, "b": 90}, 98), ModelProfile({"a": 1, "b": 90}, 93))]
    )
    assert model.costs == {0: [costs[0]], 1: [LayerCost(90, 45)]}
    tiny = alone(LayerCost(1.2, 0.7))
    assert refine(tiny, NAMES, {0}, [(ModelProfile({"a": 0.0}, 0.0), ModelProfile({"a": 0.0}, 0.0))]) is tiny


def test_a_gain_around_layers_never_makes_them_cost_nothing():
    before, after = ModelProfile({"a": 100}, 1000), ModelProfile({"a": 50}, 10)
    model = refine(alone(LayerCost(100, 50)), NAMES, {0}, [(before, after)])
    assert model.costs[0] == [LayerCost(100, 5)]


def test_every_case_has_its_own_profiles():
    costs = [LayerCost(100, 50), LayerCost(200, 100)]
    pairs = [
        (ModelProfile({"a": 100}, 100), ModelProfile({"a": 60}, 60)),
        (ModelProfile({"a": 300}, 400), ModelProfile({"a": 100}, 200)),
    ]
    model = refine(alone(costs, weights=(1.0, 0.5)), NAMES, {0}, pairs)
    assert model.costs[0] == [LayerCost(100, 60), LayerCost(300, 100)]
    assert [model.foretell({0}, case, 100) for case in (0, 1)] == pytest.approx([60, 50])


def test_what_cannot_gain_is_not_tried():
    costs = alone(
        [LayerCost(100, 120), LayerCost(100, 10)],
        [LayerCost(100, 10), LayerCost(100, 130)],
        [LayerCost(100, math.inf), LayerCost(100, 10)],
        weights=(1.0, 1.0),
    )
    assert worth_trying(costs) == {0}
    assert worth_trying(alone(LayerCost(0.0, 0.0))) == set()
    # Dense pays for layouts beside a sparse neighbour.
    assert worth_trying(alone(LayerCost(60, 120, 20, 20))) == {0}
