"""What the native library's plans for warpgroups take, in cycles: `ChooseWgmmaLaunch` of wgmma_plan.cc,
`ChooseOctetLaunch` of octet_plan.cc, `ChooseRingLaunch` of ring_plan.cc, `ChoosePointwiseLaunch` of pointwise_plan.cc
and `ChooseClusterLaunch` of cluster_plan.cc, without limits of memory but that of shared memory, in which the fourth
always fits. They have the same constants, which are explained there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnx_sparseconv.kernels.layer import SparseLayer

ROWS, CHANNELS, IMAGES, WARPGROUPS = 64, 32, 8, 2
# Of a weight with its zeros; see wgmma_operand.h.
MOST_DENSE_BYTES = 64 << 20
_POSITIONS = (16, 24, 28, 30, 32)
_POSITION_CYCLES, _CHUNK_CYCLES, _OVERLAP = 4.6, 150.0, 0.3
_COLUMN_CYCLES, _BYTES_A_CYCLE = 0.25, 32.0
_STORE_CYCLES, _BEGIN_CYCLES, _FULL_CYCLES = 9000.0, 3000.0, 1500.0
_FLOAT_POSITION_CYCLES, _FIRST_POSITIONS, _KEPT_BYTES = 350.0, 13, 30e6
_MEMORY_BYTES_A_CYCLE, LAUNCH_CYCLES, _MAX_PARTS = 15.0, 4000.0, 16
_VALUE_BYTES, _STEP_BYTES, _PIXEL_BYTES, _ROW_BYTES, _MAX_STAGES = 2048, 2304, 528, 20480, 3
_MAX_CHUNK_STEPS, _MORE_RUNS = 25, 3
_LINE_PIXELS, _SECTOR_PIXELS = 8, 2
# Of the ring kernel.
_RING_POSITIONS, _RING_COLUMNS, _MAX_RING_CHANNELS = (8, 16, 32), 8, 96
_RING_SHARED_BYTES, _MAX_RING_ROWS = (227 << 10) - 1024, 16
_SHARED_BYTES_A_CYCLE, _PRODUCT_SHARE = 128.0, 0.85
_RING_LINE_CYCLES, _RING_UNIT_CYCLES, _RING_BEGIN_CYCLES = 620.0, 91.0, 4700.0
_DENSE_POSITION_CYCLES = 4.0
# Of the octet kernel.
_OCTET, _OCTET_BLOCKS, _WORD_BLOCKS, _STRIDED_BLOCKS, _MAX_OCTET_ROWS = 8, (8, 15, 28, 29), (8, 15), (8, 15), 32
_MAX_OCTET_STRIDE, _MOST_APART, _MAX_BLOCKS_OF_TWO_SETS, _SHORT_ROW_BYTES, _BESIDES_BYTES = 2, 7, 15, 128, 152
_FEW_CHANNELS, _MAX_OCTET_CHANNELS, _MAX_OCTET_STEPS = 128, 512, 64
_STAGED_COLUMNS, _MAX_TILE_ROWS, _PRODUCT_OVERLAP = 32, 2048, 1.25
_OCTET_GROUP_CYCLES, _OCTET_BLOCK_CYCLES, _STAGED_CYCLES, _OCTET_BEGIN_CYCLES = 200.0, 35.0, 0.04, 8500.0
_WAITING_SHARE, _ALONE_SHARE, _SHARING_SHARE, _OCTET_BYTES_A_CYCLE = 1.25, 1.6, 1.05, 15.0
_DENSE_BLOCK_CYCLES, _LEAST_DENSE_CYCLES, _LEAST_PRODUCT_CYCLES, _LEAST_BLOCK_CYCLES = 2.9, 45.0, 64.0, 4.3
_ELEMENT_CYCLES = 0.4
_COLD_CYCLES, _COLD_BYTES = 3000.0, 16e6
# Of the kernel for 1x1.
_SEGMENTS, _SEGMENT_POSITIONS, _LEAST_SEGMENTS = (16, 24, 32), 8, 4
_TILE_CYCLES, _WIDE_TILE_CYCLES, _SEGMENT_CHUNK_CYCLES, _SEGMENT_CYCLES = 3260.0, 2060.0, 309.0, 18.9
_POINTWISE_BEGIN_CYCLES, _FLOAT_TILE_CYCLES, _ROUNDED_CYCLES = 2000.0, 3000.0, 60.0
# Of the cluster kernel. Clusters of so many blocks that an H100 runs at a time, which has as many multiprocessors.
_CLUSTER_BLOCKS, _MAX_CLUSTERS, _CLUSTER_MULTIPROCESSORS = (8, 15, 19, 29), (132, 66, 39, 30, 22, 17, 15, 15), 132
_MAX_CLUSTER_CHUNKS, _MORE_CUTS, _HEAD_BYTES, _UNIT_BYTES = 31, 3, 1152, 128
_CLUSTER_BEGIN_CYCLES, _CLUSTER_NEXT_CYCLES, _CLUSTER_BYTES_A_CYCLE = 8400.0, 5600.0, 32.0
_TASK_CYCLES, _FLOAT_TASK_CYCLES = 55.0, 65.0
_CLUSTER_POSITION_CYCLES, _OUTPUT_CYCLES, _PART_CYCLES = 0.75, 0.43, 0.12
_CACHED_BYTES = 4e6
# Of the CSR kernel; see csr_plan.cc.
_CSR_CALL, _CSR_WINDOW_ENTRY, _CSR_ENTRY = 4400.0, 58.0, 22.0
_CSR_WINDOW_ENTRIES_A_CYCLE, _CSR_ENTRIES_A_CYCLE, _CSR_OUTPUTS_A_CYCLE = (6.0, 7.7), 9.3, 1.3
_CSR_SHARING_IMAGES = 4
_PIXEL_CALL, _PIXEL_ROUND, _PIXEL_ROW = 2500.0, 500.0, 60.0
# What a launch for warpgroups saves where another one is in front of it.
EARLY_CYCLES = 1600.0


@dataclass(frozen=True)
class WarpgroupPlan:
    """How the warpgroup kernel runs a layer, about.

    Attributes:
        cycles: of a multiprocessor, without what a launch takes that computes nothing.
        tiles: of the whole output.
        parts: of the chunks, which multiprocessors that share a tile sum.
        launch_cycles: of a launch, where the library counts it apart.
    """

    cycles: float
    tiles: int
    parts: int
    launch_cycles: float = 0.0

    @property
    def counted_cycles(self) -> float:
        """Those by which the library compares the kernel with others."""
        return self.cycles + self.launch_cycles


@dataclass(frozen=True)
class Eights:
    """What the parts of a pixel are: images, or strips of one image; `rows` are the outputs' of each."""

    count: int
    rows: int


