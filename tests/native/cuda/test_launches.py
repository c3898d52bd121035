"""The launches that are planned for sizes too large to compute here: what they use of the GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.kernels.image_container import PLAN_FIELDS
from onnx_sparseconv.kernels.plan import choose_plan
from tests.native.cuda.reference import ZERO_BYTES, make_plan
from tests.support.cuda_emulation import build_shared
from tests.support.native_build import ROOT
from tests.support.sparse_layers import sparse_layer
from tests.support.sparse_models import SparseConvCase, geometry_2d

NATIVE = ROOT / "onnx_sparseconv/custom_ops/native"
SOURCES = (Path(__file__).with_name("launch_probe.cc"), NATIVE / "cuda/generated_plan.cc", NATIVE / "cuda/csr_plan.cc")
# What csr_plan.cc refers to; nothing here calls it.
UNUSED = NATIVE / "cuda/driver.cc"
TEXT_BYTES = 1000


@pytest.fixture(scope="session")
def probe():
    return ctypes.CDLL(str(build_shared("launch_probe.so", [*SOURCES, UNUSED], "-O0")))


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launch's text says."""

    staging: str
    groups: int
    slots: int
    lanes: int
    cluster: int
    splits: int
    passes: int
    grid: int
    threads: int

    def turns(self):
        """Groups that the busiest block computes, one after the other."""
        return -(-self.groups // self.lanes)


PATTERN = re.compile(
    r"generated staging=(\w+) groups=(\d+) \((\d+) slots\) rows=\d+x\d+ row_pitch=\d+ image_pitch=\d+ "
    r"lanes=(\d+) cluster=(\d) splits=(\d+) passes=(\d+) grid=(\d+) threads=(\d+) shared_bytes=\d+"
)


def array(kind, values):
    return (kind * len(values))(*values)


def generated(probe, plan, sizes, *, device=(90, 132, 227 << 10), aligned=True, blocks=1, pairs=66, asked=(0, 0, -1)):
    """The launch for ``(batch, in_h, in_w, out_h, out_w)``, or the reason why there is none."""
    values = [getattr(plan, name) for name, _ in PLAN_FIELDS]
    numbers = [n for value in values for n in (value if isinstance(value, tuple) else (value,))]
    text = ctypes.create_string_buffer(TEXT_BYTES)
    found = probe.probe_generated(
        array(ctypes.c_int, numbers),
        array(ctypes.c_longlong, sizes),
        array(ctypes.c_int, device),
        array(ctypes.c_int, (aligned, 64, blocks, pairs)),
        array(ctypes.c_int, asked),
        text,
        TEXT_BYTES,
    )
    if not found:
        return text.value.decode()
    staging, *rest = PATTERN.fullmatch(text.value.decode()).groups()
    return Launch(staging, *map(int, rest))


def layer(in_channels, out_channels, kernel=3, stride=1, dtype=np.float32):
    weight = np.ones((out_channels, in_channels, kernel, kernel), np.float32)
    return SparseConvCase(weight, geometry_2d(kernel, stride, kernel // 2), dtype=np.dtype(dtype))


MULTIPROCESSORS = 132
QUARTER_SLOTS = 4 * 32  # a warp for each quarter of a multiprocessor


def excess(plan, sizes, launch, blocks=1):
    """How much longer the busiest block takes than if all that can run at a time had the same work.

    Less than a warp for each quarter of a multiprocessor takes as long as one.
    """
    batch, _, _, out_h, out_w = sizes
    slots = batch * out_h * -(-out_w // plan.columns_per_slot)
    lanes = MULTIPROCESSORS * blocks // (plan.num_tiles * launch.splits)
    return launch.turns() * -(-launch.slots // QUARTER_SLOTS) / max(1, slots / lanes / QUARTER_SLOTS)


def check_launch(plan, sizes, launch, blocks=1):
    """What holds for every launch."""
    batch, _, _, out_h, out_w = sizes
    slots = batch * out_h * -(-out_w // plan.columns_per_slot)
    assert launch.slots <= plan.threads
    assert launch.groups == -(-slots // launch.slots)
    assert 1 <= launch.lanes <= launch.groups
    assert launch.lanes % launch.cluster == 0
    # No warp without a slot, but for those that stage.
    assert launch.threads == -(-launch.slots // 32) * 32 + plan.staging_threads
    assert launch.grid == plan.num_tiles * launch.splits * launch.lanes
    assert launch.splits == 1 or launch.passes == 1
    assert plan.min_passes <= launch.splits * launch.passes
    assert max(launch.splits, launch.passes) <= plan.num_chunks
    # All blocks run at the same time, where the least number of splits allows it.
    assert launch.grid <= max(MULTIPROCESSORS * blocks, plan.num_tiles * max(launch.splits, 1))


# Channels, size of the map, channels of a tile.
LAYERS = [
    *((64, 56, 32), (64, 224, 32), (128, 112, 64), (256, 56, 64), (128, 28, 64), (256, 14, 64), (512, 7, 64)),
    *((512, 28, 64), (64, 57, 32), (100, 31, 50)),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("real", LAYERS, ids=str)
def test_real_layers_use_the_gpu(probe, real, blocks, kernel, dtype):
    channels, size, tile = real
    plane = size * size
    plan = make_plan(
        layer(channels, channels, kernel, dtype=dtype),
        tile_channels=tile,
        chunk_channels=8,
        threads={1: 416, 2: 256}[blocks],
        channel_pitch=7168 // blocks + 1024,
        code_bytes=64 << 10,
        is_pointwise=int(kernel == 1),
        plane_residue=0 if dtype == np.float16 and size % 2 else plane % (8 if dtype == np.float16 else 4),
    )
    one = (size, size, size, size) if kernel == 3 else (1, plane, 1, plane)
    for batch in (1, 2, 7, 32, 64, 256):
        sizes = (batch, *one)
        launch = generated(probe, plan, sizes, blocks=blocks)
        check_launch(plan, sizes, launch, blocks)
        if plane % (8 if dtype == np.float16 else 4) == 0:
            assert launch.staging == "bulk"
        if batch >= 64:
            # A block's warps fill the quarters of a multiprocessor, and blocks have equally many groups.
            assert excess(plan, sizes, launch, blocks) <= 1.4
        if batch == 1:
            # Few groups share the chunks of input channels, as long as there are blocks without work.
            assert launch.splits == plan.num_chunks or launch.grid > MULTIPROCESSORS * blocks / 2


def test_pairs_of_blocks_share_a_tile(probe):
    """Where that leaves no multiprocessor without work, and there are several tiles to begin with."""

    def lanes(tiles, size, **facts):
        plan = make_plan(layer(64, 32 * tiles), tile_channels=32, threads=512, channel_pitch=1 << 13, chunk_channels=8)
        launch = generated(probe, plan, (64, size, size, size, size), **facts)
        return launch.lanes, launch.cluster

    assert lanes(8, 56) == (16, 2)
    assert lanes(4, 112) == (32, 2)  # not 33
    assert lanes(12, 56) == (11, 1)  # 10 would take a tenth longer
    assert lanes(1, 56)[1] == 1
    assert lanes(8, 56, pairs=0) == (16, 1)
    assert lanes(8, 56, pairs=63)[1] == 1


def test_small_maps_share_a_group(probe):
    plan = make_plan(layer(512, 512), tile_channels=64, threads=512, channel_pitch=4096)
    sizes = (64, 7, 7, 7, 7)
    launch = generated(probe, plan, sizes)
    assert launch.staging == "element"  # 49 values are no multiple of 16 bytes, and planes were said to begin aligned
    check_launch(plan, sizes, launch)
    assert launch.slots > 2 * 49
    assert launch.slots % 49 != 0  # it also ends within an image
    assert excess(plan, sizes, launch) <= 1.4


@pytest.mark.parametrize("min_passes", [1, 2, 5, 64])
def test_long_sums_of_halves_are_divided(probe, min_passes):
    """Among splits where the GPU has room for them, else among passes, whatever else would be best."""
    plan = make_plan(
        layer(512, 512, dtype=np.float16), tile_channels=64, chunk_channels=8, threads=416, min_passes=min_passes
    )
    for batch in (1, 3, 8, 64, 200):
        for size in (7, 14, 28):
            sizes = (batch, size, size, size, size)
            for asked in ((0, 0, -1), (1, 0, -1), (0, 1, -1), (1, 1, -1), (3, 0, -1)):
                launch = generated(probe, plan, sizes, asked=asked)
                check_launch(plan, sizes, launch)
                assert asked[1] == 0 or launch.splits == 1
                assert launch.passes >= min(asked[0], plan.num_chunks) or launch.splits > 1
    one = generated(probe, plan, (1, 7, 7, 7, 7))
    assert one.splits == max(16, min_passes)
    assert generated(probe, plan, (64, 28, 28, 28, 28)).passes == min_passes


def test_whole_planes_of_any_size_are_copied_as_bytes_where_channels_allow_it(probe):
    plan = make_plan(layer(512, 512), tile_channels=64, threads=512, channel_pitch=4096, plane_residue=1)
    assert generated(probe, plan, (64, 7, 7, 7, 7)).staging in {"bulk", "vector"}
    assert generated(probe, plan, (64, 7, 7, 7, 7), asked=(0, 0, 0)).staging == "bulk"
    assert generated(probe, plan, (64, 7, 7, 7, 7), device=(80, 108, 163 << 10)).staging == "vector"
    assert generated(probe, plan, (64, 7, 7, 7, 7), aligned=False).staging == "element"
    odd = dataclasses.replace(plan, chunk_channels=2)
    assert generated(probe, odd, (64, 7, 7, 7, 7)).staging == "element"
    assert generated(probe, plan, (64, 7, 9, 7, 9)).staging == "element"


@pytest.mark.parametrize("size", [7, 14])
def test_one_image_of_many_channels_is_split(probe, size):
    plan = make_plan(layer(512, 512), tile_channels=64, chunk_channels=8, threads=256, channel_pitch=4096)
    launch = generated(probe, plan, (1, size, size, size, size))
    assert launch.splits * launch.groups == 16
    assert launch.grid == 128
    assert launch.passes == 1
    few = generated(probe, plan, (1, size, size, size, size), asked=(0, 4, -1))
    assert few.splits == 4


def test_a_wide_pointwise_plane_is_staged_in_parts(probe):
    plan = make_plan(layer(64, 64, 1), is_pointwise=1, threads=256, channel_pitch=ZERO_BYTES + 4 * 256 + 32)
    sizes = (2, 1, 56 * 56, 1, 56 * 56)
    launch = generated(probe, plan, sizes)
    assert launch.staging != "element"
    check_launch(plan, sizes, launch)
    assert excess(plan, sizes, launch) <= 1.4


def test_long_code_does_not_make_passes(probe):
    """They cost memory traffic, whether or not the code stays in a cache."""
    plan = make_plan(layer(128, 128), tile_channels=64, threads=416, channel_pitch=2048, code_bytes=200_000)
    assert generated(probe, plan, (64, 28, 28, 28, 28)).passes == 1
    assert generated(probe, plan, (64, 28, 28, 28, 28), asked=(3, 0, -1)).passes == 3


def test_more_than_it_can_stage(probe):
    plan = make_plan(layer(64, 64), channel_pitch=1024)
    assert generated(probe, plan, (1, 56, 100, 56, 100)) == (
        "it stages 1024 bytes a channel, too few for planes of 56 x 100"
    )
    plan = make_plan(layer(64, 64), channel_pitch=2048)
    reason = generated(probe, plan, (1, 55, 31, 55, 31), asked=(0, 0, 1))
    assert reason.endswith("too few for planes of 55 x 31 with the staging that was asked for")


def test_a_packed_plan_says_why_it_cannot_run(probe):
    packed = {"channel_pitch": 14 * 14 * 4, "image_pitch": 4 * 14 * 14 * 4, "stage_images": 2, "threads": 416}
    plan = make_plan(layer(64, 64), **packed)
    assert generated(probe, plan, (256, 14, 14, 14, 14)).slots == 2 * 14 * 14
    reason = generated(probe, plan, (3, 10, 14, 10, 14))
    assert reason == "it is for planes of 196 elements, X has 10 x 14"
    reason = generated(probe, plan, (3, 14, 14, 14, 14), aligned=False, asked=(0, 0, 0))
    assert reason.endswith("and cannot with the staging that was asked for")
    half = make_plan(layer(64, 64, dtype=np.float16), **{**packed, "channel_pitch": 392, "image_pitch": 1568})
    reason = generated(probe, half, (3, 28, 7, 28, 7))
    assert reason.endswith("words of two halves would begin at odd columns")


@pytest.mark.parametrize(("size", "staging"), [((6, 8), "bulk"), ((5, 6), "element"), ((5, 5), "element")])
def test_inputs_whose_planes_begin_anywhere_are_staged_by_elements(probe, size, staging):
    """However many channels X has: each input has its own."""
    plan = make_plan(layer(64, 32, kernel=1), is_pointwise=1, source_channels=(24, 40, 0, 0, 0, 0, 0, 0))
    assert generated(probe, plan, (3, 1, math.prod(size), 1, math.prod(size))).staging == staging


def test_odd_planes_of_halves(probe):
    plan = make_plan(layer(64, 64, dtype=np.float16), plane_residue=1)
    assert generated(probe, plan, (1, 7, 7, 7, 7)) == "its float16 planes begin at odd elements"


def test_a_last_tile_beyond_the_input(probe):
    case = SparseConvCase(np.ones((12, 2, 3, 3), np.float32), geometry_2d(group=3))
    plan = make_plan(case, tile_channels=8, tile_in_channels=4)
    assert generated(probe, plan, (1, 7, 7, 7, 7)) == "its last tile reads input channels that X does not have"


def test_long_signals(probe):
    case = SparseConvCase(np.ones((100, 300, 3), np.float32), ConvGeometry((3,), (1,), (0, 0), (1,)))
    plan = make_plan(case, tile_channels=25, chunk_channels=20, threads=512, channel_pitch=4096)
    sizes = (128, 1, 56, 1, 54)
    launch = generated(probe, plan, sizes)
    check_launch(plan, sizes, launch)
    assert launch.slots > 2 * 54
    assert excess(plan, sizes, launch) <= 1.4
    launch = generated(
        probe, dataclasses.replace(plan, channel_pitch=1 << 20, chunk_channels=1), (1, 1, 10**5, 1, 99998)
    )
    assert isinstance(launch, str)


def test_millions_of_groups_are_counted_quickly(probe):
    plan = make_plan(layer(4, 4), threads=32, channel_pitch=1 << 16, num_stages=1, chunk_channels=1)
    launch = generated(probe, plan, (1, 20000, 5000, 20000, 5000), device=(90, 132, 227 << 10))
    assert launch.groups > 10**6


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_row_of_millions_is_staged_in_parts(probe, kernel, dtype):
    weight = np.ones((4, 4, kernel), np.float32)
    case = SparseConvCase(weight, ConvGeometry((kernel,), (1,), (0, 0), (1,)), dtype=np.dtype(dtype))
    plan = make_plan(case, is_pointwise=int(kernel == 1), threads=512, channel_pitch=ZERO_BYTES + 512 * 4 + 32)
    width = 5_000_011  # a prime, so that there is no other way to cut it into rows
    sizes = (1, 1, width, 1, width - kernel + 1)
    launch = generated(probe, plan, sizes)
    assert launch.groups > 4096
    check_launch(plan, sizes, launch)
    assert excess(plan, sizes, launch) <= 1.1


def csr(probe, out_dims, out_channels, batch, row_entries):
    text = ctypes.create_string_buffer(TEXT_BYTES)
    probe.probe_csr(
        array(ctypes.c_longlong, out_dims),
        ctypes.c_longlong(out_channels),
        ctypes.c_longlong(batch),
        ctypes.c_longlong(row_entries * out_channels),
        132,
        0,
        text,
        TEXT_BYTES,
    )
    return text.value.decode()


@pytest.mark.parametrize(
    ("layer", "batch", "wanted"),
    [
        (((1, 56, 56), 64, 58), 64, "csr sub_batch=4 rows=1 grid=25x64x16 threads=128"),
        (((1, 224, 224), 64, 3), 64, "csr sub_batch=8 rows=21 grid=392x4x8 threads=128"),
        (((1, 224, 224), 64, 3), 1, "csr sub_batch=1 rows=21 grid=392x4x1 threads=128"),
        (((1, 7, 7), 512, 205), 1, "csr sub_batch=1 rows=1 grid=1x512x1 threads=64"),
        (((1, 7, 7), 512, 205), 30, "csr sub_batch=4 rows=1 grid=1x512x8 threads=64"),
        (((1, 1, 2), 70000, 300), 1, "csr sub_batch=1 rows=1 grid=1x65535x1 threads=32"),
        (((1, 1, 2), 70000, 0), 1, "csr sub_batch=1 rows=16 grid=1x4375x1 threads=32"),
        (((1, 1, 1), 70001, 300), 1, "pixel grid=17501 threads=128"),
        (((4, 8, 8), 8, 10), 10**6, "csr sub_batch=8 rows=6 grid=2x2x65535 threads=128"),
        (((1, 1, 2**31 - 1), 1, 1), 2, "csr sub_batch=2 rows=1 grid=16777216x1x1 threads=128"),
    ],
)
def test_csr_launches_stay_within_a_grid(probe, layer, batch, wanted):
    out_dims, out_channels, row_entries = layer
    assert csr(probe, out_dims, out_channels, batch, row_entries) == wanted


def staged_bytes(height, begin, slots):
    """What a group of a 3x3 layer stages of a channel, on maps that are one column wide, in copies of 16 bytes."""
    total = 0
    while slots > 0:
        end = min(begin + slots, height)
        rows = min(end + 1, height) - max(begin - 1, 0)
        total += -(-(rows + 3) * 4 // 16) * 16
        slots, begin = slots - (end - begin), 0
    return total


@pytest.mark.parametrize("height", [4098, 5003, 9001, 70_000])
def test_groups_of_tall_maps_fit_wherever_they_begin(probe, height):
    """With so many groups, not each of them is looked at."""
    height += -height % 4  # copies of 16 bytes
    for room in (400, 1000, 1056):
        plan = make_plan(layer(64, 64), threads=256, channel_pitch=ZERO_BYTES + room)
        launch = generated(probe, plan, (512, height, 1, height, 1))
        assert launch.groups > 4096
        assert launch.staging != "element"
        worst = max(
            staged_bytes(height, first % height, launch.slots) for first in range(0, 512 * height, launch.slots)
        )
        assert worst <= room


@pytest.mark.parametrize(
    ("channels", "size", "dtype", "staging"),
    [
        (384, 14, np.float32, "bulk"),
        (384, 14, np.float16, "bulk"),
        (960, 7, np.float32, "bulk"),
        (960, 7, np.float16, "element"),  # words of two halves would begin at odd columns
        (6, 7, np.float32, "element"),  # a tile of all six channels begins at 16 bytes, the next image does not
    ],
)
def test_planes_of_depthwise_layers_are_copied_in_one_piece(probe, channels, size, dtype, staging):
    """A tile begins at 16 bytes where its channels together have so many, though one plane has not."""
    layer = sparse_layer((channels, 1, 3, 3), size=(size, size), density=1, dtype=dtype, group=channels)
    plan = choose_plan(layer, 90)
    assert generated(probe, plan, (64, size, size, size, size)).staging == staging


def test_tiles_of_whole_groups_are_copied_in_one_piece_where_they_are_aligned(probe):
    """Six planes of 49 floats are no multiple of 16 bytes, those of two groups are."""
    layer = sparse_layer((64, 6, 3, 3), size=(7, 7), density=1, group=4)
    plan = dataclasses.replace(choose_plan(layer, 90), chunk_channels=12, num_chunks=1, plane_residue=1)
    plan = dataclasses.replace(plan, image_pitch=0, stage_images=0, channel_pitch=4096, staging_threads=32)
    of_two = dataclasses.replace(plan, tile_channels=32, num_tiles=2, tile_in_channels=12)
    assert generated(probe, of_two, (4, 7, 7, 7, 7)).staging == "bulk"
    of_one = dataclasses.replace(plan, tile_channels=16, num_tiles=4, tile_in_channels=6)
    assert generated(probe, of_one, (4, 7, 7, 7, 7)).staging == "element"


@pytest.mark.parametrize(
    ("channels", "size", "batch", "splits"), [((72, 24), 56, 32, 1), ((72, 40), 28, 64, 1), ((512, 64), 14, 1, 8)]
)
def test_more_groups_are_better_than_splits_where_sums_are_many(probe, channels, size, batch, splits):
    in_channels, out_channels = channels
    shape = out_channels, in_channels, 1, 1
    plan = choose_plan(sparse_layer(shape, size=(size, size), density=0.1, dtype=np.float16), 90)
    launch = generated(probe, plan, (batch, 1, size * size, 1, size * size))
    assert launch.splits == splits
