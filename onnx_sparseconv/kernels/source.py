"""The source text of a generated kernel: constants of the plan, and the weights as instructions.

What does not depend on the weights is in ``cuda/generated_conv.cuh``. Each chunk is one block of inline PTX, so the
C++ front end has next to nothing to do. Where the code is long, tiles are programs of their own: the time that the
assembler takes for a program grows with the square of its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnx_sparseconv.kernels.device_sources import read_device_sources
from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.plan import HALF_TERMS, LOADS_AHEAD, GeneratedPlan
from onnx_sparseconv.kernels.schedule import Item, Tap, tile_items, words_and_taps

KERNEL_NAME = "sparseconv_generated"
_HEADERS = ("divide.cuh", "epilogue.cuh", "generated_conv.cuh", "intrinsics.cuh", "params.h", "sums.cuh")


@dataclass(frozen=True)
class SourceText:
    """What NVRTC makes an image of: one program, or several that are linked.

    Attributes:
        text: CUDA C++ with one kernel, `KERNEL_NAME`.
        headers: text of every file that the programs include, by name.
        tiles: programs that the kernel calls, one for each tile; none where `text` has the code of all.
    """

    text: str
    headers: Mapping[str, str]
    tiles: tuple[str, ...] = ()

    @property
    def whole(self) -> str:
        """All programs as a single one, which does the same: for what reads or emulates them."""
        return "\n".join((*self.tiles, self.text))


def make_source(layer: SparseLayer, plan: GeneratedPlan) -> SourceText:
    """One program of a layer for a plan. The same for all architectures; equal layers and plans give equal text."""
    tiles = (line for tile in range(plan.num_tiles) for line in _tile_struct(layer, plan, tile))
    lines = [
        *_begin(layer, plan, ""),
        *tiles,
        "struct Code : Plan {",
        "  static __device__ __forceinline__ void RunChunk(int tile, int chunk, Sums& sums,",
        "                                                  const Shared (&words)[kNumWords]) {",
        "    switch (tile) {",
        *(f"      case {t}: Tile{t}::RunChunk(chunk, sums, words); break;" for t in range(plan.num_tiles)),
        "    }",
        "  }",
        "};",
        "}  // namespace",
        f"SPARSECONV_GENERATED_KERNEL({KERNEL_NAME}, Code)",
        "",
    ]
    return SourceText("\n".join(lines), _headers())


def make_linked_source(layer: SparseLayer, plan: GeneratedPlan) -> SourceText:
    """The same with a program for each tile, which are to be linked."""
    functions = [f"sparseconv_tile_{t}" for t in range(plan.num_tiles)]
    lines = [
        *(f'extern "C" __device__ void {function}();' for function in functions),
        *_begin(layer, plan, "kernel"),
        "struct Code : Plan {",
        "  static __device__ __forceinline__ void RunTile(int tile) {",
        "    switch (tile) {",
        *(f"      case {t}: {function}(); break;" for t, function in enumerate(functions)),
        "    }",
        "  }",
        "};",
        "}  // namespace kernel",
        f"SPARSECONV_LINKED_KERNEL({KERNEL_NAME}, kernel::Code)",
        "",
    ]
    tiles = tuple(_tile_text(layer, plan, t, function) for t, function in enumerate(functions))
    return SourceText("\n".join(lines), _headers(), tiles)


def _tile_text(layer: SparseLayer, plan: GeneratedPlan, tile: int, function: str) -> str:
    lines = [
        *_begin(layer, plan, f"tile_{tile}"),
        *_tile_struct(layer, plan, tile),
        f"}}  // namespace tile_{tile}",
        f"SPARSECONV_LINKED_TILE({function}, tile_{tile}::Tile{tile}, {tile})",
        "",
    ]
    return "\n".join(lines)


def _headers() -> dict[str, str]:
    sources = read_device_sources()
    return {name: sources[name] for name in _HEADERS}


def _begin(layer: SparseLayer, plan: GeneratedPlan, namespace: str) -> list[str]:
    """The start of a program, in a namespace that stays open: the constants of the plan."""
    words, _ = words_and_taps(layer)
    constants = {
        "TileChannels": plan.tile_channels,
        "NumTiles": plan.num_tiles,
        "ChunkChannels": plan.chunk_channels,
        "Threads": plan.threads,
        "StagingThreads": plan.staging_threads,
        "NumStages": plan.num_stages,
        "ChannelPitch": plan.channel_pitch,
        "PlaneResidue": plan.plane_residue,
        "ImagePitch": plan.image_pitch,
        "ZeroBytes": plan.zero_bytes,
        "StageBytes": plan.stage_bytes,
        "InChannels": plan.in_channels,
        "OutChannels": plan.out_channels,
        "TileInChannels": plan.tile_in_channels,
        "GroupInChannels": layer.group_in_channels,
        "GroupOutChannels": layer.group_out_channels,
        "StrideH": plan.strides[0],
        "StrideW": plan.strides[1],
        "PadTop": plan.pads_begin[0],
        "PadLeft": plan.pads_begin[1],
        "ReachH": (plan.kernel_shape[0] - 1) * plan.dilations[0] + 1,
        "ReachW": (plan.kernel_shape[1] - 1) * plan.dilations[1] + 1,
        "Activation": plan.activation,
        "NumWords": len(words),
        "NumSources": plan.num_sources,
    }
    return [
        '#include "generated_conv.cuh"',
        f"namespace {namespace} {{" if namespace else "namespace {",
        "using namespace sparseconv::cuda;",
        "struct Plan {",
        *(f"  static constexpr int k{name} = {value};" for name, value in constants.items()),
        *_lookup("Row", [word.row for word in words]),
        *_lookup("Column", [word.column for word in words]),
        *_lookup("SourceBegin", list(plan.source_begins) or [0]),
        f"  using Sums = {sums_type(layer)}<kTileChannels>;",
        "};",
    ]


def _tile_struct(layer: SparseLayer, plan: GeneratedPlan, tile: int) -> Iterator[str]:
    """The code of a tile's chunks."""
    yield f"struct Tile{tile} : Plan {{"
    yield "  static __device__ __forceinline__ void RunChunk(int chunk, Sums& sums,"
    yield "                                                  const Shared (&words)[kNumWords]) {"
    yield "    switch (chunk) {"
    for index, chunk in enumerate(_chunk_texts(layer, plan, tile, _Ptx(layer, plan))):
        yield from (f"      case {index}:", chunk, "        break;")
    yield from ("    }", "  }", "};")