def plan_warpgroups(layer: SparseLayer, batch: int, chunks: float, multiprocessors: float) -> WarpgroupPlan | None:
    """The plan of a layer that takes the fewest cycles; None where no tile fits shared memory.

    Args:
        layer: 1-D or 2-D, with a known input size.
        batch: images, at least 1.
        chunks: of 32 channels that a block of rows goes through, those among them that come once more.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    return min(_plans(layer, batch, chunks, multiprocessors), key=lambda plan: plan.cycles, default=None)


@dataclass(frozen=True)
class WindowSteps:
    """What 64 outputs of a window of few channels go through (window_weight.h).

    Attributes:
        sparse: of 32 channels and a tap.
        dense: of 16 channels and a tap.
    """

    sparse: float
    dense: float = 0

    @property
    def count(self) -> float:
        """Of both kinds."""
        return self.sparse + self.dense

    @property
    def weight_bytes(self) -> float:
        """Of a row tile."""
        header = math.ceil(4 * (self.count + 1) / 128) * 128
        return header + self.sparse * _STEP_BYTES + self.dense * _VALUE_BYTES


def plan_ring(layer: SparseLayer, batch: int, steps: WindowSteps, multiprocessors: float) -> WarpgroupPlan | None:
    """The same of the ring kernel; None where it cannot run the layer, or its rows do not fit shared memory.

    Args:
        layer: as of `plan_warpgroups`, float16.
        batch: images, at least 1.
        steps: that 64 outputs go through.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    (out_h, out_w), (_, in_w) = out_size(layer), layer.in_size or (0, 0)
    is_small = layer.group == 1 and layer.in_channels <= _MAX_RING_CHANNELS and math.prod(layer.kernel_shape) > 1
    if not is_small or in_w % _RING_COLUMNS or out_w % _RING_COLUMNS:
        return None
    plans = [
        plan
        for eight in eights_of(batch, out_h)
        for positions in _RING_POSITIONS
        for rows in range(1, eight.rows + 1)
        if (plan := _ring_plan(layer, eight, (positions, rows), (steps, multiprocessors))) is not None
    ]
    return min(plans, key=lambda plan: plan.cycles, default=None)


