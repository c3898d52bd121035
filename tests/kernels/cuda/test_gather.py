"""What brings planes into the form that the pointwise kernel reads, in the emulation, between forbidden pages."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from onnx_sparseconv.kernels.device_sources import WGMMA_KERNELS
from tests.support.cuda_host_build import address, device_array, kernel_image, launch

SEGMENT = 8  # positions
_int, _two = ctypes.c_int, ctypes.c_int * 2


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
        ("columns", _int),
        ("channels", _int),
        ("sources_x", ctypes.c_void_p * 8),
        ("sources_begins", _int * 9),
        ("sources_count", _int),
    ]


def gather(x, out_size, strides=(1, 1), pads=(0, 0), *, is_whole=False, columns=0, misalignment=0):
    """Planes, ``(planes, H, W)``, as the kernel leaves them: ``(planes, positions)``."""
    positions = out_size[0] * out_size[1]
    segments = -(-positions // SEGMENT)
    source = device_array(x, misalignment=misalignment)
    out = device_array(np.zeros((len(x), segments * SEGMENT), np.float16), writable=True)
    params = GatherParams(
        *(address(source), address(out), None, len(x) * segments, segments, *x.shape[1:], *out_size),
        *(_two(*strides), _two(*pads), is_whole, columns),
    )
    launch(kernel_image(WGMMA_KERNELS), "sparseconv_gather", (3,), (64,), [params])
    return out[:, :positions]


def planes(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("misalignment", [0, 1, 3, None])
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (7, 7), (5, 9), (2, 8)], ids=str)
def test_whole_planes(size, misalignment):
    x = planes(11, *size)
    found = gather(x, size, is_whole=True, misalignment=misalignment)
    np.testing.assert_array_equal(found, x.reshape(11, -1))


@pytest.mark.parametrize("misalignment", [1, None])
@pytest.mark.parametrize(
    ("strides", "pads", "out_size"), [((2, 2), (0, 0), (4, 5)), ((1, 3), (1, 2), (9, 5)), ((2, 1), (3, 0), (6, 9))]
)
def test_positions_of_strides_and_padding(strides, pads, out_size, misalignment):
    x = planes(5, 7, 9)
    padded = np.pad(x, ((0, 0), (pads[0], 12), (pads[1], 12)))
    wanted = padded[:, :: strides[0], :: strides[1]][:, : out_size[0], : out_size[1]]
    found = gather(x, out_size, strides, pads, misalignment=misalignment)
    np.testing.assert_array_equal(found, wanted.reshape(5, -1))


@pytest.mark.parametrize(
    ("size", "columns", "misalignment"),
    [((6, 16), 4, 0), ((6, 16), 2, 4), ((6, 12), 2, 0), ((7, 14), 1, 2), ((14, 14), 1, None), ((2, 8), 4, None)],
)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_second_column_by_vectors(size, columns, misalignment, stride):
    x = planes(5, *size)
    wanted = x[:, ::stride, ::2]
    found = gather(x, wanted.shape[1:], (stride, 2), columns=columns, misalignment=misalignment)
    np.testing.assert_array_equal(found, wanted.reshape(5, -1))
