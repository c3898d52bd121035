"""What foretells times of the flat kernel, against how the library packs its weight and plans its launch."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.flat_plan import FlatSteps, flat_steps, plan_flat
from onnx_sparseconv.kernels.warpgroup_plan import out_size
from tests.support.cuda_emulation import build_shared
from tests.support.native_build import ROOT
from tests.support.sparse_layers import layer_of, sparse_layer
from tests.support.sparse_models import SparseConvCase, geometry_2d, random_weight

NATIVE = ROOT / "onnx_sparseconv/custom_ops/native/cuda"
SOURCES = [Path(__file__).with_name("flat_probe.cc")]
SOURCES += [NATIVE / f"{name}.cc" for name in ("channel_order", "flat_plan", "flat_weight")]
HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Packed:
    """What the library makes of a layer: steps of a row tile in the mean; the launch's NaN where there is none."""

    steps: FlatSteps
    cycles: float
    blocks: float
    tiles: float
    grid: float


@pytest.fixture(scope="module")
def pack():
    """Packs a layer's weight and plans its launch; None where the library does not pack it."""
    probe = ctypes.CDLL(str(build_shared("flat_probe.so", SOURCES, "-O2")))

    def call(layer, batch=1):
        entries = np.ascontiguousarray(layer.used_weights != 0, np.uint8)
        numbers = [layer.in_channels, layer.out_channels, layer.group, *layer.kernel_shape, *layer.strides]
        numbers += [*layer.dilations, *layer.pads[:2], *layer.in_size, *out_size(layer)]
        numbers += [batch, layer.element_type.itemsize, MULTIPROCESSORS]
        found = (ctypes.c_double * 8)(*(8 * [math.nan]))
        if not probe.probe_flat(entries.ctypes.data_as(ctypes.c_void_p), (ctypes.c_longlong * 18)(*numbers), found):
            return None
        steps, pairs, row_tiles, is_dense, *launch = found
        return Packed(FlatSteps(steps / row_tiles, pairs / row_tiles, is_dense=bool(is_dense)), *launch)

    return call


@pytest.mark.parametrize(
    "form",
    [
        ((64, 64, 3, 3), (28, 28), geometry_2d(pad=1)),
        ((130, 160, 3, 3), (14, 14), geometry_2d(pad=1)),
        ((256, 128, 3, 3), (7, 7), geometry_2d(pad=1)),
        ((100, 96, 3, 3), (13, 41), geometry_2d(pad=0)),
        ((128, 64, 3, 3), (56, 56), geometry_2d(stride=2, pad=1)),
        ((128, 256, 3, 3), (15, 29), geometry_2d(stride=2, pad=1)),
        ((64, 96, 5, 5), (14, 17), geometry_2d(5, pad=2)),
        ((64, 80, 5, 5), (112, 112), geometry_2d(5, stride=2, pad=2)),
        ((64, 64, 7, 7), (28, 28), geometry_2d(7, pad=3)),
        ((64, 96, 5, 3), (17, 19), ConvGeometry((5, 3), (2, 3), (2, 0, 1, 2), (1, 1))),
        ((64, 160, 3, 3), (18, 20), ConvGeometry((3, 3), (1, 1), (2, 3, 2, 3), (2, 3))),
        ((64, 160, 3, 3), (18, 20), ConvGeometry((3, 3), (2, 2), (2, 2, 2, 2), (2, 2))),
        ((64, 160, 2, 2), (14, 14), ConvGeometry((2, 2), (2, 2), (0, 0, 0, 0), (1, 1))),
        ((64, 160, 3, 3), (9, 11), ConvGeometry((3, 3), (1, 1), (4, 5, 4, 5), (1, 1))),
        ((64, 160, 3, 3), (12, 14), ConvGeometry((3, 3), (1, 1), (0, 1, 3, 0), (1, 1))),
        ((200, 80, 3, 3), (14, 14), geometry_2d(pad=1, group=2)),
        ((64, 160, 3), (50,), ConvGeometry((3,), (2,), (1, 1), (1,))),
        ((64, 64, 3, 3), (4, 700), geometry_2d(pad=1)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("batch", "density"), [(1, 0.05), (5, 0.05), (64, 0.05), (64, 0.1), (9, 0.5)])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_the_plan_is_the_librarys(pack, form, batch, density, dtype):
    weight_shape, size, geometry = form
    weight = random_weight(weight_shape, density, dtype=dtype)
    layer = layer_of(SparseConvCase(weight, geometry, Activation.NONE, dtype=dtype), size)
    packed = pack(layer, batch)
    assert packed.steps.is_dense == (density > 0.1)
    foretold = plan_flat(layer, batch, packed.steps, MULTIPROCESSORS)
    assert (foretold.blocks, foretold.tiles) == (packed.blocks, packed.tiles)
    assert min(foretold.tiles, MULTIPROCESSORS) == packed.grid
    assert foretold.cycles == pytest.approx(packed.cycles)


def test_a_tile_that_does_not_fit_has_no_plan(pack):
    layer = sparse_layer((64, 64, 3, 3), size=(4, 2000), dtype=np.float16)
    assert math.isnan(pack(layer).cycles)
    assert plan_flat(layer, 1, FlatSteps(18), MULTIPROCESSORS) is None


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((64, 60, 3, 3), {}),
        ((64, 2080, 3, 3), {}),
        ((2080, 64, 1, 3), {}),
        ((64, 64, 1, 1), {}),
        ((64, 64, 3, 3), {"dilations": (1, 128), "in_size": (28, 300)}),
        ((64, 64, 3, 3), {"strides": (256, 1)}),
    ],
    ids=["few channels", "many channels", "many outputs", "1x1", "dilation", "stride"],
)
def test_what_the_library_does_not_run_has_no_plan(pack, shape, changes):
    layer = dataclasses.replace(sparse_layer(shape, density=0.02, dtype=np.float16), **changes)
    assert pack(layer) is None
    assert plan_flat(layer, 1, FlatSteps(18), MULTIPROCESSORS) is None


