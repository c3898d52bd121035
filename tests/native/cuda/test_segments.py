"""The tensor-core kernel for 1x1 through ONNX Runtime, against the float64 oracle: sizes, groups, residuals, inputs of
a Concat and parts of sums of all kinds, and what runs where it cannot."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.gpu_time_constants import MODEL
from onnx_sparseconv.kernels.gpu_times import BY_CSR, ON_PLANES, ON_TENSOR_CORES
from onnx_sparseconv.kernels.segment_plan import plan_segments
from tests.native.cuda.test_ring import run_misaligned
from tests.native.cuda.test_sources import make_case, run_and_check
from tests.support.random_cases import ACTIVATION_PARAMETERS
from tests.support.sparse_layers import layer_of
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
SEGMENTS = "sparseconv_segments_"
both_types = pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)


@pytest.fixture(autouse=True)
def _gpu_without_warpgroups(driver):
    """Where `test_pointwise`'s kernel runs as well, it goes before."""
    driver.set_device(architecture=89)


def one_by_one(rows, channels, dtype, density=0.2, group=1, **other):
    weight = random_weight((rows, channels, 1, 1), density, dtype=dtype)
    return SparseConvCase(weight, geometry_2d(1, pad=0, group=group), dtype=dtype, **other)


def check(make_session, driver, case, x_shape):
    """Run a case by this kernel and compare; returns what was launched."""
    session = make_session(make_model(case), cuda_kernel="segments")
    names = run_and_check(session, driver, case, x_shape)
    assert names[0].startswith(SEGMENTS), names
    assert {record.kernel for record in library.describe_kernels()} == {"cuda.segments"}
    return names


@both_types
@pytest.mark.parametrize("size", [(14, 14), (16, 16), (3, 36)], ids=str)
@pytest.mark.parametrize("channels", [3, 64, 150])
def test_layers(make_session, driver, dtype, size, channels):
    """Rows that fill no tile, planes whose segments are no whole ones, and chunks that are not full."""
    for rows in (16, 33, 130):
        check(make_session, driver, one_by_one(rows, channels, dtype), (5, channels, *size))


@both_types
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_densities(make_session, driver, dtype, density):
    """Two non-zeros in four are not enough for a dense weight; chunks without a weight have no steps."""
    check(make_session, driver, one_by_one(64, 200, dtype, density), (3, 200, 6, 6))


@both_types
def test_rows_and_columns_count_alike(make_session, driver, dtype):
    weight = random_weight((40, 70, 1), 0.2, dtype=dtype)
    case = SparseConvCase(weight, ConvGeometry((1,), (1,), (0, 0), (1,)), dtype=dtype)
    check(make_session, driver, case, (3, 70, 36))


