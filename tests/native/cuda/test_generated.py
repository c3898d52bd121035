"""How generated images are launched: for any plan, size and device, what comes out is right.

The image is `reference_image.cc`, which checks every launch against params.h.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.native.cuda.reference import ZERO_BYTES, model_with_image
from tests.support.cuda_emulation import fake_driver
from tests.support.random_cases import cases
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    oracle,
    random_inputs,
    random_weight,
    resolve,
)

PROPERTY = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
GENERATED, REDUCE = "sparseconv_generated", "sparseconv_reduce_f32"
CASE = SparseConvCase(random_weight((8, 12, 3, 3), 0.4), geometry_2d(), Activation.RELU, has_residual=True)
SHAPE = (2, 12, 16, 12)
HALF = np.dtype(np.float16)


def run_and_check(session, case, x_shape, seed=0):
    inputs = random_inputs(case, x_shape, seed)
    driver = fake_driver()
    before = len(driver.launches())
    (actual,) = session.run(None, inputs)
    names = [name for name, *_ in driver.launches()[before:]]
    assert actual.dtype == case.dtype
    assert_within(actual, *oracle(case, inputs, stored_sums=len(names) - 1))  # by each launch but the last one


def kernels(driver):
    return [name for name, *_ in driver.take_launches()]


@st.composite
def plan_changes(draw, case, x_shape, is_packed):
    """Fields of a plan that could be for this case."""
    geometry, vector = case.geometry, 8 if case.dtype == HALF else 4
    plane = int(np.prod(x_shape[2:]))
    group_out, group_in = case.out_channels // geometry.group, case.in_channels // geometry.group
    changes = {
        "threads": draw(st.sampled_from([32, 64, 96, 128, 256])),
        "num_stages": draw(st.integers(1, 3)),
        "channel_pitch": ZERO_BYTES + 16 * draw(st.sampled_from([1, 8, 32, 99, 332])),
        "plane_residue": draw(st.sampled_from([0, plane % vector, 2])),
        "code_bytes": draw(st.sampled_from([0, 5000, 250_000])),
    }
    if geometry.group == 1 or draw(st.booleans()):
        tile = draw(st.integers(1, case.out_channels)) if geometry.group == 1 else case.out_channels
        tile_in = case.in_channels
    else:
        tile = draw(st.sampled_from([d for d in range(1, group_out + 1) if group_out % d == 0]))
        tile_in = group_in
    chunk = draw(st.integers(1, tile_in))
    changes |= {"tile_channels": tile, "tile_in_channels": tile_in, "chunk_channels": chunk}
    if is_packed:
        pitch = plane * case.dtype.itemsize
        if draw(st.booleans()):  # planes that copies of 16 bytes can move
            changes["chunk_channels"] = chunk = min(tile_in, -(-chunk // vector) * vector)
        image_pitch = -(-chunk * pitch // 16) * 16 + 16 * draw(st.integers(0, 2))
        changes |= {"channel_pitch": pitch, "image_pitch": image_pitch, "plane_residue": 0}
        changes["stage_images"] = draw(st.integers(1, 5))
    changes["staging_threads"] = draw(st.sampled_from([0, 32]))
    changes["min_passes"] = draw(st.sampled_from([1, 1, -(-tile_in // chunk)]))
    pads = [begin for begin, _, _ in resolve(geometry, x_shape[2:])]
    changes["pads_begin"] = tuple(pads) if len(pads) == 2 else (0, pads[0])
    return changes


@pytest.mark.parametrize("is_packed", [False, True])
def test_any_plan_for_any_convolution(driver, make_session, is_packed):
    launched, staged = collections.Counter(), collections.Counter()

    @PROPERTY
    @given(st.data())
    def check(data):
        case, x_shape = data.draw(cases(ranks=(1, 2), longest={1: 150, 2: 14}, pooled=False))
        staging = data.draw(st.sampled_from(["auto", "auto", "bulk", "vector", "element"]))
        # Rows that copies of 16 bytes can move are rare otherwise.
        if staging in ("bulk", "vector") or data.draw(st.booleans()):
            x_shape = (*x_shape[:-1], -(-x_shape[-1] // 8) * 8)
        activation = data.draw(st.sampled_from([Activation.NONE, Activation.RELU]))
        case = dataclasses.replace(case, activation=activation, alpha=0.0, beta=0.0)
        model = model_with_image(case, **data.draw(plan_changes(case, x_shape, is_packed)))
        driver.set_device(
            num_multiprocessors=data.draw(st.sampled_from([1, 4, 40])),
            blocks_a_multiprocessor=data.draw(st.integers(1, 3)),
        )
        asked = data.draw(
            st.sampled_from([{}, {"cuda_splits": 3}, {"cuda_passes": 2}, {"cuda_splits": 1, "cuda_passes": 1}])
        )
        run_and_check(make_session(model, cuda_staging=staging, **asked), case, x_shape)
        names = kernels(driver)
        launched.update(names)
        staged[staging, GENERATED in names] += 1

    check()
    # The property would say little if the CSR kernel ran most of them.
    assert launched[GENERATED] > 70
    assert launched[REDUCE] > 2
    for staging in ("auto", "bulk", "vector", "element"):
        assert staged[staging, True] > 2, staged


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("width", [*range(5, 17), 20, 24])
def test_rows_that_begin_anywhere(driver, make_session, width, dtype):
    """Small groups, so that they begin at many rows; plane sizes of every remainder, told to the plan or not."""
    case = dataclasses.replace(CASE, dtype=np.dtype(dtype))
    vector = 8 if dtype == np.float16 else 4
    for height in (7, 8, 9, 12, 14):
        for residue in {0, height * width % vector}:
            for threads in (32, 64, 96):
                model = model_with_image(case, threads=threads, plane_residue=residue, channel_pitch=2048)
                run_and_check(make_session(model), case, (1, 12, height, width))
    assert kernels(driver).count(GENERATED) >= 15


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("x_shape", [(3, 12, 5, 7), (3, 12, 6, 6), (1, 12, 9, 10)])
def test_every_size_of_a_stage(driver, make_session, x_shape, dtype):
    """What fits just so: images and rows fill the channel to its last bytes, skewed ones too."""
    case = dataclasses.replace(CASE, dtype=np.dtype(dtype))
    for channel_pitch in range(ZERO_BYTES + 48, ZERO_BYTES + 584, 16):
        for residue in (0, 2):
            model = model_with_image(case, threads=128, plane_residue=residue, channel_pitch=channel_pitch)
            run_and_check(make_session(model), case, x_shape)
    assert 40 < kernels(driver).count(GENERATED) < 68


def test_an_input_that_does_not_begin_at_16_bytes(driver, make_session):
    inputs = random_inputs(CASE, SHAPE)
    x = inputs["X"]
    room = np.empty(x.size + 64, np.float32)
    start = (-room.ctypes.data % 64) // x.itemsize
    for shift, staged in ((0, True), (1, False), (2, False), (4, True)):
        placed = room[start + shift :][: x.size].reshape(x.shape)
        placed[:] = x
        for settings_of_session in ({}, {"cuda_staging": "vector"}):
            session = make_session(model_with_image(CASE), **settings_of_session)
            (actual,) = session.run(None, inputs | {"X": placed})
            assert_within(actual, *oracle(CASE, inputs))
            assert (GENERATED in kernels(driver)) == (staged or not settings_of_session)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "asked", [{"cuda_passes": 1, "cuda_splits": 1}, {"cuda_passes": 3}, {"cuda_splits": 3}, {"cuda_splits": 2}]
)
def test_passes_and_splits(driver, make_session, asked, dtype):
    case = dataclasses.replace(CASE, dtype=np.dtype(dtype))
    run_and_check(make_session(model_with_image(case), **asked), case, SHAPE)
    reduce = [REDUCE.replace("f32", "f16" if dtype == np.float16 else "f32")] if asked.get("cuda_splits", 1) > 1 else []
    assert kernels(driver) == [GENERATED] * asked.get("cuda_passes", 1) + reduce


@pytest.mark.parametrize("min_passes", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_plan_has_as_many_passes_or_splits_as_it_asks_for(driver, make_session, min_passes, dtype):
    case = dataclasses.replace(CASE, dtype=np.dtype(dtype))
    driver.set_device(num_multiprocessors=1)
    model = model_with_image(case, min_passes=min_passes)
    for asked in ({}, {"cuda_passes": 1}, {"cuda_splits": 1}):
        run_and_check(make_session(model, **asked), case, SHAPE)
        assert kernels(driver) == [GENERATED] * min_passes
    run_and_check(make_session(model, cuda_passes=3), case, SHAPE)
    assert kernels(driver) == [GENERATED] * 3
    driver.set_device(num_multiprocessors=4)
    run_and_check(make_session(model), case, (1, 12, 4, 4))
    assert driver.last_generated().num_splits == max(2, min_passes)


def test_few_blocks_share_the_chunks(driver, make_session):
    driver.set_device(num_multiprocessors=132)
    run_and_check(make_session(model_with_image(CASE)), CASE, (1, 12, 8, 8))
    (_, grid, *_), (reduce, *_) = driver.take_launches()
    assert grid == (6, 1, 1)  # two tiles, three chunks
    assert reduce == REDUCE


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("x_shape", [(1, 8, 7, 7), (3, 8, 20, 20), (2, 8, 13, 1), (2, 8, 31, 4)])
def test_pointwise_planes_may_be_cut_into_any_rows(driver, make_session, x_shape, dtype):
    case = SparseConvCase(random_weight((6, 8, 1, 1), 0.5), geometry_2d(1, 1, 0), dtype=np.dtype(dtype))
    model = model_with_image(case, is_pointwise=1, channel_pitch=512)
    run_and_check(make_session(model, cuda_kernel="generated"), case, x_shape)
    assert GENERATED in kernels(driver)


def test_pointwise_images_take_inputs_with_depth(driver, make_session):
    weight = random_weight((6, 8, 1, 1, 1), 0.5)
    case = SparseConvCase(weight, ConvGeometry((1,) * 3, (1,) * 3, (0,) * 6, (1,) * 3))
    flat = SparseConvCase(weight[..., 0], geometry_2d(1, 1, 0))
    model = model_with_image(flat, is_pointwise=1)
    node = model_of(case, model)
    run_and_check(make_session(node, cuda_kernel="generated"), case, (2, 8, 3, 4, 5))
    assert GENERATED in kernels(driver)


def model_of(case, other):
    """The case's model with the images of another model's node."""
    from tests.native.cuda.reference import model_with

    (images,) = (a.t.raw_data for a in other.graph.node[0].attribute if a.name == "cuda_images")
    return model_with(case, images)


def test_depth_is_for_the_csr_kernel(driver, make_session, capfd):
    case = SparseConvCase(
        random_weight((4, 8, 1, 3, 3), 0.5), ConvGeometry((1, 3, 3), (1,) * 3, (0, 1, 1) * 2, (1,) * 3)
    )
    flat = SparseConvCase(case.weight[:, :, 0], geometry_2d())
    session = make_session(model_of(case, model_with_image(flat)), severity=2)
    run_and_check(session, case, (1, 8, 1, 6, 6))
    assert GENERATED in kernels(driver)
    assert "CSR" not in capfd.readouterr().err
    run_and_check(session, case, (1, 8, 3, 6, 6))
    assert kernels(driver) == ["sparseconv_csr_f32_b1"]
    warning = capfd.readouterr().err
    assert "SparseConv node 'conv1' runs the CSR kernel" in warning
    assert "depth of 3" in warning


def test_the_record_says_what_ran_last(make_session):
    session = make_session(model_with_image(CASE, channel_pitch=512))
    for x_shape, kernel in [
        ((1, 12, 8, 8), "cuda.generated(sm_90)"),
        ((1, 12, 4, 60), "cuda.csr"),
        ((1, 12, 8, 7), "cuda.generated(sm_90)"),
    ]:
        run_and_check(session, CASE, x_shape)
        (record,) = library.describe_kernels()
        assert record.kernel == kernel


def test_one_warning_a_node_where_no_shape_fits(make_session, capfd):
    session = make_session(model_with_image(CASE, channel_pitch=64), severity=2)
    for width in (20, 30, 20):
        run_and_check(session, CASE, (1, 12, 8, width))
    warnings = [line for line in capfd.readouterr().err.splitlines() if "conv1" in line]
    assert len(warnings) == 1
    assert "SparseConvAdd node 'conv1' runs the CSR kernel for X of this shape" in warnings[0]
    assert re.search(r"it stages 64 bytes a channel, too few for planes of 8 x 20", warnings[0])


def test_a_forced_image_that_does_not_fit_is_an_error(make_session):
    session = make_session(model_with_image(CASE, channel_pitch=64), cuda_kernel="generated")
    with pytest.raises(Exception, match=r"node 'conv1': the image for sm_90 cannot run this call: it stages 64 bytes"):
        session.run(None, random_inputs(CASE, (1, 12, 8, 20)))


def test_too_little_shared_memory(driver, make_session, capfd):
    driver.set_device(max_shared_bytes=48 << 10)
    session = make_session(model_with_image(CASE, channel_pitch=8192), severity=2)
    run_and_check(session, CASE, SHAPE)
    (kernel,) = kernels(driver)
    assert kernel.startswith("sparseconv_csr_f32_b")
    assert "it needs 65600 bytes of shared memory, this GPU has 49152" in capfd.readouterr().err


def test_same_padding_that_the_image_was_not_made_for(driver, make_session, capfd):
    geometry = ConvGeometry((3, 3), (2, 2), (), (1, 1), 1, "SAME_LOWER")
    case = SparseConvCase(random_weight((4, 8, 3, 3), 0.5), geometry)
    session = make_session(model_with_image(case, pads_begin=(1, 1)), severity=2)
    run_and_check(session, case, (1, 8, 8, 8))  # padded at the begin
    run_and_check(session, case, (1, 8, 9, 9))
    assert GENERATED in kernels(driver)
    assert "CSR" not in capfd.readouterr().err
    session = make_session(model_with_image(case, pads_begin=(0, 0)), severity=2)
    run_and_check(session, case, (1, 8, 9, 9))
    assert "a padding of [0, 0] at the begin, this size of X has [1, 1]" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_run_only_launches(driver, make_session, dtype):
    """Scratch comes from ONNX Runtime; the driver is not asked for memory, and nothing waits."""
    case = dataclasses.replace(CASE, dtype=np.dtype(dtype))
    session = make_session(model_with_image(case), cuda_splits=2)
    names = ("cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuLaunchKernel", "cuLaunchKernelEx", "cuCtxPopCurrent_v2")
    before, before_all = [driver.calls(name) for name in names], driver.calls()
    session.run(None, random_inputs(case, SHAPE))
    assert [driver.calls(name) - count for name, count in zip(names, before, strict=True)] == [1] * 5
    assert driver.calls() - before_all == 5


@pytest.mark.parametrize("asked", [{}, {"cuda_splits": 2}, {"cuda_passes": 3}])
def test_concurrent_runs(make_session, asked):
    case = dataclasses.replace(CASE, dtype=HALF)
    session = make_session(model_with_image(case), **asked)
    inputs = [random_inputs(case, (1 + i % 2, 12, 5 + i % 5, 6 + 2 * (i % 3)), seed=i) for i in range(12)]
    wanted = [session.run(None, fed)[0].tobytes() for fed in inputs]

    def run(worker):
        order = np.random.default_rng(worker).permutation(len(inputs))
        return all(session.run(None, inputs[i])[0].tobytes() == wanted[i] for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_two_images_of_one_session(make_session):
    """Each node launches its own."""
    other = dataclasses.replace(CASE, weight=random_weight((8, 12, 3, 3), 0.4, seed=5))
    first, second = make_session(model_with_image(CASE)), make_session(model_with_image(other))
    run_and_check(first, CASE, SHAPE)
    run_and_check(second, other, SHAPE)
