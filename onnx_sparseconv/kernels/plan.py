"""Plans of generated CUDA kernels: the sizes that the code is made for, chosen by a model of the machine.

The model counts what one warp of a multiprocessor needs for its share: issue slots (four instructions a cycle), loads
of shared memory (one warp a cycle), and the input that has to come from the second-level cache. Its constants are
leads, to be replaced by measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.kernels.layer import Refusal, SparseLayer
from onnx_sparseconv.kernels.schedule import columns_per_slot, words_and_taps

# Dynamic shared memory of a block, by architecture (major * 10 + minor); the highest that is not above counts.
_SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
MIN_ARCHITECTURE = 75
# Static shared memory: barriers, and for every thread the values that it finishes at a time (cuda/sums.cuh).
_BARRIER_BYTES = 64
_BATCH_BYTES_A_THREAD = 32
# Each quarter of a multiprocessor has registers for its own warps: these, for a lane of all of them. They are given out
# eight at a time.
_QUARTERS = 4
_LANE_REGISTERS = 512
_TILE_CHANNELS = (128, 96, 64, 48, 32, 24, 16, 12, 8, 4, 2, 1)
_MAX_WORDS = 64
_MAX_THREADS = 1024
_MIN_THREADS = 64
_MAX_CHUNK_CHANNELS = 64
# Instructions of all warps of a block in a chunk: many against what is done once a chunk, few enough that small batches
# can split the work.
_CHUNK_INSTRUCTIONS = 14_000
# Stages of a block, the most that fit: fewer hide less, but fewer threads cost more.
_STAGES = (4, 3, 2)
# Code that stays in the instruction cache of a multiprocessor, and the bytes of an instruction.
RESIDENT_CODE_BYTES = 96 << 10
_INSTRUCTION_BYTES = 16
# Registers besides sums and addresses: loads in flight, geometry, parameters.
_OTHER_REGISTERS = 40
LOADS_AHEAD = 8
# Terms that are summed in half before they are added to the second level. A sum of n terms in half has about
# sqrt(1 + n / 2) times the error of one in float that is rounded once; levels add up in the root.
HALF_TERMS = 16
MAX_HALF_ERROR = 3.6
# The input size that a plan is made for when the model does not tell.
_DEFAULT_SIZE = (56, 56)
# Cache and memory bandwidth of a multiprocessor, bytes a cycle (H200: about 5.5 and 4.3 TB/s over 132 at 1.75 GHz).
_CACHE_BYTES_A_CYCLE = 23.7
_MEMORY_BYTES_A_CYCLE = 18.6
_WARP = 32


@dataclass(frozen=True)
class GeneratedPlan:
    """The struct of the same name in ``cuda/params.h``, field by field; integers throughout."""

    element_type: int
    in_channels: int
    out_channels: int
    group: int
    tile_in_channels: int
    kernel_shape: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads_begin: tuple[int, int]
    activation: int
    is_pointwise: int
    tile_channels: int
    num_tiles: int
    chunk_channels: int
    num_chunks: int
    columns_per_slot: int
    threads: int
    num_stages: int
    channel_pitch: int
    plane_residue: int
    code_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.num_stages * self.chunk_channels * self.channel_pitch

    def __str__(self) -> str:
        tiles = "1 tile" if self.num_tiles == 1 else f"{self.num_tiles} tiles"
        return (
            f"{tiles} of {self.tile_channels} channels, chunks of {self.chunk_channels} input channels, "
            f"{self.threads} threads, {self.num_stages} stages of {self.shared_bytes // self.num_stages} bytes, "
            f"about {self.code_bytes} bytes of code a tile"
        )


def has_short_sums(layer: SparseLayer) -> bool:
    """Whether float16 sums are short enough for a second level in half (see `HALF_TERMS`)."""
    terms = int(np.count_nonzero(layer.used_weights.reshape(layer.out_channels, -1), axis=1).max(initial=0))
    return math.sqrt(1 + HALF_TERMS / 2 + math.ceil(terms / HALF_TERMS) / 2) <= MAX_HALF_ERROR


def registers_a_channel(layer: SparseLayer) -> int:
    """Registers that the sums of one output channel of a slot take."""
    if layer.element_type != np.float16:
        return 1
    return 2 if has_short_sums(layer) else 3


def choose_plan(layer: SparseLayer, architecture: int) -> GeneratedPlan | Refusal:
    """The plan that the model thinks fastest for a layer on a GPU of this architecture (90 for sm_90)."""
    plans = list(candidate_plans(layer, architecture))
    if not plans:
        return Refusal(_why_none(layer, architecture))
    return min(plans, key=lambda plan: estimate_cycles(layer, plan))


def _why_none(layer: SparseLayer, architecture: int) -> str:
    words, _ = words_and_taps(layer)
    if architecture < MIN_ARCHITECTURE:
        return f"sm_{architecture} is older than sm_{MIN_ARCHITECTURE}"
    if not layer.used_weights.any():
        return "all its weights are zero"
    if len(words) > _MAX_WORDS:
        return (
            f"a kernel of {layer.kernel_shape[0]}x{layer.kernel_shape[1]} needs more addresses than there are registers"
        )
    return "the rows that its taps span do not fit in shared memory"


def candidate_plans(layer: SparseLayer, architecture: int) -> Iterator[GeneratedPlan]:
    """All plans that can run: one for each number of output channels in a tile."""
    words, _ = words_and_taps(layer)
    if architecture < MIN_ARCHITECTURE or len(words) > _MAX_WORDS or not layer.used_weights.any():
        return
    group_out = layer.group_out_channels
    for tile_channels in sorted({min(channels, layer.out_channels) for channels in _TILE_CHANNELS}):
        # A tile is part of a group, or spans whole ones: as many as every other tile, for the plan has one number.
        is_even = tile_channels % group_out == 0 and layer.out_channels % tile_channels == 0
        if layer.group > 1 and group_out % tile_channels and not is_even:
            continue
        plan = _plan_for(layer, architecture, tile_channels, len(words))
        if plan is not None:
            yield plan


def _plan_for(layer: SparseLayer, architecture: int, tile_channels: int, num_words: int) -> GeneratedPlan | None:
    group_out, group_in = layer.group_out_channels, layer.group_in_channels
    registers = tile_channels * registers_a_channel(layer) + num_words + LOADS_AHEAD + _OTHER_REGISTERS
    max_threads = min(_MAX_THREADS, _LANE_REGISTERS // (-(-registers // 8) * 8) * _QUARTERS * _WARP)
    if registers > 255 or max_threads < _MIN_THREADS:
        return None
    tile_in_channels = min(layer.in_channels, group_in * max(1, tile_channels // group_out))
    threads = _choose_threads(layer, max_threads)
    code_bytes = _code_bytes(layer, tile_channels)
    a_channel = max(1.0, code_bytes / _INSTRUCTION_BYTES / tile_in_channels)
    shared = _SHARED_BYTES[max(k for k in _SHARED_BYTES if k <= architecture)] - _BARRIER_BYTES
    while threads >= _MIN_THREADS:
        pitch = _channel_pitch(layer, threads)
        room = shared - _BATCH_BYTES_A_THREAD * threads
        least = min(4, tile_in_channels)
        stages = next((n for n in _STAGES if room // (n * pitch) >= least), 0)
        wanted = max(4, int(_CHUNK_INSTRUCTIONS / (a_channel * threads / _WARP)))
        if stages:
            limit = min(room // (stages * pitch), tile_in_channels, _MAX_CHUNK_CHANNELS)
            break
        threads = threads // 2 // _WARP * _WARP
    else:
        return None
    chunk = _chunk_channels(min(wanted, limit), limit, tile_in_channels)
    return GeneratedPlan(
        element_type=10 if layer.element_type == np.float16 else 1,
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
        group=layer.group,
        tile_in_channels=tile_in_channels,
        kernel_shape=layer.kernel_shape,
        strides=layer.strides,
        dilations=layer.dilations,
        pads_begin=(layer.pads[0], layer.pads[1]),
        activation=layer.activation,
        is_pointwise=int(layer.is_pointwise),
        tile_channels=tile_channels,
        num_tiles=-(-layer.out_channels // tile_channels),
        chunk_channels=chunk,
        num_chunks=-(-tile_in_channels // chunk),
        columns_per_slot=columns_per_slot(layer),
        threads=threads,
        num_stages=stages,
        channel_pitch=pitch,
        plane_residue=_plane_residue(layer),
        code_bytes=code_bytes,
    )


def _plane_residue(layer: SparseLayer) -> int:
    height, width = layer.row_size or _DEFAULT_SIZE
    residue = height * width % (16 // layer.element_type.itemsize)
    # Words of two halves never begin at odd elements; planes of an odd size are staged element by element.
    return residue if residue % columns_per_slot(layer) == 0 else 0


def _chunk_channels(wanted: int, limit: int, channels: int) -> int:
    """Channels of chunks of nearly equal size, if possible a multiple of 8 or 4: their planes then begin aligned."""
    chunk = -(-channels // -(-channels // wanted))
    for multiple in (8, 4):
        if chunk >= multiple:
            rounded = -(-chunk // multiple) * multiple
            return rounded if rounded <= limit else chunk // multiple * multiple
    return chunk


def _slots(layer: SparseLayer) -> tuple[int, int]:
    """Slots of an output row, and rows; of a default size where the model does not tell."""
    size = layer.out_size()
    if size is None:
        size = replace(layer, in_size=_DEFAULT_SIZE).out_size()
    height, width = size or _DEFAULT_SIZE
    return max(1, -(-width // columns_per_slot(layer))), max(1, height)


def _choose_threads(layer: SparseLayer, max_threads: int) -> int:
    """Threads of a block such that few of them idle, and as many warps as possible share the code."""
    row, height = _slots(layer)
    plane = row * height

    def busy(threads: int) -> float:
        if plane <= threads:
            return threads // plane * plane / threads
        return plane / (-(-plane // threads) * threads)

    candidates = range(_WARP * max(2, max_threads // 64), max_threads + 1, _WARP)
    return max(candidates, key=lambda t: busy(t) * (1 - 2 * _WARP / t / 10), default=max_threads)


def _channel_pitch(layer: SparseLayer, threads: int) -> int:
    """Bytes of a staged channel: the leading zeros, and what any group of slots reads of one or several images."""
    row, height = _slots(layer)
    in_height, in_width = layer.row_size or _DEFAULT_SIZE
    size = layer.element_type.itemsize
    columns = columns_per_slot(layer)
    reach_h, reach_w = (
        (kernel - 1) * dilation + 1 for kernel, dilation in zip(layer.kernel_shape, layer.dilations, strict=True)
    )
    pitch = in_width + in_width % columns
    plane = row * height
    images = max(1, threads // plane)
    slots = -(-plane // -(-plane // threads))
    if plane <= threads:
        elements = in_height * pitch
    elif in_height == 1:
        elements = (slots * columns - 1) * layer.strides[1] + reach_w + columns
    else:
        out_rows = min(height, -(-slots // row) + (1 if slots % row else 0))
        elements = min(in_height, (out_rows - 1) * layer.strides[0] + reach_h) * pitch
    image = -(-(elements * size + 16 - size) // 16) * 16
    return 16 + images * image + 16


@dataclass(frozen=True)
class _Work:
    """Instructions of each tile, ``[num_tiles]``: multiply-adds, loads of words, and others."""

    multiply_adds: NDArray[np.int64]
    loads: NDArray[np.int64]
    others: NDArray[np.int64]


def _work(layer: SparseLayer, tile_channels: int) -> _Work:
    words, taps = words_and_taps(layer)
    used = (layer.used_weights != 0).reshape(layer.out_channels, layer.group_in_channels, -1)
    # Output channels that read the same input channels: of one tile and one group.
    rows = tile_channels if layer.group == 1 else min(tile_channels, layer.group_out_channels)
    starts = np.arange(0, layer.out_channels, rows)
    tap_used = np.logical_or.reduceat(used, starts)
    word_used = np.zeros((*tap_used.shape[:2], len(words)), bool)
    for index, tap in enumerate(taps):
        for word in tap.words:
            word_used[:, :, word] |= tap_used[:, :, index]
    is_joined = np.array([not tap.is_word for tap in taps])
    tiles = starts // tile_channels
    count = -(-layer.out_channels // tile_channels)

    def by_tile(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(tiles, values, count).astype(np.int64)

    multiply_adds = by_tile(np.add.reduceat(used.sum(axis=(1, 2)), starts))
    others = by_tile(tap_used[:, :, is_joined].sum(axis=(1, 2)))
    if layer.element_type == np.float16:
        others += multiply_adds // HALF_TERMS * (1 if has_short_sums(layer) else 4)
    return _Work(multiply_adds, by_tile(word_used.sum(axis=(1, 2))), others)


def _code_bytes(layer: SparseLayer, tile_channels: int) -> int:
    work = _work(layer, tile_channels)
    return int((work.multiply_adds + work.loads + work.others).max()) * _INSTRUCTION_BYTES


def estimate_cycles(layer: SparseLayer, plan: GeneratedPlan) -> float:
    """Cycles of a multiprocessor for a warp's slots of all output channels; only good for comparing plans."""
    work = _work(layer, plan.tile_channels)
    issued = (work.multiply_adds + work.loads + work.others) / 4
    compute = float(np.maximum(issued, work.loads * layer.strides[1]).sum())
    size = layer.element_type.itemsize
    row, height = _slots(layer)
    in_height, in_width = layer.row_size or _DEFAULT_SIZE
    halo = plan.channel_pitch / size / plan.threads / plan.columns_per_slot
    halo = max(halo, in_height * in_width / (row * height * plan.columns_per_slot))
    staged = plan.num_tiles * plan.tile_in_channels * _WARP * plan.columns_per_slot * halo * size / _CACHE_BYTES_A_CYCLE
    passes = -(-plan.code_bytes // RESIDENT_CODE_BYTES)
    partial = (passes - 1) * 2 * 4 * layer.out_channels * _WARP * plan.columns_per_slot / _MEMORY_BYTES_A_CYCLE
    moved = staged + partial
    # Fewer warps hide less; sixteen are enough.
    warps = plan.threads / _WARP
    return (max(compute, moved) + 0.3 * min(compute, moved)) * (1 + max(0.0, 16 - warps) / 32)
