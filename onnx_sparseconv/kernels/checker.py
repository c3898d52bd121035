"""Proofs about generated kernels that need neither a GPU nor a compiler.

`check_code` reads the PTX of every chunk back and follows where each value comes from: every non-zero weight must be
multiplied exactly once, with the right input value, into the right sum. `count_writes` counts how often a launch writes
each output: exactly once, if the launch is right.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.plan import GeneratedPlan
from onnx_sparseconv.kernels.schedule import words_and_taps

_TILE = re.compile(r"^struct Tile(\d+) : Plan \{$", re.MULTILINE)
_CHUNK = re.compile(r"^      case (\d+):$", re.MULTILINE)
_ASM = re.compile(r'asm volatile\(R"\(\{(?P<body>.*?)\}\)"\s*: (?P<sums>.*?)\n\s*: (?P<words>.*?)\);', re.DOTALL)
_LOAD = re.compile(r"ld\.volatile\.shared\.(?:f32|b32) (w\d+), \[%(\d+)\+(\d+)\]")
_JOIN = re.compile(r"prmt\.b32 (v\d+), (w\d+), (w\d+), 0x([0-9A-F]{4})")
_CONSTANT = re.compile(r"mov\.b32 c, 0x([0-9A-F]{8})")
_MULTIPLY_ADD = re.compile(r"fma\.rn\.(?:f32|f16x2) %(\d+), (\w+), (\w+), %(\d+)")
_MULTIPLY = re.compile(r"mul\.rn\.f16x2 %(\d+), (\w+), c")
# Bytes that `prmt` chooses for one half of a word: 0 and 1, or 2 and 3; 4 more for the second word.
_HALF_BYTES = {0x10: 0, 0x32: 1, 0x54: 0, 0x76: 1}
_FLUSH = re.compile(r"add\.rn\.f16x2 %(\d+), %(\d+), %(\d+)")
_REGISTERS = re.compile(r"\.reg \.\w+ .*")


class CodeError(SparseConvError):
    """Generated code does not compute its layer: a bug in the generator."""


@dataclass(frozen=True)
class _Word:
    """A loaded word: channel within the chunk, and index into `words_and_taps`."""

    channel: int
    word: int


def check_code(layer: SparseLayer, plan: GeneratedPlan, text: str) -> None:
    """Check the code of a layer and a plan: `SourceText.whole` of whichever form.

    Raises:
        CodeError: a non-zero is missing, used twice or wrongly, or an instruction is not understood; says which.
    """
    used: Counter[tuple[int, int, int, int]] = Counter()
    weights = layer.used_weights.reshape(layer.out_channels, layer.group_in_channels, -1)
    tiles = 0
    for tile, chunks in _tiles(text):
        tiles += 1
        for chunk, body in chunks:
            for k, channel, tap, weight in _Chunk(layer, plan, body).products():
                out_channel = tile * plan.tile_channels + k
                first = tile * plan.tile_channels // layer.group_out_channels * layer.group_in_channels
                in_channel = first + chunk * plan.chunk_channels + channel
                group_channel = in_channel - out_channel // layer.group_out_channels * layer.group_in_channels
                if not 0 <= group_channel < layer.group_in_channels or out_channel >= layer.out_channels:
                    raise CodeError(
                        f"tile {tile} multiplies input channel {in_channel} into output channel {out_channel}"
                    )
                expected = float(weights[out_channel, group_channel, tap])
                if weight != expected and not (math.isnan(weight) and math.isnan(expected)):
                    raise CodeError(f"weight {(out_channel, group_channel, tap)} is {expected}, the code has {weight}")
                used[out_channel, group_channel, tap, tile] += 1
    if tiles != plan.num_tiles:
        raise CodeError(f"the plan has {plan.num_tiles} tiles, the code {tiles}")
    twice = [key[:3] for key, count in used.items() if count != 1]
    if twice:
        raise CodeError(f"weight {twice[0]} is used more than once")
    missing = set(zip(*(axis.tolist() for axis in np.nonzero(weights)), strict=True)) - {key[:3] for key in used}
    if missing:
        raise CodeError(f"weight {min(missing)} is not used")


def _tiles(text: str) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    starts = [*_TILE.finditer(text)]
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        part = text[match.end() : following.start() if following else len(text)]
        cases = [*_CHUNK.finditer(part)]
        ends = [*(case.start() for case in cases[1:]), len(part)]
        yield int(match[1]), [(int(c[1]), part[c.end() : end]) for c, end in zip(cases, ends, strict=True)]


class _Chunk:
    """The instructions of one chunk, followed one by one."""

    def __init__(self, layer: SparseLayer, plan: GeneratedPlan, body: str) -> None:
        self._plan = plan
        self._taps = words_and_taps(layer)[1]
        match = _ASM.search(body)
        self._text = match["body"] if match else ""
        self._words_from = len(re.findall(r'"\+[rf]"', match["sums"])) if match else 0
        self._num_words = len(re.findall(r'"r"', match["words"])) if match else 0
        self._values: dict[str, tuple[int, int]] = {}  # register -> (channel, tap)
        self._words: dict[str, _Word] = {}
        self._constant = 0
        self._flushed: set[int] = set()  # sums that must restart: the second level has them

    def products(self) -> Iterator[tuple[int, int, int, float]]:
        """``(output channel of the tile, channel of the chunk, tap, weight)`` of every multiply-add."""
        for instruction in (part.strip() for part in self._text.split(";")):
            if not instruction or _REGISTERS.fullmatch(instruction):
                continue
            if match := _MULTIPLY_ADD.fullmatch(instruction):
                k = self._sum(match[1])
                if match[1] != match[4]:
                    raise CodeError(f"a product is added to another sum: {instruction}")
                if k in self._flushed:
                    raise CodeError(f"a sum is added twice: {instruction}")
                yield (k, *self._value(match[2]), self._weight(match[3]))
            elif match := _MULTIPLY.fullmatch(instruction):
                # It overwrites the sum, which must have been brought to safety.
                k = self._sum(match[1])
                if k not in self._flushed:
                    raise CodeError(f"a sum is lost: {instruction}")
                yield (k, *self._value(match[2]), self._weight("c"))
                self._flushed.discard(k)
            else:
                self._follow(instruction)
        if self._flushed:
            raise CodeError(f"sum {min(self._flushed)} is added twice: nothing restarts it")

    def _sum(self, operand: str) -> int:
        k = int(operand)
        if k >= self._plan.tile_channels:
            raise CodeError(f"operand {k} is no sum of products")
        return k

    def _follow(self, instruction: str) -> None:
        if match := _LOAD.fullmatch(instruction):
            self._words[match[1]] = self._word(int(match[2]), int(match[3]))
        elif match := _JOIN.fullmatch(instruction):
            self._join(match[1], (match[2], match[3]), int(match[4], 16))
        elif match := _CONSTANT.fullmatch(instruction):
            self._constant = int(match[1], 16)
        elif match := _FLUSH.fullmatch(instruction):
            k = self._sum(match[3])
            if match[1] != match[2] or int(match[1]) != k + self._plan.tile_channels:
                raise CodeError(f"a sum is added to another one: {instruction}")
            if k in self._flushed:
                raise CodeError(f"a sum is added twice: {instruction}")
            self._flushed.add(k)
        else:
            raise CodeError(f"unknown instruction: {instruction}")

    def _word(self, operand: int, offset: int) -> _Word:
        word = operand - self._words_from
        vector = 16 // (4 // self._plan.columns_per_slot)
        channel, rest = divmod(offset, self._plan.channel_pitch)
        skew = channel * self._plan.plane_residue % vector * (4 // self._plan.columns_per_slot)
        if not 0 <= word < self._num_words or channel >= self._plan.chunk_channels or rest != skew:
            raise CodeError(f"a load of operand {operand} at {offset} is no word of a staged channel")
        return _Word(channel, word)

    def _join(self, register: str, words: tuple[str, str], selector: int) -> None:
        first, second = selector & 0xFF, selector >> 8
        halves = (_HALF_BYTES.get(first), _HALF_BYTES.get(second))
        sources = tuple(self._words[w] for w in words)
        if first not in (0x10, 0x32) or second not in (0x54, 0x76) or sources[0].channel != sources[1].channel:
            raise CodeError(f"{register} joins what does not belong together")
        self._define(register, sources[0].channel, tuple(source.word for source in sources), halves)

    def _define(self, register: str, channel: int, words: tuple[int, ...], halves: tuple[int | None, ...]) -> None:
        for tap, places in enumerate(self._taps):
            if places.words == words and places.halves == halves:
                self._values[register] = (channel, tap)
                return
        raise CodeError(f"{register} holds no tap")

    def _value(self, register: str) -> tuple[int, int]:
        if register not in self._values:
            word = self._words.get(register)
            if word is None:
                raise CodeError(f"{register} is used before it is loaded")
            columns = self._plan.columns_per_slot
            self._define(register, word.channel, (word.word,) * columns, tuple(range(columns)))
        return self._values[register]

    def _weight(self, text: str) -> float:
        if text == "c":
            low, high = self._constant & 0xFFFF, self._constant >> 16
            if low != high:
                raise CodeError(f"two columns have different weights: {self._constant:08X}")
            return float(struct.unpack("<e", struct.pack("<H", low))[0])
        return float(struct.unpack("<f", struct.pack("<I", int(text[2:], 16)))[0])


@dataclass(frozen=True)
class Launch:
    """The numbers of a ``GeneratedParams`` (cuda/params.h) that say which outputs a launch computes."""

    num_splits: int
    num_lanes: int
    cluster_blocks: int
    batch: int
    out_h: int
    out_w: int
    num_groups: int
    group_slots: int
    num_slots: int


def count_writes(plan: GeneratedPlan, launch: Launch) -> NDArray[np.int64]:
    """How often a launch writes each output, ``[num_splits, batch, out_channels, out_h, out_w]``.

    It follows ``cuda/generated_conv.cuh``: the grid, the groups of each block, the slots of its threads.

    Raises:
        CodeError: it also writes beyond the last image.
    """
    writes = np.zeros((launch.num_splits, launch.batch, plan.out_channels, launch.out_h, launch.out_w), np.int64)
    row_slots = -(-launch.out_w // plan.columns_per_slot)
    units = plan.num_tiles * launch.num_splits
    threads = np.arange(plan.threads)
    for block in range(units * launch.num_lanes):
        cluster, rank = divmod(block, launch.cluster_blocks)
        split, tile = divmod(cluster % units, plan.num_tiles)
        lane = cluster // units * launch.cluster_blocks + rank
        channels = slice(tile * plan.tile_channels, min((tile + 1) * plan.tile_channels, plan.out_channels))
        for group in range(lane, launch.num_groups, launch.num_lanes):
            first = group * launch.group_slots
            slots = first + threads[: max(0, min(launch.group_slots, launch.num_slots - first))]
            image, slot = np.divmod(slots, launch.out_h * row_slots)
            if (image >= launch.batch).any():
                raise CodeError(f"group {group} writes image {image.max()} of {launch.batch}")
            row, column = np.divmod(slot, row_slots)
            for step in range(plan.columns_per_slot):
                at = column * plan.columns_per_slot + step
                there = at < launch.out_w
                # A view with the channels last, since they are written together.
                np.add.at(writes[split, :, channels].transpose(0, 2, 3, 1), (image[there], row[there], at[there]), 1)
    return writes