def sums_type(layer: SparseLayer) -> str:
    """The type in ``cuda/sums.cuh`` that holds a thread's sums."""
    return "HalfSums" if layer.element_type == np.float16 else "FloatSums"


def _lookup(name: str, values: list[int]) -> list[str]:
    return [
        f"  static __device__ constexpr int {name}(int i) {{",
        f"    constexpr int values[] = {{{', '.join(map(str, values))}}};",
        "    return values[i];",
        "  }",
    ]


def _chunk_texts(layer: SparseLayer, plan: GeneratedPlan, tile: int, emitter: _Ptx) -> Iterator[str]:
    # Sums in half are flushed every few terms, counted through all chunks.
    _, taps = words_and_taps(layer)
    is_half = layer.element_type == np.float16
    terms = [0] * plan.tile_channels
    for items in tile_items(layer, plan, tile):
        yield _chunk_text(items, plan, taps, emitter, terms if is_half else None)


def _chunk_text(items: list[Item], plan: GeneratedPlan, taps: list[Tap], emitter: _Ptx, terms: list[int] | None) -> str:
    # Every load stands LOADS_AHEAD loads before it is needed. `terms` counts the terms of each sum since it was last
    # flushed; None where sums never are.
    size = 2 if plan.columns_per_slot == 2 else 4
    vector = 16 // size
    loads: dict[tuple[int, int], int] = {}
    needed = []  # how many loads there must be before each item
    for item in items:
        for word in taps[item.tap].words:
            loads.setdefault((item.channel, word), len(loads))
        needed.append(len(loads))
    pending = iter(loads)
    num_loaded = 0
    lines: list[str] = []

    def load_up_to(count: int) -> None:
        nonlocal num_loaded
        while num_loaded < min(count, len(loads)):
            channel, word = next(pending)
            skew = channel * plan.plane_residue % vector * size
            lines.append(emitter.load(num_loaded, word, channel * plan.channel_pitch + skew))
            num_loaded += 1

    for index, (item, count) in enumerate(zip(items, needed, strict=True)):
        load_up_to(count + LOADS_AHEAD)
        tap = taps[item.tap]
        sources = tuple(loads[item.channel, word] for word in tap.words)
        if tap.is_word:
            value = f"w{sources[0]}"
        else:
            value = f"v{index}"
            lines.append(emitter.join(index, sources, tap))
        for k, weight in zip(item.out_channels, item.weights, strict=True):
            if terms is not None and terms[k] == HALF_TERMS:
                lines.append(emitter.flush(k))
                terms[k] = 0
                lines.append(emitter.multiply(k, value, weight))
            else:
                lines.append(emitter.multiply_add(k, value, weight))
            if terms is not None:
                terms[k] += 1
    return emitter.chunk(lines, len(loads), len(items))


