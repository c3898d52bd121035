"""What the native library's plan for its flat kernel takes, in cycles: `ChooseFlatLaunch` of flat_plan.cc, which has
the same constants and explains them, without limits of memory but that of shared memory; and which steps
`PackFlatWeight` of flat_weight.cc makes of a weight of which is known how many zeros it has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.warpgroup_plan import (
    CHANNELS,
    MOST_DENSE_BYTES,
    ROWS,
    WARPGROUPS,
    WarpgroupPlan,
    out_size,
    round_up,
)

_BLOCKS, _BLOCK_PIXELS, _MAX_STAGES = (16, 24, 28, 30, 32), 8, 3
_PIXEL_BYTES, _OCTET, _PIXEL_UNIT, _LEAST_ROW_PIXELS = 16, 8, 8, 8
_LEAST_CHANNELS, _MOST_CHANNELS, _MOST_REACH = 64, 2048, 256
_MAX_CHUNK_STEPS, _HEADER_BYTES = 18, 128
# Of sparse steps, and of dense ones.
_STEP_BYTES, _DENSE_STEP_BYTES, _DENSE_CHANNELS = 2304, 2048, 16
# Shared memory of a block, less what the driver has of it, outputs on their way to Y, and tables.
_ROOM = (227 << 10) - 1024 - (8 * (16 * (512 + 16) + 16) + 2 * (16 + 2 * 8 * 32 * 2 + 16))
_STAGE_UNIT, _BARRIER_BYTES, _ALIGNED = 128, 16, 16


class _Costs(NamedTuple):
    step: float
    step_block: float
    store: float
    store_block: float
    begin: float
    chunk: float
    staged_bytes: float


_HALF_COSTS = _Costs(94.0, 6.7, 1900.0, 139.0, 7700.0, 150.0, 32.0)
_FLOAT_COSTS = _Costs(45.0, 8.2, 4300.0, 337.0, 5700.0, 150.0, 32.0)
_DENSE_HALF_COSTS = _Costs(20.5, 6.9, 1900.0, 139.0, 7700.0, 360.0, 40.0)
_DENSE_FLOAT_COSTS = _Costs(47.0, 5.4, 4300.0, 337.0, 5700.0, 360.0, 40.0)
_FLATTEN_CYCLES, _FLATTEN_BYTES_A_CYCLE = 2000.0, 15.0
# Of what is left of X to be made flat beside products.
_HALF_BESIDE, _FLOAT_BESIDE, _LEAST_HALF_TURNS, _LEAST_FLOAT_TURNS, _LEAST_STAGES = 0.8, 0.55, 3, 2, 2
_REST_ROWS_BYTES, _REST_SLOTS, _REST_HEADER, _LEAST_ROWS_PLANE, _MOST_SEEN = 6144, 6, 16, 128, 8192

# Octets with third entries. Where entries are at random, and channels in any order, an octet has so many third entries
# of four neighbours in the mean, of 64 rows and a tap, `thirds`, and has any with a probability of 1 - exp(-thirds).
# The order is chosen, and has `channels ** -(strength / of_four ** power)` times as many: the fewer the more channels
# there are to choose from, and the fewer four neighbours have in all steps that they are part of, `of_four`. Strength
# and power are of the order that the search begins with, fitted to 2291 weights at random, packed: 64 to 1024 channels
# and 32 to 1024 rows of 2 to 49 taps, with 78% to 96% zeros; and of the one that it ends with, fitted to 119 of 14
# shapes, with 84% to 96%. Of these, pairs for each step are 0.027 off (root mean square).
_FIRST_ORDER, _LAST_ORDER = (1.295, 0.676), (3.3, 1.0)
_MOST_STRAY_OCTETS, _MOST_DENSITY = 1.2, 0.3


@dataclass(frozen=True)
class FlatPlan(WarpgroupPlan):
    """How the flat kernel runs a layer.

    Attributes:
        blocks: eights of pixels of a warpgroup.
    """

    blocks: int = 0


@dataclass(frozen=True)
class FlatSteps:
    """What 64 outputs go through.

    Attributes:
        count: how many steps.
        pairs: how many pairs of octets, beside these, for entries that are the third of their neighbours.
        is_dense: whether a step is of 16 channels and a tap, with their zeros; else of 32.
    """

    count: float
    pairs: float = 0.0
    is_dense: bool = False

    @property
    def channels(self) -> int:
        """Of a step."""
        return _DENSE_CHANNELS if self.is_dense else CHANNELS

    @property
    def bytes_of_step(self) -> int:
        """Of the weight."""
        return _DENSE_STEP_BYTES if self.is_dense else _STEP_BYTES


def flat_steps(layer: SparseLayer) -> FlatSteps | None:
    """As many steps as weights at random take; None where the library would not pack the weight."""
    density = np.count_nonzero(layer.used_weights) / layer.weight.size
    thirds = _third_share(layer, density)
    if density <= _MOST_DENSITY and 4 * _stray_share(layer, thirds, _FIRST_ORDER) <= _MOST_STRAY_OCTETS:
        chunks, taps = math.ceil(layer.group_in_channels / CHANNELS), math.prod(layer.kernel_shape)
        octets = 4 * taps * _stray_share(layer, thirds, _LAST_ORDER)
        # An octet that is left over has a pair, too.
        pairs = octets / 2 + (1 - math.exp(-2 * octets)) / 4
        return FlatSteps(chunks * taps, pairs=chunks * pairs)
    dense = math.ceil(layer.group_in_channels / _DENSE_CHANNELS) * math.prod(layer.kernel_shape)
    row_tiles = layer.group * math.ceil(layer.group_out_channels / ROWS)
    if dense > MOST_DENSE_BYTES // _DENSE_STEP_BYTES // row_tiles:
        return None
    return FlatSteps(dense, is_dense=True)


def _stray_share(layer: SparseLayer, thirds: float, order: tuple[float, float]) -> float:
    """Of octets and taps, those of which 64 rows have entries that are the third of their neighbours."""
    if thirds == 0:
        return 0.0
    strength, power = order
    rows = layer.group_out_channels
    of_four = rows * math.prod(layer.kernel_shape) * thirds
    of_octet = rows / math.ceil(rows / ROWS) * (_OCTET // 4) * thirds
    return 1 - math.exp(-of_octet * layer.group_in_channels ** (-strength / of_four**power))


def _third_share(layer: SparseLayer, density: float) -> float:
    """Probability that a row has more than two entries in four neighbours: no more channels of them than have to be."""
    channels, fours = layer.group_in_channels, math.ceil(layer.group_in_channels / CHANNELS) * CHANNELS // 4
    together = math.ceil(channels / fours)
    of_full = density**3 if together == 3 else density**3 * (4 - 3 * density)
    return of_full * channels / together / fours if together > 2 else 0.0


def plan_flat(layer: SparseLayer, batch: int, steps: FlatSteps, multiprocessors: float) -> FlatPlan | None:
    """The plan of a layer that takes the fewest cycles; None where the kernel cannot run it, or no tile fits.

    Args:
        layer: 1-D or 2-D, with a known input size.
        batch: images, at least 1.
        steps: that 64 outputs go through.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    call = _Call(layer, batch, steps, multiprocessors, *_axes(layer))
    if not _has_flat_form(layer) or 0 in (layer.in_size or ()):
        return None
    plans = (_plan(call, blocks) for blocks in _BLOCKS)
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.cycles, default=None)


