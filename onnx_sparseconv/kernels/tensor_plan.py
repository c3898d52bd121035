"""What the native library's plans for `cuda.tensor` take, in cycles: `ChooseTensorLaunch` of tensor_plan.cc, which has
the same constants and explains them, for a weight of which is known how many zeros it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.plan import shared_bytes_of
from onnx_sparseconv.kernels.warpgroup_plan import IMAGES, Eights, eights_of, memory_cycles, out_size

_WARP, _QUARTERS, _MAX_WARPS, _MAX_PRODUCT_WARPS, _MAX_PARTS = 32, 4, 12, 8, 16
_PIXEL_BYTES, _MAX_TILE_ROWS, _FEW_PRODUCT_WARPS, _STAGE_BYTES = 16, 8, 4, 1 << 17
_STAGING_WARPS, _MANY_STAGING_WARPS = (8, 4, 2), 8
_POSITIONS = {64: (7, 8), 32: (14, 16)}
_WIDE_POSITIONS, _SUBTILE_ROWS, _STEP_COLUMNS = 8, 16, 32
_WANTED_COLUMNS, _FEW_COLUMNS, _AMPLE_BYTES, _MAX_CHUNK_CHANNELS = 288, 144, 160 << 10, 64
_RESERVED_BYTES, _LEAST_BYTES, _UNIT_BYTES, _ENTRY_BYTES, _SUM_BYTES = 1024, 3072, 8, 8, 4
_UNITS, _WIDE_UNITS = 4, 2
_HALF_BYTES, _SECTOR_BYTES = 2, 32
_PRODUCT_CYCLES, _WIDE_FACTOR, _STEP_CYCLES, _SHARED_CYCLES, _SHARED_UNIT_CYCLES = 6.5, 1.65, 270.0, 1.3, 18.0
_UNIT_CYCLES, _L2_BYTES_A_CYCLE, _ROW_BYTES, _CHUNK_CYCLES, _OVERLAP = 350.0, 40.0, 76, 210.0, 0.06
_STRIDE_FACTOR, _LAUNCH_AND_FIRST_CYCLES, _BLOCK_CYCLES, _FLOAT_BLOCK_CYCLES = 1.36, 6500.0, 830.0, 4100.0
_OUTPUT_CYCLES, _SHARE_CYCLES, _STORED_BYTES_A_CYCLE, _FLOAT_BYTES_A_CYCLE = 0.22, 94.0, 10.25, 5.0
_REDUCE_CYCLES, _REDUCE_PART_CYCLES = 3500.0, 440.0
# Steps that a tile of 64 rows, and of 32, takes of a chunk, for each that its columns would fill, by the share of
# zeros: random weights, packed. The last ones are those of 1x1, whose chunks have few columns. A little of a step fits
# anyway.
_ZEROS = (0.0, 0.5, 0.65, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
_STEPS = {
    64: (2.0, 1.44, 1.26, 1.22, 1.11, 1.01, 1.0, 1.0, 0.78, 0.55),
    32: (2.0, 1.35, 1.15, 1.11, 1.01, 1.0, 1.0, 0.89, 0.54, 0.33),
}
_FITS = 0.2
_POINTWISE_STEPS = (2.0, 1.5, 1.5, 1.5, 1.5, 1.3, 1.0, 1.0, 0.9, 0.7)


@dataclass(frozen=True)
class TensorPlan:
    """How the kernel runs a layer.

    Attributes:
        cycles: of a multiprocessor, about.
        blocks: of the launch.
    """

    cycles: float
    blocks: int


@dataclass(frozen=True)
class TensorForm:
    """How a weight is packed: `TensorForm` of tensor_weight.h, and steps of a tile in a chunk."""

    tile_rows: int
    tiles_per_group: int
    chunk_channels: int
    num_chunks: int
    steps: int

    @property
    def subtiles(self) -> int:
        """Of 16 rows."""
        return self.tile_rows // _SUBTILE_ROWS

    @property
    def step_bytes(self) -> int:
        """Of a step of a tile."""
        return 512 * (self.subtiles + 1)


@dataclass(frozen=True)
class _Call:
    """What plans are made for."""

    layer: SparseLayer
    form: TensorForm
    max_shared_bytes: int
    batch: int
    multiprocessors: float
    eights: Eights


@dataclass(frozen=True)
class _Tiling:
    """A tile of outputs, and who computes it."""

    positions: int
    tile_h: int
    tile_w: int
    warps_m: int
    warps_k: int
    staging_warps: int
    parts: int

    @property
    def base_warps(self) -> int:
        """Those that have outputs of their own."""
        return self.warps_m * self.tile_h * self.tile_w // self.positions

    @property
    def product_warps(self) -> int:
        return self.base_warps * self.warps_k


def plan_tensor(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> TensorPlan | None:
    """The plan of a layer that takes the fewest cycles; None where no tile fits shared memory.

    Args:
        layer: 1-D or 2-D, with a known input size; X begins at a multiple of 16 bytes.
        architecture: 86 for sm_86.
        batch: images, at least 1.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    form = form_of(layer, shared_bytes_of(architecture))
    plans = []
    for eights in eights_of(batch, _out_size(layer)[0]):
        call = _Call(layer, form, shared_bytes_of(architecture), batch, multiprocessors, eights)
        for min_product_warps in (_FEW_PRODUCT_WARPS, 1):
            found = [plan for tiling in _tilings(call, min_product_warps) if (plan := _plan(call, tiling)) is not None]
            plans += found
            if found:
                break
    return min(plans, key=lambda plan: plan.cycles, default=None)


