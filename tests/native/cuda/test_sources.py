"""Inputs of a Concat that a node reads itself, on the emulated GPU: where they are, or copied together first."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation
from onnx_sparseconv.kernels.image_container import pack
from onnx_sparseconv.kernels.source import KERNEL_NAME, make_linked_source, make_source
from tests.native.cuda.reference import model_with
from tests.native.cuda.test_generated_kernel import exact_and_bound, image_of, unpacked_image_of
from tests.native.cuda.test_generated_kernel import run_and_check as check_code
from tests.native.cuda.test_ring import run_misaligned
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    parts_of,
    random_inputs,
    random_weight,
    whole_x,
)

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
POINTWISE = geometry_2d(1, pad=0)
POINTWISE_KERNEL = "sparseconv_pointwise"
COPY = "sparseconv_concatenate_v"
SEGMENTS = "sparseconv_segments_"


def make_case(parts, rows=70, density=0.1, dtype=HALF):
    weight = random_weight((rows, sum(parts), 1, 1), density, dtype=dtype)
    return SparseConvCase(weight, POINTWISE, Activation.RELU, dtype=dtype, input_channels=parts)


def launched(driver):
    return [name for name, *_ in driver.take_launches()]


def run_and_check(session, driver, case, x_shape):
    """Run a case and compare; returns the kernels that were launched."""
    inputs = random_inputs(case, x_shape)
    driver.take_launches()
    (y,) = session.run(None, inputs)
    names = launched(driver)
    is_rounded = case.dtype == FLOAT and not any("csr" in name for name in names)
    stored_sums = int(any("reduce" in name for name in names))
    assert_within(y, *oracle(case, inputs, stored_sums=stored_sums, has_rounded_factors=is_rounded))
    return names


@pytest.mark.parametrize(
    "parts", [(32, 16), (16, 16, 16), (1, 70), (3, 5, 7, 9), (40, 1, 40, 1, 40, 1, 40, 1), (64, 64, 64), (300, 2, 130)]
)
@pytest.mark.parametrize("size", [(8, 12), (20, 20)], ids=str)
@pytest.mark.parametrize("weight", list(itertools.product([0.05, 0.6], [HALF, FLOAT])), ids=str)
def test_kernels_for_1x1_read_them_where_they_are(make_session, driver, parts, size, weight):
    density, dtype = weight
    case = make_case(parts, rows=150, density=density, dtype=dtype)
    for kernel, name in (("wgmma", "pointwise"), ("cluster", "cluster")):
        session = make_session(make_model(case), cuda_kernel=kernel)
        (product,) = run_and_check(session, driver, case, (5, sum(parts), *size))
        assert product.startswith(f"sparseconv_{name}_")
        (record,) = library.describe_kernels()
        assert (record.op, record.kernel) == (f"SparseConvConcat{len(parts)}", f"cuda.{kernel}")
        del session


def scale_case(parts, dtype):
    """What scales channels of several inputs."""
    weight, geometry = random_weight((sum(parts), 1, 1, 1), 0.9), geometry_2d(1, pad=0, group=sum(parts))
    return SparseConvCase(weight, geometry, Activation.RELU, dtype=dtype, input_channels=parts)


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize(
    ("parts", "size"),
    [((8, 16), (7, 7)), ((64, 8, 8, 8, 8, 8, 8, 8), (7, 7)), ((1, 2, 1), (4, 8)), ((2, 8), (4, 3)), ((3, 1), (16, 20))],
    ids=str,
)
def test_what_scales_channels_reads_them_where_they_are(make_session, driver, parts, size, dtype):
    session = make_session(make_model(scale_case(parts, dtype)))
    for batch in (1, 5):
        (name,) = run_and_check(session, driver, scale_case(parts, dtype), (batch, sum(parts), *size))
        assert name.startswith("sparseconv_depthwise_1x1_")


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize(("parts", "size"), [((3, 16), (7, 7)), ((8, 8), (1, 1)), ((16, 9), (5, 5))], ids=str)
def test_what_scales_channels_has_them_copied_where_vectors_cross(make_session, driver, parts, size, dtype):
    case = scale_case(parts, dtype)
    copy, name = run_and_check(make_session(make_model(case)), driver, case, (3, sum(parts), *size))
    assert copy.startswith(COPY)
    assert name.startswith("sparseconv_depthwise_1x1_")


@pytest.mark.parametrize("kernel", ["csr", "tensor", "segments"])
def test_other_kernels_have_what_scales_channels_copied(make_session, driver, kernel):
    case = scale_case((16, 32), HALF)
    case = dataclasses.replace(case, weight=case.weight.astype(HALF))
    copy, name, *_ = run_and_check(make_session(make_model(case), cuda_kernel=kernel), driver, case, (3, 48, 8, 8))
    assert copy.startswith(COPY)
    assert name.startswith(f"sparseconv_{kernel}")


@pytest.mark.parametrize("which", ["X", "X2", "Y"])
def test_what_scales_channels_has_them_copied_where_one_begins_between_vectors(driver, make_session, which):
    case = scale_case((8, 16), HALF)
    inputs = random_inputs(case, (2, 24, 4, 4))
    y, name = run_misaligned(make_session(make_model(case)), driver, inputs, np.zeros((2, 24, 4, 4), HALF), which)
    assert name.startswith(COPY)
    assert_within(y, *oracle(case, inputs))


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("size", [(7, 7), (5, 6), (1, 1)], ids=str)
def test_clusters_read_planes_of_any_size_where_they_are(make_session, driver, size, dtype):
    case = make_case((33, 60, 14), dtype=dtype)
    (product,) = run_and_check(make_session(make_model(case), cuda_kernel="cluster"), driver, case, (3, 107, *size))
    assert product.startswith("sparseconv_cluster_")


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_parts_of_sums(make_session, driver, dtype):
    """Blocks that share a tile begin at chunks of any source."""
    driver.set_device(num_multiprocessors=132)
    case = make_case((200, 33, 400, 250), dtype=dtype)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    names = run_and_check(session, driver, case, (1, 883, 6, 6))
    assert [name[:16] for name in names] == ["sparseconv_point", "sparseconv_reduc"]


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("size", [(7, 7), (5, 6), (1, 1)], ids=str)
def test_planes_that_begin_anywhere_are_gathered_from_where_they_are(make_session, driver, size, dtype):
    for parts in ((33, 20), (1, 1, 50, 1)):
        case = make_case(parts, dtype=dtype)
        names = run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (3, sum(parts), *size))
        assert [name[:20] for name in names] == ["sparseconv_gather" + "_f32"[: 3 * (dtype == FLOAT)], POINTWISE_KERNEL]


CODE_PARTS = [(9, 5, 7, 3), (3, 1, 4, 1, 5, 9, 2, 6)]


@pytest.mark.parametrize("architecture", [75, 90])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("parts", CODE_PARTS, ids=str)
def test_code_reads_them_where_they_are(make_session, driver, parts, dtype, architecture):
    """Chunks of channels begin and end within any of them; maps that are staged whole, and channel by channel."""
    driver.set_device(architecture)
    case = make_case(parts, rows=20, density=0.3, dtype=dtype)
    size = (8, 16)
    for make_image, make in (
        (image_of, make_source),
        (unpacked_image_of, make_source),
        (unpacked_image_of, make_linked_source),
    ):
        image = make_image(case, size, architecture=architecture, make=make, chunk_channels=4)
        assert image.plan.is_packed == (make_image is image_of)
        for batch, staging in ((1, "auto"), (5, "vector"), (3, "element")):
            x_shape = (batch, case.in_channels, *size)
            check_code(make_session, driver, case, pack([image]), x_shape, cuda_staging=staging)


def test_code_reads_inputs_at_any_address(make_session, driver):
    case = make_case((16, 24))
    inputs = random_inputs(case, (4, 40, 8, 8))
    for make_image in (image_of, unpacked_image_of):
        session = make_session(model_with(case, pack([make_image(case, (8, 8))])), cuda_kernel="generated")
        for which in ("X", "X2"):
            y, launched_first = run_misaligned(session, driver, inputs, np.empty((4, 70, 8, 8), HALF), which)
            assert_within(y, *exact_and_bound(case, inputs))
            assert launched_first == KERNEL_NAME


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_code_reads_planes_of_another_size_where_they_are(make_session, driver, dtype):
    """Element by element, where they begin anywhere."""
    case = make_case((9, 12), rows=20, density=0.3, dtype=dtype)
    container = pack([unpacked_image_of(case, (16, 16))])
    for size in ((16, 16), (8, 12), (5, 6), (1, 2)):
        check_code(make_session, driver, case, container, (3, 21, *size))


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_code_for_planes_that_begin_anywhere_has_them_copied_together(make_session, driver, dtype):
    case = make_case((9, 12), rows=20, density=0.3, dtype=dtype)
    for size in ((7, 10), None):
        image = image_of(case, size)
        assert image.plan.source_begins == ()
        session = make_session(model_with(case, pack([image])), cuda_kernel="generated")
        inputs = random_inputs(case, (3, 21, 7, 10))
        driver.take_launches()
        (y,) = session.run(None, inputs)
        assert launched(driver)[:2] == [f"{COPY}4", KERNEL_NAME]
        assert_within(y, *exact_and_bound(case, inputs))


@pytest.mark.parametrize("kernel", [("csr", HALF), ("csr", FLOAT), ("tensor", HALF)], ids=str)
@pytest.mark.parametrize(("size", "unit"), [((8, 8), 16), ((3, 6), 4), ((3, 3), 2)], ids=str)
def test_all_other_kernels_have_them_copied_together(make_session, driver, kernel, size, unit):
    kernel, dtype = kernel
    case = make_case((29, 6, 15), dtype=dtype)
    session = make_session(make_model(case), cuda_kernel=kernel)
    copy, product = run_and_check(session, driver, case, (3, 50, *size))
    assert copy == f"{COPY}{max(unit, dtype.itemsize)}"
    assert product.startswith(f"sparseconv_{kernel}")


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("kernel", ["auto", "cluster"])
def test_windows_may_have_them_too(make_session, driver, kernel, dtype):
    weight = random_weight((24, 20, 3, 3), 0.2, dtype=dtype)
    case = SparseConvCase(weight, geometry_2d(pad=1), Activation.SILU, dtype=dtype, input_channels=(4, 16))
    copy, *_ = run_and_check(make_session(make_model(case), cuda_kernel=kernel), driver, case, (2, 20, 8, 8))
    assert copy == f"{COPY}16"


@pytest.mark.parametrize(
    ("architecture", "kernels"), [(75, [f"{COPY}16", "sparseconv_csr_f16"]), (86, [SEGMENTS]), (100, [SEGMENTS])]
)
def test_other_gpus(make_session, driver, architecture, kernels):
    driver.set_device(architecture=architecture)
    case = make_case((32, 16))
    names = run_and_check(make_session(make_model(case)), driver, case, (4, 48, 12, 12))
    assert [name[: len(kernel)] for name, kernel in zip(names, kernels, strict=True)] == kernels


@pytest.mark.parametrize("scale", [1.0, 2.0**-13, 2.0**17])
@pytest.mark.parametrize("channel", [0, 33, 50])
def test_what_halves_cannot_hold_is_computed_once_more(make_session, driver, scale, channel):
    """From wherever it lies; also where blocks share tiles."""
    for parts, batch, size, kernel in (
        ((33, 20), 5, 8, "wgmma"),
        ((200, 33, 400, 250), 1, 6, "wgmma"),
        ((33, 20), 2, 7, "cluster"),
    ):
        driver.set_device(num_multiprocessors=132 if batch == 1 else 4)
        case = dataclasses.replace(make_case(parts, dtype=FLOAT), activation=Activation.NONE)
        inputs = random_inputs(case, (batch, sum(parts), size, size))
        x = whole_x(case, inputs)
        if scale > 1.0:
            x[0, channel, 1, 2] *= np.float32(scale)
        else:
            x *= np.float32(scale)
        inputs.update(parts_of(case, x))
        (y,) = make_session(make_model(case), cuda_kernel=kernel).run(None, inputs)
        exact, bound = oracle(case, inputs, stored_sums=1, has_rounded_factors=scale >= 1.0)
        assert_within(y, exact, bound)


def test_inputs_at_any_address(driver, make_session):
    """The one that is not at a multiple of 16 bytes has all copied."""
    case = make_case((32, 24))
    inputs = random_inputs(case, (4, 56, 8, 8))
    for kernel, which, first in (
        ("wgmma", "X2", "sparseconv_gather"),
        ("wgmma", "Y", "sparseconv_pointwise"),
        ("cluster", "X2", f"{COPY}2"),
    ):
        session = make_session(make_model(case), cuda_kernel=kernel)
        y, launched_first = run_misaligned(session, driver, inputs, np.empty((4, 70, 8, 8), HALF), which)
        assert_within(y, *oracle(case, inputs))
        assert launched_first.startswith(first)


def test_none_of_no_images(make_session):
    case = make_case((32, 16))
    (y,) = make_session(make_model(case)).run(None, random_inputs(case, (0, 48, 8, 8)))
    assert y.shape == (0, 70, 8, 8)


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_nothing_but_padding_gives_the_bias(make_session, driver, dtype):
    case = dataclasses.replace(make_case((32, 16), dtype=dtype), geometry=geometry_2d(1, pad=2))
    names = run_and_check(make_session(make_model(case)), driver, case, (2, 48, 0, 9))
    assert not any(COPY in name for name in names)


@pytest.mark.parametrize(("kernel", "launches"), [("wgmma", 1), ("csr", 2)])
def test_a_run_only_launches(assert_only_launches, make_session, kernel, launches):
    case = make_case((32, 16))
    session = make_session(make_model(case), cuda_kernel=kernel)
    assert_only_launches(session, random_inputs(case, (8, 48, 8, 8)), launches)