@both_types
@pytest.mark.parametrize("size", [(10, 14), (8, 16)], ids=str)
@pytest.mark.parametrize("activation", list(Activation))
def test_every_activation_with_a_residual(make_session, driver, activation, size, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = one_by_one(70, 40, dtype, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    check(make_session, driver, case, (5, 40, *size))


@both_types
def test_groups(make_session, driver, dtype):
    check(make_session, driver, one_by_one(140, 40, dtype, group=2), (3, 80, 6, 6))


@both_types
def test_blocks_go_on_to_further_tiles(make_session, driver, dtype):
    """With weights that stay (few channels) and others; the last tile is short."""
    driver.set_device(architecture=89, num_multiprocessors=2)
    for channels in (40, 100, 200):
        check(make_session, driver, one_by_one(70, channels, dtype), (9, channels, 14, 14))


@both_types
def test_parts_of_sums(make_session, driver, dtype):
    """One image: blocks share the chunks of a tile, and warps of a block the steps of a chunk."""
    driver.set_device(architecture=89, num_multiprocessors=132)
    case = one_by_one(70, 900, dtype, 0.05, activation=Activation.SILU, has_residual=True)
    names = check(make_session, driver, case, (1, 900, 8, 10))
    assert [name[:17] for name in names] == ["sparseconv_segmen", "sparseconv_reduce"]


@both_types
@pytest.mark.parametrize("parts", [(32, 16), (3, 5, 7, 9), (40, 1, 40, 1, 40, 1, 40, 1), (300, 2, 130)], ids=str)
@pytest.mark.parametrize("size", [(10, 14), (8, 16)], ids=str)
def test_inputs_of_a_concat_are_read_where_they_are(make_session, driver, parts, size, dtype):
    names = check(make_session, driver, make_case(parts, rows=150, dtype=dtype), (3, sum(parts), *size))
    assert len(names) == 1


@both_types
def test_inputs_that_begin_anywhere_are_copied_together(make_session, driver, dtype):
    case = make_case((32, 24), dtype=dtype)
    inputs = random_inputs(case, (4, 56, 8, 8))
    for which in ("X2", "Y"):
        session = make_session(make_model(case), cuda_kernel="segments")
        y, first = run_misaligned(session, driver, inputs, np.empty((4, 70, 8, 8), dtype), which)
        assert first.startswith("sparseconv_concatenate_v")
        assert_within(y, *oracle(case, inputs, has_rounded_factors=dtype == FLOAT))


@pytest.mark.parametrize("which", ["X", "Z", "Y"])
def test_tensors_that_begin_anywhere_run_by_another_kernel(make_session, driver, which):
    case = one_by_one(70, 40, HALF, has_residual=True)
    inputs = random_inputs(case, (3, 40, 14, 24))
    y = np.zeros((3, 70, 14, 24), HALF)
    session = make_session(make_model(case))
    _, name = run_misaligned(session, driver, inputs, y, which="")
    assert name.startswith(SEGMENTS)
    y, name = run_misaligned(session, driver, inputs, y, which)
    assert name.startswith("sparseconv_tensor_")
    assert_within(y, *oracle(case, inputs))


@both_types
@pytest.mark.parametrize(
    ("geometry", "size"),
    [(geometry_2d(1, pad=0), (7, 7)), (geometry_2d(1, 2, 0), (8, 8)), (geometry_2d(1, pad=1), (6, 6))],
    ids=["odd planes", "strides", "padding"],
)
def test_what_is_not_planes_as_they_are_runs_by_the_other_kernel(make_session, driver, geometry, size, dtype):
    case = dataclasses.replace(one_by_one(64, 40, dtype), geometry=geometry)
    (name,) = run_and_check(make_session(make_model(case)), driver, case, (8, 40, *size))
    assert not name.startswith(SEGMENTS)
    told = (
        "cannot run this call: it is for planes of" if size == (7, 7) else "which runs 1x1 without strides and padding"
    )
    with pytest.raises(Exception, match=f"node 'conv1'.*segment kernel,? {told}"):
        make_session(make_model(case), cuda_kernel="segments").run(None, random_inputs(case, (8, 40, *size)))


@pytest.mark.parametrize("scale", [1.0, 2.0**-13, 2.0**17])
@pytest.mark.parametrize(("parts", "batch"), [((), 5), ((33, 20), 5), ((200, 33, 400, 250), 1)], ids=str)
def test_what_halves_cannot_hold_is_computed_once_more(make_session, driver, scale, parts, batch):
    """Also of blocks with segments of several images, and of those that share tiles."""
    driver.set_device(architecture=89, num_multiprocessors=132 if batch == 1 else 4)
    case = make_case(parts, dtype=FLOAT) if parts else one_by_one(70, 53, FLOAT)
    case = dataclasses.replace(case, activation=Activation.NONE)
    channels = sum(parts) or 53
    inputs = random_inputs(case, (batch, channels, 6, 6))
    x = whole_x(case, inputs)
    if scale > 1.0:
        x[0, channels // 2, 1, 2] *= np.float32(scale)
    else:
        x *= np.float32(scale)
    inputs.update(parts_of(case, x))
    driver.take_launches()
    (y,) = make_session(make_model(case), cuda_kernel="segments").run(None, inputs)
    assert driver.take_launches()[0][0].startswith(SEGMENTS)
    assert_within(y, *oracle(case, inputs, stored_sums=1, has_rounded_factors=scale >= 1.0))


@both_types
@pytest.mark.parametrize("gpu", [(80, 163 << 10), (86, 99 << 10)], ids=["sm_80", "sm_86"])
@pytest.mark.parametrize("layer", [(130, 128, 11), (32, 64, 3), (200, 320, 1)], ids=str)
def test_what_foretells_times_makes_the_same_plan(make_session, driver, dtype, gpu, layer):
    """Of dense weights, whose steps are known: twice as many as columns fill, and chunks that are all full."""
    (architecture, max_shared_bytes), (rows, channels, batch) = gpu, layer
    driver.set_device(architecture, num_multiprocessors=20, max_shared_bytes=max_shared_bytes)
    case = one_by_one(rows, channels, dtype, 1.0)
    session = make_session(make_model(case), cuda_kernel="segments")
    driver.take_launches()
    session.run(None, random_inputs(case, (batch, channels, 14, 14)))
    (_, (blocks, parts, _), _, _), *_ = driver.take_launches()
    assert plan_segments(layer_of(case, (14, 14)), architecture, batch, 20).blocks == blocks * parts


KERNELS = {"segments": ON_PLANES, "tensor": ON_TENSOR_CORES, "csr": BY_CSR}


@pytest.mark.parametrize("num_inputs", [1, 2])
@pytest.mark.parametrize("call", [(16, 40, 6, 1, 8), (16, 64, 8, 2, 2), (16, 64, 6, 5, 2)], ids=str)
def test_what_foretells_times_foretells_the_kernel(make_session, driver, call, num_inputs):
    """Several inputs are copied together before the other kernels, which counts. Of dense weights, as above."""
    rows, channels, size, batch, multiprocessors = call
    driver.set_device(architecture=86, num_multiprocessors=multiprocessors, max_shared_bytes=99 << 10)
    is_joined = num_inputs > 1
    sources = (channels // num_inputs,) * num_inputs if is_joined else ()
    case = dataclasses.replace(one_by_one(rows, channels, HALF, 1.0), input_channels=sources)
    model = dataclasses.replace(MODEL, multiprocessors=multiprocessors)
    _, runs_on = model.library_us(layer_of(case, (size, size)), 86, batch, is_joined=is_joined)
    names = run_and_check(make_session(make_model(case)), driver, case, (batch, channels, size, size))
    assert [KERNELS[name.split("_")[1]] for name in names if "concatenate" not in name] == [runs_on]


@pytest.mark.parametrize("max_shared_bytes", [64 << 10, 99 << 10, 163 << 10])
def test_tiles_fit_what_shared_memory_there_is(driver, make_session, max_shared_bytes):
    driver.set_device(architecture=89, max_shared_bytes=max_shared_bytes)
    check(make_session, driver, one_by_one(130, 150, HALF), (5, 150, 14, 14))


@pytest.mark.parametrize("parts", [(), (32, 8)], ids=["one input", "inputs of a Concat"])
def test_a_run_only_launches(make_session, assert_one_launch, parts):
    case = make_case(parts) if parts else one_by_one(70, 40, HALF)
    assert_one_launch(make_session(make_model(case), cuda_kernel="segments"), random_inputs(case, (8, 40, 8, 8)))
