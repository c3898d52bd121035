"""The least time that a GPU's memory takes for a layer. Needs nothing but numpy: figures can be made anywhere."""

from __future__ import annotations

import math

import numpy as np
from suite_rows import Layer

# Peak bandwidth of the memory, bytes a second, by the name of the GPU, from NVIDIA's data sheets.
BANDWIDTHS = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA L4": 0.3e12,
    "Tesla T4": 0.32e12,
}


def memory_bandwidth(given: float | None, gpu_name: str) -> tuple[float, str]:
    """Bytes a second, and where the figure comes from; 0 where it is not known.

    Args:
        given: GB a second that someone says it is; None where nobody does.
        gpu_name: as the driver calls it.
    """
    if given is not None:
        return given * 1e9, "given by --bandwidth"
    known = BANDWIDTHS.get(gpu_name, 0.0)
    return known, f"data sheet of {gpu_name}" if known else ""


def tensor_bytes(layer: Layer, batch: int, dtype: str) -> int:
    """Bytes of a layer's input and output together."""
    inputs = layer.in_channels * math.prod(layer.spatial)
    outputs = layer.out_channels * math.prod(layer.out_sizes)
    return batch * (inputs + outputs) * np.dtype(dtype).itemsize
