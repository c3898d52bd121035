"""Windows of few channels with strides, which the octet kernel computes from a copy of X without strides."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.warpgroup_plan import WindowSteps, copy_cycles, plan_octets, without_strides
from tests.native.cuda.test_ring import run_and_check, run_misaligned
from tests.support.sparse_layers import layer_of
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    convolve,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
RUNS = [["space_to_depth", "octets"], ["space_to_depth", "words"]]
RUNS += [[f"{name}_f32" for name in names] for names in RUNS]

# Shape of the weight, batch and size of the input, geometry: among them the first layers of ResNets and MobileNets.
LAYERS = [
    ((64, 3, 7, 7), (2, 48, 64), geometry_2d(7, 2, 3)),
    ((64, 3, 7, 7), (1, 31, 47), geometry_2d(7, 2, 3)),
    # of rows that octets cannot be read of
    ((32, 3, 3, 3), (3, 33, 31), geometry_2d(3, 2, 1)),
    ((130, 24, 3, 3), (2, 16, 31), geometry_2d(3, 2, 1)),
    # planes of outputs that begin anywhere
    ((96, 3, 7, 7), (2, 35, 51), geometry_2d(7, 2, 0)),
    ((24, 4, 6, 6), (1, 33, 66), geometry_2d(6, 4, 1)),
    ((64, 6, 5, 5), (2, 46, 61), geometry_2d(5, 2, 2)),
    ((16, 1, 5, 5), (2, 36, 51), geometry_2d(5, 2, 0)),
    ((24, 3, 3, 5), (2, 20, 31), ConvGeometry((3, 5), (1, 2), (1, 2, 1, 2), (1, 1))),
    ((24, 3, 5, 3), (2, 36, 20), ConvGeometry((5, 3), (3, 1), (2, 1, 2, 1), (1, 1))),
    ((40, 8, 3, 3), (2, 23, 42), ConvGeometry((3, 3), (2, 2), (0, 3, 5, 0), (2, 3))),
    ((32, 4, 6, 6), (1, 32, 66), geometry_2d(6, 4, 1)),
    ((32, 6, 4, 4), (2, 37, 61), geometry_2d(4, 3, 0)),
    ((32, 3, 3, 3), (2, 63, 95), ConvGeometry((3, 3), (2, 2), (0, 0, 0, 0), (1, 1), auto_pad="SAME_UPPER")),
    ((32, 3, 4, 4), (2, 32, 64), ConvGeometry((4, 4), (2, 2), (0, 0, 0, 0), (1, 1), auto_pad="SAME_LOWER")),
    ((100, 12, 1, 5), (3, 1, 125), ConvGeometry((1, 5), (1, 2), (0, 2, 0, 2), (1, 1))),
    ((100, 12, 5), (3, 125), ConvGeometry((5,), (2,), (2, 2), (1,))),
]


@pytest.fixture(autouse=True)
def a_few_multiprocessors(driver):
    """So that blocks compute several tiles."""
    driver.set_device(num_multiprocessors=4)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_layers(make_session, driver, layer, dtype, has_residual):
    weight_shape, (batch, *size), geometry = layer
    weight = random_weight(weight_shape, 0.2, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.RELU, has_residual=has_residual, dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    x_shape = (batch, weight_shape[1], *size)
    names = run_and_check(session, driver, case, x_shape, has_rounded_factors=dtype == FLOAT)
    assert [re.sub(r"_n\d+$", "", name.removeprefix("sparseconv_")) for name in names] in RUNS


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_may_begin_anywhere(make_session, driver, dtype, which):
    """The copy is aligned whatever X is; Y and the residual have to be."""
    weight_shape, (batch, *size), geometry = LAYERS[0]
    weight = random_weight(weight_shape, 0.2, dtype=dtype)
    case = SparseConvCase(weight, geometry, Activation.RELU, has_residual=True, dtype=dtype)
    inputs = random_inputs(case, (batch, weight_shape[1], *size))
    session = make_session(make_model(case), cuda_kernel="wgmma")
    y, first = run_misaligned(session, driver, inputs, np.zeros((batch, 64, 24, 32), dtype), which)
    assert first.startswith("sparseconv_space_to_depth" if which == "X" else "sparseconv_interleave")
    assert_within(y, *oracle(case, inputs, has_rounded_factors=dtype == FLOAT))


@pytest.mark.parametrize(
    "layer", [layer for layer in LAYERS if len(layer[0]) == 4 and layer[2].auto_pad == "NOTSET"], ids=str
)
def test_what_foretells_times_knows_the_copy(make_session, driver, layer):
    weight_shape, (batch, *size), geometry = layer
    case = SparseConvCase(random_weight(weight_shape, 0.2, dtype=FLOAT), geometry, Activation.NONE, has_bias=False)
    copied = without_strides(layer_of(case, size))
    places, taps = -(-copied.in_channels // 32), math.prod(copied.kernel_shape)
    x = random_inputs(case, (batch, weight_shape[1], *size))["X"]
    without = SparseConvCase(copied.weight, ConvGeometry(copied.kernel_shape, (1, 1), (0, 0, 0, 0), (1, 1)))
    y = convolve(without, copied.weight, copy_of(x, layer_of(case, size), copied))
    np.testing.assert_allclose(y[..., : copied.out_size()[1]], convolve(case, case.weight, x), atol=1e-9)
    driver.set_device(num_multiprocessors=132)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    driver.take_launches()
    session.run(None, {"X": x})
    grid = driver.take_launches()[-1][1]
    foretold = plan_octets(copied, batch, WindowSteps(places * taps), 132, is_copied=True)
    row_tiles = -(-weight_shape[0] // 64)
    assert min(foretold.tiles, max(132 // row_tiles, 1) * row_tiles) == grid[0]
    elements = batch * (math.prod((layer[0][1], *size)) + math.prod((copied.in_channels, *copied.in_size)))
    assert copy_cycles(layer_of(case, size), copied, batch, 132) == pytest.approx(4000 + 4 * elements / (15 * 132))


def copy_of(x, layer, copied):
    """X as the copy has it, after its definition in params.h."""
    (height, width), (top, left), (out_h, out_w) = layer.strides, layer.pads[:2], copied.in_size
    padded = np.zeros((*x.shape[:2], out_h * height, out_w * width), x.dtype)
    rows, columns = min(x.shape[2], out_h * height - top), min(x.shape[3], out_w * width - left)
    padded[:, :, top : top + rows, left : left + columns] = x[:, :, :rows, :columns]
    places = padded.reshape(*x.shape[:2], out_h, height, out_w, width).transpose(0, 1, 3, 5, 2, 4)
    return places.reshape(len(x), -1, out_h, out_w)
