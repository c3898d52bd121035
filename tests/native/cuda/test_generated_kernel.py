"""Generated kernels: their own text, PTX included, runs on the emulated GPU and is right for every form and size."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.image_container import Image, pack
from onnx_sparseconv.kernels.layer import make_layer
from onnx_sparseconv.kernels.plan import HALF_TERMS, choose_plan
from onnx_sparseconv.kernels.source import KERNEL_NAME, make_source
from tests.native.cuda.reference import model_with
from tests.support.cuda_host_build import build_host_image
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    convolve,
    oracle,
    random_inputs,
    random_weight,
)

HALF = np.dtype(np.float16)
FLOAT = np.dtype(np.float32)
ROUNDING = 2.0**-11  # of a half


def layer_of(case, in_size=None):
    geometry = case.geometry
    return make_layer(
        case.weight,
        strides=geometry.strides,
        dilations=geometry.dilations,
        pads=geometry.pads,
        group=geometry.group,
        element_type=case.dtype,
        activation=int(case.activation),
        in_size=in_size,
    )


def image_of(case, in_size=None, architecture=90, **changes):
    """An image as `convert` would put it into the node, but compiled for the CPU. ``changes``: fields of the plan."""
    layer = layer_of(case, in_size)
    plan = dataclasses.replace(choose_plan(layer, architecture), **changes)
    chunk = min(plan.chunk_channels, plan.tile_in_channels)
    plan = dataclasses.replace(plan, chunk_channels=chunk, num_chunks=-(-plan.tile_in_channels // chunk))
    source = make_source(layer, plan)
    code = build_host_image(source.text, source.headers).read_bytes()
    return Image(architecture, 12000, "NVRTC 12.9", plan, code)


def exact_and_bound(case, inputs):
    """As `oracle`, with the error of sums in half."""
    exact, bound = oracle(case, inputs)
    if case.dtype == HALF:
        magnitude = convolve(case, np.abs(case.weight), np.abs(inputs["X"]))
        terms = np.count_nonzero(case.weight.reshape(case.out_channels, -1), axis=1).max()
        bound = bound + 1.1 * (HALF_TERMS + terms / HALF_TERMS + 2) * ROUNDING * magnitude
    return exact, bound


def run_and_check(make_session, driver, case, container, x_shape, **settings):
    inputs = random_inputs(case, x_shape, seed=1)
    driver.take_launches()
    (actual,) = make_session(model_with(case, container), cuda_kernel="generated", **settings).run(None, inputs)
    names = {name for name, *_ in driver.take_launches()}
    assert KERNEL_NAME in names
    assert names <= {KERNEL_NAME, "sparseconv_reduce_f32", "sparseconv_reduce_f16"}
    assert_within(actual, *exact_and_bound(case, inputs))


def conv_2d(kernel, stride=(1, 1), pads=(1, 1, 1, 1), dilation=(1, 1), group=1):
    return ConvGeometry(kernel, stride, pads, dilation, group)


# name: weight shape, geometry, sizes of X; the plan is made for the first
FORMS = {
    "3x3": ((12, 9, 3, 3), conv_2d((3, 3)), [(16, 16), (9, 13), (1, 1), (5, 40)]),
    "3x3, stride 2": ((6, 8, 3, 3), conv_2d((3, 3), (2, 2)), [(16, 16), (15, 17)]),
    "3x3, dilation 2": ((6, 8, 3, 3), conv_2d((3, 3), (1, 1), (2, 2, 2, 2), (2, 2)), [(12, 12), (7, 9)]),
    "asymmetric": ((5, 6, 2, 3), conv_2d((2, 3), (1, 2), (0, 2, 1, 1), (1, 1)), [(8, 14), (7, 7)]),
    "5x5": ((8, 4, 5, 5), conv_2d((5, 5), (1, 1), (2, 2, 2, 2)), [(14, 14), (7, 7)]),
    "7x7, stride 2": ((8, 3, 7, 7), conv_2d((7, 7), (2, 2), (3, 3, 3, 3)), [(20, 20), (11, 9)]),
    "no padding": ((7, 5, 3, 3), conv_2d((3, 3), (1, 1), (0, 0, 0, 0)), [(8, 8), (3, 3)]),
    "wide padding": ((4, 4, 3, 3), conv_2d((3, 3), (1, 1), (5, 4, 4, 5)), [(4, 4), (2, 3)]),
    "1x1": ((20, 12, 1, 1), conv_2d((1, 1), (1, 1), (0, 0, 0, 0)), [(16, 16), (7, 7), (3, 5)]),
    "1x1, odd planes": ((20, 12, 1, 1), conv_2d((1, 1), (1, 1), (0, 0, 0, 0)), [(15, 15), (1, 225), (9, 25)]),
    "1x1, stride 2": ((8, 12, 1, 1), conv_2d((1, 1), (2, 2), (0, 0, 0, 0)), [(14, 14), (7, 7)]),
    "groups": ((12, 4, 3, 3), conv_2d((3, 3), group=3), [(8, 8), (7, 7)]),
    "many groups": ((32, 1, 3, 3), conv_2d((3, 3), group=32), [(8, 8)]),
    "1-D": ((10, 16, 3), ConvGeometry((3,), (1,), (1, 1), (1,)), [(56,), (7,), (301,)]),
    "1-D, stride 2, dilation 3": ((6, 5, 4), ConvGeometry((4,), (2,), (3, 2), (3,)), [(40,), (33,)]),
}


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(driver, make_session, form, dtype):
    shape, geometry, sizes = FORMS[form]
    case = SparseConvCase(random_weight(shape, 0.4), geometry, Activation.RELU, dtype=dtype, has_residual="3x3" in form)
    # Few threads and short chunks, so that small inputs have several groups and several chunks; two tiles, one shorter.
    changes = {"threads": 64, "chunk_channels": 4, "channel_pitch": 2048, "num_stages": 2}
    container = pack([image_of(case, sizes[0], **changes)])
    for size in sizes:
        for batch, settings in ((1, {}), (3, {"cuda_staging": "element"}), (2, {"cuda_passes": 2, "cuda_splits": 1})):
            run_and_check(make_session, driver, case, container, (batch, case.in_channels, *size), **settings)


@pytest.mark.parametrize("architecture", [75, 80, 90])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_plans_as_they_are_chosen(driver, make_session, dtype, architecture):
    case = SparseConvCase(random_weight((40, 48, 3, 3), 0.1), conv_2d((3, 3)), Activation.RELU, dtype=dtype)
    driver.set_device(architecture, max_shared_bytes={75: 64, 80: 163, 90: 227}[architecture] << 10)
    container = pack([image_of(case, (28, 28), architecture)])
    for size in ((28, 28), (14, 14), (7, 7)):
        run_and_check(make_session, driver, case, container, (2, 48, *size))


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_tiles_and_chunks_without_weights(driver, make_session, dtype):
    weight = random_weight((24, 12, 3, 3), 0.4)
    weight[:8] = 0  # a tile
    weight[8:16, 4:8] = 0  # a chunk of another one
    case = SparseConvCase(weight, conv_2d((3, 3)), Activation.RELU, dtype=dtype)
    changes = {"tile_channels": 8, "num_tiles": 3, "chunk_channels": 4, "threads": 64}
    container = pack([image_of(case, (8, 8), **changes)])
    for settings in ({}, {"cuda_splits": 3}, {"cuda_passes": 3, "cuda_splits": 1}):
        run_and_check(make_session, driver, case, container, (2, 12, 8, 8), **settings)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_weights_that_are_no_numbers_act_as_in_the_other_kernel(make_session, dtype):
    weight = random_weight((8, 4, 3, 3), 0.3).astype(dtype)
    limits = np.finfo(dtype)
    for row, value in enumerate((np.nan, np.inf, -np.inf, limits.max)):
        weight[row, 0, 1, 1] = value
    weight[4] = limits.smallest_subnormal
    case = SparseConvCase(weight, conv_2d((3, 3)), dtype=dtype)
    inputs = random_inputs(case, (2, 4, 9, 8), seed=1)
    model = model_with(case, pack([image_of(case, (9, 8))]))
    generated, csr = (make_session(model, cuda_kernel=kernel).run(None, inputs)[0] for kernel in ("generated", "csr"))
    assert np.isnan(generated).any()
    assert np.isinf(generated).any()
    np.testing.assert_array_equal(np.isnan(generated), np.isnan(csr))
    np.testing.assert_array_equal(np.isinf(generated), np.isinf(csr))
    tolerance = 64 * ROUNDING if dtype == HALF else 1e-5
    np.testing.assert_allclose(generated[:, 4:], csr[:, 4:], atol=tolerance)


@pytest.mark.parametrize("channels", [64, 512])
def test_half_sums_are_accurate(make_session, channels):
    """The error is at most 4 times that of sums in float that are rounded once, as in ONNX Runtime's Conv."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((8, channels, 3, 3)) * (rng.random((8, channels, 3, 3)) < 0.1)).astype(np.float16)
    case = SparseConvCase(weight, conv_2d((3, 3)), dtype=HALF, has_bias=False)
    inputs = {"X": rng.standard_normal((2, channels, 14, 14)).astype(np.float16)}
    session = make_session(model_with(case, pack([image_of(case, (14, 14))])), cuda_kernel="generated", cuda_splits=1)
    (actual,) = session.run(None, inputs)
    exact = convolve(case, weight, inputs["X"])
    best = exact.astype(np.float32).astype(np.float16)

    def rms(values):
        return np.sqrt(np.mean((values.astype(np.float64) - exact) ** 2))

    assert rms(actual) <= 4 * rms(best)
    # Sums in half all the way would be far off, so the test can fail.
    assert rms(actual) > 1.2 * rms(best)
