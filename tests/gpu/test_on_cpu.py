"""What the GPU tests are made of works on the CPU provider, and the tests themselves are found: no GPU needed."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import subprocess
import sys

import numpy as np
import onnx
import pytest

from onnx_sparseconv.custom_ops.schema import Activation
from onnx_sparseconv.kernels.plan import HALF_TERMS
from tests.gpu import sanitized_sample
from tests.gpu.layers import DEPTHWISE, GENERATED, POOLS, TYPES, case_of
from tests.gpu.test_accuracy import LAYERS, dense_model
from tests.support.gpu_checks import (
    Place,
    assert_right_with_half_sums,
    check,
    check_graph,
    check_threads,
    image_bytes,
    static_model,
)
from tests.support.native_build import ROOT, find_tool
from tests.support.sparse_models import make_model, oracle, random_inputs

CPU = Place("cpu")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", GENERATED)
def test_every_layer_can_be_checked(name, dtype):
    case, x_shape = case_of(name, dtype)
    assert check(CPU, case, x_shape, model=static_model(case, x_shape)).startswith("cpu.")


def test_replays_and_threads_can_be_checked():
    case, x_shape = case_of("3x3, odd width", np.float16)
    check_graph(CPU, case, x_shape, cuda_graph=False)
    session = CPU.session(make_model(case))
    check_threads(session, case, [x_shape, (1, *x_shape[1:]), (3, x_shape[1], 6, 8)], threads=3)


def test_the_sanitized_sample_runs(capsys):
    sanitized_sample.run_warpgroups(CPU)
    sanitized_sample.run_tensor(CPU)
    sanitized_sample.run_others(CPU, "")
    count = 3 * sum(len(types) for types in sanitized_sample.SAMPLE.values())
    samples = sanitized_sample.WARPGROUP_SAMPLE, sanitized_sample.DENSE_SAMPLE, sanitized_sample.CONCATENATED_SAMPLE
    warpgroups = sum(map(len, samples))
    count += (warpgroups + len(DEPTHWISE) + 2 + 1 + 2 * len(POOLS)) * len(TYPES)
    assert len(capsys.readouterr().out.splitlines()) == count


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.RELU])
@pytest.mark.parametrize("name", ["3x3, 14 wide", "1x1", "1-D", "5x5"])
def test_sums_in_float16_pass_and_a_lost_weight_does_not(name, activation):
    """The bound for generated float16 code, on sums as such code makes them, and on a wrong result."""
    case, x_shape = case_of(name, np.float16, activation=activation, has_residual=False)
    inputs = random_inputs(case, x_shape)
    assert_right_with_half_sums(_half_sums(case, inputs), case, inputs)
    damaged = case.weight.copy()
    row, *rest = np.argwhere(damaged)[len(np.argwhere(damaged)) // 2]
    damaged[(row, *rest)] = 0
    wrong, _ = oracle(dataclasses.replace(case, weight=damaged), inputs)
    with pytest.raises(AssertionError):
        assert_right_with_half_sums(wrong.astype(np.float16), case, inputs)


def _half_sums(case, inputs):
    """Stride 1, equal padding: products are added up in float16, a few at a time, and these sums in float16 too."""
    weight, pads = case.weight, case.geometry.pads
    rank = weight.ndim - 2
    x = np.pad(inputs["X"], [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    sizes = [size - k + 1 for size, k in zip(x.shape[2:], weight.shape[2:], strict=True)]
    y = np.zeros((x.shape[0], weight.shape[0], *sizes), np.float16)
    y += inputs["B"].reshape(1, -1, *(1,) * rank)
    for k in range(weight.shape[0]):
        taps = np.argwhere(weight[k])
        for begin in range(0, len(taps), HALF_TERMS):
            partial = np.zeros((x.shape[0], *sizes), np.float16)
            for c, *tap in taps[begin : begin + HALF_TERMS]:
                window = tuple(slice(t, t + size) for t, size in zip(tap, sizes, strict=True))
                product = x[(slice(None), c, *window)].astype(np.float32) * np.float32(weight[(k, c, *tap)])
                partial = (partial.astype(np.float32) + product).astype(np.float16)
            y[:, k] += partial
    return np.maximum(y, 0) if case.activation == Activation.RELU else y


def test_models_of_dense_layers_are_valid():
    for weight_shape, geometry, _ in LAYERS.values():
        onnx.checker.check_model(dense_model(np.zeros(weight_shape, np.float16), geometry))


def test_images_are_counted():
    case, x_shape = case_of("1x1", np.float32)
    assert image_bytes(static_model(case, x_shape)) == 0


def _pytest(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_gpu_tests_are_found_and_marked():
    done = _pytest("--collect-only", "tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("tests/gpu/")]
    assert len(found) > 150
    assert not any("test_on_cpu" in line for line in found)
    for file in ("test_kernels", "test_running", "test_accuracy", "test_models", "test_sanitizer"):
        assert any(file in line for line in found)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="GPUs are emulated on Linux on x86-64"
)
def test_a_sample_of_them_passes_on_an_emulated_gpu():
    find_tool("cmake")
    find_tool("g++")
    chosen = "(captured and 3x3-) or (every_plan and 1x1) or (stage and 1-D) or (concurrent and float16 and not gemm)"
    done = _pytest(
        "-p", "tests.support.emulated_gpu", "-k", chosen, "tests/gpu/test_kernels.py", "tests/gpu/test_running.py"
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20, done.stdout
    assert "skipped" not in done.stdout
