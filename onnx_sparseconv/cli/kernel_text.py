"""Which kernels ran, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx_sparseconv.cli.console import count

if TYPE_CHECKING:
    from onnx_sparseconv.runtime.kernels import KernelUse


def kernel_lines(kernels: Sequence[KernelUse]) -> list[str]:
    """One line a kernel, with the number of nodes that it ran."""
    counted = Counter(use.kernel for use in kernels)
    return [f"{kernel}: {count(number, 'SparseConv node')}" for kernel, number in counted.most_common()]
