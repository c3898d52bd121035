"""Plans of generated CUDA kernels: the sizes that the code is made for, chosen by a model of the machine.

The model counts what a block needs for its groups of slots: lines of code, until they are fetched and all warps have
run them, and the input and output that pass through the second-level cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.kernels.layer import Refusal, SparseLayer
from onnx_sparseconv.kernels.schedule import columns_per_slot, words_and_taps

# Shared memory of a block, by architecture (major * 10 + minor); the highest that is not above counts.
_SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
MIN_ARCHITECTURE = 75
# Static shared memory: `kMaxStaticBytes` of ``cuda/generated_conv.cuh``.
_STATIC_BYTES = 256
_ZERO_BANK_BYTES = 128  # a word of each bank of shared memory
_ZERO_BYTES = _ZERO_BANK_BYTES + 16  # before each staged channel
# Bulk copies have a warp of their own.
_BULK_ARCHITECTURE = 90
# Each quarter of a multiprocessor has registers for its own warps: these, for a lane of all of them. They are given out
# eight at a time.
_QUARTERS = 4
_LANE_REGISTERS = 512
_TILE_CHANNELS = (64, 32, 16, 8, 4, 2, 1)
_MAX_WORDS = 64
_MAX_THREADS = 1024
_MIN_THREADS = 64
_MAX_REGISTERS = 255
_MAX_CHUNK_CHANNELS = 64
# Maps of at most so many slots are staged as whole planes: a copy for each channel would take longer than the code.
_PACKED_SLOTS = 256
# Instructions of a chunk: many against what is done once a chunk, few enough that small batches can split the work.
_CHUNK_INSTRUCTIONS = 1500
_MIN_CHUNK_CHANNELS = 4
# Stages of a block: with more, warps run ahead of each other and share less of the code that they fetch.
_STAGES = 2
_INSTRUCTION_BYTES = 16
# Registers of a thread besides sums, addresses and loads in flight. With fewer, the assembler puts each load right
# before what needs it, or spills; with more, there is room for fewer warps.
_OTHER_REGISTERS = 19
# The same, where all threads stage and none does only that.
_STAGING_REGISTERS = 8
LOADS_AHEAD = 4
# Terms that are summed in half before they are added to a second level, also in half. A sum of n terms in half has
# about sqrt(1 + n / 2) times the error of one in float that is rounded once; levels add up in the root, and so do
# passes, between which sums are rounded.
HALF_TERMS = 12
MAX_HALF_ERROR = 3.75
# The model's constants, fitted to measurements on an H200. Cycles that a block takes for a line of 128 bytes of code:
# until it is there, by the bytes of the code of a single tile (several tiles never stay near), and for each warp to
# run it.
_LINE_INSTRUCTIONS = 128 // _INSTRUCTION_BYTES
_LINE_CODE_BYTES = (100 << 10, 150 << 10)
_LINE_CYCLES = (24.5, 43.0)
_WARP_LINE_CYCLES = 0.6
# Instructions that a warp runs once for every group and tile, and once for every chunk of them.
_GROUP_INSTRUCTIONS = 100
_CHUNK_INSTRUCTIONS_BESIDES = 100
_MULTIPROCESSORS = 132
# To launch the kernel that adds up the sums of splits.
_REDUCE_CYCLES = 3000
# Plans are compared for so many images and, with this exponent, for one, whose launch takes its time whatever the plan.
_REFERENCE_BATCH = 64
_ONE_IMAGE_WEIGHT = 0.05
_LAUNCH_CYCLES = 9000
# Of compute and memory, the share of the lesser that does not overlap with the other.
_OVERLAP = 0.41
# The input size that a plan is made for when the model does not tell.
_DEFAULT_SIZE = (56, 56)
# Cache and memory bandwidth of a multiprocessor, bytes a cycle.
_CACHE_BYTES_A_CYCLE = 33.0
_COPY_CYCLES = 46.0  # of a channel of an image, or a part of one; of all of a chunk where they are packed
_MEMORY_BYTES_A_CYCLE = 12.7
_WARP = 32
# Inputs that X may be concatenated of: `kMaxSources` of ``cuda/params.h``.
MAX_SOURCES = 8


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
    staging_threads: int
    num_stages: int
    channel_pitch: int
    plane_residue: int
    image_pitch: int
    stage_images: int
    min_passes: int
    code_bytes: int
    source_channels: tuple[int, int, int, int, int, int, int, int]

    @property
    def num_sources(self) -> int:
        """Inputs that X is concatenated of and that the code reads; 0 where it reads X."""
        return len(self.source_channels) - self.source_channels.count(0)

    @property
    def source_begins(self) -> tuple[int, ...]:
        """The first channel in X of each of these, and the number of all; empty where there are none."""
        channels = self.source_channels[: self.num_sources]
        return tuple(itertools.accumulate(channels, initial=0)) if channels else ()

    @property
    def is_packed(self) -> bool:
        """Whether whole planes are staged as they lie in memory, which fits inputs of one size."""
        return self.image_pitch > 0

    @property
    def zero_bytes(self) -> int:
        """Zeros before each staged channel, or before the images of a packed stage."""
        if not self.is_packed:
            return _ZERO_BYTES
        return 0 if self.is_pointwise else _round_up_16(self.chunk_channels * self.channel_pitch) + _ZERO_BANK_BYTES

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a staged chunk."""
        if self.is_packed:
            return self.zero_bytes + self.stage_images * self.image_pitch
        return self.chunk_channels * self.channel_pitch

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.num_stages * self.stage_bytes

    @property
    def max_registers(self) -> int:
        """Registers that a thread may have, so that a block fits into a multiprocessor."""
        warps = -(-(self.threads + self.staging_threads) // _WARP)
        return min(_MAX_REGISTERS, _LANE_REGISTERS // -(-warps // _QUARTERS) // 8 * 8)

    def __str__(self) -> str:
        tiles = "1 tile" if self.num_tiles == 1 else f"{self.num_tiles} tiles"
        return (
            f"{tiles} of {self.tile_channels} channels, chunks of {self.chunk_channels} input channels, "
            f"{self.threads} threads, {self.num_stages} stages of {self.stage_bytes} bytes, "
            f"about {self.code_bytes} bytes of code a tile"
            f"{f', {self.num_sources} inputs' if self.num_sources else ''}"
        )


def min_passes(layer: SparseLayer) -> int:
    """Passes or splits among which float16 sums must be divided to stay accurate; 0 if none are enough."""
    if layer.element_type != np.float16:
        return 1
    terms = int(np.count_nonzero(layer.used_weights.reshape(layer.out_channels, -1), axis=1).max(initial=0))
    flushes = math.ceil(terms / HALF_TERMS)
    for passes in range(1, math.isqrt(flushes) + 2):
        if 1 + (HALF_TERMS + flushes / passes + passes - 1) / 2 <= MAX_HALF_ERROR**2:
            return passes
    return 0


def registers_a_channel(layer: SparseLayer) -> int:
    """Registers that the sums of one output channel of a slot take."""
    return 2 if layer.element_type == np.float16 else 1


def choose_plan(layer: SparseLayer, architecture: int) -> GeneratedPlan | Refusal:
    """The plan that `cost` thinks best for a layer on a GPU of this architecture (90 for sm_90)."""
    plans = list(candidate_plans(layer, architecture))
    if not plans:
        no_room = "the rows that its taps span do not fit in shared memory"
        return Refusal(_obstacle(layer, architecture) or no_room)
    return min(plans, key=lambda plan: cost(layer, plan))


def cost(layer: SparseLayer, plan: GeneratedPlan) -> float:
    """What plans are compared by: cycles for many images and, to a small part, those for one."""
    one = estimate_cycles(layer, plan, 1) + _LAUNCH_CYCLES
    return float(estimate_cycles(layer, plan, _REFERENCE_BATCH) * one**_ONE_IMAGE_WEIGHT)


def _obstacle(layer: SparseLayer, architecture: int) -> str:
    """Why no plan can or should run a layer, whatever its sizes; empty where nothing stands against it."""
    if architecture < MIN_ARCHITECTURE:
        return f"sm_{architecture} is older than sm_{MIN_ARCHITECTURE}"
    if not layer.used_weights.any():
        return "all its weights are zero"
    if len(words_and_taps(layer)[0]) > _MAX_WORDS:
        return (
            f"a kernel of {layer.kernel_shape[0]}x{layer.kernel_shape[1]} needs more addresses than there are registers"
        )
    if min_passes(layer) == 0:
        return "its sums have too many terms to be accurate in float16"
    if _has_odd_pointwise_planes(layer):
        return "its float16 planes are of an odd size, and would take longer to stage than the CSR kernel computes"
    return ""


def candidate_plans(layer: SparseLayer, architecture: int) -> Iterator[GeneratedPlan]:
    """All plans that can run: one for each number of output channels in a tile."""
    if _obstacle(layer, architecture):
        return
    group_out = layer.group_out_channels
    tiles = {_even_tile(layer.out_channels, channels) for channels in _TILE_CHANNELS}
    for tile_channels in sorted(tiles):
        # A tile is part of a group, or spans whole ones: as many as every other tile, for the plan has one number.
        is_even = tile_channels % group_out == 0 and layer.out_channels % tile_channels == 0
        if layer.group > 1 and group_out % tile_channels and not is_even:
            continue
        plan = _plan_for(layer, architecture, tile_channels)
        if plan is not None:
            yield plan


def _has_odd_pointwise_planes(layer: SparseLayer) -> bool:
    # Staged element by element, for one multiply-add each: slower than the CSR kernel, measured on 7x7 maps.
    if layer.element_type != np.float16 or not layer.is_pointwise or layer.in_size is None:
        return False
    return math.prod(layer.in_size) % 2 == 1


def _even_tile(out_channels: int, most: int) -> int:
    """Channels of tiles of nearly equal size: blocks of all tiles then take equally long."""
    return -(-out_channels // -(-out_channels // most))


def _plan_for(layer: SparseLayer, architecture: int, tile_channels: int) -> GeneratedPlan | None:
    group_out, group_in = layer.group_out_channels, layer.group_in_channels
    num_words = len(words_and_taps(layer)[0])
    sums = tile_channels * registers_a_channel(layer)
    code_bytes = _code_bytes(layer, tile_channels)
    tile_in_channels = min(layer.in_channels, group_in * max(1, tile_channels // group_out))
    suits_bulk_copies = architecture >= _BULK_ARCHITECTURE and _suits_bulk_copies(layer, tile_in_channels)
    staging_threads = _WARP if suits_bulk_copies else 0
    num_tiles = -(-layer.out_channels // tile_channels)
    registers = sums + num_words + LOADS_AHEAD + _OTHER_REGISTERS
    registers += 0 if staging_threads else _STAGING_REGISTERS
    warps = _LANE_REGISTERS // (-(-registers // 8) * 8) * _QUARTERS
    threads = min(_MAX_THREADS, warps * _WARP) - staging_threads
    passes = min_passes(layer)
    if registers > _MAX_REGISTERS or threads < _MIN_THREADS or passes > tile_in_channels:
        return None
    wanted = int(_CHUNK_INSTRUCTIONS / max(1.0, code_bytes / _INSTRUCTION_BYTES / tile_in_channels))
    chunks = _Chunks(tile_in_channels, max(wanted, _MIN_CHUNK_CHANNELS), tile_in_channels // passes)
    room = shared_bytes_of(architecture) - _STATIC_BYTES
    stage = _packed_stage(layer, threads, chunks, room) or _stage(layer, threads, chunks, room)
    if stage is None:
        return None
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
        num_tiles=num_tiles,
        chunk_channels=stage.chunk_channels,
        num_chunks=-(-tile_in_channels // stage.chunk_channels),
        columns_per_slot=columns_per_slot(layer),
        threads=stage.threads,
        staging_threads=staging_threads,
        num_stages=_STAGES,
        channel_pitch=stage.channel_pitch,
        plane_residue=stage.plane_residue,
        image_pitch=stage.image_pitch,
        stage_images=stage.images,
        min_passes=passes,
        code_bytes=code_bytes,
        source_channels=_padded(layer.source_channels if can_read_sources(layer) else ()),
    )


def can_read_sources(layer: SparseLayer) -> bool:
    """Whether code reads the inputs that X is concatenated of where they are: of a pointwise layer, if every plane
    begins at a multiple of 16 bytes. Else they are to be copied together first.
    """
    if not layer.is_pointwise or layer.in_size is None:
        return False
    return math.prod(layer.in_size) * layer.element_type.itemsize % 16 == 0


def _padded(channels: tuple[int, ...]) -> tuple[int, int, int, int, int, int, int, int]:
    a, b, c, d, e, f, g, h = (*channels, *(0,) * (MAX_SOURCES - len(channels)))
    return a, b, c, d, e, f, g, h


def _round_up_16(size: int) -> int:
    return -(-size // 16) * 16


@dataclass(frozen=True)
class _Chunks:
    """Input channels of a tile, how many a chunk should have, and the most that accuracy allows."""

    channels: int
    wanted: int
    most: int


@dataclass(frozen=True)
class _Stage:
    """The fields of a plan that say how input is staged; ``images`` and ``image_pitch`` of packed stages only."""

    threads: int
    chunk_channels: int
    channel_pitch: int
    plane_residue: int
    images: int = 0
    image_pitch: int = 0


def _stage(layer: SparseLayer, threads: int, chunks: _Chunks, room: int) -> _Stage | None:
    """A stage of single channels, with as many threads as there is room for what they read."""
    while threads >= _MIN_THREADS:
        pitch = _channel_pitch(layer, threads)
        fitting = room // (_STAGES * pitch)
        if fitting >= min(_MIN_CHUNK_CHANNELS, chunks.channels):
            limit = min(fitting, chunks.most, _MAX_CHUNK_CHANNELS)
            chunk = _chunk_channels(min(chunks.wanted, limit), limit, chunks.channels)
            return _Stage(threads, chunk, pitch, _plane_residue(layer))
        threads = threads // 2 // _WARP * _WARP
    return None


def _packed_stage(layer: SparseLayer, threads: int, chunks: _Chunks, room: int) -> _Stage | None:
    """A stage of whole planes, for as many images as the threads have slots of; None where it does not suit a layer."""
    if layer.row_size is None or 0 in layer.row_size:
        return None
    height, width = layer.row_size
    pitch = height * width * layer.element_type.itemsize
    plane_slots = math.prod(_slots(layer))
    # The planes of a chunk, and those of a group, must begin at multiples of 16 bytes.
    multiple = 16 // math.gcd(16, pitch)
    is_aligned = width % columns_per_slot(layer) == 0 and layer.group_in_channels % multiple == 0
    if plane_slots > min(_PACKED_SLOTS, threads) or not is_aligned:
        return None
    images = threads // plane_slots
    most = min(chunks.most, _MAX_CHUNK_CHANNELS) // multiple * multiple
    for chunk in range(min(chunks.wanted // multiple * multiple, most), 0, -multiple):
        used = _round_up_16(chunk * pitch)
        # So that the last slots of an image and the first ones of the next lie in different banks, as neighbours do.
        image_pitch = used + (pitch - used) % _ZERO_BANK_BYTES // 16 * 16
        zeros = 0 if layer.is_pointwise else used + _ZERO_BANK_BYTES
        if _STAGES * (zeros + images * image_pitch) <= room:
            even = -(-chunks.channels // -(-chunks.channels // chunk))
            if -(-even // multiple) * multiple < chunk:
                continue  # as many chunks, nearer to equal
            return _Stage(threads, chunk, pitch, 0, images, image_pitch)
    return None


def _suits_bulk_copies(layer: SparseLayer, tile_in_channels: int) -> bool:
    """Whether a warp that stages for all of a block is enough, as it is if it need not move single elements."""
    if layer.row_size is None:
        return True
    # Words of two halves never begin at odd elements; planes of an odd size are staged element by element.
    columns, plane = columns_per_slot(layer), math.prod(layer.row_size)
    if layer.row_size[1] % columns or plane % columns:
        return False
    # So are those of groups, unless the first one of every tile begins at a multiple of 16 bytes: tiles are parts of
    # groups or span whole ones, so what one reads follows on what another does.
    return layer.group == 1 or tile_in_channels * plane * layer.element_type.itemsize % 16 == 0


def _plane_residue(layer: SparseLayer) -> int:
    height, width = layer.row_size or _DEFAULT_SIZE
    residue = height * width % (16 // layer.element_type.itemsize)
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


def _channel_pitch(layer: SparseLayer, threads: int) -> int:
    """Bytes of a staged channel: the leading zeros, and what any group of slots reads of one or several images.

    A group begins anywhere: it may end in the middle of the next image, or of one after it.
    """
    row, height = _slots(layer)
    in_height, in_width = layer.row_size or _DEFAULT_SIZE
    size = layer.element_type.itemsize
    columns = columns_per_slot(layer)
    reach_h, reach_w = (
        (kernel - 1) * dilation + 1 for kernel, dilation in zip(layer.kernel_shape, layer.dilations, strict=True)
    )
    width = in_width + in_width % columns
    plane = row * height

    def part(begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        # Bytes that the slots [begin, end) of an image take; 16 bytes more for either misalignment.
        first, last = begin // row, (end - 1) // row
        rows = np.minimum(last * layer.strides[0] - layer.pads[0] + reach_h, in_height)
        rows = np.maximum(0, rows - np.clip(first * layer.strides[0] - layer.pads[0], 0, in_height))
        elements = rows * width
        if reach_h == 1:
            reached = (end - begin) * columns * layer.strides[1] + reach_w + 2 * columns
            elements = np.where(first == last, np.minimum(reached, width), elements)
        return np.where(end > begin, -(-(elements * size) // 16) * 16 + 32, 0)

    begins = np.arange(plane)
    ends = begins + threads
    # The rest of the image in which a group begins, whole ones, and the beginning of the one in which it ends.
    whole = np.maximum(ends // plane - 1, 0)
    bytes_ = part(begins, np.minimum(ends, plane)) + whole * part(np.zeros(1, np.int64), np.full(1, plane))
    bytes_ = bytes_ + part(np.zeros_like(begins), np.where(ends > plane, ends % plane, 0))
    return _ZERO_BYTES + int(bytes_.max())


def _code_bytes(layer: SparseLayer, tile_channels: int) -> int:
    """Of the longest tile: its multiply-adds, loads of words, and what joins and flushes halves."""
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

    def by_tile(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(tiles, values, -(-layer.out_channels // tile_channels)).astype(np.int64)

    multiply_adds = by_tile(np.add.reduceat(used.sum(axis=(1, 2)), starts))
    instructions = multiply_adds + by_tile(word_used.sum(axis=(1, 2)) + tap_used[:, :, is_joined].sum(axis=(1, 2)))
    if layer.element_type == np.float16:
        instructions += multiply_adds // HALF_TERMS
    return int(instructions.max()) * _INSTRUCTION_BYTES


def shared_bytes_of(architecture: int) -> int:
    """Shared memory that a block may have, in bytes; ``architecture`` is 90 for sm_90."""
    return _SHARED_BYTES[max(known for known in _SHARED_BYTES if known <= architecture)]


def estimate_cycles(layer: SparseLayer, plan: GeneratedPlan, batch: int) -> float:
    """Cycles that an H200 takes for a layer, about; better for comparing plans than taken by themselves.

    Args:
        layer: of which the plan is.
        plan: how it is computed.
        batch: images.
    """
    slots, columns = math.prod(_slots(layer)), plan.columns_per_slot
    groups, group_slots = _reference_groups(plan, batch * slots, slots)
    splits = max(1, min(_MULTIPROCESSORS // (plan.num_tiles * groups), plan.num_chunks))
    if splits > 1:  # they keep float16 sums accurate as passes do
        splits = max(splits, plan.min_passes)
    passes = 1 if splits > 1 else plan.min_passes
    turns = -(-plan.num_tiles * groups * splits // _MULTIPROCESSORS)
    code = plan.code_bytes / _INSTRUCTION_BYTES + _CHUNK_INSTRUCTIONS_BESIDES * plan.num_chunks
    instructions = code / splits + _GROUP_INSTRUCTIONS * passes
    # All warps wait for instructions, line by line, and share what is fetched: the more there are, the less it costs.
    code_bytes = plan.code_bytes if plan.num_tiles == 1 else _LINE_CODE_BYTES[-1]
    fetched = float(np.interp(code_bytes, _LINE_CODE_BYTES, _LINE_CYCLES))
    compute = instructions / _LINE_INSTRUCTIONS * (fetched + _WARP_LINE_CYCLES * -(-group_slots // _WARP))
    size = layer.element_type.itemsize
    images = max(1.0, group_slots / slots)
    if slots % group_slots and group_slots % slots:
        images += min(1.0, group_slots / slots)  # groups that do not end with an image
    height, width = layer.row_size or _DEFAULT_SIZE
    halo = height * width / slots  # inputs for each slot
    if not plan.is_packed:
        halo = max(halo, plan.channel_pitch / size / plan.threads)
    copies = images / plan.chunk_channels if plan.is_packed else images  # for a channel
    channel = max(group_slots * halo * size / _CACHE_BYTES_A_CYCLE, copies * _COPY_CYCLES)
    staged = plan.tile_in_channels / splits * channel
    # Each pass but the first reads what the one before it stored.
    stored = (2 * passes - 1) * plan.tile_channels * group_slots * columns * size / _MEMORY_BYTES_A_CYCLE
    moved = staged + stored
    cycles = turns * (max(compute, moved) + _OVERLAP * min(compute, moved))
    if splits > 1:
        outputs = batch * slots * columns * layer.out_channels
        cycles += _REDUCE_CYCLES + (splits + 1) * outputs * size / _MULTIPROCESSORS / _MEMORY_BYTES_A_CYCLE
    return float(cycles)


def _reference_groups(plan: GeneratedPlan, slots: int, plane_slots: int) -> tuple[int, int]:
    """Groups of that many slots, and the slots of one, as a launch on an H200 would choose them."""
    lanes = max(1, _MULTIPROCESSORS // plan.num_tiles)
    turns = -(-slots // (lanes * plan.threads))
    # A warp for each quarter, at least: smaller batches split the chunks instead.
    group_slots = max(-(-slots // (lanes * turns)), min(_QUARTERS * _WARP, plan.threads, slots))
    if plan.is_packed and group_slots > plane_slots:
        group_slots = min(-(-group_slots // plane_slots), plan.stage_images) * plane_slots
    return -(-slots // group_slots), group_slots