class _Ptx:
    """Inline PTX. Operands of a chunk: the sums, then the addresses of the words."""

    def __init__(self, layer: SparseLayer, plan: GeneratedPlan) -> None:
        self._is_half = layer.element_type == np.float16
        self._channels = plan.tile_channels
        self._num_words = len(words_and_taps(layer)[0])
        self._words_from = self._channels * (2 if self._is_half else 1)

    def chunk(self, lines: Iterable[str], num_loads: int, num_values: int) -> str:
        """An asm statement of the chunk's instructions."""
        kind = "b32" if self._is_half else "f32"
        body = "\n".join(lines)
        if not body:
            return "        // no weights"
        scratch = ".reg .b32 c;\n" if self._is_half else ""
        text = f"{{\n.reg .{kind} w<{num_loads}>;\n.reg .{kind} v<{num_values}>;\n{scratch}{body}\n}}"
        words = ", ".join(f'"r"(words[{i}])' for i in range(self._num_words))
        indent = "\n            : "
        return indent.join((f'        asm volatile(R"({text})"', self._sum_operands(), words, '"memory");'))

    def _sum_operands(self) -> str:
        arrays = [("part", "r"), ("whole", "r")] if self._is_half else [("sum", "f")]
        return ", ".join(f'"+{kind}"(sums.{name}[{k}])' for name, kind in arrays for k in range(self._channels))

    def load(self, index: int, word: int, byte_offset: int) -> str:
        """One word from shared memory. Volatile, or the assembler gathers loads and runs out of registers."""
        kind = "b32" if self._is_half else "f32"
        return f"ld.volatile.shared.{kind} w{index}, [%{self._words_from + word}+{byte_offset}];"

    def join(self, index: int, loads: tuple[int, ...], tap: Tap) -> str:
        """Two halves of one or two words side by side."""
        first, second = (2 * half for half in tap.halves)
        selector = (second + 5) << 12 | (second + 4) << 8 | (first + 1) << 4 | first
        return f"prmt.b32 v{index}, w{loads[0]}, w{loads[1]}, 0x{selector:04X};"

    def multiply_add(self, sum_index: int, value: str, weight: float) -> str:
        """The instruction that adds value * weight to a sum."""
        if self._is_half:
            return f"mov.b32 c, {_half2(weight)};\nfma.rn.f16x2 %{sum_index}, {value}, c, %{sum_index};"
        return f"fma.rn.f32 %{sum_index}, {value}, {_float(weight)}, %{sum_index};"

    def multiply(self, sum_index: int, value: str, weight: float) -> str:
        """The instruction that restarts a sum in half, after a flush."""
        return f"mov.b32 c, {_half2(weight)};\nmul.rn.f16x2 %{sum_index}, {value}, c;"

    def flush(self, sum_index: int) -> str:
        """Add the first level of a sum to the second."""
        whole = sum_index + self._channels
        return f"add.rn.f16x2 %{whole}, %{whole}, %{sum_index};"


def _float(weight: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', weight))[0]:08X}"


def _half2(weight: float) -> str:
    bits = int(np.float16(weight).view(np.uint16))
    return f"0x{bits << 16 | bits:08X}"
