"""CUDA graphs, threads and several GPUs."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.gpu.layers import (
    FLAT,
    FLAT_DENSITY,
    GEMM,
    KERNELS,
    POOLS,
    TYPES,
    WARPGROUPS,
    case_of,
    concatenated_case_of,
)
from tests.support.gpu_checks import (
    assert_right,
    check,
    check_graph,
    check_threads,
    kernel_of_newest_session,
    static_model,
    with_images,
)
from tests.support.sparse_models import make_model, random_inputs


def _model(kernel, case, x_shape, request):
    if kernel != "generated":
        return make_model(case)
    return with_images(static_model(case, x_shape), request.getfixturevalue("target"))


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("name", ["3x3", "3x3, 7 wide", "1x1", "1-D"])
def test_a_cuda_graph_is_captured_and_replayed(gpu, request, kernel, dtype, name):
    case, x_shape = case_of(name, dtype)
    model = _model(kernel, case, x_shape, request)
    assert check_graph(gpu, case, x_shape, model=model, cuda_kernel=kernel).startswith(f"cuda.{kernel}")


@pytest.mark.parametrize("name", ["3x3, 14 wide", "1x1", "1x1, 7 wide"])
def test_a_cuda_graph_of_warpgroups(gpu, name):
    case, x_shape = case_of(name, np.float16, layers=WARPGROUPS)
    for kernel in ("wgmma", "cluster"):
        assert check_graph(gpu, case, x_shape, cuda_kernel=kernel) == f"cuda.{kernel}"


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_a_cuda_graph_with_a_pool(gpu, pool):
    case, x_shape = case_of("3x3, 14 wide", np.float16, has_residual=False, layers=WARPGROUPS)
    assert check_graph(gpu, dataclasses.replace(case, pool=pool), x_shape, cuda_kernel="wgmma") == "cuda.wgmma"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "kernel"), [("1x1", "wgmma"), ("1x1", "csr"), ("1x1, 7 wide", "wgmma")])
def test_a_cuda_graph_of_inputs_that_are_concatenated(gpu, dtype, name, kernel):
    case, x_shape = concatenated_case_of(name, dtype, 3)
    assert check_graph(gpu, case, x_shape, cuda_kernel=kernel) == f"cuda.{kernel}"


@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_changes_with_the_number_of_images(gpu, target, dtype):
    """Of one session: a node's own code runs from so many images on."""
    case, x_shape = case_of("3x3", dtype)
    session = gpu.session(with_images(static_model(case, x_shape), target, min_batch=3))
    for batch in (1, 2, 3, 5, 1):
        inputs = random_inputs(case, (batch, *x_shape[1:]))
        (actual,) = session.run(None, inputs)
        kernel = kernel_of_newest_session()
        assert kernel.startswith("cuda.generated") == (batch >= 3)
        assert_right(actual, case, inputs, kernel)


@pytest.mark.parametrize("splits", [2, 4])
def test_a_cuda_graph_of_a_plan_with_partial_sums(gpu, request, splits):
    case, x_shape = case_of("3x3, one image", np.float32)
    model = _model("generated", case, x_shape, request)
    check_graph(gpu, case, x_shape, model=model, cuda_kernel="generated", cuda_splits=splits)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_concurrent_runs_with_changing_shapes(gpu, request, kernel, dtype):
    case, x_shape = case_of("3x3", dtype)
    model = _model(kernel, case, x_shape, request)
    session = gpu.session(model, cuda_kernel=kernel)
    shapes = [(1 + i % 5, *x_shape[1:]) for i in range(20)]
    if kernel != "generated":
        shapes = [(1 + i % 3, x_shape[1], 5 + i, 30 - i) for i in range(20)]
    check_threads(session, case, shapes)


def test_sessions_come_and_go_beside_each_other(gpu):
    def run(worker):
        case, x_shape = case_of(["3x3", "1x1", "5x5", "1-D"][worker % 4], TYPES[worker % 2])
        session = gpu.session(make_model(case), cuda_kernel="csr")
        return session.run(None, random_inputs(case, x_shape, worker))[0].shape[0] == x_shape[0]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(16)))


@pytest.mark.parametrize("name", ["3x3, 7 wide", "1x1, 7 wide"])
def test_concurrent_runs_of_warpgroups(gpu, name):
    case, x_shape = case_of(name, np.float16, layers=WARPGROUPS)
    for kernel in ("wgmma", "cluster"):
        session = gpu.session(make_model(case), cuda_kernel=kernel)
        check_threads(session, case, [(1 + i % 9, x_shape[1], 5 + i % 4, 6 + i % 7) for i in range(20)])


def test_concurrent_runs_from_flat_images(gpu):
    case, x_shape = case_of("3x3, 14 wide", np.float16, FLAT_DENSITY, layers=FLAT)
    session = gpu.session(make_model(case), cuda_kernel="flat")
    check_threads(session, case, [(1 + i % 9, x_shape[1], 5 + i % 4, 6 + i % 7) for i in range(20)])


@pytest.mark.parametrize("dtype", TYPES)
def test_concurrent_runs_of_gemm_kernels(gpu, dtype):
    for name in ("14 wide", "28 wide"):
        case, x_shape = case_of(name, dtype, layers=GEMM)
        session = gpu.session(make_model(case), cuda_kernel="gemm")
        check_threads(session, case, [(1 + i % 9, x_shape[1], 4 + i % 4, 4 * (1 + i % 3)) for i in range(20)])


@pytest.mark.parametrize("kernel", ["csr", "tensor", "segments", "wgmma", "flat", "gemm", "cluster", "generated"])
def test_every_gpu_computes_the_same(gpus, request, kernel):
    if kernel in ("wgmma", "cluster"):
        case, x_shape = case_of("3x3, 14 wide", np.float16, layers=WARPGROUPS)
    elif kernel == "flat":
        case, x_shape = case_of("3x3, 14 wide", np.float16, FLAT_DENSITY, layers=FLAT)
    elif kernel == "gemm":
        case, x_shape = case_of("14 wide", np.float16, layers=GEMM)
    elif kernel == "segments":
        case, x_shape = case_of("1x1", np.float16, layers=WARPGROUPS)
    else:
        case, x_shape = case_of("3x3", np.float16 if kernel == "tensor" else np.float32)
    model = _model(kernel, case, x_shape, request)
    sessions = [place.session(model, cuda_kernel=kernel) for place in gpus]
    inputs = random_inputs(case, x_shape)

    def run(session):
        return [session.run(None, inputs)[0].tobytes() for _ in range(10)]

    with ThreadPoolExecutor(len(sessions)) as pool:
        results = [result for group in pool.map(run, sessions) for result in group]
    assert len(set(results)) == 1
    for place in gpus:
        check(place, case, x_shape, model=model, cuda_kernel=kernel)
        check_graph(place, case, x_shape, model=model, cuda_kernel=kernel)
