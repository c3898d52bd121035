"""What the native library's plan for its gemm kernels takes, in cycles: `ChooseGemmLaunch` of gemm_plan.cc, which has
the same constants and explains them, without limits of memory but that of shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.warpgroup_plan import LAUNCH_CYCLES, WarpgroupPlan, memory_cycles, out_size, round_up

_ROWS, _CHANNELS, _WEIGHT_BYTES, _MOST_WEIGHT_BYTES = 128, 64, 16 << 10, 64 << 20
_BOXES_SEGMENTS, _PLANES_SEGMENTS = (16, 32), (16, 25, 32)
_BOX_POSITIONS, _BOX_ROWS, _BOX_SEGMENTS, _PIECE_BYTES = 64, 16, 8, 8
_HALF_BYTES, _VECTOR_BYTES, _SEGMENT_POSITIONS, _PACKED_PITCH = 2, 16, 8, 16 * _CHANNELS + 16
_PRODUCT_WARPS, _BARRIER_BYTES, _SHARED_UNIT = 8, 16, 128
_ROOM = (227 << 10) - 1024
_RAW_STAGES, _LEAST_STAGES = 2, 2
_BEGIN_CYCLES, _STORE_CYCLES, _GATHER_CYCLES = 2500.0, 80.0, 2250.0
# Bytes a cycle, and the least cycles, to stage a chunk.
_BOX_COSTS, _PLANE_COSTS = (62.0, 430.0), (31.0, 780.0)


@dataclass(frozen=True)
class GemmPlan(WarpgroupPlan):
    """How the gemm kernels run a layer.

    Attributes:
        segments: of a tile, eight positions each.
        has_boxes: whether X is brought in boxes; else in whole planes.
        is_gathered: whether planes of X are brought together before.
    """

    segments: int = 0
    has_boxes: bool = False
    is_gathered: bool = False


def plan_gemm(layer: SparseLayer, batch: int, multiprocessors: float) -> GemmPlan | None:
    """The plan of a layer that takes the fewest cycles; None where the kernels cannot run it.

    Args:
        layer: 1-D or 2-D, with a known input size.
        batch: images, at least 1.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    plane = math.prod(out_size(layer))
    if not _has_gemm_form(layer) or plane == 0 or 0 in (layer.in_size or ()):
        return None
    call = _Call(layer, batch, int(multiprocessors), plane)
    plans = [plan for segments in _BOXES_SEGMENTS for plan in _box_plans(call, segments)]
    plans += [plan for segments in _PLANES_SEGMENTS for plan in _plane_plans(call, segments)]
    return min(plans, key=lambda plan: plan.cycles, default=None)


def _has_gemm_form(layer: SparseLayer) -> bool:
    blocks = math.ceil(layer.out_channels / _ROWS) * math.ceil(layer.in_channels / _CHANNELS)
    return (
        layer.kernel_shape == layer.strides == (1, 1)
        and not any(layer.pads)
        and layer.group == 1
        and layer.element_type == np.float16
        and blocks * _WEIGHT_BYTES <= _MOST_WEIGHT_BYTES
    )


@dataclass(frozen=True)
class _Call:
    """What plans are made for; positions of a plane of Y."""

    layer: SparseLayer
    batch: int
    multiprocessors: int
    plane: int


def _box_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    if _HALF_BYTES * call.plane % _VECTOR_BYTES != 0:
        return
    boxes, of_position = segments // _BOX_SEGMENTS, _HALF_BYTES * _BOX_POSITIONS
    stage, output = boxes * _CHANNELS * of_position, boxes * _BOX_ROWS * of_position
    if _fits(stage, 0, output):
        places = math.ceil(call.batch * math.ceil(call.plane / _BOX_POSITIONS) / boxes)
        yield _plan(call, places, boxes * of_position, segments, has_boxes=True, is_gathered=False)


def _plane_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    of_image, whole = math.ceil(call.plane / _SEGMENT_POSITIONS), _HALF_BYTES * call.plane
    images = min(segments // of_image, call.batch)
    if images == 0 or whole * call.layer.out_channels % _VECTOR_BYTES != 0:
        return
    is_gathered = whole % _PIECE_BYTES != 0 or whole * call.layer.in_channels % _VECTOR_BYTES != 0
    of_plane = of_image * _VECTOR_BYTES if is_gathered else whole
    stage = round_up(segments * _PACKED_PITCH, _SHARED_UNIT)
    raw = _RAW_STAGES * (round_up(images * _CHANNELS * of_plane + _VECTOR_BYTES, _SHARED_UNIT) + _BARRIER_BYTES)
    if _fits(stage, raw, images * _BOX_ROWS * whole):
        places = math.ceil(call.batch / images)
        yield _plan(call, places, images * of_plane, segments, has_boxes=False, is_gathered=is_gathered)


def _fits(stage: int, raws: int, output: int) -> bool:
    fixed = raws + _PRODUCT_WARPS * (output + _BARRIER_BYTES)
    of_stage = stage + _BARRIER_BYTES + _WEIGHT_BYTES + _BARRIER_BYTES
    return fixed + _LEAST_STAGES * of_stage <= _ROOM


def _plan(call: _Call, places: int, of_channel: int, segments: int, *, has_boxes: bool, is_gathered: bool) -> GemmPlan:
    """Of so many tiles for 128 rows, and so many bytes of a tile's channel."""
    layer = call.layer
    tiles = places * math.ceil(layer.out_channels / _ROWS)
    bytes_a_cycle, least = _BOX_COSTS if has_boxes else _PLANE_COSTS
    of_chunk = max((_CHANNELS * of_channel + _WEIGHT_BYTES) / bytes_a_cycle, least)
    of_tile = math.ceil(layer.in_channels / _CHANNELS) * of_chunk + _STORE_CYCLES * segments
    staged = math.ceil(tiles / min(tiles, call.multiprocessors)) * of_tile
    moved = _HALF_BYTES * call.batch * (layer.in_channels + layer.out_channels) * call.plane
    cycles = _BEGIN_CYCLES + math.hypot(memory_cycles(moved, call.multiprocessors), staged)
    if is_gathered:
        gathered = 2 * _HALF_BYTES * call.batch * layer.in_channels * call.plane
        cycles += LAUNCH_CYCLES + _GATHER_CYCLES + memory_cycles(gathered, call.multiprocessors)
    return GemmPlan(cycles, tiles, 1, LAUNCH_CYCLES, segments=segments, has_boxes=has_boxes, is_gathered=is_gathered)
