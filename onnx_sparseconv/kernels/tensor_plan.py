"""What the native library's plans for `cuda.tensor` take, in cycles: `ChooseTensorLaunch` of tensor_plan.cc, which has
the same constants and explains them, for a weight of which is known how many zeros it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.plan import shared_bytes_of
from onnx_sparseconv.kernels.warpgroup_plan import IMAGES, out_size

_WARP, _QUARTERS, _MAX_WARPS, _MAX_PRODUCT_WARPS = 32, 4, 12, 8
_PIXEL_BYTES, _MAX_TILE_ROWS, _FEW_PRODUCT_WARPS = 16, 8, 4
_POSITIONS = {64: (7, 8), 32: (14, 16)}
_WIDE_POSITIONS, _SUBTILE_ROWS, _STEP_COLUMNS = 8, 16, 32
_WANTED_COLUMNS, _FEW_COLUMNS, _AMPLE_BYTES, _MAX_CHUNK_CHANNELS = 288, 144, 160 << 10, 64
_RESERVED_BYTES, _LEAST_BYTES, _UNIT_BYTES, _ENTRY_BYTES = 1024, 3072, 8, 8
_UNITS, _WIDE_UNITS = 4, 2
_PRODUCT_CYCLES, _WIDE_FACTOR, _SHARED_CYCLES, _SHARED_UNIT_CYCLES = 16.0, 1.3, 2.0, 18.0
_UNIT_CYCLES, _L2_BYTES_A_CYCLE, _ROW_BYTES, _CHUNK_CYCLES, _OVERLAP = 480.0, 17.0, 76, 2150.0, 0.6
_UNITS_TO_CYCLES, _STRIDE_FACTOR, _ONE_CHUNK_FACTOR, _BEGIN_CYCLES = 0.32, 1.4, 2.6, 8800.0
_STORED_BYTES_A_CYCLE, _FLOAT_BYTES_A_CYCLE, _HALF_BYTES = 7.2, 5.2, 2
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
class _Form:
    """How the weight is packed: `TensorForm` of tensor_weight.h, and steps of a tile in a chunk."""

    tile_rows: int
    tiles_per_group: int
    chunk_channels: int
    num_chunks: int
    steps: int

    @property
    def subtiles(self) -> int:
        return self.tile_rows // _SUBTILE_ROWS

    @property
    def step_bytes(self) -> int:
        return 512 * (self.subtiles + 1)


@dataclass(frozen=True)
class _Call:
    """What plans are made for."""

    layer: SparseLayer
    form: _Form
    max_shared_bytes: int
    batch: int
    multiprocessors: float


@dataclass(frozen=True)
class _Tiling:
    """A tile of outputs, and who computes it."""

    positions: int
    tile_h: int
    tile_w: int
    warps_m: int
    product_warps: int
    staging_warps: int


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
    form = _form_of(layer, shared_bytes_of(architecture))
    call = _Call(layer, form, shared_bytes_of(architecture), batch, multiprocessors)
    for min_product_warps in (_FEW_PRODUCT_WARPS, 1):
        plans = (_plan(call, tiling) for tiling in _tilings(layer, form, min_product_warps))
        best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.cycles, default=None)
        if best is not None:
            return best
    return None


def _form_of(layer: SparseLayer, max_shared_bytes: int) -> _Form:
    taps, rows = math.prod(layer.kernel_shape), layer.group_out_channels
    tile_rows = 32 if rows <= 32 else 64
    columns = _FEW_COLUMNS if max_shared_bytes < _AMPLE_BYTES else _WANTED_COLUMNS
    channels = min(max(columns // taps, 1), _MAX_CHUNK_CHANNELS, layer.group_in_channels)
    zeros = 1 - np.count_nonzero(layer.used_weights) / layer.weight.size
    share = np.interp(zeros, _ZEROS, _POINTWISE_STEPS if taps == 1 else _STEPS[tile_rows])
    return _Form(
        tile_rows=tile_rows,
        tiles_per_group=math.ceil(rows / tile_rows),
        chunk_channels=channels,
        num_chunks=math.ceil(layer.group_in_channels / channels),
        steps=max(1, math.ceil(channels * taps / _STEP_COLUMNS * float(share) - _FITS)),
    )


def _tilings(layer: SparseLayer, form: _Form, min_product_warps: int) -> Iterator[_Tiling]:
    out_h, out_w = _out_size(layer)
    for positions in _POSITIONS[form.tile_rows]:
        for runs in range(1, min(math.ceil(out_w / positions), _MAX_PRODUCT_WARPS) + 1):
            for tile_h in range(1, min(out_h, _MAX_TILE_ROWS) + 1):
                warps_m = 1
                while warps_m < 2 * form.tiles_per_group and warps_m * runs * tile_h <= _MAX_PRODUCT_WARPS:
                    product_warps = warps_m * runs * tile_h
                    for staging_warps in (4, 2) if product_warps >= min_product_warps else ():
                        yield _Tiling(positions, tile_h, positions * runs, warps_m, product_warps, staging_warps)
                    warps_m *= 2


def _plan(call: _Call, tiling: _Tiling) -> TensorPlan | None:
    layer, form, batch = call.layer, call.form, call.batch
    out_h, out_w = _out_size(layer)
    in_rows, in_columns = (
        (outputs - 1) * stride + (kernel - 1) * dilation + 1
        for outputs, stride, kernel, dilation in zip(
            (tiling.tile_h, tiling.tile_w), layer.strides, layer.kernel_shape, layer.dilations, strict=True
        )
    )
    stride_x = layer.strides[1]
    line_pitch = _odd_pitch(math.ceil(in_columns / stride_x))
    channel_pitch = _odd_pitch(in_rows * stride_x * line_pitch)
    stage_bytes = form.chunk_channels * channel_pitch * _PIXEL_BYTES + (tiling.warps_m * form.steps * form.step_bytes)
    unit_columns, units, table_bytes = _units(layer, form, tiling, in_rows, in_columns)
    slots = tiling.tile_h * tiling.tile_w
    sums_bytes = tiling.warps_m * form.tile_rows * (IMAGES // 2) * (slots | 1) * 4
    shared_bytes = max(2 * stage_bytes + table_bytes, sums_bytes, _LEAST_BYTES)
    warps = tiling.product_warps + tiling.staging_warps
    if shared_bytes + _RESERVED_BYTES > call.max_shared_bytes or slots > warps * _WARP:
        return None
    group_blocks = math.ceil(form.tiles_per_group / tiling.warps_m)
    tiles = math.ceil(out_w / tiling.tile_w) * math.ceil(out_h / tiling.tile_h)
    blocks = layer.group * group_blocks * tiles * math.ceil(batch / IMAGES)

    resident = max(min(_MAX_WARPS // warps, call.max_shared_bytes // (shared_bytes + _RESERVED_BYTES)), 1)
    staged_units = units * unit_columns // 2 / _WARP
    wide = _WIDE_FACTOR if tiling.positions == _WIDE_POSITIONS else 1.0
    rounds = math.ceil(tiling.product_warps * resident / _QUARTERS) / resident
    product = rounds * form.steps * form.subtiles * tiling.positions * _PRODUCT_CYCLES * wide
    shared = (
        tiling.product_warps * form.steps * 4.0 * (tiling.positions + form.subtiles + 1)
        + tiling.warps_m * form.steps * 4.0 * (form.subtiles + 1)
        + staged_units * _SHARED_UNIT_CYCLES
    )
    row_bytes = in_columns * _HALF_BYTES + _ROW_BYTES
    num_bytes = tiling.warps_m * form.steps * form.step_bytes + form.chunk_channels * in_rows * row_bytes * IMAGES
    staging = staged_units * _UNIT_CYCLES / (tiling.staging_warps * resident)
    parts = (product, shared * _SHARED_CYCLES, num_bytes / _L2_BYTES_A_CYCLE, staging)
    chunk = (max(parts) + _OVERLAP * (sum(parts) - max(parts)) + _CHUNK_CYCLES / resident) * (
        (_STRIDE_FACTOR if stride_x > 1 else 1.0) * (_ONE_CHUNK_FACTOR if form.num_chunks == 1 else 1.0)
    )
    turns = math.ceil(blocks / (call.multiprocessors * resident)) * resident
    outputs = batch * layer.out_channels * out_h * out_w
    both = outputs + batch * layer.in_channels * math.prod(layer.in_size or ())
    more_bytes = (layer.element_type.itemsize - _HALF_BYTES) * both
    moved = (_HALF_BYTES * outputs / _STORED_BYTES_A_CYCLE + more_bytes / _FLOAT_BYTES_A_CYCLE) / call.multiprocessors
    return TensorPlan(_BEGIN_CYCLES + _UNITS_TO_CYCLES * turns * form.num_chunks * chunk + moved, blocks)


def _units(layer: SparseLayer, form: _Form, tiling: _Tiling, in_rows: int, in_columns: int) -> tuple[int, int, int]:
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
