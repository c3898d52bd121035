"""From the times of layers to a choice for all of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_sparseconv.tuner.candidates import DenseCandidate, SparseCandidate
from onnx_sparseconv.tuner.database import LayerTimes
from onnx_sparseconv.tuner.layouts import layouts_of
from onnx_sparseconv.tuner.network import CostModel, LayerCost, Layouts, Links, find_links, layer_cost
from tests.support import architectures
from tests.support.odd_models import conv, model, pruned, tensor, value
from tests.tuner.test_pieces import Cutter, nodes

SPARSE = SparseCandidate()
CANDIDATES = (DenseCandidate(), SPARSE)
(BLOCKED,) = layouts_of("cpu")
UNTIMED = LayerCost(0.0, 0.0)


def chain(costs, weights=(1.0,)):
    """Layers one behind the other, between what is no layer; each has one cost or one a case."""
    last = len(costs) - 1
    links = Links(
        {i: frozenset({i - 1} if i else ()) for i in range(len(costs))},
        {i: frozenset({i + 1} if i < last else ()) for i in range(len(costs))},
        frozenset({0}),
        frozenset({last}),
    )
    by_case = {i: cost if isinstance(cost, list) else [cost] for i, cost in enumerate(costs)}
    return CostModel(by_case, links, weights)


def test_the_faster_wins():
    costs = [LayerCost(100, 50), LayerCost(100, 150), LayerCost(100, math.inf)]
    assert chain(costs).choose() == {0}


def test_less_than_the_margin_is_noise():
    assert chain([LayerCost(100, 99)]).choose() == set()
    assert chain([LayerCost(100, 97)]).choose() == {0}


def test_layouts_that_neighbours_save_are_not_held_against_dense():
    """Alone every dense layer loses 40 us to layouts; in a row of dense layers only the ends do."""
    lone, row = [LayerCost(60, 75, 20, 20)], [LayerCost(60, 75, 20, 20)] * 5
    assert chain(lone).choose() == {0}
    assert chain(row).choose() in (set(), {0, 4}, {0}, {4})
    assert chain(row).total(frozenset()) == 5 * 60 + 40


def test_a_dense_layer_among_sparse_ones_pays_for_layouts():
    costs = [LayerCost(100, 10), LayerCost(60, 75, 20, 20), LayerCost(100, 10)]
    assert chain(costs).choose() == {0, 1, 2}


def test_a_dense_neighbour_that_was_not_timed_costs_what_the_layer_itself_would():
    model = chain([UNTIMED, LayerCost(60, 55, 20, 20), UNTIMED])
    assert model.layers_us(frozenset({1}), 0) == 55 + 40
    assert model.choose() == set()
    assert model.choose(frozenset({0, 2})) == {0, 1, 2}


def test_layers_that_were_not_timed_are_never_chosen():
    costs = [UNTIMED, LayerCost(100, 10, 20, 20), UNTIMED, LayerCost(100, 90, 5, 5)]
    assert chain(costs).choose() <= {1, 3}


def test_every_case_counts_by_its_share():
    """A layer that gains 50 of 100 us at one case and loses 300 of 10,000 at the other is worth it."""
    costs = [[LayerCost(100, 50), LayerCost(10_000, 10_300)]]
    assert chain(costs, weights=(1 / 100, 1 / 10_000)).choose() == {0}
    assert chain(costs, weights=(1.0, 1.0)).choose() == set()


TIMES = st.floats(1, 100)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(LayerCost, TIMES, TIMES, st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=7))
def test_the_choice_is_never_worse_than_all_dense_and_close_to_the_best(costs):
    model = chain(costs)
    every = itertools.chain.from_iterable(itertools.combinations(range(len(costs)), n) for n in range(len(costs) + 1))
    best = min(model.total(frozenset(choice)) for choice in every)
    chosen = model.total(model.choose())
    slack = 0.02 * sum(cost.dense_us for cost in costs)
    assert chosen <= model.total(frozenset()) + slack
    assert chosen <= 1.35 * best + slack


def test_the_cost_of_a_layer():
    cost = layer_cost(LayerTimes({"dense": 100.0, "sparse": 70.0}, {}, 10.0, 20.0), CANDIDATES, SPARSE, BLOCKED)
    assert cost == LayerCost(70, 70, 10, 20)
    assert cost.alone_us == 100
    many = layer_cost(LayerTimes({"dense": 100.0, "sparse": 70.0}, {}, 100.0, 300.0), CANDIDATES, SPARSE, BLOCKED)
    assert (many.dense_us, many.alone_us) == (50, 100)
    cannot = layer_cost(LayerTimes({"dense": 100.0, "sparse": math.inf}, {"sparse": "no"}), CANDIDATES, None, BLOCKED)
    assert math.isinf(cannot.sparse_us)


def links_of(proto, *, channels_last=False):
    cutter = Cutter(proto)
    regions = {id(region.site.node): region for region in cutter.regions}
    names = {key: region.site.name for key, region in regions.items()}
    links = find_links(regions, channels_last=channels_last)
    bound = ({names[key] for key in links.bound_before}, {names[key] for key in links.bound_behind})
    return (
        {(names[a], names[b]) for b, before in links.before.items() for a in before},
        {(names[a], names[b]) for a, behind in links.behind.items() for b in behind},
        {names[key] for key in links.open_before},
        {names[key] for key in links.open_behind},
        *bound,
    )


def test_links_go_through_what_leaves_the_layout_alone():
    weights = [tensor(pruned(), "W"), tensor(pruned((8, 8, 3, 3)), "V"), tensor(pruned((8, 16, 3, 3)), "U")]
    proto = model(
        [
            conv(out="a", name="first"),
            *nodes(("MaxPool", "a", "p", {"kernel_shape": [1, 1]})),
            conv("V", source="p", out="b", name="second"),
            *nodes(("Concat", "b p", "both", {"axis": 1})),
            conv("U", source="both", out="c", name="third"),
            *nodes(("Transpose", "c", "Y", {})),
        ],
        weights,
    )
    before, behind, open_before, open_behind, *bound = links_of(proto)
    assert before == behind == {("first", "second"), ("first", "third"), ("second", "third")}
    assert (open_before, open_behind) == ({"first"}, {"third"})
    assert bound == [set(), set()]


def test_with_the_channels_last_pools_and_the_models_own_transposes_have_the_layout_of_dense_layers():
    weights = [tensor(pruned(), "W"), tensor(pruned((8, 8, 3, 3)), "V")]
    proto = model(
        [
            *nodes(("Transpose", "X", "x", {"perm": [0, 3, 1, 2]})),
            conv(source="x", out="a", name="first"),
            *nodes(("AveragePool", "a", "p", {"kernel_shape": [1, 1]}), ("Sigmoid", "p", "s", {})),
            conv("V", source="s", out="b", name="second"),
            *nodes(("Transpose", "b", "Y", {"perm": [0, 2, 1, 3]})),
        ],
        weights,
        [value("X", (2, 6, 6, 16))],
    )
    before, behind, open_before, open_behind, bound_before, bound_behind = links_of(proto, channels_last=True)
    assert before == behind == set()
    assert (open_before, open_behind) == (set(), {"second"})
    assert (bound_before, bound_behind) == ({"first", "second"}, {"first"})


@pytest.mark.parametrize(
    ("behind", "is_bound"),
    [
        (("Transpose", "a", "Y", {"perm": [0, 2, 3, 1]}), True),
        (("Transpose", "a", "Y", {"perm": [0, 3, 1, 2]}), False),
        (("GlobalAveragePool", "a", "Y", {}), True),
        (("BatchNormalization", "a k k k k", "Y", {}), False),  # one with the layer itself
        (("Conv", "a a", "Y", {}), True),  # no layer: its weight is only known at run time
        (("Softmax", "a", "Y", {}), False),
    ],
)
def test_what_is_bound_to_the_layout_of_dense_layers(behind, is_bound):
    weights = [tensor(pruned(), "W"), tensor(np.ones(8, np.float32), "k")]
    found = links_of(model([conv(out="a", name="layer"), *nodes(behind)], weights), channels_last=True)
    assert found[-1] == ({"layer"} if is_bound else set())


def test_a_sparse_layer_beside_what_is_bound_to_a_layout_changes_it():
    nobody = {0: frozenset[int]()}
    links = Links(nobody, nobody, frozenset(), frozenset(), frozenset({0}), frozenset({0}))
    model = CostModel({0: [LayerCost(100, 50, 7, 20)]}, links, (1.0,))
    assert model.layers_us(frozenset(), 0) == 100
    assert model.layers_us(frozenset({0}), 0) == 50 + 7 + 20


@pytest.mark.parametrize("make", [architectures.resnet, architectures.densenet])
def test_links_are_the_same_in_both_directions(make):
    before, behind, *_ = links_of(make())
    assert before == behind
    assert before


def in_layouts(first, last, dense_us):
    return Layouts({"default": chain(first), "nhwc": chain(last)}, {"default": [dense_us[0]], "nhwc": [dense_us[1]]})


def test_a_layer_that_gains_in_one_layout_may_lose_in_the_one_that_suits_the_model():
    """By itself each gains; with the channels last dense is faster still, but for changes around sparse layers."""
    first, last = [LayerCost(100, 75)] * 3, [LayerCost(50, 75, 20, 20)] * 3
    model = in_layouts(first, last, (350, 230))
    assert model.fastest(frozenset()) == model.fastest({0, 1, 2}) == "nhwc"
    assert model.choose()[0] == set()
    assert model.choose()[1] == {0, 1, 2}
    assert model.foretell({0, 1, 2}, 0, {"default": 350.0}) == 350 - 75
    assert model.foretell({0, 1, 2}, 0, {"default": 350.0, "nhwc": 230.0}) == 230 + 3 * 25 - 40
    assert model.foretell({1}, 0, {"nhwc": 230.0}) == 230 + 25 + 40
    # Where the rest of the model does not care, sparse layers and the model's own layout are the best of all.
    assert in_layouts(first, last, (350, 340)).choose()[0] == {0, 1, 2}
    assert in_layouts(first, last, (350, 340)).fastest({0, 1, 2}) == "default"


def test_what_a_layer_gains_is_counted_in_the_fastest_layout():
    model = in_layouts([LayerCost(100, 40)], [LayerCost(60, 40, 5, 5)], (300, 290))
    assert model.total(frozenset()) == 290
    assert model.total({0}) == 240
    assert model.gain(0, frozenset({0})) == 50


def test_a_layout_that_does_not_run_counts_for_nothing():
    model = in_layouts([LayerCost(100, 40)], [LayerCost(100, 40, 5, 5)], (300, math.inf))
    assert model.fastest(frozenset()) == model.fastest({0}) == "default"
    assert model.choose() == [{0}]


def test_each_case_runs_in_its_own_layout():
    costs = [[LayerCost(100, 40), LayerCost(100, 40)]]
    models = {"default": chain(costs, (1.0, 1.0)), "nhwc": chain(costs, (1.0, 1.0))}
    split = Layouts(models, {"default": [300, math.inf], "nhwc": [math.inf, 290]})
    assert [split.fastest(frozenset(), case) for case in (0, 1)] == ["default", "nhwc"]
    assert split.total(frozenset()) == 590
    assert split.gain(0, frozenset({0})) == 120
    assert split.choose() == [{0}]


def test_a_layer_without_a_time_in_a_layout_costs_what_it_does_in_another():
    default, last = layouts_of("cuda")
    candidates = (DenseCandidate(default.dense), DenseCandidate(last.dense), SPARSE)
    times = LayerTimes({default.dense: 100.0, last.dense: math.inf, "sparse": 70.0}, {}, 10.0, 20.0)
    assert layer_cost(times, candidates, SPARSE, default) == LayerCost(100, 70)
    assert layer_cost(times, candidates, SPARSE, last) == LayerCost(70, 70, 10, 20)
    both = LayerTimes({default.dense: 100.0, last.dense: 80.0, "sparse": 70.0}, {}, 10.0, 20.0)
    assert layer_cost(both, candidates, SPARSE, default) == LayerCost(100, 70)
    assert layer_cost(both, candidates, SPARSE, last) == LayerCost(50, 70, 10, 20)
