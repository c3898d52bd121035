"""The CSR kernel through ONNX Runtime, in every form of convolution, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.support.native_build import ROOT
from tests.support.random_cases import ACTIVATION_PARAMETERS, cases, concat_cases
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    output_shape,
    random_inputs,
    random_weight,
    run_and_check,
)

PROPERTY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CASE = SparseConvCase(random_weight((8, 6, 3, 3), 0.4), geometry_2d(), Activation.RELU)


@PROPERTY
@given(drawn=cases(longest={1: 150, 2: 14, 3: 6}), sub_batch=st.sampled_from(["auto", 1, 2, 4, 8]))
def test_any_convolution(make_session, drawn, sub_batch):
    case, x_shape = drawn
    run_and_check(make_session(make_model(case), cuda_sub_batch=sub_batch), case, x_shape)


@PROPERTY
@given(drawn=concat_cases(longest={1: 150, 2: 14, 3: 6}))
def test_any_convolution_of_inputs_that_are_concatenated(make_session, drawn):
    case, x_shape = drawn
    run_and_check(make_session(make_model(case)), case, x_shape)


@pytest.mark.parametrize("batch", [1, 2, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(5, 300), (1152, 48), (48, 1152), (3, 1)], ids=str)
def test_maps_of_one_pixel(make_session, driver, shape, dtype, batch):
    """As gates have them."""
    driver.set_device(num_multiprocessors=132)
    for axes in ((1, 1), (1,), (1, 1, 1)):
        geometry = ConvGeometry(axes, (2,) * len(axes), (0,) * (2 * len(axes)), axes)
        weight = random_weight((*shape, *axes), 0.3)
        case = SparseConvCase(weight, geometry, Activation.SILU, dtype=np.dtype(dtype), has_residual=len(axes) == 1)
        run_and_check(make_session(make_model(case), cuda_kernel="csr"), case, (batch, shape[1], *axes))
        ((kernel, *_),) = driver.take_launches()
        assert kernel.startswith("sparseconv_csr_" if batch > 1 else "sparseconv_pixel_")


def test_what_no_entry_asks_for_is_not_read(make_session):
    weight = np.zeros((40, 200, 1, 1), np.float32)
    weight[:, 7] = 1.0
    case = SparseConvCase(weight, geometry_2d(1, pad=0))
    inputs = random_inputs(case, (1, 200, 1, 1))
    inputs["X"][:, :7] = np.nan
    inputs["X"][:, 8:] = np.inf
    (y,) = make_session(make_model(case), cuda_kernel="csr").run(None, inputs)
    assert np.isfinite(y).all()


def test_a_sub_batch_that_is_asked_for_runs_maps_of_one_pixel_too(make_session, driver):
    case = SparseConvCase(random_weight((40, 200, 1, 1), 0.3), geometry_2d(1, pad=0))
    run_and_check(make_session(make_model(case), cuda_sub_batch=2), case, (1, 200, 1, 1))
    assert driver.take_launches()[0][0] == "sparseconv_csr_f32_b2"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("activation", list(Activation))
def test_every_activation(make_session, activation, dtype):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = SparseConvCase(
        random_weight((5, 4, 3, 3), 0.5), geometry_2d(), activation, alpha, beta, np.dtype(dtype), has_residual=True
    )
    run_and_check(make_session(make_model(case)), case, (2, 4, 6, 5))


@pytest.mark.parametrize("batch", [1, 3, 8, 9])
@pytest.mark.parametrize("sub_batch", [1, 2, 4, 8])
def test_every_sub_batch(driver, make_session, sub_batch, batch):
    run_and_check(make_session(make_model(CASE), cuda_sub_batch=sub_batch), CASE, (batch, 6, 5, 7))
    ((kernel, grid, _, _),) = driver.take_launches()
    assert kernel == f"sparseconv_csr_f32_b{sub_batch}"
    assert grid == (1, 8, -(-batch // sub_batch))


@pytest.mark.parametrize(("num_multiprocessors", "sub_batch", "rows"), [(1, 4, 8), (2, 2, 8), (3, 1, 8), (100, 1, 8)])
def test_blocks_have_much_to_do_as_long_as_there_are_enough(driver, make_session, num_multiprocessors, sub_batch, rows):
    driver.set_device(num_multiprocessors=num_multiprocessors)
    run_and_check(make_session(make_model(CASE)), CASE, (8, 6, 5, 7))
    ((kernel, grid, _, _),) = driver.take_launches()
    assert (kernel, grid[1]) == (f"sparseconv_csr_f32_b{sub_batch}", rows)


def test_without_a_batch_nothing_is_launched(driver, make_session):
    session = make_session(make_model(CASE))
    before = driver.calls()
    (y,) = session.run(None, random_inputs(CASE, (0, 6, 5, 7)))
    assert y.shape == output_shape(CASE, (0, 6, 5, 7))
    assert driver.calls() == before


def test_nothing_but_padding_gives_the_bias(make_session):
    case = dataclasses.replace(CASE, geometry=geometry_2d(pad=2))
    run_and_check(make_session(make_model(case)), case, (2, 6, 0, 9))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_weight_without_entries(make_session, dtype):
    case = dataclasses.replace(CASE, weight=np.zeros_like(CASE.weight), dtype=np.dtype(dtype))
    run_and_check(make_session(make_model(case)), case, (2, 6, 4, 4))


def test_launches_begin_early_where_the_gpu_can(driver, make_session):
    """By the kernels that are made for it; elsewhere by those for every GPU, one after the other."""
    for architecture, launch in ((89, "cuLaunchKernel"), (90, "cuLaunchKernelEx")):
        driver.set_device(architecture=architecture)
        session = make_session(make_model(CASE))
        before = driver.calls(launch)
        inputs = random_inputs(CASE, (1, 6, 5, 7))
        assert_within(session.run(None, inputs)[0], *oracle(CASE, inputs))
        assert driver.calls(launch) == before + 1


def test_a_run_only_launches(driver, make_session):
    """No allocation, no copy and no synchronisation: CUDA graphs are captured."""
    session = make_session(make_model(CASE))
    session.run(None, random_inputs(CASE, (1, 6, 5, 7)))
    names = ("cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuLaunchKernelEx", "cuCtxPopCurrent_v2")
    before, before_all = [driver.calls(name) for name in names], driver.calls()
    session.run(None, random_inputs(CASE, (2, 6, 8, 7)))
    assert [driver.calls(name) - count for name, count in zip(names, before, strict=True)] == [1] * len(names)
    assert driver.calls() - before_all == len(names)


def test_nodes_share_the_librarys_kernels(driver, make_session):
    first = make_session(make_model(CASE))
    before = driver.calls("cuLibraryLoadData")
    second = make_session(make_model(dataclasses.replace(CASE, dtype=np.dtype(np.float16))))
    assert driver.calls("cuLibraryLoadData") == before
    del first, second


def test_the_kernel_is_described(make_session):
    session = make_session(make_model(CASE))
    session.run(None, random_inputs(CASE, (1, 6, 5, 7)))
    (record,) = library.describe_kernels()
    assert record == library.KernelInfo("conv1", "SparseConv", "cuda", "cuda.csr", 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_concurrent_runs_with_changing_shapes(make_session, dtype):
    """Four threads, one session, more shapes than it keeps plans for."""
    case = dataclasses.replace(CASE, dtype=np.dtype(dtype), has_residual=True)
    session = make_session(make_model(case), threads=2)
    inputs = [random_inputs(case, (1 + i % 3, 6, 5 + i % 7, 12 - i % 8), seed=i) for i in range(50)]
    wanted = [session.run(None, fed)[0].tobytes() for fed in inputs]

    def run(worker):
        order = np.random.default_rng(worker).permutation(len(inputs))
        return all(session.run(None, inputs[i])[0].tobytes() == wanted[i] for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_a_stream_of_another_gpu_is_an_error(driver, make_session):
    session = make_session(make_model(CASE))
    driver.set_stream_device(1)
    with pytest.raises(Exception, match=r"node 'conv1': the stream of this call belongs to another GPU"):
        session.run(None, random_inputs(CASE, (1, 6, 5, 7)))
    driver.set_stream_device(0)
    run_and_check(session, CASE, (1, 6, 5, 7))


@pytest.mark.parametrize(
    ("geometry", "x_shape"),
    [
        (geometry_2d(pad=2**30), (1, 6, 3, 3)),
        (geometry_2d(pad=25000), (1, 6, 3, 3)),
        (ConvGeometry((3, 3), (2**31 - 1,) * 2, (2**31 - 1,) * 4, (1, 1)), (1, 6, 3, 3)),
    ],
)
def test_sizes_beyond_its_reach_are_refused(make_session, geometry, x_shape):
    session = make_session(make_model(dataclasses.replace(CASE, geometry=geometry)))
    with pytest.raises(Exception, match=r"node 'conv1': .*(the CUDA kernel can address|overflows)"):
        session.run(None, random_inputs(CASE, x_shape))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cuda_kernel", "fast"),
        ("cuda_kernel", ""),
        ("cuda_sub_batch", "3"),
        ("cuda_sub_batch", "16"),
        ("cuda_passes", "0"),
        ("cuda_passes", "-1"),
        ("cuda_splits", "2x"),
        ("cuda_splits", "99999999999999999999"),
        ("cuda_staging", "bulky"),
    ],
)
def test_a_bad_setting_is_refused_at_registration(make_session, name, value):
    with pytest.raises(
        Exception, match=re.escape(f"'sparseconv.{name}' must be ") + ".*" + re.escape(f"found '{value}'")
    ):
        make_session(make_model(CASE), **{name: value})


def test_passes_and_splits_exclude_each_other(make_session):
    with pytest.raises(Exception, match=r"cuda_passes' and 'sparseconv\.cuda_splits' cannot both be above 1"):
        make_session(make_model(CASE), cuda_passes=2, cuda_splits=2)


FUZZ = """
import os, sys
from tests.support import cuda_emulation
driver = cuda_emulation.fake_driver()
os.environ["ONNX_SPARSECONV_LIBRARY"] = str(cuda_emulation.build_emulated_library())
from tests.native import fuzz_attributes
sys.argv = ["fuzz_attributes.py", "--count", "300", "--seed", "1"]
fuzz_attributes.main()
assert driver.live() == 0, driver.live()
"""


def test_mutated_attributes_do_not_crash():
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", FUZZ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused: " in done.stdout
    assert "ran: " in done.stdout


def test_the_generated_kernel_cannot_be_forced_without_an_image(make_session):
    with pytest.raises(Exception, match=r"node 'conv1': .*generated kernel, and the node carries no image"):
        make_session(make_model(CASE), cuda_kernel="generated")