def _has_flat_form(layer: SparseLayer) -> bool:
    reaches = ((kernel - 1) * dilation for kernel, dilation in zip(layer.kernel_shape, layer.dilations, strict=True))
    return (
        math.prod(layer.kernel_shape) > 1
        and _LEAST_CHANNELS <= layer.group_in_channels <= _MOST_CHANNELS
        and layer.group_out_channels <= _MOST_CHANNELS
        and max(*reaches, *layer.strides) < _MOST_REACH
    )


@dataclass(frozen=True)
class _Axis:
    """Rows, or columns, of flat images: sizes of X and Y, and the window along them."""

    size: int
    out: int
    stride: int
    dilation: int
    kernel: int
    pad: int

    @property
    def taps(self) -> list[tuple[int, int]]:
        """Of each, from the pixel of the first one, and its place between strides."""
        return [divmod(tap * self.dilation, self.stride) for tap in range(self.kernel)]

    @property
    def reach(self) -> int:
        """Pixels from that of the first tap to that of the last one."""
        return (self.kernel - 1) * self.dilation // self.stride

    def count(self, least: int) -> int:
        """How many there are: as few as can be, where those behind the last one serve as the next row's first ones."""
        return next(count for count in itertools.count(max(self.out, least)) if self._is_enough(count))

    def _is_enough(self, count: int) -> bool:
        """Whether those that are read behind so many are zeros, and are zeros, too, at the begin of the next row."""
        return all(
            self._is_padding(pixel, between) and self._is_padding(pixel % count, between)
            for offset, between in self.taps
            for pixel in range(count, self.out + offset)
        )

    def _is_padding(self, pixel: int, between: int) -> bool:
        return not 0 <= pixel * self.stride + between - self.pad < self.size


