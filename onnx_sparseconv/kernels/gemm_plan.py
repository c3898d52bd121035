"""What the native library's plan for its gemm kernels takes, in cycles: `ChooseGemmLaunch` of gemm_plan.cc, which has
the same constants and explains them, without limits of memory but that of shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.warpgroup_plan import (
    LAUNCH_CYCLES,
    MOST_DENSE_BYTES,
    WarpgroupPlan,
    memory_cycles,
    out_size,
    round_up,
)

_ROWS, _CHANNELS, _WEIGHT_BYTES = 128, 64, 16 << 10
_BOXES_SEGMENTS, _PLANES_SEGMENTS, _FLOAT_SEGMENTS = (16, 32), (16, 25, 32), (8, 13, 14)
_READY_FLOAT_BOXES_SEGMENTS, _READY_FLOAT_PLANES_SEGMENTS, _MOST_READY_PLANE = (13, 14), (14,), 256
_BOX_POSITIONS, _BOX_ROWS, _BOX_SEGMENTS, _PIECE_POSITIONS = 64, 16, 8, 4
_HALF_BYTES, _FLOAT_BYTES, _VECTOR_BYTES, _SEGMENT_POSITIONS, _PACKED_PITCH = 2, 4, 16, 8, 16 * _CHANNELS + 16
_FLOAT_VECTOR = _VECTOR_BYTES // _FLOAT_BYTES
_PRODUCT_WARPS, _BARRIER_BYTES, _SHARED_UNIT = 8, 16, 128
_ROOM = (227 << 10) - 1024
_RAW_STAGES, _LEAST_STAGES, _MOST_RAW_BYTES = 2, 2, 1 << 16
_STEP, _BEYOND_BYTES = 2, 32
_GATHER_CYCLES, _STRIDED_PACK_CYCLES = 2250.0, 4000.0


class _Costs(NamedTuple):
    """Of staging a chunk, of storing a segment of a tile, and of a block to begin."""

    bytes_a_cycle: float
    least: float
    store: float
    begin: float


_BOX_COSTS, _PLANE_COSTS = _Costs(62.0, 430.0, 80.0, 2500.0), _Costs(31.0, 780.0, 80.0, 2500.0)
_FLOAT_BOX_COSTS, _STRIDED_COSTS = _Costs(36.0, 0.0, 72.0, 400.0), _Costs(24.0, 0.0, 72.0, 400.0)
_FLOAT_PLANE_COSTS = _Costs(36.0, 0.0, 160.0, 400.0)
_READY_COSTS, _READY_FLOAT_COSTS = _Costs(62.0, 430.0, 80.0, 2500.0), _Costs(62.0, 430.0, 72.0, 2500.0)


@dataclass(frozen=True)
class GemmPlan(WarpgroupPlan):
    """How the gemm kernels run a layer.

    Attributes:
        segments: of a tile, eight positions each.
        has_boxes: whether X is brought in boxes; else in whole planes.
        is_gathered: whether planes of X are brought together before.
        is_ready: whether X is made ready to be multiplied before.
    """

    segments: int = 0
    has_boxes: bool = False
    is_gathered: bool = False
    is_ready: bool = False


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
    if _is_half(layer):
        plans = [plan for segments in _BOXES_SEGMENTS for plan in _box_plans(call, segments)]
        ways = (_plane_plans, _ready_plane_plans)
        plans += [plan for segments in _PLANES_SEGMENTS for way in ways for plan in way(call, segments)]
    else:
        ways = (_float_box_plans, _float_plane_plans)
        plans = [plan for segments in _FLOAT_SEGMENTS for way in ways for plan in way(call, segments)]
        if call.step > 1:
            plans += [plan for segments in _READY_FLOAT_BOXES_SEGMENTS for plan in _ready_box_plans(call, segments)]
            plans += [plan for segments in _READY_FLOAT_PLANES_SEGMENTS for plan in _ready_plane_plans(call, segments)]
    return min(plans, key=lambda plan: plan.cycles, default=None)


def _is_half(layer: SparseLayer) -> bool:
    return bool(layer.element_type == np.float16)


def _has_gemm_form(layer: SparseLayer) -> bool:
    blocks = math.ceil(layer.out_channels / _ROWS) * math.ceil(layer.in_channels / _CHANNELS)
    return (
        layer.kernel_shape == (1, 1)
        and layer.strides in ((1, 1), (_STEP, _STEP))
        and not any(layer.pads)
        and layer.group == 1
        and blocks * _WEIGHT_BYTES <= MOST_DENSE_BYTES
    )


@dataclass(frozen=True)
class _Call:
    """What plans are made for; positions of a plane of Y."""

    layer: SparseLayer
    batch: int
    multiprocessors: int
    plane: int

    @property
    def step(self) -> int:
        """Of X, from one position to the next that is read."""
        return self.layer.strides[1]


def _box_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    if _HALF_BYTES * call.plane % _VECTOR_BYTES != 0:
        return
    boxes, of_position = segments // _BOX_SEGMENTS, _HALF_BYTES * _BOX_POSITIONS
    stage, output = boxes * _CHANNELS * of_position, boxes * _BOX_ROWS * of_position
    if _fits(stage, 0, output):
        places = math.ceil(call.batch * math.ceil(call.plane / _BOX_POSITIONS) / boxes)
        yield _plan(call, places, stage, segments, _BOX_COSTS, has_boxes=True, is_gathered=call.step > 1)


def _plane_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    images, of_plane = _images(call, segments), _HALF_BYTES * call.plane
    channels = (call.layer.in_channels, call.layer.out_channels)
    is_vectors = call.plane % _PIECE_POSITIONS == 0 and not any(of_plane * count % _VECTOR_BYTES for count in channels)
    if images == 0 or call.step > 1 or not is_vectors:
        return
    stage = _packed_bytes(segments)
    raw = _RAW_STAGES * (round_up(images * _CHANNELS * of_plane + _VECTOR_BYTES, _SHARED_UNIT) + _BARRIER_BYTES)
    if _fits(stage, raw, images * _BOX_ROWS * of_plane):
        places, of_chunk = math.ceil(call.batch / images), _CHANNELS * images * of_plane
        yield _plan(call, places, of_chunk, segments, _PLANE_COSTS)


def _images(call: _Call, segments: int) -> int:
    """Of a tile of whole planes."""
    return min(segments // math.ceil(call.plane / _SEGMENT_POSITIONS), call.batch)


def _ready_plane_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    images, of_plane = _images(call, segments), call.layer.element_type.itemsize * call.plane
    if images == 0 or call.plane > _MOST_READY_PLANE or of_plane * call.layer.out_channels % _VECTOR_BYTES != 0:
        return
    yield from _ready_plans(call, segments, images * _BOX_ROWS * of_plane, math.ceil(call.batch / images))


def _ready_box_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    if _FLOAT_BYTES * call.plane % _VECTOR_BYTES != 0:
        return
    boxes, positions = _float_boxes(call, segments)
    yield from _ready_plans(call, segments, _float_box_output(positions), call.batch * boxes, has_boxes=True)


def _ready_plans(
    call: _Call, segments: int, output: int, places: int, *, has_boxes: bool = False
) -> Iterator[GemmPlan]:
    if _fits(_packed_bytes(segments), 0, output):
        of_chunk = _CHANNELS * segments * _VECTOR_BYTES
        costs = _READY_COSTS if _is_half(call.layer) else _READY_FLOAT_COSTS
        yield _plan(call, places, of_chunk, segments, costs, has_boxes=has_boxes, is_ready=True)


def _float_boxes(call: _Call, segments: int) -> tuple[int, int]:
    """Of a plane, and positions of each."""
    boxes = math.ceil(call.plane / (segments * _SEGMENT_POSITIONS))
    return boxes, round_up(math.ceil(call.plane / boxes), _FLOAT_VECTOR)


def _float_box_output(positions: int) -> int:
    """Bytes of a warp."""
    return round_up(_BOX_ROWS * _FLOAT_BYTES * positions, _SHARED_UNIT)


def _float_box_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    (height, width), (in_h, in_w) = out_size(call.layer), call.layer.in_size or (0, 0)
    if _FLOAT_BYTES * call.plane % _VECTOR_BYTES != 0:
        return
    if call.step == 1:
        boxes, positions = _float_boxes(call, segments)
        of_channel = positions
    else:
        rows = min(segments // math.ceil(width / _SEGMENT_POSITIONS), height)
        while rows * width % _FLOAT_VECTOR != 0:
            rows -= 1
        if rows == 0 or in_h % _STEP != 0 or _STEP * in_w % _FLOAT_VECTOR != 0:
            return
        boxes, positions = math.ceil(height / rows), rows * width
        of_channel = rows * round_up(_STEP * width - 1, _FLOAT_VECTOR)
    of_chunk, output = _CHANNELS * _FLOAT_BYTES * of_channel, _float_box_output(positions)
    raw = round_up(of_chunk + (_BEYOND_BYTES if call.step > 1 else 0), _SHARED_UNIT)
    if _fits_floats(call, segments, raw, output):
        costs = _FLOAT_BOX_COSTS if call.step == 1 else _STRIDED_COSTS
        yield _plan(call, call.batch * boxes, of_chunk, segments, costs, has_boxes=True)


def _float_plane_plans(call: _Call, segments: int) -> Iterator[GemmPlan]:
    images, channels = _images(call, segments), (call.layer.in_channels, call.layer.out_channels)
    if call.step > 1 or images == 0 or any(_FLOAT_BYTES * call.plane * count % _VECTOR_BYTES for count in channels):
        return
    of_chunk = _CHANNELS * images * _FLOAT_BYTES * call.plane
    raw, output = round_up(of_chunk + _BEYOND_BYTES, _SHARED_UNIT), images * _BOX_ROWS * _FLOAT_BYTES * call.plane
    if _fits_floats(call, segments, raw, output):
        yield _plan(call, math.ceil(call.batch / images), of_chunk, segments, _FLOAT_PLANE_COSTS)


def _packed_bytes(segments: int) -> int:
    """Of a stage."""
    return round_up(segments * _PACKED_PITCH, _SHARED_UNIT)


def _fits(stage: int, raws: int, output: int, stages: int = _LEAST_STAGES) -> bool:
    fixed = raws + _PRODUCT_WARPS * (output + _BARRIER_BYTES)
    of_stage = stage + _BARRIER_BYTES + _WEIGHT_BYTES + _BARRIER_BYTES
    return fixed + stages * of_stage <= _ROOM


def _fits_floats(call: _Call, segments: int, raw: int, output: int) -> bool:
    stage, stages = _packed_bytes(segments), min(_chunks(call.layer), _LEAST_STAGES)
    return raw <= _MOST_RAW_BYTES and _fits(stage, _RAW_STAGES * (raw + _BARRIER_BYTES), output, stages)


def _chunks(layer: SparseLayer) -> int:
    return math.ceil(layer.in_channels / _CHANNELS)


def _plan(
    call: _Call,
    places: int,
    of_chunk: int,
    segments: int,
    costs: _Costs,
    *,
    has_boxes: bool = False,
    is_gathered: bool = False,
    is_ready: bool = False,
) -> GemmPlan:
    """Of so many tiles for 128 rows, and so many bytes of X a tile's chunk."""
    layer, itemsize, is_copied = call.layer, call.layer.element_type.itemsize, is_gathered or is_ready
    tiles = places * math.ceil(layer.out_channels / _ROWS)
    staged_chunk = max((of_chunk + _WEIGHT_BYTES) / costs.bytes_a_cycle, costs.least)
    of_tile = _chunks(layer) * staged_chunk + costs.store * segments
    staged = math.ceil(tiles / min(tiles, call.multiprocessors)) * of_tile
    of_position = _HALF_BYTES if is_copied else call.step * itemsize
    moved = call.batch * (of_position * layer.in_channels + itemsize * layer.out_channels) * call.plane
    cycles = costs.begin + math.hypot(memory_cycles(moved, call.multiprocessors), staged)
    if is_copied:
        read = itemsize * (math.prod(layer.in_size or ()) // layer.strides[0])
        copied = call.batch * layer.in_channels * (read + _HALF_BYTES * call.plane)
        cycles += _STRIDED_PACK_CYCLES if is_ready and call.step > 1 and _is_half(layer) else 0.0
        cycles += LAUNCH_CYCLES + _GATHER_CYCLES + memory_cycles(copied, call.multiprocessors)
    return GemmPlan(
        *(cycles, tiles, 1, LAUNCH_CYCLES),
        segments=segments,
        has_boxes=has_boxes,
        is_gathered=is_gathered,
        is_ready=is_ready,
    )