def form_of(layer: SparseLayer, max_shared_bytes: int) -> TensorForm:
    """How the library packs a layer's weight, for a GPU whose blocks have so much shared memory at most."""
    taps, rows = math.prod(layer.kernel_shape), layer.group_out_channels
    tile_rows = 32 if rows <= 32 else 64
    is_one_chunk = layer.group_in_channels <= max(_WANTED_COLUMNS // taps, 1)
    columns = _FEW_COLUMNS if max_shared_bytes < _AMPLE_BYTES or is_one_chunk else _WANTED_COLUMNS
    channels = min(max(columns // taps, 1), _MAX_CHUNK_CHANNELS, layer.group_in_channels)
    zeros = 1 - np.count_nonzero(layer.used_weights) / layer.weight.size
    share = np.interp(zeros, _ZEROS, _POINTWISE_STEPS if taps == 1 else _STEPS[tile_rows])
    return TensorForm(
        tile_rows=tile_rows,
        tiles_per_group=math.ceil(rows / tile_rows),
        chunk_channels=channels,
        num_chunks=math.ceil(layer.group_in_channels / channels),
        steps=max(1, math.ceil(channels * taps / _STEP_COLUMNS * float(share) - _FITS)),
    )


def _tilings(call: _Call, min_product_warps: int) -> Iterator[_Tiling]:
    form, out_w = call.form, _out_size(call.layer)[1]
    for positions in _POSITIONS[form.tile_rows]:
        for runs in range(1, min(math.ceil(out_w / positions), _MAX_PRODUCT_WARPS) + 1):
            for tile_h in range(1, min(call.eights.rows, _MAX_TILE_ROWS) + 1):
                for warps_m in (1, 2, 4, 8):
                    if warps_m >= 2 * form.tiles_per_group:
                        break
                    tile = (positions, tile_h, positions * runs, warps_m)
                    yield from _sharings(call, tile, min_product_warps)


def _sharings(call: _Call, tile: tuple[int, int, int, int], min_product_warps: int) -> Iterator[_Tiling]:
    """All numbers of warps that share steps, of those that stage, and of parts of the chunks."""
    blocks, chunks = _blocks(call, _Tiling(*tile, 1, 0, 1)), call.form.num_chunks
    are_strips = call.eights != eights_of(call.batch, _out_size(call.layer)[0])[0]
    all_parts = parts_to_try(chunks, blocks, call.multiprocessors)
    for warps_k in (1, 2, 4, 8) if blocks < call.multiprocessors else (1,):
        for staging_warps in _STAGING_WARPS:
            tiling = _Tiling(*tile, warps_k, staging_warps, 1)
            if not min_product_warps <= tiling.product_warps <= min(_MAX_PRODUCT_WARPS, _MAX_WARPS - staging_warps):
                continue
            if staging_warps != _MANY_STAGING_WARPS or are_strips:
                yield from (replace(tiling, parts=parts) for parts in all_parts)


def parts_to_try(chunks: int, blocks: int, multiprocessors: float) -> list[int]:
    """Numbers of parts of a tile's chunks that may be worth it, as many as there are multiprocessors for."""
    most = max(min(_MAX_PARTS, chunks, int(multiprocessors) // blocks), 1)
    # A part more is for nothing where the longest stays as long.
    return [n for n in range(1, most + 1) if n == 1 or -(-chunks // n) < -(-chunks // (n - 1))]


def _blocks(call: _Call, tiling: _Tiling) -> int:
    """Of one part of the chunks."""
    tiles = math.ceil(_out_size(call.layer)[1] / tiling.tile_w) * math.ceil(call.eights.rows / tiling.tile_h)
    return call.layer.group * math.ceil(call.form.tiles_per_group / tiling.warps_m) * tiles * call.eights.count


def _plan(call: _Call, tiling: _Tiling) -> TensorPlan | None:
    layer, form = call.layer, call.form
    in_rows, in_columns = (
        (outputs - 1) * stride + (kernel - 1) * dilation + 1
        for outputs, stride, kernel, dilation in zip(
            (tiling.tile_h, tiling.tile_w), layer.strides, layer.kernel_shape, layer.dilations, strict=True
        )
    )
    stride_x = layer.strides[1]
    line_pitch = _odd_pitch(math.ceil(in_columns / stride_x))
    input_bytes = form.chunk_channels * _odd_pitch(in_rows * stride_x * line_pitch) * _PIXEL_BYTES
    stage_bytes = input_bytes + tiling.warps_m * form.steps * form.step_bytes
    unit_columns, units, table_bytes = _units(layer, form, tiling, in_rows, in_columns)
    slots = tiling.tile_h * tiling.tile_w
    sums_bytes = tiling.warps_m * form.tile_rows * (IMAGES // 2) * (slots | 1) * _SUM_BYTES
    other_warps = tiling.product_warps - tiling.base_warps
    sums_bytes += other_warps * form.subtiles * tiling.positions * _WARP * 4 * _SUM_BYTES
    shared_bytes = max(2 * stage_bytes + table_bytes, sums_bytes, _LEAST_BYTES)
    warps = tiling.product_warps + tiling.staging_warps
    if shared_bytes + _RESERVED_BYTES > call.max_shared_bytes or slots > warps * _WARP or input_bytes >= _STAGE_BYTES:
        return None
    blocks = _blocks(call, tiling)

    resident = max(min(_MAX_WARPS // warps, call.max_shared_bytes // (shared_bytes + _RESERVED_BYTES)), 1)
    staged_units = units * unit_columns // 2 / _WARP
    wide = _WIDE_FACTOR if tiling.positions == _WIDE_POSITIONS else 1.0
    rounds = math.ceil(tiling.product_warps * resident / _QUARTERS) / resident
    products = rounds * form.subtiles * tiling.positions * _PRODUCT_CYCLES * wide
    shared = (
        tiling.base_warps * form.steps * 4.0 * (tiling.positions + form.subtiles + 1)
        + tiling.warps_m * form.steps * 4.0 * (form.subtiles + 1)
        + staged_units * _SHARED_UNIT_CYCLES
    )
    row_bytes = in_columns * _HALF_BYTES + _ROW_BYTES
    num_bytes = tiling.warps_m * form.steps * form.step_bytes + form.chunk_channels * in_rows * row_bytes * IMAGES
    needs = (
        math.ceil(form.steps / tiling.warps_k) * (products + _STEP_CYCLES),
        shared * _SHARED_CYCLES,
        num_bytes / _L2_BYTES_A_CYCLE,
        staged_units * _UNIT_CYCLES / (tiling.staging_warps * resident),
    )
    chunk = max(needs) + _OVERLAP * (sum(needs) - max(needs)) + _CHUNK_CYCLES / resident
    chunk *= _STRIDE_FACTOR if stride_x > 1 else 1.0
    more = _FLOAT_BLOCK_CYCLES if layer.element_type.itemsize > _HALF_BYTES else 0.0
    block = _BLOCK_CYCLES + more + _OUTPUT_CYCLES * slots * tiling.warps_m * form.tile_rows * IMAGES
    block += _SHARE_CYCLES * other_warps
    turns = math.ceil(blocks * tiling.parts / (call.multiprocessors * resident)) * resident
    cycles = turns * (block / resident + math.ceil(form.num_chunks / tiling.parts) * chunk)
    cycles += _LAUNCH_AND_FIRST_CYCLES + _moved_cycles(call, tiling) + _reduce_cycles(call, tiling)
    return TensorPlan(cycles, blocks * tiling.parts)


def _moved_cycles(call: _Call, tiling: _Tiling) -> float:
    """To bring outputs to memory; of floats, inputs as well have more bytes."""
    layer, size, out_w = call.layer, call.layer.element_type.itemsize, _out_size(call.layer)[1]
    num_bytes = min(tiling.tile_w, out_w) * size
    has_sectors = num_bytes % _SECTOR_BYTES == 0 and out_w * size % _SECTOR_BYTES == 0
    sectors = 1.0 if tiling.tile_w >= out_w or has_sectors else (num_bytes + _SECTOR_BYTES - _HALF_BYTES) / num_bytes
    both = _num_outputs(call) + call.batch * layer.in_channels * math.prod(layer.in_size or ())
    moved = _HALF_BYTES * _num_outputs(call) * sectors / _STORED_BYTES_A_CYCLE
    return (moved + (size - _HALF_BYTES) * both / _FLOAT_BYTES_A_CYCLE) / call.multiprocessors


def _reduce_cycles(call: _Call, tiling: _Tiling) -> float:
    if tiling.parts == 1:
        return 0.0
    num_bytes = (2 * tiling.parts + 1) * call.layer.element_type.itemsize * _num_outputs(call)
    return _REDUCE_CYCLES + _REDUCE_PART_CYCLES * tiling.parts + memory_cycles(num_bytes, call.multiprocessors)


def _num_outputs(call: _Call) -> int:
    return call.batch * call.layer.out_channels * math.prod(_out_size(call.layer))


def _units(
    layer: SparseLayer, form: TensorForm, tiling: _Tiling, in_rows: int, in_columns: int
) -> tuple[int, int, int]:
    """Columns that one load brings, units of them in a chunk, and the bytes of their table."""
    (_, in_w), most = layer.in_size or (0, 0), _UNIT_BYTES // layer.element_type.itemsize
    wide = (columns for columns in (4, 2) if columns <= most and in_w % columns == 0 and layer.strides[1] <= 2)
    columns = next(wide, 1)
    units = math.ceil(form.chunk_channels / columns) * columns * in_rows * ((in_columns + 2 * columns - 2) // columns)
    at_once = (_WIDE_UNITS if columns == most else _UNITS) * tiling.staging_warps * _WARP
    return columns, units, math.ceil(units / at_once) * at_once * _ENTRY_BYTES


def _out_size(layer: SparseLayer) -> tuple[int, int]:
    """Of planes: that this kernel does not see as single rows."""
    return layer.in_size if layer.is_pointwise and layer.in_size is not None else out_size(layer)


def _odd_pitch(pixels: int) -> int:
    """The least number that is 1 more than a multiple of 8."""
    return math.ceil((pixels - 1) / 8) * 8 + 1
