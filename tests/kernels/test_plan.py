"""Plans keep to what the native library accepts and to what a GPU of their architecture has."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from onnx_sparseconv.kernels import plan as plan_module
from onnx_sparseconv.kernels.device_sources import read_device_sources
from onnx_sparseconv.kernels.layer import Refusal, make_layer
from onnx_sparseconv.kernels.plan import candidate_plans, choose_plan
from tests.support.sparse_models import random_weight

# Shared memory of a block, from NVIDIA's table of compute capabilities.
SHARED_BYTES = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


def make(shape, group=1, in_size=(14, 14), dtype=np.float32):
    return make_layer(
        random_weight(shape, 0.5),
        strides=(1, 1),
        dilations=(1, 1),
        pads=(1, 1, 1, 1),
        group=group,
        element_type=np.dtype(dtype),
        activation=0,
        in_size=in_size,
    )


@pytest.mark.parametrize(
    ("changes", "reads_apart"),
    [
        ({}, True),
        ({"in_size": (10, 10)}, True),
        ({"in_size": (9, 9)}, False),  # planes begin anywhere
        ({"in_size": (10, 10), "element_type": np.dtype(np.float16)}, False),
        ({"in_size": None}, False),
        ({"strides": (2, 2)}, False),
        ({"pads": (1, 1, 1, 1)}, False),
        ({"source_channels": ()}, False),
    ],
    ids=str,
)
def test_inputs_that_are_read_where_they_are(changes, reads_apart):
    layer = dataclasses.replace(make((32, 64, 1, 1)), pads=(0, 0, 0, 0), source_channels=(40, 8, 16))
    plans = list(candidate_plans(dataclasses.replace(layer, **changes), 90))
    assert plans
    for plan in plans:
        assert plan.source_begins == ((0, 40, 48, 64) if reads_apart else ())
        assert ("3 inputs" in str(plan)) == reads_apart


@pytest.mark.parametrize("in_size", [(0, 7), (7, 0)])
def test_an_empty_input_is_not_packed(in_size):
    plan = choose_plan(make((32, 64, 3, 3), in_size=in_size), 90)
    assert not plan.is_packed
    assert plan.channel_pitch > 0


@pytest.mark.parametrize("architecture", SHARED_BYTES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_stages_fit_in_shared_memory(architecture, dtype):
    plans = list(candidate_plans(make((32, 64, 3, 3), in_size=(200, 200), dtype=dtype), architecture))
    assert plans
    for plan in plans:
        static = 16 * plan.num_stages  # cuda/generated_conv.cuh: two barriers a stage
        assert plan.shared_bytes + static <= SHARED_BYTES[architecture] << 10


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "shape", [(8, 8, 7, 7), (16, 3, 7, 7), (4, 1, 5, 5), (64, 64, 3, 3), (32, 512, 3, 3), (8, 2048, 1, 1), (8, 4, 1, 1)]
)
def test_plans_are_what_the_library_accepts(shape, dtype):
    """As ``custom_ops/native/cuda/images.cc`` checks them."""
    layer = dataclasses.replace(make(shape, dtype=dtype), weight=np.ones(shape, np.float32))
    for architecture in (75, 80, 86, 90, 120):
        plans = list(candidate_plans(layer, architecture))
        if np.prod(shape[1:]) > 1000 and dtype == np.float16:
            assert choose_plan(layer, architecture) == Refusal("its sums have too many terms to be accurate in float16")
            continue
        assert plans
        for plan in plans:
            assert plan.threads % 32 == 0
            assert plan.threads >= 32
            assert plan.staging_threads in {0, 32}
            assert plan.staging_threads == 0 or architecture >= 90
            assert plan.threads + plan.staging_threads <= 1024
            assert plan.num_chunks == -(-plan.tile_in_channels // plan.chunk_channels)
            assert 1 <= plan.min_passes <= plan.num_chunks
            assert plan.min_passes == 1 or dtype == np.float16


@pytest.mark.parametrize(("out_channels", "group"), [(12, 3), (30, 5), (42, 14), (45, 15), (64, 64), (100, 2)])
def test_every_tile_finds_its_input_channels(out_channels, group):
    layer = make((out_channels, 2, 3, 3), group)
    plans = list(candidate_plans(layer, 90))
    assert plans
    for plan in plans:
        last_group = (plan.num_tiles - 1) * plan.tile_channels // layer.group_out_channels
        assert last_group * layer.group_in_channels + plan.tile_in_channels <= layer.in_channels


def test_a_layer_without_weights_says_so():
    layer = dataclasses.replace(make((8, 4, 3, 3)), weight=np.zeros((8, 4, 3, 3), np.float32))
    assert choose_plan(layer, 90) == Refusal("all its weights are zero")


@pytest.mark.parametrize("geometry", [{"strides": (1, 2**21)}, {"dilations": (2**21, 1)}, {"pads": (0, 0, 0, 2**30)}])
def test_what_does_not_fit_into_the_code_is_refused(geometry):
    whole = {"strides": (1, 1), "dilations": (1, 1), "pads": (0, 0, 0, 0), **geometry}
    weight = random_weight((8, 4, 1, 1), 0.5)
    layer = make_layer(weight, **whole, group=1, element_type=np.dtype(np.float32), activation=0)
    assert isinstance(layer, Refusal)
    assert str(2**20) in layer.reason


@pytest.mark.parametrize(("architecture", "size"), [(75, 224), (86, 512), (90, 1080)])
def test_wide_planes_do_not_take_threads(architecture, size):
    plan = choose_plan(make((32, 32, 3, 3), in_size=(size, size)), architecture)
    assert plan.threads >= 256
    assert plan.num_stages >= 2


def test_float16_planes_of_an_odd_size_stay_with_the_csr_kernel():
    """Pointwise ones: staged element by element, the generated kernel is the slower one."""
    layer = make((8, 8, 1, 1), in_size=(7, 7), dtype=np.float16)
    layer = dataclasses.replace(layer, pads=(0, 0, 0, 0))
    refusal = choose_plan(layer, 90)
    assert isinstance(refusal, Refusal)
    assert "odd size" in refusal.reason
    assert not isinstance(choose_plan(dataclasses.replace(layer, in_size=(8, 8)), 90), Refusal)


def test_as_much_static_shared_memory_is_left_as_kernels_may_take():
    (number,) = re.findall(r"kMaxStaticBytes = (\d+);", read_device_sources()["generated_conv.cuh"])
    assert int(number) == plan_module._STATIC_BYTES


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_block_fits_with_the_registers_that_its_threads_may_have(dtype):
    for plan in candidate_plans(make((128, 64, 3, 3), dtype=dtype, in_size=(56, 56)), 90):
        warps = -(-(plan.threads + plan.staging_threads) // 32)
        quarter = -(-warps // 4)  # warps of a quarter of a multiprocessor, which has 512 registers for each lane
        assert plan.max_registers % 8 == 0 or plan.max_registers == 255
        assert quarter * plan.max_registers <= 512
        assert quarter * (plan.max_registers + 8) > 512 or plan.max_registers == 255


@pytest.mark.parametrize(
    ("channels", "group", "size", "dtype", "has_warp"),
    [
        (48, 48, 14, np.float16, True),  # 8 planes or more in a tile
        (48, 48, 7, np.float32, True),
        (48, 48, 7, np.float16, False),  # odd columns
        (24, 4, 7, np.float32, False),  # 6 planes of 49 in a tile of one group
        (32, 4, 7, np.float32, True),
        (24, 1, 7, np.float32, True),
    ],
)
def test_one_warp_stages_what_can_be_copied_in_one_piece(channels, group, size, dtype, has_warp):
    layer = make((channels, channels // group, 3, 3), in_size=(size, size), dtype=dtype, group=group)
    assert [plan.staging_threads for plan in candidate_plans(layer, 80)] == [0] * len([*candidate_plans(layer, 80)])
    plan = choose_plan(layer, 90)
    assert plan.staging_threads == (32 if has_warp else 0)