@pytest.mark.parametrize("density", [0.02, 0.05, 0.08, 0.09, 0.1, 0.11, 0.12])
@pytest.mark.parametrize(
    "shape",
    [
        (64, 64, 3, 3),
        (128, 128, 3, 3),
        (256, 256, 3, 3),
        (100, 192, 3, 3),
        (64, 512, 3, 3),
        (384, 160, 3, 3),
        (128, 96, 5, 5),
        (64, 80, 3, 3),
    ],
    ids=str,
)
def test_steps_of_random_weights_are_about_those_that_are_packed(pack, shape, density):
    layer = sparse_layer(shape, density=density, dtype=np.float16)
    dense_steps = math.ceil(shape[1] / 32) * math.prod(shape[2:])
    packed, foretold = pack(layer).steps, flat_steps(layer)
    if packed.is_dense == foretold.is_dense:
        assert foretold.count == pytest.approx(packed.count, abs=1)
        assert foretold.pairs == pytest.approx(packed.pairs, abs=1 + 0.07 * dense_steps)
    else:
        # Near the limit, either may be.
        assert max(packed.pairs, foretold.pairs) > 0.5 * dense_steps


@pytest.mark.parametrize(
    ("shape", "density", "is_sparse"),
    [
        ((512, 512, 3, 3), 0.13, False),
        ((512, 512, 3, 3), 0.07, True),
        ((256, 256, 3, 3), 0.13, False),
        ((256, 256, 3, 3), 0.09, True),
        ((64, 64, 3, 3), 0.16, False),
        ((64, 64, 3, 3), 0.1, True),
        ((64, 72, 3, 3), 0.4, False),
        ((8, 256, 3, 3), 0.33, False),
    ],
    ids=str,
)
def test_weights_with_too_few_zeros_keep_them(pack, shape, density, is_sparse):
    layer = sparse_layer(shape, density=density, dtype=np.float16)
    assert pack(layer).steps.is_dense == flat_steps(layer).is_dense == (not is_sparse)


def test_weights_that_are_too_large_with_their_zeros_have_no_form(pack):
    layer = sparse_layer((2048, 2048, 3, 3), density=0.2, dtype=np.float16)
    assert pack(layer) is None
    assert flat_steps(layer) is None


def test_nothing_but_zeros_has_no_further_steps():
    layer = sparse_layer((64, 64, 3, 3), density=0.0, dtype=np.float16)
    assert flat_steps(layer) == FlatSteps(2 * 9)
