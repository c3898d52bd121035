from __future__ import annotations

import pytest

from tests.runtime import networks
from tests.support.cuda_on_cpu import cuda_on_cpu, sparse_kernels_say_cuda

__all__ = ["cuda_on_cpu", "sparse_kernels_say_cuda"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Files of a dense network of two layers and of its converted form."""
    directory = tmp_path_factory.mktemp("pair")
    layer_weights = networks.weights()
    return (
        networks.save(networks.dense(layer_weights), directory / "dense.onnx"),
        networks.save(networks.sparse(layer_weights), directory / "sparse.onnx"),
    )
