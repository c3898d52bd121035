"""What the straight-line code of a generated kernel does, chunk by chunk, before it becomes text.

A tile's code is, for every chunk of input channels, a list of *items*: one input value that is loaded once and then
multiplied into the sum of every output channel of the tile that has a weight for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.kernels.layer import SparseLayer

if TYPE_CHECKING:
    from onnx_sparseconv.kernels.plan import GeneratedPlan


@dataclass(frozen=True)
class Word:
    """What one load of shared memory brings: 4 bytes, one float or two neighbouring halves.

    Attributes:
        row: input row, from ``out_row * stride - pad`` on.
        column: input column of the first element, from ``slot * columns_per_slot * stride`` on; even for halves.
    """

    row: int
    column: int


@dataclass(frozen=True)
class Tap:
    """Where the input values of one tap come from, one for each column of a slot.

    Attributes:
        words: index into `words_of` for each column of the slot.
        halves: which element of that word, 0 or 1; always 0 for floats.
    """

    words: tuple[int, ...]
    halves: tuple[int, ...]

    @property
    def is_word(self) -> bool:
        """Whether the values are a word as it was loaded, so that nothing need be joined."""
        return len(set(self.words)) == 1 and self.halves == tuple(range(len(self.halves)))


@dataclass(frozen=True)
class Item:
    """One tap of one input channel.

    Attributes:
        channel: input channel within the chunk.
        tap: ``r * S + s``.
        out_channels: output channels of the tile that it counts for, ``[n]``, increasing.
        weights: their weights, float32 ``[n]``.
    """

    channel: int
    tap: int
    out_channels: tuple[int, ...]
    weights: tuple[float, ...]


def columns_per_slot(layer: SparseLayer) -> int:
    """Neighbouring outputs that a thread computes: two halves share a register."""
    return 2 if layer.element_type == np.float16 else 1


def words_and_taps(layer: SparseLayer) -> tuple[list[Word], list[Tap]]:
    """The words that a slot reads in every channel, and how taps find their values in them."""
    columns = columns_per_slot(layer)
    rows, cols = layer.kernel_shape
    words: dict[Word, int] = {}
    taps = []
    for r in range(rows):
        for s in range(cols):
            row = r * layer.dilations[0]
            first = s * layer.dilations[1] - layer.pads[1]
            elements = [first + i * layer.strides[1] for i in range(columns)]
            places = [Word(row, e // columns * columns) for e in elements]
            indices = tuple(words.setdefault(place, len(words)) for place in places)
            taps.append(Tap(indices, tuple(e % columns for e in elements)))
    return list(words), taps


def tile_weights(layer: SparseLayer, tile_channels: int, tile: int) -> NDArray[np.float32]:
    """Weights of a tile over the input channels that it reads: ``[tile_channels, tile_in_channels, taps]``.

    The channels of other groups are zero, those beyond the last output channel too.
    """
    group_out, group_in = layer.group_out_channels, layer.group_in_channels
    first = tile * tile_channels
    rows = layer.used_weights.reshape(layer.out_channels, group_in, -1)[first : first + tile_channels]
    first_group = first // group_out
    num_groups = max(1, tile_channels // group_out)
    result = np.zeros((tile_channels, num_groups * group_in, rows.shape[2]), np.float32)
    for k, row in enumerate(rows):
        begin = ((first + k) // group_out - first_group) * group_in
        result[k, begin : begin + group_in] = row
    return result


def tile_items(layer: SparseLayer, plan: GeneratedPlan, tile: int) -> Iterator[list[Item]]:
    """The items of each chunk of a tile, in the order of the code. Every non-zero of the tile is in exactly one."""
    weights = tile_weights(layer, plan.tile_channels, tile)
    for begin in range(0, weights.shape[1], plan.chunk_channels):
        part = weights[:, begin : begin + plan.chunk_channels]
        # Ordered by (channel, tap, output channel).
        channels, taps, outs = np.nonzero(part.transpose(1, 2, 0))
        values = part[outs, channels, taps].tolist()
        keys = channels * part.shape[2] + taps
        starts = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
        ends = [*starts[1:], len(values)] if starts else []
        channel_list, tap_list, out_list = channels.tolist(), taps.tolist(), outs.tolist()
        yield [
            Item(channel_list[a], tap_list[a], tuple(out_list[a:b]), tuple(values[a:b]))
            for a, b in zip(starts, ends, strict=True)
        ]
