"""Times inside networks: what a dense layer is made up of, and what generated code is charged with."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.kernels.gpu_network_times import code_work
from onnx_sparseconv.kernels.gpu_time_constants import MODEL, NETWORK
from onnx_sparseconv.kernels.gpu_times import dense_work
from onnx_sparseconv.kernels.plan import choose_plan
from tests.support.sparse_layers import sparse_layer


def layer_of(channels=64, size=28):
    return sparse_layer((channels, channels, 3, 3), size=(size, size), density=0.1)


def test_a_dense_layer_is_a_product_and_passes_over_its_output():
    layer = layer_of()
    bare, biased, both = (
        NETWORK.dense_layer_us(layer, 64, has_bias=bias, has_activation=activation)
        for bias, activation in ((False, False), (True, False), (True, True))
    )
    moutputs = 64 * 64 * 28 * 28 / 1e6
    assert bare == float(NETWORK.product_us(dense_work(layer, 64)))
    assert biased - bare == pytest.approx(NETWORK.pass_launch_us + NETWORK.bias_us * moutputs)
    assert both - biased == pytest.approx(NETWORK.pass_launch_us + NETWORK.activation_us * moutputs)
    clipped = NETWORK.dense_layer_us(layer, 64, has_bias=True, has_activation=True, is_slow=True)
    assert clipped - biased == pytest.approx(NETWORK.pass_launch_us + NETWORK.slow_activation_us * moutputs)


def test_a_window_takes_longer_than_a_product_of_its_size():
    work = dense_work(layer_of(), 64)
    as_points = NETWORK.product_us(dataclasses.replace(work, is_window=0.0))
    assert NETWORK.product_us(work) - as_points == pytest.approx(NETWORK.window_us)


def test_a_depthwise_layer_moves_bytes():
    layer = sparse_layer((64, 1, 3, 3), size=(56, 56), density=1, group=64)
    found = NETWORK.dense_layer_us(layer, 64, has_bias=False, has_activation=False)
    mbytes = (2 * 64 * 64 * 56 * 56 + 64 * 9) * 4 / 1e6
    assert found == pytest.approx(NETWORK.product_launch_us + mbytes / NETWORK.depthwise_tb)


def test_code_is_charged_with_what_no_cache_has_kept():
    layer = layer_of()
    plan = choose_plan(layer, 90)
    work = code_work(layer, plan, 64, MODEL.clock_mhz)
    assert work.in_mb == work.out_mb == pytest.approx(64 * 64 * 28 * 28 * 4 / 1e6)
    assert work.code_mb == plan.num_tiles * plan.code_bytes / 1e6
    found = NETWORK.code_layer_us(layer, plan, 64, MODEL.clock_mhz)
    larger = NETWORK.code_us(dataclasses.replace(work, code_mb=4 * work.code_mb))
    assert larger - found == pytest.approx(NETWORK.code_size_us * np.sqrt(work.code_mb))
    assert float(MODEL.sparse_us(work)) != found


def test_code_takes_some_time_whatever_is_subtracted():
    """What it writes counts less than the plan's cycles say, which must not make up for more than there is."""
    work = code_work(layer_of(), choose_plan(layer_of(), 90), 64, MODEL.clock_mhz)
    model = dataclasses.replace(NETWORK, code_out_us=-100.0)
    assert model.code_us(work) == NETWORK.code_launch_us + 1.0