@dataclass(frozen=True)
class _Call:
    """What plans are made for."""

    layer: SparseLayer
    batch: int
    steps: FlatSteps
    multiprocessors: float
    y: _Axis
    x: _Axis

    @cached_property
    def rows(self) -> int:
        """Of a flat image."""
        return self.y.count(1)

    @cached_property
    def row_pixels(self) -> int:
        return self.x.count(_LEAST_ROW_PIXELS)


def _axes(layer: SparseLayer) -> Iterator[_Axis]:
    sizes = zip(layer.in_size or (0, 0), out_size(layer), strict=True)
    windows = zip(layer.strides, layer.dilations, layer.kernel_shape, layer.pads[:2], strict=True)
    return (_Axis(*size, *window) for size, window in zip(sizes, windows, strict=True))


def _plan(call: _Call, blocks: int) -> FlatPlan | None:
    layer, chunks, rows, row_pixels = call.layer, _chunks(call), call.rows, call.row_pixels
    tile_pixels = WARPGROUPS * _BLOCK_PIXELS * blocks
    stage_pixels = round_up(tile_pixels + call.y.reach * row_pixels + call.x.reach, _PIXEL_UNIT)
    of_octets = call.steps.channels // _OCTET * _PIXEL_BYTES * stage_pixels
    of_weight = _HEADER_BYTES + math.ceil(max(chunks)) * call.steps.bytes_of_step
    of_weight += _most_pairs(call.steps.pairs / len(chunks)) * _DENSE_STEP_BYTES
    stage_bytes = round_up(of_octets + of_weight, _STAGE_UNIT)
    if stage_bytes + _BARRIER_BYTES > _ROOM:
        return None
    pixels = ((call.batch - 1) * rows + call.y.out - 1) * row_pixels + call.x.out
    runs, row_tiles = math.ceil(pixels / tile_pixels), layer.group * math.ceil(layer.group_out_channels / ROWS)
    tiles = runs * row_tiles

    costs, itemsize, steps = _costs(call), layer.element_type.itemsize, call.steps.count
    staged = len(chunks) * of_octets + steps * call.steps.bytes_of_step + call.steps.pairs * _DENSE_STEP_BYTES
    products = steps * (costs.step + blocks * costs.step_block)
    of_pairs = _DENSE_FLOAT_COSTS if _is_float(call) else _DENSE_HALF_COSTS
    products += call.steps.pairs * (of_pairs.step + blocks * of_pairs.step_block)
    of_tile = max(products, staged / costs.staged_bytes)
    of_tile += len(chunks) * costs.chunk + costs.store + blocks * costs.store_block
    flat_pixels = round_up((runs - 1) * tile_pixels + stage_pixels, _PIXEL_UNIT)
    moved = itemsize * call.batch * layer.in_channels * call.y.size * call.x.size
    moved += _num_octets(call) * flat_pixels * _PIXEL_BYTES
    num_blocks = min(tiles, int(call.multiprocessors))
    turns = math.ceil(tiles / num_blocks)
    first_tiles = num_blocks if turns >= (_LEAST_FLOAT_TURNS if _is_float(call) else _LEAST_HALF_TURNS) else tiles
    first_pixels = (first_tiles - 1) // row_tiles * tile_pixels + stage_pixels
    of_stages = min(_ROOM // (stage_bytes + _BARRIER_BYTES), _LEAST_STAGES) * (stage_bytes + _BARRIER_BYTES)
    saved = 1 - (_FLOAT_BESIDE if _is_float(call) else _HALF_BESIDE)
    saved *= _share_left(call, first_pixels, _ROOM - of_stages)
    before = _FLATTEN_CYCLES + (1 - saved) * moved / (_FLATTEN_BYTES_A_CYCLE * int(call.multiprocessors))
    cycles = before + costs.begin + turns * of_tile
    return FlatPlan(cycles, tiles, 1, blocks=blocks)


def _most_pairs(mean: float) -> int:
    """Of the chunk that has most of them, about: the largest one needs room."""
    return math.ceil(mean + 1.75 * math.sqrt(mean))


def _share_left(call: _Call, first_pixels: int, room: int) -> float:
    """Of X, what is made flat by the kernel itself, behind the first pixels, where there is room for it."""
    layer, rows, row_pixels = call.layer, call.rows, call.row_pixels
    row_bytes = layer.element_type.itemsize * call.x.size
    is_aligned = layer.in_channels * call.y.size * row_bytes % _ALIGNED == 0
    if max(layer.strides) > 1 or call.y.size * call.x.size < _LEAST_ROWS_PLANE or not is_aligned:
        return 0.0
    chunk_rows = math.ceil(rows / min(math.ceil(_OCTET * rows * row_bytes / _REST_ROWS_BYTES), rows))
    chunks = math.ceil(rows / chunk_rows)
    image, pixel = divmod(first_pixels - 1, rows * row_pixels)
    first_chunks = min(image * chunks + pixel // row_pixels // chunk_rows + 1, call.batch * chunks)
    slot_bytes = _REST_HEADER + _OCTET * (round_up(chunk_rows * row_bytes, _ALIGNED) + _ALIGNED)
    is_seen = not _is_float(call) or first_chunks * _num_octets(call) <= _MOST_SEEN
    return 1 - first_chunks / (call.batch * chunks) if _REST_SLOTS * slot_bytes <= room and is_seen else 0.0


def _is_float(call: _Call) -> bool:
    return bool(call.layer.element_type == np.float32)


def _costs(call: _Call) -> _Costs:
    if call.steps.is_dense:
        return _DENSE_FLOAT_COSTS if _is_float(call) else _DENSE_HALF_COSTS
    return _FLOAT_COSTS if _is_float(call) else _HALF_COSTS


def _chunks(call: _Call) -> list[float]:
    """Steps of each chunk of a row tile. Taps at other places between strides are in other ones."""
    taps = [(y, x) for _, y in call.y.taps for _, x in call.x.taps]
    channels = math.ceil(call.layer.group_in_channels / call.steps.channels)
    found: list[float] = []
    for place in dict.fromkeys(taps):
        steps = call.steps.count * taps.count(place) / len(taps) / channels
        pairs = call.steps.pairs * taps.count(place) / len(taps) / channels
        parts = math.ceil((steps + pairs) / _MAX_CHUNK_STEPS)
        found += [steps / parts] * parts * channels
    return found


def _num_octets(call: _Call) -> int:
    """Of flat X."""
    places = math.prod(len({between for _, between in axis.taps}) for axis in (call.y, call.x))
    channels = round_up(call.layer.group_in_channels, call.steps.channels)
    return call.layer.group * places * channels // _OCTET
