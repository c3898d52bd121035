"""From profiles of the whole model to the costs of its layers."""

from __future__ import annotations

import math

import pytest

from onnx_sparseconv.tuner.in_place import LayerNames, ModelProfile, refine, worth_trying
from onnx_sparseconv.tuner.network import CostModel, LayerCost, Links

NAMES = {key: LayerNames(name, f"new {name}") for key, name in enumerate("abc")}
NOTHING = frozenset[int]()


def alone(*costs, weights=(1.0,)):
    """Layers that do not touch each other."""
    keys = range(len(costs))
    nothing = {key: frozenset[int]() for key in keys}
    by_case = {key: cost if isinstance(cost, list) else [cost] for key, cost in zip(keys, costs, strict=True)}
    return CostModel(by_case, Links(nothing, nothing, frozenset(), frozenset()), weights)


def profiles(before, before_us, after, after_us):
    """Of the dense and of the sparse model; layers are named as in the dense one."""
    return ModelProfile(before, before_us), ModelProfile({f"new {name}": us for name, us in after.items()}, after_us)


def refined(model, tried, *pairs, fixed=NOTHING):
    return refine(model, NAMES, tried, fixed, pairs)


def test_a_layer_costs_what_it_takes_in_place():
    pair = profiles({"a": 120, "b": 80}, 250, {"a": 40, "b": 100}, 190)
    model = refined(alone(LayerCost(100, 50), LayerCost(100, 90)), {0, 1}, pair)
    assert model.costs == {0: [LayerCost(120, 40)], 1: [LayerCost(80, 100)]}
    assert model.choose() == {0}
    # All nodes of the dense model take 250 us, of which the first layer saves 80.
    assert model.foretell({0}, 0, 500) == pytest.approx(500 * (250 - 80) / 250)


def test_what_no_layer_accounts_for_is_shared_by_dense_times():
    pair = profiles({"a": 150, "b": 50}, 250, {"a": 40, "b": 20}, 130)  # 20 us more between them
    model = refined(alone(LayerCost(100, 50), LayerCost(100, 50)), {0, 1}, pair)
    assert [cost.sparse_us for (cost,) in model.costs.values()] == pytest.approx([55, 25])
    assert model.foretell({0, 1}, 0, 1000) == pytest.approx(1000 * 130 / 250)


def test_changes_of_layout_are_told_apart_from_the_rest():
    """A layer alone in a model pays 20 us on either side, and in the profile, too."""
    ends = Links({0: NOTHING}, {0: NOTHING}, frozenset({0}), frozenset({0}))
    model = refined(
        CostModel({0: [LayerCost(60, 50, 20, 20)]}, ends, [1.0]), {0}, profiles({"a": 60}, 120, {"a": 50}, 70)
    )
    assert model.costs == {0: [LayerCost(60, 50, 20, 20)]}
    assert model.foretell({0}, 0, 120) == pytest.approx(70)


def test_layers_that_were_not_tried_keep_the_ratio_of_their_own_times():
    costs = (LayerCost(100, 50), LayerCost(100, 230, 40, 40), LayerCost(100, math.inf))
    pair = profiles({"a": 100, "b": 50, "c": 60}, 300, {"a": 40, "b": 50, "c": 60}, 240)
    model = refined(alone(*costs), {0}, pair)
    assert model.costs == {0: [LayerCost(100, 40)], 1: [LayerCost(50, 115, 20, 20)], 2: [LayerCost(60, math.inf)]}


def test_layers_that_were_not_found_or_timed_stay_as_they_are():
    costs = (LayerCost(100, 50), LayerCost(100, 50), LayerCost(0.0, 0.0))
    model = refined(alone(*costs), {0, 1}, profiles({"b": 80, "c": 7}, 200, {"b": 40}, 110))
    assert model.costs == {0: [costs[0]], 1: [LayerCost(80, 40)], 2: [costs[2]]}


@pytest.mark.parametrize(
    "pair",
    [
        profiles({"x": 90}, 98, {"a": 50}, 93),
        profiles({"a": 90}, 98, {"x": 50}, 93),
        profiles({"a": 0}, 0, {"a": 0}, 0),
        profiles({"a": 40}, 50, {"a": 30}, 49),
    ],
)
def test_what_a_profile_does_not_show_cannot_be_refined(pair):
    assert refined(alone(LayerCost(100, 50)), {0}, pair) is None


def test_times_that_the_profiler_cannot_tell_do_not_count():
    """Of a dense layer. A sparse one that is over at once has gained what the dense one took."""
    model = refined(
        alone(LayerCost(9, 4), LayerCost(40, 6)), {0, 1}, profiles({"a": 4, "b": 80}, 90, {"a": 1, "b": 0}, 6)
    )
    assert model.costs == {0: [LayerCost(9, 4)], 1: [LayerCost(80, 1)]}


def test_layers_that_are_sparse_anyhow_keep_their_gain_to_themselves():
    """The second was not timed alone: the budget was spent, say."""
    pair = profiles({"a": 100, "b": 100}, 200, {"a": 50, "b": 20}, 70)
    model = refined(alone(LayerCost(100, 50), LayerCost(0.0, 0.0)), {0}, pair, fixed={1})
    assert model.costs == {0: [LayerCost(100, 50)], 1: [LayerCost(100, 20)]}
    assert model.choose({1}) == {0, 1}
    assert model.foretell({0, 1}, 0, 200) == pytest.approx(70)
    assert model.foretell({1}, 0, 200) == pytest.approx(120)


def test_a_gain_that_is_not_shown_is_given_to_no_other():
    """The second is sparse anyhow and stands in a loop: its time is in the sum alone."""
    pair = profiles({"a": 300}, 3000, {"a": 310}, 800)
    assert refined(alone(LayerCost(300, 320)), {0}, pair, fixed={1}) is None
    assert refined(alone(LayerCost(300, 320), LayerCost(0.0, 0.0)), {0}, pair, fixed={1}) is None


def test_a_gain_around_layers_never_makes_them_cost_nothing():
    model = refined(alone(LayerCost(100, 50)), {0}, profiles({"a": 100}, 1000, {"a": 50}, 10))
    assert model.costs == {0: [LayerCost(100, 25)]}


def test_every_case_has_its_own_profiles():
    costs = [LayerCost(100, 50), LayerCost(200, 100)]
    pairs = (profiles({"a": 100}, 100, {"a": 60}, 60), profiles({"a": 300}, 400, {"a": 100}, 200))
    model = refined(alone(costs, weights=(1.0, 0.5)), {0}, *pairs)
    assert model.costs == {0: [LayerCost(100, 60), LayerCost(300, 100)]}
    assert [model.foretell({0}, case, 100) for case in (0, 1)] == pytest.approx([60, 50])


def test_what_cannot_gain_is_not_tried():
    costs = alone(
        [LayerCost(100, 200), LayerCost(100, 10)],
        [LayerCost(100, 200), LayerCost(100, 60)],
        [LayerCost(100, math.inf), LayerCost(100, 10)],
        weights=(1.0, 1.0),
    )
    assert worth_trying(costs) == {0}
    assert worth_trying(alone(LayerCost(0.0, 0.0))) == set()
    # Dense pays for layouts beside a sparse neighbour.
    assert worth_trying(alone(LayerCost(60, 120, 20, 20))) == {0}
