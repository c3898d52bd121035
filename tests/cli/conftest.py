from __future__ import annotations

import pytest
from typer.testing import CliRunner

from onnx_sparseconv.cli.app import app
from tests.runtime import networks
from tests.support.cuda_on_cpu import cuda_on_cpu, sparse_kernels_say_cuda

__all__ = ["cuda_on_cpu", "sparse_kernels_say_cuda"]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sparseconv():
    """Run a command in this process: gives exit_code, stdout, stderr."""

    def run(*arguments):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def model(tmp_path):
    """A model whose two Conv are 95% zeros and large enough to qualify."""
    layer_weights = networks.weights(channels=32, sparsity=0.95)
    return networks.save(networks.dense(layer_weights), tmp_path / "model.onnx")


@pytest.fixture
def dense_model(tmp_path):
    """A model without zeros."""
    layer_weights = networks.weights(channels=32, sparsity=0.0)
    return networks.save(networks.dense(layer_weights), tmp_path / "dense.onnx")
