"""Every non-zero is used exactly once and every output written exactly once; and the checker sees where it is not."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_sparseconv.kernels.checker import CodeError, Launch, check_code, count_writes
from onnx_sparseconv.kernels.layer import Refusal, make_layer
from onnx_sparseconv.kernels.plan import candidate_plans, choose_plan
from onnx_sparseconv.kernels.source import make_linked_source, make_source
from tests.support.random_cases import cases
from tests.support.sparse_models import random_weight

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def make(shape=(12, 10, 3, 3), dtype=np.float32, group=1, stride=1, density=0.4):
    return make_layer(
        random_weight(shape, density),
        strides=(stride, stride),
        dilations=(1, 1),
        pads=(1, 1, 1, 1),
        group=group,
        element_type=np.dtype(dtype),
        activation=0,
        in_size=(14, 14),
    )


@PROPERTY
@given(st.data())
def test_any_layer_with_any_plan(data):
    case, x_shape = data.draw(cases(ranks=(1, 2)))
    geometry = case.geometry
    layer = make_layer(
        case.weight,
        strides=geometry.strides,
        dilations=geometry.dilations,
        pads=geometry.pads,
        group=geometry.group,
        element_type=case.dtype,
        activation=int(case.activation),
        in_size=data.draw(st.sampled_from([None, tuple(x_shape[2:])])),
    )
    if isinstance(layer, Refusal):
        assert geometry.auto_pad != "NOTSET"
        return
    for plan in candidate_plans(layer, data.draw(st.sampled_from([75, 80, 86, 90]))):
        check_code(layer, plan, make_source(layer, plan).whole)
        check_code(layer, plan, make_linked_source(layer, plan).whole)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (100, 300, 1, 3)])
def test_layers_of_real_size(shape, dtype):
    layer = make(shape, dtype, density=0.1)
    plan = choose_plan(layer, 90)
    assert plan.num_chunks > 1
    check_code(layer, plan, make_source(layer, plan).text)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_no_numbers(dtype):
    layer = make(dtype=dtype)
    layer.weight[0, 0, 0] = [np.nan, np.inf, -np.inf]
    plan = choose_plan(layer, 90)
    check_code(layer, plan, make_source(layer, plan).text)


def _swap(text):
    first, second = re.findall(r"0f[0-9A-F]{8}", text)[:2]
    return text.replace(first, "0f#", 1).replace(second, first, 1).replace("0f#", second, 1)


def _drop_second_constant(text):
    second = [*re.finditer(r"mov.b32 c[^;]*;\n", text)][1]
    return text[: second.start()] + text[second.end() :]


def _drop_first_chunk(text):
    return re.sub(r"asm volatile.*?\);\n        break;", "break;", text, count=1, flags=re.DOTALL)


_FLUSH = re.compile(r"add\.rn\.f16x2 %(\d+), %(\d+), %(\d+);\n")


def _go_on_after_a_flush(text):
    return re.sub(r"mul\.rn\.f16x2 %(\d+), (\w+), c;", r"fma.rn.f16x2 %\1, \2, c, %\1;", text, count=1)


def _flush_at_the_end(text):
    (flush, *_) = _FLUSH.findall(text)
    return text.replace('\n})"', '\nadd.rn.f16x2 %{}, %{}, %{};\n}})"'.format(*flush), 1)


def _flush_to_the_next(match):
    to, first, second = map(int, match.groups())
    return f"add.rn.f16x2 %{to + 1}, %{first + 1}, %{second};\n"


def _multiply_into_the_second_level(text):
    (to, *_), *_ = _FLUSH.findall(text)
    return re.sub(r"fma\.rn\.f16x2 %\d+, (\w+), c, %\d+;", rf"fma.rn.f16x2 %{to}, \1, c, %{to};", text, count=1)


def _replace_first_product(replacement):
    return lambda text: re.sub(r"fma.rn.f32 %0, (.*), %0;", replacement, text, count=1)


MUTATIONS = {
    "a product is missing": (np.float32, lambda t: re.sub(r"fma[^;]*;\n", "", t, count=1), "not used"),
    "a product is there twice": (np.float32, lambda t: re.sub(r"(fma[^;]*;\n)", r"\1\1", t, count=1), "more than once"),
    "weights are swapped": (np.float32, _swap, "the code has"),
    "another sum": (np.float32, _replace_first_product(r"fma.rn.f32 %1, \1, %1;"), "the code has"),
    "sums are mixed": (np.float32, _replace_first_product(r"fma.rn.f32 %0, \1, %1;"), "another sum"),
    "another address": (np.float32, lambda t: re.sub(r"\[%(\d+)\+0\]", r"[%\1+4]", t, count=1), "no word"),
    "a chunk is missing": (np.float32, _drop_first_chunk, "not used"),
    "halves are crossed": (np.float16, lambda t: t.replace("0x5432", "0x7610", 1), "holds no tap"),
    "a flush is missing": (np.float16, lambda t: re.sub(r"add.rn.f16x2[^;]*;\n", "", t, count=1), "a sum is lost"),
    "a flush is there twice": (np.float16, lambda t: _FLUSH.sub(r"\g<0>\g<0>", t, count=1), "added twice"),
    "a flushed sum goes on": (np.float16, _go_on_after_a_flush, "added twice"),
    "a flushed sum never restarts": (np.float16, _flush_at_the_end, "added twice"),
    "another second level": (np.float16, lambda t: _FLUSH.sub(_flush_to_the_next, t, count=1), "another one"),
    "products go to the second level": (np.float16, _multiply_into_the_second_level, "no sum of products"),
    "a constant is stale": (np.float16, _drop_second_constant, "the code has"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checker_sees(name):
    dtype, mutate, message = MUTATIONS[name]
    layer = make(dtype=dtype)
    plan = choose_plan(layer, 90)
    text = make_source(layer, plan).text
    check_code(layer, plan, text)
    changed = mutate(text)
    assert changed != text
    with pytest.raises(CodeError, match=message):
        check_code(layer, plan, changed)


def launch(**changes):
    values = {
        "num_splits": 1,
        "num_lanes": 3,
        "cluster_blocks": 1,
        "batch": 3,
        "out_h": 7,
        "out_w": 9,
        "num_groups": 6,
        "group_slots": 32,
        "num_slots": 189,
    }
    return Launch(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_splits": 2},
        {"num_groups": 3, "group_slots": 63, "num_lanes": 1},
        {"num_groups": 2, "group_slots": 128, "num_lanes": 2},
        {"num_groups": 2, "group_slots": 100, "num_lanes": 1},
        {"num_lanes": 6},
        {"num_lanes": 4, "cluster_blocks": 2},
        {"num_lanes": 4, "cluster_blocks": 2, "num_splits": 2},
        {"num_lanes": 8, "cluster_blocks": 2},  # more than there are groups
        {"num_groups": 189, "group_slots": 1, "num_lanes": 189},
    ],
)
def test_every_output_is_written_once(changes):
    plan = dataclasses.replace(choose_plan(make(), 90), threads=128, tile_channels=5, num_tiles=3)
    assert (count_writes(plan, launch(**changes)) == 1).all()


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_an_odd_number_of_halves_are_written_once(batch):
    plan = dataclasses.replace(choose_plan(make(dtype=np.float16), 90), threads=64)
    slots = batch * 7 * 5
    changes = {"batch": batch, "num_slots": slots, "group_slots": 64, "num_groups": -(-slots // 64), "num_lanes": 1}
    assert (count_writes(plan, launch(**changes)) == 1).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_groups": 5},
        {"group_slots": 31},
        {"cluster_blocks": 2, "num_splits": 2},  # three lanes are no pairs
        {"batch": 4},
        {"num_slots": 188},
        {"group_slots": 189, "num_groups": 1, "num_lanes": 1},  # more than threads
    ],
)
def test_a_launch_that_misses_outputs_is_seen(changes):
    plan = dataclasses.replace(choose_plan(make(), 90), threads=128)
    assert not (count_writes(plan, launch(**changes)) == 1).all()


def test_a_launch_that_goes_beyond_the_last_image_is_seen():
    plan = dataclasses.replace(choose_plan(make(), 90), threads=128)
    with pytest.raises(CodeError, match="writes image 3 of 3"):
        count_writes(plan, launch(num_slots=190))
