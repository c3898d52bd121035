"""``bench`` and ``verify`` with ``provider="cuda"`` down to the CUDA kernels, on the emulated GPU."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_sparseconv.runtime.bench import CudaBench, bench
from onnx_sparseconv.runtime.timing import TimingPlan
from onnx_sparseconv.runtime.verify import verify
from tests.runtime import networks
from tests.support.cuda_on_cpu import cuda_on_cpu

__all__ = ["cuda_on_cpu"]
QUICK = TimingPlan(warmup=0, min_rounds=1, max_rounds=1, runs_per_round=1, seconds=0)


@pytest.fixture
def pair(tmp_path):
    layer_weights = networks.weights(np.float16, channels=4)
    return (
        networks.save(networks.dense(layer_weights, size=6), tmp_path / "dense.onnx"),
        networks.save(networks.sparse(layer_weights, size=6), tmp_path / "sparse.onnx"),
    )


@pytest.mark.usefixtures("cuda_on_cpu")
def test_models_are_verified_and_timed_on_the_cuda_kernels(pair):
    report = verify(*pair, provider="cuda", config={"sparseconv.cuda_kernel": "csr"})
    assert report.passed
    assert {(use.kernel, use.provider) for use in report.kernels} == {("cuda.csr", "cuda")}
    timed = bench(*pair, provider="cuda", cuda=CudaBench("default", cuda_graph=True, copies=2), plan=QUICK)
    assert [candidate.problem for candidate in timed.candidates] == ["", ""]
    assert {use.kernel for use in timed.kernels} == {"cuda.csr"}


@pytest.mark.usefixtures("cuda_on_cpu")
def test_floats_on_warpgroups_are_verified_with_tf32(tmp_path):
    """Their inputs are rounded to halves. Nothing but ``kernel`` asks for them here, where no option allows TF32."""
    layer_weights = networks.weights(channels=40)
    dense = networks.save(networks.dense(layer_weights, size=7), tmp_path / "dense.onnx")
    sparse = networks.save(networks.sparse(layer_weights, size=7), tmp_path / "sparse.onnx")
    config = {"sparseconv.cuda_kernel": "wgmma"}
    as_float, as_tf32 = (
        verify(dense, sparse, provider="cuda", config=config, batch=8, tf32=tf32) for tf32 in (False, True)
    )
    assert {use.kernel for use in as_tf32.kernels} == {"cuda.wgmma"}
    assert as_tf32.passed
    assert not as_float.passed
    layer_weights[1][tuple(np.argwhere(layer_weights[1])[0])] *= 2
    wrong = networks.save(networks.sparse(layer_weights, size=7), tmp_path / "wrong.onnx")
    assert not verify(dense, wrong, provider="cuda", config=config, batch=8, tf32=True).passed
