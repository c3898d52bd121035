"""The CUDA sources that the package carries."""

from __future__ import annotations

from importlib import resources

LIBRARY_KERNELS = "library_kernels.cu"
EARLY_KERNELS = "early_kernels.cu"
TENSOR_KERNELS = "tensor_kernels.cu"
TENSOR_FLOAT_KERNELS = "tensor_float_kernels.cu"
SEGMENT_KERNELS = "segment_kernels.cu"
SEGMENT_FLOAT_KERNELS = "segment_float_kernels.cu"
WGMMA_KERNELS = "wgmma_kernels.cu"
WGMMA_FLOAT_KERNELS = "wgmma_float_kernels.cu"
GEMM_KERNELS = "gemm_kernels.cu"
GEMM_FLOAT_KERNELS = "gemm_float_kernels.cu"
# What every source is compiled with, whatever the architecture.
LANGUAGE_OPTIONS = ("--std=c++17",)


def read_device_sources() -> dict[str, str]:
    """Text of every file in ``kernels/cuda``, by the name that ``#include`` gives it."""
    folder = resources.files("onnx_sparseconv.kernels") / "cuda"
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith((".h", ".cuh", ".cu"))
    }
