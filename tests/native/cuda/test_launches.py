"""The launches that are planned for sizes too large to compute here: what they use of the GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.kernels.image_container import PLAN_FIELDS
from tests.native.cuda.reference import make_plan
from tests.support.cuda_emulation import build_shared
from tests.support.native_build import ROOT
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
    images: int
    parts: int
    slots: int
    lanes: int
    splits: int
    passes: int
    grid: int


PATTERN = re.compile(
    r"generated staging=(\w+) groups=(\d+) \((\d+) images, 1/(\d+) of an image, (\d+) slots\) rows=\d+x\d+ "
    r"row_pitch=\d+ image_pitch=\d+ lanes=(\d+) splits=(\d+) passes=(\d+) grid=(\d+) threads=\d+ shared_bytes=\d+"
)


def array(kind, values):
    return (kind * len(values))(*values)


def generated(probe, plan, sizes, *, device=(90, 132, 227 << 10), aligned=True, blocks=1, asked=(0, 0, -1)):
    """The launch for ``(batch, in_h, in_w, out_h, out_w)``, or the reason why there is none."""
    values = [getattr(plan, name) for name, _ in PLAN_FIELDS]
    numbers = [n for value in values for n in (value if isinstance(value, tuple) else (value,))]
    text = ctypes.create_string_buffer(TEXT_BYTES)
    found = probe.probe_generated(
        array(ctypes.c_int, numbers),
        array(ctypes.c_longlong, sizes),
        array(ctypes.c_int, device),
        array(ctypes.c_int, (aligned, 64, blocks)),
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("channels", "size", "threads"), [(64, 56, 448), (64, 224, 448), (128, 112, 448), (256, 56, 448), (512, 28, 448)]
)
def test_large_maps_use_the_threads_and_the_gpu(probe, channels, size, threads, dtype):
    plan = make_plan(
        layer(channels, channels, dtype=dtype),
        tile_channels=32,
        chunk_channels=8,
        threads=threads,
        num_stages=3,
        channel_pitch=9472,
    )
    launch = generated(probe, plan, (64, size, size, size, size))
    assert launch.staging == "bulk"
    slots = size * (size // 2 if dtype == np.float16 else size)
    used = launch.images * launch.slots if launch.parts == 1 else slots / launch.parts
    assert used >= 0.85 * threads
    assert launch.groups * launch.images * slots >= 64 * slots * launch.parts
    assert launch.splits == launch.passes == 1
    assert 0.85 * 132 <= launch.grid <= 132
    assert launch.grid == launch.lanes * plan.num_tiles


def test_small_maps_share_a_group(probe):
    plan = make_plan(layer(512, 512), tile_channels=64, threads=512, channel_pitch=4096)
    launch = generated(probe, plan, (64, 7, 7, 7, 7))
    assert launch.staging == "element"  # 49 values are no multiple of 16 bytes, and planes were said to begin aligned
    assert (launch.images, launch.parts) == (10, 1)
    assert launch.groups == 7


def test_whole_planes_of_any_size_are_copied_as_bytes_where_channels_allow_it(probe):
    plan = make_plan(layer(512, 512), tile_channels=64, threads=512, channel_pitch=4096, plane_residue=1)
    assert generated(probe, plan, (64, 7, 7, 7, 7)).staging == "bulk"
    assert generated(probe, plan, (64, 7, 7, 7, 7), device=(80, 108, 163 << 10)).staging == "vector"
    assert generated(probe, plan, (64, 7, 7, 7, 7), aligned=False).staging == "element"
    odd = dataclasses.replace(plan, chunk_channels=2)
    assert generated(probe, odd, (64, 7, 7, 7, 7)).staging == "element"
    assert generated(probe, plan, (64, 7, 9, 7, 9)).staging == "element"


@pytest.mark.parametrize("size", [7, 14])
def test_one_image_of_many_channels_is_split(probe, size):
    plan = make_plan(layer(512, 512), tile_channels=64, chunk_channels=8, threads=256, channel_pitch=4096)
    launch = generated(probe, plan, (1, size, size, size, size))
    assert launch.splits == 16
    assert launch.grid == 128
    assert launch.passes == 1
    few = generated(probe, plan, (1, size, size, size, size), asked=(0, 4, -1))
    assert few.splits == 4


def test_a_wide_pointwise_plane_is_staged_in_parts(probe):
    plan = make_plan(layer(64, 64, 1), is_pointwise=1, threads=256, channel_pitch=16 + 4 * 256 + 32)
    launch = generated(probe, plan, (2, 1, 56 * 56, 1, 56 * 56))
    assert launch.staging == "bulk"
    assert launch.slots >= 196


def test_code_that_runs_once_needs_no_passes(probe):
    plan = make_plan(layer(128, 128), tile_channels=64, threads=416, channel_pitch=2048, code_bytes=200_000)
    assert generated(probe, plan, (64, 28, 28, 28, 28)).passes == 3
    assert generated(probe, plan, (33, 28, 28, 28, 28)).passes == 1


def test_more_than_it_can_stage(probe):
    plan = make_plan(layer(64, 64), channel_pitch=1024)
    assert generated(probe, plan, (1, 56, 100, 56, 100)) == (
        "it stages 1024 bytes a channel, too few for planes of 56 x 100"
    )
    plan = make_plan(layer(64, 64), channel_pitch=2048)
    reason = generated(probe, plan, (1, 55, 31, 55, 31), asked=(0, 0, 1))
    assert reason.endswith("too few for planes of 55 x 31 with the staging that was asked for")


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
    launch = generated(probe, plan, (128, 1, 56, 1, 54))
    assert launch.images == 9
    assert launch.groups == 15
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
    plan = make_plan(case, is_pointwise=int(kernel == 1), threads=512, channel_pitch=16 + 512 * 4 + 32)
    width = 5_000_011  # a prime, so that there is no other way to cut it into rows
    launch = generated(probe, plan, (1, 1, width, 1, width - kernel + 1))
    assert launch.parts == launch.groups > 4096
    assert launch.slots >= 400


def csr(probe, out_dims, out_channels, batch):
    text = ctypes.create_string_buffer(TEXT_BYTES)
    probe.probe_csr(
        array(ctypes.c_longlong, out_dims),
        ctypes.c_longlong(out_channels),
        ctypes.c_longlong(batch),
        132,
        0,
        text,
        TEXT_BYTES,
    )
    return text.value.decode()


@pytest.mark.parametrize(
    ("out_dims", "out_channels", "batch", "wanted"),
    [
        ((1, 56, 56), 64, 64, "csr sub_batch=8 grid=25x64x8 threads=128"),
        ((1, 7, 7), 512, 1, "csr sub_batch=1 grid=1x512x1 threads=64"),
        ((1, 7, 7), 512, 3, "csr sub_batch=2 grid=1x512x2 threads=64"),
        ((1, 1, 1), 70000, 1, "csr sub_batch=1 grid=1x65535x1 threads=32"),
        ((4, 8, 8), 8, 10**6, "csr sub_batch=8 grid=2x8x65535 threads=128"),
        ((1, 1, 2**31 - 1), 1, 2, "csr sub_batch=2 grid=16777216x1x1 threads=128"),
    ],
)
def test_csr_launches_stay_within_a_grid(probe, out_dims, out_channels, batch, wanted):
    assert csr(probe, out_dims, out_channels, batch) == wanted
