"""Generated kernels: their own text, PTX included, runs on the emulated GPU and is right for every form and size."""

from __future__ import annotations

import dataclasses
import itertools
import math
from unittest import mock

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels import plan as plans
from onnx_sparseconv.kernels.image_container import Image, pack
from onnx_sparseconv.kernels.layer import Refusal, make_layer
from onnx_sparseconv.kernels.plan import HALF_TERMS, choose_plan
from onnx_sparseconv.kernels.source import KERNEL_NAME, make_linked_source, make_source
from tests.native.cuda.reference import model_with
from tests.support.cuda_emulation import Divisor, GeneratedParams
from tests.support.cuda_host_build import address, build_host_image, check_surroundings, device_array, launch
from tests.support.random_cases import ACTIVATION_PARAMETERS
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
        source_channels=case.input_channels,
    )


def unpacked_image_of(case, in_size, **changes):
    """An image that stages channels one by one, also for small maps."""
    with mock.patch.object(plans, "_PACKED_SLOTS", 0):
        return image_of(case, in_size, **changes)


def image_of(case, in_size=None, architecture=90, make=make_source, **changes):
    """An image as `convert` would put it into the node, but compiled for the CPU.

    ``make``: the source of a layer and a plan; ``changes``: fields of the plan.
    """
    layer = layer_of(case, in_size)
    plan = choose_plan(layer, architecture)
    if isinstance(plan, Refusal):
        # No image is made for float16 planes of an odd size; one for planes of another size runs them.
        layer = layer_of(case, None)
        plan = choose_plan(layer, architecture)
    plan = dataclasses.replace(plan, **changes)
    chunk = min(plan.chunk_channels, plan.tile_in_channels)
    plan = dataclasses.replace(plan, chunk_channels=chunk, num_chunks=-(-plan.tile_in_channels // chunk))
    source = make(layer, plan)
    code = build_host_image(source.whole, source.headers).read_bytes()
    return Image(architecture, 12000, "NVRTC 12.9", plan, code)


def exact_and_bound(case, inputs):
    """As `oracle`, with the error of sums in half."""
    # Rounded with every term, every sum of a few, and the bias and the residual.
    terms = np.count_nonzero(case.weight.reshape(case.out_channels, -1), axis=1).max()
    return oracle(case, inputs, stored_sums=1.1 * (HALF_TERMS + terms / HALF_TERMS + 4))


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
    container = pack([unpacked_image_of(case, sizes[0], **changes)])
    for size in sizes:
        for batch, settings in ((1, {}), (3, {"cuda_staging": "element"}), (2, {"cuda_passes": 2, "cuda_splits": 1})):
            run_and_check(make_session, driver, case, container, (batch, case.in_channels, *size), **settings)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_small_maps(driver, make_session, form, dtype):
    """Their planes are staged as they lie in memory, where rows of halves are even."""
    shape, geometry, sizes = FORMS[form]
    case = SparseConvCase(random_weight(shape, 0.4), geometry, Activation.RELU, dtype=dtype, has_residual="3x3" in form)
    image = image_of(case, sizes[0], chunk_channels=4)
    # Where not: rows of halves are odd, or the planes of a group are no multiple of 16 bytes.
    assert image.plan.is_packed == (form != "1x1, odd planes" or dtype == FLOAT)
    for batch, settings in ((1, {}), (7, {"cuda_staging": "element"}), (4, {"cuda_passes": 2, "cuda_splits": 1})):
        run_and_check(make_session, driver, case, pack([image]), (batch, case.in_channels, *sizes[0]), **settings)


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
    container = pack([unpacked_image_of(case, (8, 8), **changes)])
    for settings in ({}, {"cuda_splits": 3}, {"cuda_passes": 3, "cuda_splits": 1}):
        run_and_check(make_session, driver, case, container, (2, 12, 8, 8), **settings)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_tiles_that_are_programs_of_their_own(driver, make_session, dtype, architecture):
    driver.set_device(architecture)
    weight = random_weight((20, 12, 3, 3), 0.4)
    weight[:8] = 0
    case = SparseConvCase(weight, conv_2d((3, 3)), Activation.SILU, dtype=dtype, has_residual=True)
    changes = {"tile_channels": 8, "num_tiles": 3, "chunk_channels": 4, "threads": 64, "make": make_linked_source}
    container = pack([unpacked_image_of(case, (8, 8), architecture=architecture, **changes)])
    for settings in ({}, {"cuda_splits": 3}, {"cuda_passes": 3, "cuda_splits": 1}, {"cuda_staging": "element"}):
        run_and_check(make_session, driver, case, container, (5, 12, 8, 8), **settings)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_are_applied_to_final_sums_alone(driver, make_session, activation, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    weight = random_weight((8, 8, 1, 1), 0.6)
    case = SparseConvCase(weight, conv_2d((1, 1)), activation, alpha, beta, dtype=dtype, has_residual=True)
    for size in ((6, 6), (5, 7)):  # columns in pairs, and one without
        container = pack([unpacked_image_of(case, size, chunk_channels=4, threads=64)])
        for settings in ({"cuda_splits": 2}, {"cuda_passes": 2, "cuda_splits": 1}):
            run_and_check(make_session, driver, case, container, (2, 8, *size), **settings)


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


SMALL_MAPS = {
    "3x3": ((6, 12, 3, 3), conv_2d((3, 3)), [(7, 7), (14, 14), (5, 9), (3, 8), (1, 1)]),
    "3x3, stride 2": ((6, 12, 3, 3), conv_2d((3, 3), (2, 2)), [(7, 7), (14, 14)]),
    "3x3, wide padding": ((6, 12, 3, 3), conv_2d((3, 3), (1, 1), (5, 4, 4, 5)), [(4, 4)]),
    "1x1": ((6, 12, 1, 1), conv_2d((1, 1), (1, 1), (0, 0, 0, 0)), [(7, 7), (14, 14), (1, 10)]),
    "1x3": ((6, 12, 1, 3), conv_2d((1, 3), (1, 1), (0, 1, 0, 1)), [(6, 8), (1, 20)]),
}
STAGINGS = ("bulk", "vector", "element")


def divisor(number):
    shift = (number - 1).bit_length()
    return Divisor(-(-(1 << (31 + shift)) // number), shift)


def launch_params(case, plan, sizes, group_slots, staging):
    """The launch of all chunks, with groups of so many slots, whatever the library would choose; without pointers."""
    batch, in_h, in_w, out_h, out_w = sizes
    columns, vector = plan.columns_per_slot, 16 // case.dtype.itemsize
    row_slots = -(-out_w // columns)
    slots = batch * out_h * row_slots
    row_pitch = -(-in_w // columns) * columns
    reach = (plan.kernel_shape[0] - 1) * plan.dilations[0] + 1
    rows = min(max((out_h - 1) * plan.strides[0] - plan.pads_begin[0] + reach, 0), in_h)
    unknown = (vector - 1) * ((plan.plane_residue > 0) + (staging != "element"))
    groups = -(-slots // group_slots)
    return GeneratedParams(
        split_stride=batch * plan.out_channels * out_h * out_w,
        is_final=1,
        is_paired=int(out_w % 2 == 0),
        chunk_end=plan.num_chunks,
        num_splits=1,
        num_lanes=min(2, groups),
        cluster_blocks=min(2, groups),
        staging=STAGINGS.index(staging),
        in_h=in_h,
        in_w=in_w,
        out_h=out_h,
        out_w=out_w,
        num_groups=groups,
        group_slots=group_slots,
        num_slots=slots,
        row_pitch=row_pitch,
        image_pitch=plan.image_pitch or -(-(rows * row_pitch + unknown) * case.dtype.itemsize // 16) * 16,
        by_row_slots=divisor(row_slots),
        by_plane_slots=divisor(out_h * row_slots),
    )


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize(
    ("form", "size"), [(form, size) for form, (*_, sizes) in SMALL_MAPS.items() for size in sizes], ids=str
)
def test_groups_of_several_images(tmp_path, form, size, dtype):
    """They begin and end anywhere, and the last one need not be full. For every way to stage them that there is."""
    shape, geometry, _ = SMALL_MAPS[form]
    case = SparseConvCase(random_weight(shape, 0.4), geometry, Activation.RELU, dtype=dtype, has_residual=True)
    changes = {"threads": 160, "tile_channels": 4, "num_tiles": 2, "chunk_channels": 4, "channel_pitch": 1 << 14}
    image = unpacked_image_of(case, size, **changes, num_stages=2, staging_threads=32)
    check_groups(tmp_path, case, image, size, (1, 31, 64, 100, 160))


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("form", SMALL_MAPS)
def test_groups_of_several_packed_images(tmp_path, form, dtype):
    """They hold whole images, parts of one, or several that they begin and end within."""
    shape, geometry, _ = SMALL_MAPS[form]
    case = SparseConvCase(random_weight(shape, 0.4), geometry, Activation.RELU, dtype=dtype, has_residual=True)
    for size in ((14, 14), (4, 8)):
        slots = math.prod(plans._slots(layer_of(case, size)))
        if slots > 200:
            continue
        with mock.patch.object(plans, "_MAX_THREADS", 640):
            image = image_of(case, size)
        assert image.plan.stage_images >= 3
        check_groups(tmp_path, case, image, size, (1, slots, 2 * slots, slots + 1, 2 * slots - 5))


def check_groups(tmp_path, case, image, size, all_group_slots):
    """Runs an image with groups of so many slots, staged in every way that fits, for several batches."""
    dtype = case.dtype
    code = tmp_path / "{}x{}.so".format(*size)  # one that is loaded must not change
    code.write_bytes(image.code)
    plan, plane = image.plan, size[0] * size[1]
    in_sizes = (1, plane) if plan.is_pointwise else size
    stagings = STAGINGS if in_sizes[1] % plan.columns_per_slot == 0 else ("element",)
    for batch, group_slots, staging in itertools.product((1, 2, 7), all_group_slots, stagings):
        inputs = random_inputs(case, (batch, case.in_channels, *size), seed=1)
        exact, bound = exact_and_bound(case, inputs)
        out_sizes = (1, plane) if plan.is_pointwise else exact.shape[2:]
        params = launch_params(case, plan, (batch, *in_sizes, *out_sizes), group_slots, staging)
        y = device_array(np.full(exact.shape, np.nan, dtype), writable=True)
        arrays = {name: device_array(inputs[key]) for name, key in (("x", "X"), ("bias", "B"), ("addend", "Z"))}
        for name, array in {**arrays, "out": y}.items():
            setattr(params, name, address(array))
        threads = -(-min(group_slots, params.num_slots) // 32) * 32 + plan.staging_threads
        blocks = plan.num_tiles * params.num_lanes
        launch(code, KERNEL_NAME, (blocks,), (threads,), [params], shared_bytes=plan.shared_bytes)
        check_surroundings(y)
        assert_within(y, exact, bound)


@pytest.mark.parametrize("channels", [64, 256, 512, 700])
def test_half_sums_are_accurate(make_session, driver, channels):
    """The error is at most 4 times that of sums in float that are rounded once, as in ONNX Runtime's Conv."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((8, channels, 3, 3)) * (rng.random((8, channels, 3, 3)) < 0.1)).astype(np.float16)
    case = SparseConvCase(weight, conv_2d((3, 3)), dtype=HALF, has_bias=False)
    inputs = {"X": rng.standard_normal((2, channels, 14, 14)).astype(np.float16)}
    model = model_with(case, pack([image_of(case, (14, 14))]))
    driver.take_launches()
    # Sums are divided among passes, or among splits.
    asked = [{"cuda_splits": 1}, {}]
    results = [make_session(model, cuda_kernel="generated", **a).run(None, inputs)[0] for a in asked]
    if channels > 64:
        names = [name for name, *_ in driver.take_launches()]
        assert names.count(KERNEL_NAME) > len(asked) or "sparseconv_reduce_f16" in names
    exact = convolve(case, weight, inputs["X"])
    best = exact.astype(np.float32).astype(np.float16)

    def rms(values):
        return np.sqrt(np.mean((values.astype(np.float64) - exact) ** 2))

    for actual in results:
        assert rms(actual) <= 4 * rms(best)
        # Sums in half all the way would be far off, so the test can fail.
        assert rms(actual) > 1.2 * rms(best)
