"""What the native library's plan for warpgroups takes, in cycles: `ChooseWgmmaLaunch` of wgmma_plan.cc, without its
limits of memory. The two have the same constants, which are explained there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onnx_sparseconv.kernels.layer import SparseLayer

ROWS, CHANNELS, IMAGES, WARPGROUPS = 64, 32, 8, 2
_POSITIONS = (24, 28, 30, 32)
_POSITION_CYCLES, _CHUNK_CYCLES, _OVERLAP = 4.6, 150.0, 0.3
_COLUMN_CYCLES, _BYTES_A_CYCLE = 0.25, 32.0
_STORE_CYCLES, _BEGIN_CYCLES, _FULL_CYCLES = 9000.0, 3000.0, 1500.0
_MEMORY_BYTES_A_CYCLE, _LAUNCH_CYCLES, _MAX_PARTS = 15.0, 4000.0, 16
_STEP_BYTES = 2304
_LINE_PIXELS, _SECTOR_PIXELS = 8, 2
# Of the CSR kernel: a call, an entry of a row, and entries that a multiprocessor computes; see csr_plan.cc.
_CSR_CALL, _CSR_ENTRY, _CSR_ENTRIES_A_CYCLE = 8250.0, 69.0, 7.9


@dataclass(frozen=True)
class WarpgroupPlan:
    """How the warpgroup kernel runs a layer, about.

    Attributes:
        cycles: of a multiprocessor, without what a launch takes that computes nothing.
        tiles: of the whole output.
        parts: of the chunks, which multiprocessors that share a tile sum.
        used_positions: the share of a tile's positions that has outputs.
    """

    cycles: float
    tiles: int
    parts: int
    used_positions: float


@dataclass(frozen=True)
class _Eights:
    """What the parts of a pixel are: images, or strips of one image; `rows` are the outputs' of each."""

    count: int
    rows: int
    is_strips: bool


def plan_warpgroups(layer: SparseLayer, batch: int, chunks: float, multiprocessors: float) -> WarpgroupPlan:
    """The plan of a layer that takes the fewest cycles.

    Args:
        layer: float16, 1-D or 2-D, with a known input size.
        batch: images, at least 1.
        chunks: of 32 channels that a block of rows goes through, those among them that come once more.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    return min(_plans(layer, batch, chunks, multiprocessors), key=lambda plan: plan.cycles)


def csr_cycles(nonzeros: int, out_channels: int, outputs: int, multiprocessors: float) -> float:
    """What the CSR kernel takes for a few images, in the same cycles; `outputs` are those of a channel."""
    waits = _CSR_CALL + _CSR_ENTRY * nonzeros / out_channels
    return waits + nonzeros * outputs / (_CSR_ENTRIES_A_CYCLE * multiprocessors) - _LAUNCH_CYCLES


def _plans(layer: SparseLayer, batch: int, chunks: float, multiprocessors: float) -> Iterator[WarpgroupPlan]:
    size = layer.out_size()
    if size is None or layer.in_size is None:
        raise ValueError("the layer's input size is not known")
    out_h, out_w = (max(1, length) for length in size)
    eights = [_Eights(math.ceil(batch / IMAGES), out_h, False)]
    if batch % IMAGES:
        eights.append(_Eights(batch, math.ceil(out_h / IMAGES), True))
    for eight in eights:
        for positions in _POSITIONS:
            in_row = math.ceil(out_w / positions)
            run_w = math.ceil(out_w / in_row)
            run_w += out_w % 2 == 0 and run_w % 2 != 0 and run_w < positions
            for runs_x in range(1, min(WARPGROUPS, in_row) + 1):
                for lines in range(1, (min(eight.rows, positions) if in_row == 1 else 1) + 1):
                    tiling = _Tiling(positions, runs_x * run_w, WARPGROUPS // runs_x * lines)
                    window = _window(layer, tiling)
                    pitch = layer.strides[0] * layer.strides[1] * math.ceil(window[1] / layer.strides[1])
                    if (lines - 1) * pitch + run_w > positions:
                        break
                    yield _plan(layer, eight, tiling, (batch, chunks, multiprocessors))


@dataclass(frozen=True)
class _Tiling:
    positions: int
    width: int
    height: int


def _window(layer: SparseLayer, tiling: _Tiling) -> tuple[int, int]:
    """Rows and columns that a tile reads."""
    sizes = zip((tiling.height, tiling.width), layer.strides, layer.kernel_shape, layer.dilations, strict=True)
    rows, columns = ((n - 1) * stride + (kernel - 1) * dilation + 1 for n, stride, kernel, dilation in sizes)
    return rows, columns


def _plan(layer: SparseLayer, eights: _Eights, tiling: _Tiling, work: tuple[int, float, float]) -> WarpgroupPlan:
    batch, chunks, multiprocessors = work
    out_h, out_w = (max(1, length) for length in layer.out_size() or ())
    rows, columns = _window(layer, tiling)
    tiles_x, tiles_y = math.ceil(out_w / tiling.width), math.ceil(eights.rows / tiling.height)
    row_blocks = layer.group * math.ceil(layer.group_out_channels / ROWS)
    tiles = row_blocks * tiles_x * tiles_y * eights.count
    memory = _MEMORY_BYTES_A_CYCLE * multiprocessors

    steps, pixels = chunks * math.prod(layer.kernel_shape), chunks * rows * columns * CHANNELS
    products = steps * WARPGROUPS * tiling.positions * _POSITION_CYCLES
    needs = [products, (steps * _STEP_BYTES + pixels * 2 * IMAGES) / _BYTES_A_CYCLE, pixels * _COLUMN_CYCLES]
    sums = max(needs) + _OVERLAP * (sum(needs) - max(needs)) + chunks * _CHUNK_CYCLES
    outputs = _STORE_CYCLES + (_FULL_CYCLES if tiling.positions == max(_POSITIONS) else 0.0)

    window = math.ceil(columns / _LINE_PIXELS) * _LINE_PIXELS
    if 8 * window > 9 * columns:
        window = math.ceil(columns / _SECTOR_PIXELS) * _SECTOR_PIXELS
    all_rows = (tiles_y - 1) * tiling.height * layer.strides[0] + rows
    x_bytes = 2 * batch * layer.in_channels * math.prod(layer.in_size or ())
    interleaved = 2 * IMAGES * eights.count * layer.in_channels * all_rows * tiles_x * window
    before = _BEGIN_CYCLES + (x_bytes + interleaved) / memory
    cycles, parts = before + math.ceil(tiles / multiprocessors) * (sums + outputs), 1
    values = batch * layer.out_channels * out_h * out_w
    most = int(min(multiprocessors // tiles, chunks, _MAX_PARTS))
    for more in range(2, most + 1):
        reduced = _LAUNCH_CYCLES + 2 * (2 * more + 1) * values / memory
        shared = before + math.ceil(chunks / more) / chunks * sums + outputs + reduced
        cycles, parts = min((cycles, parts), (shared, more))
    computed = tiles_x * tiles_y * WARPGROUPS * tiling.positions * (IMAGES if eights.is_strips else 1)
    return WarpgroupPlan(cycles, tiles, parts, out_h * out_w / computed)
