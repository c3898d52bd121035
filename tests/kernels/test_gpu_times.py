"""Times foretold for a GPU: they follow from what there is to do, as they must."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

from onnx_sparseconv.kernels.flat_plan import flat_steps, plan_flat
from onnx_sparseconv.kernels.gemm_plan import plan_gemm
from onnx_sparseconv.kernels.gpu_time_constants import MIN_GAIN, MODEL
from onnx_sparseconv.kernels.gpu_times import (
    AS_PRODUCTS,
    BY_CSR,
    FLAT,
    GEMM,
    ON_TENSOR_CORES,
    ON_WARPGROUPS,
    DenseWork,
    LibraryWork,
    SparseWork,
    as_arrays,
    cluster_work,
    dense_work,
    depthwise_work,
    fastest_work,
    flat_work,
    gemm_work,
    library_work,
    pointwise_work,
    sparse_work,
    tensor_work,
    warpgroup_work,
)
from onnx_sparseconv.kernels.plan import choose_plan, estimate_cycles
from onnx_sparseconv.kernels.tensor_plan import plan_tensor
from onnx_sparseconv.kernels.warpgroup_plan import csr_cycles, plan_pointwise, plan_warpgroups, without_strides
from tests.support.sparse_layers import sparse_layer

make = functools.partial(sparse_layer, size=(28, 30))


def sparse_us(layer, batch=1):
    return float(MODEL.sparse_us(sparse_work(layer, choose_plan(layer, 90), batch, MODEL.clock_mhz)))


def dense_us(layer, batch=1):
    return float(MODEL.dense_us(dense_work(layer, batch)))


def test_what_a_dense_layer_has_to_do():
    work = dense_work(make(stride=2), 3)
    positions = 14 * 15
    assert work.mflop == pytest.approx(2e-6 * 3 * positions * 64 * 32 * 9)
    assert work.mbytes == pytest.approx(4e-6 * (3 * (32 * 28 * 30 + 64 * positions) + 64 * 32 * 9))
    assert work.moutputs == pytest.approx(3e-6 * 64 * positions)
    assert (work.depth, work.is_window, work.is_half) == (32 * 9, 1, 0)
    half = dense_work(make((64, 32, 1, 1), dtype=np.float16), 3)
    assert (half.depth, half.is_window, half.is_half) == (32, 0, 1)
    assert half.mbytes == pytest.approx(2e-6 * (3 * 96 * 28 * 30 + 64 * 32))
    assert dense_work(make((64, 32, 1, 1), stride=2), 3).is_window == 1


def test_dense_groups_are_products_of_their_own():
    """But for depthwise ones, which cuDNN computes in another way."""
    one, two = make((64, 64, 3, 3)), make((64, 32, 3, 3), group=2)
    assert dense_work(two, 3).moutputs == dense_work(one, 3).moutputs / 2
    assert dense_work(make((64, 1, 3, 3), group=64), 3).moutputs == dense_work(one, 3).moutputs


def test_what_a_sparse_layer_has_to_do():
    plan = choose_plan(make(), 90)
    assert sparse_work(make(), plan, 5, 1000.0).work_us == pytest.approx(estimate_cycles(make(), plan, 5) / 1000)


def test_a_layer_of_unknown_size_has_no_time():
    layer = dataclasses.replace(make(), in_size=None)
    with pytest.raises(ValueError, match="not known"):
        dense_work(layer, 1)
    with pytest.raises(ValueError, match="not known"):
        sparse_work(layer, choose_plan(layer, 90), 1, MODEL.clock_mhz)


def on_warpgroups(layer, batch=64, architecture=90):
    return warpgroup_work(layer, architecture, batch, MODEL.multiprocessors)


def half_layer(channels, size, **changes):
    return make((channels, channels, 3, 3), size=(size, size), dtype=np.float16, **changes)


def test_what_a_layer_has_to_do_on_warpgroups():
    layer = half_layer(512, 28)
    work = on_warpgroups(layer)
    plan = plan_warpgroups(layer, 64, 16 * 1.02, MODEL.multiprocessors)
    # 8 blocks of 64 outputs, 8 eights of images, tiles of 2 rows.
    assert plan.tiles == 8 * 8 * 14
    assert work.kcycles == pytest.approx(plan.cycles / 1000, rel=0.03)
    denser = half_layer(512, 28, density=0.3)
    assert MODEL.cycles_us(on_warpgroups(denser)) > 1.2 * MODEL.cycles_us(work)
    # With more zeros, X is flat.
    some = half_layer(512, 28, density=0.13)
    assert MODEL.library_us(some, 90, 64) == (pytest.approx(float(MODEL.cycles_us(on_warpgroups(some)))), "warpgroups")


def flat(layer, batch=64, architecture=90):
    return flat_work(layer, architecture, batch, MODEL.multiprocessors)


@pytest.mark.parametrize("density", [0.05, 0.2])
def test_windows_of_many_channels_are_flat(density):
    layer = half_layer(256, 28, density=density)
    steps = flat_steps(layer)
    plan = plan_flat(layer, 64, steps, MODEL.multiprocessors)
    # 4 row tiles, and 64 images of 28 rows and columns, each with zeros behind it.
    assert plan.tiles == 4 * math.ceil(64 * 29 * 29 / (16 * plan.blocks))
    assert steps.is_dense == (density == 0.2)
    assert flat(layer).kcycles == plan.cycles / 1000
    work, others = (fastest_work(layer, 90, 64, MODEL.multiprocessors, without=without) for without in ((), (FLAT,)))
    assert work == flat(layer)
    assert work.kcycles < 0.9 * others.kcycles
    assert MODEL.library_us(layer, 90, 64) == (float(MODEL.cycles_us(work)), "warpgroups")


def test_few_images_have_too_few_tiles_to_be_flat_with_their_zeros():
    layer = half_layer(512, 7, density=0.2)
    assert fastest_work(layer, 90, 16, MODEL.multiprocessors) != flat(layer, 16)


def test_matrix_products_run_1x1_where_that_takes_fewer_cycles():
    def half(shape, size, **changes):
        return sparse_layer(shape, size=(size, size), dtype=np.float16, **changes)

    plan = plan_gemm(half((1024, 256, 1, 1), 14), 64, MODEL.multiprocessors)
    # A tile is an image, by 128 rows.
    assert (plan.tiles, plan.segments, plan.has_boxes) == (64 * 8, 25, False)
    for layer, batch, is_gemm in (
        (half((1024, 256, 1, 1), 14), 64, True),
        (half((512, 128, 1, 1), 28), 8, True),
        (half((2048, 512, 1, 1), 7), 64, True),
        (half((1024, 512, 1, 1), 28, stride=2), 64, True),
        (half((512, 256, 1, 1), 14, stride=2), 64, False),
        (half((512, 2048, 1, 1), 7), 2, False),
    ):
        work, others = (fastest_work(layer, 90, batch, MODEL.multiprocessors, without=names) for names in ((), (GEMM,)))
        assert work == (gemm_work(layer, 90, batch, MODEL.multiprocessors) if is_gemm else others)
        assert (work.kcycles < others.kcycles) == is_gemm
    for other in (
        sparse_layer((128, 64, 1, 1), size=(28, 28), dtype=np.float32, stride=3),
        half((128, 64, 1, 1), 28, stride=3),
        half((128, 32, 1, 1), 28, group=2),
        half((63, 64, 1, 1), 7),
    ):
        assert gemm_work(other, 90, 8, MODEL.multiprocessors) is None
    assert gemm_work(half((128, 64, 1, 1), 28), 80, 8, MODEL.multiprocessors) is None


def test_matrix_products_run_1x1_of_floats_with_strides_where_that_takes_fewer_cycles():
    def floats(shape, size, **changes):
        return sparse_layer(shape, size=(size, size), **changes)

    plan = plan_gemm(floats((1024, 256, 1, 1), 14), 64, MODEL.multiprocessors)
    # A tile is half an image, by 128 rows.
    assert (plan.tiles, plan.segments, plan.has_boxes) == (2 * 64 * 8, 13, True)
    for layer, batch, is_gemm in (
        (floats((1024, 256, 1, 1), 14), 64, True),
        (floats((2048, 512, 1, 1), 7), 8, True),
        (floats((128, 64, 1, 1), 56, stride=2), 64, True),
        (floats((512, 2048, 1, 1), 7), 8, False),
        (floats((1024, 512, 1, 1), 28, stride=2), 64, True),
        (floats((2048, 1024, 1, 1), 14, stride=2), 64, True),
    ):
        work, others = (fastest_work(layer, 90, batch, MODEL.multiprocessors, without=names) for names in ((), (GEMM,)))
        assert work == (gemm_work(layer, 90, batch, MODEL.multiprocessors) if is_gemm else others)
        assert (work.kcycles < others.kcycles) == is_gemm


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        ({"shape": (256, 256, 1, 1)}, {}),
        ({"shape": (256, 60, 3, 3)}, {}),
        ({"shape": (7, 256, 3, 3)}, {}),
        ({"stride": 3}, {}),
        ({"density": 0.01}, {}),
        ({}, {"architecture": 100}),
    ],
    ids=str,
)
def test_nothing_is_foretold_of_flat_layers_unlike_those_measured(changes, call):
    layer = {"shape": (256, 256, 3, 3), "size": (28, 28), "dtype": np.float16, "density": 0.05}
    assert flat(make(**layer)) is not None
    assert flat(make(**layer | changes), **call) is None


def test_few_images_are_cut_into_strips_and_shared():
    layer = half_layer(512, 14)
    one, eight = (plan_warpgroups(layer, batch, 16.0, MODEL.multiprocessors) for batch in (1, 8))
    # A tile or two for each of 8 blocks of outputs, whose sums several multiprocessors share.
    assert one.tiles <= 16
    assert one.cycles < eight.cycles < 2 * one.cycles
    assert one.cycles < plan_warpgroups(layer, 1, 16.0, 8).cycles / 2
    # Next to nothing to do: the CSR kernel would be faster.
    few = on_warpgroups(half_layer(64, 7), 1)
    assert few.kcycles < plan_warpgroups(half_layer(64, 7), 1, 2.0, MODEL.multiprocessors).cycles / 1000


def test_a_plan_needs_a_size():
    with pytest.raises(ValueError, match="not known"):
        plan_warpgroups(dataclasses.replace(make(), in_size=None), 1, 1.0, 132)


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        ({"shape": (512, 512, 1, 1)}, {}),
        ({"shape": (64, 64, 8, 8)}, {}),
        ({"stride": 3}, {}),
        ({"shape": (7, 512, 3, 3)}, {}),
        ({"density": 0.005}, {}),
        ({}, {"architecture": 100}),
    ],
)
def test_what_was_not_measured_on_warpgroups_is_not_foretold(changes, call):
    layer = make(**{"shape": (512, 512, 3, 3), "size": (28, 28), "dtype": np.float16, **changes})
    assert on_warpgroups(layer, **call) is None


def pointwise(layer, batch=64, architecture=90):
    return pointwise_work(layer, architecture, batch, MODEL.multiprocessors)


def planned(layer, batch, chunks):
    return plan_pointwise(layer, batch, chunks, MODEL.multiprocessors)


def test_what_a_1x1_layer_has_to_do_on_warpgroups():
    layer = make((256, 1024, 1, 1), size=(14, 14), dtype=np.float16)
    work, plan = pointwise(layer), planned(layer, 64, 32)
    # Two blocks of 128 outputs, a tile for each image: 128 tiles, one on each multiprocessor.
    assert (plan.tiles, plan.parts) == (128, 1)
    assert work.kcycles == plan.cycles / 1000
    denser = make((256, 1024, 1, 1), size=(14, 14), dtype=np.float16, density=0.3)
    assert MODEL.cycles_us(pointwise(denser)) > MODEL.cycles_us(work)
    floats = make((512, 2048, 1, 1), size=(7, 7), dtype=np.float32)
    us = pytest.approx(float(MODEL.cycles_us(fastest_work(floats, 90, 64, MODEL.multiprocessors))))
    assert MODEL.library_us(floats, 90, 64) == (us, AS_PRODUCTS)


def test_planes_that_are_gathered_take_longer():
    whole, odd = (make((512, 256, 1, 1), size=(n, n), dtype=np.float16) for n in (8, 7))
    assert planned(odd, 64, 8).cycles > 1.2 * planned(whole, 64, 8).cycles
    strided = make((512, 256, 1, 1), stride=2, size=(16, 16), dtype=np.float16)
    assert planned(strided, 64, 8).cycles > planned(odd, 64, 8).cycles


def test_few_images_of_1x1_layers_are_shared():
    layer = make((512, 2048, 1, 1), size=(14, 14), dtype=np.float16)
    one, many = planned(layer, 1, 64), planned(layer, 64, 64)
    assert one.parts > 1 == many.parts
    assert one.tiles * one.parts <= MODEL.multiprocessors
    assert one.cycles < many.cycles / 2


def test_with_few_images_the_csr_kernel_runs_what_nothing_else_does():
    layer = make((64, 3, 8, 8), size=(28, 28))
    assert MODEL.library_us(layer, 90, 4) is None
    for architecture in (75, 90):
        one, three = (MODEL.library_us(layer, architecture, batch) for batch in (1, 3))
        assert one[1] == three[1] == "the CSR kernel"
        assert one[0] < three[0]
    assert library_work(layer, 90, 1, 132).kcycles == csr_cycles(layer, 1, 132) / 1000
    with pytest.raises(ValueError, match="not known"):
        csr_cycles(dataclasses.replace(layer, in_size=None), 1, 132)
    with pytest.raises(ValueError, match="not known"):
        planned(dataclasses.replace(layer, in_size=None), 1, 1)
    # Also where warpgroups could run it.
    pixel = make((512, 512, 1, 1), size=(1, 1), dtype=np.float16)
    kernels = [MODEL.library_us(pixel, 90, batch)[1] for batch in (1, 3, 4)]
    assert kernels == ["the CSR kernel", "warpgroups", "warpgroups"]
    # Its entries look at no border, which takes less.
    window, point = make((64, 64, 3, 3), size=(28, 28)), make((64, 576, 1, 1), size=(28, 28))
    assert csr_cycles(window, 1, 132) > csr_cycles(point, 1, 132)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((256, 256, 3, 3), np.float16), ((256, 256, 3, 3), np.float32), ((256, 1024, 1, 1), np.float16)],
)
def test_few_images_run_by_clusters_and_many_do_not(shape, dtype):
    layer = make(shape, size=(14, 14), dtype=dtype)
    for batch, is_faster in ((1, True), (2, True), (256, False)):
        by_clusters = cluster_work(layer, 90, batch, 132)
        of_kernels = (work_of(layer, 90, batch, 132) for work_of in (library_work, flat_work, gemm_work))
        others = [work for work in of_kernels if work is not None]
        assert (by_clusters.kcycles < min(other.kcycles for other in others)) == is_faster
        least = min(work.kcycles for work in (by_clusters, *others))
        us, kernel = MODEL.library_us(layer, 90, batch)
        assert us == pytest.approx(float(MODEL.cycles_us(LibraryWork(least))))
        products = gemm_work(layer, 90, batch, 132)
        is_product = products is not None and products.kcycles == least
        assert kernel == (AS_PRODUCTS if is_product else ON_WARPGROUPS)


def test_behind_another_launch_kernels_on_warpgroups_begin_early():
    assert MODEL.early_us(ON_WARPGROUPS) == pytest.approx(1.0, abs=0.1)
    assert not any(map(MODEL.early_us, (AS_PRODUCTS, BY_CSR, ON_TENSOR_CORES, "")))


@pytest.mark.parametrize(
    ("shape", "changes", "architecture"),
    [
        ((64, 64, 3, 3), {}, 80),
        ((64, 64, 8, 8), {}, 90),
        ((64, 64, 3, 3), {"dilations": (2, 2)}, 90),
        ((64, 64, 3, 3), {"strides": (3, 3)}, 90),
        ((7, 64, 3, 3), {}, 90),
        ((64, 64, 1, 1), {"pads": (1, 1, 1, 1)}, 90),
        ((64, 4096, 3, 3), {}, 90),
    ],
    ids=["another GPU", "a larger window", "dilations", "strides", "few outputs", "1x1, padded", "too many channels"],
)
def test_nothing_is_foretold_of_clusters_that_was_not_measured(shape, changes, architecture):
    layer = dataclasses.replace(make(shape, size=(28, 28), dtype=np.float16), **changes)
    assert cluster_work(layer, architecture, 1, 132) is None


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        ({"shape": (256, 256, 3, 3)}, {}),
        ({"shape": (256, 7, 1, 1)}, {}),
        ({"shape": (7, 256, 1, 1)}, {}),
        ({"density": 0.01}, {}),
        ({"shape": (72, 40, 1, 1), "density": 0.03}, {"batch": 8}),  # mostly rows and channels that are not there
        ({}, {"architecture": 100}),
    ],
    ids=str,
)
def test_nothing_is_foretold_of_1x1_layers_unlike_those_measured(changes, call):
    layer = {"shape": (256, 256, 1, 1), "size": (14, 14), "dtype": np.float16}
    assert pointwise(make(**layer)) is not None
    assert pointwise(make(**layer | changes), **call) is None


def test_first_layers_are_foretold_without_their_strides():
    """From a copy of X; the CSR kernel would take five times as long."""
    layer = dataclasses.replace(
        make((64, 3, 7, 7), size=(224, 224), dtype=np.float32), pads=(3, 3, 3, 3), strides=(2, 2)
    )
    us, kernel = MODEL.library_us(layer, 90, 64)
    assert kernel == "warpgroups"
    assert us < float(MODEL.cycles_us(LibraryWork(csr_cycles(layer, 64, 132) / 1000))) / 3
    assert without_strides(dataclasses.replace(layer, strides=(1, 1))) is None
    assert without_strides(dataclasses.replace(make((64, 40, 3, 3), size=(28, 28)), strides=(2, 2))) is None


def test_more_work_takes_longer_and_zeros_only_help_the_sparse_kernel():
    assert dense_us(make(), 64) > dense_us(make(), 1)
    assert sparse_us(make(), 64) > sparse_us(make(), 1)
    denser, sparser = make(density=0.3), make(density=0.05)
    assert dense_us(denser, 64) == dense_us(sparser, 64)
    assert sparse_us(denser, 64) > sparse_us(sparser, 64)
    wide = (256, 256, 3, 3)
    assert dense_us(make(wide, dtype=np.float16), 64) < dense_us(make(wide), 64)


def test_nothing_to_do_still_takes_a_launch():
    assert MODEL.dense_us(DenseWork(0.0, 0.0, 1.0, 1e-6, 0.0, 0.0)) == pytest.approx(MODEL.dense_launch_us)
    assert MODEL.sparse_us(SparseWork(0.0)) == pytest.approx(MODEL.sparse_launch_us)


def test_many_layers_at_once_are_as_one_by_one():
    layers = [make(), make((64, 64, 1, 1)), make(dtype=np.float16)]
    works = [dense_work(layer, 8) for layer in layers]
    together = MODEL.dense_us(DenseWork(**as_arrays(works)))
    assert together == pytest.approx([dense_us(layer, 8) for layer in layers])
    sparse = [sparse_work(layer, choose_plan(layer, 90), 8, MODEL.clock_mhz) for layer in layers]
    assert MODEL.sparse_us(SparseWork(**as_arrays(sparse))) == pytest.approx([sparse_us(layer, 8) for layer in layers])


def test_the_constants_are_of_this_world():
    assert 100 < MODEL.float_tflops < 600  # TF32 of an H200: 495
    assert MODEL.float_tflops < MODEL.half_tflops < 1200  # float16: 990
    assert 1 < MIN_GAIN < 1.5
    assert 0.1 < MODEL.sparse_slowdown < 10


def test_dense_is_never_foretold_to_be_slower_than_it_was_seen():
    """A first layer has sums of 27 terms; none that short was measured."""
    work = DenseWork(mflop=1e4, mbytes=1.0, depth=MODEL.least_depth, moutputs=100.0, is_window=0.0, is_half=0.0)
    least = float(MODEL.dense_us(work))
    assert float(MODEL.dense_us(dataclasses.replace(work, depth=27.0))) == least
    assert float(MODEL.dense_us(dataclasses.replace(work, depth=2 * MODEL.least_depth))) < least
    few = dataclasses.replace(work, moutputs=MODEL.least_moutputs)
    assert float(MODEL.dense_us(dataclasses.replace(few, moutputs=MODEL.least_moutputs / 9))) == float(
        MODEL.dense_us(few)
    )


def depthwise_layer(channels=64, size=(28, 30), kernel=3, **changes):
    return make((channels, 1, kernel, kernel), size=size, density=1, group=channels, **changes)


def test_a_depthwise_layer_moves_bytes_and_multiplies_taps():
    def cycles(layer, batch=64):
        return 1000 * float(depthwise_work(layer, 90, batch, 132.0).kcycles)

    call = cycles(depthwise_layer(size=(1, 1), channels=1), 1)
    floats, halves = (cycles(depthwise_layer(dtype=dtype)) - call for dtype in (np.float32, np.float16))
    assert halves < floats < 2 * halves  # bytes, and as many taps
    assert cycles(depthwise_layer(kernel=5)) > cycles(depthwise_layer())
    assert cycles(depthwise_layer(), 128) - call == pytest.approx(2 * floats, rel=0.01)
    # On every GPU, with as many images as there are, whatever its zeros.
    for architecture, batch in ((75, 64), (90, 1)):
        found = MODEL.library_us(depthwise_layer(), architecture, batch)
        assert found is not None
        assert found[1] == "the depthwise kernel"


def test_one_tap_moves_bytes_alone():
    def cycles(**changes):
        layer = depthwise_layer(kernel=1, size=(900, 2000), **changes)
        return 1000 * float(depthwise_work(layer, 90, 1, 132.0).kcycles)

    call = cycles(channels=1) * 2 - cycles(channels=2)
    assert cycles(channels=8) - call == pytest.approx(2 * (cycles(channels=8, dtype=np.float16) - call))
    assert cycles(channels=64) - call == pytest.approx(8 * (cycles(channels=8) - call))
    # No row is too wide for it.
    wide = depthwise_layer(kernel=1, size=(9, 200_000))
    assert depthwise_work(wide, 90, 64, 132.0) is not None


def test_what_is_not_depthwise_or_too_wide_is_not_foretold_so():
    assert depthwise_work(make((64, 32, 3, 3)), 90, 64, 132.0) is None
    twice = make((128, 1, 3, 3), group=64, density=1)
    assert depthwise_work(twice, 90, 64, 132.0) is None
    assert depthwise_work(depthwise_layer(channels=1), 90, 64, 132.0) is not None
    assert depthwise_work(depthwise_layer(size=(9, 10_000)), 90, 64, 132.0) is not None
    assert depthwise_work(depthwise_layer(size=(9, 20_000)), 90, 64, 132.0) is None


def on_tensor_cores(layer, batch=64, architecture=86):
    return tensor_work(layer, architecture, batch, MODEL.multiprocessors)


@pytest.mark.parametrize("shape", [(128, 128, 3, 3), (256, 64, 1, 1), (64, 12, 7, 7), (100, 300, 1, 3)], ids=str)
def test_what_a_layer_has_to_do_on_sparse_tensor_cores(shape):
    half, whole = (on_tensor_cores(make(shape, dtype=dtype)) for dtype in (np.float16, np.float32))
    assert 0 < half.kcycles < whole.kcycles  # floats have more bytes
    assert on_tensor_cores(make(shape), 128).kcycles > 1.5 * whole.kcycles
    # It is the kernel that the library takes, but for 1x1, which has a faster one.
    taken = library_work(make(shape), 86, 64, MODEL.multiprocessors)
    assert taken == whole if shape[2:] != (1, 1) else taken.kcycles < 0.8 * whole.kcycles


def test_fewer_zeros_take_more_steps_on_sparse_tensor_cores():
    shape = (256, 256, 3, 3)
    cycles = [on_tensor_cores(make(shape, density=density)).kcycles for density in (0.05, 0.1, 0.3, 0.5, 1.0)]
    assert cycles == sorted(cycles)
    assert cycles[-1] > 1.3 * cycles[0]


@pytest.mark.parametrize("architecture", [75, 90])
def test_other_gpus_have_none_or_better(architecture):
    assert on_tensor_cores(make((128, 128, 3, 3)), architecture=architecture) is None


def test_next_to_no_weights_are_not_foretold_on_sparse_tensor_cores():
    assert on_tensor_cores(make((128, 128, 3, 3), density=0.01)) is None


def test_where_the_csr_kernel_is_faster_than_sparse_tensor_cores_it_runs():
    layer = make((16, 16, 3, 3), size=(7, 7))
    assert on_tensor_cores(layer, 1).kcycles == csr_cycles(layer, 1, MODEL.multiprocessors) / 1000


def test_rows_too_long_for_shared_memory_are_not_foretold_on_sparse_tensor_cores():
    layer = dataclasses.replace(make((64, 64, 3, 3), size=(3, 9000)), dilations=(1, 4000))
    assert plan_tensor(layer, 86, 8, MODEL.multiprocessors) is None
