"""The warpgroup kernel for windows of many channels, or of rows that are no multiples of 8, through ONNX Runtime, in
every form of convolution it runs, against the float64 oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from onnx import numpy_helper

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels.warpgroup_plan import plan_warpgroups
from tests.support.random_cases import ACTIVATION_PARAMETERS
from tests.support.sparse_layers import layer_of
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)
from tests.support.warpgroup_layers import WINDOWS

HALF = np.dtype(np.float16)
CASE = SparseConvCase(random_weight((70, 40, 3, 3), 0.1, dtype=HALF), geometry_2d(pad=1), Activation.RELU, dtype=HALF)


def run_and_check(session, driver, case, x_shape):
    """Run a case and compare; returns what was launched, and its grids."""
    inputs = random_inputs(case, x_shape)
    driver.take_launches()
    (y,) = session.run(None, inputs)
    launches = [(name, grid) for name, grid, _, _ in driver.take_launches()]
    has_sums = any(name.startswith("sparseconv_reduce") for name, _ in launches)
    assert_within(y, *oracle(case, inputs, stored_sums=int(has_sums)))
    return launches


@pytest.mark.parametrize("layer", WINDOWS, ids=str)
@pytest.mark.parametrize("density", [0.05, 0.4, 1.0])
def test_layers(make_session, driver, layer, density):
    """Of all densities: two non-zeros in four are not enough for the dense one."""
    weight_shape, size, geometry = layer
    case = SparseConvCase(random_weight(weight_shape, density, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    launches = run_and_check(session, driver, case, (9, weight_shape[1] * geometry.group, *size))
    assert launches[0][0] == "sparseconv_interleave"
    assert launches[1][0].startswith("sparseconv_wgmma_p")
    assert [name for name, _ in launches[2:]] in ([], ["sparseconv_reduce_vectors"])
    (record,) = library.describe_kernels()
    assert record.kernel == "cuda.wgmma"


@pytest.mark.parametrize(
    ("layer", "multiprocessors"),
    [
        (((58, 38, 1, 4), (10, 95), ConvGeometry((1, 4), (1, 1), (0, 4, 0, 10), (1, 1))), 132),
        (((70, 68, 5, 2), (5, 39), ConvGeometry((5, 2), (1, 1), (3, 6, 2, 4), (1, 3))), 5),
    ],
    ids=str,
)
def test_a_run_of_outputs_beyond_a_rows_end(make_session, driver, layer, multiprocessors):
    """A tile's second run may lie there as a whole: it stores nothing, else it would overwrite the next row."""
    weight_shape, size, geometry = layer
    driver.set_device(num_multiprocessors=multiprocessors)
    case = SparseConvCase(random_weight(weight_shape, 0.1, dtype=HALF), geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    launches = run_and_check(session, driver, case, (1, weight_shape[1], *size))
    assert [name for name, _ in launches] == ["sparseconv_interleave", "sparseconv_wgmma_p16"]


@pytest.mark.parametrize("size", [(2, 1), (5, 2)], ids=str)
def test_padding_beyond_the_reach_of_windows(make_session, driver, size):
    """Columns of outputs that read nothing but zeros have positions of their own."""
    driver.set_device(num_multiprocessors=16)
    geometry = ConvGeometry((3, 2), (1, 1), (2, 4, 5, 5), (3, 2))
    case = SparseConvCase(random_weight((64, 8, 3, 2), 0.2, dtype=HALF), geometry, Activation.SILU, dtype=HALF)
    run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (8, 8, *size))


@pytest.mark.parametrize("size", [(5, 6), (5, 7), (2, 28), (2, 32)], ids=str)
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_and_a_residual(make_session, driver, activation, size):
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = dataclasses.replace(CASE, activation=activation, alpha=alpha, beta=beta, has_residual=True)
    run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (4, 40, *size))


@pytest.mark.parametrize("batch", [1, 4, 5, 8, 17])
def test_every_batch(make_session, driver, batch):
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    run_and_check(session, driver, CASE, (batch, 40, 6, 9))


