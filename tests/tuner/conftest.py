from __future__ import annotations

from tests.support.cuda_on_cpu import cuda_on_cpu, sparse_kernels_say_cuda

__all__ = ["cuda_on_cpu", "sparse_kernels_say_cuda"]
