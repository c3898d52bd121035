"""Layers for the GPU tests: what generated kernels have to cover, and shapes that real networks have."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry, PoolGeometry
from tests.support.sparse_models import SparseConvCase, geometry_2d, random_weight
from tests.support.sparse_nodes import split_channels

TYPES = (np.float32, np.float16)
# What each kernel computes in.
KERNELS = list(itertools.product(("csr", "tensor", "generated"), TYPES))


def conv1d(kernel, stride=1, pads=(0, 0), dilation=1, group=1):
    return ConvGeometry((kernel,), (stride,), tuple(pads), (dilation,), group)


# Windows with a kernel of their own, and one without.
POOLS = (
    PoolGeometry((2, 2), (2, 2), (0,) * 4),
    PoolGeometry((3, 3), (2, 2), (1,) * 4),
    PoolGeometry((3, 2), (1, 2), (1, 0, 2, 1)),
)
# For the warpgroup kernels, which want more channels than most of the others have.
WARPGROUPS = {
    "3x3, 28 wide": ((128, 128, 3, 3), geometry_2d(), (16, 128, 28, 28)),
    "3x3, 56 wide": ((64, 64, 3, 3), geometry_2d(), (11, 64, 56, 56)),
    "3x3, 112 wide": ((128, 128, 3, 3), geometry_2d(), (5, 128, 40, 112)),
    "3x3, 240 wide": ((64, 64, 3, 3), geometry_2d(), (3, 64, 50, 240)),
    "3x3, 14 wide": ((192, 256, 3, 3), geometry_2d(), (9, 256, 14, 14)),
    "3x3, 7 wide": ((96, 100, 3, 3), geometry_2d(), (8, 100, 7, 7)),
    "3x3, odd width": ((70, 40, 3, 3), geometry_2d(pad=0), (5, 40, 17, 31)),
    "3x3, stride 2": ((64, 48, 3, 3), geometry_2d(3, 2, 1), (8, 48, 30, 56)),
    "3x3, stride 2, 20 wide": ((130, 64, 3, 3), geometry_2d(3, 2, 1), (9, 64, 16, 20)),
    "5x5, stride 2": ((64, 40, 5, 5), geometry_2d(5, 2, 2), (5, 40, 32, 44)),
    "3x3, dilation 2": ((64, 32, 3, 3), geometry_2d(3, 1, 2, 2), (8, 32, 20, 16)),
    "3x3, groups": ((128, 32, 3, 3), geometry_2d(group=2), (8, 64, 18, 20)),
    "3x3, 32 wide, one image": ((80, 64, 3, 3), geometry_2d(), (1, 64, 30, 32)),
    "3x3, 24 wide": ((64, 72, 3, 3), geometry_2d(), (5, 72, 11, 24)),
    "3x3, three channels": ((32, 3, 3, 3), geometry_2d(), (5, 3, 30, 56)),
    "7x7, three channels, stride 2": ((64, 3, 7, 7), geometry_2d(7, 2, 3), (5, 3, 96, 112)),
    "7x7, three channels, stride 2, odd planes": ((96, 3, 7, 7), geometry_2d(7, 2, 0), (3, 3, 115, 115)),
    "1x1": ((256, 200, 1, 1), geometry_2d(1, 1, 0), (9, 200, 14, 14)),
    "1x1, 28 wide": ((150, 300, 1, 1), geometry_2d(1, 1, 0), (9, 300, 28, 28)),
    "1x1, 7 wide": ((300, 200, 1, 1), geometry_2d(1, 1, 0), (9, 200, 7, 7)),
    "1x1, few rows": ((50, 64, 1, 1), geometry_2d(1, 1, 0), (3, 64, 30, 56)),
    "1x1, stride 2": ((130, 64, 1, 1), geometry_2d(1, 2, 0), (5, 64, 28, 28)),
    "1x1, stride 2, 56 wide": ((64, 64, 1, 1), geometry_2d(1, 2, 0), (3, 64, 56, 56)),
    "1x1, stride 2, 14 wide": ((64, 64, 1, 1), geometry_2d(1, 2, 0), (3, 64, 14, 14)),
    "1x1, groups": ((256, 40, 1, 1), geometry_2d(1, 1, 0, group=2), (5, 80, 14, 16)),
    "1-D": ((100, 300, 3), conv1d(3), (16, 300, 56)),
    "1-D, 112 words": ((100, 140, 2), conv1d(2, pads=(1, 0)), (5, 140, 112)),
    "1x3, 20 wide": ((64, 64, 1, 3), ConvGeometry((1, 3), (1, 1), (0, 1, 0, 1), (1, 1)), (3, 64, 13, 20)),
}

# Of `WARPGROUPS`, what the kernel for 1x1 from sm_80 on runs, too.
SEGMENTS = ("1x1", "1x1, 28 wide", "1x1, few rows", "1x1, groups")

# For the flat kernels, which want many channels.
FLAT = {
    "3x3, 14 wide": ((192, 256, 3, 3), geometry_2d(), (9, 256, 14, 14)),
    "3x3, 7 wide": ((512, 512, 3, 3), geometry_2d(), (8, 512, 7, 7)),
    "3x3, 28 wide": ((130, 160, 3, 3), geometry_2d(), (17, 160, 28, 28)),
    "3x3, 112 wide": ((128, 128, 3, 3), geometry_2d(), (5, 128, 40, 112)),
    "3x3, odd width": ((70, 100, 3, 3), geometry_2d(pad=0), (5, 100, 17, 31)),
    "3x3, stride 2": ((256, 256, 3, 3), geometry_2d(3, 2, 1), (9, 256, 28, 28)),
    "3x3, dilation 2": ((64, 72, 3, 3), geometry_2d(3, 1, 2, 2), (8, 72, 20, 16)),
    "3x3, groups": ((128, 80, 3, 3), geometry_2d(group=2), (8, 160, 18, 20)),
    # Several turns of tiles, so that some of X is left to the kernel; and rows with third non-zeros.
    "3x3, many rows": ((2048, 64, 3, 3), geometry_2d(), (9, 64, 28, 28)),
    "5x5": ((64, 96, 5, 5), geometry_2d(5, 1, 2), (5, 96, 14, 14)),
    "1-D": ((100, 300, 3), conv1d(3, 2, (1, 1)), (16, 300, 56)),
}
# Share of their weights that are not zero, so few that rows have an order in common, and more.
FLAT_DENSITY, FLAT_DENSE = 0.05, 0.3

# For the gemm kernels: boxes and planes, as they are, gathered, and made ready.
GEMM = {
    "14 wide": ((256, 200, 1, 1), geometry_2d(1, 1, 0), (9, 200, 14, 14)),
    "10 wide": ((72, 64, 1, 1), geometry_2d(1, 1, 0), (70, 64, 10, 10)),
    "28 wide": ((150, 300, 1, 1), geometry_2d(1, 1, 0), (9, 300, 28, 28)),
    "56 wide": ((64, 64, 1, 1), geometry_2d(1, 1, 0), (5, 64, 56, 56)),
    "7 wide": ((304, 200, 1, 1), geometry_2d(1, 1, 0), (9, 200, 7, 7)),
    "4 wide": ((128, 100, 1, 1), geometry_2d(1, 1, 0), (40, 100, 4, 4)),
    "a pixel": ((128, 64, 1, 1), geometry_2d(1, 1, 0), (40, 64, 1, 1)),
    "few rows": ((50, 64, 1, 1), geometry_2d(1, 1, 0), (3, 64, 30, 56)),
    "56 wide, stride 2": ((200, 136, 1, 1), geometry_2d(1, 2, 0), (5, 136, 56, 56)),
    "28 wide, stride 2": ((150, 64, 1, 1), geometry_2d(1, 2, 0), (20, 64, 28, 28)),
    "14 wide, stride 2": ((304, 200, 1, 1), geometry_2d(1, 2, 0), (20, 200, 14, 14)),
    "27 wide, stride 2": ((304, 200, 1, 1), geometry_2d(1, 2, 0), (9, 200, 13, 27)),
    "8 wide, stride 2": ((72, 64, 1, 1), geometry_2d(1, 2, 0), (40, 64, 4, 8)),
}

# Each window that has a kernel of its own, blocks of planes and of bands of rows, and what no such window is.
DEPTHWISE = {
    "3x3": ((96, 1, 3, 3), geometry_2d(group=96), (5, 96, 14, 14)),
    "3x3, 7 wide": ((161, 1, 3, 3), geometry_2d(group=161), (64, 161, 7, 7)),
    "3x3, 112 wide": ((33, 1, 3, 3), geometry_2d(group=33), (3, 33, 112, 112)),
    "3x3, 301 wide": ((5, 1, 3, 3), geometry_2d(group=5), (3, 5, 64, 301)),
    "3x3, stride 2": ((48, 1, 3, 3), geometry_2d(3, 2, 1, group=48), (9, 48, 57, 56)),
    "5x5": ((75, 1, 5, 5), geometry_2d(5, 1, 2, group=75), (7, 75, 28, 28)),
    "5x5, stride 2": ((75, 1, 5, 5), geometry_2d(5, 2, 2, group=75), (7, 75, 29, 27)),
    "7x7": ((96, 1, 7, 7), geometry_2d(7, 1, 3, group=96), (5, 96, 56, 56)),
    "7x7, 7 wide": ((96, 1, 7, 7), geometry_2d(7, 1, 3, group=96), (5, 96, 7, 7)),
    "3x3, dilation 2": ((48, 1, 3, 3), geometry_2d(3, 1, 2, 2, group=48), (5, 48, 20, 21)),
    "3x3, wide padding": ((48, 1, 3, 3), geometry_2d(pad=20, group=48), (2, 48, 8, 9)),
    "4x4": ((48, 1, 4, 4), geometry_2d(4, 3, 1, group=48), (5, 48, 31, 30)),
    "1-D": ((48, 1, 9), conv1d(9, pads=(4, 4), group=48), (5, 48, 1001)),
    "1x1": ((200, 1, 1, 1), geometry_2d(1, pad=0, group=200), (9, 200, 28, 28)),
    "1x1, 7 wide": ((161, 1, 1, 1), geometry_2d(1, pad=0, group=161), (33, 161, 7, 7)),
    "1x1, one pixel": ((99, 1, 1, 1), geometry_2d(1, pad=0, group=99), (5, 99, 1, 1)),
    "1x1, stride 2": ((48, 1, 1, 1), geometry_2d(1, 2, 0, group=48), (3, 48, 15, 14)),
    "1-D, one tap": ((48, 1, 1), conv1d(1, pads=(0, 0), group=48), (5, 48, 1001)),
}

# name: shape of the weight, geometry, shape of X
GENERATED = {
    "3x3": ((16, 16, 3, 3), geometry_2d(), (2, 16, 28, 28)),
    "3x3, 56 wide": ((8, 8, 3, 3), geometry_2d(), (3, 8, 56, 56)),
    "3x3, 14 wide": ((16, 24, 3, 3), geometry_2d(), (5, 24, 14, 14)),
    "3x3, 7 wide": ((24, 40, 3, 3), geometry_2d(), (9, 40, 7, 7)),
    "3x3, odd width": ((8, 8, 3, 3), geometry_2d(), (2, 8, 11, 13)),
    "3x3, one image": ((32, 32, 3, 3), geometry_2d(), (1, 32, 14, 14)),
    "3x3, one pixel": ((8, 8, 3, 3), geometry_2d(), (2, 8, 1, 1)),
    "3x3, one row": ((8, 8, 3, 3), geometry_2d(), (2, 8, 1, 40)),
    "3x3, no padding": ((8, 8, 3, 3), geometry_2d(pad=0), (2, 8, 17, 19)),
    "3x3, uneven padding": ((8, 8, 3, 3), ConvGeometry((3, 3), (1, 1), (0, 2, 1, 0), (1, 1)), (2, 8, 15, 16)),
    "3x3, wide padding": ((8, 8, 3, 3), geometry_2d(pad=4), (2, 8, 10, 12)),
    "3x3, stride 2": ((16, 8, 3, 3), geometry_2d(3, 2, 1), (2, 8, 29, 30)),
    "3x3, dilation 2": ((8, 8, 3, 3), geometry_2d(3, 1, 2, 2), (2, 8, 20, 21)),
    "3x3, dilation 12": ((8, 8, 3, 3), geometry_2d(3, 1, 12, 12), (1, 8, 33, 33)),
    "3x3, groups": ((24, 4, 3, 3), geometry_2d(group=3), (2, 12, 18, 18)),
    "3x3, groups, 14 wide": ((24, 2, 3, 3), geometry_2d(group=12), (3, 24, 14, 14)),
    "depthwise": ((48, 1, 3, 3), geometry_2d(group=48), (2, 48, 28, 28)),
    "depthwise, 14 wide": ((48, 1, 3, 3), geometry_2d(group=48), (5, 48, 14, 14)),
    "depthwise, 7 wide": ((80, 1, 3, 3), geometry_2d(group=80), (9, 80, 7, 7)),
    "depthwise, stride 2": ((48, 1, 3, 3), geometry_2d(3, 2, 1, group=48), (3, 48, 14, 14)),
    "1x1": ((64, 32, 1, 1), geometry_2d(1, pad=0), (2, 32, 28, 28)),
    "1x1, 7 wide": ((48, 64, 1, 1), geometry_2d(1, pad=0), (3, 64, 7, 7)),
    "1x1, stride 2": ((32, 32, 1, 1), geometry_2d(1, 2, 0), (2, 32, 28, 28)),
    "1x1, padded": ((8, 8, 1, 1), geometry_2d(1, 1, 1), (2, 8, 9, 9)),
    "1x3": ((8, 8, 1, 3), ConvGeometry((1, 3), (1, 1), (0, 1, 0, 1), (1, 1)), (2, 8, 12, 20)),
    "5x5": ((8, 6, 5, 5), geometry_2d(5, 1, 2), (2, 6, 20, 22)),
    "7x7, stride 2": ((16, 3, 7, 7), geometry_2d(7, 2, 3), (2, 3, 60, 62)),
    "1-D": ((20, 30, 3), conv1d(3), (4, 30, 56)),
    "1-D, width 2": ((20, 30, 2), conv1d(2), (4, 30, 56)),
    "1-D, stride and dilation": ((12, 8, 5), conv1d(5, 2, (3, 4), 2), (2, 8, 101)),
}


def concatenated_case_of(name, dtype, count, layers=None):
    """A layer of `WARPGROUPS`, or others, whose X comes in so many parts, and the shape of all of it."""
    case, x_shape = case_of(name, dtype, has_residual=False, layers=layers or WARPGROUPS)
    return dataclasses.replace(case, input_channels=split_channels(x_shape[1], count)), x_shape


def case_of(name, dtype, density=0.15, *, activation=Activation.RELU, has_residual=True, layers=None):
    """A layer of `layers` as a case, with some rows empty, and the shape of its input."""
    shape, geometry, x_shape = (layers or GENERATED)[name]
    weight = random_weight(shape, density, seed=len(name), dtype=dtype)
    weight[1::7] = 0
    return SparseConvCase(weight, geometry, activation, 0.0, 0.0, np.dtype(dtype), has_residual=has_residual), x_shape