@pytest.mark.parametrize(
    ("layer", "call", "launched"),
    [
        (((70, 40, 3, 3), (16, 15), geometry_2d(pad=1)), (1, 132), (1, 1)),
        (((64, 160, 3, 3), (14, 14), geometry_2d(pad=1)), (1, 132), (1, 6)),
        (((130, 96, 3, 3), (7, 9), geometry_2d(pad=1)), (3, 132), (1, 1)),
        (((64, 96, 3, 3), (13, 9), geometry_2d(pad=1)), (2, 132), (2, 4)),
        (((64, 96, 3, 3), (20, 10), ConvGeometry((3, 3), (1, 1), (0, 1, 0, 1), (1, 1))), (1, 132), (1, 4)),
        (((64, 96, 3, 3), (36, 31), geometry_2d(pad=1)), (3, 132), (3, 4)),
        (((64, 96, 3, 3), (1, 27), ConvGeometry((3, 3), (1, 1), (1, 1, 1, 2), (1, 1))), (1, 132), (1, 4)),
        (((64, 96, 3, 3), (35, 29), geometry_2d(3, 2, 1)), (1, 132), (1, 4)),
        (((64, 96, 3, 3), (21, 17), geometry_2d(3, 1, 2, 2)), (1, 132), (1, 4)),
        (((128, 40, 3, 3), (26, 50), geometry_2d(group=2)), (3, 66), (3, 1)),
        (((64, 32, 3, 3), (56, 29), geometry_2d(pad=1)), (9, 66), (9, 1)),
    ],
    ids=str,
)
def test_few_images(make_session, driver, layer, call, launched):
    """Each is cut into strips where that saves time, and what has to be summed is shared among blocks."""
    batch, multiprocessors = call
    driver.set_device(num_multiprocessors=multiprocessors)
    weight_shape, size, geometry = layer
    weight = random_weight(weight_shape, 0.1, dtype=HALF)
    for has_residual in (False, True):
        case = SparseConvCase(weight, geometry, Activation.SILU, has_residual=has_residual, dtype=HALF)
        session = make_session(make_model(case), cuda_kernel="wgmma")
        (_, interleave), (_, product), *reduce = run_and_check(
            session, driver, case, (batch, weight_shape[1] * geometry.group, *size)
        )
        eights, parts = launched
        assert (interleave[2], product[1], len(reduce)) == (eights, parts, 1 if parts > 1 else 0)


@pytest.mark.parametrize(("size", "positions"), [((7, 7), 32), ((10, 5), 30)], ids=str)
def test_zeros_behind_a_row_are_those_before_the_next(make_session, driver, size, positions):
    """So four rows of seven outputs fit into 32 positions, and five of five, not just three and four."""
    driver.set_device(num_multiprocessors=1)
    case = dataclasses.replace(CASE, has_residual=True)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    _, (product, _) = run_and_check(session, driver, case, (9, 40, *size))
    assert product == f"sparseconv_wgmma_p{positions}"


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (((64, 64, 3, 3), (56, 55), geometry_2d(pad=1)), 1),
        (((128, 160, 3, 3), (14, 14), geometry_2d(pad=1)), 1),
        (((128, 96, 3, 3), (7, 9), geometry_2d(pad=1)), 3),
        (((64, 256, 3, 3), (7, 7), geometry_2d(pad=1)), 16),
        (((64, 96, 3, 3), (13, 9), geometry_2d(pad=0)), 2),
        (((64, 96, 3, 3), (35, 29), geometry_2d(3, 2, 1)), 1),
        (((64, 96, 3, 3), (28, 28), geometry_2d(3, 2, 1)), 16),
        (((128, 512, 3, 3), (7, 7), geometry_2d(pad=1)), 64),
        (((64, 96, 3, 3), (21, 17), geometry_2d(3, 1, 2, 2)), 5),
        (((128, 64, 3, 3), (28, 28), geometry_2d(group=2)), 4),
        (((64, 32, 3, 3), (112, 111), geometry_2d(pad=1)), 9),
    ],
    ids=str,
)
def test_what_foretells_times_makes_the_same_plan(make_session, driver, layer, batch):
    driver.set_device(num_multiprocessors=132)
    weight_shape, size, geometry = layer
    weight = random_weight(weight_shape, 0.004, dtype=HALF)  # no channel comes twice
    case = SparseConvCase(weight, geometry, Activation.NONE, dtype=HALF)
    session = make_session(make_model(case), cuda_kernel="wgmma")
    session.run(None, random_inputs(case, (batch, weight_shape[1] * geometry.group, *size)))
    _, (_, product, _, _), *_ = driver.take_launches()
    sized = layer_of(case, size)
    foretold = plan_warpgroups(sized, batch, -(-weight_shape[1] // 32), 132)
    assert (min(foretold.tiles, 132), foretold.parts) == product[:2]


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 64), slice(64, 128)], ids=["all", "the first", "others"])
def test_rows_without_entries(make_session, driver, rows):
    weight = np.zeros((130, 40, 3, 3), HALF)
    weight[rows] = random_weight(weight.shape, 0.1, dtype=HALF)[rows]
    case = dataclasses.replace(CASE, weight=weight)
    run_and_check(make_session(make_model(case), cuda_kernel="wgmma"), driver, case, (17, 40, 4, 14))


def test_nothing_but_padding_gives_the_bias(make_session, driver):
    case = dataclasses.replace(CASE, geometry=geometry_2d(pad=2))
    run_and_check(make_session(make_model(case)), driver, case, (8, 40, 0, 9))


def test_a_run_only_launches(assert_only_launches, make_session):
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    assert_only_launches(session, random_inputs(CASE, (8, 40, 5, 7)), 2)


