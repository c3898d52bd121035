"""Choices of kernels find the plan that they were made of, and the most like it where that is gone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.kernels.compile import CompileOptions, compile_layers
from onnx_sparseconv.kernels.kernel_choice import (
    CSR,
    CSR_CHOSEN,
    KernelChoice,
    choice_of,
    find_plan,
    ranked_plans,
    sized,
)
from onnx_sparseconv.kernels.layer import Refusal
from onnx_sparseconv.kernels.plan import choose_plan, cost
from onnx_sparseconv.kernels.targets import resolve_targets
from tests.support.gpu_images import needs_nvrtc
from tests.support.sparse_layers import sparse_layer


def test_plans_are_ranked_by_the_cost_model():
    layer = sparse_layer()
    plans = ranked_plans(layer, 90)
    costs = [cost(layer, plan) for plan in plans]
    assert len(plans) > 3
    assert costs == sorted(costs)
    assert plans[0] == choose_plan(layer, 90)


def test_every_plan_is_found_again():
    layer = sparse_layer()
    for plan in ranked_plans(layer, 90):
        assert find_plan(layer, 90, choice_of(plan, layer)) == plan


def test_what_is_gone_is_replaced_by_what_is_most_like_it():
    layer = sparse_layer()
    plan = ranked_plans(layer, 90)[-1]
    other = dataclasses.replace(choice_of(plan, layer), chunk_channels=plan.chunk_channels + 1, threads=1)
    assert find_plan(layer, 90, other) == plan
    assert find_plan(layer, 90, dataclasses.replace(other, tile_channels=63)) == choose_plan(layer, 90)


def test_a_layer_of_open_size_gets_the_plan_of_the_size_that_was_timed():
    small = sparse_layer(size=(7, 9))
    choice = choice_of(ranked_plans(small, 90)[0], small)
    assert choice.in_size == (7, 9)
    is_open = dataclasses.replace(small, in_size=None)
    assert sized(is_open, choice).in_size == (7, 9)
    assert find_plan(sized(is_open, choice), 90, choice) == find_plan(small, 90, choice)
    # A model that knows better is asked.
    assert sized(sparse_layer(), choice).in_size == (28, 28)


def test_the_general_kernel_has_no_plan():
    assert find_plan(sparse_layer(), 90, CSR) == Refusal(CSR_CHOSEN)
    assert str(CSR) == "csr"
    assert str(KernelChoice("generated", 32, 24, 864)) == "generated 32x24x864"


def test_a_layer_that_no_plan_runs_is_refused():
    nothing = dataclasses.replace(sparse_layer(), weight=np.zeros((8, 8, 3, 3), np.float32))
    assert ranked_plans(nothing, 90) == []
    assert isinstance(find_plan(nothing, 90, KernelChoice("generated", 8)), Refusal)


@needs_nvrtc
def test_compiling_follows_the_choices(tmp_path):
    layer = sparse_layer(shape=(16, 8, 3, 3), density=0.01)
    plans = ranked_plans(layer, 90)
    choices = [{90: choice_of(plans[1], layer)}, {90: CSR}, {80: CSR}, {}]
    targets = resolve_targets(["sm_90"])
    made = compile_layers([("one", layer)] * 4, targets, CompileOptions(1, tmp_path), choices=choices)
    images = [outcome.image and outcome.image.plan for (outcome,) in made]
    assert images == [plans[1], None, plans[0], plans[0]]
    assert made[1][0].refusal == CSR_CHOSEN


@pytest.mark.parametrize("choices", [[{}], [{}, {}, {}]])
def test_choices_are_one_for_each_layer(tmp_path, choices):
    with pytest.raises(ValueError, match="zip"):
        compile_layers([("a", sparse_layer()), ("b", sparse_layer())], (), CompileOptions(1, tmp_path), choices=choices)