def plan_octets(
    layer: SparseLayer, batch: int, steps: WindowSteps, multiprocessors: float, *, is_copied: bool = False
) -> WarpgroupPlan | None:
    """The same of the octet kernel, likewise.

    Args:
        layer: as of `plan_warpgroups`.
        batch: images, at least 1.
        steps: as of `plan_ring`.
        multiprocessors: of the GPU.
        is_copied: whether it is what `without_strides` made of another layer.

    Raises:
        ValueError: the input size is not known.
    """
    (out_h, out_w), (_, in_w) = out_size(layer), layer.in_size or (0, 0)
    if not _has_octet_form(layer) or max(layer.strides) > _MAX_OCTET_STRIDE or in_w % (_OCTET // 2):
        return None
    is_for_words = layer.kernel_shape[0] == 1 and layer.strides == (1, 1)
    if not is_for_words and _needs_words(layer) and not (is_copied and layer.in_channels <= CHANNELS):
        return None
    stored = _stored_together(layer)
    plans = (
        plan
        for columns in _octet_columns(layer)
        for rows, blocks in _octet_groups(layer, columns)
        for tile_rows in range(1, min(out_h, _MAX_TILE_ROWS) + 1)
        if tile_rows * out_w % stored == 0
        for plan in _octet_plans(layer, columns, (rows, blocks, tile_rows), (batch, steps, multiprocessors))
    )
    return min(plans, key=lambda plan: plan.cycles, default=None)


def without_strides(layer: SparseLayer) -> SparseLayer | None:
    """What the octet kernel computes instead of a layer with strides (space_to_depth.cc): rows and columns between
    those that are one stride apart are channels of their own, in a copy of X, of which padding is a part.

    Args:
        layer: 1-D or 2-D, with a known input size.

    Returns:
        None where there are no strides, or several groups, or too many channels.
    """
    (height, width), (rows, columns) = layer.strides, layer.kernel_shape
    if layer.strides == (1, 1) or layer.group != 1 or layer.in_channels * height * width > _FEW_CHANNELS:
        return None
    y, x = (np.arange(taps) * dilation for taps, dilation in zip((rows, columns), layer.dilations, strict=True))
    taps = int(y[-1]) // height + 1, int(x[-1]) // width + 1
    weight = np.zeros((layer.out_channels, layer.in_channels, height, width, *taps), layer.weight.dtype)
    at = (y % height)[:, None], (x % width)[None], (y // height)[:, None], (x // width)[None]
    weight[(slice(None), slice(None), *at)] = layer.weight
    out_h, out_w = out_size(layer)
    in_w = out_w - 1 + taps[1]
    more = -in_w % _OCTET  # zeros behind a row, which no output reads
    return replace(
        layer,
        weight=weight.reshape(layer.out_channels, -1, *taps),
        strides=(1, 1),
        dilations=(1, 1),
        pads=(0, 0, 0, -more),
        in_size=(out_h - 1 + taps[0], in_w + more),
    )


def copy_cycles(layer: SparseLayer, copied: SparseLayer, batch: int, multiprocessors: float) -> float:
    """Cycles of a multiprocessor that it takes to make the copy of `without_strides`."""
    elements = (one.in_channels * math.prod(one.in_size or ()) for one in (layer, copied))
    return LAUNCH_CYCLES + memory_cycles(layer.element_type.itemsize * batch * sum(elements), multiprocessors)


def joining_cycles(layer: SparseLayer, batch: int, multiprocessors: float) -> float:
    """The same of copying several inputs together, before a kernel that reads one."""
    return copy_cycles(layer, layer, batch, multiprocessors)


def _has_octet_form(layer: SparseLayer) -> bool:
    if layer.group != 1 or math.prod(layer.kernel_shape) == 1:
        return False
    if layer.in_channels <= _FEW_CHANNELS:
        return True
    steps = math.ceil(layer.in_channels / CHANNELS) * math.prod(layer.kernel_shape)
    return layer.in_channels <= _MAX_OCTET_CHANNELS and steps <= _MAX_OCTET_STEPS


def _stored_together(layer: SparseLayer) -> int:
    """Elements of Y: where planes do not begin at multiples of 16 bytes, one by one."""
    return 1 if math.prod(out_size(layer)) % _OCTET else _OCTET


def _needs_words(layer: SparseLayer) -> bool:
    """Whether the kernel for words has to run it, windows of one row."""
    return layer.in_channels > _FEW_CHANNELS or _stored_together(layer) == 1


@dataclass(frozen=True)
class _OctetColumns:
    """How a row is cut into tiles: so many, columns of each, columns of X that are staged for each, and pixels of a row
    at one place between strides.
    """

    tiles: int
    of_tile: int
    staged: int
    pixels: int


def _octet_columns(layer: SparseLayer) -> Iterator[_OctetColumns]:
    (_, out_w), (_, in_w), pad_left = out_size(layer), layer.in_size or (0, 0), layer.pads[1]
    window = (layer.kernel_shape[1] - 1) * layer.dilations[1] + 1
    stride = layer.strides[1]
    read = (out_w - 1) * stride + window
    yield _OctetColumns(1, out_w, in_w, _pixels(max(pad_left + in_w, read), stride))
    if _stored_together(layer) > 1 and (in_w % _OCTET or out_w % _OCTET):
        return
    halo = math.ceil(pad_left / _OCTET) * _OCTET
    for columns in range(_OCTET, min(out_w, _OCTET * max(_OCTET_BLOCKS) + 1), _OCTET):
        tiles = math.ceil(out_w / columns)
        if columns == _OCTET or math.ceil(out_w / (columns - _OCTET)) != tiles:
            staged = math.ceil((halo - pad_left + (columns - 1) * stride + window) / _OCTET) * _OCTET
            yield _OctetColumns(tiles, columns, staged, _pixels(staged, stride))


def _pixels(columns: int, stride: int) -> int:
    """That so many columns take at one place between strides, an even number."""
    return math.ceil(columns / (2 * stride)) * 2


def _octet_groups(layer: SparseLayer, columns: _OctetColumns) -> Iterator[tuple[int, int]]:
    """Rows that a warpgroup computes at a time, and eights of positions of the kernel that does."""
    out_h, out_w = out_size(layer)
    parts, chunks = math.ceil(columns.staged / _STAGED_COLUMNS), math.ceil(layer.in_channels / CHANNELS)
    if not _can_stage_octets(layer, parts, chunks) or columns.pixels < _OCTET:
        return
    plain = _OCTET_BLOCKS if layer.strides == (1, 1) else _STRIDED_BLOCKS
    of_kernels = _WORD_BLOCKS if _needs_words(layer) else plain
    stored = _stored_together(layer)
    for rows in range(1, out_h + 1):
        positions = (rows - 1) * columns.pixels + columns.of_tile
        if positions > _OCTET * max(of_kernels):
            return
        if rows * out_w % stored == 0 and (rows == 1 or out_w % 2 == 0):
            yield rows, min(blocks for blocks in of_kernels if positions <= _OCTET * blocks)


def _can_stage_octets(layer: SparseLayer, parts: int, chunks: int) -> bool:
    """Whether registers hold what a warp has of a row, of which floats take twice as many."""
    if _needs_words(layer):
        return True
    if layer.element_type == np.float32:
        return parts <= 2 or (parts <= 4 and chunks <= 2) or (parts <= 8 and chunks == 1)
    if (layer.in_size or (0, 0))[1] % _OCTET:
        return parts <= 2
    return parts <= 4 or (parts <= 8 and chunks <= 2)


def _staging_sets(layer: SparseLayer, blocks: int) -> int:
    """Of warps, of which wide rows of floats have one."""
    row_bytes = layer.element_type.itemsize * (layer.in_size or (0, 0))[1]
    is_float = layer.element_type == np.float32 and layer.strides == (1, 1)
    return 2 if blocks <= _MAX_BLOCKS_OF_TWO_SETS and not (is_float and row_bytes > _SHORT_ROW_BYTES) else 1


def _octet_plans(
    layer: SparseLayer, columns: _OctetColumns, tile: tuple[int, int, int], work: tuple[int, WindowSteps, float]
) -> Iterator[WarpgroupPlan]:
    """With a place for outputs for each warpgroup, and where rows lack room with one for both."""
    (rows, blocks, tile_rows), (batch, steps, multiprocessors) = tile, work
    places = math.ceil(layer.in_channels / CHANNELS) * CHANNELS
    phases = math.prod(layer.strides)  # places between strides, each of which has the pixels of a row
    window_rows = (layer.kernel_shape[0] - 1) * layer.dilations[0] // layer.strides[0] + 1
    row_bytes = 2 * places * phases * columns.pixels
    apart = 2 * places * phases * _MOST_APART if phases > 1 else 0
    of_row = row_bytes + 16 + math.ceil(4 * steps.count / 16) * 16 + 32
    out_h, _ = out_size(layer)
    row_tiles = math.ceil(layer.out_channels / ROWS)
    of_images = columns.tiles * math.ceil(out_h / tile_rows) * batch
    num_blocks = min(of_images, max(int(multiprocessors) // row_tiles, 1)) * row_tiles
    in_rows, groups = layer.strides[0] * (tile_rows - 1 + window_rows), math.ceil(tile_rows / rows)
    product = _PRODUCT_OVERLAP * (512 * blocks + 2304) / _SHARED_BYTES_A_CYCLE
    least = _LEAST_PRODUCT_CYCLES + _LEAST_BLOCK_CYCLES * blocks if phases > 1 else 0.0
    products = steps.sparse * max(product, least)
    products += steps.dense * max(_DENSE_BLOCK_CYCLES * blocks, _LEAST_DENSE_CYCLES, least)
    staging = in_rows * columns.staged * places * _STAGED_CYCLES
    itemsize = layer.element_type.itemsize
    moved = in_rows * columns.staged * places + tile_rows * columns.of_tile * ROWS
    moving = itemsize * moved / _OCTET_BYTES_A_CYCLE
    x_bytes = itemsize * batch * layer.in_channels * math.prod(layer.in_size or ())
    begin = _OCTET_BEGIN_CYCLES + _COLD_CYCLES * min(1.0, x_bytes / _COLD_BYTES)
    for buffers in (WARPGROUPS, 1):
        outputs = buffers * ROWS * _OCTET * itemsize * (blocks | 1)
        besides = outputs + steps.weight_bytes + 4 * places + _BESIDES_BYTES + apart
        ring_rows = min((_RING_SHARED_BYTES - besides - (rows - 1) * row_bytes) // of_row, _MAX_OCTET_ROWS)
        has_room = ring_rows >= window_rows + 2 * rows - 1
        if ring_rows >= max(window_rows + rows - 1, _staging_sets(layer, blocks)):
            computing = groups * (products + _OCTET_BLOCK_CYCLES * blocks + _OCTET_GROUP_CYCLES)
            tiles = of_images * row_tiles
            if not has_room and (groups > 1 or tiles > num_blocks):
                computing *= _WAITING_SHARE if groups > 1 else _ALONE_SHARE
            if groups > 1 and buffers < WARPGROUPS:
                computing *= _SHARING_SHARE
            if window_rows > 1 and _stored_together(layer) == 1:
                computing += _ELEMENT_CYCLES * tile_rows * columns.of_tile * ROWS
            cycles = math.ceil(tiles / num_blocks) * max(computing + staging, moving)
            yield WarpgroupPlan(begin + cycles, tiles, 1)
        if has_room:
            return


def _ring_plan(
    layer: SparseLayer, eights: Eights, tile: tuple[int, int], work: tuple[WindowSteps, float]
) -> WarpgroupPlan | None:
    (positions, rows), (steps, multiprocessors) = tile, work
    places = math.ceil(layer.in_channels / CHANNELS) * CHANNELS
    window_rows, row_pixels = _window(layer, _Tiling(positions, positions, 1))
    units = places // 2 * math.ceil((row_pixels + _RING_COLUMNS - 1) / (4 * _RING_COLUMNS))
    besides = steps.weight_bytes + 4 * (places + units) + 16
    ring_bytes = window_rows * (row_pixels * (16 * places + 16) + 16)
    if window_rows > _MAX_RING_ROWS or ring_bytes > _RING_SHARED_BYTES - besides:
        return None
    _, out_w = out_size(layer)
    tiles_x, tiles_y = math.ceil(out_w / positions), math.ceil(eights.rows / rows)
    row_tiles, of_eights = math.ceil(layer.out_channels / ROWS), tiles_x * tiles_y * eights.count
    blocks = min(of_eights, max(int(multiprocessors) // row_tiles, 1)) * row_tiles
    sparse = (64 * 8 * positions + 2048) / _SHARED_BYTES_A_CYCLE
    products = steps.sparse * sparse + steps.dense * max(_DENSE_POSITION_CYCLES * positions, _LEAST_DENSE_CYCLES)
    line = _PRODUCT_SHARE * products + _RING_LINE_CYCLES
    in_rows = (rows - 1) * layer.strides[0] + window_rows
    cycles = math.ceil(of_eights * row_tiles / blocks) * (in_rows * units * _RING_UNIT_CYCLES + rows * line)
    return WarpgroupPlan(_RING_BEGIN_CYCLES + cycles, of_eights * row_tiles, 1)


def plan_pointwise(layer: SparseLayer, batch: int, chunks: int, multiprocessors: float) -> WarpgroupPlan:
    """The plan of a 1x1 layer that takes the fewest cycles, with what gathers its planes; as of `plan_warpgroups`."""
    plane = math.prod(out_size(layer))
    row_tiles, row_blocks = rows_of_blocks(layer)
    blocks = max(int(multiprocessors) // row_blocks, 1) * row_blocks
    num_bytes = layer.element_type.itemsize * batch * layer.out_channels * plane
    is_float = layer.element_type == np.float32
    is_gathered = layer.strides != (1, 1) or any(layer.pads) or plane % (_SEGMENT_POSITIONS // 2) != 0
    of_segment = _ROUNDED_CYCLES if is_float and not is_gathered else _SEGMENT_CYCLES

    def plan(run: tuple[int, int, int]) -> WarpgroupPlan:
        tiles, segments, of_warpgroup = run[0] * row_blocks, *run[1:]
        of_tile = _TILE_CYCLES + (_WIDE_TILE_CYCLES if of_warpgroup == max(_SEGMENTS) else 0.0)
        of_tile += _FLOAT_TILE_CYCLES if is_float else 0.0
        of_chunks = chunks * (_SEGMENT_CHUNK_CYCLES + segments * of_segment)
        cycles, parts = math.ceil(tiles / blocks) * (of_tile + of_chunks), 1
        if tiles <= min(blocks, multiprocessors):
            cycles, parts = _share(tiles, chunks, (of_chunks, of_tile), num_bytes, multiprocessors)
        return WarpgroupPlan(_POINTWISE_BEGIN_CYCLES + cycles, tiles, parts, LAUNCH_CYCLES)

    best = min(map(plan, _runs_of_segments(plane, batch, WARPGROUPS // row_tiles)), key=lambda one: one.cycles)
    if not is_gathered:
        return best
    # A row of X is read as a whole where only some of its columns are.
    read = layer.element_type.itemsize * (math.prod(layer.in_size or ()) // layer.strides[0])
    moved = batch * layer.in_channels * (read + 2 * plane)
    return replace(best, cycles=best.cycles + LAUNCH_CYCLES + memory_cycles(moved, multiprocessors))


def plan_clusters(layer: SparseLayer, batch: int, chunks: float, multiprocessors: float) -> WarpgroupPlan | None:
    """The same of the cluster kernel; None where no part of a tile fits shared memory, or there are no chunks.

    Args:
        layer: as of `plan_warpgroups`, or 1x1.
        batch: images, at least 1.
        chunks: as of `plan_warpgroups`.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    return min(_cluster_plans(layer, batch, chunks, multiprocessors), key=lambda plan: plan.cycles, default=None)


def _cluster_plans(layer: SparseLayer, batch: int, chunks: float, multiprocessors: float) -> Iterator[WarpgroupPlan]:
    runs = list(_cluster_runs(layer, batch))
    all_chunks = chunks * _chunks_of_places(layer)
    for parts, most in enumerate(_MAX_CLUSTERS, 1):
        clusters = max(int(most * multiprocessors / _CLUSTER_MULTIPROCESSORS), 1)
        if parts > all_chunks or math.ceil(all_chunks / parts) > _MAX_CLUSTER_CHUNKS:
            continue
        plans = (_cluster_plan(layer, run, (batch, all_chunks, parts, clusters), multiprocessors) for run in runs)
        yield from (plan for plan in plans if plan is not None)


def _cluster_runs(layer: SparseLayer, batch: int) -> Iterator[_ClusterRun]:
    """Ways to cut outputs into tiles."""
    is_pointwise = math.prod(layer.kernel_shape) == 1
    out_h, out_w = out_size(layer)
    if is_pointwise and layer.strides == (1, 1) and not any(layer.pads):
        out_h, out_w = 1, out_h * out_w
    row_tiles, _ = rows_of_blocks(layer)
    arrangements = ((1, 1),) if row_tiles > 1 else ((1, WARPGROUPS), (WARPGROUPS, 1))
    for blocks in _CLUSTER_BLOCKS:
        least = math.ceil(out_w / (_OCTET * blocks))
        for cuts in range(least, min(least + _MORE_CUTS, out_w) + 1):
            run_w = math.ceil(out_w / cuts)
            run_w += out_w % 2 == 0 and run_w % 2 != 0 and run_w < _OCTET * blocks
            for runs_x, runs_y in arrangements if cuts > 1 else arrangements[:1]:
                run = _ClusterRun(blocks, run_w, 1, runs_x, runs_y, row_tiles, (out_h, out_w))
                runs = (replace(run, lines=lines) for lines in range(1, out_h + 1))
                yield from itertools.takewhile(lambda run: run.fits(layer), runs)
        # Of several images, all outputs.
        runs_y = WARPGROUPS // row_tiles
        run = _ClusterRun(blocks, out_w, 1, 1, runs_y, row_tiles, (out_h, out_w))
        runs = (replace(run, lines=math.ceil(images * out_h / runs_y), images=images) for images in range(2, batch + 1))
        yield from itertools.takewhile(lambda run: run.fits(layer), runs)


@dataclass(frozen=True)
class _ClusterRun:
    """Eights of positions of a warpgroup, columns and lines of its runs, runs of a tile, and images."""

    blocks: int
    width: int
    lines: int
    runs_x: int
    runs_y: int
    row_tiles: int
    out_size: tuple[int, int]
    images: int = 1

    @property
    def tile_h(self) -> int:
        return min(math.ceil(self.runs_y * self.lines / self.images), self.out_size[0])

    def line_pixels(self, layer: SparseLayer) -> int:
        """Of X, along a row of the tile."""
        reach = (layer.kernel_shape[1] - 1) * layer.dilations[1] // layer.strides[1]
        pixels = self.runs_x * self.width + reach
        return pixels + (pixels % 2 if self.out_size[1] % 2 == 0 and self.width % 2 == 0 else 0)

    def fits(self, layer: SparseLayer) -> bool:
        """Whether the lines of a run fit its positions."""
        return (self.lines - 1) * self.line_pixels(layer) + self.width <= _OCTET * self.blocks


def _cluster_plan(
    layer: SparseLayer, run: _ClusterRun, work: tuple[int, float, int, int], multiprocessors: float
) -> WarpgroupPlan | None:
    batch, chunks, parts, clusters = work
    out_h, out_w = run.out_size
    taps, line_pixels = math.prod(layer.kernel_shape), run.line_pixels(layer)
    places = math.ceil(chunks / parts) * CHANNELS
    steps = math.ceil(chunks * taps / _chunks_of_places(layer) / parts)
    plane_rows = run.tile_h + (layer.kernel_shape[0] - 1) * layer.dilations[0] // layer.strides[0]
    all_lines = plane_rows * math.prod(_planes(layer)) * run.images
    octet_bytes = math.ceil(16 * (all_lines * line_pixels - 1) / _UNIT_BYTES) * _UNIT_BYTES + 16
    weight_bytes = math.ceil(steps / 4) * 4 * run.row_tiles * _STEP_BYTES
    input_bytes = math.ceil(places // _OCTET * octet_bytes / _UNIT_BYTES) * _UNIT_BYTES
    lists = 4 * (math.ceil(steps / 4) * 4 + places)
    sums_pitch = math.ceil((_OCTET * run.blocks - _OCTET) / 16) * 16 + _OCTET
    sums_bytes = WARPGROUPS * ROWS * 4 * sums_pitch
    if _HEAD_BYTES + max(input_bytes + weight_bytes + lists, sums_bytes) > _RING_SHARED_BYTES:
        return None
    tiles_x, tiles_y = math.ceil(out_w / (run.runs_x * run.width)), math.ceil(out_h / run.tile_h)
    _, row_blocks = rows_of_blocks(layer)
    tiles = row_blocks * tiles_x * tiles_y * math.ceil(batch / run.images)
    columns = _columns_of_x(layer, run)
    vectors = math.ceil((line_pixels + columns - 1) / columns)
    tasks = math.ceil(all_lines * vectors * columns / 32) * places // _OCTET // columns
    is_float = layer.element_type == np.float32
    staging = max((_FLOAT_TASK_CYCLES if is_float else _TASK_CYCLES) * tasks, weight_bytes / _CLUSTER_BYTES_A_CYCLE)
    products = steps * _CLUSTER_POSITION_CYCLES * WARPGROUPS * _OCTET * run.blocks
    finishing = (_OUTPUT_CYCLES + _PART_CYCLES * parts) * WARPGROUPS * ROWS * run.lines * run.width / parts
    cycles = math.ceil(tiles / clusters) * (_CLUSTER_NEXT_CYCLES + staging + products + finishing)
    cycles += _CLUSTER_BEGIN_CYCLES - _CLUSTER_NEXT_CYCLES
    x_values, y_values = layer.in_channels * math.prod(layer.in_size or ()), layer.out_channels * out_h * out_w
    num_bytes = layer.element_type.itemsize * batch * (x_values + y_values)
    cycles += memory_cycles(max(num_bytes - _CACHED_BYTES, 0.0), multiprocessors)
    return WarpgroupPlan(cycles, tiles, parts)


def _planes(layer: SparseLayer) -> list[int]:
    """Places between strides that taps read, along rows and columns."""
    return [
        1 if kernel == 1 or dilation % stride == 0 else min(stride, (kernel - 1) * dilation + 1)
        for kernel, dilation, stride in zip(layer.kernel_shape, layer.dilations, layer.strides, strict=True)
    ]


def _columns_of_x(layer: SparseLayer, run: _ClusterRun) -> int:
    """Elements of X that are loaded together, where it begins at a multiple of 16 bytes."""
    in_w = run.out_size[1] if layer.is_pointwise else (layer.in_size or (0, 0))[1]
    columns = 4 if layer.strides[1] == 1 else 1
    while in_w % columns:
        columns //= 2
    return columns


def rows_of_blocks(layer: SparseLayer) -> tuple[int, int]:
    """Tiles of `ROWS` outputs in a block of rows, more than one with 1x1 alone, and how many such blocks there are."""
    is_window = math.prod(layer.kernel_shape) > 1
    row_tiles = 1 if is_window or layer.group_out_channels <= ROWS else WARPGROUPS
    return row_tiles, layer.group * math.ceil(layer.group_out_channels / (row_tiles * ROWS))


def out_size(layer: SparseLayer) -> tuple[int, int]:
    """Rows and columns of a layer's output, 1 at least.

    Raises:
        ValueError: the input size is not known.
    """
    size = layer.out_size()
    if size is None:
        raise ValueError("the layer's input size is not known")
    return max(1, size[0]), max(1, size[1])


def _runs_of_segments(plane: int, batch: int, runs: int) -> list[tuple[int, int, int]]:
    """Ways to cut a batch of planes, for so many runs a tile: tiles, segments of each, and of what the kernel has."""
    found, of_plane = [], math.ceil(plane / _SEGMENT_POSITIONS)
    for of_warpgroup in _SEGMENTS:
        for images in range(1, of_warpgroup // of_plane + 1):
            found.append((math.ceil(batch / (images * runs)), images * runs * of_plane, of_warpgroup))
        most = min(of_warpgroup, of_plane - 1)
        for part in range(min(_LEAST_SEGMENTS, of_plane), most + 1):
            found.append((batch * math.ceil(of_plane / (part * runs)), part * runs, of_warpgroup))
    return found


def csr_cycles(layer: SparseLayer, batch: int, multiprocessors: float) -> float:
    """What the CSR kernel takes, with its launch; arguments and errors as of `plan_warpgroups`."""
    nonzeros, outputs = int(np.count_nonzero(layer.used_weights)), batch * math.prod(out_size(layer))
    if layer.kernel_shape == (1, 1) and layer.group == 1 and layer.in_size == (1, 1) and outputs == 1:
        rows = layer.out_channels
        return LAUNCH_CYCLES + _PIXEL_CALL + _PIXEL_ROUND * nonzeros / rows / 128 + _PIXEL_ROW * rows / multiprocessors
    is_window = math.prod(layer.kernel_shape) > 1
    waits = nonzeros / layer.out_channels * (_CSR_WINDOW_ENTRY if is_window else _CSR_ENTRY)
    of_window = _CSR_WINDOW_ENTRIES_A_CYCLE[batch >= _CSR_SHARING_IMAGES]
    entries = nonzeros / (of_window if is_window else _CSR_ENTRIES_A_CYCLE)
    of_outputs = outputs * (entries + layer.out_channels / _CSR_OUTPUTS_A_CYCLE) / multiprocessors
    return LAUNCH_CYCLES + _CSR_CALL + waits + of_outputs


def _plans(layer: SparseLayer, batch: int, chunks: float, multiprocessors: float) -> Iterator[WarpgroupPlan]:
    for more in range(_MORE_RUNS + 1):
        plans = list(_plans_of_runs(layer, batch, (chunks, more), multiprocessors))
        if plans:
            yield from plans
            return


def _plans_of_runs(
    layer: SparseLayer, batch: int, chunks_and_more: tuple[float, int], multiprocessors: float
) -> Iterator[WarpgroupPlan]:
    """With so many runs more in a row than are needed."""
    chunks, more = chunks_and_more
    out_h, out_w = out_size(layer)
    for eight in eights_of(batch, out_h):
        for positions in _POSITIONS:
            in_row = min(math.ceil(out_w / positions) + more, out_w)
            run_w = math.ceil(out_w / in_row)
            run_w += out_w % 2 == 0 and run_w % 2 != 0 and run_w < positions
            for runs_x in range(1, min(WARPGROUPS, in_row) + 1):
                for lines in range(1, (min(eight.rows, positions) if in_row == 1 else 1) + 1):
                    tiling = _Tiling(positions, runs_x * run_w, WARPGROUPS // runs_x * lines)
                    pitch = _line_pitch(layer, tiling, lines)
                    if (lines - 1) * pitch + run_w > positions:
                        break
                    if stages := _num_stages(layer, tiling, pitch):
                        yield _plan(layer, eight, tiling, (batch, chunks, multiprocessors, stages))


def _line_pitch(layer: SparseLayer, tiling: _Tiling, lines: int) -> int:
    """Pixels from a line of a run to the next one, at least: zeros behind a row are also those before the next."""
    _, columns = _window(layer, tiling)
    shared = 0
    if layer.strides == (1, 1) and lines > 1:
        before, (_, in_w) = layer.pads[1], layer.in_size or (0, 0)
        shared = min(max(columns - before - in_w, 0), before)
    pitch = max(math.ceil((columns - shared) / layer.strides[1]), tiling.width)
    return pitch + (pitch % 2 if lines > 1 and tiling.width % 2 == 0 else 0)


def _chunks_of_places(layer: SparseLayer) -> int:
    """Chunks that share out the taps of the same 32 places."""
    return math.ceil(math.prod(layer.kernel_shape) / _MAX_CHUNK_STEPS)


def _num_stages(layer: SparseLayer, tiling: _Tiling, line_pitch: int) -> int:
    """Chunks that shared memory has room for."""
    rows, columns = _window(layer, tiling)
    taps = math.prod(layer.kernel_shape)
    steps = math.ceil(taps / _chunks_of_places(layer))
    weight_bytes = math.ceil(4 * (taps + 1) / 128) * 128 + steps * _STEP_BYTES
    stage_bytes = rows * layer.strides[1] * line_pitch * _PIXEL_BYTES + weight_bytes
    room = _RING_SHARED_BYTES - _ROW_BYTES - 8 * rows * columns
    return min(room // stage_bytes, _MAX_STAGES)


def eights_of(batch: int, out_h: int) -> list[Eights]:
    """Of images and, where these leave parts of a pixel empty, of strips."""
    eights = [Eights(math.ceil(batch / IMAGES), out_h)]
    if batch % IMAGES:
        eights.append(Eights(batch, math.ceil(out_h / IMAGES)))
    return eights


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


def _plan(layer: SparseLayer, eights: Eights, tiling: _Tiling, work: tuple[int, float, float, int]) -> WarpgroupPlan:
    batch, chunks, multiprocessors, stages = work
    out_h, out_w = out_size(layer)
    rows, columns = _window(layer, tiling)
    tiles_x, tiles_y = math.ceil(out_w / tiling.width), math.ceil(eights.rows / tiling.height)
    _, row_blocks = rows_of_blocks(layer)
    tiles = row_blocks * tiles_x * tiles_y * eights.count

    steps, chunks = chunks * math.prod(layer.kernel_shape), chunks * _chunks_of_places(layer)
    pixels = chunks * rows * columns * CHANNELS
    products = steps * WARPGROUPS * tiling.positions * _POSITION_CYCLES
    needs = [products, (steps * _STEP_BYTES + pixels * 2 * IMAGES) / _BYTES_A_CYCLE, pixels * _COLUMN_CYCLES]
    overlap = _OVERLAP if stages > 1 else 1.0
    sums = max(needs) + overlap * (sum(needs) - max(needs)) + chunks * _CHUNK_CYCLES
    outputs = _STORE_CYCLES + (_FULL_CYCLES if tiling.positions == max(_POSITIONS) else 0.0)
    is_float, itemsize = layer.element_type == np.float32, layer.element_type.itemsize
    outputs += _FLOAT_POSITION_CYCLES * (tiling.positions - _FIRST_POSITIONS) if is_float else 0.0

    window = math.ceil(columns / _LINE_PIXELS) * _LINE_PIXELS
    if 8 * window > 9 * columns:
        window = math.ceil(columns / _SECTOR_PIXELS) * _SECTOR_PIXELS
    all_rows = (tiles_y - 1) * tiling.height * layer.strides[0] + rows
    x_bytes = itemsize * batch * layer.in_channels * math.prod(layer.in_size or ())
    interleaved = 2 * IMAGES * eights.count * layer.in_channels * all_rows * tiles_x * window
    before = _BEGIN_CYCLES + memory_cycles(x_bytes + interleaved, multiprocessors)
    num_bytes = itemsize * batch * layer.out_channels * out_h * out_w
    before += memory_cycles(max(num_bytes - _KEPT_BYTES, 0.0), multiprocessors) if is_float else 0.0
    cycles, parts = _share(tiles, chunks, (sums, outputs), num_bytes, multiprocessors)
    return WarpgroupPlan(before + cycles, tiles, parts, LAUNCH_CYCLES)


def _share(
    tiles: int, chunks: float, each: tuple[float, float], num_bytes: int, multiprocessors: float
) -> tuple[float, int]:
    """Cycles, and parts of a tile's chunks that multiprocessors share; ``each`` tile's are of all chunks, and more."""
    of_chunks, of_tile = each
    best = (math.ceil(tiles / multiprocessors) * (of_chunks + of_tile), 1)
    for parts in range(2, int(min(multiprocessors // max(tiles, 1), chunks, _MAX_PARTS)) + 1):
        reduced = LAUNCH_CYCLES + memory_cycles((2 * parts + 1) * num_bytes, multiprocessors)
        best = min(best, (math.ceil(chunks / parts) / chunks * of_chunks + of_tile + reduced, parts))
    return best


def round_up(value: int, unit: int) -> int:
    """The next multiple of a unit."""
    return math.ceil(value / unit) * unit


def memory_cycles(num_bytes: float, multiprocessors: float) -> float:
    """Cycles of a multiprocessor until memory has moved so many bytes."""
    return num_bytes / (_MEMORY_BYTES_A_CYCLE * multiprocessors)