@pytest.mark.parametrize(
    ("changes", "call", "kernel"),
    [
        ({"weight": random_weight((128, 60, 3, 3), 0.2, dtype=HALF)}, (4, 8, 28, 26), "wgmma"),
        ({"weight": random_weight((128, 96, 3, 3), 0.1, dtype=HALF)}, (4, 8, 28, 26), "flat_n"),
        ({"weight": random_weight((128, 96, 3, 3), 0.2, dtype=HALF)}, (4, 8, 28, 26), "flat_dense_n"),
        ({"weight": random_weight((128, 60, 3, 3), 0.15, dtype=HALF)}, (24, 8, 28, 26), "wgmma"),
        ({}, (4, 3, 28, 26), "wgmma"),
        ({"weight": random_weight((128, 128, 3, 3), 0.2, dtype=HALF)}, (132, 1, 28, 26), "tensor"),
        ({"weight": random_weight((70, 40, 3, 3), 0.02, dtype=HALF)}, (132, 1, 28, 26), "csr"),
        ({"weight": random_weight((70, 40, 3, 3), 0.002, dtype=HALF)}, (4, 8, 28, 26), "csr"),
        ({"weight": random_weight((70, 7, 3, 3), 0.1, dtype=HALF)}, (4, 8, 28, 26), "tensor"),
        ({"geometry": geometry_2d(pad=0)}, (2, 8, 3, 26), "tensor"),
    ],
    ids=[
        "it pays",
        "many zeros",
        "few zeros",
        "fewer blocks than multiprocessors",
        "few images",
        "a single one",
        "a single one, and too few weights",
        "next to no weights",
        "too few channels",
        "positions without outputs",
    ],
)
def test_it_runs_by_itself_where_it_pays(driver, make_session, changes, call, kernel):
    """Against all but clusters, of which this GPU runs none."""
    num_multiprocessors, batch, height, width = call
    driver.set_device(num_multiprocessors=num_multiprocessors, blocks_a_multiprocessor=0)
    case = dataclasses.replace(CASE, **changes)
    session = make_session(make_model(case))
    names = [name for name, _ in run_and_check(session, driver, case, (batch, case.weight.shape[1], height, width))]
    assert any(name.startswith(f"sparseconv_{kernel}") for name in names), names


@pytest.mark.parametrize("architecture", [89, 100])
def test_other_gpus_do_not_run_it(driver, make_session, architecture):
    driver.set_device(architecture=architecture)
    ((kernel, _),) = run_and_check(make_session(make_model(CASE)), driver, CASE, (8, 40, 6, 9))
    assert kernel.startswith("sparseconv_tensor_r")
    with pytest.raises(Exception, match=r"node 'conv1': .*asks for the warpgroup kernel, which runs 1-D and 2-D"):
        make_session(make_model(CASE), cuda_kernel="wgmma")


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": CASE.weight.astype(np.float32) * np.float32(1.0001)},
        {"weight": random_weight((7, 40, 3, 3), 0.1, dtype=HALF)},
        {"weight": random_weight((40, 24, 8, 8), 0.1, dtype=HALF), "geometry": geometry_2d(8)},
    ],
    ids=["weights that are no halves", "few outputs", "large kernels"],
)
def test_it_cannot_be_forced_on_what_it_does_not_run(make_session, changes):
    with pytest.raises(Exception, match=r"node 'conv1': .*asks for the warpgroup kernel, which runs 1-D and 2-D"):
        make_session(make_model(dataclasses.replace(CASE, **changes)), cuda_kernel="wgmma")


def test_a_tile_that_does_not_fit_is_said(driver, make_session):
    driver.set_device(max_shared_bytes=56 << 10)
    session = make_session(make_model(CASE), cuda_kernel="wgmma")
    with pytest.raises(Exception, match="the warpgroup kernel cannot run this call: no tile of it fits"):
        session.run(None, random_inputs(CASE, (8, 40, 28, 28)))


def test_more_columns_than_any_layer_has_are_not_packed(make_session):
    """A small node may say that its weight has millions; with their zeros, packing took gigabytes."""
    case = SparseConvCase(
        random_weight((8, 64, 1, 1), 0.5, dtype=HALF), geometry_2d(1, pad=0), has_bias=False, dtype=HALF
    )
    channels = 2**21
    model = make_model(case)
    (shape,) = (a for a in model.graph.node[0].attribute if a.name == "weight_shape")
    shape.t.CopyFrom(numpy_helper.from_array(np.array([8, channels, 1, 1], np.int64), "weight_shape"))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = channels
    x = np.zeros((1, channels, 1, 1), HALF)
    x[:, :64] = random_inputs(case, (1, 64, 1, 1))["X"]
    session = make_session(model)
    (y,) = session.run(None, {"X": x})
    assert "wgmma" not in library.describe_kernels()[0].kernel
    assert_within(y, *oracle(case, {"X": x[:, :64]}))
    with pytest.raises(Exception, match="asks for the warpgroup kernel"):
        make_session(model, cuda_kernel="wgmma")
