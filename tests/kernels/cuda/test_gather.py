"""What brings planes into the form that the pointwise kernel reads, in the emulation, between forbidden pages."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from onnx_sparseconv.kernels.device_sources import WGMMA_FLOAT_KERNELS, WGMMA_KERNELS
from tests.support.cuda_host_build import address, device_array, kernel_image, launch

SEGMENT = 8  # positions
THREADS = 256
_int, _two = ctypes.c_int, ctypes.c_int * 2


class _Divisor(ctypes.Structure):
    _fields_ = [("multiplier", ctypes.c_uint), ("shift", _int)]


def divisor(number):
    shift = (number - 1).bit_length()
    return _Divisor(-(-(1 << (31 + shift)) // number), shift)


class GatherParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("num_segments", _int),
        ("plane_segments", _int),
        ("in_h", _int),
        ("in_w", _int),
        ("out_h", _int),
        ("out_w", _int),
        ("strides", _two),
        ("pads_begin", _two),
        ("is_whole", _int),
        ("channels", _int),
        ("sources_x", ctypes.c_void_p * 8),
        ("sources_begins", _int * 9),
        ("sources_count", _int),
        ("plane_divisor", _Divisor),
        ("row_divisor", _Divisor),
        ("num_lines", _int),
        ("load_bytes", _int),
    ]


KERNELS = {np.dtype(np.float16): WGMMA_KERNELS, np.dtype(np.float32): WGMMA_FLOAT_KERNELS}
SAW_SOME, SAW_ENOUGH, SAW_BEYOND = 1, 2, 4


def gather(kernel, x, out_size, strides=(1, 1), pads=(0, 0), *, misalignment=0, load_bytes=0, blocks=3):
    """Planes, ``(planes, H, W)``, as the kernel leaves them, ``(planes, positions)`` of halves, and what it saw."""
    positions = out_size[0] * out_size[1]
    segments = -(-positions // SEGMENT)
    source = device_array(x, misalignment=misalignment)
    out = device_array(np.zeros((len(x), segments * SEGMENT), np.float16), writable=True)
    seen = device_array(np.zeros(blocks, np.uint32), writable=True)
    is_whole = x.shape[1:] == out_size
    params = GatherParams(
        *(address(source), address(out), address(seen), len(x) * segments, segments, *x.shape[1:], *out_size),
        *(_two(*strides), _two(*pads), is_whole),
    )
    if kernel == "whole":
        params.in_h, params.in_w, params.plane_divisor = 1, positions, divisor(segments)
    if kernel == "columns":
        params.num_lines, params.load_bytes = len(x) * out_size[0], load_bytes
        params.plane_divisor = divisor(out_size[0])
        params.row_divisor = divisor(out_size[1] * 2 * x.itemsize // load_bytes)
    suffix = "_f32" * (x.dtype == np.float32)
    name = "sparseconv_gather" + f"_{kernel}" * (kernel != "any") + suffix
    launch(kernel_image(KERNELS[x.dtype]), name, (blocks,), (THREADS,), [params])
    return out[:, :positions], np.bitwise_or.reduce(seen)


def planes(*shape, dtype=np.float16):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def assert_gathered(found, x, wanted):
    """Floats are rounded, and what was seen of them is noted."""
    gathered, seen = found
    np.testing.assert_array_equal(gathered, wanted.reshape(len(x), -1).astype(np.float16))
    assert seen == (SAW_SOME | SAW_ENOUGH) * (x.dtype == np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("misalignment", [0, 1, 3, None])
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (7, 7), (5, 9), (2, 8)], ids=str)
@pytest.mark.parametrize("kernel", ["any", "whole"])
def test_whole_planes(kernel, size, misalignment, dtype):
    x = planes(11, *size, dtype=dtype)
    assert_gathered(gather(kernel, x, size, misalignment=misalignment), x, x)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("count", "size"), [(300, (7, 7)), (3, (40, 41)), (1100, (1, 1)), (74, (8, 7))], ids=str)
def test_more_whole_planes_than_blocks_have_threads(count, size, dtype):
    x = planes(count, *size, dtype=dtype)
    assert_gathered(gather("whole", x, size, misalignment=1), x, x)


@pytest.mark.parametrize("misalignment", [1, None])
@pytest.mark.parametrize(
    ("strides", "pads", "out_size"), [((2, 2), (0, 0), (4, 5)), ((1, 3), (1, 2), (9, 5)), ((2, 1), (3, 0), (6, 9))]
)
def test_positions_of_strides_and_padding(strides, pads, out_size, misalignment):
    x = planes(5, 7, 9)
    padded = np.pad(x, ((0, 0), (pads[0], 12), (pads[1], 12)))
    wanted = padded[:, :: strides[0], :: strides[1]][:, : out_size[0], : out_size[1]]
    assert_gathered(gather("any", x, out_size, strides, pads, misalignment=misalignment), x, wanted)


@pytest.mark.parametrize(
    ("dtype", "size", "load_bytes", "misalignment"),
    [
        (np.float16, (6, 16), 16, 0),
        (np.float16, (6, 16), 8, 4),
        (np.float16, (6, 12), 8, 0),
        (np.float16, (7, 14), 4, 2),
        (np.float16, (2, 8), 16, None),
        (np.float32, (6, 16), 16, 0),
        (np.float32, (6, 16), 8, 2),
        (np.float32, (7, 14), 8, 0),
        (np.float32, (2, 8), 16, None),
    ],
)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_second_column_by_vectors(dtype, size, load_bytes, misalignment, stride):
    x = planes(150, *size, dtype=dtype)
    wanted = x[:, ::stride, ::2]
    found = gather(
        "columns", x, wanted.shape[1:], (stride, 2), load_bytes=load_bytes, misalignment=misalignment, blocks=2
    )
    assert_gathered(found, x, wanted)


@pytest.mark.parametrize(
    ("value", "seen"), [(1e6, 7), (np.inf, 7), (np.nan, 7), (1e-7, SAW_SOME), (0.0, 0), (1e-20, SAW_SOME)]
)
@pytest.mark.parametrize("kernel", ["any", "whole", "columns"])
def test_what_halves_do_not_hold_is_noted(kernel, value, seen):
    x = np.zeros((9, 4, 8), np.float32)
    x[8, 2, 6] = value
    strides = (2, 2) if kernel == "columns" else (1, 1)
    out_size = x[:, :: strides[0], :: strides[1]].shape[1:]
    _, found = gather(kernel, x, out_size, strides, load_bytes=16)
    assert found == seen
