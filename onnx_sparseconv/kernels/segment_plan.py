"""What the native library's plans for `cuda.segments` take, in cycles: `ChooseSegmentLaunch` of segment_plan.cc,
which has the same constants and explains them, for a weight of which is known how many zeros it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.plan import shared_bytes_of
from onnx_sparseconv.kernels.tensor_plan import TensorForm, TensorPlan, form_of, parts_to_try
from onnx_sparseconv.kernels.warpgroup_plan import memory_cycles

_POSITIONS, _SEGMENT_BYTES, _PLANE_UNIT, _QUARTERS, _HALF_BYTES = 8, 16, 4, 4, 2
_MAX_WARPS, _MIN_WARPS, _RESIDENT_WARPS, _WARP = 8, 4, 16, 32
_MAX_STAGES, _FLOAT_STAGES, _WARP_SEGMENTS = 4, 2, {64: 4, 32: 8}
_FLOAT_PIECES, _BATCH_PIECES, _PIECE_BYTES = 2, 4, 512
_RESERVED_BYTES, _LEAST_BYTES, _ENTRY_BYTES, _SUM_BYTES = 1024, 3072, 4, 512
_PRODUCT_CYCLES, _L2_BYTES_A_CYCLE, _PIECE_CYCLES = 24.5, 23.5, 29.0
_OUTPUT_CYCLES, _FLOAT_OUTPUT_CYCLES, _SHARE_CYCLES = 0.046, 0.226, 350.0
_CHUNK_CYCLES, _BATCH_CYCLES, _STEP_CYCLES, _TILE_CYCLES, _FLOAT_BLOCK_CYCLES = 774.0, 835.0, 790.0, 2640.0, 3530.0
_OVERLAP, _LAUNCH_AND_FIRST_CYCLES, _REDUCE_CYCLES, _REDUCE_PART_CYCLES = 0.27, 7000.0, 2000.0, 470.0


@dataclass(frozen=True)
class _Call:
    """What plans are made for."""

    layer: SparseLayer
    form: TensorForm
    max_shared_bytes: int
    batch: int
    multiprocessors: float

    @property
    def is_float(self) -> bool:
        return self.layer.element_type.itemsize > _HALF_BYTES

    @property
    def plane(self) -> int:
        return math.prod(self.layer.in_size or ())

    @property
    def segments(self) -> int:
        """Of all images."""
        return self.batch * math.ceil(self.plane / _POSITIONS)

    @property
    def warp_segments(self) -> int:
        return _WARP_SEGMENTS[self.form.tile_rows]

    @property
    def num_outputs(self) -> int:
        return self.batch * self.layer.out_channels * self.plane


@dataclass(frozen=True)
class _Tiling:
    """A tile of outputs, and who computes it."""

    warps_m: int
    runs: int
    warps_k: int
    stages: int = 2
    parts: int = 1

    @property
    def base_warps(self) -> int:
        """Those that have outputs of their own."""
        return self.warps_m * self.runs

    @property
    def warps(self) -> int:
        return self.base_warps * self.warps_k


def can_run_segments(layer: SparseLayer) -> bool:
    """Whether the kernel runs a layer, from sm_80 on: a convolution of planes as they are, of a known size."""
    return layer.is_pointwise and layer.in_size is not None and math.prod(layer.in_size) % _PLANE_UNIT == 0


def plan_segments(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> TensorPlan | None:
    """The plan of a layer that takes the fewest cycles; None where the kernel cannot run it.

    Args:
        layer: 1-D or 2-D; all its tensors begin at multiples of 16 bytes.
        architecture: 86 for sm_86.
        batch: images, at least 1.
        multiprocessors: of the GPU.
    """
    if not can_run_segments(layer) or 0 in (layer.in_size or ()):
        return None
    max_shared_bytes = shared_bytes_of(architecture)
    call = _Call(layer, form_of(layer, max_shared_bytes), max_shared_bytes, batch, multiprocessors)
    plans = (_plan(call, tiling) for tiling in _tilings(call))
    return min(plans, key=lambda plan: plan.cycles, default=None)


def _tilings(call: _Call) -> Iterator[_Tiling]:
    """All that shared memory has room for."""
    chunks = call.form.num_chunks
    counts = (1, 2, 4, 8)
    for first in (_Tiling(m, runs, k) for m in counts for runs in counts for k in counts):
        if first.warps_m >= 2 * call.form.tiles_per_group or not _MIN_WARPS <= first.warps <= _MAX_WARPS:
            continue
        for parts in parts_to_try(chunks, _blocks(call, first), call.multiprocessors):
            part_chunks = math.ceil(chunks / parts)
            max_stages = _FLOAT_STAGES if call.is_float else min(max(part_chunks, 2), _MAX_STAGES)
            resident = _resident_blocks(call, replace(first, parts=parts))
            for stages in range(2, max_stages + 1):
                tiling = replace(first, stages=stages, parts=parts)
                # Stages more are for nothing where they leave room for fewer blocks.
                if resident == 0 or _resident_blocks(call, tiling) != resident:
                    break
                yield tiling


def _row_blocks(call: _Call, tiling: _Tiling) -> int:
    """Of all groups."""
    return call.layer.group * math.ceil(call.form.tiles_per_group / tiling.warps_m)


def _tiles(call: _Call, tiling: _Tiling) -> int:
    """Of a row block."""
    return math.ceil(call.segments / (tiling.runs * call.warp_segments))


def _blocks(call: _Call, tiling: _Tiling) -> int:
    """Of one part of the chunks."""
    return _row_blocks(call, tiling) * _tiles(call, tiling)


def _resident_blocks(call: _Call, tiling: _Tiling) -> int:
    """Of a multiprocessor."""
    form = call.form
    input_bytes = form.chunk_channels * (tiling.runs * call.warp_segments + 1) * _SEGMENT_BYTES
    entries = tiling.warps_m * (math.ceil(form.num_chunks / tiling.parts) + 1)
    list_bytes = math.ceil(entries * _ENTRY_BYTES / _SEGMENT_BYTES) * _SEGMENT_BYTES
    kept_bytes = (tiling.warps - tiling.base_warps) * _SUM_BYTES * form.subtiles * call.warp_segments
    stages_bytes = tiling.stages * (input_bytes + tiling.warps_m * form.steps * form.step_bytes)
    shared_bytes = max(stages_bytes + list_bytes + kept_bytes, _LEAST_BYTES)
    return min(_RESIDENT_WARPS // tiling.warps, call.max_shared_bytes // (shared_bytes + _RESERVED_BYTES))


def _plan(call: _Call, tiling: _Tiling) -> TensorPlan:
    resident, rows, tiles = _resident_blocks(call, tiling), _row_blocks(call, tiling), _tiles(call, tiling)
    # A block of floats has one tile.
    runners = tiles if call.is_float else int(call.multiprocessors) * resident // (rows * tiling.parts)
    runners = min(max(runners, 1), tiles)
    blocks = rows * runners
    at_once = min(resident, math.ceil(blocks * tiling.parts / call.multiprocessors))
    turns = math.ceil(blocks * tiling.parts / (call.multiprocessors * resident))
    if not call.is_float:
        turns = math.ceil(tiles / runners)
    moved = call.layer.element_type.itemsize * (call.batch * call.layer.in_channels * call.plane + call.num_outputs)
    needs = (
        at_once * turns * _work(call, tiling),
        turns * _waits(call, tiling),
        memory_cycles(moved, call.multiprocessors),
    )
    cycles = _LAUNCH_AND_FIRST_CYCLES + max(needs) + _OVERLAP * (sum(needs) - max(needs))
    if tiling.parts > 1:
        num_bytes = (2 * tiling.parts + 1) * call.layer.element_type.itemsize * call.num_outputs
        cycles += _REDUCE_CYCLES + _REDUCE_PART_CYCLES * tiling.parts + memory_cycles(num_bytes, call.multiprocessors)
    return TensorPlan(cycles, blocks * tiling.parts)


def _shares(tiling: _Tiling) -> float:
    return _SHARE_CYCLES * (tiling.warps - tiling.base_warps)


def _work(call: _Call, tiling: _Tiling) -> float:
    """Of a multiprocessor, for a tile."""
    form, input_bytes = call.form, call.form.chunk_channels * tiling.runs * call.warp_segments * _SEGMENT_BYTES
    keeps_steps = not call.is_float and tiling.parts == 1 and tiling.stages % form.num_chunks == 0
    step_bytes = 0 if keeps_steps else tiling.warps_m * form.steps * form.step_bytes
    products = tiling.base_warps * form.steps * form.subtiles * call.warp_segments
    num_bytes = step_bytes + input_bytes * call.layer.element_type.itemsize / _HALF_BYTES
    pieces = 2 * input_bytes / _PIECE_BYTES if call.is_float else 0.0
    needs = (products * _PRODUCT_CYCLES / _QUARTERS, num_bytes / _L2_BYTES_A_CYCLE, pieces * _PIECE_CYCLES)
    outputs = tiling.base_warps * form.tile_rows * call.warp_segments * _POSITIONS
    of_outputs = (_FLOAT_OUTPUT_CYCLES if call.is_float else _OUTPUT_CYCLES) * outputs
    return of_outputs + math.ceil(form.num_chunks / tiling.parts) * max(needs) + _shares(tiling)


def _waits(call: _Call, tiling: _Tiling) -> float:
    """Of a block, one after the other, for a tile."""
    form = call.form
    arrival = _CHUNK_CYCLES / (tiling.stages - 1)
    if call.is_float:
        pieces = form.chunk_channels * tiling.runs * call.warp_segments * _FLOAT_PIECES
        arrival = _BATCH_CYCLES * math.ceil(pieces / (tiling.warps * _WARP * _BATCH_PIECES))
    chunk = _STEP_CYCLES * math.ceil(form.steps / tiling.warps_k) + arrival
    more = _FLOAT_BLOCK_CYCLES if call.is_float else 0.0
    return _TILE_CYCLES + math.ceil(form.num_chunks / tiling.parts) * chunk + _shares(tiling) + more
