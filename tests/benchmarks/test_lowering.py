"""Lowered layers: shapes and plans, and the kernels on an emulated GPU, against a convolution written out."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.benchmarks.emulated_device import EmulatedDevice, reference, size_of
from tests.support.cuda_host_build import address, build_host_image, check_surroundings, device_array, launch


def make(name="layer", **changes):
    from suite_rows import Layer

    sizes = {
        "in_channels": 3,
        "out_channels": 5,
        "height": 7,
        "width": 8,
        "kernel": 3,
        "stride": 1,
        "pad": 1,
        "group": 1,
    }
    return Layer(name, **{**sizes, **changes})


LAYERS = {
    "3x3": {},
    "even positions": {"width": 10, "height": 6},
    "5x5 without padding": {"kernel": 5, "pad": 0, "height": 9},
    "stride 2": {"stride": 2, "height": 9, "width": 9},
    "1x1": {"kernel": 1, "pad": 0, "in_channels": 8},
    "1x1, depth no multiple": {"kernel": 1, "pad": 0, "in_channels": 12},
    "1x1, stride 2": {"kernel": 1, "pad": 0, "stride": 2},
    "1-D": {"height": 1, "kernel": 2, "pad": 0, "width": 9},
    "1-D, padded": {"height": 1, "kernel": 3, "pad": 1, "width": 12},
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return make(**LAYERS[request.param])


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("layout", ["batched", "joined"])
def test_the_lowered_matrix_makes_the_convolution_a_product(layer, layout):
    from layers import make_weights
    from lowering import Lowering, LoweringPlan, lower, weight_matrix

    lowering = Lowering.of(layer)
    x, weights = random((2, layer.in_channels, *layer.spatial), np.float64), make_weights(layer, 0.3, "float64")
    x4 = x.reshape(2, layer.in_channels, lowering.in_height, lowering.in_width)
    lowered = lower(x4, lowering, LoweringPlan(layout, 2))
    product = weight_matrix(weights["w"], lowering) @ lowered
    if layout == "joined":
        product = product.reshape(layer.out_channels, 2, -1).transpose(1, 0, 2)
    y = np.maximum(product + weights["b"][:, None], 0).reshape(2, layer.out_channels, *layer.out_sizes)
    np.testing.assert_allclose(y, reference(x, weights, layer), atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", ["batched", "joined"])
def test_the_kernel_writes_the_lowered_matrix_and_nothing_else(layer, layout, dtype):
    from lowering import Lowering, LoweringPlan, kernel_source, launch_shape, lower

    lowering, plan = Lowering.of(layer), LoweringPlan(layout, 3)
    x = device_array(random((3, layer.in_channels, lowering.in_height, lowering.in_width), dtype))
    wanted = lower(x, lowering, plan)
    lowered = device_array(np.full(wanted.shape, 7, dtype), writable=True)
    grid, threads = launch_shape("lower", lowering, x.itemsize, 3)
    strides = [ctypes.c_longlong(stride) for stride in plan.strides(lowering)]
    params = [ctypes.c_void_p(address(x)), ctypes.c_void_p(address(lowered)), *strides]
    launch(build_host_image(kernel_source(lowering, np.dtype(dtype))), "lower", grid, (threads,), params)
    real, filled = (lowered, wanted) if layout == "joined" else (lowered.swapaxes(0, 1), wanted.swapaxes(0, 1))
    np.testing.assert_array_equal(real[: lowering.rows], filled[: lowering.rows])
    assert (real[lowering.rows :] == 7).all()
    check_surroundings(lowered)


@pytest.fixture
def memory():
    from device_memory import HostMemory

    made = HostMemory()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_plan_computes_the_layer_on_every_copy(layer, dtype, memory):
    from layers import make_weights
    from lowered_runs import LoweredLayer
    from lowering import Lowering, LoweringPlan

    batch, lowering = 4, Lowering.of(layer)
    x, weights = random((batch, layer.in_channels, *layer.spatial), dtype), make_weights(layer, 0.5, dtype)
    wanted = reference(x, weights, layer)
    device = EmulatedDevice(memory, lowering, np.dtype(dtype))
    places = [(device.upload(x), memory.allocate(size_of(wanted.shape, dtype))) for _ in range(2)]
    lowered = LoweredLayer(device, lowering, weights, batch, places=places)
    small = [LoweringPlan(layout, chunk) for layout in ("batched", "joined") for chunk in (1, 2, 4)]
    dense = [(plan, lowered.dense_runs) for plan in {*lowered.dense_plans(), *small}]
    sparse_plans = {*lowered.sparse_plans((0,)), LoweringPlan("joined", 2), LoweringPlan("batched", 1)}
    for plan, make_runs in [*dense, *((plan, lowered.sparse_runs) for plan in sparse_plans)]:
        runs = make_runs(plan)
        for _, y in places:
            memory.fill(y, size_of(wanted.shape, dtype), 0xFF)
            runs()
            got = memory.read(y, wanted.shape, np.dtype(dtype))
            bound = 1e-5 if dtype == "float32" else 2e-2
            np.testing.assert_allclose(got.astype(np.float64), wanted, atol=bound, err_msg=plan.name)


def test_chunks_divide_the_batch_and_stay_below_their_limits():
    from lowering import CACHED_CHUNK_BYTES, LARGEST_CHUNK_BYTES, Lowering, chunks

    wide = Lowering.of(make(in_channels=64, out_channels=64, height=224, width=224))
    assert chunks(wide, 64, 4) == (1, 64)
    assert chunks(wide, 128, 4) == (1, 64)
    small = Lowering.of(make(in_channels=128, out_channels=128, height=28, width=28))
    cached, largest = chunks(small, 64, 4)
    image = small.depth * small.positions * 4
    assert cached * image <= CACHED_CHUNK_BYTES < 2 * cached * image
    assert largest == 64
    assert 64 * image <= LARGEST_CHUNK_BYTES
    assert chunks(small, 1, 4) == (1,)


def test_plans_are_told_apart_and_identities_are_not_lowered():
    from lowering import Lowering, LoweringPlan, dense_plans, sparse_plans

    layer = Lowering.of(make(in_channels=128, out_channels=128, height=28, width=28))
    assert [plan.name for plan in dense_plans(layer, 64, 4)] == [
        *("batched, 4 images", "joined, 4 images", "batched, 64 images", "joined, 64 images")
    ]
    assert [plan.name for plan in sparse_plans(layer, 64, 4, (6,))] == [
        *("batched, 1 image, algorithm 6", "joined, 4 images, algorithm 6", "joined, 64 images, algorithm 6")
    ]
    assert dense_plans(layer, 1, 4) == (LoweringPlan("batched", 1),)
    pointwise = Lowering.of(make(kernel=1, pad=0))
    assert dense_plans(pointwise, 64, 4) == (LoweringPlan("batched", 64),)
    assert {plan.layout for plan in sparse_plans(pointwise, 64, 4, (6, 4))} == {"batched", "joined"}
    assert sparse_plans(pointwise, 1, 4, (6,)) == (LoweringPlan("batched", 1, 6),)


def test_compressed_rows_hold_the_matrix_and_no_zero():
    from lowering import csr_arrays

    matrix = np.array([[0, 2, 0, 3], [0, 0, 0, 0], [5, 0, 0, 0]], np.float16)
    pointers, columns, values = csr_arrays(matrix)
    assert (pointers.tolist(), columns.tolist(), values.tolist()) == ([0, 2, 2, 3], [1, 3, 0], [2, 3, 5])
    assert (pointers.dtype, columns.dtype, values.dtype) == (np.int32, np.int32, np.float16)


def test_groups_are_refused():
    from lowering import Lowering

    with pytest.raises(ValueError, match="has 3 groups"):
        Lowering.of(make(group=3))


def test_the_fastest_plan_is_taken_and_what_fails_is_told():
    from lowered_runs import PROBING_RUNS, fastest
    from lowering import LoweringPlan

    now, times = [0], {1: 30, 2: 10, 4: 20}
    plans = [LoweringPlan("joined", chunk) for chunk in (1, 2, 4, 8)]
    calls = []

    def make_runs(plan):
        if plan.chunk == 8:
            raise RuntimeError("no room")

        def run():
            calls.append(plan.chunk)
            now[0] += times[plan.chunk] * 1000

        return run

    best, found = fastest(plans, make_runs, clock=lambda: now[0])
    assert best.chunk == 2
    assert found == {
        "joined, 1 image": 30,
        "joined, 2 images": 10,
        "joined, 4 images": 20,
        "joined, 8 images": "RuntimeError: no room",
    }
    assert calls.count(2) == 1 + PROBING_RUNS
    with pytest.raises(RuntimeError, match="joined, 8 images: RuntimeError: no room"):
        fastest(plans[3:], make_runs)


def test_a_plan_with_wrong_results_is_not_taken_however_fast():
    from lowered_runs import fastest
    from lowering import LoweringPlan

    now, times = [0], {1: 30, 2: 10}

    def make_runs(plan):
        def run():
            now[0] += times[plan.chunk] * 1000

        run.chunk = plan.chunk
        return run

    plans = [LoweringPlan("joined", chunk) for chunk in times]
    best, found = fastest(plans, make_runs, lambda runs: "wrong" if runs.chunk == 2 else "", clock=lambda: now[0])
    assert best.chunk == 1
    assert found == {"joined, 1 image": 30, "joined, 2 images": "wrong"}


def test_slow_plans_are_probed_once():
    from lowered_runs import fastest
    from lowering import LoweringPlan

    now, calls = [0], []

    def run():
        calls.append(1)
        now[0] += 10**9

    fastest([LoweringPlan("joined", 1)], lambda _: run, clock=lambda: now[0])
    assert len(calls) == 2
